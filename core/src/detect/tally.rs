//! How many findings there have been of each subject: the counter `highwater_findings_total`.
//!
//! Enters: findings that are raised. Leaves: a count for each kind, GPU, job and rank. Invariants: at most [`MOST_SERIES`]
//! counts are kept, and the owner with the most of them loses its oldest. A dropped count is not added to any other; if it
//! comes back, it starts at 0, which every reader of counters takes for a restart. A count is exported as 0 before it is
//! exported as 1, because a reader of counters sees no increase from "no such series" to 1.

use super::finding::{Finding, FindingKind};
use crate::jobs::JobId;
use crate::shares;
use std::collections::BTreeMap;

/// Counts that are kept.
pub(super) const MOST_SERIES: usize = 512;

/// What is counted. Each kind also has a count without a subject, which is always 0, so that it has a series from the start.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Counted {
    /// What kind.
    pub kind: FindingKind,
    /// Index and UUID of the GPU.
    pub gpu: Option<(String, String)>,
    /// The job.
    pub job: Option<JobId>,
    /// Which process of it.
    pub rank: Option<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Count {
    raised: u64,
    first_ns: i64,
    last_ns: i64,
    /// It has been shown as more than 0, and is never shown as less again.
    is_shown: bool,
}

/// The counts.
#[derive(Debug, Default)]
pub(super) struct FindingCounts(BTreeMap<Counted, Count>);

impl FindingCounts {
    /// Counts a finding. If there are then too many counts, the owner with the most loses the one that has not changed for
    /// longest.
    pub(super) fn raise(&mut self, finding: &Finding, now_ns: i64) {
        let subject = &finding.sign.subject;
        let of =
            Counted { kind: finding.sign.kind, gpu: finding.gpu.clone(), job: subject.job.clone(), rank: subject.rank };
        let new = Count { raised: 0, first_ns: now_ns, last_ns: now_ns, is_shown: false };
        let count = self.0.entry(of).or_insert(new);
        (count.raised, count.last_ns) = (count.raised + 1, now_ns);
        if self.0.len() > MOST_SERIES {
            let owner = |of: &Counted| of.job.as_ref().map(|job| job.scope().clone());
            let largest = shares::largest(self.0.keys().map(owner)).map(|(owner, _)| owner);
            let of_largest = self.0.iter().filter(|(of, _)| Some(owner(of)) == largest);
            let oldest = of_largest.min_by_key(|(_, count)| count.last_ns).map(|(of, _)| of.clone());
            oldest.and_then(|of| self.0.remove(&of));
        }
    }

    /// The counts to export at a time. A new count is exported as 0 for its first `settle_ns`.
    pub(super) fn shown(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(Counted, u64)> {
        let none = |kind| Counted { kind, gpu: None, job: None, rank: None };
        let mut shown: BTreeMap<Counted, u64> = FindingKind::ALL.into_iter().map(|kind| (none(kind), 0)).collect();
        for (of, count) in &mut self.0 {
            count.is_shown |= now_ns - count.first_ns >= settle_ns;
            shown.insert(of.clone(), if count.is_shown { count.raised } else { 0 });
        }
        shown.into_iter().collect()
    }
}
