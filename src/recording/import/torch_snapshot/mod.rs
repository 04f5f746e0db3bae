//! Memory snapshots of PyTorch: `torch.cuda.memory._dump_snapshot`, a pickle, also packed by gzip.
//!
//! Enters: a file of any size. Leaves: the memory that PyTorch's allocator gave to the program, by GPU and over time, the peak
//! and who held it then, failures, and what is reserved and not in use. Invariants: nothing in the file is executed; memory
//! grows with what is allocated at a time, and not with the file; the peak and its holders are those of PyTorch's own
//! visualiser.

mod curve;
mod input;
mod members;
mod memo;
mod pickle;
mod replay;
mod stacks;
mod values;

use crate::recording::allocator::{Allocator, Failure, Holder, Moment, Place};
use crate::recording::lines::{File, refuse};
use crate::recording::points::Track;
use crate::recording::rows::MOST_GPUS;
use crate::recording::tape::{Format, READING_NS, Tape, Times};
use crate::recording::{SkippedLines, printable};
use crate::source::OpenError;
use highwater_core::gpu::Device;
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
/// Stacks that are listed with all of their frames.
const MOST_HOLDERS: usize = 100;
/// The longest name of a file or function in a list, characters.
const LONGEST_NAME: usize = 200;

/// Whether a file is a pickle, by its first bytes as they are unpacked.
pub(super) fn is_one(path: &Path) -> bool {
    matches!(super::begin_of(path, 2).as_slice(), [0x80, 0..=5])
}

/// Reads a snapshot.
///
/// # Errors
/// It is cut short, contains code, is a pickle of something else, or exceeds the bounds of `docs/recordings.md`.
pub(super) fn tape(path: &Path, file: &File) -> Result<Tape, OpenError> {
    let unreadable = |problem: String| refuse("recording_unreadable", path, problem);
    let mut stacks = Stacks::default();
    let mut replay = Replay::new(&mut stacks);
    let top = pickle::read(file.bytes_up_to(MOST_BYTES), &mut stacks, &mut replay).map_err(unreadable)?;
    let mut skipped = SkippedLines::default();
    for (count, what) in
        [(replay.skipped, "values that are no entries"), (stacks.left_out, "texts and stacks without room")]
    {
        if let Some(count) = usize::try_from(count).ok().filter(|count| *count > 0) {
            skipped.add_many(path, count, what);
        }
    }
    let devices = replay.finish(&top);
    if devices.len() > MOST_GPUS {
        return Err(refuse("recording_too_large", path, format!("it has more than {MOST_GPUS} GPUs")));
    }
    // Before PyTorch 2.1, entries had no times.
    let has_times = devices.iter().all(|device| device.trace.events == 0 || device.trace.begin_us.is_some());
    let has_times = has_times && devices.iter().any(|device| device.trace.events > 0);
    let mut gpus = Vec::new();
    let mut allocators = Vec::new();
    for device in &devices {
        let known = Device { index: device.device.to_string(), ..Device::default() };
        let number = u32::try_from(device.device).unwrap_or(u32::MAX);
        gpus.push((known, Track::new(number, points(device, has_times))));
        allocators.push(allocator(gpus.len() - 1, device, &stacks, has_times));
    }
    let times = if has_times { Times::Unix } else { Times::Readings };
    let mut tape = Tape::imported(path, Format { times, ..FORMAT }, gpus, skipped)?;
    tape.allocators = allocators;
    Ok(tape)
}

/// When an entry was, nanoseconds.
fn at_ns(event: u64, time_us: Option<i64>, has_times: bool) -> Option<i64> {
    if has_times { time_us?.checked_mul(1_000) } else { i64::try_from(event).ok()?.checked_mul(READING_NS) }
}

/// What was allocated after each entry, as far as that is drawn; without entries, what is in use all the time.
fn points(device: &replay::Device, has_times: bool) -> Vec<(i64, Option<u64>)> {
    let absolute = |level: i128| u64::try_from(device.allocated_before + level).ok();
    let begin = at_ns(0, device.trace.begin_us, has_times);
    let levels = device.trace.curve.levels();
    let drawn = levels.filter_map(|one| Some((at_ns(one.event, one.time_us, has_times)?, absolute(one.allocated))));
    let mut points: Vec<_> = begin.map(|begin_ns| (begin_ns, absolute(0))).into_iter().chain(drawn).collect();
    if device.trace.events == 0 && !has_times {
        points.push((READING_NS, absolute(0)));
    }
    points
}

fn allocator(gpu: usize, device: &replay::Device, stacks: &Stacks, has_times: bool) -> Allocator {
    let moment = |event: u64, time_us: Option<i64>, allocated: i128, reserved: i128| Moment {
        after_events: event,
        at_ns: at_ns(event, time_us.or(device.trace.begin_us), has_times),
        allocated: u64::try_from(device.allocated_before + allocated).ok(),
        reserved: u64::try_from(device.reserved_before + reserved).ok(),
    };
    let peak = device.trace.peak;
    let holders = device.holders.iter().take(MOST_HOLDERS).map(|holder| Holder {
        bytes: holder.bytes,
        allocations: holder.allocations,
        place: place(holder.stack, stacks),
    });
    let others = device.holders.get(MOST_HOLDERS..).unwrap_or_default();
    let failures = device.trace.failures.iter().map(|failure| Failure {
        at: moment(failure.event, failure.time_us, failure.allocated, failure.reserved),
        requested: failure.requested,
        device_free: failure.device_free,
        place: place(failure.stack, stacks),
    });
    Allocator {
        gpu,
        events: device.trace.events,
        peak: moment(peak.event, peak.time_us, peak.allocated, peak.reserved),
        reserved: device.reserved,
        in_use: device.in_use,
        requested: device.requested,
        holders: holders.collect(),
        others: (others.len(), others.iter().fold(0, |sum, holder| sum.saturating_add(holder.bytes))),
        failures: failures.collect(),
        failures_left_out: device.trace.failures_left_out,
    }
}

/// Code that is not the program's own: of Python's frames, those of PyTorch.
const NOT_OWN: [&str; 4] = ["/torch/", "site-packages/", "dist-packages/", "<frozen "];

fn place(stack: u32, stacks: &Stacks) -> Place {
    let frames = stacks.stack_of(stack).iter().map(|frame| stacks.frame_of(*frame));
    let frames: Vec<_> =
        frames.map(|frame| (stacks.text_of(frame.file), frame.line, stacks.text_of(frame.name))).collect();
    let shown = |(file, line, name): &(&str, u32, &str)| {
        let end: String = file.chars().rev().take(LONGEST_NAME).collect();
        let (file, name): (String, String) = (end.chars().rev().collect(), name.chars().take(LONGEST_NAME).collect());
        printable(&format!("{file}:{line}:{name}"))
    };
    let of_python = |file: &str| file.ends_with(".py") || file.starts_with("<ipython");
    let is_own = |file: &str| of_python(file) && !NOT_OWN.iter().any(|part| file.contains(part));
    let of_python =
        frames.iter().find(|frame| is_own(frame.0)).or_else(|| frames.iter().find(|frame| of_python(frame.0)));
    let site = of_python
        .map(shown)
        .or_else(|| of_cpp(frames.iter().map(|frame| frame.2)))
        .or_else(|| frames.last().map(shown));
    Place { site, frames: frames.iter().map(shown).collect() }
}

/// What PyTorch did where no Python ran, by the names of its functions, the innermost first: threads of the backward pass have
/// no Python of their own.
fn of_cpp<'a>(names: impl DoubleEndedIterator<Item = &'a str> + Clone) -> Option<String> {
    let word =
        |text: &str| text.split(|one: char| !one.is_alphanumeric() && one != '_').next().unwrap_or_default().to_owned();
    let mut passes = names
        .clone()
        .filter_map(|name| name.strip_prefix("torch::autograd::generated::").filter(|rest| rest.contains("::apply(")));
    let mut operators = names.rev().filter_map(|name| name.strip_prefix("at::_ops::"));
    let pass = passes.next().map(|rest| printable(&format!("backward pass, {}", word(rest))));
    pass.or_else(|| operators.next().map(|rest| printable(&format!("operator {}", word(rest)))))
}

#[cfg(test)]
mod tests;
