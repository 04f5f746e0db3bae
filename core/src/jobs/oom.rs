//! What is known of a rank's failed allocation, from its mark `oom`.
//!
//! Kept beside the rank, and not among the marks, so that no other sender can push it out before the detectors look.

use super::event::Event;
use crate::wire::Memory;
use std::sync::Arc;

/// The name of the mark, in any case.
const NAME: &str = "oom";

/// The last failed allocation that a rank marked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FailedAllocation {
    /// How many of them the rank has marked, with this one.
    pub count: u64,
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// In which step.
    pub step: Option<u64>,
    /// In which phase, the innermost.
    pub phase: Option<Arc<str>>,
    /// Positions of the rank's GPUs then; empty where they were not known.
    pub gpus: Box<[usize]>,
    /// The process.
    pub pid: Option<u32>,
    /// The allocator's counters.
    pub memory: Memory,
    /// What was asked for, bytes.
    pub requested_bytes: Option<u64>,
    /// What was free on the device, by the framework, bytes.
    pub free_bytes: Option<u64>,
}

/// Whether an event is such a mark.
pub(super) fn is_failed_allocation(event: &Event) -> bool {
    event.is_mark(NAME)
}

impl FailedAllocation {
    /// What a mark itself says: its counters may be fields or attributes. Those of before it are not used, because they are of
    /// another moment.
    pub(super) fn of(mark: &Event) -> Self {
        let said = mark.memory.unwrap_or_default();
        let memory = Memory {
            allocated: said.allocated.or_else(|| mark.number("allocated")),
            reserved: said.reserved.or_else(|| mark.number("reserved")),
            ..said
        };
        let (requested_bytes, free_bytes) = (mark.number("requested"), mark.number("device_free"));
        Self { at_ns: mark.at_ns, pid: mark.pid, memory, requested_bytes, free_bytes, ..Self::default() }
    }
}
