//! Several traces of one job kernel by kernel: which take longer than in the first, and which are new.
//!
//! Enters: reports. Leaves: of each kernel or copy its number and time in a step, for those whose time differs the most. Names are as in
//! the table of kernels: without what the kernel returns and its arguments. Absent on purpose: traces of several ranks of one job.

use super::model::Report;
use super::printed::Printed;
use super::table::Table;
use highwater_core::wire::Kind;
use highwater_engine::recording::short;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Kernels that are compared.
const MOST_COMPARED: usize = 32;
/// Kernels that a terminal shows.
const MOST_PRINTED: usize = 10;
/// A difference of at least this share is worth a sentence.
const LEAST_NAMED: f64 = 0.02;
/// The longest name in a sentence, characters.
const LONGEST_NAMED: usize = 80;
/// A difference below this share of the kernels' time is not shown: it says nothing.
const LEAST_SHARE: f64 = 0.001;

/// A kernel or copy in each trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedKernel {
    /// Its name.
    pub kernel: String,
    /// Whether its numbers are of a step; else they are of the whole trace, as one of the traces has no steps.
    pub is_by_step: bool,
    /// The traces, in the order in which they were given.
    pub recordings: Vec<KernelBeside>,
}

/// A kernel in one trace beside the first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelBeside {
    /// The trace.
    pub name: String,
    /// How many there are in a step; in the whole trace, if one of the traces has no steps.
    pub count: f64,
    /// Their time in a step, nanoseconds.
    pub time_ns: f64,
    /// By how much that is more than the first's; `None` for the first.
    pub increase_ns: Option<f64>,
    /// The same as a part of the time of all of the first's kernels.
    pub increase_of_all: Option<f64>,
}

/// A trace's kernels: their number and time in a step, by name.
type Kernels<'a> = BTreeMap<&'a str, (f64, f64)>;

/// Compares the kernels of traces; nothing if fewer than two have some.
pub(super) fn compare(reports: &[Report]) -> Vec<ComparedKernel> {
    if super::by_phase::traced_ranks(reports) {
        return Vec::new();
    }
    let traces: Vec<&Report> = reports.iter().filter(|report| report.trace.is_some()).collect();
    let steps: Vec<f64> = traces.iter().map(|report| steps(report)).collect();
    let by_step = steps.iter().all(|steps| *steps > 0.0);
    let measured: Vec<Kernels<'_>> =
        traces.iter().zip(&steps).map(|(report, steps)| kernels(report, if by_step { *steps } else { 1.0 })).collect();
    let Some((first, others @ [_, ..])) = measured.split_first() else { return Vec::new() };
    let all_ns = first.values().map(|(_, ns)| *ns).sum::<f64>();
    let time = |of: &Kernels<'_>, name: &str| of.get(name).map_or(0.0, |(_, ns)| *ns);
    let difference = |name: &str| {
        let from_first = others.iter().map(|of| (time(of, name) - time(first, name)).abs());
        from_first.fold(0.0, f64::max)
    };
    let names: BTreeSet<&str> = measured.iter().flat_map(|of| of.keys().copied()).collect();
    let mut names: Vec<(&str, f64)> = names.into_iter().map(|name| (name, difference(name))).collect();
    names.retain(|(_, difference)| *difference > LEAST_SHARE * all_ns);
    names.sort_by(|one, other| other.1.total_cmp(&one.1));
    let beside = |name: &str| {
        let of = traces.iter().zip(&measured).enumerate().map(|(nth, (report, of))| {
            let (count, time_ns) = of.get(name).copied().unwrap_or((0.0, 0.0));
            let increase_ns = (nth > 0).then(|| time_ns - time(first, name));
            let increase_of_all = increase_ns.filter(|_| all_ns > 0.0).map(|increase| increase / all_ns);
            KernelBeside { name: report.name.clone(), count, time_ns, increase_ns, increase_of_all }
        });
        of.collect()
    };
    let compared = |(name, _): (&str, f64)| ComparedKernel {
        kernel: name.to_owned(),
        is_by_step: by_step,
        recordings: beside(name),
    };
    names.into_iter().take(MOST_COMPARED).map(compared).collect()
}

/// The number of a trace's steps.
#[allow(clippy::cast_precision_loss, reason = "a number of steps")]
fn steps(report: &Report) -> f64 {
    let steps = report.trace.iter().flat_map(|traced| &traced.analysis.steps).filter_map(|step| step.step);
    steps.collect::<BTreeSet<u64>>().len() as f64
}

#[allow(clippy::cast_precision_loss, reason = "means")]
fn kernels(report: &Report, steps: f64) -> Kernels<'_> {
    let mut found = Kernels::new();
    for row in report.spans.rows().iter().filter(|row| row.kind == Kind::Layer) {
        // Those of several GPUs are added up.
        let (count, ns) = found.entry(row.name.as_str()).or_default();
        *count += row.count as f64 / steps;
        *ns += row.total_ns as f64 / steps;
    }
    found
}

/// For each trace but the first, the kernel whose time differs the most, in a sentence.
pub(super) fn verdict(kernels: &[ComparedKernel]) -> Vec<String> {
    let Some(first) = kernels.first() else { return Vec::new() };
    let of = |nth: usize, one: &KernelBeside| {
        let increase =
            |kernel: &&ComparedKernel| kernel.recordings.get(nth).and_then(|of| of.increase_ns).unwrap_or(0.0);
        let most = kernels.iter().max_by(|one, other| increase(one).abs().total_cmp(&increase(other).abs()))?;
        most.recordings.get(nth)?.increase_of_all.filter(|part| part.abs() >= LEAST_NAMED)?;
        let (by, than) = (increase(&most) / 1e6, &most.recordings.first()?.name);
        let more = if by < 0.0 { "less" } else { "more" };
        let name = short(&most.kernel, LONGEST_NAMED);
        let of = if most.is_by_step { "a step" } else { "all" };
        Some(format!("In {of} of {}, {name} takes {:.3} ms {more} than in {than}.", one.name, by.abs()))
    };
    first.recordings.iter().enumerate().skip(1).filter_map(|(nth, one)| of(nth, one)).collect()
}

/// The kernels that differ the most, for a terminal.
pub(super) fn print(kernels: &[ComparedKernel], out: &mut Printed) {
    if kernels.is_empty() {
        return;
    }
    let time = if kernels.iter().all(|one| one.is_by_step) { "time in a step" } else { "time in all" };
    let mut table = Table::new([time, "", "count", "trace", "kernel or copy"]);
    let shown = kernels.iter().take(MOST_PRINTED);
    for (of, one) in shown.flat_map(|one| one.recordings.iter().map(move |of| (of, one))) {
        table.push([
            format!("{:.3} ms", of.time_ns / 1e6),
            of.increase_ns.map_or_else(String::new, |increase| format!("{:+.3} ms", increase / 1e6)),
            format!("{:.1}", of.count),
            of.name.clone(),
            one.kernel.clone(),
        ]);
    }
    out.table(table);
}

#[cfg(test)]
mod tests {
    use crate::report::{Comparison, Report, Room};
    use highwater_engine::offline::Settings;

    /// A trace of steps of 100 µs with these kernels in each: a name and its duration, µs.
    fn trace(folder: &std::path::Path, name: &str, steps: u64, kernels: &[(&str, u64)]) -> Report {
        let mut events = Vec::new();
        for step in 0..steps {
            let mut at = 1 + step * 100;
            events.push(format!(
                r#"{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{step}", "ts": {at}, "dur": 99}}"#
            ));
            for (kernel, duration) in kernels {
                events.push(format!(
                    r#"{{"ph": "X", "cat": "kernel", "name": "{kernel}", "ts": {at}, "dur": {duration}, "args": {{"device": 0}}}}"#
                ));
                at += duration;
            }
        }
        let path = folder.join(name);
        std::fs::write(&path, format!(r#"{{"traceEvents": [{}]}}"#, events.join(","))).expect("written");
        Report::open(&path, Room::of(2), &Settings::default()).expect("a trace")
    }

    #[test]
    fn kernels_are_compared_by_step_and_those_that_differ_the_most_come_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let before = trace(folder.path(), "before.json", 3, &[("gemm", 20), ("relu", 5), ("old", 7)]);
        let after = trace(folder.path(), "after.json", 2, &[("gemm", 50), ("gemm", 1), ("relu", 5), ("new", 2)]);
        let comparison = Comparison::of(&[before, after]).expect("two traces");
        let found: Vec<_> = comparison
            .kernels
            .iter()
            .map(|one| {
                (one.kernel.as_str(), one.recordings.iter().map(|of| (of.count, of.time_ns, of.increase_ns)).collect())
            })
            .collect();
        let expected: [(&str, Vec<_>); 3] = [
            ("gemm", vec![(1.0, 20_000.0, None), (2.0, 51_000.0, Some(31_000.0))]),
            ("old", vec![(1.0, 7_000.0, None), (0.0, 0.0, Some(-7_000.0))]),
            ("new", vec![(0.0, 0.0, None), (1.0, 2_000.0, Some(2_000.0))]),
        ];
        assert_eq!(found, expected);
        let sentence = "In a step of after.json, gemm takes 0.031 ms more than in before.json.";
        assert!(comparison.verdict.iter().any(|one| one == sentence), "{:?}", comparison.verdict);
    }
}
