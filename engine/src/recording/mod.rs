//! Recordings: files of the memory of GPUs over time and of the events that jobs sent.
//!
//! Enters: rows of what a node keeps, or files from elsewhere. Leaves: SQLite files in the format of
//! `docs/recordings.md`, and a [`Source`](highwater_core::source::Source) that plays any recording: such a file, or a folder of
//! text files. Invariants: a row or a line that cannot be read is counted, and no other is lost; times and values are
//! those of the recording. Absent on purpose: when something is recorded, which its callers decide.

pub mod allocator;
pub mod curve;
mod folder;
mod jobs;
pub mod lines;
mod meters;
mod part;
mod problem;
mod profiles;
mod read;
#[cfg(test)]
mod round_trip;
pub mod rows;
pub mod schema;
mod source;
mod state;
pub mod tape;
#[cfg(test)]
mod tests;
pub mod track;
pub mod track_writer;
mod utf16;
pub mod write;

pub use allocator::{
    Allocator, BandMoment, Bands, Failure, HeldBlock, HeldMemory, Holder, Layout, Moment, Place, PoolLayout,
};
pub use lines::{Skipped, SkippedLines, printable, refuse, short};
pub use part::Part;
pub use problem::FileProblem;
pub use profiles::{Head, MOST_PROFILES, MOST_RECORDS, Record as LayerRecord};
pub use schema::{APPLICATION_ID, FORMAT_VERSION};
pub use source::{Options, Replay, refuse_part};
pub use state::State;
pub use tape::{Allocation, Format, READING_NS, Times, is_too_long};

/// What SQLite has allocated in this process, bytes.
pub fn sqlite_bytes() -> usize {
    // SAFETY: it reads a counter, under a lock of SQLite's own, whether or not SQLite was used before.
    usize::try_from(unsafe { rusqlite::ffi::sqlite3_memory_used() }).unwrap_or(0)
}
