//! Recordings: what GPUs' memory did, and what jobs said meanwhile, kept for later.
//!
//! Enters: what a node keeps, row by row, or files that others wrote. Leaves: SQLite files as `docs/recordings.md` has them,
//! and a [`Source`](crate::source::Source) that plays any recording: such a file, or a folder of text files. Invariants: a
//! row or a line that cannot be read costs itself alone, and is counted; times and values are those of the recording.
//! Absent on purpose: when something is recorded, which [`capture`](crate::capture) decides.

mod folder;
mod lines;
mod meters;
mod points;
mod read;
pub(crate) mod schema;
mod source;
mod state;
mod tape;
#[cfg(test)]
mod tests;
pub(crate) mod track;
pub(crate) mod write;

pub use lines::{Skipped, SkippedLines};
pub use schema::{APPLICATION_ID, FORMAT_VERSION};
pub use source::{Options, Replay};
pub use state::State;
