//! A report as text: for terminals, and for readers of a CI log.

use super::incidents::{Incident, incidents};
use super::layers::Profile;
use super::model::{Found, Report};
use super::printed::Printed;
use super::spans::Span;
use super::table::{Table, milliseconds, size, size_if};
use super::{advised, allocator, logged, trace};
use crate::timeline::{Analysis, Ranks, RanksError};
use highwater_core::wire::Kind;
use highwater_engine::recording::{Times, printable};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

/// What a recording shows: its peak, a table of GPUs, one of phases, and the findings.
#[must_use]
pub fn summary(report: &Report) -> Printed {
    let mut text = Printed::default();
    let _ = write_summary(report, &mut text);
    text
}

/// How long the ranks of several traces waited for each other, or why that is not known.
#[must_use]
pub fn comparison_of_ranks(ranks: &Result<Ranks, RanksError>) -> Printed {
    let mut text = Printed::default();
    let _ = match ranks {
        Ok(ranks) => trace::write_ranks(ranks, &mut text),
        Err(problem) => writeln!(text, "The traces are not compared as ranks of one job: {problem}"),
    };
    text
}

fn write_summary(report: &Report, out: &mut Printed) -> fmt::Result {
    if let Some(notice) = report.origin.notice() {
        writeln!(out, "{}", printable(&notice))?;
    }
    if let Some(headline) = headline(report) {
        writeln!(out, "{}", printable(&headline))?;
    }
    if !report.gpus.is_empty() {
        out.table(gpus(report));
    }
    for gpu in &report.gpus {
        gpu.allocator.iter().try_for_each(|of| allocator::write(report, gpu, of, out))?;
    }
    report.logged.iter().try_for_each(|of| logged::write(of, out))?;
    if let Some(traced) = &report.trace {
        trace::write_trace(&traced.analysis, out)?;
        trace::write_kernels(&report.spans, out)?;
        trace::write_operators(&traced.analysis, out)?;
        trace::write_annotations(&traced.analysis, out)?;
        trace::write_short_kernels(&traced.analysis, out)?;
    } else if report.spans.rows().iter().any(|row| row.kind != Kind::Layer) {
        out.table(phases(report));
    }
    if !report.layers.profiles.is_empty() {
        out.table(profiles(report));
        out.table(top_layers(report));
    }
    for incident in incidents(report.found()) {
        let findings = incident.kinds.iter().flatten();
        if !incident.is_single() {
            write_incident(report, &incident, out)?;
            continue;
        }
        findings.copied().try_for_each(|found| write_finding(report, found, out))?;
    }
    for advised in advised(report) {
        writeln!(out, "advice: {}", printable(&advised.text))?;
    }
    for assumed in &report.origin.assumed {
        writeln!(out, "guessed: {}", printable(assumed))?;
    }
    if !report.origin.missing.is_empty() {
        writeln!(out, "not in this file: {}", report.origin.missing.join(", "))?;
    }
    if let Some(first) = report.skipped.first.first() {
        writeln!(out, "{} lines or rows could not be read; the first: {first}", report.skipped.count)?;
    }
    Ok(())
}

/// Times at which an incident came that are listed.
const MOST_TIMES: usize = 5;

/// Findings of one cause: the cause, what followed from it, when, and what to do.
fn write_incident(report: &Report, incident: &Incident<'_>, out: &mut Printed) -> fmt::Result {
    let Some(newest) = incident.newest() else { return Ok(()) };
    let times: Vec<i64> = incident.times().collect();
    let mut when: Vec<String> =
        times.iter().take(MOST_TIMES).map(|at_ns| report.time(at_ns - report.begin_ns)).collect();
    if times.len() > MOST_TIMES {
        when.push(format!("{} more", times.len() - MOST_TIMES));
    }
    let often = if times.len() > 1 { format!(", {} times", times.len()) } else { String::new() };
    let line = format!("{} incident{often}, at {}: {}", incident.severity(), when.join(", "), newest.what);
    writeln!(out, "{}", printable(&line))?;
    incident.followed().try_for_each(|found| writeln!(out, "    {}", printable(&found.what)))?;
    writeln!(out, "    {}", printable(&newest.why))?;
    writeln!(out, "    {}", printable(&newest.advice))?;
    let kinds = incident.kinds.iter().filter_map(|findings| Some((findings.first()?, findings.len())));
    let kinds = kinds
        .map(|(found, count)| if count > 1 { format!("{} ({count} times)", found.kind) } else { found.kind.clone() });
    writeln!(out, "    findings: {}", printable(&kinds.collect::<Vec<_>>().join(", ")))
}

fn write_finding(report: &Report, found: &Found, out: &mut Printed) -> fmt::Result {
    let end = found.end_ns.map_or_else(|| "the end".to_owned(), |end_ns| report.time(end_ns - report.begin_ns));
    let begin = report.time(found.begin_ns - report.begin_ns);
    let (what, why) = found.at_first();
    let line = format!("{} {} from {begin} to {end}: {what}", found.severity, found.kind);
    writeln!(out, "{}", printable(&line))?;
    writeln!(out, "    {}", printable(why))?;
    if let Some(changed_ns) = found.changed_ns() {
        let line = format!("At last, {}: {} {}", report.time(changed_ns - report.begin_ns), found.what, found.why);
        writeln!(out, "    {}", printable(&line))?;
    }
    if !found.workloads.is_empty() {
        writeln!(out, "    {}", printable(&found.workloads.join(", ")))?;
    }
    writeln!(out, "    {}", printable(&found.advice))
}

/// What stands above all else: the peak in one sentence, or what the GPUs of a profiler's trace did. `None` if neither is known.
#[must_use]
pub(super) fn headline(report: &Report) -> Option<String> {
    let Some(traced) = &report.trace else { return peak(report) };
    let has_allocations = report.gpus.iter().any(|gpu| gpu.allocations.is_some());
    let memory = if has_allocations { peak_alone(report) } else { peak_of_allocator(report, &traced.analysis) };
    let texts = [trace::verdict(&traced.analysis), trace::headline(&traced.analysis), memory];
    let texts: Vec<String> = texts.into_iter().flatten().collect();
    (!texts.is_empty()).then(|| texts.join(" "))
}

/// The peak of a trace's allocator. Not what ran on the GPU then: the host allocates before the GPU uses it.
fn peak_of_allocator(report: &Report, analysis: &Analysis) -> Option<String> {
    let (gpu, bytes, at_ns) = report.peak()?;
    let step = analysis.steps.iter().find(|step| step.allocated_peak_bytes == Some(bytes) && step.step.is_some());
    let when = match step.and_then(|step| step.step) {
        Some(step) => format!("in step {step}"),
        None => format!("after {}", report.time(at_ns - report.begin_ns)),
    };
    let reserved = analysis.steps.iter().filter_map(|step| step.reserved_peak_bytes).max();
    let reserved =
        reserved.map_or_else(String::new, |reserved| format!(", and had reserved {} at most", size(reserved)));
    Some(format!("PyTorch had allocated {} at most, on GPU {} {when}{reserved}.", size(bytes), gpu.device.index))
}

/// The peak: where, when, how full, and what ran then.
fn peak(report: &Report) -> Option<String> {
    let (gpu, _, at_ns) = report.peak()?;
    let mut text = peak_alone(report)?;
    let running: Vec<String> = report.at(at_ns, gpu).take(3).map(|span| during(report, span)).collect();
    if !running.is_empty() {
        text.truncate(text.len() - 1);
        let _ = write!(text, ", in {}.", running.join(" and "));
    }
    Some(text)
}

/// The peak: where, when, and how full.
fn peak_alone(report: &Report) -> Option<String> {
    let (gpu, bytes, at_ns) = report.peak()?;
    let at = match report.origin.times {
        Times::Readings => format!("at {}", report.time(at_ns - report.begin_ns)),
        Times::Unix | Times::Relative => format!("after {}", report.time(at_ns - report.begin_ns)),
    };
    let mut text = format!("Peak: {} on GPU {} {at}", size(bytes), gpu.device.index);
    if let Some(usable) = gpu.device.usable_bytes().filter(|usable| *usable > 0) {
        #[allow(clippy::cast_precision_loss, reason = "a share")]
        let percent = bytes as f64 / usable as f64 * 100.0;
        let _ = write!(text, ", {percent:.1} % of the usable {}", size(usable));
    }
    text.push('.');
    Some(text)
}

/// `forward of step 3 of job rank 0`.
fn during(report: &Report, span: &Span) -> String {
    let (job, rank) = report.spans.rank(span.rank);
    let of = report.spans.rows().get(span.row);
    let (kind, name) = of.map_or((Kind::Phase, ""), |row| (row.kind, row.name.as_str()));
    match (kind, span.step) {
        (Kind::Step, Some(step)) => format!("step {step} of {job} rank {rank}"),
        (Kind::Step, None) => format!("a step of {job} rank {rank}"),
        (_, Some(step)) => format!("{name} of step {step} of {job} rank {rank}"),
        (_, None) => format!("{name} of {job} rank {rank}"),
    }
}

fn gpus(report: &Report) -> Table {
    let mut table = Table::new(["GPU", "peak", "reached at", "mean", "lowest", "size", "unknown for"]);
    for gpu in &report.gpus {
        let usage = &gpu.usage;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of sizes is a size")]
        let mean = usage.mean_bytes().map(|bytes| bytes as u64);
        table.push([
            gpu.device.index.clone(),
            size_if(usage.peak.map(|(bytes, _)| bytes)),
            usage.peak.map_or_else(|| "?".to_owned(), |(_, at_ns)| report.time(at_ns - report.begin_ns)),
            size_if(mean),
            size_if(usage.lowest_bytes),
            size_if(gpu.device.memory_total_bytes),
            report.stretch(usage.gap_ns),
        ]);
    }
    table
}

fn phases(report: &Report) -> Table {
    let mut table =
        Table::new(["job", "rank", "phase", "count", "mean", "longest", "in step", "peak", "in step"]).keys(3);
    // There may be hundreds of layers; the page and JSON have them.
    for row in report.spans.rows().iter().filter(|row| row.kind != Kind::Layer) {
        let (job, rank) = report.spans.rank(row.rank);
        let step = |step: Option<u64>| step.map_or_else(|| "?".to_owned(), |step| step.to_string());
        let long = |ns: Option<i64>| ns.map_or_else(|| "?".to_owned(), milliseconds);
        #[allow(clippy::cast_possible_truncation, reason = "a mean of durations is one")]
        let mean_ns = row.mean_ns().map(|ns| ns as i64);
        table.push([
            job.to_owned(),
            rank.to_string(),
            row.name.clone(),
            row.count.to_string(),
            long(mean_ns),
            long(row.longest.map(|span| span.duration_ns())),
            step(row.longest.and_then(|span| span.step)),
            size_if(row.highest.and_then(|span| span.peak_bytes)),
            step(row.highest.and_then(|span| span.step)),
        ]);
    }
    table
}

fn profiles(report: &Report) -> Table {
    let mut table = Table::new([
        "job",
        "rank",
        "in step",
        "layers",
        "activations",
        "parameters",
        "gathered",
        "allocated",
        "reserved",
        "missing",
    ])
    .keys(2);
    for profile in &report.layers.profiles {
        let totals = &profile.totals;
        table.push([
            profile.job.clone(),
            profile.rank.to_string(),
            profile.step.map_or_else(|| "?".to_owned(), |step| step.to_string()),
            totals.layers.to_string(),
            size_if(totals.activations),
            size_if(totals.parameters),
            size_if(totals.gathered),
            size_if(totals.allocated_max),
            size_if(totals.reserved_max),
            profile.missing.to_string(),
        ]);
    }
    table
}

/// The layers with the most activations of each job, of the rank in which all layers have the most.
fn top_layers(report: &Report) -> Table {
    let mut table = Table::new(["job", "rank", "layer", "activations", "parameters"]).keys(3);
    let mut largest: BTreeMap<&str, &Profile> = BTreeMap::new();
    for profile in &report.layers.profiles {
        let known = largest.entry(&profile.job).or_insert(profile);
        if profile.totals.activations > known.totals.activations {
            *known = profile;
        }
    }
    for (job, profile) in largest {
        for top in &profile.top {
            let (name, activations) = (report.layers.names[top.number].clone(), size(top.activations));
            table.push([job.to_owned(), profile.rank.to_string(), name, activations, size_if(top.parameters)]);
        }
    }
    table
}
