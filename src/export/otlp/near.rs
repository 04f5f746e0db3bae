//! The times near findings, which decide which raw points are sent if `otlp.raw` is `findings`.
//!
//! Enters: when findings began and ended. Leaves: whether an instant or an interval lies within a margin of one.
//! Invariants: it takes time as an argument; it keeps only what still matters, and that is bounded. Absent on purpose:
//! what a finding is.

use std::collections::VecDeque;

/// How long before a finding begins, and after it ends, counts as near it.
pub const MARGIN_NS: i64 = 10 * highwater_core::clock::SECOND_NS;

/// The maximum number of separate stretches. Beyond it, the two oldest are merged with the time between them, so that too
/// much counts as near, never too little.
const MOST: usize = 256;

/// Times near findings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Near {
    /// Begin and end of each stretch, margins included, nanoseconds; in order, and disjoint.
    stretches: VecDeque<(i64, i64)>,
}

impl Near {
    /// Adds a finding from `begin_ns` to `end_ns`. A finding that goes on is added again with a later end.
    pub fn add(&mut self, begin_ns: i64, end_ns: i64) {
        let mut begin_ns = begin_ns.saturating_sub(MARGIN_NS);
        let mut end_ns = end_ns.saturating_add(MARGIN_NS).max(begin_ns);
        let place = self.stretches.partition_point(|(_, known_end_ns)| *known_end_ns < begin_ns);
        while let Some((known_begin_ns, known_end_ns)) = self.stretches.get(place).filter(|known| known.0 <= end_ns) {
            (begin_ns, end_ns) = (begin_ns.min(*known_begin_ns), end_ns.max(*known_end_ns));
            self.stretches.remove(place);
        }
        self.stretches.insert(place, (begin_ns, end_ns));
        if self.stretches.len() > MOST
            && let (Some(oldest), Some(next)) = (self.stretches.pop_front(), self.stretches.front_mut())
        {
            next.0 = oldest.0;
        }
    }

    /// Whether any of the time from `from_ns` to `to_ns`, both included, is near a finding. If both are equal, that is
    /// one instant. A finding that begins up to [`MARGIN_NS`] later can still turn `false` into `true`.
    #[must_use]
    pub fn touches(&self, from_ns: i64, to_ns: i64) -> bool {
        let place = self.stretches.partition_point(|(_, end_ns)| *end_ns < from_ns);
        self.stretches.get(place).is_some_and(|(begin_ns, _)| *begin_ns <= to_ns)
    }

    /// Removes the stretches that end before `at_ns`. Later queries must not ask for earlier times.
    pub fn forget_before(&mut self, at_ns: i64) {
        while self.stretches.front().is_some_and(|(_, end_ns)| *end_ns < at_ns) {
            self.stretches.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::SECOND_NS;
    use proptest::prelude::*;

    #[test]
    fn ten_seconds_before_and_after_are_near() {
        let mut near = Near::default();
        near.add(100 * SECOND_NS, 103 * SECOND_NS);
        let at = |s: i64, ns: i64| near.touches(s * SECOND_NS + ns, s * SECOND_NS + ns);
        assert!(!at(90, -1) && at(90, 0) && at(100, 0) && at(113, 0) && !at(113, 1));
        assert!(near.touches(0, 90 * SECOND_NS) && near.touches(95 * SECOND_NS, 96 * SECOND_NS));
        assert!(!near.touches(0, 89 * SECOND_NS) && !near.touches(114 * SECOND_NS, i64::MAX));
        near.forget_before(113 * SECOND_NS + 1);
        assert_eq!(near, Near::default());
    }

    proptest! {
        /// In whatever order findings come, the answer is that of a list of all of them.
        #[test]
        fn answers_are_those_of_every_single_finding(
            findings in prop::collection::vec((0..3_000_i64, 0..50_i64), 0..100),
            questions in prop::collection::vec((0..3_100_i64, 0..50_i64), 1..50),
        ) {
            let mut near = Near::default();
            for (begin_s, seconds) in &findings {
                near.add(begin_s * SECOND_NS, (begin_s + seconds) * SECOND_NS);
            }
            prop_assert!(near.stretches.iter().zip(near.stretches.iter().skip(1)).all(|(one, next)| one.1 < next.0));
            for (from_s, seconds) in questions {
                let to_s = from_s + seconds;
                let expected = findings.iter().any(|(begin_s, seconds)| begin_s - 10 <= to_s && begin_s + seconds + 10 >= from_s);
                prop_assert_eq!(near.touches(from_s * SECOND_NS, to_s * SECOND_NS), expected);
            }
        }

        #[test]
        fn beyond_the_bound_too_much_is_near_and_never_too_little(findings in prop::collection::vec(0..1_000_000_i64, 0..1_000)) {
            let mut near = Near::default();
            for begin_s in &findings {
                near.add(begin_s * SECOND_NS, begin_s * SECOND_NS);
                prop_assert!(near.stretches.len() <= MOST);
            }
            prop_assert!(findings.iter().all(|begin_s| near.touches(begin_s * SECOND_NS, begin_s * SECOND_NS)));
        }
    }
}
