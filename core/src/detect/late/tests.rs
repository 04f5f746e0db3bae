use super::super::compare::Compare;
use super::super::finding::{Certainty, seconds};
use super::super::hand::Hand;
use super::super::hosts::HostWaits;
use super::super::steps::{Phase, Step};
use super::super::view::median_of_others;
use super::*;
use crate::clock::MILLISECOND_NS;
use crate::gpu::{Activity, Medium};
use crate::mesh::Mesh;

/// Each rank's phases in milliseconds, and what its GPU does: tensor cores, busy; or [`THROTTLED`] for busy with clocks that
/// are held back.
type Does<'a> = (&'a [(&'a str, i64)], f64, f64);

/// Runs steps of 130 ms and returns the signs, each with its step.
fn run(
    hand: &mut Hand,
    detector: &mut Compare,
    steps: std::ops::Range<u64>,
    of: impl Fn(u64) -> Vec<Does<'static>>,
) -> Vec<Sign> {
    run_of(130, hand, detector, steps, of)
}

fn run_of(
    step_ms: i64,
    hand: &mut Hand,
    detector: &mut Compare,
    steps: std::ops::Range<u64>,
    of: impl Fn(u64) -> Vec<Does<'static>>,
) -> Vec<Sign> {
    let mut signs = Vec::new();
    for nth in steps {
        let (begin_ns, does) = (hand.now_ns.max(SECOND_NS), of(nth));
        for (gpu, (_, tensor, busy)) in does.iter().enumerate() {
            let activity = Activity { tensor_active_ratio: Some(*tensor), ..Activity::default() };
            let throttle_reasons = (*busy > 1.0).then_some(0x80);
            let medium =
                Medium { utilization_ratio: Some(busy.min(1.0)), throttle_reasons, activity, ..Medium::default() };
            hand.gpus[gpu].set_medium(begin_ns, medium);
        }
        hand.now_ns = begin_ns;
        hand.look(detector);
        let steps = does.iter().enumerate().map(|(rank, (phases, ..))| {
            let step = Hand::step(rank, nth, begin_ns, phases);
            Step { end_ns: begin_ns + step_ms * MILLISECOND_NS, ..step }
        });
        signs.extend(hand.steps_end(detector, steps.collect()));
    }
    signs
}

/// Always busy, with clocks that are held back.
const THROTTLED: f64 = 2.0;
const EQUAL: &[(&str, i64)] = &[("data", 2), ("forward", 22), ("backward", 88), ("optimizer", 12)];
const LATE_FORWARD: &[(&str, i64)] = &[("data", 2), ("forward", 47), ("backward", 66), ("optimizer", 12)];
const LATE_DATA: &[(&str, i64)] = &[("data", 30), ("forward", 22), ("backward", 61), ("optimizer", 12)];

fn ranks(signs: &[Sign]) -> Vec<u32> {
    let mut ranks: Vec<u32> = signs.iter().filter_map(|sign| sign.subject.rank).collect();
    ranks.dedup();
    ranks
}

#[test]
fn a_phase_that_the_peers_wait_for_later_names_its_rank_by_the_marks_alone() {
    for (late, why) in [(LATE_FORWARD, "takes 25 ms longer in forward"), (LATE_DATA, "waits 28 ms longer for data")] {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let signs = run(&mut hand, &mut detector, 0..30, |_| vec![(EQUAL, 0.0, 0.0), (late, 0.0, 0.0)]);
        assert_eq!(ranks(&signs), [1]);
        assert_eq!((signs[0].step, signs[0].certainty), (Some(7), Certainty::Observed), "five steps after the warm-up");
        assert!(signs[0].text.what.contains(why), "{}", signs[0].text.what);
        assert!(signs[0].text.why.contains("more in backward"), "{}", signs[0].text.why);
        let lag_ms = if late == LATE_FORWARD { 25 } else { 28 };
        assert_eq!(signs[0].lost_ns, Some(5 * lag_ms * MILLISECOND_NS), "by its one peer, since it began");
        assert_eq!(signs[0].begin_ns, SECOND_NS + 3 * 130 * MILLISECOND_NS, "the first after the warm-up");
        assert!(Hand::ratios(&detector, 1).compute_lag.is_some_and(|ratio| (1.2..1.3).contains(&ratio)));
        assert_eq!(Hand::ratios(&detector, 0).compute_lag, None);
    }
}

#[test]
fn a_lag_by_the_gpus_holds_until_the_next_block_and_its_first_sign_counts_all_blocks_before_it() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let signs = run(&mut hand, &mut detector, 0..33, |_| vec![(EQUAL, 0.3, 1.0), (EQUAL, 0.5, 1.0)]);
    let lost_ms = |sign: &Sign| sign.lost_ns.map(|lost_ns| lost_ns / MILLISECOND_NS);
    // Two blocks of ten steps, each longer by up to two fifths of 130 ms, and one more.
    assert_eq!(signs.iter().map(lost_ms).collect::<Vec<_>>(), [Some(1040), Some(520)]);
    assert!(Hand::ratios(&detector, 1).compute_lag.is_some_and(|ratio| ratio > 1.6), "amid a block");
    assert_eq!(Hand::ratios(&detector, 0).compute_lag, None);
    run(&mut hand, &mut detector, 33..60, |_| vec![(EQUAL, 0.3, 1.0), (EQUAL, 0.3, 1.0)]);
    assert_eq!(Hand::ratios(&detector, 1).compute_lag, None);
}

/// Steps of two ranks with a collective each, which begins after this many milliseconds and ends after 110. `sees` is whether
/// the GPUs have readings.
fn beside(of: [(&'static [(&'static str, i64)], i64); 2], sees: bool) -> Vec<Sign> {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let mut signs = Vec::new();
    for nth in 0..30 {
        let begin_ns = i64::try_from(nth).expect("small") * SECOND_NS;
        for gpu in hand.gpus.iter().filter(|_| sees) {
            let activity = Activity { tensor_active_ratio: Some(0.03), ..Activity::default() };
            gpu.set_medium(begin_ns, Medium { utilization_ratio: Some(1.0), activity, ..Medium::default() });
        }
        let steps = of.into_iter().enumerate().map(|(rank, (phases, from_ms))| {
            let mut step = Hand::step(rank, nth, begin_ns, phases);
            let (from_ns, to_ns) = (begin_ns + from_ms * MILLISECOND_NS, begin_ns + 110 * MILLISECOND_NS);
            let name = "comm".into();
            step.phases.push(Phase { name, begin_ns: from_ns, end_ns: to_ns, retries: [None; 2] });
            step
        });
        signs.extend(hand.steps_end(&mut detector, steps.collect()));
    }
    signs
}

/// The host of rank 1 is late by 40 of 130 ms, of which its garbage collector takes this long, and that of its peer this long.
fn collects(own_ms: i64, peers_ms: i64) -> Vec<String> {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let mut signs = Vec::new();
    for nth in 0..60 {
        let begin_ns = hand.now_ns.max(SECOND_NS);
        for (gpu, busy) in hand.gpus.iter().zip([1.0, 0.7]) {
            let activity = Activity { tensor_active_ratio: Some(0.3), ..Activity::default() };
            gpu.set_medium(begin_ns, Medium { utilization_ratio: Some(busy), activity, ..Medium::default() });
        }
        hand.now_ns = begin_ns;
        hand.look(&mut detector);
        let steps = [peers_ms, own_ms].into_iter().enumerate().map(|(rank, ms)| {
            let step = Hand::step(rank, nth, begin_ns, &[("forward", 40), ("backward", 70), ("optimizer", 20)]);
            Step { collected_ns: Some(ms * MILLISECOND_NS), ..step }
        });
        signs.extend(hand.steps_end(&mut detector, steps.collect()));
    }
    assert!(!signs.is_empty() && signs.iter().all(|sign| sign.subject.rank == Some(1)), "{signs:?}");
    let has_evidence = |sign: &Sign| sign.evidence.iter().any(|evidence| evidence.name == "gc_seconds");
    assert!(signs.iter().all(|sign| has_evidence(sign) == sign.text.what.contains("collector")), "{signs:?}");
    let mut said: Vec<String> = signs.into_iter().map(|sign| sign.text.what).collect();
    said.dedup();
    said
}

#[test]
fn the_garbage_collector_is_named_if_it_takes_half_of_the_lag_longer_than_that_of_the_others() {
    let collector = |ms: u32| {
        format!(
            "Python's garbage collector stops rank 1 of j for {ms} ms a step longer than the other ranks, which wait for it."
        )
    };
    assert_eq!(collects(30, 5), [collector(25)]);
    assert_eq!(collects(25, 5), [collector(20)]);
    for (own_ms, peers_ms) in [(18, 0), (60, 45), (0, 0)] {
        let said = collects(own_ms, peers_ms);
        assert!(said.iter().all(|what| what.starts_with("The host of rank 1")), "{own_ms}, {peers_ms}: {said:?}");
    }
}

#[test]
fn a_phase_that_is_longer_by_the_garbage_collector_is_named_so() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let mut signs = Vec::new();
    for nth in 0..30 {
        let begin_ns = i64::try_from(nth).expect("small") * SECOND_NS;
        let steps = [(EQUAL, None), (LATE_FORWARD, Some(15 * MILLISECOND_NS))].into_iter().enumerate();
        let steps = steps
            .map(|(rank, (phases, collected_ns))| Step { collected_ns, ..Hand::step(rank, nth, begin_ns, phases) });
        signs.extend(hand.steps_end(&mut detector, steps.collect()));
    }
    assert!(!signs.is_empty() && ranks(&signs) == [1]);
    assert!(signs.iter().all(|sign| sign.text.what.contains("garbage collector")), "{signs:?}");
    assert!(signs.iter().all(|sign| sign.text.why.contains("its forward took")), "{signs:?}");
}

/// The marks of `watch` under DDP and FSDP2: what is left of a rank's phases beside its collectives is chance.
#[test]
fn communication_that_runs_beside_the_work_neither_names_a_rank_nor_hides_one() {
    for (late, expected) in [(EQUAL, vec![]), (LATE_FORWARD, vec![1])] {
        let signs = beside([(EQUAL, 10), (late, 75)], true);
        assert_eq!(ranks(&signs), expected);
        assert!(signs.iter().all(|sign| sign.text.what.contains("takes 25 ms longer in forward")), "{signs:?}");
    }
    // In two phases also where nothing else is known, as of older GPUs: then nobody is named by what is left.
    assert_eq!(ranks(&beside([(EQUAL, 2), (EQUAL, 20)], false)), [0_u32; 0]);
}

/// DDP, late in the backward pass, where nothing is known of the GPUs: the late rank comes to the collective last.
#[test]
fn communication_in_one_phase_shows_who_comes_last_where_nothing_else_does() {
    assert_eq!(ranks(&beside([(EQUAL, 30), (EQUAL, 90)], false)), [1]);
    assert_eq!(ranks(&beside([(EQUAL, 30), (EQUAL, 30)], false)), [0_u32; 0]);
}

/// The host of each rank runs ahead of its GPU, and waits for it after its last phase.
#[test]
fn peers_may_wait_after_their_last_phase() {
    const AHEAD: &[(&str, i64)] = &[("data", 2), ("forward", 10), ("backward", 20), ("optimizer", 5)];
    const LATE: &[(&str, i64)] = &[("data", 42), ("forward", 10), ("backward", 20), ("optimizer", 5)];
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let signs = run(&mut hand, &mut detector, 0..20, |_| vec![(AHEAD, 0.0, 0.0), (LATE, 0.0, 0.0)]);
    assert_eq!(ranks(&signs), [1]);
    assert!(signs[0].text.what.contains("waits 40 ms longer for data"), "{}", signs[0].text.what);
    assert!(signs[0].text.why.contains("40 ms more in unmarked time"), "{}", signs[0].text.why);
    // Its GPU idles for that reason, and says so of the host alone; the marks know better.
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let signs = run(&mut hand, &mut detector, 0..40, |nth| {
        let is_late = nth < 25;
        vec![(AHEAD, 0.03, 1.0), (if is_late { LATE } else { AHEAD }, 0.03, 0.6)]
    });
    assert!(signs.iter().all(|sign| sign.text.what.contains("for data")) && signs.len() > 15, "{signs:?}");
    // In which phase such a host is held up says nothing.
    const HELD: &[(&str, i64)] = &[("data", 2), ("forward", 10), ("backward", 60), ("optimizer", 5)];
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    assert!(run(&mut hand, &mut detector, 0..20, |_| vec![(AHEAD, 0.0, 0.0), (HELD, 0.0, 0.0)]).is_empty());
}

/// The peer waits for it in backward of the next step, so that the peer's backward is longer.
#[test]
fn who_waits_in_a_phase_is_not_late_in_it() {
    const LATE_END: &[(&str, i64)] = &[("data", 2), ("forward", 22), ("backward", 68), ("optimizer", 37)];
    const WAITS: &[(&str, i64)] = &[("data", 2), ("forward", 22), ("backward", 93), ("optimizer", 12)];
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let mut signs = Vec::new();
    for nth in 0..20 {
        let begin_ns = SECOND_NS + nth * 130 * MILLISECOND_NS;
        let early = Hand::step(1, nth.unsigned_abs(), begin_ns - 25 * MILLISECOND_NS, WAITS);
        signs.extend(hand.steps_end(&mut detector, vec![Hand::step(0, nth.unsigned_abs(), begin_ns, LATE_END), early]));
    }
    assert!(signs.is_empty(), "{signs:?}");
}

#[test]
fn steps_that_differ_in_length_need_more_blocks() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let mut first = None;
    for nth in 0..100 {
        let of = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.06, 1.0)];
        let signs = run_of(if nth % 2 == 0 { 125 } else { 250 }, &mut hand, &mut detector, nth..nth + 1, of);
        first = first.or_else(|| signs.first().and_then(|sign| sign.step));
    }
    assert_eq!(first, Some(52), "five blocks after the warm-up");
}

/// As a checkpoint every ten steps that nothing marks.
#[test]
fn a_host_that_stops_in_few_steps_is_not_late_in_each() {
    let named = |busy: f64, stops: fn(u64) -> bool| {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let mut signs = Vec::new();
        for nth in 0..80 {
            let (step_ms, own) = if stops(nth) { (700, 0.0) } else { (130, busy) };
            let of = |_| vec![(EQUAL, 0.03, 0.95), (EQUAL, 0.03, own)];
            signs.extend(run_of(step_ms, &mut hand, &mut detector, nth..nth + 1, of));
        }
        ranks(&signs)
    };
    assert_eq!(named(0.95, |nth| nth % 10 == 5), Vec::<u32>::new());
    assert_eq!(named(0.6, |nth| nth % 10 == 5), [1], "late in the others too");
    assert_eq!(named(0.95, |nth| nth % 3 == 1), [1], "one in three is not rare");
}

#[test]
fn the_median_of_the_others_leaves_one_value_out() {
    let of = |sorted: &[i64], own| median_of_others(sorted, own);
    assert_eq!([of(&[1, 5], 1), of(&[1, 5], 5), of(&[7], 7), of(&[], 7)], [Some(5), Some(1), None, None]);
    assert_eq!([1, 2, 3].map(|own| of(&[1, 2, 3], own)), [Some(2), Some(1), Some(1)]);
    assert_eq!([1, 2, 3, 9].map(|own| of(&[1, 2, 3, 9], own)), [3, 3, 2, 2].map(Some));
    assert_eq!(of(&[4, 4, 4], 4), Some(4));
}

#[test]
fn what_it_costs_is_bounded_by_what_steps_took_before() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let cost = |signs: &[Sign]| signs.last().map(|sign| sign.evidence[0].value);
    let lost_s = |signs: &[Sign]| signs.last().and_then(|sign| sign.lost_ns).map(seconds);
    let late = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.06, 1.0)];
    assert_eq!(cost(&run(&mut hand, &mut detector, 0..40, late)), Some(0.065), "half of the step at most");
    // Steps of 130 ms that had taken 100.
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    run_of(100, &mut hand, &mut detector, 0..30, |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.03, 1.0)]);
    let signs = run(&mut hand, &mut detector, 30..70, late);
    assert!(cost(&signs).is_some_and(|cost| (0.03..0.035).contains(&cost)), "{:?}", cost(&signs));
    assert!(lost_s(&signs).is_some_and(|lost| (0.3..0.35).contains(&lost)), "ten steps: {:?}", lost_s(&signs));
}

#[test]
fn where_the_marks_are_equal_the_gpus_name_the_rank_and_why() {
    let cases = [
        ((0.0325, 0.95), (0.0516, 0.93), Some("computes longer than the other ranks")),
        ((0.0209, 0.97), (0.0216, 0.49), Some("The host of rank 1 of j is late")),
        ((0.0436, 0.95), (0.0459, 0.98), None),
    ];
    for (first, second, why) in cases {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let of = |_| vec![(EQUAL, first.0, first.1), (EQUAL, second.0, second.1)];
        let signs = run(&mut hand, &mut detector, 0..33, of);
        assert_eq!(ranks(&signs), why.map_or(vec![], |_| vec![1]), "{why:?}");
        let Some(why) = why else { continue };
        assert_eq!(
            (signs[0].step, signs[0].certainty),
            (Some(22), Certainty::Suspected),
            "two blocks after the warm-up"
        );
        assert_eq!(signs[0].begin_ns, SECOND_NS + 3 * 130 * MILLISECOND_NS, "since the first of them");
        assert!(signs[0].text.what.contains(why), "{}", signs[0].text.what);
    }
}

#[test]
fn a_phase_that_is_longer_gets_its_cause_from_the_gpus() {
    let cases = [
        ((0.03, 1.0), None, "which wait for it."),
        ((0.05, 1.0), Some(LagCause::Computes), "which wait for it: it computes longer."),
        ((0.05, THROTTLED), Some(LagCause::Clocks), "which wait for it: its GPU's clocks are held back."),
        ((0.03, 0.5), Some(LagCause::Host), "which wait for it: its host is late, and its GPU has nothing to do."),
    ];
    for ((tensor, busy), cause, end) in cases {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let signs = run(&mut hand, &mut detector, 0..33, |_| vec![(EQUAL, 0.03, 1.0), (LATE_FORWARD, tensor, busy)]);
        let last = signs.last().expect("a sign");
        assert_eq!((signs[0].lag_cause, last.lag_cause), (None, cause), "not before the first block");
        assert!(last.text.what.contains("longer in forward") && last.text.what.ends_with(end), "{}", last.text.what);
        // Late data are a cause of their own.
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let signs = run(&mut hand, &mut detector, 0..33, |_| vec![(EQUAL, 0.03, 1.0), (LATE_DATA, tensor, busy)]);
        assert!(signs.iter().all(|sign| sign.lag_cause == Some(LagCause::Data)), "{signs:?}");
    }
}

#[test]
fn what_its_process_waits_for_is_why_a_host_is_late_if_it_waits_for_half_of_the_lag() {
    let waits = |nth: u64, percent: u64, limited: bool, storage: u64| {
        let of = |percent: u64| Some(nth * 130_000_000 * percent / 100);
        let limited_ns = if limited { of(percent) } else { Some(0) };
        HostWaits { cpu_ns: of(percent), limited_ns, storage_ns: of(storage), ..HostWaits::default() }
    };
    // The lag is 0.4 of a step.
    let cases = [
        ((25, false, 3), Some(LagCause::Cpu), "its process waits for a CPU for 25 % of the time."),
        ((25, true, 3), Some(LagCause::CpuLimit), "reached its CPU limit, and its process waits for 25 % of the time."),
        ((25, false, 30), Some(LagCause::Storage), "its container waits for storage for 30 % of the time."),
        ((15, false, 15), Some(LagCause::Host), "is late: its GPU has nothing to do"),
    ];
    for ((cpu, limited, storage), cause, words) in cases {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        hand.ranks[1].pid = Some(77);
        let (mut asked, mut signs) = (Vec::new(), Vec::new());
        for nth in 0..60 {
            let does = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.03, 0.6)];
            signs.extend(run(&mut hand, &mut detector, nth..nth + 1, does));
            for (key, pid) in hand.hosts.wanted(hand.now_ns) {
                hand.hosts.note(&key, HostWaits { at_ns: hand.now_ns, ..waits(nth, cpu, limited, storage) });
                asked.push((nth, key.1, pid));
            }
        }
        assert_eq!(asked[0], (12, 1, 77), "after the first block that shows it");
        let last = signs.last().expect("a sign");
        assert_eq!(last.lag_cause, cause);
        assert!(last.text.what.contains(words), "{}", last.text.what);
        let value = |name| last.evidence.iter().find(|evidence| evidence.name == name).map(|evidence| evidence.value);
        assert!(value("cpu_wait_ratio").is_some_and(|ratio| (100.0 * ratio - cpu as f64).abs() < 0.01));
        assert_eq!(value("memory_stall_ratio"), None, "what is not known is no number");
    }
}

#[test]
fn an_interrupted_block_does_not_begin_anew_and_another_cause_is_named_within_four_blocks() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let of = |tensor, busy| move |_: u64| vec![(EQUAL, 0.03, 1.0), (EQUAL, tensor, busy)];
    let causes = |signs: &[Sign]| signs.iter().map(|sign| sign.lag_cause).collect::<Vec<_>>();
    run(&mut hand, &mut detector, 0..3, of(0.03, 1.0));
    assert!(run(&mut hand, &mut detector, 3..13, of(0.05, 1.0)).is_empty(), "one block");
    assert!(run(&mut hand, &mut detector, 13..23, of(0.05, 0.6)).is_empty(), "another cause");
    let signs = run(&mut hand, &mut detector, 23..43, of(0.05, 1.0));
    assert_eq!(causes(&signs), [Some(LagCause::Computes); 2]);
    assert_eq!(signs[0].begin_ns, SECOND_NS + 3 * 130 * MILLISECOND_NS, "since the first of them");
    run(&mut hand, &mut detector, 43..1043, of(0.05, 1.0));
    let signs = run(&mut hand, &mut detector, 1043..1083, of(0.03, 0.6));
    assert_eq!(causes(&signs).last(), Some(&Some(LagCause::Host)));
}

#[test]
fn a_block_in_which_two_ranks_are_late_neither_ends_a_run_nor_is_a_healthy_one() {
    let both = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.05, 1.0), (EQUAL, 0.05, 1.0)];
    let one = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.06, 1.0), (EQUAL, 0.03, 1.0)];
    let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
    run(&mut hand, &mut detector, 0..13, one);
    assert!(run(&mut hand, &mut detector, 13..23, both).is_empty());
    let signs = run(&mut hand, &mut detector, 23..33, one);
    assert_eq!((ranks(&signs), signs[0].begin_ns), (vec![1], SECOND_NS + 3 * 130 * MILLISECOND_NS));
    // But not for long.
    let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
    run(&mut hand, &mut detector, 0..13, one);
    run(&mut hand, &mut detector, 13..73, both);
    assert!(run(&mut hand, &mut detector, 73..83, one).is_empty(), "one block");
    // Steps of 130 ms that had taken 100.
    let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
    run_of(100, &mut hand, &mut detector, 0..30, |_| vec![(EQUAL, 0.03, 1.0); 3]);
    run(&mut hand, &mut detector, 30..120, both);
    let signs = run(&mut hand, &mut detector, 120..160, one);
    assert!(signs.last().is_some_and(|sign| (0.03..0.035).contains(&sign.evidence[0].value)), "{signs:?}");
}

/// What the GPUs showed before a rank was late in a phase is not why it is.
#[test]
fn a_block_from_before_the_lag_explains_nothing() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    run(&mut hand, &mut detector, 0..23, |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.03, 0.5)]);
    let signs = run(&mut hand, &mut detector, 23..31, |_| vec![(EQUAL, 0.03, 1.0), (LATE_FORWARD, 0.03, 1.0)]);
    let by_marks = signs.iter().filter(|sign| sign.text.what.contains("forward"));
    assert!(by_marks.clone().count() > 0 && by_marks.clone().all(|sign| sign.lag_cause.is_none()), "{signs:?}");
}

#[test]
fn clocks_that_are_held_back_are_the_reason_where_they_are() {
    let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
    let of = |_| vec![(EQUAL, 0.03, 1.0), (EQUAL, 0.05, THROTTLED)];
    let signs = run(&mut hand, &mut detector, 0..33, of);
    assert!(signs[0].text.what.contains("clocks are held back"), "{}", signs[0].text.what);
}

#[test]
fn who_lags_in_turn_and_two_at_once_are_not_named() {
    let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
    let in_turn = |nth: u64| {
        let late = usize::try_from(nth % 3).expect("small");
        (0..3).map(|rank| if rank == late { (LATE_FORWARD, 0.05, 1.0) } else { (EQUAL, 0.04, 1.0) }).collect()
    };
    assert!(run(&mut hand, &mut detector, 0..60, in_turn).is_empty());
    let both = |_| vec![(EQUAL, 0.03, 1.0), (LATE_FORWARD, 0.05, 1.0), (LATE_FORWARD, 0.05, 1.0)];
    let (mut hand, mut detector) = (Hand::with_ranks(3), Compare::default());
    assert!(run(&mut hand, &mut detector, 0..40, both).is_empty());
}

#[test]
fn what_may_be_a_pipeline_and_what_does_something_else_is_not_compared() {
    let with = |phases: &'static [(&'static str, i64)], mesh: Option<&str>| {
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        for (rank, now) in hand.ranks.iter_mut().enumerate() {
            let axes = mesh.map(|name| {
                Mesh::checked([(name.to_owned(), u32::try_from(rank).expect("small"))].into()).expect("a mesh")
            });
            now.mesh = axes.map(Arc::new);
        }
        let of = |_| vec![(phases, 0.03, 1.0), (phases, 0.05, 1.0)];
        run(&mut hand, &mut detector, 0..40, of).len()
    };
    const ROUNDS: &[(&str, i64)] = &[("forward", 20), ("backward", 40), ("forward", 20), ("backward", 40)];
    const SAVES: &[(&str, i64)] = &[("forward", 20), ("backward", 40), ("checkpoint", 60)];
    assert!(with(EQUAL, None) > 0 && with(ROUNDS, Some("dp")) > 0);
    assert_eq!((with(ROUNDS, None), with(EQUAL, Some("pp")), with(SAVES, None)), (0, 0, 0));
}
