//! `comm_starvation`: communication far slower than this rank's own healthy steps, while a rank of the same job was out of
//! memory.
//!
//! A collective ends only when its last rank has arrived. A rank that flushes its allocator's cache, or has no room for
//! communication buffers, makes all others wait. This detector reports that both happened in one step. The finding is about
//! the rank in trouble, and lists the ranks that wait for it. If a job marks no communication, its whole
//! steps are compared instead, and the finding is only suspected. Slow communication without a rank in trouble is no
//! finding, but the slowdown is exported.

use super::detector::{Detector, Looked, Ratios, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Subject, Text, number, seconds};
use super::steps::{Step, title};
use super::view::{View, median, ratio};
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Healthy steps that the baseline is made of, at most.
const MOST_BASELINE: usize = 64;
/// And at least.
const LEAST_BASELINE: usize = 5;
/// Below this ratio a step counts as healthy.
const HEALTHY: f64 = 1.5;
/// The configured ratio is multiplied by this for whole steps. They also contain time that is not communication, so a slow
/// collective lengthens them less.
const STEP_FACTOR: f64 = 0.8;
/// Where communication runs behind computation, full memory alone explains only steps that are longer by at least this part (1 / n).
const LONGER_PART: i64 = 2;
/// Number of consecutive slow steps, with no rank of the job thrashing, after which their times become the new baseline.
const ADOPTED_AFTER: usize = 20;
/// Full memory alone counts as the cause only after this long, because a flush may still be detected until then.
const SETTLE_NS: i64 = 300_000_000;
/// How long a slow step waits for a rank in trouble to be known.
const PATIENCE_NS: i64 = 2 * SECOND_NS;

/// Compares each rank's communication with its own past.
#[derive(Debug, Default)]
pub(super) struct CommStarvation {
    ranks: BTreeMap<RankKey, Baseline>,
    waiting: Vec<Slow>,
    looked: Looked,
}

#[derive(Debug, Default)]
struct Baseline {
    /// Whether the times are of communication. Otherwise they are of whole steps.
    is_comm: bool,
    healthy: VecDeque<Took>,
    /// The slow steps since the last healthy one.
    slow: VecDeque<Took>,
    last_ratio: Option<f64>,
}

/// How long a step took.
#[derive(Debug, Clone, Copy)]
struct Took {
    /// Its communication, or the whole step where none is marked.
    ns: i64,
    step_ns: i64,
}

/// A rank in trouble, and the slow steps of one number that it explains: other ranks' or its own.
#[derive(Debug)]
struct Shortage {
    kind: FindingKind,
    key: RankKey,
    slow: Vec<Slow>,
}

/// A step whose communication was slow.
#[derive(Debug)]
struct Slow {
    key: RankKey,
    step: Option<u64>,
    from_ns: i64,
    to_ns: i64,
    took: Took,
    baseline_ns: i64,
    /// How much longer than usual it made the step.
    delay_ns: i64,
    /// How long steps usually take, if the communication ran behind computation.
    usual_step_ns: Option<i64>,
    /// The usual time and the delay, over the usual time.
    ratio: f64,
    is_comm: bool,
    seen_ns: i64,
}

impl Detector for CommStarvation {
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        for step in view.steps {
            let baseline = self.ranks.entry(step.key.clone()).or_default();
            self.waiting.extend(baseline.judge(view, step));
            self.looked.note(baseline.last_ratio.is_some());
            baseline.adopt(has_thrashed(troubles, step));
        }
        let mut shortages: BTreeMap<(RankKey, Option<u64>), Shortage> = BTreeMap::new();
        for slow in std::mem::take(&mut self.waiting) {
            let waited_ns = view.now_ns - slow.seen_ns;
            match slow.cause(troubles) {
                Some(trouble) if trouble.kind == FindingKind::AllocatorThrash || waited_ns >= SETTLE_NS => {
                    let of_step = shortages.entry((trouble.key.clone(), slow.step));
                    of_step.or_insert_with(|| Shortage::of(trouble)).slow.push(slow);
                }
                None if waited_ns >= PATIENCE_NS => {}
                _ => self.waiting.push(slow),
            }
        }
        signs.extend(shortages.values().filter_map(|shortage| shortage.sign(view, troubles)));
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, baseline) in self.ranks.iter().filter(|(_, baseline)| baseline.is_comm) {
            out.entry(key.clone()).or_default().comm_slowdown = baseline.last_ratio;
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::CommStarvation, self.looked);
    }
}

impl Baseline {
    fn judge(&mut self, view: &View<'_>, step: &Step) -> Option<Slow> {
        let settings = view.settings;
        let comm_ns = step.time_in(&settings.comm_phases);
        if comm_ns.is_some() != self.is_comm {
            *self = Self { is_comm: comm_ns.is_some(), ..Self::default() };
        }
        let step_ns = step.length_ns();
        let took = Took { ns: comm_ns.unwrap_or(step_ns), step_ns };
        self.last_ratio = None;
        let baseline_ns = self.usual(|took| took.ns).filter(|_| self.healthy.len() >= LEAST_BASELINE);
        let Some((baseline_ns, times)) = baseline_ns.and_then(|usual_ns| Some((usual_ns, ratio(took.ns, usual_ns)?)))
        else {
            if step.nth >= settings.warm_up_steps {
                self.learn(took);
            }
            return None;
        };
        if times >= HEALTHY {
            self.slow.push_back(took);
        } else {
            self.slow.clear();
            if step.nth >= settings.warm_up_steps {
                self.learn(took);
            }
        }
        // Communication behind computation can take longer and cost nothing: with FSDP the GPU that is ahead waits in a collective
        // whose result it does not need yet. Then only the time by which the step is longer counts.
        let most = settings.comm_slowdown * if self.is_comm { 1.0 } else { STEP_FACTOR };
        let is_behind = times >= most.min(HEALTHY) && step.overlaps(&settings.comm_phases);
        let usual_step_ns = if is_behind { self.usual(|took| took.step_ns) } else { None };
        let longer_ns = usual_step_ns.map_or(i64::MAX, |usual_ns| (took.step_ns - usual_ns).max(0));
        let delay_ns = longer_ns.min(took.ns - baseline_ns);
        let ratio = ratio(baseline_ns + delay_ns, baseline_ns)?;
        self.last_ratio = Some(ratio);
        (ratio >= most && delay_ns >= settings.comm_excess_ns).then(|| Slow {
            key: step.key.clone(),
            step: step.number,
            from_ns: step.begin_ns,
            to_ns: step.end_ns,
            took,
            baseline_ns,
            delay_ns,
            usual_step_ns,
            ratio,
            is_comm: self.is_comm,
            seen_ns: view.now_ns,
        })
    }

    /// The median of the healthy steps.
    fn usual(&self, time: fn(&Took) -> i64) -> Option<i64> {
        median(self.healthy.iter().map(time))
    }

    /// Makes the times of [`ADOPTED_AFTER`] slow steps in a row the new baseline, unless a rank of the job thrashed meanwhile:
    /// the job then runs with other parameters, such as longer sequences.
    fn adopt(&mut self, has_thrashed: bool) {
        if has_thrashed {
            self.slow.clear();
        } else if self.slow.len() >= ADOPTED_AFTER {
            self.healthy = std::mem::take(&mut self.slow);
        }
    }

    fn learn(&mut self, took: Took) {
        self.healthy.push_back(took);
        if self.healthy.len() > MOST_BASELINE {
            self.healthy.pop_front();
        }
    }
}

/// Whether a rank of the step's job thrashed in it.
fn has_thrashed(troubles: &[Trouble], step: &Step) -> bool {
    troubles.iter().any(|trouble| trouble.kind == FindingKind::AllocatorThrash && trouble.is_of_job(step))
}

impl Slow {
    /// The trouble that explains the slow step: one that overlaps the step, of a rank of the same job. Another rank's trouble
    /// comes before the rank's own, and a flush before full memory.
    fn cause<'a>(&self, troubles: &'a [Trouble]) -> Option<&'a Trouble> {
        let meets = |trouble: &&Trouble| trouble.key.0 == self.key.0 && trouble.meets(self.from_ns, self.to_ns);
        let rank_of = |trouble: &&Trouble| (trouble.key.1 == self.key.1, trouble.kind != FindingKind::AllocatorThrash);
        let found = troubles.iter().filter(meets).min_by_key(rank_of)?;
        // A rank that flushes has slow steps of its own: allocator_thrash reports them.
        let is_own = !self.is_comm && found.key.1 == self.key.1;
        let is_little = self.usual_step_ns.is_some_and(|usual_ns| self.delay_ns < usual_ns / LONGER_PART);
        (!is_own && (found.kind == FindingKind::AllocatorThrash || !is_little)).then_some(found)
    }

    fn evidence(&self, waiting: &[u32]) -> Vec<Evidence> {
        vec![
            Evidence { name: "slowdown_ratio", value: self.ratio },
            Evidence { name: "took_seconds", value: seconds(self.took.ns) },
            Evidence { name: "baseline_seconds", value: seconds(self.baseline_ns) },
            Evidence { name: "waiting_count", value: number(waiting.len() as u64) },
        ]
    }
}

impl Shortage {
    fn of(trouble: &Trouble) -> Self {
        Self { kind: trouble.kind, key: trouble.key.clone(), slow: Vec::new() }
    }

    fn sign(&self, view: &View<'_>, troubles: &[Trouble]) -> Option<Sign> {
        // A step of its own counts only where no other rank waits.
        let is_other = |slow: &Slow| slow.key != self.key;
        let order = |a: &&Slow, b: &&Slow| is_other(a).cmp(&is_other(b)).then(a.ratio.total_cmp(&b.ratio));
        let slowest = self.slow.iter().max_by(order)?;
        let gpu = view.ranks.iter().find(|now| now.key == self.key).and_then(|now| now.gpus.first().copied());
        let mut sign = Sign {
            kind: FindingKind::CommStarvation,
            subject: Subject { gpu, job: Some(self.key.0.clone()), rank: Some(self.key.1) },
            severity: if slowest.ratio >= 10.0 { Severity::Critical } else { Severity::Warning },
            certainty: if slowest.is_comm { Certainty::Observed } else { Certainty::Suspected },
            begin_ns: self.slow.iter().map(|slow| slow.from_ns).min()?,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: slowest.step,
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: Vec::new(),
            text: Text::default(),
        };
        let others = self.slow.iter().map(|slow| slow.key.1).filter(|rank| *rank != self.key.1);
        sign.add_waiting(&others.collect::<Vec<_>>());
        sign.lost_ns = Some(self.lost_ns(troubles));
        sign.evidence = slowest.evidence(&sign.waiting_ranks);
        sign.text = self.text(slowest, &sign.waiting_ranks);
        Some(sign)
    }

    /// The time by which communication beyond the baselines made steps longer. What a rank that flushes lost itself is reported by
    /// `allocator_thrash`.
    fn lost_ns(&self, troubles: &[Trouble]) -> i64 {
        let has_flushed = |slow: &Slow| {
            let flushes = troubles.iter().filter(|trouble| trouble.kind == FindingKind::AllocatorThrash);
            flushes.filter(|flush| flush.key == slow.key).any(|flush| flush.meets(slow.from_ns, slow.to_ns))
        };
        self.slow.iter().filter(|slow| !has_flushed(slow)).map(|slow| slow.delay_ns).sum()
    }

    fn text(&self, slowest: &Slow, waiting: &[u32]) -> Text {
        let (job, rank) = &self.key;
        let did = match self.kind {
            FindingKind::AllocatorThrash => "flushed its allocator's cache",
            _ => "had almost no memory free",
        };
        let baseline = HumanDuration(slowest.baseline_ns);
        let took = match slowest.usual_step_ns {
            None => format!("{}, {:.1} times the baseline", HumanDuration(slowest.took.ns), slowest.ratio),
            Some(usual_ns) => format!(
                "{} of a step of {}, which usually takes {}",
                HumanDuration(slowest.took.ns),
                HumanDuration(slowest.took.step_ns),
                HumanDuration(usual_ns)
            ),
        };
        let meanwhile = match (waiting, slowest.is_comm) {
            ([], _) => format!("and its communication took {took}"),
            (_, true) => format!("while {} waited in communication for {took}", ranks(waiting)),
            (_, false) => format!("while a step of {} took {took}", ranks(waiting)),
        };
        Text {
            what: format!("Rank {rank} of {job} {did} in {}, {meanwhile}.", title(slowest.step)),
            why: format!(
                "The median of rank {}'s healthy steps is {baseline}. A collective ends only when its last rank has come, \
                 and rank {rank} {did} in the same step.",
                slowest.key.1
            ),
            advice: format!(
                "Give rank {rank} room: a batch smaller by one, shorter sequences, or recomputed activations. Compare its \
                 peak memory by phase with the other ranks'. The ranks that wait need no change."
            ),
        }
    }
}

/// `rank 3`, `ranks 1, 2 and 3`, or how many and the first of them.
fn ranks(waiting: &[u32]) -> String {
    const NAMED: usize = 4;
    let named: Vec<_> = waiting.iter().take(NAMED).map(u32::to_string).collect();
    match named.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, rest)) if waiting.len() <= NAMED => format!("ranks {} and {last}", rest.join(", ")),
        _ => format!("{} ranks ({}, …)", waiting.len(), named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::phases::hand::key;

    /// A second for each step, so that none waits for another's cause.
    fn at(nth: u64) -> i64 {
        i64::try_from(nth).expect("a step") * SECOND_NS
    }

    /// A step of rank 0 with `comm_ms` ms of communication.
    fn comm(nth: u64, comm_ms: i64) -> Step {
        Hand::step(0, nth, at(nth), &[("forward", 50), ("comm", comm_ms)])
    }

    /// The ratio that is known of a step after these.
    fn ratio_after(steps: impl Iterator<Item = Step>) -> Option<f64> {
        let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
        steps.for_each(|step| assert_eq!(hand.steps_end(&mut detector, vec![step]), []));
        Hand::ratios(&detector, 0).comm_slowdown
    }

    /// The sign, if any, for one step after eight healthy ones of 10 ms, where another rank was in trouble in it.
    fn after_healthy(step: Step, trouble: impl FnOnce(&Step, &mut Trouble)) -> Option<Sign> {
        let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
        (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![comm(nth, 10)]), []));
        hand.troubles = vec![in_trouble(&step)];
        trouble(&step, &mut hand.troubles[0]);
        let mut signs = hand.steps_end(&mut detector, vec![step]);
        assert!(signs.len() < 2);
        let sign = signs.pop();
        assert!(sign.is_none() || hand.look(&mut detector).0.is_empty(), "reported once");
        sign
    }

    /// Rank 1 flushes within a step.
    fn in_trouble(step: &Step) -> Trouble {
        Trouble { kind: FindingKind::AllocatorThrash, key: key(1), from_ns: step.begin_ns, to_ns: step.end_ns }
    }

    #[test]
    fn slow_communication_while_another_rank_flushes_is_about_the_rank_that_flushes() {
        let sign = after_healthy(comm(8, 40), |_, _| {}).expect("slow");
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (FindingKind::CommStarvation, Severity::Warning, Certainty::Observed)
        );
        let culprit = Subject { gpu: Some(1), job: Some("j".into()), rank: Some(1) };
        assert_eq!((sign.subject, sign.waiting_ranks), (culprit, vec![0]), "rank 1 is short of memory, rank 0 waits");
        let end_ns = 8 * SECOND_NS + 90 * MILLISECOND_NS;
        let hold_ns = Hand::new(0).settings.hold_ns;
        assert_eq!((sign.begin_ns, sign.until_ns, sign.step), (8 * SECOND_NS, end_ns + hold_ns, Some(8)));
        assert_eq!(sign.lost_ns, Some(30 * MILLISECOND_NS), "beyond the baseline");
        let values: Vec<_> = sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect();
        let expected =
            [("slowdown_ratio", 4.0), ("took_seconds", 0.04), ("baseline_seconds", 0.01), ("waiting_count", 1.0)];
        assert_eq!(values, expected);
        assert_eq!(
            sign.text.what,
            "Rank 1 of j flushed its allocator's cache in step 8, while rank 0 waited in communication for 40 ms, 4.0 times \
             the baseline."
        );
        assert!(sign.text.advice.starts_with("Give rank 1 room"), "{}", sign.text.advice);
        let severity = |comm_ms| after_healthy(comm(8, comm_ms), |_, _| {}).map(|sign| sign.severity);
        assert_eq!((severity(99), severity(100)), (Some(Severity::Warning), Some(Severity::Critical)));
        assert_eq!((severity(29), severity(30)), (None, Some(Severity::Warning)), "20 ms above its baseline");
    }

    #[test]
    fn all_ranks_that_wait_for_one_are_in_one_finding() {
        let (mut hand, mut detector) = (Hand::with_ranks(8), CommStarvation::default());
        let of = |rank, nth, ms| Hand::step(rank, nth, at(nth), &[("forward", 50), ("comm", ms)]);
        // Rank 1 waits longest.
        let all = |nth, ms: i64| {
            (1..8).map(move |rank| of(rank, nth, if rank == 1 { ms + 1 } else { ms })).collect::<Vec<_>>()
        };
        (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, all(nth, 10)), []));
        hand.troubles = vec![Trouble { key: key(0), ..in_trouble(&comm(8, 200)) }];
        let [sign] = hand.steps_end(&mut detector, all(8, 90)).try_into().expect("one for all");
        assert_eq!((sign.subject.gpu, sign.subject.rank), (Some(0), Some(0)));
        assert_eq!((sign.waiting_ranks, sign.severity), ((1..8).collect(), Severity::Warning));
        assert!(
            sign.text.what.contains("while 7 ranks (1, 2, 3, 4, …) waited in communication for 90 ms, 9.0 times"),
            "{}",
            sign.text.what
        );
        let named = [&[3][..], &[1, 2], &[1, 2, 5]].map(ranks);
        assert_eq!(named, ["rank 3", "ranks 1 and 2", "ranks 1, 2 and 5"]);
    }

    #[test]
    fn slow_is_from_the_ratio_asked_for() {
        let reported = |slowdown, excess_ns| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
            (hand.settings.comm_slowdown, hand.settings.comm_excess_ns) = (slowdown, excess_ns);
            (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![comm(nth, 10)]), []));
            hand.troubles = vec![in_trouble(&comm(8, 40))];
            hand.steps_end(&mut detector, vec![comm(8, 40)]).len()
        };
        assert_eq!((reported(4.0, 0), reported(4.01, 0)), (1, 0));
        assert_eq!((reported(4.0, 30 * MILLISECOND_NS), reported(4.0, 30 * MILLISECOND_NS + 1)), (1, 0));
    }

    #[test]
    fn the_baseline_is_the_median_of_healthy_steps_after_the_warm_up() {
        assert_eq!(ratio_after((0..8).map(|nth| comm(nth, 10))), None, "three of warm-up and four others were before");
        assert_eq!(ratio_after((0..9).map(|nth| comm(nth, if nth < 3 { 90 } else { 10 }))), Some(1.0));
        // A step that is slow is none of them, from one and a half times on.
        let one = |ms| move |nth| comm(nth, if nth == 8 { ms } else { 10 });
        let of = |ms| ratio_after((0..9).map(one(ms)));
        assert_eq!((of(15), of(14)), (Some(1.5), Some(1.4)));
        let drift = |first_ms: i64| (0..8).map(|nth| comm(nth, 10)).chain((8..28).map(move |nth| comm(nth, first_ms)));
        assert_eq!(ratio_after(drift(14)), Some(1.0), "it follows what is healthy");
        assert_eq!(ratio_after(drift(15).take(27)), Some(1.5), "what is slow is not, at once");
        // The first steps of a later run teach it nothing either.
        let again = (0..8).map(|nth| comm(nth, 10)).chain((0..40).map(|nth| Step { nth: nth % 3, ..comm(nth, 14) }));
        assert_eq!(ratio_after(again), Some(1.4));
        // Of the last sixty-four.
        let far = |tens: u64| (0..3 + 64 + tens).map(move |nth| comm(nth, if nth < 3 + 32 { 10 } else { 14 }));
        assert_eq!((ratio_after(far(1)), ratio_after(far(2))), (Some(1.4), Some(1.0)));
    }

    #[test]
    fn what_is_slow_for_twenty_steps_without_a_cause_is_the_new_baseline() {
        let slow = |count: u64| (0..8).map(|nth| comm(nth, 10)).chain((8..8 + count).map(|nth| comm(nth, 40)));
        assert_eq!((ratio_after(slow(20)), ratio_after(slow(21))), (Some(4.0), Some(1.0)));
        let broken = slow(19).chain([comm(27, 10)]).chain((28..48).map(|nth| comm(nth, 40)));
        assert_eq!(ratio_after(broken), Some(4.0), "one healthy step between");
        // With a rank that thrashes it stays slow.
        let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
        for (nth, step) in slow(40).enumerate() {
            hand.troubles = if nth < 8 { Vec::new() } else { vec![in_trouble(&step)] };
            hand.steps_end(&mut detector, vec![step]);
        }
        assert_eq!(Hand::ratios(&detector, 0).comm_slowdown, Some(4.0));
        let others = |change: &dyn Fn(&mut Trouble)| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
            for step in slow(21) {
                let mut trouble = in_trouble(&step);
                change(&mut trouble);
                hand.troubles = vec![trouble];
                hand.steps_end(&mut detector, vec![step]);
            }
            Hand::ratios(&detector, 0).comm_slowdown
        };
        assert_eq!(others(&|_| {}), Some(4.0));
        assert_eq!(others(&|trouble| trouble.key.0 = "k".into()), Some(1.0), "another job's");
        assert_eq!(others(&|trouble| trouble.kind = FindingKind::LowHeadroom), Some(1.0));
        assert_eq!(others(&|trouble| (trouble.from_ns, trouble.to_ns) = (-2, -1)), Some(1.0), "at another time");
    }

    #[test]
    fn a_cause_is_of_the_same_job_and_time_and_a_flush_before_full_memory() {
        let reported =
            |change: &dyn Fn(&Step, &mut Trouble)| after_healthy(comm(8, 40), change).map(|sign| sign.text.what);
        assert!(reported(&|_, trouble| trouble.key.0 = "k".into()).is_none());
        assert!(reported(&|step, trouble| trouble.from_ns = step.end_ns + 1).is_none());
        assert!(reported(&|step, trouble| trouble.from_ns = step.end_ns).is_some());
        let own = reported(&|_, trouble| trouble.key = key(0)).expect("its own");
        assert!(own.starts_with("Rank 0 of j flushed") && own.contains("and its communication took 40 ms"), "{own}");
        let (mut hand, mut detector) = (Hand::with_ranks(3), CommStarvation::default());
        (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![comm(nth, 10)]), []));
        let trouble = |rank, kind| Trouble { kind, key: key(rank), ..in_trouble(&comm(8, 40)) };
        let (flush, full) = (FindingKind::AllocatorThrash, FindingKind::LowHeadroom);
        hand.troubles = vec![trouble(0, flush), trouble(1, full), trouble(2, flush)];
        let [sign] = hand.steps_end(&mut detector, vec![comm(8, 40)]).try_into().expect("one");
        assert_eq!((sign.subject.rank, sign.waiting_ranks), (Some(2), vec![0]), "{}", sign.text.what);
    }

    #[test]
    fn full_memory_alone_is_the_cause_only_when_no_flush_became_known() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
        (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![comm(nth, 10)]), []));
        hand.troubles = vec![Trouble { kind: FindingKind::LowHeadroom, ..in_trouble(&comm(8, 40)) }];
        assert_eq!(hand.steps_end(&mut detector, vec![comm(8, 40)]), []);
        hand.now_ns += 300 * MILLISECOND_NS - 1;
        assert_eq!(hand.look(&mut detector).0, []);
        hand.now_ns += 1;
        let [sign] = hand.look(&mut detector).0.try_into().expect("one");
        assert!(sign.text.what.starts_with("Rank 1 of j had almost no memory free in step 8"), "{}", sign.text.what);
        assert_eq!(hand.look(&mut detector).0, [], "reported once");
    }

    #[test]
    fn a_slow_step_waits_two_seconds_for_its_cause() {
        let reported_after = |wait_ns| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
            (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![comm(nth, 10)]), []));
            hand.steps_end(&mut detector, vec![comm(8, 40)]);
            hand.now_ns += wait_ns;
            assert_eq!(hand.look(&mut detector).0, []);
            hand.troubles = vec![in_trouble(&comm(8, 40))];
            hand.look(&mut detector).0.len()
        };
        assert_eq!((reported_after(2 * SECOND_NS - 1), reported_after(2 * SECOND_NS)), (1, 0));
    }

    #[test]
    fn where_no_communication_is_marked_whole_steps_are_compared_with_doubt() {
        let whole = |nth, ms| Hand::step(0, nth, at(nth), &[("forward", ms)]);
        let reported = |ms, rank| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
            (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![whole(nth, 100)]), []));
            hand.troubles = vec![Trouble { key: key(rank), ..in_trouble(&whole(8, ms)) }];
            let signs = hand.steps_end(&mut detector, vec![whole(8, ms)]);
            assert_eq!(Hand::ratios(&detector, 0).comm_slowdown, None, "no communication is known");
            signs
        };
        let [sign] = reported(160, 1).try_into().expect("at four fifths of the ratio asked for");
        assert_eq!(sign.certainty, Certainty::Suspected);
        assert!(
            sign.text.what.ends_with("in step 8, while a step of rank 0 took 160 ms, 1.6 times the baseline."),
            "{}",
            sign.text.what
        );
        assert_eq!((reported(159, 1), reported(160, 0)), (Vec::new(), Vec::new()), "not slow; its own flush");
        // From when communication is marked, its baseline is learnt anew.
        let marked = (0..8).map(|nth| whole(nth, 100)).chain((8..14).map(|nth| comm(nth, 20)));
        assert_eq!(ratio_after(marked.clone().take(13)), None);
        assert_eq!(ratio_after(marked), Some(1.0));
    }

    #[test]
    fn communication_behind_computation_counts_by_how_much_the_step_is_longer() {
        // A step of `step_ms` ms of forward, with communication inside it.
        let behind = |nth, step_ms, comm_ms| {
            let step = Hand::step(0, nth, at(nth), &[("forward", step_ms)]);
            let mut comm = step.phases[0].clone();
            (comm.name, comm.end_ns) = ("comm".into(), comm.begin_ns + comm_ms * MILLISECOND_NS);
            Step { phases: [step.phases, vec![comm]].concat(), ..step }
        };
        let after = |step: Step, kind| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
            (0..8).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![behind(nth, 100, 10)]), []));
            hand.troubles = vec![Trouble { kind, ..in_trouble(&step) }];
            let mut signs = hand.steps_end(&mut detector, vec![step]);
            hand.now_ns += SETTLE_NS;
            signs.extend(hand.look(&mut detector).0);
            (signs.pop(), Hand::ratios(&detector, 0).comm_slowdown)
        };
        let flush = |step_ms| after(behind(8, step_ms, 90), FindingKind::AllocatorThrash);
        assert_eq!((flush(100), flush(90)), ((None, Some(1.0)), (None, Some(1.0))), "it cost nothing");
        assert_eq!(flush(119), (None, Some(2.9)));
        let sign = flush(120).0.expect("20 ms longer");
        assert_eq!(sign.lost_ns, Some(20 * MILLISECOND_NS));
        assert_eq!(
            sign.text.what,
            "Rank 1 of j flushed its allocator's cache in step 8, while rank 0 waited in communication for 90 ms of a step of \
             120 ms, which usually takes 100 ms."
        );
        let full = |step_ms| after(behind(8, step_ms, 90), FindingKind::LowHeadroom).0.is_some();
        assert_eq!((full(149), full(150)), (false, true), "full memory alone explains less");
    }

    #[test]
    fn a_rank_that_has_gone_is_forgotten() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), CommStarvation::default());
        (0..9).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![comm(nth, 10)]), []));
        assert!(Hand::ratios(&detector, 0).comm_slowdown.is_some());
        hand.ranks.remove(0);
        hand.look(&mut detector);
        assert_eq!(Hand::ratios(&detector, 0).comm_slowdown, None);
    }
}
