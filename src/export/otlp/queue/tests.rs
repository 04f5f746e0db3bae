use super::*;
use proptest::prelude::*;

fn batch(signal: Signal, points: u64, bytes: usize) -> Batch {
    Batch { signal, points, payload: vec![0; bytes].into() }
}

#[derive(Debug, Clone)]
enum Act {
    Push(Signal, u64, usize),
    Take(Signal),
    Exported(Signal, u64),
    Refused(Signal),
    GiveBack(Signal),
    Abandon,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let signal = || prop::sample::select(Signal::ALL.to_vec());
    let push =
        || (signal(), 0_u64..50, 1_usize..400).prop_map(|(signal, points, bytes)| Act::Push(signal, points, bytes));
    let act = prop_oneof![
        push(),
        push(),
        push(),
        signal().prop_map(Act::Take),
        signal().prop_map(Act::Take),
        (signal(), 0_u64..10).prop_map(|(signal, rejected)| Act::Exported(signal, rejected)),
        signal().prop_map(Act::Refused),
        signal().prop_map(Act::GiveBack),
        Just(Act::Abandon),
    ];
    prop::collection::vec(act, 0..200)
}

fn perform(queue: &Queue, act: Act) {
    match act {
        Act::Push(signal, points, bytes) => queue.push(batch(signal, points, bytes)),
        Act::Take(signal) => drop(queue.try_take(signal)),
        Act::Exported(signal, rejected) => queue.exported(signal, rejected),
        Act::Refused(signal) => queue.refused(signal),
        Act::GiveBack(signal) => queue.give_back(signal),
        Act::Abandon => drop(queue.abandon()),
    }
}

proptest! {
    /// Whatever happens, every point is accounted for, and the bytes stay under the cap.
    #[test]
    fn every_point_is_accounted_for(acts in acts(), on_disk: bool) {
        let folder = tempfile::TempDir::new().expect("a folder");
        let disk = on_disk.then(|| Disk::open(folder.path()).expect("a folder"));
        let stats = Arc::new(OtlpStats::default());
        let queue = Queue::new(1_000, disk, Arc::clone(&stats));
        let mut pushed = [0; Signal::ALL.len()];
        for act in acts {
            if let Act::Push(signal, points, _) = act {
                pushed[signal as usize] += points;
            }
            perform(&queue, act);
            prop_assert!(stats.queued_bytes() <= 1_000);
            prop_assert_eq!(stats.memory_bytes(), if on_disk { 0 } else { stats.queued_bytes() });
            for signal in Signal::ALL {
                let (account, state) = (stats.account(signal), queue.state());
                let lane = &state.lanes[signal as usize];
                let waiting: u64 = lane.waiting.iter().chain(&lane.sending).map(|entry| entry.points).sum();
                prop_assert_eq!((account.produced, account.queued), (pushed[signal as usize], waiting));
                prop_assert_eq!(account.produced, account.exported + account.queued + account.all_dropped());
            }
        }
        let files = std::fs::read_dir(folder.path()).expect("there").filter(|file| {
            file.as_ref().is_ok_and(|file| file.path().extension().is_some_and(|extension| extension == "otlp"))
        });
        let state = queue.state();
        let waiting: usize = state.lanes.iter().map(|lane| lane.waiting.len() + usize::from(lane.sending.is_some())).sum();
        prop_assert_eq!(files.count(), if on_disk { waiting } else { 0 });
    }
}

#[test]
fn a_request_for_which_those_being_sent_leave_no_room_pushes_out_none_that_waits() {
    let (queue, stats) = holding(&[Signal::Metrics, Signal::Metrics]);
    assert_eq!(taken(&queue, Signal::Metrics), Some(1));
    queue.push(batch(Signal::Spans, 9, 70));
    assert_eq!(stats.account(Signal::Spans).dropped(DropReason::Overflow), 9);
    assert_eq!((stats.account(Signal::Metrics).queued, stats.queued_bytes()), (3, 80), "the other waits on");
}

/// The points of the request that a lane gets, if any.
fn taken(queue: &Queue, signal: Signal) -> Option<u64> {
    match queue.try_take(signal) {
        Next::Batch(batch) => Some(batch.points),
        Next::Nothing => None,
        Next::Unreadable(error) => panic!("{error}"),
    }
}

/// A queue of 100 bytes with these requests of 40 bytes. Each has as many points as its number.
fn holding(signals: &[Signal]) -> (Queue, Arc<OtlpStats>) {
    let stats = Arc::new(OtlpStats::default());
    let queue = Queue::new(100, None, Arc::clone(&stats));
    for (number, signal) in (1..).zip(signals) {
        queue.push(batch(*signal, number, 40));
    }
    (queue, stats)
}

#[test]
fn the_oldest_goes_first_whatever_its_signal() {
    let (queue, stats) = holding(&[Signal::Spans, Signal::Metrics, Signal::Metrics]);
    assert_eq!(stats.account(Signal::Spans).dropped(DropReason::Overflow), 1);
    assert_eq!(taken(&queue, Signal::Metrics), Some(2));
}

#[test]
fn what_is_being_sent_is_not_dropped_and_comes_first_again_when_given_back() {
    let (queue, stats) = holding(&[Signal::Metrics, Signal::Metrics]);
    assert_eq!(taken(&queue, Signal::Metrics), Some(1));
    assert_eq!(taken(&queue, Signal::Metrics), None, "one at a time");
    queue.push(batch(Signal::Metrics, 3, 40));
    assert_eq!(stats.account(Signal::Metrics).dropped(DropReason::Overflow), 2, "the oldest that is not being sent");
    queue.give_back(Signal::Metrics);
    assert_eq!(taken(&queue, Signal::Metrics), Some(1));
    queue.push(batch(Signal::Metrics, 4, 90));
    assert_eq!(
        stats.account(Signal::Metrics).dropped(DropReason::Overflow),
        2 + 4,
        "it leaves no room, and the other waits on"
    );
    queue.push(batch(Signal::Metrics, 5, 101));
    assert_eq!(stats.account(Signal::Metrics).dropped(DropReason::TooLarge), 5);
}

#[test]
fn a_disk_that_refuses_costs_no_point() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let stats = Arc::new(OtlpStats::default());
    let queue = Queue::new(1_000, Some(Disk::open(folder.path()).expect("a folder")), Arc::clone(&stats));
    queue.push(batch(Signal::Raw, 1, 10));
    std::fs::remove_dir_all(folder.path()).expect("removed");
    queue.push(batch(Signal::Raw, 2, 9));
    assert_eq!((stats.queued_bytes(), stats.memory_bytes()), (19, 9), "it stays in memory");
    assert_eq!(taken(&queue, Signal::Raw), Some(2), "the file of the first is gone");
    assert_eq!(stats.account(Signal::Raw).dropped(DropReason::Corrupt), 1);
    queue.give_back(Signal::Raw);
    assert_eq!(queue.abandon(), 2, "what is only in memory ends with the process");
    assert_eq!((stats.queued_bytes(), stats.memory_bytes()), (0, 0));
}

#[test]
fn a_folder_is_one_process_s_and_names_that_no_process_writes_are_left_alone() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let huge = format!("{}-raw-5.otlp", u64::MAX);
    let many = format!("00000000000000000007-raw-{}.otlp", u64::MAX);
    for name in [&huge, &many] {
        std::fs::write(folder.path().join(name), "not ours").expect("written");
    }
    let first = Disk::open(folder.path()).expect("a folder");
    let error = Disk::open(folder.path()).expect_err("it is taken");
    assert!(error.to_string().contains("another process"), "{error}");
    let queue = Queue::new(1_000, Some(first), Arc::default());
    assert!(queue.is_empty());
    queue.push(batch(Signal::Raw, 1, 10));
    drop(queue);
    let stats = Arc::<OtlpStats>::default();
    let queue = Queue::new(1_000, Some(Disk::open(folder.path()).expect("free again")), Arc::clone(&stats));
    assert_eq!(taken(&queue, Signal::Raw), Some(1));
    assert!(folder.path().join(huge).exists() && folder.path().join(many).exists());
}

fn accounted(stats: &OtlpStats, signal: Signal) -> bool {
    let account = stats.account(signal);
    account.produced == account.exported + account.queued + account.all_dropped()
}

/// A disk, or a full table of open files, can fail like this for a while. Here directories are in place of the files,
/// which root cannot read either.
#[test]
fn what_cannot_be_read_for_a_while_keeps_its_place_and_nothing_is_lost() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let stats = Arc::new(OtlpStats::default());
    let queue = Queue::new(1_000, Some(Disk::open(folder.path()).expect("a folder")), Arc::clone(&stats));
    for points in [666, 1, 2] {
        queue.push(batch(Signal::Raw, points, 10));
    }
    let first = folder.path().join("00000000000000000000-raw-666.otlp");
    let aside = folder.path().join("aside");
    std::fs::rename(&first, &aside).expect("it was there");
    std::fs::create_dir(&first).expect("made");
    for failures in 1..=5 {
        match queue.try_take(Signal::Raw) {
            Next::Unreadable(error) => assert!(error.to_string().contains("raw-666.otlp"), "{error}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(stats.read_failures(Signal::Raw), failures);
        assert_eq!((stats.account(Signal::Raw).queued, stats.account(Signal::Raw).all_dropped()), (669, 0));
        assert!(accounted(&stats, Signal::Raw));
    }
    std::fs::remove_dir(&first).expect("empty");
    std::fs::rename(&aside, &first).expect("put back");
    for points in [666, 1, 2] {
        assert_eq!(taken(&queue, Signal::Raw), Some(points), "in the order of production");
        queue.exported(Signal::Raw, 0);
        assert!(accounted(&stats, Signal::Raw));
    }
    assert_eq!((stats.account(Signal::Raw).exported, stats.account(Signal::Raw).all_dropped()), (669, 0));
}

#[test]
fn a_wrong_checksum_and_a_file_that_is_gone_are_damage() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let stats = Arc::new(OtlpStats::default());
    let queue = Queue::new(1_000, Some(Disk::open(folder.path()).expect("a folder")), Arc::clone(&stats));
    for points in 1..=5 {
        queue.push(batch(Signal::Raw, points, 10));
    }
    let file = |points: u64| folder.path().join(format!("{:020}-raw-{points}.otlp", points - 1));
    let content = std::fs::read(file(1)).expect("it is there");
    std::fs::write(file(1), [&content[..], b"more"].concat()).expect("longer");
    std::fs::write(file(2), [b"x", &content[1..]].concat()).expect("torn");
    std::fs::write(file(3), b"ab").expect("shorter than a checksum");
    std::fs::remove_file(file(4)).expect("it was there");
    assert_eq!(taken(&queue, Signal::Raw), Some(5));
    assert_eq!(stats.account(Signal::Raw).dropped(DropReason::Corrupt), 1 + 2 + 3 + 4);
    assert!(accounted(&stats, Signal::Raw));
}

/// Names that another user prepared: links at each file that the queue makes.
#[test]
fn no_link_in_the_folder_is_followed() {
    use std::os::unix::fs::symlink;
    let root = tempfile::TempDir::new().expect("a folder");
    let (victim, folder) = (root.path().join("victim"), root.path().join("queue"));
    std::fs::write(&victim, "bytes of somebody else").expect("written");
    std::fs::create_dir(&folder).expect("made");
    for name in ["otlp.lock", "00000000000000000007-raw-5.otlp"] {
        symlink(&victim, folder.join(name)).expect("made");
        let message = Disk::open(&folder).expect_err("it is refused").to_string();
        assert!(message.contains(name) && message.contains("symbolic link"), "{message}");
        std::fs::remove_file(folder.join(name)).expect("ours");
    }
    let stats = Arc::new(OtlpStats::default());
    let queue = Queue::new(1_000, Some(Disk::open(&folder).expect("a folder")), Arc::clone(&stats));
    symlink(&victim, folder.join("00000000000000000000-raw-1.otlp.partial")).expect("made");
    symlink(&victim, folder.join("00000000000000000001-raw-2.otlp")).expect("made");
    queue.push(batch(Signal::Raw, 1, 10));
    queue.push(batch(Signal::Raw, 2, 10));
    assert_eq!(std::fs::read_to_string(&victim).expect("there"), "bytes of somebody else");
    assert_eq!(taken(&queue, Signal::Raw), Some(1), "kept in memory");
    queue.exported(Signal::Raw, 0);
    assert_eq!(taken(&queue, Signal::Raw), Some(2), "in a file that took the link's name");
}

/// Writing a file takes time, in which a scrape may come.
#[test]
fn whoever_reads_while_a_request_is_written_finds_each_point_in_one_place() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let stats = Arc::new(OtlpStats::default());
    let queue = Queue::new(1 << 20, Some(Disk::open(folder.path()).expect("a folder")), Arc::clone(&stats));
    std::thread::scope(|scope| {
        let producer = scope.spawn(|| {
            for points in 1..500 {
                queue.push(batch(Signal::Spans, points, 100));
                stats.add_lost(Signal::Spans, DropReason::Overrun, points);
                assert_eq!(taken(&queue, Signal::Spans), Some(points));
                queue.exported(Signal::Spans, points / 2);
            }
        });
        while !producer.is_finished() {
            assert!(accounted(&stats, Signal::Spans), "{:?}", stats.account(Signal::Spans));
        }
        producer.join().expect("no panic");
    });
    assert!(accounted(&stats, Signal::Spans));
}
