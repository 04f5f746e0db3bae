//! NVML's functions that are called without the wrapper, resolved once from the library that it loaded.
//!
//! Enters: a [`Handle`]. Leaves: plain numbers, or the [`Code`] that NVML returned. Invariant: nothing here allocates
//! except [`RawFunctions::processes`], and nothing here keeps state. The pointers are valid while the wrapper's library is
//! loaded; [`Nvml`](super::Nvml) owns both.

use super::errors::Code;
use highwater_core::gpu::{Fabric, MigPlace, NvLinks};
use nvml_wrapper_sys::bindings as sys;
use sys::field_id;

/// The scope that requests the sum over all links, in a field whose scope is a link.
pub(super) const ALL_LINKS: u32 = u32::MAX;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION` of NVIDIA's nvml.h, which the bindings do not have yet.
const RECOVERY_ACTION: u32 = 230;
/// More processes than a GPU can hold contexts of; the call fails if NVML asks for more room.
const MOST_PROCESSES: usize = 65_536;

type Device = sys::nvmlDevice_t;
type Return = sys::nvmlReturn_t;
type MemoryV1 = unsafe extern "C" fn(Device, *mut sys::nvmlMemory_t) -> Return;
type MemoryV2 = unsafe extern "C" fn(Device, *mut sys::nvmlMemory_v2_t) -> Return;
type Fields = unsafe extern "C" fn(Device, i32, *mut sys::nvmlFieldValue_t) -> Return;
type Reasons = unsafe extern "C" fn(Device, *mut u64) -> Return;
type Rows = unsafe extern "C" fn(Device, *mut u32, *mut u32, *mut u32, *mut u32) -> Return;
type Processes = unsafe extern "C" fn(Device, *mut u32, *mut sys::nvmlProcessInfo_t) -> Return;
type Number = unsafe extern "C" fn(Device, *mut u32) -> Return;
type LinkState = unsafe extern "C" fn(Device, u32, *mut sys::nvmlEnableState_t) -> Return;
type FabricInfo = unsafe extern "C" fn(Device, *mut sys::nvmlGpuFabricInfo_t) -> Return;
type Attributes = unsafe extern "C" fn(Device, *mut sys::nvmlDeviceAttributes_t) -> Return;
type GpuInstance = unsafe extern "C" fn(Device, u32, *mut sys::nvmlGpuInstance_t) -> Return;
type GpuInstanceInfo = unsafe extern "C" fn(sys::nvmlGpuInstance_t, *mut sys::nvmlGpuInstanceInfo_t) -> Return;

/// A device handle that NVML gave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(pub(super) Device);

/// Which of the two memory calls a GPU answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum MemoryVersion {
    /// Neither: `used` is never known.
    None = 0,
    /// `used` includes the driver's reserve, which is unknown.
    V1 = 1,
    /// `used` and `reserved` are separate.
    V2 = 2,
}

/// Framebuffer of one GPU, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) total: u64,
    pub(super) reserved: Option<u64>,
    pub(super) used: u64,
}

/// The value of one field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) value: u64,
    /// Whether NVML keeps it in 64 bits. A counter of bytes in 32 bits wraps several times a second.
    pub(super) wide: bool,
}

/// What is known of the rows of a GPU's memory that were remapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RemappedRows {
    /// Because of corrected errors.
    pub(super) corrected: u32,
    /// Because of uncorrected errors.
    pub(super) uncorrected: u32,
    pub(super) is_pending: bool,
    pub(super) has_failed: bool,
}

/// What the running-process calls report of one context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessContext {
    pub(super) pid: u32,
    pub(super) used_bytes: Option<u64>,
}

/// Which list of processes to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessKind {
    Compute,
    Graphics,
}

/// The resolved functions; `None` if this version of NVML lacks one.
#[derive(Debug)]
pub(super) struct RawFunctions {
    memory_v1: Option<MemoryV1>,
    memory_v2: Option<MemoryV2>,
    fields: Option<Fields>,
    reasons: Option<Reasons>,
    remapped_rows: Option<Rows>,
    compute_processes: Option<Processes>,
    graphics_processes: Option<Processes>,
    gpu_instance_id: Option<Number>,
    compute_instance_id: Option<Number>,
    attributes: Option<Attributes>,
    gpu_instance: Option<GpuInstance>,
    gpu_instance_info: Option<GpuInstanceInfo>,
    nvlink_state: Option<LinkState>,
    fabric: Option<FabricInfo>,
    /// Whether this NVML may write longer process structures.
    writes_long_processes: bool,
}

/// The pointer of one function, if the library has it.
pub(super) fn resolved<F: Copy, E>(symbol: &Result<F, E>) -> Option<F> {
    symbol.as_ref().ok().copied()
}

impl RawFunctions {
    /// Resolves every function of `library`, which belongs to a driver of this version.
    pub(super) fn of(library: &sys::NvmlLib, driver_version: Option<&str>) -> Self {
        Self {
            memory_v1: resolved(&library.nvmlDeviceGetMemoryInfo),
            memory_v2: resolved(&library.nvmlDeviceGetMemoryInfo_v2),
            fields: resolved(&library.nvmlDeviceGetFieldValues),
            // The call was renamed with driver 535; both names have the same mask.
            reasons: resolved(&library.nvmlDeviceGetCurrentClocksEventReasons)
                .or(resolved(&library.nvmlDeviceGetCurrentClocksThrottleReasons)),
            remapped_rows: resolved(&library.nvmlDeviceGetRemappedRows),
            // Drivers before 510, and 535.98, have only the second version, with the same structure.
            compute_processes: resolved(&library.nvmlDeviceGetComputeRunningProcesses_v3)
                .or(resolved(&library.nvmlDeviceGetComputeRunningProcesses_v2)),
            graphics_processes: resolved(&library.nvmlDeviceGetGraphicsRunningProcesses_v3)
                .or(resolved(&library.nvmlDeviceGetGraphicsRunningProcesses_v2)),
            gpu_instance_id: resolved(&library.nvmlDeviceGetGpuInstanceId),
            compute_instance_id: resolved(&library.nvmlDeviceGetComputeInstanceId),
            attributes: resolved(&library.nvmlDeviceGetAttributes_v2),
            gpu_instance: resolved(&library.nvmlDeviceGetGpuInstanceById),
            gpu_instance_info: resolved(&library.nvmlGpuInstanceGetInfo),
            nvlink_state: resolved(&library.nvmlDeviceGetNvLinkState),
            fabric: resolved(&library.nvmlDeviceGetGpuFabricInfo),
            writes_long_processes: driver_version.is_some_and(writes_long_processes),
        }
    }

    /// Whether this NVML lists processes at all.
    pub(super) fn lists_processes(&self) -> bool {
        self.compute_processes.is_some()
    }

    /// Finds which memory call this GPU supports. If the newer call fails for another reason, it is taken as supported.
    pub(super) fn memory_version(&self, handle: Handle) -> MemoryVersion {
        // A library that does not know this version of the structure returns that code, or "invalid argument".
        let refused = |code: Code| code.is_unsupported() || code == Code::INVALID_ARGUMENT;
        match self.memory_info_v2(handle) {
            Ok(_) => return MemoryVersion::V2,
            Err(code) if !refused(code) => return MemoryVersion::V2,
            Err(_) => {}
        }
        match self.memory_info_v1(handle) {
            Err(code) if refused(code) => MemoryVersion::None,
            _ => MemoryVersion::V1,
        }
    }

    /// Framebuffer of one GPU, by the call that it supports. The only call of the fast lane.
    #[inline]
    pub(super) fn memory(&self, version: MemoryVersion, handle: Handle) -> Result<Memory, Code> {
        match version {
            MemoryVersion::V2 => self.memory_info_v2(handle),
            MemoryVersion::V1 => self.memory_info_v1(handle),
            MemoryVersion::None => Err(Code::NOT_SUPPORTED),
        }
    }

    /// Framebuffer by version 2 of the call.
    pub(super) fn memory_info_v2(&self, handle: Handle) -> Result<Memory, Code> {
        let call = self.memory_v2.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let version = structure_version::<sys::nvmlMemory_v2_t>(2);
        let mut memory = sys::nvmlMemory_v2_t { version, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: the handle is NVML's own, and `memory` is the structure that its version names.
        Code::check(unsafe { call(handle.0, &raw mut memory) })?;
        Ok(Memory { total: memory.total, reserved: Some(memory.reserved), used: memory.used })
    }

    /// Framebuffer by version 1 of the call: `used` counts the driver's reserve.
    pub(super) fn memory_info_v1(&self, handle: Handle) -> Result<Memory, Code> {
        let call = self.memory_v1.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut memory = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
        // SAFETY: the handle is NVML's own, and `memory` outlives the call.
        Code::check(unsafe { call(handle.0, &raw mut memory) })?;
        Ok(Memory { total: memory.total, reserved: None, used: memory.used })
    }

    /// Instant power draw, milliwatts.
    pub(super) fn power_instant_mw(&self, handle: Handle) -> Result<u64, Code> {
        let [power] = self.fields(handle, [(field_id::NVML_FI_DEV_POWER_INSTANT, 0)])?;
        power.map(|field| field.value)
    }

    /// PCIe bytes as the GPU counts them: transmitted, received.
    pub(super) fn pcie_counters(&self, handle: Handle) -> Result<[Result<Field, Code>; 2], Code> {
        self.fields(
            handle,
            [(field_id::NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0), (field_id::NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0)],
        )
    }

    /// NVLink payload in KiB, the sum of all links: transmitted, received.
    pub(super) fn nvlink_counters(&self, handle: Handle) -> Result<[Result<Field, Code>; 2], Code> {
        let (sent, received) =
            (field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX);
        self.fields(handle, [(sent, ALL_LINKS), (received, ALL_LINKS)])
    }

    /// Errors of NVLinks, the sum of all links: replays, recoveries, wrong checksums.
    pub(super) fn nvlink_errors(&self, handle: Handle) -> Result<[Result<Field, Code>; 3], Code> {
        let ids = [
            field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
            field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
            field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
        ];
        self.fields(handle, ids.map(|id| (id, ALL_LINKS)))
    }

    /// Which NVLinks are up. Links from the first one on that the GPU does not know are not present.
    pub(super) fn nvlinks(&self, handle: Handle) -> Result<NvLinks, Code> {
        let call = self.nvlink_state.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut links = NvLinks::default();
        for link in 0..sys::NVML_NVLINK_MAX_LINKS.min(u32::BITS) {
            let mut state = 0;
            // SAFETY: the handle is NVML's own, and `state` outlives the call.
            match Code::check(unsafe { call(handle.0, link, &raw mut state) }) {
                Ok(()) => {}
                Err(Code::INVALID_ARGUMENT | Code::NOT_SUPPORTED) if links.present != 0 => break,
                Err(code) => return Err(code),
            }
            links.present |= 1 << link;
            links.up |= u32::from(state == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED) << link;
        }
        Ok(links)
    }

    /// The GPU's part in the NVLink fabric.
    pub(super) fn fabric(&self, handle: Handle) -> Result<Fabric, Code> {
        let call = self.fabric.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut info = sys::nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: 0, cliqueId: 0, state: 0 };
        // SAFETY: the handle is NVML's own, and `info` outlives the call.
        Code::check(unsafe { call(handle.0, &raw mut info) })?;
        match info.state {
            0 => Err(Code::NOT_SUPPORTED),
            state => Ok(Fabric { state: state.into(), status: info.status }),
        }
    }

    /// Values of fields, each an id with its scope, in one call.
    pub(super) fn fields<const N: usize>(
        &self,
        handle: Handle,
        asked: [(u32, u32); N],
    ) -> Result<[Result<Field, Code>; N], Code> {
        let call = self.fields.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut values = asked.map(|(id, scope)| sys::nvmlFieldValue_t {
            fieldId: id,
            scopeId: scope,
            timestamp: 0,
            latencyUsec: 0,
            valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_COUNT,
            // A field that the driver does not write must not read as a success.
            nvmlReturn: Code::NO_DATA.0,
            value: sys::nvmlValue_t { ullVal: 0 },
        });
        let count = i32::try_from(N).map_err(|_| Code::INVALID_ARGUMENT)?;
        // SAFETY: the handle is NVML's own, and `values` holds `count` structures.
        Code::check(unsafe { call(handle.0, count, values.as_mut_ptr()) })?;
        Ok(values.map(|value| decode(&value)))
    }

    /// The mask of clock event reasons.
    pub(super) fn clock_event_reasons(&self, handle: Handle) -> Result<u64, Code> {
        let call = self.reasons.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut reasons = 0;
        // SAFETY: the handle is NVML's own, and `reasons` outlives the call.
        Code::check(unsafe { call(handle.0, &raw mut reasons) })?;
        Ok(reasons)
    }

    /// Rows that were remapped, and whether others wait for it or could not be.
    pub(super) fn remapped_rows(&self, handle: Handle) -> Result<RemappedRows, Code> {
        let call = self.remapped_rows.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: the handle is NVML's own, and the four numbers outlive the call.
        let code =
            unsafe { call(handle.0, &raw mut corrected, &raw mut uncorrected, &raw mut pending, &raw mut failed) };
        Code::check(code)?;
        Ok(RemappedRows { corrected, uncorrected, is_pending: pending != 0, has_failed: failed != 0 })
    }

    /// What the driver asks for to recover the GPU.
    pub(super) fn recovery_action(&self, handle: Handle) -> Result<u64, Code> {
        let [action] = self.fields(handle, [(RECOVERY_ACTION, 0)])?;
        action.map(|field| field.value)
    }

    /// The processes with a context of this kind; one process may be listed once for each MIG instance.
    pub(super) fn processes(&self, kind: ProcessKind, handle: Handle) -> Result<Vec<ProcessContext>, Code> {
        let call = match kind {
            ProcessKind::Compute => self.compute_processes,
            ProcessKind::Graphics => self.graphics_processes,
        }
        .ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut room = 64;
        loop {
            let mut slots = vec![[UNTOUCHED; SLOT_WORDS]; room];
            let mut count = u32::try_from(room).map_err(|_| Code::INSUFFICIENT_SIZE)?;
            // SAFETY: the handle is NVML's own, and `slots` has room for `count` structures of either size, with their
            // alignment.
            match Code::check(unsafe { call(handle.0, &raw mut count, slots.as_mut_ptr().cast()) }) {
                // Processes may start between two calls, so the next try has more room than NVML requested.
                Err(Code::INSUFFICIENT_SIZE) if room < MOST_PROCESSES => {
                    room = (count as usize).clamp(room, MOST_PROCESSES / 2) * 2;
                }
                Err(code) => return Err(code),
                Ok(()) => return Ok(contexts(slots.as_flattened(), count as usize, self.writes_long_processes)),
            }
        }
    }

    /// The ids of a MIG instance: GPU instance, compute instance.
    pub(super) fn instance_ids(&self, handle: Handle) -> Result<(u32, u32), Code> {
        Ok((number(self.gpu_instance_id, handle)?, number(self.compute_instance_id, handle)?))
    }

    /// Where the GPU instance with this id lies on a GPU. NVML reports it to privileged processes alone.
    pub(super) fn mig_place(&self, gpu: Handle, id: u32) -> Result<MigPlace, Code> {
        let (open, describe) = self.gpu_instance.zip(self.gpu_instance_info).ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut instance = std::ptr::null_mut();
        let mut info = NO_INSTANCE;
        // SAFETY: the handle is NVML's own, and `instance` outlives the call.
        Code::check(unsafe { open(gpu.0, id, &raw mut instance) })?;
        // SAFETY: NVML has just returned `instance`, and `info` outlives the call.
        Code::check(unsafe { describe(instance, &raw mut info) })?;
        Ok(MigPlace { profile: info.profileId, start: info.placement.start })
    }

    /// Slices and memory of a MIG instance.
    pub(super) fn attributes(&self, handle: Handle) -> Result<sys::nvmlDeviceAttributes_t, Code> {
        let call = self.attributes.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut attributes = NO_ATTRIBUTES;
        // SAFETY: the handle is NVML's own, and `attributes` outlives the call.
        Code::check(unsafe { call(handle.0, &raw mut attributes) })?;
        Ok(attributes)
    }
}

/// Eight-byte words of one process in the running-process calls: its id, its memory, its MIG instance.
const PROCESS_WORDS: usize = size_of::<sys::nvmlProcessInfo_t>() / 8;
/// The room needed per process: NVML of the drivers from 535.43 to before 535.98 writes one word more per process,
/// under the same name and version.
const SLOT_WORDS: usize = PROCESS_WORDS + 1;
/// A value that is never the last word of a process, neither as ids of a MIG instance nor as bytes.
const UNTOUCHED: u64 = 0xA5A5_A5A5_A5A5_A5A5;

const NO_INSTANCE: sys::nvmlGpuInstanceInfo_t = sys::nvmlGpuInstanceInfo_t {
    device: std::ptr::null_mut(),
    id: 0,
    profileId: 0,
    placement: sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 },
};

const NO_ATTRIBUTES: sys::nvmlDeviceAttributes_t = sys::nvmlDeviceAttributes_t {
    multiprocessorCount: 0,
    sharedCopyEngineCount: 0,
    sharedDecoderCount: 0,
    sharedEncoderCount: 0,
    sharedJpegCount: 0,
    sharedOfaCount: 0,
    gpuInstanceSliceCount: 0,
    computeInstanceSliceCount: 0,
    memorySizeMB: 0,
};

/// The `version` that NVML expects in a versioned structure: its size, and its number in the top byte.
fn structure_version<T>(number: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(0) | (number << 24)
}

fn number(call: Option<Number>, handle: Handle) -> Result<u32, Code> {
    let call = call.ok_or(Code::FUNCTION_NOT_FOUND)?;
    let mut number = 0;
    // SAFETY: the handle is NVML's own, and `number` outlives the call.
    Code::check(unsafe { call(handle.0, &raw mut number) })?;
    Ok(number)
}

/// Whether a driver is one of those that write one more word per process: 535.43 to before 535.98.
fn writes_long_processes(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    matches!((parts.next(), parts.next()), (Some(Ok(535)), Some(Ok(43..98))))
}

/// The first `count` processes in the words that NVML wrote. If they may be long, the very last word shows whether they
/// are.
fn contexts(words: &[u64], count: usize, may_be_long: bool) -> Vec<ProcessContext> {
    let last = count.checked_mul(SLOT_WORDS).and_then(|end| words.get(..end)?.last());
    let are_long = may_be_long && last.is_some_and(|last| *last != UNTOUCHED);
    let each = if are_long { SLOT_WORDS } else { PROCESS_WORDS };
    words.chunks_exact(each).take(count).map(context).collect()
}

/// `used` is all ones if the driver does not know it, and 0 if the driver looked up the process by the id of another
/// namespace (drivers 535.113 to 560). Both are unknown: a listed process has a context, which takes some memory.
fn context(words: &[u64]) -> ProcessContext {
    let pid = words.first().map_or(0, |word| {
        let [a, b, c, d, ..] = word.to_ne_bytes();
        u32::from_ne_bytes([a, b, c, d])
    });
    let used = words.get(1).copied().unwrap_or(u64::MAX);
    ProcessContext { pid, used_bytes: (used != u64::MAX && used != 0).then_some(used) }
}

fn decode(field: &sys::nvmlFieldValue_t) -> Result<Field, Code> {
    Code::check(field.nvmlReturn)?;
    let value = field.value;
    // SAFETY: every member is a plain number of at most eight bytes, for which each bit pattern is a value, and all
    // eight bytes were set before the call.
    let (signed, number, wide) = unsafe {
        match field.valueType {
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT => (None, u64::from(value.uiVal), false),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT => (None, u64::from(value.usVal), false),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG => (None, value.ulVal, true),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG => (None, value.ullVal, true),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG => (Some(value.sllVal), 0, true),
            sys::nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT => (Some(i64::from(value.siVal)), 0, false),
            _ => return Err(Code::UNKNOWN),
        }
    };
    let value = match signed {
        Some(signed) => u64::try_from(signed).map_err(|_| Code::NO_DATA)?,
        None => number,
    };
    Ok(Field { value, wide })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(value_type: u32, value: sys::nvmlValue_t) -> sys::nvmlFieldValue_t {
        sys::nvmlFieldValue_t {
            fieldId: 0,
            scopeId: 0,
            timestamp: 0,
            latencyUsec: 0,
            valueType: value_type,
            nvmlReturn: 0,
            value,
        }
    }

    #[test]
    fn fields_are_read_by_their_type() {
        // The upper half is what a driver may leave there; it does not belong to a 32-bit value.
        let dirty = sys::nvmlValue_t { ullVal: 0xdead_beef_0000_0007 };
        assert_eq!(decode(&field(1, dirty)), Ok(Field { value: 7, wide: false }));
        assert_eq!(decode(&field(3, dirty)), Ok(Field { value: 0xdead_beef_0000_0007, wide: true }));
        assert_eq!(decode(&field(4, sys::nvmlValue_t { sllVal: -1 })), Err(Code::NO_DATA));
        assert_eq!(decode(&field(7, dirty)), Err(Code::UNKNOWN));
        assert_eq!(decode(&sys::nvmlFieldValue_t { nvmlReturn: 3, ..field(3, dirty) }), Err(Code::NOT_SUPPORTED));
    }

    #[test]
    fn the_memory_structure_is_the_one_that_nvml_13_knows() {
        assert_eq!(structure_version::<sys::nvmlMemory_v2_t>(2), 0x0200_0028);
    }
}
