//! What an allocator's memory was, replayed from its trace: its level over time, the peak, and who held it then.
//!
//! Enters: segments, and the entries of traces in their order. Leaves: by device, the curves of allocated and reserved
//! memory, the peak with its holders, and failures. Invariants: the results are those of PyTorch's own visualiser; memory that
//! is freed, or in use at the end, without an allocation in the trace counts from the begin; one pass is enough, in memory that
//! grows with what is allocated at a time and not with the trace.

use super::areas::Areas;
use super::bands::Bands;
use super::blocks::{Blocks, Owned};
use super::curve::{AllocatorCurve, Level};
use super::input::Parsed;
use super::layout::Area;
use super::stacks::{NONE, Stacks};
use super::values::{Block, Entry, MOST_DEVICES, Segment, Sink, Top};
use highwater_engine::recording::{FileProblem, Layout};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The most allocations at a time of all traces, and the most blocks of all segments.
const MOST_LIVE: usize = 1 << 20;
/// Maximum number of stacks with totals, over all traces. Memory of further stacks counts as that of an unknown stack.
const MOST_HELD: usize = 1 << 19;
/// The most failures that are listed of one trace.
const MOST_FAILURES: usize = 64;
/// The most blocks and segments that are kept of all failures, to know how memory lay then: 8 MiB. Of later failures that is not
/// known.
const MOST_OF_FAILURES: usize = 1 << 18;
/// Maximum number of segments of the snapshot.
const MOST_SEGMENTS: usize = 1 << 18;
/// What one stack holds. Bytes, and how many allocations.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Held {
    pub now: (i64, i64),
    /// What it held at peak number `peak`. If there has been a newer peak since, it held `now` there: it has not
    /// changed.
    pub at_peak: (i64, i64),
    /// The number of the last peak before the latest change.
    pub peak: u32,
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
    pub stream: Option<u64>,
    /// The blocks and segments that the history had made until then, if they are kept.
    pub state: Option<(Vec<Owned>, Vec<Area>)>,
    pub layout: Option<Layout>,
}

/// One trace. Levels are relative to its begin, whose levels are known only at its end.
#[derive(Debug, Default)]
pub(super) struct DeviceTrace {
    pub events: u64,
    pub begin_us: Option<i64>,
    pub end_us: Option<i64>,
    last_us: Option<i64>,
    allocated: i64,
    pub reserved: i64,
    /// Bytes that were freed in the trace without having been allocated in it.
    pub freed_before: i64,
    pub blocks: Blocks,
    pub areas: Areas,
    pub held: HashMap<u32, Held>,
    pub peak: Peak,
    /// How many peaks there were.
    pub peaks: u32,
    pub curve: AllocatorCurve,
    pub bands: Bands,
    /// `freed_before` by stack.
    pub before: HashMap<u32, u64>,
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

/// A block of the snapshot that is in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    pub device: i64,
    pub address: Option<u64>,
    pub size: u64,
    /// What was asked for; all of it where that is not known.
    pub requested: u64,
    pub stack: u32,
    /// Whether the program has it. If not, the GPU still uses it.
    pub is_allocated: bool,
}

/// The numbers of the texts of actions.
#[derive(Debug)]
struct Actions {
    alloc: u32,
    free: [u32; 2],
    reserve: [u32; 2],
    release: [u32; 2],
    /// Of the above, those of segments that grow.
    grow: [u32; 2],
    oom: u32,
}

/// All traces and segments of a snapshot.
#[derive(Debug)]
pub(super) struct Replay {
    actions: Actions,
    traces: Vec<DeviceTrace>,
    blocks: Vec<Resident>,
    segments: BTreeMap<i64, Segments>,
    /// The segments, with their devices.
    areas: Vec<(i64, Area)>,
    /// Of all traces.
    live: usize,
    held: usize,
    of_failures: usize,
    pub skipped: u64,
    /// Entries whose stack is not kept.
    pub without_room: u64,
}

/// The segments of a device at the end. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segments {
    /// Whether all of them have addresses, and are kept.
    pub is_whole: bool,
    pub reserved: u64,
    /// Of that, blocks in use.
    pub in_use: u64,
    /// What was requested for these blocks; `None` if that of any of them is not known.
    pub requested: Option<u64>,
}

/// What the replay has of one device.
#[derive(Debug)]
pub(super) struct Replayed {
    pub device: i64,
    pub trace: DeviceTrace,
    /// At the end, where the snapshot has segments of the device, with their places and the blocks in use.
    pub segments: Option<Segments>,
    pub areas: Vec<Area>,
    pub blocks: Vec<Resident>,
}

impl Replay {
    pub fn new(stacks: &mut Stacks) -> Self {
        let mut text = |text| stacks.text(text);
        let actions = Actions {
            alloc: text("alloc"),
            free: [text("free_completed"), text("free")],
            reserve: [text("segment_alloc"), text("segment_map")],
            release: [text("segment_free"), text("segment_unmap")],
            grow: [text("segment_map"), text("segment_unmap")],
            oom: text("oom"),
        };
        Self {
            actions,
            traces: Vec::new(),
            blocks: Vec::new(),
            segments: BTreeMap::new(),
            areas: Vec::new(),
            live: 0,
            held: 0,
            of_failures: 0,
            skipped: 0,
            without_room: 0,
        }
    }

    /// Returns what there is of each device that has a trace or memory.
    pub fn finish(mut self, top: &Top) -> Vec<Replayed> {
        let traced = top.traces.iter().enumerate().filter(|(_, trace)| trace.is_some());
        let traced = traced.filter_map(|(device, _)| i64::try_from(device).ok());
        let devices: BTreeSet<i64> = traced.chain(self.segments.keys().copied()).collect();
        let mut found = Vec::new();
        for device in devices {
            let at = usize::try_from(device).ok().and_then(|device| *top.traces.get(device)?);
            let trace = at.and_then(|at| self.traces.get_mut(at as usize)).map(std::mem::take).unwrap_or_default();
            let (blocks, others) = self.blocks.into_iter().partition(|block| block.device == device);
            self.blocks = others;
            let areas = self.areas.iter().filter(|(of, _)| *of == device).map(|(_, area)| *area).collect();
            let segments = self.segments.get(&device).copied();
            found.push(Replayed { device, trace, segments, areas, blocks });
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
        let (live, held) = (trace.blocks.len(), trace.held.len());
        let has_room = self.held < MOST_HELD || trace.held.contains_key(&entry.stack);
        trace.add(&self.actions, &Entry { stack: if has_room { entry.stack } else { NONE }, ..entry })?;
        if entry.action == self.actions.oom {
            self.of_failures += trace.keep_state(MOST_OF_FAILURES.saturating_sub(self.of_failures));
        }
        self.without_room += u64::from(!has_room);
        self.live = self.live + trace.blocks.len() - live;
        self.held = self.held + trace.held.len() - held;
        if self.live > MOST_LIVE {
            return Err(FileProblem::too_many(MOST_LIVE, "live allocations at a time").into());
        }
        Ok(())
    }

    fn segment(&mut self, segment: Segment) -> Parsed<()> {
        let Segment { device, address, total, kind, blocks } = segment;
        let none = Segments { is_whole: true, reserved: 0, in_use: 0, requested: Some(0) };
        let sums = self.segments.entry(device).or_insert(none);
        sums.reserved = sums.reserved.saturating_add(total);
        match address.filter(|_| self.areas.len() < MOST_SEGMENTS) {
            Some(begin) => self.areas.push((device, Area { begin, bytes: total, kind })),
            None => sums.is_whole = false,
        }
        for block in blocks.iter().filter(|block| block.is_in_use) {
            sums.in_use = sums.in_use.saturating_add(block.size);
            sums.requested = sums.requested.zip(block.requested).map(|(sum, bytes)| sum.saturating_add(bytes));
        }
        for block in blocks.iter().filter(|block| block.is_in_use) {
            if self.blocks.len() >= MOST_LIVE {
                return Err(FileProblem::too_many(MOST_LIVE, "blocks in use in its segments").into());
            }
            let Block { address, size, requested, is_allocated, stack, .. } = *block;
            let requested = requested.unwrap_or(size);
            self.blocks.push(Resident { device, address, size, requested, stack, is_allocated });
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
                self.blocks.allocate(address, entry.size, entry.stack, self.events);
            }
            if self.allocated > self.peak.allocated {
                self.blocks.peak();
                self.areas.peak();
                self.peak = Peak { event: self.events, time_us, allocated: self.allocated, reserved: self.reserved };
                self.peaks = self.peaks.wrapping_add(1);
            }
        } else if actions.free.contains(&action) {
            if let Some(Owned { bytes, stack, .. }) = self.blocks.free(entry.address, self.peak.event) {
                let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
                self.allocated = sum(self.allocated, -bytes)?;
                self.hold(stack, -bytes, -1);
                self.bands.change(self.events, time_us, stack, -bytes);
            } else {
                self.blocks.free_before(entry.address, entry.size, entry.stack, self.events);
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
            self.areas.reserve(entry, self.events, actions.grow.contains(&action));
        } else if actions.release.contains(&action) {
            self.reserved = sum(self.reserved, -size)?;
            self.areas.release(entry, self.events, actions.grow.contains(&action), self.peak.event);
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
            stream: entry.stream,
            state: None,
            layout: None,
        });
    }

    /// Keeps the blocks and segments of the last failure, if it is listed and they are at most `most`; returns how many they are.
    fn keep_state(&mut self, most: usize) -> usize {
        let event = self.events;
        let Some(failure) = self.failures.last_mut().filter(|failure| failure.event == event) else { return 0 };
        if self.blocks.len() > most {
            return 0;
        }
        failure.state = self.areas.now().map(|areas| (self.blocks.now(), areas));
        failure.state.as_ref().map_or(0, |(blocks, areas)| blocks.len() + areas.len())
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
