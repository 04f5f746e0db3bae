//! What the GPU did in each step, read from PyTorch profiler traces (Kineto's Chrome trace format).
//!
//! Enters: the text of a trace, one file for each rank. Leaves: by step, how long the GPU computed, communicated and
//! was idle, and why; the levels of the allocator, if they were profiled; for several ranks, how long each waited for the others in collectives. Invariants: memory is
//! bounded by [`MOST_EVENTS`] and [`MOST_NAME_BYTES`], not by the file; time in which several streams are busy counts
//! once; what is not known is `None`, never 0. Absent on purpose: opening and unpacking files, and how the answers are
//! shown.

mod analyse;
mod bytes;
mod collective;
mod event;
mod idle;
mod intervals;
mod memory;
mod names;
mod ranks;
mod read;
mod reading;
mod steps;
#[cfg(test)]
mod tests;
mod time;
mod trace;
mod usage;
mod value;
mod waits;

pub use analyse::{Activity, Analysis, NothingOnGpu, Step, Stretch, analyse, analyse_and_draw};
pub use collective::{Collective, Kind};
pub use idle::Idle;
pub use memory::{AllocatorLevel, Levels, levels};
pub use ranks::{Clocks, KindShare, RankShare, Ranks, RanksError, compare};
pub use read::{TraceError, read};
pub use trace::{DeviceProperties, MemoryEvent, Op, Trace, Work};
pub use usage::CollectiveUsage;

/// The most events of one trace that are kept: what ran on a GPU, the calls that launched it, steps and data loading.
/// Reading and analysing a trace of that many kernels took 412 MB.
pub const MOST_EVENTS: usize = 4 << 20;
/// The most bytes of different names: process groups and the kernels of collectives.
pub const MOST_NAME_BYTES: usize = 1 << 20;
/// The most bytes of one file, unpacked.
pub const MOST_BYTES: u64 = 16 << 30;
