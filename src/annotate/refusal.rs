//! What becomes of each event, with the label that counts it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why an event is refused. The text names what is wrong; nothing else of the batch is lost with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message tells")]
pub enum Refusal {
    #[error("not a valid event: {0}")]
    Malformed(String),
    #[error("the datagram is longer than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("{field}: {problem}")]
    BadName { field: &'static str, problem: String },
    #[error("{0}")]
    Missing(&'static str),
    #[error("gpu: no GPU `{0}` on this node")]
    UnknownGpu(String),
    #[error("time_unix_nano: {behind_s} s ago, older than the {kept_s} s that are kept")]
    TooOld { behind_s: i64, kept_s: i64 },
    #[error("time_unix_nano: {ahead_s} s ahead of this host's clock")]
    InFuture { ahead_s: i64 },
    #[error("{0} has not begun")]
    EndWithoutBegin(String),
    #[error("{what} ends {by_ns} ns before it began")]
    EndBeforeBegin { what: String, by_ns: i64 },
    #[error("this node keeps at most {0} jobs at a time")]
    TooManyJobs(usize),
    #[error("this node keeps at most {0} ranks at a time")]
    TooManyRanks(usize),
    #[error("job has more than {0} different phase or layer names")]
    TooManyNames(usize),
    #[error("this node keeps at most {0} phases of ranks apart (annotations.max_phase_series)")]
    TooManySeries(usize),
    #[error("more than {0} steps, phases and layers are open")]
    TooManyOpen(usize),
}

impl Refusal {
    /// The outcome that counts it.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            Refusal::Malformed(_) | Refusal::Missing(_) => Outcome::Malformed,
            Refusal::TooLarge { .. } => Outcome::TooLarge,
            Refusal::BadName { .. } => Outcome::BadName,
            Refusal::UnknownGpu(_) => Outcome::UnknownGpu,
            Refusal::TooOld { .. } => Outcome::TooOld,
            Refusal::InFuture { .. } => Outcome::InFuture,
            Refusal::EndWithoutBegin(_) => Outcome::EndWithoutBegin,
            Refusal::EndBeforeBegin { .. } => Outcome::EndBeforeBegin,
            Refusal::TooManyJobs(_) => Outcome::TooManyJobs,
            Refusal::TooManyRanks(_) => Outcome::TooManyRanks,
            Refusal::TooManyNames(_) | Refusal::TooManySeries(_) => Outcome::TooManyNames,
            Refusal::TooManyOpen(_) => Outcome::TooManyOpen,
        }
    }
}

/// What became of an event: the values of the label `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs, reason = "docs/annotations.md tells each")]
pub enum Outcome {
    Accepted,
    AcceptedWithoutGpu,
    AcceptedOutOfOrder,
    Malformed,
    TooLarge,
    BadName,
    UnknownGpu,
    TooOld,
    InFuture,
    EndWithoutBegin,
    EndBeforeBegin,
    TooManyJobs,
    TooManyRanks,
    TooManyNames,
    TooManyOpen,
}

impl Outcome {
    /// Every outcome, in the order of their numbers.
    pub const ALL: [Outcome; 15] = [
        Outcome::Accepted,
        Outcome::AcceptedWithoutGpu,
        Outcome::AcceptedOutOfOrder,
        Outcome::Malformed,
        Outcome::TooLarge,
        Outcome::BadName,
        Outcome::UnknownGpu,
        Outcome::TooOld,
        Outcome::InFuture,
        Outcome::EndWithoutBegin,
        Outcome::EndBeforeBegin,
        Outcome::TooManyJobs,
        Outcome::TooManyRanks,
        Outcome::TooManyNames,
        Outcome::TooManyOpen,
    ];

    /// The label value.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Accepted => "accepted",
            Outcome::AcceptedWithoutGpu => "accepted_without_gpu",
            Outcome::AcceptedOutOfOrder => "accepted_out_of_order",
            Outcome::Malformed => "malformed",
            Outcome::TooLarge => "too_large",
            Outcome::BadName => "bad_name",
            Outcome::UnknownGpu => "unknown_gpu",
            Outcome::TooOld => "too_old",
            Outcome::InFuture => "in_future",
            Outcome::EndWithoutBegin => "end_without_begin",
            Outcome::EndBeforeBegin => "end_before_begin",
            Outcome::TooManyJobs => "too_many_jobs",
            Outcome::TooManyRanks => "too_many_ranks",
            Outcome::TooManyNames => "too_many_names",
            Outcome::TooManyOpen => "too_many_open",
        }
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

    /// How many events had this outcome since the start.
    #[must_use]
    pub fn get(&self, outcome: Outcome) -> u64 {
        self.0[outcome as usize].load(Ordering::Relaxed)
    }
}
