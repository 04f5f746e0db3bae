//! What bounds a job: the one cause that takes most of the time in which its GPUs do not compute.
//!
//! The time of all windows is divided: computation; collectives with no other kernel beside; copies and fills with no kernel beside; idle
//! time for data and for the host. A cause bounds the job if it takes at least a fifth of the time, and one and a half times as much as each
//! other; computation, if it takes four fifths. Otherwise nothing does, and none is named.
//!
//! Enters: times. Leaves: a cause with its share, or none. Invariant: idle time whose cause is not known counts against every answer.

use serde::Serialize;

/// Least shares of the time, and by how much a cause must exceed the others.
const LEAST_COMPUTED: f64 = 0.8;
const LEAST_CAUSE: f64 = 0.2;
const DOMINATES: f64 = 1.5;

/// A cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// The GPUs had no work while the host waited for data.
    Data,
    /// The GPUs had no work for another reason.
    Host,
    /// Collectives ran with no other kernel beside.
    Communication,
    /// Memory was copied or filled with no kernel beside.
    Copies,
    /// Kernels ran that are no collectives.
    Computation,
}

/// What bounds a job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bound {
    /// The cause.
    pub by: BoundBy,
    /// The part of the time of all windows that it takes, from 0 to 1.
    pub share: f64,
}

/// The time of windows by what it went to, nanoseconds. `None` is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spent {
    pub window_ns: u64,
    pub busy_ns: u64,
    pub compute_ns: u64,
    pub communication_ns: u64,
    pub overlap_ns: u64,
    pub data_ns: Option<u64>,
    pub host_ns: Option<u64>,
    pub unexplained_ns: u64,
}

impl Spent {
    /// The sum of both.
    pub(super) fn with(self, other: Self) -> Self {
        let sum = |own: Option<u64>, other: Option<u64>| match (own, other) {
            (Some(own), Some(other)) => Some(own.saturating_add(other)),
            (one, other) => one.or(other),
        };
        Self {
            window_ns: self.window_ns.saturating_add(other.window_ns),
            busy_ns: self.busy_ns.saturating_add(other.busy_ns),
            compute_ns: self.compute_ns.saturating_add(other.compute_ns),
            communication_ns: self.communication_ns.saturating_add(other.communication_ns),
            overlap_ns: self.overlap_ns.saturating_add(other.overlap_ns),
            data_ns: sum(self.data_ns, other.data_ns),
            host_ns: sum(self.host_ns, other.host_ns),
            unexplained_ns: self.unexplained_ns.saturating_add(other.unexplained_ns),
        }
    }

    /// What bounds the job.
    #[allow(clippy::cast_precision_loss, reason = "shares")]
    pub(super) fn bound(self) -> Option<Bound> {
        let share = |ns: u64| ns as f64 / self.window_ns as f64;
        if self.window_ns == 0 {
            return None;
        }
        let alone_ns = self.communication_ns.saturating_sub(self.overlap_ns);
        let computed = share(self.compute_ns);
        if computed >= LEAST_COMPUTED {
            return Some(Bound { by: BoundBy::Computation, share: computed });
        }
        let causes = [
            (BoundBy::Data, self.data_ns.unwrap_or(0)),
            (BoundBy::Host, self.host_ns.unwrap_or(0)),
            (BoundBy::Communication, alone_ns),
            (BoundBy::Copies, self.busy_ns.saturating_sub(self.compute_ns).saturating_sub(alone_ns)),
        ];
        let (by, ns) = causes.into_iter().max_by_key(|(_, ns)| *ns)?;
        let others = causes.into_iter().filter(|(other, _)| *other != by).map(|(_, ns)| ns);
        let next_ns = others.chain([self.unexplained_ns]).max()?;
        let dominates = share(ns) >= LEAST_CAUSE && share(ns) >= DOMINATES * share(next_ns);
        dominates.then(|| Bound { by, share: share(ns) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What bounds a window of 100 ns: busy, compute, communication, overlap, then idle for data, the host, and unexplained.
    fn bound(
        [busy_ns, compute_ns, communication_ns, overlap_ns]: [u64; 4],
        idle: (Option<u64>, Option<u64>, u64),
    ) -> Option<(BoundBy, f64)> {
        let (data_ns, host_ns, unexplained_ns) = idle;
        let spent = Spent {
            window_ns: 100,
            busy_ns,
            compute_ns,
            communication_ns,
            overlap_ns,
            data_ns,
            host_ns,
            unexplained_ns,
        };
        spent.bound().map(|bound| (bound.by, bound.share))
    }

    #[test]
    fn a_cause_is_named_if_it_dominates() {
        assert_eq!(bound([60, 60, 0, 0], (Some(33), Some(7), 0)), Some((BoundBy::Data, 0.33)));
        assert_eq!(bound([40, 40, 0, 0], (None, Some(55), 0)), Some((BoundBy::Host, 0.55)));
        assert_eq!(bound([95, 50, 60, 15], (Some(0), Some(5), 0)), Some((BoundBy::Communication, 0.45)));
        assert_eq!(bound([90, 50, 10, 10], (None, None, 10)), Some((BoundBy::Copies, 0.4)));
        assert_eq!(bound([95, 90, 60, 55], (Some(5), Some(0), 0)), Some((BoundBy::Computation, 0.9)));
    }

    #[test]
    fn none_is_named_if_two_are_alike_or_all_are_small_or_the_cause_is_not_known() {
        assert_eq!(bound([50, 50, 0, 0], (Some(28), Some(22), 0)), None);
        assert_eq!(bound([81, 70, 8, 0], (Some(19), Some(0), 0)), None);
        assert_eq!(bound([40, 40, 0, 0], (None, Some(30), 30)), None);
        assert_eq!(bound([0; 4], (None, None, 100)), None);
        assert_eq!(Spent::default().bound(), None);
    }

    #[test]
    fn what_is_not_known_of_one_window_is_that_of_the_others() {
        let of = |data_ns| Spent { window_ns: 10, data_ns, ..Spent::default() };
        assert_eq!(of(None).with(of(Some(3))).with(of(Some(4))).data_ns, Some(7));
        assert_eq!(of(None).with(of(None)).data_ns, None);
    }
}
