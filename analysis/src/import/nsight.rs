//! SQLite of Nsight Systems (`nsys profile --cuda-memory-usage=true`, `nsys export -t sqlite`): a row for each
//! allocation and each release.

use super::allocations::{self, Lifetime, MISSING, MOST_ALLOCATIONS};
use highwater_core::clock::A_DATE_NS;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::FileProblem;
use highwater_engine::recording::rows::{MOST_GPUS, RecordingReader, needed, number, text};
pub use highwater_engine::recording::tape::{Format, Tape, Times};
use std::collections::BTreeMap;

/// The table of memory events.
pub(crate) const TABLE: &str = "CUDA_GPU_MEMORY_USAGE_EVENTS";

const FORMAT: Format = Format { name: "Nsight Systems export", times: Times::Relative, missing: MISSING };

/// `ENUM_CUDA_MEM_KIND`: pageable and pinned memory are the host's.
const OF_HOST: [i64; 2] = [0, 1];
/// `ENUM_CUDA_DEV_MEM_EVENT_OPER`.
const ALLOCATED: i64 = 0;
const FREED: i64 = 1;

/// Where the process's number lies in `globalPid`.
const PROCESS_SHIFT: u32 = 24;
const PROCESS_MASK: i64 = 0xff_ffff;
/// The most devices of all processes.
const MOST_DEVICES: usize = 1 << 16;

/// Identifies an allocation: process, context, device and address.
type Address = (Option<i64>, Option<i64>, u32, i64);

/// An event: an address, its time, its size, and whether it allocates.
type Event = (Address, i64, u64, bool);

pub(crate) fn tape(mut file: RecordingReader) -> Result<Tape, OpenError> {
    let column = |name: &'static str| if file.has_column(TABLE, name) { name } else { "NULL" };
    let (kind, process, context) = (column("memKind"), column("globalPid"), column("contextId"));
    let query = format!(
        "SELECT deviceId, start, bytes, memoryOperationType, address, {kind}, {process}, {context} FROM {TABLE} \
         ORDER BY start, rowid"
    );
    let rows = file.rows(TABLE, &query, 0, 2 * MOST_ALLOCATIONS, |row| {
        let is_allocated = match needed::<i64>(row, 3)? {
            ALLOCATED => true,
            FREED => false,
            other => {
                let problem = format!("{other} is neither an allocation nor a release");
                return Err(FileProblem::Column { column: "memoryOperationType".to_owned(), problem });
            }
        };
        let is_of_host = number::<i64>(row, 5)?.is_some_and(|kind| OF_HOST.contains(&kind));
        let address = (number(row, 6)?, number(row, 7)?, needed(row, 0)?, needed(row, 4)?);
        let event: Event = (address, needed(row, 1)?, needed(row, 2)?, is_allocated);
        Ok((!is_of_host).then_some(event))
    })?;
    let gpus = gpus(&mut file)?;
    let epoch_ns = epoch_ns(&mut file)?;
    let dated =
        |(address, at_ns, bytes, is_allocated): Event| (address, at_ns.saturating_add(epoch_ns), bytes, is_allocated);
    let lifetimes = lifetimes(rows.into_iter().flatten().map(dated), &gpus, &mut file);
    if lifetimes.is_empty() && file.skipped.count == 0 {
        return Err(
            file.refuse("recording_unreadable", "it has no memory of any GPU: record it with --cuda-memory-usage=true")
        );
    }
    if lifetimes.len() > MOST_ALLOCATIONS {
        let problem = format!("table {TABLE} has more than {MOST_ALLOCATIONS} allocations");
        return Err(file.refuse("recording_too_large", problem));
    }
    let (path, facts) = (file.path().to_owned(), facts(&mut file)?);
    allocations::tape(&path, FORMAT, &lifetimes, &facts, file.skipped)
}

/// When the session began, nanoseconds since 1970; 0 if the export does not have it.
fn epoch_ns(file: &mut RecordingReader) -> Result<i64, OpenError> {
    const START: &str = "TARGET_INFO_SESSION_START_TIME";
    if !file.has_column(START, "utcEpochNs") {
        return Ok(0);
    }
    let rows = file.rows(START, &format!("SELECT utcEpochNs FROM {START}"), 0, 1, |row| needed::<i64>(row, 0))?;
    Ok(rows.first().copied().filter(|epoch_ns| *epoch_ns >= A_DATE_NS).unwrap_or(0))
}

/// The GPU of each process's device: `CUDA_VISIBLE_DEVICES` can make every GPU of a node the device 0 of its process.
fn gpus(file: &mut RecordingReader) -> Result<BTreeMap<(i64, u32), u32>, OpenError> {
    const DEVICES: &str = "TARGET_INFO_CUDA_DEVICE";
    if !["gpuId", "cudaId", "pid"].into_iter().all(|column| file.has_column(DEVICES, column)) {
        return Ok(BTreeMap::new());
    }
    let query = format!("SELECT pid, cudaId, gpuId FROM {DEVICES}");
    let rows =
        file.rows(DEVICES, &query, 0, MOST_DEVICES, |row| Ok(((needed(row, 0)?, needed(row, 1)?), needed(row, 2)?)))?;
    Ok(rows.into_iter().collect())
}

/// Name, size and UUID of each GPU, as far as the export has them.
fn facts(file: &mut RecordingReader) -> Result<BTreeMap<u32, Device>, OpenError> {
    const GPUS: &str = "TARGET_INFO_GPU";
    if !file.has_column(GPUS, "id") {
        return Ok(BTreeMap::new());
    }
    let column = |name: &'static str| if file.has_column(GPUS, name) { name } else { "NULL" };
    let query = format!("SELECT id, {}, {}, {} FROM {GPUS}", column("name"), column("totalMemory"), column("uuid"));
    let rows = file.rows(GPUS, &query, 0, MOST_GPUS, |row| {
        let (name, memory_total_bytes) = (text(row, 1)?, number(row, 2)?);
        let uuid = text(row, 3)?.map(|uuid| if uuid.starts_with("GPU-") { uuid } else { format!("GPU-{uuid}") });
        Ok((needed(row, 0)?, Device { name, memory_total_bytes, uuid: uuid.unwrap_or_default(), ..Device::default() }))
    })?;
    Ok(rows.into_iter().collect())
}

/// Joins each release with its allocation. A release of what was allocated before the trace began is counted as
/// skipped: how long that was there is not known.
fn lifetimes(
    events: impl Iterator<Item = Event>,
    gpus: &BTreeMap<(i64, u32), u32>,
    file: &mut RecordingReader,
) -> Vec<Lifetime> {
    let mut open: BTreeMap<Address, usize> = BTreeMap::new();
    let mut all: Vec<Lifetime> = Vec::new();
    for (address, at_ns, bytes, is_allocated) in events {
        if is_allocated {
            // The address is allocated again, so its release is missing. The old allocation counts until now.
            if let Some(before) = open.insert(address, all.len()) {
                all[before].end_ns = Some(at_ns);
            }
            let process = address.0.map(|process| process >> PROCESS_SHIFT & PROCESS_MASK);
            let gpu = process.and_then(|process| gpus.get(&(process, address.2)));
            all.push(Lifetime { device: *gpu.unwrap_or(&address.2), begin_ns: at_ns, end_ns: None, bytes });
        } else if let Some(begun) = open.remove(&address) {
            all[begun].end_ns = Some(at_ns);
        } else {
            let problem =
                format!("a release of {bytes} bytes at {at_ns} ns that were allocated before the trace began");
            file.skip(0, TABLE, problem);
        }
    }
    all
}
