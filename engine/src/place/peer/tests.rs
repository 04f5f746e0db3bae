//! Tests of processes that are looked up, including hostile ones.

use super::*;
use std::path::Path;

#[test]
fn the_first_variable_that_names_a_job_wins() {
    let peer = parse(b"SLURM_JOB_ID=77\0RANK=3\0LOCAL_RANK=1\0CUDA_VISIBLE_DEVICES=0,1\0\xff=x\0");
    assert_eq!(peer.job.as_deref(), Some("slurm-77"));
    assert_eq!((peer.rank, peer.place.local_rank), (Some(3), Some(1)));
    assert_eq!(parse(b"SLURM_JOB_ID=77\0HIGHWATER_JOB=llama").job.as_deref(), Some("llama"));
    assert_eq!(parse(b"TORCHELASTIC_RUN_ID=a").job.as_deref(), Some("torchrun-a"));
    assert_eq!(parse(b"TORCHELASTIC_RUN_ID=none").job, None, "no id was given");
    assert_eq!(parse(b"HIGHWATER_JOB=none").job.as_deref(), Some("none"));
    assert_eq!(parse(b"HIGHWATER_JOB=\0RANK=x"), Peer { is_read: true, ..Peer::default() });
    let hidden = parse(b"CUDA_VISIBLE_DEVICES=\0").place.visible_devices;
    assert_eq!(hidden.as_deref(), Some(""), "all devices are hidden");
    let endless = [b"CUDA_VISIBLE_DEVICES=".as_slice(), &[b'0'; MOST_BYTES + 1]].concat();
    assert_eq!(parse(&endless), Peer { is_read: true, ..Peer::default() });
}

/// A process whose environment never arrives: nothing writes to the other end of the pipe.
fn stuck_process(folder: &Path, pid: u32) {
    let process = folder.join(pid.to_string());
    std::fs::create_dir_all(&process).expect("a folder");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, process.join("environ"), rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
    std::fs::write(process.join("status"), "Uid:\t1\t2\t3\t4\n").expect("written");
}

fn process(folder: &Path, pid: u32, environ: &[u8]) {
    std::fs::create_dir_all(folder.join(pid.to_string())).expect("a folder");
    std::fs::write(folder.join(format!("{pid}/environ")), environ).expect("written");
    std::fs::write(folder.join(format!("{pid}/status")), "Uid:\t1\t2\t3\t4\n").expect("written");
}

/// Unblocks the pipe's reader.
fn release(folder: &Path, pid: u32) {
    std::fs::write(folder.join(format!("{pid}/environ")), b"HIGHWATER_JOB=late").expect("written");
}

/// A process that was read, and the events that waited for it.
type Read = (u32, Vec<u32>);

/// Peers with one reader thread, which reports each process that it read and the events that waited for it.
fn threaded(folder: &Path) -> (Arc<Peers<u32>>, std::sync::mpsc::Receiver<Read>) {
    let peers = Arc::new(Peers::<u32>::default().at(folder.to_owned()));
    peers.set_threaded();
    let (sender, read) = std::sync::mpsc::channel();
    start_reader(&peers, sender);
    (peers, read)
}

fn start_reader(peers: &Arc<Peers<u32>>, sender: std::sync::mpsc::Sender<Read>) {
    let of_thread = Arc::clone(peers);
    std::thread::spawn(move || {
        of_thread.read_until_ended(
            || 0,
            |pid| {
                let mut waited = Vec::new();
                of_thread.drain(pid, |_, events| waited.extend(events));
                // The test may have ended.
                let _ = sender.send((pid, waited));
            },
        );
    });
}

#[test]
fn events_wait_for_their_own_process_and_for_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    stuck_process(folder.path(), 1);
    process(folder.path(), 2, b"HIGHWATER_JOB=honest");
    let (peers, read) = threaded(folder.path());
    let (hostile, honest) = (Account::alone(), Account::alone());
    let ask = |pid, account, event: u32, now_ns| peers.ask(pid, account, now_ns, &mut Some(event));
    assert!(matches!(ask(1, &hostile, 10, 0), LookupOutcome::Later));
    assert!(matches!(ask(1, &hostile, 11, 0), LookupOutcome::Later));
    // The only thread hangs in process 1: the next lookup waits until that read is given up.
    while !matches!(peers.state().lookups[&1].stage, Stage::Reading(_)) {
        std::thread::yield_now();
    }
    assert!(matches!(ask(2, &honest, 20, DEADLINE_NS / 2), LookupOutcome::Later));
    let overdue = peers.advance(DEADLINE_NS);
    assert_eq!((overdue.pids.as_slice(), overdue.needs_reader), (&[1][..], true));
    let mut waited = Vec::new();
    peers.drain(1, |_, events| waited.extend(events));
    assert_eq!(waited, [10, 11], "no event is lost");
    let (sender, read_by_second) = std::sync::mpsc::channel();
    start_reader(&peers, sender);
    assert_eq!(read_by_second.recv().expect("it is read"), (2, vec![20]));
    assert!(
        matches!(ask(2, &honest, 21, DEADLINE_NS), LookupOutcome::Known(peer) if peer.job.as_deref() == Some("honest"))
    );
    assert!(
        matches!(ask(1, &hostile, 12, DEADLINE_NS), LookupOutcome::Known(peer) if peer.job.is_none()),
        "given up for now"
    );
    release(folder.path(), 1);
    assert_eq!(read.recv().expect("it comes back"), (1, vec![]));
    assert!(peers.state().stuck.is_empty());
    // Its thread ends, because another has taken its place, and that one goes on.
    while peers.state().readers != 1 {
        std::thread::yield_now();
    }
    process(folder.path(), 3, b"");
    assert!(matches!(ask(3, &honest, 30, DEADLINE_NS), LookupOutcome::Later));
    assert_eq!(read_by_second.recv().expect("it is read"), (3, vec![30]));
    assert_eq!(peers.state().readers, 1);
    peers.end();
    while peers.state().readers != 0 {
        std::thread::yield_now();
    }
}

#[test]
fn another_reader_is_needed_after_a_tenth_of_a_second_up_to_a_limit() {
    let folder = tempfile::tempdir().expect("a folder");
    let peers = Peers::<u32>::default().at(folder.path().to_owned());
    peers.set_threaded();
    // A thread that reads something else.
    peers.state().readers = 1;
    assert!(matches!(peers.ask(2, &Account::alone(), 0, &mut Some(1)), LookupOutcome::Later));
    assert!(!peers.advance(99 * MILLISECOND_NS).needs_reader);
    assert!(peers.advance(100 * MILLISECOND_NS).needs_reader);
    for (readers, needs_reader) in [(MOST_READERS - 1, true), (MOST_READERS, false)] {
        peers.state().readers = readers;
        assert_eq!(peers.advance(100 * MILLISECOND_NS).needs_reader, needs_reader, "{readers}");
    }
}

#[test]
fn an_owner_whose_processes_hang_has_no_more_of_them_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let count = u32::try_from(MOST_READERS).expect("a few");
    (0..count).for_each(|pid| stuck_process(folder.path(), pid));
    process(folder.path(), 99, b"HIGHWATER_JOB=honest");
    let (peers, _read) = threaded(folder.path());
    let (hostile, honest) = (Account::alone(), Account::alone());
    let mut threads = 1;
    for pid in 0..count {
        let now_ns = i64::from(pid) * 2 * DEADLINE_NS;
        let read = peers.ask(pid, &hostile, now_ns, &mut Some(pid));
        if !matches!(read, LookupOutcome::Later) {
            break;
        }
        while !matches!(peers.state().lookups[&pid].stage, Stage::Reading(_)) {
            std::thread::yield_now();
        }
        let overdue = peers.advance(now_ns + DEADLINE_NS);
        peers.drain(pid, |_, events| drop(events));
        if overdue.needs_reader {
            start_reader(&peers, std::sync::mpsc::channel().0);
            threads += 1;
        }
    }
    assert_eq!((peers.state().stuck.len(), threads), (MOST_STUCK, MOST_STUCK + 1));
    let (sender, read) = std::sync::mpsc::channel();
    start_reader(&peers, sender.clone());
    start_reader(&peers, sender);
    let now_ns = i64::from(count) * 2 * DEADLINE_NS;
    assert!(matches!(peers.ask(99, &honest, now_ns, &mut Some(1)), LookupOutcome::Later));
    while !peers.state().known.contains_key(&99) {
        std::thread::yield_now();
    }
    drop(read);
    (0..u32::try_from(MOST_STUCK).expect("a few")).for_each(|pid| release(folder.path(), pid));
    peers.end();
}

/// Events that come while others are taken wait behind them.
#[test]
fn nothing_overtakes_what_waits() {
    let folder = tempfile::tempdir().expect("a folder");
    process(folder.path(), 1, b"HIGHWATER_JOB=j");
    let peers = Peers::<u32>::default().at(folder.path().to_owned());
    peers.set_threaded();
    let account = Account::alone();
    let ask = |event: u32| peers.ask(1, &account, 0, &mut Some(event));
    assert!(matches!(ask(0), LookupOutcome::Later));
    let (asked, taken) = (std::cell::Cell::new(1), std::cell::RefCell::new(Vec::new()));
    let read = |pid| {
        assert_eq!(pid, 1);
        peers.drain(1, |peer, events| {
            assert_eq!(peer.job.as_deref(), Some("j"));
            taken.borrow_mut().extend(events);
            if asked.get() < 100 {
                assert!(matches!(ask(asked.get()), LookupOutcome::Later), "behind those being taken");
                asked.set(asked.get() + 1);
            }
        });
        peers.end();
    };
    peers.read_until_ended(|| 0, read);
    assert_eq!(taken.into_inner(), (0..100).collect::<Vec<_>>());
    assert!(matches!(ask(100), LookupOutcome::Known(_)));
    assert!(peers.state().lookups.is_empty());
}

#[test]
fn the_owner_with_the_fewest_reads_is_next_and_the_oldest_does_not_wait_for_one_thread() {
    let folder = tempfile::tempdir().expect("a folder");
    let peers = Peers::<u32>::default().at(folder.path().to_owned());
    peers.set_threaded();
    let (hostile, honest) = (Account::alone(), Account::alone());
    for pid in 1..20 {
        assert!(matches!(peers.ask(pid, &hostile, 0, &mut Some(1)), LookupOutcome::Later));
    }
    assert!(matches!(peers.ask(50, &honest, 0, &mut Some(1)), LookupOutcome::Later));
    peers.state().readers = 1;
    assert!(!peers.advance(IMPATIENCE_NS - 1).needs_reader);
    assert!(peers.advance(IMPATIENCE_NS).needs_reader);
    assert_eq!(peers.state().next_of_least(0), Some(1));
    assert_eq!(peers.state().next_of_least(0), Some(50), "before the other eighteen");
    // Reading has a deadline of its own; waiting for a turn is no reason to give up.
    assert_eq!(peers.advance(DEADLINE_NS).pids.len(), 2);
    assert_eq!(peers.state().stuck.len(), 2);
    assert_eq!(peers.advance(WAIT_NS).pids.len(), 18);
    assert_eq!(peers.state().stuck.len(), 2);
    // A lookup that was given up is not trusted for long, and nothing is given up twice.
    assert!(peers.advance(10 * WAIT_NS).pids.is_empty());
    assert!(peers.believed(50, DEADLINE_NS + LOOK_AGAIN_NS, || None).is_none(), "it is being drained");
    peers.drain(50, |_, events| drop(events));
    assert!(peers.believed(50, DEADLINE_NS + LOOK_AGAIN_NS, || None).is_some());
    assert!(peers.believed(50, DEADLINE_NS + LOOK_AGAIN_NS + 1, || None).is_none());
}

#[test]
fn an_environment_is_read_once_for_each_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let stat = |start: u64| {
        std::fs::write(folder.path().join("7/stat"), format!("7 (x) S {} {start} 0", "0 ".repeat(18)))
            .expect("written");
    };
    process(folder.path(), 7, b"HIGHWATER_JOB=first");
    stat(100);
    let peers = Peers::<()>::default().at(folder.path().to_owned());
    let job = |now_ns| match peers.ask(7, &Account::alone(), now_ns, &mut None) {
        LookupOutcome::Known(peer) => peer.job.clone().unwrap_or_default(),
        answer => panic!("{answer:?}"),
    };
    assert_eq!(job(0), "first");
    process(folder.path(), 7, b"HIGHWATER_JOB=second");
    assert_eq!(job(2 * KEEP_NS), "first", "the same process");
    stat(101);
    assert_eq!(job(4 * KEEP_NS), "second", "another one with its id");
    std::fs::remove_dir_all(folder.path().join("7")).expect("gone");
    assert_eq!(job(6 * KEEP_NS), "second", "its last events");
}

#[test]
fn an_environment_without_end_is_read_to_its_bound() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("endless");
    let file = std::fs::File::create(&path).expect("made");
    file.set_len(1 << 40).expect("sparse");
    let read = read_at_most(&path, MOST_ENVIRON_BYTES).expect("read");
    assert_eq!(read.len() as u64, MOST_ENVIRON_BYTES);
    assert!(read.capacity() as u64 <= 2 * MOST_ENVIRON_BYTES, "{}", read.capacity());
    assert_eq!(parse(&read), Peer { is_read: true, ..Peer::default() });
}

#[test]
fn what_waits_for_one_owner_is_bounded() {
    let folder = tempfile::tempdir().expect("a folder");
    // There is no reader.
    let peers = Peers::<u32>::default().at(folder.path().to_owned());
    peers.set_threaded();
    let account = Account::alone();
    let waits = |pid| matches!(peers.ask(pid, &account, 0, &mut Some(1)), LookupOutcome::Later);
    assert_eq!((0..2 * MOST_PARKED).filter(|_| waits(1)).count(), MOST_PARKED);
    assert_eq!(1 + (2..1_000).filter(|pid| waits(*pid)).count(), MOST_WAITING);
    assert!(matches!(peers.ask(5_000, &Account::alone(), 0, &mut Some(1)), LookupOutcome::Later), "another owner");
}
