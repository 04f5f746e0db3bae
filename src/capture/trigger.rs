//! Why a capture is taken, and who tells the findings that are written into it.

use crate::recording::write::FindingRow;

/// Why a capture is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A finding was raised: its kind, as the label `finding` has it.
    Finding(&'static str),
    /// A job marked `oom`.
    Oom {
        /// The job.
        job: String,
        /// Which process of it.
        rank: u32,
    },
    /// Somebody asked for it.
    Asked,
}

impl Reason {
    /// The reason without whom it is about: what files are named after, and what cools down.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Reason::Finding(kind) => kind,
            Reason::Oom { .. } => "oom",
            Reason::Asked => "asked",
        }
    }
}

/// Something that makes the recorder write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trigger {
    /// Why.
    pub reason: Reason,
    /// When it happened, nanoseconds of the timeline.
    pub at_ns: i64,
    /// A word for people: what was found, or why somebody asked.
    pub note: String,
}

/// Tells the findings to be written. Called a few times a second while a capture is taken, by its thread.
pub(super) trait Findings: Send + Sync {
    /// Those that held at any time between these two, in any order; bounded by whoever keeps them.
    fn between(&self, from_ns: i64, to_ns: i64) -> Vec<FindingRow>;
}
