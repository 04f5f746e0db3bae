//! `straggler`: a rank that computes longer than its peers, which wait for it in their collectives.
//!
//! Within one step, the time outside communication and data of a rank is compared with the median of the job's other
//! ranks on this node, and counts as a lag if those spent about as much longer in communication. Ranks with inputs of
//! different lengths lag in turn, by chance: so a rank is a straggler if it lags in each of its last steps by about as
//! much, or in most of many. One step that lags far because the rank mapped memory, as the first steps of a run do, is
//! told as what it is, for information: its peers' slow collectives are explained by it.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Span, Subject, Text, seconds};
use super::steps::Step;
use super::view::{View, bytes, human, median, ratio};
use super::{Detector, Ratios, Trouble};
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

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
/// One step alone is told from this lag on, relative and absolute.
const FAR: f64 = 1.5;
const FAR_NS: i64 = 50_000_000;
/// Memory that a step must have mapped to be told as the reason, bytes.
const MAPPED_BYTES: u64 = 1 << 30;

/// Puts the ranks of one step beside each other.
#[derive(Debug, Default)]
pub(super) struct Straggler {
    waiting: BTreeMap<Arc<str>, VecDeque<Group>>,
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
        for group in complete.iter().filter(|group| group.steps.len() > 1) {
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
        // A rank that flushed its allocator's cache is late for that reason, which is told as what it is.
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
