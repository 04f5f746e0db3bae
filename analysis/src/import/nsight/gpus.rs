//! What an export says of the GPUs, of processes, and of its clock.

use highwater_core::clock::A_DATE_NS;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::rows::{MOST_GPUS, RecordingReader, needed, number, text};
use std::collections::BTreeMap;

/// Where the process's number lies in `globalPid` and `globalTid`.
const PROCESS_SHIFT: u32 = 24;
const PROCESS_MASK: i64 = 0xff_ffff;
/// The most devices of all processes.
pub(super) const MOST_DEVICES: usize = 1 << 16;

/// The number of the process in a `globalPid` or `globalTid`.
pub(super) fn process(global: i64) -> i64 {
    global >> PROCESS_SHIFT & PROCESS_MASK
}

/// When the session began, nanoseconds since 1970; `None` if the export does not have it.
pub(super) fn epoch_ns(file: &mut RecordingReader) -> Result<Option<i64>, OpenError> {
    const START: &str = "TARGET_INFO_SESSION_START_TIME";
    if !file.has_column(START, "utcEpochNs") {
        return Ok(None);
    }
    let rows = file.rows(START, &format!("SELECT utcEpochNs FROM {START} ORDER BY rowid LIMIT 1"), 0, 1, |row| {
        needed::<i64>(row, 0)
    })?;
    Ok(rows.first().copied().filter(|epoch_ns| *epoch_ns >= A_DATE_NS))
}

/// The GPU of each process's device: `CUDA_VISIBLE_DEVICES` can make every GPU of a node the device 0 of its process.
pub(super) struct GpuNumbers(BTreeMap<(i64, u32), u32>);

impl GpuNumbers {
    pub(super) fn read(file: &mut RecordingReader) -> Result<Self, OpenError> {
        const DEVICES: &str = "TARGET_INFO_CUDA_DEVICE";
        if !["gpuId", "cudaId", "pid"].into_iter().all(|column| file.has_column(DEVICES, column)) {
            return Ok(Self(BTreeMap::new()));
        }
        let query = format!("SELECT pid, cudaId, gpuId FROM {DEVICES}");
        let read = |row: &rusqlite::Row<'_>| Ok(((needed(row, 0)?, needed(row, 1)?), needed(row, 2)?));
        Ok(Self(file.rows(DEVICES, &query, 0, MOST_DEVICES, read)?.into_iter().collect()))
    }

    /// The GPU that is this device of the process with this `globalPid`; its own number if the export does not say.
    pub(super) fn of(&self, global_pid: Option<i64>, device: u32) -> u32 {
        let known = global_pid.and_then(|global| self.0.get(&(process(global), device)));
        *known.unwrap_or(&device)
    }
}

/// Name, size and UUID of each GPU, as far as the export has them.
pub(super) fn facts(file: &mut RecordingReader) -> Result<BTreeMap<u32, Device>, OpenError> {
    const GPUS: &str = "TARGET_INFO_GPU";
    if !file.has_column(GPUS, "id") {
        return Ok(BTreeMap::new());
    }
    let query = format!("SELECT {} FROM {GPUS}", file.columns(GPUS, ["id", "name", "totalMemory", "uuid"]));
    let rows = file.rows(GPUS, &query, 0, MOST_GPUS, |row| {
        let (name, memory_total_bytes) = (text(row, 1)?, number(row, 2)?);
        let uuid = text(row, 3)?.map(|uuid| if uuid.starts_with("GPU-") { uuid } else { format!("GPU-{uuid}") });
        Ok((needed(row, 0)?, Device { name, memory_total_bytes, uuid: uuid.unwrap_or_default(), ..Device::default() }))
    })?;
    Ok(rows.into_iter().collect())
}
