//! Reads traces of PyTorch's profiler.
//!
//! Enters: a trace. Leaves: a report on what the GPUs did, whose memory is what PyTorch's allocator had given out, if that was profiled.

use super::work::{Drawn, Near};
use crate::import::bytes_of;
use crate::kineto;
use crate::report::curve::Point;
use crate::report::model::{Gpu, Origin, Report};
use crate::report::room::Room;
use crate::report::trace::Traced;
use crate::timeline::{self, Levels, Trace};
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::tape::made_up_uuid;
use highwater_engine::recording::{Times, refuse};
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
    let near = Near::of(&trace);
    let mut drawn = Drawn::new(room);
    let analysis = drawn.draw(&trace, room.spans);
    let levels = timeline::levels(&trace);
    let analysis = match analysis {
        Err(error) if levels.is_empty() => return Err(refuse("recording_unreadable", path, error)),
        analysis => analysis.ok(),
    };
    trace.memory.iter().filter(|event| near.holds(event.at_ns)).for_each(|event| drawn.reach(near.dated(event.at_ns)));
    let (spans, begin_ns, end_ns) = drawn.finish();
    let origin = Origin {
        state: trace.is_cut_short.then(|| "cut_short".to_owned()),
        missing: match levels.first() {
            None => MISSING.to_vec(),
            Some(levels) if levels.is_lower_bound => MISSING_BELOW.to_vec(),
            Some(_) => MISSING_BESIDE.to_vec(),
        },
        ..Origin::new("PyTorch profiler trace", if trace.clock_ns().is_some() { Times::Unix } else { Times::Relative })
    };
    let most = room.points_of_one(levels.len());
    let gpu = |of: &Levels| {
        let mut gpu = Gpu::new(device_of(&trace, of.device, path), begin_ns, most);
        for level in of.levels.iter().filter(|level| near.holds(level.at_ns)) {
            gpu.usage.push(Point { at_ns: near.dated(level.at_ns), used: Some(level.allocated) });
        }
        gpu.usage.end(None, end_ns);
        gpu
    };
    let gpus: Vec<Gpu> = levels.iter().map(gpu).collect();
    let gpus_of = super::work::gpus_of(&gpus, near.rank);
    let trace = trace.without_work();
    let trace = analysis.map(|analysis| Traced { analysis, trace: Some(trace) });
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
