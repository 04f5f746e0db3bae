//! One span: a step or phase that ended, with what memory did in it.

use super::context::Context;
use super::findings;
use super::resource::instrumentation;
use highwater_core::jobs::{Ended, EndedBy, Mark};
use highwater_core::phases::{Attributed, PhaseMemory};
use highwater_core::wire::{Kind, Memory, Scalar};
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status};
use opentelemetry::{Array, KeyValue, StringValue, Value};
use opentelemetry_proto::tonic::metrics::v1::{Exemplar, exemplar};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The span of a step or phase, at its place in the trace.
pub(super) fn span(
    attributed: &Attributed,
    own: SpanContext,
    parent: Option<&SpanContext>,
    context: &Context,
) -> SpanData {
    let ended = &attributed.ended;
    let mut events = SpanEvents::default();
    if ended.open.kind == Kind::Step {
        events.events = self::events(attributed, context);
    }
    SpanData {
        span_context: own,
        parent_span_id: parent.map_or(SpanId::INVALID, SpanContext::span_id),
        parent_span_is_remote: parent.is_some_and(SpanContext::is_remote),
        span_kind: SpanKind::Internal,
        name: match ended.open.kind {
            Kind::Step => Cow::Borrowed("highwater.step"),
            Kind::Phase | Kind::Layer => Cow::Owned(ended.open.name.to_string()),
        },
        start_time: context.time(ended.open.begin_ns),
        end_time: context.time(ended.end_ns),
        attributes: attributes(attributed),
        dropped_attributes_count: 0,
        events,
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: instrumentation(),
    }
}

/// Phases that a row has attributes for: the longest. Jobs choose their names.
pub(super) const MOST_PHASES_OF_A_ROW: usize = 16;
/// What a row leaves out. The peak and the drop of the step say more, and the allocator's totals are in the metrics.
const NOT_IN_A_ROW: [&str; 10] = [
    "highwater.memory.min",
    "highwater.memory.begin",
    "highwater.memory.end",
    "highwater.memory.growth",
    "highwater.allocator.allocated",
    "highwater.allocator.reserved",
    "highwater.allocator.active",
    "highwater.allocator.inactive_split",
    "highwater.allocator.retries",
    "highwater.allocator.ooms",
];

/// The span of a step that has its phases as attributes.
pub(super) fn row(
    step: &Attributed,
    phases: &[Arc<Attributed>],
    own: SpanContext,
    parent: Option<&SpanContext>,
    context: &Context,
) -> SpanData {
    let mut span = span(step, own, parent, context);
    span.attributes.retain(|attribute| !NOT_IN_A_ROW.contains(&attribute.key.as_str()));
    let mut by_name: BTreeMap<&str, (i64, Option<u64>)> = BTreeMap::new();
    for phase in phases {
        let (ns, peak) = by_name.entry(&phase.ended.open.name).or_default();
        *ns += phase.ended.end_ns - phase.ended.open.begin_ns;
        *peak = (*peak).max(phase.gpus.iter().filter_map(|gpu| gpu.peak_bytes).max());
    }
    let mut longest: Vec<_> = by_name.into_iter().collect();
    longest.sort_by_key(|(_, (ns, _))| Reverse(*ns));
    let left_out = longest.len().saturating_sub(MOST_PHASES_OF_A_ROW);
    for (name, (ns, peak)) in longest.into_iter().take(MOST_PHASES_OF_A_ROW) {
        #[allow(clippy::cast_precision_loss, reason = "seconds to a nanosecond")]
        let seconds = ns as f64 * 1e-9;
        span.attributes.push(KeyValue::new(format!("highwater.phase.{name}.seconds"), seconds));
        let peak = peak.map(|bytes| KeyValue::new(format!("highwater.phase.{name}.memory.peak"), bytes.cast_signed()));
        span.attributes.extend(peak);
    }
    if let Some(count) = i64::try_from(left_out).ok().filter(|count| *count > 0) {
        span.attributes.push(KeyValue::new("highwater.phases.left_out", count));
    }
    span
}

fn events(step: &Attributed, context: &Context) -> Vec<Event> {
    let ended = &step.ended;
    let is_own = |mark: &&Mark| {
        mark.job == ended.job && mark.rank == ended.rank && (ended.open.begin_ns..=ended.end_ns).contains(&mark.at_ns)
    };
    let event = |mark: &Mark| Event::new(mark.name.clone(), context.time(mark.at_ns), Vec::new(), 0);
    let marked = context.marks.iter().filter(is_own).map(event);
    marked.chain(findings::findings_of(step, context).map(|one| findings::event(one, step, context))).collect()
}

fn attributes(attributed: &Attributed) -> Vec<KeyValue> {
    let ended = &attributed.ended;
    let mut list = vec![
        KeyValue::new("highwater.job", Arc::clone(ended.job.name())),
        KeyValue::new("highwater.rank", i64::from(ended.rank)),
    ];
    let (namespace, user) = (ended.job.scope().namespace(), ended.job.scope().user());
    list.extend(namespace.map(|namespace| KeyValue::new("k8s.namespace.name", namespace.to_owned())));
    list.extend(user.map(|user| KeyValue::new("highwater.user", user.to_owned())));
    if let Some(step) = ended.open.step.and_then(|step| i64::try_from(step).ok()) {
        list.push(KeyValue::new("highwater.step", step));
    }
    if ended.open.kind == Kind::Phase {
        list.push(KeyValue::new("highwater.phase", Arc::clone(&ended.open.name)));
    }
    if ended.by == EndedBy::Exit {
        list.push(KeyValue::new("highwater.cut", true));
    }
    gpus(attributed, &mut list);
    memory(attributed, &mut list);
    allocator(ended.open.memory, ended.memory, &mut list);
    for (name, value) in ended.open.attributes.as_deref().unwrap_or_default() {
        let value = match value {
            Scalar::Bool(value) => Value::Bool(*value),
            Scalar::Int(value) => Value::I64(*value),
            Scalar::Float(value) => Value::F64(*value),
            Scalar::Text(value) => Value::String(value.clone().into()),
        };
        list.push(KeyValue::new(format!("highwater.attribute.{name}"), value));
    }
    list
}

fn gpus(attributed: &Attributed, list: &mut Vec<KeyValue>) {
    let uuids = attributed.gpus.iter().filter_map(|gpu| attributed.uuid_of(gpu));
    let mut values: Vec<StringValue> = uuids.map(|uuid| uuid.to_owned().into()).collect();
    match values.len() {
        0 => {}
        1 => list.push(KeyValue::new("hw.id", values.remove(0))),
        _ => list.push(KeyValue::new("hw.id", Value::Array(Array::String(values)))),
    }
}

/// What memory did: the highest value of several GPUs, as in the metrics of phases, and sums of what adds up.
fn memory(attributed: &Attributed, list: &mut Vec<KeyValue>) {
    let gpus = attributed.gpus.as_slice();
    let mut highest = |name: &'static str, of: fn(&PhaseMemory) -> Option<i64>| {
        list.extend(gpus.iter().filter_map(of).max().map(|value| KeyValue::new(name, value)));
    };
    highest("highwater.memory.peak", |gpu| Some(gpu.peak_bytes?.cast_signed()));
    highest("highwater.memory.min", |gpu| Some(gpu.min_bytes?.cast_signed()));
    highest("highwater.memory.begin", |gpu| Some(gpu.begin_bytes?.cast_signed()));
    highest("highwater.memory.end", |gpu| Some(gpu.end_bytes?.cast_signed()));
    highest("highwater.memory.growth", PhaseMemory::growth_bytes);
    highest("highwater.memory.drop", |gpu| Some(gpu.drop_bytes?.cast_signed()));
    highest("highwater.memory.outside_allocator", |gpu| gpu.outside_allocator_bytes.map(u64::cast_signed));
    highest("highwater.memory.gap_time_ns", |gpu| Some(gpu.gap_ns).filter(|gap_ns| *gap_ns > 0));
    let mut total = |name: &'static str, of: &dyn Fn(&PhaseMemory) -> Option<f64>| {
        if let Some(sum) = gpus.iter().map(of).sum::<Option<f64>>().filter(|_| !gpus.is_empty()) {
            list.push(KeyValue::new(name, sum));
        }
    };
    total("highwater.energy_joules", &|gpu| gpu.usage.energy_joules);
    total("highwater.gpu.idle_seconds", &|gpu| gpu.usage.idle_seconds);
    total("highwater.gpu.sm_active_seconds", &|gpu| attributed.active_of(gpu).sm.map(f64::from));
    total("highwater.gpu.tensor_active_seconds", &|gpu| attributed.active_of(gpu).tensor.map(f64::from));
    total("highwater.gpu.dram_active_seconds", &|gpu| attributed.active_of(gpu).dram.map(f64::from));
}

fn allocator(begin: Option<Memory>, end: Option<Memory>, list: &mut Vec<KeyValue>) {
    let Some(allocator) = end.or(begin) else { return };
    let mut add = |name: &str, value: Option<u64>| {
        let value = value.and_then(|value| i64::try_from(value).ok());
        list.extend(value.map(|value| KeyValue::new(format!("highwater.allocator.{name}"), value)));
    };
    add("allocated", allocator.allocated);
    add("reserved", allocator.reserved);
    add("active", allocator.active);
    add("inactive_split", allocator.inactive_split);
    add("retries", allocator.alloc_retries);
    add("ooms", allocator.ooms);
    let (begin, end) = (begin.unwrap_or_default(), end.unwrap_or_default());
    let added = |begin: Option<u64>, end: Option<u64>| end?.checked_sub(begin?);
    add("retries.added", added(begin.alloc_retries, end.alloc_retries));
    add("ooms.added", added(begin.ooms, end.ooms));
}

/// The exemplar that leads from a duration to its span.
pub(super) fn exemplar(ended: &Ended, own: &SpanContext, time_unix_nano: u64) -> Exemplar {
    #[allow(clippy::cast_precision_loss, reason = "seconds to a nanosecond")]
    let seconds = (ended.end_ns - ended.open.begin_ns) as f64 * 1e-9;
    Exemplar {
        time_unix_nano,
        trace_id: own.trace_id().to_bytes().to_vec(),
        span_id: own.span_id().to_bytes().to_vec(),
        value: Some(exemplar::Value::AsDouble(seconds)),
        ..Exemplar::default()
    }
}

/// The duration in an exemplar.
pub(super) fn seconds_of(exemplar: &Exemplar) -> f64 {
    match exemplar.value {
        Some(exemplar::Value::AsDouble(seconds)) => seconds,
        _ => 0.0,
    }
}
