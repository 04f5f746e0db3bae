//! GPUs: what they are, what was read of them last, and what they used over time.
//!
//! Enters: a device and the readings of its lanes. Leaves: [`GpuState`], which scrapes, attribution and detectors look at
//! without waiting for any lane. Invariants: "not available" is `None`; a GPU that does not answer keeps none of its last
//! readings. Absent on purpose: its memory over time, which is in a [`ring`](crate::ring), and the code that reads the GPU.

mod active;
mod breakdown;
mod changes;
mod device;
mod energy;
mod latest;
mod means;
mod readings;
mod series;
mod workloads;

pub use active::ActiveSeconds;
pub use breakdown::{Breakdown, BreakdownPoint, Parts, most_breakdown_bytes};
pub use changes::{ChangeLog, Changed, GpuChange, MOST_TROUBLE, most_bytes as most_change_bytes};
pub use device::{Device, MigPlace};
pub use energy::Energy;
pub use latest::{CONTEXT_BYTES, GpuState, Health, Latest, OnGpus, Processes, Xid};
pub use means::{ActivityMeans, ActivityShares};
pub use readings::{
    Activity, Fabric, Medium, NvLinkErrors, NvLinks, Pcie, PcieLink, Process, Rare, SLOWDOWN_MASK, Slow,
    THROTTLE_REASONS,
};
pub use series::{IDLE_PERIOD_NS, MOST_POINTS, Series, Usage, UsagePoint, most_usage_bytes};
pub use workloads::{GpuWorkloads, MOST_NAMED, PodName, SlurmStep, Workload, WorkloadRow, most_first};
