//! A simulated node's scenario: GPUs, jobs with their phases and troubles, and events of the GPUs themselves.
//!
//! Enters: TOML as documented in `docs/scenarios.md`. Leaves: a checked [`Scenario`], so that everything that runs one
//! can rely on it: each named GPU exists, each rank fits its GPU, no phase is empty. Unknown keys are errors, and every
//! error names its key, its file and its line.

mod check;
pub(super) mod fleet;
mod parse;
mod place;
#[cfg(test)]
mod tests;

pub use parse::{ScenarioError, ScenarioFault};

use highwater_core::gpu::THROTTLE_REASONS;
use highwater_core::units::{Bytes, Nanoseconds};
use serde::Deserialize;

/// A whole scenario.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The file's name without its extension, shown as `sim:NAME`.
    #[serde(skip)]
    pub name: String,
    /// The seed of everything random: jitter and the sizes of allocations.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// The node's GPUs, in order of their index; one H200 if left out.
    #[serde(default = "default_gpus")]
    pub gpus: Vec<GpuGroup>,
    /// Training jobs.
    #[serde(default)]
    pub jobs: Vec<Job>,
    /// Short bursts of memory that belong to no job.
    #[serde(default)]
    pub spikes: Vec<Spike>,
    /// GPUs that fall off the bus.
    #[serde(default)]
    pub lost: Vec<Lost>,
    /// GPUs that work worse than they should.
    #[serde(default)]
    pub degraded: Vec<Degraded>,
    /// XID errors.
    #[serde(default)]
    pub xids: Vec<Xid>,
}

/// Several GPUs of one kind.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GpuGroup {
    /// How many of them.
    pub count: usize,
    /// Product name.
    pub name: String,
    /// Framebuffer.
    pub total: Bytes,
    /// The driver's reserved part of it.
    pub reserved: Bytes,
    /// MIG instances that each of them is split into; none if empty.
    pub mig: Vec<MigInstance>,
}

impl Default for GpuGroup {
    fn default() -> Self {
        // NVML's values for an H200 under driver 580.
        let (total, reserved) = (Bytes(143_771 << 20), Bytes(615 << 20));
        Self { count: 1, name: "NVIDIA H200".to_owned(), total, reserved, mig: Vec::new() }
    }
}

/// One MIG instance of a GPU.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigInstance {
    /// Profile, such as `1g.18gb`.
    pub profile: String,
    /// Its framebuffer.
    pub total: Bytes,
}

/// A GPU by index, or a MIG instance as `gpu:instance`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a GPU's index, as `0`, or a MIG instance, as `\"0:1\"`")]
pub enum DeviceRef {
    /// A GPU's index.
    Index(u32),
    /// An index as text; `0:1` for a MIG instance.
    Name(String),
}

impl std::fmt::Display for DeviceRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceRef::Index(index) => write!(f, "{index}"),
            DeviceRef::Name(name) => f.write_str(name),
        }
    }
}

/// Where a job's ranks run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a number of ranks, or a list of the GPUs that they run on")]
pub enum Ranks {
    /// Rank r runs on GPU r.
    Count(u32),
    /// Rank r runs on the r-th of these.
    On(Vec<DeviceRef>),
}

impl Ranks {
    /// The device of each rank, in order of rank.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceRef> {
        match self {
            Ranks::Count(count) => (0..*count).map(DeviceRef::Index).collect(),
            Ranks::On(devices) => devices.clone(),
        }
    }

    /// The number of ranks.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Ranks::Count(count) => *count as usize,
            Ranks::On(devices) => devices.len(),
        }
    }
}

/// A training job: the same steps on every rank, each made of the same phases.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The name that its annotations carry.
    pub name: String,
    /// Where it runs.
    pub ranks: Ranks,
    /// The number of its first rank here: those before it are on other nodes.
    #[serde(default)]
    pub first_rank: u32,
    /// How many ranks it has on all nodes; those here and before, if left out.
    pub world_size: Option<u32>,
    /// When its processes start, after the scenario's start.
    #[serde(default)]
    pub start: Nanoseconds,
    /// How long they take until step 0: context, libraries, weights.
    #[serde(default = "default_startup")]
    pub startup: Nanoseconds,
    /// What the allocator of each rank holds between steps: weights and optimizer state.
    #[serde(default)]
    pub base: Bytes,
    /// What each rank holds outside its allocator: context, NCCL's buffers, workspaces.
    #[serde(default = "default_outside")]
    pub outside: Bytes,
    /// Added to `outside` after every step; when it no longer fits, the job dies.
    #[serde(default)]
    pub leak_per_step: Bytes,
    /// The number of steps before its processes end; endless if left out.
    pub steps: Option<u64>,
    /// How many times longer than in other steps the first step's phases last.
    #[serde(default = "default_stretch")]
    pub first_step_stretch: f64,
    /// How long after dying of OOM it starts again, from step 0; never if left out.
    pub restart_after: Option<Nanoseconds>,
    /// The phases of a step, in order.
    pub phases: Vec<Phase>,
    /// Stages that the model is divided into.
    pub pipeline: Option<Pipeline>,
    /// Checkpoints.
    pub checkpoint: Option<Checkpoint>,
    /// The layers of its model, which it profiles now and then.
    pub layers: Option<Layers>,
    /// A slow data loader.
    pub data_stall: Option<DataStall>,
    /// Times at which memory is nearly full and the allocator flushes its cache.
    pub near_oom: Option<NearOom>,
    /// Death by OOM.
    pub oom: Option<Oom>,
}

/// How memory moves from one level to the next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// It does not change.
    #[default]
    Hold,
    /// Evenly.
    Ramp,
    /// In increments of uneven size at uneven times, each a multiple of 2 MiB, as a caching allocator requests them.
    Steps,
}

/// A part of a step.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Its name: `data`, `forward`, …
    pub name: String,
    /// How long it lasts.
    pub duration: Nanoseconds,
    /// The largest difference of a rank's duration from that, either way.
    #[serde(default)]
    pub jitter: Nanoseconds,
    /// What the rank's allocator holds at the end of the phase, including `base`.
    pub to: Option<Bytes>,
    /// How it gets there.
    #[serde(default)]
    pub shape: Shape,
    /// Whether memory above `base` is freed just before the phase ends.
    #[serde(default)]
    pub release: bool,
    /// Share of the time in which a kernel runs, 0 to 1.
    #[serde(default)]
    pub busy: f64,
    /// Whether no rank can leave it before the last one has reached it, as in an all-reduce.
    #[serde(default)]
    pub collective: bool,
}

/// Pipeline parallelism: the model is divided into stages, each on ranks of its own, and a step sends microbatches through them.
/// The phases `forward` and `backward` then describe one microbatch in one stage. Rank r runs stage r / (ranks / stages).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipeline {
    /// How many stages; the number of ranks is a multiple of it.
    pub stages: usize,
    /// How many microbatches a step has.
    pub microbatches: usize,
    /// Into how many chunks a stage's part of the model is divided; more than one makes the schedule an interleaved one.
    #[serde(default = "default_chunks")]
    pub chunks: usize,
    /// Which pass a stage runs next.
    #[serde(default)]
    pub schedule: Schedule,
    /// For each stage, the factor on the durations of its passes; 1 if left out.
    #[serde(default)]
    pub weights: Vec<f64>,
    /// By which share the lengths of microbatches differ, either way: sequences of other lengths.
    #[serde(default)]
    pub spread: f64,
    /// A rank that is slower than the others.
    pub slow: Option<Slow>,
    /// The name of the phase in which a rank waits for another stage.
    #[serde(default = "default_comm")]
    pub wait: String,
    /// Whether that phase is marked.
    #[serde(default = "default_true")]
    pub marks_waits: bool,
    /// Whether ranks send their coordinates.
    #[serde(default = "default_true")]
    pub sends_mesh: bool,
}

/// The order of the passes of one stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum Schedule {
    /// 1F1B: a backward pass as soon as one can run. With one chunk per stage, a stage has at most as many microbatches in
    /// flight as there are stages from it to the last one, both included.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// All forward passes before the first backward pass.
    #[serde(rename = "gpipe")]
    Gpipe,
}

/// A rank whose passes take longer than those of others.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slow {
    /// Which rank.
    pub rank: u32,
    /// How many times as long.
    pub factor: f64,
}

impl Pipeline {
    /// The activations of one microbatch in one chunk, bytes.
    #[must_use]
    pub fn chunk_bytes(&self, job: &Job) -> u64 {
        let forward = job.phases.iter().find(|phase| phase.name == FORWARD).and_then(|phase| phase.to);
        forward.map_or(0, |to| to.0.saturating_sub(job.base.0)) / (self.chunks as u64).max(1)
    }

    /// The most passes of which a rank keeps the activations.
    fn most_in_flight(&self) -> u64 {
        match self.schedule {
            Schedule::OneForwardOneBackward if self.chunks == 1 => self.stages.min(self.microbatches) as u64,
            _ => (self.microbatches as u64).saturating_mul(self.chunks as u64),
        }
    }
}

/// A phase `checkpoint` at the end of some steps, with the mark `checkpoint saved`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// The number of steps from one checkpoint to the next.
    pub every_steps: u64,
    /// How long it takes.
    pub duration: Nanoseconds,
}

/// Some steps send a record of each layer, forward and backward.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layers {
    /// How many layers the model has.
    pub count: usize,
    /// The number of steps from one profile to the next, from step 0 on.
    pub every_steps: u64,
    /// Whether each rank has a part of the parameters, and gathers the whole ones of a block while it runs.
    #[serde(default)]
    pub sharded: bool,
}

/// Some steps wait for their data.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataStall {
    /// The number of steps from one stall to the next; the last of them stalls.
    pub every_steps: u64,
    /// How much longer the phase lasts.
    pub duration: Nanoseconds,
    /// Which phase.
    #[serde(default = "default_data")]
    pub phase: String,
}

/// For some time one rank has hardly any free memory: in each step its allocator fails once, frees its cache and takes
/// it again, and its peers wait for it in the next collective phase.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NearOom {
    /// Which rank.
    #[serde(default)]
    pub rank: u32,
    /// When it first begins, after the scenario's start.
    #[serde(default)]
    pub offset: Nanoseconds,
    /// How often it begins again; once only if left out.
    pub every: Option<Nanoseconds>,
    /// How long it lasts; steps that begin within are affected.
    #[serde(rename = "for")]
    pub lasting: Nanoseconds,
    /// Bytes left at the step's peak. Either this or `ballast`.
    pub free: Option<Bytes>,
    /// Bytes taken by something outside the allocator. Either this or `free`.
    pub ballast: Option<Bytes>,
    /// How many bytes the allocator frees.
    #[serde(default = "default_drop")]
    pub drop: Bytes,
    /// Time from the first byte freed to the last one taken again.
    #[serde(default = "default_regrow")]
    pub regrow: Nanoseconds,
    /// How many times longer than usual the peers' next collective phase lasts.
    #[serde(default = "default_comm_stretch")]
    pub comm_stretch: f64,
    /// The phase in which the allocator fails.
    #[serde(default = "default_forward")]
    pub phase: String,
}

/// One rank runs out of memory and dies, and its peers with it: `oom` is marked, and open phases never end.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Oom {
    /// Which rank.
    #[serde(default)]
    pub rank: u32,
    /// When, after the scenario's start: in the first step that begins then or later.
    pub at: Nanoseconds,
    /// How often after that; once only if left out.
    pub every: Option<Nanoseconds>,
    /// In which phase.
    #[serde(default = "default_forward")]
    pub phase: String,
}

/// A short burst of memory on one GPU.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spike {
    /// Which GPU.
    pub gpu: DeviceRef,
    /// When it first begins, after the scenario's start.
    #[serde(default)]
    pub offset: Nanoseconds,
    /// How often it begins again; once only if left out.
    pub every: Option<Nanoseconds>,
    /// How long it lasts.
    pub duration: Nanoseconds,
    /// How large it is; it takes no more than the free memory.
    pub bytes: Bytes,
}

/// A GPU that is lost for a while.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lost {
    /// Which GPU; its MIG instances go with it.
    pub gpu: DeviceRef,
    /// When, after the scenario's start.
    pub at: Nanoseconds,
    /// How often after that; once only if left out.
    pub every: Option<Nanoseconds>,
    /// For how long.
    #[serde(rename = "for")]
    pub lasting: Nanoseconds,
}

/// NVLinks of a simulated GPU, as an H200 has them.
pub const NVLINKS: u32 = 18;

/// A GPU that works worse than it should for a while, in what the driver reports of it. Jobs on it are no slower.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Degraded {
    /// Which GPU.
    pub gpu: DeviceRef,
    /// When, after the scenario's start.
    pub at: Nanoseconds,
    /// How often after that; once only if left out.
    pub every: Option<Nanoseconds>,
    /// For how long.
    #[serde(rename = "for")]
    pub lasting: Nanoseconds,
    /// What holds its clocks back: a reason of [`THROTTLE_REASONS`].
    pub throttle: Option<String>,
    /// The clock of its multiprocessors meanwhile, as a part of the usual one.
    #[serde(default = "default_clock")]
    pub clock: f64,
    /// Generation of its PCIe link; 5 at its best.
    pub pcie_generation: Option<u32>,
    /// Lanes of its PCIe link; 16 at its best.
    pub pcie_width: Option<u32>,
    /// Whether rows of its memory wait to be remapped.
    #[serde(default)]
    pub row_remap_pending: bool,
    /// Whether a row of its memory could not be remapped.
    #[serde(default)]
    pub row_remap_failed: bool,
    /// NVIDIA's number of the action that the driver asks for.
    pub recovery_action: Option<u64>,
    /// How many of its 18 NVLinks are down.
    #[serde(default)]
    pub nvlinks_down: u32,
    /// Packets a second that its NVLinks send again.
    #[serde(default)]
    pub nvlink_replays: u32,
    /// Whether it has not joined the NVLink fabric.
    #[serde(default)]
    pub outside_fabric: bool,
}

fn default_clock() -> f64 {
    0.5
}

impl Degraded {
    /// The bit of the reason that holds its clocks back; `None` if it is no known one.
    pub fn throttle_bit(&self) -> Option<u64> {
        let throttle = self.throttle.as_deref()?;
        THROTTLE_REASONS.iter().find(|(_, name)| *name == throttle).map(|(bit, _)| *bit)
    }
}

/// An XID error reported by the driver.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    /// Which GPU.
    pub gpu: DeviceRef,
    /// When, after the scenario's start.
    pub at: Nanoseconds,
    /// How often after that; once only if left out.
    pub every: Option<Nanoseconds>,
    /// NVIDIA's number of the error.
    pub xid: u64,
}

fn default_seed() -> u64 {
    1
}

fn default_gpus() -> Vec<GpuGroup> {
    vec![GpuGroup::default()]
}

fn default_startup() -> Nanoseconds {
    Nanoseconds(2_000_000_000)
}

fn default_outside() -> Bytes {
    Bytes(1 << 30)
}

fn default_stretch() -> f64 {
    1.0
}

fn default_data() -> String {
    "data".to_owned()
}

/// The phases in which layers run.
pub const FORWARD: &str = "forward";
/// See above.
pub const BACKWARD: &str = "backward";

fn default_forward() -> String {
    FORWARD.to_owned()
}

fn default_comm() -> String {
    "comm".to_owned()
}

fn default_true() -> bool {
    true
}

fn default_chunks() -> usize {
    1
}

fn default_drop() -> Bytes {
    Bytes(6 << 30)
}

fn default_regrow() -> Nanoseconds {
    Nanoseconds(90_000_000)
}

fn default_comm_stretch() -> f64 {
    10.0
}

impl Job {
    /// The most that one rank takes without troubles, bytes.
    #[must_use]
    pub fn most_bytes(&self) -> u64 {
        let highest = self.phases.iter().filter_map(|phase| phase.to).fold(self.base, Bytes::max);
        let in_flight = self.pipeline.as_ref().map_or(0, |pipeline| {
            let bytes = pipeline.chunk_bytes(self).saturating_mul(pipeline.most_in_flight());
            self.base.0.saturating_add(bytes)
        });
        highest.0.max(in_flight).saturating_add(self.outside.0)
    }
}
