//! What the generator makes: timed states and annotations of ranks.

use highwater_core::wire::Annotation;

/// The part of a job's moments that a reader wants.
#[derive(Debug, Clone)]
pub(in crate::sim) enum Select {
    /// The states of these ranks.
    States(Vec<usize>),
    /// The annotations of all ranks.
    Annotations,
}

/// An event of one rank.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::sim) struct RankEvent {
    /// Nanoseconds since the scenario's start.
    pub(in crate::sim) at_ns: i64,
    pub(in crate::sim) rank: usize,
    pub(in crate::sim) what: What,
}

#[derive(Debug, Clone, PartialEq)]
pub(in crate::sim) enum What {
    /// Its process has this state from now on.
    State(State),
    /// It sends this annotation; the time is still to be filled in.
    Says(Box<Annotation>),
}

/// A rank's process as its GPU sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(in crate::sim) struct State {
    /// Whether there is a process.
    pub(in crate::sim) alive: bool,
    /// What its allocator holds from the driver, bytes.
    pub(in crate::sim) allocator_bytes: u64,
    /// What it holds outside the allocator, bytes.
    pub(in crate::sim) outside_bytes: u64,
    /// Share of the time in which a kernel runs, millionths.
    pub(in crate::sim) busy_ppm: u64,
    pub(in crate::sim) traffic: Traffic,
}

impl State {
    /// All memory of the process, bytes.
    pub(in crate::sim) fn used_bytes(&self) -> u64 {
        self.allocator_bytes.saturating_add(self.outside_bytes)
    }
}

/// The traffic of a rank over its links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::sim) enum Traffic {
    /// Hardly anything.
    #[default]
    Quiet,
    /// Batches from the host.
    Load,
    /// Gradients to and from its peers.
    Collective,
    /// Weights to the host.
    Save,
}
