//! Plays a recording: GPUs whose memory is the recorded one, and the annotations of the jobs that ran on them.
//!
//! Leaves: memory at any recorded time, the times at which it changes, and the annotations of all ranks in order of
//! time. Invariants: times and values are those of the recording; on request, all times are moved by one and the same
//! shift. Absent on purpose: the lanes that were not recorded, whose values are not known.

use super::allocator::Allocator;
use super::lines::{SkippedLines, refuse};
use super::part::Part;
use super::tape::{Allocation, Format, Tape};
use super::track::Track;
use super::{folder, read};
use highwater_core::gpu::{Changed, Device, GpuChange, GpuState, Medium};
use highwater_core::source::provenance::RECORDED_FROM;
use highwater_core::source::{CallStats, Error, NextTick, OpenError, Source};
use highwater_core::wire::Annotation;
use std::path::Path;

/// How to replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Moves all times so that the recording begins at this time, nanoseconds of Unix time; `None` leaves them as
    /// recorded.
    pub shift_to_now: Option<i64>,
    /// Which part of it.
    pub part: Part,
}

/// Refuses to read a part of what can be read only as a whole.
///
/// # Errors
/// A part is asked for.
pub fn refuse_part(path: &Path, options: Options) -> Result<(), OpenError> {
    let why = "a part can be played only of a recording in the product's own format, a SQLite file";
    if options.part == Part::WHOLE { Ok(()) } else { Err(refuse("recording_unreadable", path, why)) }
}

/// A recording.
#[derive(Debug)]
pub struct Replay {
    description: String,
    tape: Tape,
    /// Added to every recorded time.
    shift_ns: i64,
}

impl Replay {
    /// Reads a recording in the product's own format: a SQLite file, or a folder of text files.
    ///
    /// # Errors
    /// [`OpenError`] if it is missing, is not a recording, has no valid line of memory, or exceeds the bounds of
    /// `docs/recordings.md`. Single lines and rows that cannot be read are no error: [`skipped`](Self::skipped) has
    /// them.
    pub fn open(path: &Path, options: Options) -> Result<Self, OpenError> {
        if !path.is_file() {
            refuse_part(path, options)?;
            return Ok(Self::of(folder::tape(path)?, path, options));
        }
        let mut replay = Self::of(read::tape(path, options.part)?, path, options);
        if let Some(simulation) = read::simulation_of(path) {
            replay.description = format!("{}{RECORDED_FROM}{simulation}", replay.description);
        }
        Ok(replay)
    }

    /// What was read of a file, as a recording.
    #[must_use]
    pub fn of(tape: Tape, path: &Path, options: Options) -> Self {
        let shift_ns = options.shift_to_now.map_or(0, |now_ns| now_ns.saturating_sub(tape.begin_ns));
        Self { description: format!("replay:{}", path.display()), tape, shift_ns }
    }

    /// The earliest point or annotation, nanoseconds of Unix time, shifted.
    #[must_use]
    pub fn begin_ns(&self) -> i64 {
        self.tape.begin_ns.saturating_add(self.shift_ns)
    }

    /// The latest point or annotation, nanoseconds of Unix time, shifted.
    #[must_use]
    pub fn end_ns(&self) -> i64 {
        self.tape.end_ns.saturating_add(self.shift_ns)
    }

    /// The changes of memory of the GPU at this position, in order of time; `None` begins a gap.
    pub fn points(&self, gpu: usize) -> impl Iterator<Item = (i64, Option<u64>)> {
        let points = self.tape.tracks.get(gpu).into_iter().flat_map(Track::points);
        points.map(|(at_ns, used)| (at_ns.saturating_add(self.shift_ns), used))
    }

    /// What programs allocated, if the recording has that. Times are as recorded.
    #[must_use]
    pub fn allocations(&self) -> &[Allocation] {
        &self.tape.allocations
    }

    /// What a framework's own allocator did on each GPU, if the recording has that. Times are as recorded.
    #[must_use]
    pub fn allocators(&self) -> &[Allocator] {
        &self.tape.allocators
    }

    /// The format that it was read from.
    #[must_use]
    pub fn format(&self) -> Format {
        self.tape.format
    }

    /// What was guessed of a file that does not say it, for people.
    #[must_use]
    pub fn assumed(&self) -> &[String] {
        &self.tape.assumed
    }

    /// The lines and rows that could not be read.
    #[must_use]
    pub fn skipped(&self) -> &SkippedLines {
        &self.tape.skipped
    }

    /// Whether the join and the detectors run after the tick at this time: between the first and the last recorded turn of the
    /// detectors, only at a recorded turn; before and after, and without recorded turns, after each tick.
    #[must_use]
    pub fn is_turn(&self, at_ns: i64) -> bool {
        let (turns, at_ns) = (&self.tape.turns, self.recorded_ns(at_ns));
        let is_known = turns.first().is_some_and(|first| *first <= at_ns) && turns.last() >= Some(&at_ns);
        !is_known || turns.binary_search(&at_ns).is_ok()
    }

    /// The changes of GPUs after one time and up to another.
    pub fn changes(&self, after_ns: i64, to_ns: i64) -> impl Iterator<Item = GpuChange> {
        let (after_ns, to_ns) = (self.recorded_ns(after_ns), self.recorded_ns(to_ns));
        let changes = &self.tape.changes;
        let first = changes.partition_point(|change| change.at_ns <= after_ns);
        let here = changes[first..].iter().take_while(move |change| change.at_ns <= to_ns);
        here.map(|change| {
            let mut change = change.clone();
            change.at_ns = change.at_ns.saturating_add(self.shift_ns);
            if let Changed::Xid { seen, .. } = &mut change.what {
                seen.last_ns = seen.last_ns.saturating_add(self.shift_ns);
            }
            change
        })
    }

    /// Applies to `gpus` their changes after one time and up to another.
    pub fn replay_changes(&self, gpus: &[GpuState], after_ns: i64, to_ns: i64) {
        for change in self.changes(after_ns, to_ns) {
            if let Some(gpu) = gpus.get(change.gpu) {
                gpu.replay(&change.what);
            }
        }
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
        &self.tape.devices
    }

    fn memory_used(&self, gpu: usize, at_ns: i64) -> Result<u64, Error> {
        let track =
            self.tape.tracks.get(gpu).ok_or_else(|| Error::Failed(format!("there is no GPU at position {gpu}")))?;
        track.used_at(self.recorded_ns(at_ns)).ok_or(Error::NotYet)
    }

    fn medium(&self, gpu: usize, at_ns: i64, _calls: &CallStats) -> Medium {
        let gpu = self.tape.tracks.get(gpu).map(|track| track.gpu);
        gpu.map(|gpu| self.tape.meters.at(gpu, self.recorded_ns(at_ns))).unwrap_or_default()
    }

    /// The next time at which any GPU's memory changes or the detectors looked. After the last of them comes the end of
    /// the recording once, so that phases after it are known to be over.
    fn next_tick(&self, after_ns: i64) -> NextTick {
        let after = self.recorded_ns(after_ns);
        let changes = self.tape.tracks.iter().filter_map(|track| track.next_change_ns(after));
        let turns = &self.tape.turns;
        let turn = turns.get(turns.partition_point(|turn| *turn <= after)).copied();
        match changes.chain(turn).min() {
            Some(at_ns) => NextTick::At(at_ns.saturating_add(self.shift_ns)),
            None if after_ns < self.end_ns() => NextTick::At(self.end_ns()),
            None => NextTick::End,
        }
    }

    fn annotations(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        let shift_ns = self.shift_ns;
        Box::new(self.tape.said.in_order().map(move |mut said| {
            said.time_unix_nano = said.time_unix_nano.map(|at_ns| at_ns.saturating_add(shift_ns));
            said
        }))
    }
}
