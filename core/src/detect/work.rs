//! How long a rank worked in one step, by what its marks cover.
//!
//! Enters: a [`Step`] with its phases. Leaves: [`Work`]. Invariants: time that no mark covers is unknown and counts as
//! nothing; communication, waiting for data, and phases outside of training are no work, wherever they lie in other phases. A
//! step whose communication is not marked has no known work: its phases may contain waiting. Neither has one whose communication
//! runs beside its work, as under DDP and FSDP2: a collective is marked from when it is issued until it is waited for, and the rank
//! computes meanwhile.

use super::settings::Settings;
use super::steps::{Phase, Step, is_one_of};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// Communication lies in one phase if at most one part in `SPREAD` of it lies in others.
const SPREAD: i64 = 8;
/// Two ranks ran their second phases together if these have at least `TOGETHER` times as long in common as the begins of their
/// first phases are apart. Stages of a pipeline are apart by a forward pass at least, and a backward pass is two or three as long.
const TOGETHER: i64 = 8;

/// What one rank did in one step. Of a step in which most of the communication of all ranks lies in phases of work, nothing of this
/// is known ([`Work::is_known`]).
#[derive(Debug, Clone)]
pub(super) struct Work {
    /// Time in marked phases, without communication, waiting for data and phases outside of training, nanoseconds.
    pub total_ns: i64,
    /// The part of it in phases that occur once in the step, such as the optimizer; 0 if no phase repeats.
    pub once_ns: i64,
    /// How often the most frequent phase of work came: the microbatches.
    pub rounds: u64,
    /// Time in communication, nanoseconds.
    pub comm_ns: i64,
    /// The part of it outside of evaluations and the like.
    training_comm_ns: i64,
    /// The part of it that lies in phases of work, and of that, the part outside of the phase that has most of it.
    beside_ns: i64,
    spread_ns: i64,
    /// Time of the step that is no work, nanoseconds: communication, waiting, and what no mark covers.
    pub idle_ns: i64,
    /// The part of it before the first and after the last phase that repeats.
    pub outside_ns: i64,
    /// Which phases of work came in which order.
    pub order: u64,
    /// Begin and end of the first one.
    pub first_ns: (i64, i64),
    /// And of the longest of the others that are the first of their name, unless that name is the last of the step, such as an
    /// optimizer's.
    second_ns: Option<(i64, i64)>,
}

type Interval = (i64, i64);

impl Work {
    /// `None` where it cannot be known: communication or work is not marked, or the step has more phases than are kept.
    pub fn of(step: &Step, settings: &Settings) -> Option<Self> {
        if !step.is_whole {
            return None;
        }
        let is_comm = |phase: &&Phase| is_one_of(&phase.name, &settings.comm_phases);
        let is_other = |phase: &&Phase| {
            is_comm(phase)
                || is_one_of(&phase.name, &settings.data_phases)
                || is_one_of(&phase.name, &settings.refill_phases)
        };
        let comm = union(step.phases.iter().filter(is_comm));
        let others = union(step.phases.iter().filter(is_other));
        let refills = union(step.phases.iter().filter(|phase| is_one_of(&phase.name, &settings.refill_phases)));
        let mut phases: Vec<&Phase> = step.phases.iter().filter(|phase| !is_other(phase)).collect();
        phases.sort_by_key(|phase| phase.begin_ns);
        let first = phases.first().filter(|_| !comm.is_empty())?;
        let counts = counts(&phases);
        let repeats = |phase: &&Phase| counts.get(&*phase.name).is_some_and(|count| *count > 1);
        let known = |some: &[Interval]| length(some) - length(&common(some, &others));
        let work = union(phases.iter().copied());
        let total_ns = known(&work);
        let beside_ns = length(&common(&work, &comm));
        let in_phase = |name: &str| {
            let named = union(phases.iter().copied().filter(|phase| &*phase.name == name));
            length(&common(&named, &comm))
        };
        let most_ns = counts.keys().map(|name| in_phase(name)).max().unwrap_or(0);
        let repeated = union(phases.iter().copied().filter(repeats));
        let repeated = if repeated.is_empty() { work } else { repeated };
        let repeated_ns = known(&repeated);
        let span_ns = repeated.last()?.1 - repeated.first()?.0;
        let once_ns = total_ns - repeated_ns;
        Some(Self {
            total_ns,
            once_ns,
            rounds: counts.values().copied().max().unwrap_or(1),
            comm_ns: length(&comm),
            training_comm_ns: length(&comm) - length(&common(&comm, &refills)),
            beside_ns,
            spread_ns: (beside_ns - most_ns).max(0),
            idle_ns: step.length_ns() - total_ns,
            outside_ns: (step.length_ns() - span_ns - once_ns).max(0),
            order: order(&phases),
            first_ns: (first.begin_ns, first.end_ns),
            second_ns: second(&phases),
        })
    }
}

impl Work {
    /// Whether what the ranks of one step did is known: at most half of their communication in training lies in phases of work. Where
    /// more does, collectives run beside the work, or the marks do not show whether they do.
    pub fn is_known<'a>(ranks: impl Iterator<Item = &'a Self>) -> bool {
        let (comm_ns, beside_ns) =
            ranks.fold((0, 0), |(comm_ns, beside_ns), one| (comm_ns + one.training_comm_ns, beside_ns + one.beside_ns));
        2 * beside_ns <= comm_ns
    }

    /// Whether two ranks ran what comes after their first phase together, as ranks do whose forward passes are shorter than they
    /// are apart, and stages of a pipeline never do.
    pub fn is_beside(&self, other: &Self) -> bool {
        let Some((one, other_one)) = self.second_ns.zip(other.second_ns) else { return false };
        let common_ns = one.1.min(other_one.1) - one.0.max(other_one.0);
        common_ns > 0 && common_ns / TOGETHER >= (self.first_ns.0 - other.first_ns.0).abs()
    }

    /// Whether the communication that lies in phases of work lies in one of them, as DDP's in the backward pass. The ranks enter
    /// it together, so that one with more work communicates less by about as much. Under FSDP2, whose ranks communicate in each pass
    /// and run ahead of each other, what is left of their phases is chance.
    pub fn is_in_one_phase<'a>(ranks: impl Iterator<Item = &'a Self>) -> bool {
        let (beside_ns, spread_ns) =
            ranks.fold((0, 0), |(beside_ns, spread_ns), one| (beside_ns + one.beside_ns, spread_ns + one.spread_ns));
        SPREAD * spread_ns <= beside_ns
    }
}

/// When the main phase after the first one was: of the first phases of each name but that of the step's first and of its last, the
/// longest. A short one in between, such as a loss before a backward pass, does not show whether ranks run together.
fn second(phases: &[&Phase]) -> Option<Interval> {
    let (first, last) = (&phases.first()?.name, &phases.last()?.name);
    let mut seen = BTreeSet::from([first, last]);
    let others = phases.iter().filter(|phase| seen.insert(&phase.name));
    others.map(|phase| (phase.begin_ns, phase.end_ns)).max_by_key(|(begin_ns, end_ns)| end_ns - begin_ns)
}

fn counts<'a>(phases: &[&'a Phase]) -> BTreeMap<&'a str, u64> {
    let mut counts = BTreeMap::new();
    for phase in phases {
        *counts.entry(&*phase.name).or_default() += 1;
    }
    counts
}

fn order(phases: &[&Phase]) -> u64 {
    let mut hasher = DefaultHasher::new();
    phases.iter().for_each(|phase| phase.name.hash(&mut hasher));
    hasher.finish()
}

/// The time that any of these phases covers, as intervals in order that do not touch.
fn union<'a>(phases: impl Iterator<Item = &'a Phase>) -> Vec<Interval> {
    let mut all: Vec<Interval> = phases.map(|phase| (phase.begin_ns, phase.end_ns)).collect();
    all.sort_unstable();
    let mut union: Vec<Interval> = Vec::new();
    for (begin_ns, end_ns) in all {
        match union.last_mut() {
            Some(last) if begin_ns <= last.1 => last.1 = last.1.max(end_ns),
            _ => union.push((begin_ns, end_ns)),
        }
    }
    union
}

fn length(intervals: &[Interval]) -> i64 {
    intervals.iter().map(|(begin_ns, end_ns)| end_ns - begin_ns).sum()
}

/// What two unions have in common.
fn common(one: &[Interval], other: &[Interval]) -> Vec<Interval> {
    let (mut common, mut one, mut other) = (Vec::new(), one.iter().peekable(), other.iter().peekable());
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let both = (a.0.max(b.0), a.1.min(b.1));
        if both.0 < both.1 {
            common.push(both);
        }
        if a.1 < b.1 {
            one.next()
        } else {
            other.next()
        };
    }
    common
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::clock::MILLISECOND_NS;

    fn work(phases: &[(&str, i64)]) -> Option<Work> {
        Work::of(&Hand::step(0, 5, 0, phases), &Settings::default())
    }

    fn ms(ns: i64) -> i64 {
        ns / MILLISECOND_NS
    }

    #[test]
    fn work_is_what_marks_cover_but_communication_data_and_checkpoints() {
        let phases =
            [("data", 7), ("forward", 20), ("comm", 5), ("backward", 40), ("checkpoint", 90), ("optimizer", 3)];
        let work = work(&phases).expect("known");
        assert_eq!((ms(work.total_ns), ms(work.comm_ns), work.rounds), (63, 5, 1));
        // Time that nothing covers: the step takes longer, and the work does not.
        let mut step = Hand::step(0, 5, 0, &phases);
        step.end_ns += 500 * MILLISECOND_NS;
        let work = Work::of(&step, &Settings::default()).expect("known");
        assert_eq!((ms(work.total_ns), ms(work.idle_ns)), (63, 602));
    }

    #[test]
    fn communication_inside_of_a_phase_is_no_work_and_nested_phases_count_once() {
        let mut step = Hand::step(0, 5, 0, &[("backward", 100), ("comm", 10)]);
        let inside = |name: &str, begin_ms: i64, end_ms: i64| Phase {
            name: name.into(),
            begin_ns: begin_ms * MILLISECOND_NS,
            end_ns: end_ms * MILLISECOND_NS,
            retries: [None; 2],
        };
        step.phases.extend([inside("comm", 20, 50), inside("comm", 40, 60), inside("block", 10, 90)]);
        let work = Work::of(&step, &Settings::default()).expect("known");
        assert_eq!((ms(work.total_ns), ms(work.comm_ns)), (60, 50));
    }

    #[test]
    fn work_is_not_known_where_most_of_the_communication_of_all_ranks_runs_beside_it() {
        let of = |after_ms| {
            let mut step = Hand::step(0, 5, 0, &[("backward", 100), ("comm", after_ms), ("optimizer", 5)]);
            let (begin_ns, end_ns) = (20 * MILLISECOND_NS, 60 * MILLISECOND_NS);
            step.phases.push(Phase { name: "comm".into(), begin_ns, end_ns, retries: [None; 2] });
            Work::of(&step, &Settings::default()).expect("marked")
        };
        assert_eq!(
            (ms(of(40).total_ns), Work::is_known([of(40)].iter()), Work::is_known([of(39)].iter())),
            (65, true, false)
        );
        assert!(Work::is_in_one_phase([of(39)].iter()), "in backward alone");
        // An evaluation's communication says nothing of it.
        let evaluated = |name: &'static str| {
            let mut step = Hand::step(0, 5, 0, &[(name, 90), ("backward", 100), ("optimizer", 5)]);
            for begin_ms in [10, 100] {
                let (begin_ns, end_ns) = (begin_ms * MILLISECOND_NS, (begin_ms + 60) * MILLISECOND_NS);
                step.phases.push(Phase { name: "comm".into(), begin_ns, end_ns, retries: [None; 2] });
            }
            Work::is_known([Work::of(&step, &Settings::default()).expect("marked")].iter())
        };
        assert_eq!([evaluated("eval"), evaluated("data")], [false, true]);
        // The ranks of a step are judged together, or not at all.
        assert!(Work::is_known([of(30), of(50)].iter()) && !Work::is_known([of(30), of(49)].iter()));
    }

    #[test]
    fn communication_is_in_one_phase_up_to_an_eighth_of_it() {
        let of = |forward_ms| {
            let mut step = Hand::step(0, 5, 0, &[("forward", 50), ("backward", 100), ("comm", 1)]);
            for (begin_ms, length_ms) in [(0, forward_ms), (60, 70)] {
                let (begin_ns, end_ns) = (begin_ms * MILLISECOND_NS, (begin_ms + length_ms) * MILLISECOND_NS);
                step.phases.push(Phase { name: "comm".into(), begin_ns, end_ns, retries: [None; 2] });
            }
            Work::is_in_one_phase([Work::of(&step, &Settings::default()).expect("marked")].iter())
        };
        assert_eq!([0, 10, 11, 40].map(of), [true, true, false, false]);
    }

    #[test]
    fn work_is_not_known_without_marks_of_communication_or_of_every_phase() {
        assert!(work(&[("forward", 20), ("backward", 40)]).is_none());
        assert!(work(&[("comm", 20), ("data", 40)]).is_none());
        let step = Hand::step(0, 5, 0, &[("forward", 20), ("comm", 4)]);
        assert!(Work::of(&step, &Settings::default()).is_some());
        assert!(Work::of(&Step { is_whole: false, ..step }, &Settings::default()).is_none());
    }

    /// Two ranks, of which one begins 10 ms later, and whose backward passes begin and end together.
    #[test]
    fn a_short_phase_between_two_passes_hides_nothing() {
        let of = |forward_ms, loss_ms: Option<i64>| {
            let loss = loss_ms.map(|loss_ms| ("loss", loss_ms));
            let passes = [("forward", forward_ms - loss_ms.unwrap_or(0))];
            let rest = [("backward", 100), ("comm", 5), ("optimizer", 5)];
            let phases: Vec<_> = passes.into_iter().chain(loss).chain(rest).collect();
            let begin_ns = (20 - forward_ms) * MILLISECOND_NS;
            Work::of(&Hand::step(0, 5, begin_ns, &phases), &Settings::default()).expect("marked")
        };
        for loss_ms in [None, Some(1), Some(4)] {
            assert!(of(20, loss_ms).is_beside(&of(10, loss_ms)), "{loss_ms:?}");
        }
        // Nor does it show anything where there is nothing else.
        let without = |begin_ns| {
            let phases = [("forward", 20), ("loss", 1), ("comm", 5), ("optimizer", 5)];
            Work::of(&Hand::step(0, 5, begin_ns, &phases), &Settings::default()).expect("marked")
        };
        assert!(!without(0).is_beside(&without(10 * MILLISECOND_NS)));
    }

    #[test]
    fn a_step_of_microbatches_has_rounds_and_what_it_does_once() {
        let round = [("comm", 1), ("forward", 10), ("backward", 20)];
        let mut phases = vec![("comm", 4)];
        phases.extend(round.iter().chain(&round).chain(&round));
        phases.extend([("comm", 30), ("optimizer", 5)]);
        let work = work(&phases).expect("known");
        assert_eq!((work.rounds, ms(work.total_ns), ms(work.once_ns)), (3, 95, 5));
        assert_eq!((ms(work.comm_ns), ms(work.idle_ns), ms(work.outside_ns)), (37, 37, 35));
        assert_eq!((ms(work.first_ns.0), ms(work.first_ns.1)), (5, 15));
    }

    #[test]
    fn an_order_is_of_the_phases_of_work() {
        let order = |phases: &[(&str, i64)]| work(phases).expect("known").order;
        let one = order(&[("forward", 1), ("comm", 1), ("backward", 1)]);
        assert_eq!(one, order(&[("data", 3), ("forward", 9), ("backward", 1), ("comm", 1)]));
        assert_ne!(one, order(&[("backward", 1), ("comm", 1), ("forward", 1)]));
        assert_ne!(one, order(&[("forward", 1), ("forward", 1), ("comm", 1), ("backward", 1)]));
    }
}
