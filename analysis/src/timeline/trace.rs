//! A trace, as far as it is needed: what ran on the GPUs, what launched it, and which steps the host was in.
//!
//! Invariants: times are nanoseconds on the clock of the trace; what ran on the GPUs and the collectives are in the
//! order in which they began.

use super::annotations::AnnotationTime;
use super::collective::Collective;
use super::names::Names;
use super::operators::OperatorTime;
use super::short::ShortKernels;
use highwater_core::clock::A_DATE_NS;
use serde::Deserialize;

/// What a GPU did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A kernel that computes.
    Compute,
    /// The same, but its name looks like a collective of some other library.
    Lookalike,
    /// A kernel of NCCL, RCCL or MSCCL.
    Communication,
    /// A copy or a fill of memory.
    Memory,
}

/// Something that ran on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// When it began, nanoseconds.
    pub begin_ns: i64,
    /// When it ended, nanoseconds.
    pub end_ns: i64,
    /// When the host began to launch it, nanoseconds, if the trace has the call.
    pub launch_ns: Option<i64>,
    /// The GPU's number in its process.
    pub device: u32,
    /// What it was.
    pub work: Work,
    /// The number of its name in the trace; `None` if there was no room for the name.
    pub(crate) name: Option<u32>,
}

/// A change of what the allocator had given out on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEvent {
    /// When, nanoseconds on the trace's clock.
    pub at_ns: i64,
    /// The GPU's number in its process.
    pub device: u32,
    /// What was allocated, or freed if it is negative.
    pub bytes: i64,
    /// What the program then held of the allocator, if the event has it.
    pub allocated: Option<u64>,
    /// What the allocator then held of the GPU, if the event has it.
    pub reserved: Option<u64>,
}

/// What a trace says of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DeviceProperties {
    /// Its number in the process.
    pub id: u32,
    /// What it is called.
    pub name: Option<String>,
    /// Its size, bytes.
    #[serde(rename = "totalGlobalMem")]
    pub total_bytes: Option<u64>,
}

/// What one process did while it was profiled.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// When the clock of the trace was 0, nanoseconds since 1970, if the file has it.
    pub base_ns: Option<i64>,
    /// The rank of the process.
    pub rank: Option<u64>,
    /// How many ranks the job has.
    pub world_size: Option<u64>,
    /// What ran on GPUs.
    pub ops: Vec<Op>,
    /// Those of them that are collectives.
    pub collectives: Vec<Collective>,
    /// The host's steps: their numbers, and when they began and ended, nanoseconds, in the order in which they began.
    pub steps: Vec<(u64, i64, i64)>,
    /// When the host waited for a data loader, nanoseconds.
    pub loading: Vec<(i64, i64)>,
    /// What PyTorch's allocator gave out, in order of time, if that was profiled.
    pub memory: Vec<MemoryEvent>,
    /// The time of the GPUs by the host's operators or NVTX ranges, the longest first; `None` if the file does not say which launched what.
    pub operators: Option<Vec<OperatorTime>>,
    /// The time of the host and the GPUs by annotation or NVTX range, the longest first; `None` if there are too many of them.
    pub annotations: Option<Vec<AnnotationTime>>,
    /// The kernels that take about as long as launching them, by GPU.
    pub short_kernels: Vec<ShortKernels>,
    /// What the file says of the GPUs.
    pub properties: Vec<DeviceProperties>,
    /// How many events could not be used: they are no objects, or have no time or a negative duration.
    pub unusable: u64,
    /// Whether the file ended before its events did.
    pub is_cut_short: bool,
    pub(super) names: Names,
    /// The names of `ops`, without the lists of their arguments.
    pub(super) op_names: Names,
}

impl Trace {
    /// When the clock of the trace was 0, nanoseconds since 1970: what the file says, or 1970 if its times are dates,
    /// as those of older versions are.
    #[must_use]
    pub fn clock_ns(&self) -> Option<i64> {
        let first_ns = self.ops.first().map(|op| op.begin_ns).or_else(|| Some(self.memory.first()?.at_ns));
        let is_dated = first_ns.is_some_and(|at_ns| at_ns >= A_DATE_NS);
        self.base_ns.or(is_dated.then_some(0))
    }

    /// What ran, as its kernel is called; `None` if that is not kept.
    #[must_use]
    pub fn name_of(&self, op: &Op) -> Option<&str> {
        self.op_names.get(op.name?)
    }

    /// The trace without its `ops`, `operators`, `annotations`, `loading` and `memory`, which are most of it. What is left suffices to compare ranks.
    #[must_use]
    pub fn without_work(self) -> Self {
        let (ops, loading, memory) = (Vec::new(), Vec::new(), Vec::new());
        let base_ns = self.clock_ns();
        Self { base_ns, ops, loading, memory, operators: None, annotations: None, op_names: Names::default(), ..self }
    }

    /// The GPUs that did something, in order.
    #[must_use]
    pub fn devices(&self) -> Vec<u32> {
        let devices: std::collections::BTreeSet<u32> = self.ops.iter().map(|op| op.device).collect();
        devices.into_iter().collect()
    }
}
