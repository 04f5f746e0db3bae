//! Builds a trace from what a file has, and joins its parts at the end.
//!
//! Enters: what ran on GPUs, calls, steps and what is known of collectives, in any order. Leaves: a [`Trace`]. Invariants: at most
//! [`MOST_EVENTS`] events and `MOST_NAME_BYTES` bytes of names of groups and collectives, and again of kernels, are kept; a launch is
//! joined with what ran by their correlation, a number that the file gives both. Absent on purpose: formats of files.

use super::MOST_EVENTS;
use super::annotations::{Annotations, Launched};
use super::collective::{self, Collective, Kind};
use super::operators::Operators;
use super::recurring::short_kernels;
use super::steps;
use super::trace::{MemoryEvent, Op, Trace, Work};
use std::collections::{HashMap, HashSet};

/// A collective, or its parameters, counts as this number of events of [`MOST_EVENTS`].
const COLLECTIVE: usize = 4;

/// Announcements before a launch that are looked at: few are in progress at one time.
const MOST_AT_ONCE: usize = 64;

/// A trace, and what is needed until it is complete.
#[derive(Default)]
pub(crate) struct Builder {
    /// What is known so far. What ran has no launches yet, and is in the order of the file.
    pub trace: Trace,
    kept: usize,
    /// The correlation of each of the trace's `ops`; 0 if it has none.
    correlations: Vec<u64>,
    /// The operator that launched each of the trace's `ops`; 0 if that is not known.
    launchers: Vec<u64>,
    /// The stream of each of the trace's `ops`, if it is known.
    streams: Vec<Option<u32>>,
    operators: Operators,
    annotations: Annotations,
    /// For each of its `collectives`: its correlation, and the operator that launched it.
    linked: Vec<(u64, Option<u64>)>,
    /// When the calls began, by correlation, and on which thread.
    calls: Vec<(u64, i64, i64)>,
    parameters: HashMap<u64, Parameters>,
    /// When the host launched collectives of a kind: begin and end.
    announced: Vec<(i64, i64, Kind)>,
}

/// Where and when something ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuRun {
    /// The GPU's number in its process.
    pub device: u32,
    /// When it began, nanoseconds.
    pub begin_ns: i64,
    /// When it ended, nanoseconds.
    pub end_ns: i64,
    /// What it shares with the call that launched it; 0 if it has nothing.
    pub correlation: u64,
    /// The number of the host's operator that launched it, if the file says so.
    pub operator: Option<u64>,
    /// The number of the stream on which it ran, if the file says so.
    pub stream: Option<u32>,
}

/// How something was launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    /// When the call began, nanoseconds.
    pub at_ns: i64,
    /// The number of the operator or range in which it began; 0 if that is not known.
    pub operator: u64,
    /// What distinguishes the thread from others; 0 if it is not known.
    pub thread: i64,
}

/// What a kernel's name says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamedKernel {
    name: Option<u32>,
    work: Work,
    /// The kind that a collective's name says, and the number of that name.
    collective: Option<(Kind, u32)>,
}

/// What the host wrote about a collective.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Parameters {
    /// Its kind, if it is a known one.
    pub kind: Option<Kind>,
    /// Its message, bytes.
    pub bytes: Option<u64>,
    /// How many ranks take part.
    pub group_size: Option<u64>,
    /// The number of its group's name.
    pub group: Option<u32>,
    /// Its number within the group.
    pub sequence: Option<u64>,
}

/// There is no room for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

impl Builder {
    /// One in which this number of events have been taken.
    #[cfg(test)]
    pub(crate) fn with(kept: usize) -> Self {
        Self { kept, ..Self::default() }
    }

    fn make_room(&mut self, events: usize) -> Result<(), Full> {
        self.kept += events;
        if self.kept > MOST_EVENTS { Err(Full) } else { Ok(()) }
    }

    /// What the name of a kernel says. `is_collective` if the file says so otherwise.
    ///
    /// # Errors
    /// There is no room for the name of a collective.
    pub(crate) fn kernel(&mut self, name: &str, is_collective: bool) -> Result<NamedKernel, Full> {
        let own = self.trace.op_names.intern_kernel(name);
        if !is_collective && !collective::is_library_kernel(name) {
            let work = if collective::looks_like_one(name) { Work::Lookalike } else { Work::Compute };
            return Ok(NamedKernel { name: own, work, collective: None });
        }
        let bare = name.split('(').next().unwrap_or_default();
        let number = self.trace.names.intern(bare).ok_or(Full)?;
        Ok(NamedKernel { name: own, work: Work::Communication, collective: Some((Kind::of(bare), number)) })
    }

    /// Takes a kernel.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_kernel(&mut self, run: GpuRun, kernel: NamedKernel, known: Parameters) -> Result<(), Full> {
        self.take_op(run, kernel.work, kernel.name)?;
        let Some((kind, name)) = kernel.collective else { return Ok(()) };
        self.make_room(COLLECTIVE)?;
        self.trace.collectives.push(Collective {
            kind: known.kind.unwrap_or(kind),
            begin_ns: run.begin_ns,
            end_ns: run.end_ns,
            launch_ns: None,
            device: run.device,
            bytes: known.bytes,
            group_size: known.group_size,
            sequence: known.sequence,
            group: known.group,
            name,
        });
        self.linked.push((run.correlation, run.operator));
        Ok(())
    }

    /// Takes a copy or a fill of memory.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_copy(&mut self, run: GpuRun, name: &str) -> Result<(), Full> {
        let name = self.trace.op_names.intern_kernel(name);
        self.take_op(run, Work::Memory, name)
    }

    fn take_op(&mut self, run: GpuRun, work: Work, name: Option<u32>) -> Result<(), Full> {
        self.make_room(1)?;
        let GpuRun { device, begin_ns, end_ns, correlation, operator, stream } = run;
        self.trace.ops.push(Op { begin_ns, end_ns, launch_ns: None, device, work, name });
        self.correlations.push(correlation);
        self.launchers.push(operator.unwrap_or(0));
        self.streams.push(stream);
        Ok(())
    }

    /// Takes a change of the allocator.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_allocation(&mut self, event: MemoryEvent) -> Result<(), Full> {
        self.make_room(1)?;
        self.trace.memory.push(event);
        Ok(())
    }

    /// Takes a call that may have launched something, by what it shares with that; 0 is nothing. A `thread` of 0 is not known.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_call(&mut self, correlation: u64, begin_ns: i64, thread: i64) -> Result<(), Full> {
        if correlation != 0 {
            self.make_room(1)?;
            self.calls.push((correlation, begin_ns, thread));
        }
        Ok(())
    }

    /// Takes a step of the host.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_step(&mut self, number: u64, begin_ns: i64, end_ns: i64) -> Result<(), Full> {
        self.make_room(1)?;
        self.trace.steps.push((number, begin_ns, end_ns));
        Ok(())
    }

    /// Takes a time in which the host waited for a data loader.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_loading(&mut self, begin_ns: i64, end_ns: i64) -> Result<(), Full> {
        self.make_room(1)?;
        self.trace.loading.push((begin_ns, end_ns));
        Ok(())
    }

    /// Takes an operator of the host. For more of them than are kept, it is not known which launched what.
    pub(crate) fn take_operator(&mut self, number: u64, name: &str) {
        self.operators.take(number, name);
    }

    /// Takes an annotation of a thread, which is 0 if it is not known. For more of them than are kept, nothing is known of any.
    pub(crate) fn take_annotation(&mut self, thread: i64, name: &str, begin_ns: i64, end_ns: i64) {
        self.annotations.take(thread, name, begin_ns, end_ns);
    }

    /// Takes what the operator with this number wrote about the collectives that it launched.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_parameters(&mut self, external: u64, known: Parameters) -> Result<(), Full> {
        self.make_room(COLLECTIVE)?;
        self.parameters.insert(external, known);
        Ok(())
    }

    /// Takes a time in which the host launched collectives of a kind.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_announcement(&mut self, kind: Kind, begin_ns: i64, end_ns: i64) -> Result<(), Full> {
        self.make_room(1)?;
        self.announced.push((begin_ns, end_ns, kind));
        Ok(())
    }

    /// The number of the name of a group of ranks.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn group(&mut self, name: &str) -> Result<u32, Full> {
        self.trace.names.intern(name).ok_or(Full)
    }

    /// The correlations of what was taken; 0 where it has none.
    pub(crate) fn correlations(&self) -> impl Iterator<Item = u64> + '_ {
        self.correlations.iter().copied()
    }

    /// Joins what belongs together, after the last event.
    pub(crate) fn finish(mut self) -> Trace {
        let mut calls = std::mem::take(&mut self.calls);
        calls.sort_unstable();
        self.finish_launched(|correlation| {
            let at = calls.partition_point(|(known, ..)| *known < correlation);
            let known = calls.get(at).filter(|(known, ..)| *known == correlation);
            known.map(|(_, at_ns, thread)| Launch { at_ns: *at_ns, operator: 0, thread: *thread })
        })
    }

    /// The same, if the calls were not taken: `launched` is the one with a correlation.
    pub(crate) fn finish_launched(mut self, launched: impl Fn(u64) -> Option<Launch>) -> Trace {
        self.announced.sort_unstable_by_key(|(begin_ns, end_ns, _)| (*begin_ns, *end_ns));
        let (mut trace, mut by_thread) = (self.trace, Vec::new());
        for ((op, correlation), launcher) in trace.ops.iter_mut().zip(&self.correlations).zip(&mut self.launchers) {
            let launch = launched(*correlation);
            op.launch_ns = launch.map(|launch| launch.at_ns);
            if let Some(Launch { at_ns, thread, .. }) = launch.filter(|_| !self.annotations.is_empty()) {
                by_thread.push(Launched { thread, at_ns, duration_ns: op.end_ns.abs_diff(op.begin_ns) });
            }
            *launcher = launch.map(|launch| launch.operator).filter(|number| *number != 0).unwrap_or(*launcher);
        }
        let ran = trace.ops.iter().zip(&self.launchers);
        trace.operators =
            self.operators.times(ran.map(|(op, number)| (op.device, op.end_ns.abs_diff(op.begin_ns), *number)));
        for (collective, (correlation, external)) in trace.collectives.iter_mut().zip(&self.linked) {
            collective.launch_ns = launched(*correlation).map(|launch| launch.at_ns);
            // Older versions of PyTorch have the parameters only in the operator's event, not in the kernel's.
            if let Some(known) = external.and_then(|external| self.parameters.get(&external)) {
                complete(collective, known);
            }
            if let (Kind::Unknown | Kind::SendRecv, Some(at_ns)) = (collective.kind, collective.launch_ns) {
                collective.kind = announced(&self.announced, at_ns).unwrap_or(collective.kind);
            }
        }
        trace.short_kernels = short_kernels(&trace.ops, &self.streams, &trace.op_names);
        trace.ops.sort_unstable_by_key(|op| (op.begin_ns, op.end_ns));
        trace.collectives.sort_by_key(|collective| (collective.begin_ns, collective.end_ns));
        // Those of one time stay in the order of the file.
        trace.memory.sort_by_key(|event| event.at_ns);
        trace.steps.sort_unstable_by_key(|(_, begin_ns, end_ns)| (*begin_ns, *end_ns));
        let mut seen = HashSet::new();
        trace.steps.retain(|(number, _, _)| seen.insert(*number));
        let step_at = |at_ns| steps::entered(&trace, at_ns).and_then(|at| trace.steps.get(at)).map(|step| step.0);
        trace.annotations = self.annotations.times(by_thread, step_at);
        trace
    }
}

/// The kind of collectives that the host launched at a time; `None` if it launched none, or several threads launched different kinds.
fn announced(all: &[(i64, i64, Kind)], at_ns: i64) -> Option<Kind> {
    let before = all.partition_point(|(begin_ns, ..)| *begin_ns <= at_ns);
    let recent = all[before.saturating_sub(MOST_AT_ONCE)..before].iter();
    let mut kinds = recent.filter(|(_, end_ns, _)| at_ns < *end_ns).map(|(_, _, kind)| *kind);
    let first = kinds.next()?;
    kinds.all(|kind| kind == first).then_some(first)
}

fn complete(collective: &mut Collective, known: &Parameters) {
    if let (Kind::Unknown | Kind::SendRecv, Some(kind)) = (collective.kind, known.kind) {
        collective.kind = kind;
    }
    collective.bytes = collective.bytes.or(known.bytes);
    collective.group_size = collective.group_size.or(known.group_size);
    collective.group = collective.group.or(known.group);
    collective.sequence = collective.sequence.or(known.sequence);
}
