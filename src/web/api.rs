//! The read API: GPUs, their memory over time, and jobs. Times are Unix nanoseconds.

use super::Site;
use super::json::{self, Json};
use super::problem::Problem;
use crate::node::Node;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::Health;
use highwater_core::jobs::{Gpus, Rank};
use highwater_core::ring::QueryError;
use highwater_core::wire;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// Points in one answer by default.
const POINTS: usize = 10_000;
/// The most points that a client may request.
const MOST_POINTS: usize = 100_000;

fn node(site: &Site) -> Result<Arc<Node>, Problem> {
    site.known().slot.node().ok_or_else(|| {
        let trouble = site.known().slot.trouble();
        let detail = trouble.map_or_else(|| "starting".into(), |trouble| trouble.message.clone());
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    })
}

/// `GET /api/v1/gpus`
pub(super) async fn gpus(State(site): State<Site>) -> Result<Json<Value>, Problem> {
    let node = node(&site)?;
    let gpus = node.gpus.iter().zip(node.rings.iter()).map(|(gpu, ring)| {
        let used = ring.newest_ns().and_then(|newest_ns| ring.at(newest_ns).ok().flatten());
        json!({
            "gpu": gpu.device.index, "uuid": gpu.device.uuid, "name": gpu.device.name,
            "pci_bus_id": gpu.device.pci_bus_id, "parent_uuid": gpu.device.parent_uuid,
            "up": gpu.health() == Health::Up,
            "trouble": (gpu.health() != Health::Up).then(|| gpu.trouble()).filter(|trouble| !trouble.is_empty()),
            "memory_total_bytes": gpu.total_bytes(), "memory_reserved_bytes": gpu.reserved_bytes(),
            "memory_used_bytes": used.filter(|_| gpu.health() == Health::Up),
            "oldest_unix_nano": ring.oldest_ns().map(|at_ns| at_ns + node.clock.unix_shift_ns()),
            "newest_unix_nano": ring.newest_ns().map(|at_ns| at_ns + node.clock.unix_shift_ns()),
        })
    });
    let skipped = node.source.skipped().iter();
    let skipped = skipped.map(|gpu| json!({"gpu": gpu.index, "uuid": null, "up": false, "trouble": gpu.reason}));
    Ok(Json(json!({ "source": node.source.description(), "gpus": gpus.chain(skipped).collect::<Vec<_>>() })))
}

/// The query of `GET /api/v1/gpus/{gpu}/memory`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemoryQuery {
    /// Begin, Unix nanoseconds; a minute before the end if left out.
    from: Option<i64>,
    /// End; the newest sample if left out.
    to: Option<i64>,
    max_points: Option<usize>,
}

/// `GET /api/v1/gpus/{gpu}/memory`: the change points in an interval; `null` begins a gap.
pub(super) async fn memory(
    State(site): State<Site>,
    Path(gpu): Path<String>,
    query: Result<Query<MemoryQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let node = node(&site)?;
    let devices: Vec<_> = node.gpus.iter().map(|gpu| gpu.device.clone()).collect();
    let unknown = |name| Problem::new(StatusCode::NOT_FOUND, format!("no GPU `{name}` on this node"));
    let position = Gpus::new(&devices).resolve(&wire::Gpus::One(wire::Gpu::Name(gpu))).map_err(unknown)?[0];
    let (ring, state) = (&node.rings[position], &node.gpus[position]);
    let shift_ns = node.clock.unix_shift_ns();
    let empty = || Problem::new(StatusCode::NOT_FOUND, "no memory has been read of this GPU yet");
    let (oldest_ns, newest_ns) = (ring.oldest_ns().ok_or_else(empty)?, ring.newest_ns().ok_or_else(empty)?);
    let to_ns = query.to.map_or(newest_ns, |to| to.saturating_sub(shift_ns)).min(newest_ns);
    let from_ns = query.from.map_or(to_ns.saturating_sub(60 * SECOND_NS), |from| from.saturating_sub(shift_ns));
    let from_ns = from_ns.max(oldest_ns);
    let most = query.max_points.unwrap_or(POINTS).clamp(4, MOST_POINTS);
    // A change exactly at the end belongs to the next interval, except for the newest reading, which may have no next
    // interval.
    let (points, summary) = if to_ns == newest_ns {
        (ring.points_through(from_ns, to_ns, most), ring.summary_through(from_ns, to_ns))
    } else {
        (ring.points(from_ns, to_ns, most), ring.summary(from_ns, to_ns))
    };
    let points = points.map_err(|error| query_problem(&error))?;
    let summary = summary.map_err(|error| query_problem(&error))?;
    let answer = MemoryAnswer {
        gpu: state.device.index.clone(),
        uuid: state.device.uuid.clone(),
        from_unix_nano: from_ns + shift_ns,
        to_unix_nano: to_ns + shift_ns,
        peak_bytes: summary.max,
        min_bytes: summary.min,
        mean_bytes: summary.mean,
        gap_ns: summary.gap_ns,
        points: points.iter().map(|point| (point.at_ns + shift_ns, point.used)).collect(),
    };
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

/// The answer of `GET /api/v1/gpus/{gpu}/memory`.
#[derive(Serialize)]
pub(super) struct MemoryAnswer {
    gpu: String,
    uuid: String,
    from_unix_nano: i64,
    to_unix_nano: i64,
    peak_bytes: Option<u64>,
    min_bytes: Option<u64>,
    mean_bytes: Option<f64>,
    gap_ns: i64,
    /// Time and bytes; `null` begins a gap.
    points: Vec<(i64, Option<u64>)>,
}

fn query_problem(error: &QueryError) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, error.to_string())
}

#[allow(clippy::needless_pass_by_value, reason = "the shape that map_err takes")]
pub(super) fn bad_query(rejection: QueryRejection) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, rejection.body_text())
}

/// `GET /api/v1/jobs`
pub(super) async fn jobs(State(site): State<Site>) -> Json<Value> {
    let node = site.known().slot.node();
    let shift_ns = site.known().unix_shift_ns();
    let jobs = site.known().ledger.open();
    let rank = |number: &u32, rank: &Rank| {
        let gpus = rank.gpus.as_deref().unwrap_or_default().iter();
        let uuid = |gpu: &usize| Some(node.as_ref()?.gpus.get(*gpu)?.device.uuid.clone());
        json!({
            "rank": number, "world_size": rank.world_size, "pid": rank.pid, "step": rank.step, "steps": rank.steps,
            "gpus": gpus.filter_map(uuid).collect::<Vec<_>>(),
            "open": rank.open.iter().map(|open| &*open.name).collect::<Vec<_>>(),
            "last_annotation_unix_nano": rank.last_event_ns.saturating_add(shift_ns),
        })
    };
    let listed = jobs.by_name().iter().map(|(name, job)| {
        json!({ "job": name, "ranks": job.ranks.iter().map(|(number, r)| rank(number, r)).collect::<Vec<_>>() })
    });
    Json(json!({ "jobs": listed.collect::<Vec<_>>() }))
}
