//! What jobs have open beside what of theirs has ended, each under a lock of its own.
//!
//! A sender takes only the first lock. A scrape holds the second lock for as long as its series take. So neither waits for the
//! other. Where both locks are needed, the lock of what is open is taken first, and is released before rings are read.

use super::log::Log;
use crate::jobs::{Jobs, Limits};
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// All that is known of jobs.
#[derive(Debug)]
pub struct Ledger {
    open: Mutex<Jobs>,
    ended: Mutex<Log>,
}

impl Ledger {
    /// No jobs yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { open: Mutex::new(Jobs::new(limits)), ended: Mutex::new(Log::new(&limits)) }
    }

    /// What jobs have in progress. Held for microseconds, by senders, attribution and scrapes, never by the sampler.
    pub fn open(&self) -> MutexGuard<'_, Jobs> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has ended. Taking an annotation never needs this lock.
    pub fn ended(&self) -> MutexGuard<'_, Log> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the GPUs that positions refer to, by UUID. If positions then refer to other GPUs than before, the log of ended phases
    /// is cleared. Returns whether they do.
    pub fn set_devices(&self, devices: Vec<String>) -> bool {
        let mut open = self.open();
        let are_others = open.set_devices(devices);
        if are_others {
            self.ended().clear();
        }
        are_others
    }

    /// Forgets ranks that ended a while ago or have been silent for too long, with their statistics.
    pub fn expire(&self, now_ns: i64) {
        let mut open = self.open();
        if open.expire(now_ns) {
            let left: BTreeSet<_> = open.ranks().map(|(job, rank, _)| (job.clone(), rank)).collect();
            self.ended().keep_ranks(&left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{Account, Event};
    use crate::phases::hand;
    use crate::wire::{EventType, Kind};

    fn mark(ledger: &Ledger, rank: u32, now_ns: i64) {
        let event = Event { event: EventType::Mark, rank, ..Event::exit("j", 0, None, now_ns) };
        ledger.open().take(&event, &Account::alone(), now_ns).expect("taken");
    }

    fn record(ledger: &Ledger, rank: usize) {
        ledger.ended().record(hand::attributed(hand::ended(Kind::Phase, rank, "a", None, 0, 1)));
    }

    #[test]
    fn what_was_known_of_a_rank_goes_with_it() {
        let limits = Limits::default();
        let ledger = Ledger::new(limits);
        (0..2).for_each(|rank| record(&ledger, rank));
        mark(&ledger, 0, 0);
        mark(&ledger, 1, 1);
        let known = || [0, 1].map(|rank| ledger.ended().rank(&hand::key(rank)).is_some());
        ledger.expire(limits.silence_ns);
        assert_eq!(known(), [true, true]);
        ledger.expire(limits.silence_ns + 1);
        assert_eq!(known(), [false, true]);
    }

    #[test]
    fn what_has_ended_is_forgotten_where_positions_mean_others() {
        let ledger = Ledger::new(Limits::default());
        record(&ledger, 0);
        assert!(!ledger.set_devices(vec!["a".into()]) && ledger.ended().has_job(&"j".into()));
        assert!(ledger.set_devices(vec!["b".into()]) && !ledger.ended().has_job(&"j".into()));
    }
}
