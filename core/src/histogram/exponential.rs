//! A base-2 exponential histogram: buckets that are fine where the values are, and never more than [`MOST_BUCKETS`].
//!
//! Bucket `i` at scale `s` holds values in (2^(i·2^-s), 2^((i+1)·2^-s)], as OpenTelemetry's data model has it. It
//! begins at the finest scale and halves its resolution each time a value does not fit. The SDK's own one cannot be
//! used: it takes one value at a time and stamps it with the time of collection.

use std::collections::VecDeque;

/// The most buckets.
pub const MOST_BUCKETS: usize = 160;
/// The finest scale.
pub const MOST_SCALE: i32 = 20;

/// Counts of values above 0, by size, and of zeros.
#[derive(Debug, Clone, PartialEq)]
pub struct Exponential {
    scale: i32,
    offset: i32,
    buckets: VecDeque<u64>,
    zeros: u64,
    count: u64,
    sum: f64,
    min: Option<f64>,
    max: Option<f64>,
}

impl Default for Exponential {
    fn default() -> Self {
        Self {
            scale: MOST_SCALE,
            offset: 0,
            buckets: VecDeque::new(),
            zeros: 0,
            count: 0,
            sum: 0.0,
            min: None,
            max: None,
        }
    }
}

impl Exponential {
    /// Counts a value `times` times. Negative values and those that are not finite are not counted.
    pub fn record(&mut self, value: f64, times: u64) {
        if !value.is_finite() || value < 0.0 || times == 0 {
            return;
        }
        self.count += times;
        #[allow(clippy::cast_precision_loss, reason = "a sum of doubles is no more exact")]
        let weight = times as f64;
        self.sum += value * weight;
        self.min = Some(self.min.map_or(value, |min| min.min(value)));
        self.max = Some(self.max.map_or(value, |max| max.max(value)));
        if value == 0.0 {
            self.zeros += times;
            return;
        }
        let mut index = index(value, self.scale);
        if self.buckets.is_empty() {
            self.offset = index;
        }
        loop {
            let (low, high) = (self.offset.min(index), self.last_index().max(index));
            if i64::from(high) - i64::from(low) < MOST_BUCKETS as i64 {
                break;
            }
            self.coarsen(1);
            index >>= 1;
        }
        self.make_room(index);
        while index < self.offset {
            self.buckets.push_front(0);
            self.offset -= 1;
        }
        let position = usize::try_from(index - self.offset).unwrap_or(0);
        if position >= self.buckets.len() {
            self.buckets.resize(position + 1, 0);
        }
        self.buckets[position] += times;
    }

    /// Makes room for the bucket of this index. Growing on its own, the queue would take room for 256.
    fn make_room(&mut self, index: i32) {
        let (low, high) = (self.offset.min(index), self.last_index().max(index));
        let needed = usize::try_from(high - low).unwrap_or(0) + 1;
        if needed > self.buckets.capacity() {
            let room = needed.next_power_of_two().min(MOST_BUCKETS);
            self.buckets.reserve_exact(room.saturating_sub(self.buckets.len()));
        }
    }

    /// One with these counts: `buckets` from index `first` on at this scale. Its extremes are not known.
    pub(super) fn of_counts(scale: i32, first: i32, buckets: impl Iterator<Item = u64>, zeros: u64, sum: f64) -> Self {
        // Each count is read once: others write meanwhile.
        let mut buckets: Vec<u64> = buckets.collect();
        let is_filled = |count: &u64| *count > 0;
        buckets.truncate(buckets.iter().rposition(is_filled).map_or(0, |last| last + 1));
        let empty = buckets.iter().position(is_filled).unwrap_or(0);
        buckets.drain(..empty);
        let offset = if buckets.is_empty() { 0 } else { first + i32::try_from(empty).unwrap_or(0) };
        let count = zeros + buckets.iter().sum::<u64>();
        let mut made = Self { scale, offset, buckets: buckets.into(), zeros, count, sum, min: None, max: None };
        while made.buckets.len() > MOST_BUCKETS {
            made.coarsen(1);
        }
        made
    }

    fn last_index(&self) -> i32 {
        self.offset.saturating_add(i32::try_from(self.buckets.len()).unwrap_or(0)).saturating_sub(1).max(self.offset)
    }

    /// Lowers the scale: 2^`by` buckets become one.
    fn coarsen(&mut self, by: i32) {
        let offset = self.offset >> by;
        let mut merged = VecDeque::with_capacity((self.buckets.len() >> by.min(31)) + 2);
        for (position, count) in self.buckets.iter().enumerate() {
            let index = (self.offset + i32::try_from(position).unwrap_or(0)) >> by;
            let position = usize::try_from(index - offset).unwrap_or(0);
            if position >= merged.len() {
                merged.resize(position + 1, 0);
            }
            merged[position] += count;
        }
        (self.offset, self.buckets) = (offset, merged);
        self.scale -= by;
    }

    /// What was recorded since `earlier`, an older state of the same histogram. Its extremes are not known.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut earlier = earlier.clone();
        earlier.coarsen((earlier.scale - self.scale).max(0));
        let mut added = self.clone();
        for (position, count) in earlier.buckets.iter().enumerate() {
            let index = earlier.offset + i32::try_from(position).unwrap_or(0);
            let position = usize::try_from(index - added.offset).ok();
            if let Some(bucket) = position.and_then(|position| added.buckets.get_mut(position)) {
                *bucket = bucket.saturating_sub(*count);
            }
        }
        added.zeros = added.zeros.saturating_sub(earlier.zeros);
        added.count = added.count.saturating_sub(earlier.count);
        added.sum -= earlier.sum;
        (added.min, added.max) = (None, None);
        added
    }

    /// The value that this share of the values do not exceed, to the resolution of a bucket. `None` where there are
    /// none.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank"
        )]
        let rank = ((self.count as f64 * share).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = self.zeros;
        if seen >= rank {
            return Some(0.0);
        }
        for (position, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let upper = self.upper_bound(position);
                return Some(self.max.map_or(upper, |max| upper.min(max)));
            }
        }
        None
    }

    /// The highest value that the bucket at this position holds.
    #[must_use]
    pub fn upper_bound(&self, position: usize) -> f64 {
        let index = f64::from(self.offset) + i32::try_from(position).map_or(0.0, f64::from) + 1.0;
        (index * f64::from(-self.scale).exp2()).exp2()
    }

    /// The scale: 2^-scale powers of two to a bucket.
    #[must_use]
    pub fn scale(&self) -> i32 {
        self.scale
    }

    /// The index of the first bucket.
    #[must_use]
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Counts of the buckets from the offset on.
    pub fn buckets(&self) -> impl ExactSizeIterator<Item = u64> {
        self.buckets.iter().copied()
    }

    /// The scale, lowered to `most` if it is finer, and at that scale the index and the count of each bucket that is not
    /// empty, in rising order.
    pub fn at_most(&self, most: i32) -> (i32, impl Iterator<Item = (i32, u64)>) {
        let by = self.scale.saturating_sub(most).clamp(0, 31);
        let indexed = (self.offset..).zip(&self.buckets).filter(|(_, count)| **count > 0);
        let mut fine = indexed.map(move |(index, count)| (index >> by, *count)).peekable();
        let merged = std::iter::from_fn(move || {
            let (index, mut count) = fine.next()?;
            while let Some((_, more)) = fine.next_if(|(next, _)| *next == index) {
                count += more;
            }
            Some((index, count))
        });
        (self.scale - by, merged)
    }

    /// How many values were 0.
    #[must_use]
    pub fn zeros(&self) -> u64 {
        self.zeros
    }

    /// How many values there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their sum.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// The lowest and the highest, where known.
    #[must_use]
    pub fn extremes(&self) -> Option<(f64, f64)> {
        self.min.zip(self.max)
    }
}

/// The bucket of a value above 0.
pub(super) fn index(value: f64, scale: i32) -> i32 {
    let (mantissa, exponent) = split(value);
    if scale <= 0 {
        // A power of two is the upper bound of the bucket below it.
        let correction = i32::from(mantissa == 1.0);
        return (exponent - correction) >> -scale;
    }
    // Powers of two fall on bounds at every scale, where the logarithm must not be trusted.
    if mantissa == 1.0 {
        return (exponent << scale) - 1;
    }
    #[allow(clippy::cast_possible_truncation, reason = "at most 2^20 buckets a power of two")]
    let within = (mantissa.log2() * f64::from(scale).exp2()).ceil() as i32 - 1;
    (exponent << scale) + within.max(0)
}

/// A value as mantissa, from 1 to below 2, and exponent. A subnormal counts as the smallest normal one.
pub(super) fn split(value: f64) -> (f64, i32) {
    let bits = value.max(f64::MIN_POSITIVE).to_bits();
    let exponent = i32::try_from(bits >> 52 & 0x7ff).unwrap_or(0) - 1023;
    (f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52), exponent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Each value lies within its bucket, to the error of the logarithm.
    fn holds(histogram: &Exponential, values: &[(f64, u64)]) {
        let mut expected = vec![0; histogram.buckets.len()];
        for (value, times) in values.iter().filter(|(value, _)| *value > 0.0) {
            let position = usize::try_from(index(*value, histogram.scale) - histogram.offset).expect("in range");
            expected[position] += times;
            let upper = histogram.upper_bound(position);
            let lower = upper / (-f64::from(histogram.scale)).exp2().exp2();
            assert!(*value <= upper * (1.0 + 1e-9) && *value >= lower * (1.0 - 1e-9), "{value} in ({lower}, {upper}]");
        }
        assert_eq!(histogram.buckets().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn counts_sums_and_extremes_are_those_of_the_values() {
        let mut histogram = Exponential::default();
        assert_eq!(histogram.extremes(), None);
        histogram.record(1.5, 4);
        assert_eq!((histogram.scale(), histogram.offset()), (MOST_SCALE, index(1.5, MOST_SCALE)));
        histogram.record(4.0, 1);
        for (value, times) in [(0.0, 3), (-1.0, 1), (f64::NAN, 1), (f64::INFINITY, 1), (9.0, 0)] {
            histogram.record(value, times);
        }
        assert_eq!((histogram.count(), histogram.zeros(), histogram.sum()), (8, 3, 10.0));
        assert_eq!((histogram.extremes(), histogram.buckets().sum::<u64>()), (Some((0.0, 4.0)), 5));
        assert!(histogram.scale() < MOST_SCALE, "no buckets so narrow hold both");
    }

    proptest! {
        #[test]
        fn every_value_is_in_its_bucket(values in prop::collection::vec((prop_oneof![0.0..1e-3, 0.0..1e12, Just(0.0), Just(4096.0)], 1u64..1000), 0..200)) {
            let mut histogram = Exponential::default();
            for (value, times) in &values {
                histogram.record(*value, *times);
            }
            prop_assert!(histogram.buckets.len() <= MOST_BUCKETS);
            prop_assert_eq!(histogram.count(), values.iter().map(|(_, times)| times).sum::<u64>());
            prop_assert_eq!(histogram.buckets().sum::<u64>() + histogram.zeros(), histogram.count());
            holds(&histogram, &values);
        }

        /// A difference holds what was recorded in between, whatever the scales were.
        #[test]
        fn a_difference_is_what_came_between(first in prop::collection::vec(1e-6..1e6_f64, 0..60), then in prop::collection::vec(1e-9..1e9_f64, 1..60)) {
            let mut histogram = Exponential::default();
            first.iter().for_each(|value| histogram.record(*value, 1));
            let earlier = histogram.clone();
            then.iter().for_each(|value| histogram.record(*value, 1));
            let added = histogram.since(&earlier);
            prop_assert_eq!(added.count(), then.len() as u64);
            let mut expected = vec![0; added.buckets.len()];
            for value in &then {
                expected[usize::try_from(index(*value, added.scale) - added.offset).expect("in range")] += 1;
            }
            prop_assert_eq!(added.buckets().collect::<Vec<u64>>(), expected);
        }

        /// Lowering the scale for a reader is what recording at that scale would have been.
        #[test]
        fn a_lower_scale_has_the_same_values(values in prop::collection::vec(1e-9..1e3_f64, 1..200), most in -4..12) {
            let mut histogram = Exponential::default();
            values.iter().for_each(|value| histogram.record(*value, 1));
            let (scale, buckets) = histogram.at_most(most);
            prop_assert_eq!(scale, most.min(histogram.scale()));
            let mut expected = std::collections::BTreeMap::<i32, u64>::new();
            values.iter().for_each(|value| *expected.entry(index(*value, scale)).or_default() += 1);
            prop_assert_eq!(buckets.collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
        }

        /// A quantile is the exact one's bucket.
        #[test]
        fn quantiles_are_right_to_a_bucket(mut values in prop::collection::vec(1e-3..1e3_f64, 1..200), share in 0.01..1.0_f64) {
            let mut histogram = Exponential::default();
            values.iter().for_each(|value| histogram.record(*value, 1));
            values.sort_by(f64::total_cmp);
            let rank = (values.len() as f64 * share).ceil() as usize;
            let exact = values[rank.clamp(1, values.len()) - 1];
            let returned = histogram.quantile(share).expect("there are values");
            let width = (-f64::from(histogram.scale())).exp2().exp2();
            prop_assert!(returned >= exact * (1.0 - 1e-9) && returned <= exact * width * (1.0 + 1e-9), "{} for {}", returned, exact);
        }
    }

    #[test]
    fn it_takes_room_for_no_more_buckets_than_it_may_have() {
        let mut histogram = Exponential::default();
        for n in 0..2_000 {
            histogram.record(1.5_f64.powi(n * 37 % 41 - 20) * (1.0 + f64::from(n) * 1e-5), 1);
            assert!(histogram.buckets.capacity() <= MOST_BUCKETS, "{}", histogram.buckets.capacity());
        }
        assert!(histogram.buckets.len() > MOST_BUCKETS / 2);
    }

    #[test]
    fn the_whole_range_of_doubles_fits() {
        let mut histogram = Exponential::default();
        for value in [f64::MIN_POSITIVE, 5e-324, 1.0, f64::MAX] {
            histogram.record(value, 1);
        }
        assert_eq!((histogram.count(), histogram.buckets().sum::<u64>()), (4, 4));
        histogram.record(f64::NAN, 1);
        histogram.record(f64::INFINITY, 1);
        histogram.record(-1.0, 1);
        assert_eq!(histogram.count(), 4);
    }

    /// A bucket is open below and closed above.
    #[test]
    fn a_power_of_two_belongs_to_the_bucket_below_it() {
        for scale in -3..=4 {
            for exponent in -9..=9 {
                let bucket = f64::from(index(f64::from(exponent).exp2(), scale));
                let width = (-f64::from(scale)).exp2();
                let (lower, upper) = (bucket * width, (bucket + 1.0) * width);
                let exponent = f64::from(exponent);
                assert!(lower < exponent && exponent <= upper, "2^{exponent} at scale {scale}: ({lower}, {upper}]");
            }
        }
    }
}
