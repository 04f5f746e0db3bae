//! PCIe bytes of one GPU measured with GPM, for GPUs whose own counters are too narrow.
//!
//! An H200 keeps its PCIe counters in 32 bits, which wrap every 72 ms at full speed. GPM returns the rates between two
//! samples. Each reading takes a sample, multiplies the rate since the previous sample by the time between them, and
//! adds the result to a total for each direction.
//!
//! Enters: a sample at each reading. Leaves: bytes transmitted and received in the GPU's view, since the daemon began.
//! Invariants: totals begin at 0 and never fall; a turn without a window behind it (the first turn, the one after a
//! failure or a gap, and the one after the GPU was reacquired) adds nothing and returns no totals. A total is not a
//! count of packets. It is a sum of rates that NVML rounds, may count the end of a copy one window late, and misses
//! traffic while the slow lane does not run.

use super::errors::Code;
use super::gpm::{Gpm, GpmSample};
use super::raw::Handle;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The shortest window. GPM returns 0 below 0.1 s; this leaves a margin if the lane is configured to be fast.
const SHORTEST_NS: i64 = 500 * MILLISECOND_NS;
/// The longest window. After a longer gap the lane begins a new window, because the time after which GPM's own counters
/// wrap has not been measured.
const LONGEST_NS: i64 = 10 * SECOND_NS;
const MIB_BYTES: f64 = 1_048_576.0;

/// Bytes transmitted and received, each `None` if unknown.
pub(super) type Bytes = [Option<u64>; 2];

/// The running totals of one GPU. Only the slow lane uses them, so the lock is never contended.
#[derive(Debug, Default)]
pub(super) struct PcieMeter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    window: Option<Window>,
    totals: [u64; 2],
    /// The last turn's answer.
    returned: Bytes,
}

/// The sample at which the current window begins.
#[derive(Debug)]
struct Window {
    from_ns: i64,
    sample: GpmSample,
}

impl Window {
    fn elapsed_ns(&self, at_ns: i64) -> i64 {
        at_ns.saturating_sub(self.from_ns)
    }
}

impl PcieMeter {
    /// The answer of the turn before, while the window is still too short.
    pub(super) fn still(&self, at_ns: i64) -> Option<Bytes> {
        let state = self.state();
        let elapsed_ns = state.window.as_ref()?.elapsed_ns(at_ns);
        (0..SHORTEST_NS).contains(&elapsed_ns).then_some(state.returned)
    }

    /// Takes this turn's sample and adds the bytes since the last one.
    ///
    /// # Errors
    /// NVML's code; the current window is discarded.
    pub(super) fn advance(&self, gpm: Option<&Gpm>, handle: Handle, at_ns: i64) -> Result<Bytes, Code> {
        let gpm = gpm.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut state = self.state();
        let answer = state.advance(gpm, handle, at_ns);
        state.returned = answer.unwrap_or_default();
        answer
    }

    /// Discards the window's first sample, because the GPU was away.
    pub(super) fn interrupt(&self) {
        self.state().window = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn advance(&mut self, gpm: &Gpm, handle: Handle, at_ns: i64) -> Result<Bytes, Code> {
        // Taken out, so that a failure below leaves no window.
        let window = self.window.take().filter(|window| (0..=LONGEST_NS).contains(&window.elapsed_ns(at_ns)));
        if window.is_none() && !gpm.supports(handle)? {
            return Err(Code::NOT_SUPPORTED);
        }
        let sample = gpm.sample(handle)?;
        let rates = window.as_ref().map(|window| gpm.pcie_rates(&window.sample, &sample));
        self.window = Some(Window { from_ns: at_ns, sample });
        match (window, rates.transpose()?) {
            (Some(window), Some(rates)) => self.add(rates, window.elapsed_ns(at_ns)),
            _ => Ok(Bytes::default()),
        }
    }

    fn add(&mut self, rates: [Result<f64, Code>; 2], elapsed_ns: i64) -> Result<Bytes, Code> {
        if let [Err(code), Err(_)] = rates {
            return Err(code);
        }
        let mut returned = Bytes::default();
        for ((returned, total), rate) in returned.iter_mut().zip(&mut self.totals).zip(rates) {
            if let Ok(mib_per_second) = rate {
                *total = total.saturating_add(bytes(mib_per_second, elapsed_ns));
                *returned = Some(*total);
            }
        }
        Ok(returned)
    }
}

/// Bytes at this rate, which is finite and not below 0.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "ten seconds in nanoseconds are far below 2^53, and an absurdly high rate saturates"
)]
fn bytes(mib_per_second: f64, elapsed_ns: i64) -> u64 {
    (mib_per_second * MIB_BYTES * (elapsed_ns as f64 / SECOND_NS as f64)).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_times_its_time_is_bytes() {
        assert_eq!(bytes(1.0, SECOND_NS), 1 << 20);
        assert_eq!(bytes(50_000.0, 1_500 * MILLISECOND_NS), 75_000 << 20);
        assert_eq!(bytes(0.0, SECOND_NS), 0);
        assert_eq!(bytes(f64::MAX, LONGEST_NS), u64::MAX);
    }

    #[test]
    fn totals_add_up_each_direction_for_itself() {
        let mut state = State::default();
        assert_eq!(state.add([Ok(1.0), Ok(2.0)], SECOND_NS), Ok([Some(1 << 20), Some(2 << 20)]));
        assert_eq!(state.add([Err(Code::UNKNOWN), Ok(1.0)], SECOND_NS), Ok([None, Some(3 << 20)]));
        assert_eq!(state.add([Err(Code::UNKNOWN), Err(Code::NO_DATA)], SECOND_NS), Err(Code::UNKNOWN));
        assert_eq!(state.add([Ok(1.0), Ok(0.0)], SECOND_NS), Ok([Some(2 << 20), Some(3 << 20)]));
        state.totals = [u64::MAX; 2];
        assert_eq!(state.add([Ok(1.0), Ok(0.0)], SECOND_NS), Ok([Some(u64::MAX); 2]), "a total never falls");
    }
}
