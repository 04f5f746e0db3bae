//! What recordings show, for people: numbers, a comparison, and a page that opens without a network.
//!
//! Enters: recordings of any format that [`recording`](highwater_engine::recording) reads. Leaves: [`Report`], and from it a
//! summary for a terminal, JSON, an HTML page and a picture. Invariants: numbers are of every reading; only what is drawn
//! is thinned, and then every extreme is kept; what a recording does not contain is absent, never 0. Memory is bounded
//! whatever the recording's size: a file in the recordings' own format is read row by row.

mod advised;
mod allocator;
mod axis;
mod compare;
mod condition;
mod curve;
#[cfg(test)]
mod hand;
mod json;
mod layered;
mod layers;
mod logged;
mod packed;
mod page;
mod picture;
mod played;
pub mod recorded;
mod spans;
mod table;
mod text;
mod trace;
mod usage;

pub use advised::{Advised, advised};
pub use compare::{Comparison, Difference};
pub use condition::{Condition, ConditionError, Failed};
pub use curve::{Curve, Point};
pub use json::json;
pub use layers::Layers;
#[cfg(feature = "testing")]
pub use layers::{MOST_NAME_BYTES, MOST_NAMES, MOST_TOP};
pub use page::page;
pub use picture::picture;
pub use spans::{Ended, Row, Span, Spans};
pub use table::{Table, size};
pub use text::{comparison_of_ranks, summary};
pub use trace::{Traced, ranks};
pub use usage::MemoryUsage;

use crate::formats::FileFormat;
use highwater_core::gpu::Device;
use highwater_core::source::{OpenError, provenance};
use highwater_engine::offline::Settings;
use highwater_engine::recording::{Allocation, Allocator, READING_NS, SkippedLines, Times};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What is kept one by one of a recording, to be drawn. All reports of a page share what one could have, so that it stays
/// small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Points of all GPUs. With three to five bytes each, they are most of a page.
    points: usize,
    /// Steps, phases and layers.
    spans: usize,
    /// Records of layers in profiled steps. With ten to twenty bytes each.
    records: usize,
}

/// The most points of one GPU.
const MOST_POINTS_OF_ONE: usize = 100_000;

impl Room {
    /// The room of each of `recordings` recordings.
    #[must_use]
    pub fn of(recordings: usize) -> Self {
        let recordings = recordings.max(1);
        Self { points: 280_000 / recordings, spans: 60_000 / recordings, records: 30_000 / recordings }
    }

    /// How many points each of `gpus` GPUs may have.
    fn points_of_one(self, gpus: usize) -> usize {
        (self.points / gpus.max(1)).min(MOST_POINTS_OF_ONE)
    }
}

/// What one recording shows.
#[derive(Debug, Clone)]
pub struct Report {
    /// The file's name, for people.
    pub name: String,
    /// Where the recording is from.
    pub origin: Origin,
    /// When it began and ended, nanoseconds of Unix time, or since its begin if it has no other times.
    pub begin_ns: i64,
    /// See above.
    pub end_ns: i64,
    /// The GPUs, in the recording's order.
    pub gpus: Vec<Gpu>,
    /// Steps, phases and layers.
    pub spans: Spans,
    /// The UUIDs of each rank's GPUs, if they are known.
    pub gpus_of: BTreeMap<(String, u32), BTreeSet<String>>,
    /// What was found, in order of time; `None` if the recording has nothing that detectors could look at.
    pub findings: Option<Vec<Found>>,
    /// The layers of each rank's last profiled step.
    pub layers: Layers,
    /// Rows and lines that could not be read.
    pub skipped: SkippedLines,
    /// What the GPUs did, if this is a trace of PyTorch's profiler.
    pub trace: Option<Traced>,
    /// What each rank printed of its memory, if this is a training log.
    pub(crate) logged: Vec<logged::Logged>,
}

/// Where a recording is from. `None` is not known.
#[derive(Debug, Clone, PartialEq)]
pub struct Origin {
    /// The format of the file.
    pub format: &'static str,
    /// The host.
    pub host: Option<String>,
    /// What was read: NVML with its driver's version.
    pub source: Option<String>,
    /// The command that was recorded, or why a capture was taken.
    pub note: Option<String>,
    /// Whether the recording is whole: `complete`, `cut_short`, …
    pub state: Option<String>,
    /// The sampling period, nanoseconds.
    pub period_ns: Option<i64>,
    /// What the times are.
    pub times: Times,
    /// What such a file does not contain, for people.
    pub missing: Vec<&'static str>,
}

impl Origin {
    /// What to say first of a recording that is not of GPUs, or of a replay.
    pub(crate) fn notice(&self) -> Option<String> {
        self.source.as_deref().and_then(provenance::notice)
    }
}

/// One GPU.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// What it is.
    pub device: Device,
    /// What its memory did.
    pub usage: MemoryUsage,
    /// How many allocations the recording has, if it is one of allocations.
    pub allocations: Option<u64>,
    /// The largest of them.
    pub largest: Vec<Allocation>,
    /// What a framework's own allocator did, if the recording is of one.
    pub allocator: Option<Allocator>,
}

/// A finding. Times are nanoseconds, like the recording's.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Its kind, as in the label `finding`.
    pub kind: String,
    /// `info`, `warning` or `critical`.
    pub severity: String,
    /// `suspected`, `observed` or `confirmed`.
    pub certainty: String,
    /// The GPU's index.
    pub gpu: Option<String>,
    /// The job and rank that it is about.
    pub job: Option<String>,
    /// See above.
    pub rank: Option<u32>,
    /// Since when it held.
    pub begin_ns: i64,
    /// When it ended; `None` if it had not ended.
    pub end_ns: Option<i64>,
    /// What was found, in the words of the newest sign.
    pub what: String,
    /// Why we think so.
    pub why: String,
    /// What to try next.
    pub advice: String,
    /// When the newest sign was seen, if the recording says so.
    pub seen_ns: Option<i64>,
    /// What the first sign said; `None` if the recording does not say it.
    pub first: Option<FirstSaid>,
}

/// What the first sign of a finding said.
#[derive(Debug, Clone, PartialEq)]
pub struct FirstSaid {
    /// When it was seen, nanoseconds like the recording's.
    pub seen_ns: i64,
    /// What was found.
    pub what: String,
    /// Why that was believed.
    pub why: String,
}

impl Found {
    /// What was said when the finding began: its words, in numbers of that time.
    fn at_first(&self) -> (&str, &str) {
        self.first.as_ref().map_or((&self.what, &self.why), |first| (&first.what, &first.why))
    }

    /// When the newest sign was seen, if it said anything else than the first.
    fn changed_ns(&self) -> Option<i64> {
        self.seen_ns.filter(|_| self.at_first() != (self.what.as_str(), self.why.as_str()))
    }
}

impl Report {
    /// Reads a recording of any format. A recording without phases and findings of its own is played through the
    /// detectors with these settings.
    ///
    /// # Errors
    /// It is missing, is not a recording, or exceeds the bounds of `docs/recordings.md`.
    pub fn open(path: &Path, room: Room, settings: &Settings) -> Result<Self, OpenError> {
        let format = FileFormat::of(path)?;
        match format {
            FileFormat::Own => recorded::open(path, room),
            FileFormat::Kineto => trace::open(path, room),
            FileFormat::FairScale => layered::open(path, room),
            FileFormat::TrainingLog => logged::open(path, room),
            FileFormat::Folder
            | FileFormat::OnnxRuntime
            | FileFormat::NvidiaSmi
            | FileFormat::Nvprof
            | FileFormat::NsightSystems
            | FileFormat::TorchSnapshot => played::open(format, path, room, settings),
        }
    }

    /// Reads a recording in our own format, as captures are.
    ///
    /// # Errors
    /// It is missing, or is not such a recording.
    pub fn open_own(path: &Path, room: Room) -> Result<Self, OpenError> {
        recorded::open(path, room)
    }

    /// How long it lasted, nanoseconds.
    #[must_use]
    pub fn duration_ns(&self) -> i64 {
        self.end_ns.saturating_sub(self.begin_ns)
    }

    /// The GPU with the highest peak, with that peak and its time; `None` if no memory is known.
    #[must_use]
    pub fn peak(&self) -> Option<(&Gpu, u64, i64)> {
        let peaks = self.gpus.iter().filter_map(|gpu| gpu.usage.peak.map(|(bytes, at_ns)| (gpu, bytes, at_ns)));
        peaks.rev().max_by_key(|(_, bytes, _)| *bytes)
    }

    /// The innermost spans at a time: of each rank on this GPU the shortest phase, layer or step that contains it. A rank
    /// whose GPUs are not known may be on it.
    pub fn at<'a>(&'a self, at_ns: i64, gpu: &'a Gpu) -> impl Iterator<Item = &'a Span> {
        let mut innermost: BTreeMap<usize, &Span> = BTreeMap::new();
        let begun = self.spans.spans().iter().take_while(|span| span.begin_ns <= at_ns);
        for span in begun.filter(|span| span.holds(at_ns)) {
            let known = innermost.entry(span.rank).or_insert(span);
            if span.duration_ns() <= known.duration_ns() {
                *known = span;
            }
        }
        innermost.into_values().filter(move |span| {
            let gpus = self.gpus_of.get(&self.spans.ranks()[span.rank]);
            gpus.is_none_or(|gpus| gpus.contains(&gpu.device.uuid))
        })
    }

    /// The findings; none if there is nothing that detectors could look at.
    pub fn found(&self) -> &[Found] {
        self.findings.as_deref().unwrap_or_default()
    }

    /// A time after the begin, for people.
    #[must_use]
    pub fn time(&self, after_ns: i64) -> String {
        match self.origin.times {
            Times::Readings => format!("reading {}", after_ns / READING_NS),
            Times::Unix | Times::Relative => table::seconds(after_ns),
        }
    }

    /// A stretch of time, for people.
    #[must_use]
    pub fn stretch(&self, length_ns: i64) -> String {
        match self.origin.times {
            Times::Readings => format!("{} readings", length_ns / READING_NS),
            Times::Unix | Times::Relative => table::seconds(length_ns),
        }
    }
}

impl Gpu {
    /// One with at most `most` points.
    fn new(device: Device, begin_ns: i64, most: usize) -> Self {
        Self {
            device,
            usage: MemoryUsage::new(begin_ns, most),
            allocations: None,
            largest: Vec::new(),
            allocator: None,
        }
    }
}

/// When each GPU's memory was highest.
fn peaks_of(gpus: &[Gpu]) -> Vec<i64> {
    gpus.iter().filter_map(|gpu| Some(gpu.usage.peak?.1)).collect()
}

/// The index of the GPU with this UUID; the UUID itself if it is not among the recording's.
fn index_of(gpus: &[Gpu], uuid: String) -> String {
    let known = gpus.iter().find(|gpu| gpu.device.uuid == uuid);
    known.map_or(uuid, |gpu| gpu.device.index.clone())
}
