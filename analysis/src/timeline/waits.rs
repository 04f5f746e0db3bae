//! Which collectives of several ranks are the same one.
//!
//! Collectives are matched by process group and PyTorch's sequence number. Without these, they are matched by their order
//! within step, group and kind, but only if all ranks have equally many of them with equal message sizes. Otherwise the trace of
//! one rank may have begun later, and its first collective would be matched with an earlier one of another rank.
//!
//! Enters: the traces of one job. Leaves: collectives with a part for each rank. Invariants: every part is of another
//! rank; what cannot be matched for certain is counted, and left out.

use super::collective::{Collective, Kind};
use super::steps;
use super::trace::Trace;
use std::collections::BTreeMap;

/// A collective on one rank. Its times are of the rank's own clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    /// The position of the rank's trace.
    pub trace: usize,
    pub begin_ns: i64,
    pub end_ns: i64,
    pub collective: &'a Collective,
}

/// What was found of several traces.
#[derive(Debug, Default)]
pub(super) struct Matches<'a> {
    /// In no order of time.
    pub matched: Vec<Vec<Part<'a>>>,
    /// How many of them by sequence number.
    pub by_sequence: u64,
    /// How many collectives of single ranks have no certain counterpart on all others.
    pub unmatched: u64,
    /// How many do not wait for all ranks, or are of unknown kind.
    pub not_compared: u64,
}

/// The step, group and kind within which collectives are matched by their order.
type Series<'a> = (Option<u64>, Option<&'a str>, Kind);

/// What the parts of one collective share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    Sequence(&'a str, Kind, u64),
    Order(Series<'a>, usize),
}

/// Matches the collectives of several traces.
pub(super) fn matches<'a>(traces: &[&'a Trace]) -> Matches<'a> {
    let (mut found, mut matches) = (BTreeMap::<Key, Vec<Part>>::new(), Matches::default());
    let mut lengths = BTreeMap::<Series, Vec<usize>>::new();
    for (at, trace) in traces.iter().enumerate() {
        let mut series = BTreeMap::<Series, usize>::new();
        for collective in &trace.collectives {
            if !collective.kind.waits_for_all() {
                matches.not_compared += 1;
                continue;
            }
            let group = collective.group.and_then(|group| trace.names.get(group));
            let key = match (group, collective.sequence) {
                (Some(group), Some(sequence)) => Key::Sequence(group, collective.kind, sequence),
                _ => {
                    let of = (step(trace, collective), group, collective.kind);
                    let nth = series.entry(of).or_default();
                    *nth += 1;
                    Key::Order(of, *nth)
                }
            };
            add(found.entry(key).or_default(), at, collective);
        }
        series.into_iter().for_each(|(of, length)| lengths.entry(of).or_default().push(length));
    }
    for (key, parts) in found {
        let is_certain = match key {
            Key::Sequence(..) => true,
            Key::Order(series, _) => {
                let lengths = lengths.get(&series).map(Vec::as_slice).unwrap_or_default();
                lengths.iter().all(|length| Some(length) == lengths.first()) && have_same_message(&parts)
            }
        };
        if is_certain && is_complete(&parts, traces.len()) {
            matches.by_sequence += u64::from(matches!(key, Key::Sequence(..)));
            matches.matched.push(parts);
        } else {
            matches.unmatched += parts.len() as u64;
        }
    }
    matches
}

fn step(trace: &Trace, collective: &Collective) -> Option<u64> {
    let at = steps::owner(trace, &[], collective.launch_ns, collective.begin_ns)?;
    trace.steps.get(at).map(|(step, _, _)| *step)
}

/// Adds a part, or makes the rank's own longer: one collective may be several kernels.
fn add<'a>(parts: &mut Vec<Part<'a>>, trace: usize, collective: &'a Collective) {
    match parts.last_mut() {
        Some(part) if part.trace == trace => part.end_ns = part.end_ns.max(collective.end_ns),
        _ => parts.push(Part { trace, begin_ns: collective.begin_ns, end_ns: collective.end_ns, collective }),
    }
}

fn have_same_message(parts: &[Part]) -> bool {
    let messages = || parts.iter().map(|part| part.collective.bytes);
    // Ranks may exchange different amounts in an all-to-all.
    parts.iter().any(|part| part.collective.kind == Kind::AllToAll)
        || messages().all(|bytes| Some(bytes) == messages().next())
}

/// Whether all ranks of the group have a part. Otherwise the last rank may be one that has no trace.
fn is_complete(parts: &[Part], traces: usize) -> bool {
    let size = parts.iter().find_map(|part| part.collective.group_size);
    parts.len() > 1 && parts.len() as u64 == size.unwrap_or(traces as u64)
}
