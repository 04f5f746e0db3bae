//! Why a capture is taken, and the findings that are written into it.

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

/// One finding as a recording keeps it. Times are nanoseconds of the timeline.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FindingRow {
    /// Its number, the same for its whole life: a row is replaced by a newer one of its number.
    pub id: u64,
    /// Its kind, as the label `finding` has it.
    pub kind: &'static str,
    /// `info`, `warning` or `critical`.
    pub severity: String,
    /// `suspected`, `observed` or `confirmed`.
    pub certainty: String,
    /// The GPU that it is about.
    pub gpu_uuid: Option<String>,
    /// The job that it is about.
    pub job: Option<String>,
    /// The rank that it is about.
    pub rank: Option<u32>,
    /// Since when it holds.
    pub begin_ns: i64,
    /// When it ended; `None` while it holds.
    pub end_ns: Option<i64>,
    /// What was found.
    pub what: String,
    /// Why we think so.
    pub why: String,
    /// What to try next.
    pub advice: String,
    /// The numbers behind it, by name.
    pub evidence: serde_json::Value,
}

/// Tells the findings to be written. Called a few times a second while a capture is taken, by its thread.
pub(super) trait Findings: Send + Sync {
    /// Those that held at any time between these two, in any order; bounded by whoever keeps them.
    fn between(&self, from_ns: i64, to_ns: i64) -> Vec<FindingRow>;
}
