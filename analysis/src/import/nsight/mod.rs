//! SQLite of Nsight Systems (`nsys export -t sqlite`): the memory of GPUs, and what ran on them.
//!
//! Enters: an export of any version since 2020: which tables and columns it has depends on what was recorded and by which version, so each
//! is looked for. Leaves: a `Tape` of the memory, and traces as `timeline` takes them. Invariants: rows are read as a stream; of
//! texts, only those are read that name a kernel or a range; a row that cannot be used is counted.

mod gpus;
mod host;
mod launches;
mod memory;
mod names;
mod ranges;
mod steps;
mod survey;
#[cfg(test)]
mod tests;
mod work;

pub(crate) use host::{HostRange, host};
pub(crate) use memory::{TABLE as MEMORY, has_memory, tape};
pub(crate) use ranges::TABLE as RANGES;
pub(crate) use work::{ProfiledWork, TABLES as WORK, profile};
