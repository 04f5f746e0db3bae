//! What each GPU did in each step.
//!
//! Enters: a trace. Leaves: by step and GPU, how long it computed, communicated, moved memory and was idle. Invariants:
//! busy and idle time add up to the window; time in which several streams were busy counts once; windows do not
//! overlap. Absent on purpose: the annotations that Kineto repeats for the GPU, which are no work.

use super::annotations::{self, AnnotationTime};
use super::bound::{Bound, Spent};
use super::collective::{Collective, Kind};
use super::delays::LaunchDelay;
use super::idle::{Causes, Idle};
use super::intervals::Intervals;
use super::memory;
use super::operators::OperatorTime;
use super::short::ShortKernels;
use super::steps::{self, Window};
use super::trace::{Op, Trace, Work};
use super::usage::{self, CollectiveUsage};
use serde::Serialize;
use std::collections::BTreeSet;

/// What the GPUs of one process did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Analysis {
    /// The rank of the process.
    pub rank: Option<u64>,
    /// How many ranks the job has.
    pub world_size: Option<u64>,
    /// Whether the file ended before its events did, so that all numbers are of a part.
    pub is_cut_short: bool,
    /// How many events could not be used.
    pub unusable_events: u64,
    /// By GPU, and then in the order of time.
    pub steps: Vec<Step>,
    /// How many collectives belong to no step: no step was in progress at the launch, or, if the trace lacks the
    /// launch, at the begin.
    pub collectives_outside_steps: u64,
    /// The kernels of collectives of unknown kind.
    pub unknown_collectives: BTreeSet<String>,
    /// How long after their launches the kernels of each GPU began, if any launch is known.
    pub launch_delays: Vec<LaunchDelay>,
    /// The time of the GPUs by the host's operators or NVTX ranges, the longest first; `None` if the trace does not say which launched what.
    pub operators: Option<Vec<OperatorTime>>,
    /// The time of the host and the GPUs by annotation or NVTX range, the longest first; `None` if there are too many of them.
    pub annotations: Option<Vec<AnnotationTime>>,
    /// The kernels that take about as long as launching them, by GPU.
    pub short_kernels: Vec<ShortKernels>,
    /// What bounds the job in all windows together; `None` if nothing dominates.
    pub bound: Option<Bound>,
}

/// What one GPU did in one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// The step; `None` if the trace has no steps, and this is all of it.
    pub step: Option<u64>,
    /// The GPU's number in its process.
    pub device: u32,
    /// When the window began, nanoseconds since 1970, if the trace has the time.
    pub begin_unix_ns: Option<i64>,
    /// How long the window was, nanoseconds.
    pub window_ns: u64,
    /// Time in which anything ran on the GPU.
    pub busy_ns: u64,
    /// Time in which nothing did.
    pub idle_ns: u64,
    /// The idle time by cause.
    pub idle: Idle,
    /// Time in which a kernel ran that is no collective.
    pub compute_ns: u64,
    /// Time in which a collective ran.
    pub communication_ns: u64,
    /// Time in which memory was copied or filled.
    pub memory_ns: u64,
    /// Time in which both a collective and another kernel ran.
    pub overlap_ns: u64,
    /// Which part of the communication that is, from 0 to 1; `None` if there was none.
    pub overlap: Option<f64>,
    /// The most that PyTorch's allocator had given out while the host was in the step, bytes, if the trace has that.
    pub allocated_peak_bytes: Option<u64>,
    /// The most that it held of the GPU.
    pub reserved_peak_bytes: Option<u64>,
    /// How many kernels the step launched, collectives included.
    pub kernels: u64,
    /// How many copies and fills.
    pub memory_operations: u64,
    /// How many kernels count as computation although their name looks like a collective of some other library.
    pub collective_lookalikes: u64,
    /// The collectives that the step launched, by kind.
    pub collectives: Vec<CollectiveUsage>,
}

impl Analysis {
    /// The same with that of another process, which used other GPUs.
    pub(crate) fn with(mut self, other: Self) -> Self {
        self.is_cut_short |= other.is_cut_short;
        self.unusable_events = self.unusable_events.saturating_add(other.unusable_events);
        self.collectives_outside_steps = self.collectives_outside_steps.saturating_add(other.collectives_outside_steps);
        self.steps.extend(other.steps);
        self.steps.sort_by_key(|step| step.device);
        self.unknown_collectives.extend(other.unknown_collectives);
        if let Some(times) = other.operators {
            let all = self.operators.get_or_insert_default();
            all.extend(times);
            all.sort_by_key(|one| std::cmp::Reverse(one.total_ns));
        }
        self.annotations =
            self.annotations.zip(other.annotations).map(|(own, others)| annotations::merged(own, others));
        self.short_kernels.extend(other.short_kernels);
        self.short_kernels.sort_by_key(|of| of.device);
        self.launch_delays.extend(other.launch_delays);
        self.launch_delays.sort_by_key(|delay| delay.device);
        self.bound = bound(&self.steps);
        self
    }
}

/// The trace has nothing that ran on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the trace has no kernel and no copy on any GPU{}", if *.is_cut_short { ", and ends before all its events" } else { "" })]
pub struct NothingOnGpu {
    /// Whether the file ends before all events of the trace.
    pub is_cut_short: bool,
}

/// What the GPUs did.
///
/// # Errors
/// The trace has nothing that ran on a GPU.
pub fn analyse(trace: &Trace) -> Result<Analysis, NothingOnGpu> {
    analyse_and_draw(trace, |_| ())
}

/// What the GPUs did, in numbers. Also passes each stretch of time to `draw`: GPU by GPU, and the stretches of one activity in
/// order of time.
///
/// # Errors
/// The trace has nothing that ran on a GPU.
pub fn analyse_and_draw(trace: &Trace, mut draw: impl FnMut(Stretch)) -> Result<Analysis, NothingOnGpu> {
    if trace.ops.is_empty() {
        return Err(NothingOnGpu { is_cut_short: trace.is_cut_short });
    }
    let mut analysis = Analysis {
        rank: trace.rank,
        world_size: trace.world_size,
        is_cut_short: trace.is_cut_short,
        unusable_events: trace.unusable,
        steps: Vec::new(),
        collectives_outside_steps: 0,
        unknown_collectives: BTreeSet::new(),
        launch_delays: Vec::new(),
        operators: trace.operators.clone(),
        annotations: trace.annotations.clone(),
        short_kernels: trace.short_kernels.clone(),
        bound: None,
    };
    for device in trace.devices() {
        let gpu = Gpu::new(trace, device);
        analysis.collectives_outside_steps += gpu.outside;
        analysis.launch_delays.extend(LaunchDelay::of(device, &gpu.ops));
        analysis.steps.extend(gpu.windows.iter().zip(&gpu.owned).map(|(window, owned)| gpu.step(window, owned)));
        gpu.draw(&mut draw);
    }
    for levels in memory::levels(trace) {
        for step in analysis.steps.iter_mut().filter(|step| step.device == levels.device) {
            let host = match step.step {
                Some(number) => trace.steps.iter().find(|(of, ..)| *of == number).map(|(_, begin, end)| (*begin, *end)),
                None => Some((i64::MIN, i64::MAX)),
            };
            let highest = host.map(|(begin_ns, end_ns)| levels.highest(begin_ns, end_ns));
            (step.allocated_peak_bytes, step.reserved_peak_bytes) = highest.unwrap_or_default();
        }
    }
    analysis.bound = bound(&analysis.steps);
    let unknown = trace.collectives.iter().filter(|collective| collective.kind == Kind::Unknown);
    let names = unknown.filter_map(|collective| trace.names.get(collective.name));
    analysis.unknown_collectives = names.map(str::to_owned).collect();
    Ok(analysis)
}

/// What bounds the job in these windows.
fn bound(steps: &[Step]) -> Option<Bound> {
    let spent = |step: &Step| Spent {
        window_ns: step.window_ns,
        busy_ns: step.busy_ns,
        compute_ns: step.compute_ns,
        communication_ns: step.communication_ns,
        overlap_ns: step.overlap_ns,
        data_ns: step.idle.data_ns,
        host_ns: step.idle.host_ns,
        unexplained_ns: step.idle.unexplained_ns,
    };
    steps.iter().map(spent).fold(Spent::default(), Spent::with).bound()
}

/// What a GPU did for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// It worked on a step, or had nothing to do in it.
    Step,
    /// Kernels ran.
    Compute,
    /// Collectives ran.
    Communication,
    /// Memory was copied or filled.
    Memory,
    /// Nothing was queued, and the host waited for a data loader.
    WaitsForData,
    /// Nothing was queued for another reason.
    WaitsForHost,
    /// Work was queued and had not begun, or what launched it is not known.
    WaitsOtherwise,
}

/// An interval in which a GPU did one thing. Times are nanoseconds on the clock of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// The GPU's number in its process.
    pub device: u32,
    /// What it did.
    pub activity: Activity,
    /// The step in whose window it began.
    pub step: Option<u64>,
    /// When it began.
    pub begin_ns: i64,
    /// When it ended.
    pub end_ns: i64,
}

/// Kernels follow each other within microseconds: what is closer than this is drawn as one, and idle time that is shorter is
/// not drawn.
const CLOSE_NS: u64 = 20_000;

/// One GPU of a trace.
struct Gpu<'a> {
    trace: &'a Trace,
    device: u32,
    ops: Vec<&'a Op>,
    windows: Vec<Window>,
    /// For each window.
    owned: Vec<Owned<'a>>,
    outside: u64,
    busy: Intervals,
    compute: Intervals,
    communication: Intervals,
    memory: Intervals,
    overlap: Intervals,
    loading: Intervals,
    has_launches: bool,
}

/// What a step launched.
#[derive(Default, Clone)]
struct Owned<'a> {
    kernels: u64,
    memory: u64,
    alike: u64,
    collectives: Vec<&'a Collective>,
}

impl<'a> Gpu<'a> {
    fn new(trace: &'a Trace, device: u32) -> Self {
        let ops: Vec<&Op> = trace.ops.iter().filter(|op| op.device == device).collect();
        let union = |is: fn(Work) -> bool| {
            Intervals::union(ops.iter().filter(|op| is(op.work)).map(|op| (op.begin_ns, op.end_ns)))
        };
        let compute = union(|work| matches!(work, Work::Compute | Work::Lookalike));
        let communication = union(|work| work == Work::Communication);
        let windows = steps::windows(trace, &ops);
        let mut gpu = Self {
            trace,
            device,
            owned: vec![Owned::default(); windows.len()],
            outside: 0,
            busy: union(|_| true),
            overlap: compute.and(&communication),
            memory: union(|work| work == Work::Memory),
            loading: Intervals::union(trace.loading.iter().copied()),
            has_launches: trace.ops.iter().any(|op| op.launch_ns.is_some()),
            ops,
            windows,
            compute,
            communication,
        };
        gpu.count();
        gpu
    }

    /// Counts what each step launched.
    fn count(&mut self) {
        for op in &self.ops {
            let owner = steps::owner(self.trace, &self.windows, op.launch_ns, op.begin_ns);
            let Some(owned) = owner.and_then(|owner| self.owned.get_mut(owner)) else { continue };
            match op.work {
                Work::Memory => owned.memory += 1,
                _ => owned.kernels += 1,
            }
            owned.alike += u64::from(op.work == Work::Lookalike);
        }
        for collective in self.trace.collectives.iter().filter(|collective| collective.device == self.device) {
            let owner = steps::owner(self.trace, &self.windows, collective.launch_ns, collective.begin_ns);
            match owner.and_then(|owner| self.owned.get_mut(owner)) {
                Some(owned) => owned.collectives.push(collective),
                None => self.outside += 1,
            }
        }
    }

    fn causes(&self) -> Causes<'_> {
        Causes { ops: &self.ops, loading: &self.loading, has_launches: self.has_launches }
    }

    fn draw(&self, draw: &mut impl FnMut(Stretch)) {
        let mut one = |activity, (begin_ns, end_ns), step| {
            draw(Stretch { device: self.device, activity, step, begin_ns, end_ns });
        };
        for Window { step, begin_ns, end_ns } in &self.windows {
            one(Activity::Step, (*begin_ns, *end_ns), *step);
        }
        let step_at = |at_ns: i64| {
            let last = self.windows.partition_point(|window| window.begin_ns <= at_ns).checked_sub(1)?;
            self.windows.get(last).filter(|window| at_ns < window.end_ns)?.step
        };
        for (times, activity) in [
            (&self.compute, Activity::Compute),
            (&self.communication, Activity::Communication),
            (&self.memory, Activity::Memory),
        ] {
            times.joined(CLOSE_NS).into_iter().for_each(|(begin, end)| one(activity, (begin, end), step_at(begin)));
        }
        let causes = self.causes();
        for window in &self.windows {
            let gaps = self.busy.gaps(window.begin_ns, window.end_ns);
            for gap in gaps.into_iter().filter(|(begin, end)| end.abs_diff(*begin) >= CLOSE_NS) {
                let Idle { data_ns, host_ns, other_ns, unexplained_ns } = causes.split(&[gap]);
                let activity = [
                    (Activity::WaitsOtherwise, other_ns.unwrap_or(0).saturating_add(unexplained_ns)),
                    (Activity::WaitsForHost, host_ns.unwrap_or(0)),
                    (Activity::WaitsForData, data_ns.unwrap_or(0)),
                ];
                let longest = activity.into_iter().max_by_key(|(_, ns)| *ns);
                one(longest.map_or(Activity::WaitsOtherwise, |(activity, _)| activity), gap, window.step);
            }
        }
    }

    fn step(&self, window: &Window, owned: &Owned) -> Step {
        let (begin, end) = (window.begin_ns, window.end_ns);
        let causes = self.causes();
        let window_ns = end.abs_diff(begin);
        let busy_ns = self.busy.within_ns(begin, end);
        let communication_ns = self.communication.within_ns(begin, end);
        let overlap_ns = self.overlap.within_ns(begin, end);
        Step {
            step: window.step,
            device: self.device,
            begin_unix_ns: self.trace.clock_ns().and_then(|base| base.checked_add(begin)),
            window_ns,
            busy_ns,
            idle_ns: window_ns - busy_ns,
            idle: causes.split(&self.busy.gaps(begin, end)),
            compute_ns: self.compute.within_ns(begin, end),
            communication_ns,
            memory_ns: self.memory.within_ns(begin, end),
            overlap_ns,
            allocated_peak_bytes: None,
            reserved_peak_bytes: None,
            overlap: (communication_ns > 0).then(|| overlap_ns as f64 / communication_ns as f64),
            kernels: owned.kernels,
            memory_operations: owned.memory,
            collective_lookalikes: owned.alike,
            collectives: usage::by_kind(owned.collectives.iter().copied()),
        }
    }
}
