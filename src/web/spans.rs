//! Steps and phases as the live page draws them: those that have ended, and those that are open.
//!
//! Enters: the ledger. Leaves: one row per rank, with times relative to a base, so that they are small and exact in
//! JavaScript. Invariant: the lock that annotations need is held only while what is open is copied.

use highwater_core::jobs::{JobId, Rank};
use highwater_core::phases::{RankKey, Span};
use highwater_core::wire::Kind;
use highwater_engine::node::Node;
use highwater_engine::shared_state::SharedState;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
#[cfg(test)]
use utoipa::ToSchema;

/// UUIDs of a rank's GPUs, as far as they are known.
pub(super) fn uuids(node: Option<&Node>, rank: &Rank) -> Vec<String> {
    let uuid = |gpu: &usize| Some(node?.gpus.get(*gpu)?.device.uuid.clone());
    rank.gpus.as_deref().unwrap_or_default().iter().filter_map(uuid).collect()
}

/// A rank with its steps and phases.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct RankSpans {
    #[cfg_attr(test, schema(value_type = String))]
    job: Arc<str>,
    /// The job as `/api/v1/jobs` has it under `id`.
    id: String,
    rank: u32,
    /// UUIDs of its GPUs, as far as they are known.
    gpus: Vec<String>,
    /// Number of its last step.
    step: Option<u64>,
    /// What has ended since the last event, or in the requested interval, in the order in which it ended.
    spans: Vec<EndedSpan>,
    /// What is open.
    open: Vec<OpenSpan>,
}

/// A step or phase that has ended. Times are microseconds relative to the event's `base_unix_nano`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct EndedSpan {
    /// A number that no other span of this daemon has.
    id: u64,
    #[cfg_attr(test, schema(value_type = String))]
    kind: Kind,
    #[cfg_attr(test, schema(value_type = String))]
    name: Arc<str>,
    step: Option<u64>,
    begin_us: i64,
    end_us: i64,
    /// Its rank ended while it was open.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    cut: bool,
    /// Highest memory in use on the rank's GPUs meanwhile, bytes; `null` if unknown.
    peak_bytes: Option<u64>,
}

/// A step or phase that has not ended.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct OpenSpan {
    #[cfg_attr(test, schema(value_type = String))]
    kind: Kind,
    #[cfg_attr(test, schema(value_type = String))]
    name: Arc<str>,
    step: Option<u64>,
    begin_us: i64,
}

/// Ranks in their order.
pub(super) type SpansByRank = BTreeMap<RankKey, RankSpans>;

/// All ranks that are known now, with what they have open. `base_ns` is on the current timeline.
pub(super) fn open(state: &SharedState, node: Option<&Node>, base_ns: i64) -> SpansByRank {
    let jobs = state.ledger.open();
    let of_rank = |(job, number, rank): (&JobId, u32, &highwater_core::jobs::Rank)| {
        // Layers have no place in the lanes: there may be thousands in a step.
        let open = rank.open.iter().filter(|open| open.kind != Kind::Layer).map(|open| OpenSpan {
            kind: open.kind,
            name: Arc::clone(&open.name),
            step: open.step,
            begin_us: open.begin_ns.saturating_sub(base_ns) / 1_000,
        });
        let spans = RankSpans {
            job: Arc::clone(job.name()),
            id: job.text(),
            rank: number,
            gpus: uuids(node, rank),
            step: rank.step,
            spans: Vec::new(),
            open: open.collect(),
        };
        ((job.clone(), number), spans)
    };
    jobs.ranks().map(of_rank).collect()
}

/// Adds a step or phase that has ended to its rank. A rank that is no longer known gets a row of its own.
pub(super) fn add(ranks: &mut SpansByRank, span: Span, base_ns: i64) {
    let rank = ranks.entry((span.job.clone(), span.rank)).or_insert_with(|| RankSpans {
        job: Arc::clone(span.job.name()),
        id: span.job.text(),
        rank: span.rank,
        gpus: Vec::new(),
        step: None,
        spans: Vec::new(),
        open: Vec::new(),
    });
    rank.spans.push(EndedSpan {
        id: span.number,
        kind: span.kind,
        name: span.name,
        step: span.step,
        begin_us: span.begin_ns.saturating_sub(base_ns) / 1_000,
        end_us: span.end_ns.saturating_sub(base_ns) / 1_000,
        cut: span.is_cut,
        peak_bytes: span.peak_bytes,
    });
}
