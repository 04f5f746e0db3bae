//! `comm_starvation`: communication far slower than this rank's own healthy steps, while a rank of the same job was out of
//! memory.
//!
//! A collective ends when its last rank has come. One rank that flushes its allocator's cache, or has no room for
//! communication buffers, makes all others wait in theirs. What is found here is that both happened together; the
//! rank in trouble is named. Where a job marks no communication, its whole steps are compared instead, and more doubt is
//! told. Slow communication without a rank in trouble is no finding; the slowdown is a metric all the same.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Span, Subject, Text, seconds};
use super::steps::{Step, title};
use super::view::{View, median, ratio};
use super::{Detector, Ratios, Trouble};
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Healthy steps that the baseline is made of, at most.
const MOST_BASELINE: usize = 64;
/// And at least.
const LEAST_BASELINE: usize = 5;
/// Below this ratio a step counts as healthy.
const HEALTHY: f64 = 1.5;
/// Whole steps vary more than collectives do: they are slow at this part of the ratio asked for.
const STEP_FACTOR: f64 = 0.8;
/// After so many steps that were slow one after the other, with no rank of the job thrashing, slow is how it is now.
const ADOPTED_AFTER: usize = 20;
/// Full memory alone is taken for the cause only after this: a flush may still become known.
const SETTLE_NS: i64 = 300_000_000;
/// How long a slow step waits for a rank in trouble to be known.
const PATIENCE_NS: i64 = 2 * SECOND_NS;

/// Compares each rank's communication with its own past.
#[derive(Debug, Default)]
pub(super) struct CommStarvation {
    ranks: BTreeMap<RankKey, Baseline>,
    waiting: Vec<Slow>,
}

#[derive(Debug, Default)]
struct Baseline {
    /// Of communication if the flag is set, else of whole steps.
    is_comm: bool,
    healthy_ns: VecDeque<i64>,
    /// The slow steps since the last healthy one.
    slow_ns: VecDeque<i64>,
    last_ratio: Option<f64>,
}

/// A step whose communication was slow.
#[derive(Debug)]
struct Slow {
    key: RankKey,
    gpu: Option<usize>,
    step: Option<u64>,
    from_ns: i64,
    to_ns: i64,
    comm_ns: i64,
    baseline_ns: i64,
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
            baseline.adopt(has_thrashed(troubles, step));
        }
        self.waiting.retain(|slow| {
            let waited_ns = view.now_ns - slow.seen_ns;
            let Some(trouble) = slow.cause(troubles) else { return waited_ns < PATIENCE_NS };
            if trouble.kind != Kind::AllocatorThrash && waited_ns < SETTLE_NS {
                return true;
            }
            signs.push(slow.sign(view, trouble));
            false
        });
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, baseline) in self.ranks.iter().filter(|(_, baseline)| baseline.is_comm) {
            out.entry(key.clone()).or_default().comm_slowdown = baseline.last_ratio;
        }
    }
}

impl Baseline {
    fn judge(&mut self, view: &View<'_>, step: &Step) -> Option<Slow> {
        let settings = view.settings;
        let comm_ns = step.time_in(&settings.comm_phases);
        if comm_ns.is_some() != self.is_comm {
            *self = Self { is_comm: comm_ns.is_some(), ..Self::default() };
        }
        let took_ns = comm_ns.unwrap_or_else(|| step.length_ns());
        self.last_ratio = None;
        let baseline_ns = median(self.healthy_ns.iter().copied());
        let known = baseline_ns.filter(|_| self.healthy_ns.len() >= LEAST_BASELINE);
        let Some((baseline_ns, ratio)) = known.and_then(|known_ns| Some((known_ns, ratio(took_ns, known_ns)?))) else {
            if step.nth >= settings.warm_up_steps {
                self.learn(took_ns);
            }
            return None;
        };
        self.last_ratio = Some(ratio);
        if ratio >= HEALTHY {
            self.slow_ns.push_back(took_ns);
        } else {
            self.slow_ns.clear();
            if step.nth >= settings.warm_up_steps {
                self.learn(took_ns);
            }
        }
        let most = settings.comm_slowdown * if self.is_comm { 1.0 } else { STEP_FACTOR };
        (ratio >= most && took_ns - baseline_ns >= settings.comm_excess_ns).then(|| Slow {
            key: step.key.clone(),
            gpu: step.gpus.first().copied(),
            step: step.number,
            from_ns: step.begin_ns,
            to_ns: step.end_ns,
            comm_ns: took_ns,
            baseline_ns,
            ratio,
            is_comm: self.is_comm,
            seen_ns: view.now_ns,
        })
    }

    /// Another run, or longer sequences: what has been slow for long without a cause is the new baseline.
    fn adopt(&mut self, has_thrashed: bool) {
        if has_thrashed {
            self.slow_ns.clear();
        } else if self.slow_ns.len() >= ADOPTED_AFTER {
            self.healthy_ns = std::mem::take(&mut self.slow_ns);
        }
    }

    fn learn(&mut self, took_ns: i64) {
        self.healthy_ns.push_back(took_ns);
        if self.healthy_ns.len() > MOST_BASELINE {
            self.healthy_ns.pop_front();
        }
    }
}

/// Whether a rank of the step's job thrashed in it.
fn has_thrashed(troubles: &[Trouble], step: &Step) -> bool {
    troubles.iter().any(|trouble| {
        let is_of_job = trouble.key.0 == step.key.0 && trouble.meets(step.begin_ns, step.end_ns);
        trouble.kind == Kind::AllocatorThrash && is_of_job
    })
}

impl Slow {
    /// The trouble of a rank of the same job that overlaps the step; another rank's before one's own.
    fn cause<'a>(&self, troubles: &'a [Trouble]) -> Option<&'a Trouble> {
        let meets = |trouble: &&Trouble| trouble.key.0 == self.key.0 && trouble.meets(self.from_ns, self.to_ns);
        let rank_of = |trouble: &&Trouble| (trouble.key.1 == self.key.1, trouble.kind != Kind::AllocatorThrash);
        let found = troubles.iter().filter(meets).min_by_key(rank_of)?;
        // A rank that flushes has slow steps of its own: that is told as what it is.
        (self.is_comm || found.key.1 != self.key.1).then_some(found)
    }

    fn sign(&self, view: &View<'_>, trouble: &Trouble) -> Sign {
        let (job, rank) = (&self.key.0, self.key.1);
        let step = title(self.step);
        let what = if self.is_comm { "Communication" } else { "A step" };
        let did = match trouble.kind {
            Kind::AllocatorThrash => "flushed its allocator's cache",
            _ => "had almost no memory free",
        };
        Sign {
            kind: Kind::CommStarvation,
            subject: Subject { gpu: self.gpu, job: Some(job.clone()), rank: Some(rank) },
            severity: if self.ratio >= 10.0 { Severity::Critical } else { Severity::Warning },
            certainty: if self.is_comm { Certainty::Observed } else { Certainty::Suspected },
            begin_ns: self.from_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: self.step,
            code: None,
            evidence: vec![
                Evidence { name: "slowdown_ratio", value: self.ratio },
                Evidence { name: "took_seconds", value: seconds(self.comm_ns) },
                Evidence { name: "baseline_seconds", value: seconds(self.baseline_ns) },
                Evidence { name: "rank_in_trouble", value: f64::from(trouble.key.1) },
            ],
            text: Text {
                what: format!(
                    "{what} of rank {rank} of {job} in {step} took {}, {:.1} times its baseline, while rank {} {did}.",
                    Span(self.comm_ns),
                    self.ratio,
                    trouble.key.1
                ),
                why: format!(
                    "The median of its healthy steps is {}. Rank {} {did} in the same step; a collective ends only when \
                     its last rank has come.",
                    Span(self.baseline_ns),
                    trouble.key.1
                ),
                advice: format!(
                    "Give rank {} room: a batch smaller by one, shorter sequences, or recomputed activations. Compare its \
                     peak memory by phase with the other ranks'.",
                    trouble.key.1
                ),
            },
        }
    }
}
