//! Reports as a file that Perfetto and other viewers of Chrome's trace format open.
//!
//! Enters: reports. Leaves: one trace in JSON: a process for the GPUs of each recording, with their memory as counters; one for each
//! rank, with a thread each for steps, phases and layers (kernels, in traces of the profiler); and one for findings. Invariants: recordings
//! that ran at the same time are on one clock; memory that is not known is no 0, but a stretch that says so.

use super::axis;
use super::model::Report;
use super::spans::Span;
use highwater_core::jobs::EndedBy;
use highwater_core::wire::Kind;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const MICROSECOND_NS: i64 = 1_000;
/// Threads for stretches of one kind that overlap; what overlaps more is on the last.
const MOST_ROWS: usize = 8;
/// The first thread of each kind of a rank's stretches.
const KINDS: [(Kind, &str, u64); 3] =
    [(Kind::Step, "steps", 1), (Kind::Phase, "phases", 101), (Kind::Layer, "layers", 201)];

/// The trace.
#[must_use]
pub fn perfetto(reports: &[Report]) -> String {
    let mut events = Events { written: String::from("{\"traceEvents\":["), processes: 0 };
    for (report, offset_ns) in reports.iter().zip(axis::offsets(reports)) {
        let clock = Clock { begin_ns: report.begin_ns, offset_ns: offset_ns.unwrap_or(0) };
        events.gpus(report, clock);
        events.ranks(report, clock);
        events.findings(report, clock);
    }
    let left_out: u64 = reports.iter().map(|report| report.spans.left_out()).sum();
    let about = json!({ "highwater": env!("CARGO_PKG_VERSION"), "files": reports.iter().map(|report| &report.name).collect::<Vec<_>>(),
        "shortest_left_out": left_out });
    format!("{}],\"displayTimeUnit\":\"ms\",\"otherData\":{about}}}\n", events.written)
}

/// When a recording begins on the clock of the trace, nanoseconds.
#[derive(Clone, Copy)]
struct Clock {
    begin_ns: i64,
    offset_ns: i64,
}

impl Clock {
    /// A time of the recording in microseconds of the trace, as JSON, to the nanosecond.
    fn us(self, at_ns: i64) -> Value {
        microseconds(at_ns.saturating_sub(self.begin_ns).saturating_add(self.offset_ns))
    }
}

/// Nanoseconds in microseconds: exact up to three months.
fn microseconds(ns: i64) -> Value {
    if ns % MICROSECOND_NS == 0 {
        return (ns / MICROSECOND_NS).into();
    }
    #[allow(clippy::cast_precision_loss, reason = "up to 2^53 exact")]
    let us = ns as f64 / 1e3;
    us.into()
}

/// Something that lasted a while.
struct Stretch<'a> {
    name: &'a str,
    begin_ns: i64,
    end_ns: i64,
    args: Map<String, Value>,
}

/// The events so far.
struct Events {
    written: String,
    processes: u64,
}

impl Events {
    fn push(&mut self, event: &Value) {
        if !self.written.ends_with('[') {
            self.written.push_str(",\n");
        }
        self.written.push_str(&event.to_string());
    }

    /// Begins a process, and returns its number.
    fn process(&mut self, name: &str) -> u64 {
        self.processes += 1;
        let process = self.processes;
        self.push(&json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } }));
        self.push(
            &json!({ "ph": "M", "name": "process_sort_index", "pid": process, "args": { "sort_index": process } }),
        );
        process
    }

    /// The memory of each GPU: a counter of bytes for each, and what is not known.
    fn gpus(&mut self, report: &Report, clock: Clock) {
        if report.gpus.is_empty() {
            return;
        }
        let process = self.process(&format!("{}: GPU memory", report.name));
        for (nth, gpu) in report.gpus.iter().enumerate() {
            let name = format!("GPU {} memory", gpu.device.index);
            let (mut gaps, mut unknown_ns) = (Vec::new(), None);
            for point in gpu.usage.curve.points() {
                match (point.used, unknown_ns) {
                    (Some(used), _) => {
                        if let Some(begin_ns) = unknown_ns.take() {
                            gaps.push((begin_ns, point.at_ns));
                        }
                        self.push(&json!({ "ph": "C", "name": name, "pid": process, "ts": clock.us(point.at_ns), "args": { "bytes": used } }));
                    }
                    (None, None) => unknown_ns = Some(point.at_ns),
                    (None, Some(_)) => {}
                }
            }
            gaps.extend(unknown_ns.map(|begin_ns| (begin_ns, report.end_ns)));
            let name = format!("GPU {} not read", gpu.device.index);
            let gaps =
                gaps.into_iter().map(|(begin_ns, end_ns)| Stretch { name: &name, begin_ns, end_ns, args: Map::new() });
            self.thread(process, 1 + nth as u64 * MOST_ROWS as u64, &name, gaps.collect(), clock);
        }
    }

    fn ranks(&mut self, report: &Report, clock: Clock) {
        let rows = report.spans.rows();
        let mut by_rank: BTreeMap<(usize, Kind), Vec<&Span>> = BTreeMap::new();
        for span in report.spans.spans() {
            by_rank.entry((span.rank, rows[span.row].kind)).or_default().push(span);
        }
        for (at, (job, rank)) in report.spans.ranks().iter().enumerate() {
            let process = self.process(&format!("{}: {job} rank {rank}", report.name));
            for (kind, name, first) in KINDS {
                let name = if kind == Kind::Layer && report.trace.is_some() { "kernels" } else { name };
                let own = by_rank.get(&(at, kind)).into_iter().flatten();
                let stretches = own.map(|span| {
                    let mut args = Map::new();
                    args.extend(span.step.map(|step| ("step".to_owned(), step.into())));
                    args.extend(span.peak_bytes.map(|peak| ("peak_bytes".to_owned(), peak.into())));
                    args.extend((span.by != EndedBy::End).then(|| ("cut".to_owned(), true.into())));
                    Stretch { name: &rows[span.row].name, begin_ns: span.begin_ns, end_ns: span.end_ns, args }
                });
                self.thread(process, first, name, stretches.collect(), clock);
            }
        }
    }

    fn findings(&mut self, report: &Report, clock: Clock) {
        if report.found().is_empty() {
            return;
        }
        let process = self.process(&format!("{}: findings", report.name));
        let stretches = report.found().iter().map(|found| {
            let mut args = Map::new();
            for (name, text) in
                [("what", &found.what), ("why", &found.why), ("advice", &found.advice), ("severity", &found.severity)]
            {
                args.insert(name.to_owned(), text.as_str().into());
            }
            args.extend(found.job.as_ref().map(|job| ("job".to_owned(), job.as_str().into())));
            args.extend(found.rank.map(|rank| ("rank".to_owned(), rank.into())));
            args.extend(found.gpu.as_ref().map(|gpu| ("gpu".to_owned(), gpu.as_str().into())));
            Stretch { name: &found.kind, begin_ns: found.begin_ns, end_ns: found.end_ns.unwrap_or(report.end_ns), args }
        });
        self.thread(process, 1, "findings", stretches.collect(), clock);
    }

    /// Stretches as one thread, and as further ones where they overlap: viewers take what overlaps on one thread for nested.
    fn thread(&mut self, process: u64, first: u64, name: &str, mut stretches: Vec<Stretch>, clock: Clock) {
        stretches.sort_by_key(|one| (one.begin_ns, std::cmp::Reverse(one.end_ns)));
        let mut ends: Vec<i64> = Vec::new();
        for Stretch { name: own, begin_ns, end_ns, args } in stretches {
            let free = ends.iter().position(|end| *end <= begin_ns);
            let row = free.unwrap_or_else(|| ends.len().min(MOST_ROWS - 1));
            let thread = first + row as u64;
            if row == ends.len() {
                ends.push(end_ns);
                self.push(&json!({ "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": { "name": name } }));
            } else {
                ends[row] = ends[row].max(end_ns);
            }
            self.push(&json!({ "ph": "X", "name": own, "pid": process, "tid": thread, "ts": clock.us(begin_ns),
                "dur": microseconds(end_ns.saturating_sub(begin_ns).max(0)), "args": args }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::spans::{Ended, Spans};
    use crate::report::{Room, hand};

    fn events(reports: &[Report]) -> Vec<Value> {
        let trace: Value = serde_json::from_str(&perfetto(reports)).expect("JSON");
        trace["traceEvents"].as_array().expect("a list").clone()
    }

    fn of<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
        events.iter().filter(|event| event["ph"] == kind).collect()
    }

    #[test]
    fn memory_is_a_counter_and_what_is_not_known_no_zero() {
        let report = hand::report("it", &[vec![(0, Some(7 << 30)), (1_500, None), (3_000, Some(0))]]);
        let events = events(&[report]);
        let counters: Vec<_> =
            of(&events, "C").iter().map(|event| (event["ts"].clone(), event["args"]["bytes"].clone())).collect();
        assert_eq!(counters, [(json!(0), json!(7_u64 << 30)), (json!(3), json!(0))]);
        let [gap] = of(&events, "X")[..] else { panic!("{events:?}") };
        assert_eq!((&gap["name"], &gap["ts"], &gap["dur"]), (&json!("GPU 0 not read"), &json!(1.5), &json!(1.5)));
    }

    #[test]
    fn stretches_that_overlap_are_on_threads_of_their_own_and_names_are_data() {
        let mut report = hand::report("it", &[]);
        let mut spans = Spans::new(Room::of(1).spans, Vec::new());
        for (kind, name, begin_ns, end_ns) in [
            (Kind::Step, "step", 0, 10_000),
            (Kind::Phase, "a\"]}", 0, 6_000),
            (Kind::Phase, "b", 4_000, 9_000),
            (Kind::Phase, "c", 6_000, 7_000),
        ] {
            let (job, name) = ("job".to_owned(), name.to_owned());
            spans.push(Ended {
                job,
                rank: 3,
                kind,
                name,
                step: Some(5),
                begin_ns,
                end_ns,
                by: EndedBy::End,
                peak_bytes: None,
            });
        }
        spans.finish();
        (report.spans, report.end_ns) = (spans, 10_000);
        let events = events(&[report]);
        let placed: Vec<_> = of(&events, "X")
            .iter()
            .map(|event| {
                (event["name"].as_str().unwrap_or_default(), event["tid"].as_u64(), event["args"]["step"].as_u64())
            })
            .collect();
        assert_eq!(
            placed,
            [
                ("step", Some(1), Some(5)),
                ("a\"]}", Some(101), Some(5)),
                ("b", Some(102), Some(5)),
                ("c", Some(101), Some(5))
            ]
        );
        // On no thread does one begin before the last has ended.
        let names: Vec<_> = of(&events, "M")
            .iter()
            .filter(|event| event["name"] == "thread_name")
            .map(|event| event["args"]["name"].clone())
            .collect();
        assert_eq!(names, [json!("steps"), json!("phases"), json!("phases")]);
    }

    #[test]
    fn recordings_that_ran_at_the_same_time_are_on_one_clock() {
        let mut late = hand::report("late", &[vec![(0, Some(1))]]);
        let mut first = hand::report("first", &[vec![(0, Some(1)), (9_000_000, Some(2))]]);
        (late.begin_ns, late.end_ns, first.end_ns) = (2_000_000, 3_000_000, 9_000_001);
        late.gpus = hand::report("late", &[vec![(2_000_000, Some(3))]]).gpus;
        let events = events(&[first, late]);
        let last = of(&events, "C").into_iter().rfind(|event| event["args"]["bytes"] == 3).expect("a point");
        assert_eq!(last["ts"], json!(2_000));
    }
}
