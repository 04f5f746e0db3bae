//! How long collectives took and how fast they were, by kind.
//!
//! Enters: collectives of one rank. Leaves: a line for each kind, in the order of [`Kind`]. Invariant: a
//! bandwidth includes only collectives whose message size is known.

use super::collective::{Collective, Kind};
use serde::Serialize;

/// The collectives of one kind. Bandwidths count all of a kernel's time, in which it may have waited for other ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CollectiveUsage {
    /// The kind.
    pub kind: Kind,
    /// How many there were.
    pub count: u64,
    /// The durations of their kernels, nanoseconds; two that ran at once count twice.
    pub total_ns: u64,
    /// How many of them have a known message.
    pub sized: u64,
    /// The messages of those, bytes; `None` if there is none.
    pub bytes: Option<u64>,
    /// Their bytes divided by their time, bytes a second.
    pub algorithm_bytes_per_second: Option<f64>,
    /// The same times the factor of nccl-tests, bytes a second, for those whose number of ranks is known too.
    pub bus_bytes_per_second: Option<f64>,
}

/// Bytes, and the time that they took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rate {
    pub count: u64,
    pub bytes: f64,
    pub ns: u64,
}

impl Rate {
    pub(super) fn add(&mut self, bytes: f64, ns: u64) {
        *self = Self { count: self.count + 1, bytes: self.bytes + bytes, ns: self.ns.saturating_add(ns) };
    }

    /// Bytes a second, if there was any time.
    pub(super) fn per_second(self) -> Option<f64> {
        (self.ns > 0).then(|| self.bytes * 1e9 / self.ns as f64)
    }
}

impl Collective {
    /// How long its kernel ran, nanoseconds.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.abs_diff(self.begin_ns)
    }

    /// The message times the bus factor of nccl-tests, bytes; `None` if one of them is not known.
    pub(super) fn bus_bytes(&self) -> Option<f64> {
        let factor = self.group_size.and_then(|ranks| self.kind.bus_factor(ranks));
        self.bytes.zip(factor).map(|(bytes, factor)| bytes as f64 * factor)
    }
}

/// The collectives by kind.
pub(super) fn by_kind<'a>(collectives: impl IntoIterator<Item = &'a Collective>) -> Vec<CollectiveUsage> {
    let mut kinds = std::collections::BTreeMap::<Kind, Vec<&Collective>>::new();
    for collective in collectives {
        kinds.entry(collective.kind).or_default().push(collective);
    }
    kinds.into_iter().map(|(kind, all)| of_kind(kind, &all)).collect()
}

fn of_kind(kind: Kind, all: &[&Collective]) -> CollectiveUsage {
    let (mut total_ns, mut bytes, mut message, mut bus) = (0_u64, 0_u64, Rate::default(), Rate::default());
    for collective in all {
        total_ns = total_ns.saturating_add(collective.duration_ns());
        if let Some(size) = collective.bytes {
            bytes = bytes.saturating_add(size);
            message.add(size as f64, collective.duration_ns());
        }
        if let Some(size) = collective.bus_bytes() {
            bus.add(size, collective.duration_ns());
        }
    }
    CollectiveUsage {
        kind,
        count: all.len() as u64,
        total_ns,
        sized: message.count,
        bytes: (message.count > 0).then_some(bytes),
        // A barrier takes its time for synchronization, not for its message.
        algorithm_bytes_per_second: message.per_second().filter(|_| kind != Kind::Barrier),
        bus_bytes_per_second: bus.per_second(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collective(kind: Kind, ns: i64, bytes: Option<u64>, group_size: Option<u64>) -> Collective {
        let (begin_ns, end_ns, launch_ns, device) = (5, 5 + ns, None, 0);
        Collective {
            kind,
            begin_ns,
            end_ns,
            launch_ns,
            device,
            bytes,
            group_size,
            sequence: None,
            group: None,
            name: 0,
        }
    }

    #[test]
    fn a_bandwidth_is_of_those_whose_message_is_known() {
        let of = by_kind(&[
            collective(Kind::Barrier, 7, Some(1), Some(4)),
            collective(Kind::AllReduce, 100, Some(1_000), Some(4)),
            collective(Kind::AllReduce, 300, Some(3_000), None),
            collective(Kind::AllReduce, 600, None, Some(4)),
            collective(Kind::Unknown, 9, None, None),
        ]);
        let [reduce, barrier, unknown] = &of[..] else { panic!("{of:?}") };
        assert_eq!((reduce.kind, reduce.count, reduce.total_ns), (Kind::AllReduce, 3, 1_000));
        assert_eq!((reduce.sized, reduce.bytes), (2, Some(4_000)));
        assert_eq!((reduce.algorithm_bytes_per_second, reduce.bus_bytes_per_second), (Some(1e10), Some(1.5e10)));
        assert_eq!((barrier.algorithm_bytes_per_second, barrier.bus_bytes_per_second), (None, None));
        assert_eq!((unknown.kind, unknown.sized, unknown.bytes), (Kind::Unknown, 0, None));
    }

    #[test]
    fn no_time_gives_no_bandwidth() {
        let of = by_kind(&[collective(Kind::AllGather, 0, Some(8), Some(2))]);
        assert_eq!((of[0].bytes, of[0].algorithm_bytes_per_second), (Some(8), None));
    }
}
