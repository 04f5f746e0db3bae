//! Event sets, and the XID errors in the control file.

use crate::functions::Function;
use crate::handle::{INVALID_ARGUMENT, Place, code, on_device, on_system, put};
use crate::state::{self, State};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const XID: u64 = 8;
const TIMEOUT: u32 = 10;
const GPU_IS_LOST: u32 = 15;

/// The open sets with their GPUs, and how many XID errors were delivered.
#[derive(Debug)]
struct Sets {
    open: BTreeMap<usize, Vec<usize>>,
    made: usize,
    delivered: usize,
}

static SETS: Mutex<Sets> = Mutex::new(Sets { open: BTreeMap::new(), made: 0, delivered: 0 });

fn sets() -> MutexGuard<'static, Sets> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts over, with every XID error still to be delivered.
pub fn start() {
    let mut sets = sets();
    sets.open.clear();
    sets.delivered = 0;
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> u32 {
    on_system(Function::nvmlEventSetCreate, |_| {
        let mut sets = sets();
        sets.made += 1;
        let number = sets.made << 4;
        sets.open.insert(number, Vec::new());
        put(set, std::ptr::without_provenance_mut(number))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, types: *mut u64) -> u32 {
    on_device(Function::nvmlDeviceGetSupportedEventTypes, device, |target| {
        target.whole()?;
        put(types, XID)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, types: u64, set: nvmlEventSet_t) -> u32 {
    on_device(Function::nvmlDeviceRegisterEvents, device, |target| {
        target.whole()?;
        let mut sets = sets();
        let gpus = sets.open.get_mut(&set.addr()).ok_or(INVALID_ARGUMENT)?;
        if types & XID != 0 {
            gpus.push(target.place.gpu);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout_ms: u32) -> u32 {
    let until = Instant::now() + Duration::from_millis(timeout_ms.into());
    let mut waits = state::enter(Function::nvmlEventSetWait_v2)
        .and_then(|state| state::obey(Function::nvmlEventSetWait_v2, |state| Some(&state.system), state));
    loop {
        match waits.and_then(|state| next(&state, set)) {
            Err(code) => return code,
            Ok(Some(event)) => return code(put(data, event)),
            Ok(None) if Instant::now() >= until => return TIMEOUT,
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
        }
        waits = state::current().ok_or(state::UNKNOWN);
    }
}

/// The next XID error of a GPU of this set.
fn next(state: &State, set: nvmlEventSet_t) -> Result<Option<nvmlEventData_t>, u32> {
    let mut sets = sets();
    let gpus = sets.open.get(&set.addr()).ok_or(INVALID_ARGUMENT)?.clone();
    while let Some(xid) = state.control.xids.get(sets.delivered) {
        sets.delivered += 1;
        if gpus.contains(&xid.gpu) {
            return Ok(Some(nvmlEventData_t {
                device: Place::of(state, xid.gpu, None).to_handle(),
                eventType: XID,
                eventData: xid.xid,
                gpuInstanceId: xid.gpu_instance,
                computeInstanceId: xid.compute_instance,
            }));
        }
    }
    // As with real drivers: once a GPU of the set is gone, each wait returns that at once.
    let is_lost = |gpu: &usize| state.control.gpus.get(*gpu).is_some_and(|gpu| gpu.lost);
    if gpus.iter().any(is_lost) { Err(GPU_IS_LOST) } else { Ok(None) }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: nvmlEventSet_t) -> u32 {
    on_system(Function::nvmlEventSetFree, |_| sets().open.remove(&set.addr()).map(drop).ok_or(INVALID_ARGUMENT))
}
