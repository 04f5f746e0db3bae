//! A report as JSON, for programs: `docs/reports.md` describes every field. What is not known is `null`.

use super::compare::Comparison;
use super::layers::Profile;
use super::model::{Gpu, Report};
use super::spans::{Row, Span};
use super::{advised, allocator};
use crate::timeline::{Ranks, RanksError};
use highwater_core::gpu::Parts;
use highwater_core::source::provenance;
use highwater_engine::recording::{Allocator, Times};
use serde_json::{Value, json};

/// The reports, their comparison, and how long the ranks of several traces waited for each other, as one object.
#[must_use]
pub fn json(reports: &[Report], comparison: Option<&Comparison>, ranks: Option<&Result<Ranks, RanksError>>) -> Value {
    json!({
        "format": 1,
        "recordings": reports.iter().map(recording).collect::<Vec<_>>(),
        "comparison": comparison,
        "ranks": ranks.map(self::ranks),
    })
}

/// What is known of the ranks, or why nothing is.
pub(super) fn ranks(ranks: &Result<Ranks, RanksError>) -> Value {
    match ranks {
        Ok(ranks) => json!(ranks),
        Err(problem) => json!({"problem": problem.to_string()}),
    }
}

fn recording(report: &Report) -> Value {
    let origin = &report.origin;
    json!({
        "name": report.name,
        "format": origin.format,
        "times": times(report),
        "host": origin.host,
        "source": origin.source,
        "simulated": origin.source.as_deref().map(provenance::is_simulated),
        "note": origin.note,
        "state": origin.state,
        "period_ns": origin.period_ns,
        "missing": origin.missing,
        "assumed": origin.assumed,
        "begin_unix_nano": (origin.times == Times::Unix).then_some(report.begin_ns),
        "duration_ns": report.duration_ns(),
        "gpus": report.gpus.iter().map(|one| gpu(one, report.begin_ns, allocator::json)).collect::<Vec<_>>(),
        "phases": phases(report),
        "layers": layers(report),
        "findings": findings(report),
        "advice": advised(report),
        "skipped_rows": report.skipped.count,
        "trace": report.trace.as_ref().map(|traced| &traced.analysis),
        "logged": report.logged,
    })
}

/// A GPU; `allocator` shows what a framework's allocator did on it.
pub(super) fn gpu(gpu: &Gpu, begin_ns: i64, allocator: fn(&Allocator, i64) -> Value) -> Value {
    let largest = gpu.largest.iter().map(|one| {
        json!({
            "bytes": one.bytes,
            "after_ns": one.begin_ns - begin_ns,
            "lasted_ns": one.end_ns - one.begin_ns,
            "freed": one.is_freed,
        })
    });
    let (device, usage) = (&gpu.device, &gpu.usage);
    json!({
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "total_bytes": device.memory_total_bytes,
        "usable_bytes": device.usable_bytes(),
        "peak_bytes": usage.peak.map(|(bytes, _)| bytes),
        "peak_after_ns": usage.peak.map(|(_, at_ns)| at_ns - begin_ns),
        "mean_bytes": usage.mean_bytes(),
        "lowest_bytes": usage.lowest_bytes,
        "known_ns": usage.known_ns,
        "unknown_ns": usage.gap_ns,
        "changes": usage.curve.changes(),
        "at_peak": gpu.breakdown.at_peak().map(parts),
        "allocations": gpu.allocations,
        "largest": largest.collect::<Vec<_>>(),
        "allocator": gpu.allocator.as_ref().map(|of| allocator(of, begin_ns)),
    })
}

fn parts(parts: Parts) -> Value {
    json!({
        "allocated_bytes": parts.allocated,
        "cached_bytes": parts.cached,
        "outside_allocator_bytes": parts.outside,
        "process_bytes": parts.processes,
        "other_processes_bytes": parts.others,
    })
}

fn phases(report: &Report) -> Vec<Value> {
    let named = |row: &Row| {
        let (job, rank) = report.spans.rank(row.rank);
        let mut value = self::row(row, report.begin_ns);
        if let Some(fields) = value.as_object_mut() {
            fields.extend([("job".to_owned(), job.into()), ("rank".to_owned(), rank.into())]);
        }
        value
    };
    report.spans.rows().iter().map(named).collect()
}

/// One row of the table of phases; `rank` is a position among the ranks.
pub(super) fn row(row: &Row, begin_ns: i64) -> Value {
    let place = |span: &Span| {
        json!({
            "step": span.step,
            "after_ns": span.begin_ns - begin_ns,
            "duration_ns": span.duration_ns(),
            "peak_bytes": span.peak_bytes,
        })
    };
    json!({
        "rank": row.rank,
        "kind": row.kind,
        "name": row.name,
        "count": row.count,
        "total_ns": row.total_ns,
        "mean_ns": row.mean_ns(),
        "longest": row.longest.as_ref().map(place),
        "highest": row.highest.as_ref().map(place),
    })
}

fn layers(report: &Report) -> Vec<Value> {
    let profiles = report.layers.profiles.iter().map(|profile| {
        let mut value = totals(profile);
        let top = profile.top.iter().map(|top| {
            json!({
                "layer": report.layers.names[top.number],
                "activation_bytes": top.activations,
                "parameter_bytes": top.parameters,
            })
        });
        if let Some(fields) = value.as_object_mut() {
            fields.insert("top".to_owned(), top.collect());
        }
        value
    });
    profiles.collect()
}

/// A profile without its layers.
pub(super) fn totals(profile: &Profile) -> Value {
    let totals = &profile.totals;
    json!({
        "job": profile.job,
        "rank": profile.rank,
        "step": profile.step,
        "missing": profile.missing,
        "layers": totals.layers,
        "activation_bytes": totals.activations,
        "parameter_bytes": totals.parameters,
        "gathered_bytes": totals.gathered,
        "allocated_max_bytes": totals.allocated_max,
        "reserved_max_bytes": totals.reserved_max,
    })
}

/// What the times are.
pub(super) fn times(report: &Report) -> &'static str {
    match report.origin.times {
        Times::Unix => "unix",
        Times::Relative => "relative",
        Times::Readings => "readings",
    }
}

/// The findings; `None` if nothing was looked for.
pub(super) fn findings(report: &Report) -> Option<Vec<Value>> {
    let shown = report.findings.as_ref()?.iter().map(|found| {
        json!({
            "kind": found.kind,
            "severity": found.severity,
            "certainty": found.certainty,
            "lag_cause": found.lag_cause,
            "gpu": found.gpu,
            "job": found.job,
            "rank": found.rank,
            "incident": found.incident,
            "workloads": found.workloads,
            "begin_after_ns": found.begin_ns - report.begin_ns,
            "end_after_ns": found.end_ns.map(|end_ns| end_ns - report.begin_ns),
            "what": found.what,
            "why": found.why,
            "advice": found.advice,
            "seen_after_ns": found.seen_ns.map(|seen_ns| seen_ns - report.begin_ns),
            "first": found.first.as_ref().map(|first| json!({
                "seen_after_ns": first.seen_ns - report.begin_ns,
                "what": first.what,
                "why": first.why,
            })),
        })
    });
    Some(shown.collect())
}
