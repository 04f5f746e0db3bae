//! A histogram of durations with fixed bounds that one thread fills and any other reads, without locks.

mod exponential;

pub use exponential::{Exponential, MOST_BUCKETS, MOST_SCALE};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of durations by upper bound.
#[derive(Debug)]
pub struct Histogram {
    bounds_s: &'static [f64],
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

/// What a histogram held at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    /// Upper bounds, seconds.
    pub bounds_s: &'static [f64],
    /// Cumulative counts at or below each bound; the last, beyond all bounds, is the number of observations.
    pub cumulative: Vec<u64>,
    /// Sum of all observations, seconds.
    pub sum_s: f64,
    /// The same observations in exponential buckets, seconds, where they were kept so too.
    pub exponential: Option<Arc<Exponential>>,
}

/// Durations with fixed bounds and in exponential buckets at once, for exporters that know the one or the other.
#[derive(Debug)]
pub struct Durations {
    explicit: Histogram,
    /// Shared with those who have read it, until the next one comes.
    exponential: Arc<Exponential>,
}

impl Durations {
    /// None yet, with these upper bounds, seconds, in rising order.
    #[must_use]
    pub fn new(bounds_s: &'static [f64]) -> Self {
        Self { explicit: Histogram::new(bounds_s), exponential: Arc::default() }
    }

    /// Counts one duration; a negative one counts as 0.
    #[allow(clippy::cast_precision_loss, reason = "buckets are wider than the error")]
    pub fn observe_ns(&mut self, duration_ns: i64) {
        self.explicit.observe_ns(duration_ns);
        Arc::make_mut(&mut self.exponential).record(duration_ns.max(0) as f64 * 1e-9, 1);
    }

    /// What they hold now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { exponential: Some(Arc::clone(&self.exponential)), ..self.explicit.counts() }
    }

    /// The exponential buckets.
    #[must_use]
    pub fn exponential(&self) -> &Exponential {
        &self.exponential
    }
}

impl Histogram {
    /// An empty histogram with these upper bounds, seconds, in rising order.
    #[must_use]
    pub fn new(bounds_s: &'static [f64]) -> Self {
        Self { bounds_s, counts: (0..=bounds_s.len()).map(|_| AtomicU64::new(0)).collect(), sum_ns: AtomicU64::new(0) }
    }

    /// Counts one duration; a negative one counts as 0.
    pub fn observe_ns(&self, duration_ns: i64) {
        let duration_ns = u64::try_from(duration_ns).unwrap_or(0);
        #[allow(clippy::cast_precision_loss, reason = "bounds have two digits")]
        let seconds = duration_ns as f64 * 1e-9;
        let slot = self.bounds_s.partition_point(|bound| *bound < seconds);
        self.counts[slot].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(duration_ns, Ordering::Relaxed);
    }

    /// Sum of all durations, nanoseconds.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns.load(Ordering::Relaxed)
    }

    /// What it holds now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut total = 0;
        let cumulative = self
            .counts
            .iter()
            .map(|count| {
                total += count.load(Ordering::Relaxed);
                total
            })
            .collect();
        #[allow(clippy::cast_precision_loss, reason = "a sum of durations")]
        let sum_s = self.sum_ns() as f64 * 1e-9;
        Counts { bounds_s: self.bounds_s, cumulative, sum_s, exponential: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_counted_at_its_bound_and_in_its_bucket() {
        let mut durations = Durations::new(&[0.001, 0.01]);
        for ms in [1, 1, 5, 5, 10, 11] {
            durations.observe_ns(ms * 1_000_000);
        }
        durations.observe_ns(-7);
        let counts = durations.counts();
        assert_eq!((counts.bounds_s, counts.cumulative), (&[0.001, 0.01][..], vec![3, 6, 7]));
        assert!((counts.sum_s - 0.033).abs() < 1e-12, "{}", counts.sum_s);
        let exponential = counts.exponential.expect("kept so too");
        assert_eq!((exponential.count(), &*exponential), (7, durations.exponential()));
        let mut same = Exponential::default();
        [1, 1, 5, 5, 10, 11, 0].iter().for_each(|ms| same.record(f64::from(ms * 1_000_000) * 1e-9, 1));
        assert_eq!(*exponential, same);
        // Who has read them keeps what they were.
        durations.observe_ns(1_000_000);
        assert_eq!((exponential.count(), durations.exponential().count()), (7, 8));
    }

    #[test]
    fn sums_are_to_the_nanosecond() {
        let histogram = Histogram::new(&[1.0]);
        [3, 4, i64::MIN].iter().for_each(|ns| histogram.observe_ns(*ns));
        assert_eq!((histogram.sum_ns(), histogram.counts().cumulative), (7, vec![3, 3]));
        assert!(histogram.counts().exponential.is_none());
    }
}
