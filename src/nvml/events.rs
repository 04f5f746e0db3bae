//! What the driver reports by itself: XID errors of all GPUs, through one event set.
//!
//! Enters: the units. Leaves: [`Event`]s with the position of their GPU or MIG instance. Invariants: one thread waits
//! at a time; the set is freed before NVML is shut down. Absent on purpose: ECC and clock events, which are counters of
//! the slow and medium lane already.

use super::errors::Code;
use super::raw::Handle;
use super::unit::Unit;
use crate::source::{Error, Event};
use nvml_wrapper_sys::bindings as sys;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

type Register = unsafe extern "C" fn(sys::nvmlDevice_t, u64, sys::nvmlEventSet_t) -> sys::nvmlReturn_t;
type Wait = unsafe extern "C" fn(sys::nvmlEventSet_t, *mut sys::nvmlEventData_t, u32) -> sys::nvmlReturn_t;
type Free = unsafe extern "C" fn(sys::nvmlEventSet_t) -> sys::nvmlReturn_t;

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;

/// The set and NVML's functions for it.
#[derive(Debug)]
pub(super) struct Events {
    set: Mutex<Set>,
    register: Register,
    wait: Wait,
    free: Free,
}

/// NVML's own event set.
#[derive(Debug)]
struct Set(sys::nvmlEventSet_t);

// SAFETY: NVML allows a set to be used from any thread, one at a time; the mutex around it sees to that.
unsafe impl Send for Set {}

impl Events {
    /// An event set over the GPUs that take part; `None` where NVML has no events or no GPU reports any.
    pub(super) fn open(library: &sys::NvmlLib, units: &[Unit]) -> Option<Self> {
        let create = *library.nvmlEventSetCreate.as_ref().ok()?;
        let register = *library.nvmlDeviceRegisterEvents.as_ref().ok()?;
        let wait = *library.nvmlEventSetWait_v2.as_ref().ok()?;
        let free = *library.nvmlEventSetFree.as_ref().ok()?;
        let mut set = std::ptr::null_mut();
        // SAFETY: NVML is initialized, and `set` outlives the call.
        if let Err(code) = Code::check(unsafe { create(&raw mut set) }) {
            tracing::warn!(%code, "no XID events: NVML gives no event set");
            return None;
        }
        let events = Self { set: Mutex::new(Set(set)), register, wait, free };
        let gpus = units.iter().enumerate().filter(|(_, unit)| unit.instance.is_none());
        let taken = gpus.filter(|(gpu, unit)| events.register(*gpu, unit, set)).count();
        (taken > 0).then_some(events)
    }

    fn register(&self, gpu: usize, unit: &Unit, set: sys::nvmlEventSet_t) -> bool {
        // SAFETY: the handle and the set are NVML's own.
        let registered = Code::check(unsafe { (self.register)(unit.handle().0, XID, set) });
        if let Err(code) = registered {
            tracing::warn!(gpu, %code, "this GPU reports no XID events");
        }
        registered.is_ok()
    }

    /// Waits for the next XID error. A failure takes the whole timeout, so that a caller who goes on at once is no
    /// busy loop.
    pub(super) fn wait(&self, units: &[Unit], timeout: Duration) -> Result<Option<Event>, Error> {
        let begin = Instant::now();
        let set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        for (gpu, unit) in units.iter().enumerate() {
            if unit.instance.is_none() && unit.take_registers_again() {
                self.register(gpu, unit, set.0);
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
        match Code::check(unsafe { (self.wait)(set.0, &raw mut data, milliseconds) }) {
            Ok(()) => event(units, &data).transpose(),
            Err(Code::TIMEOUT) => Ok(None),
            Err(code) => {
                std::thread::sleep(timeout.saturating_sub(begin.elapsed()));
                Err(Error::Failed(format!("waiting for XID events: {code}")))
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let set = self.set.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the set is NVML's own, nobody waits on it any more, and it is freed once.
        if let Err(code) = Code::check(unsafe { (self.free)(set.0) }) {
            tracing::debug!(%code, "the event set was not freed");
        }
    }
}

fn event(units: &[Unit], data: &sys::nvmlEventData_t) -> Option<Result<Event, Error>> {
    if data.eventType & XID == 0 {
        return None;
    }
    let xid = data.eventData;
    let gpu = position(units, Handle(data.device), data.gpuInstanceId, data.computeInstanceId);
    Some(gpu.map(|gpu| Event::Xid { gpu, xid }).ok_or_else(|| Error::Failed(format!("XID {xid} of an unlisted GPU"))))
}

/// The MIG instance where the event names one, or else the GPU. An id that does not apply is all ones.
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
