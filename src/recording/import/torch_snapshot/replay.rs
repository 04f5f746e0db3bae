//! What an allocator's memory was, replayed from its trace: its level over time, the peak, and who held it then.
//!
//! Enters: segments, and the entries of traces in their order. Leaves: by device, the curves of allocated and reserved
//! memory, the peak with its holders, and failures. Invariants: what PyTorch's own visualiser computes: memory that is freed
//! without having been allocated in the trace, and blocks that never were, have been there from the begin; everything is done
//! in one pass, in memory that grows with what is allocated at a time and not with the trace.

use super::curve::{Curve, Level};
use super::stacks::Stacks;
use super::values::{Entry, Segment, Sink, Top};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The most allocations at a time, and the most blocks of all segments.
const MOST_LIVE: usize = 1 << 21;
/// The most failures that are listed.
const MOST_FAILURES: usize = 1 << 10;

/// What one stack holds. Bytes, and how many allocations.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    now: (i128, i64),
    /// At the peak, if anything changed since; else it is what is held now.
    at_peak: (i128, i64),
    /// Which peak that was.
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
    pub allocated: i128,
    pub reserved: i128,
    pub stack: u32,
}

/// One trace. Levels are less what was there at the begin, which is known at the end.
#[derive(Debug, Default)]
pub(super) struct Trace {
    pub events: u64,
    pub begin_us: Option<i64>,
    pub end_us: Option<i64>,
    allocated: i128,
    reserved: i128,
    /// Of allocations that the trace has not, what was freed in it.
    freed_before: i128,
    live: HashMap<u64, (u64, u32)>,
    held: HashMap<u32, Held>,
    pub peak: Peak,
    /// How many peaks there were.
    peaks: u32,
    pub curve: Curve,
    pub failures: Vec<Failure>,
    pub failures_left_out: u64,
}

/// The highest level. At first that of the begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Peak {
    /// After how many entries; 0 is before the first.
    pub event: u64,
    pub time_us: Option<i64>,
    pub allocated: i128,
    pub reserved: i128,
}

#[derive(Debug, Clone, Copy)]
struct Resident {
    device: i64,
    address: Option<u64>,
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
    traces: Vec<Trace>,
    blocks: Vec<Resident>,
    /// By device: bytes of all segments; of their blocks in use: the sizes, and what was asked for.
    reserved: BTreeMap<i64, (u64, u64, u64)>,
    pub skipped: u64,
}

/// What a stack held at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holder {
    pub stack: u32,
    pub bytes: u64,
    pub allocations: u64,
}

/// What became of one device. Bytes.
#[derive(Debug)]
pub(super) struct Device {
    pub device: i64,
    pub trace: Trace,
    /// What was allocated and reserved at the begin.
    pub allocated_before: i128,
    pub reserved_before: i128,
    /// At the end: all segments, blocks in use, and what was asked for of these.
    pub reserved: u64,
    pub in_use: u64,
    pub requested: u64,
    /// Whoever held memory at the peak, the most first.
    pub holders: Vec<Holder>,
}

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
        Self { actions, traces: Vec::new(), blocks: Vec::new(), reserved: BTreeMap::new(), skipped: 0 }
    }

    /// What became of each device that has a trace or memory.
    pub fn finish(mut self, top: &Top) -> Vec<Device> {
        let traced =
            top.traces.iter().enumerate().filter(|(_, trace)| trace.is_some()).map(|(device, _)| device as i64);
        let devices: BTreeSet<i64> = traced.chain(self.reserved.keys().copied()).collect();
        let mut found = Vec::new();
        for device in devices {
            let at = usize::try_from(device).ok().and_then(|device| *top.traces.get(device)?);
            let trace = at.and_then(|at| self.traces.get_mut(at as usize)).map(std::mem::take).unwrap_or_default();
            let (reserved, in_use, requested) = self.reserved.get(&device).copied().unwrap_or_default();
            let blocks = self.blocks.iter().filter(|block| block.device == device);
            found.push(Device::of(device, trace, (reserved, in_use, requested), blocks));
        }
        found
    }
}

impl Sink for Replay {
    fn trace(&mut self) -> u32 {
        self.traces.push(Trace::default());
        u32::try_from(self.traces.len() - 1).unwrap_or(u32::MAX)
    }

    fn entry(&mut self, trace: u32, entry: Entry) -> Result<(), String> {
        let Some(trace) = self.traces.get_mut(trace as usize) else { return Ok(()) };
        trace.add(&self.actions, &entry)
    }

    fn segment(&mut self, segment: Segment) -> Result<(), String> {
        let Segment { device, total, blocks } = segment;
        let sums = self.reserved.entry(device).or_default();
        sums.0 = sums.0.saturating_add(total);
        for block in blocks {
            if !block.is_allocated {
                continue;
            }
            sums.1 = sums.1.saturating_add(block.size);
            sums.2 = sums.2.saturating_add(block.requested);
            if self.blocks.len() >= MOST_LIVE {
                return Err(format!("its segments have more than {MOST_LIVE} blocks in use"));
            }
            let (address, requested, stack) = (block.address, block.requested, block.stack);
            self.blocks.push(Resident { device, address, requested, stack });
        }
        Ok(())
    }

    fn skipped(&mut self) {
        self.skipped += 1;
    }
}

impl Trace {
    fn add(&mut self, actions: &Actions, entry: &Entry) -> Result<(), String> {
        self.events += 1;
        if entry.time_us.is_some() {
            self.begin_us = self.begin_us.or(entry.time_us);
            self.end_us = entry.time_us;
        }
        let (action, size) = (entry.action, i128::from(entry.size));
        if action == actions.alloc {
            self.allocated += size;
            self.hold(entry.stack, size, 1);
            if let Some(address) = entry.address {
                if self.live.len() >= MOST_LIVE {
                    return Err(format!("more than {MOST_LIVE} allocations live at a time"));
                }
                self.live.insert(address, (entry.size, entry.stack));
            }
            if self.allocated > self.peak.allocated {
                let (event, time_us, allocated, reserved) = (self.events, entry.time_us, self.allocated, self.reserved);
                self.peak = Peak { event, time_us, allocated, reserved };
                self.peaks = self.peaks.wrapping_add(1);
            }
        } else if actions.free.contains(&action) {
            match entry.address.and_then(|address| self.live.remove(&address)) {
                Some((bytes, stack)) => {
                    self.allocated -= i128::from(bytes);
                    self.hold(stack, -i128::from(bytes), -1);
                }
                None => {
                    self.allocated -= size;
                    self.freed_before += size;
                    // It was there at the peak, as that lies before.
                    let held = self.touch(entry.stack);
                    held.at_peak = (held.at_peak.0 + size, held.at_peak.1 + 1);
                }
            }
        } else if actions.reserve.contains(&action) {
            self.reserved += size;
        } else if actions.release.contains(&action) {
            self.reserved -= size;
        } else {
            if action == actions.oom {
                self.fail(entry);
            }
            return Ok(());
        }
        self.curve.push(Level { event: self.events, time_us: entry.time_us, allocated: self.allocated });
        Ok(())
    }

    fn fail(&mut self, entry: &Entry) {
        if self.failures.len() >= MOST_FAILURES {
            self.failures_left_out += 1;
            return;
        }
        self.failures.push(Failure {
            event: self.events,
            time_us: entry.time_us,
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

    fn hold(&mut self, stack: u32, bytes: i128, allocations: i64) {
        let held = self.touch(stack);
        held.now = (held.now.0 + bytes, held.now.1 + allocations);
    }
}

impl Device {
    fn of<'a>(
        device: i64,
        trace: Trace,
        (reserved, in_use, requested): (u64, u64, u64),
        blocks: impl Iterator<Item = &'a Resident>,
    ) -> Self {
        let mut held: HashMap<u32, (i128, i64)> = HashMap::with_capacity(trace.held.len());
        for (stack, of) in &trace.held {
            held.insert(*stack, if of.peak == trace.peaks { of.at_peak } else { of.now });
        }
        // What is in use and was not allocated in the trace was there all the time.
        let mut allocated_before = trace.freed_before;
        let mut seen = HashSet::new();
        for block in blocks {
            let is_traced =
                block.address.is_some_and(|address| trace.live.contains_key(&address) || !seen.insert(address));
            if !is_traced {
                allocated_before += i128::from(block.requested);
                let held = held.entry(block.stack).or_default();
                *held = (held.0 + i128::from(block.requested), held.1 + 1);
            }
        }
        let mut holders: Vec<Holder> = held
            .into_iter()
            .filter_map(|(stack, (bytes, allocations))| {
                let (bytes, allocations) = (u64::try_from(bytes).ok()?, u64::try_from(allocations).ok()?);
                (allocations > 0).then_some(Holder { stack, bytes, allocations })
            })
            .collect();
        holders.sort_unstable_by_key(|holder| (std::cmp::Reverse(holder.bytes), holder.stack));
        let reserved_before = i128::from(reserved) - trace.reserved;
        Self { device, trace, allocated_before, reserved_before, reserved, in_use, requested, holders }
    }
}
