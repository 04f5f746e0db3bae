//! The activity of a simulated GPU, and the readings that follow from it: power, energy, temperature, clocks, link
//! bytes.
//!
//! Rates are whole numbers that hold between two changes, so their sums over time are exact, never fall, and do not
//! depend on when they are read. The figures are an H200's: 75 W idle, 700 W at its limit, 1980 and 3201 MHz.

use super::job::{State, Traffic};

const IDLE_MILLIWATTS: u64 = 75_000;
const LIMIT_MILLIWATTS: u64 = 700_000;
/// The limits that an H200 reports with driver 580. No load heats a simulated GPU to them.
pub(super) const SLOWDOWN_CELSIUS: f64 = 89.0;
pub(super) const SHUTDOWN_CELSIUS: f64 = 95.0;
/// What a kernel that runs all the time would draw without a limit.
const FULL_MILLIWATTS: u64 = 720_000;
const NO_LOAD_CELSIUS: f64 = 31.0;
const FULL_LOAD_CELSIUS: f64 = 74.0;
/// The heat sink's time constant, seconds.
const THERMAL_LAG_S: f64 = 20.0;
const WHOLE_PPM: u64 = 1_000_000;

/// The quantities that are summed over time, each with its unit per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meter {
    /// Milliwatts.
    Energy,
    /// Millionths.
    Busy,
    /// Bytes.
    PcieReceived,
    /// Bytes.
    PcieTransmitted,
    /// Bytes, either way: in a ring all-reduce each GPU sends as much as it receives.
    Nvlink,
    /// Millionths: multiprocessors with work. While it runs, a collective uses 15 % of them, any other kernel 90 %.
    Sm,
    /// Millionths: tensor cores at work, which a collective does not need.
    Tensor,
}

const METERS: usize = 7;

/// One GPU's rates from one change to the next, and their sums before.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Meters {
    rates: [u64; METERS],
    /// Rates × nanoseconds.
    sums: [u128; METERS],
    celsius: f64,
    powered: bool,
    capped: bool,
}

impl Meters {
    /// An idle GPU at room temperature.
    pub(super) fn idle() -> Self {
        let mut meters = Self { celsius: NO_LOAD_CELSIUS, ..Self::default() };
        meters.rates[Meter::Energy as usize] = IDLE_MILLIWATTS;
        meters
    }

    /// The meters `elapsed_ns` later, with these processes on the GPU from then on.
    pub(super) fn after<'a>(&self, elapsed_ns: i64, processes: impl Iterator<Item = &'a State>) -> Self {
        let mut next = Self { celsius: self.celsius_after(elapsed_ns), ..Self::default() };
        for (sum, meter) in next.sums.iter_mut().zip(0..METERS) {
            *sum = self.sum(meter, elapsed_ns);
        }
        for state in processes {
            next.powered |= state.alive;
            next.rates[Meter::Busy as usize] += state.busy_ppm;
            let (sm, tensor) = if state.traffic == Traffic::Collective { (15, 0) } else { (90, 40) };
            next.rates[Meter::Sm as usize] += state.busy_ppm * sm / 100;
            next.rates[Meter::Tensor as usize] += state.busy_ppm * tensor / 100;
            let (received, transmitted, nvlink) = link_rates(state);
            next.rates[Meter::PcieReceived as usize] += received;
            next.rates[Meter::PcieTransmitted as usize] += transmitted;
            next.rates[Meter::Nvlink as usize] += nvlink;
        }
        for share in [Meter::Busy, Meter::Sm, Meter::Tensor] {
            let share = &mut next.rates[share as usize];
            *share = (*share).min(WHOLE_PPM);
        }
        let busy = next.rates[Meter::Busy as usize];
        let wanted = IDLE_MILLIWATTS + (FULL_MILLIWATTS - IDLE_MILLIWATTS) * busy / WHOLE_PPM;
        next.rates[Meter::Energy as usize] = wanted.min(LIMIT_MILLIWATTS);
        next.capped = wanted >= LIMIT_MILLIWATTS;
        next
    }

    fn sum(&self, meter: usize, elapsed_ns: i64) -> u128 {
        self.sums[meter] + u128::from(self.rates[meter]) * u128::from(elapsed_ns.max(0).unsigned_abs())
    }

    /// A meter's sum `elapsed_ns` after the last change: its unit × nanoseconds.
    pub(super) fn total(&self, meter: Meter, elapsed_ns: i64) -> u128 {
        self.sum(meter as usize, elapsed_ns)
    }

    /// The same in whole units × seconds.
    pub(super) fn total_units(&self, meter: Meter, elapsed_ns: i64) -> u64 {
        u64::try_from(self.total(meter, elapsed_ns) / 1_000_000_000).unwrap_or(u64::MAX)
    }

    /// Energy since the scenario's start, joules.
    #[allow(clippy::cast_precision_loss, reason = "energy is read in millijoules")]
    pub(super) fn joules(&self, elapsed_ns: i64) -> f64 {
        self.total_units(Meter::Energy, elapsed_ns) as f64 * 1e-3
    }

    /// Power now, watts.
    #[allow(clippy::cast_precision_loss, reason = "below a million")]
    pub(super) fn watts(&self) -> f64 {
        self.rates[Meter::Energy as usize] as f64 * 1e-3
    }

    /// The power at which `sw_power_cap` becomes the reason of a lower clock, watts.
    #[allow(clippy::cast_precision_loss, reason = "below a million")]
    pub(super) fn limit_watts() -> f64 {
        LIMIT_MILLIWATTS as f64 * 1e-3
    }

    /// Temperature, which follows power slowly.
    #[allow(clippy::cast_precision_loss, reason = "for an exponential")]
    pub(super) fn celsius_after(&self, elapsed_ns: i64) -> f64 {
        let drawn = self.rates[Meter::Energy as usize].saturating_sub(IDLE_MILLIWATTS) as f64;
        let load = drawn / (LIMIT_MILLIWATTS - IDLE_MILLIWATTS) as f64;
        let target = NO_LOAD_CELSIUS + (FULL_LOAD_CELSIUS - NO_LOAD_CELSIUS) * load;
        let left = (-(elapsed_ns.max(0) as f64) * 1e-9 / THERMAL_LAG_S).exp();
        target + (self.celsius - target) * left
    }

    /// Streaming multiprocessors' clock: low without a process, reduced at the power limit.
    pub(super) fn sm_hertz(&self) -> f64 {
        match (self.powered, self.capped) {
            (false, _) => 345e6,
            (true, false) => 1_980e6,
            (true, true) => 1_755e6,
        }
    }

    /// Memory clock.
    #[allow(clippy::unused_self, reason = "one of the readings")]
    pub(super) fn memory_hertz(&self) -> f64 {
        3_201e6
    }

    /// The mask of [`highwater_core::gpu::THROTTLE_REASONS`].
    pub(super) fn throttle_reasons(&self) -> u64 {
        if self.capped { 0x4 } else { 0 }
    }
}

/// Bytes a second over PCIe to and from the GPU, and over NVLink in each direction.
fn link_rates(state: &State) -> (u64, u64, u64) {
    let quiet = if state.alive { 2_000_000 } else { 0 };
    match state.traffic {
        Traffic::Quiet => (quiet, quiet, 0),
        Traffic::Load => (6_000_000_000, quiet, 0),
        Traffic::Save => (quiet, 12_000_000_000, 0),
        Traffic::Collective => (quiet, quiet, 150_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(ppm: u64) -> State {
        State { alive: true, busy_ppm: ppm, ..State::default() }
    }

    #[test]
    fn energy_is_power_times_time_whenever_it_is_read() {
        let working = Meters::idle().after(2_000_000_000, [busy(500_000)].iter());
        assert_eq!(working.joules(0), 150.0);
        assert_eq!(working.watts(), 397.5);
        assert_eq!(working.joules(4_000_000_000), 150.0 + 4.0 * 397.5);
        let split = working.after(1_234_567_891, [busy(500_000)].iter());
        assert_eq!(split.total(Meter::Energy, 765_432_109), working.total(Meter::Energy, 2_000_000_000));
    }

    #[test]
    fn at_the_power_limit_clocks_fall_and_it_says_why() {
        let full = Meters::idle().after(0, [busy(900_000), busy(900_000)].iter());
        assert_eq!((full.watts(), full.sm_hertz(), full.throttle_reasons()), (700.0, 1_755e6, 0x4));
        assert_eq!(full.watts(), Meters::limit_watts());
        let half = full.after(1, [busy(500_000)].iter());
        assert_eq!((half.sm_hertz(), half.throttle_reasons()), (1_980e6, 0));
        assert_eq!(half.after(1, std::iter::empty()).sm_hertz(), 345e6);
    }

    #[test]
    fn temperature_goes_slowly_to_where_power_wants_it() {
        let full = Meters::idle().after(0, [busy(1_000_000)].iter());
        assert_eq!(full.celsius_after(0), 31.0);
        assert!((45.0..60.0).contains(&full.celsius_after(15_000_000_000)));
        assert!((full.celsius_after(600_000_000_000) - 74.0).abs() < 0.1);
    }
}
