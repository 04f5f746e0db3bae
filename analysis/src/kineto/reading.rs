//! What is kept of each event of a trace.
//!
//! Enters: events in any order. Leaves: a [`Trace`]. Invariants: the file is read once; the builder bounds what is kept.

use super::event::{Args, Category, Event};
use crate::timeline::{Builder, Full, GpuRun, Kind, MemoryEvent, Parameters, Trace, element_bytes};
use std::collections::HashMap;

/// PyTorch's numbers of the kinds of devices that are GPUs: CUDA and HIP.
const GPUS: [u64; 2] = [1, 6];
/// The operator in which PyTorch writes down what it passes to NCCL.
const PARAMETERS: &str = "record_param_comms";
/// What the annotations around NCCL's calls begin with.
const ANNOUNCED: &str = "nccl:";

/// The most threads that are distinguished.
const MOST_THREADS: usize = 1 << 12;

/// The events so far.
#[derive(Default)]
pub(super) struct Reading {
    builder: Builder,
    /// The numbers of threads, from 1, by process and thread.
    threads: HashMap<(u64, i64), i64>,
}

impl Reading {
    /// The trace so far.
    pub(super) fn trace(&mut self) -> &mut Trace {
        &mut self.builder.trace
    }

    /// Keeps what is needed of an event.
    ///
    /// # Errors
    /// There is no room for it.
    pub(super) fn take(&mut self, event: &Event) -> Result<(), Full> {
        if !event.is_object {
            self.trace().unusable += 1;
        }
        let category = event.category();
        if category == Category::Allocation {
            return self.take_allocation(event);
        }
        if event.phase != "X" || category == Category::Other {
            return Ok(());
        }
        let Some((begin_ns, end_ns)) = event.times() else {
            self.trace().unusable += 1;
            return Ok(());
        };
        let correlation = event.args.correlation.unwrap_or(0);
        // Versions before PyTorch 2.0 write the correlation there, which may be the number of any operator.
        let operator = event.args.external.filter(|external| Some(*external) != event.args.correlation);
        let run =
            || GpuRun { device: device(event), begin_ns, end_ns, correlation, operator, stream: event.args.stream };
        match category {
            Category::Kernel => self.take_kernel(event, run()),
            Category::Memory => self.builder.take_copy(run(), &event.name),
            // Calls that launch nothing have the correlation 0.
            Category::Call => {
                let thread = self.thread(event);
                self.builder.take_call(correlation, begin_ns, thread)
            }
            Category::Host => self.take_host(event, begin_ns, end_ns),
            Category::Allocation | Category::Other => Ok(()),
        }
    }

    fn take_kernel(&mut self, event: &Event, run: GpuRun) -> Result<(), Full> {
        let kernel = self.builder.kernel(&event.name, !event.args.collective.is_empty())?;
        let known = self.parameters_of(event)?;
        self.builder.take_kernel(run, kernel, known)
    }

    fn take_allocation(&mut self, event: &Event) -> Result<(), Full> {
        let Args { device_kind, device_id, bytes, allocated, reserved, .. } = event.args;
        if !device_kind.is_some_and(|kind| GPUS.contains(&kind)) {
            return Ok(());
        }
        let device = device_id.and_then(|device| u32::try_from(device).ok());
        let (Some(at_ns), Some(device), Some(bytes)) = (event.begin_ns, device, bytes) else {
            self.trace().unusable += 1;
            return Ok(());
        };
        self.builder.take_allocation(MemoryEvent { at_ns, device, bytes, allocated, reserved })
    }

    fn take_host(&mut self, event: &Event, begin_ns: i64, end_ns: i64) -> Result<(), Full> {
        if let Some(number) = event.args.external.filter(|_| event.is_operator()) {
            self.builder.take_operator(number, &event.name);
        }
        if let Some(number) = event.name.strip_prefix("ProfilerStep#").and_then(|number| number.parse().ok()) {
            return self.builder.take_step(number, begin_ns, end_ns);
        }
        if event.is_annotation() {
            let thread = self.thread(event);
            self.builder.take_annotation(thread, &event.name, begin_ns, end_ns);
        }
        if event.name.contains("DataLoader") {
            return self.builder.take_loading(begin_ns, end_ns);
        }
        if let Some(kind) = event.name.strip_prefix(ANNOUNCED).map(Kind::of).filter(|kind| *kind != Kind::Unknown) {
            return self.builder.take_announcement(kind, begin_ns, end_ns);
        }
        let external = event.args.external.filter(|_| event.name == PARAMETERS);
        let Some(external) = external else { return Ok(()) };
        let known = self.parameters_of(event)?;
        self.builder.take_parameters(external, known)
    }

    /// The number of the thread of an event; 0 if that is not known.
    fn thread(&mut self, event: &Event) -> i64 {
        let Some(thread) = event.process.zip(event.thread) else { return 0 };
        let next = self.threads.len() + 1;
        match self.threads.get(&thread) {
            Some(known) => *known,
            None if next > MOST_THREADS => 0,
            None => *self.threads.entry(thread).or_insert(i64::try_from(next).unwrap_or(0)),
        }
    }

    fn parameters_of(&mut self, event: &Event) -> Result<Parameters, Full> {
        let args = &event.args;
        let elements = args.elements_in.max(args.elements_out);
        // A name alone is not enough: ranks may name different groups alike.
        let group = match args.group_name.as_str() {
            "" => None,
            name => Some(self.builder.group(&format!("{name} {}", args.group_ranks))?),
        };
        Ok(Parameters {
            kind: Some(Kind::of(&args.collective)).filter(|kind| *kind != Kind::Unknown),
            bytes: elements.zip(element_bytes(&args.dtype)).and_then(|(count, each)| count.checked_mul(each)),
            group_size: args.group_size.filter(|size| *size > 0),
            group,
            sequence: args.sequence,
        })
    }

    /// The trace, after the last event.
    pub(super) fn finish(self) -> Trace {
        self.builder.finish()
    }
}

fn device(event: &Event) -> u32 {
    // Without the argument `device`, the process id is the GPU's number: Kineto shows each GPU as a process.
    event.args.device.or(event.process).and_then(|device| u32::try_from(device).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::MOST_EVENTS;

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
            ("user_annotation", "nccl:all_to_all", 1),
        ] {
            let with =
                |kept| Reading { builder: Builder::with(kept), ..Reading::default() }.take(&event(category, name));
            assert!(with(MOST_EVENTS - room).is_ok(), "{name}");
            assert!(with(MOST_EVENTS - room + 1).is_err(), "{name}");
        }
        for (category, name) in [("cpu_op", "aten::mm"), ("ac2g", "ac2g"), ("gpu_user_annotation", "ProfilerStep#3")] {
            assert!(
                Reading { builder: Builder::with(MOST_EVENTS), ..Reading::default() }
                    .take(&event(category, name))
                    .is_ok(),
                "{name}"
            );
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
