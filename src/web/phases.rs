//! `GET /api/v1/jobs/{job}/phases`: the steps and phases that ended, newest first, with their memory.

use super::api::bad_query;
use super::pieces::{self, Page, ROWS, Rows};
use super::problem::Problem;
use super::site::Site;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use highwater_core::jobs::{Attributes, EndedBy, JobId};
use highwater_core::phases::{Attributed, PhaseMemory, THRESHOLDS};
use highwater_core::wire::{Kind, Memory, Scalar};
use highwater_engine::node::Node;
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeSet;
use std::sync::Arc;
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// Phases in one answer by default.
const PHASES: usize = 1000;

/// The query.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct PhasesQuery {
    /// The most; 1,000 if left out.
    limit: Option<usize>,
}

/// The answer, as it is written in pieces.
#[cfg(test)]
#[derive(ToSchema)]
#[allow(dead_code, reason = "describes what `pieces` writes, for the API's description")]
pub(super) struct PhasesAnswer<'a> {
    job: String,
    phases: Vec<Phase<'a>>,
}

/// Steps and phases that ended, newest first, with their memory by GPU.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs/{job}/phases", tag = "jobs",
    params(("job" = String, Path, description = "Its name."), PhasesQuery),
    responses((status = 200, body = PhasesAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such job is known.", body = super::problem::Body),
        (status = 409, description = "Several owners have a job of this name.", body = super::problem::Body))))]
pub(super) async fn phases(
    State(site): State<Site>,
    Path(job): Path<String>,
    query: Result<Query<PhasesQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let id = find(&site, &job)?;
    let left = RemainingPhases { site, before: u64::MAX, left: query.limit.unwrap_or(PHASES), job: id };
    Ok(pieces::list(&job, "phases", left))
}

/// The job that a reader means: by its name, or with its owner before it.
///
/// # Errors
/// None is known, or several owners have a job of this name.
pub(super) fn find(site: &Site, job: &str) -> Result<JobId, Problem> {
    let ledger = &site.state().ledger;
    let open = ledger.open().by_id().keys().filter(|id| id.is_meant_by(job)).cloned().collect::<BTreeSet<_>>();
    let ids: Vec<JobId> = open.union(&ledger.ended().jobs_meant_by(job)).cloned().collect();
    match ids.as_slice() {
        [] => Err(Problem::new(StatusCode::NOT_FOUND, format!("no job `{job}` is known"))),
        [id] => Ok(id.clone()),
        several => {
            let ids = several.iter().map(|id| format!("`{}`", id.text())).collect::<Vec<_>>().join(", ");
            let problem = format!("several owners have a job `{job}`: name one of {ids}, with / written as %2F");
            Err(Problem::new(StatusCode::CONFLICT, problem))
        }
    }
}

struct RemainingPhases {
    site: Site,
    job: JobId,
    /// Only phases with lower numbers are left.
    before: u64,
    left: usize,
}

impl Page for RemainingPhases {
    fn next(&mut self, rows: &mut Rows) {
        let ended: Vec<_> = {
            let log = self.site.state().ledger.ended();
            let ended = log.phases.of_job(&self.job, self.before).take(self.left.min(ROWS));
            ended.map(|(number, attributed)| (number, Arc::clone(attributed))).collect()
        };
        let node = self.site.state().slot.node();
        let shift_ns = self.site.state().unix_shift_ns();
        for (number, attributed) in &ended {
            rows.push(&Phase::new(attributed, node.as_deref(), shift_ns));
            self.before = *number;
        }
        self.left -= ended.len();
    }
}

/// One step or phase that ended.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct Phase<'a> {
    rank: u32,
    #[cfg_attr(test, schema(value_type = String))]
    kind: Kind,
    phase: &'a str,
    step: Option<u64>,
    begin_unix_nano: i64,
    end_unix_nano: i64,
    /// It was open when its rank ended: how long it would have taken is not known.
    cut: bool,
    /// Counters of the job's allocator at the begin, as it sent them.
    #[cfg_attr(test, schema(value_type = Option<serde_json::Value>))]
    memory_begin: Option<Memory>,
    /// Counters of the job's allocator at the end, as it sent them.
    #[cfg_attr(test, schema(value_type = Option<serde_json::Value>))]
    memory_end: Option<Memory>,
    /// What else the job sent.
    #[cfg_attr(test, schema(value_type = Option<serde_json::Value>))]
    #[serde(serialize_with = "as_map")]
    attributes: Option<&'a Attributes>,
    gpus: Vec<OnGpu<'a>>,
}

/// Its memory on one GPU. Bytes, nanoseconds, joules and seconds; `null` if unknown.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct OnGpu<'a> {
    gpu: Option<&'a str>,
    uuid: Option<&'a str>,
    begin_bytes: Option<u64>,
    end_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    min_bytes: Option<u64>,
    mean_bytes: Option<f64>,
    growth_bytes: Option<i64>,
    drop_bytes: Option<u64>,
    /// Time with at least this share of the usable memory in use, by share.
    #[cfg_attr(test, schema(value_type = Option<serde_json::Value>))]
    #[serde(serialize_with = "by_threshold")]
    above_ns: Option<[i64; THRESHOLDS.len()]>,
    gap_ns: i64,
    energy_joules: Option<f64>,
    gpu_idle_seconds: Option<f64>,
    /// `null` if it took less than 2 s, as the next two: the readings are means of 500 ms.
    sm_active_seconds: Option<f32>,
    tensor_active_seconds: Option<f32>,
    dram_active_seconds: Option<f32>,
    outside_allocator_bytes: Option<u64>,
}

impl<'a> Phase<'a> {
    fn new(attributed: &'a Attributed, node: Option<&'a Node>, shift_ns: i64) -> Self {
        let (ended, open) = (&attributed.ended, &attributed.ended.open);
        Self {
            rank: ended.rank,
            kind: open.kind,
            phase: &open.name,
            step: open.step,
            begin_unix_nano: open.begin_ns + shift_ns,
            end_unix_nano: ended.end_ns + shift_ns,
            cut: ended.by == EndedBy::Exit,
            memory_begin: open.memory,
            memory_end: ended.memory,
            attributes: open.attributes.as_ref(),
            gpus: attributed.gpus.iter().map(|memory| OnGpu::new(attributed, memory, node)).collect(),
        }
    }
}

impl<'a> OnGpu<'a> {
    fn new(attributed: &'a Attributed, memory: &PhaseMemory, node: Option<&'a Node>) -> Self {
        let uuid = attributed.uuid_of(memory);
        let active = attributed.active_of(memory);
        let device = node.and_then(|node| node.gpus.get(memory.gpu)).map(|gpu| &gpu.device);
        Self {
            gpu: device.filter(|device| Some(device.uuid.as_str()) == uuid).map(|device| device.index.as_str()),
            uuid,
            begin_bytes: memory.begin_bytes,
            end_bytes: memory.end_bytes,
            peak_bytes: memory.peak_bytes,
            min_bytes: memory.min_bytes,
            mean_bytes: memory.mean_bytes,
            growth_bytes: memory.growth_bytes(),
            drop_bytes: memory.drop_bytes,
            above_ns: memory.above_ns,
            gap_ns: memory.gap_ns,
            energy_joules: memory.usage.energy_joules,
            gpu_idle_seconds: memory.usage.idle_seconds,
            sm_active_seconds: active.sm,
            tensor_active_seconds: active.tensor,
            dram_active_seconds: active.dram,
            outside_allocator_bytes: memory.outside_allocator_bytes,
        }
    }
}

#[allow(clippy::ref_option, reason = "the shape that serde asks for")]
fn as_map<S: Serializer>(attributes: &Option<&Attributes>, serializer: S) -> Result<S::Ok, S::Error> {
    let Some(attributes) = attributes else { return serializer.serialize_none() };
    let mut map = serializer.serialize_map(Some(attributes.len()))?;
    for (name, value) in attributes.iter() {
        map.serialize_entry::<str, Scalar>(name, value)?;
    }
    map.end()
}

#[allow(clippy::ref_option, reason = "the shape that serde asks for")]
fn by_threshold<S: Serializer>(above_ns: &Option<[i64; THRESHOLDS.len()]>, serializer: S) -> Result<S::Ok, S::Error> {
    let Some(above_ns) = above_ns else { return serializer.serialize_none() };
    let mut map = serializer.serialize_map(Some(above_ns.len()))?;
    for (threshold, ns) in THRESHOLDS.iter().zip(above_ns) {
        map.serialize_entry(threshold.label, ns)?;
    }
    map.end()
}
