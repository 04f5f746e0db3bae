//! `GET /api/v1/jobs/{job}/advice`: what to change so that a job needs less memory.

use super::Site;
use super::api::bad_query;
use super::json;
use super::phases::know;
use super::problem::Problem;
use crate::advise::{Checkpoints, Layers, MOST_CHECKPOINTS, checkpoints};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use highwater_core::jobs::{Cursor, Profile};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// How many checkpoints are placed if nothing is said.
const CHECKPOINTS: usize = 4;

/// The query.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct AdviceQuery {
    /// How many checkpoints there may be; 4 if left out, at most 4096.
    checkpoints: Option<usize>,
    /// How many layers at the begin are left as they are; none if left out.
    skip_layers: Option<usize>,
    /// This rank's layers; those of the rank with the most activations if left out.
    rank: Option<u32>,
}

/// The answer.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct AdviceAnswer {
    job: String,
    /// Where to checkpoint activations.
    checkpoints: Checkpoints,
}

/// Where to checkpoint a job's activations, from its last layer profile.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs/{job}/advice", tag = "jobs",
    params(("job" = String, Path, description = "Its name."), AdviceQuery),
    responses((status = 200, body = AdviceAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such job is known, or it has sent no layer profile.", body = super::problem::Body))))]
pub(super) async fn advice(
    State(site): State<Site>,
    Path(job): Path<String>,
    query: Result<Query<AdviceQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(AdviceQuery { checkpoints: most, skip_layers, rank }) = query.map_err(bad_query)?;
    let (most, skipped) = (most.unwrap_or(CHECKPOINTS), skip_layers.unwrap_or(0));
    if most > MOST_CHECKPOINTS {
        let problem = format!("`checkpoints`: {most} is more than {MOST_CHECKPOINTS}");
        return Err(Problem::new(StatusCode::BAD_REQUEST, problem));
    }
    know(&site, &job)?;
    // Thousands of layers and checkpoints take a tenth of a second: one at a time, also if the client goes away meanwhile. The
    // profile is looked up after that, or those who wait would keep many.
    let alone = site.live.alone().await;
    let Some((rank, profile)) = profile(&site, &job, rank) else {
        let whose = rank.map_or_else(|| format!("job `{job}`"), |rank| format!("rank {rank} of job `{job}`"));
        return Err(Problem::new(StatusCode::NOT_FOUND, format!("{whose} has sent no layer profile")));
    };
    let name = job.clone();
    let advised = tokio::task::spawn_blocking(move || {
        let _alone = alone;
        let mut layers = Layers::of(Some(name), Some(rank), profile.step);
        layers.missing = profile.missing;
        let mut cursor = Cursor::default();
        while let Some(record) = profile.next(&mut cursor) {
            layers.add(&record.name, record.allocated, &record.layer)?;
        }
        checkpoints(&layers, most, skipped)
    });
    let failed = |error: tokio::task::JoinError| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    let advised = advised.await.map_err(failed)?;
    let checkpoints = advised.map_err(|problem| Problem::new(StatusCode::BAD_REQUEST, problem))?;
    let answer = json::line(&AdviceAnswer { job, checkpoints })?;
    Ok(site.answers.0.keep(answer).response(json::TYPE))
}

/// The last profile of this rank, or of the one with the most activations.
fn profile(site: &Site, job: &str, rank: Option<u32>) -> Option<(u32, Arc<Profile>)> {
    let jobs = site.known().ledger.open();
    let ranks = jobs.by_name().get(job)?.ranks.iter().filter(|(number, _)| rank.is_none_or(|rank| rank == **number));
    let profiles = ranks.filter_map(|(number, rank)| Some((*number, Arc::clone(rank.profile()?))));
    // Of equal ones, the first rank.
    profiles.min_by_key(|(_, profile)| std::cmp::Reverse(profile.totals.activations))
}
