//! How a job's memory grows with its batch size, and the largest batch that fits, by ordinary least squares.
//!
//! Enters: the peak of each batch size in each run. Leaves: a line with the error of what it predicts. Invariants: a batch is
//! advised only if the upper bound of the 95 % prediction interval is at most the limit. Two points have no standard error: the
//! line itself is then the bound, and `error_bytes` is `None`.

use serde::Serialize;
#[cfg(feature = "testing")]
use utoipa::ToSchema;

/// The highest memory of one batch size in one run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[cfg_attr(feature = "testing", derive(ToSchema))]
pub struct BatchPeak {
    /// Samples.
    pub batch_size: u64,
    /// The highest memory of the GPU in any step with it, bytes.
    pub peak_bytes: u64,
    /// In how many steps.
    pub steps: u64,
}

/// Which batch size fits.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "testing", derive(ToSchema))]
pub struct Fit {
    /// By how much a further sample raises the peak, bytes.
    pub bytes_per_sample: f64,
    /// The peak at a batch size of 0 by the same line, bytes.
    pub fixed_bytes: f64,
    /// The standard error of the observed peaks from the line, bytes; `None` of two points, which are always on one.
    pub error_bytes: Option<f64>,
    /// What the peak may be at most, bytes.
    pub limit_bytes: u64,
    /// The largest batch whose peak, with the error, is at most the limit; `None` if already one sample exceeds it.
    pub largest_batch_size: Option<u64>,
    /// The largest batch whose peak by the line alone is at most the limit; `None` if already one sample exceeds it. Between
    /// these two it depends on the error and on what is needed beside the peak.
    pub possible_batch_size: Option<u64>,
    /// The peak of the largest batch by the line, bytes.
    pub predicted_peak_bytes: Option<u64>,
    /// The upper bound of the 95 % prediction interval of the peak, bytes: the peak is below it with a probability of
    /// 97.5 %. `None` for two points, which have no error.
    pub highest_peak_bytes: Option<u64>,
    /// The ratio of this batch size to the largest observed one.
    pub times_observed: Option<f64>,
    /// What is needed beside the peak with the largest batch, bytes; `None` if nothing is.
    pub slack_bytes: Option<u64>,
    /// What was observed, by batch size.
    pub points: Vec<BatchPeak>,
}

/// Student's t at 0.975, by degrees of freedom from 1; beyond them the last one is an upper bound.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// No batch is larger.
const MOST: u64 = 1 << 32;

/// What is needed beside a peak.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Slack {
    /// As a share of the peak.
    pub share: f64,
    /// For each sample, bytes.
    pub per_sample: f64,
}

impl Slack {
    fn at(self, batch: f64, peak: f64) -> f64 {
        self.share * peak + self.per_sample * batch
    }
}

/// A line through the points.
struct Line {
    slope: f64,
    intercept: f64,
    mean: f64,
    /// The sum of the squared distances of the batch sizes from their mean.
    spread: f64,
    count: f64,
    /// The standard error of the points, and Student's t for it.
    error: Option<(f64, f64)>,
}

impl Line {
    #[allow(clippy::cast_precision_loss, reason = "bytes below 2^53")]
    fn of(points: &[BatchPeak]) -> Self {
        let count = points.len() as f64;
        let xy = || points.iter().map(|point| (point.batch_size as f64, point.peak_bytes as f64));
        let mean = xy().map(|(x, _)| x).sum::<f64>() / count;
        let mean_y = xy().map(|(_, y)| y).sum::<f64>() / count;
        // Computed around the means: memory is large compared with its growth, so plain sums would lose precision.
        let spread: f64 = xy().map(|(x, _)| (x - mean).powi(2)).sum();
        let slope = xy().map(|(x, y)| (x - mean) * (y - mean_y)).sum::<f64>() / spread;
        let intercept = mean_y - slope * mean;
        let freedom = points.len().saturating_sub(2);
        let squares: f64 = xy().map(|(x, y)| (y - mean_y - slope * (x - mean)).powi(2)).sum();
        let t = T.get(freedom.min(T.len()).wrapping_sub(1));
        let error = t.map(|t| ((squares / freedom as f64).sqrt(), *t));
        Self { slope, intercept, mean, spread, count, error }
    }

    fn at(&self, batch: f64) -> f64 {
        self.intercept + self.slope * batch
    }

    /// The upper bound of the prediction interval; the line itself if no error is known.
    fn high(&self, batch: f64) -> f64 {
        let (error, t) = self.error.unwrap_or((0.0, 0.0));
        self.at(batch) + t * error * (1.0 + 1.0 / self.count + (batch - self.mean).powi(2) / self.spread).sqrt()
    }

    /// Whether the slope is positive beyond its error. The upper bound then rises everywhere, so a binary search is valid.
    fn is_certain(&self) -> bool {
        let (error, t) = self.error.unwrap_or((0.0, 0.0));
        self.slope > t * error / self.spread.sqrt()
    }
}

/// Why steps do not show how memory grows with the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// There are no steps to learn from.
    #[error("no step has a batch size and a known peak")]
    NoSteps,
    /// All steps have this batch size.
    #[error("two batch sizes are needed to see how memory grows: all steps have {0}")]
    OneSize(u64),
    /// The growth is within the error of the fit.
    #[error("memory does not grow with the batch size by more than its error")]
    NoGrowth,
}

/// The largest batch with which the peak, and what is needed beside it, stays at or below a limit.
///
/// # Errors
/// There is no point, only one batch size, or memory does not grow with the batch size by more than its error.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "batches below 2^32, bytes below 2^53"
)]
pub(super) fn fit(mut points: Vec<BatchPeak>, limit_bytes: u64, slack: Slack) -> Result<Fit, FitError> {
    points.sort_by_key(|point| (point.batch_size, point.peak_bytes));
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return Err(FitError::NoSteps);
    };
    if first.batch_size == last.batch_size {
        return Err(FitError::OneSize(first.batch_size));
    }
    let (line, most_observed) = (Line::of(&points), last.batch_size);
    if !line.is_certain() {
        return Err(FitError::NoGrowth);
    }
    let beside = |batch: u64| slack.at(batch as f64, line.high(batch as f64));
    let largest = last_that(|batch| line.high(batch as f64) + beside(batch) <= limit_bytes as f64);
    let bytes = |bytes: f64| bytes.round() as u64;
    Ok(Fit {
        bytes_per_sample: line.slope,
        fixed_bytes: line.intercept,
        error_bytes: line.error.map(|(error, _)| error),
        limit_bytes,
        largest_batch_size: largest,
        possible_batch_size: last_that(|batch| line.at(batch as f64) <= limit_bytes as f64),
        predicted_peak_bytes: largest.map(|batch| bytes(line.at(batch as f64))),
        highest_peak_bytes: largest.filter(|_| line.error.is_some()).map(|batch| bytes(line.high(batch as f64))),
        slack_bytes: largest.filter(|_| slack != Slack::default()).map(|batch| bytes(beside(batch))),
        times_observed: largest.map(|batch| batch as f64 / most_observed as f64),
        points,
    })
}

/// The largest batch that fits, where every smaller one does too; `None` if not even one sample does.
pub(in crate::advise) fn last_that(fits: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (1, MOST);
    while low < high {
        let middle = low.midpoint(high);
        if fits(middle) { low = middle + 1 } else { high = middle }
    }
    (low > 1).then(|| low - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn points(of: &[(u64, u64)]) -> Vec<BatchPeak> {
        of.iter()
            .map(|(batch_size, mib)| BatchPeak { batch_size: *batch_size, peak_bytes: mib * MIB, steps: 1 })
            .collect()
    }

    /// The numbers are of an independent computation in Python.
    #[test]
    fn a_batch_is_advised_with_its_error() {
        let fit = fit(points(&[(4, 1_403), (8, 1_799), (16, 2_593), (24, 3_405)]), 8_000 * MIB, Slack::default())
            .expect("a line");
        let mib = |bytes: f64| bytes / MIB as f64;
        assert!((mib(fit.bytes_per_sample) - 100.050_847).abs() < 1e-4, "{}", mib(fit.bytes_per_sample));
        assert!((mib(fit.fixed_bytes) - 999.338_983).abs() < 1e-3, "{}", mib(fit.fixed_bytes));
        let error = mib(fit.error_bytes.expect("known"));
        assert!((error - 6.457_160).abs() < 1e-3, "{error}");
        assert_eq!((fit.largest_batch_size, fit.possible_batch_size), (Some(68), Some(69)));
        assert_eq!(fit.predicted_peak_bytes.map(|bytes| bytes / MIB), Some(7_802));
        assert_eq!(fit.highest_peak_bytes.map(|bytes| bytes / MIB), Some(7_907));
    }

    #[test]
    fn what_points_do_not_say_is_not_said() {
        assert_eq!(fit(Vec::new(), MIB, Slack::default()).err(), Some(FitError::NoSteps));
        assert_eq!(fit(points(&[(32, 5), (32, 6)]), MIB, Slack::default()).err(), Some(FitError::OneSize(32)));
        for flat in [[(1, 50), (2, 50), (3, 50)], [(1, 50), (2, 40), (3, 30)], [(1, 50), (2, 90), (3, 55)]] {
            assert_eq!(fit(points(&flat), 100 * MIB, Slack::default()).err(), Some(FitError::NoGrowth), "{flat:?}");
        }
        let two = fit(points(&[(10, 200), (20, 300)]), 1_000 * MIB, Slack::default()).expect("a line");
        assert_eq!((two.largest_batch_size, two.error_bytes, two.highest_peak_bytes), (Some(90), None, None));
        assert_eq!(two.times_observed, Some(4.5));
        let full = fit(points(&[(10, 200), (20, 300)]), 109 * MIB, Slack::default()).expect("a line");
        assert_eq!(
            (full.largest_batch_size, full.possible_batch_size, full.predicted_peak_bytes),
            (None, None, None),
            "not even one sample"
        );
    }

    proptest! {
        /// The advised batch fits with its error, and the next one does not.
        #[test]
        fn the_largest_batch_is_the_last_that_fits(
            slope in 1_u64..4_000, fixed in 0_u64..40_000, limit in 0_u64..150_000,
            noise in proptest::collection::vec(0_u64..50, 3..12),
        ) {
            let of: Vec<_> = noise.iter().enumerate().map(|(nth, noise)| {
                let batch = 2 * (nth as u64 + 1);
                (batch, fixed + slope * batch + noise)
            }).collect();
            let line = Line::of(&points(&of));
            if let Ok(fit) = fit(points(&of), limit * MIB, Slack::default()) {
                let high = |batch: u64| line.high(batch as f64);
                let largest = fit.largest_batch_size.unwrap_or(0);
                prop_assert!(largest == 0 || high(largest) <= (limit * MIB) as f64);
                prop_assert!(high(largest + 1) > (limit * MIB) as f64);
                prop_assert!(fit.highest_peak_bytes >= fit.predicted_peak_bytes);
            } else {
                prop_assert!(!line.is_certain());
            }
        }
    }
}
