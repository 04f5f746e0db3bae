//! Memory snapshots of PyTorch: `torch.cuda.memory._dump_snapshot`, a pickle, also packed by gzip.
//!
//! Enters: a file of any size. Leaves: the memory that PyTorch's allocator gave to the program, by GPU and over time, the peak
//! and who held it then, failures, and what is reserved and not in use. Invariants: nothing in the file is executed; memory
//! grows with what is allocated at a time, and not with the file; the peak and its holders are those of PyTorch's own
//! visualiser.

mod areas;
pub(super) mod bands;
mod blocks;
pub(super) mod curve;
mod input;
mod layout;
mod members;
mod memo;
mod outcome;
mod pickle;
mod places;
mod replay;
mod stacks;
mod values;

use blocks::Owned;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use highwater_engine::recording::allocator::{
    Allocator, BandMoment, Bands, Failure, HeldBlock, HeldMemory, Holder, Moment,
};
use highwater_engine::recording::lines::LineFile;
pub use highwater_engine::recording::tape::{Format, READING_NS, Tape, Times};
use highwater_engine::recording::track::Track;
use highwater_engine::recording::{FileProblem, SkippedLines};
use outcome::Device as Traced;
use places::Places;
use replay::Replay;
use stacks::Stacks;
use std::path::Path;

const FORMAT: Format = Format {
    name: "PyTorch memory snapshot",
    times: Times::Unix,
    missing: &["memory outside PyTorch's allocator, such as NCCL's", "the GPUs' sizes and names", "steps and phases"],
};
/// The largest snapshot, unpacked, bytes.
const MOST_BYTES: u64 = 64 << 30;
/// Maximum number of failures that are listed of one device, and of all devices.
const MOST_FAILURES: usize = 100;
const MOST_OF_ALL: usize = 256;
/// Maximum number of stacks that are kept for the peak, and the same for the end, of all devices together. Two snapshots are
/// compared by them.
const MOST_HOLDERS: usize = 1 << 13;
/// Maximum number of places of a GPU with memory over time, and of GPUs that have them. They take most of a page.
const MOST_SITES: usize = 12;
const MOST_BANDED: usize = 8;

/// Reads a snapshot.
///
/// # Errors
/// It is cut short, contains code, is a pickle of something else, or exceeds the bounds of `docs/reports.md`.
pub(crate) fn tape(path: &Path, file: &LineFile) -> Result<Tape, OpenError> {
    let refused = |problem: Box<FileProblem>| file.refused(&problem);
    let mut stacks = Stacks::default();
    let mut replay = Replay::new(&mut stacks);
    let top = pickle::read(file.bytes_up_to(MOST_BYTES), &mut stacks, &mut replay).map_err(refused)?;
    let mut skipped = SkippedLines::default();
    for (count, what) in [
        (replay.skipped, "values that are no entries, segments or traces, or occur twice"),
        (stacks.left_out + replay.without_room, "texts and stacks without room"),
    ] {
        if let Some(count) = usize::try_from(count).ok().filter(|count| *count > 0) {
            skipped.add_many(path, count, what);
        }
    }
    let devices: Vec<Traced> = replay.finish(&top).into_iter().map(Traced::of).collect();
    // Before PyTorch 2.1, entries had no times.
    let traces = || devices.iter().map(|device| &device.trace).filter(|trace| trace.events > 0);
    let has_times = traces().next().is_some() && traces().all(|trace| trace.begin_us.is_some());
    let span = (traces().filter_map(|trace| trace.begin_us).min(), traces().filter_map(|trace| trace.end_us).max());
    let times = Timing { has_times, span };
    let count = devices.len().max(1);
    let most = Most { failures: (MOST_OF_ALL / count).clamp(1, MOST_FAILURES), holders: MOST_HOLDERS / count };
    let mut places = Places::of(&stacks);
    let mut gpus = Vec::new();
    let mut allocators = Vec::new();
    for device in &devices {
        let known = Device { index: device.device.to_string(), ..Device::default() };
        let number = u32::try_from(device.device).unwrap_or(u32::MAX);
        gpus.push((known, Track::new(number, times.points(device))));
        allocators.push(allocator(gpus.len() - 1, device, &mut places, times, most));
    }
    let times = if has_times { Times::Unix } else { Times::Readings };
    let mut tape = Tape::imported(path, Format { times, ..FORMAT }, gpus, skipped)?;
    tape.allocators = allocators;
    Ok(tape)
}

/// What the times of a snapshot are.
#[derive(Clone, Copy)]
struct Timing {
    /// Whether entries have times; else they have only their numbers.
    has_times: bool,
    /// The earliest and the latest, microseconds of Unix time.
    span: (Option<i64>, Option<i64>),
}

impl Timing {
    /// When an entry was, nanoseconds.
    fn at_ns(self, event: u64, time_us: Option<i64>) -> Option<i64> {
        if self.has_times { time_us?.checked_mul(1_000) } else { i64::try_from(event).ok()?.checked_mul(READING_NS) }
    }

    /// The curve of allocated memory, as thinned for drawing. Without entries, it is constant: the memory in use at the end.
    fn points(self, device: &Traced) -> Vec<(i64, Option<u64>)> {
        let absolute = |level: i64| u64::try_from(device.allocated_before.saturating_add(level)).ok();
        if device.trace.events == 0 {
            let (begin, end) = if self.has_times { self.span } else { (None, None) };
            let ends = [self.at_ns(0, begin), self.at_ns(1, end)];
            return ends.into_iter().flatten().map(|at_ns| (at_ns, absolute(0))).collect();
        }
        let begin = self.at_ns(0, device.trace.begin_us).map(|begin_ns| (begin_ns, absolute(0)));
        let levels = device.trace.curve.levels();
        let drawn = levels.filter_map(|one| Some((self.at_ns(one.event, one.time_us)?, absolute(one.allocated))));
        begin.into_iter().chain(drawn).collect()
    }
}

/// How much is listed of one device.
#[derive(Debug, Clone, Copy)]
struct Most {
    failures: usize,
    holders: usize,
}

fn allocator(gpu: usize, device: &Traced, places: &mut Places<'_>, times: Timing, most: Most) -> Allocator {
    let moment = |event: u64, time_us: Option<i64>, allocated: i64, reserved: i64| Moment {
        after_events: event,
        // Before the first entry, it is the begin.
        at_ns: times.at_ns(event, if event == 0 { device.trace.begin_us } else { time_us }),
        allocated: u64::try_from(device.allocated_before.saturating_add(allocated)).ok(),
        reserved: device.reserved_before.and_then(|before| u64::try_from(before.checked_add(reserved)?).ok()),
    };
    let peak = device.trace.peak;
    let failures = device.trace.failures.iter().take(most.failures).map(|failure| Failure {
        at: moment(failure.event, failure.time_us, failure.allocated, failure.reserved),
        requested: failure.requested,
        device_free: failure.device_free,
        stream: failure.stream,
        layout: failure.layout.clone(),
        place: places.place(failure.stack),
    });
    let failures: Vec<Failure> = failures.collect();
    let more = device.trace.failures.len().saturating_sub(most.failures) as u64;
    Allocator {
        gpu,
        events: device.trace.events,
        peak: moment(peak.event, peak.time_us, peak.allocated, peak.reserved),
        reserved: device.segments.map(|segments| segments.reserved),
        in_use: device.segments.map(|segments| segments.in_use),
        requested: device.segments.and_then(|segments| segments.requested),
        is_by_category: false,
        at_peak: held(&device.holders, places, most.holders),
        at_end: device.holders_at_end.as_ref().map(|holders| held(holders, places, most.holders)),
        blocks_at_peak: blocks(&device.blocks_at_peak, places),
        blocks_at_end: blocks(&device.blocks_at_end, places),
        layout_at_peak: device.layout_at_peak.clone(),
        layout_at_end: device.layout_at_end.clone(),
        failures,
        failures_left_out: device.trace.failures_left_out.saturating_add(more),
        bands: if gpu < MOST_BANDED { bands(&device.banded, places, times) } else { Bands::default() },
    }
}

fn held(holders: &[outcome::Holder], places: &mut Places<'_>, most: usize) -> HeldMemory {
    let (listed, others) = holders.split_at(most.min(holders.len()));
    let holder = |holder: &outcome::Holder| Holder {
        bytes: holder.bytes,
        allocations: Some(holder.allocations),
        place: places.place(holder.stack),
    };
    let bytes = others.iter().fold(0, |sum: u64, holder| sum.saturating_add(holder.bytes));
    HeldMemory { holders: listed.iter().map(holder).collect(), others: (others.len(), bytes) }
}

fn blocks(of: &[Owned], places: &mut Places<'_>) -> Vec<HeldBlock> {
    let block = |block: &Owned| HeldBlock {
        bytes: block.bytes,
        entry: Some(u64::from(block.event)).filter(|entry| *entry > 0),
        place: places.place(block.stack),
    };
    of.iter().map(block).collect()
}

/// Who held memory over time, by place in the program.
fn bands(of: &bands::Banded, places: &mut Places<'_>, times: Timing) -> Bands {
    let mut sites: Vec<Option<String>> = Vec::new();
    let site_of: Vec<usize> = of
        .holders
        .iter()
        .map(|stack| {
            let site = places.place(*stack).site;
            sites.iter().position(|known| *known == site).unwrap_or_else(|| {
                sites.push(site);
                sites.len() - 1
            })
        })
        .collect();
    let mut last_ns = i64::MIN;
    let moments = of.moments.iter().filter_map(|moment| {
        // A history's times may go back; a chart's do not.
        last_ns = last_ns.max(times.at_ns(moment.begin_event, moment.begin_us)?);
        let mut held = vec![0_u64; sites.len()];
        for (site, bytes) in site_of.iter().zip(&moment.held) {
            held[*site] = held[*site].saturating_add(*bytes);
        }
        Some(BandMoment { from_ns: last_ns, total: moment.total, held })
    });
    let moments: Vec<BandMoment> = moments.collect();
    Bands { sites, moments }.largest(MOST_SITES)
}

#[cfg(test)]
mod tests;
