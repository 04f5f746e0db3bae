//! The functions that can be counted, made to fail, delayed or hung, by NVML's names.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! functions {
    ($($name:ident),* $(,)?) => {
        /// One of NVML's functions.
        #[allow(non_camel_case_types, reason = "NVML's own names, as the control file has them")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Function { $($name),* }

        /// Their names, in the order of the enumeration.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

functions! {
    nvmlInit_v2,
    nvmlInitWithFlags,
    nvmlShutdown,
    nvmlSystemGetDriverVersion,
    nvmlSystemGetNVMLVersion,
    nvmlSystemGetCudaDriverVersion,
    nvmlSystemGetCudaDriverVersion_v2,
    nvmlDeviceGetCount_v2,
    nvmlDeviceGetHandleByIndex_v2,
    nvmlDeviceGetHandleByUUID,
    nvmlDeviceGetHandleByPciBusId_v2,
    nvmlDeviceGetName,
    nvmlDeviceGetUUID,
    nvmlDeviceGetPciInfo_v3,
    nvmlDeviceGetIndex,
    nvmlDeviceGetMemoryInfo,
    nvmlDeviceGetMemoryInfo_v2,
    nvmlDeviceGetUtilizationRates,
    nvmlDeviceGetPowerUsage,
    nvmlDeviceGetEnforcedPowerLimit,
    nvmlDeviceGetTemperature,
    nvmlDeviceGetTemperatureThreshold,
    nvmlDeviceGetClockInfo,
    nvmlDeviceGetCurrentClocksThrottleReasons,
    nvmlDeviceGetCurrentClocksEventReasons,
    nvmlDeviceGetFieldValues,
    nvmlDeviceGetTotalEnergyConsumption,
    nvmlDeviceGetBAR1MemoryInfo,
    nvmlDeviceGetPcieThroughput,
    nvmlDeviceGetTotalEccErrors,
    nvmlDeviceGetMemoryErrorCounter,
    nvmlDeviceGetRemappedRows,
    nvmlDeviceGetCurrPcieLinkGeneration,
    nvmlDeviceGetCurrPcieLinkWidth,
    nvmlDeviceGetMaxPcieLinkGeneration,
    nvmlDeviceGetMaxPcieLinkWidth,
    nvmlDeviceGetNvLinkState,
    nvmlDeviceGetGpuFabricInfo,
    nvmlDeviceGetComputeRunningProcesses_v3,
    nvmlDeviceGetGraphicsRunningProcesses_v3,
    nvmlDeviceGetMigMode,
    nvmlDeviceGetMaxMigDeviceCount,
    nvmlDeviceGetMigDeviceHandleByIndex,
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle,
    nvmlDeviceIsMigDeviceHandle,
    nvmlDeviceGetGpuInstanceId,
    nvmlDeviceGetComputeInstanceId,
    nvmlDeviceGetAttributes_v2,
    nvmlDeviceGetGpuInstanceById,
    nvmlGpuInstanceGetInfo,
    nvmlDeviceGetSamples,
    nvmlEventSetCreate,
    nvmlDeviceGetSupportedEventTypes,
    nvmlDeviceRegisterEvents,
    nvmlEventSetWait_v2,
    nvmlEventSetFree,
    nvmlGpmQueryDeviceSupport,
    nvmlGpmSampleAlloc,
    nvmlGpmSampleGet,
    nvmlGpmSampleFree,
    nvmlGpmMetricsGet,
}

/// How many functions there are.
pub const COUNT: usize = NAMES.len();
/// Fields above this are not counted.
const FIELDS: usize = 512;

static CALLS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];
static FIELD_CALLS: [AtomicU64; FIELDS] = [const { AtomicU64::new(0) }; FIELDS];

/// Counts one call.
pub fn count(function: Function) {
    CALLS[function as usize].fetch_add(1, Ordering::Relaxed);
}

/// Counts one query of a field.
pub fn count_field(field: u32) {
    if let Some(calls) = FIELD_CALLS.get(field as usize) {
        calls.fetch_add(1, Ordering::Relaxed);
    }
}

/// The count of a function or of a field, by name.
pub fn calls(name: &str) -> Option<u64> {
    let counter = match name.strip_prefix("field:") {
        Some(field) => FIELD_CALLS.get(field.parse::<usize>().ok()?)?,
        None => CALLS.get(position(name)?)?,
    };
    Some(counter.load(Ordering::Relaxed))
}

/// The position of a function in the enumeration.
pub fn position(name: &str) -> Option<usize> {
    NAMES.iter().position(|known| *known == name)
}
