//! Durations that the sampling thread has measured and not counted yet.
//!
//! A histogram takes a dozen cache lines, and few of them are still cached when the thread wakes after a millisecond.
//! So the thread counts durations in batches. Enters: durations. Leaves: the same, in histograms. Invariant: each is
//! counted once.

use super::prefetch::prefetch;
use highwater_core::histogram::Histogram;

/// Minimum number of waiting durations that are worth counting.
const MANY: usize = 64;

/// Durations that wait to be counted in one histogram.
#[derive(Debug)]
pub(super) struct DeferredDurations {
    durations_ns: Vec<i64>,
}

impl DeferredDurations {
    /// An empty batch. The caller checks [`are_many`](Self::are_many) after at most `in_a_tick` more durations, so
    /// `add` never allocates.
    pub fn new(in_a_tick: usize) -> Self {
        Self { durations_ns: Vec::with_capacity(MANY + in_a_tick) }
    }

    /// Adds a duration.
    pub fn add(&mut self, duration_ns: i64) {
        self.durations_ns.push(duration_ns);
    }

    /// Asks for the memory of the next.
    pub fn prefetch(&self) {
        prefetch(self.durations_ns.as_ptr().wrapping_add(self.durations_ns.len()));
    }

    /// Whether at least `MANY` durations wait, so that they should be counted.
    pub fn are_many(&self) -> bool {
        self.durations_ns.len() >= MANY
    }

    /// Counts all of them now, and calls `observe` with each.
    pub fn count_all(&mut self, histogram: &Histogram, mut observe: impl FnMut(i64)) {
        for duration_ns in self.durations_ns.drain(..) {
            histogram.observe_ns(duration_ns);
            observe(duration_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_many_at_a_time_and_each_once() {
        let (mut held, histogram) = (DeferredDurations::new(1), Histogram::new(&[1e-6]));
        let mut observed = 0;
        let counted: Vec<u64> = (0..200)
            .map(|_| {
                held.add(2_000);
                if held.are_many() {
                    held.count_all(&histogram, |duration_ns| observed += duration_ns);
                }
                histogram.counts().cumulative[1]
            })
            .collect();
        assert_eq!([counted[62], counted[63], counted[126], counted[127], counted[199]], [0, 64, 64, 128, 192]);
        assert_eq!(observed, 192 * 2_000);
    }

    #[test]
    fn the_rest_is_counted_once_and_as_long_as_it_was() {
        let (mut held, histogram) = (DeferredDurations::new(1), Histogram::new(&[1e-6, 1e-3]));
        [500, 2_000, 5_000_000, -1].iter().for_each(|duration_ns| held.add(*duration_ns));
        held.count_all(&histogram, |_| ());
        held.count_all(&histogram, |_| ());
        assert_eq!(histogram.counts().cumulative, [2, 3, 4]);
        assert_eq!(histogram.sum_ns(), 5_002_500);
    }
}
