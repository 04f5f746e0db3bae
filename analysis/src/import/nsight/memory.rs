//! The memory of GPUs (`nsys profile --cuda-memory-usage=true`): a row for each allocation and each release.

use super::super::allocations::{self, Lifetime, MISSING, MOST_ALLOCATIONS};
use super::gpus::{self, GpuNumbers};
use highwater_core::source::OpenError;
use highwater_engine::recording::FileProblem;
use highwater_engine::recording::rows::{RecordingReader, needed, number};
use highwater_engine::recording::tape::{Format, Tape, Times};
use std::collections::BTreeMap;

/// The table of memory events.
pub(crate) const TABLE: &str = "CUDA_GPU_MEMORY_USAGE_EVENTS";

const FORMAT: Format = Format { name: "Nsight Systems export", times: Times::Relative, missing: MISSING };

/// `ENUM_CUDA_MEM_KIND`: pageable and pinned memory are the host's.
const OF_HOST: [i64; 2] = [0, 1];
/// `ENUM_CUDA_DEV_MEM_EVENT_OPER`.
const ALLOCATED: i64 = 0;
const FREED: i64 = 1;

/// Identifies an allocation: process, context, device and address.
type Address = (Option<i64>, Option<i64>, u32, i64);

/// An event: an address, its time, its size, and whether it allocates.
type Event = (Address, i64, u64, bool);

/// Whether the export has the memory of any GPU.
///
/// # Errors
/// The table cannot be read.
pub(crate) fn has_memory(file: &mut RecordingReader) -> Result<bool, OpenError> {
    if !file.has_table(TABLE) {
        return Ok(false);
    }
    let [pageable, pinned] = OF_HOST;
    let is_of_gpu = match file.has_column(TABLE, "memKind") {
        true => format!("WHERE memKind IS NULL OR memKind NOT IN ({pageable}, {pinned})"),
        false => String::new(),
    };
    let query = format!("SELECT 1 FROM {TABLE} {is_of_gpu} LIMIT 1");
    Ok(!file.rows(TABLE, &query, 0, 1, |_| Ok(()))?.is_empty())
}

pub(crate) fn tape(mut file: RecordingReader) -> Result<Tape, OpenError> {
    if !file.has_table(TABLE) {
        return Err(without_memory(&file));
    }
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
    let gpus = GpuNumbers::read(&mut file)?;
    let epoch_ns = gpus::epoch_ns(&mut file)?.unwrap_or(0);
    let dated =
        |(address, at_ns, bytes, is_allocated): Event| (address, at_ns.saturating_add(epoch_ns), bytes, is_allocated);
    let lifetimes = lifetimes(rows.into_iter().flatten().map(dated), &gpus, &mut file);
    if lifetimes.is_empty() && file.skipped.count == 0 {
        return Err(without_memory(&file));
    }
    if lifetimes.len() > MOST_ALLOCATIONS {
        let problem = format!("table {TABLE} has more than {MOST_ALLOCATIONS} allocations");
        return Err(file.refuse("recording_too_large", problem));
    }
    let (path, facts) = (file.path().to_owned(), gpus::facts(&mut file)?);
    allocations::tape(&path, FORMAT, &lifetimes, &facts, file.skipped)
}

fn without_memory(file: &RecordingReader) -> OpenError {
    file.refuse("recording_unreadable", "it has no memory of any GPU: record it with --cuda-memory-usage=true")
}

/// Joins each release with its allocation. A release of what was allocated before the trace began is counted as
/// skipped: how long that was there is not known.
fn lifetimes(events: impl Iterator<Item = Event>, gpus: &GpuNumbers, file: &mut RecordingReader) -> Vec<Lifetime> {
    let mut open: BTreeMap<Address, usize> = BTreeMap::new();
    let mut all: Vec<Lifetime> = Vec::new();
    for (address, at_ns, bytes, is_allocated) in events {
        if is_allocated {
            // The address is allocated again, so its release is missing. The old allocation counts until now.
            if let Some(before) = open.insert(address, all.len()) {
                all[before].end_ns = Some(at_ns);
            }
            all.push(Lifetime { device: gpus.of(address.0, address.2), begin_ns: at_ns, end_ns: None, bytes });
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
