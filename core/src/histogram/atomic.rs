//! Exponential buckets at a fixed scale, which several threads fill and any other reads, without locks.
//!
//! They span every duration that a timeline in nanoseconds can hold, so no observation is out of range and no scale
//! ever changes. Absent on purpose: a finer scale, because each histogram takes 4 KiB. A reader looks only at the buckets
//! between the first and the last that was ever filled: of a call that takes 5 to 500 µs these are 54 of 505.

use super::exponential::{Exponential, split};
use std::f64::consts::SQRT_2;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Eight buckets to a power of two: each is 9 % wide.
const SCALE: i32 = 3;
/// The bucket of 1 ns.
const FIRST: i32 = -240;
/// Buckets up to that of `i64::MAX` nanoseconds.
const BUCKETS: usize = 505;
/// Upper bounds of the buckets from 1 to 2, but for the last: 2^(1/8) to 2^(7/8).
const WITHIN: [f64; 7] = [
    1.090_507_732_665_257_7,
    1.189_207_115_002_721,
    1.296_839_554_651_009_6,
    SQRT_2,
    1.542_210_825_407_940_7,
    1.681_792_830_507_429,
    1.834_008_086_409_342_4,
];

/// Counts of durations by size.
#[derive(Debug)]
pub(super) struct Atomic {
    buckets: Box<[AtomicU64]>,
    zeros: AtomicU64,
    /// The first bucket that was ever filled, in the upper 16 bits, and the one after the last.
    filled: AtomicU32,
}

impl Default for Atomic {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            zeros: AtomicU64::new(0),
            filled: AtomicU32::new(NONE),
        }
    }
}

/// No bucket is filled.
const NONE: u32 = 0xffff << 16;

/// The first bucket that is filled, and the one after the last.
fn unpacked(filled: u32) -> (usize, usize) {
    ((filled >> 16) as usize, (filled & 0xffff) as usize)
}

/// The bucket of a value above 0. It is the bucket of `exponential::index`, computed without a logarithm: this runs in each tick.
fn position(seconds: f64) -> usize {
    let (mantissa, exponent) = split(seconds);
    // A value at a bound is in the bucket below it.
    let within = if mantissa > 1.0 { WITHIN.iter().map(|bound| i32::from(*bound < mantissa)).sum() } else { -1 };
    usize::try_from((exponent << SCALE) + within - FIRST).unwrap_or(0).min(BUCKETS - 1)
}

impl Atomic {
    /// Counts one duration, seconds, made of whole nanoseconds.
    pub(super) fn record(&self, seconds: f64) {
        let bucket = if seconds > 0.0 {
            let position = position(seconds);
            self.widen(position);
            &self.buckets[position]
        } else {
            &self.zeros
        };
        // A reader that sees a later count of the same thread sees this one too.
        bucket.fetch_add(1, Ordering::Release);
    }

    /// Includes a bucket in those that are read, before anything is counted in it.
    fn widen(&self, position: usize) {
        let is_within = |filled| {
            let (first, end) = unpacked(filled);
            first <= position && position < end
        };
        if is_within(self.filled.load(Ordering::Relaxed)) {
            return;
        }
        let widened = |filled| {
            let (first, end) = unpacked(filled);
            let [first, end] =
                [first.min(position), end.max(position + 1)].map(|edge| u32::try_from(edge).unwrap_or(0xffff));
            Some(first << 16 | end)
        };
        // The function never declines.
        let _ = self.filled.fetch_update(Ordering::Release, Ordering::Relaxed, widened);
    }

    /// What they hold now, with this sum, seconds.
    pub(super) fn read(&self, sum_s: f64) -> Exponential {
        let (first, end) = unpacked(self.filled.load(Ordering::Acquire));
        let filled = self.buckets.get(first..end).unwrap_or_default();
        let counts = filled.iter().map(|bucket| bucket.load(Ordering::Acquire));
        let first = FIRST + i32::try_from(first).unwrap_or(0);
        Exponential::of_counts(SCALE, first, counts, self.zeros.load(Ordering::Acquire), sum_s)
    }
}

#[cfg(test)]
mod tests {
    use super::super::exponential::index;
    use super::*;

    #[test]
    fn every_duration_has_its_bucket() {
        #[allow(clippy::cast_precision_loss, reason = "as it is observed")]
        let bucket = |ns: i64| position(ns as f64 * 1e-9);
        assert_eq!((bucket(1), bucket(i64::MAX)), (0, BUCKETS - 1));
        let atomic = Atomic::default();
        [0.0, 1e-9, 1e-3, 1e-3, 9.3e9].iter().for_each(|seconds| atomic.record(*seconds));
        let read = atomic.read(7.0);
        assert_eq!((read.count(), read.zeros(), read.buckets().sum::<u64>()), (5, 1, 4));
        assert!((read.sum() - 7.0).abs() < 1e-9);
    }

    #[test]
    fn a_bucket_is_that_of_the_logarithm() {
        let is = |seconds: f64| {
            assert_eq!(position(seconds), usize::try_from(index(seconds, SCALE) - FIRST).unwrap(), "{seconds}")
        };
        // Every nanosecond to 20 µs, then steps of a ten-thousandth, and powers of two, which are bounds.
        (1..20_000_u32).for_each(|ns| is(f64::from(ns) * 1e-9));
        (0..330_000).map(|n| 2e-5 * 1.0001_f64.powi(n)).take_while(|seconds| *seconds < 9e9).for_each(is);
        (-29..33).map(|power| 2_f64.powi(power)).for_each(is);
    }

    #[test]
    fn what_is_filled_is_read_wherever_it_is() {
        let orders: [&[usize]; 5] = [&[], &[0], &[BUCKETS - 1], &[200, 199, 201], &[300, 0, BUCKETS - 1]];
        for filled in orders {
            let atomic = Atomic::default();
            // The middle of a bucket.
            let value = |position: usize| ((f64::from(FIRST) + position as f64 + 0.5) / 8.0).exp2();
            filled.iter().for_each(|position| atomic.record(value(*position)));
            let read = atomic.read(0.0);
            assert_eq!(read.count(), filled.len() as u64, "{filled:?}");
            let shift = SCALE - read.scale();
            let mut expected: Vec<i32> =
                filled.iter().map(|position| (FIRST + i32::try_from(*position).unwrap()) >> shift).collect();
            expected.sort_unstable();
            let indices: Vec<i32> = read.at_most(SCALE).1.map(|(index, _)| index).collect();
            assert_eq!(indices, expected, "{filled:?}");
        }
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
