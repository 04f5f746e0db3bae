//! `/api/v1/gpus/{gpu}/activity`: what a GPU did over time, as the medium lane read it, averaged to as many points as are asked for.

use super::api::{bad_query, find_gpu, node};
use super::json;
use super::problem::Problem;
use super::site::Site;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{ActivityMeans, ActivityShares};
use serde::{Deserialize, Serialize};
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// Points if the request names no number, and at most: a reading each 100 ms for ten minutes is 6,000.
const POINTS: usize = 2_000;
const MOST_POINTS: usize = 20_000;

/// The query of `GET /api/v1/gpus/{gpu}/activity`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct ActivityQuery {
    /// Begin, Unix nanoseconds; a minute before the end if left out. Before the oldest reading that is kept, for example 0, it
    /// means that time.
    from: Option<i64>,
    /// End, Unix nanoseconds; now if left out.
    to: Option<i64>,
    /// The most points; 2,000 if left out, at most 20,000. If there are more readings, each point is the mean of some.
    max_points: Option<usize>,
}

/// The answer of `GET /api/v1/gpus/{gpu}/activity`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct ActivityAnswer {
    gpu: String,
    uuid: String,
    /// How many readings a point is the mean of, at most.
    readings_each: usize,
    /// The Unix time of a point's newest reading, nanoseconds, and shares of the time before it, 0 to 1: with a kernel, of
    /// multiprocessors with a warp, of tensor cores, of memory that transfers. `null` is not known.
    #[cfg_attr(test, schema(value_type = Vec<Vec<Option<f64>>>))]
    points: Vec<Point>,
}

type Point = (i64, Option<f32>, Option<f32>, Option<f32>, Option<f32>);

/// A point of an answer. To a part in ten thousand: more digits would only make it longer.
fn point(at_unix_ns: i64, shares: ActivityShares) -> Point {
    #[allow(clippy::cast_possible_truncation, reason = "a share")]
    let [utilization, sm, tensor, dram] = shares.map(|share| share.map(|share| ((share * 1e4).round() / 1e4) as f32));
    (at_unix_ns, utilization, sm, tensor, dram)
}

/// What a GPU did in an interval, as far back as readings are kept.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/gpus/{gpu}/activity", tag = "gpus",
    params(("gpu" = String, Path, description = "Index, UUID or PCI bus id."), ActivityQuery),
    responses((status = 200, body = ActivityAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such GPU.", body = super::problem::Body),
        (status = 503, description = "Nothing is read; the detail says why.", body = super::problem::Body))))]
pub(super) async fn activity(
    State(site): State<Site>,
    Path(gpu): Path<String>,
    query: Result<Query<ActivityQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let node = node(&site)?;
    let state = &node.gpus[find_gpu(&node, gpu)?];
    let shift_ns = node.clock.unix_shift_ns();
    let to_ns = query.to.map_or_else(|| node.clock.now_ns(), |to| to.saturating_sub(shift_ns));
    let from_ns = query.from.map_or(to_ns.saturating_sub(60 * SECOND_NS), |from| from.saturating_sub(shift_ns));
    let readings = state.series.points(from_ns, to_ns);
    let most = query.max_points.unwrap_or(POINTS).clamp(1, MOST_POINTS);
    let readings_each = readings.len().div_ceil(most).max(1);
    let mut means = ActivityMeans::new(readings_each, usize::MAX, state.series.hold_ns());
    readings.iter().for_each(|reading| means.push(reading.at_ns, reading.shares()));
    let answer = ActivityAnswer {
        gpu: state.device.index.clone(),
        uuid: state.device.uuid.clone(),
        readings_each,
        points: means.points().map(|(at_ns, shares)| point(at_ns + shift_ns, shares)).collect(),
    };
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_has_four_digits_and_what_is_not_known_stays_so() {
        let of = point(102, [Some(0.955_555), None, Some(0.3), Some(1.0)]);
        assert_eq!(of, (102, Some(0.9556), None, Some(0.3), Some(1.0)));
    }
}
