//! Durations that the sampling thread has measured and not counted yet.
//!
//! A histogram lies in a dozen lines of memory, and a thread that has slept for a millisecond finds few of them in its caches.
//! Enters: durations. Leaves: the same, counted many at a time. Invariant: each is counted once.

use highwater_core::histogram::Histogram;

/// Durations that wait at most.
const MOST: usize = 64;

/// Durations that wait to be counted in one histogram.
#[derive(Debug)]
pub(super) struct Held {
    count: usize,
    durations_ns: [i64; MOST],
}

impl Held {
    /// None yet.
    pub fn new() -> Self {
        Self { count: 0, durations_ns: [0; MOST] }
    }

    /// Adds a duration. If there is no room for another, all are counted.
    pub fn add(&mut self, duration_ns: i64, histogram: &Histogram) {
        self.durations_ns[self.count] = duration_ns;
        self.count += 1;
        if self.count == MOST {
            self.count_all(histogram);
        }
    }

    /// Counts all of them now.
    pub fn count_all(&mut self, histogram: &Histogram) {
        self.durations_ns[..self.count].iter().for_each(|duration_ns| histogram.observe_ns(*duration_ns));
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_many_at_a_time_and_each_once() {
        let (mut held, histogram) = (Held::new(), Histogram::new(&[1e-6]));
        let counted: Vec<u64> = (0..200)
            .map(|_| {
                held.add(2_000, &histogram);
                histogram.counts().cumulative[1]
            })
            .collect();
        assert_eq!([counted[62], counted[63], counted[126], counted[127], counted[199]], [0, 64, 64, 128, 192]);
    }

    #[test]
    fn the_rest_is_counted_once_and_as_long_as_it_was() {
        let (mut held, histogram) = (Held::new(), Histogram::new(&[1e-6, 1e-3]));
        [500, 2_000, 5_000_000, -1].iter().for_each(|duration_ns| held.add(*duration_ns, &histogram));
        held.count_all(&histogram);
        held.count_all(&histogram);
        assert_eq!(histogram.counts().cumulative, [2, 3, 4]);
        assert_eq!(histogram.sum_ns(), 5_002_500);
    }
}
