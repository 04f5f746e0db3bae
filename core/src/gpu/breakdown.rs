//! What the memory of one GPU was over time, by who held it, once a second.
//!
//! Enters: a point each second. Leaves: the points of an interval. Invariants: of points that are alike only the first is kept, and
//! it holds until the next; their number is bounded. Absent on purpose: where the parts come from, which is in
//! [`phases`](crate::phases).

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Points kept at most: 20 minutes in which each second differs from the one before.
pub const MOST_BREAKDOWNS: usize = 1_200;

const MIB: u64 = 1 << 20;

/// The parts of a GPU's memory at a time, bytes; `None` where not known. They may be less than all that is in use, and no more than
/// what their sources say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parts {
    /// What the allocators of its ranks have given out: the most within the second.
    pub allocated: Option<u64>,
    /// What these allocators keep beside it.
    pub cached: Option<u64>,
    /// What the same processes hold outside of their allocators.
    pub outside: Option<u64>,
    /// What processes of ranks hold of whose allocators nothing is known.
    pub processes: Option<u64>,
    /// What all other processes hold.
    pub others: Option<u64>,
}

/// The parts from a time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakdownPoint {
    /// Since when, nanoseconds of the timeline.
    pub at_ns: i64,
    /// What they were.
    pub parts: Parts,
}

/// One point in 32 bytes: mebibytes, and [`u32::MAX`] where not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    at_ns: i64,
    mib: [u32; 5],
}

/// The parts of one GPU's memory over time.
#[derive(Debug, Default)]
pub struct Breakdown(Mutex<VecDeque<Kept>>);

/// What is kept of one GPU at most, bytes: room grows by doubling.
#[must_use]
pub fn most_breakdown_bytes() -> usize {
    MOST_BREAKDOWNS.next_power_of_two() * size_of::<Kept>()
}

impl Parts {
    /// All of them, in this order.
    #[must_use]
    pub fn all(self) -> [Option<u64>; 5] {
        [self.allocated, self.cached, self.outside, self.processes, self.others]
    }

    fn packed(self) -> [u32; 5] {
        let packed = |bytes: u64| u32::try_from(bytes.div_ceil(MIB)).unwrap_or(u32::MAX - 1);
        self.all().map(|part| part.map_or(u32::MAX, packed))
    }
}

impl Kept {
    fn point(&self) -> BreakdownPoint {
        let part = |nth: usize| Some(self.mib[nth]).filter(|mib| *mib != u32::MAX).map(|mib| u64::from(mib) * MIB);
        let parts =
            Parts { allocated: part(0), cached: part(1), outside: part(2), processes: part(3), others: part(4) };
        BreakdownPoint { at_ns: self.at_ns, parts }
    }
}

impl Breakdown {
    /// Adds what holds from `at_ns` on. One that is not later than the last is ignored.
    pub fn push(&self, at_ns: i64, parts: Parts) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mib = parts.packed();
        // Before anything is known, there is nothing to keep.
        let is_news = kept.back().map_or(parts != Parts::default(), |last| last.at_ns < at_ns && last.mib != mib);
        if !is_news {
            return;
        }
        if kept.len() >= MOST_BREAKDOWNS {
            kept.pop_front();
        }
        kept.push_back(Kept { at_ns, mib });
    }

    /// The points of an interval, oldest first, with the one that holds at its begin.
    #[must_use]
    pub fn points(&self, from_ns: i64, to_ns: i64) -> Vec<BreakdownPoint> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = kept.partition_point(|point| point.at_ns <= from_ns).saturating_sub(1);
        kept.iter().skip(first).take_while(|point| point.at_ns <= to_ns).map(Kept::point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocated(bytes: u64) -> Parts {
        Parts { allocated: Some(bytes), ..Parts::default() }
    }

    #[test]
    fn a_part_holds_until_it_changes_and_what_is_not_known_stays_so() {
        let breakdown = Breakdown::default();
        breakdown.push(1, Parts::default());
        assert_eq!(breakdown.points(0, 9), []);
        let all = Parts {
            allocated: Some(5 * MIB),
            cached: Some(0),
            outside: None,
            processes: Some(7 * MIB),
            others: Some(1),
        };
        for (at_ns, parts) in [(2, all), (3, all), (4, Parts::default()), (4, all), (5, Parts::default()), (6, all)] {
            breakdown.push(at_ns, parts);
        }
        let rounded = Parts { others: Some(MIB), ..all };
        let points = |from_ns, to_ns| -> Vec<(i64, Parts)> {
            breakdown.points(from_ns, to_ns).iter().map(|point| (point.at_ns, point.parts)).collect()
        };
        assert_eq!(points(0, 9), [(2, rounded), (4, Parts::default()), (6, rounded)]);
        assert_eq!(points(3, 4), [(2, rounded), (4, Parts::default())], "with what holds at the begin");
        assert_eq!(points(0, 1), []);
    }

    #[test]
    fn the_oldest_go_first_and_the_bytes_are_those_of_the_bound() {
        let breakdown = Breakdown::default();
        (0..3_000).for_each(|second| breakdown.push(second, allocated((second as u64 % 7) * MIB)));
        let points = breakdown.points(0, i64::MAX);
        assert_eq!((points.len(), points[0].at_ns), (MOST_BREAKDOWNS, 3_000 - MOST_BREAKDOWNS as i64));
        let room = breakdown.0.lock().expect("whole").capacity() * size_of::<Kept>();
        assert!(room <= most_breakdown_bytes(), "{room}");
        assert_eq!(allocated(u64::MAX).packed()[0], u32::MAX - 1, "is known, whatever a job says");
    }
}
