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
    /// By owner, oldest first, each with its number.
    by_owner: BTreeMap<usize, VecDeque<Entry>>,
    count: u64,
    kept: usize,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    attributed: Arc<Attributed>,
}

impl EndedLog {
    /// How many have come so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds one, and forgets others where that is needed.
    pub fn push(&mut self, mut attributed: Attributed, limits: &Limits) {
        // What nobody answers for, a test's, stands beside what owners hold.
        let before = attributed.ended.open.held.take();
        let account = before.map(|held| Arc::clone(held.account()));
        let owner = account.as_ref().map_or(0, |account| Arc::as_ptr(account) as usize);
        let bytes = ENTRY_BYTES
            + attributed.gpus.capacity() * size_of::<PhaseMemory>()
            + attributed.ended.open.attributes.as_ref().map_or(0, super::event::weight);
        attributed.ended.open.held = account.as_ref().map(|account| account.hold(Resource::Ended, bytes));
        let entry = Entry { number: self.count, attributed: Arc::new(attributed) };
        self.by_owner.entry(owner).or_default().push_back(entry);
        self.count += 1;
        self.kept += 1;
        let is_full = |log: &Self| {
            let held = account.as_ref().is_some_and(|account| account.overdraws(Resource::Ended));
            log.kept > limits.ended || held
        };
        while is_full(self) && self.forget_one() {}
    }

    /// Forgets the oldest of the owner that has the most; returns whether there was one.
    fn forget_one(&mut self) -> bool {
        let bytes = |entries: &VecDeque<Entry>| {
            let held = entries.front().and_then(|entry| entry.attributed.ended.open.held.as_ref());
            held.map_or(0, |held| held.account().holds(Resource::Ended))
        };
        let largest = self.by_owner.iter().max_by_key(|(_, entries)| (bytes(entries), entries.len()));
        let Some(owner) = largest.map(|(owner, _)| *owner) else { return false };
        let Some(entries) = self.by_owner.get_mut(&owner) else { return false };
        let is_gone = entries.pop_front().is_some();
        if entries.is_empty() {
            self.by_owner.remove(&owner);
        }
        self.kept -= usize::from(is_gone);
        is_gone
    }

    /// Those from number `count` on, oldest first, and how many of these are not kept any more.
    pub fn since(&self, count: u64) -> (Vec<Arc<Attributed>>, u64) {
        let new = |entries: &VecDeque<Entry>| entries.partition_point(|entry| entry.number < count);
        let mut found: Vec<&Entry> =
            self.by_owner.values().flat_map(|entries| entries.iter().skip(new(entries))).collect();
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
            .flat_map(|entries| entries.iter().rev())
            .filter(|entry| entry.number < before && &*entry.attributed.ended.job == job)
            .collect();
        found.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.number));
        found.into_iter().map(|entry| (entry.number, &entry.attributed))
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.by_owner.clear();
        self.kept = 0;
    }
}
