//! Calls that the daemon never makes and that the `probe` command times: PCIe throughput, samples, GPM.

use crate::functions::Function;
use crate::handle::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_SUPPORTED, on_device, on_system, put};
use nvml_wrapper_sys::bindings as sys;
use sys::nvmlDevice_t;

const SAMPLES: u32 = 10;

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPcieThroughput(device: nvmlDevice_t, counter: u32, kib_per_second: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetPcieThroughput, device, |target| {
        target.whole()?;
        if counter > 1 { Err(INVALID_ARGUMENT) } else { put(kib_per_second, 400) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetSamples(
    device: nvmlDevice_t,
    _kind: u32,
    last_seen: u64,
    value_type: *mut u32,
    count: *mut u32,
    samples: *mut sys::nvmlSample_t,
) -> u32 {
    on_device(Function::nvmlDeviceGetSamples, device, |target| {
        target.whole()?;
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        put(value_type, sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT)?;
        // SAFETY: not null, and the caller has set the room of its array.
        let room = unsafe { *count };
        put(count, SAMPLES)?;
        if samples.is_null() {
            return Ok(());
        }
        if room < SAMPLES {
            return Err(INSUFFICIENT_SIZE);
        }
        for number in 0..SAMPLES {
            let sample = sys::nvmlSample_t {
                timeStamp: last_seen + u64::from(number) * 20_000,
                sampleValue: sys::nvmlValue_t { ullVal: 50 },
            };
            // SAFETY: the caller's array has room for them all.
            unsafe { samples.add(number as usize).write(sample) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, support: *mut sys::nvmlGpmSupport_t) -> u32 {
    on_device(Function::nvmlGpmQueryDeviceSupport, device, |_| {
        put(support, sys::nvmlGpmSupport_t { version: 1, isSupportedDevice: 0 })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleAlloc(sample: *mut sys::nvmlGpmSample_t) -> u32 {
    on_system(Function::nvmlGpmSampleAlloc, |_| put(sample, std::ptr::without_provenance_mut(16)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleGet(device: nvmlDevice_t, _sample: sys::nvmlGpmSample_t) -> u32 {
    on_device(Function::nvmlGpmSampleGet, device, |_| Err(NOT_SUPPORTED))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleFree(_sample: sys::nvmlGpmSample_t) -> u32 {
    on_system(Function::nvmlGpmSampleFree, |_| Ok(()))
}
