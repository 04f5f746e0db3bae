//! A recording played again: GPUs whose memory is what a file says, and the annotations of the job that ran on them.
//!
//! Enters: a folder with `nvml_1khz.csv[.gz]` and, where a job annotated, one `annotations_rank<N>.jsonl[.gz]` a rank;
//! `docs/scenarios.md` has the formats. Leaves: memory at any recorded time, the times at which it changes, and the
//! annotations of all ranks in order of time. Invariants: times and values are those of the file, all times moved by
//! one and the same shift if asked; a line that cannot be read is told and costs no other line. Absent on purpose:
//! the other lanes, which were not recorded and so are not known.

mod annotations;
mod folder;
mod lines;
mod meters;
mod points;
#[cfg(test)]
mod tests;

pub use lines::{Skipped, SkippedLines};

use crate::source::{CallStats, Error, NextTick, OpenError, Source};
use folder::{Folder, GpuFacts};
use highwater_core::gpu::{Device, Medium};
use highwater_core::wire::Annotation;
use meters::Meters;
use points::Track;
use std::path::Path;

/// How to replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Moves all times so that the recording begins then, nanoseconds of Unix time; as recorded if left out.
    pub shift_to_now: Option<i64>,
}

/// A recording.
#[derive(Debug)]
pub struct Replay {
    description: String,
    devices: Vec<Device>,
    tracks: Vec<Track>,
    ranks: Vec<annotations::RankFile>,
    meters: Meters,
    begin_ns: i64,
    end_ns: i64,
    /// Added to every recorded time.
    shift_ns: i64,
    skipped: SkippedLines,
}

/// A day.
const DAY_NS: i64 = 86_400_000_000_000;
/// Longer than anybody records: one time of another clock or unit would be waited for, for years.
const LONGEST_NS: i64 = 31 * DAY_NS;

impl Replay {
    /// Reads a recording.
    ///
    /// # Errors
    /// [`OpenError`] where the folder or its memory file is missing, a file has no good line, a file is there twice,
    /// or `gpus.json` is wrong. Single lines that cannot be read are no error:
    /// [`skipped`](Self::skipped) tells them. One whose time lies more than 31 days from the others' is.
    pub fn open(path: &Path, options: Options) -> Result<Self, OpenError> {
        let folder = Folder::open(path)?;
        let mut skipped = SkippedLines::default();
        let tracks = points::read(&folder.memory, &mut skipped)?;
        let ranks = annotations::read(&folder, &mut skipped)?;
        let facts = folder.gpu_facts()?;
        let meters = folder.utilization.as_deref().map(|path| Meters::read(path, &mut skipped)).transpose()?;
        let of_memory = tracks.iter().map(|track| (track.span(), &folder.memory));
        let of_ranks = ranks.iter().map(annotations::RankFile::span).zip(&folder.annotations);
        let spans: Vec<_> = of_memory.chain(of_ranks).collect();
        let first = spans.iter().min_by_key(|(span, _)| span.0);
        let last = spans.iter().max_by_key(|(span, _)| span.1);
        let begin_ns = first.map_or(i64::MAX, |(span, _)| span.0);
        let end_ns = last.map_or(i64::MIN, |(span, _)| span.1);
        if end_ns.saturating_sub(begin_ns) > LONGEST_NS {
            let days = end_ns.saturating_sub(begin_ns) / DAY_NS;
            let [first, last] = [first, last].map(|end| end.and_then(|(_, file)| file.file_name()).unwrap_or_default());
            let (first, last) = (first.display(), last.display());
            let problem = format!(
                "times lie {days} days apart, from {begin_ns} ns in {first} to {end_ns} ns in {last}: one of them is wrong"
            );
            return Err(folder::refuse("recording", path, problem));
        }
        let shift_ns = options.shift_to_now.map_or(0, |now_ns| now_ns.saturating_sub(begin_ns));
        Ok(Self {
            description: format!("replay:{}", path.display()),
            devices: tracks.iter().map(|track| device(track.gpu, &folder.name, &facts)).collect(),
            tracks,
            ranks,
            meters: meters.unwrap_or_default(),
            begin_ns: begin_ns.saturating_add(shift_ns),
            end_ns: end_ns.saturating_add(shift_ns),
            shift_ns,
            skipped,
        })
    }

    /// The earliest point or annotation, nanoseconds of Unix time, shifted.
    #[must_use]
    pub fn begin_ns(&self) -> i64 {
        self.begin_ns
    }

    /// The latest point or annotation, nanoseconds of Unix time, shifted.
    #[must_use]
    pub fn end_ns(&self) -> i64 {
        self.end_ns
    }

    /// The lines that could not be read.
    #[must_use]
    pub fn skipped(&self) -> &SkippedLines {
        &self.skipped
    }

    fn recorded_ns(&self, at_ns: i64) -> i64 {
        at_ns.saturating_sub(self.shift_ns)
    }
}

impl Source for Replay {
    fn description(&self) -> String {
        self.description.clone()
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn memory_used(&self, gpu: usize, at_ns: i64) -> Result<u64, Error> {
        let track = self.tracks.get(gpu).ok_or_else(|| Error::Failed(format!("there is no GPU at position {gpu}")))?;
        track.used_at(self.recorded_ns(at_ns)).ok_or(Error::NotYet)
    }

    fn medium(&self, gpu: usize, at_ns: i64, _calls: &CallStats) -> Medium {
        let gpu = self.tracks.get(gpu).map(|track| track.gpu);
        gpu.map(|gpu| self.meters.at(gpu, self.recorded_ns(at_ns))).unwrap_or_default()
    }

    /// The next time at which any GPU's memory changes; after the last change once more at the end of the recording,
    /// so that phases after it are known to be over.
    fn next_tick(&self, after_ns: i64) -> NextTick {
        let after = self.recorded_ns(after_ns);
        let change = self.tracks.iter().filter_map(|track| track.next_change_ns(after)).min();
        match change {
            Some(at_ns) => NextTick::At(at_ns.saturating_add(self.shift_ns)),
            None if after_ns < self.end_ns => NextTick::At(self.end_ns),
            None => NextTick::End,
        }
    }

    fn annotations(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        Box::new(annotations::merged(&self.ranks, self.shift_ns))
    }
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
