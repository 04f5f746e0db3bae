//! The beginnings and ends of a job's life: its processes start, end, or die of OOM and start again.

use super::moment::State;
use super::timeline::{GAP_NS, PEERS_DIE_NS, RankProgress, Stage, TEARDOWN_NS, Timeline};
use crate::sim::scenario::Shape;
use highwater_core::wire::{EventType, Kind};
use std::sync::Arc;

/// A rank that has run out of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Death {
    pub(super) rank: usize,
    pub(super) at_ns: i64,
    /// What its allocator holds at that moment.
    pub(super) allocator_bytes: u64,
}

impl Timeline {
    /// Processes appear, allocate their contexts, then load the memory that they keep between steps.
    pub(super) fn start_up(&mut self) {
        let plan = Arc::clone(&self.plan);
        let (begin_ns, lasting_ns) = (self.at_ns, plan.job.startup.0);
        for rank in 0..self.ranks.len() {
            self.ranks[rank] = RankProgress::default();
            self.change(rank, begin_ns, |state| state.alive = true);
            self.change(rank, begin_ns + lasting_ns / 10, |state| state.outside_bytes = plan.job.outside.0);
            let loading = (begin_ns + lasting_ns / 5, lasting_ns / 5 * 4);
            self.move_to(rank, plan.job.base.0, Shape::Steps, loading);
        }
        self.at_ns = begin_ns + lasting_ns;
        self.stage = Stage::Steps;
    }

    /// Ends the job after its last step.
    pub(super) fn exit(&mut self) {
        for rank in 0..self.ranks.len() {
            self.change(rank, self.at_ns + TEARDOWN_NS, |state| *state = State::default());
        }
        self.stage = Stage::Over;
    }

    /// Discards what was generated beyond a rank's death: the rank marks `oom` and ends, its peers are killed, and the
    /// job may start again.
    pub(super) fn die(&mut self, death: Death) {
        let last_ns = |rank| if rank == death.rank { death.at_ns } else { death.at_ns + PEERS_DIE_NS };
        self.queue.retain(|moment| moment.at_ns <= last_ns(moment.rank));
        let dying = &mut self.ranks[death.rank];
        dying.state.allocator_bytes = death.allocator_bytes;
        // The allocator flushes its cache and retries once before it gives up.
        dying.alloc_retries += 1;
        dying.ooms += 1;
        self.say(death.rank, death.at_ns, EventType::Mark, Kind::Phase, Some("oom"));
        for rank in 0..self.ranks.len() {
            let gone_ns = if rank == death.rank { death.at_ns + TEARDOWN_NS } else { last_ns(rank) };
            self.change(rank, gone_ns, |state| *state = State::default());
        }
        match self.plan.job.restart_after {
            Some(pause) => {
                self.at_ns = death.at_ns + pause.0.max(PEERS_DIE_NS + GAP_NS);
                self.life += 1;
                self.step = 0;
                self.stage = Stage::Startup;
            }
            None => self.stage = Stage::Over,
        }
    }
}
