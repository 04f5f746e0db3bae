//! The last exported value of each total, from which start times and deltas are computed.
//!
//! A total that this process counts starts at 0, at the time of the last snapshot without the series. The start of a total
//! that began elsewhere (in the driver, in a job) is unknown: its first point has its own time as start time, which is how
//! the data model marks an unknown start, and later points keep this start time. A total that falls has been reset. Series
//! that are no longer exported are removed, so those of a job are gone when the job is.

use crate::metrics::Labels;
use highwater_core::histogram::{Counts, Exponential};
use std::collections::HashMap;
use std::sync::Arc;

/// Identifies a series: the place of its metric in the table of names, and its labels.
pub(super) type SeriesKey = (usize, Labels);

/// One point of a total.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Reported<T> {
    /// When it began, Unix nanoseconds.
    pub start_ns: i64,
    /// The total, or its increase if deltas are asked for.
    pub value: T,
}

/// A value that adds up.
pub(super) trait Total: Clone {
    /// Whether it cannot have grown from `earlier`.
    fn is_reset(&self, earlier: &Self) -> bool;
    /// The increase since `earlier`.
    fn since(&self, earlier: &Self) -> Self;
}

impl Total for f64 {
    fn is_reset(&self, earlier: &Self) -> bool {
        self < earlier
    }

    fn since(&self, earlier: &Self) -> Self {
        self - earlier
    }
}

impl Total for Counts {
    fn is_reset(&self, earlier: &Self) -> bool {
        self.cumulative.last() < earlier.cumulative.last()
    }

    fn since(&self, earlier: &Self) -> Self {
        let cumulative = self.cumulative.iter().zip(&earlier.cumulative);
        let exponential = self.exponential.as_ref().zip(earlier.exponential.as_ref());
        Counts {
            bounds_s: self.bounds_s,
            cumulative: cumulative.map(|(now, before)| now.saturating_sub(*before)).collect(),
            sum_s: self.sum_s - earlier.sum_s,
            exponential: exponential.map(|(now, before)| Arc::new(now.since(before))),
        }
    }
}

impl Total for Exponential {
    fn is_reset(&self, earlier: &Self) -> bool {
        self.count() < earlier.count()
    }

    fn since(&self, earlier: &Self) -> Self {
        Exponential::since(self, earlier)
    }
}

/// The series of one type of value.
#[derive(Debug)]
pub(super) struct Series<T> {
    known: HashMap<SeriesKey, Last<T>>,
    round: u64,
}

#[derive(Debug)]
struct Last<T> {
    start_ns: i64,
    at_ns: i64,
    value: T,
    round: u64,
}

/// When a snapshot is taken, and how its totals are exported.
#[derive(Debug, Clone, Copy)]
pub(super) struct SnapshotTime {
    /// Now, Unix nanoseconds.
    pub now_ns: i64,
    /// When the last snapshot was taken; before the first one, when the exporter started.
    pub last_ns: i64,
    /// Whether only the increase is exported.
    pub delta: bool,
    /// Whether the totals began with this process.
    pub own: bool,
}

impl<T> Default for Series<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), round: 0 }
    }
}

impl<T: Total> Series<T> {
    /// The point to export for a total; `None` if deltas are asked for and there is none yet.
    pub fn advance(&mut self, key: SeriesKey, value: T, moment: SnapshotTime) -> Option<Reported<T>> {
        let SnapshotTime { now_ns, last_ns, delta, own } = moment;
        let round = self.round;
        let Some(last) = self.known.get_mut(&key) else {
            let start_ns = if own { last_ns } else { now_ns };
            self.known.insert(key, Last { start_ns, at_ns: now_ns, value: value.clone(), round });
            return (own || !delta).then_some(Reported { start_ns, value });
        };
        let earlier = std::mem::replace(&mut last.value, value.clone());
        let is_reset = value.is_reset(&earlier);
        if is_reset {
            last.start_ns = if own { last.at_ns } else { now_ns };
        }
        let start_ns = if delta { last.at_ns } else { last.start_ns };
        (last.at_ns, last.round) = (now_ns, round);
        let value = if delta && !is_reset { value.since(&earlier) } else { value };
        Some(Reported { start_ns, value })
    }

    /// Forgets series that were not exported since the last call.
    pub fn end_round(&mut self) {
        let round = self.round;
        self.known.retain(|_, last| last.round == round);
        self.round += 1;
    }
}
