//! Builds a trace from what a file has, and joins its parts at the end.
//!
//! Enters: what ran on GPUs, calls, steps and what is known of collectives, in any order. Leaves: a [`Trace`]. Invariants: at most
//! [`MOST_EVENTS`] events and `MOST_NAME_BYTES` bytes of names of groups and collectives, and again of kernels, are kept; a launch is
//! joined with what ran by their correlation, a number that the file gives both. Absent on purpose: formats of files.

use super::MOST_EVENTS;
use super::collective::{self, Collective, Kind};
use super::trace::{MemoryEvent, Op, Trace, Work};
use std::collections::{HashMap, HashSet};

/// A collective, or its parameters, counts as this number of events of [`MOST_EVENTS`].
const COLLECTIVE: usize = 4;

/// A trace, and what is needed until it is complete.
#[derive(Default)]
pub(crate) struct Builder {
    /// What is known so far. What ran has no launches yet, and is in the order of the file.
    pub trace: Trace,
    kept: usize,
    /// The correlation of each of the trace's `ops`; 0 if it has none.
    correlations: Vec<u64>,
    /// For each of its `collectives`: its correlation, and the operator that launched it.
    linked: Vec<(u64, Option<u64>)>,
    /// When the calls began, by correlation.
    calls: Vec<(u64, i64)>,
    parameters: HashMap<u64, Parameters>,
}

/// Where and when something ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// The GPU's number in its process.
    pub device: u32,
    /// When it began, nanoseconds.
    pub begin_ns: i64,
    /// When it ended, nanoseconds.
    pub end_ns: i64,
    /// What it shares with the call that launched it; 0 if it has nothing.
    pub correlation: u64,
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

    /// Takes a kernel. `external` is the number of the host's operator that launched it.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_kernel(
        &mut self,
        run: Run,
        kernel: NamedKernel,
        known: Parameters,
        external: Option<u64>,
    ) -> Result<(), Full> {
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
        self.linked.push((run.correlation, external));
        Ok(())
    }

    /// Takes a copy or a fill of memory.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_copy(&mut self, run: Run, name: &str) -> Result<(), Full> {
        let name = self.trace.op_names.intern_kernel(name);
        self.take_op(run, Work::Memory, name)
    }

    fn take_op(&mut self, run: Run, work: Work, name: Option<u32>) -> Result<(), Full> {
        self.make_room(1)?;
        let Run { device, begin_ns, end_ns, correlation } = run;
        self.trace.ops.push(Op { begin_ns, end_ns, launch_ns: None, device, work, name });
        self.correlations.push(correlation);
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

    /// Takes a call that may have launched something, by what it shares with that; 0 is nothing.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_call(&mut self, correlation: u64, begin_ns: i64) -> Result<(), Full> {
        if correlation != 0 {
            self.make_room(1)?;
            self.calls.push((correlation, begin_ns));
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

    /// Takes what the operator with this number wrote about the collectives that it launched.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn take_parameters(&mut self, external: u64, known: Parameters) -> Result<(), Full> {
        self.make_room(COLLECTIVE)?;
        self.parameters.insert(external, known);
        Ok(())
    }

    /// The number of the name of a group of ranks.
    ///
    /// # Errors
    /// There is no room for it.
    pub(crate) fn group(&mut self, name: &str) -> Result<u32, Full> {
        self.trace.names.intern(name).ok_or(Full)
    }

    /// Joins what belongs together, after the last event.
    pub(crate) fn finish(mut self) -> Trace {
        self.calls.sort_unstable();
        let launched = |correlation: u64| {
            let at = self.calls.partition_point(|(known, _)| *known < correlation);
            self.calls.get(at).filter(|(known, _)| *known == correlation).map(|(_, at_ns)| *at_ns)
        };
        let mut trace = self.trace;
        for (op, correlation) in trace.ops.iter_mut().zip(&self.correlations) {
            op.launch_ns = launched(*correlation);
        }
        for (collective, (correlation, external)) in trace.collectives.iter_mut().zip(&self.linked) {
            collective.launch_ns = launched(*correlation);
            // Older versions of PyTorch have the parameters only in the operator's event, not in the kernel's.
            if let Some(known) = external.and_then(|external| self.parameters.get(&external)) {
                complete(collective, known);
            }
        }
        trace.ops.sort_unstable_by_key(|op| (op.begin_ns, op.end_ns));
        trace.collectives.sort_by_key(|collective| (collective.begin_ns, collective.end_ns));
        // Those of one time stay in the order of the file.
        trace.memory.sort_by_key(|event| event.at_ns);
        trace.steps.sort_unstable_by_key(|(_, begin_ns, end_ns)| (*begin_ns, *end_ns));
        let mut seen = HashSet::new();
        trace.steps.retain(|(number, _, _)| seen.insert(*number));
        trace
    }
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
