//! The steps and NVTX ranges of the host, for exports in which nothing ran on a GPU.
//!
//! Enters: an export. Leaves: its ranges, each with the step in which it began. Invariants: ranges are passed on one by one; of
//! more than [`MOST_NAMES`] different names, those that differ only in numbers are one.

use super::gpus::{epoch_ns, process};
use super::names::family;
use super::ranges::Ranges;
use super::steps::marks;
use highwater_core::source::OpenError;
use highwater_engine::recording::SkippedLines;
use highwater_engine::recording::rows::RecordingReader;
use std::collections::{BTreeMap, BTreeSet};

/// The most names that are kept as they are.
const MOST_NAMES: usize = 256;
/// The most threads that have ranges of their own. Ranges of further threads are added to the last one.
const MOST_THREADS: usize = 256;

/// A step or a range.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HostRange {
    /// The number of its thread, from 1 in the order in which they appear.
    pub thread: usize,
    /// What it is called; `None` for a step.
    pub name: Option<String>,
    /// The step that it is, or in which it began.
    pub step: Option<u64>,
    /// When it began, nanoseconds since 1970, or on the export's clock if that is not known.
    pub begin_ns: i64,
    /// When it ended, likewise.
    pub end_ns: i64,
}

/// What else the export has.
#[derive(Debug)]
pub(crate) struct Host {
    /// When the session began, nanoseconds since 1970.
    pub epoch_ns: Option<i64>,
    /// What was guessed, for people.
    pub assumed: Vec<String>,
    /// What it lacks, for people.
    pub missing: Vec<&'static str>,
    /// Rows that could not be read.
    pub skipped: SkippedLines,
}

/// Passes on the ranges of an export, and then its steps.
///
/// # Errors
/// A table cannot be read.
pub(crate) fn host(mut file: RecordingReader, mut take: impl FnMut(HostRange)) -> Result<Host, OpenError> {
    let epoch_ns = epoch_ns(&mut file)?;
    let dated = |at_ns: i64| at_ns.saturating_add(epoch_ns.unwrap_or(0));
    let marks = marks(&mut file, None)?;
    let skipped = file.skipped.clone();
    let mut threads: BTreeMap<i64, usize> = BTreeMap::new();
    if let Some(ranges) = Ranges::find(&mut file)? {
        let mut names = BTreeSet::new();
        ranges.each(&mut file, |range| {
            if names.len() <= MOST_NAMES {
                names.insert(range.name);
            }
            Ok(())
        })?;
        let has_many = names.len() > MOST_NAMES;
        drop(names);
        ranges.each(&mut file, |range| {
            let next = (threads.len() + 1).min(MOST_THREADS);
            let thread = *threads.entry(range.thread).or_insert(next);
            let of = family(&range.name).0;
            if marks.family.as_ref() == Some(&of) && marks.threads.contains(&range.thread) {
                return Ok(());
            }
            let steps = marks.steps.get(&process(range.thread)).map(Vec::as_slice).unwrap_or_default();
            let begun = steps.partition_point(|(_, begin_ns, _)| *begin_ns <= range.begin_ns);
            let step =
                begun.checked_sub(1).and_then(|at| steps.get(at)).filter(|(_, _, end_ns)| range.begin_ns < *end_ns);
            let (begin_ns, end_ns, step) =
                (dated(range.begin_ns), dated(range.end_ns), step.map(|(number, ..)| *number));
            take(HostRange { thread, name: Some(if has_many { of } else { range.name }), step, begin_ns, end_ns });
            Ok(())
        })?;
    }
    for thread in &marks.threads {
        let at = threads.get(thread).copied().unwrap_or(1);
        for (number, begin_ns, end_ns) in marks.steps.get(&process(*thread)).into_iter().flatten() {
            take(HostRange {
                thread: at,
                name: None,
                step: Some(*number),
                begin_ns: dated(*begin_ns),
                end_ns: dated(*end_ns),
            });
        }
    }
    // What cannot be read was counted the first time.
    file.skipped = skipped;
    Ok(Host { epoch_ns, assumed: marks.assumed, missing: marks.missing, skipped: file.skipped })
}
