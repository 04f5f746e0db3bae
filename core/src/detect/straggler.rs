//! `straggler`: a rank that computes longer than its peers, which wait for it in their collectives.
//!
//! Within one step, the time outside communication and data of a rank is compared with the median of the job's other
//! ranks on this node, and counts as a lag if those spent about as much longer in communication. Ranks with inputs of
//! different lengths lag in turn, by chance: so a rank is a straggler if it lags in each of its last steps by about as
//! much, or in most of many. One step that lags far because the rank mapped memory, as the first steps of a run do, is
//! reported for information, because it explains its peers' slow collectives.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Span, Subject, Text, seconds};
use super::steps::Step;
use super::view::{View, bytes, human, median, ratio};
use super::{Detector, Ratios, Trouble};
use crate::clock::SECOND_NS;
use crate::jobs::JobId;
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Steps of a job that wait for their other ranks, at most.
const MOST_WAITING: usize = 8;
/// How long a step waits for the others.
const PATIENCE_NS: i64 = 10 * SECOND_NS;
/// Steps that must all have the lag, by about as much: the ratios are apart by at most this part of their mean lag.
const STEADY_STEPS: usize = 5;
const STEADY_SPREAD: f64 = 0.5;
/// Or of so many steps, so many.
const STEPS: usize = 20;
const LAGGING_STEPS: usize = 15;
/// What the peers wait for a rank must be at least this part of its lag.
const WAITED_SHARE: f64 = 0.5;
/// A single step is reported from this lag on, relative and absolute.
const FAR: f64 = 1.5;
const FAR_NS: i64 = 50_000_000;
/// Memory that a step must have mapped to be named as the reason, bytes.
const MAPPED_BYTES: u64 = 1 << 30;

/// Puts the ranks of one step beside each other.
#[derive(Debug, Default)]
pub(super) struct Straggler {
    waiting: BTreeMap<JobId, VecDeque<Group>>,
    ranks: BTreeMap<RankKey, Lags>,
}

/// The ranks of one step that have ended it.
#[derive(Debug)]
struct Group {
    number: u64,
    since_ns: i64,
    steps: Vec<Step>,
}

#[derive(Debug, Default)]
struct Lags {
    /// By how much it lagged in each of its last steps; 1 where it did not.
    recent: VecDeque<f64>,
    last_ratio: Option<f64>,
}

/// One rank's lag behind the others in one step.
struct Lag<'a> {
    step: &'a Step,
    compute_ns: i64,
    peers_ns: i64,
    waited_ns: i64,
    ratio: f64,
}

impl Detector for Straggler {
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        self.waiting.retain(|job, _| view.ranks.iter().any(|rank| rank.key.0 == *job));
        for step in view.steps {
            self.add(view, step);
        }
        let mut complete = Vec::new();
        for (job, groups) in &mut self.waiting {
            let ranks = view.ranks.iter().filter(|rank| rank.key.0 == *job).count();
            while let Some(first) = groups.front() {
                let is_old = view.now_ns - first.since_ns > PATIENCE_NS || groups.len() > MOST_WAITING;
                if first.steps.len() < ranks && !is_old {
                    break;
                }
                complete.extend(groups.pop_front());
            }
        }
        for group in &complete {
            for position in 0..group.steps.len() {
                self.judge(view, &group.steps, position, troubles, signs);
            }
        }
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, lags) in &self.ranks {
            out.entry(key.clone()).or_default().compute_lag = lags.last_ratio;
        }
    }
}

impl Straggler {
    fn add(&mut self, view: &View<'_>, step: &Step) {
        let Some(number) = step.number else { return };
        let groups = self.waiting.entry(step.key.0.clone()).or_default();
        let overlaps = |group: &Group| {
            group.steps.iter().all(|other| other.begin_ns <= step.end_ns && step.begin_ns <= other.end_ns)
        };
        let known = groups.iter_mut().find(|group| group.number == number && overlaps(group));
        match known {
            Some(group) => group.steps.push(step.clone()),
            None => groups.push_back(Group { number, since_ns: view.now_ns, steps: vec![step.clone()] }),
        }
    }

    fn judge(&mut self, view: &View<'_>, steps: &[Step], position: usize, troubles: &[Trouble], signs: &mut Vec<Sign>) {
        let Some(lag) = lag(view, steps, position) else { return };
        let lags = self.ranks.entry(lag.step.key.clone()).or_default();
        lags.last_ratio = Some(lag.ratio);
        let lag_ns = lag.compute_ns - lag.peers_ns;
        #[allow(clippy::cast_precision_loss, reason = "a share of milliseconds")]
        let is_waited_for = lag.waited_ns as f64 >= WAITED_SHARE * lag_ns as f64;
        let settings = view.settings;
        let is_lagging = lag.ratio >= settings.lag && lag_ns >= settings.lag_ns && is_waited_for;
        let is_warm = lag.step.nth >= settings.warm_up_steps;
        let (from_ns, to_ns) = (lag.step.begin_ns, lag.step.end_ns);
        // A rank that flushed its allocator's cache is late for that reason: allocator_thrash reports it.
        let thrashed = troubles.iter().any(|trouble| {
            trouble.kind == Kind::AllocatorThrash && trouble.key == lag.step.key && trouble.meets(from_ns, to_ns)
        });
        if is_warm {
            lags.recent.push_back(if is_lagging && !thrashed { lag.ratio } else { 1.0 });
        } else {
            lags.recent.clear();
        }
        while lags.recent.len() > STEPS {
            lags.recent.pop_front();
        }
        if !is_lagging || thrashed {
            return;
        }
        let is_lasting = lags.is_lasting();
        let mapped = lag.step.rise_bytes.filter(|rise_bytes| *rise_bytes >= MAPPED_BYTES);
        let is_far = lag.ratio >= FAR && lag_ns >= FAR_NS;
        if is_lasting {
            signs.push(lag.sign(view, Severity::Warning, None));
        } else if let (true, Some(mapped)) = (is_far, mapped) {
            signs.push(lag.sign(view, Severity::Info, Some((mapped, is_warm))));
        }
    }
}

impl Lags {
    /// Whether the last steps make it a straggler.
    fn is_lasting(&self) -> bool {
        let lagging = self.recent.iter().filter(|ratio| **ratio > 1.0).count();
        if lagging >= LAGGING_STEPS {
            return true;
        }
        let last: Vec<f64> = self.recent.iter().rev().take(STEADY_STEPS).copied().collect();
        let (least, most) =
            last.iter().fold((f64::MAX, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
        #[allow(clippy::cast_precision_loss, reason = "five steps")]
        let mean = last.iter().sum::<f64>() / last.len().max(1) as f64;
        last.len() == STEADY_STEPS && least > 1.0 && most - least <= STEADY_SPREAD * (mean - 1.0)
    }
}

/// How one rank of a step compares with the others; `None` where communication is not marked, or times are nothing.
fn lag<'a>(view: &View<'_>, steps: &'a [Step], position: usize) -> Option<Lag<'a>> {
    let settings = view.settings;
    let comm_ns = |step: &Step| step.time_in(&settings.comm_phases);
    let compute_ns =
        |step: &Step| Some(step.length_ns() - comm_ns(step)? - step.time_in(&settings.data_phases).unwrap_or(0));
    let step = steps.get(position)?;
    let others = || steps.iter().enumerate().filter(move |(other, _)| *other != position).map(|(_, step)| step);
    let own_ns = compute_ns(step)?;
    let peers_ns = median(others().map(compute_ns).collect::<Option<Vec<i64>>>()?)?;
    let waited_ns = median(others().map(comm_ns).collect::<Option<Vec<i64>>>()?)? - comm_ns(step)?;
    Some(Lag { step, compute_ns: own_ns, peers_ns, waited_ns, ratio: ratio(own_ns, peers_ns)? })
}

impl Lag<'_> {
    /// `once` is set for a single step: the memory that it mapped, and whether the run is past its warm-up.
    fn sign(&self, view: &View<'_>, severity: Severity, once: Option<(u64, bool)>) -> Sign {
        let (job, rank) = (&self.step.key.0, self.step.key.1);
        let lag_ns = self.compute_ns - self.peers_ns;
        let title = self.step.title();
        let mut evidence = vec![
            Evidence { name: "lag_ratio", value: self.ratio },
            Evidence { name: "lag_seconds", value: seconds(lag_ns) },
            Evidence { name: "peers_waited_seconds", value: seconds(self.waited_ns) },
        ];
        evidence.extend(once.map(|(mapped, _)| bytes("mapped_bytes", mapped)));
        let (what, advice) = match once {
            None => (
                format!(
                    "Rank {rank} of {job} computes {:.2} times as long as its peers, which wait for it.",
                    self.ratio
                ),
                "Compare its input (sequence lengths, experts), its GPU's clocks and throttle reasons, and its host's load \
                 with its peers'.",
            ),
            Some((mapped, is_warm)) => {
                let mapped = human(mapped);
                let when = if is_warm { "" } else { ", one of the first of its run" };
                (
                    format!(
                        "In {title}{when}, rank {rank} of {job} came {} late while it mapped {mapped}.",
                        Span(lag_ns)
                    ),
                    "One such step at the begin of a run or of a new shape is usual: memory is mapped and kernels are \
                     chosen. If it recurs, allocate the largest shape first.",
                )
            }
        };
        Sign {
            kind: Kind::Straggler,
            subject: Subject { gpu: self.step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
            severity,
            certainty: Certainty::Observed,
            begin_ns: self.step.begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: self.step.number,
            code: None,
            waiting_ranks: Vec::new(),
            evidence,
            text: Text {
                what,
                why: format!(
                    "In {title} it computed {}, its peers {} at the median, and they spent {} more in communication than \
                     it did.",
                    Span(self.compute_ns),
                    Span(self.peers_ns),
                    Span(self.waited_ns)
                ),
                advice: advice.to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::clock::MILLISECOND_NS;
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
        let (mut hand, mut detector) = (Hand::with_ranks(4), Straggler::default());
        settings(&mut hand);
        let signs =
            steps.flat_map(|(nth, compute_ms, comm_ms)| hand.steps_end(&mut detector, group(nth, compute_ms, comm_ms)));
        signs.map(|sign| sign.step.expect("a number")).collect()
    }

    #[test]
    fn a_rank_that_computes_longer_in_five_steps_after_the_warm_up_is_reported_with_what_it_costs() {
        let (mut hand, mut detector) = (Hand::with_ranks(4), Straggler::default());
        for nth in 0..7 {
            assert_eq!(hand.steps_end(&mut detector, group(nth, 130, 30)), [], "step {nth}");
        }
        let [sign] = hand.steps_end(&mut detector, group(7, 130, 30)).try_into().expect("one");
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (Kind::Straggler, Severity::Warning, Certainty::Observed)
        );
        assert_eq!(sign.subject, Subject { gpu: Some(3), job: Some("j".into()), rank: Some(3) });
        assert_eq!((sign.begin_ns, sign.until_ns), (7 * SECOND_NS, hand.now_ns + hand.settings.hold_ns));
        let values: Vec<_> = sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect();
        assert_eq!(values, [("lag_ratio", 1.3), ("lag_seconds", 0.03), ("peers_waited_seconds", 0.03)]);
        assert_eq!(sign.text.what, "Rank 3 of j computes 1.30 times as long as its peers, which wait for it.");
        assert_eq!(
            sign.text.why,
            "In step 7 it computed 130 ms, its peers 100 ms at the median, and they spent 30 ms more in communication \
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
    fn five_steps_by_about_as_much_or_fifteen_of_twenty_last() {
        let lasts = |ratios: &[f64]| Lags { recent: ratios.iter().copied().collect(), last_ratio: None }.is_lasting();
        assert!(lasts(&[1.3; 5]) && !lasts(&[1.3; 4]) && !lasts(&[]));
        assert!(!lasts(&[1.3, 1.3, 1.0, 1.3, 1.3]) && lasts(&[1.0, 1.3, 1.3, 1.3, 1.3, 1.3]));
        // Apart by half of their mean lag, and by more.
        assert!(lasts(&[1.75, 2.0, 2.25, 2.0, 2.0]) && !lasts(&[1.75, 2.0, 2.26, 2.0, 2.0]));
        let in_turn = |lagging: usize| {
            let of = |nth| if nth >= lagging { 1.0 } else { [1.2, 3.0][nth % 2] };
            lasts(&(0..STEPS).map(of).collect::<Vec<f64>>())
        };
        assert!(in_turn(15) && !in_turn(14));
        assert!(!lasts(&[1.2, 1.2, 1.2, 1.2, 1.4]), "apart by most of it");
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
        assert_eq!(with(3, Kind::AllocatorThrash), [10], "five after step 5");
        assert_eq!(with(2, Kind::AllocatorThrash), [7, 8, 9, 10], "another's");
        assert_eq!(with(3, Kind::LowHeadroom), [7, 8, 9, 10]);
    }

    #[test]
    fn one_step_that_lags_far_while_it_maps_memory_is_reported_for_information() {
        let once = |nth, compute_ms, mapped_bytes: u64| {
            let (mut hand, mut detector) = (Hand::with_ranks(4), Straggler::default());
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
        let (mut hand, mut detector) = (Hand::with_ranks(2), Straggler::default());
        let short = |rank, compute_ms, comm_ms| Step {
            rise_bytes: Some(MAPPED_BYTES),
            ..Hand::step(rank, 0, 0, &[("forward", compute_ms), ("comm", comm_ms)])
        };
        assert_eq!(hand.steps_end(&mut detector, vec![short(0, 20, 55), short(1, 69, 6)]), []);
        assert_eq!(hand.steps_end(&mut detector, vec![short(0, 20, 55), short(1, 70, 6)]).len(), 1);
    }

    #[test]
    fn a_step_waits_for_all_ranks_but_not_for_long_and_not_with_many() {
        let one_missing = |nth| group(nth, 130, 30).into_iter().skip(1);
        let (mut hand, mut detector) = (Hand::with_ranks(4), Straggler::default());
        hand.settings.warm_up_steps = 0;
        let compared = |detector: &Straggler| Hand::ratios(detector, 3).compute_lag.is_some();
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
        let mut many = Straggler::default();
        hand.steps_end(&mut many, (0..8).flat_map(one_missing).collect());
        assert!(!compared(&many));
        hand.steps_end(&mut many, one_missing(8).collect());
        assert!(compared(&many));
    }

    #[test]
    fn only_steps_of_one_number_and_one_time_with_communication_are_compared() {
        let compared = |change: &dyn Fn(&mut Step)| {
            let (mut hand, mut detector) = (Hand::with_ranks(2), Straggler::default());
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
