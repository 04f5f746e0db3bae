//! Calls that the daemon never makes and that the `probe` command times: PCIe throughput and samples.

use crate::functions::Function;
use crate::handle::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, on_device, put};
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
