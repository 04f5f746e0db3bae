//! Reads training logs with memory statistics of ONNX Runtime.
//!
//! Enters: the lines, in their order. Leaves: a report. Invariants: when the allocator's own maximum rose between two lines, it
//! is drawn as a reading of its own between them; times are numbers of readings, as the log has no times that can be relied on.

use crate::import::ort_memory;
use crate::report::curve::Point;
use crate::report::logged::{Logged, MOST_RANKS};
use crate::report::model::{Gpu, Origin, Report};
use crate::report::room::Room;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::{FileProblem, READING_NS, Times, refuse};
use std::collections::BTreeMap;
use std::path::Path;

/// Reads the log.
pub(super) fn open(path: &Path, room: Room) -> Result<Report, OpenError> {
    let (mut ranks, mut at_ns) = (BTreeMap::<u32, (Logged, Gpu)>::new(), 0);
    let skipped = ort_memory::each(path, |line| {
        let is_full = ranks.len() >= MOST_RANKS;
        match ranks.get_mut(&line.rank) {
            Some((logged, gpu)) => {
                // The maximum was reached between two lines, so it becomes a reading of its own between them.
                if let Some(max) = logged.add(&line) {
                    gpu.usage.push(Point { at_ns, used: Some(max) });
                    at_ns += READING_NS;
                }
                gpu.usage.push(Point { at_ns, used: Some(line.allocated) });
            }
            None if is_full => return Err(FileProblem::too_many(MOST_RANKS, "ranks")),
            None => {
                let device = Device { index: line.rank.to_string(), ..Device::default() };
                let mut gpu = Gpu::new(device, 0, room.points_of_one(MOST_RANKS));
                gpu.usage.push(Point { at_ns, used: Some(line.allocated) });
                ranks.insert(line.rank, (Logged::new(&line), gpu));
            }
        }
        at_ns += READING_NS;
        Ok(())
    })?;
    if ranks.is_empty() {
        return Err(refuse("recording_unreadable", path, "has no line about memory that can be read"));
    }
    let end_ns = at_ns - READING_NS;
    let (logged, mut gpus): (Vec<_>, Vec<_>) = ranks.into_values().unzip();
    gpus.iter_mut().for_each(|gpu| gpu.usage.end(None, end_ns));
    let origin = Origin {
        missing: vec!["memory outside PyTorch's allocator between lines", "the GPUs' sizes", "times"],
        ..Origin::new("log with memory statistics of ONNX Runtime", Times::Readings)
    };
    Ok(Report { end_ns, gpus, skipped, logged, ..Report::of_file(path, origin) })
}
