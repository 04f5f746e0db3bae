//! `GET /api/v1/findings`: the findings, newest first. Times are Unix nanoseconds.

use super::Site;
use super::api::bad_query;
use super::json::Json;
use super::problem::Problem;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use highwater_core::detect::Finding;
use serde::Deserialize;
use serde_json::{Value, json};

/// Findings in one answer by default.
const FINDINGS: usize = 100;

/// The query.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FindingsQuery {
    /// Only active ones, or only those that have ended.
    active: Option<bool>,
    limit: Option<usize>,
}

/// Active and ended findings, newest first.
pub(super) async fn findings(
    State(site): State<Site>,
    query: Result<Query<FindingsQuery>, QueryRejection>,
) -> Result<Json<Value>, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let shift_ns = site.known().unix_shift_ns();
    let board = site.known().findings.board();
    let mut found: Vec<&Finding> = board.all().collect();
    found.retain(|finding| query.active.is_none_or(|active| active == finding.ended_ns.is_none()));
    found.sort_by_key(|finding| std::cmp::Reverse(finding.id));
    found.truncate(query.limit.unwrap_or(FINDINGS));
    let listed: Vec<Value> = found.into_iter().map(|finding| body(finding, shift_ns)).collect();
    Ok(Json(json!({ "findings": listed })))
}

fn body(finding: &Finding, shift_ns: i64) -> Value {
    let (sign, subject) = (&finding.sign, &finding.sign.subject);
    let (gpu, uuid) = finding.gpu.clone().unzip();
    let evidence: serde_json::Map<String, Value> =
        sign.evidence.iter().map(|evidence| (evidence.name.to_owned(), json!(evidence.value))).collect();
    json!({
        "id": finding.id, "finding": sign.kind, "severity": sign.severity, "certainty": sign.certainty,
        "gpu": gpu, "uuid": uuid, "job": subject.job.as_deref(), "rank": subject.rank, "step": sign.step,
        "begin_unix_nano": sign.begin_ns + shift_ns,
        "raised_unix_nano": finding.raised_ns + shift_ns,
        "seen_unix_nano": finding.seen_ns + shift_ns,
        "ended_unix_nano": finding.ended_ns.map(|ended_ns| ended_ns + shift_ns),
        "signs": finding.signs, "evidence": evidence,
        "what": sign.text.what, "why": sign.text.why, "advice": sign.text.advice,
    })
}
