//! Tests of what the comparison of several ranks reports.

use super::story::trace;
use crate::timeline::{Kind, RankShare, Ranks, RanksError, compare};

/// Two ranks whose clocks began 100 µs apart.
fn compared(first: &str, second: &str) -> Ranks {
    compare(&[&trace(Some(0), 0, first), &trace(Some(100_000), 1, second)]).expect("two ranks")
}

/// In microseconds: total, waiting, transfer, times last, made others wait.
fn share(share: &RankShare) -> [Option<u64>; 5] {
    let us = |ns: Option<u64>| ns.map(|ns| ns / 1_000);
    [
        us(Some(share.total_ns)),
        us(share.waiting_ns),
        us(share.transfer_ns),
        share.times_last,
        us(share.made_others_wait_ns),
    ]
}

#[test]
fn a_rank_waits_until_the_last_one_begins() {
    let ranks = compared(
        "nccl AllReduce 200..260 group 0 seq 1 bytes 1000 of 2
         nccl AllReduce 300..311 group 0 seq 2 bytes 1000 of 2",
        "nccl AllReduce 150..161 group 0 seq 1 bytes 1000 of 2
         nccl AllReduce 199..210 group 0 seq 2 bytes 1000 of 2",
    );
    assert_eq!((ranks.matched, ranks.matched_by_sequence, ranks.unmatched), (2, 2, 0));
    assert_eq!(share(&ranks.ranks[0]), [Some(71), Some(50), Some(10 + 11), Some(1), Some(1)]);
    assert_eq!(share(&ranks.ranks[1]), [Some(22), Some(1), Some(11 + 10), Some(1), Some(50)]);
    assert_eq!((ranks.most_often_last, ranks.most_waited_for), (Some(1), Some(1)));
    let kind = &ranks.kinds[0];
    assert_eq!((kind.kind, kind.count, kind.transfer_ns), (Kind::AllReduce, 2, 22_000));
    let rate = 2_000.0 / 22e-6;
    assert!((kind.algorithm_bytes_per_second.expect("known") / rate - 1.0).abs() < 1e-9, "{kind:?}");
    assert!((kind.bus_bytes_per_second.expect("known") / rate - 1.0).abs() < 1e-9, "{kind:?}");
}

#[test]
fn sequence_numbers_match_whatever_part_of_the_job_was_traced() {
    let ranks = compared(
        "nccl AllReduce 200..210 group 0 seq 1 of 2
         nccl AllReduce 220..230 group 0 seq 2 of 2
         nccl AllReduce 240..260 group 1 seq 2 of 2",
        "nccl AllReduce 122..130 group 0 seq 2 of 2
         nccl AllReduce 145..160 group 0 seq 3 of 2",
    );
    assert_eq!((ranks.matched, ranks.unmatched), (1, 3));
    assert_eq!(share(&ranks.ranks[0]), [Some(10), Some(2), Some(8), Some(0), Some(0)]);
}

#[test]
fn without_them_the_order_matches_only_if_all_have_as_many_and_the_same() {
    let one = "nccl AllReduce 200..220 bytes 10\nnccl AllReduce 230..240 bytes 20\nnccl AllGather 250..260";
    let other = "nccl AllGather 150..160\nnccl AllReduce 110..120 bytes 10\nnccl AllReduce 132..140 bytes 20";
    let ranks = compared(one, other);
    assert_eq!((ranks.matched, ranks.matched_by_sequence, ranks.unmatched), (3, 0, 0));
    assert_eq!(share(&ranks.ranks[0])[1], Some(12));
    let ranks = compared(one, "nccl AllGather 150..160\nnccl AllReduce 132..140 bytes 20");
    assert_eq!((ranks.matched, ranks.unmatched), (1, 3));
    let ranks = compared(one, &other.replace("bytes 10", "bytes 11"));
    assert_eq!((ranks.matched, ranks.unmatched), (2, 2));
}

#[test]
fn steps_keep_the_order_apart() {
    let one =
        "step 1 0..300\nstep 2 300..400\nnccl AllReduce 200..220 launched 5\nnccl AllReduce 330..340 launched 310";
    // The trace of this rank began with step 2.
    let other = "step 2 200..300\nnccl AllReduce 231..240 launched 210";
    let ranks = compared(one, other);
    assert_eq!((ranks.matched, ranks.unmatched), (1, 1));
    assert_eq!(share(&ranks.ranks[0])[1..], [Some(1), Some(9), Some(0), Some(0)]);
}

#[test]
fn a_group_with_a_rank_whose_trace_is_missing_is_not_split() {
    let both = "nccl AllReduce 200..300 group 0 seq 1 of 3";
    let ranks = compared(both, both);
    assert_eq!((ranks.matched, ranks.unmatched), (0, 2));
    assert_eq!((ranks.most_often_last, ranks.most_waited_for), (None, None));
}

#[test]
fn groups_of_the_same_name_and_other_ranks_are_not_the_same() {
    let of = |ranks| format!("nccl AllReduce 200..300 group 0 ranks {ranks} seq 1 of 2");
    let matched = |one, other| compared(&of(one), &of(other)).matched;
    assert_eq!((matched("[0,1]", "[0,1]"), matched("[0,1]", "[2,3]")), (1, 0));
}

#[test]
fn who_begins_at_the_same_time_is_not_late_and_an_end_at_the_begin_is_no_contradiction() {
    let ranks = compared("nccl AllReduce 200..210 group 0 seq 1 of 2", "nccl AllReduce 100..115 group 0 seq 1 of 2");
    assert_eq!((ranks.most_often_last, ranks.most_waited_for, ranks.kinds[0].transfer_ns), (None, None, 15_000));
    assert!(ranks.ranks.iter().all(|share| share.times_last == Some(0)));
    let ranks = compared("nccl AllReduce 200..210 group 0 seq 1 of 2", "nccl AllReduce 110..115 group 0 seq 1 of 2");
    assert_eq!((ranks.clocks.contradicting, ranks.most_waited_for), (0, Some(1)));
}

#[test]
fn what_does_not_wait_for_all_is_not_compared() {
    let ranks = compared("nccl Broadcast 200..220\nnccl SendRecv 230..240", "nccl Generic 100..120");
    assert_eq!((ranks.matched, ranks.unmatched, ranks.not_compared), (0, 0, 3));
    // Nothing was compared: that nobody waited is not known.
    assert_eq!(share(&ranks.ranks[0]), [Some(0), None, None, None, None]);
}

#[test]
fn several_kernels_of_one_collective_are_one() {
    let ranks = compared(
        "nccl AllToAll 200..210 group 0 seq 1 of 2\nnccl AllToAll 210..230 group 0 seq 1 of 2",
        "nccl AllToAll 105..130 group 0 seq 1 of 2",
    );
    assert_eq!(share(&ranks.ranks[0]), [Some(30), Some(5), Some(25), Some(0), Some(0)]);
}

#[test]
fn without_dates_nobody_was_late() {
    let both = "nccl AllReduce 200..260 group 0 seq 1 bytes 8 of 2";
    let ranks = compare(&[&trace(Some(0), 0, both), &trace(None, 1, both)]).expect("two ranks");
    assert!(!ranks.clocks.are_comparable && ranks.kinds.is_empty());
    let problem = ranks.clocks.problem.expect("why");
    assert!(problem.starts_with("the trace of rank 1 lacks `baseTimeNanoseconds`"), "{problem}");
    assert!(problem.ends_with("which rank was late is not known"), "{problem}");
    assert_eq!(share(&ranks.ranks[0]), [Some(60), None, None, None, None]);
    assert_eq!((ranks.matched, ranks.most_often_last, ranks.most_waited_for), (1, None, None));
}

#[test]
fn clocks_that_collectives_contradict_are_not_believed() {
    let many = |count: usize, begin: usize| -> String {
        let line =
            |nth| format!("nccl AllReduce {}..{} group 0 seq {nth}\n", begin + nth * 100, begin + nth * 100 + 10);
        (0..count).map(line).collect()
    };
    // One of eleven ended before the other rank began it: it is left out.
    let ranks = compared(&many(10, 1_100), &(many(9, 1_000) + "nccl AllReduce 1914..1925 group 0 seq 9"));
    assert_eq!((ranks.clocks.are_comparable, ranks.clocks.contradicting), (false, 1));
    let ranks = compared(&many(11, 1_100), &(many(10, 1_000) + "nccl AllReduce 2014..2025 group 0 seq 10"));
    assert_eq!((ranks.clocks.are_comparable, ranks.clocks.contradicting), (true, 1));
    assert_eq!(ranks.clocks.disagreement_ns, Some(4_000));
    assert_eq!(share(&ranks.ranks[0]), [Some(110), Some(0), Some(100), Some(0), Some(0)]);
    let ranks = compared(&many(10, 1_100), &many(10, 1_050));
    assert_eq!((ranks.clocks.are_comparable, ranks.clocks.contradicting), (false, 10));
    let problem = ranks.clocks.problem.expect("why");
    assert!(problem.starts_with("the clocks differ by at least 40000 ns"), "{problem}");
    assert_eq!(share(&ranks.ranks[1]), [Some(100), None, None, None, None]);
}

#[test]
fn traces_that_are_not_of_different_ranks_are_refused() {
    let one = || trace(None, 3, "nccl AllReduce 1..2");
    assert_eq!(compare(&[&one()]).err(), Some(RanksError::TooFew));
    assert_eq!(compare(&[&one(), &one()]).err(), Some(RanksError::SameRank(3)));
    let mut unknown = one();
    unknown.rank = None;
    assert_eq!(compare(&[&unknown, &one()]).err(), Some(RanksError::NoRank));
}
