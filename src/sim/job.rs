//! One training job as a stream of timed moments: its memory and activity, and its annotations.
//!
//! Enters: a job of a scenario. Leaves: [`RankEvent`]s in order of time, endless unless the job ends. Both the GPUs'
//! readings and the annotations come from this one generator, so they agree to the nanosecond. Each reader has its own
//! copy that computes only the part it [selects](Select). Invariant: a moment is a pure function of the scenario and
//! its seed; selecting less does not change the rest.

mod curve;
mod layers;
mod life;
mod pipeline;
mod step;

use super::random::Random;
use super::scenario::fleet::Fleet;
use super::scenario::{DeviceRef, Job, Phase, Scenario, Shape};
use super::window::Window;
use highwater_core::units::{Bytes, Nanoseconds};
use highwater_core::wire::{Annotation, EventType, Gpu, GpuList, Kind, Memory};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Time between two annotations of one rank, which a training loop spends there.
const GAP_NS: i64 = 50_000;
/// Time from the mark `oom` until the dying process's memory is freed.
const TEARDOWN_NS: i64 = 30_000_000;
/// Time from a rank's death until the launcher has killed its peers.
const PEERS_DIE_NS: i64 = 200_000_000;
/// The name of the phase in which a checkpoint is written.
const CHECKPOINT: &str = "checkpoint";

/// A job with everything that its generator needs to know about the node.
#[derive(Debug)]
pub(super) struct Plan {
    job: Job,
    /// The index of the job in the scenario.
    index: u64,
    seed: u64,
    ranks: Vec<Place>,
    near_oom: Option<Window>,
    oom: Option<Window>,
    /// The phase that a checkpoint adds to a step.
    checkpoint: Option<Phase>,
    /// The layers of its model, which some steps profile.
    modules: Vec<layers::Module>,
}

/// Where a rank runs.
#[derive(Debug)]
struct Place {
    device: usize,
    gpu: Gpu,
    usable_bytes: u64,
}

impl Plan {
    pub(super) fn new(scenario: &Scenario, index: usize, job: &Job, fleet: &Fleet) -> Self {
        let place = |device: DeviceRef| {
            let position = fleet.find(&device)?;
            let gpu = match device {
                DeviceRef::Index(index) => Gpu::Index(index),
                DeviceRef::Name(name) => Gpu::Name(name),
            };
            Some(Place { device: position, gpu, usable_bytes: fleet.usable_bytes(position) })
        };
        Self {
            index: index as u64,
            seed: scenario.seed,
            ranks: job.ranks.devices().into_iter().filter_map(place).collect(),
            near_oom: job.near_oom.as_ref().map(|near| Window::new(near.offset, near.every, near.lasting)),
            oom: job.oom.as_ref().map(|oom| Window::new(oom.at, oom.every, Nanoseconds(1))),
            checkpoint: job.checkpoint.as_ref().map(|checkpoint| checkpoint_phase(checkpoint.duration)),
            modules: job.layers.as_ref().map_or_else(Vec::new, |layers| layers::modules(layers.count)),
            job: job.clone(),
        }
    }

    /// Which device each rank runs on.
    pub(super) fn devices(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().map(|place| place.device)
    }
}

fn checkpoint_phase(duration: Nanoseconds) -> Phase {
    let name = CHECKPOINT.to_owned();
    let (jitter, to, shape, release) = (Nanoseconds(0), None::<Bytes>, Shape::Hold, false);
    Phase { name, duration, jitter, to, shape, release, busy: 0.05, collective: true }
}

/// The part of a job's moments that a reader wants.
#[derive(Debug, Clone)]
pub(super) enum Select {
    /// The states of these ranks.
    States(Vec<usize>),
    /// The annotations of all ranks.
    Annotations,
}

/// An event of one rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RankEvent {
    /// Nanoseconds since the scenario's start.
    pub(super) at_ns: i64,
    pub(super) rank: usize,
    pub(super) what: What,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum What {
    /// Its process has this state from now on.
    State(State),
    /// It sends this annotation; the time is still to be filled in.
    Says(Box<Annotation>),
}

/// A rank's process as its GPU sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct State {
    /// Whether there is a process.
    pub(super) alive: bool,
    /// What its allocator holds from the driver, bytes.
    pub(super) allocator_bytes: u64,
    /// What it holds outside the allocator, bytes.
    pub(super) outside_bytes: u64,
    /// Share of the time in which a kernel runs, millionths.
    pub(super) busy_ppm: u64,
    pub(super) traffic: Traffic,
}

impl State {
    /// All memory of the process, bytes.
    pub(super) fn used_bytes(&self) -> u64 {
        self.allocator_bytes.saturating_add(self.outside_bytes)
    }
}

/// The traffic of a rank over its links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Traffic {
    /// Hardly anything.
    #[default]
    Quiet,
    /// Batches from the host.
    Load,
    /// Gradients to and from its peers.
    Collective,
    /// Weights to the host.
    Save,
}

/// The generator: an iterator of moments in order of time.
#[derive(Debug)]
pub(super) struct Timeline {
    plan: Arc<Plan>,
    select: Select,
    stage: Stage,
    /// When the next part begins.
    at_ns: i64,
    /// How often the job has been restarted.
    life: u64,
    step: u64,
    /// Time after which the scenario's next OOM is due.
    oom_done_ns: i64,
    ranks: Vec<Rank>,
    queue: VecDeque<RankEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Startup,
    Steps,
    Over,
}

/// One rank during generation.
#[derive(Debug, Clone, Default)]
struct Rank {
    at_ns: i64,
    state: State,
    /// The part of `outside_bytes` that fills the GPU up on purpose.
    ballast_bytes: u64,
    /// Whether a leak did not fit.
    overflowed: bool,
    alloc_retries: u64,
    ooms: u64,
}

impl Timeline {
    pub(super) fn new(plan: Arc<Plan>, select: Select) -> Self {
        Self {
            stage: Stage::Startup,
            at_ns: plan.job.start.0,
            life: 0,
            step: 0,
            oom_done_ns: i64::MIN,
            ranks: vec![Rank::default(); plan.ranks.len()],
            queue: VecDeque::new(),
            plan,
            select,
        }
    }

    /// Fills the queue with the job's next part; each part begins after the previous one has ended.
    fn refill(&mut self) {
        match self.stage {
            Stage::Startup => self.start_up(),
            Stage::Steps if self.plan.job.steps == Some(self.step) => self.exit(),
            Stage::Steps => self.make_step(),
            Stage::Over => {}
        }
        self.queue.make_contiguous().sort_by_key(|moment| moment.at_ns);
    }

    /// If a whole part changed nothing, queues the state at its end. Otherwise a job whose memory never changes would
    /// be played forever in search of a change.
    fn let_time_pass(&mut self) {
        if let (true, Select::States(ranks)) = (self.queue.is_empty(), &self.select)
            && let Some(rank) = ranks.first().copied()
        {
            let (at_ns, what) = (self.at_ns, What::State(self.ranks[rank].state));
            self.queue.push_back(RankEvent { at_ns, rank, what });
        }
    }

    /// Whether the reader wants the states of this rank.
    fn shows(&self, rank: usize) -> bool {
        matches!(&self.select, Select::States(ranks) if ranks.contains(&rank))
    }

    /// Changes the state of a rank's process.
    fn change(&mut self, rank: usize, at_ns: i64, apply: impl FnOnce(&mut State)) {
        let before = self.ranks[rank].state;
        apply(&mut self.ranks[rank].state);
        let state = self.ranks[rank].state;
        if state != before && self.shows(rank) {
            self.queue.push_back(RankEvent { at_ns, rank, what: What::State(state) });
        }
    }

    /// Moves a rank's allocator to a level, with a curve that fills the given time.
    fn move_to(&mut self, rank: usize, to_bytes: u64, shape: Shape, (begin_ns, lasting_ns): (i64, i64)) {
        if self.shows(rank) {
            for (at_ns, bytes) in self.curve(rank, to_bytes, shape, (begin_ns, lasting_ns)) {
                self.change(rank, at_ns, |state| state.allocator_bytes = bytes);
            }
        }
        self.ranks[rank].state.allocator_bytes = to_bytes;
    }

    /// The times and levels of a rank's allocator on its way to a level.
    fn curve(&self, rank: usize, to_bytes: u64, shape: Shape, span: (i64, i64)) -> Vec<(i64, u64)> {
        let key = [self.plan.seed, self.plan.index, self.life, self.step, rank as u64, span.0.cast_unsigned()];
        curve::points(shape, (self.ranks[rank].state.allocator_bytes, to_bytes), span, Random::keyed(&key))
    }

    /// Where a rank stands in a pipeline.
    fn mesh(&self, rank: usize) -> Option<BTreeMap<String, u32>> {
        let pipeline = self.plan.job.pipeline.as_ref().filter(|pipeline| pipeline.sends_mesh)?;
        let replicas = self.ranks.len() / pipeline.stages;
        let at = |name: &str, at: usize| Some((name.to_owned(), u32::try_from(at).ok()?));
        Some([at("dp", rank % replicas)?, at("pp", rank / replicas)?].into())
    }

    /// The number of a rank in its job, by its place among those on this node.
    fn number(&self, rank: usize) -> Option<u32> {
        self.plan.job.first_rank.checked_add(u32::try_from(rank).ok()?)
    }

    /// Queues an annotation of a rank.
    fn say(&mut self, rank: usize, at_ns: i64, event: EventType, kind: Kind, name: Option<&str>) {
        if !matches!(self.select, Select::Annotations) {
            return;
        }
        let Rank { state, alloc_retries, ooms, .. } = &self.ranks[rank];
        let memory = Memory {
            allocated: Some(live_bytes(state.allocator_bytes)),
            reserved: Some(state.allocator_bytes),
            alloc_retries: Some(*alloc_retries),
            ooms: Some(*ooms),
            ..Memory::default()
        };
        let annotation = Annotation {
            event,
            kind,
            name: name.map(str::to_owned),
            job: Some(self.plan.job.name.clone()),
            scope: None,
            rank: self.number(rank),
            world_size: self.plan.job.world_size.or_else(|| self.number(self.ranks.len())),
            mesh: self.mesh(rank).filter(|_| kind == Kind::Step && event == EventType::Begin),
            gpu: Some(GpuList::One(self.plan.ranks[rank].gpu.clone())),
            step: Some(self.step),
            layer: None,
            lost: None,
            answer: None,
            time_unix_nano: Some(at_ns),
            memory: Some(memory),
            attributes: None,
        };
        self.queue.push_back(RankEvent { at_ns, rank, what: What::Says(Box::new(annotation)) });
    }
}

impl Iterator for Timeline {
    type Item = RankEvent;

    fn next(&mut self) -> Option<RankEvent> {
        while self.queue.is_empty() && self.stage != Stage::Over {
            self.refill();
            self.let_time_pass();
        }
        self.queue.pop_front()
    }
}

/// The live part of an allocator's memory: a sixteenth is free inside it, a usual fragmentation. Tensors are aligned to
/// 512 bytes.
fn live_bytes(allocator_bytes: u64) -> u64 {
    (allocator_bytes - allocator_bytes / 16) & !511
}
