//! MIG mode and its instances.

use crate::control::Mig;
use crate::functions::Function;
use crate::handle::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Place, on_device, put};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAttributes_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
};

/// As many instances as an H100 or H200 can have.
const MOST_INSTANCES: u32 = 7;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut u32, pending: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetMigMode, device, |target| {
        let mode = u32::from(!target.whole()?.mig.is_empty());
        put(current, mode)?;
        put(pending, mode)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetMaxMigDeviceCount, device, |target| {
        let mode = !target.whole()?.mig.is_empty();
        put(count, if mode { MOST_INSTANCES } else { 0 })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: u32, mig: *mut nvmlDevice_t) -> u32 {
    on_device(Function::nvmlDeviceGetMigDeviceHandleByIndex, device, |target| {
        let place = index as usize;
        target.whole()?.mig.get(place).and_then(Option::as_ref).ok_or(NOT_FOUND)?;
        put(mig, Place::of(target.state, target.place.gpu, Some(place)).to_handle())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: nvmlDevice_t, device: *mut nvmlDevice_t) -> u32 {
    on_device(Function::nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig, |target| {
        target.mig.ok_or(INVALID_ARGUMENT)?;
        put(device, Place::of(target.state, target.place.gpu, None).to_handle())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, is_mig: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceIsMigDeviceHandle, device, |target| put(is_mig, u32::from(target.mig.is_some())))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetGpuInstanceId, device, |target| {
        put(id, target.mig.ok_or(NOT_SUPPORTED)?.gpu_instance)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeInstanceId(device: nvmlDevice_t, id: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetComputeInstanceId, device, |target| {
        put(id, target.mig.ok_or(NOT_SUPPORTED)?.compute_instance)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetAttributes_v2(device: nvmlDevice_t, attributes: *mut nvmlDeviceAttributes_t) -> u32 {
    on_device(Function::nvmlDeviceGetAttributes_v2, device, |target| {
        put(attributes, attributes_of(target.mig.ok_or(NOT_SUPPORTED)?))
    })
}

/// The handle of a GPU instance is that of its MIG instance.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuInstanceById(device: nvmlDevice_t, id: u32, instance: *mut nvmlGpuInstance_t) -> u32 {
    on_device(Function::nvmlDeviceGetGpuInstanceById, device, |target| {
        let is_it = |mig: &Option<Mig>| mig.as_ref().is_some_and(|mig| mig.gpu_instance == id);
        let place = target.whole()?.mig.iter().position(is_it).ok_or(NOT_FOUND)?;
        put(instance, Place::of(target.state, target.place.gpu, Some(place)).to_handle().cast())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceGetInfo(instance: nvmlGpuInstance_t, info: *mut nvmlGpuInstanceInfo_t) -> u32 {
    on_device(Function::nvmlGpuInstanceGetInfo, instance.cast(), |target| {
        let mig = target.mig.ok_or(INVALID_ARGUMENT)?;
        let placement = nvmlGpuInstancePlacement_t { start: mig.start, size: mig.gpu_slices };
        let device = Place::of(target.state, target.place.gpu, None).to_handle();
        put(info, nvmlGpuInstanceInfo_t { device, id: mig.gpu_instance, profileId: mig.profile_id, placement })
    })
}

fn attributes_of(mig: &Mig) -> nvmlDeviceAttributes_t {
    nvmlDeviceAttributes_t {
        multiprocessorCount: 16 * mig.gpu_slices,
        sharedCopyEngineCount: 1,
        sharedDecoderCount: 1,
        sharedEncoderCount: 0,
        sharedJpegCount: 1,
        sharedOfaCount: 0,
        gpuInstanceSliceCount: mig.gpu_slices,
        computeInstanceSliceCount: mig.compute_slices,
        memorySizeMB: mig.total >> 20,
    }
}
