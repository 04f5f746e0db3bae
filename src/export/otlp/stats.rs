//! What became of every point: counted where it happens, exported as the catalogue's `highwater_otlp_*`.

use crate::metrics::{Collect, Families, Part, catalogue as c};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

highwater_core::labels! {
    /// What a request carries. Each signal has a lane of its own, so that trouble with one receiver does not affect the
    /// other.
    pub enum Signal {
        /// The snapshot, and memory levels.
        Metrics = "metrics",
        /// Every change of memory.
        Raw = "raw",
        /// Steps and phases.
        Spans = "spans",
    }
}

highwater_core::labels! {
    /// Why points were dropped: the values of the label `reason`.
    pub enum Reason {
        /// The queue was full, and these were the oldest.
        Overflow = "overflow",
        /// One request was larger than the whole queue.
        TooLarge = "too_large",
        /// The receiver accepted the request without these: a partial success.
        Rejected = "rejected",
        /// The receiver refused the request for good.
        Refused = "refused",
        /// The daemon ended before they could be sent.
        Shutdown = "shutdown",
        /// The queue's file was damaged or gone.
        Corrupt = "corrupt",
        /// Too many ended at once, waited for the end of their step, or waited for a finding.
        Overrun = "overrun",
    }
}

highwater_core::labels! {
    /// How one attempt to send ended: the values of the label `outcome`.
    pub enum Attempt {
        /// Accepted, wholly or in part.
        Sent = "sent",
        /// Failed, and will be retried.
        Failed = "failed",
        /// Refused for good.
        Refused = "refused",
    }
}

/// The counters.
#[derive(Debug, Default)]
pub struct Stats {
    signals: [OfSignal; Signal::ALL.len()],
    queued_bytes: AtomicU64,
    memory_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct OfSignal {
    produced: AtomicU64,
    exported: AtomicU64,
    queued: AtomicU64,
    dropped: [AtomicU64; Reason::ALL.len()],
    attempts: [AtomicU64; Attempt::ALL.len()],
    sent_bytes: AtomicU64,
    read_failures: AtomicU64,
}

macro_rules! counter {
    ($add:ident, $get:ident, $field:ident, $doc:literal) => {
        pub(super) fn $add(&self, signal: Signal, count: u64) {
            self.signals[signal as usize].$field.fetch_add(count, Relaxed);
        }

        #[doc = $doc]
        #[must_use]
        pub fn $get(&self, signal: Signal) -> u64 {
            self.signals[signal as usize].$field.load(Relaxed)
        }
    };
}

impl Stats {
    counter!(add_produced, produced, produced, "Points produced for export since the start.");
    counter!(add_exported, exported, exported, "Points that a receiver accepted.");
    counter!(add_sent_bytes, sent_bytes, sent_bytes, "Bytes of the requests that were accepted, before compression.");

    /// Counts a request's file that could not be read for now.
    pub(super) fn add_read_failure(&self, signal: Signal) {
        self.signals[signal as usize].read_failures.fetch_add(1, Relaxed);
    }

    /// How often a request's file could not be read for now.
    #[must_use]
    pub fn read_failures(&self, signal: Signal) -> u64 {
        self.signals[signal as usize].read_failures.load(Relaxed)
    }

    pub(super) fn set_queued(&self, signal: Signal, points: u64) {
        self.signals[signal as usize].queued.store(points, Relaxed);
    }

    /// Of the bytes that wait, those in memory and not in files.
    pub(super) fn set_queued_bytes(&self, bytes: u64, in_memory: u64) {
        self.queued_bytes.store(bytes, Relaxed);
        self.memory_bytes.store(in_memory, Relaxed);
    }

    pub(super) fn add_dropped(&self, signal: Signal, reason: Reason, points: u64) {
        self.signals[signal as usize].dropped[reason as usize].fetch_add(points, Relaxed);
    }

    pub(super) fn add_attempt(&self, signal: Signal, attempt: Attempt) {
        self.signals[signal as usize].attempts[attempt as usize].fetch_add(1, Relaxed);
    }

    /// Points that wait or are being sent.
    #[must_use]
    pub fn queued(&self, signal: Signal) -> u64 {
        self.signals[signal as usize].queued.load(Relaxed)
    }

    /// Bytes of all requests that wait or are being sent.
    #[must_use]
    pub fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Relaxed)
    }

    /// Of these, the bytes in memory and not in files.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Relaxed)
    }

    /// Points that were lost for this reason.
    #[must_use]
    pub fn dropped(&self, signal: Signal, reason: Reason) -> u64 {
        self.signals[signal as usize].dropped[reason as usize].load(Relaxed)
    }

    /// Points that were lost for any reason.
    #[must_use]
    pub fn all_dropped(&self, signal: Signal) -> u64 {
        Reason::ALL.into_iter().map(|reason| self.dropped(signal, reason)).sum()
    }

    /// Attempts to send with this outcome.
    #[must_use]
    pub fn attempts(&self, signal: Signal, attempt: Attempt) -> u64 {
        self.signals[signal as usize].attempts[attempt as usize].load(Relaxed)
    }
}

/// Exports the counters as metrics of the catalogue.
impl Collect for Stats {
    fn collect(&self, out: &mut Families) {
        for signal in Signal::ALL {
            let labels = [signal.label()];
            out.count(&c::OTLP_PRODUCED, labels, Some(self.produced(signal)));
            out.count(&c::OTLP_EXPORTED, labels, Some(self.exported(signal)));
            out.count(&c::OTLP_QUEUED, labels, Some(self.queued(signal)));
            out.count(&c::OTLP_READ_FAILURES, labels, Some(self.read_failures(signal)));
            out.count(&c::OTLP_SENT_BYTES, labels, Some(self.sent_bytes(signal)));
            for reason in Reason::ALL {
                out.count(&c::OTLP_DROPPED, [labels[0], reason.label()], Some(self.dropped(signal, reason)));
            }
            for attempt in Attempt::ALL {
                out.count(&c::OTLP_ATTEMPTS, [labels[0], attempt.label()], Some(self.attempts(signal, attempt)));
            }
        }
        out.count(&c::OTLP_QUEUED_BYTES, (), Some(self.queued_bytes()));
        out.memory(Part::Otlp, usize::try_from(self.memory_bytes()).unwrap_or(usize::MAX));
    }
}
