//! `/api/v1/gpus/{gpu}/activity`: what a GPU did over time, as the medium lane read it, averaged to as many points as are asked for.

use super::api::{bad_query, find_gpu, node};
use super::problem::Problem;
use super::{Site, json};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::UsagePoint;
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

/// The mean of readings, of what is known. Each counts for the time since the one before it, at most for as long as readings hold:
/// a GPU on which nothing runs is read once a second, and others ten times. `before_ns` is the time of the reading before these.
fn mean(readings: &[UsagePoint], before_ns: Option<i64>, hold_ns: i64, shift_ns: i64) -> Option<Point> {
    let mean = |of: fn(&UsagePoint) -> Option<f64>| {
        let (mut weight, mut sum, mut before_ns) = (0.0, 0.0, before_ns);
        for reading in readings {
            // The first one of all says how much it counts only if it is alone.
            let since_ns = before_ns.map_or(1, |before_ns| (reading.at_ns - before_ns).clamp(1, hold_ns));
            #[allow(clippy::cast_precision_loss, reason = "seconds")]
            let own = since_ns as f64;
            if let Some(share) = of(reading) {
                (weight, sum) = (weight + own, sum + share * own);
            }
            before_ns = Some(reading.at_ns);
        }
        // To a part in ten thousand: more digits would only make the answer longer.
        #[allow(clippy::cast_possible_truncation, reason = "a share")]
        (weight > 0.0).then(|| ((sum / weight * 1e4).round() / 1e4) as f32)
    };
    Some((
        readings.last()?.at_ns + shift_ns,
        mean(|reading| reading.utilization_ratio),
        mean(|reading| reading.activity.sm_active_ratio),
        mean(|reading| reading.activity.tensor_active_ratio),
        mean(|reading| reading.activity.dram_active_ratio),
    ))
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
    let (mut before_ns, hold_ns) = (None, state.series.hold_ns());
    let points = readings.chunks(readings_each).filter_map(|some| {
        let point = mean(some, before_ns, hold_ns, shift_ns);
        before_ns = some.last().map(|last| last.at_ns);
        point
    });
    let answer = ActivityAnswer {
        gpu: state.device.index.clone(),
        uuid: state.device.uuid.clone(),
        readings_each,
        points: points.collect(),
    };
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::gpu::Activity;

    #[test]
    fn a_point_is_the_mean_of_what_is_known_by_time_at_its_newest_reading() {
        let reading = |at_ns, utilization: f64, tensor: Option<f64>| UsagePoint {
            at_ns,
            utilization_ratio: Some(utilization),
            activity: Activity { tensor_active_ratio: tensor, ..Activity::default() },
            ..UsagePoint::default()
        };
        let readings = [reading(1, 0.5, Some(0.3)), reading(2, 1.0, None)];
        let first = mean(&readings, Some(0), 100, 100);
        assert_eq!(first, Some((102, Some(0.75), None, Some(0.3), None)));
        // By their times, and no longer than readings hold.
        let readings = [reading(40, 0.0, None), reading(50, 1.0, None), reading(900, 1.0, None)];
        let mean_of = |hold_ns| mean(&readings, Some(0), hold_ns, 0).and_then(|point| point.1);
        assert_eq!((mean_of(1_000), mean_of(40)), (Some(0.9556), Some(0.5556)));
        assert_eq!(mean(&readings[..1], None, 40, 0), Some((40, Some(0.0), None, None, None)));
        assert_eq!(mean(&[], None, 40, 0), None);
    }
}
