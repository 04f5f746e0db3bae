//! The medium lane's readings of one GPU over time: power, utilization, throttle reasons and activity. Energy and idle
//! time are kept as running totals, so that any interval costs two look-ups.

use super::active::{ActiveReading, ActiveSeconds, ActiveTotals};
use super::means::ActivityShares;
use super::readings::Activity;
use crate::clock::SECOND_NS;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Points kept at most: 10 minutes at 30 ms, 1 MB.
pub const MOST_POINTS: usize = 20_000;

/// What the readings of one GPU take at most, bytes.
#[must_use]
pub fn most_usage_bytes() -> usize {
    MOST_POINTS * size_of::<Point>() + ActiveTotals::most_bytes(MOST_POINTS)
}

/// The medium lane's period on a GPU on which nothing runs, unless the configured one is longer, nanoseconds.
pub const IDLE_PERIOD_NS: i64 = SECOND_NS;

/// What an interval cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Energy, joules.
    pub energy_joules: Option<f64>,
    /// Time without any kernel, seconds. The driver reports utilization over windows of 1/6 to 1 s, so that this is an
    /// estimate for shorter intervals.
    pub idle_seconds: Option<f64>,
    /// How long its units worked.
    pub active: ActiveSeconds,
}

/// One reading of the medium lane.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UsagePoint {
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// Power draw, watts.
    pub power_watts: Option<f64>,
    /// Share of the driver's last window in which a kernel ran, 0 to 1.
    pub utilization_ratio: Option<f64>,
    /// Why clocks were held back: NVML's mask, of which [`THROTTLE_REASONS`](super::THROTTLE_REASONS) names some bits.
    pub throttle_reasons: Option<u64>,
    /// What its multiprocessors and its memory did in the time before.
    pub activity: Activity,
}

impl UsagePoint {
    /// Its shares of the time before it.
    #[must_use]
    pub fn shares(&self) -> ActivityShares {
        let Activity { sm_active_ratio, tensor_active_ratio, dram_active_ratio, .. } = self.activity;
        [self.utilization_ratio, sm_active_ratio, tensor_active_ratio, dram_active_ratio]
    }
}

/// Readings of the medium lane with their running totals. One lane writes, attribution reads.
#[derive(Debug)]
pub struct Series {
    keep_ns: i64,
    /// A reading holds for this long after it was taken; beyond, nothing is known.
    hold_ns: i64,
    kept: Mutex<Kept>,
}

/// What is kept.
#[derive(Debug)]
struct Kept {
    points: VecDeque<Point>,
    active: ActiveTotals,
}

/// One reading in 48 bytes: there are thousands for each GPU.
#[derive(Debug, Clone, Copy)]
struct Point {
    at_ns: i64,
    /// Totals up to `at_ns`.
    energy_joules: f64,
    idle_seconds: f64,
    power_milliwatts: Packed,
    busy: Busy,
    activity: [Share; 4],
    /// Total time before this point without a known value, microseconds, modulo 2^32. Totals are only compared for equality.
    unknown_energy_us: u32,
    unknown_idle_us: u32,
}

/// A number that may be unknown, stored as a whole multiple of a fraction of its unit.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Packed(u32);

impl Packed {
    const UNKNOWN: Self = Self(u32::MAX);

    /// `value` in units of `1 / parts`. A value that is negative or does not fit 32 bits becomes unknown.
    fn new(value: Option<f64>, parts: f64) -> Self {
        let units =
            value.map(|value| (value * parts).round()).filter(|units| (0.0..f64::from(u32::MAX)).contains(units));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number in range")]
        units.map_or(Self::UNKNOWN, |units| Self(units as u32))
    }

    fn value(self, parts: f64) -> Option<f64> {
        (self != Self::UNKNOWN).then(|| f64::from(self.0) / parts)
    }
}

/// Utilization in parts of a million, in the lower bits, and NVML's mask of clock event reasons in the upper ones; all ones
/// is "not known" of either.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Busy(u32);

impl Busy {
    const RATIO_BITS: u32 = 20;
    const NO_RATIO: u32 = (1 << Self::RATIO_BITS) - 1;
    const NO_REASONS: u32 = u32::MAX >> Self::RATIO_BITS;
    const UNKNOWN: Self = Self(u32::MAX);

    /// A ratio above 1 becomes unknown. So does a mask of more than eleven bits; NVML uses nine.
    fn new(utilization_ratio: Option<f64>, throttle_reasons: Option<u64>) -> Self {
        let ratio = match Packed::new(utilization_ratio, MICRO) {
            Packed(ppm) if f64::from(ppm) <= MICRO => ppm,
            _ => Self::NO_RATIO,
        };
        let reasons = throttle_reasons.and_then(|reasons| u32::try_from(reasons).ok());
        let reasons = reasons.filter(|reasons| *reasons <= Self::NO_REASONS >> 1);
        Self(ratio | reasons.unwrap_or(Self::NO_REASONS) << Self::RATIO_BITS)
    }

    fn utilization_ratio(self) -> Option<f64> {
        let ratio = self.0 & Self::NO_RATIO;
        if ratio == Self::NO_RATIO { None } else { Packed(ratio).value(MICRO) }
    }

    fn throttle_reasons(self) -> Option<u64> {
        Some(self.0 >> Self::RATIO_BITS).filter(|reasons| *reasons != Self::NO_REASONS).map(u64::from)
    }
}

/// A share in 16 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Share(u16);

impl Share {
    /// What is no share is not known.
    fn new(share: Option<f64>) -> Self {
        Self(
            u16::try_from(Packed::new(share, Self::PARTS).0)
                .ok()
                .filter(|parts| f64::from(*parts) <= Self::PARTS)
                .unwrap_or(u16::MAX),
        )
    }

    fn value(self) -> Option<f64> {
        (self.0 != u16::MAX).then(|| f64::from(self.0) / Self::PARTS)
    }

    const PARTS: f64 = 50_000.0;
}

fn shares(activity: &Activity) -> [Share; 4] {
    let Activity { sm_active_ratio, sm_occupancy_ratio, tensor_active_ratio, dram_active_ratio } = *activity;
    [sm_active_ratio, sm_occupancy_ratio, tensor_active_ratio, dram_active_ratio].map(Share::new)
}

fn activity(shares: &[Share; 4]) -> Activity {
    let [sm_active_ratio, sm_occupancy_ratio, tensor_active_ratio, dram_active_ratio] = shares.map(Share::value);
    Activity { sm_active_ratio, sm_occupancy_ratio, tensor_active_ratio, dram_active_ratio }
}

const MILLI: f64 = 1e3;
const MICRO: f64 = 1e6;

impl Series {
    /// Keeps the readings of the last `keep_ns`. Each holds for three periods of its lane, and for at least one and a half
    /// times [`IDLE_PERIOD_NS`].
    #[must_use]
    pub fn new(keep_ns: i64, period_ns: i64) -> Self {
        // Room for all points is reserved at once: growth by doubling could reserve more than is needed. Pages that are not used
        // yet are not resident.
        let points = usize::try_from(keep_ns / period_ns.max(1)).unwrap_or(0).saturating_add(2).min(MOST_POINTS);
        let most_ns = i64::try_from(MOST_POINTS).unwrap_or(i64::MAX).saturating_mul(period_ns);
        Self {
            keep_ns: keep_ns.min(most_ns),
            hold_ns: (3 * period_ns).max(IDLE_PERIOD_NS * 3 / 2),
            kept: Mutex::new(Kept { points: VecDeque::with_capacity(points), active: ActiveTotals::default() }),
        }
    }

    /// How far back its readings go, nanoseconds.
    #[must_use]
    pub fn keep_ns(&self) -> i64 {
        self.keep_ns
    }

    /// For how long a reading holds, nanoseconds.
    #[must_use]
    pub fn hold_ns(&self) -> i64 {
        self.hold_ns
    }

    /// Bytes that its readings take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let kept = self.kept();
        kept.points.len() * size_of::<Point>() + kept.active.bytes()
    }

    /// Adds a reading; one that is not later than the last is ignored.
    pub fn push(&self, reading: UsagePoint) {
        let UsagePoint { at_ns, power_watts, utilization_ratio, throttle_reasons, activity } = reading;
        let mut kept = self.kept();
        let Kept { points, active } = &mut *kept;
        let base = match points.back() {
            None => Point::first(at_ns),
            Some(last) if last.at_ns >= at_ns => return,
            Some(last) => last.at(at_ns, self.hold_ns),
        };
        while points.len() >= MOST_POINTS || points.front().is_some_and(|point| point.at_ns < at_ns - self.keep_ns) {
            points.pop_front();
        }
        let before_ns = points.back().map(|last| last.at_ns);
        let point = Point {
            power_milliwatts: Packed::new(power_watts, MILLI),
            busy: Busy::new(utilization_ratio, throttle_reasons),
            activity: shares(&activity),
            ..base
        };
        points.push_back(point);
        active.push(before_ns, &point.active(), self.hold_ns);
        active.forget(points.front().map_or(at_ns, |oldest| oldest.at_ns));
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the interval cost; each part is `None` unless it is known for all of the interval.
    #[must_use]
    pub fn usage(&self, from_ns: i64, to_ns: i64) -> Usage {
        let kept = self.kept();
        let points = &kept.points;
        let Some((from, to)) = ends(points, from_ns, to_ns, self.hold_ns) else { return Usage::default() };
        Usage {
            energy_joules: (from.unknown_energy_us == to.unknown_energy_us)
                .then_some(to.energy_joules - from.energy_joules),
            idle_seconds: (from.unknown_idle_us == to.unknown_idle_us).then_some(to.idle_seconds - from.idle_seconds),
            active: kept.active.of(from_ns, to_ns, self.hold_ns, |after_ns| {
                let first = points.partition_point(|point| point.at_ns <= after_ns).checked_sub(1)?;
                Some(points.range(first..).map(Point::active))
            }),
        }
    }

    /// Energy of the part of the interval of which power is known, joules: a lower bound of what was used. 0 if the
    /// interval begins before the first reading that is kept.
    #[must_use]
    pub fn known_energy_joules(&self, from_ns: i64, to_ns: i64) -> f64 {
        ends(&self.kept().points, from_ns, to_ns, self.hold_ns)
            .map_or(0.0, |(from, to)| to.energy_joules - from.energy_joules)
    }

    /// The readings after one time and up to another, oldest first.
    #[must_use]
    pub fn points(&self, after_ns: i64, to_ns: i64) -> Vec<UsagePoint> {
        let points = &self.kept().points;
        let (first, end) = (
            points.partition_point(|point| point.at_ns <= after_ns),
            points.partition_point(|point| point.at_ns <= to_ns),
        );
        points.range(first..end.max(first)).map(Point::reading).collect()
    }
}

/// The totals at both ends of an interval.
fn ends(points: &VecDeque<Point>, from_ns: i64, to_ns: i64, hold_ns: i64) -> Option<(Point, Point)> {
    let at = |at_ns| {
        let later = points.partition_point(|point| point.at_ns <= at_ns);
        Some(points.get(later.checked_sub(1)?)?.at(at_ns, hold_ns))
    };
    Some((at(from_ns)?, at(to_ns)?))
}

impl Point {
    fn first(at_ns: i64) -> Self {
        Self {
            at_ns,
            energy_joules: 0.0,
            idle_seconds: 0.0,
            power_milliwatts: Packed::UNKNOWN,
            busy: Busy::UNKNOWN,
            activity: shares(&Activity::default()),
            unknown_energy_us: 0,
            unknown_idle_us: 0,
        }
    }

    fn reading(&self) -> UsagePoint {
        UsagePoint {
            at_ns: self.at_ns,
            power_watts: self.power_watts(),
            utilization_ratio: self.busy.utilization_ratio(),
            throttle_reasons: self.busy.throttle_reasons(),
            activity: activity(&self.activity),
        }
    }

    fn active(&self) -> ActiveReading {
        let [sm, _, tensor, dram] = self.activity;
        ActiveReading { at_ns: self.at_ns, shares: [sm, tensor, dram].map(Share::value) }
    }

    fn power_watts(&self) -> Option<f64> {
        self.power_milliwatts.value(MILLI)
    }

    /// NVML reports the share of its window in which a kernel ran: in the rest none did.
    fn idle_ratio(&self) -> Option<f64> {
        self.busy.utilization_ratio().map(|ratio| (1.0 - ratio).clamp(0.0, 1.0))
    }

    /// The totals at a later time, with this point's readings held.
    fn at(&self, at_ns: i64, hold_ns: i64) -> Self {
        let length_ns = at_ns - self.at_ns;
        let held_ns = length_ns.min(hold_ns);
        #[allow(clippy::cast_precision_loss, reason = "at most the hold time")]
        let held_s = held_ns as f64 / SECOND_NS as f64;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "begins anew at 2^32")]
        let unknown_us = |is_known: bool| ((if is_known { length_ns - held_ns } else { length_ns }) / 1_000) as u32;
        Self {
            at_ns,
            energy_joules: self.energy_joules + self.power_watts().unwrap_or(0.0) * held_s,
            idle_seconds: self.idle_seconds + self.idle_ratio().unwrap_or(0.0) * held_s,
            unknown_energy_us: self.unknown_energy_us.wrapping_add(unknown_us(self.power_watts().is_some())),
            unknown_idle_us: self.unknown_idle_us.wrapping_add(unknown_us(self.idle_ratio().is_some())),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS;

    fn at_ms(ms: i64) -> i64 {
        1_000 * SECOND_NS + ms * MILLISECOND_NS
    }

    fn series(points: &[(i64, Option<f64>, Option<f64>)]) -> Series {
        let series = Series::new(600 * SECOND_NS, 100 * MILLISECOND_NS);
        for (ms, power, utilization) in points {
            series.push(UsagePoint {
                at_ns: at_ms(*ms),
                power_watts: *power,
                utilization_ratio: *utilization,
                ..UsagePoint::default()
            });
        }
        series
    }

    #[test]
    fn a_long_interval_is_the_sum_of_its_parts_and_reads_few_readings() {
        let series = Series::new(600 * SECOND_NS, 100 * MILLISECOND_NS);
        let share = |nth: i64| (nth * 7_919 % 1_000) as f64 / 1e3;
        for nth in 0..3_000 {
            let tensor = (nth != 2_000).then(|| share(nth));
            let activity =
                Activity { sm_active_ratio: Some(share(nth)), tensor_active_ratio: tensor, ..Activity::default() };
            series.push(UsagePoint { at_ns: at_ms(nth * 100), activity, ..UsagePoint::default() });
        }
        let of = |from_ms, to_ms| series.usage(at_ms(from_ms), at_ms(to_ms)).active;
        for (from, to) in [(0, 2_999), (1, 64), (63, 64), (63, 127), (64, 128), (5, 1_700), (100, 129), (2_100, 2_999)]
        {
            let expected: f64 = (from + 1..=to).map(|nth| share(nth) / 10.0).sum();
            let sm = f64::from(of(from * 100, to * 100).sm.expect("known"));
            assert!((sm - expected).abs() < 1e-4 * expected.max(1.0), "{from} to {to}: {sm}, not {expected}");
            let (half, rest) = (of(from * 100, from * 100 + 50), of(from * 100 + 50, to * 100));
            assert!((f64::from(half.sm.unwrap() + rest.sm.unwrap()) - expected).abs() < 1e-4 * expected.max(1.0));
        }
        // One reading of which it is not known, wherever it lies in the interval.
        assert!(of(0, 199_900).tensor.is_some() && of(200_000, 299_900).tensor.is_some());
        assert!(
            of(0, 200_000).tensor.is_none() && of(0, 299_900).tensor.is_none() && of(199_910, 199_950).tensor.is_none()
        );
        let reads = std::cell::Cell::new(0);
        let kept = series.kept();
        kept.active.of(at_ms(10), at_ms(299_000), series.hold_ns, |after_ns| {
            let first = kept.points.partition_point(|point| point.at_ns <= after_ns).checked_sub(1)?;
            let count = |point: &Point| {
                reads.set(reads.get() + 1);
                point.active()
            };
            Some(kept.points.range(first..).map(count))
        });
        assert!(reads.get() <= 2 * 66, "{} readings", reads.get());
    }

    #[test]
    fn units_worked_in_the_time_before_each_reading() {
        let series = Series::new(600 * SECOND_NS, 100 * MILLISECOND_NS);
        let push = |ms, tensor: Option<f64>| {
            let activity = Activity { sm_active_ratio: Some(0.5), tensor_active_ratio: tensor, ..Activity::default() };
            series.push(UsagePoint { at_ns: at_ms(ms), activity, ..UsagePoint::default() });
        };
        push(0, Some(0.9));
        push(100, Some(0.2));
        push(200, Some(0.4));
        let tensor = |from_ms, to_ms| {
            let seconds = series.usage(at_ms(from_ms), at_ms(to_ms)).active.tensor?;
            Some((f64::from(seconds) * 1e6).round() / 1e3)
        };
        assert_eq!((tensor(0, 200), tensor(50, 150), tensor(20, 80)), (Some(60.0), Some(30.0), Some(12.0)));
        // The last one holds.
        assert_eq!((tensor(150, 300), tensor(300, 400)), (Some(60.0), Some(40.0)));
        assert_eq!((tensor(200, 1_700), tensor(200, 1_701)), (Some(600.0), None));
        assert_eq!(tensor(-1, 100), None, "before the first");
        let active = series.usage(at_ms(0), at_ms(200)).active;
        assert_eq!((active.sm, active.dram), (Some(0.1), None));
        push(300, None);
        push(400, Some(0.1));
        assert_eq!((tensor(0, 201), tensor(210, 400), tensor(300, 400)), (None, None, Some(10.0)));
        push(2_000, Some(0.1));
        assert_eq!(tensor(350, 450), None, "nothing is known of the time between two that are far apart");
    }

    #[test]
    fn energy_is_power_times_time_within_and_across_readings() {
        let series =
            series(&[(0, Some(100.0), Some(0.0)), (100, Some(300.0), Some(0.5)), (200, Some(300.0), Some(0.5))]);
        let usage = series.usage(at_ms(50), at_ms(150));
        assert!((usage.energy_joules.unwrap() - (5.0 + 15.0)).abs() < 1e-9);
        // Idle for 50 ms, then half of the time for 50 ms.
        assert!((usage.idle_seconds.unwrap() - 0.075).abs() < 1e-9);
    }

    #[test]
    fn what_is_not_known_all_the_way_is_not_known() {
        let series = series(&[(0, Some(100.0), None), (100, None, Some(0.0)), (200, Some(100.0), Some(0.0))]);
        assert_eq!(series.usage(at_ms(50), at_ms(150)), Usage::default());
        assert_eq!(series.usage(at_ms(110), at_ms(190)).energy_joules, None);
        assert!(series.usage(at_ms(110), at_ms(190)).idle_seconds.is_some());
        assert_eq!(series.usage(at_ms(-50), at_ms(50)), Usage::default(), "before the first reading");
    }

    #[test]
    fn it_says_how_far_back_it_goes_also_where_its_room_ends_that() {
        let keep_s = |keep_s: i64, period_ms: i64| {
            Series::new(keep_s * SECOND_NS, period_ms * MILLISECOND_NS).keep_ns() / SECOND_NS
        };
        assert_eq!([keep_s(600, 100), keep_s(600, 10), keep_s(86_400, 100)], [600, 200, 2_000]);
    }

    #[test]
    fn a_reading_holds_for_three_periods_only() {
        let series = Series::new(600 * SECOND_NS, SECOND_NS);
        let (power_watts, utilization_ratio) = (Some(100.0), Some(0.0));
        series.push(UsagePoint { at_ns: at_ms(0), power_watts, utilization_ratio, ..UsagePoint::default() });
        assert!(series.usage(at_ms(0), at_ms(3_000)).energy_joules.is_some());
        assert_eq!(series.usage(at_ms(0), at_ms(3_001)).energy_joules, None);
    }

    #[test]
    fn a_reading_of_a_short_period_holds_as_long_as_an_idle_gpu_is_not_read() {
        let series = series(&[(0, Some(100.0), Some(0.0))]);
        assert!(series.usage(at_ms(0), at_ms(1_500)).energy_joules.is_some());
        assert_eq!(series.usage(at_ms(0), at_ms(1_501)).energy_joules, None);
    }

    #[test]
    fn readings_come_back_as_they_were_kept() {
        let readings = [(0, Some(700.123), Some(0.98)), (100, None, Some(1.0)), (200, Some(0.0), None)];
        let given: Vec<_> = series(&readings)
            .points(at_ms(-1), at_ms(200))
            .into_iter()
            .map(|point| (point.at_ns, point.power_watts, point.utilization_ratio))
            .collect();
        assert_eq!(given, readings.map(|(ms, power, utilization)| (at_ms(ms), power, utilization)));
        assert_eq!(size_of::<Point>(), 48);
    }

    #[test]
    fn reasons_come_back_beside_utilization_known_or_not() {
        let series = series(&[]);
        let given =
            [(Some(0.0), Some(0)), (Some(1.0), Some(0x44)), (None, Some(0x1ff)), (Some(0.5), None), (None, None)];
        for (n, (utilization_ratio, throttle_reasons)) in (0..).zip(given) {
            series.push(UsagePoint { at_ns: at_ms(n), utilization_ratio, throttle_reasons, ..UsagePoint::default() });
        }
        let points = series.points(at_ms(-1), at_ms(9));
        assert_eq!(
            points.iter().map(|point| (point.utilization_ratio, point.throttle_reasons)).collect::<Vec<_>>(),
            given
        );
        for (ratio, reasons) in [(1.000_001, 0x800), (1.1, u64::MAX)] {
            assert_eq!(Busy::new(Some(ratio), Some(reasons)), Busy::UNKNOWN);
        }
    }

    #[test]
    fn activity_comes_back_to_a_fiftieth_of_a_thousandth_and_what_is_no_share_is_not_known() {
        let series = series(&[]);
        let given = [Some(0.123_46), Some(1.0), None, Some(0.0)];
        let [sm_active_ratio, sm_occupancy_ratio, tensor_active_ratio, dram_active_ratio] = given;
        let activity = Activity { sm_active_ratio, sm_occupancy_ratio, tensor_active_ratio, dram_active_ratio };
        series.push(UsagePoint { at_ns: at_ms(0), activity, ..UsagePoint::default() });
        let wrong = Activity { sm_active_ratio: Some(1.1), tensor_active_ratio: Some(f64::NAN), ..Activity::default() };
        series.push(UsagePoint { at_ns: at_ms(100), activity: wrong, ..UsagePoint::default() });
        let kept: Vec<_> = series.points(at_ms(-1), at_ms(100)).iter().map(|point| point.activity).collect();
        assert_eq!(kept, [activity, Activity::default()]);
    }

    #[test]
    fn what_no_gpu_can_be_is_no_reading() {
        let series = series(&[(0, Some(-1.0), Some(f64::NAN)), (100, Some(1e10), Some(0.5))]);
        let given = series.points(at_ms(-1), at_ms(100));
        assert!(given.iter().all(|point| point.power_watts.is_none()), "{given:?}");
        assert_eq!(given[0].utilization_ratio, None);
    }

    #[test]
    fn readings_are_in_order_and_kept_for_their_time_and_in_their_number() {
        let series = Series::new(1_000, 10);
        let push = |at_ns| {
            let reading = UsagePoint { at_ns, ..UsagePoint::default() };
            series.push(reading);
        };
        let times = || series.points(i64::MIN, i64::MAX).iter().map(|point| point.at_ns).collect::<Vec<_>>();
        [5, 20, 20, 7, 30].into_iter().for_each(push);
        assert_eq!(times(), [5, 20, 30], "what is not later than the last is ignored");
        push(1_005);
        assert_eq!(times(), [5, 20, 30, 1_005]);
        push(1_020);
        assert_eq!(times(), [20, 30, 1_005, 1_020]);
        assert_eq!(series.points(20, 1_005).iter().map(|point| point.at_ns).collect::<Vec<_>>(), [30, 1_005]);
        assert!(series.points(1_005, 20).is_empty());
        let many = Series::new(i64::MAX / 2, 1);
        (0..MOST_POINTS as i64 + 3).for_each(|at_ns| {
            many.push(UsagePoint { at_ns, ..UsagePoint::default() });
        });
        let points = many.points(i64::MIN, i64::MAX);
        assert_eq!((points.len(), points[0].at_ns), (MOST_POINTS, 3));
    }

    #[test]
    fn room_is_made_for_all_readings_that_are_kept_at_once() {
        let room = |keep_ns, period_ns| Series::new(keep_ns, period_ns).kept().points.capacity();
        assert_eq!((room(1_000, 10), room(i64::MAX, 1), room(7, 0)), (102, MOST_POINTS, 9));
    }

    #[test]
    fn known_energy_is_that_of_the_known_part() {
        let series =
            series(&[(0, Some(100.0), None), (100, None, None), (200, Some(100.0), None), (300, Some(100.0), None)]);
        assert!((series.known_energy_joules(at_ms(50), at_ms(250)) - 10.0).abs() < 1e-9);
        assert_eq!(series.known_energy_joules(at_ms(-50), at_ms(250)), 0.0);
    }
}
