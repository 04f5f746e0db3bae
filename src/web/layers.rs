//! `GET /api/v1/jobs/{job}/layers`: statistics of each rank's timed layers, one row per name, and each rank's last layer
//! profile.

use super::api::bad_query;
use super::phases::find;
use super::pieces::{self, Page, ROWS, Rows};
use super::problem::Problem;
use super::profiles;
use super::site::Site;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use highwater_core::jobs::JobId;
use highwater_core::phases::{LayerStats, Log};
use serde::{Deserialize, Serialize};
use std::ops::Bound;
use std::sync::Arc;
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// The query.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct LayersQuery {
    /// Only this rank; every rank if left out.
    rank: Option<u32>,
}

/// The answer, as it is written in pieces.
#[cfg(test)]
#[derive(ToSchema)]
#[allow(dead_code, reason = "describes what `pieces` writes, for the API's description")]
pub(super) struct LayersAnswer<'a> {
    job: String,
    layers: Vec<Row<'a>>,
    profiles: Vec<profiles::ListedProfile<'a>>,
}

/// Layers of a job: those with a begin and an end, in the order of ranks and names, and the last profile of each rank.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs/{job}/layers", tag = "jobs",
    params(("job" = String, Path, description = "Its name."), LayersQuery),
    responses((status = 200, body = LayersAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such job is known.", body = super::problem::Body),
        (status = 409, description = "Several owners have a job of this name.", body = super::problem::Body))))]
pub(super) async fn layers(
    State(site): State<Site>,
    Path(job): Path<String>,
    query: Result<Query<LayersQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(LayersQuery { rank }) = query.map_err(bad_query)?;
    let id = find(&site, &job)?;
    let profiles = profiles::RemainingProfiles::new(site.clone(), id.clone(), rank);
    let layers = RemainingLayers { job: id, site, rank, after: None };
    Ok(pieces::lists(&job, ("layers", layers), ("profiles", profiles)))
}

struct RemainingLayers {
    site: Site,
    job: JobId,
    rank: Option<u32>,
    /// The rank and the name of the last row.
    after: Option<(u32, Arc<str>)>,
}

impl Page for RemainingLayers {
    fn next(&mut self, rows: &mut Rows) {
        let shift_ns = self.site.state().unix_shift_ns();
        let log = self.site.state().ledger.ended();
        let mut last = None;
        for (rank, name, layer) in of_job(&log, &self.job, self.rank, self.after.as_ref()).take(ROWS) {
            rows.push(&Row::new(rank, name, layer, shift_ns));
            last = Some((rank, Arc::clone(name)));
        }
        drop(log);
        self.after = last.or(self.after.take());
    }
}

/// Layers of a job, or of one rank of it, after this one.
fn of_job<'a>(
    log: &'a Log,
    job: &'a JobId,
    only: Option<u32>,
    after: Option<&'a (u32, Arc<str>)>,
) -> impl Iterator<Item = (u32, &'a Arc<str>, &'a LayerStats)> {
    let first = after.map_or(0, |(rank, _)| *rank);
    let is_asked_for = move |rank: u32| rank >= first && only.is_none_or(|only| only == rank);
    let ranks = log.ranks().filter(move |((of, rank), _)| of == job && is_asked_for(*rank));
    ranks.flat_map(move |((_, rank), stats)| {
        let begun = after.filter(|(of, _)| of == rank);
        let from = begun.map_or(Bound::Unbounded, |(_, name)| Bound::Excluded(Arc::clone(name)));
        stats.layers.range((from, Bound::Unbounded)).map(move |(name, layer)| (*rank, name, layer))
    })
}

/// A layer of one rank. Bytes, nanoseconds and seconds; `null` if unknown.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
#[cfg_attr(test, schema(as = Layer))]
struct Row<'a> {
    rank: u32,
    layer: &'a str,
    order: usize,
    count: u64,
    #[serde(rename = "total_seconds")]
    total_s: f64,
    peak_bytes: Option<u64>,
    last: Last,
}

/// The last occurrence of the layer.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
#[cfg_attr(test, schema(as = LastLayer))]
struct Last {
    step: Option<u64>,
    begin_unix_nano: i64,
    end_unix_nano: i64,
    peak_bytes: Option<u64>,
    growth_bytes: Option<i64>,
    allocated_growth_bytes: Option<i64>,
    reserved_growth_bytes: Option<i64>,
}

impl<'a> Row<'a> {
    #[allow(clippy::cast_precision_loss, reason = "seconds to a microsecond")]
    fn new(rank: u32, layer: &'a str, stats: &LayerStats, shift_ns: i64) -> Self {
        let last = &stats.last;
        let last = Last {
            step: last.step,
            begin_unix_nano: last.begin_ns.saturating_add(shift_ns),
            end_unix_nano: last.end_ns.saturating_add(shift_ns),
            peak_bytes: last.peak_bytes,
            growth_bytes: last.growth_bytes,
            allocated_growth_bytes: last.allocated_growth_bytes,
            reserved_growth_bytes: last.reserved_growth_bytes,
        };
        let (order, count, peak_bytes) = (stats.order, stats.count, stats.peak_bytes);
        Self { rank, layer, order, count, total_s: stats.total_ns as f64 * 1e-9, peak_bytes, last }
    }
}
