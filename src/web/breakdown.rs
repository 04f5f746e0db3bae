//! `/api/v1/gpus/{gpu}/breakdown`: who held a GPU's memory over time, by the second.

use super::api::{bad_query, find_gpu, node};
use super::json;
use super::problem::Problem;
use super::site::Site;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use highwater_core::gpu::BreakdownPoint;
use serde::{Deserialize, Serialize};
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// The query of `GET /api/v1/gpus/{gpu}/breakdown`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct BreakdownQuery {
    /// Begin, Unix nanoseconds; the oldest that is kept if left out. The point that holds then comes first.
    from: Option<i64>,
    /// End, Unix nanoseconds; now if left out.
    to: Option<i64>,
}

/// The answer of `GET /api/v1/gpus/{gpu}/breakdown`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct BreakdownAnswer {
    gpu: String,
    uuid: String,
    /// The begin of a second, Unix nanoseconds, and bytes from then on until the next point: what the allocators of the GPU's ranks have
    /// given out (the most within the second), what these allocators keep beside it, what the same processes hold outside of them, what
    /// processes of ranks hold of whose allocators nothing is known, and what all other processes hold. `null` is not known.
    #[cfg_attr(test, schema(value_type = Vec<Vec<Option<i64>>>))]
    points: Vec<Point>,
}

type Point = (i64, Option<u64>, Option<u64>, Option<u64>, Option<u64>, Option<u64>);

fn point(BreakdownPoint { at_ns, parts }: BreakdownPoint, shift_ns: i64) -> Point {
    let [allocated, cached, outside, processes, others] = parts.all();
    (at_ns.saturating_add(shift_ns), allocated, cached, outside, processes, others)
}

/// Who held a GPU's memory in an interval, as far back as that is kept.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/gpus/{gpu}/breakdown", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or PCI bus id."), BreakdownQuery),
    responses((status = 200, body = BreakdownAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such GPU.", body = super::problem::Body),
        (status = 503, description = "Nothing is read; the detail says why.", body = super::problem::Body))))]
pub(super) async fn breakdown(
    State(site): State<Site>,
    Path(gpu): Path<String>,
    query: Result<Query<BreakdownQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let node = node(&site)?;
    let state = &node.gpus[find_gpu(&node, gpu)?];
    let shift_ns = node.clock.unix_shift_ns();
    let time = |unix_ns: Option<i64>, other_ns| unix_ns.map_or(other_ns, |unix_ns| unix_ns.saturating_sub(shift_ns));
    let points = state.breakdown.points(time(query.from, i64::MIN), time(query.to, node.clock.now_ns()));
    let answer = BreakdownAnswer {
        gpu: state.device.index.clone(),
        uuid: state.device.uuid.clone(),
        points: points.into_iter().map(|held| point(held, shift_ns)).collect(),
    };
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}
