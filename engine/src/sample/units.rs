//! Which thread makes the calls of the slower lanes on which physical GPU.
//!
//! One common thread makes the calls on all GPUs, one GPU after the other. If a call takes long and may not return, the GPUs
//! *part*: each other GPU gets a thread of its own, and the common thread keeps the GPU whose call it waits for. A minute
//! after they last parted, GPUs come back to the common thread. So a GPU that hangs does not delay the others, and while
//! nothing hangs, a node of eight GPUs wakes one thread, not eight.
//!
//! Invariants: no two threads make calls on one GPU; the lock is held during no call of the driver.

use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::GpuState;
use highwater_core::source::CallStats;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};

/// Minimum time since the GPUs last parted before one comes back to the common thread.
const CALM_NS: i64 = 60 * SECOND_NS;

/// A turn of the common thread that takes longer may be in a call that does not return.
const LONG_TURN_NS: i64 = 20 * MILLISECOND_NS;

/// Starts the thread of the unit with this number; returns whether it runs.
pub type Start = Box<dyn Fn(usize) -> bool + Send + Sync>;

/// One physical GPU.
pub struct Unit {
    /// Its own position and those of its instances.
    pub positions: Vec<usize>,
    /// Durations of the calls that are made on it, and whether one of them does not return.
    pub calls: CallStats,
    /// The thread that it has while it is apart.
    thread: Mutex<Option<Thread>>,
}

/// All physical GPUs, and which thread makes the slower lanes' calls on each.
pub struct Units {
    units: Vec<Unit>,
    /// The unit of each device, by the device's position.
    unit_of: Vec<usize>,
    parting: Mutex<Parting>,
    start: OnceLock<Start>,
    common: OnceLock<Thread>,
}

#[derive(Debug)]
struct Parting {
    /// Whether a unit has a thread of its own.
    apart: Vec<bool>,
    /// The unit whose turn the common thread is in, and since when, nanoseconds of the timeline.
    current: Option<(usize, i64)>,
    /// When they parted last, nanoseconds of the timeline.
    at_ns: i64,
}

/// A turn of the common thread: it makes calls on a unit while it has this.
pub(super) struct Turn<'a>(&'a Units);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.parting().current = None;
    }
}

impl Unit {
    /// Whether one of its devices is doubted: the fast lane skips it until a slower lane's thread has read its memory.
    pub(super) fn is_called(&self, gpus: &[GpuState]) -> bool {
        self.positions.iter().filter_map(|position| gpus.get(*position)).any(GpuState::is_doubted)
    }
}

impl Units {
    /// One for each physical GPU among `gpus`.
    #[must_use]
    pub fn new(gpus: &[GpuState], calls: &CallStats) -> Self {
        let mut by_uuid = BTreeMap::<&str, Vec<usize>>::new();
        for (position, gpu) in gpus.iter().enumerate() {
            let physical = gpu.device.parent_uuid.as_deref().unwrap_or(&gpu.device.uuid);
            by_uuid.entry(physical).or_default().push(position);
        }
        let unit = |positions| Unit { positions, calls: calls.for_one_thread(), thread: Mutex::default() };
        let units: Vec<Unit> = by_uuid.into_values().map(unit).collect();
        let mut unit_of = vec![0; gpus.len()];
        for (number, unit) in units.iter().enumerate() {
            unit.positions.iter().for_each(|position| unit_of[*position] = number);
        }
        let parting = Mutex::new(Parting { apart: vec![false; units.len()], current: None, at_ns: i64::MIN });
        let (start, common) = (OnceLock::new(), OnceLock::new());
        Self { units, unit_of, parting, start, common }
    }

    /// All units, in the order of their numbers.
    #[must_use]
    pub fn all(&self) -> &[Unit] {
        &self.units
    }

    /// The number of a device's unit.
    pub(super) fn of(&self, position: usize) -> Option<usize> {
        self.unit_of.get(position).copied()
    }

    /// Sets the function that starts a unit's own thread, which calls [`run_unit`](super::run_unit). Without it the
    /// units never part.
    pub fn on_parting(&self, start: Start) {
        // Only the first call has an effect.
        let _ = self.start.set(start);
    }

    /// Registers the calling thread as the common one.
    pub(super) fn i_am_common(&self) {
        // Refused only to a second one, which does not exist; it would see a unit that comes back a second later.
        let _ = self.common.set(thread::current());
    }

    /// Registers the calling thread as a unit's own.
    pub(super) fn i_am_apart(&self, number: usize) {
        if let Some(unit) = self.units.get(number) {
            *unit.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        }
    }

    /// The common thread is about to make calls on a unit; `None` if the unit is apart.
    pub(super) fn enter(&self, number: usize, now_ns: i64) -> Option<Turn<'_>> {
        let mut parting = self.parting();
        if parting.apart.get(number).copied().unwrap_or(true) {
            return None;
        }
        parting.current = Some((number, now_ns));
        Some(Turn(self))
    }

    /// The units of the common thread.
    pub(super) fn common(&self) -> Vec<usize> {
        let parting = self.parting();
        parting.apart.iter().enumerate().filter(|(_, is_apart)| !**is_apart).map(|(number, _)| number).collect()
    }

    /// Since when the common thread has been in the turn of one unit, if it is in one.
    pub(super) fn in_turn_since_ns(&self) -> Option<i64> {
        self.parting().current.map(|(_, since_ns)| since_ns)
    }

    /// Gives each unit a thread of its own, but for the one on which the common thread makes calls. A unit for which no
    /// thread can be started stays where it is.
    pub(super) fn separate(&self, now_ns: i64) {
        let Some(start) = self.start.get() else { return };
        let mut parting = self.parting();
        parting.at_ns = now_ns;
        let current = parting.current.map(|(number, _)| number);
        if parting.apart.len() < 2 {
            return;
        }
        for (number, is_apart) in parting.apart.iter_mut().enumerate() {
            if !*is_apart && Some(number) != current && start(number) {
                *is_apart = true;
            }
        }
    }

    /// Gives a unit back to the common thread, unless it is too early. Returns whether it did: the unit's own thread
    /// then ends. That thread calls this between two turns.
    pub(super) fn come_back(&self, number: usize, now_ns: i64) -> bool {
        let mut parting = self.parting();
        // A turn of the common thread that takes long may be in a call that does not return.
        if parting.current.is_some_and(|(_, since_ns)| now_ns - since_ns > LONG_TURN_NS)
            || now_ns.saturating_sub(parting.at_ns) < CALM_NS
        {
            return false;
        }
        let Some(is_apart) = parting.apart.get_mut(number) else { return false };
        *is_apart = false;
        drop(parting);
        self.common.get().inspect(|common| common.unpark());
        true
    }

    /// Wakes every thread.
    pub(super) fn wake(&self) {
        self.common.get().inspect(|common| common.unpark());
        for unit in &self.units {
            let thread = unit.thread.lock().unwrap_or_else(PoisonError::into_inner);
            thread.iter().for_each(Thread::unpark);
        }
    }

    fn parting(&self) -> MutexGuard<'_, Parting> {
        self.parting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::gpu::Device;
    use std::sync::Arc;

    /// `count` units, and the numbers of those for which a thread was to be started, in order.
    fn units(count: usize) -> (Units, Arc<Mutex<Vec<usize>>>) {
        let device = |number| Device { uuid: format!("GPU-{number:02}"), ..Device::default() };
        let gpus: Vec<_> = (0..count).map(|number| GpuState::new(device(number), SECOND_NS, SECOND_NS)).collect();
        let (units, started) = (Units::new(&gpus, &CallStats::default()), Arc::<Mutex<Vec<usize>>>::default());
        let noted = Arc::clone(&started);
        units.on_parting(Box::new(move |number| {
            noted.lock().expect("whole").push(number);
            number != 3
        }));
        (units, started)
    }

    #[test]
    fn the_common_thread_keeps_the_unit_that_it_waits_for() {
        let (units, started) = units(4);
        let turn = units.enter(1, 0).expect("common");
        units.separate(0);
        assert_eq!(*started.lock().expect("whole"), [0, 2, 3]);
        assert_eq!(units.common(), [1, 3], "no thread could be started for the last");
        assert!([0, 2].iter().all(|number| units.enter(*number, 1).is_none()));
        // Parting again starts what is missing, and nothing else.
        units.separate(1);
        assert_eq!(*started.lock().expect("whole"), [0, 2, 3, 3]);
        assert!(!units.come_back(0, CALM_NS + 1), "the common thread is in a call");
        drop(turn);
        assert!(!units.come_back(0, CALM_NS), "they have just parted");
        assert!(units.come_back(0, CALM_NS + 1));
        assert_eq!(units.common(), [0, 1, 3]);
        let _turn = units.enter(0, 2 * CALM_NS).expect("common");
        assert!(units.come_back(2, 2 * CALM_NS + LONG_TURN_NS), "a short turn keeps none away");
    }

    #[test]
    fn one_that_is_alone_and_ones_that_cannot_part_stay() {
        let (alone, started) = units(1);
        alone.separate(0);
        assert_eq!((alone.common(), started.lock().expect("whole").len()), (vec![0], 0));
        let (several, _) = units(0);
        several.separate(0);
        assert_eq!(several.common(), [] as [usize; 0]);
    }
}
