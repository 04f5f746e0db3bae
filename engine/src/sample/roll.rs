//! Finds which GPUs answer while a call of the fast lane does not return: a thread for each GPU reads its memory once.
//!
//! Enters: the roll call, from the watchdog. Leaves: GPUs that are no longer doubted, and a wake-up of the watchdog.
//! Invariants: a GPU that hangs blocks one thread and no other; while nothing hangs, each turn reads one atomic and wakes no
//! thread.

use super::sweep::{Stuck, TickStats};
use super::units::{Unit, Units};
use highwater_core::clock::MILLISECOND_NS;
use highwater_core::gpu::GpuState;
use highwater_core::source::{Call, CallStats, Source};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};

/// How long a call of the fast lane may take before the roll call. While a job maps memory, the driver delays calls for
/// tens of milliseconds, whichever GPU they are for.
const STUCK_NS: i64 = 100 * MILLISECOND_NS;
/// How long a call of the fast lane may take before the common thread of the slower lanes pauses.
const DOUBTFUL_NS: i64 = 5 * MILLISECOND_NS;

/// The physical GPUs with the threads of the slower lanes, and the watchdog of the fast lane.
pub struct RollCall {
    units: Units,
    watchdog: OnceLock<Thread>,
    ticks: Arc<TickStats>,
    stuck_after_ns: i64,
}

impl RollCall {
    /// One unit for each physical GPU among `gpus`. A call of the fast lane hangs after `hang_after_ns`.
    #[must_use]
    pub fn new(gpus: &[GpuState], calls: &CallStats, ticks: Arc<TickStats>, hang_after_ns: i64) -> Self {
        let (units, stuck_after_ns) = (Units::new(gpus, calls), STUCK_NS.min(hang_after_ns / 2));
        Self { units, watchdog: OnceLock::new(), ticks, stuck_after_ns }
    }

    /// The physical GPUs.
    #[must_use]
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Registers the calling thread as the watchdog.
    pub(super) fn i_am_the_watchdog(&self) {
        // Refused only to a second watchdog, which does not exist; it would check by itself, if less often.
        let _ = self.watchdog.set(thread::current());
    }

    /// The call of the fast lane that has taken too long at `now_ns`, if any.
    pub(super) fn stuck(&self, now_ns: i64) -> Option<Stuck> {
        self.ticks.stuck_since(now_ns - self.stuck_after_ns)
    }

    /// How long a call may take before the roll call, nanoseconds.
    pub(super) fn stuck_after_ns(&self) -> i64 {
        self.stuck_after_ns
    }

    /// Parts the units and wakes their threads, which then read the doubted devices.
    pub(super) fn call(&self, now_ns: i64) {
        self.units.separate(now_ns);
        self.units.wake();
    }

    /// The fast lane's call in progress, if it has taken so long that it may not return.
    pub(super) fn doubtful(&self, now_ns: i64) -> Option<Stuck> {
        self.ticks.stuck_since(now_ns - DOUBTFUL_NS)
    }

    /// Wakes the watchdog if a call of the fast lane takes too long. Threads that wake often check this.
    pub fn look(&self, now_ns: i64) {
        if self.stuck(now_ns).is_some() {
            self.wake_watchdog();
        }
    }

    fn wake_watchdog(&self) {
        self.watchdog.get().inspect(|watchdog| watchdog.unpark());
    }

    /// Reads the memory of the doubted devices of `unit`. A device that does not answer blocks this thread.
    pub(super) fn answer(&self, unit: &Unit, gpus: &[GpuState], source: &dyn Source, at_ns: i64) {
        for (position, gpu) in unit.positions.iter().filter_map(|position| Some((*position, gpus.get(*position)?))) {
            if gpu.is_doubted() {
                // The value and the error are dropped: that the call has returned ends the doubt, and the fast lane
                // reads the GPU again.
                let _ = unit.calls.time(Call::MemoryInfoSlow, || source.memory_used(position, at_ns));
                gpu.end_doubt();
                self.wake_watchdog();
            }
        }
    }
}
