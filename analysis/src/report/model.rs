//! What one recording shows: where it is from, its GPUs, its steps and phases, and what was found.

use super::breakdown::Breakdown;
use super::layers::Layers;
use super::logged::Logged;
use super::spans::{Span, Spans};
use super::table::seconds;
use super::trace::Traced;
use super::usage::MemoryUsage;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{ActivityMeans, Device};
use highwater_core::source::provenance;
use highwater_engine::recording::{Allocation, Allocator, READING_NS, SkippedLines, Times};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The most points of what a GPU did: more than a screen has columns.
const MOST_ACTIVITY: usize = 1 << 12;
/// A reading is about at most this much of the time before it, nanoseconds. A GPU on which nothing runs is read once a second.
const READING_HOLDS_NS: i64 = SECOND_NS * 3 / 2;

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
    pub(crate) logged: Vec<Logged>,
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
    /// What was guessed, as the file does not say it, for people.
    pub assumed: Vec<String>,
}

impl Origin {
    /// One of which nothing else is known.
    pub(super) fn new(format: &'static str, times: Times) -> Self {
        let (missing, assumed) = (Vec::new(), Vec::new());
        Self { format, host: None, source: None, note: None, state: None, period_ns: None, times, missing, assumed }
    }

    /// The notice that data are simulated or replayed, which is shown before everything else.
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
    /// What it did otherwise, as far as the recording says so.
    pub activity: ActivityMeans,
    /// Who held its memory over time, as far as the recording says so.
    pub breakdown: Breakdown,
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
    /// Why a rank is late, in one word, if the recording says so.
    pub lag_cause: Option<String>,
    /// The GPU's index.
    pub gpu: Option<String>,
    /// The job and rank that it is about.
    pub job: Option<String>,
    /// See above.
    pub rank: Option<u32>,
    /// The number of its incident, if the recording says so: findings of one cause have the same.
    pub incident: Option<u64>,
    /// The pods or Slurm steps that it is about, as texts; empty if they are not known.
    pub workloads: Vec<String>,
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
    pub(super) fn at_first(&self) -> (&str, &str) {
        self.first.as_ref().map_or((&self.what, &self.why), |first| (&first.what, &first.why))
    }

    /// When the newest sign was seen, if it said anything else than the first.
    pub(super) fn changed_ns(&self) -> Option<i64> {
        self.seen_ns.filter(|_| self.at_first() != (self.what.as_str(), self.why.as_str()))
    }
}

impl Report {
    /// A report on this file, as yet without anything of it.
    pub(super) fn of_file(path: &Path, origin: Origin) -> Self {
        Self {
            name: name_of(path),
            origin,
            begin_ns: 0,
            end_ns: 0,
            gpus: Vec::new(),
            spans: Spans::default(),
            gpus_of: BTreeMap::new(),
            findings: None,
            layers: Layers::default(),
            skipped: SkippedLines::default(),
            trace: None,
            logged: Vec::new(),
        }
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
            Times::Unix | Times::Relative => seconds(after_ns),
        }
    }

    /// A stretch of time, for people.
    #[must_use]
    pub fn stretch(&self, length_ns: i64) -> String {
        match self.origin.times {
            Times::Readings => format!("{} readings", length_ns / READING_NS),
            Times::Unix | Times::Relative => seconds(length_ns),
        }
    }
}

impl Gpu {
    /// One with at most `most` points.
    pub(super) fn new(device: Device, begin_ns: i64, most: usize) -> Self {
        Self {
            device,
            usage: MemoryUsage::new(begin_ns, most),
            activity: ActivityMeans::new(1, MOST_ACTIVITY, READING_HOLDS_NS),
            breakdown: Breakdown::default(),
            allocations: None,
            largest: Vec::new(),
            allocator: None,
        }
    }
}

/// The name of a file, for people.
pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// When each GPU's memory was highest.
pub(super) fn peaks_of(gpus: &[Gpu]) -> Vec<i64> {
    gpus.iter().filter_map(|gpu| Some(gpu.usage.peak?.1)).collect()
}

/// The index of the GPU with this UUID; the UUID itself if it is not among the recording's.
pub(super) fn index_of(gpus: &[Gpu], uuid: String) -> String {
    let known = gpus.iter().find(|gpu| gpu.device.uuid == uuid);
    known.map_or(uuid, |gpu| gpu.device.index.clone())
}
