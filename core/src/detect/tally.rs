//! Counters by subject: how many findings and incidents there have been, and how much time was lost.
//!
//! Enters: what is to be added to a count. Leaves: the counts. Invariants: the counts of each sort are bounded in number, and
//! the owner with the most of them loses its oldest. A dropped count is not added to any other; if it comes back, it starts at 0,
//! which every reader of counters takes for a restart. A count is exported as 0 before it is exported as more, because a reader of
//! counters sees no increase from "no such series" to 1.

use super::finding::{Finding, FindingKind};
use super::incident::{Cause, Concerned, Incident};
use crate::jobs::JobId;
use crate::scope::Scope;
use crate::shares;
use std::collections::BTreeMap;

/// Counts of findings that are kept, by rank; and of incidents, and of lost time, by job.
pub(super) const MOST_SERIES: usize = 512;
const MOST_OF_JOBS: usize = 128;

/// Something that is counted.
pub(super) trait HasJob: Ord + Clone {
    /// How many counts are kept.
    const MOST: usize;

    /// The job that it is about.
    fn job(&self) -> Option<&JobId>;
}

/// A kind of finding and whom it is about.
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

/// A cause of incidents and whose they are.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Incurred {
    /// What kind of cause.
    pub cause: Cause,
    /// The job, or the GPU without a job. `None` is a count per cause that stays 0, so that each cause has a series.
    pub whose: Option<Concerned>,
}

/// A job that lost time, and by what.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lost {
    /// The job.
    pub job: JobId,
    /// By what kind of cause.
    pub cause: Cause,
}

impl Counted {
    pub(super) fn of(finding: &Finding) -> Self {
        let subject = &finding.sign.subject;
        Self { kind: finding.sign.kind, gpu: finding.gpu.clone(), job: subject.job.clone(), rank: subject.rank }
    }
}

impl Incurred {
    pub(super) fn of(incident: &Incident) -> Self {
        Self { cause: incident.cause, whose: Some(incident.whose.clone()) }
    }
}

impl Lost {
    /// `None` for an incident of no job.
    pub(super) fn of(incident: &Incident) -> Option<Self> {
        Some(Self { job: incident.whose.job()?.clone(), cause: incident.cause })
    }
}

impl HasJob for Counted {
    const MOST: usize = MOST_SERIES;

    fn job(&self) -> Option<&JobId> {
        self.job.as_ref()
    }
}

impl HasJob for Incurred {
    const MOST: usize = MOST_OF_JOBS;

    fn job(&self) -> Option<&JobId> {
        self.whose.as_ref().and_then(Concerned::job)
    }
}

impl HasJob for JobId {
    const MOST: usize = MOST_OF_JOBS;

    fn job(&self) -> Option<&JobId> {
        Some(self)
    }
}

impl HasJob for Lost {
    const MOST: usize = MOST_OF_JOBS;

    fn job(&self) -> Option<&JobId> {
        Some(&self.job)
    }
}

#[derive(Debug, Clone, Copy)]
struct Count {
    sum: u64,
    first_ns: i64,
    last_ns: i64,
    /// It has been shown as more than 0, and is never shown as less again.
    is_shown: bool,
}

/// Time in steps that was not lost, by job. Lost time is often known only after the step was counted, and a counter
/// must not fall. So it is kept as a debt, and deducted from the steps that follow.
#[derive(Debug, Default)]
pub(super) struct Productive {
    counts: SubjectCounts<JobId>,
    owed_ns: BTreeMap<JobId, u64>,
}

impl Productive {
    /// Adds the time of a job's steps.
    pub(super) fn add(&mut self, job: &JobId, time_ns: u64, now_ns: i64) {
        let owed_ns = self.owed_ns.remove(job).unwrap_or(0);
        self.counts.add(job.clone(), time_ns.saturating_sub(owed_ns), now_ns);
        self.owe(job, owed_ns.saturating_sub(time_ns));
    }

    /// Takes lost time from what follows.
    pub(super) fn owe(&mut self, job: &JobId, lost_ns: u64) {
        if lost_ns > 0 && self.counts.0.contains_key(job) {
            *self.owed_ns.entry(job.clone()).or_default() += lost_ns;
        }
        if self.owed_ns.len() > MOST_OF_JOBS {
            self.owed_ns.retain(|job, _| self.counts.0.contains_key(job));
        }
    }

    /// The counts to export at a time, as [`SubjectCounts::shown`].
    pub(super) fn shown(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(JobId, u64)> {
        self.counts.shown(now_ns, settle_ns)
    }
}

/// The counts.
#[derive(Debug)]
pub(super) struct SubjectCounts<Of>(BTreeMap<Of, Count>);

impl<Of> Default for SubjectCounts<Of> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<Of: HasJob> SubjectCounts<Of> {
    /// Adds to a count. If there are then too many counts, the owner with the most loses the one that has not changed for longest.
    pub(super) fn add(&mut self, of: Of, more: u64, now_ns: i64) {
        let new = Count { sum: 0, first_ns: now_ns, last_ns: now_ns, is_shown: false };
        let count = self.0.entry(of).or_insert(new);
        (count.sum, count.last_ns) = (count.sum.saturating_add(more), now_ns);
        if self.0.len() > Of::MOST {
            let owner = |of: &Of| of.job().map(JobId::scope).cloned();
            let largest: Option<Option<Scope>> = shares::largest(self.0.keys().map(owner)).map(|(owner, _)| owner);
            let of_largest = self.0.iter().filter(|(of, _)| Some(owner(of)) == largest);
            let oldest = of_largest.min_by_key(|(_, count)| count.last_ns).map(|(of, _)| of.clone());
            oldest.and_then(|of| self.0.remove(&of));
        }
    }

    /// The counts to export at a time. A new count is exported as 0 for its first `settle_ns`.
    pub(super) fn shown(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(Of, u64)> {
        let show = |(of, count): (&Of, &mut Count)| {
            count.is_shown |= now_ns - count.first_ns >= settle_ns;
            (of.clone(), if count.is_shown { count.sum } else { 0 })
        };
        self.0.iter_mut().map(show).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_time_is_taken_from_the_steps_that_follow_and_no_count_falls() {
        let mut productive = Productive::default();
        let job = JobId::from("j");
        productive.owe(&job, 5);
        let mut counted = |time_ns: u64, lost_ns: u64| {
            productive.add(&job, time_ns, 0);
            productive.owe(&job, lost_ns);
            productive.shown(1, 0)[0].1
        };
        assert_eq!(counted(10, 0), 10, "nothing is owed of a job that had no step");
        assert_eq!(
            [counted(10, 25), counted(10, 0), counted(10, 1), counted(10, 0), counted(10, 0)],
            [20, 20, 20, 24, 34]
        );
    }

    #[test]
    fn time_is_kept_of_as_many_jobs_as_counts_are() {
        let mut productive = Productive::default();
        for number in 0..1_000 {
            let job = JobId::from(format!("job {number}").as_str());
            productive.add(&job, 10, number);
            productive.owe(&job, 100);
        }
        assert!(productive.owed_ns.len() <= MOST_OF_JOBS + 1 && productive.counts.0.len() == MOST_OF_JOBS);
    }
}
