//! What a detector is, and what it reports beside findings.

use super::finding::{FindingKind, Sign};
use super::steps::Step;
use super::view::View;
use crate::phases::RankKey;
use std::collections::BTreeMap;

/// A detector of one or more kinds of findings.
pub(super) trait Detector: Send {
    /// Examines one moment. `troubles` has the recent troubles of ranks: those of earlier turns, and those that the detectors
    /// before this one have added in this turn.
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>);

    /// Adds what it knows of each rank's last steps.
    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        let _ = out;
    }

    /// Adds in how many steps it looked for each of its kinds.
    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        let _ = out;
    }
}

/// In how many steps of ranks a kind of finding was looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Looked {
    /// Steps that ended.
    pub steps: u64,
    /// Of these, the steps that could not be judged because a required input was missing. Each other step had a result: the
    /// problem is there, or it is not.
    pub abstained: u64,
}

impl Looked {
    /// Counts a step.
    pub(super) fn note(&mut self, is_judged: bool) {
        self.steps += 1;
        self.abstained += u64::from(!is_judged);
    }

    /// This and another recording's together.
    pub fn add(&mut self, other: Self) {
        self.steps += other.steps;
        self.abstained += other.abstained;
    }

    /// The share of the steps of which nothing could be said; `None` without steps.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "counts of steps")]
    pub fn abstained_ratio(self) -> Option<f64> {
        (self.steps > 0).then(|| self.abstained as f64 / self.steps as f64)
    }
}

/// An interval in which a rank was short of memory, so that other ranks may have waited for it.
#[derive(Debug, Clone)]
pub(super) struct Trouble {
    pub kind: FindingKind,
    pub key: RankKey,
    pub from_ns: i64,
    pub to_ns: i64,
}

impl Trouble {
    /// Whether it overlaps an interval.
    pub fn meets(&self, from_ns: i64, to_ns: i64) -> bool {
        self.from_ns <= to_ns && from_ns <= self.to_ns
    }

    /// Whether it is one of the step's rank, and overlaps the step.
    pub fn is_of(&self, step: &Step) -> bool {
        self.key == step.key && self.meets(step.begin_ns, step.end_ns)
    }

    /// Whether it is one of any rank of the step's job, and overlaps the step.
    pub fn is_of_job(&self, step: &Step) -> bool {
        self.key.0 == step.key.0 && self.meets(step.begin_ns, step.end_ns)
    }
}

/// What a rank's last steps were like; a part that is not known is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Ratios {
    /// The last step's communication over its own healthy baseline.
    pub comm_slowdown: Option<f64>,
    /// The last step's work over the median of the ranks that are like it. Where work is not known, of a late rank:
    /// the step over what it would have taken without the lag.
    pub compute_lag: Option<f64>,
    /// Whether its last step could be compared with that of a rank that is like it.
    pub compared: Option<bool>,
    /// Share of the last steps spent waiting for data.
    pub data_stall: Option<f64>,
    /// Time until memory is full at the present growth, seconds.
    pub memory_full_seconds: Option<f64>,
}
