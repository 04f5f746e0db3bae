//! Exponential buckets at a fixed scale, which several threads fill and any other reads, without locks.
//!
//! They span every duration that a timeline in nanoseconds can hold, so no observation is out of range and no scale
//! ever changes. Absent on purpose: a finer scale, because each histogram takes 4 KiB.

use super::exponential::{Exponential, index};
use std::sync::atomic::{AtomicU64, Ordering};

/// Eight buckets to a power of two: each is 9 % wide.
const SCALE: i32 = 3;
/// The bucket of 1 ns.
const FIRST: i32 = -240;
/// Buckets up to that of `i64::MAX` nanoseconds.
const BUCKETS: usize = 505;

/// Counts of durations by size.
#[derive(Debug)]
pub(super) struct Atomic {
    buckets: Box<[AtomicU64]>,
    zeros: AtomicU64,
}

impl Default for Atomic {
    fn default() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(), zeros: AtomicU64::new(0) }
    }
}

impl Atomic {
    /// Counts one duration, seconds, made of whole nanoseconds.
    pub(super) fn record(&self, seconds: f64) {
        let bucket = if seconds > 0.0 {
            let position = usize::try_from(index(seconds, SCALE) - FIRST).unwrap_or(0);
            &self.buckets[position.min(BUCKETS - 1)]
        } else {
            &self.zeros
        };
        // Whoever sees a later count of the same thread sees this one too.
        bucket.fetch_add(1, Ordering::Release);
    }

    /// What they hold now, with this sum, seconds.
    pub(super) fn read(&self, sum_s: f64) -> Exponential {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Acquire));
        Exponential::of_counts(SCALE, FIRST, counts, self.zeros.load(Ordering::Acquire), sum_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_its_bucket() {
        #[allow(clippy::cast_precision_loss, reason = "as it is observed")]
        let bucket = |ns: i64| index(ns as f64 * 1e-9, SCALE);
        assert_eq!((bucket(1), bucket(i64::MAX)), (FIRST, FIRST + i32::try_from(BUCKETS).expect("few") - 1));
        let atomic = Atomic::default();
        [0.0, 1e-9, 1e-3, 1e-3, 9.3e9].iter().for_each(|seconds| atomic.record(*seconds));
        let read = atomic.read(7.0);
        assert_eq!((read.count(), read.zeros(), read.buckets().sum::<u64>()), (5, 1, 4));
        assert!((read.sum() - 7.0).abs() < 1e-9);
    }

    #[test]
    fn it_holds_what_one_that_records_alone_holds() {
        let (atomic, mut alone) = (Atomic::default(), Exponential::default());
        for n in 0..2_000 {
            let seconds = 1e-6 * 1.005_f64.powi(n);
            atomic.record(seconds);
            alone.record(seconds, 1);
        }
        let read = atomic.read(0.0);
        assert_eq!(read.scale(), SCALE);
        assert_eq!(read.at_most(0).1.collect::<Vec<_>>(), alone.at_most(0).1.collect::<Vec<_>>());
    }
}
