//! Sets of disjoint time intervals: when anything of one kind was going on.
//!
//! Enters: begins and ends in any order, which may overlap. Leaves: the times that they cover, in order and apart from
//! each other. Invariant: no time counts twice.

/// Times in order that do not touch each other; nanoseconds, the end excluded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Intervals(Vec<(i64, i64)>);

impl Intervals {
    /// What the intervals cover together.
    pub(super) fn union(intervals: impl IntoIterator<Item = (i64, i64)>) -> Self {
        let mut apart: Vec<(i64, i64)> = intervals.into_iter().filter(|(begin, end)| begin < end).collect();
        apart.sort_unstable();
        apart.dedup_by(|(begin, end), (_, last)| {
            let touches = *begin <= *last;
            if touches {
                *last = (*last).max(*end);
            }
            touches
        });
        apart.shrink_to_fit();
        Self(apart)
    }

    /// What both cover.
    pub(super) fn and(&self, other: &Self) -> Self {
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&(a, b)), Some(&&(c, d))) = (left.peek(), right.peek()) {
            if a.max(c) < b.min(d) {
                both.push((a.max(c), b.min(d)));
            }
            if b < d {
                left.next()
            } else {
                right.next()
            };
        }
        Self(both)
    }

    /// The intervals that overlap the time from `begin` to `end`, clipped to it.
    fn between(&self, begin: i64, end: i64) -> impl Iterator<Item = (i64, i64)> {
        let first = self.0.partition_point(|(_, last)| *last <= begin);
        let rest = self.0.get(first..).unwrap_or_default().iter();
        rest.take_while(move |(from, _)| *from < end).map(move |(from, to)| ((*from).max(begin), (*to).min(end)))
    }

    /// The intervals in order. Two that are less than `gap_ns` nanoseconds apart are merged.
    pub(super) fn joined(&self, gap_ns: u64) -> Vec<(i64, i64)> {
        let mut joined: Vec<(i64, i64)> = Vec::new();
        for (begin, end) in &self.0 {
            match joined.last_mut() {
                Some((_, last)) if begin.abs_diff(*last) < gap_ns => *last = *end,
                _ => joined.push((*begin, *end)),
            }
        }
        joined
    }

    /// How much of the time from `begin` to `end` they cover, nanoseconds.
    pub(super) fn within_ns(&self, begin: i64, end: i64) -> u64 {
        self.between(begin, end).map(|(from, to)| to.abs_diff(from)).sum()
    }

    /// The parts of the time from `begin` to `end` that they do not cover.
    pub(super) fn gaps(&self, begin: i64, end: i64) -> Vec<(i64, i64)> {
        let (mut gaps, mut covered) = (Vec::new(), begin);
        for (from, to) in self.between(begin, end).chain([(end, end)]) {
            if covered < from {
                gaps.push((covered, from));
            }
            covered = to;
        }
        gaps
    }

    /// Whether they cover no time at all.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each nanosecond from 0 to 63 as a bit.
    fn bits(intervals: &Intervals) -> u64 {
        intervals.0.iter().flat_map(|(begin, end)| *begin..*end).fold(0, |bits, at| bits | 1 << at)
    }

    /// Numbers that look random, and are the same each time.
    fn scattered(seed: u64) -> Vec<(i64, i64)> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as i64
        };
        (0..next() % 7).map(|_| (next() % 56, next() % 8)).map(|(begin, length)| (begin, begin + length)).collect()
    }

    #[test]
    fn sets_are_the_same_as_bits() {
        for seed in 0..2_000 {
            let (left, right) = (scattered(seed), scattered(seed + 5_000));
            let (a, b) = (Intervals::union(left.clone()), Intervals::union(right));
            let each = left.iter().map(|(begin, end)| bits(&Intervals::union([(*begin, *end)])));
            assert_eq!(bits(&a), each.fold(0, |all, one| all | one), "{seed}");
            assert_eq!(bits(&a.and(&b)), bits(&a) & bits(&b), "{seed}");
            let (begin, end) = (seed as i64 % 30, seed as i64 % 30 + seed as i64 % 33);
            let window = bits(&Intervals(vec![(begin, end)]));
            assert_eq!(a.within_ns(begin, end), u64::from((bits(&a) & window).count_ones()), "{seed}");
            assert_eq!(bits(&Intervals(a.gaps(begin, end))), window & !bits(&a), "{seed}");
        }
    }

    #[test]
    fn intervals_that_touch_are_one_and_empty_ones_none() {
        assert_eq!(Intervals::union([(5, 9), (1, 5), (20, 20)]).0, [(1, 9)]);
        assert!(Intervals::union([(3, 3), (4, 2)]).is_empty());
        let apart = Intervals::union([(0, 10), (15, 20), (24, 30), (40, 41)]);
        assert_eq!(apart.joined(5), [(0, 10), (15, 30), (40, 41)]);
        assert_eq!(apart.joined(0), apart.0);
    }
}
