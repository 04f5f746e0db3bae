//! Why a capture is taken, and where the findings that are written into it come from.

use highwater_core::jobs::{JobId, Scope};
use highwater_engine::recording::write::FindingRow;

/// Why a capture is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A finding was raised: its kind, the value of the label `finding`.
    Finding(&'static str),
    /// A job marked `oom`, or the finding of that kind was raised.
    Oom {
        /// The job.
        job: JobId,
        /// Which of its processes.
        rank: u32,
    },
    /// It was requested.
    Asked,
}

impl Reason {
    /// The reason without its job or rank. It is part of the file's name; captures of one reason and owner cool down together.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Reason::Finding(kind) => kind,
            Reason::Oom { .. } => "oom",
            Reason::Asked => "asked",
        }
    }
}

/// Something that triggers a capture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trigger {
    /// Why.
    pub reason: Reason,
    /// When it happened, nanoseconds of the timeline.
    pub at_ns: i64,
    /// A text for people: what was found, or why the capture was requested.
    pub note: String,
    /// Whose job it is about; `None` of what the driver says and of what was requested.
    pub owner: Option<Scope>,
}

impl Trigger {
    /// Its owner in the form in which files have it; empty without one.
    #[must_use]
    pub fn owner_text(&self) -> String {
        let Some(owner) = &self.owner else { return String::new() };
        match (owner.namespace(), owner.user()) {
            (Some(namespace), _) => format!("namespace {namespace}"),
            (None, Some(user)) => format!("user {user}"),
            (None, None) => "daemon".to_owned(),
        }
    }
}

/// Provides the findings to be written. Called a few times a second while a capture is taken, by its thread.
pub(super) trait Findings: Send + Sync {
    /// Findings that held at any time between these two, in any order. The source bounds their number.
    fn between(&self, from_ns: i64, to_ns: i64) -> Vec<FindingRow>;
}
