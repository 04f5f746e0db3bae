//! GPM: samples, and the rates between two of them from the control file.

use crate::control::{Curve, Gpm};
use crate::functions::Function;
use crate::handle::{
    ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT, NOT_SUPPORTED, Place, Target, on_device, on_system, put,
};
use crate::state::{State, elapsed_ms};
use nvml_wrapper_sys::bindings as sys;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use sys::{nvmlDevice_t, nvmlGpmMetric_t, nvmlGpmSample_t};

/// The GPU of a sample, and its time.
#[derive(Debug, Clone, Copy)]
struct Taken {
    place: Place,
    at_ms: f64,
}

/// The allocated samples; `None` for a sample that has not been filled.
#[derive(Debug)]
struct Samples {
    allocated: BTreeMap<usize, Option<Taken>>,
    made: usize,
}

static SAMPLES: Mutex<Samples> = Mutex::new(Samples { allocated: BTreeMap::new(), made: 0 });

fn samples() -> MutexGuard<'static, Samples> {
    SAMPLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts over, without samples.
pub fn start() {
    samples().allocated.clear();
}

fn of<'a>(target: &'a Target<'_>) -> Result<&'a Gpm, u32> {
    target.whole()?.gpm.as_ref().ok_or(NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, support: *mut sys::nvmlGpmSupport_t) -> u32 {
    on_device(Function::nvmlGpmQueryDeviceSupport, device, |target| {
        if support.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the caller has set the version, which is read before anything is written.
        let version = unsafe { (*support).version };
        if version != sys::NVML_GPM_SUPPORT_VERSION {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        put(support, sys::nvmlGpmSupport_t { version, isSupportedDevice: u32::from(of(target).is_ok()) })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleAlloc(sample: *mut nvmlGpmSample_t) -> u32 {
    on_system(Function::nvmlGpmSampleAlloc, |_| {
        let mut samples = samples();
        samples.made += 1;
        let number = samples.made << 4;
        samples.allocated.insert(number, None);
        put(sample, std::ptr::without_provenance_mut(number))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleGet(device: nvmlDevice_t, sample: nvmlGpmSample_t) -> u32 {
    on_device(Function::nvmlGpmSampleGet, device, |target| {
        of(target)?;
        let mut samples = samples();
        let allocated = samples.allocated.get_mut(&sample.addr()).ok_or(INVALID_ARGUMENT)?;
        *allocated = Some(Taken { place: target.place, at_ms: elapsed_ms() });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) -> u32 {
    on_system(Function::nvmlGpmSampleFree, |_| {
        samples().allocated.remove(&sample.addr()).map(drop).ok_or(INVALID_ARGUMENT)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmMetricsGet(request: *mut sys::nvmlGpmMetricsGet_t) -> u32 {
    on_system(Function::nvmlGpmMetricsGet, |state| {
        // SAFETY: null, or the caller's own structure, which nothing else uses meanwhile.
        let request = unsafe { request.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        if request.version != sys::NVML_GPM_METRICS_GET_VERSION {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let later = later(request.sample1, request.sample2)?;
        let metrics = request.metrics.get_mut(..request.numMetrics as usize).ok_or(INVALID_ARGUMENT)?;
        metrics.iter_mut().for_each(|metric| answer(state, later, metric));
        Ok(())
    })
}

/// The second of two samples of the same GPU, in the order of time, with no reset between them.
fn later(first: nvmlGpmSample_t, second: nvmlGpmSample_t) -> Result<Taken, u32> {
    let samples = samples();
    let taken = |sample: nvmlGpmSample_t| samples.allocated.get(&sample.addr()).copied().flatten();
    let (first, second) = taken(first).zip(taken(second)).ok_or(INVALID_ARGUMENT)?;
    if first.place == second.place && first.at_ms <= second.at_ms { Ok(second) } else { Err(INVALID_ARGUMENT) }
}

fn answer(state: &State, later: Taken, metric: &mut nvmlGpmMetric_t) {
    let gpm = state.control.gpus.get(later.place.gpu).and_then(|gpu| gpu.gpm.as_ref());
    let rate = |of: fn(&Gpm) -> Option<&Curve>| Some(gpm.and_then(of)?.at(later.at_ms));
    let value = match metric.metricId {
        2 => rate(|gpm| gpm.sm.as_ref()),
        3 => rate(|gpm| gpm.occupancy.as_ref()),
        5 => rate(|gpm| gpm.tensor.as_ref()),
        10 => rate(|gpm| gpm.dram.as_ref()),
        20 => rate(|gpm| gpm.pcie_tx_mib_per_second.as_ref()),
        21 => rate(|gpm| gpm.pcie_rx_mib_per_second.as_ref()),
        _ => None,
    };
    metric.nvmlReturn = if value.is_some() { 0 } else { NOT_SUPPORTED };
    metric.value = value.map_or(f64::NAN, |value| value as f64);
}
