//! The outcome of each event, with the label that counts it.

use super::account::{Account, Resource, Shortage};
use super::gpus::UnknownGpu;
use crate::mesh::BadMesh;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why an event is refused. The text names what is wrong. The other events of the batch are not affected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message explains it")]
pub enum Refusal {
    #[error("not a valid event: {0}")]
    Malformed(String),
    #[error("longer than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("{field}: {problem}")]
    BadName { field: &'static str, problem: String },
    #[error("{0}")]
    Missing(&'static str),
    #[error("mesh: {0}")]
    BadMesh(BadMesh),
    #[error("gpu: {0}")]
    UnknownGpu(UnknownGpu),
    #[error("time_unix_nano: {behind_s} s ago, older than the {kept_s} s that are kept")]
    TooOld { behind_s: i64, kept_s: i64 },
    #[error("time_unix_nano: {ahead_s} s ahead of this host's clock")]
    InFuture { ahead_s: i64 },
    #[error("{0} has not begun")]
    EndWithoutBegin(String),
    #[error("{what} ends {by_ns} ns before it began")]
    EndBeforeBegin { what: String, by_ns: i64 },
    #[error("jobs: {}", shortage(*.0, *.1))]
    TooManyJobs(Shortage, usize),
    #[error("ranks: {}", shortage(*.0, *.1))]
    TooManyRanks(Shortage, usize),
    #[error("job has more than {0} different phase or layer names")]
    TooManyNames(usize),
    #[error("phases of ranks with series of their own (annotations.max_phase_series): {}", shortage(*.0, *.1))]
    TooManySeries(Shortage, usize),
    #[error("profile of one step has more than {0} records of layers")]
    TooManyRecords(usize),
    #[error("more than {0} steps, phases and layers are open")]
    TooManyOpen(usize),
    #[error("job `{0}` belongs to another user or namespace")]
    NotOwner(String),
    #[error("k8s.namespace.name: is `{named}`, and the token is that of namespace `{own}`")]
    OtherNamespace { named: String, own: String },
    #[error("rank {rank} of job `{job}` is process {holder}, which still runs")]
    Contested { job: String, rank: u32, holder: u32 },
    #[error("{what}: {}", shortage(*.short, *.limit))]
    OverBudget { what: &'static str, resource: Resource, short: Shortage, limit: usize },
    #[error("more events a second than this sender's share of {0}")]
    OverRate(usize),
}

fn shortage(short: Shortage, limit: usize) -> String {
    match short {
        Shortage::Node => format!("this node keeps at most {limit}"),
        Shortage::Share => format!("this sender may have no more of the {limit} that all share"),
    }
}

impl Refusal {
    /// An owner may have no more of what all share; `what` names it for people.
    #[must_use]
    pub fn over_budget(what: &'static str, short: Shortage, resource: Resource, account: &Account) -> Self {
        Refusal::OverBudget { what, resource, short, limit: account.limit(resource) }
    }

    /// Whether there would be room if less were kept.
    #[must_use]
    pub fn is_want_of_room(&self) -> bool {
        use Refusal::{OverBudget, TooManyJobs, TooManyRanks, TooManySeries};
        matches!(self, TooManyJobs(..) | TooManyRanks(..) | TooManySeries(..) | OverBudget { .. })
    }

    /// Whether this resource is the one that is short.
    pub(super) fn is_over_budget_of(&self, of: Resource) -> bool {
        matches!(self, Refusal::OverBudget { resource, .. } if *resource == of)
    }

    /// Whether there is no room for the name of a layer's record, or for the record.
    pub(super) fn is_lack_for_record(&self) -> bool {
        matches!(self, Refusal::OverBudget { .. } | Refusal::TooManyNames(_) | Refusal::TooManyRecords(_))
    }

    /// The outcome that counts it.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            Refusal::Malformed(_) | Refusal::Missing(_) => Outcome::Malformed,
            Refusal::TooLarge { .. } => Outcome::TooLarge,
            Refusal::BadName { .. } | Refusal::BadMesh(_) => Outcome::BadName,
            Refusal::UnknownGpu(_) => Outcome::UnknownGpu,
            Refusal::TooOld { .. } => Outcome::TooOld,
            Refusal::InFuture { .. } => Outcome::InFuture,
            Refusal::EndWithoutBegin(_) => Outcome::EndWithoutBegin,
            Refusal::EndBeforeBegin { .. } => Outcome::EndBeforeBegin,
            Refusal::TooManyJobs(..) => Outcome::TooManyJobs,
            Refusal::TooManyRanks(..) => Outcome::TooManyRanks,
            Refusal::TooManyNames(_) | Refusal::TooManySeries(..) => Outcome::TooManyNames,
            Refusal::TooManyOpen(_) => Outcome::TooManyOpen,
            Refusal::NotOwner(_) | Refusal::OtherNamespace { .. } => Outcome::NotOwner,
            Refusal::Contested { .. } => Outcome::Contested,
            Refusal::OverBudget { .. } | Refusal::TooManyRecords(_) => Outcome::OverBudget,
            Refusal::OverRate(_) => Outcome::OverRate,
        }
    }
}

crate::labels! {
    /// Outcome of an event: the values of the label `outcome`.
    #[allow(missing_docs, reason = "docs/annotations.md has each")]
    pub enum Outcome {
        Accepted = "accepted",
        AcceptedWithoutGpu = "accepted_without_gpu",
        AcceptedOutOfOrder = "accepted_out_of_order",
        Malformed = "malformed",
        TooLarge = "too_large",
        BadName = "bad_name",
        UnknownGpu = "unknown_gpu",
        TooOld = "too_old",
        InFuture = "in_future",
        EndWithoutBegin = "end_without_begin",
        EndBeforeBegin = "end_before_begin",
        TooManyJobs = "too_many_jobs",
        TooManyRanks = "too_many_ranks",
        TooManyNames = "too_many_names",
        TooManyOpen = "too_many_open",
        NotOwner = "not_owner",
        Contested = "contested",
        OverBudget = "over_budget",
        OverRate = "over_rate",
    }
}

/// How many events had each outcome.
#[derive(Debug, Default)]
pub struct OutcomeCounts([AtomicU64; Outcome::ALL.len()]);

impl OutcomeCounts {
    /// Counts one event.
    pub fn count(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts some events.
    pub fn add(&self, outcome: Outcome, events: u64) {
        self.0[outcome as usize].fetch_add(events, Ordering::Relaxed);
    }

    /// How many events had this outcome since the start.
    #[must_use]
    pub fn get(&self, outcome: Outcome) -> u64 {
        self.0[outcome as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Limits, Owner, Within};
    use super::*;

    #[test]
    fn want_of_room_is_what_ranks_that_ended_can_mend() {
        let short = Shortage::Share;
        let mended =
            [Refusal::TooManyJobs(short, 1), Refusal::TooManyRanks(short, 1), Refusal::TooManySeries(short, 1)];
        assert!(mended.iter().all(Refusal::is_want_of_room));
        let others =
            [Refusal::TooManyNames(1), Refusal::TooManyOpen(1), Refusal::NotOwner("j".into()), Refusal::OverRate(1)];
        assert!(!others.iter().any(Refusal::is_want_of_room));
        let accounts = super::super::Accounts::new(&Limits { bytes: 4_096, ..Limits::default() });
        let account = accounts.of(&Owner::User { uid: 1, within: Within::Node });
        let over = Refusal::over_budget("bytes", Shortage::Node, Resource::Bytes, &account);
        assert!(over.is_want_of_room());
        assert_eq!(over.to_string(), "bytes: this node keeps at most 4096");
        assert_eq!(
            Refusal::TooManyJobs(short, 9).to_string(),
            "jobs: this sender may have no more of the 9 that all share"
        );
    }

    #[test]
    fn each_outcome_is_counted_by_itself() {
        let counts = OutcomeCounts::default();
        counts.count(Outcome::BadName);
        counts.add(Outcome::BadName, 2);
        counts.add(Outcome::OverRate, 5);
        let all = Outcome::ALL.map(|outcome| counts.get(outcome));
        assert_eq!((counts.get(Outcome::BadName), counts.get(Outcome::OverRate), all.iter().sum::<u64>()), (3, 5, 8));
    }

    #[test]
    fn refusals_have_the_outcome_of_their_name() {
        let (text, short) = (String::new, Shortage::Node);
        for (refusal, outcome) in [
            (Refusal::Malformed(text()), Outcome::Malformed),
            (Refusal::Missing(""), Outcome::Malformed),
            (Refusal::TooLarge { limit: 1 }, Outcome::TooLarge),
            (Refusal::BadName { field: "name", problem: text() }, Outcome::BadName),
            (Refusal::BadMesh(BadMesh::Name), Outcome::BadName),
            (Refusal::UnknownGpu(UnknownGpu(text())), Outcome::UnknownGpu),
            (Refusal::TooOld { behind_s: 1, kept_s: 1 }, Outcome::TooOld),
            (Refusal::InFuture { ahead_s: 1 }, Outcome::InFuture),
            (Refusal::EndWithoutBegin(text()), Outcome::EndWithoutBegin),
            (Refusal::EndBeforeBegin { what: text(), by_ns: 1 }, Outcome::EndBeforeBegin),
            (Refusal::TooManyJobs(short, 1), Outcome::TooManyJobs),
            (Refusal::TooManyRanks(short, 1), Outcome::TooManyRanks),
            (Refusal::TooManyNames(1), Outcome::TooManyNames),
            (Refusal::TooManySeries(short, 1), Outcome::TooManyNames),
            (Refusal::TooManyOpen(1), Outcome::TooManyOpen),
            (Refusal::NotOwner(text()), Outcome::NotOwner),
            (Refusal::OtherNamespace { named: text(), own: text() }, Outcome::NotOwner),
            (Refusal::Contested { job: text(), rank: 0, holder: 1 }, Outcome::Contested),
            (Refusal::OverBudget { what: "bytes", resource: Resource::Bytes, short, limit: 1 }, Outcome::OverBudget),
            (Refusal::TooManyRecords(1), Outcome::OverBudget),
            (Refusal::OverRate(1), Outcome::OverRate),
        ] {
            assert_eq!(refusal.outcome(), outcome);
        }
    }
}
