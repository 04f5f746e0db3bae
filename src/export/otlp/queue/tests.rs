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
    /// Whatever happens: every point is accounted for, and the bytes stay under the cap.
    #[test]
    fn every_point_is_accounted_for(acts in acts(), on_disk: bool) {
        let folder = tempfile::TempDir::new().expect("a folder");
        let disk = on_disk.then(|| Disk::open(folder.path()).expect("a folder"));
        let stats = Arc::new(Stats::default());
        let queue = Queue::new(1_000, disk, Arc::clone(&stats));
        for act in acts {
            perform(&queue, act);
            prop_assert!(stats.queued_bytes() <= 1_000);
            for signal in Signal::ALL {
                let accounted = stats.exported(signal) + stats.queued(signal) + stats.all_dropped(signal);
                prop_assert_eq!(stats.produced(signal), accounted);
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

/// A queue of 100 bytes that holds these requests of 40 bytes, each with as many points as its number.
fn holding(signals: &[Signal]) -> (Queue, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let queue = Queue::new(100, None, Arc::clone(&stats));
    for (number, signal) in (1..).zip(signals) {
        queue.push(batch(*signal, number, 40));
    }
    (queue, stats)
}

#[test]
fn the_oldest_goes_first_whatever_its_signal() {
    let (queue, stats) = holding(&[Signal::Spans, Signal::Metrics, Signal::Metrics]);
    assert_eq!(stats.dropped(Signal::Spans, Reason::Overflow), 1);
    assert_eq!(queue.try_take(Signal::Metrics).map(|batch| batch.points), Some(2));
}

#[test]
fn what_is_being_sent_is_not_dropped_and_comes_first_again_when_given_back() {
    let (queue, stats) = holding(&[Signal::Metrics, Signal::Metrics]);
    assert_eq!(queue.try_take(Signal::Metrics).map(|batch| batch.points), Some(1));
    assert_eq!(queue.try_take(Signal::Metrics), None, "one at a time");
    queue.push(batch(Signal::Metrics, 3, 40));
    assert_eq!(stats.dropped(Signal::Metrics, Reason::Overflow), 2, "the oldest that is not being sent");
    queue.give_back(Signal::Metrics);
    assert_eq!(queue.try_take(Signal::Metrics).map(|batch| batch.points), Some(1));
    queue.push(batch(Signal::Metrics, 4, 90));
    assert_eq!(stats.dropped(Signal::Metrics, Reason::Overflow), 2 + 3 + 4, "it leaves no room");
    queue.push(batch(Signal::Metrics, 5, 101));
    assert_eq!(stats.dropped(Signal::Metrics, Reason::TooLarge), 5);
}

#[test]
fn a_disk_that_refuses_costs_no_point() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let stats = Arc::new(Stats::default());
    let queue = Queue::new(1_000, Some(Disk::open(folder.path()).expect("a folder")), Arc::clone(&stats));
    queue.push(batch(Signal::Raw, 1, 10));
    std::fs::remove_dir_all(folder.path()).expect("removed");
    queue.push(batch(Signal::Raw, 2, 10));
    assert_eq!(queue.try_take(Signal::Raw).map(|batch| batch.points), Some(2), "the file of the first is gone");
    assert_eq!(stats.dropped(Signal::Raw, Reason::Corrupt), 1);
    queue.give_back(Signal::Raw);
    assert_eq!(queue.abandon(), 2, "what is only in memory ends with the process");
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
    let stats = Arc::<Stats>::default();
    let queue = Queue::new(1_000, Some(Disk::open(folder.path()).expect("free again")), Arc::clone(&stats));
    assert_eq!(queue.try_take(Signal::Raw).map(|batch| batch.points), Some(1));
    assert!(folder.path().join(huge).exists() && folder.path().join(many).exists());
}
