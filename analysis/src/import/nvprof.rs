//! SQLite of nvprof (`nvprof --track-memory-allocations on -o FILE`): a row for each allocation, with the times of its
//! allocation and of its release.

use super::allocations::{self, Lifetime, MISSING, MOST_ALLOCATIONS};
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::FileProblem;
use highwater_engine::recording::rows::{MOST_GPUS, RecordingReader, needed, number, text};
pub use highwater_engine::recording::tape::{Format, Tape, Times};
use std::collections::BTreeMap;

/// The table of CUPTI's memory activity.
pub(crate) const TABLE: &str = "CUPTI_ACTIVITY_KIND_MEMORY";

const FORMAT: Format = Format { name: "nvprof profile", times: Times::Relative, missing: MISSING };

/// CUPTI's kinds of memory that is the host's: pageable and pinned.
const OF_HOST: [i64; 2] = [1, 2];

pub(crate) fn tape(mut file: RecordingReader) -> Result<Tape, OpenError> {
    let kind = if file.has_column(TABLE, "memoryKind") { "memoryKind" } else { "NULL" };
    let query = format!("SELECT deviceId, start, end, bytes, {kind} FROM {TABLE} ORDER BY start");
    let rows = file.rows(TABLE, &query, 0, MOST_ALLOCATIONS, |row| {
        let (begin_ns, end_ns): (i64, i64) = (needed(row, 1)?, needed(row, 2)?);
        // CUPTI writes 0 as the end of what was never freed.
        let end_ns = (end_ns != 0).then_some(end_ns);
        if end_ns.is_some_and(|end_ns| end_ns < begin_ns) {
            return Err(FileProblem::malformed("end: it lies before start"));
        }
        let is_of_host = number::<i64>(row, 4)?.is_some_and(|kind| OF_HOST.contains(&kind));
        let lifetime = Lifetime { device: needed(row, 0)?, begin_ns, end_ns, bytes: needed(row, 3)? };
        Ok((!is_of_host).then_some(lifetime))
    })?;
    let lifetimes: Vec<Lifetime> = rows.into_iter().flatten().collect();
    if lifetimes.is_empty() && file.skipped.count == 0 {
        return Err(file.refuse(
            "recording_unreadable",
            "it has no memory of any GPU: record it with --track-memory-allocations on",
        ));
    }
    let (path, facts) = (file.path().to_owned(), facts(&mut file)?);
    allocations::tape(&path, FORMAT, &lifetimes, &facts, file.skipped)
}

/// The size and the name of each device, if the profile has the devices.
fn facts(file: &mut RecordingReader) -> Result<BTreeMap<u32, Device>, OpenError> {
    const DEVICES: &str = "CUPTI_ACTIVITY_KIND_DEVICE";
    const STRINGS: &str = "StringTable";
    if !file.has_column(DEVICES, "globalMemorySize") || !file.has_column(DEVICES, "id") {
        return Ok(BTreeMap::new());
    }
    // A name is the number of a text.
    let has_names =
        file.has_column(DEVICES, "name") && file.has_column(STRINGS, "_id_") && file.has_column(STRINGS, "value");
    let name = if has_names { "(SELECT value FROM StringTable WHERE _id_ = name LIMIT 1)" } else { "NULL" };
    let query = format!("SELECT id, globalMemorySize, {name} FROM {DEVICES}");
    let rows = file.rows(DEVICES, &query, 0, MOST_GPUS, |row| {
        let (memory_total_bytes, name) = (number(row, 1)?, text(row, 2)?);
        Ok((needed(row, 0)?, Device { memory_total_bytes, name, ..Device::default() }))
    })?;
    Ok(rows.into_iter().collect())
}
