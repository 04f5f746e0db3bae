//! A straight line through values that follow one another, with 90 % bounds of its slope.
//!
//! The slope is the median of the slopes between all pairs of values (Theil and Sen), so that a fourth of the values may be far off
//! the line, as the peaks of evaluations are. Its bounds are pairs' slopes too, by Kendall's variance. Neighbouring values are often
//! off the line in the same direction: the bounds are widened for the autocorrelation of the residuals at lag 1, as for fewer
//! independent values. Pure.

/// The 95 % quantile of the normal distribution: between it and its negative lie 90 %.
const Z: f64 = 1.645;
/// Beyond this, an estimated autocorrelation says that hardly any two values are independent.
const MOST_CORRELATED: f64 = 0.95;
/// Residuals beyond this many times the median one say nothing of how alike neighbours are.
const FAR_OFF: f64 = 4.0;

/// A line. Its slope is per value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trend {
    pub slope: f64,
    /// The slope's 90 % bounds.
    pub low: f64,
    pub high: f64,
    /// Where the line is at the first value and at the last.
    pub begin: f64,
    pub end: f64,
    /// How far the highest value is above it.
    pub highest: f64,
}

impl Trend {
    /// The line through at least three values.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.len() < 3 {
            return None;
        }
        let numbered = || (0..).map(f64::from).zip(values.iter().copied());
        let pair = |(at, value): (f64, f64)| {
            let later = move |(other, _): &(f64, f64)| *other > at;
            numbered().filter(later).map(move |(other, next)| (next - value) / (other - at))
        };
        let mut slopes: Vec<f64> = numbered().flat_map(pair).collect();
        slopes.sort_unstable_by(f64::total_cmp);
        let slope = middle(&slopes)?;
        let mut levels: Vec<f64> = numbered().map(|(at, value)| value - slope * at).collect();
        levels.sort_unstable_by(f64::total_cmp);
        let begin = middle(&levels)?;
        let off: Vec<f64> = numbered().map(|(at, value)| value - begin - slope * at).collect();
        #[allow(clippy::cast_precision_loss, reason = "some hundreds")]
        let n = values.len() as f64;
        let alike = correlation(&off);
        let wide = Z * (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0 * (1.0 + alike) / (1.0 - alike)).sqrt() / 2.0;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "less than the number of pairs")]
        let wide = wide.round() as usize;
        let middle = slopes.len() / 2;
        Some(Self {
            slope,
            low: slopes[middle.saturating_sub(wide)],
            high: slopes[(middle + wide).min(slopes.len() - 1)],
            begin,
            end: begin + slope * (n - 1.0),
            highest: off.iter().copied().fold(0.0, f64::max),
        })
    }

    /// In how many values the line rises by `left`, then the earliest and the latest by the slope's 90 % bounds. The
    /// earliest is for a value that is as far above the line as the highest was. The latest is infinite if the lower
    /// bound does not rise. `None` if the line does not rise.
    pub fn until(&self, left: f64) -> Option<(f64, f64, f64)> {
        let left = left.max(0.0);
        let latest = if self.low > 0.0 { left / self.low } else { f64::INFINITY };
        (self.slope > 0.0).then(|| (left / self.slope, (left - self.highest).max(0.0) / self.high, latest))
    }
}

/// The median of sorted values; `None` of nothing.
pub(super) fn middle<Value: Copy>(sorted: &[Value]) -> Option<Value> {
    sorted.get(sorted.len() / 2).copied()
}

/// How alike neighbours are, from 0 on. Values that are far off count as if they were less so.
fn correlation(off: &[f64]) -> f64 {
    let mut sizes: Vec<f64> = off.iter().map(|off| off.abs()).collect();
    sizes.sort_unstable_by(f64::total_cmp);
    let most = FAR_OFF * middle(&sizes).unwrap_or(0.0);
    let off: Vec<f64> = off.iter().map(|off| off.clamp(-most, most)).collect();
    let squares: f64 = off.iter().map(|off| off * off).sum();
    let products: f64 = off.windows(2).map(|pair| pair[0] * pair[1]).sum();
    if squares > 0.0 { (products / squares).clamp(0.0, MOST_CORRELATED) } else { 0.0 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Numbers between -1 and 1 of a fixed sequence.
    pub fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    fn is_near(is: f64, expected: f64) -> bool {
        (is - expected).abs() < 1e-6
    }

    #[test]
    fn a_straight_line_is_known_exactly_whatever_a_fifth_of_the_values_are() {
        let line = |nth: i32| 7.0 + 2.5 * f64::from(nth);
        let straight: Vec<f64> = (0..40).map(line).collect();
        let trend = Trend::of(&straight).expect("a line");
        for (is, expected) in
            [trend.slope, trend.low, trend.high, trend.begin, trend.end].into_iter().zip([2.5, 2.5, 2.5, 7.0, 104.5])
        {
            assert!(is_near(is, expected), "{trend:?}");
        }
        let (full, soonest, latest) = trend.until(50.0).expect("it rises");
        assert!(is_near(full, 20.0) && is_near(soonest, 20.0) && is_near(latest, 20.0));
        let early: Vec<f64> = (0..40).map(|nth| line(nth) + if nth < 8 { 500.0 } else { 0.0 }).collect();
        let trend = Trend::of(&early).expect("a line");
        assert!(is_near(trend.slope, 2.5) && is_near(trend.end, 104.5) && is_near(trend.highest, 500.0), "{trend:?}");
        assert_eq!(Trend::of(&[1.0, 2.0]), None);
    }

    #[test]
    fn nine_of_ten_bounds_hold_the_slope_whether_or_not_neighbours_are_alike() {
        for (alike, count) in [(0.0, 40), (0.0, 128), (0.6, 80), (0.8, 128)] {
            let (mut state, all) = (7, 400);
            let held = (0..all).filter(|_| {
                let mut off = 0.0;
                let values: Vec<f64> = (0..count)
                    .map(|nth| {
                        off = alike * off + random(&mut state);
                        0.1 * f64::from(nth) + off
                    })
                    .collect();
                let trend = Trend::of(&values).expect("a line");
                (trend.low..=trend.high).contains(&0.1)
            });
            let held = held.count() as f64 / f64::from(all);
            assert!((0.84..=0.95).contains(&held), "{alike} {count}: {held}");
        }
    }

    #[test]
    fn what_does_not_rise_has_no_time_and_what_may_not_has_no_latest() {
        let trend = |low: f64| Trend { slope: 0.1, low, high: 0.3, begin: 0.0, end: 1.0, highest: 1.0 };
        assert_eq!(Trend { slope: 0.0, ..trend(0.0) }.until(0.0), None);
        assert_eq!([0.0, -0.1].map(|low| trend(low).until(3.0).map(|until| until.2)), [Some(f64::INFINITY); 2]);
        let (full, soonest, latest) = trend(0.05).until(3.0).expect("it rises");
        assert!(is_near(full, 30.0) && is_near(soonest, 2.0 / 0.3) && is_near(latest, 60.0));
        assert_eq!(trend(0.05).until(-1.0), Some((0.0, 0.0, 0.0)), "it is full");
    }
}
