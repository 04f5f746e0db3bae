//! The GPU's part of each step.
//!
//! The host runs ahead of the GPU, so what a GPU does while the host is in a step may belong to the step before. A
//! step's window therefore ends when the last work that it launched has ended, or when the host left it if that is
//! later, and begins where the window before ended, or when the host entered it if that is later. Without steps, one
//! window lasts from the first work to the end of the last, as in Holistic Trace Analysis.
//!
//! Enters: a trace, and what one GPU did. Leaves: windows in order. Invariant: no two windows of a GPU overlap, so that
//! their times can be added.

use super::trace::{Op, Trace};

/// The time of one GPU that belongs to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    /// The step, unless the trace has none.
    pub step: Option<u64>,
    pub begin_ns: i64,
    pub end_ns: i64,
}

/// The windows of a GPU, one for each of the trace's `steps`; `ops` are in the order in which they began.
pub(super) fn windows(trace: &Trace, ops: &[&Op]) -> Vec<Window> {
    if trace.steps.is_empty() {
        let begin_ns = ops.first().map(|op| op.begin_ns);
        let end_ns = ops.iter().map(|op| op.end_ns).max();
        return begin_ns
            .zip(end_ns)
            .map(|(begin_ns, end_ns)| Window { step: None, begin_ns, end_ns })
            .into_iter()
            .collect();
    }
    let mut ends: Vec<i64> = trace.steps.iter().map(|(_, _, end_ns)| *end_ns).collect();
    for op in ops {
        let step = op.launch_ns.and_then(|launch_ns| entered(trace, launch_ns));
        if let Some(end_ns) = step.and_then(|step| ends.get_mut(step)) {
            *end_ns = op.end_ns.max(*end_ns);
        }
    }
    let mut before = i64::MIN;
    let mut windows = Vec::with_capacity(ends.len());
    for ((step, begin_ns, _), end_ns) in trace.steps.iter().zip(ends) {
        let begin_ns = before.max(*begin_ns);
        before = begin_ns.max(end_ns);
        windows.push(Window { step: Some(*step), begin_ns, end_ns: before });
    }
    windows
}

/// Which of the trace's `steps` the host was in.
pub(super) fn entered(trace: &Trace, at_ns: i64) -> Option<usize> {
    let before = trace.steps.partition_point(|(_, begin_ns, _)| *begin_ns <= at_ns);
    let last = before.checked_sub(1)?;
    trace.steps.get(last).filter(|(_, _, end_ns)| at_ns < *end_ns).map(|_| last)
}

/// Which window work belongs to: that of the step that launched it, or that in which it began if the trace lacks the
/// call.
pub(super) fn owner(trace: &Trace, windows: &[Window], launch_ns: Option<i64>, begin_ns: i64) -> Option<usize> {
    match launch_ns {
        Some(launch_ns) if !trace.steps.is_empty() => entered(trace, launch_ns),
        _ if trace.steps.is_empty() => Some(0),
        _ => {
            let last = windows.partition_point(|window| window.begin_ns <= begin_ns).checked_sub(1)?;
            windows.get(last).filter(|window| begin_ns < window.end_ns).map(|_| last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::trace::Work;
    use super::*;

    fn op(launch_ns: Option<i64>, begin_ns: i64, end_ns: i64) -> Op {
        Op { begin_ns, end_ns, launch_ns, device: 0, work: Work::Compute, name: None }
    }

    fn times(steps: &[(u64, i64, i64)], ops: &[Op]) -> Vec<(i64, i64)> {
        let trace = Trace { steps: steps.to_vec(), ..Trace::default() };
        let windows = windows(&trace, &ops.iter().collect::<Vec<_>>());
        windows.iter().map(|window| (window.begin_ns, window.end_ns)).collect()
    }

    #[test]
    fn a_window_lasts_as_long_as_the_work_that_its_step_launched() {
        let steps = [(1, 0, 10), (2, 12, 20), (3, 20, 30), (4, 60, 70)];
        let ops = [op(Some(1), 2, 15), op(Some(8), 15, 25), op(Some(13), 25, 50), op(Some(11), 55, 58)];
        // Step 3 launched nothing, and was over for the host before the work of step 2 was.
        assert_eq!(times(&steps, &ops), [(0, 25), (25, 50), (50, 50), (60, 70)]);
    }

    #[test]
    fn without_steps_there_is_one_window_from_the_first_work_to_the_end_of_the_last() {
        assert_eq!(times(&[], &[op(Some(1), 2, 90), op(None, 15, 25)]), [(2, 90)]);
        assert_eq!(times(&[], &[]), []);
    }

    #[test]
    fn work_belongs_to_the_step_that_launched_it_if_that_is_known() {
        let trace = Trace { steps: vec![(1, 0, 10), (2, 12, 20)], ..Trace::default() };
        let of = |step, begin_ns, end_ns| Window { step, begin_ns, end_ns };
        let windows = [of(Some(1), 0, 16), of(Some(2), 16, 20)];
        let owners = [(Some(3), 17), (Some(10), 13), (Some(12), 13), (None, 13), (None, 16), (None, 20), (None, -1)]
            .map(|(launch_ns, begin_ns)| owner(&trace, &windows, launch_ns, begin_ns));
        assert_eq!(owners, [Some(0), None, Some(1), Some(0), Some(1), None, None]);
    }
}
