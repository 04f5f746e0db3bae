//! What is exported, and where to: highwater's own keys, and the standard `OTEL_*` variables.
//!
//! Enters: [`Keys`] and the environment. Leaves: [`OtlpSettings`], every fault of the variables with the variable's name,
//! or nothing if no endpoint is set. A variable of one signal takes precedence over the general one, and
//! `otlp.endpoint` takes the place of the general endpoint. Variables are read only if something is exported, because
//! they may be meant for other programs. Absent on purpose: default endpoints.

use super::environment::Environment;
use super::{endpoint, resource};
use highwater_core::clock::SECOND_NS;
use std::path::PathBuf;

pub use super::endpoint::{Endpoint, Headers, Protocol, Tls};
pub use super::environment::{EnvironmentFault, OF_KEY};

/// Which steps become traces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Spans {
    /// None.
    Off,
    /// Every step.
    All,
    /// Steps whose number is a multiple of this.
    OneIn(u64),
    /// Steps slower than this share of their rank's steps so far, 0 to 1.
    Slow(f64),
    /// Steps with a finding.
    Findings,
}

/// The form of the phases of a step that is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phases {
    /// Each is a span below that of the step.
    Spans,
    /// Attributes of the step's span, which is then one row of a table.
    Attributes,
}

/// Whether every change of memory is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Raw {
    /// Never.
    Never,
    /// From 10 s before each finding to 10 s after its last sign.
    Findings,
    /// All the time.
    Always,
}

/// How histograms and counters relate to earlier points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Temporality {
    /// Totals since their start.
    Cumulative,
    /// What was added since the last point.
    Delta,
    /// Histograms as [`Delta`](Self::Delta), counters as [`Cumulative`](Self::Cumulative).
    LowMemory,
}

/// The keys of the section `otlp`.
#[derive(Debug, Clone, PartialEq)]
pub struct Keys {
    /// Where to export to, in place of `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub endpoint: Option<String>,
    /// Which steps become traces.
    pub spans: Spans,
    /// The form of their phases.
    pub phases: Phases,
    /// Whether every change of memory is sent.
    pub raw: Raw,
    /// The most bytes that wait to be sent.
    pub queue_bytes: usize,
    /// Where waiting requests are kept over a restart.
    pub queue_dir: Option<PathBuf>,
}

impl Default for Keys {
    fn default() -> Self {
        Self {
            endpoint: None,
            spans: Spans::All,
            phases: Phases::Spans,
            raw: Raw::Never,
            queue_bytes: 64 << 20,
            queue_dir: None,
        }
    }
}

/// Everything that the exporter needs.
#[derive(Debug, Clone, PartialEq)]
pub struct OtlpSettings {
    /// Where metrics go, raw ones too.
    pub metrics: Option<Endpoint>,
    /// Where spans go.
    pub traces: Option<Endpoint>,
    /// Period of the snapshot, nanoseconds.
    pub interval_ns: i64,
    /// How points relate to earlier ones.
    pub temporality: Temporality,
    /// Whether durations are exported with fixed bounds instead of exponential buckets.
    pub explicit_histograms: bool,
    /// Which steps become traces.
    pub spans: Spans,
    /// The form of their phases.
    pub phases: Phases,
    /// Whether every change of memory is sent.
    pub raw: Raw,
    /// The most bytes that wait to be sent.
    pub queue_bytes: usize,
    /// Where waiting requests are kept over a restart.
    pub queue_dir: Option<PathBuf>,
    /// The attributes of the resource.
    pub resource: Vec<(String, String)>,
}

/// Whether [`resolve`] may read this variable of the environment.
#[must_use]
pub fn is_standard_variable(name: &str) -> bool {
    name.starts_with("OTEL_") || resource::VARIABLES.contains(&name)
}

/// The settings in force; `None` if nothing is to be exported.
///
/// # Errors
/// Every variable that cannot be understood.
pub fn resolve(keys: &Keys, variables: &[(String, String)]) -> Result<Option<OtlpSettings>, Vec<EnvironmentFault>> {
    let mut environment = Environment::of(variables);
    if environment.get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Ok(None);
    }
    let general = keys.endpoint.as_deref();
    let mut of = |names, exporter, wanted: bool| {
        let is_wanted = wanted
            && endpoint::is_set(names, general, &environment)
            && environment.read(exporter, is_exporter).unwrap_or(true);
        is_wanted.then(|| endpoint::resolve(names, general, &mut environment)).flatten()
    };
    let metrics = of(endpoint::METRICS, "OTEL_METRICS_EXPORTER", true);
    let traces = of(endpoint::TRACES, "OTEL_TRACES_EXPORTER", keys.spans != Spans::Off);
    if metrics.is_none() && traces.is_none() && environment.faults.is_empty() {
        return Ok(None);
    }
    let interval_ns = environment.read("OTEL_METRIC_EXPORT_INTERVAL", interval);
    let temporality = environment.read("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality);
    let explicit = environment.read("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", explicit_histograms);
    let resource = resource::detect(&mut environment);
    if !environment.faults.is_empty() {
        // A general variable is read for each signal, but its fault is reported once.
        let mut faults: Vec<EnvironmentFault> = Vec::new();
        for fault in environment.faults {
            if !faults.contains(&fault) {
                faults.push(fault);
            }
        }
        return Err(faults);
    }
    Ok(Some(OtlpSettings {
        metrics,
        traces,
        interval_ns: interval_ns.unwrap_or(60 * SECOND_NS),
        temporality: temporality.unwrap_or(Temporality::Cumulative),
        explicit_histograms: explicit.unwrap_or(false),
        spans: keys.spans,
        phases: keys.phases,
        raw: keys.raw,
        queue_bytes: keys.queue_bytes,
        queue_dir: keys.queue_dir.clone(),
        resource,
    }))
}

/// Whether a list of exporters has ours. A list with only others is a fault, because exporting nothing would be a
/// surprise.
fn is_exporter(text: &str) -> Result<bool, String> {
    let mut names = text.split(',').map(str::trim);
    if names.clone().any(|name| name == "otlp") {
        return Ok(true);
    }
    if names.all(|name| name == "none") { Ok(false) } else { Err(format!("`{text}` is neither otlp nor none")) }
}

fn interval(text: &str) -> Result<i64, String> {
    let milliseconds: i64 = text.parse().map_err(|_| format!("`{text}` is not a number of milliseconds"))?;
    if (100..=3_600_000).contains(&milliseconds) {
        return Ok(milliseconds * 1_000_000);
    }
    Err(format!("`{text}` is not between 100 and 3600000 milliseconds"))
}

fn explicit_histograms(text: &str) -> Result<bool, String> {
    match text {
        "explicit_bucket_histogram" => Ok(true),
        "base2_exponential_bucket_histogram" => Ok(false),
        _ => Err(format!("`{text}` is neither explicit_bucket_histogram nor base2_exponential_bucket_histogram")),
    }
}

fn temporality(text: &str) -> Result<Temporality, String> {
    match text.to_ascii_lowercase().as_str() {
        "cumulative" => Ok(Temporality::Cumulative),
        "delta" => Ok(Temporality::Delta),
        "lowmemory" => Ok(Temporality::LowMemory),
        _ => Err(format!("`{text}` is none of cumulative, delta, lowmemory")),
    }
}

/// Reads `otlp.spans`.
///
/// # Errors
/// What is wrong with it.
pub fn spans(text: &str) -> Result<Spans, String> {
    let slow = |percentile: &str| {
        let percentile: f64 = percentile.parse().ok()?;
        (percentile > 0.0 && percentile < 100.0).then_some(Spans::Slow(percentile / 100.0))
    };
    let parsed = match text {
        "off" => Some(Spans::Off),
        "all" => Some(Spans::All),
        "findings" => Some(Spans::Findings),
        _ => match (text.strip_prefix("1/"), text.strip_prefix("slow:p")) {
            (Some(number), _) => number.parse().ok().filter(|number| *number > 0).map(Spans::OneIn),
            (_, Some(percentile)) => slow(percentile),
            _ => None,
        },
    };
    parsed.ok_or_else(|| "is none of off, all, findings, 1/N, slow:pPERCENTILE (as slow:p95)".into())
}

/// Reads `otlp.phases`.
///
/// # Errors
/// What is wrong with it.
pub fn phases(text: &str) -> Result<Phases, String> {
    match text {
        "spans" => Ok(Phases::Spans),
        "attributes" => Ok(Phases::Attributes),
        _ => Err("is none of spans, attributes".into()),
    }
}

/// Reads `otlp.raw`.
///
/// # Errors
/// What is wrong with it.
pub fn raw(text: &str) -> Result<Raw, String> {
    match text {
        "never" => Ok(Raw::Never),
        "always" => Ok(Raw::Always),
        "findings" => Ok(Raw::Findings),
        _ => Err("is none of never, findings, always".into()),
    }
}

#[cfg(test)]
mod tests;
