use super::*;
use crate::jobs::{Account, Accounts, Owner, Within};
use crate::phases::{LastLayer, hand};
use crate::wire::Memory;

fn ended(account: &Arc<Account>, kind: Kind, name: &str, rank: usize, step: u64) -> Attributed {
    let begin_ns = i64::try_from(step).unwrap() * 1_000;
    let memory = |allocated| Some(Memory { allocated: Some(allocated), ..Memory::default() });
    let mut ended = hand::ended(kind, rank, name, Some(step), begin_ns, begin_ns + 10);
    (ended.open.memory, ended.memory) = (memory(100), memory(70));
    ended.open.held = Some(account.hold(Resource::Bytes, 1));
    let on_gpu = PhaseMemory {
        begin_bytes: Some(5),
        end_bytes: Some(9),
        peak_bytes: Some(20 - step),
        ..PhaseMemory::unknown(0)
    };
    Attributed { gpus: vec![on_gpu], ..hand::attributed(ended) }
}

/// The accounts of two users, and each one's own.
fn two_owners(limits: &Limits) -> (Accounts, Arc<Account>, Arc<Account>) {
    let accounts = Accounts::new(limits);
    let [one, other] = [1, 2].map(|uid| accounts.of(&Owner::User { uid, within: Within::Node }));
    (accounts, one, other)
}

fn of_key(log: &Log, rank: u32) -> &RankStats {
    log.rank(&("j".into(), rank)).expect("something of it has ended")
}

#[test]
fn layers_push_no_phase_out() {
    let (limits, account) = (Limits::default(), Account::alone());
    let mut log = Log::new(&limits);
    log.record(ended(&account, Kind::Phase, "forward", 0, 1));
    for n in 0..2 * limits.ended {
        log.record(ended(&account, Kind::Layer, &format!("layer {}", n % 200), 0, 1));
    }
    let (phases, lost) = log.phases.since(0);
    assert_eq!((phases.len(), lost, log.phases.count()), (1, 0, 1));
    let (layers, lost) = log.layers.since(0);
    assert_eq!(layers.len() as u64 + lost, 2 * limits.ended as u64);
    assert!(layers.len() <= limits.ended && layers.len() > 1_000, "{}", layers.len());
    assert!(log.layers.entries.bytes() <= limits.ended_layer_bytes);
    assert_eq!(log.phases.of_job(&"j".into(), u64::MAX).count(), 1);
}

#[test]
fn a_rank_has_each_layer_once_with_all_that_ended_of_it() {
    let account = Account::alone();
    let mut log = Log::new(&Limits::default());
    for (name, step) in [("b", 1), ("a", 1), ("b", 3), ("b", 2)] {
        log.record(ended(&account, Kind::Layer, name, 0, step));
    }
    let layers = &of_key(&log, 0).layers;
    assert_eq!(layers.iter().map(|(name, layer)| (&**name, layer.order)).collect::<Vec<_>>(), [("a", 1), ("b", 0)]);
    let layer = &layers["b"];
    assert_eq!((layer.count, layer.total_ns, layer.peak_bytes), (3, 30, Some(19)));
    let last = LastLayer {
        step: Some(3),
        begin_ns: 3_000,
        end_ns: 3_010,
        peak_bytes: Some(17),
        growth_bytes: Some(4),
        allocated_growth_bytes: Some(-30),
        reserved_growth_bytes: None,
    };
    assert_eq!(layer.last, last, "step 2 came late");
    assert!(of_key(&log, 0).phases.is_empty());
}

#[test]
fn layers_are_bounded_and_one_owner_leaves_room_for_another() {
    let limits = Limits { layer_bytes: 64 << 10, ..Limits::default() };
    let (accounts, one, other) = two_owners(&limits);
    let mut log = Log::new(&limits);
    for n in 0..1_000 {
        log.record(ended(&one, Kind::Layer, &format!("layer {n}"), 0, 1));
    }
    let kept = of_key(&log, 0).layers.len() as u64;
    assert!(kept > 50 && accounts.held(Resource::Layers) <= limits.layer_bytes / 2, "{kept}");
    assert_eq!(log.layers_unkept(), 1_000 - kept);
    log.record(ended(&other, Kind::Layer, "layer 0", 1, 1));
    assert_eq!(of_key(&log, 1).layers.len(), 1);
    // What is known already goes on, full or not.
    log.record(ended(&one, Kind::Layer, "layer 0", 0, 2));
    assert_eq!((of_key(&log, 0).layers["layer 0"].count, log.layers_unkept()), (2, 1_000 - kept));
    log.keep_ranks(&BTreeSet::new());
    assert_eq!(accounts.held(Resource::Layers), 0);
}

#[test]
fn the_owner_with_most_forgets_first_and_numbers_go_on() {
    let limits = Limits { ended: 4, ..Limits::default() };
    let (accounts, one, other) = two_owners(&limits);
    let mut log = Log::new(&limits);
    log.record(ended(&other, Kind::Phase, "x", 1, 1));
    (0..6).for_each(|step| log.record(ended(&one, Kind::Phase, "a", 0, step)));
    let numbers =
        |log: &Log, job: &str, before| log.phases.of_job(&job.into(), before).map(|(n, _)| n).collect::<Vec<_>>();
    assert_eq!((numbers(&log, "j", u64::MAX), numbers(&log, "j", 5)), (vec![6, 5, 4, 0], vec![4, 0]));
    let (since, lost) = log.phases.since(2);
    assert_eq!((since.len(), lost, log.phases.count()), (3, 2, 7));
    drop(since);
    assert!(log.has_job(&"j".into()) && !log.has_job(&"k".into()));
    log.clear();
    assert_eq!((log.has_job(&"j".into()), log.phases.count(), accounts.held(Resource::Ended)), (false, 7, 0));
}

#[test]
fn what_is_found_out_is_counted_by_how_much_it_is() {
    let account = Account::alone();
    let mut log = Log::new(&Limits::default());
    let known = |gpu| PhaseMemory { peak_bytes: Some(1), ..PhaseMemory::unknown(gpu) };
    for gpus in [
        vec![known(0), known(1)],
        vec![known(0)],
        vec![known(0)],
        vec![known(0), PhaseMemory { gap_ns: 1, ..known(1) }],
        vec![known(0), PhaseMemory::unknown(1)],
        vec![],
        vec![PhaseMemory::unknown(0), PhaseMemory { gap_ns: 5, ..PhaseMemory::unknown(1) }],
        vec![PhaseMemory::unknown(0)],
        vec![PhaseMemory::unknown(0)],
        vec![PhaseMemory::unknown(0)],
    ] {
        log.record(Attributed { gpus, ..ended(&account, Kind::Phase, "a", 0, 1) });
    }
    let expected = [("attributed", 3), ("with_gap", 2), ("without_gpu", 1), ("without_memory", 4)];
    assert_eq!(log.attributions().labelled(), expected);
    assert_eq!(log.ranks().map(|(key, _)| key.clone()).collect::<Vec<_>>(), [hand::key(0)]);
}

#[test]
fn bytes_are_those_of_attributes_and_gpus_and_are_bounded() {
    let attributes: crate::jobs::Attributes = Box::new([("a".into(), crate::wire::Scalar::Text("b".repeat(500)))]);
    let with = |account: &Arc<Account>| {
        let mut one = ended(account, Kind::Phase, "a", 0, 1);
        one.ended.open.attributes = Some(attributes.clone());
        one
    };
    assert_eq!(ENTRY_BYTES, size_of::<Attributed>() + 96);
    let bytes = ENTRY_BYTES + size_of::<PhaseMemory>() + weight(&attributes);
    let limits = Limits { ended_bytes: 3 * bytes, ..Limits::default() };
    let accounts = Accounts::new(&limits);
    let account = accounts.of(&Owner::Daemon);
    let mut log = Log::new(&limits);
    for kept in [1, 2, 3, 3, 3] {
        log.record(with(&account));
        assert_eq!((log.phases.entries.bytes(), log.phases.since(0).0.len()), (kept * bytes, kept));
        assert_eq!(accounts.held(Resource::Ended), kept * bytes);
    }
    assert_eq!((log.phases.since(0).1, log.phases.kept), (2, 3));
    log.clear();
    assert_eq!((log.phases.entries.bytes(), log.phases.kept, accounts.held(Resource::Ended)), (0, 0, 0));
}

#[test]
fn who_has_forgotten_some_has_less_than_before() {
    let limits = Limits { ended: 4, ..Limits::default() };
    let (_, one, other) = two_owners(&limits);
    let mut log = Log::new(&limits);
    let record = |log: &mut Log, account, rank, times| {
        (0..times).for_each(|step| log.record(ended(account, Kind::Phase, "a", rank, step)));
        let (kept, _) = log.phases.since(0);
        [0, 1].map(|rank| kept.iter().filter(|attributed| attributed.ended.rank == rank).count())
    };
    assert_eq!(record(&mut log, &one, 0, 4), [4, 0]);
    assert_eq!(record(&mut log, &other, 1, 2), [2, 2]);
    assert_eq!(record(&mut log, &other, 1, 3), [2, 2], "now the other has the most");
}

#[test]
fn of_a_phase_that_its_rank_ended_or_that_goes_on_the_peak_counts_and_no_time() {
    let (limits, account) = (Limits::default(), Account::alone());
    let mut log = Log::new(&limits);
    log.record(ended(&account, Kind::Phase, "forward", 0, 3));
    let counted = log.attributions();
    let mut cut = ended(&account, Kind::Phase, "forward", 0, 4);
    (cut.ended.by, cut.gpus[0].peak_bytes, cut.gpus[0].end_bytes) = (EndedBy::StillOpen, Some(140), Some(0));
    log.record(cut);
    let forward = &of_key(&log, 0).phases["forward"];
    assert_eq!((forward.peak_bytes, forward.peak_max_bytes(4_010, 15)), (Some(140), Some(140)));
    assert_eq!((forward.growth_bytes, forward.durations.exponential().count()), (Some(4), 1));
    assert_eq!((log.phases.count(), log.attributions()), (1, counted));
    // The first phase of its name may be the one.
    let mut cut = ended(&account, Kind::Phase, "backward", 0, 5);
    (cut.ended.by, cut.gpus[0].peak_bytes) = (EndedBy::Exit, Some(139));
    log.record(cut);
    assert_eq!(of_key(&log, 0).phases["backward"].peak_bytes, Some(139));
    // One that its rank ended is on the shelf and in the trail, and says so.
    let mut step = ended(&account, Kind::Step, "step", 0, 6);
    step.ended.by = EndedBy::Exit;
    log.record(step);
    let by: Vec<_> = log.phases.since(1).0.iter().map(|one| one.ended.by).collect();
    let cut: Vec<_> = log.trail.blocks(i64::MIN, i64::MAX)[0].spans().map(|span| (span.number, span.is_cut)).collect();
    assert_eq!((by, cut), (vec![EndedBy::Exit; 2], vec![(0, false), (1, true), (2, true)]));
    let stats = of_key(&log, 0);
    assert_eq!((stats.step_durations.exponential().count(), stats.phases.contains_key("step")), (0, false));
    assert_eq!(log.attributions(), counted);
}
