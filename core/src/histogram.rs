//! Histograms of durations, each with fixed bounds and in exponential buckets: one that threads fill and read without
//! locks, and one for state that has a lock of its own.

mod atomic;
mod exponential;

pub use exponential::{Exponential, MOST_BUCKETS, MOST_SCALE};

use atomic::Atomic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every fourth upper bound of step and phase durations is a coarse one, beginning with the first: the coarse ones alone
/// are the buckets of a node with many series.
pub const BOUNDS_TO_A_COARSE_ONE: usize = 4;

/// How often a histogram that is being written is read again, so that all its counts are of the same observations. A
/// read takes a microsecond, and a writer comes every 100.
const TRIES: usize = 4;

/// Counts of durations by upper bound and in exponential buckets.
#[derive(Debug)]
pub struct Histogram {
    explicit: Explicit,
    exponential: Atomic,
}

/// Counts of durations by upper bound.
#[derive(Debug)]
struct Explicit {
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
    /// The same observations in exponential buckets, seconds; `None` if an exporter does not need them.
    pub exponential: Option<Arc<Exponential>>,
}

/// Durations with fixed bounds and in exponential buckets at once, for exporters that know the one or the other.
#[derive(Debug)]
pub struct Durations {
    explicit: Explicit,
    /// Shared with readers. An observation copies it if a reader still holds it.
    exponential: Arc<Exponential>,
}

impl Durations {
    /// None yet, with these upper bounds, seconds, in rising order.
    #[must_use]
    pub fn new(bounds_s: &'static [f64]) -> Self {
        Self { explicit: Explicit::new(bounds_s), exponential: Arc::default() }
    }

    /// Counts one duration; a negative one counts as 0.
    pub fn observe_ns(&mut self, duration_ns: i64) {
        self.explicit.observe_ns(duration_ns);
        Arc::make_mut(&mut self.exponential).record(seconds(duration_ns), 1);
    }

    /// What they hold now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let (cumulative, sum_s) = (self.explicit.cumulative(), self.explicit.sum_s());
        Counts { bounds_s: self.explicit.bounds_s, cumulative, sum_s, exponential: Some(Arc::clone(&self.exponential)) }
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
        Self { explicit: Explicit::new(bounds_s), exponential: Atomic::default() }
    }

    /// Counts one duration; a negative one counts as 0.
    pub fn observe_ns(&self, duration_ns: i64) {
        self.exponential.record(seconds(duration_ns));
        self.explicit.observe_ns(duration_ns);
    }

    /// Sum of all durations, nanoseconds.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.explicit.sum_ns.load(Ordering::Relaxed)
    }

    /// The current counts. Both kinds of buckets have the same observations, with one exception: if every try meets an
    /// observation that is being counted, it may be missing from the buckets with fixed bounds, but not from their
    /// total. The sum is read first, so it may lack the newest observations.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let sum_s = self.explicit.sum_s();
        let read = || (self.explicit.cumulative(), self.exponential.read(sum_s));
        let (mut cumulative, mut exponential) = read();
        for _ in 0..TRIES {
            if cumulative.last() == Some(&exponential.count()) {
                break;
            }
            (cumulative, exponential) = read();
        }
        // The exponential buckets are counted first and read last, so they have every observation.
        if let Some(all) = cumulative.last_mut() {
            *all = exponential.count();
        }
        Counts { bounds_s: self.explicit.bounds_s, cumulative, sum_s, exponential: Some(Arc::new(exponential)) }
    }
}

impl Explicit {
    fn new(bounds_s: &'static [f64]) -> Self {
        Self { bounds_s, counts: (0..=bounds_s.len()).map(|_| AtomicU64::new(0)).collect(), sum_ns: AtomicU64::new(0) }
    }

    fn observe_ns(&self, duration_ns: i64) {
        let slot = self.bounds_s.partition_point(|bound| *bound < seconds(duration_ns));
        // A reader that sees this count also sees what the same thread counted before it.
        self.counts[slot].fetch_add(1, Ordering::Release);
        self.sum_ns.fetch_add(u64::try_from(duration_ns).unwrap_or(0), Ordering::Relaxed);
    }

    #[allow(clippy::cast_precision_loss, reason = "a sum of durations")]
    fn sum_s(&self) -> f64 {
        self.sum_ns.load(Ordering::Relaxed) as f64 * 1e-9
    }

    /// Counts at or below each bound, and of all.
    fn cumulative(&self) -> Vec<u64> {
        let mut total = 0;
        let counts = self.counts.iter().map(|count| {
            total += count.load(Ordering::Acquire);
            total
        });
        counts.collect()
    }
}

/// A duration in seconds; a negative one counts as 0.
#[allow(clippy::cast_precision_loss, reason = "buckets are wider than the error")]
fn seconds(duration_ns: i64) -> f64 {
    duration_ns.max(0) as f64 * 1e-9
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
    }

    #[test]
    fn what_is_read_while_others_write_adds_up() {
        let histogram = Histogram::new(&[1e-6, 1e-3]);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let observed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for start in 0..2_i64 {
                let (histogram, is_over, observed) = (&histogram, &is_over, &observed);
                scope.spawn(move || {
                    let mut ns = start;
                    while !is_over.load(Ordering::Relaxed) {
                        ns = (ns * 31 + 7) % 10_000_000;
                        histogram.observe_ns(ns);
                        observed.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let mut before = Counts::default();
            for _ in 0..2_000 {
                // An observation is in an exponential bucket before it is at a bound.
                let (explicit, exponential) = (histogram.explicit.cumulative(), histogram.exponential.read(0.0));
                assert!(explicit.last() <= Some(&exponential.count()), "{explicit:?}, {}", exponential.count());
                let now = histogram.counts();
                assert!(now.cumulative.is_sorted(), "{:?}", now.cumulative);
                assert!(before.cumulative.iter().zip(&now.cumulative).all(|(before, now)| before <= now));
                before = now;
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let observed = observed.load(Ordering::Relaxed);
        assert_eq!((histogram.explicit.cumulative()[2], histogram.exponential.read(0.0).count()), (observed, observed));
    }
}
