//! The generator, and what its parts have in common: the queue of moments, and the change of a rank's state.
//!
//! Enters: a plan. Leaves: [`RankEvent`]s in order of time. The parts of a job's life are in `life`, `step`, `pipeline` and
//! `layers`, which add to the queue.

use super::curve;
use super::moment::{RankEvent, Select, State, What};
use super::plan::Plan;
use crate::sim::random::Random;
use crate::sim::scenario::Shape;
use highwater_core::wire::{Annotation, EventType, GpuList, Kind, Memory};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Time between two annotations of one rank, which a training loop spends there.
pub(super) const GAP_NS: i64 = 50_000;
/// Time from the mark `oom` until the dying process's memory is freed.
pub(super) const TEARDOWN_NS: i64 = 30_000_000;
/// Time from a rank's death until the launcher has killed its peers.
pub(super) const PEERS_DIE_NS: i64 = 200_000_000;

/// The generator: an iterator of moments in order of time.
#[derive(Debug)]
pub(in crate::sim) struct Timeline {
    pub(super) plan: Arc<Plan>,
    pub(super) select: Select,
    pub(super) stage: Stage,
    /// When the next part begins.
    pub(super) at_ns: i64,
    /// How often the job has been restarted.
    pub(super) life: u64,
    pub(super) step: u64,
    /// Time after which the scenario's next OOM is due.
    pub(super) oom_done_ns: i64,
    pub(super) ranks: Vec<RankProgress>,
    pub(super) queue: VecDeque<RankEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Startup,
    Steps,
    Over,
}

/// One rank during generation.
#[derive(Debug, Clone, Default)]
pub(super) struct RankProgress {
    pub(super) at_ns: i64,
    pub(super) state: State,
    /// The part of `outside_bytes` that fills the GPU up on purpose.
    pub(super) ballast_bytes: u64,
    /// Whether a leak did not fit.
    pub(super) overflowed: bool,
    pub(super) alloc_retries: u64,
    pub(super) ooms: u64,
}

impl Timeline {
    pub(in crate::sim) fn new(plan: Arc<Plan>, select: Select) -> Self {
        Self {
            stage: Stage::Startup,
            at_ns: plan.job.start.0,
            life: 0,
            step: 0,
            oom_done_ns: i64::MIN,
            ranks: vec![RankProgress::default(); plan.ranks.len()],
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
    pub(super) fn shows(&self, rank: usize) -> bool {
        matches!(&self.select, Select::States(ranks) if ranks.contains(&rank))
    }

    /// Changes the state of a rank's process.
    pub(super) fn change(&mut self, rank: usize, at_ns: i64, apply: impl FnOnce(&mut State)) {
        let before = self.ranks[rank].state;
        apply(&mut self.ranks[rank].state);
        let state = self.ranks[rank].state;
        if state != before && self.shows(rank) {
            self.queue.push_back(RankEvent { at_ns, rank, what: What::State(state) });
        }
    }

    /// Moves a rank's allocator to a level, with a curve that fills the given time.
    pub(super) fn move_to(&mut self, rank: usize, to_bytes: u64, shape: Shape, (begin_ns, lasting_ns): (i64, i64)) {
        if self.shows(rank) {
            for (at_ns, bytes) in self.curve(rank, to_bytes, shape, (begin_ns, lasting_ns)) {
                self.change(rank, at_ns, |state| state.allocator_bytes = bytes);
            }
        }
        self.ranks[rank].state.allocator_bytes = to_bytes;
    }

    /// The times and levels of a rank's allocator on its way to a level.
    pub(super) fn curve(&self, rank: usize, to_bytes: u64, shape: Shape, span: (i64, i64)) -> Vec<(i64, u64)> {
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
    pub(super) fn number(&self, rank: usize) -> Option<u32> {
        self.plan.job.first_rank.checked_add(u32::try_from(rank).ok()?)
    }

    /// Queues an annotation of a rank.
    pub(super) fn say(&mut self, rank: usize, at_ns: i64, event: EventType, kind: Kind, name: Option<&str>) {
        if !matches!(self.select, Select::Annotations) {
            return;
        }
        let RankProgress { state, alloc_retries, ooms, .. } = &self.ranks[rank];
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
pub(super) fn live_bytes(allocator_bytes: u64) -> u64 {
    (allocator_bytes - allocator_bytes / 16) & !511
}
