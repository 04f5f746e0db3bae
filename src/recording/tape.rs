//! What a recording has, wherever it was read from.

use super::lines::SkippedLines;
use super::meters::Meters;
use super::points::Track;
use highwater_core::gpu::{Device, GpuChange};
use highwater_core::wire::Annotation;

/// A day.
pub(super) const DAY_NS: i64 = 86_400_000_000_000;
/// Longer than anybody records: one time of another clock or unit would be waited for, for years.
pub(super) const LONGEST_NS: i64 = 31 * DAY_NS;

/// A recording in memory, but for what jobs said in files of text.
#[derive(Debug)]
pub(super) struct Tape {
    pub devices: Vec<Device>,
    /// Of each device, in the same order.
    pub tracks: Vec<Track>,
    pub said: Box<dyn Words>,
    /// By the tracks' numbers.
    pub meters: Meters,
    /// When the detectors looked, in order of time; empty where that was not recorded.
    pub turns: Vec<i64>,
    /// What became of GPUs, by their positions, in order of time.
    pub changes: Vec<GpuChange>,
    pub begin_ns: i64,
    pub end_ns: i64,
    pub skipped: SkippedLines,
}

/// What jobs said.
pub(super) trait Words: std::fmt::Debug + Send + Sync {
    /// In the order in which it is to be taken, at the recorded times.
    fn in_order(&self) -> Box<dyn Iterator<Item = Annotation> + Send>;
}
