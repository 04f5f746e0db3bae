//! Why a GPU was idle.
//!
//! If the next work was launched after the gap began, or no more work follows, nothing was queued: the host caused the gap.
//! The part of it before the launch in which the host waited for a data loader counts as `data`, the rest as `host`. If the
//! launch began before the gap, work was queued and did not start, because of launch latency or because it waited for another
//! stream: the gap counts as `other`. If the trace lacks the launch, the gap is unexplained. Holistic Trace Analysis applies
//! the same test to each stream on its own, and has no data loader.
//!
//! Enters: the gaps of one GPU in a window, and what it did next. Leaves: their times by cause. Invariant: the causes
//! add up to the idle time.

use super::intervals::Intervals;
use super::trace::Op;
use serde::Serialize;

/// The idle time of a GPU by cause, nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Idle {
    /// Nothing was queued, and the host waited for a data loader; `None` if the trace has no call that launches work,
    /// or no annotation of PyTorch's data loader.
    pub data_ns: Option<u64>,
    /// Nothing was queued for another reason, or for the data loader if that is not known; `None` if the trace has no
    /// call that launches work.
    pub host_ns: Option<u64>,
    /// Work was queued and had not begun; `None` if the trace has no call that launches work.
    pub other_ns: Option<u64>,
    /// The trace lacks the call that launched the next work.
    pub unexplained_ns: u64,
}

/// What is known of one GPU and its host.
pub(super) struct Causes<'a> {
    /// What the GPU did, in the order in which it began.
    pub ops: &'a [&'a Op],
    /// When the host waited for a data loader.
    pub loading: &'a Intervals,
    /// Whether the trace has any call that launched work.
    pub has_launches: bool,
}

impl Causes<'_> {
    /// The idle time by cause.
    pub(super) fn split(&self, gaps: &[(i64, i64)]) -> Idle {
        let (mut data, mut host, mut other, mut unexplained) = (0, 0, 0, 0);
        for (begin, end) in gaps {
            let gap = end.abs_diff(*begin);
            match self.launch_of_next(*end) {
                Next::Unknown => unexplained += gap,
                Next::Launched(at) if at <= *begin => other += gap,
                next => {
                    let until = if let Next::Launched(at) = next { at.min(*end) } else { *end };
                    let loading = self.loading.within_ns(*begin, until);
                    data += loading;
                    host += gap - loading;
                }
            }
        }
        let known = |time: u64| self.has_launches.then_some(time);
        let data_ns = known(data).filter(|_| !self.loading.is_empty());
        Idle { data_ns, host_ns: known(host), other_ns: known(other), unexplained_ns: unexplained }
    }

    /// When the next work was launched. If several begin at once, the earliest launch counts.
    fn launch_of_next(&self, end: i64) -> Next {
        let next = self.ops.get(self.ops.partition_point(|op| op.begin_ns < end)..).unwrap_or_default();
        let Some(first) = next.first() else {
            return if self.has_launches { Next::Nothing } else { Next::Unknown };
        };
        let at_once = next.iter().take_while(|op| op.begin_ns == first.begin_ns);
        at_once.filter_map(|op| op.launch_ns).min().map_or(Next::Unknown, Next::Launched)
    }
}

/// What a GPU does after a gap.
enum Next {
    /// Nothing more, so nothing was queued.
    Nothing,
    /// Work that was launched then.
    Launched(i64),
    /// Work whose launch is not in the trace.
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::super::trace::Work;
    use super::*;

    fn op(launch_ns: Option<i64>, begin_ns: i64) -> Op {
        Op { begin_ns, end_ns: begin_ns + 10, launch_ns, device: 0, work: Work::Compute, name: None }
    }

    /// The causes of a gap from 100 to 200, the rest being idle too: data, host, other, unexplained.
    fn causes(ops: &[Op], loading: &[(i64, i64)]) -> (Option<u64>, Option<u64>, Option<u64>, u64) {
        let (ops, loading): (Vec<&Op>, _) = (ops.iter().collect(), Intervals::union(loading.iter().copied()));
        let has_launches = ops.iter().any(|op| op.launch_ns.is_some());
        let idle = Causes { ops: &ops, loading: &loading, has_launches }.split(&[(100, 200)]);
        (idle.data_ns, idle.host_ns, idle.other_ns, idle.unexplained_ns)
    }

    #[test]
    fn a_gap_is_the_hosts_if_the_next_launch_began_after_it() {
        assert_eq!(causes(&[op(Some(101), 200)], &[]), (None, Some(100), Some(0), 0));
        assert_eq!(causes(&[op(Some(100), 200)], &[]), (None, Some(0), Some(100), 0));
        // What is launched with the next work, and what comes later, makes no difference.
        assert_eq!(causes(&[op(Some(150), 200), op(Some(90), 200)], &[]), (None, Some(0), Some(100), 0));
        assert_eq!(causes(&[op(Some(150), 200), op(Some(90), 201)], &[]), (None, Some(100), Some(0), 0));
        // Nothing follows, so nothing was queued.
        assert_eq!(causes(&[op(Some(50), 60)], &[]), (None, Some(100), Some(0), 0));
        // The next work begins after the window.
        assert_eq!(causes(&[op(Some(300), 310)], &[]), (None, Some(100), Some(0), 0));
    }

    #[test]
    fn the_loader_has_the_time_until_the_launch_and_only_of_the_hosts_gaps() {
        let loading = [(50, 130), (140, 150), (170, 300)];
        assert_eq!(causes(&[op(Some(180), 200)], &loading), (Some(50), Some(50), Some(0), 0));
        assert_eq!(causes(&[op(Some(100), 200)], &loading), (Some(0), Some(0), Some(100), 0));
        assert_eq!(causes(&[op(Some(150), 200)], &[(500, 600)]), (Some(0), Some(100), Some(0), 0));
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        assert_eq!(causes(&[op(None, 200)], &[(0, 9)]), (None, None, None, 100));
        assert_eq!(causes(&[op(Some(1), 50), op(None, 200)], &[]), (None, Some(0), Some(0), 100));
    }
}
