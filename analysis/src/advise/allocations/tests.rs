//! What a simulation says, beside what ran on an H200; and allocators that are given anything.

use super::allocator::{AllocatorPeaks, OutOfMemory, SimulatedAllocator};
use super::growth::Growth;
use super::{AllocationHistory, Histories, HistoriesError, HistoryProblem, SimulatedRank, read};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn recorded(name: &str) -> AllocationHistory {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/advise");
    read(&folder.join(format!("allocations_{name}.json.gz"))).expect(name)
}

/// The answer of these files, where the allocator may reserve 40 GiB.
fn at_40_gib(names: &[&str]) -> SimulatedRank {
    let mut histories = Histories::default();
    for name in names {
        histories.add(recorded(name));
    }
    let whole = histories.advise(0).expect("an answer").limit_bytes;
    let mut histories = Histories::default();
    names.iter().for_each(|name| histories.add(recorded(name)));
    histories.advise(whole - 40 * GIB).expect("an answer")
}

/// Four steps of each batch ran in a process of its own on an H200, whose allocator might reserve 40 GiB
/// (benches/gpu/batch.py): 24 samples of the GPT did and 25 did not, with expandable segments 28 and 29; of the U-Net 346 and 364,
/// 367 and 386. The third ran with expandable segments: 42 samples did, 43 did not.
#[test]
fn what_ran_on_an_h200_was_advised() {
    let gpt = at_40_gib(&["gpt_batch8", "gpt_batch16"]);
    let expandable = gpt.with_expandable_segments.expect("it ran without");
    assert_eq!((gpt.batch.largest_batch_size, expandable.largest_batch_size), (Some(24), Some(28)));
    assert_eq!(gpt.limit_bytes, 40 * GIB);
    // The job reserved 39.65 GiB with that batch.
    let reserved = gpt.batch.reserved_peak_bytes.expect("known");
    assert!((39 * GIB + 600 * MIB..40 * GIB).contains(&reserved), "{reserved}");
    let unet = at_40_gib(&["unet_batch64", "unet_batch32"]);
    let expandable = unet.with_expandable_segments.expect("it ran without");
    assert_eq!((unet.batch.largest_batch_size, expandable.largest_batch_size), (Some(345), Some(366)));
    assert_eq!(unet.batch.times_observed, Some(345.0 / 64.0));
    let grows = at_40_gib(&["expandable_batch8", "expandable_batch16"]);
    assert_eq!((grows.is_expandable, grows.with_expandable_segments), (true, None));
    assert_eq!(grows.batch.largest_batch_size, Some(42));
    for of in [gpt, unet, grows] {
        for steps in of.histories {
            let (real, simulated) = (steps.reserved_peak_bytes, steps.simulated_peak_bytes);
            assert!(real.abs_diff(simulated) < 4 * MIB, "{}: {real} {simulated}", steps.batch_size);
        }
    }
}

/// A history of one step, in a process that begins with 100 MiB: `[address, size]` for a request, `[address]` for a release.
fn made(batch: u64, settings: &str, events: &[&[u64]]) -> AllocationHistory {
    let events: Vec<Vec<u64>> = events
        .iter()
        .map(|event| match event {
            [address, size] => vec![*address, *size, 0],
            release => release.to_vec(),
        })
        .collect();
    let segments = json!([{"stream": 0, "is_small": false, "is_expandable": false, "address": 1_u64 << 40,
        "blocks": [[100 * MIB, true]]}]);
    let whole = json!({"highwater_allocations": 1, "rank": 0, "batch_size": batch, "steps": 1, "settings": settings,
        "total_bytes": GIB, "outside_bytes": 24 * MIB, "reserved_peak_bytes": 100 * MIB + reserved(&events), "segments": segments,
        "events": events});
    written(&whole).expect("a history")
}

/// What requests of more than 10 MiB that nothing serves again reserve, bytes.
fn reserved(events: &[Vec<u64>]) -> u64 {
    events.iter().filter(|event| event.len() > 1).map(|event| event[1].next_multiple_of(2 * MIB)).sum()
}

fn written(whole: &Value) -> Result<AllocationHistory, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("it.json");
    std::fs::write(&path, whole.to_string()).expect("written");
    read(&path).map_err(|error| error.to_string())
}

fn advised(of: Vec<AllocationHistory>, headroom: u64) -> Result<SimulatedRank, HistoriesError> {
    let mut histories = Histories::default();
    of.into_iter().for_each(|history| histories.add(history));
    histories.advise(headroom)
}

/// A batch of 2 takes 20 MiB, and one of 4 takes 40 MiB; 30 MiB are the same in both.
fn two_batches() -> Vec<AllocationHistory> {
    let of = |batch: u64| made(batch, "", &[&[1, batch * 10 * MIB], &[2, 30 * MIB], &[1], &[2]]);
    vec![of(2), of(4)]
}

#[test]
fn the_largest_batch_is_the_last_that_leaves_the_headroom() {
    // 1,024 MiB, less 24 outside, less 100 of the model, less 30: 870 MiB, at 10 MiB a sample.
    let found = advised(two_batches(), 0).expect("an answer");
    assert_eq!((found.limit_bytes, found.outside_bytes), (1_000 * MIB, 24 * MIB));
    assert_eq!(found.batch.largest_batch_size, Some(87));
    assert_eq!(
        (found.batch.reserved_peak_bytes, found.batch.allocated_peak_bytes),
        (Some(1_000 * MIB), Some(1_000 * MIB))
    );
    let found = advised(two_batches(), 200 * MIB).expect("an answer");
    assert_eq!(found.batch.largest_batch_size, Some(67));
    let [small, large] = two_batches().try_into().expect("two");
    let busier = AllocationHistory { outside_bytes: 124 * MIB, ..small };
    assert_eq!(advised(vec![busier, large], 0).expect("an answer").batch.largest_batch_size, Some(77));
    let none = advised(two_batches(), 900 * MIB).expect("an answer");
    assert_eq!((none.batch.largest_batch_size, none.batch.times_observed), (None, None));
}

#[test]
fn the_answer_is_of_the_rank_that_can_have_the_fewest_samples() {
    let of = |rank: u32, each: u64| {
        [2, 4].map(|batch| AllocationHistory { rank, ..made(batch, "", &[&[1, batch * each * MIB], &[1]]) })
    };
    let mut all: Vec<AllocationHistory> = of(0, 10).into_iter().chain(of(1, 20)).collect();
    all.push(AllocationHistory { rank: 2, ..made(2, "", &[&[1, 20 * MIB]]) });
    let found = advised(all, 0).expect("an answer");
    assert_eq!((found.rank, found.batch.largest_batch_size), (1, Some(45)));
    let why = "histories of two batch sizes are needed to see how memory grows: all have 2";
    assert_eq!(found.unknown_ranks.get(&2).map(String::as_str), Some(why));
}

#[test]
fn what_histories_do_not_say_is_not_said() {
    let one = |settings: &str| made(2, settings, &[&[1, 20 * MIB]]);
    let problem = |of: Vec<AllocationHistory>| match advised(of, 0) {
        Err(HistoriesError::Rank(0, problem)) => problem,
        other => panic!("{other:?}"),
    };
    assert_eq!(advised(Vec::new(), 0), Err(HistoriesError::None));
    assert_eq!(problem(vec![one("")]), HistoryProblem::OneSize(2));
    let two = |settings: &str| made(4, settings, &[&[1, 40 * MIB]]);
    assert_eq!(
        problem(vec![one("expandable_segments:True"), two("expandable_segments:True, max_split_size_mb:64")]),
        HistoryProblem::Setting("max_split_size_mb".to_owned())
    );
    assert_eq!(problem(vec![one(""), two("backend:cudaMallocAsync")]), HistoryProblem::Setting("backend".to_owned()));
    assert_eq!(problem(vec![one(""), two("expandable_segments:True")]), HistoryProblem::Mixed);
    let harmless = vec![one("backend:native,pinned_use_cuda_host_register:True"), two("expandable_segments:False,")];
    assert!(advised(harmless, 0).is_ok());
    let longer = made(4, "", &[&[1, 40 * MIB], &[2, 40 * MIB]]);
    assert_eq!(problem(vec![one(""), longer]), HistoryProblem::Others(2, 4, 1, 2));
    let flat = |batch: u64| made(batch, "", &[&[1, 20 * MIB]]);
    assert_eq!(problem(vec![flat(2), flat(4)]), HistoryProblem::NoGrowth);
    let other = AllocationHistory { reserved_peak_bytes: 200 * MIB, ..two("") };
    let apart = HistoryProblem::Apart { batch_size: 4, observed: 200 * MIB, simulated: 140 * MIB };
    assert_eq!(problem(vec![one(""), other]), apart);
}

#[test]
fn sizes_follow_the_batch_as_they_did() {
    let sizes = |of: &[u64]| {
        let events: Vec<Vec<u64>> = of.iter().enumerate().map(|(nth, size)| vec![nth as u64, *size]).collect();
        events
    };
    let history = |batch: u64, of: &[u64]| {
        let events = sizes(of);
        let events: Vec<&[u64]> = events.iter().map(Vec::as_slice).collect();
        made(batch, "", &events)
    };
    // A scalar, a weight, an activation, a square of the batch, a size that is both, and work space.
    let small = history(2, &[4, 50 * MIB, 20 * MIB, 40 * MIB, 30 * MIB, 60 * MIB, 60 * MIB, 7_000_001]);
    let large = history(4, &[4, 50 * MIB, 40 * MIB, 160 * MIB, 60 * MIB, 60 * MIB, 9_000_001]);
    let growth = Growth::of(&small, &large);
    assert_eq!(growth.with(4, 400), 4);
    assert_eq!(growth.with(50 * MIB, 400), 50 * MIB);
    assert_eq!(growth.with(40 * MIB, 6), 60 * MIB);
    assert_eq!(growth.with(160 * MIB, 8), 640 * MIB, "the square");
    assert_eq!(growth.with(60 * MIB, 6), 60 * MIB, "as often as in the other");
    assert_eq!(growth.with(9_000_001, 6), 13_500_002, "rounded up");
    assert_eq!(growth.with(160 * MIB, u64::MAX), 1 << 60, "no overflow");
}

fn blocks(allocator: &mut SimulatedAllocator, sizes: &[u64]) -> Vec<usize> {
    sizes.iter().map(|size| allocator.allocate(0, *size).expect("room")).collect()
}

/// By the rules of PyTorch's allocator: what is reserved after these requests.
#[test]
fn segments_are_as_large_as_pytorchs() {
    for (sizes, reserved) in [
        (&[1, 512, MIB - 2048][..], 2 * MIB),
        (&[MIB, MIB], 2 * MIB),
        (&[MIB + 1], 20 * MIB),
        // The rest of the segment serves the second, and then too little is left for the third.
        (&[9 * MIB, 9 * MIB, 3 * MIB], 40 * MIB),
        (&[10 * MIB], 10 * MIB),
        (&[10 * MIB + 1], 12 * MIB),
    ] {
        let mut allocator = SimulatedAllocator::new(false, GIB);
        blocks(&mut allocator, sizes);
        assert_eq!(allocator.peaks().reserved, reserved, "{sizes:?}");
    }
    // A rest of 1 MiB stays with its block, and counts as allocated.
    let mut allocator = SimulatedAllocator::new(false, GIB);
    blocks(&mut allocator, &[19 * MIB, 512]);
    assert_eq!(allocator.peaks(), AllocatorPeaks { reserved: 22 * MIB, allocated: 20 * MIB + 512 });
    let mut allocator = SimulatedAllocator::new(false, GIB);
    blocks(&mut allocator, &[19 * MIB - 512]);
    assert_eq!(allocator.peaks().allocated, 19 * MIB - 512, "a larger rest is a block of its own");
    let mut allocator = SimulatedAllocator::new(false, GIB);
    blocks(&mut allocator, &[9 * MIB, 10 * MIB]);
    assert_eq!(allocator.peaks(), AllocatorPeaks { reserved: 20 * MIB, allocated: 20 * MIB });
    // Pages of segments that grow.
    for (sizes, reserved) in [(&[1, MIB][..], 2 * MIB), (&[21 * MIB], 40 * MIB), (&[21 * MIB, 19 * MIB], 40 * MIB)] {
        let mut allocator = SimulatedAllocator::new(true, GIB);
        blocks(&mut allocator, sizes);
        assert_eq!(allocator.peaks().reserved, reserved, "{sizes:?}");
    }
}

#[test]
fn the_smallest_block_that_fits_is_taken_and_neighbours_are_joined() {
    let mut allocator = SimulatedAllocator::new(false, GIB);
    let held = blocks(&mut allocator, &[40 * MIB, 30 * MIB]);
    held.into_iter().for_each(|block| allocator.free(block));
    blocks(&mut allocator, &[25 * MIB, 35 * MIB]);
    assert_eq!(allocator.peaks().reserved, 70 * MIB, "each in its own");
    let mut allocator = SimulatedAllocator::new(false, GIB);
    let held = blocks(&mut allocator, &[60 * MIB]);
    held.into_iter().for_each(|block| allocator.free(block));
    let parts = blocks(&mut allocator, &[20 * MIB, 20 * MIB, 20 * MIB]);
    for nth in [0, 2, 1] {
        allocator.free(parts[nth]);
    }
    blocks(&mut allocator, &[60 * MIB]);
    assert_eq!(allocator.peaks().reserved, 60 * MIB);
}

/// A segment of fixed size is given back only as a whole. A segment that grows gives back each page that is free.
#[test]
fn what_is_free_is_given_back_before_memory_is_out() {
    let mut allocator = SimulatedAllocator::new(false, 100 * MIB);
    let held = blocks(&mut allocator, &[60 * MIB]);
    allocator.free(held[0]);
    blocks(&mut allocator, &[100 * MIB]);
    assert_eq!(allocator.allocate(0, 1), Err(OutOfMemory));
    let mut allocator = SimulatedAllocator::new(false, 100 * MIB);
    let held = blocks(&mut allocator, &[60 * MIB]);
    allocator.free(held[0]);
    blocks(&mut allocator, &[2 * MIB]);
    assert_eq!(allocator.allocate(0, 80 * MIB), Err(OutOfMemory), "a part of its only segment is taken");
    let mut allocator = SimulatedAllocator::new(true, 100 * MIB);
    let held = blocks(&mut allocator, &[20 * MIB, 40 * MIB, 20 * MIB]);
    allocator.free(held[1]);
    blocks(&mut allocator, &[60 * MIB]);
    assert_eq!(allocator.peaks(), AllocatorPeaks { reserved: 100 * MIB, allocated: 100 * MIB });
    // Other streams have other blocks.
    let mut allocator = SimulatedAllocator::new(false, 100 * MIB);
    let held = blocks(&mut allocator, &[60 * MIB]);
    allocator.free(held[0]);
    allocator.allocate(1, 40 * MIB).expect("room");
    assert_eq!(allocator.peaks().reserved, 100 * MIB);
}

#[test]
fn files_that_contradict_themselves_are_refused() {
    let good = json!({"highwater_allocations": 1, "rank": 0, "batch_size": 2, "steps": 1, "settings": "", "total_bytes": 1,
        "outside_bytes": 0, "reserved_peak_bytes": 1, "events": [[1, 5, 0], [1]],
        "segments": [{"stream": 0, "is_small": true, "is_expandable": false, "address": 64, "blocks": [[5, true], [7, false]]}]});
    assert!(written(&good).is_ok());
    for (member, value, because) in [
        ("highwater_allocations", json!(2), "it is of version 2 of its form, and version 1 is known"),
        ("batch_size", json!(0), "its batch size is 0"),
        ("settings", json!("a".repeat(5_000)), "its settings are too long"),
        ("events", json!([[9]]), "its entry 0 releases an address that is not taken"),
        ("events", json!([[1, 5, 0], [1, 5, 0]]), "its entry 1 requests an address that is taken"),
        ("events", json!([[64, 5, 0]]), "its entry 0 requests an address that is taken"),
        ("events", json!([[1, u64::MAX, 0]]), "it has a size or an address of 18446744073709551615"),
        ("events", json!([[]]), "an entry has no address"),
        ("events", json!([[1, 5]]), "releases an address that is not taken"),
        ("events", json!(7), "something in it is of another form than what is read"),
        ("rank", json!(-1), "something in it is of another form than what is read"),
    ] {
        let mut bad = good.clone();
        bad[member] = value;
        let problem = written(&bad).expect_err(because);
        assert!(problem.contains(because), "{problem}");
    }
}

/// Sizes as jobs have them, and at the borders of the rules.
fn any_size() -> impl Strategy<Value = u64> {
    prop_oneof![1..4 * KIB, 1..MIB + 2, MIB..12 * MIB, 8 * MIB..64 * MIB]
}

proptest! {
    /// Whatever is asked for and given back: the sums are right, no two blocks overlap, the limit holds, and in the end all is free
    /// again.
    #[test]
    fn blocks_never_overlap_and_sums_are_right(
        is_expandable in any::<bool>(), limit in 1_u64..400,
        steps in prop::collection::vec((any_size(), 0_u64..2, any::<prop::sample::Index>(), any::<bool>()), 1..200),
    ) {
        let limit = limit * MIB;
        let mut allocator = SimulatedAllocator::new(is_expandable, limit);
        let mut taken: Vec<usize> = Vec::new();
        for (size, stream, which, is_release) in steps {
            if is_release && !taken.is_empty() {
                allocator.free(taken.swap_remove(which.index(taken.len())));
            } else if let Ok(block) = allocator.allocate(stream, size) {
                prop_assert!(!taken.contains(&block));
                taken.push(block);
                let mut spans: Vec<(u64, u64)> = taken.iter().map(|nth| allocator.span(*nth)).collect();
                prop_assert!(spans.iter().all(|(begin, end)| begin < end));
                prop_assert!(allocator.span(block).1 - allocator.span(block).0 >= size);
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|two| two[0].1 <= two[1].0));
            }
            let sum: u64 = taken.iter().map(|nth| allocator.span(*nth)).map(|(begin, end)| end - begin).sum();
            prop_assert_eq!(allocator.now().allocated, sum);
            prop_assert!(sum <= allocator.now().reserved && allocator.now().reserved <= limit);
        }
        taken.into_iter().for_each(|block| allocator.free(block));
        // More than there can be: everything is given back before this fails.
        prop_assert_eq!(allocator.allocate(0, limit + 1), Err(OutOfMemory));
        prop_assert_eq!(allocator.now(), AllocatorPeaks::default());
    }

    /// Whatever a file has, it is refused or simulated.
    #[test]
    fn anything_may_be_in_a_file(
        blocks in prop::collection::vec((any::<u64>(), any::<bool>()), 0..5),
        events in prop::collection::vec(prop::collection::vec(any::<u64>(), 1..4), 0..20),
        address in any::<u64>(), batch in any::<u64>(), flags in any::<(bool, bool, bool)>(),
    ) {
        let settings = if flags.2 { "expandable_segments:True" } else { "" };
        let whole = json!({"highwater_allocations": 1, "rank": 0, "batch_size": batch, "steps": 3, "settings": settings,
            "total_bytes": u64::MAX, "outside_bytes": 0, "reserved_peak_bytes": batch, "events": events,
            "segments": [{"stream": 0, "is_small": flags.0, "is_expandable": flags.1, "address": address, "blocks": blocks}]});
        if let Ok(history) = written(&whole) {
            let other = AllocationHistory { batch_size: 1, ..history.clone() };
            let _ = advised(vec![history, other], 0);
        }
    }
}
