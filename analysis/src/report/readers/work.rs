//! What traces show of the work of GPUs, whichever profiler recorded it: their steps and phases are what the GPUs did, their layers are
//! kernels.
//!
//! Enters: traces. Leaves: their analysis, and spans. Invariant: numbers are of all events, and only what is drawn is joined and thinned.

use crate::report::model::Gpu;
use crate::report::room::Room;
use crate::report::spans::{Ended, Spans};
use crate::timeline::{self, Activity, Analysis, NothingOnGpu, Op, Stretch, Trace};
use highwater_core::jobs::EndedBy;
use highwater_core::wire::Kind;
use highwater_engine::recording::is_too_long;
use std::collections::{BTreeMap, BTreeSet};

/// Which times of a trace are drawn: one event with a wrong time must not hide all others, so what is far from the one in the middle
/// is not.
#[derive(Debug, Clone, Copy)]
pub(super) struct Near {
    middle_ns: i64,
    clock_ns: i64,
    /// The rank of the trace's process.
    pub rank: u32,
}

impl Near {
    pub(super) fn of(trace: &Trace) -> Self {
        let middle_of_memory = trace.memory.get(trace.memory.len() / 2).map_or(0, |event| event.at_ns);
        let middle_ns = trace.ops.get(trace.ops.len() / 2).map_or(middle_of_memory, |op| op.begin_ns);
        let rank = trace.rank.and_then(|rank| u32::try_from(rank).ok()).unwrap_or(0);
        Self { middle_ns, clock_ns: trace.clock_ns().unwrap_or(0), rank }
    }

    pub(super) fn holds(self, at_ns: i64) -> bool {
        !is_too_long(at_ns.min(self.middle_ns), at_ns.max(self.middle_ns))
    }

    /// A time of the trace on the report's clock.
    pub(super) fn dated(self, at_ns: i64) -> i64 {
        at_ns.saturating_add(self.clock_ns)
    }
}

/// What is drawn of traces, and the time that it takes.
pub(super) struct Drawn {
    spans: Spans,
    far: u64,
    begin_ns: i64,
    end_ns: i64,
}

impl Drawn {
    pub(super) fn new(room: Room) -> Self {
        let spans = Spans::new(room.spans, Vec::new()).sampled(false);
        Self { spans, far: 0, begin_ns: i64::MAX, end_ns: i64::MIN }
    }

    /// Analyses a trace and draws it, its kernels as far as there is room for as many spans in all.
    pub(super) fn draw(&mut self, trace: &Trace, most: usize) -> Result<Analysis, NothingOnGpu> {
        let near = Near::of(trace);
        let analysis = timeline::analyse_and_draw(trace, |stretch| {
            if !near.holds(stretch.begin_ns) || !near.holds(stretch.end_ns) {
                self.far += 1;
                return;
            }
            let ended = ended(&stretch, near);
            self.reach(ended.begin_ns);
            self.reach(ended.end_ns);
            self.spans.push(ended);
        });
        add_kernels(trace, near, &mut self.spans, most);
        analysis
    }

    /// Makes the report last until this time, if it does not.
    pub(super) fn reach(&mut self, at_ns: i64) {
        (self.begin_ns, self.end_ns) = (self.begin_ns.min(at_ns), self.end_ns.max(at_ns));
    }

    /// The spans, and when the first began and the last ended.
    pub(super) fn finish(mut self) -> (Spans, i64, i64) {
        self.spans.lose(self.far);
        self.spans.finish();
        (self.spans, self.begin_ns.min(self.end_ns), self.end_ns)
    }
}

/// Which GPU each lane of a trace is.
pub(super) fn gpus_of(gpus: &[Gpu], rank: u32) -> BTreeMap<(String, u32), BTreeSet<String>> {
    let of = |gpu: &Gpu| {
        let device: u32 = gpu.device.index.parse().ok()?;
        Some(((job_of(device), rank), [gpu.device.uuid.clone()].into()))
    };
    gpus.iter().filter_map(of).collect()
}

/// Adds each kernel and copy as a layer: the longest of them one by one, as far as there is room beside what is there already, and the
/// others only to the totals of their name.
fn add_kernels(trace: &Trace, near: Near, spans: &mut Spans, most: usize) {
    let long = |op: &Op| op.end_ns.saturating_sub(op.begin_ns);
    let drawn = || trace.ops.iter().filter(|op| near.holds(op.begin_ns) && near.holds(op.end_ns));
    let free = most.saturating_sub(spans.spans().len());
    let mut lengths: Vec<i64> = drawn().map(long).collect();
    let least = match free {
        0 => i64::MAX,
        free if free >= lengths.len() => 0,
        free => *lengths.select_nth_unstable_by_key(free - 1, |length| std::cmp::Reverse(*length)).1,
    };
    // Several are as long as the last for which there is room.
    let longer = drawn().filter(|op| long(op) > least).count();
    let mut alike = free.saturating_sub(longer);
    let ended = |op: &Op| Ended {
        job: job_of(op.device),
        rank: near.rank,
        kind: Kind::Layer,
        name: trace.name_of(op).unwrap_or("a kernel whose name is not kept").to_owned(),
        step: None,
        begin_ns: near.dated(op.begin_ns),
        end_ns: near.dated(op.end_ns),
        by: EndedBy::End,
        peak_bytes: None,
    };
    // The shorter kernels are counted by GPU and name. An entry has the longest of them, their number and their total duration.
    let mut counted: BTreeMap<(u32, Option<&str>), (&Op, u64, i64)> = BTreeMap::new();
    for op in drawn() {
        let is_alike = long(op) == least && alike > 0;
        if long(op) > least || is_alike {
            alike -= usize::from(is_alike);
            spans.push(ended(op));
            continue;
        }
        let (longest, count, total_ns) = counted.entry((op.device, trace.name_of(op))).or_insert((op, 0, 0));
        if long(op) > long(longest) {
            *longest = op;
        }
        (*count, *total_ns) = (*count + 1, total_ns.saturating_add(long(op)));
    }
    for (longest, count, total_ns) in counted.into_values() {
        spans.count(ended(longest), count, total_ns);
    }
}

/// The GPU takes the place of the job, as several GPUs of one process have the same rank.
fn job_of(device: u32) -> String {
    format!("GPU {device}")
}

/// A stretch as a step or a phase.
fn ended(stretch: &Stretch, near: Near) -> Ended {
    let (kind, name) = match stretch.activity {
        Activity::Step => (Kind::Step, "step"),
        Activity::Compute => (Kind::Phase, "compute"),
        Activity::Communication => (Kind::Phase, "comm"),
        Activity::Memory => (Kind::Phase, "copy"),
        Activity::WaitsForData => (Kind::Phase, "idle (data)"),
        Activity::WaitsForHost => (Kind::Phase, "idle (host)"),
        Activity::WaitsOtherwise => (Kind::Phase, "idle (other)"),
    };
    Ended {
        job: job_of(stretch.device),
        rank: near.rank,
        kind,
        name: name.to_owned(),
        step: stretch.step,
        begin_ns: near.dated(stretch.begin_ns),
        end_ns: near.dated(stretch.end_ns),
        by: EndedBy::End,
        peak_bytes: None,
    }
}
