//! A GPU's energy counter, known at any time although it is seldom read.
//!
//! Reading the counter holds the driver's lock for 3 ms on an H200, and for 15 ms now and then: at once a second this
//! alone would make the fast lane miss 0.3 % of its ticks. So it is read once a minute, and in between the power, which
//! the medium lane reads as often as it changes, is added up.

use super::series::Series;
use std::sync::{Mutex, PoisonError};

/// The counter of one GPU.
#[derive(Debug, Default)]
pub struct Energy {
    state: Mutex<State>,
}

#[derive(Debug, Default, Clone)]
struct State {
    /// When the counter was read last since its GPU answers, and what it said.
    read: Option<(i64, f64)>,
    /// What it said last, also before its GPU was away.
    last_joules: f64,
    /// The most that was returned: a counter never falls.
    returned_joules: f64,
}

impl Energy {
    /// Keeps a reading of the counter. One that is below the last reading means that the driver was loaded anew.
    pub fn set(&self, at_ns: i64, joules: f64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if joules < state.last_joules {
            state.returned_joules = 0.0;
        }
        (state.read, state.last_joules) = (Some((at_ns, joules)), joules);
    }

    /// Whether the counter has been read since its GPU answers.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).read.is_some()
    }

    /// Returns nothing until the counter is read again: its GPU is gone. What was returned is kept, so that the counter does
    /// not fall when the GPU is back with fewer joules than were added up.
    pub fn lose(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).read = None;
    }

    /// The counter of the same GPU in a state that is made anew.
    #[must_use]
    pub fn go_on(&self) -> Self {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Self { state: Mutex::new(State { read: None, ..state }) }
    }

    /// Energy at `at_ns`, joules: the last reading and the power since, as far as that is known. `None` before the first
    /// reading.
    #[must_use]
    pub fn joules(&self, at_ns: i64, power: &Series) -> Option<f64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (read_ns, read_joules) = state.read?;
        let since_joules = power.known_energy_joules(read_ns, at_ns);
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
        let series = Series::new(600 * SECOND_NS, 100 * MILLISECOND_NS);
        (0..=100).for_each(|n| {
            series.push(UsagePoint {
                at_ns: SECOND_NS + n * 100 * MILLISECOND_NS,
                power_watts: Some(100.0),
                utilization_ratio: None,
                throttle_reasons: None,
            })
        });
        series
    }

    #[test]
    fn between_two_readings_power_is_added_up() {
        let (energy, power) = (Energy::default(), hundred_watts());
        assert_eq!(energy.joules(2 * SECOND_NS, &power), None);
        energy.set(2 * SECOND_NS, 5_000.0);
        assert!((energy.joules(3 * SECOND_NS, &power).unwrap() - 5_100.0).abs() < 1e-6);
    }

    #[test]
    fn a_reading_below_what_was_reported_does_not_make_it_fall_and_a_new_driver_does() {
        let (energy, power) = (Energy::default(), hundred_watts());
        energy.set(2 * SECOND_NS, 5_000.0);
        assert!(energy.joules(4 * SECOND_NS, &power).unwrap() > 5_199.0);
        energy.set(4 * SECOND_NS, 5_190.0);
        assert!(energy.joules(4 * SECOND_NS, &power).unwrap() > 5_199.0);
        energy.set(5 * SECOND_NS, 3.0);
        assert!(energy.joules(5 * SECOND_NS, &power).unwrap() < 4.0);
        assert!(energy.is_known());
        assert!(energy.joules(6 * SECOND_NS, &power).unwrap() > 102.0);
        energy.set(6 * SECOND_NS, 3.0);
        assert!(energy.joules(6 * SECOND_NS, &power).unwrap() > 102.0, "the same reading again is no new driver");
    }

    #[test]
    fn a_gpu_that_was_away_goes_on_where_it_was_and_a_new_driver_begins_anew() {
        let (energy, power) = (Energy::default(), hundred_watts());
        energy.set(2 * SECOND_NS, 5_000.0);
        assert!(energy.joules(4 * SECOND_NS, &power).unwrap() > 5_199.0);
        energy.lose();
        assert_eq!(energy.joules(5 * SECOND_NS, &power), None);
        energy.set(5 * SECOND_NS, 5_190.0);
        assert!(energy.joules(5 * SECOND_NS, &power).unwrap() > 5_199.0, "less used than was added up");
        let energy = energy.go_on();
        assert_eq!(energy.joules(6 * SECOND_NS, &power), None);
        energy.set(6 * SECOND_NS, 5_191.0);
        assert!(energy.joules(6 * SECOND_NS, &power).unwrap() > 5_199.0, "the node was made anew");
        energy.lose();
        energy.set(7 * SECOND_NS, 3.0);
        assert!(energy.joules(7 * SECOND_NS, &power).unwrap() < 4.0, "a new driver");
    }
}
