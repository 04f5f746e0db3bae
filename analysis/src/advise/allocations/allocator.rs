//! PyTorch's caching allocator, with the segments of fixed size that it has by default, or with `expandable_segments:True`.
//!
//! Enters: requests and releases in their order. Leaves: what is reserved of the GPU for them, or that they exceed a limit.
//! Invariants: the rules are those of `c10/cuda/CUDACachingAllocator.cpp` (PyTorch 2.1 to 2.15) for one device without private
//! pools and without other settings; 30 histories of an H200 came out with what the job had reserved.

use super::parts::{BlockPool, SegmentParts};

const MIB: u64 = 1 << 20;
/// Sizes of blocks are multiples of this.
const ALIGNMENT: u64 = 512;
/// Requests up to this size are served from small segments. In segments of fixed size, no more than this is left behind a
/// larger block without becoming a block of its own.
const SMALL: u64 = MIB;
/// The size of a small segment, and what segments for the largest requests are multiples of.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// The size of the segment of a request below `MIDDLE`.
const LARGE_SEGMENT: u64 = 20 * MIB;
const MIDDLE: u64 = 10 * MIB;
/// How many addresses a segment that grows has: whole pages, and more than a GPU has memory.
const ADDRESSES: u64 = LARGE_SEGMENT << 17;

/// There is no memory left, and nothing that could be given back to the driver is enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutOfMemory;

/// What was reserved and in use at most, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct AllocatorPeaks {
    pub reserved: u64,
    pub allocated: u64,
}

/// The allocator of one device.
#[derive(Debug)]
pub(super) struct SimulatedAllocator {
    blocks: SegmentParts,
    is_expandable: bool,
    limit_bytes: u64,
    reserved: u64,
    allocated: u64,
    peaks: AllocatorPeaks,
    /// Where the next segment begins. The driver's addresses are not known; what matters is only their order.
    next_begin: u64,
}

impl SimulatedAllocator {
    /// One that has nothing yet, and may reserve this many bytes.
    pub fn new(is_expandable: bool, limit_bytes: u64) -> Self {
        let (blocks, peaks) = (SegmentParts::default(), AllocatorPeaks::default());
        Self { blocks, is_expandable, limit_bytes, reserved: 0, allocated: 0, peaks, next_begin: 0 }
    }

    pub fn peaks(&self) -> AllocatorPeaks {
        self.peaks
    }

    /// What is reserved and in use now.
    #[cfg(test)]
    pub fn now(&self) -> AllocatorPeaks {
        AllocatorPeaks { reserved: self.reserved, allocated: self.allocated }
    }

    /// The addresses of a block: the first, and the first behind it.
    #[cfg(test)]
    pub fn span(&self, nth: usize) -> (u64, u64) {
        let part = self.blocks.get(nth);
        (part.begin, part.begin + part.bytes)
    }

    /// A segment that there is from the begin: the sizes of its blocks in order, and whether each is taken. Returns those that are.
    pub fn restore(&mut self, pool: BlockPool, begin: u64, parts: &[(u64, bool)]) -> Vec<usize> {
        let (mut before, mut at, mut all) = (None, begin, Vec::with_capacity(parts.len()));
        for (bytes, _) in parts {
            let nth = self.blocks.add(pool, at, *bytes, true, before);
            at = at.saturating_add(*bytes);
            before = Some(nth);
            all.push(nth);
        }
        self.next_begin = self.next_begin.max(at.saturating_add(LARGE_SEGMENT));
        self.reserve(at - begin);
        let mut taken = Vec::new();
        for (nth, (bytes, is_taken)) in all.into_iter().zip(parts) {
            if *is_taken {
                self.use_more(*bytes);
                taken.push(nth);
            } else {
                self.blocks.give(nth);
            }
        }
        taken
    }

    /// A block for a request.
    ///
    /// # Errors
    /// It exceeds the limit.
    pub fn allocate(&mut self, stream: u64, requested: u64) -> Result<usize, OutOfMemory> {
        let bytes = requested.max(1).next_multiple_of(ALIGNMENT);
        let pool = BlockPool { stream, is_small: bytes <= SMALL };
        let found = match self.best(pool, bytes) {
            Some(nth) => {
                self.blocks.take(nth);
                Some(nth)
            }
            None => self.obtain(pool, bytes).or_else(|| {
                self.release();
                self.obtain(pool, bytes)
            }),
        };
        let nth = found.ok_or(OutOfMemory)?;
        let rest = self.blocks.get(nth).bytes - bytes;
        if rest >= ALIGNMENT && (pool.is_small || self.is_expandable || rest > SMALL) {
            let rest = self.blocks.cut(nth, bytes);
            self.blocks.give(rest);
        }
        self.use_more(self.blocks.get(nth).bytes);
        Ok(nth)
    }

    /// Takes a block back.
    pub fn free(&mut self, nth: usize) {
        self.allocated -= self.blocks.get(nth).bytes;
        self.blocks.give(nth);
    }

    fn use_more(&mut self, bytes: u64) {
        self.allocated += bytes;
        self.peaks.allocated = self.peaks.allocated.max(self.allocated);
    }

    fn reserve(&mut self, bytes: u64) {
        self.reserved += bytes;
        self.peaks.reserved = self.peaks.reserved.max(self.reserved);
    }

    fn has_room_for(&self, bytes: u64) -> bool {
        self.reserved.saturating_add(bytes) <= self.limit_bytes
    }

    /// The free block that serves a request.
    fn best(&self, pool: BlockPool, bytes: u64) -> Option<usize> {
        let mut fitting = self.blocks.at_least(pool, bytes);
        let mut best = fitting.next()?;
        if self.is_expandable {
            // The end of a segment can grow, so blocks before its end are preferred, though larger.
            for next in fitting {
                if self.could_be(next) >= self.could_be(best) {
                    break;
                }
                best = next;
            }
        }
        Some(best)
    }

    /// The size of a block, with addresses behind it that have no memory yet.
    fn could_be(&self, nth: usize) -> u64 {
        let behind = self.blocks.get(nth).after.map(|after| self.blocks.get(after)).filter(|after| !after.is_mapped);
        self.blocks.get(nth).bytes + behind.map_or(0, |after| after.bytes)
    }

    /// A taken block of new memory.
    fn obtain(&mut self, pool: BlockPool, bytes: u64) -> Option<usize> {
        let segment = if pool.is_small {
            SMALL_SEGMENT
        } else if bytes < MIDDLE {
            LARGE_SEGMENT
        } else {
            bytes.next_multiple_of(SMALL_SEGMENT)
        };
        if !self.has_room_for(segment) {
            return None;
        }
        if self.is_expandable {
            return self.grow(pool, bytes);
        }
        let begin = self.addresses(segment)?;
        self.reserve(segment);
        Some(self.blocks.add(pool, begin, segment, true, None))
    }

    fn addresses(&mut self, bytes: u64) -> Option<u64> {
        let begin = self.next_begin;
        // A gap, as segments of the driver do not touch. Segments that grow begin at whole pages.
        self.next_begin = begin.checked_add(bytes)?.checked_add(LARGE_SEGMENT)?;
        Some(begin)
    }

    /// Lets a segment grow until it has a block of this size.
    fn grow(&mut self, pool: BlockPool, bytes: u64) -> Option<usize> {
        let first = self.blocks.unmapped(pool).find_map(|nth| self.with_addresses(nth, bytes));
        let nth = match first {
            Some(nth) => nth,
            None => {
                let begin = self.addresses(ADDRESSES)?;
                let nth = self.blocks.add(pool, begin, ADDRESSES, false, None);
                self.blocks.give(nth);
                self.with_addresses(nth, bytes)?
            }
        };
        self.blocks.take(nth);
        if !self.blocks.get(nth).is_mapped && !self.map(nth, bytes) {
            self.blocks.give(nth);
            return None;
        }
        self.blocks.join(nth);
        while self.blocks.get(nth).bytes < bytes {
            let missing = bytes - self.blocks.get(nth).bytes;
            let Some(next) = self.blocks.get(nth).after else { break };
            self.blocks.take(next);
            if !self.blocks.get(next).is_mapped && !self.map(next, missing) {
                self.blocks.give(next);
                self.blocks.give(nth);
                return None;
            }
            self.blocks.absorb(nth, next);
            self.blocks.join(nth);
        }
        Some(nth)
    }

    /// The first of the free blocks, from the one before these addresses on, that have enough addresses together.
    fn with_addresses(&self, unmapped: usize, bytes: u64) -> Option<usize> {
        let first =
            self.blocks.get(unmapped).before.filter(|before| self.blocks.get(*before).is_free).unwrap_or(unmapped);
        let (mut found, mut at) = (0_u64, Some(first));
        while let Some(nth) = at.filter(|nth| found < bytes && self.blocks.get(*nth).is_free) {
            found = found.saturating_add(self.blocks.get(nth).bytes);
            at = self.blocks.get(nth).after;
        }
        (found >= bytes).then_some(first)
    }

    /// Puts memory behind the first bytes of a taken block; what is left of it is given back.
    fn map(&mut self, nth: usize, bytes: u64) -> bool {
        let part = *self.blocks.get(nth);
        let bytes = bytes.next_multiple_of(granularity(part.pool)).min(part.bytes);
        if !self.has_room_for(bytes) {
            return false;
        }
        if bytes < part.bytes {
            let rest = self.blocks.cut(nth, bytes);
            self.blocks.give(rest);
        }
        self.blocks.set_mapped(nth, true);
        self.reserve(bytes);
        true
    }

    /// Gives back to the driver what is free as a whole.
    fn release(&mut self) {
        for nth in self.blocks.free() {
            if self.is_expandable {
                self.unmap(nth);
            } else if self.blocks.get(nth).before.or(self.blocks.get(nth).after).is_none() {
                self.blocks.take(nth);
                self.reserved -= self.blocks.get(nth).bytes;
                self.blocks.remove(nth);
            }
        }
    }

    /// Takes the memory from the whole pages of a free block.
    fn unmap(&mut self, nth: usize) {
        let part = *self.blocks.get(nth);
        let page = granularity(part.pool);
        let begin = part.begin.next_multiple_of(page);
        let end = (part.begin + part.bytes) / page * page;
        if begin >= end {
            return;
        }
        self.blocks.take(nth);
        let pages = if begin > part.begin { self.blocks.cut(nth, begin - part.begin) } else { nth };
        if end < part.begin + part.bytes {
            let rest = self.blocks.cut(pages, end - begin);
            self.blocks.give(rest);
        }
        self.blocks.set_mapped(pages, false);
        self.reserved -= end - begin;
        self.blocks.give(pages);
        if pages != nth {
            self.blocks.give(nth);
        }
    }
}

/// The size of the pages of a segment that grows.
fn granularity(pool: BlockPool) -> u64 {
    if pool.is_small { SMALL_SEGMENT } else { LARGE_SEGMENT }
}
