//! Readings of a program that polled, on their way into a `Tape`.
//!
//! Enters: readings of each GPU in order of time. Leaves: change points, with gaps where the poller was held up.
//! Invariant: readings that repeat the value before take no memory.

use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
pub use highwater_engine::recording::lines::Fault;
use highwater_engine::recording::rows::MOST_GPUS;
use highwater_engine::recording::tape::{Format, Tape};
use highwater_engine::recording::track::Track;
use highwater_engine::recording::{FileProblem, SkippedLines};
use std::collections::BTreeMap;
use std::path::Path;

/// Number of intervals from which the poller's period is learned.
const LEARNED_FROM: usize = 256;
/// A pause of more than this number of periods is a gap. A poller that sleeps between calls has no deadlines, so a few
/// periods are nothing unusual.
const GAP_PERIODS: i64 = 10;
/// The most changes of all GPUs that are kept: 192 MiB.
const MOST_POINTS: usize = 1 << 23;

/// All readings of a file.
#[derive(Debug, Default)]
pub(super) struct Readings {
    gpus: BTreeMap<u32, Readout>,
    points: usize,
}

/// One GPU's.
#[derive(Debug, Default)]
struct Readout {
    device: Device,
    points: Vec<(i64, Option<u64>)>,
    last: Option<(i64, Option<u64>)>,
    /// The first intervals; empty once the period is known.
    intervals: Vec<i64>,
    /// The same intervals as (begin, end), in their order: `intervals` is sorted to find the median. Empty once it is
    /// known.
    pauses: Vec<(i64, i64)>,
    period_ns: Option<i64>,
}

impl Readings {
    /// Adds a reading of a GPU; `None` if the tool could not read it. `device` describes the GPU at its first reading.
    ///
    /// # Errors
    /// The reading is older than the one before, or there are too many.
    pub fn push(
        &mut self,
        gpu: u32,
        at_ns: i64,
        used: Option<u64>,
        device: impl FnOnce() -> Device,
    ) -> Result<(), Fault> {
        if self.gpus.len() >= MOST_GPUS && !self.gpus.contains_key(&gpu) {
            return Err(Fault::File(FileProblem::too_many(MOST_GPUS, "GPUs")));
        }
        let last = self.gpus.get(&gpu).and_then(|of| of.last);
        if last.is_some_and(|(last_ns, _)| at_ns < last_ns) {
            return Err(Fault::Line(FileProblem::malformed("its time lies before that of the reading before")));
        }
        let of = self.gpus.entry(gpu).or_insert_with(|| Readout { device: device(), ..Readout::default() });
        let before = of.points.len();
        of.push(at_ns, used);
        self.points += of.points.len() - before;
        if self.points > MOST_POINTS {
            return Err(Fault::File(FileProblem::too_many(MOST_POINTS, "changes of memory")));
        }
        Ok(())
    }

    /// Starts another run of the tool in the same file. Its period may differ.
    pub fn begin_anew(&mut self) {
        self.gpus.values_mut().for_each(Readout::begin_anew);
    }

    /// The recording.
    ///
    /// # Errors
    /// There is no reading, or times lie too far apart.
    pub fn tape(self, path: &Path, format: Format, skipped: SkippedLines) -> Result<Tape, OpenError> {
        let end_ns = self.gpus.values().filter_map(|of| Some(of.last?.0)).max().unwrap_or(i64::MIN);
        let gpus = self.gpus.into_iter().map(|(gpu, readout)| {
            let (device, points) = readout.end(end_ns);
            (device, Track::new(gpu, points))
        });
        Tape::imported(path, format, gpus, skipped)
    }
}

impl Readout {
    fn push(&mut self, at_ns: i64, used: Option<u64>) {
        if let Some((last_ns, _)) = self.last {
            self.pause(last_ns, at_ns);
        }
        let changes = self.points.last().is_none_or(|(_, before)| *before != used);
        if changes {
            self.points.push((at_ns, used));
        }
        self.last = Some((at_ns, used));
    }

    /// Takes the time between two readings into account.
    fn pause(&mut self, from_ns: i64, to_ns: i64) {
        if matches!(self.points.last(), Some((_, None))) {
            // It is in a gap already.
            return;
        }
        let interval_ns = to_ns.saturating_sub(from_ns);
        let Some(period_ns) = self.period_ns else {
            self.intervals.push(interval_ns);
            self.pauses.push((from_ns, to_ns));
            if self.intervals.len() >= LEARNED_FROM {
                self.learn();
            }
            return;
        };
        if interval_ns > GAP_PERIODS.saturating_mul(period_ns) {
            self.gap(from_ns);
        }
    }

    /// Learns the period: the median of the first intervals. Where most are 0, the poller is faster than its clock, and the median of
    /// the others is how fine that is.
    fn learn(&mut self) {
        self.intervals.sort_unstable();
        let middle_of = |all: &[i64]| all.get(all.len() / 2).copied();
        let some = &self.intervals[self.intervals.partition_point(|interval| *interval == 0)..];
        let middle = middle_of(&self.intervals).filter(|middle| *middle > 0).or_else(|| middle_of(some));
        self.period_ns = Some(middle.unwrap_or(0).max(1));
        self.intervals = Vec::new();
        let longest_ns = GAP_PERIODS.saturating_mul(middle.unwrap_or(0).max(1));
        for (from_ns, to_ns) in std::mem::take(&mut self.pauses) {
            if to_ns.saturating_sub(from_ns) > longest_ns {
                self.earlier_gap(from_ns, to_ns);
            }
        }
    }

    /// A gap after the newest reading, which the next reading ends.
    fn gap(&mut self, from_ns: i64) {
        if let Some((_, Some(_))) = self.points.last() {
            self.points.push((from_ns.saturating_add(1), None));
        }
    }

    /// A gap between two readings that are not the newest.
    fn earlier_gap(&mut self, from_ns: i64, to_ns: i64) {
        let held = self.points.iter().rev().find(|(at_ns, _)| *at_ns <= to_ns).and_then(|(_, used)| *used);
        // Both are near the end, so that little moves.
        let place = self.points.partition_point(|(at_ns, _)| *at_ns <= from_ns);
        self.points.insert(place, (from_ns.saturating_add(1), None));
        // The reading at the gap's end may have repeated the value before.
        let place = self.points.partition_point(|(at_ns, _)| *at_ns < to_ns);
        if held.is_some() && self.points.get(place).is_none_or(|(at_ns, _)| *at_ns != to_ns) {
            self.points.insert(place, (to_ns, held));
        }
    }

    fn begin_anew(&mut self) {
        self.learn();
        self.period_ns = None;
        // What lies between two runs is not known.
        if let Some((last_ns, _)) = self.last {
            self.gap(last_ns);
        }
    }

    /// Its points, in a recording that ends with a reading at `end_ns`.
    fn end(mut self, end_ns: i64) -> (Device, Vec<(i64, Option<u64>)>) {
        if self.period_ns.is_none() {
            self.learn();
        }
        // Adds the last reading as a point even if its value is unchanged, so that the points reach its time.
        if let Some((at_ns, used)) = self.last
            && self.points.last().is_none_or(|(last_ns, _)| *last_ns < at_ns)
        {
            self.points.push((at_ns, used));
        }
        // If the tool read other GPUs for much longer, this GPU's memory is unknown from its last reading on.
        let longest_ns = GAP_PERIODS.saturating_mul(self.period_ns.unwrap_or(1));
        if let Some((at_ns, _)) = self.last
            && end_ns.saturating_sub(at_ns) > longest_ns
        {
            self.gap(at_ns);
        }
        (self.device, self.points)
    }
}
