//! The readings of a device: memory, load, power, clocks, counters.

use crate::control::{Curve, Gpu};
use crate::functions::{Function, count_field};
use crate::handle::{ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT, NOT_SUPPORTED, on_device, put};
use crate::state::{clock_ns, elapsed_ms, spin};
use nvml_wrapper_sys::bindings as sys;
use std::time::Duration;
use sys::{nvmlDevice_t, nvmlFieldValue_t};

const MEMORY_V2: u32 = size_of::<sys::nvmlMemory_v2_t>() as u32 | 2 << 24;

fn now(curve: &Curve) -> u64 {
    curve.at(elapsed_ms())
}

fn now_u32(curve: &Curve) -> u32 {
    u32::try_from(now(curve)).unwrap_or(u32::MAX)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut sys::nvmlMemory_t) -> u32 {
    on_device(Function::nvmlDeviceGetMemoryInfo, device, |target| {
        let (total, reserved, curve) = memory_of(target);
        let used = now(curve).saturating_add(reserved);
        put(memory, sys::nvmlMemory_t { total, free: total.saturating_sub(used), used })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut sys::nvmlMemory_v2_t) -> u32 {
    on_device(Function::nvmlDeviceGetMemoryInfo_v2, device, |target| {
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the caller has set the version, which is read before anything is written.
        if unsafe { (*memory).version } != MEMORY_V2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let (total, reserved, curve) = memory_of(target);
        let used = now(curve);
        let free = total.saturating_sub(used.saturating_add(reserved));
        put(memory, sys::nvmlMemory_v2_t { version: MEMORY_V2, total, reserved, free, used })
    })
}

fn memory_of<'a>(target: &'a crate::handle::Target<'_>) -> (u64, u64, &'a Curve) {
    match target.mig {
        Some(mig) => (mig.total, mig.reserved, &mig.used),
        None => (target.gpu.total, target.gpu.reserved, &target.gpu.used),
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, rates: *mut sys::nvmlUtilization_t) -> u32 {
    on_device(Function::nvmlDeviceGetUtilizationRates, device, |target| {
        let gpu = target.whole()?;
        put(rates, sys::nvmlUtilization_t { gpu: now_u32(&gpu.utilization), memory: now_u32(&gpu.memory_utilization) })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, power: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetPowerUsage, device, |target| {
        put(power, now_u32(&target.whole()?.power_average_mw))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(device: nvmlDevice_t, sensor: u32, temperature: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetTemperature, device, |target| match sensor {
        0 => put(temperature, now_u32(&target.whole()?.temperature)),
        _ => Err(INVALID_ARGUMENT),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, limit: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetEnforcedPowerLimit, device, |target| {
        put(limit, now_u32(&target.whole()?.power_limit_mw))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperatureThreshold(device: nvmlDevice_t, kind: u32, celsius: *mut u32) -> u32 {
    use sys::{
        nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_COUNT as COUNT,
        nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_SHUTDOWN as SHUTDOWN,
        nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_SLOWDOWN as SLOWDOWN,
    };
    on_device(Function::nvmlDeviceGetTemperatureThreshold, device, |target| {
        let gpu = target.whole()?;
        let threshold = match kind {
            SHUTDOWN => gpu.shutdown_celsius,
            SLOWDOWN => gpu.slowdown_celsius,
            COUNT.. => return Err(INVALID_ARGUMENT),
            _ => None,
        };
        put(celsius, threshold.ok_or(NOT_SUPPORTED)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, kind: u32, clock: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetClockInfo, device, |target| match kind {
        0 | 1 => put(clock, now_u32(&target.whole()?.sm_clock_mhz)),
        2 => put(clock, now_u32(&target.whole()?.memory_clock_mhz)),
        _ => Err(NOT_SUPPORTED),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(device: nvmlDevice_t, reasons: *mut u64) -> u32 {
    on_device(Function::nvmlDeviceGetCurrentClocksThrottleReasons, device, |target| {
        put(reasons, now(&target.whole()?.throttle_reasons))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(device: nvmlDevice_t, reasons: *mut u64) -> u32 {
    on_device(Function::nvmlDeviceGetCurrentClocksEventReasons, device, |target| {
        put(reasons, now(&target.whole()?.throttle_reasons))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEnergyConsumption(device: nvmlDevice_t, energy: *mut u64) -> u32 {
    on_device(Function::nvmlDeviceGetTotalEnergyConsumption, device, |target| {
        // It counts since the driver was loaded, and not since the library was.
        put(energy, target.whole()?.energy_mj.at(clock_ns(libc::CLOCK_MONOTONIC) as f64 * 1e-6))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, memory: *mut sys::nvmlBAR1Memory_t) -> u32 {
    on_device(Function::nvmlDeviceGetBAR1MemoryInfo, device, |target| {
        let (total, used) = (256 << 30, now(&target.gpu.bar1_used));
        put(memory, sys::nvmlBAR1Memory_t { bar1Total: total, bar1Free: total.saturating_sub(used), bar1Used: used })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(device: nvmlDevice_t, kind: u32, counter: u32, errors: *mut u64) -> u32 {
    on_device(Function::nvmlDeviceGetTotalEccErrors, device, |target| put(errors, ecc(target.whole()?, kind, counter)?))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryErrorCounter(
    device: nvmlDevice_t,
    kind: u32,
    counter: u32,
    _location: u32,
    errors: *mut u64,
) -> u32 {
    on_device(Function::nvmlDeviceGetMemoryErrorCounter, device, |target| {
        put(errors, ecc(target.whole()?, kind, counter)?)
    })
}

/// Only the volatile counters exist.
fn ecc(gpu: &Gpu, kind: u32, counter: u32) -> Result<u64, u32> {
    match (kind, counter) {
        (0, 0) => Ok(gpu.ecc_corrected),
        (1, 0) => Ok(gpu.ecc_uncorrected),
        (0 | 1, 1) => Err(NOT_SUPPORTED),
        _ => Err(INVALID_ARGUMENT),
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetRemappedRows(
    device: nvmlDevice_t,
    corrected: *mut u32,
    uncorrected: *mut u32,
    pending: *mut u32,
    failed: *mut u32,
) -> u32 {
    on_device(Function::nvmlDeviceGetRemappedRows, device, |target| {
        let gpu = target.whole()?;
        put(corrected, gpu.rows_corrected)?;
        put(uncorrected, gpu.rows_uncorrected)?;
        put(pending, gpu.rows_pending.into())?;
        put(failed, gpu.rows_failed.into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrPcieLinkGeneration(device: nvmlDevice_t, number: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetCurrPcieLinkGeneration, device, |target| put(number, target.whole()?.pcie_link[0]))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(device: nvmlDevice_t, number: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetCurrPcieLinkWidth, device, |target| put(number, target.whole()?.pcie_link[1]))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(device: nvmlDevice_t, number: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetMaxPcieLinkGeneration, device, |target| put(number, target.whole()?.pcie_best[0]))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(device: nvmlDevice_t, number: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetMaxPcieLinkWidth, device, |target| put(number, target.whole()?.pcie_best[1]))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(device: nvmlDevice_t, count: i32, values: *mut nvmlFieldValue_t) -> u32 {
    on_device(Function::nvmlDeviceGetFieldValues, device, |target| {
        let gpu = target.whole()?;
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        if values.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's array has `count` structures.
        for value in unsafe { std::slice::from_raw_parts_mut(values, count) } {
            count_field(value.fieldId);
            let delay_us = gpu.field_delay_us.get(&value.fieldId).copied().unwrap_or(0.0);
            spin(Duration::try_from_secs_f64(delay_us * 1e-6).unwrap_or_default());
            answer_field(gpu, value);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, link: u32, state: *mut u32) -> u32 {
    on_device(Function::nvmlDeviceGetNvLinkState, device, |target| {
        let gpu = target.whole()?;
        let missing = if gpu.nvlink.is_empty() { NOT_SUPPORTED } else { INVALID_ARGUMENT };
        put(state, (!gpu.nvlink.get(link as usize).ok_or(missing)?.is_down).into())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfo(device: nvmlDevice_t, info: *mut sys::nvmlGpuFabricInfo_t) -> u32 {
    on_device(Function::nvmlDeviceGetGpuFabricInfo, device, |target| {
        let [state, status] = target.whole()?.fabric.unwrap_or([0, 0]);
        let state = u8::try_from(state).map_err(|_| INVALID_ARGUMENT)?;
        put(info, sys::nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status, cliqueId: 0, state })
    })
}

fn answer_field(gpu: &Gpu, field: &mut nvmlFieldValue_t) {
    use sys::{
        nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT as NARROW,
        nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG as WIDE,
    };
    let pcie = if gpu.pcie_narrow { NARROW } else { WIDE };
    let answer = match (gpu.field_errors.get(&field.fieldId), field.fieldId) {
        (Some(code), _) => Err(*code),
        (None, 138) => links(gpu, field.scopeId, |link| link.tx_kib).map(|kib| (kib, WIDE)),
        (None, 139) => links(gpu, field.scopeId, |link| link.rx_kib).map(|kib| (kib, WIDE)),
        (None, 161) => links(gpu, field.scopeId, |link| link.replays).map(|count| (count, WIDE)),
        (None, 162) => links(gpu, field.scopeId, |link| link.recoveries).map(|count| (count, WIDE)),
        (None, 163) => links(gpu, field.scopeId, |link| link.crc).map(|count| (count, WIDE)),
        (None, 185) => Ok((now(&gpu.power_average_mw), NARROW)),
        (None, 186) => Ok((now(&gpu.power_instant_mw), NARROW)),
        (None, 197) => Ok((now(&gpu.pcie_tx_bytes), pcie)),
        (None, 198) => Ok((now(&gpu.pcie_rx_bytes), pcie)),
        (None, 230) => Ok((gpu.recovery_action, NARROW)),
        _ => Err(NOT_SUPPORTED),
    };
    field.nvmlReturn = answer.err().unwrap_or(0);
    if let Ok((value, value_type)) = answer {
        field.valueType = value_type;
        field.value = match value_type {
            NARROW => sys::nvmlValue_t { uiVal: value as u32 },
            _ => sys::nvmlValue_t { ullVal: value },
        };
    }
}

/// One link by its number, or the sum of all.
fn links(gpu: &Gpu, scope: u32, of: impl Fn(&crate::control::Link) -> u64) -> Result<u64, u32> {
    match scope {
        _ if gpu.nvlink.is_empty() => Err(NOT_SUPPORTED),
        u32::MAX => Ok(gpu.nvlink.iter().map(of).sum()),
        link => gpu.nvlink.get(link as usize).map(of).ok_or(INVALID_ARGUMENT),
    }
}
