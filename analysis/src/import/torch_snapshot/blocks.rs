//! The blocks of a device over a history: which the program had at a time.
//!
//! Enters: allocations and frees, in order; at the end, the blocks of the snapshot. Leaves: the blocks at the last peak. Invariants:
//! a block that is freed without having been allocated was there from the begin; memory grows with what is allocated at a time.

use std::collections::HashMap;

/// The most blocks from before a history, beyond which those at a time are not known.
const MOST_BEFORE: usize = 1 << 19;

/// A block of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owned {
    pub address: u64,
    /// What was asked for.
    pub bytes: u64,
    pub stack: u32,
    /// The entry that allocated it; 0 if it is older than the history.
    pub event: u32,
}

/// What is kept of a block beside its address.
#[derive(Debug, Clone, Copy)]
struct Allocated {
    bytes: u64,
    stack: u32,
    event: u32,
}

/// The blocks of a trace so far.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    live: HashMap<u64, Allocated>,
    /// Those of the last peak that were freed since.
    since_peak: Vec<Owned>,
    /// Those that were freed without having been allocated, with the entry that freed them.
    before: Vec<(Owned, u32)>,
    /// There were more than are kept.
    is_partial: bool,
}

/// The number of an entry in four bytes. A file has fewer than this can count.
fn short(event: u64) -> u32 {
    u32::try_from(event).unwrap_or(u32::MAX)
}

impl Blocks {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// The program gets a block.
    pub fn allocate(&mut self, address: u64, bytes: u64, stack: u32, event: u64) {
        self.live.insert(address, Allocated { bytes, stack, event: short(event) });
    }

    /// The program gives a block back; returns it if the history allocated it. `peak` is the entry of the last peak.
    pub fn free(&mut self, address: Option<u64>, peak: u64) -> Option<Owned> {
        let address = address?;
        let Allocated { bytes, stack, event } = self.live.remove(&address)?;
        let block = Owned { address, bytes, stack, event };
        if u64::from(event) <= peak {
            self.since_peak.push(block);
        }
        Some(block)
    }

    /// The program gives a block back that was there before the history began.
    pub fn free_before(&mut self, address: Option<u64>, bytes: u64, stack: u32, event: u64) {
        match address.filter(|_| self.before.len() < MOST_BEFORE) {
            Some(address) => self.before.push((Owned { address, bytes, stack, event: 0 }, short(event))),
            None => self.is_partial = true,
        }
    }

    /// There is a new peak.
    pub fn peak(&mut self) {
        self.since_peak.clear();
    }

    /// One that the program has, by its address.
    pub fn at(&self, address: u64) -> Option<Owned> {
        let Allocated { bytes, stack, event } = *self.live.get(&address)?;
        Some(Owned { address, bytes, stack, event })
    }

    /// Those now, without those from before the history.
    pub fn now(&self) -> Vec<Owned> {
        self.live.keys().filter_map(|address| self.at(*address)).collect()
    }

    /// Those at the last peak, likewise.
    pub fn at_peak(&self, peak: u64) -> Vec<Owned> {
        let live = self.live.keys().filter_map(|address| self.at(*address));
        live.filter(|block| u64::from(block.event) <= peak).chain(self.since_peak.iter().copied()).collect()
    }

    /// Those from before the history that were freed after an entry; `None` if that is not known.
    pub fn freed_after(&self, event: u64) -> Option<impl Iterator<Item = Owned>> {
        let later = move |(block, freed): &(Owned, u32)| (u64::from(*freed) > event).then_some(*block);
        (!self.is_partial).then(|| self.before.iter().filter_map(later))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(blocks: impl IntoIterator<Item = Owned>) -> Vec<u64> {
        let mut addresses: Vec<u64> = blocks.into_iter().map(|block| block.address).collect();
        addresses.sort_unstable();
        addresses
    }

    #[test]
    fn those_at_the_peak_are_found_after_they_are_freed() {
        let mut blocks = Blocks::default();
        blocks.allocate(1, 10, 0, 1);
        blocks.allocate(2, 10, 0, 2);
        // The peak was at entry 2.
        blocks.allocate(3, 5, 0, 4);
        assert_eq!(blocks.free(Some(1), 2).map(|block| block.event), Some(1));
        assert!(
            blocks.free(Some(3), 2).is_some() && blocks.free(Some(9), 2).is_none() && blocks.free(None, 2).is_none()
        );
        blocks.allocate(1, 5, 0, 7);
        assert_eq!((addresses(blocks.at_peak(2)), addresses(blocks.now())), (vec![1, 2], vec![1, 2]));
        assert_eq!(blocks.at_peak(2).iter().map(|block| block.bytes).sum::<u64>(), 20);
        blocks.peak();
        assert_eq!(blocks.at_peak(8).iter().map(|block| block.bytes).sum::<u64>(), 15);
    }

    #[test]
    fn those_from_before_the_history_are_there_until_they_are_freed() {
        let mut blocks = Blocks::default();
        blocks.free_before(Some(4), 10, 0, 3);
        blocks.free_before(Some(5), 10, 0, 8);
        let after = |blocks: &Blocks, event| blocks.freed_after(event).map(addresses);
        assert_eq!(
            (after(&blocks, 2), after(&blocks, 3), after(&blocks, 8)),
            (Some(vec![4, 5]), Some(vec![5]), Some(vec![]))
        );
        blocks.free_before(None, 10, 0, 9);
        assert_eq!(after(&blocks, 0), None);
    }
}
