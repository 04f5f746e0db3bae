//! `GET /api/v1/jobs/{job}/layers`: statistics of each rank's layers, one row per name.

use super::Site;
use super::phases::know;
use super::pieces::{self, Page, ROWS, Rows};
use super::problem::Problem;
use axum::extract::{Path, State};
use axum::response::Response;
use highwater_core::phases::{LayerStats, Log};
use serde::Serialize;
use std::ops::Bound;
use std::sync::Arc;
#[cfg(test)]
use utoipa::ToSchema;

/// The answer, as it is written in pieces.
#[cfg(test)]
#[derive(ToSchema)]
#[allow(dead_code, reason = "describes what `pieces` writes, for the API's description")]
pub(super) struct LayersAnswer<'a> {
    job: String,
    layers: Vec<Row<'a>>,
}

/// Layers of every rank of a job, in the order of ranks and names.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs/{job}/layers", tag = "jobs",
    params(("job" = String, Path, description = "Its name.")),
    responses((status = 200, body = LayersAnswer),
        (status = 404, description = "No such job is known.", body = super::problem::Body))))]
pub(super) async fn layers(State(site): State<Site>, Path(job): Path<String>) -> Result<Response, Problem> {
    know(&site, &job)?;
    let left = Left { job: job.as_str().into(), site, after: None };
    Ok(pieces::list(&job, "layers", left))
}

struct Left {
    site: Site,
    job: Arc<str>,
    /// The rank and the name of the last row.
    after: Option<(u32, Arc<str>)>,
}

impl Page for Left {
    fn next(&mut self, rows: &mut Rows) {
        let shift_ns = self.site.known().unix_shift_ns();
        let log = self.site.known().ledger.ended();
        let mut last = None;
        for (rank, name, layer) in of_job(&log, &self.job, self.after.as_ref()).take(ROWS) {
            rows.push(&Row::new(rank, name, layer, shift_ns));
            last = Some((rank, Arc::clone(name)));
        }
        drop(log);
        self.after = last.or(self.after.take());
    }
}

/// Layers of a job after this one.
fn of_job<'a>(
    log: &'a Log,
    job: &'a str,
    after: Option<&'a (u32, Arc<str>)>,
) -> impl Iterator<Item = (u32, &'a Arc<str>, &'a LayerStats)> {
    let first = after.map_or(0, |(rank, _)| *rank);
    let ranks = log.ranks().filter(move |((of, rank), _)| &**of == job && *rank >= first);
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
