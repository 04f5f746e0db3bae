//! The part of a step in which a pipeline runs: forward and backward passes of microbatches on stages that wait for each other.
//!
//! Enters: a [`Pipeline`] with how long each pass takes. Leaves: when each rank runs which pass. Invariants: a pass begins after
//! the pass that it depends on; a rank runs one pass at a time; if two can begin, the backward pass goes first, to free memory.

use super::moment::State;
use super::plan::Plan;
use super::timeline::{GAP_NS, Timeline};
use crate::sim::random::Random;
use crate::sim::scenario::{BACKWARD, FORWARD, Phase, Pipeline, Schedule, Shape};
use highwater_core::wire::{EventType, Kind};
use std::collections::BTreeMap;

/// One pass of a microbatch through a chunk of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pass {
    is_forward: bool,
    /// Of all chunks of the model, in order: stage s has the chunks s, s + stages, …
    chunk: usize,
    microbatch: usize,
}

/// When a pass runs.
#[derive(Debug, Clone, Copy)]
struct Run {
    pass: Pass,
    begin_ns: i64,
    end_ns: i64,
}

/// The passes that the stages of one replica have run so far.
struct Running<'a> {
    pipeline: &'a Pipeline,
    done_ns: BTreeMap<Pass, i64>,
    /// By stage.
    runs: Vec<Vec<Run>>,
    /// By stage, how many of them are backward and forward passes.
    counts: Vec<[usize; 2]>,
    /// Of each direction and chunk, the next microbatch.
    next: BTreeMap<(bool, usize), usize>,
}

impl Running<'_> {
    fn chunks(&self) -> usize {
        self.pipeline.stages * self.pipeline.chunks
    }

    /// Whether the schedule lets a stage run a pass in this direction now.
    fn may(&self, stage: usize, is_forward: bool) -> bool {
        let [backwards, forwards] = self.counts.get(stage).copied().unwrap_or_default();
        match self.pipeline.schedule {
            Schedule::Gpipe => is_forward || forwards == self.pipeline.chunks * self.pipeline.microbatches,
            Schedule::OneForwardOneBackward if self.pipeline.chunks == 1 => {
                !is_forward || forwards - backwards < self.pipeline.stages - stage
            }
            Schedule::OneForwardOneBackward => true,
        }
    }

    /// When the pass that this one needs has ended; `None` if it has not run.
    fn ready_ns(&self, pass: Pass) -> Option<i64> {
        let is_last = pass.chunk + 1 == self.chunks();
        let needed = match (pass.is_forward, pass.chunk) {
            (true, 0) => return Some(0),
            (true, chunk) => Pass { chunk: chunk - 1, ..pass },
            (false, _) if is_last => Pass { is_forward: true, ..pass },
            (false, chunk) => Pass { chunk: chunk + 1, ..pass },
        };
        self.done_ns.get(&needed).copied()
    }

    /// The pass that can begin first, with its stage and begin.
    fn first(&self) -> Option<(usize, Pass, i64)> {
        let mut first: Option<(i64, bool, usize, Pass)> = None;
        for chunk in 0..self.chunks() {
            let stage = chunk % self.pipeline.stages;
            let free_ns = self.runs.get(stage).and_then(|runs| runs.last()).map_or(0, |run| run.end_ns + GAP_NS);
            for is_forward in [false, true] {
                let microbatch = self.next.get(&(is_forward, chunk)).copied().unwrap_or(0);
                let pass = Pass { is_forward, chunk, microbatch };
                if microbatch == self.pipeline.microbatches || !self.may(stage, is_forward) {
                    continue;
                }
                let Some(ready_ns) = self.ready_ns(pass) else { continue };
                let one = (free_ns.max(ready_ns), is_forward, stage, pass);
                first = Some(first.map_or(one, |first| first.min(one)));
            }
        }
        first.map(|(begin_ns, _, stage, pass)| (stage, pass, begin_ns))
    }
}

impl Pipeline {
    /// When the stages of a replica run which pass, from 0; each takes as long as `lasting_ns` says.
    fn runs(&self, lasting_ns: impl Fn(usize, Pass) -> i64) -> Vec<Vec<Run>> {
        let (runs, counts) = (vec![Vec::new(); self.stages], vec![[0; 2]; self.stages]);
        let mut running = Running { pipeline: self, done_ns: BTreeMap::new(), runs, counts, next: BTreeMap::new() };
        while let Some((stage, pass, begin_ns)) = running.first() {
            let end_ns = begin_ns + lasting_ns(stage, pass);
            running.done_ns.insert(pass, end_ns);
            running.counts[stage][usize::from(pass.is_forward)] += 1;
            running.runs[stage].push(Run { pass, begin_ns, end_ns });
            *running.next.entry((pass.is_forward, pass.chunk)).or_default() += 1;
        }
        running.runs
    }
}

impl Timeline {
    /// Runs the pipeline on every rank, from where they are.
    pub(super) fn make_pipeline(&mut self, plan: &Plan, pipeline: &Pipeline) {
        let replicas = self.ranks.len() / pipeline.stages;
        for replica in 0..replicas {
            let rank = |stage: usize| stage * replicas + replica;
            let begin_ns = (0..pipeline.stages).map(|stage| self.ranks[rank(stage)].at_ns).max().unwrap_or(self.at_ns);
            let runs = pipeline.runs(|stage, pass| self.pass_ns(plan, pipeline, (rank(stage), replica, stage), pass));
            for (stage, runs) in runs.into_iter().enumerate() {
                self.run_stage(plan, pipeline, (rank(stage), begin_ns), &runs);
            }
        }
    }

    /// How long a pass takes on a rank.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a stretched duration is rough")]
    fn pass_ns(&self, plan: &Plan, pipeline: &Pipeline, of: (usize, usize, usize), pass: Pass) -> i64 {
        let (rank, replica, stage) = of;
        let Some((index, phase)) = plan.pass(pass.is_forward) else { return GAP_NS };
        let microbatch = [plan.seed, plan.index, self.life, self.step, replica as u64, pass.microbatch as u64];
        let length = 1.0 + pipeline.spread * Random::keyed(&microbatch).around(1 << 20) as f64 / (1 << 20) as f64;
        let weight = pipeline.weights.get(stage).copied().unwrap_or(1.0);
        let slow = pipeline.slow.as_ref().filter(|slow| slow.rank as usize == rank).map_or(1.0, |slow| slow.factor);
        let [seed, job, life, step, ..] = microbatch;
        let key = [seed, job, life, step, rank as u64, index as u64, pass.microbatch as u64, pass.chunk as u64];
        let of_chunk = phase.duration.0 as f64 / pipeline.chunks as f64 * length * weight * slow;
        self.stretched(plan, (of_chunk as i64 + Random::keyed(&key).around(phase.jitter.0)).max(GAP_NS))
    }

    /// The passes of one rank, and its waiting between them.
    fn run_stage(&mut self, plan: &Plan, pipeline: &Pipeline, (rank, begin_ns): (usize, i64), runs: &[Run]) {
        let (Some((_, forward)), Some((_, backward))) = (plan.pass(true), plan.pass(false)) else { return };
        let (chunk_bytes, mut held) = (pipeline.chunk_bytes(&plan.job), 0_u64);
        for run in runs {
            let (from_ns, to_ns) = (begin_ns + run.begin_ns, begin_ns + run.end_ns);
            let waits_ns = (self.ranks[rank].at_ns, from_ns - GAP_NS);
            if waits_ns.1 - waits_ns.0 > GAP_NS && pipeline.marks_waits {
                self.say(rank, waits_ns.0, EventType::Begin, Kind::Phase, Some(&pipeline.wait));
                self.say(rank, waits_ns.1, EventType::End, Kind::Phase, Some(&pipeline.wait));
            }
            held = if run.pass.is_forward { held + 1 } else { held.saturating_sub(1) };
            let phase = if run.pass.is_forward { forward } else { backward };
            let level = plan.job.base.0 + chunk_bytes * held;
            self.run_pass((rank, phase), (level, forward.shape), (from_ns, to_ns));
        }
    }

    /// One pass: a forward pass keeps its activations until the backward pass has used them.
    fn run_pass(&mut self, (rank, phase): (usize, &Phase), (level, shape): (u64, Shape), (from_ns, to_ns): (i64, i64)) {
        self.change(rank, from_ns, |state| state.busy_with(phase));
        self.say(rank, from_ns, EventType::Begin, Kind::Phase, Some(&phase.name));
        let lasting_ns = to_ns - from_ns;
        self.move_to(rank, level, shape, (from_ns + lasting_ns / 20, lasting_ns * 17 / 20));
        self.change(rank, to_ns, State::rest);
        self.say(rank, to_ns, EventType::End, Kind::Phase, Some(&phase.name));
        self.ranks[rank].at_ns = to_ns + GAP_NS;
    }
}

impl Plan {
    /// The phase of a pass, with its position.
    fn pass(&self, is_forward: bool) -> Option<(usize, &Phase)> {
        let name = if is_forward { FORWARD } else { BACKWARD };
        self.job.phases.iter().enumerate().find(|(_, phase)| phase.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipeline(stages: usize, microbatches: usize, chunks: usize, schedule: Schedule) -> Pipeline {
        let text = format!("stages = {stages}\nmicrobatches = {microbatches}\nchunks = {chunks}\n");
        Pipeline { schedule, ..toml::from_str(&text).expect("a pipeline") }
    }

    /// A forward pass takes a second, a backward pass two.
    fn runs(pipeline: &Pipeline) -> Vec<Vec<Run>> {
        let chunks = i64::try_from(pipeline.chunks).expect("few");
        pipeline.runs(|_, pass| if pass.is_forward { 1_000_000_000 } else { 2_000_000_000 } / chunks)
    }

    fn seconds(runs: &[Vec<Run>]) -> i64 {
        let last_ns = runs.iter().flatten().map(|run| run.end_ns).max().expect("runs");
        last_ns / 1_000_000_000
    }

    #[test]
    fn a_pass_begins_after_the_one_that_it_needs_and_each_runs_once() {
        use Schedule::{Gpipe, OneForwardOneBackward};
        for (stages, microbatches, chunks, schedule) in
            [(4, 8, 1, OneForwardOneBackward), (4, 8, 2, OneForwardOneBackward), (3, 5, 1, Gpipe), (2, 1, 1, Gpipe)]
        {
            let pipeline = pipeline(stages, microbatches, chunks, schedule);
            let runs = runs(&pipeline);
            let ends: BTreeMap<Pass, i64> = runs.iter().flatten().map(|run| (run.pass, run.end_ns)).collect();
            assert_eq!(ends.len(), 2 * stages * chunks * microbatches);
            for run in runs.iter().flatten() {
                let Pass { is_forward, chunk, .. } = run.pass;
                let needed = match (is_forward, chunk) {
                    (true, 0) => continue,
                    (true, _) => Pass { chunk: chunk - 1, ..run.pass },
                    (false, _) if chunk + 1 == stages * chunks => Pass { is_forward: true, ..run.pass },
                    (false, _) => Pass { chunk: chunk + 1, ..run.pass },
                };
                assert!(ends[&needed] <= run.begin_ns, "{run:?} of {pipeline:?}");
            }
            assert!(runs.iter().all(|of| of.windows(2).all(|pair| pair[0].end_ns < pair[1].begin_ns)));
        }
    }

    /// The known lengths: (microbatches + stages − 1) rounds of 3 s, and with chunks a shorter way through the stages.
    #[test]
    fn a_pipeline_takes_as_long_as_its_bubbles_say() {
        use Schedule::{Gpipe, OneForwardOneBackward};
        assert_eq!(seconds(&runs(&pipeline(4, 8, 1, OneForwardOneBackward))), (8 + 3) * 3);
        assert_eq!(seconds(&runs(&pipeline(4, 8, 1, Gpipe))), (8 + 3) * 3);
        let interleaved = seconds(&runs(&pipeline(4, 8, 2, OneForwardOneBackward)));
        assert!((8 * 3 + 3..(8 + 3) * 3).contains(&interleaved), "{interleaved}");
    }

    #[test]
    fn a_stage_holds_as_many_microbatches_as_its_schedule_lets_it() {
        let most = |schedule| -> Vec<usize> {
            let held = |runs: &Vec<Run>| {
                let mut held = 0_usize;
                let held = runs.iter().map(|run| {
                    held = if run.pass.is_forward { held + 1 } else { held - 1 };
                    held
                });
                held.max().expect("runs")
            };
            runs(&pipeline(4, 8, 1, schedule)).iter().map(held).collect()
        };
        assert_eq!(most(Schedule::OneForwardOneBackward), [4, 3, 2, 1]);
        assert_eq!(most(Schedule::Gpipe), [8; 4]);
    }
}
