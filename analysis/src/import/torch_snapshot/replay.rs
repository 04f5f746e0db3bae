//! What an allocator's memory was, replayed from its trace: its level over time, the peak, and who held it then.
//!
//! Enters: segments, and the entries of traces in their order. Leaves: by device, the curves of allocated and reserved
//! memory, the peak with its holders, and failures. Invariants: the results are those of PyTorch's own visualiser; memory that
//! is freed, or in use at the end, without an allocation in the trace counts from the begin; one pass is enough, in memory that
//! grows with what is allocated at a time and not with the trace.

use super::bands::{Banded, Bands};
use super::curve::{AllocatorCurve, Level};
use super::input::Parsed;
use super::stacks::{NONE, Stacks};
use super::values::{Entry, MOST_DEVICES, Segment, Sink, Top};
use highwater_engine::recording::FileProblem;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The most allocations at a time of all traces, and the most blocks of all segments.
const MOST_LIVE: usize = 1 << 20;
/// Maximum number of stacks with totals, over all traces. Memory of further stacks counts as that of an unknown stack.
const MOST_HELD: usize = 1 << 19;
/// The most failures that are listed of one trace.
const MOST_FAILURES: usize = 64;

/// What one stack holds. Bytes, and how many allocations.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    now: (i64, i64),
    /// What it held at peak number `peak`. If there has been a newer peak since, it held `now` there: it has not
    /// changed.
    at_peak: (i64, i64),
    /// The number of the last peak before the latest change.
    peak: u32,
}

/// The allocator found no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub event: u64,
    pub time_us: Option<i64>,
    pub requested: u64,
    pub device_free: Option<u64>,
    /// Allocated and reserved less what they were at the begin.
    pub allocated: i64,
    pub reserved: i64,
    pub stack: u32,
}

/// One trace. Levels are relative to its begin, whose levels are known only at its end.
#[derive(Debug, Default)]
pub(super) struct DeviceTrace {
    pub events: u64,
    pub begin_us: Option<i64>,
    pub end_us: Option<i64>,
    last_us: Option<i64>,
    allocated: i64,
    reserved: i64,
    /// Bytes that were freed in the trace without having been allocated in it.
    freed_before: i64,
    live: HashMap<u64, (u64, u32)>,
    held: HashMap<u32, Held>,
    pub peak: Peak,
    /// How many peaks there were.
    peaks: u32,
    pub curve: AllocatorCurve,
    bands: Bands,
    /// `freed_before` by stack.
    before: HashMap<u32, u64>,
    pub failures: Vec<Failure>,
    pub failures_left_out: u64,
}

/// The highest level. At first that of the begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Peak {
    /// After how many entries; 0 is before the first.
    pub event: u64,
    pub time_us: Option<i64>,
    pub allocated: i64,
    pub reserved: i64,
}

#[derive(Debug, Clone, Copy)]
struct Resident {
    device: i64,
    address: Option<u64>,
    /// What was asked for; all of it where that is not known.
    requested: u64,
    stack: u32,
}

/// The numbers of the texts of actions.
#[derive(Debug)]
struct Actions {
    alloc: u32,
    free: [u32; 2],
    reserve: [u32; 2],
    release: [u32; 2],
    oom: u32,
}

/// All traces and segments of a snapshot.
#[derive(Debug)]
pub(super) struct Replay {
    actions: Actions,
    traces: Vec<DeviceTrace>,
    blocks: Vec<Resident>,
    segments: BTreeMap<i64, Segments>,
    /// Of all traces.
    live: usize,
    held: usize,
    pub skipped: u64,
    /// Entries whose stack is not kept.
    pub without_room: u64,
}

/// The segments of a device at the end. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segments {
    pub reserved: u64,
    /// Of that, blocks in use.
    pub in_use: u64,
    /// What was requested for these blocks; `None` if that of any of them is not known.
    pub requested: Option<u64>,
}

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
    /// The stacks that held the most at any time, with what they held over time.
    pub banded: Banded,
}

/// The most stacks whose levels over time are kept of a device.
const MOST_BANDED: usize = 64;

impl Replay {
    pub fn new(stacks: &mut Stacks) -> Self {
        let mut text = |text| stacks.text(text);
        let actions = Actions {
            alloc: text("alloc"),
            free: [text("free_completed"), text("free")],
            reserve: [text("segment_alloc"), text("segment_map")],
            release: [text("segment_free"), text("segment_unmap")],
            oom: text("oom"),
        };
        let (traces, blocks, segments) = (Vec::new(), Vec::new(), BTreeMap::new());
        Self { actions, traces, blocks, segments, live: 0, held: 0, skipped: 0, without_room: 0 }
    }

    /// Returns the result for each device that has a trace or memory.
    pub fn finish(mut self, top: &Top) -> Vec<Device> {
        let traced = top.traces.iter().enumerate().filter(|(_, trace)| trace.is_some());
        let traced = traced.filter_map(|(device, _)| i64::try_from(device).ok());
        let devices: BTreeSet<i64> = traced.chain(self.segments.keys().copied()).collect();
        let mut found = Vec::new();
        for device in devices {
            let at = usize::try_from(device).ok().and_then(|device| *top.traces.get(device)?);
            let trace = at.and_then(|at| self.traces.get_mut(at as usize)).map(std::mem::take).unwrap_or_default();
            let blocks = self.blocks.iter().filter(|block| block.device == device);
            found.push(Device::of(device, trace, self.segments.get(&device).copied(), blocks));
        }
        found
    }
}

impl Sink for Replay {
    fn trace(&mut self) -> Parsed<u32> {
        if self.traces.len() >= MOST_DEVICES {
            return Err(FileProblem::too_many(MOST_DEVICES, "traces").into());
        }
        self.traces.push(DeviceTrace::default());
        Ok(u32::try_from(self.traces.len() - 1).unwrap_or(u32::MAX))
    }

    fn entry(&mut self, trace: u32, entry: Entry) -> Parsed<()> {
        let Some(trace) = self.traces.get_mut(trace as usize) else { return Ok(()) };
        let (live, held) = (trace.live.len(), trace.held.len());
        let has_room = self.held < MOST_HELD || trace.held.contains_key(&entry.stack);
        trace.add(&self.actions, &Entry { stack: if has_room { entry.stack } else { NONE }, ..entry })?;
        self.without_room += u64::from(!has_room);
        self.live = self.live + trace.live.len() - live;
        self.held = self.held + trace.held.len() - held;
        if self.live > MOST_LIVE {
            return Err(FileProblem::too_many(MOST_LIVE, "live allocations at a time").into());
        }
        Ok(())
    }

    fn segment(&mut self, segment: Segment) -> Parsed<()> {
        let Segment { device, total, blocks } = segment;
        let sums = self.segments.entry(device).or_insert(Segments { reserved: 0, in_use: 0, requested: Some(0) });
        sums.reserved = sums.reserved.saturating_add(total);
        for block in blocks.iter().filter(|block| block.is_in_use) {
            sums.in_use = sums.in_use.saturating_add(block.size);
            sums.requested = sums.requested.zip(block.requested).map(|(sum, bytes)| sum.saturating_add(bytes));
        }
        for block in blocks.iter().filter(|block| block.is_allocated) {
            if self.blocks.len() >= MOST_LIVE {
                return Err(FileProblem::too_many(MOST_LIVE, "blocks in use in its segments").into());
            }
            let (address, requested, stack) = (block.address, block.requested.unwrap_or(block.size), block.stack);
            self.blocks.push(Resident { device, address, requested, stack });
        }
        if self.segments.len() > MOST_DEVICES {
            return Err(FileProblem::too_many(MOST_DEVICES, "devices in its segments").into());
        }
        Ok(())
    }

    fn skipped(&mut self, count: u64) {
        self.skipped = self.skipped.saturating_add(count);
    }
}

/// A sum that no real allocator reaches is an error.
fn sum(level: i64, bytes: i64) -> Parsed<i64> {
    level.checked_add(bytes).ok_or_else(|| FileProblem::malformed("its sizes add up to more than 2^63 bytes").into())
}

impl DeviceTrace {
    fn add(&mut self, actions: &Actions, entry: &Entry) -> Parsed<()> {
        if self.events == 0 {
            self.bands.change(0, entry.time_us, NONE, 0);
        }
        self.events += 1;
        if entry.time_us.is_some() {
            self.begin_us = self.begin_us.or(entry.time_us);
            self.end_us = self.end_us.max(entry.time_us);
            self.last_us = entry.time_us;
        }
        // An entry without a time was after the one before it.
        let time_us = self.last_us;
        let action = entry.action;
        let size = i64::try_from(entry.size)
            .map_err(|_| FileProblem::malformed(format!("an entry has {} bytes", entry.size)))?;
        if action == actions.alloc {
            self.allocated = sum(self.allocated, size)?;
            self.hold(entry.stack, size, 1);
            self.bands.change(self.events, time_us, entry.stack, size);
            if let Some(address) = entry.address {
                self.live.insert(address, (entry.size, entry.stack));
            }
            if self.allocated > self.peak.allocated {
                self.peak = Peak { event: self.events, time_us, allocated: self.allocated, reserved: self.reserved };
                self.peaks = self.peaks.wrapping_add(1);
            }
        } else if actions.free.contains(&action) {
            if let Some((bytes, stack)) = entry.address.and_then(|address| self.live.remove(&address)) {
                let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
                self.allocated = sum(self.allocated, -bytes)?;
                self.hold(stack, -bytes, -1);
                self.bands.change(self.events, time_us, stack, -bytes);
            } else {
                self.allocated = sum(self.allocated, -size)?;
                self.freed_before = sum(self.freed_before, size)?;
                self.bands.change(self.events, time_us, entry.stack, -size);
                let before = self.before.entry(entry.stack).or_default();
                *before = before.saturating_add(entry.size);
                // This memory was there at the last peak, which lies before its release.
                let held = self.touch(entry.stack);
                held.at_peak = (held.at_peak.0.saturating_add(size), held.at_peak.1 + 1);
            }
        } else if actions.reserve.contains(&action) {
            self.reserved = sum(self.reserved, size)?;
        } else if actions.release.contains(&action) {
            self.reserved = sum(self.reserved, -size)?;
        } else {
            if action == actions.oom {
                self.fail(entry);
            }
            return Ok(());
        }
        self.curve.push(Level { event: self.events, time_us, allocated: self.allocated });
        Ok(())
    }

    fn fail(&mut self, entry: &Entry) {
        if self.failures.len() >= MOST_FAILURES {
            self.failures_left_out += 1;
            return;
        }
        self.failures.push(Failure {
            event: self.events,
            time_us: self.last_us,
            requested: entry.size,
            device_free: entry.device_free,
            allocated: self.allocated,
            reserved: self.reserved,
            stack: entry.stack,
        });
    }

    /// What a stack holds, with what it held at the last peak kept.
    fn touch(&mut self, stack: u32) -> &mut Held {
        let peak = self.peaks;
        let held = self.held.entry(stack).or_default();
        if held.peak != peak {
            (held.at_peak, held.peak) = (held.now, peak);
        }
        held
    }

    fn hold(&mut self, stack: u32, bytes: i64, allocations: i64) {
        let held = self.touch(stack);
        held.now = (held.now.0.saturating_add(bytes), held.now.1 + allocations);
    }
}

impl Device {
    fn of<'a>(
        device: i64,
        mut trace: DeviceTrace,
        segments: Option<Segments>,
        blocks: impl Iterator<Item = &'a Resident>,
    ) -> Self {
        let mut held = std::mem::take(&mut trace.held);
        for of in held.values_mut() {
            of.at_peak = if of.peak == trace.peaks { of.at_peak } else { of.now };
        }
        // What is in use and was not allocated in the trace was there all the time.
        let mut allocated_before = trace.freed_before;
        let mut before = std::mem::take(&mut trace.before);
        let mut seen = HashSet::new();
        for block in blocks {
            let is_traced =
                block.address.is_some_and(|address| trace.live.contains_key(&address) || !seen.insert(address));
            if !is_traced {
                let bytes = i64::try_from(block.requested).unwrap_or(i64::MAX);
                allocated_before = allocated_before.saturating_add(bytes);
                let level = before.entry(block.stack).or_default();
                *level = level.saturating_add(block.requested);
                let held = held.entry(block.stack).or_default();
                held.at_peak = (held.at_peak.0.saturating_add(bytes), held.at_peak.1 + 1);
            }
        }
        trace.live = HashMap::new();
        let mut holders: Vec<Holder> = held
            .into_iter()
            .filter_map(|(stack, Held { at_peak: (bytes, allocations), .. })| {
                let (bytes, allocations) = (u64::try_from(bytes).ok()?, u64::try_from(allocations).ok()?);
                (allocations > 0).then_some(Holder { stack, bytes, allocations })
            })
            .collect();
        holders.sort_unstable_by_key(|holder| (std::cmp::Reverse(holder.bytes), holder.stack));
        let reserved_before =
            segments.and_then(|segments| i64::try_from(segments.reserved).ok()?.checked_sub(trace.reserved));
        let banded = std::mem::take(&mut trace.bands).finish(&before, MOST_BANDED);
        Self { device, trace, allocated_before, reserved_before, segments, holders, banded }
    }
}
