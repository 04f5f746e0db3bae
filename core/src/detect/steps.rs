//! Whole steps, put together from the phases that ended inside them.
//!
//! Enters: attributed steps and phases in the order in which they were attributed. Leaves: one [`Step`] for each step
//! that ended, with its phases, its memory and its allocator's retries. Invariants: the numbers of ranks, of phases of a step and
//! of phases of all current steps are bounded, and where these are too many, the owner that has most loses its own; a rank whose
//! step numbers begin again, or that has paused for long, begins a new run.

use super::settings::Settings;
use crate::clock::SECOND_NS;
use crate::jobs::{Attributes, attribute};
use crate::phases::{Attributed, PhaseMemory, RankKey};
use crate::shares::{heaviest, largest};
use crate::wire::{Kind, Memory, Scalar};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Phases of one step that are looked at; more are left out.
const MOST_PHASES: usize = 512;
/// Phases of all current steps.
pub const MOST_ALL_PHASES: usize = 16 << 10;
/// The most ranks that the daemon knows.
const KNOWN_RANKS: usize = 1024;
/// Ranks that are followed: those that the daemon knows, and as many that have ended and may come back.
const MOST_RANKS: usize = 2 * KNOWN_RANKS;
/// Steps that begin this long after the last one ended are another run.
const PAUSE_NS: i64 = 60 * SECOND_NS;

/// More seconds than this in the garbage collector are no number of a step.
const MOST_COLLECTED_S: f64 = 86_400.0;

/// Bytes of the phases of current steps, with room for as many again, and of steps that wait for those of other ranks.
pub const MOST_PHASES_BYTES: usize = 3 * MOST_ALL_PHASES * size_of::<Phase>();

/// One phase of a step.
#[derive(Debug, Clone)]
pub(super) struct Phase {
    pub name: Arc<str>,
    pub begin_ns: i64,
    pub end_ns: i64,
    /// Retries of the allocator so far, at its begin and at its end.
    pub retries: [Option<u64>; 2],
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
    /// Names of phases between the step before and this one.
    pub before: Vec<Arc<str>>,
    /// The highest memory on any of its GPUs, bytes.
    pub peak_bytes: Option<u64>,
    /// How far memory rose above its begin, bytes, on the GPU where it rose most.
    pub rise_bytes: Option<u64>,
    /// Time in which no kernel ran, on the GPU that was idle most, nanoseconds.
    pub idle_ns: Option<i64>,
    /// What its process held outside its allocator at its end, or that of its last phase that shows it, bytes, on the GPU where that was
    /// most.
    pub outside_bytes: Option<u64>,
    /// Retries of the allocator within the step; `None` if the job does not send them.
    pub retries: Option<u64>,
    /// How long Python's garbage collector stopped its process, nanoseconds; `None` if the job does not say.
    pub collected_ns: Option<i64>,
    /// Whether all of its phases are here.
    pub is_whole: bool,
}

impl Step {
    /// How long it took.
    pub fn length_ns(&self) -> i64 {
        self.end_ns - self.begin_ns
    }

    /// Whether it is past the warm-up and trains only, so that its length shows how long steps take.
    pub fn is_usual(&self, settings: &Settings) -> bool {
        self.nth >= settings.warm_up_steps && self.time_in(&settings.refill_phases).is_none()
    }

    /// Time in phases of these names; `None` where the step has none of them.
    pub fn time_in(&self, names: &[String]) -> Option<i64> {
        let mut phases = self.phases.iter().filter(|phase| is_one_of(&phase.name, names)).peekable();
        phases.peek()?;
        Some(phases.map(|phase| phase.end_ns - phase.begin_ns).sum())
    }

    /// Whether some of the phases of these names ran while others were open.
    pub fn overlaps(&self, names: &[String]) -> bool {
        let (named, others): (Vec<&Phase>, Vec<&Phase>) =
            self.phases.iter().partition(|phase| is_one_of(&phase.name, names));
        let meets = |one: &Phase| others.iter().any(|other| other.begin_ns < one.end_ns && one.begin_ns < other.end_ns);
        named.into_iter().any(meets)
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

/// ` in forward of step 7`, with as much of it as is known.
pub(super) fn place(phase: Option<&str>, step: Option<u64>) -> String {
    match (phase, step) {
        (Some(phase), Some(_)) => format!(" in {phase} of {}", title(step)),
        (Some(phase), None) => format!(" in {phase}"),
        (None, Some(_)) => format!(" in {}", title(step)),
        (None, None) => String::new(),
    }
}

/// Whether a phase's name is one of these.
pub(super) fn is_one_of(name: &str, names: &[String]) -> bool {
    names.iter().any(|one| one == name)
}

/// What is known of each rank's current step.
#[derive(Debug, Default)]
pub(super) struct Steps {
    ranks: BTreeMap<RankKey, CurrentStep>,
    /// Phases of all ranks.
    phases: usize,
}

#[derive(Debug, Default)]
struct CurrentStep {
    phases: Vec<Phase>,
    /// Outside the allocator, at the end of the last phase that shows it.
    outside_bytes: Option<u64>,
    /// Whether the current step has more phases than are kept.
    left_out: bool,
    steps: u64,
    last_number: Option<u64>,
    last_end_ns: i64,
    /// When its last phase ended, kept or not.
    last_phase_ns: i64,
}

impl Steps {
    /// Takes what ended next. If it is a step, returns it with its phases.
    pub fn take(&mut self, attributed: &Attributed) -> Option<Step> {
        let ended = &attributed.ended;
        let key = (ended.job.clone(), ended.rank);
        if self.ranks.len() >= MOST_RANKS && !self.ranks.contains_key(&key) {
            self.forget_one();
        }
        let under = self.ranks.entry(key).or_default();
        let (begin_ns, end_ns) = (ended.open.begin_ns, ended.end_ns);
        match ended.open.kind {
            Kind::Layer => None,
            Kind::Phase => {
                under.left_out |= under.phases.len() >= MOST_PHASES;
                under.last_phase_ns = end_ns;
                under.outside_bytes = outside(attributed).or(under.outside_bytes);
                if !under.left_out {
                    let retries = [ended.open.memory, ended.memory].map(|memory| memory?.alloc_retries);
                    under.phases.push(Phase { name: Arc::clone(&ended.open.name), begin_ns, end_ns, retries });
                    self.phases += 1;
                }
                if self.phases > MOST_ALL_PHASES {
                    self.give_way();
                }
                None
            }
            Kind::Step => {
                let is_whole = !std::mem::take(&mut under.left_out);
                let had = under.phases.len();
                let (before, phases) = under.close(begin_ns, end_ns, ended.open.step);
                self.phases -= had - under.phases.len();
                let nth = under.steps;
                under.steps += 1;
                let retries = rise(ended.open.memory, ended.memory, &phases);
                let outside_bytes = outside(attributed).or(under.outside_bytes.take());
                Some(Step {
                    number: ended.open.step,
                    nth,
                    begin_ns,
                    end_ns,
                    phases,
                    before,
                    outside_bytes,
                    retries,
                    is_whole,
                    ..memory(attributed)
                })
            }
        }
    }

    /// Whether no rank is followed.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Forgets ranks of which nothing ended since a moment, and, where there are many, those that have ended.
    pub fn forget_before(&mut self, before_ns: i64, knows: impl Fn(&RankKey) -> bool) {
        let are_many = self.ranks.len() > KNOWN_RANKS;
        self.ranks.retain(|key, under| under.last_ns() >= before_ns && (!are_many || knows(key)));
        self.phases = self.ranks.values().map(|under| under.phases.len()).sum();
    }

    /// Forgets the rank of which nothing ended for the longest, of the owner that has most ranks.
    fn forget_one(&mut self) {
        let Some((owner, _)) = largest(self.ranks.keys().map(|key| key.0.scope())) else { return };
        let own = self.ranks.iter().filter(|(key, _)| key.0.scope() == owner);
        if let Some(key) = own.min_by_key(|(_, under)| under.last_ns()).map(|(key, _)| key.clone()) {
            self.phases -= self.ranks.remove(&key).map_or(0, |under| under.phases.len());
        }
    }

    /// Forgets the phases of the rank that has most, of the owner that has most.
    fn give_way(&mut self) {
        let each = self.ranks.iter().map(|(key, under)| (key.0.scope(), under.phases.len()));
        let Some(owner) = heaviest(each).map(|(owner, _)| owner.clone()) else { return };
        let own = self.ranks.iter_mut().filter(|(key, _)| *key.0.scope() == owner);
        if let Some((_, under)) = own.max_by_key(|(_, under)| under.phases.len()) {
            self.phases -= std::mem::take(&mut under.phases).len();
            under.left_out = true;
        }
    }
}

impl CurrentStep {
    /// Returns the names of the phases between the last step and the one that ends, and the phases inside this. Restarts the count
    /// of steps if the step begins a new run.
    fn close(&mut self, begin_ns: i64, end_ns: i64, number: Option<u64>) -> (Vec<Arc<str>>, Vec<Phase>) {
        let again = number.is_some() && number <= self.last_number;
        if again || self.has_paused(begin_ns) {
            self.steps = 0;
        }
        let last_end_ns = std::mem::replace(&mut self.last_end_ns, end_ns);
        self.last_number = number;
        let (inside, rest): (Vec<Phase>, Vec<Phase>) =
            self.phases.drain(..).partition(|phase| phase.begin_ns >= begin_ns && phase.end_ns <= end_ns);
        let mut before: Vec<Arc<str>> = Vec::new();
        for phase in rest {
            if phase.end_ns > end_ns {
                self.phases.push(phase);
            } else if phase.begin_ns >= last_end_ns && phase.end_ns <= begin_ns && !before.contains(&phase.name) {
                before.push(phase.name);
            }
        }
        (before, inside)
    }
}

impl CurrentStep {
    /// When something of it ended last.
    fn last_ns(&self) -> i64 {
        self.last_end_ns.max(self.last_phase_ns)
    }

    /// Whether nothing was marked for long between the last step and one that begins now. An evaluation of minutes is no pause.
    fn has_paused(&self, begin_ns: i64) -> bool {
        if begin_ns - self.last_end_ns <= PAUSE_NS {
            return false;
        }
        let before = self.phases.iter().filter(|phase| phase.begin_ns < begin_ns);
        let mut between: Vec<(i64, i64)> = before.map(|phase| (phase.begin_ns, phase.end_ns)).collect();
        between.push((begin_ns, begin_ns));
        between.sort_unstable();
        let mut marked_ns = self.last_end_ns;
        between.into_iter().any(|(from_ns, to_ns)| {
            let is_pause = from_ns - marked_ns > PAUSE_NS;
            marked_ns = marked_ns.max(to_ns);
            is_pause
        })
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
        key: (attributed.ended.job.clone(), attributed.ended.rank),
        number: None,
        nth: 0,
        begin_ns: 0,
        end_ns: 0,
        gpus: gpus.iter().map(|gpu| gpu.gpu).collect(),
        phases: Vec::new(),
        before: Vec::new(),
        peak_bytes: gpus.iter().filter_map(|gpu| gpu.peak_bytes).max(),
        rise_bytes: gpus.iter().filter_map(rise).max(),
        idle_ns: gpus.iter().filter_map(idle).max(),
        outside_bytes: None,
        retries: None,
        collected_ns: attributed.ended.open.attributes.as_ref().and_then(collected),
        is_whole: true,
    }
}

/// What a process held outside its allocator at the end of a step or phase.
fn outside(attributed: &Attributed) -> Option<u64> {
    attributed.gpus.iter().filter_map(|gpu| gpu.outside_allocator_bytes).max()
}

/// How long the garbage collector stopped a step's process, by its attribute, nanoseconds.
fn collected(attributes: &Attributes) -> Option<i64> {
    let seconds = match attribute(attributes, "gc_seconds")? {
        Scalar::Float(seconds) => *seconds,
        Scalar::Int(0) => 0.0,
        _ => return None,
    };
    #[allow(clippy::cast_possible_truncation, reason = "nanoseconds of a step")]
    (0.0..MOST_COLLECTED_S).contains(&seconds).then_some((seconds * 1e9) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::Usage;
    use crate::phases::hand::{attributed, ended, key};
    use crate::scope::Scope;

    fn retries(alloc_retries: u64) -> Option<Memory> {
        Some(Memory { alloc_retries: Some(alloc_retries), ..Memory::default() })
    }

    fn step_of(steps: &mut Steps, rank: usize, number: u64, begin_ns: i64, end_ns: i64) -> Step {
        steps.take(&attributed(ended(Kind::Step, rank, "step", Some(number), begin_ns, end_ns))).expect("a step")
    }

    fn phase(steps: &mut Steps, name: &str, begin_ns: i64, end_ns: i64) {
        assert!(steps.take(&attributed(ended(Kind::Phase, 0, name, None, begin_ns, end_ns))).is_none());
    }

    #[test]
    fn a_step_has_the_phases_within_it_and_leaves_later_ones_to_the_next() {
        let mut steps = Steps::default();
        for (name, begin_ns, end_ns) in [
            ("before", 5, 9),
            ("until", 5, 100),
            ("across", 9, 11),
            ("first", 10, 20),
            ("last", 90, 100),
            ("over", 95, 101),
            ("next", 110, 120),
        ] {
            phase(&mut steps, name, begin_ns, end_ns);
        }
        assert!(steps.take(&attributed(ended(Kind::Layer, 0, "layer", None, 20, 30))).is_none());
        let names = |step: &Step| step.phases.iter().map(|phase| phase.name.to_string()).collect::<Vec<_>>();
        let step = step_of(&mut steps, 0, 7, 10, 100);
        assert_eq!(
            (&step.key, step.number, step.length_ns(), step.title()),
            (&key(0), Some(7), 90, "step 7".to_owned())
        );
        assert_eq!(names(&step), ["first", "last"]);
        assert_eq!(names(&step_of(&mut steps, 0, 8, 0, 200)), ["over", "next"]);
        assert_eq!(title(None), "a step");
    }

    #[test]
    fn times_are_of_all_phases_of_these_names_and_the_innermost_is_open() {
        let mut steps = Steps::default();
        for (name, begin_ns, end_ns) in
            [("comm", 10, 14), ("forward", 10, 50), ("comm", 30, 37), ("all_reduce", 31, 33)]
        {
            phase(&mut steps, name, begin_ns, end_ns);
        }
        let step = step_of(&mut steps, 0, 0, 0, 100);
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(step.time_in(&names(&["comm"])), Some(11));
        assert_eq!((step.time_in(&names(&["comm", "all_reduce"])), step.time_in(&names(&["data"]))), (Some(13), None));
        let open = |at_ns| step.phase_at(at_ns).map(|phase| &*phase.name);
        assert_eq!(
            [32, 33, 34, 37, 38, 50].map(open),
            ["all_reduce", "all_reduce", "comm", "comm", "forward", "forward"].map(Some)
        );
        assert_eq!([9, 51].map(open), [None; 2]);
    }

    #[test]
    fn how_long_the_garbage_collector_took_is_what_the_step_says_if_it_can_be() {
        let of = |value: Option<Scalar>| {
            let mut step = ended(Kind::Step, 0, "step", Some(1), 0, 100);
            step.open.attributes =
                value.map(|value| [("lr".into(), Scalar::Int(3)), ("gc_seconds".into(), value)].into());
            Steps::default().take(&attributed(step)).expect("a step").collected_ns
        };
        assert_eq!(of(Some(Scalar::Float(0.031))), Some(31 * MILLISECOND_NS));
        assert_eq!((of(Some(Scalar::Int(0))), of(Some(Scalar::Float(0.0)))), (Some(0), Some(0)));
        let no_number = [Scalar::Float(-1.0), Scalar::Float(f64::NAN), Scalar::Float(1e300), Scalar::Text("1".into())];
        assert_eq!(no_number.map(Some).map(of), [None; 4]);
        assert_eq!(of(None), None);
    }

    #[test]
    fn a_run_counts_its_steps_until_its_numbers_begin_anew_or_it_pauses() {
        let mut steps = Steps::default();
        let mut nth = |number, begin_s: i64| {
            let begin_ns = begin_s * SECOND_NS;
            step_of(&mut steps, 0, number, begin_ns, begin_ns + SECOND_NS).nth
        };
        assert_eq!([nth(5, 100), nth(6, 101), nth(8, 102)], [0, 1, 2]);
        assert_eq!([nth(9, 163), nth(10, 225), nth(11, 226)], [3, 0, 1], "after a minute's pause, and after more");
        assert_eq!([nth(11, 227), nth(12, 228), nth(3, 229), nth(4, 230)], [0, 1, 0, 1]);
        assert_eq!(step_of(&mut steps, 1, 4, 0, SECOND_NS).nth, 0, "another rank's");
        let mut unnumbered = |at: i64| {
            let step = attributed(ended(Kind::Step, 2, "step", None, at, at + 1));
            steps.take(&step).expect("a step").nth
        };
        assert_eq!([unnumbered(1), unnumbered(2), unnumbered(3)], [0, 1, 2]);
    }

    #[test]
    fn retries_are_the_steps_own_or_else_its_phases() {
        let mut steps = Steps::default();
        let mut reported = |step: [Option<Memory>; 2], phases: &[[Option<Memory>; 2]]| {
            for memory in phases {
                let mut one = attributed(ended(Kind::Phase, 0, "forward", None, 1, 2));
                [one.ended.open.memory, one.ended.memory] = *memory;
                steps.take(&one);
            }
            let mut one = attributed(ended(Kind::Step, 0, "step", None, 0, 3));
            [one.ended.open.memory, one.ended.memory] = step;
            steps.take(&one).expect("a step").retries
        };
        assert_eq!(reported([retries(3), retries(5)], &[[retries(1), retries(9)]]), Some(2));
        assert_eq!(
            reported([None, None], &[[retries(4), retries(4)], [retries(3), None], [None, retries(9)]]),
            Some(6)
        );
        assert_eq!(reported([retries(3), None], &[[None, retries(4)]]), Some(1));
        assert_eq!((reported([retries(3), None], &[]), reported([None, retries(3)], &[])), (None, None));
        assert_eq!(reported([retries(5), retries(3)], &[]), None, "a counter that fell says nothing");
    }

    #[test]
    fn memory_is_of_the_gpu_on_which_it_is_worst() {
        let mut one = attributed(ended(Kind::Step, 0, "step", None, 0, 100));
        let gpu = |gpu, begin, peak, idle_seconds| PhaseMemory {
            begin_bytes: begin,
            peak_bytes: peak,
            usage: Usage { idle_seconds, ..Usage::default() },
            ..PhaseMemory::unknown(gpu)
        };
        one.gpus = vec![
            gpu(3, Some(10), Some(90), Some(0.005)),
            gpu(1, Some(80), Some(100), None),
            gpu(2, None, Some(7), Some(0.002)),
        ];
        let step = Steps::default().take(&one).expect("a step");
        assert_eq!((step.gpus, step.peak_bytes, step.rise_bytes), (vec![3, 1, 2], Some(100), Some(80)));
        assert_eq!(step.idle_ns, Some(5 * MILLISECOND_NS));
        one.gpus = vec![gpu(0, Some(90), Some(10), None)];
        let step = Steps::default().take(&one).expect("a step");
        assert_eq!((step.rise_bytes, step.idle_ns), (Some(0), None));
    }

    #[test]
    fn ranks_phases_and_silence_are_bounded() {
        let mut steps = Steps::default();
        (0..600).for_each(|at| phase(&mut steps, "forward", at, at));
        let step = step_of(&mut steps, 0, 0, 0, 1_000);
        assert_eq!((step.phases.len(), step.is_whole), (MOST_PHASES, false));
        (1..KNOWN_RANKS).for_each(|rank| assert_eq!(step_of(&mut steps, rank, 0, 0, 2_000).nth, 0));
        assert_eq!(step_of(&mut steps, 0, 1, 0, 1_000).nth, 1, "one that is known goes on");
        steps.forget_before(1_000, |_| false);
        assert_eq!(steps.ranks.len(), KNOWN_RANKS, "one that has ended may come back");
        steps.forget_before(1_001, |_| true);
        assert_eq!(steps.ranks.len(), KNOWN_RANKS - 1);
        phase(&mut steps, "forward", 2_500, 3_000);
        steps.forget_before(3_000, |_| true);
        assert_eq!(steps.ranks.keys().collect::<Vec<_>>(), [&key(0)], "its phase is younger");
        steps.forget_before(3_001, |_| true);
        assert!(steps.ranks.is_empty());
    }

    #[test]
    fn ranks_that_begin_and_end_again_and_again_cost_another_owner_nothing() {
        let mut steps = Steps::default();
        let mut end = |user: &str, rank: usize, number: u64, at_ns: i64| {
            let job = crate::jobs::JobId::new(Scope::User(user.into()), "j");
            let ended = crate::jobs::Ended { job, ..ended(Kind::Step, rank, "step", Some(number), at_ns, at_ns) };
            let step = steps.take(&attributed(ended));
            assert!(steps.ranks.len() <= MOST_RANKS);
            step.expect("a step").nth
        };
        assert_eq!(end("1000", 0, 0, 1), 0);
        assert!((0..2 * MOST_RANKS).all(|rank| end("1001", rank, 0, 2) == 0));
        assert_eq!(end("1000", 0, 1, 3), 1, "the older, but of the other owner");
        assert_eq!(end("1001", 2 * MOST_RANKS - 1, 1, 3), 1, "its newest goes on");
        assert_eq!(end("1001", 0, 1, 3), 0, "its oldest was forgotten");
        steps.forget_before(0, |key| key.1 == 0);
        assert_eq!(steps.ranks.len(), 2, "where there are many, those that have ended go");
    }

    #[test]
    fn an_evaluation_of_minutes_is_no_pause_and_what_was_between_two_steps_is_known() {
        let mut steps = Steps::default();
        let at = |seconds: i64| seconds * SECOND_NS;
        assert_eq!(step_of(&mut steps, 0, 0, at(100), at(101)).nth, 0);
        for (name, from_s, to_s) in [("eval", 101, 300), ("save", 310, 320), ("eval", 330, 331), ("forward", 332, 333)]
        {
            phase(&mut steps, name, at(from_s), at(to_s));
        }
        // One phase of the step begins long after it.
        phase(&mut steps, "late", at(500), at(501));
        let step = step_of(&mut steps, 0, 1, at(332), at(502));
        assert_eq!((step.nth, step.phases.len()), (1, 2));
        assert_eq!(step.before.iter().map(|name| &**name).collect::<Vec<_>>(), ["eval", "save"]);
        phase(&mut steps, "load", at(600), at(610));
        let step = step_of(&mut steps, 0, 2, at(610), at(611));
        assert_eq!((step.nth, step.before.len()), (0, 1), "nothing was marked for more than a minute");
    }

    #[test]
    fn a_first_step_whose_phases_gave_way_is_not_whole_either() {
        let mut steps = Steps::default();
        let of = |steps: &mut Steps, kind, rank, at_ns| {
            steps.take(&attributed(ended(kind, rank, "phase", Some(1), at_ns, at_ns)))
        };
        for nth in 0..=MOST_ALL_PHASES as i64 {
            assert!(
                of(&mut steps, Kind::Phase, usize::from(nth >= 500) * (1 + nth as usize / 400), 1_000 + nth).is_none()
            );
        }
        steps.forget_before(1_000, |_| true);
        let whole = (0..50).filter_map(|rank| of(&mut steps, Kind::Step, rank, 20_000)).filter(|step| step.is_whole);
        assert!(whole.count() < 50 && steps.phases == 0);
    }

    #[test]
    fn where_all_steps_have_too_many_phases_the_owner_with_most_loses_those_of_its_largest_rank() {
        let mut steps = Steps::default();
        let mut of = |user: &str, kind: Kind, rank: usize, name: &str, at_ns: i64| {
            let job = crate::jobs::JobId::new(Scope::User(user.into()), "j");
            let ended = crate::jobs::Ended { job, ..ended(kind, rank, name, Some(1), at_ns, at_ns) };
            let step = steps.take(&attributed(ended));
            assert!(steps.phases <= MOST_ALL_PHASES);
            assert_eq!(steps.phases, steps.ranks.values().map(|under| under.phases.len()).sum::<usize>());
            step
        };
        for nth in 0..500 {
            (0..8).for_each(|rank| drop(of("1000", Kind::Phase, rank, "forward", nth)));
        }
        for nth in 0..500 {
            (0..200).for_each(|rank| drop(of("1001", Kind::Phase, rank, "flood", nth)));
        }
        let whole = |step: Option<Step>| step.map(|step| (step.is_whole, step.phases.len()));
        let mut end = |user, rank| {
            let ended = ended(Kind::Step, rank, "step", Some(1), 0, 1_000);
            let job = crate::jobs::JobId::new(Scope::User(String::from(user).into()), "j");
            whole(steps.take(&attributed(crate::jobs::Ended { job, ..ended })))
        };
        assert!((0..8).all(|rank| end("1000", rank) == Some((true, 500))), "another's flood costs it nothing");
        let floods: Vec<_> = (0..200).filter_map(|rank| end("1001", rank)).collect();
        assert!(floods.iter().any(|(is_whole, _)| !is_whole), "{floods:?}");
        assert_eq!(steps.phases, 0);
    }
}
