//! Recordings: what GPUs' memory did, and what jobs sent meanwhile, kept for later.
//!
//! Enters: what a node keeps, row by row, or files from elsewhere. Leaves: SQLite files in the format of
//! `docs/recordings.md`, and a [`Source`](crate::source::Source) that plays any recording: such a file, or a folder of
//! text files. Invariants: a row or a line that cannot be read is counted, and no other is lost; times and values are
//! those of the recording. Absent on purpose: when something is recorded, which [`capture`](crate::capture) decides.

mod allocator;
pub(crate) mod curve;
mod folder;
mod formats;
mod import;
mod jobs;
mod lines;
pub(crate) mod log_lines;
mod meters;
mod points;
mod profiles;
mod read;
pub(crate) mod rows;
pub(crate) mod schema;
mod source;
mod state;
mod tape;
#[cfg(test)]
mod tests;
pub(crate) mod track;
pub(crate) mod write;

pub use allocator::{Allocator, BandMoment, Bands, Failure, Holder, Moment, Place};
pub(crate) use formats::FileFormat;
pub(crate) use import::{bytes_of, fairscale, json_of, ort_memory};
pub use lines::{Skipped, SkippedLines};
pub(crate) use lines::{printable, refuse, short};
#[cfg(test)]
pub(crate) use profiles::MOST_PROFILES;
pub(crate) use profiles::{MOST_RECORDS, Record as LayerRecord};
pub use schema::{APPLICATION_ID, FORMAT_VERSION};
pub use source::{Options, Replay};
pub use state::State;
pub(crate) use tape::is_too_long;
pub use tape::{Allocation, Format, READING_NS, Times};

/// What SQLite has allocated in this process, bytes.
pub(crate) fn sqlite_bytes() -> usize {
    // SAFETY: it reads a counter, under a lock of SQLite's own, whether or not SQLite was used before.
    usize::try_from(unsafe { rusqlite::ffi::sqlite3_memory_used() }).unwrap_or(0)
}
