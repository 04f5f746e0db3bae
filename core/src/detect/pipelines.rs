//! Pipeline-parallel jobs made by a small simulator, for the tests of what is reported on ranks that are compared with each
//! other: schedules with bubbles, interleaved or not, with stages, sequences and workers that differ, in many seeds.

use super::compare::Compare;
use super::finding::{FindingKind, Sign};
use super::hand::Hand;
use super::steps::{Phase, Step};
use super::view::RankNow;
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::mesh::Mesh;
use crate::phases::hand::key;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const STEPS: u64 = 30;

/// A job of some stages, each in some replicas.
#[derive(Debug, Clone)]
struct Pipeline {
    stages: usize,
    replicas: usize,
    microbatches: usize,
    /// Model chunks of each stage: more than one is an interleaved schedule.
    chunks: usize,
    /// All forwards before the first backward.
    is_gpipe: bool,
    /// How long a stage takes beside the others, and a rank (replica, stage).
    stage_weights: Vec<f64>,
    slow: Option<(usize, usize, f64)>,
    /// How far the lengths of microbatches differ: each is 1 ± this.
    spread: f64,
    forward_ms: f64,
    seed: u64,
    marks: Marks,
    has_mesh: bool,
    /// Numbers of ranks are given in this order.
    is_stage_major: bool,
}

/// Which communication is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marks {
    All,
    Collectives,
    None,
}

impl Default for Pipeline {
    fn default() -> Self {
        Self {
            stages: 4,
            replicas: 2,
            microbatches: 8,
            chunks: 1,
            is_gpipe: false,
            stage_weights: Vec::new(),
            slow: None,
            spread: 0.02,
            forward_ms: 20.0,
            seed: 1,
            marks: Marks::All,
            has_mesh: true,
            is_stage_major: true,
        }
    }
}

/// An operation: whether it is a forward, its chunk of the whole model, its microbatch.
type Op = (bool, usize, usize);
type Intervals = Vec<(&'static str, f64, f64)>;

impl Pipeline {
    fn random(&self, key: &[u64]) -> f64 {
        let mut state = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for word in key {
            state = (state ^ word).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            state ^= state >> 29;
        }
        #[allow(clippy::cast_precision_loss, reason = "53 bits")]
        let share = (state >> 11) as f64 / (1_u64 << 53) as f64;
        2.0 * share - 1.0
    }

    fn rank(&self, replica: usize, stage: usize) -> usize {
        if self.is_stage_major { stage * self.replicas + replica } else { replica * self.stages + stage }
    }

    fn ms(&self, step: u64, replica: usize, op: Op) -> f64 {
        let (is_forward, chunk, microbatch) = op;
        let stage = chunk % self.stages;
        let length = 1.0 + self.spread * self.random(&[step, replica as u64, microbatch as u64]);
        let noise = 1.0 + 0.02 * self.random(&[step, replica as u64, microbatch as u64, chunk as u64, 7]);
        let weight = self.stage_weights.get(stage).copied().unwrap_or(1.0);
        let slow = self.slow.filter(|slow| (slow.0, slow.1) == (replica, stage)).map_or(1.0, |slow| slow.2);
        #[allow(clippy::cast_precision_loss, reason = "a few chunks")]
        let chunks = self.chunks as f64;
        self.forward_ms / chunks * length * noise * weight * slow * if is_forward { 1.0 } else { 2.0 }
    }

    /// When each operation of one replica begins and ends: each stage takes what it can, a backward before a forward.
    fn schedule(&self, step: u64, replica: usize) -> Vec<Vec<(Op, f64, f64)>> {
        let last = self.stages * self.chunks - 1;
        let mut done: BTreeMap<Op, f64> = BTreeMap::new();
        let mut stages: Vec<Vec<(Op, f64, f64)>> = vec![Vec::new(); self.stages];
        let mut next: BTreeMap<(bool, usize), usize> = BTreeMap::new();
        let mut counts = vec![[0_usize; 2]; self.stages];
        let all = self.stages * self.chunks * self.microbatches * 2;
        while done.len() < all {
            let mut best: Option<(f64, u8, usize, Op)> = None;
            for stage in 0..self.stages {
                let free = stages[stage].last().map_or(0.0, |of| of.2);
                for chunk in (stage..=last).step_by(self.stages) {
                    for is_forward in [false, true] {
                        let of = |at: usize| (is_forward, chunk, at);
                        let at = next.get(&(is_forward, chunk)).copied().unwrap_or(0);
                        if at == self.microbatches {
                            continue;
                        }
                        let before = match (is_forward, chunk) {
                            (true, 0) => Some(&0.0),
                            (true, chunk) => done.get(&(true, chunk - 1, at)),
                            (false, chunk) if chunk == last => done.get(&(true, chunk, at)),
                            (false, chunk) => done.get(&(false, chunk + 1, at)),
                        };
                        let [backwards, forwards] = counts[stage];
                        let room = self.stages - stage;
                        let is_full = self.chunks == 1 && is_forward && forwards - backwards >= room;
                        let is_early = !is_forward && forwards < self.microbatches * self.chunks;
                        if (self.is_gpipe && is_early) || (!self.is_gpipe && is_full) {
                            continue;
                        }
                        let Some(before) = before else { continue };
                        let one = (free.max(*before), u8::from(is_forward), stage, of(at));
                        best =
                            Some(best.map_or(one, |best| if (one.0, one.1) < (best.0, best.1) { one } else { best }));
                    }
                }
            }
            let (begin, _, stage, op) = best.expect("something can go on");
            let end = begin + self.ms(step, replica, op);
            done.insert(op, end);
            *next.entry((op.0, op.1)).or_default() += 1;
            counts[stage][usize::from(op.0)] += 1;
            stages[stage].push((op, begin, end));
        }
        stages
    }

    /// What each rank does in a step, in milliseconds.
    fn step(&self, step: u64) -> (BTreeMap<usize, Intervals>, f64) {
        let replicas: Vec<_> = (0..self.replicas).map(|replica| self.schedule(step, replica)).collect();
        let mut ranks = BTreeMap::new();
        let ends: Vec<f64> = (0..self.stages)
            .map(|stage| replicas.iter().filter_map(|of| of[stage].last()).map(|of| of.2).fold(0.0, f64::max) + 5.0)
            .collect();
        let together = ends.iter().copied().fold(0.0, f64::max) + 1.0;
        for (replica, stages) in replicas.iter().enumerate() {
            for (stage, ops) in stages.iter().enumerate() {
                let (mut at, mut said) = (0.0, Intervals::new());
                for ((is_forward, ..), begin, end) in ops {
                    if *begin > at && self.marks == Marks::All {
                        said.push(("comm", at, *begin));
                    }
                    said.push((if *is_forward { "forward" } else { "backward" }, *begin, *end));
                    at = *end;
                }
                if self.marks != Marks::None {
                    said.push(("comm", at, ends[stage]));
                    said.push(("comm", ends[stage], together));
                }
                said.push(("optimizer", together, together + 3.0));
                ranks.insert(self.rank(replica, stage), said);
            }
        }
        (ranks, together + 3.0)
    }

    fn ranks(&self) -> Vec<RankNow> {
        let mut ranks = Vec::new();
        for replica in 0..self.replicas {
            for stage in 0..self.stages {
                let axes = [("dp".to_owned(), replica), ("pp".to_owned(), stage)];
                let axes = axes.into_iter().map(|(name, at)| (name, u32::try_from(at).expect("small"))).collect();
                let mesh = self.has_mesh.then(|| Arc::new(Mesh::checked(axes).expect("good")));
                let number = self.rank(replica, stage);
                ranks.push(RankNow { key: key(number), mesh, ..Hand::rank_on(number) });
            }
        }
        ranks.sort_by(|one, other| one.key.cmp(&other.key));
        ranks
    }

    /// What is reported on the job as a whole, or on the ranks of one node.
    fn told(&self, node: impl Fn(usize) -> bool) -> Told {
        let mut hand = Hand::new(0);
        hand.ranks = self.ranks().into_iter().filter(|rank| node(rank.key.1 as usize)).collect();
        let (mut peers, mut told, mut at_ns) = (Compare::default(), Told::default(), SECOND_NS);
        for nth in 0..STEPS {
            let (ranks, length) = self.step(nth);
            let steps: Vec<Step> = ranks
                .into_iter()
                .filter(|(rank, _)| node(*rank))
                .map(|(rank, said)| a_step(rank, nth, at_ns, &said, length))
                .collect();
            let signs = hand.steps_end(&mut peers, steps);
            told.take(nth, &signs);
            told.compared += usize::from((0..64).any(|rank| Hand::ratios(&peers, rank).compared == Some(true)));
            at_ns += ns(length) + MILLISECOND_NS;
        }
        told
    }

    fn told_whole(&self) -> Told {
        self.told(|_| true)
    }
}

fn ns(ms: f64) -> i64 {
    #[allow(clippy::cast_possible_truncation, reason = "times of seconds")]
    let ns = (ms * 1e6) as i64;
    ns
}

fn a_step(rank: usize, nth: u64, begin_ns: i64, said: &Intervals, length: f64) -> Step {
    let phase = |(name, begin, end): &(&str, f64, f64)| Phase {
        name: (*name).into(),
        begin_ns: begin_ns + ns(*begin),
        end_ns: begin_ns + ns(*end),
        retries: [None; 2],
    };
    let phases = said.iter().map(phase).collect();
    Step { phases, end_ns: begin_ns + ns(length), ..Hand::step(rank, nth, begin_ns, &[]) }
}

/// What was reported in all steps.
#[derive(Debug, Default)]
struct Told {
    /// Accused ranks, with the first step in which they are.
    accused: BTreeMap<u32, u64>,
    kinds: BTreeSet<&'static str>,
    stages: BTreeSet<u64>,
    slowdowns: Vec<f64>,
    /// Steps in which any rank was compared.
    compared: usize,
}

impl Told {
    fn take(&mut self, nth: u64, signs: &[Sign]) {
        for sign in signs {
            self.kinds.insert(sign.kind.label());
            if sign.kind == FindingKind::StageImbalance {
                self.stages.extend(sign.code);
            }
            if sign.kind == FindingKind::Straggler {
                self.accused.entry(sign.subject.rank.expect("a rank")).or_insert(nth);
            }
            let slowdown = sign.evidence.iter().find(|one| one.name == "slowdown_ratio");
            self.slowdowns.extend(slowdown.map(|one| one.value));
        }
    }

    fn accused(&self) -> Vec<u32> {
        self.accused.keys().copied().collect()
    }
}

/// Pipelines of many shapes without a slow worker.
fn sound() -> Vec<Pipeline> {
    let mut all = Vec::new();
    for seed in 1..=3 {
        for (stages, replicas, microbatches, chunks, is_gpipe) in
            [(2, 4, 8, 1, false), (4, 2, 8, 1, false), (4, 1, 12, 1, false), (4, 2, 6, 2, false), (4, 2, 8, 1, true)]
        {
            let base = Pipeline { stages, replicas, microbatches, chunks, is_gpipe, seed, ..Pipeline::default() };
            let mut uneven = vec![1.0; stages];
            uneven[stages - 1] = 1.7;
            all.push(base.clone());
            all.push(Pipeline { stage_weights: uneven.clone(), is_stage_major: seed % 2 == 0, ..base.clone() });
            all.push(Pipeline { spread: 0.6, ..base.clone() });
            all.push(Pipeline { spread: 0.5, stage_weights: uneven, forward_ms: 3.0, ..base });
        }
    }
    all
}

#[test]
fn a_pipeline_without_a_slow_worker_accuses_nobody_with_whatever_marks() {
    for pipeline in sound() {
        for marks in [Marks::All, Marks::Collectives, Marks::None] {
            for has_mesh in [true, false] {
                let pipeline = Pipeline { marks, has_mesh, ..pipeline.clone() };
                let told = pipeline.told_whole();
                assert_eq!(told.accused(), Vec::<u32>::new(), "{pipeline:?}");
                let node = pipeline.told(|rank| rank < 4);
                assert_eq!(node.accused(), Vec::<u32>::new(), "a node of {pipeline:?}");
            }
        }
    }
}

#[test]
fn a_slow_worker_of_a_pipeline_is_accused_alone_within_eight_steps() {
    for seed in 1..=2 {
        for (stage, replica) in [(0, 0), (1, 1), (3, 0)] {
            for (chunks, is_gpipe) in [(1, false), (2, false), (1, true)] {
                let slow = Some((replica, stage, 1.8));
                let pipeline = Pipeline { slow, chunks, is_gpipe, seed, ..Pipeline::default() };
                let rank = u32::try_from(pipeline.rank(replica, stage)).expect("small");
                let told = pipeline.told_whole();
                assert_eq!(told.accused.into_iter().collect::<Vec<_>>(), [(rank, 7)], "{pipeline:?}");
                assert_eq!(told.kinds.into_iter().collect::<Vec<_>>(), ["straggler"], "{pipeline:?}");
                // The node that has this stage accuses it, the one that only waits accuses nobody.
                let node = pipeline.told(|other| other / 2 == rank as usize / 2);
                assert_eq!(node.accused(), [rank], "{pipeline:?}");
                let waiting = pipeline.told(|other| other / 2 != rank as usize / 2);
                assert_eq!(waiting.accused(), Vec::<u32>::new(), "{pipeline:?}");
            }
        }
    }
}

#[test]
fn a_long_stage_and_uneven_lengths_are_told_as_what_they_are() {
    let long = Pipeline { stage_weights: vec![1.0, 1.0, 1.0, 1.7], ..Pipeline::default() };
    let told = long.told_whole();
    assert_eq!((told.kinds.iter().copied().collect::<Vec<_>>(), told.stages.len()), (vec!["stage_imbalance"], 1));
    let uneven = Pipeline { replicas: 8, stages: 2, microbatches: 3, spread: 0.9, ..Pipeline::default() };
    assert_eq!(uneven.told_whole().kinds.into_iter().collect::<Vec<_>>(), ["uneven_work"]);
    let both = Pipeline { stage_weights: vec![1.0, 1.6], ..uneven };
    assert_eq!(both.told_whole().kinds.into_iter().collect::<Vec<_>>(), ["stage_imbalance", "uneven_work"]);
    assert!(Pipeline { marks: Marks::None, ..both }.told_whole().kinds.is_empty(), "without marks of communication");
}

/// What balancing would win is what the same job takes with even stages.
#[test]
fn the_slowdown_is_within_a_twentieth_of_what_even_work_takes() {
    for (stages, microbatches) in [(4, 8), (4, 16), (2, 8)] {
        let mut stage_weights = vec![1.0; stages];
        stage_weights[stages - 1] = 1.6;
        #[allow(clippy::cast_precision_loss, reason = "few stages")]
        let mean = stage_weights.iter().sum::<f64>() / stages as f64;
        let long = Pipeline { stages, microbatches, stage_weights, spread: 0.0, ..Pipeline::default() };
        let even = Pipeline { stage_weights: vec![mean; stages], ..long.clone() };
        let truth = long.step(9).1 / even.step(9).1;
        let told = long.told_whole();
        let slowdown = told.slowdowns.last().copied().expect("told");
        assert!((slowdown / truth - 1.0).abs() < 0.05, "{slowdown} beside {truth}: {long:?}");
    }
}
