//! What a trace of PyTorch's profiler says: its steps and collectives in numbers.
//!
//! Enters: an analysed trace. Leaves: its numbers, as text and for a page. Invariant: of the trace itself, only what ranks are
//! compared by is kept.

mod text;

use crate::timeline::{Analysis, AnnotationTime, ShortKernels, Trace};
use serde_json::{Value, json};

pub(super) use text::{
    headline, verdict, write_annotations, write_kernels, write_operators, write_ranks, write_short_kernels, write_trace,
};

/// The most steps that a page lists.
const MOST_STEPS: usize = 1_000;

/// The most operators, and the most annotations, that a page lists.
const MOST_OPERATORS: usize = 20;

/// What a trace says.
#[derive(Debug, Clone)]
pub struct Traced {
    /// In numbers.
    pub analysis: Analysis,
    /// Its collectives and steps, by which ranks are compared; `None` if the format has no ranks.
    pub(super) trace: Option<Trace>,
}

impl Traced {
    /// How many collectives it keeps.
    #[must_use]
    pub fn collectives(&self) -> usize {
        self.trace.as_ref().map_or(0, |trace| trace.collectives.len())
    }
}

/// A trace for a page: the numbers of its first steps, with the nanoseconds from the report's begin to each.
pub(super) fn page(traced: &Traced, begin_ns: i64) -> Value {
    let of = &traced.analysis;
    let steps = of.steps.iter().take(MOST_STEPS).map(|step| {
        let mut value = json!(step);
        if let Some(fields) = value.as_object_mut() {
            let after_ns = step.begin_unix_ns.map(|at_ns| at_ns.saturating_sub(begin_ns));
            fields.insert("begin_after_ns".to_owned(), json!(after_ns));
        }
        value
    });
    json!({
        "steps": steps.collect::<Vec<_>>(),
        "steps_left_out": of.steps.len().saturating_sub(MOST_STEPS),
        "operators": of.operators.iter().flatten().take(MOST_OPERATORS).collect::<Vec<_>>(),
        "annotations": of.annotations.iter().flatten().take(MOST_OPERATORS).map(annotation).collect::<Vec<_>>(),
        "short_kernels": of.short_kernels.iter().filter(|short| bounds(of, short)).take(MOST_STEPS).collect::<Vec<_>>(),
        "launch_delays": of.launch_delays.iter().take(MOST_STEPS).collect::<Vec<_>>(),
        "unusable_events": of.unusable_events,
        "unknown_collectives": of.unknown_collectives.iter().take(5).collect::<Vec<_>>(),
    })
}

/// An annotation for a page: the number of its steps instead of each of them.
fn annotation(of: &AnnotationTime) -> Value {
    json!({ "annotation": of.annotation, "all": of.all, "in_steps": of.in_steps(), "steps": of.steps.len() })
}

/// Whether launching its short kernels may bound a GPU.
fn bounds(analysis: &Analysis, short: &ShortKernels) -> bool {
    let of = analysis.steps.iter().filter(|step| step.device == short.device);
    short.bound(of.map(|step| step.window_ns).fold(0, u64::saturating_add))
}
