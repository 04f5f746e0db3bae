//! A GPU's energy counter, known at any time although it is seldom read.
//!
//! Reading the counter holds the driver's lock for 3 ms on an H200, and for 15 ms now and then: at once a second this
//! alone would make the fast lane miss 0.3 % of its ticks. So it is read once in five minutes, and in between the power,
//! which the medium lane reads as often as it changes, is added up. Beside training on H100s that sum is 1.4 % more than the
//! counter's, so each reading also corrects what is added up until the next.
//!
//! A driver in trouble answers any number. A reading is therefore believed only if it follows the last one that was, as far as
//! power and time allow; one that does not, such as the first, is believed once the next reading follows it.

use super::series::Series;
use crate::clock::SECOND_NS;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

/// The longest time between two readings of the counter, nanoseconds.
const LONGEST_NS: i64 = 300 * SECOND_NS;
/// Plausible ratios of the counter's joules to the integrated joules. A ratio outside of this range is not caused by the
/// difference of two meters, and is ignored.
const PLAUSIBLE: RangeInclusive<f64> = 0.5..=2.0;
/// Ratios of the counter's joules to the integrated joules within which two readings confirm each other. Wider than
/// [`PLAUSIBLE`], because they may be one second apart only, and the counter lags by a tenth of a second.
const CONFIRMING: RangeInclusive<f64> = 0.25..=4.0;
/// More power than any GPU draws, watts.
const MOST_WATTS: f64 = 10_000.0;
/// More than any GPU has used since its driver was loaded: [`MOST_WATTS`] for thirty years, joules.
const MOST_JOULES: f64 = 1e13;

/// The counter of one GPU.
#[derive(Debug)]
pub struct Energy {
    period_ns: i64,
    state: Mutex<State>,
}

#[derive(Debug, Clone)]
struct State {
    /// The last reading that was believed, also from before its GPU was away.
    believed: Option<Reading>,
    /// Whether the GPU is away, or nothing was believed since it came back.
    is_away: bool,
    /// A reading that does not follow the believed one. It is believed if the next one follows it.
    doubted: Option<Reading>,
    /// When it is to be read next, nanoseconds of the timeline.
    due_ns: i64,
    /// The most that was returned: a counter never falls.
    returned_joules: f64,
    /// The last plausible ratio of the counter's joules to the integrated joules; 1 until there is one.
    share: f64,
}

/// What the counter said.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at_ns: i64,
    joules: f64,
}

impl Reading {
    /// The joules that were used until `later`, by the counter, if that is possible at all.
    fn used_until(self, later: Self) -> Option<f64> {
        let seconds = (later.at_ns - self.at_ns) as f64 * 1e-9;
        Some(later.joules - self.joules).filter(|used| (0.0..=MOST_WATTS * seconds).contains(used))
    }
}

/// The joules between two times by power, if power is known for all of it, and not zero.
fn by_power(power: &Series, from: Reading, to: Reading) -> Option<f64> {
    power.usage(from.at_ns, to.at_ns).energy_joules.filter(|joules| *joules > 0.0)
}

impl State {
    /// Whether a reading is what the GPU has used since the believed one: it is not lower, nor more than power allows.
    fn follows_believed(&self, reading: Reading, power: &Series) -> bool {
        let Some(believed) = self.believed else { return false };
        let most = by_power(power, believed, reading).map_or(f64::INFINITY, |joules| joules * CONFIRMING.end());
        believed.used_until(reading).is_some_and(|used| used <= most)
    }

    /// Whether a reading is what the GPU has used since the doubted one. A counter that stands still while the GPU draws power
    /// confirms nothing.
    fn confirms_doubted(&self, reading: Reading, power: &Series) -> bool {
        let Some(doubted) = self.doubted else { return false };
        let known = by_power(power, doubted, reading);
        doubted.used_until(reading).is_some_and(|used| known.is_none_or(|joules| CONFIRMING.contains(&(used / joules))))
    }
}

impl Energy {
    /// The counter of a GPU whose power readings are kept for `keep_ns`. It is read at least twice in that time, so that all
    /// power readings since its last reading are still there.
    #[must_use]
    pub fn new(keep_ns: i64) -> Self {
        let state =
            State { believed: None, is_away: true, doubted: None, due_ns: i64::MIN, returned_joules: 0.0, share: 1.0 };
        Self { period_ns: LONGEST_NS.min(keep_ns / 2), state: Mutex::new(state) }
    }

    /// Takes a reading of the counter; `power` has the GPU's power since the last ones. A reading that cannot be
    /// believed is kept as doubted. Two readings that confirm each other replace the believed one. If they are lower,
    /// the driver was loaded again, and the counter restarts.
    pub fn set(&self, at_ns: i64, joules: f64, power: &Series) {
        if !(0.0..=MOST_JOULES).contains(&joules) {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let reading = Reading { at_ns, joules };
        if state.follows_believed(reading, power) {
            if let Some(believed) = state.believed.filter(|_| !state.is_away) {
                let share = by_power(power, believed, reading).map(|added| (joules - believed.joules) / added);
                state.share = share.filter(|share| PLAUSIBLE.contains(share)).unwrap_or(state.share);
            }
        } else if state.confirms_doubted(reading, power) {
            if state.believed.is_some_and(|believed| joules < believed.joules) {
                state.returned_joules = 0.0;
            }
        } else {
            state.doubted = Some(reading);
            return;
        }
        (state.believed, state.is_away, state.doubted) = (Some(reading), false, None);
    }

    /// Whether the counter is due at `at_ns`: a period has passed since the last try, there is no reading since the GPU came
    /// back, or the last one is in doubt. Returning true counts as a try, so the caller must read the counter.
    #[must_use]
    pub fn is_due(&self, at_ns: i64) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = state.is_away || state.doubted.is_some() || at_ns >= state.due_ns;
        if is_due {
            state.due_ns = at_ns + self.period_ns;
        }
        is_due
    }

    /// The GPU is gone: [`joules`](Self::joules) returns `None` until a reading is believed again. The highest value
    /// that was returned is kept, so that the counter does not fall if the GPU comes back with fewer joules than were
    /// added up.
    pub fn lose(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.is_away, state.doubted) = (true, None);
    }

    /// A copy for a new state of the same GPU. It returns nothing until the counter is read again.
    #[must_use]
    pub fn go_on(&self) -> Self {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Self { period_ns: self.period_ns, state: Mutex::new(State { is_away: true, doubted: None, ..state }) }
    }

    /// Energy at `at_ns`, joules: the last reading that was believed and the power since, as far as that is known. `None`
    /// before there is one.
    #[must_use]
    pub fn joules(&self, at_ns: i64, power: &Series) -> Option<f64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let believed = state.believed.filter(|_| !state.is_away)?;
        let since_joules = state.share * power.known_energy_joules(believed.at_ns, at_ns);
        state.returned_joules = state.returned_joules.max(believed.joules + since_joules);
        Some(state.returned_joules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{MILLISECOND_NS, SECOND_NS};
    use crate::gpu::UsagePoint;

    /// Power of 100 W, read every 100 ms for ten seconds.
    fn hundred_watts() -> Series {
        hundred_watts_but_for(0..0)
    }

    /// The same, of which these milliseconds are not known.
    fn hundred_watts_but_for(unknown_ms: std::ops::Range<i64>) -> Series {
        let series = Series::new(600 * SECOND_NS, 100 * MILLISECOND_NS);
        (0..=100).for_each(|n| {
            series.push(UsagePoint {
                at_ns: SECOND_NS + n * 100 * MILLISECOND_NS,
                power_watts: (!unknown_ms.contains(&(n * 100))).then_some(100.0),
                ..UsagePoint::default()
            })
        });
        series
    }

    fn energy() -> Energy {
        Energy::new(600 * SECOND_NS)
    }

    /// A counter that said this at that time, and what confirms it before.
    fn that_said(at_s: i64, joules: f64, power: &Series) -> Energy {
        let energy = energy();
        energy.set(at_s * SECOND_NS - 500 * MILLISECOND_NS, joules - 50.0, power);
        energy.set(at_s * SECOND_NS, joules, power);
        energy
    }

    fn joules(energy: &Energy, at_s: i64, power: &Series) -> f64 {
        energy.joules(at_s * SECOND_NS, power).expect("known")
    }

    #[test]
    fn between_two_readings_power_is_added_up() {
        let power = hundred_watts();
        assert_eq!(energy().joules(2 * SECOND_NS, &power), None);
        let energy = that_said(2, 5_000.0, &power);
        assert!((joules(&energy, 3, &power) - 5_100.0).abs() < 1e-6);
    }

    #[test]
    fn a_reading_below_what_was_reported_does_not_make_it_fall_and_a_new_driver_does() {
        let power = hundred_watts();
        let energy = that_said(2, 5_000.0, &power);
        assert!(joules(&energy, 4, &power) > 5_199.0);
        energy.set(4 * SECOND_NS, 5_190.0, &power);
        assert!(joules(&energy, 4, &power) > 5_199.0);
        energy.set(5 * SECOND_NS, 3.0, &power);
        assert!(joules(&energy, 5, &power) > 5_199.0, "one reading may be nonsense");
        energy.set(6 * SECOND_NS, 103.0, &power);
        assert!((joules(&energy, 6, &power) - 103.0).abs() < 1e-6);
        assert!((joules(&energy, 7, &power) - 103.0 - 0.95 * 100.0).abs() < 1e-6);
        energy.set(7 * SECOND_NS, 103.0, &power);
        assert!(joules(&energy, 7, &power) > 197.0, "the same reading again is no new driver");
    }

    #[test]
    fn nonsense_is_not_believed_before_a_first_reading_between_two_and_after_the_last() {
        let power = hundred_watts();
        for nonsense in [u64::MAX as f64 * 1e-3, f64::from(u32::MAX) * 1e-3, 0.0, -1.0, f64::NAN, f64::INFINITY] {
            let energy = energy();
            // The driver answers it for two seconds, once a second; then it is well again.
            let say = |at_s: i64, joules: f64| energy.set(at_s * SECOND_NS, joules, &power);
            say(1, nonsense);
            say(2, nonsense);
            assert_eq!(energy.joules(2 * SECOND_NS, &power), None, "{nonsense}");
            say(3, 5_000.0);
            assert_eq!(energy.joules(3 * SECOND_NS, &power), None, "{nonsense}");
            say(4, 5_100.0);
            assert!((joules(&energy, 4, &power) - 5_100.0).abs() < 1e-6, "{nonsense}");
            say(5, nonsense);
            say(6, nonsense);
            assert!((joules(&energy, 6, &power) - 5_300.0).abs() < 1e-6, "{nonsense}");
            say(7, 5_400.0);
            assert!((joules(&energy, 7, &power) - 5_400.0).abs() < 1e-6, "{nonsense}");
            assert!(!energy.is_due(0) || energy.state.lock().unwrap().doubted.is_none(), "{nonsense}");
        }
    }

    #[test]
    fn without_power_two_readings_that_one_gpu_can_make_confirm_each_other() {
        let (energy, power) = (energy(), Series::new(600 * SECOND_NS, 100 * MILLISECOND_NS));
        energy.set(SECOND_NS, 5_000.0, &power);
        energy.set(2 * SECOND_NS, 16_000.0, &power);
        assert_eq!(energy.joules(2 * SECOND_NS, &power), None, "11 kW");
        energy.set(3 * SECOND_NS, 16_700.0, &power);
        assert_eq!(energy.joules(3 * SECOND_NS, &power), Some(16_700.0));
    }

    #[test]
    fn a_gpu_that_was_away_goes_on_where_it_was_and_a_new_driver_begins_anew() {
        let power = hundred_watts();
        let energy = that_said(2, 5_000.0, &power);
        assert!(joules(&energy, 4, &power) > 5_199.0);
        energy.lose();
        assert_eq!(energy.joules(5 * SECOND_NS, &power), None);
        energy.set(5 * SECOND_NS, 5_190.0, &power);
        assert!(joules(&energy, 5, &power) > 5_199.0, "less used than was added up");
        let energy = energy.go_on();
        assert_eq!(energy.joules(6 * SECOND_NS, &power), None);
        energy.set(6 * SECOND_NS, 5_191.0, &power);
        assert!(joules(&energy, 6, &power) > 5_199.0, "the node was made anew");
        energy.lose();
        energy.set(7 * SECOND_NS, 3.0, &power);
        assert_eq!(energy.joules(7 * SECOND_NS, &power), None);
        energy.set(8 * SECOND_NS, 103.0, &power);
        assert!(joules(&energy, 8, &power) < 104.0, "a new driver");
    }

    #[test]
    fn what_is_added_up_is_corrected_by_what_the_counter_said_of_the_time_before() {
        let power = hundred_watts();
        let energy = that_said(2, 5_000.0, &power);
        energy.set(6 * SECOND_NS, 5_392.0, &power);
        assert!((joules(&energy, 8, &power) - 5_392.0 - 0.98 * 200.0).abs() < 1e-6);
        energy.set(8 * SECOND_NS, 5_392.0 + 206.0, &power);
        assert!((joules(&energy, 9, &power) - 5_598.0 - 1.03 * 100.0).abs() < 1e-6);
    }

    #[test]
    fn a_time_that_tells_nothing_of_the_two_meters_corrects_nothing() {
        let power = hundred_watts();
        let of_readings = |readings: &[(i64, f64)]| {
            let energy = energy();
            readings.iter().for_each(|(at_s, joules)| energy.set(at_s * SECOND_NS, *joules, &power));
            joules(&energy, 6, &power)
        };
        assert!((of_readings(&[(1, 4_900.0), (2, 5_000.0), (4, 5_600.0)]) - 5_800.0).abs() < 1e-6, "another fault");
        assert!(
            (of_readings(&[(0, 5_000.0), (1, 5_001.0), (4, 5_301.0)]) - 5_501.0).abs() < 1e-6,
            "its begin is unknown"
        );
        assert!(
            (of_readings(&[(1, 4_900.0), (2, 5_000.0), (3, 60.0), (4, 160.0)]) - 360.0).abs() < 1e-6,
            "a new driver"
        );
        assert!((of_readings(&[(1, 4_900.0), (2, 5_000.0), (4, 5_000.0)]) - 5_200.0).abs() < 1e-6, "it has not moved");
    }

    #[test]
    fn a_gap_in_what_is_known_of_power_is_no_difference_of_the_meters() {
        let power = hundred_watts_but_for(2_000..4_000);
        let energy = that_said(2, 5_000.0, &power);
        energy.set(6 * SECOND_NS, 5_400.0, &power);
        assert!((energy.joules(8 * SECOND_NS, &power).unwrap() - 5_600.0).abs() < 1e-6);
    }

    #[test]
    fn the_counter_is_read_seldom_and_before_power_is_forgotten() {
        let power = hundred_watts();
        for (keep_s, period_s) in [(600, 300), (86_400, 300), (60, 30)] {
            let energy = Energy::new(keep_s * SECOND_NS);
            let tried =
                |from_s: i64| (from_s..from_s + 2 * period_s).filter(|at_s| energy.is_due(at_s * SECOND_NS)).count();
            assert_eq!(tried(0), 2 * period_s as usize, "never read yet");
            energy.set(2 * period_s * SECOND_NS, 1.0, &power);
            assert!(energy.is_due(2 * period_s * SECOND_NS) && energy.is_due(2 * period_s * SECOND_NS), "in doubt");
            energy.set(2 * period_s * SECOND_NS, 1.0, &power);
            assert_eq!(tried(2 * period_s), 1, "a failed try is not repeated at once");
            energy.lose();
            assert!(energy.is_due(4 * period_s * SECOND_NS) && energy.is_due(4 * period_s * SECOND_NS + 1));
        }
    }
}
