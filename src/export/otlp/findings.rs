//! Findings on steps: which findings a step has, and the span event of each.
//!
//! Enters: steps that ended, and findings. Leaves: span events. A finding belongs to a step if it overlaps the step in time,
//! from its begin to its last sign, and names one of these: the step's rank, as its subject or as a waiting rank; the step's
//! job, and no rank; no job, and a GPU that the step ran on. A sign may be seen a moment after what it reports, so the next
//! step may get the finding too.

use super::context::Context;
use highwater_core::detect::{Finding, Severity};
use highwater_core::phases::Attributed;
use opentelemetry::trace::Event;
use opentelemetry::{Array, KeyValue, Value};

/// The context's findings that belong to a step.
pub(super) fn findings_of<'a>(step: &'a Attributed, context: &Context<'a>) -> impl Iterator<Item = &'a Finding> {
    context.findings.iter().filter(move |finding| {
        let (sign, ended) = (&finding.sign, &step.ended);
        let is_own = match (&sign.subject.job, sign.subject.rank) {
            (Some(job), Some(rank)) => {
                *job == ended.job && (rank == ended.rank || sign.waiting_ranks.contains(&ended.rank))
            }
            (Some(job), None) => *job == ended.job,
            (None, _) => is_on(step, finding),
        };
        is_own && sign.begin_ns <= ended.end_ns && finding.seen_ns >= ended.open.begin_ns
    })
}

/// Whether a step has a finding that is worth a trace.
pub(super) fn is_found(step: &Attributed, context: &Context) -> bool {
    findings_of(step, context).any(|finding| finding.sign.severity >= Severity::Warning)
}

/// Whether the step ran on the finding's GPU. Compared by UUID, because a position may mean another GPU once the driver
/// came back.
fn is_on(step: &Attributed, finding: &Finding) -> bool {
    let Some((_, uuid)) = &finding.gpu else { return false };
    step.gpus.iter().any(|gpu| step.uuid_of(gpu) == Some(uuid.as_str()))
}

/// The event of a finding, at its begin, or at the step's begin if that is later.
pub(super) fn event(finding: &Finding, step: &Attributed, context: &Context) -> Event {
    let sign = &finding.sign;
    let mut attributes = vec![
        KeyValue::new("highwater.finding.id", finding.id.cast_signed()),
        KeyValue::new("highwater.incident.id", finding.incident.cast_signed()),
        KeyValue::new("highwater.finding.severity", sign.severity.label()),
        KeyValue::new("highwater.finding.certainty", sign.certainty.label()),
        KeyValue::new("highwater.finding.what", sign.text.what.clone()),
    ];
    attributes.extend(
        sign.evidence
            .iter()
            .map(|evidence| KeyValue::new(format!("highwater.finding.{}", evidence.name), evidence.value)),
    );
    attributes.extend(sign.lag_cause.map(|cause| KeyValue::new("highwater.finding.lag_cause", cause.label())));
    if !finding.workloads.is_empty() {
        let names = finding.workload_names().into_iter().map(Into::into).collect();
        attributes.push(KeyValue::new("highwater.finding.workloads", Value::Array(Array::String(names))));
    }
    if !sign.waiting_ranks.is_empty() {
        let ranks = sign.waiting_ranks.iter().map(|rank| i64::from(*rank)).collect();
        attributes.push(KeyValue::new("highwater.finding.waiting_ranks", Value::Array(Array::I64(ranks))));
    }
    Event::new(sign.kind.label(), context.time(sign.begin_ns.max(step.ended.open.begin_ns)), attributes, 0)
}
