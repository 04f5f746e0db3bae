//! How long after its launch a kernel began.
//!
//! Enters: what one GPU did. Leaves: the median and the highest percent of the delays. A long delay is not bad: the host was ahead, and the
//! kernel waited for those before it. A delay of some microseconds beside much idle time for the host says that each launch is awaited.

use super::trace::{Op, Work};
use serde::Serialize;

/// From the begin of the call that launched a kernel to the kernel's begin, of all kernels of one GPU whose launch is known; of a CUDA
/// graph, of its first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LaunchDelay {
    /// The GPU's number in its process.
    pub device: u32,
    /// How many kernels these are.
    pub kernels: u64,
    /// A half of them began after at most this, nanoseconds.
    pub median_ns: u64,
    /// 99 % of them began after at most this, nanoseconds.
    pub p99_ns: u64,
}

impl LaunchDelay {
    /// The delays of a GPU; `None` if no launch of a kernel is known. A kernel that began before its launch, by the clocks of the trace, does
    /// not count.
    pub(super) fn of(device: u32, ops: &[&Op]) -> Option<Self> {
        let kernels = ops.iter().filter(|op| op.work != Work::Memory);
        let mut begun: Vec<(i64, i64)> = kernels.filter_map(|op| Some((op.launch_ns?, op.begin_ns))).collect();
        // One call launches all kernels of a CUDA graph: those after the first wait for each other, and not for the launch.
        begun.sort_unstable();
        begun.dedup_by_key(|(launch_ns, _)| *launch_ns);
        let delay = |(launch_ns, begin_ns): (i64, i64)| u64::try_from(begin_ns.checked_sub(launch_ns)?).ok();
        let mut delays: Vec<u64> = begun.into_iter().filter_map(delay).collect();
        let count = delays.len();
        let (half, most) = (position(count, 50)?, position(count, 99)?);
        let p99_ns = *delays.select_nth_unstable(most).1;
        let median_ns = *delays.select_nth_unstable(half).1;
        Some(Self { device, kernels: count as u64, median_ns, p99_ns })
    }
}

/// The position of the first of `count` values in order that this percentage of them does not exceed; `None` if there is none.
fn position(count: usize, percent: usize) -> Option<usize> {
    (count.saturating_mul(percent).div_ceil(100)).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(begin_ns: i64, launch_ns: Option<i64>, work: Work) -> Op {
        Op { begin_ns, end_ns: begin_ns, launch_ns, device: 3, work, name: None }
    }

    fn delay(ops: &[Op]) -> Option<(u64, u64, u64)> {
        let of = LaunchDelay::of(3, &ops.iter().collect::<Vec<_>>())?;
        Some((of.kernels, of.median_ns, of.p99_ns))
    }

    #[test]
    fn delays_are_of_kernels_whose_launch_is_known() {
        let mut ops: Vec<Op> = (1..=200).map(|nth| op(1_000 * nth + nth, Some(1_000 * nth), Work::Compute)).collect();
        assert_eq!(delay(&ops), Some((200, 100, 198)));
        ops.extend([op(9_000, Some(0), Work::Memory), op(9_000, None, Work::Compute), op(5, Some(6), Work::Compute)]);
        assert_eq!(delay(&ops), Some((200, 100, 198)));
        assert_eq!(delay(&ops[..1]), Some((1, 1, 1)));
        // The third and the fourth kernel of graphs.
        ops.extend([op(900_000, Some(3_000), Work::Compute), op(900_000, Some(4_000), Work::Communication)]);
        assert_eq!(delay(&ops), Some((200, 100, 198)));
        assert_eq!((delay(&ops[200..203]), delay(&[op(i64::MAX, Some(i64::MIN), Work::Compute)])), (None, None));
    }
}
