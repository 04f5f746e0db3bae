//! The log of what has ended, with its memory: for the API, spans, captures and detectors.
//!
//! Enters: attributed steps, phases and layers, numbered in the order of their coming. Leaves: those since a number, or
//! those of a job. Invariants: their number and their bytes are bounded; where room is needed, the owner that holds the
//! most forgets its oldest, so that one that floods forgets its own. Absent on purpose: what is still open.

use super::account::Resource;
use super::limits::Limits;
use crate::attribute::{Attributed, PhaseMemory};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Bytes of one beside its attributes and its memory on GPUs, with what allocating it costs.
const ENTRY_BYTES: usize = size_of::<Attributed>() + 96;

/// The log.
#[derive(Debug, Default)]
pub(super) struct EndedLog {
    /// By owner.
    by_owner: BTreeMap<usize, Own>,
    count: u64,
    kept: usize,
    bytes: usize,
}

/// What one owner has in it, oldest first.
#[derive(Debug, Default)]
struct Own {
    entries: VecDeque<Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    bytes: usize,
    attributed: Arc<Attributed>,
}

impl EndedLog {
    /// How many have come so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds one, and forgets others where that is needed.
    pub fn push(&mut self, mut attributed: Attributed, limits: &Limits) {
        attributed.ended.waiting = None;
        // What nobody answers for, a test's, stands beside what owners have.
        let account = attributed.ended.open.held.take().map(|held| Arc::clone(held.account()));
        let owner = account.as_ref().map_or(0, |account| Arc::as_ptr(account) as usize);
        let bytes = ENTRY_BYTES
            + attributed.gpus.capacity() * size_of::<PhaseMemory>()
            + attributed.ended.open.attributes.as_ref().map_or(0, super::event::weight);
        // On the account for as long as anybody keeps it; here it counts for as long as it is in the log.
        attributed.ended.open.held = account.as_ref().map(|account| account.hold(Resource::Ended, bytes));
        let entry = Entry { number: self.count, bytes, attributed: Arc::new(attributed) };
        let own = self.by_owner.entry(owner).or_default();
        own.bytes += bytes;
        own.entries.push_back(entry);
        self.count += 1;
        self.kept += 1;
        self.bytes += bytes;
        while (self.kept > limits.ended || self.bytes > limits.ended_bytes) && self.forget_one() {}
    }

    /// Forgets the oldest of the owner that has the most; returns whether there was one.
    fn forget_one(&mut self) -> bool {
        let largest = self.by_owner.iter_mut().max_by_key(|(_, own)| own.bytes);
        let Some((owner, own)) = largest.map(|(owner, own)| (*owner, own)) else { return false };
        if let Some(gone) = own.entries.pop_front() {
            own.bytes -= gone.bytes;
            self.bytes -= gone.bytes;
            self.kept -= 1;
        }
        if own.entries.is_empty() {
            self.by_owner.remove(&owner);
        }
        true
    }

    /// Those from number `count` on, oldest first, and how many of these are not kept any more.
    pub fn since(&self, count: u64) -> (Vec<Arc<Attributed>>, u64) {
        let new = |own: &Own| own.entries.partition_point(|entry| entry.number < count);
        let mut found: Vec<&Entry> = self.by_owner.values().flat_map(|own| own.entries.iter().skip(new(own))).collect();
        found.sort_unstable_by_key(|entry| entry.number);
        let lost = self.count.saturating_sub(count).saturating_sub(found.len() as u64);
        (found.into_iter().map(|entry| Arc::clone(&entry.attributed)).collect(), lost)
    }

    /// Those of one job before number `before`, newest first, each with its number.
    pub fn of_job<'a>(&'a self, job: &'a str, before: u64) -> impl Iterator<Item = (u64, &'a Arc<Attributed>)> {
        // A job has one owner; its log may be of several accounts where pods of it send.
        let mut found: Vec<&Entry> = self
            .by_owner
            .values()
            .flat_map(|own| own.entries.iter().rev())
            .filter(|entry| entry.number < before && &*entry.attributed.ended.job == job)
            .collect();
        found.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.number));
        found.into_iter().map(|entry| (entry.number, &entry.attributed))
    }

    /// Whether it has any of this job.
    pub fn has_job(&self, job: &str) -> bool {
        self.by_owner.values().flat_map(|own| &own.entries).any(|entry| &*entry.attributed.ended.job == job)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.by_owner.clear();
        (self.kept, self.bytes) = (0, 0);
    }
}
