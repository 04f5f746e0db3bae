//! The log of what has ended, with its memory: for the API, spans, captures and detectors.
//!
//! Enters: attributed steps, phases and layers. Leaves: those since a number, or those of a job; and each rank's statistics.
//! Steps and phases are on one shelf and layers, of which a step has hundreds, on another, so that no layer displaces a phase.
//! Invariants: the number and the bytes of entries are bounded; if room is needed, the owner with the most loses its oldest, so
//! an owner that floods the log displaces its own entries. Absent on purpose: what is still open.

use super::RankKey;
use super::memory::{Attributed, PhaseMemory};
use super::stats::RankStats;
use super::trail::Trail;
use crate::jobs::{EndedBy, JobId, Limits, Resource, weight};
use crate::shares::{Given, Shares, Weigh};
use crate::wire::Kind;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Bytes of one beside its attributes and its memory on GPUs, with what allocating it costs.
const ENTRY_BYTES: usize = size_of::<Attributed>() + 96;

/// Results of joining what ended with memory: values of the label `outcome` of `highwater_phases_total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attributions {
    /// Memory was found for all of it.
    pub attributed: u64,
    /// Memory was found, but not for all of the time: there is a gap in it.
    pub with_gap: u64,
    /// No GPU of the rank is known.
    pub without_gpu: u64,
    /// No memory is known at any of its time.
    pub without_memory: u64,
}

impl Attributions {
    fn add(&mut self, attributed: &Attributed) {
        let gpus = &attributed.gpus;
        let counter = if gpus.is_empty() {
            &mut self.without_gpu
        } else if gpus.iter().all(|gpu| gpu.peak_bytes.is_none()) {
            &mut self.without_memory
        } else if gpus.iter().any(|gpu| gpu.gap_ns > 0 || gpu.peak_bytes.is_none()) {
            &mut self.with_gap
        } else {
            &mut self.attributed
        };
        *counter += 1;
    }

    /// Every count with its label value.
    #[must_use]
    pub fn labelled(&self) -> [(&'static str, u64); 4] {
        [
            ("attributed", self.attributed),
            ("with_gap", self.with_gap),
            ("without_gpu", self.without_gpu),
            ("without_memory", self.without_memory),
        ]
    }
}

/// The log.
#[derive(Debug)]
pub struct Log {
    /// Steps and phases.
    pub phases: Shelf,
    /// Layers, one by one: for captures.
    pub layers: Shelf,
    /// Steps and phases of the last minutes, small.
    pub trail: Trail,
    ranks: BTreeMap<RankKey, RankStats>,
    attributions: Attributions,
    layers_unkept: u64,
}

/// What has ended, numbered in the order of its coming.
#[derive(Debug)]
pub struct Shelf {
    most: usize,
    most_bytes: usize,
    entries: Shares<Entry>,
    count: u64,
    kept: usize,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    bytes: usize,
    attributed: Arc<Attributed>,
}

impl Weigh for Entry {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Log {
    /// Nothing has ended yet.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            phases: Shelf::new(limits.ended, limits.ended_bytes),
            layers: Shelf::new(limits.ended, limits.ended_layer_bytes),
            trail: Trail::new(limits.trail_bytes()),
            ranks: BTreeMap::new(),
            attributions: Attributions::default(),
            layers_unkept: 0,
        }
    }

    /// What was found out of what ended so far.
    #[must_use]
    pub fn attributions(&self) -> Attributions {
        self.attributions
    }

    /// Ended layers that are in no statistics, because the owner had no room for another layer.
    #[must_use]
    pub fn layers_unkept(&self) -> u64 {
        self.layers_unkept
    }

    /// The statistics of one rank; `None` where nothing of it has ended.
    #[must_use]
    pub fn rank(&self, key: &RankKey) -> Option<&RankStats> {
        self.ranks.get(key)
    }

    /// Every rank of which something has ended, in the order of their keys.
    pub fn ranks(&self) -> impl Iterator<Item = (&RankKey, &RankStats)> {
        self.ranks.iter()
    }

    /// Forgets the statistics of all other ranks.
    pub fn keep_ranks(&mut self, left: &BTreeSet<RankKey>) {
        self.ranks.retain(|key, _| left.contains(key));
    }

    /// Adds a step, phase or layer that has ended: to its rank's statistics, its shelf and, except for layers, the
    /// trail. Of a phase that its rank ended, or in which an allocation failed, the statistics take the memory alone; the latter is on
    /// no shelf, because it goes on.
    pub fn record(&mut self, attributed: Attributed) {
        let ended = &attributed.ended;
        let stats = self.ranks.entry((ended.job.clone(), ended.rank)).or_default();
        match ended.by {
            EndedBy::End => {
                self.attributions.add(&attributed);
                self.layers_unkept += u64::from(!stats.record(&attributed));
            }
            EndedBy::Exit => stats.record_cut(&attributed),
            EndedBy::StillOpen => return stats.record_cut(&attributed),
        }
        if ended.open.kind == Kind::Layer {
            self.layers.push(attributed);
            return;
        }
        self.trail.push(self.phases.count(), &attributed);
        self.phases.push(attributed);
    }

    /// The jobs of which it has something and which a reader may mean by this text.
    #[must_use]
    pub fn jobs_meant_by(&self, text: &str) -> BTreeSet<JobId> {
        let entries = [&self.phases, &self.layers].into_iter().flat_map(|shelf| shelf.entries.each().flatten());
        let jobs = entries.map(|entry| &entry.attributed.ended.job);
        jobs.filter(|job| job.is_meant_by(text)).cloned().collect()
    }

    /// Whether it has any of this job.
    #[must_use]
    pub fn has_job(&self, job: &JobId) -> bool {
        self.phases.has_job(job) || self.layers.has_job(job)
    }

    /// Drops the ended phases and layers. The trail, the ranks' statistics and the counts stay.
    pub fn clear(&mut self) {
        self.phases.clear();
        self.layers.clear();
    }
}

impl Shelf {
    fn new(most: usize, most_bytes: usize) -> Self {
        Self { most, most_bytes, entries: Shares::default(), count: 0, kept: 0 }
    }

    /// Bytes of all that it keeps.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.entries.bytes()
    }

    /// How many it keeps.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// How many have come so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds one, and forgets others where that is needed.
    fn push(&mut self, mut attributed: Attributed) {
        attributed.ended.waiting = None;
        let account = attributed.ended.open.held.take().map(|held| Arc::clone(held.account()));
        let bytes = ENTRY_BYTES
            + attributed.gpus.capacity() * size_of::<PhaseMemory>()
            + attributed.ended.open.attributes.as_ref().map_or(0, weight);
        // The owner's account has these bytes until the last reader drops the entry. The shelf counts them while it keeps it.
        attributed.ended.open.held = account.as_ref().map(|account| account.hold(Resource::Ended, bytes));
        let entry = Entry { number: self.count, bytes, attributed: Arc::new(attributed) };
        self.entries.add(account.as_ref(), |entries| {
            entries.push_back(entry);
            bytes
        });
        self.count += 1;
        self.kept += 1;
        while (self.kept > self.most || self.entries.bytes() > self.most_bytes) && self.entries.forget_one().is_some() {
            self.kept -= 1;
        }
    }

    /// Those from number `count` on, oldest first, and how many of these are not kept any more.
    #[must_use]
    pub fn since(&self, count: u64) -> (Vec<Arc<Attributed>>, u64) {
        self.numbered(count, self.entries.each().flat_map(|own| own.iter().skip(before(own, count))).collect())
    }

    /// Like [`since`](Self::since), for a reader that may take `most` in all of its calls so far; `given` has what it took. If an
    /// owner has more than its share, its newest are left out, and count as not kept.
    #[must_use]
    pub fn some_since(&self, count: u64, given: &mut Given, most: usize) -> (Vec<Arc<Attributed>>, u64) {
        let wants = self.entries.each_of().map(|(whose, own)| (whose, own.len() - before(own, count)));
        let gets = given.share_out(&wants.collect::<Vec<_>>(), most);
        let owners = self.entries.each().zip(gets);
        let found = owners.flat_map(|(own, gets)| own.iter().skip(before(own, count)).take(gets));
        self.numbered(count, found.collect())
    }

    fn numbered(&self, count: u64, mut found: Vec<&Entry>) -> (Vec<Arc<Attributed>>, u64) {
        found.sort_unstable_by_key(|entry| entry.number);
        let lost = self.count.saturating_sub(count).saturating_sub(found.len() as u64);
        (found.into_iter().map(|entry| Arc::clone(&entry.attributed)).collect(), lost)
    }

    /// Those of one job before number `before`, newest first, each with its number.
    pub fn of_job<'a>(&'a self, job: &'a JobId, before: u64) -> impl Iterator<Item = (u64, &'a Arc<Attributed>)> {
        // A job has one owner; what it has here may be of several accounts where pods of it send.
        let mut found: Vec<&Entry> = self
            .entries
            .each()
            .flat_map(|own| own.iter().rev())
            .filter(|entry| entry.number < before && entry.attributed.ended.job == *job)
            .collect();
        found.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.number));
        found.into_iter().map(|entry| (entry.number, &entry.attributed))
    }

    fn has_job(&self, job: &JobId) -> bool {
        self.entries.each().flatten().any(|entry| entry.attributed.ended.job == *job)
    }

    fn clear(&mut self) {
        (self.entries, self.kept) = (Shares::default(), 0);
    }
}

/// How many of an owner's come before number `count`.
fn before(own: &VecDeque<Entry>, count: u64) -> usize {
    own.partition_point(|entry| entry.number < count)
}

#[cfg(test)]
mod tests;
