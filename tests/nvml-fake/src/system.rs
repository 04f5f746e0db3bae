//! Initialization, versions, and lookups of devices.

use crate::functions::Function;
use crate::handle::{INVALID_ARGUMENT, Place, code, on_lookup, on_system, put, put_text};
use crate::state::{self, State};
use crate::{devices, events, gpm};
use nvml_wrapper_sys::bindings::nvmlDevice_t;
use std::ffi::{CStr, c_char};

fn init(function: Function) -> u32 {
    code(state::enter_uninitialized(function).and_then(|state| {
        state::obey(function, |state| Some(&state.system), state)?;
        if state::initialized() {
            events::start();
            gpm::start();
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    init(Function::nvmlInit_v2)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: u32) -> u32 {
    init(Function::nvmlInitWithFlags)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    on_system(Function::nvmlShutdown, |_| if state::shut_down() { Ok(()) } else { Err(1) })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    if code == 0 { c"Success".as_ptr() } else { c"An error of the fake NVML".as_ptr() }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) -> u32 {
    on_system(Function::nvmlSystemGetDriverVersion, |state| put_text(version, length, &state.control.driver_version))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) -> u32 {
    on_system(Function::nvmlSystemGetNVMLVersion, |state| {
        put_text(version, length, &format!("13.{}", state.control.driver_version))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut i32) -> u32 {
    on_system(Function::nvmlSystemGetCudaDriverVersion, |_| put(version, 13_000))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) -> u32 {
    on_system(Function::nvmlSystemGetCudaDriverVersion_v2, |_| put(version, 13_000))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> u32 {
    on_system(Function::nvmlDeviceGetCount_v2, |state| {
        put(count, u32::try_from(state.control.gpus.len()).map_err(|_| INVALID_ARGUMENT)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut nvmlDevice_t) -> u32 {
    let find = |state: &State| {
        let gpu = index as usize;
        (gpu < state.control.gpus.len()).then(|| Place::of(state, gpu, None))
    };
    on_lookup(Function::nvmlDeviceGetHandleByIndex_v2, find, device)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t) -> u32 {
    let wanted = text(uuid);
    on_lookup(Function::nvmlDeviceGetHandleByUUID, |state| by_uuid(state, &wanted), device)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, device: *mut nvmlDevice_t) -> u32 {
    let wanted = text(bus_id);
    let find = |state: &State| {
        let gpu =
            (0..state.control.gpus.len()).find(|gpu| devices::bus_id(state, *gpu).eq_ignore_ascii_case(&wanted))?;
        Some(Place::of(state, gpu, None))
    };
    on_lookup(Function::nvmlDeviceGetHandleByPciBusId_v2, find, device)
}

fn by_uuid(state: &State, wanted: &str) -> Option<Place> {
    (0..state.control.gpus.len()).find_map(|gpu| {
        let mig = state.control.gpus[gpu].mig.iter().position(|mig| mig.as_ref().is_some_and(|mig| mig.uuid == wanted));
        (mig.is_some() || devices::uuid(state, gpu) == wanted).then(|| Place::of(state, gpu, mig))
    })
}

fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: NVML's callers pass a C string, and it is not null.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}
