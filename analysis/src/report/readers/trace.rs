//! Reads traces of PyTorch's profiler.
//!
//! Enters: a trace. Leaves: a report whose steps and phases are what the GPUs did, whose layers are kernels, and whose memory is
//! what PyTorch's allocator had given out, if that was profiled.
//! Invariant: numbers are of all events, and only what is drawn is joined and thinned.

use crate::import::bytes_of;
use crate::kineto;
use crate::report::curve::Point;
use crate::report::model::{Gpu, Origin, Report};
use crate::report::room::Room;
use crate::report::spans::{Ended, Spans};
use crate::report::trace::Traced;
use crate::timeline::{self, Activity, Op, Stretch, Trace};
use highwater_core::gpu::Device;
use highwater_core::jobs::EndedBy;
use highwater_core::source::OpenError;
use highwater_core::wire::Kind;
use highwater_engine::recording::tape::made_up_uuid;
use highwater_engine::recording::{Times, is_too_long, refuse};
use std::collections::BTreeMap;
use std::path::Path;

/// What a trace does not contain, for people.
const MISSING: &[&str] = &["the memory of GPUs (profile with profile_memory=True)", "findings"];
/// The same of one with the allocator's events, and of an older one, whose events have no totals.
const MISSING_BESIDE: &[&str] = &["memory outside PyTorch's allocator", "findings"];
const MISSING_BELOW: &[&str] = &[
    "memory outside PyTorch's allocator",
    "what was allocated before and stayed: memory is above its lowest",
    "findings",
];

/// Reads a trace.
pub(super) fn open(path: &Path, room: Room) -> Result<Report, OpenError> {
    let trace = kineto::read(bytes_of(path, kineto::MOST_BYTES)?);
    let trace = trace.map_err(|error| refuse("recording_unreadable", path, error))?;
    let clock_ns = trace.clock_ns();
    // One event with a wrong time must not hide all others: what is far from the one in the middle is not drawn.
    let middle_of_memory = trace.memory.get(trace.memory.len() / 2).map_or(0, |event| event.at_ns);
    let middle_ns = trace.ops.get(trace.ops.len() / 2).map_or(middle_of_memory, |op| op.begin_ns);
    let is_near = |at_ns: i64| !is_too_long(at_ns.min(middle_ns), at_ns.max(middle_ns));
    let rank = trace.rank.and_then(|rank| u32::try_from(rank).ok()).unwrap_or(0);
    let (mut spans, mut far) = (Spans::new(room.spans, Vec::new()).sampled(false), 0);
    let (mut begin_ns, mut end_ns) = (i64::MAX, i64::MIN);
    let analysis = timeline::analyse_and_draw(&trace, |stretch| {
        if !is_near(stretch.begin_ns) || !is_near(stretch.end_ns) {
            far += 1;
            return;
        }
        let ended = ended(&stretch, rank, clock_ns.unwrap_or(0));
        (begin_ns, end_ns) = (begin_ns.min(ended.begin_ns), end_ns.max(ended.end_ns));
        spans.push(ended);
    });
    let levels = timeline::levels(&trace);
    let analysis = match analysis {
        Err(error) if levels.is_empty() => return Err(refuse("recording_unreadable", path, error)),
        analysis => analysis.ok(),
    };
    for at_ns in trace.memory.iter().map(|event| event.at_ns).filter(|at_ns| is_near(*at_ns)) {
        let at_ns = at_ns.saturating_add(clock_ns.unwrap_or(0));
        (begin_ns, end_ns) = (begin_ns.min(at_ns), end_ns.max(at_ns));
    }
    add_kernels(&trace, rank, &mut spans, room, is_near);
    spans.lose(far);
    spans.finish();
    let origin = Origin {
        state: trace.is_cut_short.then(|| "cut_short".to_owned()),
        missing: match levels.first() {
            None => MISSING.to_vec(),
            Some(levels) if levels.is_lower_bound => MISSING_BELOW.to_vec(),
            Some(_) => MISSING_BESIDE.to_vec(),
        },
        ..Origin::new("PyTorch profiler trace", if clock_ns.is_some() { Times::Unix } else { Times::Relative })
    };
    let begin_ns = begin_ns.min(end_ns);
    let most = room.points_of_one(levels.len());
    let gpus: Vec<Gpu> = levels
        .iter()
        .map(|of| {
            let mut gpu = Gpu::new(device_of(&trace, of.device, path), begin_ns, most);
            for level in of.levels.iter().filter(|level| is_near(level.at_ns)) {
                let at_ns = level.at_ns.saturating_add(clock_ns.unwrap_or(0));
                gpu.usage.push(Point { at_ns, used: Some(level.allocated) });
            }
            gpu.usage.end(None, end_ns);
            gpu
        })
        .collect();
    let gpu_of = |gpu: &Gpu| Some((gpu.device.index.parse().ok()?, gpu.device.uuid.clone()));
    let uuids: BTreeMap<u32, String> = gpus.iter().filter_map(gpu_of).collect();
    let gpus_of = uuids.into_iter().map(|(device, uuid)| ((job_of(device), rank), [uuid].into())).collect();
    let trace = trace.without_work();
    let trace = analysis.map(|analysis| Traced { analysis, trace });
    Ok(Report { begin_ns, end_ns, gpus, gpus_of, spans, trace, ..Report::of_file(path, origin) })
}

/// What the trace says of a GPU.
fn device_of(trace: &Trace, number: u32, path: &Path) -> Device {
    let known = trace.properties.iter().find(|of| of.id == number);
    Device {
        index: number.to_string(),
        uuid: made_up_uuid(number, path),
        name: known.and_then(|of| of.name.clone()),
        memory_total_bytes: known.and_then(|of| of.total_bytes),
        ..Device::default()
    }
}

/// Adds each kernel and copy as a layer: the longest of them one by one, as far as there is room beside what is there already, and the
/// others only to the totals of their name.
fn add_kernels(trace: &Trace, rank: u32, spans: &mut Spans, room: Room, is_near: impl Fn(i64) -> bool) {
    let clock_ns = trace.clock_ns().unwrap_or(0);
    let long = |op: &Op| op.end_ns.saturating_sub(op.begin_ns);
    let near = || trace.ops.iter().filter(|op| is_near(op.begin_ns) && is_near(op.end_ns));
    let free = room.spans.saturating_sub(spans.spans().len());
    let mut lengths: Vec<i64> = near().map(long).collect();
    let least = match free {
        0 => i64::MAX,
        free if free >= lengths.len() => 0,
        free => *lengths.select_nth_unstable_by_key(free - 1, |length| std::cmp::Reverse(*length)).1,
    };
    // Several are as long as the last for which there is room.
    let longer = near().filter(|op| long(op) > least).count();
    let mut alike = free.saturating_sub(longer);
    let ended = |op: &Op| Ended {
        job: job_of(op.device),
        rank,
        kind: Kind::Layer,
        name: trace.name_of(op).unwrap_or("a kernel whose name is not kept").to_owned(),
        step: None,
        begin_ns: op.begin_ns.saturating_add(clock_ns),
        end_ns: op.end_ns.saturating_add(clock_ns),
        by: EndedBy::End,
        peak_bytes: None,
    };
    // The shorter kernels are counted by GPU and name. An entry has the longest of them, their number and their total duration.
    let mut counted: BTreeMap<(u32, Option<&str>), (&Op, u64, i64)> = BTreeMap::new();
    for op in near() {
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
fn ended(stretch: &Stretch, rank: u32, clock_ns: i64) -> Ended {
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
        rank,
        kind,
        name: name.to_owned(),
        step: stretch.step,
        begin_ns: stretch.begin_ns.saturating_add(clock_ns),
        end_ns: stretch.end_ns.saturating_add(clock_ns),
        by: EndedBy::End,
        peak_bytes: None,
    }
}
