//! One step of a job: its phases on every rank, and the troubles in them.
//!
//! A collective phase ends for all ranks at once, after the last rank has reached it. So one rank's trouble shows as
//! its peers' long collective, as on real nodes.

use super::life::Death;
use super::moment::{State, Traffic};
use super::plan::{CHECKPOINT, Plan};
use super::timeline::{GAP_NS, Timeline};
use crate::sim::random::Random;
use crate::sim::scenario::{BACKWARD, FORWARD, NearOom, Phase, Shape};
use highwater_core::wire::{EventType, Kind};
use std::sync::Arc;

/// The delay of a dying rank. It is longer than its peers live, so no rank sees the end of the next collective phase.
const NEVER_NS: i64 = 3_600_000_000_000;

/// The troubles of one step.
#[derive(Debug, Default)]
struct Fate {
    /// The rank whose allocator flushes, and its phase.
    flushing: Option<(usize, usize)>,
    /// The rank that dies, and its phase.
    dying: Option<(usize, usize)>,
}

impl Timeline {
    /// Generates the next step.
    pub(super) fn make_step(&mut self) {
        let plan = Arc::clone(&self.plan);
        let begin_ns = self.at_ns;
        let fate = self.fate(&plan, begin_ns);
        for rank in 0..self.ranks.len() {
            self.say(rank, begin_ns, EventType::Begin, Kind::Step, None);
            self.ranks[rank].at_ns = begin_ns + GAP_NS;
        }
        let mut death = None;
        for (index, phase) in plan.job.phases.iter().enumerate() {
            match &plan.job.pipeline {
                // The backward passes are among the forward ones.
                Some(pipeline) if phase.name == FORWARD => self.make_pipeline(&plan, pipeline),
                Some(_) if phase.name == BACKWARD => {}
                _ => death = death.or(self.make_phase(&plan, index, phase, &fate)),
            }
        }
        self.make_checkpoint(&plan, &fate);
        for rank in 0..self.ranks.len() {
            let end_ns = self.ranks[rank].at_ns;
            self.say(rank, end_ns, EventType::End, Kind::Step, None);
            self.at_ns = self.at_ns.max(end_ns + GAP_NS);
            self.leak(&plan, rank, end_ns);
        }
        match death {
            Some(death) => {
                self.oom_done_ns = begin_ns;
                self.die(death);
            }
            None => self.step += 1,
        }
    }

    /// Decides the troubles of the step that begins now.
    fn fate(&mut self, plan: &Plan, begin_ns: i64) -> Fate {
        let mut fate = Fate::default();
        if let (Some(near), Some(window)) = (&plan.job.near_oom, &plan.near_oom) {
            let rank = near.rank as usize;
            let open = window.contains(begin_ns);
            self.set_ballast(plan, rank, begin_ns, if open { Some(near) } else { None });
            fate.flushing = plan.phase(&near.phase).filter(|_| open).map(|phase| (rank, phase));
        }
        if let (Some(oom), Some(window)) = (&plan.job.oom, &plan.oom) {
            let due = window.next_opening_ns(self.oom_done_ns).is_some_and(|opening| opening <= begin_ns);
            fate.dying = plan.phase(&oom.phase).filter(|_| due).map(|phase| (oom.rank as usize, phase));
        }
        fate.dying = fate.dying.or_else(|| self.leaked(plan));
        fate
    }

    /// A rank whose leak no longer fits beside its largest phase.
    fn leaked(&self, plan: &Plan) -> Option<(usize, usize)> {
        let tight = |rank: &usize| {
            let leaked = self.ranks[*rank].state.outside_bytes.saturating_sub(plan.job.outside.0);
            let is_too_much = leaked + plan.job.most_bytes() > plan.ranks[*rank].usable_bytes;
            self.ranks[*rank].overflowed || (plan.job.leak_per_step.0 > 0 && is_too_much)
        };
        let largest = |(_, phase): &(usize, &Phase)| phase.to;
        let (phase, _) = plan.job.phases.iter().enumerate().max_by_key(largest)?;
        (0..self.ranks.len()).find(tight).map(|rank| (rank, phase))
    }

    /// Fills a rank's GPU up, so that its peak leaves as little as the scenario says, or removes that ballast.
    fn set_ballast(&mut self, plan: &Plan, rank: usize, at_ns: i64, near: Option<&NearOom>) {
        let held = self.ranks[rank].ballast_bytes;
        let wanted = near.map_or(0, |near| {
            let outside = self.ranks[rank].state.outside_bytes - held;
            let peak = outside + plan.job.most_bytes() - plan.job.outside.0;
            let room = plan.ranks[rank].usable_bytes.saturating_sub(peak);
            near.ballast
                .map_or_else(|| room.saturating_sub(near.free.unwrap_or_default().0), |ballast| ballast.0.min(room))
        });
        self.ranks[rank].ballast_bytes = wanted;
        self.change(rank, at_ns, |state| state.outside_bytes = state.outside_bytes - held + wanted);
    }

    /// One phase on every rank. Returns the death if a rank dies in it.
    fn make_phase(&mut self, plan: &Plan, index: usize, phase: &Phase, fate: &Fate) -> Option<Death> {
        let end_ns = |timeline: &Self, rank: usize| {
            let own_ns = timeline.own_ns(plan, rank, index, phase);
            timeline.ranks[rank].at_ns + own_ns + timeline.delay_ns(plan, rank, (index, phase), fate)
        };
        let last = (0..self.ranks.len()).max_by_key(|rank| self.ranks[*rank].at_ns);
        let together_ns = last.filter(|_| phase.collective).map(|last| end_ns(self, last));
        let mut death = None;
        for rank in 0..self.ranks.len() {
            let end_ns = together_ns.unwrap_or_else(|| end_ns(self, rank));
            death = death.or(self.play(plan, rank, (index, phase), end_ns, fate));
        }
        death
    }

    /// The phase in which the step's checkpoint is written, if one is due.
    fn make_checkpoint(&mut self, plan: &Plan, fate: &Fate) {
        let (Some(checkpoint), Some(phase)) = (&plan.job.checkpoint, &plan.checkpoint) else { return };
        if !(self.step + 1).is_multiple_of(checkpoint.every_steps) {
            return;
        }
        self.make_phase(plan, plan.job.phases.len(), phase, fate);
        let saved_ns = self.ranks[0].at_ns - GAP_NS / 2;
        self.say(0, saved_ns, EventType::Mark, Kind::Phase, Some("checkpoint saved"));
    }

    /// One phase on one rank, from the rank's time until `end_ns`. Returns the death if the rank dies in it.
    fn play(
        &mut self,
        plan: &Plan,
        rank: usize,
        (index, phase): (usize, &Phase),
        end_ns: i64,
        fate: &Fate,
    ) -> Option<Death> {
        let begin_ns = self.ranks[rank].at_ns;
        let own_ns = self.own_ns(plan, rank, index, phase);
        self.change(rank, begin_ns, |state| state.busy_with(phase));
        self.say(rank, begin_ns, EventType::Begin, Kind::Phase, Some(&phase.name));
        if fate.dying.is_none() && fate.flushing.is_none() {
            self.say_layers(plan, rank, phase, (begin_ns + own_ns / 20, own_ns * 17 / 20));
        }
        let mut death = None;
        if fate.dying == Some((rank, index)) {
            death = Some(self.fill_up(plan, rank, (begin_ns, own_ns)));
        } else if fate.flushing == Some((rank, index)) {
            self.grow(plan, rank, phase, (begin_ns + own_ns / 20, own_ns * 9 / 20));
            self.flush(plan, rank, begin_ns + own_ns * 11 / 20);
        } else {
            self.grow(plan, rank, phase, (begin_ns + own_ns / 20, own_ns * 17 / 20));
        }
        if phase.release {
            let base = plan.job.base.0;
            self.change(rank, end_ns - (own_ns / 50).max(1), |state| state.allocator_bytes = base);
        }
        self.change(rank, end_ns, State::rest);
        self.say(rank, end_ns, EventType::End, Kind::Phase, Some(&phase.name));
        self.ranks[rank].at_ns = end_ns + GAP_NS;
        death
    }

    /// Moves the allocator to the phase's level. A peer of a dying rank may leak as much as that rank does: its memory
    /// is limited to its GPU's until it is killed.
    fn grow(&mut self, plan: &Plan, rank: usize, phase: &Phase, span: (i64, i64)) {
        if let Some(to) = phase.to {
            self.move_to(rank, to.0.min(self.room_bytes(plan, rank)), phase.shape, span);
        }
    }

    /// Adds the leak of each step. If it does not fit, it takes from the ballast; if that is not enough, the next step
    /// dies.
    fn leak(&mut self, plan: &Plan, rank: usize, at_ns: i64) {
        let free_bytes = self.room_bytes(plan, rank).saturating_sub(self.ranks[rank].state.allocator_bytes);
        let wanted_bytes = plan.job.leak_per_step.0;
        let given_bytes = wanted_bytes.saturating_sub(free_bytes).min(self.ranks[rank].ballast_bytes);
        let leaked_bytes = wanted_bytes.min(free_bytes + given_bytes);
        self.ranks[rank].ballast_bytes -= given_bytes;
        self.ranks[rank].overflowed |= leaked_bytes < wanted_bytes;
        self.change(rank, at_ns, |state| state.outside_bytes = state.outside_bytes - given_bytes + leaked_bytes);
    }

    /// The most that a rank's allocator can hold beside what the rank holds outside it.
    pub(super) fn room_bytes(&self, plan: &Plan, rank: usize) -> u64 {
        plan.ranks[rank].usable_bytes.saturating_sub(self.ranks[rank].state.outside_bytes)
    }

    /// The allocator fails, gives its cache back to the driver in an eighth of the time, and takes it again.
    fn flush(&mut self, plan: &Plan, rank: usize, at_ns: i64) {
        let Some(near) = &plan.job.near_oom else { return };
        let level = self.ranks[rank].state.allocator_bytes;
        let low = level.saturating_sub(near.drop.0);
        let eighth_ns = near.regrow.0 / 8;
        self.move_to(rank, low, Shape::Ramp, (at_ns, eighth_ns));
        self.move_to(rank, level, Shape::Steps, (at_ns + 2 * eighth_ns, 6 * eighth_ns));
        self.ranks[rank].alloc_retries += 1;
    }

    /// The allocator takes all memory that is left, which is not enough.
    fn fill_up(&mut self, plan: &Plan, rank: usize, (begin_ns, own_ns): (i64, i64)) -> Death {
        let level = self.ranks[rank].state.allocator_bytes;
        let allocator_bytes = self.room_bytes(plan, rank).max(level);
        self.move_to(rank, allocator_bytes, Shape::Steps, (begin_ns + own_ns / 20, own_ns * 17 / 20));
        Death { rank, at_ns: begin_ns + own_ns, allocator_bytes }
    }

    /// A phase's duration on a rank, without delays.
    fn own_ns(&self, plan: &Plan, rank: usize, index: usize, phase: &Phase) -> i64 {
        let key = [plan.seed, plan.index, self.life, self.step, rank as u64, index as u64];
        self.stretched(plan, phase.duration.0 + Random::keyed(&key).around(phase.jitter.0))
    }

    /// A duration in this step: the first one takes longer.
    pub(super) fn stretched(&self, plan: &Plan, drawn: i64) -> i64 {
        if self.step > 0 {
            return drawn;
        }
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            reason = "a stretched duration is rough"
        )]
        let stretched = (drawn as f64 * plan.job.first_step_stretch) as i64;
        stretched
    }

    /// The delay that troubles add to a phase.
    fn delay_ns(&self, plan: &Plan, rank: usize, (index, phase): (usize, &Phase), fate: &Fate) -> i64 {
        // In a collective phase, a delay of one rank delays all.
        let delayed = |trouble: Option<(usize, usize)>| {
            trouble.is_some_and(|(who, place)| place == index && (who == rank || phase.collective))
        };
        let mut delay = 0;
        let stall = plan.job.data_stall.as_ref().filter(|stall| stall.phase == phase.name);
        if let Some(stall) = stall.filter(|stall| (self.step + 1).is_multiple_of(stall.every_steps)) {
            delay += stall.duration.0;
        }
        if delayed(fate.flushing) {
            delay += plan.flush_delay_ns(index);
        }
        if delayed(fate.dying) {
            delay += NEVER_NS;
        }
        delay
    }
}

impl Plan {
    /// The first phase of this name.
    fn phase(&self, name: &str) -> Option<usize> {
        self.job.phases.iter().position(|phase| phase.name == name)
    }

    /// The delay of a rank by a flush: long enough for memory to regrow, and for the peers to wait in the next
    /// collective phase as long as the scenario says.
    fn flush_delay_ns(&self, index: usize) -> i64 {
        let Some(near) = &self.job.near_oom else { return 0 };
        let collective = self.job.phases.iter().skip(index + 1).find(|phase| phase.collective);
        let Some(collective) = collective.filter(|_| self.ranks.len() > 1) else { return near.regrow.0 };
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            reason = "a stretched duration is rough"
        )]
        let wait_ns = (collective.duration.0 as f64 * (near.comm_stretch - 1.0)) as i64;
        wait_ns.max(near.regrow.0)
    }
}

impl State {
    /// In a phase.
    pub(super) fn busy_with(&mut self, phase: &Phase) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to a million")]
        let busy_ppm = (phase.busy * 1e6) as u64;
        self.busy_ppm = busy_ppm;
        self.traffic = match phase.name.as_str() {
            CHECKPOINT => Traffic::Save,
            _ if phase.collective => Traffic::Collective,
            "data" => Traffic::Load,
            _ => Traffic::Quiet,
        };
    }

    /// Between phases.
    pub(super) fn rest(&mut self) {
        (self.busy_ppm, self.traffic) = (0, Traffic::Quiet);
    }
}
