//! `GET /api/v1/incidents`: findings that have one cause, as one; newest first. Times are Unix nanoseconds.

use super::api::{bad_query, owner_of};
use super::findings::FindingsQuery;
use super::json::Json;
use super::problem::Problem;
use super::site::Site;
use super::workloads::{self, PodNameAnswer, SlurmStepAnswer};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use highwater_core::detect::{Incident, KindFound};
use highwater_core::jobs::JobId;
use highwater_engine::shared_state::SharedState;
use serde::Serialize;
use std::sync::Arc;
#[cfg(test)]
use utoipa::ToSchema;

/// The answer.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct IncidentsAnswer {
    incidents: Vec<IncidentAnswer>,
}

/// An incident. Times are Unix nanoseconds; what does not apply or is not known is `null`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct IncidentAnswer {
    id: u64,
    /// What kind of cause: `gpu`, `held_back`, `memory`, `host_memory`, `input`, `late_rank`, `imbalance`, `idle` or `unexplained`.
    cause: &'static str,
    /// The highest of its findings.
    severity: &'static str,
    certainty: &'static str,
    #[cfg_attr(test, schema(value_type = Option<String>))]
    job: Option<Arc<str>>,
    /// The job as `/api/v1/jobs` has it under `id`.
    job_id: Option<String>,
    namespace: Option<String>,
    user: Option<String>,
    /// The ranks that are named as the cause, the first 64.
    ranks: Vec<u32>,
    /// The GPUs that are named, the first 16.
    gpus: Vec<IncidentGpu>,
    /// The pods that its findings are about, the first 8; empty if they are not known.
    pods: Vec<PodNameAnswer>,
    /// The Slurm steps, likewise.
    slurm_steps: Vec<SlurmStepAnswer>,
    /// Ranks that wait for these, the first 64.
    waiting_ranks: Vec<u32>,
    begin_unix_nano: i64,
    /// When it began the last time that it came back, or `begin_unix_nano`.
    again_unix_nano: i64,
    /// When its newest sign was seen. Severity, ranks, GPUs and texts are of the time since `again_unix_nano`.
    seen_unix_nano: i64,
    /// When its last finding ended; `null` while one goes on. If it comes back within 15 minutes it is the same incident.
    ended_unix_nano: Option<i64>,
    /// How many times it was there.
    times: u64,
    /// Time that ranks lost by it, summed over the ranks, seconds; `null` if no finding knows.
    lost_seconds: Option<f64>,
    /// What its cause says, why that is believed, and what to try: the texts of the first of `findings` that is `current`.
    what: String,
    why: String,
    advice: String,
    /// What was found, causes before what follows from them; one for each kind.
    findings: Vec<IncidentPart>,
}

/// A GPU.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct IncidentGpu {
    gpu: String,
    uuid: String,
}

/// The findings of one kind.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct IncidentPart {
    finding: &'static str,
    /// How many there were.
    count: u64,
    /// The id of the last one.
    last_id: u64,
    seen_unix_nano: i64,
    /// Whether one was seen since `again_unix_nano`; otherwise it is of a time before.
    current: bool,
    what: String,
}

/// Incidents, newest first.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/incidents", tag = "findings", params(FindingsQuery),
    responses((status = 200, body = IncidentsAnswer), (status = 400, body = super::problem::Body))))]
pub(super) async fn incidents(
    State(site): State<Site>,
    query: Result<Query<FindingsQuery>, QueryRejection>,
) -> Result<Json<IncidentsAnswer>, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    Ok(Json(found(site.state(), |incident| query.wants(incident.is_active()), query.most())))
}

/// All that go on.
pub(super) fn active(state: &SharedState) -> IncidentsAnswer {
    found(state, Incident::is_active, usize::MAX)
}

/// Those that are wanted, the newest first, at most `most`.
fn found(state: &SharedState, is_wanted: impl Fn(&Incident) -> bool, most: usize) -> IncidentsAnswer {
    let shift_ns = state.unix_shift_ns();
    let board = state.findings.board();
    let found = board.incidents().filter(|incident| is_wanted(incident)).take(most);
    IncidentsAnswer { incidents: found.map(|incident| answer(incident, shift_ns)).collect() }
}

fn answer(incident: &Incident, shift_ns: i64) -> IncidentAnswer {
    let (job, text) = (incident.whose.job(), &incident.text);
    let [namespace, user] = job.map(owner_of).unwrap_or_default();
    let gpu = |(index, uuid): &(String, String)| IncidentGpu { gpu: index.clone(), uuid: uuid.clone() };
    IncidentAnswer {
        id: incident.id,
        cause: incident.cause.label(),
        severity: incident.severity.label(),
        certainty: incident.certainty.label(),
        job: job.map(|job| Arc::clone(job.name())),
        job_id: job.map(JobId::text),
        namespace,
        user,
        ranks: incident.ranks.iter().copied().collect(),
        gpus: incident.gpus.iter().map(gpu).collect(),
        pods: workloads::pods(&incident.workloads),
        slurm_steps: workloads::slurm_steps(&incident.workloads),
        waiting_ranks: incident.waiting_ranks.iter().copied().collect(),
        begin_unix_nano: incident.begin_ns + shift_ns,
        again_unix_nano: incident.again_ns + shift_ns,
        seen_unix_nano: incident.seen_ns + shift_ns,
        ended_unix_nano: incident.ended_ns.map(|ended_ns| ended_ns + shift_ns),
        times: incident.times,
        #[allow(clippy::cast_precision_loss, reason = "nanoseconds of a job, as seconds")]
        lost_seconds: incident.lost_ns.map(|lost_ns| lost_ns as f64 / 1e9),
        what: text.what.clone(),
        why: text.why.clone(),
        advice: text.advice.clone(),
        findings: incident.parts.iter().map(|part| of_kind(part, shift_ns)).collect(),
    }
}

fn of_kind(part: &KindFound, shift_ns: i64) -> IncidentPart {
    IncidentPart {
        finding: part.kind.label(),
        count: part.findings,
        last_id: part.last_id,
        seen_unix_nano: part.seen_ns + shift_ns,
        current: part.is_now,
        what: part.what.clone(),
    }
}
