//! Counters of the outcomes of triggers and captures.

use crate::metrics::{Collect, Families, catalogue as c};
use std::sync::atomic::{AtomicU64, Ordering};

highwater_core::labels! {
    /// The outcome of a trigger: the values of the label `outcome`. Each trigger has exactly one.
    pub enum Outcome {
        /// Its capture was written whole.
        Complete = "complete",
        /// Its capture ended early: it reached its limit, it made way for another trigger, the GPUs went away or the
        /// devices changed, the replay ended, or the daemon stopped.
        CutShort = "cut_short",
        /// Its capture could not be written or finished, for example because the disk is full. What was committed
        /// before is kept; if nothing was, the file is removed.
        Failed = "failed",
        /// It came while a capture was running, which records it, or has enough others of its cause, and goes on for longer.
        Joined = "joined",
        /// It came too soon after a capture of the same reason and owner.
        Cooldown = "cooldown",
        /// Another capture was being taken, and this trigger was a request, was too old for it, or found too many
        /// waiting.
        Busy = "busy",
        /// Captures were requested too often.
        TooOften = "too_often",
        /// It was requested, and captures that it must not push out take all the room.
        NoRoom = "no_room",
        /// No directory can be written to.
        Unavailable = "unavailable",
        /// No GPU is being read.
        NoGpus = "no_gpus",
        /// The recorder's thread no longer takes triggers.
        Dropped = "dropped",
    }
}

/// Counts since the start.
#[derive(Debug, Default)]
pub struct CaptureStats {
    outcomes: [AtomicU64; Outcome::ALL.len()],
    removed: AtomicU64,
    bytes: AtomicU64,
}

impl CaptureStats {
    pub(super) fn count(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove(&self) {
        self.removed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// How many triggers had this outcome.
    #[must_use]
    pub fn outcome(&self, outcome: Outcome) -> u64 {
        self.outcomes[outcome as usize].load(Ordering::Relaxed)
    }

    /// Captures removed to make room.
    #[must_use]
    pub fn removed(&self) -> u64 {
        self.removed.load(Ordering::Relaxed)
    }

    /// Bytes of all captures, including the one being written, and of the reserve.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Exports the counters as metrics of the catalogue.
impl Collect for CaptureStats {
    fn collect(&self, out: &mut Families) {
        for outcome in Outcome::ALL {
            out.count(&c::CAPTURES, [outcome.label()], Some(self.outcome(outcome)));
        }
        out.count(&c::CAPTURES_REMOVED, (), Some(self.removed()));
        out.count(&c::CAPTURES_BYTES, (), Some(self.bytes()));
    }
}
