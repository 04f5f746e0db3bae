//! A compact log of the steps and phases of the last minutes, which charts draw below the memory that the rings keep.
//!
//! Enters: each step and phase that has ended. Leaves: those of an interval. Invariants: the bytes are bounded and shared
//! among owners: the owner with the most loses its oldest first; times are exact to the microsecond, peaks are rounded
//! down to 64 KiB. Absent on purpose: everything else that is known of a phase, which the [`Log`](super::Log) keeps for a
//! shorter time: a span takes 10 to 25 bytes here and two kilobytes there.

use super::memory::Attributed;
use crate::jobs::{EndedBy, JobId, Reservation};
use crate::shares::{Shares, Weigh};
use crate::varint::{put, take, unzigzag, zigzag};
use crate::wire::Kind;
use std::collections::VecDeque;
use std::sync::Arc;

/// The size of its spans at which a block is full, bytes. Beside them it has a list of its ranks, which is the larger part of a small
/// block of a job with 64 of them.
const BLOCK_BYTES: usize = 8 << 10;
/// And the size of all of it, as names may be long and many.
const MOST_BLOCK_BYTES: usize = 32 << 10;
/// Bytes of a block beside its spans and names.
const OVERHEAD_BYTES: usize = 256;
/// Bytes of a name beside its text, and of a rank beside its job's name; a list may have room for twice its entries.
const NAME_BYTES: usize = 64;
const RANK_BYTES: usize = 2 * size_of::<(JobId, u32)>();
const MICROSECOND_NS: i64 = 1_000;
const PEAK_UNIT_BYTES: u64 = 64 << 10;

/// A step or phase that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its number among all steps and phases that have ended.
    pub number: u64,
    /// The job.
    pub job: JobId,
    /// Which process of it.
    pub rank: u32,
    /// Step or phase.
    pub kind: Kind,
    /// Its name.
    pub name: Arc<str>,
    /// The step that it belongs to.
    pub step: Option<u64>,
    /// When it began, nanoseconds of the timeline, to the microsecond.
    pub begin_ns: i64,
    /// When it ended.
    pub end_ns: i64,
    /// Whether its rank ended it, and not an end event.
    pub is_cut: bool,
    /// Highest memory in use on the rank's GPUs meanwhile, bytes, to 64 KiB.
    pub peak_bytes: Option<u64>,
}

/// The spans of all owners.
#[derive(Debug)]
pub struct Trail {
    most_bytes: usize,
    blocks: Shares<Arc<TrailBlock>>,
}

/// Successive spans of one owner, each relative to the one before.
#[derive(Debug, Clone, Default)]
pub struct TrailBlock {
    encoded: Vec<u8>,
    /// Jobs with ranks; and names with their kinds, and whether their spans were cut. Encoded spans refer to them by position.
    ranks: Vec<(JobId, u32)>,
    names: Vec<(Kind, bool, Arc<str>)>,
    bytes: usize,
    oldest_ns: i64,
    newest_ns: i64,
    last: Last,
}

/// What the next span of a block is relative to.
#[derive(Debug, Clone, Copy, Default)]
struct Last {
    number: u64,
    end_us: i64,
    step: u64,
}

impl Weigh for Arc<TrailBlock> {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Trail {
    pub(super) fn new(most_bytes: usize) -> Self {
        Self { most_bytes, blocks: Shares::default() }
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks.bytes()
    }

    pub(super) fn push(&mut self, number: u64, attributed: &Attributed) {
        let account = attributed.ended.open.held.as_ref().map(Reservation::account);
        self.blocks.add(account, |blocks| {
            if blocks.back().is_none_or(|block| block.is_full()) {
                blocks.push_back(Arc::default());
            }
            let Some(block) = blocks.back_mut() else { return 0 };
            // A reader may hold the block that is being filled: then it is copied, which is seldom and small.
            let block = Arc::make_mut(block);
            let before = block.bytes;
            block.push(number, attributed);
            block.bytes - before
        });
        while self.blocks.bytes() > self.most_bytes && self.blocks.forget_one().is_some() {}
    }

    /// The blocks that have spans from this number on.
    #[must_use]
    pub fn blocks_since(&self, number: u64) -> Vec<Arc<TrailBlock>> {
        let new = |own: &VecDeque<Arc<TrailBlock>>| own.partition_point(|block| block.last.number < number);
        self.blocks.each().flat_map(|own| own.iter().skip(new(own))).cloned().collect()
    }

    /// The blocks that have spans of an interval, without a copy: decoding them needs no lock.
    #[must_use]
    pub fn blocks(&self, from_ns: i64, to_ns: i64) -> Vec<Arc<TrailBlock>> {
        let all = self.blocks.each().flatten();
        all.filter(|block| block.newest_ns >= from_ns && block.oldest_ns <= to_ns).cloned().collect()
    }
}

impl TrailBlock {
    fn is_full(&self) -> bool {
        self.encoded.len() >= BLOCK_BYTES || self.bytes >= MOST_BLOCK_BYTES
    }

    fn push(&mut self, number: u64, attributed: &Attributed) {
        let (ended, open) = (&attributed.ended, &attributed.ended.open);
        let is_first = self.encoded.is_empty();
        let rank = self.rank_of(&ended.job, ended.rank);
        let name = self.name_of(open.kind, ended.by != EndedBy::End, &open.name);
        let (begin_us, end_us) = (open.begin_ns.div_euclid(MICROSECOND_NS), ended.end_ns.div_euclid(MICROSECOND_NS));
        let before = self.encoded.len();
        for part in [number.wrapping_sub(self.last.number), rank as u64, name as u64] {
            put(&mut self.encoded, part);
        }
        put(&mut self.encoded, zigzag(end_us.wrapping_sub(self.last.end_us)));
        put(&mut self.encoded, zigzag(end_us.wrapping_sub(begin_us)));
        match open.step {
            None => put(&mut self.encoded, 0),
            Some(step) => {
                // 1 and the change, which may be anything: a job may send any number.
                put(&mut self.encoded, 1);
                put(&mut self.encoded, zigzag(step.wrapping_sub(self.last.step).cast_signed()));
                self.last.step = step;
            }
        }
        let peak_bytes = attributed.gpus.iter().filter_map(|gpu| gpu.peak_bytes).max();
        put(&mut self.encoded, peak_bytes.map_or(0, |bytes| bytes / PEAK_UNIT_BYTES + 1));
        (self.last.number, self.last.end_us) = (number, end_us);
        self.bytes += self.encoded.len() - before + if is_first { OVERHEAD_BYTES } else { 0 };
        self.oldest_ns = if is_first { open.begin_ns } else { self.oldest_ns.min(open.begin_ns) };
        self.newest_ns = if is_first { ended.end_ns } else { self.newest_ns.max(ended.end_ns) };
    }

    fn rank_of(&mut self, job: &JobId, rank: u32) -> usize {
        let known = self.ranks.iter().position(|(of, number)| *number == rank && of == job);
        known.unwrap_or_else(|| {
            // The name of a job is one text for all of its ranks.
            let is_new = self.ranks.iter().all(|(of, _)| of != job);
            self.bytes += RANK_BYTES + if is_new { NAME_BYTES + job.name().len() } else { 0 };
            self.ranks.push((job.clone(), rank));
            self.ranks.len() - 1
        })
    }

    fn name_of(&mut self, kind: Kind, is_cut: bool, name: &Arc<str>) -> usize {
        let known = self.names.iter().position(|(of, cut, known)| (*of, *cut) == (kind, is_cut) && known == name);
        known.unwrap_or_else(|| {
            self.bytes += NAME_BYTES + name.len();
            self.names.push((kind, is_cut, Arc::clone(name)));
            self.names.len() - 1
        })
    }

    /// Its spans, in the order in which they ended.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        let (mut at, mut last) = (0, Last::default());
        std::iter::from_fn(move || self.next(&mut at, &mut last))
    }

    fn next(&self, at: &mut usize, last: &mut Last) -> Option<Span> {
        let number = last.number.wrapping_add(take(&self.encoded, at)?);
        let (job, rank) = self.ranks.get(usize::try_from(take(&self.encoded, at)?).ok()?)?;
        let (kind, is_cut, name) = self.names.get(usize::try_from(take(&self.encoded, at)?).ok()?)?;
        let end_us = last.end_us.wrapping_add(unzigzag(take(&self.encoded, at)?));
        let begin_us = end_us.wrapping_sub(unzigzag(take(&self.encoded, at)?));
        let step = match take(&self.encoded, at)? {
            0 => None,
            _ => Some(last.step.wrapping_add(unzigzag(take(&self.encoded, at)?).cast_unsigned())),
        };
        let peak = take(&self.encoded, at)?;
        *last = Last { number, end_us, step: step.unwrap_or(last.step) };
        Some(Span {
            number,
            job: job.clone(),
            rank: *rank,
            kind: *kind,
            name: Arc::clone(name),
            step,
            begin_ns: begin_us.wrapping_mul(MICROSECOND_NS),
            end_ns: end_us.wrapping_mul(MICROSECOND_NS),
            is_cut: *is_cut,
            peak_bytes: peak.checked_sub(1).map(|units| units * PEAK_UNIT_BYTES),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{Account, Resource};
    use crate::phases::{PhaseMemory, hand};
    use proptest::prelude::*;

    fn attributed(
        kind: Kind,
        rank: usize,
        name: &str,
        step: Option<u64>,
        times: (i64, i64),
        peak: Option<u64>,
    ) -> Attributed {
        let ended = hand::ended(kind, rank, name, step, times.0, times.1);
        let gpus = peak.map(|_| PhaseMemory { peak_bytes: peak, ..PhaseMemory::unknown(0) }).into_iter().collect();
        Attributed { gpus, ..hand::attributed(ended) }
    }

    fn spans(trail: &Trail, from_ns: i64, to_ns: i64) -> Vec<Span> {
        trail.blocks(from_ns, to_ns).iter().flat_map(|block| block.spans().collect::<Vec<_>>()).collect()
    }

    /// As many phases of 20 ms as fit, of one owner.
    fn fill(trail: &mut Trail, account: &Arc<Account>, count: u64) {
        for number in 0..count {
            let begin_ns = number.cast_signed() * 20_000_000;
            let names = ["data", "forward", "backward", "comm"];
            let name = names[(number % 4) as usize];
            let times = (begin_ns, begin_ns + 19_000_000);
            let mut phase = attributed(Kind::Phase, 0, name, Some(number / 4), times, Some(70 << 30));
            phase.ended.open.held = Some(account.hold(Resource::Bytes, 1));
            trail.push(number, &phase);
        }
    }

    #[test]
    fn a_span_takes_few_bytes_and_the_oldest_go_first() {
        let mut trail = Trail::new(64 << 10);
        fill(&mut trail, &Account::alone(), 20_000);
        assert!(trail.bytes() <= 64 << 10 && trail.bytes() > 56 << 10, "{}", trail.bytes());
        let kept = spans(&trail, i64::MIN, i64::MAX);
        assert!(trail.bytes() / kept.len() <= 20, "{} bytes a span", trail.bytes() / kept.len());
        assert_eq!(kept.last().map(|span| span.number), Some(19_999));
        assert!(kept.windows(2).all(|pair| pair[0].number + 1 == pair[1].number), "none is missing in between");
        let real: usize =
            trail.blocks.each().next().expect("an owner").iter().map(|block| block.encoded.capacity()).sum();
        assert!(real < 2 * trail.bytes(), "{real} bytes are allocated");
    }

    #[test]
    fn a_span_of_one_of_64_ranks_takes_little_more() {
        let mut trail = Trail::new(1 << 20);
        for number in 0..200_000_u64 {
            let (rank, begin_ns) = ((number % 64) as usize, (number / 64).cast_signed() * 20_000_000);
            let name = ["data", "forward", "backward", "comm", "optimizer"][(number / 64 % 5) as usize];
            let times = (begin_ns + rank as i64, begin_ns + 19_000_000);
            trail.push(number, &attributed(Kind::Phase, rank, name, Some(number / 320), times, Some(70 << 30)));
        }
        let kept = spans(&trail, i64::MIN, i64::MAX).len();
        assert!(trail.bytes() / kept <= 25, "{} bytes a span", trail.bytes() / kept);
        let of_block = |block: &Arc<TrailBlock>| {
            block.encoded.capacity()
                + block.ranks.capacity() * size_of::<(JobId, u32)>()
                + block.names.capacity() * NAME_BYTES
        };
        let real: usize = trail.blocks.each().flatten().map(of_block).sum();
        assert!(real < 2 * trail.bytes(), "{real} bytes are allocated");
    }

    #[test]
    fn the_owner_with_the_most_makes_room() {
        let mut trail = Trail::new(64 << 10);
        let (one, other) = (Account::alone(), Account::alone());
        fill(&mut trail, &one, 100);
        fill(&mut trail, &other, 20_000);
        let of = |own: &VecDeque<Arc<TrailBlock>>| own.iter().map(|block| block.spans().count()).sum::<usize>();
        let mut spans: Vec<usize> = trail.blocks.each().map(of).collect();
        spans.sort_unstable();
        assert_eq!((spans.len(), spans[0]), (2, 100));
        assert!(spans[1] > 1_000);
    }

    #[test]
    fn names_count_towards_the_bytes() {
        let mut trail = Trail::new(1 << 20);
        for number in 0..100 {
            let name = format!("{number:0>128}");
            trail.push(number, &attributed(Kind::Phase, 0, &name, None, (0, 1_000), None));
        }
        assert!(trail.bytes() > 100 * (128 + NAME_BYTES), "{}", trail.bytes());
    }

    #[test]
    fn only_blocks_of_the_interval_are_returned() {
        let mut trail = Trail::new(1 << 20);
        fill(&mut trail, &Account::alone(), 10_000);
        let all = trail.blocks(i64::MIN, i64::MAX).len();
        let some = trail.blocks(100_000_000_000, 101_000_000_000).len();
        assert!(all > 10 && (1..=2).contains(&some), "{some} of {all}");
        assert!(trail.blocks(i64::MIN, -1).is_empty() && trail.blocks(200_000_000_000, i64::MAX).is_empty());
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(rows in prop::collection::vec(
            (any::<[bool; 2]>(), 0_usize..5, 0_usize..4, any::<Option<u64>>(), any::<i32>(), any::<u32>(), any::<Option<u64>>()), 1..300)) {
            let mut trail = Trail::new(1 << 20);
            let mut expected = Vec::new();
            for (number, ([is_step, is_cut], rank, name, step, begin, length, peak)) in (0..).zip(rows) {
                let kind = if is_step { Kind::Step } else { Kind::Phase };
                let name = ["a", "b", "forward", ""][name];
                let (begin_us, peak) = (i64::from(begin), peak.map(|peak| peak >> 8));
                let (begin_ns, end_ns) = (begin_us * 1_000, (begin_us + i64::from(length)) * 1_000);
                let mut one = attributed(kind, rank, name, step, (begin_ns, end_ns), peak);
                one.ended.by = if is_cut { EndedBy::Exit } else { EndedBy::End };
                trail.push(number, &one);
                let ((job, rank), peak_bytes) = (hand::key(rank), peak.map(|peak| peak >> 16 << 16));
                let name = name.into();
                expected.push(Span { number, job, rank, kind, name, step, begin_ns, end_ns, is_cut, peak_bytes });
            }
            prop_assert_eq!(spans(&trail, i64::MIN, i64::MAX), expected);
        }
    }
}
