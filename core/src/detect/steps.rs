//! Whole steps, put together from the phases that ended inside them.
//!
//! Enters: attributed steps and phases in the order in which they were attributed. Leaves: one [`Step`] for each step
//! that ended, with its phases, its memory and what its allocator's counters did. Invariants: bounded by rank and by
//! phases of a step; a rank that begins its numbers anew, or was silent for long, begins a new run.

use crate::clock::SECOND_NS;
use crate::phases::{Attributed, PhaseMemory, RankKey};
use crate::wire::{Kind, Memory};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Phases of one step that are looked at; more are left out.
const MOST_PHASES: usize = 512;
/// Ranks that are followed; the daemon knows no more.
const MOST_RANKS: usize = 1024;
/// Steps that begin this long after the last one ended are another run.
const PAUSE_NS: i64 = 60 * SECOND_NS;

/// One phase of a step.
#[derive(Debug, Clone)]
pub(super) struct Phase {
    pub name: Arc<str>,
    pub begin_ns: i64,
    pub end_ns: i64,
    /// Retries of the allocator so far, at its begin and at its end.
    retries: [Option<u64>; 2],
}

/// One step that ended.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub key: RankKey,
    pub number: Option<u64>,
    /// How many steps of this run ended before it.
    pub nth: u64,
    pub begin_ns: i64,
    pub end_ns: i64,
    /// Positions of its GPUs.
    pub gpus: Vec<usize>,
    pub phases: Vec<Phase>,
    /// The highest memory on any of its GPUs, bytes.
    pub peak_bytes: Option<u64>,
    /// How far memory rose above its begin, bytes, on the GPU where it rose most.
    pub rise_bytes: Option<u64>,
    /// Time in which no kernel ran, on the GPU that was idle most, nanoseconds.
    pub idle_ns: Option<i64>,
    /// Retries of the allocator within the step; `None` where the job does not tell.
    pub retries: Option<u64>,
}

impl Step {
    /// How long it took.
    pub fn length_ns(&self) -> i64 {
        self.end_ns - self.begin_ns
    }

    /// Time in phases of these names; `None` where the step has none of them.
    pub fn time_in(&self, names: &[String]) -> Option<i64> {
        let mut phases = self.phases.iter().filter(|phase| is_one_of(&phase.name, names)).peekable();
        phases.peek()?;
        Some(phases.map(|phase| phase.end_ns - phase.begin_ns).sum())
    }

    /// The phase that was open at a moment, the innermost.
    pub fn phase_at(&self, at_ns: i64) -> Option<&Phase> {
        let open = self.phases.iter().filter(|phase| phase.begin_ns <= at_ns && at_ns <= phase.end_ns);
        open.max_by_key(|phase| phase.begin_ns)
    }

    /// `step 7`, or `a step` where it has no number.
    pub fn title(&self) -> String {
        title(self.number)
    }
}

/// `step 7`, or `a step` where it has no number.
pub(super) fn title(number: Option<u64>) -> String {
    number.map_or_else(|| "a step".to_owned(), |number| format!("step {number}"))
}

/// Whether a phase's name is one of these.
pub(super) fn is_one_of(name: &str, names: &[String]) -> bool {
    names.iter().any(|one| one == name)
}

/// What is known of each rank's step under way.
#[derive(Debug, Default)]
pub(super) struct Steps {
    ranks: BTreeMap<RankKey, Under>,
}

#[derive(Debug, Default)]
struct Under {
    phases: Vec<Phase>,
    steps: u64,
    last_number: Option<u64>,
    last_end_ns: i64,
}

impl Steps {
    /// Takes what ended next; returns the whole step where that is one.
    pub fn take(&mut self, attributed: &Attributed) -> Option<Step> {
        let ended = &attributed.ended;
        let key = (Arc::clone(&ended.job), ended.rank);
        if self.ranks.len() >= MOST_RANKS && !self.ranks.contains_key(&key) {
            return None;
        }
        let under = self.ranks.entry(key.clone()).or_default();
        let (begin_ns, end_ns) = (ended.open.begin_ns, ended.end_ns);
        match ended.open.kind {
            Kind::Layer => None,
            Kind::Phase => {
                if under.phases.len() < MOST_PHASES {
                    let retries = [ended.open.memory, ended.memory].map(|memory| memory?.alloc_retries);
                    under.phases.push(Phase { name: Arc::clone(&ended.open.name), begin_ns, end_ns, retries });
                }
                None
            }
            Kind::Step => {
                let phases = under.close(begin_ns, end_ns, ended.open.step);
                let nth = under.steps;
                under.steps += 1;
                let retries = rise(ended.open.memory, ended.memory, &phases);
                Some(Step {
                    key,
                    number: ended.open.step,
                    nth,
                    begin_ns,
                    end_ns,
                    phases,
                    retries,
                    ..memory(attributed)
                })
            }
        }
    }

    /// Forgets ranks of which nothing ended since a moment.
    pub fn forget_before(&mut self, before_ns: i64) {
        self.ranks.retain(|_, under| {
            under.last_end_ns >= before_ns || under.phases.last().is_some_and(|phase| phase.end_ns >= before_ns)
        });
    }
}

impl Under {
    /// The phases of the step that ends, and whether it begins a new run.
    fn close(&mut self, begin_ns: i64, end_ns: i64, number: Option<u64>) -> Vec<Phase> {
        let again = number.is_some() && number <= self.last_number;
        if again || begin_ns - self.last_end_ns > PAUSE_NS {
            self.steps = 0;
        }
        (self.last_number, self.last_end_ns) = (number, end_ns);
        let (inside, rest): (Vec<Phase>, Vec<Phase>) =
            self.phases.drain(..).partition(|phase| phase.begin_ns >= begin_ns && phase.end_ns <= end_ns);
        self.phases = rest.into_iter().filter(|phase| phase.end_ns > end_ns).collect();
        inside
    }
}

/// How far the counter of retries rose, by the step's own events, or else by its phases'.
fn rise(begin: Option<Memory>, end: Option<Memory>, phases: &[Phase]) -> Option<u64> {
    let of_phases = |end: usize| phases.iter().filter_map(move |phase| phase.retries[end]);
    let begin = begin.and_then(|memory| memory.alloc_retries).or_else(|| of_phases(0).min())?;
    let end = end.and_then(|memory| memory.alloc_retries).or_else(|| of_phases(1).max())?;
    end.checked_sub(begin)
}

/// A step with nothing but its memory.
fn memory(attributed: &Attributed) -> Step {
    let gpus = &attributed.gpus;
    let rise = |gpu: &PhaseMemory| Some(gpu.peak_bytes?.saturating_sub(gpu.begin_bytes?));
    #[allow(clippy::cast_possible_truncation, reason = "nanoseconds of a step")]
    let idle = |gpu: &PhaseMemory| gpu.usage.idle_seconds.map(|seconds| (seconds * 1e9) as i64);
    Step {
        key: (Arc::clone(&attributed.ended.job), attributed.ended.rank),
        number: None,
        nth: 0,
        begin_ns: 0,
        end_ns: 0,
        gpus: gpus.iter().map(|gpu| gpu.gpu).collect(),
        phases: Vec::new(),
        peak_bytes: gpus.iter().filter_map(|gpu| gpu.peak_bytes).max(),
        rise_bytes: gpus.iter().filter_map(rise).max(),
        idle_ns: gpus.iter().filter_map(idle).max(),
        retries: None,
    }
}
