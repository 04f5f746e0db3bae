//! `GET /api/v1/findings`: the findings, newest first. Times are Unix nanoseconds.

use super::api::{bad_query, owner_of};
use super::json::Json;
use super::problem::Problem;
use super::site::Site;
use super::workloads::{self, PodNameAnswer, SlurmStepAnswer};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use highwater_core::detect::{Finding, LagCause, Said};
use highwater_core::jobs::JobId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// Findings or incidents in one answer by default.
const FINDINGS: usize = 100;

/// The query of findings, and of incidents.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct FindingsQuery {
    /// Only active ones, or only those that have ended.
    active: Option<bool>,
    /// The most; 100 if left out.
    limit: Option<usize>,
}

impl FindingsQuery {
    /// Whether one that goes on, or one that has ended, is asked for.
    pub(super) fn wants(&self, is_active: bool) -> bool {
        self.active.is_none_or(|active| active == is_active)
    }

    /// The most.
    pub(super) fn most(&self) -> usize {
        self.limit.unwrap_or(FINDINGS)
    }
}

/// The answer.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct FindingsAnswer {
    findings: Vec<FindingAnswer>,
}

/// A finding. Times are Unix nanoseconds; what does not apply is `null`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct FindingAnswer {
    id: u64,
    /// The incident that it belongs to: its id in `/api/v1/incidents`.
    incident: u64,
    finding: &'static str,
    severity: &'static str,
    certainty: &'static str,
    gpu: Option<String>,
    uuid: Option<String>,
    #[cfg_attr(test, schema(value_type = Option<String>))]
    job: Option<Arc<str>>,
    /// The job as `/api/v1/jobs` has it under `id`.
    job_id: Option<String>,
    namespace: Option<String>,
    user: Option<String>,
    rank: Option<u32>,
    /// The pods that it is about, where the kubelet is asked: its rank's, or those that have its GPU, the one that holds most
    /// memory first, at most 8. Empty if they are not known.
    pods: Vec<PodNameAnswer>,
    /// The same of the steps of Slurm's jobs, where no kubelet is asked.
    slurm_steps: Vec<SlurmStepAnswer>,
    /// Ranks of the job that wait for this one, the first 64.
    waiting_ranks: Vec<u32>,
    /// Why a rank is late, in one word, where the readings decide: `computes`, `clocks`, `host`, `garbage_collector`, `data`, `memory`.
    lag_cause: Option<&'static str>,
    step: Option<u64>,
    begin_unix_nano: i64,
    raised_unix_nano: i64,
    /// When the newest sign was seen: `step`, `evidence` and the texts are those of this moment.
    seen_unix_nano: i64,
    /// When it ended, which is when its last sign was seen; `null` while it goes on.
    ended_unix_nano: Option<i64>,
    /// How often it was seen.
    signs: u64,
    /// What was measured, by name; each name ends in its unit.
    evidence: BTreeMap<&'static str, f64>,
    what: String,
    why: String,
    advice: String,
    /// What its first sign said.
    first: SaidAnswer,
}

/// What one sign said, when it was seen.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct SaidAnswer {
    seen_unix_nano: i64,
    step: Option<u64>,
    what: String,
    why: String,
}

impl SaidAnswer {
    fn of(said: &Said, shift_ns: i64) -> Self {
        let (what, why) = (said.what.clone(), said.why.clone());
        Self { seen_unix_nano: said.seen_ns + shift_ns, step: said.step, what, why }
    }
}

/// Active and ended findings, newest first.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/findings", tag = "findings", params(FindingsQuery),
    responses((status = 200, body = FindingsAnswer), (status = 400, body = super::problem::Body))))]
pub(super) async fn findings(
    State(site): State<Site>,
    query: Result<Query<FindingsQuery>, QueryRejection>,
) -> Result<Json<FindingsAnswer>, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let shift_ns = site.state().unix_shift_ns();
    let board = site.state().findings.board();
    let mut found: Vec<&Finding> = board.all().collect();
    found.retain(|finding| query.wants(finding.ended_ns.is_none()));
    found.sort_by_key(|finding| std::cmp::Reverse(finding.id));
    found.truncate(query.most());
    Ok(Json(FindingsAnswer { findings: found.into_iter().map(|finding| answer(finding, shift_ns)).collect() }))
}

fn answer(finding: &Finding, shift_ns: i64) -> FindingAnswer {
    let (sign, subject) = (&finding.sign, &finding.sign.subject);
    let (gpu, uuid) = finding.gpu.clone().unzip();
    let [namespace, user] = subject.job.as_ref().map(owner_of).unwrap_or_default();
    FindingAnswer {
        id: finding.id,
        incident: finding.incident,
        finding: sign.kind.label(),
        severity: sign.severity.label(),
        certainty: sign.certainty.label(),
        gpu,
        uuid,
        job: subject.job.as_ref().map(|job| Arc::clone(job.name())),
        job_id: subject.job.as_ref().map(JobId::text),
        namespace,
        user,
        rank: subject.rank,
        pods: workloads::pods(&finding.workloads),
        slurm_steps: workloads::slurm_steps(&finding.workloads),
        waiting_ranks: sign.waiting_ranks.clone(),
        lag_cause: sign.lag_cause.map(LagCause::label),
        step: sign.step,
        begin_unix_nano: sign.begin_ns + shift_ns,
        raised_unix_nano: finding.raised_ns + shift_ns,
        seen_unix_nano: finding.seen_ns + shift_ns,
        ended_unix_nano: finding.ended_ns.map(|ended_ns| ended_ns + shift_ns),
        signs: finding.signs,
        evidence: sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect(),
        what: sign.text.what.clone(),
        why: sign.text.why.clone(),
        advice: sign.text.advice.clone(),
        first: SaidAnswer::of(&finding.first, shift_ns),
    }
}
