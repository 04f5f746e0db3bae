//! Counters of the time in which less than some bytes were free, and the longest such time without a break.
//!
//! Enters: each change of a GPU's memory, in the order of time. Leaves: totals since the start, and the longest stretch of the last
//! minute. Exact to a reading; time in gaps counts as nothing, and ends a stretch. Absent on purpose: shares of the memory, which
//! [`Pressure`](super::Pressure) counts.

use crate::clock::SECOND_NS;
use std::collections::VecDeque;

/// Thresholds that can be counted at a time.
pub const MOST_FREE_BELOW: usize = 4;
/// The threshold by default, bytes.
pub const FREE_BELOW: u64 = 1 << 30;
/// The window of the longest stretch, seconds.
pub const LONGEST_WINDOW_S: i64 = 60;

/// The time of one GPU below each threshold.
#[derive(Debug, Clone)]
pub struct LowMemory {
    levels: Vec<BelowThreshold>,
}

/// The time below one threshold.
#[derive(Debug, Clone)]
pub struct BelowThreshold {
    /// The threshold: fewer free bytes than this are few.
    pub free_below_bytes: u64,
    /// Time so far, nanoseconds.
    pub total_ns: i64,
    /// The stretch that goes on: its begin, and until when it is counted.
    stretch: Option<(i64, i64)>,
    /// The longest stretch that ended in each second, for the seconds of the window that have one.
    longest: VecDeque<(i64, i64)>,
}

impl Default for LowMemory {
    fn default() -> Self {
        Self::new(&[FREE_BELOW])
    }
}

impl LowMemory {
    /// Counters of these thresholds, bytes; at most [`MOST_FREE_BELOW`].
    #[must_use]
    pub fn new(free_below: &[u64]) -> Self {
        let level = |free_below_bytes: &u64| BelowThreshold {
            free_below_bytes: *free_below_bytes,
            total_ns: 0,
            stretch: None,
            longest: VecDeque::new(),
        };
        Self { levels: free_below.iter().take(MOST_FREE_BELOW).map(level).collect() }
    }

    /// From now on these are the thresholds. If they are others than before, the counts begin anew.
    pub fn set_thresholds(&mut self, free_below: &[u64]) {
        if !self.levels.iter().map(|level| &level.free_below_bytes).eq(free_below) {
            *self = Self::new(free_below);
        }
    }

    /// From `at_ns` on this much is in use; `None` if that is not known. `usable_bytes` is what jobs can have.
    pub fn push(&mut self, at_ns: i64, used_bytes: Option<u64>, usable_bytes: Option<u64>) {
        let free_bytes = used_bytes.zip(usable_bytes).map(|(used, usable)| usable.saturating_sub(used));
        for level in &mut self.levels {
            level.push(at_ns, free_bytes.is_some_and(|free| free < level.free_below_bytes));
        }
    }

    /// What was pushed last holds until this time.
    pub fn advance(&mut self, until_ns: i64) {
        self.levels.iter_mut().for_each(|level| level.count(until_ns));
    }

    /// What comes next does not follow what was pushed last.
    pub fn interrupt(&mut self) {
        self.levels.iter_mut().for_each(BelowThreshold::end);
    }

    /// The same totals, for memory that begins anew.
    #[must_use]
    pub fn go_on(&self) -> Self {
        let mut next = self.clone();
        next.interrupt();
        next
    }

    /// What is known of each threshold.
    #[must_use]
    pub fn levels(&self) -> &[BelowThreshold] {
        &self.levels
    }
}

impl BelowThreshold {
    fn push(&mut self, at_ns: i64, is_low: bool) {
        self.count(at_ns);
        match (self.stretch, is_low) {
            (None, true) => self.stretch = Some((at_ns, at_ns)),
            (Some(_), false) => self.end(),
            _ => {}
        }
    }

    fn count(&mut self, until_ns: i64) {
        if let Some((_, counted_ns)) = &mut self.stretch {
            self.total_ns += (until_ns - *counted_ns).max(0);
            *counted_ns = until_ns.max(*counted_ns);
        }
    }

    fn end(&mut self) {
        let Some((begin_ns, end_ns)) = self.stretch.take() else { return };
        let (second, length_ns) = (end_ns.div_euclid(SECOND_NS), end_ns - begin_ns);
        match self.longest.back_mut().filter(|(last, _)| *last == second) {
            Some((_, longest_ns)) => *longest_ns = length_ns.max(*longest_ns),
            None => self.longest.push_back((second, length_ns)),
        }
        while self.longest.front().is_some_and(|(oldest, _)| *oldest < second - LONGEST_WINDOW_S - 1) {
            self.longest.pop_front();
        }
    }

    /// The length of the longest stretch that ended at `from_ns` or later, or has not ended; nanoseconds, and 0 if there is none. A
    /// stretch that began earlier counts from its begin. `from_ns` lies at most one window back, and counts to the second.
    #[must_use]
    pub fn longest_ns(&self, from_ns: i64) -> i64 {
        let second = from_ns.div_euclid(SECOND_NS);
        let ended = self.longest.iter().filter(|(ended, _)| *ended >= second).map(|(_, length_ns)| *length_ns);
        let current = self
            .stretch
            .filter(|(_, counted_ns)| *counted_ns >= from_ns)
            .map(|(begin_ns, counted_ns)| counted_ns - begin_ns);
        ended.chain(current).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS as MS;

    /// 1,000 bytes, of which these are used from these milliseconds on.
    fn of(changes: &[(i64, Option<u64>)], until_ms: i64) -> LowMemory {
        let mut low = LowMemory::new(&[10, 100]);
        changes.iter().for_each(|(at_ms, used)| low.push(at_ms * MS, *used, Some(1_000)));
        low.advance(until_ms * MS);
        low
    }

    fn totals(low: &LowMemory) -> [i64; 2] {
        [0, 1].map(|level| low.levels()[level].total_ns / MS)
    }

    fn longest(low: &LowMemory, from_ms: i64) -> [i64; 2] {
        [0, 1].map(|level| low.levels()[level].longest_ns(from_ms * MS) / MS)
    }

    #[test]
    fn time_counts_only_while_less_is_free_than_the_threshold() {
        let low = of(&[(0, Some(900)), (10, Some(901)), (13, Some(995)), (15, Some(990)), (18, Some(5))], 30);
        assert_eq!((totals(&low), longest(&low, 0)), ([2, 8], [2, 8]), "exactly as much as the threshold is enough");
        assert_eq!(totals(&of(&[(0, Some(1_001))], 5)), [5, 5], "more is in use than there is");
    }

    #[test]
    fn short_stretches_add_up_and_do_not_become_a_long_one() {
        let spikes: Vec<_> = (0..50).flat_map(|nth| [(nth * 20, Some(999)), (nth * 20 + 3, Some(1))]).collect();
        let low = of(&spikes, 2_000);
        assert_eq!((totals(&low), longest(&low, 0)), ([150, 150], [3, 3]));
        // One that changes without leaving the threshold is one.
        assert_eq!(longest(&of(&[(0, Some(999)), (3, Some(998)), (9, Some(0))], 9), 0), [9, 9]);
    }

    #[test]
    fn a_stretch_that_goes_on_counts_and_none_goes_on_over_a_gap() {
        let mut low = of(&[(0, Some(999))], 40_000);
        assert_eq!((totals(&low), longest(&low, 39_999)), ([40_000; 2], [40_000; 2]), "in whole");
        assert_eq!(longest(&low, 40_001), [0, 0], "nothing is known of it since");
        low.push(40_000 * MS, None, Some(1_000));
        low.advance(90_000 * MS);
        assert_eq!((totals(&low), longest(&low, 40_000)), ([40_000; 2], [40_000; 2]));
        assert_eq!(longest(&low, 41_000), [0, 0], "it ended before");
        low.push(90_000 * MS, Some(999), Some(1_000));
        low.interrupt();
        low.push(95_000 * MS, Some(999), Some(1_000));
        low.advance(96_000 * MS);
        assert_eq!((totals(&low), longest(&low, 90_001)), ([41_000; 2], [1_000; 2]), "what was between is not known");
        low.push(97_000 * MS, Some(999), None);
        assert_eq!(totals(&low), [42_000; 2]);
        low.advance(99_000 * MS);
        assert_eq!(totals(&low), [42_000; 2], "of an unknown size nothing counts");
        low.advance(98_000 * MS);
        assert_eq!(totals(&low.go_on()), [42_000; 2]);
    }

    #[test]
    fn what_is_kept_of_stretches_is_bounded_by_the_window() {
        let spikes: Vec<_> = (0..9_000).flat_map(|nth| [(nth * 50, Some(999)), (nth * 50 + 1, Some(1))]).collect();
        let low = of(&spikes, 450_000);
        let kept = |level: &BelowThreshold| level.longest.len();
        assert!(low.levels().iter().all(|level| kept(level) <= usize::try_from(LONGEST_WINDOW_S).unwrap() + 2));
        assert_eq!(totals(&low), [9_000; 2]);
        assert_eq!(LowMemory::new(&[1; 9]).levels().len(), MOST_FREE_BELOW);
        assert_eq!(LowMemory::default().levels()[0].free_below_bytes, 1 << 30);
    }

    #[test]
    fn counts_go_on_under_the_same_thresholds_only() {
        let mut low = of(&[(0, Some(999))], 7);
        low.set_thresholds(&[10, 100]);
        assert_eq!(totals(&low), [7, 7]);
        low.set_thresholds(&[10]);
        assert_eq!((low.levels().len(), low.levels()[0].total_ns), (1, 0));
    }
}
