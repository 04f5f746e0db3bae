//! The contents of a recording, whatever it was read from.

use super::lines::SkippedLines;
use super::meters::Meters;
use super::points::Track;
use highwater_core::gpu::{Device, GpuChange};
use highwater_core::wire::Annotation;

/// A day.
pub(super) const DAY_NS: i64 = 86_400_000_000_000;
/// Longer than any real recording. With one time of another clock or unit, a replay would wait for years.
pub(super) const LONGEST_NS: i64 = 31 * DAY_NS;

/// A recording in memory, except for what jobs sent if that is in text files.
#[derive(Debug)]
pub(super) struct Tape {
    pub devices: Vec<Device>,
    /// The tracks of the devices, in the same order.
    pub tracks: Vec<Track>,
    pub said: Box<dyn Words>,
    /// By the tracks' numbers.
    pub meters: Meters,
    /// When the detectors looked, in order of time; empty if that was not recorded.
    pub turns: Vec<i64>,
    /// What became of GPUs, by their positions, in order of time.
    pub changes: Vec<GpuChange>,
    pub begin_ns: i64,
    pub end_ns: i64,
    pub skipped: SkippedLines,
}

/// What jobs sent.
pub(super) trait Words: std::fmt::Debug + Send + Sync {
    /// In the order in which it is to be received, at the recorded times.
    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send>;
}
