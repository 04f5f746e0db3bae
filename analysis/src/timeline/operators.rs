//! How much time of the GPUs each operator of the host took: what it launched itself, not in operators that it called.
//!
//! Enters: which operator launched what ran. Leaves: kernels, copies and their time by operator. Invariants: at most [`MOST_OPERATORS`]
//! operators of the host are kept; if there are more, nothing is known rather than a part. Absent on purpose: traces of versions
//! of PyTorch that do not write which operator launched what.

use super::names::Names;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The most operators of the host: 64 MiB.
pub(super) const MOST_OPERATORS: usize = 4 << 20;

/// What an operator launched on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OperatorTime {
    /// The GPU's number in its process.
    pub device: u32,
    /// The operator, such as `aten::mm`, or the innermost NVTX range of the launch; `None` for what no operator launched, and for names for which there was no room.
    pub operator: Option<String>,
    /// How many kernels, copies and fills.
    pub count: u64,
    /// Their durations, nanoseconds; two that ran at once count twice.
    pub total_ns: u64,
}

/// The operators of the host, by the number that each shares with what it launched.
#[derive(Debug, Default)]
pub(super) struct Operators {
    known: Vec<(u64, Option<u32>)>,
    names: Names,
    is_full: bool,
}

impl Operators {
    pub(super) fn take(&mut self, number: u64, name: &str) {
        if self.known.len() >= MOST_OPERATORS {
            self.is_full = true;
            return;
        }
        self.known.push((number, self.names.intern_kernel(name)));
    }

    /// The time by GPU and operator, the longest first, of what ran: its GPU, its duration in nanoseconds, and the number of the operator
    /// that launched it, 0 if there is none. `None` if no operator launched anything.
    pub(super) fn times(mut self, ran: impl Iterator<Item = (u32, u64, u64)>) -> Option<Vec<OperatorTime>> {
        if self.is_full || self.known.is_empty() {
            return None;
        }
        self.known.sort_unstable();
        let name_of = |number: u64| {
            let at = self.known.partition_point(|(known, _)| *known < number);
            self.known.get(at).filter(|(known, _)| *known == number && number != 0)?.1
        };
        let mut sums: BTreeMap<(u32, Option<u32>), (u64, u64)> = BTreeMap::new();
        for (device, duration_ns, number) in ran {
            let (count, total_ns) = sums.entry((device, name_of(number))).or_default();
            (*count, *total_ns) = (*count + 1, total_ns.saturating_add(duration_ns));
        }
        let time = |((device, name), (count, total_ns)): ((u32, Option<u32>), (u64, u64))| OperatorTime {
            device,
            operator: name.and_then(|name| self.names.get(name)).map(str::to_owned),
            count,
            total_ns,
        };
        let mut times: Vec<OperatorTime> = sums.into_iter().map(time).collect();
        times.sort_by_key(|of| Reverse(of.total_ns));
        times.iter().any(|of| of.operator.is_some()).then_some(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_that_of_what_each_operator_launched_itself() {
        let mut operators = Operators::default();
        for (number, name) in [(3, "aten::mm"), (1, "aten::add"), (9, "aten::mm"), (4, "aten::view")] {
            operators.take(number, name);
        }
        let ran = [(0, 10, 3), (0, 4, 1), (1, 7, 9), (0, 30, 9), (0, 2, 77)];
        let times = operators.times(ran.into_iter()).expect("operators");
        let shown: Vec<_> = times.iter().map(|of| (of.device, of.operator.as_deref(), of.count, of.total_ns)).collect();
        let expected =
            [(0, Some("aten::mm"), 2, 40), (1, Some("aten::mm"), 1, 7), (0, Some("aten::add"), 1, 4), (0, None, 1, 2)];
        assert_eq!(shown, expected);
    }

    #[test]
    fn without_what_joins_them_nothing_is_known() {
        let with = |launcher: u64| {
            let mut operators = Operators::default();
            operators.take(3, "aten::mm");
            operators.times([(0, 10, launcher)].into_iter())
        };
        let none = Operators::default().times([(0, 1, 3)].into_iter());
        assert_eq!((with(0), with(4), none), (None, None, None));
        let full = Operators { is_full: true, known: vec![(3, Some(0))], ..Operators::default() };
        assert_eq!(full.times([(0, 10, 3)].into_iter()), None);
    }
}
