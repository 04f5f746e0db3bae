//! A GPU's energy counter, known at any time although it is seldom read.
//!
//! Reading the counter holds the driver's lock for 3 ms on an H200, and for 15 ms now and then: at once a second this
//! alone would make the fast lane miss 0.3 % of its ticks. So it is read once in five minutes, and in between the power,
//! which the medium lane reads as often as it changes, is added up. Beside training on H100s that sum is 1.4 % more than the
//! counter's, so each reading also corrects what is added up until the next.

use super::series::Series;
use crate::clock::SECOND_NS;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

/// The longest time between two readings of the counter, nanoseconds.
const LONGEST_NS: i64 = 300 * SECOND_NS;
/// Plausible ratios of the counter's joules to the integrated joules. A ratio outside of this range is not caused by the
/// difference of two meters, and is ignored.
const PLAUSIBLE: RangeInclusive<f64> = 0.5..=2.0;

/// The counter of one GPU.
#[derive(Debug)]
pub struct Energy {
    period_ns: i64,
    state: Mutex<State>,
}

#[derive(Debug, Clone)]
struct State {
    /// Time and value of the last reading since the GPU came back.
    read: Option<(i64, f64)>,
    /// When it is to be read next, nanoseconds of the timeline.
    due_ns: i64,
    /// What it said last, also before its GPU was away.
    last_joules: f64,
    /// The most that was returned: a counter never falls.
    returned_joules: f64,
    /// The last plausible ratio of the counter's joules to the integrated joules; 1 until there is one.
    share: f64,
}

impl Energy {
    /// The counter of a GPU whose power readings are kept for `keep_ns`. It is read at least twice in that time, so that all
    /// power readings since its last reading are still there.
    #[must_use]
    pub fn new(keep_ns: i64) -> Self {
        let state = State { read: None, due_ns: i64::MIN, last_joules: 0.0, returned_joules: 0.0, share: 1.0 };
        Self { period_ns: LONGEST_NS.min(keep_ns / 2), state: Mutex::new(state) }
    }

    /// Keeps a reading of the counter, of a GPU that drew this power. One that is below the last reading means that the
    /// driver was loaded anew.
    pub fn set(&self, at_ns: i64, joules: f64, power: &Series) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if joules < state.last_joules {
            state.returned_joules = 0.0;
        }
        if let Some((read_ns, read_joules)) = state.read {
            let added = power.usage(read_ns, at_ns).energy_joules.filter(|added| *added > 0.0);
            let share = added.map(|added| (joules - read_joules) / added);
            state.share = share.filter(|share| PLAUSIBLE.contains(share)).unwrap_or(state.share);
        }
        (state.read, state.last_joules) = (Some((at_ns, joules)), joules);
    }

    /// Whether the counter is due at `at_ns`: a period has passed since the last try, or there is no reading since the GPU came
    /// back. Returning true counts as a try, so the caller must read the counter.
    #[must_use]
    pub fn is_due(&self, at_ns: i64) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = state.read.is_none() || at_ns >= state.due_ns;
        if is_due {
            state.due_ns = at_ns + self.period_ns;
        }
        is_due
    }

    /// Returns nothing until the counter is read again: its GPU is gone. What was returned is kept, so that the counter does
    /// not fall when the GPU is back with fewer joules than were added up.
    pub fn lose(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).read = None;
    }

    /// A copy for a new state of the same GPU. It returns nothing until the counter is read again.
    #[must_use]
    pub fn go_on(&self) -> Self {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Self { period_ns: self.period_ns, state: Mutex::new(State { read: None, ..state }) }
    }

    /// Energy at `at_ns`, joules: the last reading and the power since, as far as that is known. `None` before the first
    /// reading.
    #[must_use]
    pub fn joules(&self, at_ns: i64, power: &Series) -> Option<f64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (read_ns, read_joules) = state.read?;
        let since_joules = state.share * power.known_energy_joules(read_ns, at_ns);
        state.returned_joules = state.returned_joules.max(read_joules + since_joules);
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
                utilization_ratio: None,
                throttle_reasons: None,
            })
        });
        series
    }

    fn energy() -> Energy {
        Energy::new(600 * SECOND_NS)
    }

    #[test]
    fn between_two_readings_power_is_added_up() {
        let (energy, power) = (energy(), hundred_watts());
        assert_eq!(energy.joules(2 * SECOND_NS, &power), None);
        energy.set(2 * SECOND_NS, 5_000.0, &power);
        assert!((energy.joules(3 * SECOND_NS, &power).unwrap() - 5_100.0).abs() < 1e-6);
    }

    #[test]
    fn a_reading_below_what_was_reported_does_not_make_it_fall_and_a_new_driver_does() {
        let (energy, power) = (energy(), hundred_watts());
        energy.set(2 * SECOND_NS, 5_000.0, &power);
        assert!(energy.joules(4 * SECOND_NS, &power).unwrap() > 5_199.0);
        energy.set(4 * SECOND_NS, 5_190.0, &power);
        assert!(energy.joules(4 * SECOND_NS, &power).unwrap() > 5_199.0);
        energy.set(5 * SECOND_NS, 3.0, &power);
        assert!(energy.joules(5 * SECOND_NS, &power).unwrap() < 4.0);
        assert!(energy.joules(6 * SECOND_NS, &power).unwrap() > 97.0);
        energy.set(6 * SECOND_NS, 3.0, &power);
        assert!(energy.joules(6 * SECOND_NS, &power).unwrap() > 97.0, "the same reading again is no new driver");
    }

    #[test]
    fn a_gpu_that_was_away_goes_on_where_it_was_and_a_new_driver_begins_anew() {
        let (energy, power) = (energy(), hundred_watts());
        energy.set(2 * SECOND_NS, 5_000.0, &power);
        assert!(energy.joules(4 * SECOND_NS, &power).unwrap() > 5_199.0);
        energy.lose();
        assert_eq!(energy.joules(5 * SECOND_NS, &power), None);
        energy.set(5 * SECOND_NS, 5_190.0, &power);
        assert!(energy.joules(5 * SECOND_NS, &power).unwrap() > 5_199.0, "less used than was added up");
        let energy = energy.go_on();
        assert_eq!(energy.joules(6 * SECOND_NS, &power), None);
        energy.set(6 * SECOND_NS, 5_191.0, &power);
        assert!(energy.joules(6 * SECOND_NS, &power).unwrap() > 5_199.0, "the node was made anew");
        energy.lose();
        energy.set(7 * SECOND_NS, 3.0, &power);
        assert!(energy.joules(7 * SECOND_NS, &power).unwrap() < 4.0, "a new driver");
    }

    #[test]
    fn what_is_added_up_is_corrected_by_what_the_counter_said_of_the_time_before() {
        let (energy, power) = (energy(), hundred_watts());
        energy.set(2 * SECOND_NS, 5_000.0, &power);
        energy.set(6 * SECOND_NS, 5_392.0, &power);
        assert!((energy.joules(8 * SECOND_NS, &power).unwrap() - 5_392.0 - 0.98 * 200.0).abs() < 1e-6);
        energy.set(8 * SECOND_NS, 5_392.0 + 206.0, &power);
        assert!((energy.joules(9 * SECOND_NS, &power).unwrap() - 5_598.0 - 1.03 * 100.0).abs() < 1e-6);
    }

    #[test]
    fn a_time_that_tells_nothing_of_the_two_meters_corrects_nothing() {
        let power = hundred_watts();
        for (first, second, why) in [
            ((2, 5_000.0), (4, 5_200.0 * 3.0), "three times as much is another fault"),
            ((0, 5_000.0), (4, 5_150.0), "power is not known at its begin"),
            ((2, 5_000.0), (4, 160.0), "a new driver counts from its own beginning"),
            ((2, 5_000.0), (4, 5_000.0), "the counter has not moved"),
        ] {
            let energy = energy();
            for (at_s, joules) in [first, second] {
                energy.set(at_s * SECOND_NS, joules, &power);
            }
            assert!((energy.joules(6 * SECOND_NS, &power).unwrap() - second.1 - 200.0).abs() < 1e-6, "{why}");
        }
    }

    #[test]
    fn a_gap_in_what_is_known_of_power_is_no_difference_of_the_meters() {
        let (energy, power) = (energy(), hundred_watts_but_for(2_000..4_000));
        energy.set(2 * SECOND_NS, 5_000.0, &power);
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
            assert_eq!(tried(2 * period_s), 2, "a failed try is not repeated at once");
            energy.lose();
            assert!(energy.is_due(4 * period_s * SECOND_NS) && energy.is_due(4 * period_s * SECOND_NS + 1));
        }
    }
}
