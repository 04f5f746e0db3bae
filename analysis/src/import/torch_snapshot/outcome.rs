//! What the replay found of one device: who held memory at the peak and at the end, and how it lay in segments.
//!
//! Enters: the trace of a device, with its segments and blocks at the end. Leaves: holders by stack, the largest blocks, and
//! layouts. Invariants: what is in use at the end without an allocation in the trace counts from the begin; a layout whose blocks or
//! segments do not add up to what the trace says is not known.

use super::bands::Banded;
use super::blocks::{Blocks, Owned};
use super::layout::{Area, Taken, layout};
use super::replay::{DeviceTrace, Held, Peak, Replayed, Resident, Segments};
use super::stacks::NONE;
use highwater_engine::recording::Layout;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// How many of the largest blocks are listed.
const MOST_BLOCKS: usize = 16;

/// The most stacks whose levels over time are kept of a device.
const MOST_BANDED: usize = 64;

/// What a stack held at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holder {
    pub stack: u32,
    pub bytes: u64,
    pub allocations: u64,
}

/// The result of the replay for one device. Bytes.
#[derive(Debug)]
pub(super) struct Device {
    pub device: i64,
    pub trace: DeviceTrace,
    /// What was allocated and reserved at the begin.
    pub allocated_before: i64,
    pub reserved_before: Option<i64>,
    /// At the end, where the snapshot has segments of the device.
    pub segments: Option<Segments>,
    /// The stacks that held memory at the peak, the largest holder first.
    pub holders: Vec<Holder>,
    /// Likewise at the end, where the snapshot has segments of the device.
    pub holders_at_end: Option<Vec<Holder>>,
    /// The largest blocks at the peak, the largest first; none if they are not known.
    pub blocks_at_peak: Vec<Owned>,
    /// Likewise at the end.
    pub blocks_at_end: Vec<Owned>,
    pub layout_at_peak: Option<Layout>,
    pub layout_at_end: Option<Layout>,
    /// The stacks that held the most at any time, with what they held over time.
    pub banded: Banded,
}

impl Device {
    /// The result from a trace, and from the segments and the blocks in use at the end.
    pub fn of(of: Replayed) -> Self {
        let Replayed { device, mut trace, segments, areas, blocks } = of;
        let blocks = &blocks.iter().collect::<Vec<_>>()[..];
        let mut held = std::mem::take(&mut trace.held);
        for of in held.values_mut() {
            of.at_peak = if of.peak == trace.peaks { of.at_peak } else { of.now };
        }
        // What is in use and was not allocated in the trace was there all the time.
        let mut allocated_before = trace.freed_before;
        let mut before = std::mem::take(&mut trace.before);
        let mut all_along: Vec<&Resident> = Vec::new();
        let mut seen = HashSet::new();
        for block in blocks {
            let is_traced = block.address.is_some_and(|address| {
                trace.blocks.at(address).is_some() || block.is_allocated && !seen.insert(address)
            });
            if !is_traced {
                all_along.push(block);
            }
            if !is_traced && block.is_allocated {
                let bytes = i64::try_from(block.requested).unwrap_or(i64::MAX);
                allocated_before = allocated_before.saturating_add(bytes);
                let level = before.entry(block.stack).or_default();
                *level = level.saturating_add(block.requested);
                let held = held.entry(block.stack).or_default();
                held.at_peak = (held.at_peak.0.saturating_add(bytes), held.at_peak.1 + 1);
            }
        }
        let holders = held.into_iter().filter_map(|(stack, Held { at_peak: (bytes, allocations), .. })| {
            let (bytes, allocations) = (u64::try_from(bytes).ok()?, u64::try_from(allocations).ok()?);
            (allocations > 0).then_some(Holder { stack, bytes, allocations })
        });
        let holders = sorted(holders.collect());
        let reserved_before =
            segments.and_then(|segments| i64::try_from(segments.reserved).ok()?.checked_sub(trace.reserved));
        let banded = std::mem::take(&mut trace.bands).finish(&before, MOST_BANDED);
        let at_end =
            segments.map(|_| blocks.iter().filter(|block| block.is_allocated).map(|block| owned(block, &trace.blocks)));
        let at_end: Option<Vec<Owned>> = at_end.map(Iterator::collect);
        let mut all = Self {
            device,
            trace: DeviceTrace::default(),
            allocated_before,
            reserved_before,
            segments,
            holders,
            holders_at_end: at_end.as_deref().map(holders_of),
            blocks_at_peak: Vec::new(),
            blocks_at_end: at_end.map(largest).unwrap_or_default(),
            layout_at_peak: None,
            layout_at_end: None,
            banded,
        };
        all.lay_out(&mut trace, &areas, blocks, &all_along);
        all.trace = trace;
        all
    }

    /// Finds how memory lay in segments at the peak, at failures, and at the end.
    fn lay_out(&mut self, trace: &mut DeviceTrace, areas: &[Area], blocks: &[&Resident], all_along: &[&Resident]) {
        let Peak { event, allocated, reserved, .. } = trace.peak;
        let at_peak = trace.blocks.at_peak(event);
        let owned_all_along =
            all_along.iter().filter(|block| block.is_allocated).map(|block| owned(block, &trace.blocks));
        if let Some(later) = trace.blocks.freed_after(event) {
            let whole: Vec<Owned> = at_peak.iter().copied().chain(later).chain(owned_all_along).collect();
            let is_whole = self.is_level(allocated, whole.iter().map(|block| block.bytes));
            self.blocks_at_peak = if is_whole { largest(whole) } else { Vec::new() };
        }
        let is_whole = |segments: Segments| segments.is_whole && blocks.iter().all(|block| block.address.is_some());
        if !self.segments.is_some_and(is_whole) {
            return;
        }
        self.layout_at_end = layout(areas.to_vec(), blocks.iter().filter_map(|block| exact(block)).collect());
        // What blocks take that are still there at the end.
        let takes: HashMap<u64, u64> = blocks.iter().filter_map(|block| Some((block.address?, block.size))).collect();
        let taken = |trace: &DeviceTrace, one: &Owned| {
            let is_there = trace.blocks.at(one.address) == Some(*one);
            match takes.get(&one.address).filter(|_| is_there) {
                Some(bytes) => Taken { begin: one.address, bytes: *bytes, is_exact: true },
                None => Taken { begin: one.address, bytes: one.bytes, is_exact: false },
            }
        };
        let lying =
            |this: &Self, trace: &DeviceTrace, event: u64, levels: (i64, i64), state: (Vec<Owned>, Vec<Area>)| {
                let blocks: Vec<Owned> = state.0.into_iter().chain(trace.blocks.freed_after(event)?).collect();
                let segments = trace.areas.complete(state.1, event, areas);
                let known = all_along.iter().filter(|block| block.is_allocated).map(|block| block.requested);
                // Where sums differ, the history contradicts itself.
                let is_level = this.is_level(levels.0, blocks.iter().map(|one| one.bytes).chain(known));
                let reserved = segments.iter().fold(0_u64, |sum, area| sum.saturating_add(area.bytes));
                let is_reserved = this.reserved_before?.checked_add(levels.1) == i64::try_from(reserved).ok();
                let taken =
                    blocks.iter().map(|one| taken(trace, one)).chain(all_along.iter().filter_map(|block| exact(block)));
                (is_level && is_reserved).then(|| layout(segments, taken.collect())).flatten()
            };
        self.layout_at_peak = trace
            .areas
            .at_peak(event)
            .and_then(|areas| lying(self, trace, event, (allocated, reserved), (at_peak, areas)));
        let mut failures = std::mem::take(&mut trace.failures);
        for failure in &mut failures {
            let levels = (failure.allocated, failure.reserved);
            let state = failure.state.take();
            failure.layout = state.and_then(|state| lying(self, trace, failure.event, levels, state));
        }
        trace.failures = failures;
    }

    /// Whether these are all bytes that were allocated, at a level that is relative to the begin.
    fn is_level(&self, allocated: i64, bytes: impl Iterator<Item = u64>) -> bool {
        let sum = bytes.fold(0_u64, u64::saturating_add);
        self.allocated_before.checked_add(allocated) == i64::try_from(sum).ok()
    }
}

/// A block of the snapshot, with the stack of the history if it has none itself.
fn owned(block: &Resident, blocks: &Blocks) -> Owned {
    let address = block.address.unwrap_or(0);
    let known = block.address.and_then(|address| blocks.at(address));
    let stack = known.filter(|_| block.stack == NONE).map_or(block.stack, |known| known.stack);
    Owned { address, bytes: block.requested, stack, event: known.map_or(0, |known| known.event) }
}

fn exact(block: &Resident) -> Option<Taken> {
    Some(Taken { begin: block.address?, bytes: block.size, is_exact: true })
}

/// The largest, the one with the lowest address first of equal ones.
fn largest(mut blocks: Vec<Owned>) -> Vec<Owned> {
    let key = |block: &Owned| (Reverse(block.bytes), block.address);
    if blocks.len() > MOST_BLOCKS {
        blocks.select_nth_unstable_by_key(MOST_BLOCKS, key);
        blocks.truncate(MOST_BLOCKS);
    }
    blocks.sort_unstable_by_key(key);
    blocks
}

/// What each stack holds.
fn holders_of(blocks: &[Owned]) -> Vec<Holder> {
    let mut held: HashMap<u32, (u64, u64)> = HashMap::new();
    for block in blocks {
        let (bytes, allocations) = held.entry(block.stack).or_default();
        (*bytes, *allocations) = (bytes.saturating_add(block.bytes), *allocations + 1);
    }
    sorted(held.into_iter().map(|(stack, (bytes, allocations))| Holder { stack, bytes, allocations }).collect())
}

fn sorted(mut holders: Vec<Holder>) -> Vec<Holder> {
    holders.sort_unstable_by_key(|holder| (Reverse(holder.bytes), holder.stack));
    holders
}
