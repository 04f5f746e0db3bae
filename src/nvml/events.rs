//! Events that the driver reports: XID errors of all GPUs, through one event set.
//!
//! Enters: the units. Leaves: [`DriverEvent`]s with the position of their GPU or MIG instance. Invariants: one thread waits
//! at a time; the set is freed before NVML is shut down. Absent on purpose: ECC and clock events, which the slow and
//! medium lanes already read as counters.

use super::errors::Code;
use super::raw::{Handle, resolved};
use super::unit::Unit;
use highwater_core::source::{DriverEvent, Error};
use nvml_wrapper_sys::bindings as sys;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

type Create = unsafe extern "C" fn(*mut sys::nvmlEventSet_t) -> sys::nvmlReturn_t;
type Register = unsafe extern "C" fn(sys::nvmlDevice_t, u64, sys::nvmlEventSet_t) -> sys::nvmlReturn_t;
type Wait = unsafe extern "C" fn(sys::nvmlEventSet_t, *mut sys::nvmlEventData_t, u32) -> sys::nvmlReturn_t;
type Free = unsafe extern "C" fn(sys::nvmlEventSet_t) -> sys::nvmlReturn_t;

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;

/// The set and NVML's functions for it.
#[derive(Debug)]
pub(super) struct Events {
    set: Mutex<Set>,
    calls: Calls,
}

#[derive(Debug, Clone, Copy)]
struct Calls {
    create: Create,
    register: Register,
    wait: Wait,
    free: Free,
}

/// NVML's own event set.
#[derive(Debug)]
struct Set {
    handle: sys::nvmlEventSet_t,
    /// GPUs that must not be registered, because registering them made the set unusable.
    without: BTreeSet<usize>,
}

// SAFETY: NVML allows a set to be used from any thread, one at a time, and the mutex around it ensures that.
unsafe impl Send for Set {}

impl Events {
    /// An event set over the GPUs that support events; `None` if NVML has no events or no GPU reports any.
    pub(super) fn open(library: &sys::NvmlLib, units: &[Unit]) -> Option<Self> {
        let calls = Calls {
            create: resolved(&library.nvmlEventSetCreate)?,
            register: resolved(&library.nvmlDeviceRegisterEvents)?,
            wait: resolved(&library.nvmlEventSetWait_v2)?,
            free: resolved(&library.nvmlEventSetFree)?,
        };
        let (set, gpus) = calls.set_of(units, BTreeSet::new(), true)?;
        let events = Self { set: Mutex::new(set), calls };
        (gpus > 0).then_some(events)
    }

    /// Waits for the next XID error. A failure takes the whole timeout, so that a caller that retries at once does not
    /// spin.
    pub(super) fn wait(&self, units: &[Unit], timeout: Duration) -> Result<Option<DriverEvent>, Error> {
        let begin = Instant::now();
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let again: Vec<usize> = whole_gpus(units).filter(|gpu| units[*gpu].take_registers_again()).collect();
        for gpu in again {
            set.without.remove(&gpu);
            if self.calls.register(gpu, &units[gpu], set.handle, true) == Err(Code::UNKNOWN) {
                set.without.insert(gpu);
                self.begin_anew(&mut set, units);
            }
        }
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        };
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: the set is NVML's own and locked, and `data` outlives the call.
        match Code::check(unsafe { (self.calls.wait)(set.handle, &raw mut data, milliseconds) }) {
            Ok(()) => event(units, &data).transpose(),
            Err(Code::TIMEOUT) => Ok(None),
            Err(code) => {
                // A set with a lost GPU returns this error at once from now on, and reports no events of other GPUs.
                if code == Code::GPU_IS_LOST {
                    self.begin_anew(&mut set, units);
                }
                std::thread::sleep(timeout.saturating_sub(begin.elapsed()));
                Err(Error::Failed(format!("waiting for XID events: {code}")))
            }
        }
    }

    /// Replaces the set by a new one with the GPUs that can be registered, because NVML cannot remove a lost GPU from a
    /// set. The lost GPU reports events again after it was reacquired.
    fn begin_anew(&self, set: &mut Set, units: &[Unit]) {
        if let Some((new, _)) = self.calls.set_of(units, set.without.clone(), false) {
            self.calls.free(std::mem::replace(set, new).handle);
        }
    }
}

/// Positions of the GPUs, without their MIG instances: events are registered for GPUs.
fn whole_gpus(units: &[Unit]) -> impl Iterator<Item = usize> {
    units.iter().enumerate().filter(|(_, unit)| unit.instance.is_none()).map(|(gpu, _)| gpu)
}

impl Calls {
    /// A new set of all GPUs but these, and how many it contains; `None` if NVML creates none. `logs`: log the GPUs
    /// left out.
    fn set_of(&self, units: &[Unit], mut without: BTreeSet<usize>, logs: bool) -> Option<(Set, usize)> {
        loop {
            let mut handle = std::ptr::null_mut();
            // SAFETY: NVML is initialized, and `handle` outlives the call.
            if let Err(code) = Code::check(unsafe { (self.create)(&raw mut handle) }) {
                if logs {
                    tracing::warn!(%code, "no XID events: NVML gives no event set");
                }
                return None;
            }
            let (mut gpus, mut spoiled) = (0, None);
            for gpu in whole_gpus(units).filter(|gpu| !without.contains(gpu)) {
                match self.register(gpu, &units[gpu], handle, logs) {
                    Ok(()) => gpus += 1,
                    Err(Code::UNKNOWN) => {
                        spoiled = Some(gpu);
                        break;
                    }
                    Err(_) => {}
                }
            }
            // NVML documents that such a set must not be used. The next set has one GPU fewer, so the loop ends.
            let Some(gpu) = spoiled else { return Some((Set { handle, without }, gpus)) };
            without.insert(gpu);
            self.free(handle);
        }
    }

    fn register(&self, gpu: usize, unit: &Unit, set: sys::nvmlEventSet_t, logs: bool) -> Result<(), Code> {
        // SAFETY: the handle and the set are NVML's own.
        let registered = Code::check(unsafe { (self.register)(unit.handle().0, XID, set) });
        if let Err(code) = registered
            && logs
        {
            tracing::warn!(gpu, %code, "this GPU reports no XID events");
        }
        registered
    }

    fn free(&self, set: sys::nvmlEventSet_t) {
        // SAFETY: the set is NVML's own, no thread waits on it any more, and it is freed once.
        if let Err(code) = Code::check(unsafe { (self.free)(set) }) {
            tracing::debug!(%code, "the event set was not freed");
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let set = self.set.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.calls.free(set.handle);
    }
}

fn event(units: &[Unit], data: &sys::nvmlEventData_t) -> Option<Result<DriverEvent, Error>> {
    if data.eventType & XID == 0 {
        return None;
    }
    let xid = data.eventData;
    let gpu = position(units, Handle(data.device), data.gpuInstanceId, data.computeInstanceId);
    Some(
        gpu.map(|gpu| DriverEvent::Xid { gpu, xid })
            .ok_or_else(|| Error::Failed(format!("XID {xid} of an unlisted GPU"))),
    )
}

/// The MIG instance if the event names one, otherwise the GPU. An id that does not apply is all ones.
fn position(units: &[Unit], device: Handle, gpu_instance: u32, compute_instance: u32) -> Option<usize> {
    let gpu = units.iter().position(|unit| unit.handle() == device)?;
    let named = |unit: &Unit| {
        unit.instance
            .filter(|instance| instance.parent == gpu)
            .and_then(|instance| instance.ids)
            .is_some_and(|ids| ids.0 == gpu_instance && (ids.1 == compute_instance || compute_instance == u32::MAX))
    };
    let mut instances = units.iter().enumerate().filter(|(_, unit)| named(unit)).map(|(position, _)| position);
    match (instances.next(), instances.next()) {
        (Some(only), None) => Some(only),
        _ => Some(gpu),
    }
}
