//! The identity of a device: name, UUID, bus, index.

use crate::functions::Function;
use crate::handle::{INVALID_ARGUMENT, Target, on_device, put, put_text};
use crate::state::State;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlPciInfo_t};
use std::ffi::c_char;

/// The UUID of a GPU, made from its index if the file has none.
pub fn uuid(state: &State, gpu: usize) -> String {
    let given = state.control.gpus.get(gpu).and_then(|gpu| gpu.uuid.clone());
    given.unwrap_or_else(|| format!("GPU-00000000-0000-0000-0000-{gpu:012}"))
}

/// The bus id of a GPU, made from its index if the file has none.
pub fn bus_id(state: &State, gpu: usize) -> String {
    let given = state.control.gpus.get(gpu).and_then(|gpu| gpu.bus_id.clone());
    given.unwrap_or_else(|| format!("00000000:{:02X}:00.0", 0x10 + gpu))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: u32) -> u32 {
    on_device(Function::nvmlDeviceGetName, device, |target| {
        put_text(name, length, target.mig.map_or(&target.gpu.name, |mig| &mig.name))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: nvmlDevice_t, to: *mut c_char, length: u32) -> u32 {
    on_device(Function::nvmlDeviceGetUUID, device, |target| {
        put_text(to, length, &target.mig.map_or_else(|| uuid(target.state, target.place.gpu), |mig| mig.uuid.clone()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetIndex, device, |target| {
        put(index, u32::try_from(target.place.mig.unwrap_or(target.place.gpu)).map_err(|_| INVALID_ARGUMENT)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, info: *mut nvmlPciInfo_t) -> u32 {
    on_device(Function::nvmlDeviceGetPciInfo_v3, device, |target: &Target<'_>| {
        let bus_id = bus_id(target.state, target.place.gpu);
        let mut pci = nvmlPciInfo_t {
            busIdLegacy: [0; 16],
            domain: 0,
            bus: bus_id.split(':').nth(1).and_then(|bus| u32::from_str_radix(bus, 16).ok()).unwrap_or(0),
            device: 0,
            pciDeviceId: 0x2335_10de,
            pciSubSystemId: 0x18be_10de,
            busId: [0; 32],
        };
        let legacy = bus_id.get(4..).unwrap_or_default();
        put_text(pci.busIdLegacy.as_mut_ptr(), 16, legacy)?;
        put_text(pci.busId.as_mut_ptr(), 32, &bus_id)?;
        put(info, pci)
    })
}
