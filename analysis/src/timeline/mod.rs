//! What the GPUs did in each step, whichever profiler recorded it.
//!
//! Enters: what ran on the GPUs of one process, the calls that launched it, and the host's steps, from a reader of some format.
//! Leaves: by step, how long each GPU computed, communicated and was idle, and why; the levels of the allocator, if they were
//! profiled; for several ranks, how long each waited for the others in collectives. Invariants: memory is
//! bounded by [`MOST_EVENTS`] and [`MOST_NAME_BYTES`], not by the file; time in which several streams are busy counts
//! once; what is not known is `None`, never 0. Absent on purpose: reading files, and how the answers are shown.

mod analyse;
mod annotations;
mod bound;
mod builder;
mod collective;
mod delays;
mod idle;
mod intervals;
mod memory;
mod names;
mod operators;
mod ranks;
mod recurring;
mod short;
mod steps;
mod trace;
mod usage;
mod waits;

pub use analyse::{Activity, Analysis, NothingOnGpu, Step, Stretch, analyse, analyse_and_draw};
pub use annotations::{AnnotationStep, AnnotationSum, AnnotationTime};
pub use bound::{Bound, BoundBy};
pub(crate) use builder::{Builder, Full, GpuRun, Launch, NamedKernel, Parameters};
pub(crate) use collective::element_bytes;
pub use collective::{Collective, Kind};
pub use delays::LaunchDelay;
pub use idle::Idle;
pub use memory::{AllocatorLevel, Levels, levels};
pub use operators::OperatorTime;
pub use ranks::{Clocks, KindShare, RankShare, Ranks, RanksError, compare};
pub use short::{KernelSequence, ShortKernels};
pub use trace::{DeviceProperties, MemoryEvent, Op, Trace, Work};
pub use usage::CollectiveUsage;

/// The most events of one trace that are kept: what ran on a GPU, the calls that launched it, steps and data loading.
/// Reading and analysing a trace of that many kernels took 412 MB, before streams and threads were kept, which are 16 bytes a kernel
/// and 24 more where there are annotations; operators of the host, which are bounded apart, take at most 96 MiB more, and annotations
/// 64 MiB.
pub const MOST_EVENTS: usize = 4 << 20;
/// The most bytes of different names: process groups and the kernels of collectives.
pub const MOST_NAME_BYTES: usize = 1 << 20;
