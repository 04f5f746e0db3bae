//! Several recordings side by side: each measure of each, its difference from the first, and a verdict.

use super::by_kernel::{self, ComparedKernel};
use super::by_phase::{self, ComparedPhase};
use super::by_place::{self, ComparedPlaces};
use super::model::Report;
use super::printed::Printed;
use super::spans::Spans;
use super::table::{Table, milliseconds, seconds, size};
use highwater_core::wire::Kind;
use highwater_engine::recording::{Times, printable};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What recordings are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// The highest memory of any GPU, bytes.
    Peak,
    /// The highest mean of any GPU, bytes.
    Mean,
    /// The length of the recording, nanoseconds.
    Duration,
    /// The mean duration of a step, of the rank where it is longest, nanoseconds.
    Step,
    /// The longest total time for which a GPU's memory is not known, nanoseconds.
    Unknown,
    /// How many findings of severity warning or critical there are.
    Findings,
}

impl Measure {
    /// Every one.
    pub const ALL: [Measure; 6] =
        [Measure::Peak, Measure::Mean, Measure::Duration, Measure::Step, Measure::Unknown, Measure::Findings];

    /// Its name in conditions and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Measure::Peak => "peak",
            Measure::Mean => "mean",
            Measure::Duration => "duration",
            Measure::Step => "step",
            Measure::Unknown => "unknown",
            Measure::Findings => "findings",
        }
    }

    /// Its value in a recording; `None` if the recording does not contain it.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "bytes below 2^53, and days of nanoseconds to a microsecond")]
    pub fn of(self, report: &Report) -> Option<f64> {
        let has_times = report.origin.times != Times::Readings;
        let highest = |values: &mut dyn Iterator<Item = f64>| values.max_by(f64::total_cmp);
        match self {
            Measure::Peak => report.peak().map(|(_, bytes, _)| bytes as f64),
            Measure::Mean => highest(&mut report.gpus.iter().filter_map(|gpu| gpu.usage.mean_bytes())),
            Measure::Duration => has_times.then_some(report.duration_ns() as f64),
            Measure::Step => step_ns(&report.spans),
            Measure::Unknown if !has_times => None,
            Measure::Unknown => highest(&mut report.gpus.iter().map(|gpu| gpu.usage.gap_ns as f64)),
            Measure::Findings => {
                Some(report.findings.as_ref()?.iter().filter(|found| found.severity != "info").count() as f64)
            }
        }
    }

    /// A value of it, for people.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes and durations for people")]
    pub fn show(self, value: f64) -> String {
        let sign = if value < 0.0 { "-" } else { "" };
        let value = value.abs();
        let shown = match self {
            Measure::Peak | Measure::Mean => size(value as u64),
            Measure::Duration | Measure::Unknown => seconds(value as i64),
            Measure::Step => milliseconds(value as i64),
            Measure::Findings => format!("{value:.0}"),
        };
        format!("{sign}{shown}")
    }
}

fn step_ns(spans: &Spans) -> Option<f64> {
    let steps = spans.rows().iter().filter(|row| row.kind == Kind::Step);
    steps.filter_map(super::spans::Row::mean_ns).max_by(f64::total_cmp)
}

/// A measure of one recording beside the first's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Difference {
    /// The measure; `None` if the recording does not contain it.
    pub value: Option<f64>,
    /// By how much it is more than the first's; `None` if one of them is not known.
    pub increase: Option<f64>,
    /// The same as a part of the first's; `None` also if that is 0.
    pub increase_ratio: Option<f64>,
}

impl Difference {
    /// The value beside the first's.
    #[must_use]
    pub fn new(value: Option<f64>, first: Option<f64>) -> Self {
        let increase = value.zip(first).map(|(value, first)| value - first);
        let increase_ratio = increase.zip(first.filter(|first| *first > 0.0)).map(|(increase, first)| increase / first);
        Self { value, increase, increase_ratio }
    }
}

/// One recording in the comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// What [`COMPARED`] has, by name.
    #[serde(flatten)]
    by_name: BTreeMap<&'static str, Difference>,
}

/// What is shown of each recording; the others are for conditions only.
const COMPARED: [Measure; 4] = [Measure::Peak, Measure::Mean, Measure::Duration, Measure::Step];

/// Several recordings, each beside the first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The recordings with memory, in the order in which they were given.
    pub recordings: Vec<Compared>,
    /// The phases of recordings with steps.
    pub phases: Vec<ComparedPhase>,
    /// The kernels of traces whose time differs the most.
    pub kernels: Vec<ComparedKernel>,
    /// The call stacks of memory snapshots whose memory differs.
    pub places: Vec<ComparedPlaces>,
    /// What follows, in sentences.
    pub verdict: Vec<String>,
}

/// Values that are within this fraction of the highest one count as the same.
const SAME_RATIO: f64 = 0.005;

impl Comparison {
    /// Compares recordings that have memory, and those that have steps, with the first of them; `None` if there is only one of each.
    #[must_use]
    pub fn of(reports: &[Report]) -> Option<Self> {
        let (phases, kernels) = (by_phase::compare(reports), by_kernel::compare(reports));
        let places = by_place::compare(reports);
        let reports: Vec<&Report> = reports.iter().filter(|report| !report.gpus.is_empty()).collect();
        let first = match *reports.as_slice() {
            [first, _, ..] => Some(first),
            _ if phases.is_empty() && kernels.is_empty() => return None,
            _ => None,
        };
        let beside = |measure: Measure, report: &Report| {
            Difference::new(measure.of(report), first.and_then(|first| measure.of(first)))
        };
        let compared = |report: &Report| Compared {
            name: report.name.clone(),
            by_name: COMPARED.map(|measure| (measure.name(), beside(measure, report))).into(),
        };
        let recordings: Vec<Compared> = first.map_or_else(Vec::new, |_| reports.into_iter().map(compared).collect());
        let verdict = [Measure::Peak, Measure::Step].into_iter().filter_map(|measure| verdict(measure, &recordings));
        let verdict = verdict.chain(by_phase::verdict(&phases)).chain(by_kernel::verdict(&kernels));
        let verdict = verdict.chain(by_place::verdict(&places)).collect();
        Some(Self { verdict, recordings, phases, kernels, places })
    }
}

/// Which recordings have the most and the least of a measure, in one sentence.
fn verdict(measure: Measure, recordings: &[Compared]) -> Option<String> {
    let value = |compared: &&Compared| compared.by_name[measure.name()].value;
    let known = || recordings.iter().filter(|compared| value(compared).is_some());
    let order =
        |one: &&Compared, other: &&Compared| f64::total_cmp(&value(one).unwrap_or(0.0), &value(other).unwrap_or(0.0));
    // Of equal ones the first is named.
    let (most, least) = (known().rev().max_by(order)?, known().min_by(order)?);
    let (highest, lowest) = (value(&most)?, value(&least)?);
    let what = if measure == Measure::Step { "mean step" } else { "peak" };
    if known().count() < 2 {
        return None;
    }
    if highest - lowest <= SAME_RATIO * highest {
        return Some(format!("The {what} of all is the same: {}.", measure.show(highest)));
    }
    let (adjective, more) = if measure == Measure::Step { ("longest", "longer") } else { ("highest", "more") };
    let by = if lowest > 0.0 {
        format!(", {:.1} % {more} than", (highest - lowest) / lowest * 100.0)
    } else {
        ", against".into()
    };
    Some(format!(
        "{} has the {adjective} {what}, {}{by} the {} of {}.",
        most.name,
        measure.show(highest),
        measure.show(lowest),
        least.name
    ))
}

impl Comparison {
    /// Each recording beside the first, and what that means.
    #[must_use]
    pub fn printed(&self) -> Printed {
        let mut table = Table::new(["recording", "peak", "", "mean", "", "duration", "", "mean step", ""]);
        for compared in &self.recordings {
            let mut row = vec![compared.name.clone()];
            for measure in COMPARED {
                let difference = compared.by_name[measure.name()];
                row.push(difference.value.map_or_else(|| "?".to_owned(), |value| measure.show(value)));
                let ratio = difference.increase_ratio.map(|ratio| format!("{:+.1} %", ratio * 100.0));
                row.push(ratio.unwrap_or_default());
            }
            table.push(row);
        }
        let mut out = Printed::default();
        if !self.recordings.is_empty() {
            out.table(table);
        }
        by_phase::print(&self.phases, &mut out);
        by_kernel::print(&self.kernels, &mut out);
        by_place::print(&self.places, &mut out);
        for sentence in &self.verdict {
            let _ = writeln!(out, "{}", printable(sentence));
        }
        out
    }
}
