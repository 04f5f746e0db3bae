//! The blocks of a simulated allocator: which parts of its segments are free, and which neighbours they have.
//!
//! Enters: segments, and parts of them that are taken and given back. Leaves: free blocks by size. Invariants: two neighbours that
//! are free and of one kind become one block; a block that is taken is in no list; numbers of blocks that are gone are used
//! again, so memory grows with the blocks that there are.

use std::collections::BTreeSet;
use std::ops::RangeBounds;

/// SegmentParts that serve the same requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockPool {
    pub stream: u64,
    /// Whether it serves requests up to 1 MiB.
    pub is_small: bool,
}

/// A part of a segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentPart {
    pub pool: BlockPool,
    /// Its address.
    pub begin: u64,
    pub bytes: u64,
    /// Whether there is memory behind its addresses. A segment that grows has addresses without.
    pub is_mapped: bool,
    pub is_free: bool,
    pub before: Option<usize>,
    pub after: Option<usize>,
}

/// Free blocks with memory, in the order in which they are chosen: the smallest first, then by address.
type BySize = (BlockPool, u64, u64, usize);
/// Addresses without memory, in their order.
type ByAddress = (BlockPool, u64, usize);

/// All blocks.
#[derive(Debug, Default)]
pub(super) struct SegmentParts {
    all: Vec<SegmentPart>,
    unused: Vec<usize>,
    free: BTreeSet<BySize>,
    unmapped: BTreeSet<ByAddress>,
}

impl SegmentParts {
    pub fn get(&self, nth: usize) -> &SegmentPart {
        &self.all[nth]
    }

    /// Adds a taken block without neighbours, or behind another.
    pub fn add(&mut self, pool: BlockPool, begin: u64, bytes: u64, is_mapped: bool, before: Option<usize>) -> usize {
        let after = before.and_then(|before| self.all[before].after);
        let part = SegmentPart { pool, begin, bytes, is_mapped, is_free: false, before, after };
        let nth = if let Some(nth) = self.unused.pop() {
            self.all[nth] = part;
            nth
        } else {
            self.all.push(part);
            self.all.len() - 1
        };
        if let Some(before) = before {
            self.all[before].after = Some(nth);
        }
        if let Some(after) = after {
            self.all[after].before = Some(nth);
        }
        nth
    }

    /// Puts a taken block into its list, joined with what is free beside it.
    pub fn give(&mut self, nth: usize) {
        self.join(nth);
        let part = &mut self.all[nth];
        part.is_free = true;
        let SegmentPart { pool, begin, bytes, is_mapped, .. } = *part;
        if is_mapped {
            self.free.insert((pool, bytes, begin, nth));
        } else {
            self.unmapped.insert((pool, begin, nth));
        }
    }

    /// Takes a free block out of its list.
    pub fn take(&mut self, nth: usize) {
        let part = &mut self.all[nth];
        part.is_free = false;
        let SegmentPart { pool, begin, bytes, is_mapped, .. } = *part;
        if is_mapped {
            self.free.remove(&(pool, bytes, begin, nth));
        } else {
            self.unmapped.remove(&(pool, begin, nth));
        }
    }

    /// Joins a taken block with those beside it that are free and of its kind.
    pub fn join(&mut self, nth: usize) {
        for other in [self.all[nth].before, self.all[nth].after].into_iter().flatten() {
            if self.all[other].is_free && self.all[other].is_mapped == self.all[nth].is_mapped {
                self.take(other);
                self.absorb(nth, other);
            }
        }
    }

    /// Makes two taken neighbours one block.
    pub fn absorb(&mut self, nth: usize, other: usize) {
        let gone = self.all[other];
        let part = &mut self.all[nth];
        part.bytes += gone.bytes;
        if part.before == Some(other) {
            (part.begin, part.before) = (gone.begin, gone.before);
            gone.before.into_iter().for_each(|before| self.all[before].after = Some(nth));
        } else {
            part.after = gone.after;
            gone.after.into_iter().for_each(|after| self.all[after].before = Some(nth));
        }
        self.unused.push(other);
    }

    /// Cuts a taken block behind its first bytes; returns the rest, which is taken too.
    pub fn cut(&mut self, nth: usize, bytes: u64) -> usize {
        let SegmentPart { pool, begin, bytes: whole, is_mapped, .. } = self.all[nth];
        self.all[nth].bytes = bytes;
        self.add(pool, begin + bytes, whole - bytes, is_mapped, Some(nth))
    }

    /// Removes a taken block that is a whole segment.
    pub fn remove(&mut self, nth: usize) {
        self.unused.push(nth);
    }

    /// Says whether a taken block has memory.
    pub fn set_mapped(&mut self, nth: usize, is_mapped: bool) {
        self.all[nth].is_mapped = is_mapped;
    }

    /// Free blocks with memory of a pool, of at least this size, the smallest first.
    pub fn at_least(&self, pool: BlockPool, bytes: u64) -> impl Iterator<Item = usize> {
        self.range((pool, bytes, 0, 0)..=(pool, u64::MAX, u64::MAX, usize::MAX))
    }

    /// All free blocks with memory.
    pub fn free(&self) -> Vec<usize> {
        self.range(..).collect()
    }

    fn range(&self, keys: impl RangeBounds<BySize>) -> impl Iterator<Item = usize> {
        self.free.range(keys).map(|(.., nth)| *nth)
    }

    /// Addresses without memory of a pool, in their order.
    pub fn unmapped(&self, pool: BlockPool) -> impl Iterator<Item = usize> {
        self.unmapped.range((pool, 0, 0)..=(pool, u64::MAX, usize::MAX)).map(|(.., nth)| *nth)
    }
}
