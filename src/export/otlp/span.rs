//! One span: what ended, with what memory did in it.

use super::context::Context;
use super::found;
use super::metrics::unix;
use super::resource::{attribute, text};
use super::trace::{Parent, SpanId};
use highwater_core::jobs::{Ended, Mark};
use highwater_core::phases::{Attributed, PhaseMemory};
use highwater_core::wire::{Kind, Memory, Scalar};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::{Exemplar, exemplar};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};

/// The span of a step or phase at its place.
pub(super) fn span(attributed: &Attributed, own: Parent, parent: Option<SpanId>, context: &Context) -> Span {
    let ended = &attributed.ended;
    let name = match ended.open.kind {
        Kind::Step => "highwater.step",
        _ => &*ended.open.name,
    };
    let events = if ended.open.kind == Kind::Step { events(attributed, context) } else { Vec::new() };
    Span {
        trace_id: own.trace.0.to_vec(),
        span_id: own.span.0.to_vec(),
        parent_span_id: parent.map(|parent| parent.0.to_vec()).unwrap_or_default(),
        name: name.into(),
        kind: SpanKind::Internal.into(),
        start_time_unix_nano: unix(ended.open.begin_ns + context.shift_ns),
        end_time_unix_nano: unix(ended.end_ns + context.shift_ns),
        attributes: attributes(attributed),
        events,
        ..Span::default()
    }
}

fn events(step: &Attributed, context: &Context) -> Vec<Event> {
    let ended = &step.ended;
    let is_own = |mark: &&Mark| {
        mark.job == ended.job && mark.rank == ended.rank && (ended.open.begin_ns..=ended.end_ns).contains(&mark.at_ns)
    };
    let event = |mark: &Mark| Event {
        name: mark.name.clone(),
        time_unix_nano: unix(mark.at_ns + context.shift_ns),
        ..Event::default()
    };
    let marked = context.marks.iter().filter(is_own).map(event);
    marked.chain(found::findings_of(step, context).map(|one| found::event(one, step, context.shift_ns))).collect()
}

fn attributes(attributed: &Attributed) -> Vec<KeyValue> {
    let ended = &attributed.ended;
    let mut list = vec![text("highwater.job", &ended.job), whole("highwater.rank", i64::from(ended.rank))];
    if let Some(step) = ended.open.step.and_then(|step| i64::try_from(step).ok()) {
        list.push(whole("highwater.step", step));
    }
    if ended.open.kind == Kind::Phase {
        list.push(text("highwater.phase", &ended.open.name));
    }
    gpus(attributed, &mut list);
    memory(&attributed.gpus, &mut list);
    allocator(ended.open.memory, ended.memory, &mut list);
    for (name, value) in ended.open.attributes.as_deref().unwrap_or_default() {
        let value = match value {
            Scalar::Bool(value) => Value::BoolValue(*value),
            Scalar::Int(value) => Value::IntValue(*value),
            Scalar::Float(value) => Value::DoubleValue(*value),
            Scalar::Text(value) => Value::StringValue(value.clone()),
        };
        list.push(attribute(&format!("highwater.attribute.{name}"), value));
    }
    list
}

fn gpus(attributed: &Attributed, list: &mut Vec<KeyValue>) {
    let uuids = attributed.gpus.iter().filter_map(|gpu| attributed.uuid_of(gpu));
    let values: Vec<_> = uuids.map(|uuid| AnyValue { value: Some(Value::StringValue(uuid.into())) }).collect();
    match values.as_slice() {
        [] => {}
        [one] => list.extend(one.value.clone().map(|value| attribute("hw.id", value))),
        _ => list.push(attribute("hw.id", Value::ArrayValue(ArrayValue { values }))),
    }
}

/// What memory did: of several GPUs the highest, as the metrics of phases have it, and sums of what adds up.
fn memory(gpus: &[PhaseMemory], list: &mut Vec<KeyValue>) {
    let mut highest = |name: &str, of: fn(&PhaseMemory) -> Option<i64>| {
        list.extend(gpus.iter().filter_map(of).max().map(|value| whole(name, value)));
    };
    highest("highwater.memory.peak", |gpu| Some(gpu.peak_bytes?.cast_signed()));
    highest("highwater.memory.min", |gpu| Some(gpu.min_bytes?.cast_signed()));
    highest("highwater.memory.begin", |gpu| Some(gpu.begin_bytes?.cast_signed()));
    highest("highwater.memory.end", |gpu| Some(gpu.end_bytes?.cast_signed()));
    highest("highwater.memory.growth", PhaseMemory::growth_bytes);
    highest("highwater.memory.drop", |gpu| Some(gpu.drop_bytes?.cast_signed()));
    highest("highwater.memory.outside_allocator", |gpu| gpu.outside_allocator_bytes.map(u64::cast_signed));
    highest("highwater.memory.gap_time_ns", |gpu| Some(gpu.gap_ns).filter(|gap_ns| *gap_ns > 0));
    let mut total = |name: &str, of: fn(&PhaseMemory) -> Option<f64>| {
        if let Some(sum) = gpus.iter().map(of).sum::<Option<f64>>().filter(|_| !gpus.is_empty()) {
            list.push(attribute(name, Value::DoubleValue(sum)));
        }
    };
    total("highwater.energy_joules", |gpu| gpu.usage.energy_joules);
    total("highwater.gpu.idle_seconds", |gpu| gpu.usage.idle_seconds);
}

fn allocator(begin: Option<Memory>, end: Option<Memory>, list: &mut Vec<KeyValue>) {
    let Some(told) = end.or(begin) else { return };
    let mut add = |name: &str, value: Option<u64>| {
        let value = value.and_then(|value| i64::try_from(value).ok());
        list.extend(value.map(|value| whole(&format!("highwater.allocator.{name}"), value)));
    };
    add("allocated", told.allocated);
    add("reserved", told.reserved);
    add("active", told.active);
    add("inactive_split", told.inactive_split);
    add("retries", told.alloc_retries);
    add("ooms", told.ooms);
    let (begin, end) = (begin.unwrap_or_default(), end.unwrap_or_default());
    let added = |begin: Option<u64>, end: Option<u64>| end?.checked_sub(begin?);
    add("retries.added", added(begin.alloc_retries, end.alloc_retries));
    add("ooms.added", added(begin.ooms, end.ooms));
}

fn whole(name: &str, value: i64) -> KeyValue {
    attribute(name, Value::IntValue(value))
}

/// What leads from a duration to its span.
pub(super) fn exemplar(ended: &Ended, own: Parent, time_unix_nano: u64) -> Exemplar {
    #[allow(clippy::cast_precision_loss, reason = "seconds to a nanosecond")]
    let seconds = (ended.end_ns - ended.open.begin_ns) as f64 * 1e-9;
    Exemplar {
        time_unix_nano,
        trace_id: own.trace.0.to_vec(),
        span_id: own.span.0.to_vec(),
        value: Some(exemplar::Value::AsDouble(seconds)),
        ..Exemplar::default()
    }
}

/// The duration that an exemplar has.
pub(super) fn seconds_of(exemplar: &Exemplar) -> f64 {
    match exemplar.value {
        Some(exemplar::Value::AsDouble(seconds)) => seconds,
        _ => 0.0,
    }
}
