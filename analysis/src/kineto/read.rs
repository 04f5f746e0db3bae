//! Reads a trace as a stream.
//!
//! Enters: the text of a Chrome trace as Kineto writes it, unpacked. Leaves: a [`Trace`]. Invariants: an unusable event is
//! counted and does not affect the others; a file that ends early yields the events before its end; memory is
//! bounded by `MOST_EVENTS`, `MOST_NAME_BYTES` and [`MOST_EVENT_BYTES`].

use super::bytes::{Allowance, Repaired};
use super::event::{Event, Into};
use super::reading::Reading;
use super::value::{WHOLE, pass_over, pass_over_scalars};
use crate::timeline::{DeviceProperties, MOST_EVENTS, MOST_NAME_BYTES, Trace};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::io::{BufReader, ErrorKind, Read};

/// The most bytes of one event.
const MOST_EVENT_BYTES: usize = 1 << 20;
/// The most bytes of one member of the file that is not the events.
const MOST_MEMBER_BYTES: usize = 64 << 20;

/// The most GPUs with properties.
const MOST_DEVICES: usize = 1_024;

/// Why a file is no trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceError {
    /// It exceeds a bound; the text names the bound.
    TooLarge(String),
    /// It cannot be read, or is not a trace; says where.
    Unreadable(String),
}

impl std::fmt::Display for TraceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::TooLarge(problem) | Self::Unreadable(problem)) = self;
        f.write_str(problem)
    }
}

impl std::error::Error for TraceError {}

/// Reads a trace.
///
/// # Errors
/// The text is not JSON, has no array of events, or exceeds the bounds. An early end is no error once that array has begun.
pub fn read(from: impl Read) -> Result<Trace, TraceError> {
    let allowance = Allowance::new(MOST_MEMBER_BYTES);
    let mut file =
        File { reading: Reading::default(), allowance: allowance.clone(), has_events: false, is_full: false };
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(Repaired::new(from, allowance)));
    match Document(&mut file).deserialize(&mut json) {
        Ok(()) => {}
        Err(_) if file.is_full => {
            let bounds = format!("{MOST_EVENTS} events on GPUs, calls and steps, or {MOST_NAME_BYTES} bytes of names");
            return Err(TraceError::TooLarge(format!("it has more than {bounds}")));
        }
        Err(error) if error.is_eof() || error.io_error_kind() == Some(ErrorKind::UnexpectedEof) => {
            file.reading.trace().is_cut_short = true;
        }
        Err(error) if error.io_error_kind() == Some(ErrorKind::FileTooLarge) => {
            return Err(TraceError::TooLarge(error.to_string()));
        }
        Err(error) => return Err(TraceError::Unreadable(error.to_string())),
    }
    if !file.has_events {
        return Err(TraceError::Unreadable(
            "it has no `traceEvents`, so it is no trace of PyTorch's profiler".to_owned(),
        ));
    }
    Ok(file.reading.finish())
}

/// What is known of the file so far.
struct File {
    reading: Reading,
    allowance: Allowance,
    has_events: bool,
    is_full: bool,
}

#[derive(Deserialize)]
#[serde(field_identifier)]
enum Member {
    #[serde(rename = "traceEvents")]
    Events,
    #[serde(rename = "baseTimeNanoseconds")]
    Base,
    #[serde(rename = "distributedInfo")]
    Distributed,
    #[serde(rename = "deviceProperties")]
    Devices,
    #[serde(rename = "rank")]
    Rank,
    #[serde(rename = "world_size")]
    WorldSize,
    #[serde(other)]
    Other,
}

/// The file: an object with the events, or only their array.
struct Document<'a>(&'a mut File);

impl<'de> DeserializeSeed<'de> for Document<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Document<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a trace of PyTorch's profiler")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let file = self.0;
        while let Some(member) = members.next_key::<Member>()? {
            file.allowance.renew(MOST_MEMBER_BYTES);
            match member {
                Member::Events => members.next_value_seed(Events(file))?,
                Member::Base => {
                    let base = members.next_value_seed(WHOLE)?;
                    file.reading.trace().base_ns = base.and_then(|base| i64::try_from(base).ok());
                }
                Member::Distributed => members.next_value_seed(Distributed(file.reading.trace()))?,
                Member::Devices => {
                    let text = members.next_value::<Box<RawValue>>()?;
                    // Of an odd type, it counts as absent.
                    let found = serde_json::from_str::<Vec<DeviceProperties>>(text.get()).unwrap_or_default();
                    file.reading.trace().properties = found.into_iter().take(MOST_DEVICES).collect();
                }
                Member::Rank | Member::WorldSize | Member::Other => drop(members.next_value::<IgnoredAny>()?),
            }
            file.allowance.renew(MOST_MEMBER_BYTES);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, each: A) -> Result<(), A::Error> {
        Events(self.0).visit_seq(each)
    }
}

struct Events<'a>(&'a mut File);

impl<'de> DeserializeSeed<'de> for Events<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the array `traceEvents`")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut each: A) -> Result<(), A::Error> {
        let (file, mut event) = (self.0, Event::default());
        file.has_events = true;
        file.allowance.renew(MOST_EVENT_BYTES);
        while each.next_element_seed(Into(&mut event))?.is_some() {
            if file.reading.take(&event).is_err() {
                file.is_full = true;
                return Err(A::Error::custom("full"));
            }
            file.allowance.renew(MOST_EVENT_BYTES);
        }
        Ok(())
    }
}

/// Reads `distributedInfo`: the rank, and how many ranks there were.
struct Distributed<'a>(&'a mut Trace);

impl<'de> DeserializeSeed<'de> for Distributed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Distributed<'_> {
    type Value = ();

    pass_over!(());
    pass_over_scalars!(());

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(member) = members.next_key::<Member>()? {
            match member {
                Member::Rank => self.0.rank = members.next_value_seed(WHOLE)?,
                Member::WorldSize => self.0.world_size = members.next_value_seed(WHOLE)?,
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Kind, MemoryEvent, Op, Work};

    /// A kernel, and the call that launched it.
    const KERNEL: &str = r#"{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10.5, "dur": 2.25,
        "args": {"device": 1, "stream": 7, "correlation": 3}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 9, "dur": 1, "args": {"correlation": 3}}"#;

    fn events(events: &str) -> Trace {
        read(format!(r#"{{"traceEvents": [{events}]}}"#).as_bytes()).expect("a trace")
    }

    #[test]
    fn a_kernel_is_joined_with_the_call_that_launched_it() {
        let trace = events(KERNEL);
        let expected = Op {
            begin_ns: 10_500,
            end_ns: 12_750,
            launch_ns: Some(9_000),
            device: 1,
            work: Work::Compute,
            name: Some(0),
        };
        assert_eq!(trace.name_of(&expected), Some("gemm"));
        assert_eq!((trace.ops, trace.unusable, trace.is_cut_short), (vec![expected], 0, false));
    }

    #[test]
    fn changes_of_the_allocator_are_taken_of_gpus_alone() {
        let memory = |ts: &str, args: &str| {
            format!(r#"{{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": {ts}, "args": {{{args}}}}}"#)
        };
        let trace = read(
            format!(
                r#"{{"deviceProperties": [{{"id": 1, "name": "H200", "totalGlobalMem": 150, "numSms": 132}}],
                "traceEvents": [{}, {}, {}, {}, {KERNEL}]}}"#,
                memory(
                    "9",
                    r#""Device Type": 1, "Device Id": 1, "Bytes": -5, "Total Allocated": 7, "Total Reserved": 9"#
                ),
                memory("8.5", r#""Device Type": 1, "Device Id": 1, "Addr": 3, "Bytes": 12"#),
                memory("8", r#""Device Type": 0, "Device Id": -1, "Bytes": 12"#),
                memory("7", r#""Device Type": 1, "Device Id": 1, "Bytes": 1.5"#),
            )
            .as_bytes(),
        );
        let trace = trace.expect("a trace");
        let of = |at_ns, bytes, allocated, reserved| MemoryEvent { at_ns, device: 1, bytes, allocated, reserved };
        assert_eq!(trace.memory, [of(8_500, 12, None, None), of(9_000, -5, Some(7), Some(9))]);
        assert_eq!((trace.unusable, trace.ops.len()), (1, 1));
        let known = &trace.properties[0];
        assert_eq!((known.id, known.name.as_deref(), known.total_bytes), (1, Some("H200"), Some(150)));
        let odd = read(format!(r#"{{"deviceProperties": {{"a": 1}}, "traceEvents": [{KERNEL}]}}"#).as_bytes());
        assert_eq!(odd.expect("a trace").properties, []);
    }

    #[test]
    fn an_event_that_cannot_be_used_costs_no_other() {
        for bad in [
            r#"{"ph": "X", "cat": "kernel", "ts": 1, "dur": -1}"#,
            r#"{"ph": "X", "cat": "kernel", "ts": NaN, "dur": 1}"#,
            r#"{"ph": "X", "cat": "kernel", "ts": "soon", "dur": 1}"#,
            r#"{"ph": "X", "cat": "kernel", "ts": 1}"#,
            r#"{"ph": "X", "cat": "kernel", "ts": 1e40, "dur": 1}"#,
            r#"{"ph": "X", "cat": "kernel", "ts": {"a": [1]}, "dur": 1}"#,
            "null",
            "[1]",
        ] {
            let trace = events(&format!("{bad}, {KERNEL}"));
            assert_eq!((trace.ops.len(), trace.unusable), (1, 1), "{bad}");
        }
        // A copy of no duration has no bandwidth, and can be used.
        let copy = r#"{"ph": "X", "cat": "Memcpy", "ts": 1, "dur": 0, "args": {"memory bandwidth (GB/s)": inf}}"#;
        assert_eq!((events(copy).ops.len(), events(copy).unusable), (1, 0));
    }

    #[test]
    fn a_file_that_is_cut_anywhere_gives_what_it_had() {
        let others = r#"{"a": nan}, {"b": -1.5e-3, "c": true}"#;
        let text = format!(r#"{{"baseTimeNanoseconds": 7, "traceEvents": [{KERNEL}, {KERNEL}, {others}]}}"#);
        let begin = text.find('[').expect("an array") + 1;
        let mut counts = Vec::new();
        for end in 0..text.len() {
            match read(&text.as_bytes()[..end]) {
                Ok(trace) => {
                    assert!(trace.is_cut_short, "{end}");
                    assert_eq!(trace.base_ns, Some(7), "{end}");
                    counts.push(trace.ops.len());
                }
                Err(error) => assert!(end < begin && matches!(error, TraceError::Unreadable(_)), "{end}: {error}"),
            }
        }
        assert!(counts.is_sorted());
        counts.dedup();
        assert_eq!(counts, [0, 1, 2]);
    }

    /// What a gzip decoder reports for a file that ends early.
    struct Broken<'a>(&'a [u8]);

    impl Read for Broken<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.0.is_empty() { Err(ErrorKind::UnexpectedEof.into()) } else { self.0.read(buffer) }
        }
    }

    #[test]
    fn a_packed_file_that_is_cut_gives_what_it_had() {
        let text = format!(r#"{{"traceEvents": [{KERNEL}, {{"ph": "X", "cat": "ker"#);
        let trace = read(Broken(text.as_bytes())).expect("a trace");
        assert_eq!((trace.ops.len(), trace.is_cut_short), (1, true));
    }

    #[test]
    fn what_is_no_trace_is_refused_with_the_place() {
        for (text, problem) in [
            ("{}", "no `traceEvents`"),
            ("", "no `traceEvents`"),
            ("7", "expected a trace of PyTorch's profiler"),
            (r#"{"traceEvents": 7}"#, "expected the array `traceEvents` at line 1 column 18"),
            (r#"{"traceEvents": [}"#, "at line 1 column 18"),
        ] {
            let error = read(text.as_bytes()).expect_err(text);
            assert!(matches!(&error, TraceError::Unreadable(found) if found.contains(problem)), "{error:?}");
        }
    }

    #[test]
    fn one_event_that_is_too_long_is_refused() {
        let long = format!(r#"{{"traceEvents": [{{"name": "{}"}}]}}"#, "x".repeat(MOST_EVENT_BYTES + (1 << 18)));
        assert!(matches!(read(long.as_bytes()), Err(TraceError::TooLarge(_))));
        // Many that are not are no problem.
        let many = vec![format!(r#"{{"name": "{}"}}"#, "x".repeat(1 << 18)); 8].join(",");
        assert_eq!(events(&many).unusable, 0);
    }

    #[test]
    fn the_array_alone_and_files_of_old_versions_are_read() {
        let old = r#"[{"ph": "X", "cat": "Kernel", "name": "k", "ts": 1614800519473220, "dur": 3, "pid": 2,
            "args": {"external id": 4}}, {"ph": "X", "cat": "Operator", "name": "ProfilerStep#5",
            "ts": 1614800519473000, "dur": 900}]"#;
        let trace = read(old.as_bytes()).expect("a trace");
        assert_eq!((trace.ops[0].device, trace.ops[0].begin_ns), (2, 1_614_800_519_473_220_000));
        assert_eq!(trace.steps, [(5, 1_614_800_519_473_000_000, 1_614_800_519_473_900_000)]);
        // Times that are dates need no base.
        assert_eq!((trace.base_ns, trace.clock_ns(), events(KERNEL).clock_ns()), (None, Some(0), None));
    }

    #[test]
    fn kernels_are_joined_with_the_operator_that_launched_them_unless_its_number_is_only_the_correlation() {
        let of = |external: u64| {
            let trace = events(&format!(
                r#"{{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 9, "dur": 3, "args": {{"correlation": 7, "External id": {external}}}}},
                {{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {{"External id": 5}}}},
                {{"ph": "X", "cat": "user_annotation", "name": "forward", "ts": 1, "dur": 1, "args": {{"External id": 6}}}},
                {{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 3, "dur": 1, "args": {{"External id": 7}}}}"#
            ));
            let times = trace.operators?;
            Some(times.into_iter().map(|of| (of.operator, of.count, of.total_ns)).collect::<Vec<_>>())
        };
        assert_eq!(of(5), Some(vec![(Some("aten::mm".to_owned()), 1, 3_000)]));
        assert_eq!((of(7), of(6)), (None, None));
    }

    #[test]
    fn sends_and_receives_that_the_host_calls_an_all_to_all_are_one() {
        let kernel = |correlation: u64, launched: u64| {
            format!(
                r#"{{"ph": "X", "cat": "kernel", "name": "ncclKernel_SendRecv(x)", "ts": 90, "dur": 3, "args": {{"correlation": {correlation}}}}},
                {{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": {launched}, "dur": 1, "args": {{"correlation": {correlation}}}}}"#
            )
        };
        let annotation = |name: &str, begin: u64, end: u64| {
            let long = end - begin;
            format!(
                r#"{{"ph": "X", "cat": "user_annotation", "name": "{name}", "ts": {begin}, "dur": {long}, "args": {{"External id": 9}}}}"#
            )
        };
        let all = [
            kernel(1, 15),
            kernel(2, 25),
            kernel(3, 32),
            kernel(4, 45),
            annotation("nccl:all_to_all", 10, 20),
            annotation("nccl:all_to_all", 30, 40),
            annotation("nccl:all_reduce", 31, 33),
            annotation("nccl:send", 44, 46),
        ];
        let trace = events(&all.join(","));
        let kinds: Vec<Kind> = trace.collectives.iter().map(|collective| collective.kind).collect();
        // Outside of any annotation, and in two of different kinds, only the kernel's name counts.
        assert_eq!(kinds, [Kind::AllToAll, Kind::SendRecv, Kind::SendRecv, Kind::SendRecv]);
    }

    #[test]
    fn annotations_have_what_their_thread_launched_within_and_steps_are_none() {
        let host = |category: &str, name: &str, thread: i64, begin: u32, long: u32| {
            format!(
                r#"{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 5, "tid": {thread}, "ts": {begin}, "dur": {long},
                    "args": {{"correlation": {begin}}}}}"#
            )
        };
        let kernel = |correlation: u32| {
            format!(
                r#"{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 500, "dur": 3,
                    "args": {{"correlation": {correlation}, "stream": 7}}}}"#
            )
        };
        let trace = events(
            &[
                host("user_annotation", "ProfilerStep#4", -9, 0, 100),
                host("user_annotation", "Optimizer.step#SGD.step", -9, 10, 20),
                host("gpu_user_annotation", "Optimizer.step#SGD.step", 7, 500, 100),
                host("cuda_runtime", "cudaLaunchKernel", -9, 15, 1),
                host("cuda_runtime", "cudaLaunchKernel", 8, 16, 1),
                kernel(15),
                kernel(16),
            ]
            .join(","),
        );
        let found = trace.annotations.expect("few");
        let [only] = &found[..] else { panic!("{found:?}") };
        let steps: Vec<_> = only.steps.iter().map(|of| (of.step, of.sum)).collect();
        assert_eq!(only.annotation.as_deref(), Some("Optimizer.step#SGD.step"));
        assert_eq!(
            (only.all.count, only.all.host_ns, only.all.launched, only.all.gpu_ns),
            (1, 20_000, Some(1), Some(3_000))
        );
        assert_eq!(steps, [(4, only.all)]);
        assert_eq!((trace.short_kernels[0].count, trace.short_kernels[0].total_ns), (2, 6_000));
    }

    #[test]
    fn what_pytorch_knows_of_a_collective_is_taken_from_its_operator_if_need_be() {
        let trace = events(
            r#"{"ph": "X", "cat": "kernel", "name": "ncclKernel_SendRecv(x)", "ts": 1, "dur": 3,
                "args": {"External id": 4, "device": 0}},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(x)", "ts": 5, "dur": 3,
                "args": {"External id": 5}},
            {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 0, "dur": 1, "args": {"External id": 4,
                "Collective name": "all_to_allv", "dtype": "Half", "In msg nelems": 10, "Out msg nelems": 12,
                "Group size": 4, "Process Group Name": "7", "Seq": 9}}"#,
        );
        let [first, second] = &trace.collectives[..] else { panic!("{:?}", trace.collectives) };
        assert_eq!(
            (first.kind, first.bytes, first.group_size, first.sequence),
            (Kind::AllToAll, Some(24), Some(4), Some(9))
        );
        assert_eq!(
            (second.kind, second.bytes, second.group_size, second.sequence),
            (Kind::AllGather, None, None, None)
        );
        assert!(first.group.is_some() && second.group.is_none());
    }

    #[test]
    fn a_step_that_is_annotated_twice_counts_once_and_not_for_the_gpu() {
        let trace = events(
            r#"{"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#2", "ts": 5, "dur": 9},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "ts": 1, "dur": 2},
            {"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#2", "ts": 1, "dur": 2},
            {"ph": "X", "cat": "user_annotation", "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                "ts": 1, "dur": 1}"#,
        );
        assert_eq!((trace.steps, trace.loading), (vec![(2, 1_000, 3_000)], vec![(1_000, 2_000)]));
    }
}
