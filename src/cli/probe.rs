//! `highwater probe`: the cost of every NVML call on this machine, and how often every counter really changes.
//!
//! Enters: NVML. Leaves: a table for people, or the same content as JSON. Invariant: a call that NVML does not support
//! is reported as such and never as a number. It makes the calls that the daemon makes, and a few that the daemon
//! avoids because of the costs shown.

use crate::nvml::probe::measure::{self, Changes, Timing};
use crate::nvml::probe::{MadeIn, Probe, Watch};
use crate::nvml::{self, Nvml};
use anyhow::{Context, anyhow};
use clap::Args;
use highwater_core::gpu::Device;
use highwater_core::source::Source;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What to probe, and for how long.
#[derive(Debug, Clone)]
pub struct Options<'a> {
    /// NVML's library; the driver's own if left out.
    pub library: Option<&'a Path>,
    /// Index, UUID or PCI bus id; the first GPU if left out.
    pub gpu: Option<&'a str>,
    /// JSON instead of a table.
    pub json: bool,
    /// The most time that timing one call may take.
    pub budget_a_call: Duration,
    /// How long counters are watched: once for all cheap ones together, and once for each expensive one.
    pub watched: Duration,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            library: None,
            gpu: None,
            json: false,
            budget_a_call: Duration::from_secs(1),
            watched: Duration::from_millis(2500),
        }
    }
}

/// The most calls of one kind: enough for a 99th percentile, few enough that fast calls finish quickly.
const MOST_CALLS: usize = 10_000;
/// The flags of `probe`.
#[derive(Debug, Args)]
pub(super) struct ProbeCommand {
    /// Path of libnvidia-ml.so.1.
    #[arg(long, value_name = "PATH")]
    nvml_library: Option<PathBuf>,
    /// Which GPU to probe, by index, UUID or PCI bus id [default: the first].
    #[arg(long)]
    gpu: Option<String>,
    /// JSON instead of a table.
    #[arg(long)]
    json: bool,
}

impl ProbeCommand {
    /// Prints what was measured.
    pub fn run(&self) -> anyhow::Result<()> {
        let (library, gpu) = (self.nvml_library.as_deref(), self.gpu.as_deref());
        run(&Options { library, gpu, json: self.json, ..Options::default() }, &mut std::io::stdout())
    }
}

/// Pause between two rounds of reading, so that watching is no load of its own.
const PAUSE: Duration = Duration::from_micros(200);
/// The share of a lane's period that one call may take on all GPUs together.
const LANE_SHARE: f64 = 0.15;
/// The number of GPUs that share a lane on a typical node.
const LANE_GPUS: f64 = 8.0;

/// All results, as in the JSON. Durations are microseconds or milliseconds, as their names say.
#[derive(Debug, Serialize)]
struct Report {
    date: String,
    driver_version: Option<String>,
    gpu: Gpu,
    /// The lanes, each with the highest 99th percentile that a call in it may have, microseconds.
    lanes: Vec<Lane>,
    calls: Vec<Call>,
    counters: Vec<Counter>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    index: String,
    uuid: String,
    name: Option<String>,
}

#[derive(Debug, Serialize)]
struct Lane {
    lane: &'static str,
    period_ms: f64,
    most_us: f64,
}

#[derive(Debug, Serialize)]
struct Call {
    name: &'static str,
    function: &'static str,
    made_in: MadeIn,
    /// The fastest lane that it fits; `None` if it fits none or never succeeded.
    fit_for: Option<&'static str>,
    n: usize,
    failed: usize,
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    max_us: Option<f64>,
    /// The answer of the last call, in NVML's own unit, if it is a number.
    value: Option<u64>,
    status: String,
}

#[derive(Debug, Serialize)]
struct Counter {
    name: &'static str,
    unit: &'static str,
    polls: usize,
    poll_ms: Option<f64>,
    changes: Option<usize>,
    period_ms: Option<f64>,
    status: String,
}

/// Probes one GPU and writes the results.
///
/// # Errors
/// NVML cannot be opened, there is no such GPU, or `out` cannot be written to.
pub fn run(options: &Options<'_>, out: &mut impl Write) -> anyhow::Result<()> {
    let nvml = nvml::open(options.library).map_err(|error| anyhow!("{} ({})", error.message, error.reason))?;
    let gpu = choose(nvml.devices(), options.gpu)?;
    let report = report(&nvml, gpu, options).context("the chosen GPU is gone")?;
    if options.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        out.write_all(table(&report).as_bytes())?;
    }
    Ok(())
}

fn choose(devices: &[Device], wanted: Option<&str>) -> anyhow::Result<usize> {
    let Some(wanted) = wanted else { return Ok(0) };
    let is = |device: &Device| {
        let names = [Some(&device.index), Some(&device.uuid), device.pci_bus_id.as_ref()];
        names.into_iter().flatten().any(|name| name.eq_ignore_ascii_case(wanted))
    };
    devices.iter().position(is).ok_or_else(|| {
        let known: Vec<&str> = devices.iter().map(|device| device.index.as_str()).collect();
        anyhow!("there is no GPU {wanted}; there are {}", known.join(", "))
    })
}

fn report(nvml: &Nvml, gpu: usize, options: &Options<'_>) -> Option<Report> {
    let device = nvml.devices().get(gpu)?;
    let mut probes = nvml.probes(gpu);
    let lanes = lanes();
    let timings: Vec<Timing> =
        probes.iter_mut().map(|probe| measure::time(probe, MOST_CALLS, options.budget_a_call)).collect();
    let calls = probes.iter().zip(&timings).map(|(probe, timing)| call(probe, timing, &lanes)).collect();
    let counters = counters(&mut probes, &timings, options.watched);
    Some(Report {
        date: utc(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()),
        driver_version: nvml.driver_version().map(str::to_owned),
        gpu: Gpu { index: device.index.clone(), uuid: device.uuid.clone(), name: device.name.clone() },
        lanes,
        calls,
        counters,
    })
}

fn lanes() -> Vec<Lane> {
    [("fast", 1.0), ("medium", 100.0), ("slow", 1000.0)]
        .map(|(lane, period_ms)| Lane { lane, period_ms, most_us: period_ms * 1000.0 * LANE_SHARE / LANE_GPUS })
        .into()
}

fn call(probe: &Probe<'_>, timing: &Timing, lanes: &[Lane]) -> Call {
    let p99_us = timing.cost.map(|cost| us(cost.p99));
    Call {
        name: probe.name,
        function: probe.function,
        made_in: probe.made_in,
        fit_for: p99_us.and_then(|p99_us| Some(lanes.iter().find(|lane| p99_us <= lane.most_us)?.lane)),
        n: timing.answered,
        failed: timing.failed,
        p50_us: timing.cost.map(|cost| us(cost.p50)),
        p99_us,
        max_us: timing.cost.map(|cost| us(cost.max)),
        value: timing.last,
        status: timing.fault.clone().unwrap_or_else(|| probe.remark.unwrap_or("ok").into()),
    }
}

/// Watches every counter that can be read: the cheap ones together, each expensive one alone.
fn counters(probes: &mut [Probe<'_>], timings: &[Timing], watched: Duration) -> Vec<Counter> {
    let (mut cheap, mut alone) = (Vec::new(), Vec::new());
    for (probe, timing) in probes.iter_mut().zip(timings) {
        let name = probe.name;
        match probe.watch {
            Watch::Cheap(unit) => cheap.push((probe, unit, timing)),
            Watch::Dear(unit) if timing.answered > 0 => {
                let changes = measure::watch(&mut [probe], watched, PAUSE).pop().flatten();
                alone.push(counter(name, unit, changes.as_ref(), timing));
            }
            Watch::Dear(unit) => alone.push(counter(name, unit, None, timing)),
            Watch::No => {}
        }
    }
    let named: Vec<_> = cheap.iter().map(|(probe, unit, timing)| (probe.name, *unit, *timing)).collect();
    let mut together: Vec<&mut Probe<'_>> = cheap.into_iter().map(|(probe, ..)| probe).collect();
    let changes = measure::watch(&mut together, watched, PAUSE);
    let side_by_side = named.into_iter().zip(changes).map(|((n, u, t), changes)| counter(n, u, changes.as_ref(), t));
    side_by_side.chain(alone).collect()
}

fn counter(name: &'static str, unit: &'static str, changes: Option<&Changes>, timing: &Timing) -> Counter {
    let status = match changes {
        None => timing.fault.clone().unwrap_or_else(|| "never answered".into()),
        Some(Changes { count: 0, .. }) => "constant while watched".into(),
        Some(Changes { count: 1, .. }) => "changed once while watched".into(),
        // A counter that differs at nearly each read changes at least as often as it is read.
        Some(Changes { polls, count, .. }) if count * 10 >= polls * 8 => "changes at each read".into(),
        Some(_) => "ok".into(),
    };
    Counter {
        name,
        unit,
        polls: changes.map_or(0, |changes| changes.polls),
        poll_ms: changes.map(|changes| ms(changes.poll_spacing)),
        changes: changes.map(|changes| changes.count),
        period_ms: changes.and_then(|changes| changes.period).map(ms),
        status,
    }
}

fn us(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e6)
}

fn ms(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e3)
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn table(report: &Report) -> String {
    let title = format!(
        "{} · GPU {} · driver {} · {}\n\n",
        report.gpu.name.as_deref().unwrap_or("unknown GPU"),
        report.gpu.index,
        report.driver_version.as_deref().unwrap_or("unknown"),
        report.date,
    );
    let costs = aligned(
        &["What one call costs (µs)", "NVML function", "n", "p50", "p99", "max", "made in", "fit for", "status"],
        report.calls.iter().map(call_row).collect(),
        2..6,
    );
    let periods = aligned(
        &["How often it really changes", "unit", "reads", "read every", "changes", "period", "status"],
        report.counters.iter().map(counter_row).collect(),
        2..6,
    );
    format!("{title}{costs}\n{}\n\n{periods}\n{PERIOD_REMARK}\n", lanes_remark(report))
}

fn lanes_remark(report: &Report) -> String {
    let lanes: Vec<String> =
        report.lanes.iter().map(|lane| format!("{} ({} ms) {} µs", lane.lane, lane.period_ms, lane.most_us)).collect();
    format!(
        "Fit for the fastest lane in which the call's p99 on each of {LANE_GPUS} GPUs takes at most {:.0} % of the period: \
         {}.\nA call that fits no lane is too expensive for all of them.",
        LANE_SHARE * 100.0,
        lanes.join(", "),
    )
}

const PERIOD_REMARK: &str = "Reading a counter more often than it changes gives the same value again and costs the \
driver's lock.\nA counter that is constant here may change under load: run this beside a job.";

fn call_row(call: &Call) -> Vec<String> {
    let fit = call.fit_for.unwrap_or(if call.n == 0 { "–" } else { "no lane" });
    let made_in = match call.made_in {
        MadeIn::Fast => "fast",
        MadeIn::Medium => "medium",
        MadeIn::Slow => "slow",
        MadeIn::Seldom => "seldom",
        MadeIn::Never => "never",
    };
    vec![
        call.name.into(),
        call.function.into(),
        call.n.to_string(),
        number(call.p50_us),
        number(call.p99_us),
        number(call.max_us),
        made_in.into(),
        fit.into(),
        call.status.clone(),
    ]
}

fn counter_row(counter: &Counter) -> Vec<String> {
    let milliseconds = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.2} ms"));
    vec![
        counter.name.into(),
        counter.unit.into(),
        counter.polls.to_string(),
        milliseconds(counter.poll_ms),
        counter.changes.map_or("–".into(), |changes| changes.to_string()),
        milliseconds(counter.period_ms),
        counter.status.clone(),
    ]
}

fn number(value: Option<f64>) -> String {
    value.map_or("–".into(), |value| format!("{value:.1}"))
}

/// Columns as wide as their widest cell; those in `right` hold numbers.
fn aligned(head: &[&str], rows: Vec<Vec<String>>, right: std::ops::Range<usize>) -> String {
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| lines.iter().filter_map(|line| Some(line.get(column)?.chars().count())).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if right.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Unix seconds as `2026-11-20T12:00:00Z`, by the proleptic Gregorian calendar.
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March here, so that the leap day is the last of a year.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year_of_era + carry;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_utc() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_132_799), "2026-11-19T23:59:59Z");
        assert_eq!(utc(4_102_444_800), "2100-01-01T00:00:00Z");
    }

    #[test]
    fn a_call_fits_the_fastest_lane_that_its_99th_percentile_allows() {
        let fit = |p99_us: u64| {
            let p99 = Duration::from_micros(p99_us);
            let timing = Timing {
                answered: 1,
                failed: 0,
                cost: Some(measure::Cost { p50: p99, p99, max: p99 }),
                fault: None,
                last: Some(0),
            };
            let probe = Probe {
                name: "",
                function: "",
                made_in: MadeIn::Never,
                watch: Watch::No,
                remark: None,
                ask: Box::new(|| Ok(None)),
            };
            call(&probe, &timing, &lanes()).fit_for
        };
        // The memory call, BAR1, NVLink's counters, energy, and PCIe throughput, with the times of an H200.
        let answers = [8, 297, 2_627, 15_273, 21_185].map(fit);
        assert_eq!(answers, [Some("fast"), Some("medium"), Some("slow"), Some("slow"), None]);
    }

    #[test]
    fn columns_align_by_characters_and_not_by_bytes() {
        let text = aligned(&["µs", "n"], vec![vec!["–".into(), "10".into()], vec!["abc".into(), "5".into()]], 1..2);
        assert_eq!(text, "µs    n\n–    10\nabc   5\n");
    }
}
