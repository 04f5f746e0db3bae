//! `straggler`: a rank that works longer than those that are like it, which wait for it in their collectives.
//!
//! Within one step, the work of a rank is compared with the median of the other ranks that run the same stage and shard on
//! other data ([`peers`](super::peers)). Longer work is a lag if those ranks spent at least half of the difference longer in
//! communication. Ranks with inputs of different lengths lag in turn, by chance. So a rank is a straggler only if it lags by
//! about as much in each of its last steps, or in most of the last twenty. If two ranks lag at once and may wait for each
//! other in phases of work, they cannot be distinguished, and neither is named. A single step that lags far because the rank
//! mapped memory, as the first steps of a run do, is reported with severity `info`: it explains its peers' slow collectives.

use super::detector::{Looked, Ratios, Trouble};
use super::finding::{
    Certainty, Evidence, FindingKind, HumanDuration, LagCause, Severity, Sign, Subject, Text, number, seconds,
};
use super::lasting::{LagStep, Lags};
use super::peers::{Alike, Group, Member, Whole};
use super::steps::Step;
use super::view::{View, bytes, human, median, ratio};
use crate::phases::RankKey;
use std::collections::BTreeMap;

/// The time that the peers waited for a rank must be at least this part of the rank's lag.
const WAITED_SHARE: f64 = 0.5;
/// A single step is reported from this lag on, relative and absolute.
const FAR: f64 = 1.5;
const FAR_NS: i64 = 50_000_000;
/// Memory that a step must have mapped to be named as the reason, bytes.
const MAPPED_BYTES: u64 = 1 << 30;

/// What each rank's last steps were like beside its peers'.
#[derive(Debug, Default)]
pub(super) struct Straggler {
    ranks: BTreeMap<RankKey, Known>,
    /// If two ranks lag at once, so that neither is named, their steps count as abstained.
    pub looked: Looked,
}

#[derive(Debug, Default)]
struct Known {
    recent: Lags,
    last_ratio: Option<f64>,
}

/// One rank's lag behind its peers in one step.
struct Lag<'a> {
    member: &'a Member<'a>,
    /// How many it is compared with, and whether by their coordinates.
    peers: usize,
    is_by_mesh: bool,
    work_ns: i64,
    peers_ns: i64,
    waited_ns: i64,
    ratio: f64,
}

impl Straggler {
    /// Forgets ranks.
    pub fn retain(&mut self, knows: impl Fn(&RankKey) -> bool) {
        self.ranks.retain(|key, _| knows(key));
    }

    /// Adds each rank's last lag.
    pub fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, known) in &self.ranks {
            out.entry(key.clone()).or_default().compute_lag = known.last_ratio;
        }
    }

    /// Judges the ranks of a step, and counts it; `is_judged` is whether it was judged already by what its marks of communication do
    /// not say ([`Late`](super::late::Late)). Returns whether one of them lags lastingly, whether it is named or not.
    pub fn judge(
        &mut self,
        view: &View<'_>,
        group: &Group<'_>,
        troubles: &[Trouble],
        is_judged: bool,
        signs: &mut Vec<Sign>,
    ) -> bool {
        let lags: Vec<Lag<'_>> = group.alike.iter().flat_map(|alike| lags(group, alike)).collect();
        for member in &group.members {
            if let Some(known) = self.ranks.get_mut(&member.step.key) {
                known.last_ratio = None;
            }
        }
        let mut lasting = Vec::new();
        for lag in &lags {
            let is_lagging = self.note(view, lag, troubles);
            let recent = self.ranks.get_mut(&lag.member.step.key).map(|known| &mut known.recent);
            if let Some(recent) = recent.filter(|recent| is_lagging && recent.is_lasting()) {
                lasting.push((lag, recent.onset_ns().unwrap_or(lag.member.step.begin_ns), recent.take_lost_ns()));
            } else if is_lagging {
                signs.extend(lag.once(view, group));
            }
        }
        let mut unclear = Vec::new();
        for (lag, begin_ns, lost_ns) in &lasting {
            if lasting.iter().any(|(other, ..)| lag.may_wait_for(other)) {
                unclear.push(&lag.member.step.key);
            } else {
                let sign = lag.sign(view, group, Severity::Warning, None);
                signs.push(Sign {
                    begin_ns: *begin_ns,
                    lost_ns: Some(*lost_ns).filter(|lost_ns| *lost_ns > 0),
                    ..sign
                });
            }
        }
        let judged = |step: &Step| {
            let is_compared = lags.iter().any(|lag| lag.member.step.key == step.key);
            is_judged || is_compared && step.nth >= view.settings.warm_up_steps && !unclear.contains(&&step.key)
        };
        group.compared().for_each(|step| self.looked.note(judged(step)));
        !lasting.is_empty()
    }

    /// Records how far a rank was behind. Returns whether that is a lag: long enough, waited for by the peers, and not explained
    /// by another finding.
    fn note(&mut self, view: &View<'_>, lag: &Lag<'_>, troubles: &[Trouble]) -> bool {
        let (step, settings) = (lag.member.step, view.settings);
        let known = self.ranks.entry(step.key.clone()).or_default();
        known.last_ratio = Some(lag.ratio);
        let is_lagging = lag.ratio >= settings.lag && lag.ns() >= settings.lag_ns && lag.is_waited_for();
        // A rank that flushed its allocator's cache is late for that reason: allocator_thrash reports it.
        let is_flush = |trouble: &Trouble| trouble.kind == FindingKind::AllocatorThrash && trouble.is_of(step);
        let thrashed = troubles.iter().any(is_flush);
        if step.nth >= settings.warm_up_steps {
            let ratio = if is_lagging && !thrashed { lag.ratio } else { 1.0 };
            // If memory was short, `comm_starvation` counts how long its peers waited.
            let is_short = troubles.iter().any(|trouble| trouble.is_of(step));
            let lost_ns = if is_short { 0 } else { lag.lost_ns() };
            known.recent.push(LagStep { ratio, begin_ns: step.begin_ns, lost_ns });
        } else {
            known.recent.clear();
        }
        is_lagging && !thrashed
    }
}

/// Each rank beside the others that are like it.
fn lags<'a>(group: &'a Group<'_>, alike: &'a Alike) -> impl Iterator<Item = Lag<'a>> {
    alike.members.iter().filter_map(|position| {
        let others = || {
            let others = alike.members.iter().filter(move |other| *other != position);
            others.filter_map(|other| group.members.get(*other)?.work.as_ref())
        };
        let member = group.members.get(*position)?;
        let work = member.work.as_ref()?;
        let peers_ns = median(others().map(|work| work.total_ns))?;
        Some(Lag {
            member,
            peers: alike.members.len() - 1,
            is_by_mesh: alike.is_by_mesh,
            work_ns: work.total_ns,
            peers_ns,
            waited_ns: median(others().map(|work| work.comm_ns))? - work.comm_ns,
            ratio: ratio(work.total_ns, peers_ns)?,
        })
    })
}

impl Lag<'_> {
    fn ns(&self) -> i64 {
        self.work_ns - self.peers_ns
    }

    /// How long its peers waited for it, summed over them, nanoseconds.
    fn lost_ns(&self) -> i64 {
        self.waited_ns.saturating_mul(i64::try_from(self.peers).unwrap_or(i64::MAX))
    }

    #[allow(clippy::cast_precision_loss, reason = "a share of milliseconds")]
    fn is_waited_for(&self) -> bool {
        self.waited_ns as f64 >= WAITED_SHARE * self.ns() as f64
    }

    /// Whether the other rank may have caused this lag. Ranks that work on the same data wait for each other, perhaps in phases
    /// of work. Without coordinates this is always possible, because the ranks may form a pipeline stage.
    fn may_wait_for(&self, other: &Self) -> bool {
        if std::ptr::eq(self.member, other.member) {
            return false;
        }
        match (self.member.mesh, other.member.mesh) {
            (Some(mesh), Some(other)) => mesh.shares_data_with(other),
            _ => true,
        }
    }

    /// The sign of a single step that is far behind because it mapped memory.
    fn once(&self, view: &View<'_>, group: &Group<'_>) -> Option<Sign> {
        let step: &Step = self.member.step;
        let mapped = step.rise_bytes.filter(|rise_bytes| *rise_bytes >= MAPPED_BYTES)?;
        let is_far = self.ratio >= FAR && self.ns() >= FAR_NS;
        let is_warm = step.nth >= view.settings.warm_up_steps;
        is_far.then(|| self.sign(view, group, Severity::Info, Some((mapped, is_warm))))
    }

    /// Those with whom it is compared, in words.
    fn whom(&self) -> String {
        let has_stage = self.member.mesh.is_some_and(|mesh| mesh.stage().is_some());
        let what = if has_stage && self.is_by_mesh { "of its stage and shard" } else { "that do the same work" };
        match self.peers {
            1 => format!("the other rank {}", what.replace(" do ", " does ")),
            count => format!("the {count} other ranks {what}"),
        }
    }

    /// What the sign says, and what to try.
    fn words(&self, whole: Option<Whole>, once: Option<(u64, bool)>) -> (String, &'static str) {
        let step = self.member.step;
        let (job, rank) = (&step.key.0, step.key.1);
        match once {
            None => (
                format!(
                    "Rank {rank} of {job} works {:.2} times as long as {}, and is waited for{}.",
                    self.ratio,
                    self.whom(),
                    whole.map(Whole::text).unwrap_or_default()
                ),
                "Compare its input (sequence lengths, experts), its GPU's clocks and throttle reasons, and its host's load \
                 with its peers'.",
            ),
            Some((mapped, is_warm)) => {
                let mapped = human(mapped);
                let when = if is_warm { "" } else { ", one of the first of its run" };
                (
                    format!(
                        "In {}{when}, rank {rank} of {job} came {} late while it mapped {mapped}.",
                        step.title(),
                        HumanDuration(self.ns())
                    ),
                    "One such step at the begin of a run or of a new shape is usual: memory is mapped and kernels are \
                     chosen. If it recurs, allocate the largest shape first.",
                )
            }
        }
    }

    /// `once` is set for a single step: the memory that it mapped, and whether the run is past its warm-up.
    fn sign(&self, view: &View<'_>, group: &Group<'_>, severity: Severity, once: Option<(u64, bool)>) -> Sign {
        let step = self.member.step;
        let (job, rank) = (&step.key.0, step.key.1);
        let title = step.title();
        let mut evidence = vec![
            Evidence { name: "lag_ratio", value: self.ratio },
            Evidence { name: "lag_seconds", value: seconds(self.ns()) },
            Evidence { name: "peers_waited_seconds", value: seconds(self.waited_ns) },
            Evidence { name: "peers_count", value: number(self.peers as u64) },
        ];
        evidence.extend(once.map(|(mapped, _)| bytes("mapped_bytes", mapped)));
        let whole = group.whole.filter(|_| once.is_none());
        evidence.extend(whole.into_iter().flat_map(Whole::evidence));
        let (what, advice) = self.words(whole, once);
        Sign {
            kind: FindingKind::Straggler,
            subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
            severity,
            certainty: Certainty::Observed,
            begin_ns: step.begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: step.number,
            code: None,
            lag_cause: once.map(|_| LagCause::Memory),
            waiting_ranks: Vec::new(),
            lost_ns: Some(self.lost_ns()),
            evidence,
            text: Text {
                what,
                why: format!(
                    "In {title} it worked {}, its peers {} at the median, and they spent {} more in communication than \
                     it did.",
                    HumanDuration(self.work_ns),
                    HumanDuration(self.peers_ns),
                    HumanDuration(self.waited_ns)
                ),
                advice: advice.to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::compare::Compare;
    use super::super::hand::Hand;
    use super::super::steps::Step;
    use super::*;
    use crate::clock::{MILLISECOND_NS, SECOND_NS};
    use crate::phases::hand::key;

    /// A step of four ranks, of which the last computes so long and waits so long; the others 100 and 60 ms.
    fn group(nth: u64, compute_ms: i64, comm_ms: i64) -> Vec<Step> {
        let begin_ns = i64::try_from(nth).unwrap() * SECOND_NS;
        let step = |rank, compute_ms, comm_ms| {
            Hand::step(rank, nth, begin_ns, &[("data", 7), ("forward", compute_ms), ("comm", comm_ms)])
        };
        (0..3).map(|rank| step(rank, 100, 60)).chain([step(3, compute_ms, comm_ms)]).collect()
    }

    /// The numbers of the steps in which a sign is returned, if the last rank computes and waits as given in each.
    fn reported(steps: impl Iterator<Item = (u64, i64, i64)>, settings: impl FnOnce(&mut Hand)) -> Vec<u64> {
        let (mut hand, mut detector) = (Hand::with_ranks(4), Compare::default());
        settings(&mut hand);
        let signs =
            steps.flat_map(|(nth, compute_ms, comm_ms)| hand.steps_end(&mut detector, group(nth, compute_ms, comm_ms)));
        signs.map(|sign| sign.step.expect("a number")).collect()
    }

    #[test]
    fn a_rank_that_computes_longer_in_five_steps_after_the_warm_up_is_reported_with_what_it_costs() {
        let (mut hand, mut detector) = (Hand::with_ranks(4), Compare::default());
        for nth in 0..7 {
            assert_eq!(hand.steps_end(&mut detector, group(nth, 130, 30)), [], "step {nth}");
        }
        let [sign] = hand.steps_end(&mut detector, group(7, 130, 30)).try_into().expect("one");
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (FindingKind::Straggler, Severity::Warning, Certainty::Observed)
        );
        assert_eq!(sign.subject, Subject { gpu: Some(3), job: Some("j".into()), rank: Some(3) });
        assert_eq!((sign.begin_ns, sign.until_ns), (3 * SECOND_NS, hand.now_ns + hand.settings.hold_ns));
        assert_eq!(sign.lost_ns, Some(450 * MILLISECOND_NS), "30 ms of each of three in five steps");
        let values: Vec<_> = sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect();
        assert_eq!(
            values[..4],
            [("lag_ratio", 1.3), ("lag_seconds", 0.03), ("peers_waited_seconds", 0.03), ("peers_count", 3.0)]
        );
        assert_eq!(
            sign.text.what,
            "Rank 3 of j works 1.30 times as long as the 3 other ranks that do the same work, and is waited for; if all worked \
             alike, the step would take 144 ms instead of 167 ms."
        );
        assert_eq!(
            sign.text.why,
            "In step 7 it worked 130 ms, its peers 100 ms at the median, and they spent 30 ms more in communication \
             than it did."
        );
        assert_eq!(Hand::ratios(&detector, 3).compute_lag, Some(1.3));
        assert_eq!(Hand::ratios(&detector, 0).compute_lag, Some(1.0));
        // The first steps of another run say nothing, and it counts anew.
        hand.steps_end(&mut detector, group(8, 130, 30).into_iter().map(|step| Step { nth: 0, ..step }).collect());
        assert_eq!(hand.steps_end(&mut detector, group(9, 130, 30)), []);
        hand.ranks.pop();
        hand.steps_end(&mut detector, Vec::new());
        assert_eq!(Hand::ratios(&detector, 3).compute_lag, None, "it has gone");
    }

    #[test]
    fn a_lag_counts_from_its_bounds_on_and_where_it_is_waited_for() {
        let steady = |compute_ms, comm_ms| reported((0..8).map(|nth| (nth, compute_ms, comm_ms)), |_| {});
        let none = Vec::<u64>::new();
        assert_eq!((steady(120, 40), steady(119, 40)), (vec![7], none.clone()));
        // Half of the lag of 40 ms is waited for, or less.
        assert_eq!((steady(140, 40), steady(140, 41)), (vec![7], none.clone()));
        let least = |lag_ns| reported((0..8).map(|nth| (nth, 130, 30)), |hand| hand.settings.lag_ns = lag_ns);
        assert_eq!((least(30 * MILLISECOND_NS), least(30 * MILLISECOND_NS + 1)), (vec![7], none.clone()));
        let later = reported((0..9).map(|nth| (nth, 130, 30)), |hand| hand.settings.warm_up_steps = 4);
        assert_eq!(later, [8]);
    }

    #[test]
    fn fifteen_of_exactly_the_last_twenty_steps_that_lag_last() {
        // Of exactly the last twenty, and only in steps that lag.
        let but = |not: &'static [u64], last: u64| {
            let of = move |at: u64| match (not.contains(&at), at.is_multiple_of(2)) {
                (true, _) => (at + 3, 100, 60),
                (_, true) => (at + 3, 120, 40),
                (_, false) => (at + 3, 200, 0),
            };
            reported((0..3).map(|nth| (nth, 100, 60)).chain((0..=last).map(of)), |hand| hand.settings.lag = 1.15)
        };
        assert_eq!(but(&[3, 7, 11, 15, 18], 19), [22]);
        assert_eq!(but(&[3, 7, 11, 15, 20], 20), [21, 22]);
        // What is older than twenty steps is forgotten.
        let often = |nth: u64| if nth.is_multiple_of(2) { (nth, 100, 60) } else { (nth, 200, 0) };
        assert_eq!(reported((0..60).map(often), |_| {}), Vec::<u64>::new());
    }

    #[test]
    fn a_rank_that_flushed_its_cache_is_late_for_that_reason() {
        let trouble = |rank, kind| Trouble { kind, key: key(rank), from_ns: 5 * SECOND_NS, to_ns: 5 * SECOND_NS };
        let with =
            |rank, kind| reported((0..11).map(|nth| (nth, 130, 30)), |hand| hand.troubles = vec![trouble(rank, kind)]);
        assert_eq!(with(3, FindingKind::AllocatorThrash), [10], "five after step 5");
        assert_eq!(with(2, FindingKind::AllocatorThrash), [7, 8, 9, 10], "another's");
        assert_eq!(with(3, FindingKind::LowHeadroom), [7, 8, 9, 10]);
    }

    #[test]
    fn one_step_that_lags_far_while_it_maps_memory_is_reported_for_information() {
        let once = |nth, compute_ms, mapped_bytes: u64| {
            let (mut hand, mut detector) = (Hand::with_ranks(4), Compare::default());
            let mut steps = group(nth, compute_ms, 0);
            steps[3].rise_bytes = Some(mapped_bytes);
            hand.steps_end(&mut detector, steps).pop()
        };
        let sign = once(0, 150, MAPPED_BYTES).expect("far, and much");
        assert_eq!(sign.severity, Severity::Info);
        assert_eq!(
            sign.text.what,
            "In step 0, one of the first of its run, rank 3 of j came 50 ms late while it mapped 1.0 GiB."
        );
        assert!(sign.evidence.iter().any(|evidence| evidence.name == "mapped_bytes"));
        assert!(!once(3, 150, MAPPED_BYTES).expect("after the warm-up too").text.what.contains("first"));
        assert!(once(0, 149, MAPPED_BYTES).is_none() && once(0, 150, MAPPED_BYTES - 1).is_none());
        // Far in relation, and still short.
        let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
        let short = |rank, compute_ms, comm_ms| Step {
            rise_bytes: Some(MAPPED_BYTES),
            ..Hand::step(rank, 0, 0, &[("forward", compute_ms), ("comm", comm_ms)])
        };
        assert_eq!(hand.steps_end(&mut detector, vec![short(0, 20, 55), short(1, 69, 6)]), []);
        assert_eq!(hand.steps_end(&mut detector, vec![short(0, 20, 55), short(1, 70, 6)]).len(), 1);
    }

    #[test]
    fn ranks_whose_short_forward_passes_miss_each_other_are_compared_by_their_backward_passes() {
        let lag = |phases: [(&str, i64); 4]| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
            let step = |rank, begin_ms| Hand::step(rank, 3, begin_ms * MILLISECOND_NS, &phases);
            hand.steps_end(&mut detector, vec![step(0, 0), step(1, 3)]);
            Hand::ratios(&detector, 0).compute_lag
        };
        assert_eq!(lag([("forward", 1), ("backward", 60), ("comm", 9), ("optimizer", 4)]), Some(1.0));
        // The passes of a pipeline's stages miss each other, and only what is done once at the end does not.
        assert_eq!(lag([("forward", 1), ("backward", 2), ("comm", 9), ("optimizer", 4)]), None);
        assert_eq!(lag([("forward", 1), ("comm", 9), ("forward", 1), ("optimizer", 4)]), None);
    }

    #[test]
    fn a_step_waits_for_all_ranks_but_not_for_long_and_not_with_many() {
        let one_missing = |nth| group(nth, 130, 30).into_iter().skip(1);
        let (mut hand, mut detector) = (Hand::with_ranks(4), Compare::default());
        hand.settings.warm_up_steps = 0;
        let compared = |detector: &Compare| Hand::ratios(detector, 3).compute_lag.is_some();
        hand.steps_end(&mut detector, one_missing(0).collect());
        assert!(!compared(&detector));
        hand.now_ns += 10 * SECOND_NS;
        hand.steps_end(&mut detector, Vec::new());
        assert!(!compared(&detector));
        hand.now_ns += 1;
        hand.steps_end(&mut detector, Vec::new());
        assert!(compared(&detector));
        // The missing rank's own comes too late, and is compared with none.
        let late = group(0, 130, 30).into_iter().take(1).collect();
        assert_eq!(hand.steps_end(&mut detector, late), []);
        assert_eq!(Hand::ratios(&detector, 0).compute_lag, None);
        let mut many = Compare::default();
        hand.steps_end(&mut many, (0..8).flat_map(one_missing).collect());
        assert!(!compared(&many));
        hand.steps_end(&mut many, one_missing(8).collect());
        assert!(compared(&many));
    }

    #[test]
    fn only_steps_of_one_number_and_one_time_with_communication_are_compared() {
        let compared = |change: &dyn Fn(&mut Step)| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), Compare::default());
            let step = |rank| Hand::step(rank, 3, 0, &[("forward", 100), ("comm", 10)]);
            let mut other = step(1);
            change(&mut other);
            hand.steps_end(&mut detector, vec![step(0), other]);
            Hand::ratios(&detector, 0).compute_lag
        };
        assert_eq!(compared(&|_| {}), Some(1.0));
        assert_eq!(compared(&|step| step.number = Some(4)), None);
        assert_eq!(compared(&|step| step.number = None), None);
        assert_eq!(compared(&|step| step.phases.clear()), None, "no communication");
        assert_eq!(compared(&|step| step.key.0 = "k".into()), None, "another job's");
        let moved = |by_ns: i64| {
            move |step: &mut Step| {
                step.begin_ns += by_ns;
                step.end_ns += by_ns;
            }
        };
        let length_ns = 110 * MILLISECOND_NS;
        assert_eq!((compared(&moved(length_ns)), compared(&moved(length_ns + 1))), (Some(1.0), None));
        assert_eq!((compared(&moved(-length_ns)), compared(&moved(-length_ns - 1))), (Some(1.0), None));
    }
}
