//! Stories of processes that are asked about, and of those that do not want to be read.

use super::*;
use crate::kubelet::{Container, Home, Settings};

#[test]
fn a_process_in_a_pod_has_the_pods_name_for_its_job_and_its_own_for_its_rank() {
    let (folder, id) = (tempfile::tempdir().expect("a folder"), "0a".repeat(32));
    let process = folder.path().join("77");
    let write = |name: &str, text: &[u8]| std::fs::write(process.join(name), text).expect("written");
    std::fs::create_dir_all(&process).expect("a folder");
    write("cgroup", format!("0::/kubepods.slice/cri-containerd-{id}.scope\n").as_bytes());
    let logs = folder.path().join("logs");
    std::fs::create_dir_all(&logs).expect("a folder");
    let settings = Settings { socket: Some("/nowhere".into()), container_logs: logs.clone() };
    let kubelet = Kubelet::new(&settings).map(Arc::new);
    let peers = Peers::<()>::with_kubelet(kubelet).at(folder.path().to_owned());
    let get = |pid, now_ns| match peers.ask(pid, &Account::alone(), now_ns, &mut None) {
        Told::Known(peer) => Peer::clone(&peer),
        told => panic!("{told:?}"),
    };
    assert_eq!(get(77, 0).home, Home::Unknown, "its link is not there yet");
    std::fs::write(logs.join(format!("llama-0_research_trainer-{id}.log")), "").expect("written");
    let peer = get(77, LOOK_AGAIN_NS + 1);
    let (namespace, pod) = ("research".to_owned(), "llama-0".to_owned());
    let container = Container { namespace, pod, name: Some("trainer".into()), id: Some(id) };
    assert_eq!(peer.home, Home::Container(container));
    assert_eq!(peer.job, None, "its environment, which may not be read, may name the job");
    write("environ", b"RANK=5\0LOCAL_RANK=1\0");
    let peer = get(77, 2 * KEEP_NS);
    assert_eq!((peer.job.as_deref(), peer.rank, peer.place.local_rank), (Some("research/llama-0"), Some(5), Some(1)));
    write("environ", b"HIGHWATER_JOB=llama\0");
    assert_eq!(get(77, 4 * KEEP_NS).job.as_deref(), Some("llama"), "what the job says goes before");
    assert_eq!(get(78, 0), Peer::default(), "no such process, at 0");
}

#[test]
fn the_first_variable_that_names_a_job_wins() {
    let peer = parse(b"SLURM_JOB_ID=77\0RANK=3\0LOCAL_RANK=1\0CUDA_VISIBLE_DEVICES=0,1\0\xff=x\0");
    assert_eq!(peer.job.as_deref(), Some("slurm-77"));
    assert_eq!((peer.rank, peer.place.local_rank), (Some(3), Some(1)));
    assert_eq!(parse(b"SLURM_JOB_ID=77\0HIGHWATER_JOB=llama").job.as_deref(), Some("llama"));
    assert_eq!(parse(b"HIGHWATER_JOB=\0RANK=x"), Peer::default());
    let hidden = parse(b"CUDA_VISIBLE_DEVICES=\0").place.visible_devices;
    assert_eq!(hidden.as_deref(), Some(""), "all devices are hidden");
    let endless = [b"CUDA_VISIBLE_DEVICES=".as_slice(), &[b'0'; MOST_BYTES + 1]].concat();
    assert_eq!(parse(&endless), Peer::default());
}

/// A process whose environment does not come: nobody writes to the other end.
fn stuck_process(folder: &Path, pid: u32) {
    let process = folder.join(pid.to_string());
    std::fs::create_dir_all(&process).expect("a folder");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, process.join("environ"), rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
}

fn process(folder: &Path, pid: u32, environ: &[u8]) {
    std::fs::create_dir_all(folder.join(pid.to_string())).expect("a folder");
    std::fs::write(folder.join(format!("{pid}/environ")), environ).expect("written");
}

/// Lets the pipe's reader go on.
fn release(folder: &Path, pid: u32) {
    std::fs::write(folder.join(format!("{pid}/environ")), b"HIGHWATER_JOB=late").expect("written");
}

/// Peers that one thread reads, which says which process it has read and what waited for it.
fn threaded(folder: &Path) -> (Arc<Peers<u32>>, std::sync::mpsc::Receiver<(u32, Vec<u32>)>) {
    let peers = Arc::new(Peers::<u32>::default().at(folder.to_owned()));
    peers.set_threaded();
    let (tell, told) = std::sync::mpsc::channel();
    start_reader(&peers, tell);
    (peers, told)
}

fn start_reader(peers: &Arc<Peers<u32>>, tell: std::sync::mpsc::Sender<(u32, Vec<u32>)>) {
    let of_thread = Arc::clone(peers);
    std::thread::spawn(move || {
        of_thread.read_until_ended(
            || 0,
            |pid| {
                let mut waited = Vec::new();
                of_thread.drain(pid, |events| waited.extend(events));
                // The test may have ended.
                let _ = tell.send((pid, waited));
            },
        );
    });
}

#[test]
fn events_wait_for_their_own_process_and_for_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    stuck_process(folder.path(), 1);
    process(folder.path(), 2, b"HIGHWATER_JOB=honest");
    let (peers, told) = threaded(folder.path());
    let (hostile, honest) = (Account::alone(), Account::alone());
    let ask = |pid, account, event: u32, now_ns| peers.ask(pid, account, now_ns, &mut Some(event));
    assert!(matches!(ask(1, &hostile, 10, 0), Told::Later));
    assert!(matches!(ask(1, &hostile, 11, 0), Told::Later));
    // The only thread hangs in process 1: what is asked next waits until that is given up.
    while !peers.state().lookups[&1].is_begun {
        std::thread::yield_now();
    }
    assert!(matches!(ask(2, &honest, 20, DEADLINE_NS / 2), Told::Later));
    let overdue = peers.advance(DEADLINE_NS);
    assert_eq!((overdue.pids.as_slice(), overdue.needs_reader), (&[1][..], true));
    let mut waited = Vec::new();
    peers.drain(1, |events| waited.extend(events));
    assert_eq!(waited, [10, 11], "nothing is lost with it");
    let (tell, told_by_second) = std::sync::mpsc::channel();
    start_reader(&peers, tell);
    assert_eq!(told_by_second.recv().expect("it is read"), (2, vec![20]));
    assert!(matches!(ask(2, &honest, 21, DEADLINE_NS), Told::Known(peer) if peer.job.as_deref() == Some("honest")));
    assert!(matches!(ask(1, &hostile, 12, DEADLINE_NS), Told::Known(peer) if peer.job.is_none()), "given up for now");
    release(folder.path(), 1);
    assert_eq!(told.recv().expect("it comes back"), (1, vec![]));
    assert!(peers.state().stuck.is_empty());
    peers.end();
}

#[test]
fn an_owner_whose_processes_hang_has_no_more_of_them_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let count = u32::try_from(MOST_READERS).expect("a few");
    (0..count).for_each(|pid| stuck_process(folder.path(), pid));
    process(folder.path(), 99, b"HIGHWATER_JOB=honest");
    let (peers, _told) = threaded(folder.path());
    let (hostile, honest) = (Account::alone(), Account::alone());
    let mut threads = 1;
    for pid in 0..count {
        let now_ns = i64::from(pid) * 2 * DEADLINE_NS;
        let told = peers.ask(pid, &hostile, now_ns, &mut Some(pid));
        if !matches!(told, Told::Later) {
            break;
        }
        while !peers.state().lookups[&pid].is_begun {
            std::thread::yield_now();
        }
        let overdue = peers.advance(now_ns + DEADLINE_NS);
        peers.drain(pid, drop);
        if overdue.needs_reader {
            start_reader(&peers, std::sync::mpsc::channel().0);
            threads += 1;
        }
    }
    assert_eq!((peers.state().stuck.len(), threads), (MOST_STUCK, MOST_STUCK + 1));
    let (tell, told) = std::sync::mpsc::channel();
    start_reader(&peers, tell.clone());
    start_reader(&peers, tell);
    let now_ns = i64::from(count) * 2 * DEADLINE_NS;
    if matches!(peers.ask(99, &honest, now_ns, &mut Some(1)), Told::Later) {
        while !peers.state().known.contains_key(&99) {
            std::thread::yield_now();
        }
    }
    drop(told);
    (0..u32::try_from(MOST_STUCK).expect("a few")).for_each(|pid| release(folder.path(), pid));
    peers.end();
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
    assert_eq!(parse(&read), Peer::default());
}

#[test]
fn what_waits_for_one_owner_is_bounded() {
    let folder = tempfile::tempdir().expect("a folder");
    // Nobody reads.
    let peers = Peers::<u32>::default().at(folder.path().to_owned());
    peers.set_threaded();
    let account = Account::alone();
    let waits = |pid| matches!(peers.ask(pid, &account, 0, &mut Some(1)), Told::Later);
    assert_eq!((0..1_000).filter(|_| waits(1)).count(), MOST_PARKED);
    assert_eq!(1 + (2..1_000).filter(|pid| waits(*pid)).count(), MOST_WAITING);
    assert!(matches!(peers.ask(5_000, &Account::alone(), 0, &mut Some(1)), Told::Later), "another owner");
}
