//! SQLite of Nsight Systems (`nsys profile --cuda-memory-usage=true`, `nsys export -t sqlite`): a row for each
//! allocation and each release.

use super::allocations::{self, Lifetime, MOST_ALLOCATIONS};
use crate::recording::rows::{File, needed, number};
use crate::recording::tape::{Format, Tape, Times};
use crate::source::OpenError;
use std::collections::BTreeMap;

/// The table of memory events.
pub(super) const TABLE: &str = "CUDA_GPU_MEMORY_USAGE_EVENTS";

const FORMAT: Format = Format {
    name: "Nsight Systems export",
    times: Times::Relative,
    missing: &[
        "memory that CUDA itself takes",
        "pinned and pageable memory of the host",
        "the GPUs' sizes",
        "steps and phases",
    ],
};

/// `ENUM_CUDA_MEM_KIND`: pageable and pinned memory are the host's.
const OF_HOST: [i64; 2] = [0, 1];
/// `ENUM_CUDA_DEV_MEM_EVENT_OPER`.
const ALLOCATED: i64 = 0;
const FREED: i64 = 1;

/// What is allocated at an address of a process's context.
type Address = (Option<i64>, Option<i64>, u32, i64);

/// An event: an address, its time, its size, and whether it allocates.
type Event = (Address, i64, u64, bool);

pub(super) fn tape(mut file: File) -> Result<Tape, OpenError> {
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
            other => return Err(format!("memoryOperationType: {other} is neither an allocation nor a release")),
        };
        let is_of_host = number::<i64>(row, 5)?.is_some_and(|kind| OF_HOST.contains(&kind));
        let address = (number(row, 6)?, number(row, 7)?, needed(row, 0)?, needed(row, 4)?);
        let event: Event = (address, needed(row, 1)?, needed(row, 2)?, is_allocated);
        Ok((!is_of_host).then_some(event))
    })?;
    let lifetimes = lifetimes(rows.into_iter().flatten(), &mut file);
    let path = file.path().to_owned();
    allocations::tape(&path, FORMAT, &lifetimes, file.skipped)
}

/// Joins each release with its allocation. A release of what was allocated before the trace began is counted as
/// skipped: how long that was there is not known.
fn lifetimes(events: impl Iterator<Item = Event>, file: &mut File) -> Vec<Lifetime> {
    let mut open: BTreeMap<Address, usize> = BTreeMap::new();
    let mut all: Vec<Lifetime> = Vec::new();
    for (address, at_ns, bytes, is_allocated) in events {
        if is_allocated {
            // An address that is allocated again was freed in between, when is not known; it counts until now.
            if let Some(before) = open.insert(address, all.len()) {
                all[before].end_ns = Some(at_ns);
            }
            all.push(Lifetime { device: address.2, begin_ns: at_ns, end_ns: None, bytes });
        } else if let Some(begun) = open.remove(&address) {
            all[begun].end_ns = Some(at_ns);
        } else {
            let problem = format!("a release of {bytes} bytes that were allocated before the trace began");
            file.skip(all.len(), TABLE, &problem);
        }
    }
    all
}
