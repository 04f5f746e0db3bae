//! The calls that launched what ran on GPUs, and the innermost NVTX range in which each call began.
//!
//! Enters: the numbers that calls share with what they launched. Leaves: the begin and the range of each call that launched something.
//! Invariant: of calls that launched nothing, none is kept; ranges are passed once, in the order in which they began.

use super::gpus::process;
use super::names::RangeNames;
use super::ranges::{Range, Ranges};
use crate::timeline::Launch;
use highwater_core::source::OpenError;
use highwater_engine::recording::rows::{RecordingReader, needed, number};
use rusqlite::Row;
use std::collections::HashMap;

/// Calls of CUDA.
const TABLE: &str = "CUPTI_ACTIVITY_KIND_RUNTIME";
/// Ranges within each other on one thread. Those that lie deeper count as the one around.
const DEEPEST: usize = 64;
/// Threads whose ranges are looked at.
const MOST_THREADS: usize = 1 << 12;

/// A call that launched something.
#[derive(Debug, Clone, Copy)]
struct Call {
    correlation: u64,
    launch: Launch,
}

/// The calls that launched something, in the order of their correlations.
#[derive(Debug, Default)]
pub(super) struct Launches(Vec<Call>);

impl Launches {
    /// Finds the calls with these correlations, of which 0 is none. Of several calls with one correlation, such as one of the runtime and
    /// that of the driver in it, the first counts.
    pub(super) fn read(file: &mut RecordingReader, correlations: impl Iterator<Item = u64>) -> Result<Self, OpenError> {
        let unknown = Launch { at_ns: i64::MAX, operator: 0, thread: 0 };
        let awaited = correlations.filter(|correlation| *correlation != 0);
        let mut calls: Vec<Call> = awaited.map(|correlation| Call { correlation, launch: unknown }).collect();
        calls.sort_unstable_by_key(|call| call.correlation);
        calls.dedup_by_key(|call| call.correlation);
        if calls.is_empty() || !file.has_table(TABLE) {
            return Ok(Self::default());
        }
        let query = format!("SELECT {} FROM {TABLE}", file.columns(TABLE, ["start", "globalTid", "correlationId"]));
        let read = |row: &Row<'_>| {
            let thread = number(row, 1)?;
            Ok((needed::<i64>(row, 0)?, thread.unwrap_or(0), correlation(thread, number(row, 2)?)))
        };
        file.each(TABLE, &query, 0, read, |(at_ns, thread, correlation)| {
            let at = calls.binary_search_by_key(&correlation, |call| call.correlation);
            if let Some(call) = at.ok().and_then(|at| calls.get_mut(at)).filter(|call| at_ns < call.launch.at_ns) {
                (call.launch.at_ns, call.launch.thread) = (at_ns, thread);
            }
            Ok(())
        })?;
        calls.retain(|call| call.launch.at_ns != i64::MAX);
        Ok(Self(calls))
    }

    /// Finds the range of each call, whose number becomes the operator of its launch. Passes on each range that is no step, with its name.
    pub(super) fn find_ranges(
        &mut self,
        file: &mut RecordingReader,
        ranges: &Ranges,
        names: &mut RangeNames,
        mut annotated: impl FnMut(&Range, &str),
    ) -> Result<(), OpenError> {
        self.0.sort_unstable_by_key(|call| call.launch.at_ns);
        let mut calls = self.0.iter_mut().peekable();
        let mut open: HashMap<i64, Vec<(i64, u64)>> = HashMap::new();
        ranges.each(file, |range| {
            while let Some(call) = calls.next_if(|call| call.launch.at_ns < range.begin_ns) {
                call.launch.operator = innermost(&open, call);
            }
            let number = names.number(&range.name);
            names.annotation(number).into_iter().for_each(|name| annotated(&range, name));
            let has_room = open.len() < MOST_THREADS || open.contains_key(&range.thread);
            if has_room {
                let of = open.entry(range.thread).or_default();
                of.retain(|(end_ns, _)| *end_ns > range.begin_ns);
                if of.len() < DEEPEST {
                    of.push((range.end_ns, number));
                }
            }
            Ok(())
        })?;
        calls.for_each(|call| call.launch.operator = innermost(&open, call));
        self.0.sort_unstable_by_key(|call| call.correlation);
        Ok(())
    }

    /// The launch of what has this correlation.
    pub(super) fn of(&self, correlation: u64) -> Option<Launch> {
        let at = self.0.binary_search_by_key(&correlation, |call| call.correlation).ok()?;
        self.0.get(at).map(|call| call.launch)
    }
}

/// The innermost range that is open on a call's thread; 0 if none is.
fn innermost(open: &HashMap<i64, Vec<(i64, u64)>>, call: &Call) -> u64 {
    let ranges = open.get(&call.launch.thread).map(Vec::as_slice).unwrap_or_default();
    ranges.iter().rev().find(|(end_ns, _)| call.launch.at_ns < *end_ns).map_or(0, |(_, number)| *number)
}

/// What identifies a launch among those of all processes; 0 if nothing does. `global` is a `globalPid` or `globalTid`.
pub(super) fn correlation(global: Option<i64>, number: Option<i64>) -> u64 {
    let number = number.and_then(|number| u32::try_from(number).ok()).filter(|number| *number != 0);
    let process = global.map_or(0, process).unsigned_abs();
    number.map_or(0, |number| process << u32::BITS | u64::from(number))
}
