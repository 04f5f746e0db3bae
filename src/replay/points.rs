//! The memory of each GPU: change points from `realtime_ns,gpu,used_bytes` lines.

use super::lines::{File, SkippedLines};
use crate::source::OpenError;
use std::collections::BTreeMap;
use std::path::Path;

/// GPUs of one recording; more are not those of a node.
const MOST_GPUS: usize = 256;

/// One GPU's change points.
#[derive(Debug)]
pub(super) struct Track {
    /// The GPU's number in the file.
    pub(super) gpu: u32,
    /// Time and bytes from then on, in order of time; not empty.
    points: Vec<(i64, u64)>,
}

/// Reads all points, by GPU in order of its number.
pub(super) fn read(path: &Path, skipped: &mut SkippedLines) -> Result<Vec<Track>, OpenError> {
    let mut by_gpu: BTreeMap<u32, Vec<(i64, u64)>> = BTreeMap::new();
    File::open(path)?.parse(skipped, parse, |(at_ns, gpu, used)| {
        gpu_of(&mut by_gpu, gpu)?.push((at_ns, used));
        Ok(())
    })?;
    let track = |(gpu, mut points): (u32, Vec<(i64, u64)>)| {
        points.sort_by_key(|(at_ns, _)| *at_ns);
        points.shrink_to_fit();
        Track { gpu, points }
    };
    Ok(by_gpu.into_iter().map(track).collect())
}

/// What a file says of one GPU so far.
pub(super) fn gpu_of<T: Default>(by_gpu: &mut BTreeMap<u32, T>, gpu: u32) -> Result<&mut T, String> {
    if by_gpu.len() >= MOST_GPUS && !by_gpu.contains_key(&gpu) {
        return Err(format!("it has more than {MOST_GPUS} GPUs"));
    }
    Ok(by_gpu.entry(gpu).or_default())
}

fn parse(line: &str) -> Result<Option<(i64, u32, u64)>, String> {
    const HEADER: &str = "realtime_ns,gpu,used_bytes";
    if line.starts_with('#') || line == HEADER {
        return Ok(None);
    }
    let mut fields = line.split(',').map(str::trim);
    let (Some(at), Some(gpu), Some(used), None) = (fields.next(), fields.next(), fields.next(), fields.next()) else {
        return Err(format!("`{HEADER}` is expected"));
    };
    let wrong = |name: &str, text: &str| format!("`{text}` is no {name}");
    Ok(Some((
        at.parse().map_err(|_| wrong("time in nanoseconds", at))?,
        gpu.parse().map_err(|_| wrong("GPU number", gpu))?,
        used.parse().map_err(|_| wrong("number of bytes", used))?,
    )))
}

impl Track {
    /// The first and the last time.
    pub(super) fn span(&self) -> (i64, i64) {
        let time = |point: Option<&(i64, u64)>| point.map(|(at_ns, _)| *at_ns);
        (time(self.points.first()).unwrap_or(i64::MAX), time(self.points.last()).unwrap_or(i64::MIN))
    }

    /// Bytes in use at a recorded time; `None` before the first point. Of points at one time the last counts.
    pub(super) fn used_at(&self, at_ns: i64) -> Option<u64> {
        let after = self.points.partition_point(|(since, _)| *since <= at_ns);
        self.points.get(after.checked_sub(1)?).map(|(_, used)| *used)
    }

    /// The first recorded time after this one at which memory changes.
    pub(super) fn next_change_ns(&self, after_ns: i64) -> Option<i64> {
        let next = self.points.partition_point(|(since, _)| *since <= after_ns);
        self.points.get(next).map(|(at_ns, _)| *at_ns)
    }
}
