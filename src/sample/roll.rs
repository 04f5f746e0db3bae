//! Finds which GPUs answer while a call of the fast lane does not return: each GPU's own thread reads its memory once.
//!
//! Enters: the roll call, from the watchdog. Leaves: GPUs that are no longer doubted, and a wake-up of the watchdog.
//! Invariants: a thread makes calls on its own GPU only, so that a GPU that hangs blocks its own thread and no other;
//! while nothing hangs, each turn reads one atomic and wakes no thread.

use super::sweep::{Stuck, TickStats};
use crate::source::{Call, CallStats, Source};
use highwater_core::clock::MILLISECOND_NS;
use highwater_core::gpu::GpuState;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};

/// How long a call of the fast lane may take before the roll call. While a job maps memory, the driver delays calls for
/// tens of milliseconds, whichever GPU they are for.
const STUCK_NS: i64 = 100 * MILLISECOND_NS;

/// The threads of the slower lanes, one for each physical GPU, and the watchdog of the fast lane.
pub struct RollCall {
    units: Vec<Unit>,
    /// The unit of each device, by the device's position.
    unit_of: Vec<usize>,
    watchdog: OnceLock<Thread>,
    ticks: Arc<TickStats>,
    stuck_after_ns: i64,
}

/// One physical GPU.
pub struct Unit {
    /// Its own position and those of its instances.
    pub positions: Vec<usize>,
    /// Durations of its thread's calls, and whether one of them does not return.
    pub calls: CallStats,
    thread: OnceLock<Thread>,
}

impl RollCall {
    /// One unit for each physical GPU among `gpus`. A call of the fast lane hangs after `hang_after_ns`.
    #[must_use]
    pub fn new(gpus: &[GpuState], calls: &CallStats, ticks: Arc<TickStats>, hang_after_ns: i64) -> Self {
        let mut by_uuid = BTreeMap::<&str, Vec<usize>>::new();
        for (position, gpu) in gpus.iter().enumerate() {
            let physical = gpu.device.parent_uuid.as_deref().unwrap_or(&gpu.device.uuid);
            by_uuid.entry(physical).or_default().push(position);
        }
        let unit = |positions| Unit { positions, calls: calls.for_one_thread(), thread: OnceLock::new() };
        let units: Vec<Unit> = by_uuid.into_values().map(unit).collect();
        let mut unit_of = vec![0; gpus.len()];
        for (number, unit) in units.iter().enumerate() {
            unit.positions.iter().for_each(|position| unit_of[*position] = number);
        }
        Self { units, unit_of, watchdog: OnceLock::new(), ticks, stuck_after_ns: STUCK_NS.min(hang_after_ns / 2) }
    }

    /// The physical GPUs, each of which has a thread.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The number of a device's unit.
    pub(super) fn unit_of(&self, position: usize) -> Option<usize> {
        self.unit_of.get(position).copied()
    }

    /// Registers the calling thread as the watchdog.
    pub(super) fn i_am_the_watchdog(&self) {
        // Refused only to a second watchdog, which does not exist; it would check by itself every quarter of a second.
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

    /// Wakes every unit's thread, so that those whose GPU is doubted read its memory.
    pub(super) fn call(&self) {
        self.units.iter().filter_map(|unit| unit.thread.get()).for_each(Thread::unpark);
    }

    /// Wakes the watchdog if a call of the fast lane takes too long. Each unit's thread checks this in its turn.
    pub(super) fn look(&self, now_ns: i64) {
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
                // The fast lane evaluates the reading; here only the answer matters.
                let _ = unit.calls.time(Call::MemoryInfoSlow, || source.memory_used(position, at_ns));
                gpu.end_doubt();
                self.wake_watchdog();
            }
        }
    }
}

impl Unit {
    /// Registers the calling thread as this unit's.
    pub(super) fn begin(&self) {
        // Refused only to a second thread of the unit, which does not exist; it would answer at its next turn.
        let _ = self.thread.set(thread::current());
    }

    /// Whether the fast lane is waiting for an answer of one of its devices.
    pub(super) fn is_called(&self, gpus: &[GpuState]) -> bool {
        self.positions.iter().filter_map(|position| gpus.get(*position)).any(GpuState::is_doubted)
    }
}
