//! SQLite of nvprof (`nvprof --track-memory-allocations on -o FILE`): a row for each allocation, with the times of its
//! allocation and of its release.

use super::allocations::{self, Lifetime, MOST_ALLOCATIONS};
use crate::recording::rows::{File, needed, number};
use crate::recording::tape::{Format, Tape, Times};
use crate::source::OpenError;

/// The table of CUPTI's memory activity.
pub(super) const TABLE: &str = "CUPTI_ACTIVITY_KIND_MEMORY";

const FORMAT: Format = Format {
    name: "nvprof profile",
    times: Times::Relative,
    missing: &[
        "memory that CUDA itself takes",
        "pinned and pageable memory of the host",
        "the GPUs' sizes",
        "steps and phases",
    ],
};

/// CUPTI's kinds of memory that is the host's: pageable and pinned.
const OF_HOST: [i64; 2] = [1, 2];

pub(super) fn tape(mut file: File) -> Result<Tape, OpenError> {
    let kind = if file.has_column(TABLE, "memoryKind") { "memoryKind" } else { "NULL" };
    let query = format!("SELECT deviceId, start, end, bytes, {kind} FROM {TABLE} ORDER BY start");
    let rows = file.rows(TABLE, &query, 0, MOST_ALLOCATIONS, |row| {
        let (begin_ns, end_ns): (i64, i64) = (needed(row, 1)?, needed(row, 2)?);
        // CUPTI writes 0 as the end of what was never freed.
        let end_ns = (end_ns != 0).then_some(end_ns);
        if end_ns.is_some_and(|end_ns| end_ns < begin_ns) {
            return Err("end: it lies before start".to_owned());
        }
        let is_of_host = number::<i64>(row, 4)?.is_some_and(|kind| OF_HOST.contains(&kind));
        let lifetime = Lifetime { device: needed(row, 0)?, begin_ns, end_ns, bytes: needed(row, 3)? };
        Ok((!is_of_host).then_some(lifetime))
    })?;
    let lifetimes: Vec<Lifetime> = rows.into_iter().flatten().collect();
    let path = file.path().to_owned();
    allocations::tape(&path, FORMAT, &lifetimes, file.skipped)
}
