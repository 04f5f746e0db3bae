//! The memory of each GPU: change points from `realtime_ns,gpu,used_bytes` lines.

use crate::recording::FileProblem;
use crate::recording::lines::{LineFile, SkippedLines};
use crate::recording::rows::MOST_GPUS;
use crate::recording::track::Track;
use highwater_core::source::OpenError;
use std::collections::BTreeMap;
use std::path::Path;

/// Reads all points, by GPU in order of its number.
pub(super) fn read(path: &Path, skipped: &mut SkippedLines) -> Result<Vec<Track>, OpenError> {
    let mut by_gpu: BTreeMap<u32, Vec<(i64, u64)>> = BTreeMap::new();
    LineFile::open(path)?.parse(skipped, parse, |(at_ns, gpu, used)| {
        gpu_of(&mut by_gpu, gpu)?.push((at_ns, used));
        Ok(())
    })?;
    let known = |(at_ns, used)| (at_ns, Some(used));
    Ok(by_gpu.into_iter().map(|(gpu, points)| Track::new(gpu, points.into_iter().map(known))).collect())
}

/// What a file contains of one GPU so far.
pub(super) fn gpu_of<T: Default>(by_gpu: &mut BTreeMap<u32, T>, gpu: u32) -> Result<&mut T, FileProblem> {
    if by_gpu.len() >= MOST_GPUS && !by_gpu.contains_key(&gpu) {
        return Err(FileProblem::too_many(MOST_GPUS, "GPUs"));
    }
    Ok(by_gpu.entry(gpu).or_default())
}

fn parse(line: &str) -> Result<Option<(i64, u32, u64)>, FileProblem> {
    const HEADER: &str = "realtime_ns,gpu,used_bytes";
    if line.starts_with('#') || line == HEADER {
        return Ok(None);
    }
    let mut fields = line.split(',').map(str::trim);
    let (Some(at), Some(gpu), Some(used), None) = (fields.next(), fields.next(), fields.next(), fields.next()) else {
        return Err(FileProblem::malformed(format!("`{HEADER}` is expected")));
    };
    Ok(Some((
        at.parse().map_err(|_| FileProblem::not_a("time in nanoseconds", at))?,
        gpu.parse().map_err(|_| FileProblem::not_a("GPU number", gpu))?,
        used.parse().map_err(|_| FileProblem::not_a("number of bytes", used))?,
    )))
}
