//! A recording as a folder: `nvml_1khz.csv[.gz]` and, if a job annotated, one `annotations_rank<N>.jsonl[.gz]` per
//! rank; `docs/scenarios.md` has the formats. Invariant: a line that cannot be read is counted, and no other line is
//! lost.

mod annotations;
mod files;
mod memory;
mod utilization;

use super::lines::{SkippedLines, refuse};
use super::tape::{DAY_NS, Format, Tape, Times, is_too_long};
use files::{GpuFacts, TextFolder};
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use std::path::Path;

const FORMAT: Format = Format { name: "folder of text files", times: Times::Unix, missing: &[] };

/// Reads a recording.
///
/// # Errors
/// If the folder or its memory file is missing, a file has no valid line, a file is there twice, or `gpus.json` is
/// wrong; and if a time lies more than 31 days from the others.
pub(super) fn tape(path: &Path) -> Result<Tape, OpenError> {
    let folder = TextFolder::open(path)?;
    let mut skipped = SkippedLines::default();
    let tracks = memory::read(&folder.memory, &mut skipped)?;
    let ranks = annotations::read(&folder, &mut skipped)?;
    let facts = folder.gpu_facts()?;
    let meters = folder.utilization.as_deref().map(|path| utilization::read(path, &mut skipped)).transpose()?;
    let of_memory = tracks.iter().filter_map(|track| Some((track.span()?, &folder.memory)));
    let of_ranks = ranks.spans().zip(&folder.annotations);
    let spans: Vec<_> = of_memory.chain(of_ranks).collect();
    let first = spans.iter().min_by_key(|(span, _)| span.0);
    let last = spans.iter().max_by_key(|(span, _)| span.1);
    let begin_ns = first.map_or(i64::MAX, |(span, _)| span.0);
    let end_ns = last.map_or(i64::MIN, |(span, _)| span.1);
    if is_too_long(begin_ns, end_ns) {
        let days = end_ns.saturating_sub(begin_ns) / DAY_NS;
        let [first, last] = [first, last].map(|end| end.and_then(|(_, file)| file.file_name()).unwrap_or_default());
        let (first, last) = (first.display(), last.display());
        let problem = format!(
            "times lie {days} days apart, from {begin_ns} ns in {first} to {end_ns} ns in {last}: one of them is wrong"
        );
        return Err(refuse("recording_unreadable", path, problem));
    }
    Ok(Tape {
        devices: tracks.iter().map(|track| device(track.gpu, &folder.name, &facts)).collect(),
        tracks,
        said: Box::new(ranks),
        meters: meters.unwrap_or_default(),
        turns: Vec::new(),
        changes: Vec::new(),
        begin_ns,
        end_ns,
        skipped,
        format: FORMAT,
        assumed: Vec::new(),
        allocations: Vec::new(),
        allocators: Vec::new(),
    })
}

fn device(gpu: u32, folder: &str, facts: &[GpuFacts]) -> Device {
    let known = facts.iter().find(|known| known.index == gpu);
    Device {
        index: gpu.to_string(),
        uuid: known.and_then(|known| known.uuid.clone()).unwrap_or_else(|| format!("REPLAY-{folder}-{gpu}")),
        name: known.and_then(|known| known.name.clone()),
        memory_total_bytes: known.and_then(|known| known.memory_total_bytes),
        memory_reserved_bytes: known.and_then(|known| known.memory_reserved_bytes),
        ..Device::default()
    }
}
