//! The contents of a recording, whatever it was read from.

use super::allocator::Allocator;
use super::lines::{SkippedLines, refuse};
use super::meters::Meters;
use super::track::Track;
use highwater_core::gpu::{Device, GpuChange};
use highwater_core::source::OpenError;
use highwater_core::wire::Annotation;
use std::path::Path;

/// A day.
pub(super) const DAY_NS: i64 = 86_400_000_000_000;
/// Longer than any real recording. With one time of another clock or unit, a replay would wait for years.
pub(super) const LONGEST_NS: i64 = 31 * DAY_NS;

/// Whether an interval is longer than any real recording.
pub fn is_too_long(begin_ns: i64, end_ns: i64) -> bool {
    end_ns.saturating_sub(begin_ns) > LONGEST_NS
}

/// A recording in memory, except for what jobs sent if that is in text files.
#[derive(Debug)]
pub struct Tape {
    /// The GPUs.
    pub devices: Vec<Device>,
    /// The tracks of the devices, in the same order.
    pub tracks: Vec<Track>,
    /// What jobs sent.
    pub said: Box<dyn AnnotationSource>,
    /// By the tracks' numbers.
    pub meters: Meters,
    /// When the detectors looked, in order of time; empty if that was not recorded.
    pub turns: Vec<i64>,
    /// Changes of GPUs, each with the GPU's position, in order of time.
    pub changes: Vec<GpuChange>,
    /// The earliest point or annotation, nanoseconds.
    pub begin_ns: i64,
    /// The latest.
    pub end_ns: i64,
    /// What could not be read.
    pub skipped: SkippedLines,
    /// The format that it was read from.
    pub format: Format,
    /// What was guessed of a file that does not say it, for people.
    pub assumed: Vec<String>,
    /// What was allocated, if that was recorded.
    pub allocations: Vec<Allocation>,
    /// What a framework's own allocator did, if that was recorded.
    pub allocators: Vec<Allocator>,
}

/// Memory that a program allocated on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Position of the GPU.
    pub gpu: usize,
    /// When it was allocated, and when it was freed or the recording ended, nanoseconds.
    pub begin_ns: i64,
    /// See above.
    pub end_ns: i64,
    /// Its size.
    pub bytes: u64,
    /// Whether it was freed.
    pub is_freed: bool,
}

impl Tape {
    /// A recording of another tool: memory, from the first change to the last, and nothing that jobs sent. A device
    /// without a UUID gets one that no other file's has.
    ///
    /// # Errors
    /// There is no memory, or times lie too far apart.
    pub fn imported(
        path: &Path,
        format: Format,
        gpus: impl IntoIterator<Item = (Device, Track)>,
        skipped: SkippedLines,
    ) -> Result<Self, OpenError> {
        let (mut devices, tracks): (Vec<Device>, Vec<Track>) = gpus.into_iter().unzip();
        for (device, track) in devices.iter_mut().zip(&tracks).filter(|(device, _)| device.uuid.is_empty()) {
            device.uuid = made_up_uuid(track.gpu, path);
        }
        let spans: Vec<_> = tracks.iter().filter_map(Track::span).collect();
        let begin_ns = spans.iter().map(|(begin_ns, _)| *begin_ns).min();
        let end_ns = spans.iter().map(|(_, end_ns)| *end_ns).max();
        let (Some(begin_ns), Some(end_ns)) = (begin_ns, end_ns) else {
            let first = skipped.first.first().map_or_else(String::new, |first| format!("; {first}"));
            return Err(refuse("recording_unreadable", path, format!("it has no memory of any GPU{first}")));
        };
        if is_too_long(begin_ns, end_ns) {
            let problem =
                "its times lie more than 31 days apart: one of them is wrong, or it is longer than what is read";
            return Err(refuse("recording_unreadable", path, problem));
        }
        Ok(Self {
            devices,
            tracks,
            said: Box::new(NoAnnotations),
            meters: Meters::default(),
            turns: Vec::new(),
            changes: Vec::new(),
            begin_ns,
            end_ns,
            skipped,
            format,
            assumed: Vec::new(),
            allocations: Vec::new(),
            allocators: Vec::new(),
        })
    }
}

/// What the UUID of a GPU has that was made up.
const OF_FILE: &str = "-of-";

/// A UUID for a GPU of a file that does not say it: one that no other file's GPU has.
#[must_use]
pub fn made_up_uuid(gpu: u32, path: &Path) -> String {
    format!("GPU-{gpu}{OF_FILE}{}", path.display())
}

/// Whether a UUID was made up.
#[must_use]
pub fn is_made_up(uuid: &str) -> bool {
    uuid.contains(OF_FILE)
}

/// What a format is called, and what files of it do not contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// Its name, for people.
    pub name: &'static str,
    /// What its times are.
    pub times: Times,
    /// What it does not contain, for people.
    pub missing: &'static [&'static str],
}

/// Assumed time between two readings of a format without times, nanoseconds.
pub const READING_NS: i64 = 1_000_000;

/// What the times of a recording are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Unix times.
    Unix,
    /// Times from some begin.
    Relative,
    /// Numbers of readings: each stands for [`READING_NS`], because nothing is known of the real times.
    Readings,
}

/// What jobs sent where a format has no such thing.
#[derive(Debug)]
pub(super) struct NoAnnotations;

impl AnnotationSource for NoAnnotations {
    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        Box::new(std::iter::empty())
    }
}

/// What jobs sent.
pub trait AnnotationSource: std::fmt::Debug + Send + Sync {
    /// In the order in which it is to be received, at the recorded times.
    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send>;
}
