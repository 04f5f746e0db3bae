//! What is kept of a trace while it is read, and how its parts are joined at the end.
//!
//! Enters: events in any order. Leaves: a [`Trace`]. Invariants: at most [`MOST_EVENTS`] events and `MOST_NAME_BYTES` bytes of
//! names of groups and collectives, and again of kernels, are kept; the file is read once.

use super::MOST_EVENTS;
use super::collective::{self, Collective, Kind};
use super::event::{Args, Category, Event};
use super::trace::{MemoryEvent, Op, Trace, Work};
use std::collections::{HashMap, HashSet};

/// A collective, or its parameters, counts as this number of events of [`MOST_EVENTS`].
const COLLECTIVE: usize = 4;
/// PyTorch's numbers of the kinds of devices that are GPUs: CUDA and HIP.
const GPUS: [u64; 2] = [1, 6];
/// The operator in which PyTorch writes down what it passes to NCCL.
const PARAMETERS: &str = "record_param_comms";

/// A trace, and what is needed until it is complete.
#[derive(Default)]
pub(super) struct Reading {
    pub trace: Trace,
    kept: usize,
    /// The correlation of each of the trace's `ops`; 0 if it has none.
    correlations: Vec<u64>,
    /// For each of its `collectives`: its correlation, and the operator that launched it.
    linked: Vec<(Option<u64>, Option<u64>)>,
    /// When the calls began, by correlation.
    calls: Vec<(u64, i64)>,
    parameters: HashMap<u64, Parameters>,
}

/// What PyTorch wrote about a collective.
#[derive(Debug, Clone, Copy)]
struct Parameters {
    kind: Option<Kind>,
    bytes: Option<u64>,
    group_size: Option<u64>,
    group: Option<u32>,
    sequence: Option<u64>,
}

/// There is no room for more.
pub(super) struct Full;

impl Reading {
    fn make_room(&mut self, events: usize) -> Result<(), Full> {
        self.kept += events;
        if self.kept > MOST_EVENTS { Err(Full) } else { Ok(()) }
    }

    /// Keeps what is needed of an event.
    ///
    /// # Errors
    /// There is no room for it.
    pub(super) fn take(&mut self, event: &Event) -> Result<(), Full> {
        if !event.is_object {
            self.trace.unusable += 1;
        }
        let category = event.category();
        if category == Category::Allocation {
            return self.take_allocation(event);
        }
        if event.phase != "X" || category == Category::Other {
            return Ok(());
        }
        let Some((begin_ns, end_ns)) = event.times() else {
            self.trace.unusable += 1;
            return Ok(());
        };
        match category {
            Category::Kernel => self.take_kernel(event, begin_ns, end_ns),
            Category::Memory => self.take_op(event, begin_ns, end_ns, Work::Memory),
            Category::Call => self.take_call(event, begin_ns),
            Category::Host => self.take_host(event, begin_ns, end_ns),
            Category::Allocation | Category::Other => Ok(()),
        }
    }

    fn take_kernel(&mut self, event: &Event, begin_ns: i64, end_ns: i64) -> Result<(), Full> {
        let args = &event.args;
        if args.collective.is_empty() && !collective::is_library_kernel(&event.name) {
            let is_alike = collective::looks_like_one(&event.name);
            return self.take_op(event, begin_ns, end_ns, if is_alike { Work::Lookalike } else { Work::Compute });
        }
        self.take_op(event, begin_ns, end_ns, Work::Communication)?;
        self.make_room(COLLECTIVE)?;
        let parameters = self.parameters_of(event)?;
        let name = event.name.split('(').next().unwrap_or_default();
        self.trace.collectives.push(Collective {
            kind: parameters.kind.unwrap_or_else(|| Kind::of(name)),
            begin_ns,
            end_ns,
            launch_ns: None,
            device: device(event),
            bytes: parameters.bytes,
            group_size: parameters.group_size,
            sequence: parameters.sequence,
            group: parameters.group,
            name: self.trace.names.intern(name).ok_or(Full)?,
        });
        self.linked.push((args.correlation, args.external));
        Ok(())
    }

    fn take_op(&mut self, event: &Event, begin_ns: i64, end_ns: i64, work: Work) -> Result<(), Full> {
        self.make_room(1)?;
        let name = self.trace.op_names.intern_kernel(&event.name);
        self.trace.ops.push(Op { begin_ns, end_ns, launch_ns: None, device: device(event), work, name });
        self.correlations.push(event.args.correlation.unwrap_or(0));
        Ok(())
    }

    fn take_allocation(&mut self, event: &Event) -> Result<(), Full> {
        let Args { device_kind, device_id, bytes, allocated, reserved, .. } = event.args;
        if !device_kind.is_some_and(|kind| GPUS.contains(&kind)) {
            return Ok(());
        }
        let device = device_id.and_then(|device| u32::try_from(device).ok());
        let (Some(at_ns), Some(device), Some(bytes)) = (event.begin_ns, device, bytes) else {
            self.trace.unusable += 1;
            return Ok(());
        };
        self.make_room(1)?;
        self.trace.memory.push(MemoryEvent { at_ns, device, bytes, allocated, reserved });
        Ok(())
    }

    fn take_call(&mut self, event: &Event, begin_ns: i64) -> Result<(), Full> {
        match event.args.correlation {
            // Calls that launch nothing have the correlation 0.
            None | Some(0) => Ok(()),
            Some(correlation) => {
                self.make_room(1)?;
                self.calls.push((correlation, begin_ns));
                Ok(())
            }
        }
    }

    fn take_host(&mut self, event: &Event, begin_ns: i64, end_ns: i64) -> Result<(), Full> {
        if let Some(number) = event.name.strip_prefix("ProfilerStep#").and_then(|number| number.parse().ok()) {
            self.make_room(1)?;
            self.trace.steps.push((number, begin_ns, end_ns));
        } else if event.name.contains("DataLoader") {
            self.make_room(1)?;
            self.trace.loading.push((begin_ns, end_ns));
        } else if event.name == PARAMETERS
            && let Some(external) = event.args.external
        {
            self.make_room(COLLECTIVE)?;
            let parameters = self.parameters_of(event)?;
            self.parameters.insert(external, parameters);
        }
        Ok(())
    }

    fn parameters_of(&mut self, event: &Event) -> Result<Parameters, Full> {
        let args = &event.args;
        let elements = args.elements_in.max(args.elements_out);
        // A name alone is not enough: ranks may name different groups alike.
        let group = match args.group_name.as_str() {
            "" => None,
            name => Some(self.trace.names.intern(&format!("{name} {}", args.group_ranks)).ok_or(Full)?),
        };
        Ok(Parameters {
            kind: Some(Kind::of(&args.collective)).filter(|kind| *kind != Kind::Unknown),
            bytes: elements
                .zip(collective::element_bytes(&args.dtype))
                .and_then(|(count, each)| count.checked_mul(each)),
            group_size: args.group_size.filter(|size| *size > 0),
            group,
            sequence: args.sequence,
        })
    }

    /// Joins what belongs together, after the last event.
    pub(super) fn finish(mut self) -> Trace {
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
            collective.launch_ns = correlation.and_then(launched);
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

fn device(event: &Event) -> u32 {
    // Without the argument `device`, the process id is the GPU's number: Kineto shows each GPU as a process.
    event.args.device.or(event.process).and_then(|device| u32::try_from(device).ok()).unwrap_or(0)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn event(category: &str, name: &str) -> Event {
        let mut event = Event { is_object: true, begin_ns: Some(1), duration_ns: Some(2), ..Event::default() };
        (event.phase, event.category, event.name) = ("X".to_owned(), category.to_owned(), name.to_owned());
        (event.args.correlation, event.args.external) = (Some(7), Some(8));
        event
    }

    #[test]
    fn more_than_is_kept_is_refused_and_what_is_not_kept_takes_no_room() {
        for (category, name, room) in [
            ("kernel", "gemm", 1),
            ("kernel", "ncclDevKernel_AllReduce", 5),
            ("gpu_memset", "Memset", 1),
            ("cuda_runtime", "cudaLaunchKernel", 1),
            ("user_annotation", "ProfilerStep#3", 1),
            ("cpu_op", "enumerate(DataLoader)#x", 1),
            ("cpu_op", "record_param_comms", 4),
        ] {
            let with = |kept| Reading { kept, ..Reading::default() }.take(&event(category, name));
            assert!(with(MOST_EVENTS - room).is_ok(), "{name}");
            assert!(with(MOST_EVENTS - room + 1).is_err(), "{name}");
        }
        for (category, name) in [("cpu_op", "aten::mm"), ("ac2g", "ac2g"), ("gpu_user_annotation", "ProfilerStep#3")] {
            assert!(Reading { kept: MOST_EVENTS, ..Reading::default() }.take(&event(category, name)).is_ok(), "{name}");
        }
    }

    #[test]
    fn more_bytes_of_names_than_are_kept_are_refused() {
        let mut reading = Reading::default();
        let taken = (0..).map(|nth| {
            let name = format!("nccl{nth}{}", "x".repeat(4_000));
            reading.take(&event("kernel", &name)).map_err(|_| nth)
        });
        let error = taken.take(1_000).collect::<Result<(), _>>().expect_err("one too many");
        assert!((250..265).contains(&error), "{error}");
    }

    #[test]
    fn a_call_that_launches_nothing_is_not_joined() {
        let mut reading = Reading::default();
        let mut call = event("cuda_runtime", "cudaEventQuery");
        call.args.correlation = Some(0);
        let mut kernel = event("kernel", "gemm");
        kernel.args.correlation = Some(0);
        assert!(reading.take(&call).is_ok() && reading.take(&kernel).is_ok());
        assert_eq!(reading.finish().ops[0].launch_ns, None);
    }
}
