//! Counters of what happens to every point: counted where it happens, exported as the catalogue's `highwater_otlp_*`.

use crate::metrics::{Collect, Families, Part, catalogue as c};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    pub enum DropReason {
        /// The queue was full: these were the oldest that waited, or the requests being sent left no room for them.
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
        /// Too many steps and phases ended at once, or too many spans or raw points waited for a step's end or a finding.
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

/// Counts of the points of one signal. Always produced = exported + queued + dropped: each point that is produced is
/// queued, and leaves the queue in one of the two other ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    /// Produced for export since the start.
    pub produced: u64,
    /// Accepted by a receiver.
    pub exported: u64,
    /// Waiting, or being sent.
    pub queued: u64,
    dropped: [u64; DropReason::ALL.len()],
}

impl Account {
    /// Points that were dropped for this reason.
    #[must_use]
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize]
    }

    /// Points that were dropped for any reason.
    #[must_use]
    pub fn all_dropped(&self) -> u64 {
        self.dropped.iter().sum()
    }

    pub(super) fn queue(&mut self, points: u64) {
        self.produced += points;
        self.queued += points;
    }

    pub(super) fn export(&mut self, points: u64) {
        self.queued -= points;
        self.exported += points;
    }

    pub(super) fn drop(&mut self, reason: DropReason, points: u64) {
        self.queued -= points;
        self.dropped[reason as usize] += points;
    }
}

/// The counters.
#[derive(Debug, Default)]
pub struct OtlpStats {
    accounts: Mutex<Accounts>,
    signals: [OfSignal; Signal::ALL.len()],
    queued_bytes: AtomicU64,
    memory_bytes: AtomicU64,
}

/// Under one lock, so that no scrape sees a point that has left one place and come to no other.
#[derive(Debug, Default)]
struct Accounts {
    /// As the queue last published them.
    of_queue: [Account; Signal::ALL.len()],
    /// Of those that were dropped before they came to the queue.
    before_queue: [Account; Signal::ALL.len()],
}

#[derive(Debug, Default)]
struct OfSignal {
    attempts: [AtomicU64; Attempt::ALL.len()],
    sent_bytes: AtomicU64,
    read_failures: AtomicU64,
}

impl OtlpStats {
    /// Publishes all that the queue holds and has done, at once.
    pub(super) fn publish(&self, of_queue: [Account; Signal::ALL.len()]) {
        self.accounts().of_queue = of_queue;
    }

    /// Counts points that were dropped before they came to the queue.
    pub(super) fn add_lost(&self, signal: Signal, reason: DropReason, points: u64) {
        let account = &mut self.accounts().before_queue[signal as usize];
        account.queue(points);
        account.drop(reason, points);
    }

    /// The counts of the points of a signal, all of the same moment.
    #[must_use]
    pub fn account(&self, signal: Signal) -> Account {
        let accounts = self.accounts();
        let (mut account, before) = (accounts.of_queue[signal as usize], accounts.before_queue[signal as usize]);
        account.produced += before.produced;
        for (all, more) in account.dropped.iter_mut().zip(before.dropped) {
            *all += more;
        }
        account
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_sent_bytes(&self, signal: Signal, bytes: u64) {
        self.signals[signal as usize].sent_bytes.fetch_add(bytes, Relaxed);
    }

    /// Bytes of the requests that were accepted, before compression.
    #[must_use]
    pub fn sent_bytes(&self, signal: Signal) -> u64 {
        self.signals[signal as usize].sent_bytes.load(Relaxed)
    }

    /// Counts a request's file that could not be read for now.
    pub(super) fn add_read_failure(&self, signal: Signal) {
        self.signals[signal as usize].read_failures.fetch_add(1, Relaxed);
    }

    /// How often a request's file could not be read for now.
    #[must_use]
    pub fn read_failures(&self, signal: Signal) -> u64 {
        self.signals[signal as usize].read_failures.load(Relaxed)
    }

    /// Sets the bytes of all queued requests, and of those whose payload is in memory.
    pub(super) fn set_queued_bytes(&self, bytes: u64, in_memory: u64) {
        self.queued_bytes.store(bytes, Relaxed);
        self.memory_bytes.store(in_memory, Relaxed);
    }

    pub(super) fn add_attempt(&self, signal: Signal, attempt: Attempt) {
        self.signals[signal as usize].attempts[attempt as usize].fetch_add(1, Relaxed);
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

    /// Attempts to send with this outcome.
    #[must_use]
    pub fn attempts(&self, signal: Signal, attempt: Attempt) -> u64 {
        self.signals[signal as usize].attempts[attempt as usize].load(Relaxed)
    }
}

/// Exports the counters as metrics of the catalogue.
impl Collect for OtlpStats {
    fn collect(&self, out: &mut Families) {
        for signal in Signal::ALL {
            let (labels, account) = ([signal.label()], self.account(signal));
            out.count(&c::OTLP_PRODUCED, labels, Some(account.produced));
            out.count(&c::OTLP_EXPORTED, labels, Some(account.exported));
            out.count(&c::OTLP_QUEUED, labels, Some(account.queued));
            out.count(&c::OTLP_READ_FAILURES, labels, Some(self.read_failures(signal)));
            out.count(&c::OTLP_SENT_BYTES, labels, Some(self.sent_bytes(signal)));
            for reason in DropReason::ALL {
                out.count(&c::OTLP_DROPPED, [labels[0], reason.label()], Some(account.dropped(reason)));
            }
            for attempt in Attempt::ALL {
                out.count(&c::OTLP_ATTEMPTS, [labels[0], attempt.label()], Some(self.attempts(signal, attempt)));
            }
        }
        out.count(&c::OTLP_QUEUED_BYTES, (), Some(self.queued_bytes()));
        out.memory(Part::Otlp, usize::try_from(self.memory_bytes()).unwrap_or(usize::MAX));
    }
}
