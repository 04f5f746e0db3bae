//! `GET /api/v1/jobs/{job}/advice`: what to change so that a job needs less memory.

use super::api::bad_query;
use super::json;
use super::phases::find;
use super::pieces::ROWS;
use super::problem::Problem;
use super::site::Site;
use crate::heap;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use highwater_analysis::advise::batch::{self, Observed, Peaks, Run, SizedStep};
use highwater_analysis::advise::{Checkpoints, MOST_CHECKPOINTS, StepLayers, checkpoints};
use highwater_core::jobs::{Cursor, EndedBy, JobId, Profile};
use highwater_core::phases::Attributed;
use highwater_core::wire::{Kind, Scalar};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// The query.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct AdviceQuery {
    /// How many checkpoints there may be, at most 4096. If left out, the parts have 4, and as many modules are named as bring
    /// the peak near the lowest that can be reached.
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
    /// Where to checkpoint activations; absent if the job has sent no layer profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoints: Option<Checkpoints>,
    /// Which batch size fits; absent if the steps that are kept do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<batch::Rank>,
}

/// Where to checkpoint a job's activations, from its last layer profile, and which batch size fits, from its last steps.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/jobs/{job}/advice", tag = "jobs",
    params(("job" = String, Path, description = "Its name."), AdviceQuery),
    responses((status = 200, body = AdviceAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "No such job is known, or it has sent no layer profile, and no two steps of different batch sizes.", body = super::problem::Body))))]
pub(super) async fn advice(
    State(site): State<Site>,
    Path(job): Path<String>,
    query: Result<Query<AdviceQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(AdviceQuery { checkpoints: most, skip_layers, rank }) = query.map_err(bad_query)?;
    let skipped = skip_layers.unwrap_or(0);
    if let Some(most) = most.filter(|most| *most > MOST_CHECKPOINTS) {
        let problem = format!("`checkpoints`: {most} is more than {MOST_CHECKPOINTS}");
        return Err(Problem::new(StatusCode::BAD_REQUEST, problem));
    }
    let id = find(&site, &job)?;
    // Thousands of layers and checkpoints take a tenth of a second, so only one request is computed at a time, even if its client
    // disconnects. The profile is looked up after the wait; otherwise, waiting requests would keep many profiles in memory.
    let alone = site.live.alone().await;
    let profile = profile(&site, &id, rank);
    let name = job.clone();
    let work = move || {
        let _alone = alone;
        let batch = observed(&site, &id, rank).advise();
        let Some((rank, profile)) = profile else {
            let whose = rank.map_or_else(|| format!("job `{name}`"), |rank| format!("rank {rank} of job `{name}`"));
            let why = |problem| (StatusCode::NOT_FOUND, format!("{whose} has sent no layer profile, and {problem}"));
            return batch.map(|batch| (site, None, Some(batch))).map_err(why);
        };
        let mut layers = StepLayers::of(Some(name), Some(rank), profile.step);
        layers.missing = profile.missing;
        let mut cursor = Cursor::default();
        while let Some(record) = profile.next(&mut cursor) {
            layers.add(&record.name, record.allocated, &record.layer).map_err(bad)?;
        }
        let checkpoints = checkpoints(&layers, most, skipped).map_err(bad)?;
        Ok((site, Some(checkpoints), batch.ok()))
    };
    let advised = tokio::task::spawn_blocking(|| heap::making(work));
    let failed = |error: tokio::task::JoinError| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    let advised = advised.await.map_err(failed)?;
    let (site, checkpoints, batch) = advised.map_err(|(status, problem)| Problem::new(status, problem))?;
    let answer = json::line(&AdviceAnswer { job, checkpoints, batch })?;
    Ok(site.answers.0.keep(answer).response(json::TYPE))
}

fn bad(problem: impl ToString) -> (StatusCode, String) {
    (StatusCode::BAD_REQUEST, problem.to_string())
}

/// A step that has its batch size and memory: when it began, that size, and its peaks with the GPU's UUID.
type Sized = (i64, u64, Peaks, String);

/// The steps of a job that are kept, of this rank or of all.
fn observed(site: &Site, job: &JobId, rank: Option<u32>) -> Observed {
    let mut steps: BTreeMap<u32, Vec<Sized>> = BTreeMap::new();
    let mut before = u64::MAX;
    loop {
        // A thread that ends a phase waits for the lock.
        let ledger = &site.state().ledger;
        let some: Vec<_> = {
            let log = ledger.ended();
            log.phases.of_job(job, before).take(ROWS).map(|(number, one)| (number, Arc::clone(one))).collect()
        };
        let Some((last, _)) = some.last() else { break };
        before = *last;
        for (_, one) in &some {
            let is_whole = one.ended.open.kind == Kind::Step && one.ended.by == EndedBy::End;
            if is_whole && rank.is_none_or(|rank| rank == one.ended.rank) {
                steps.entry(one.ended.rank).or_default().extend(sized(one));
            }
        }
    }
    let node = site.state().slot.node();
    let headroom_bytes = site.state().findings.settings().headroom_bytes;
    let limit = |uuid: &str| {
        let gpu = node.as_deref()?.gpus.iter().find(|gpu| gpu.device.uuid == uuid)?;
        Some(gpu.usable_bytes()?.saturating_sub(headroom_bytes))
    };
    let mut observed = Observed::default();
    for (rank, mut steps) in steps {
        steps.sort_unstable_by_key(|(begin_ns, ..)| *begin_ns);
        let mut run = Run::default();
        steps.iter().for_each(|(_, size, peaks, _)| run.add(*size, *peaks));
        let uuids: BTreeSet<&str> = steps.iter().map(|(.., uuid)| uuid.as_str()).collect();
        observed.add(rank, run, uuids.into_iter().filter_map(limit).min());
    }
    observed
}

fn sized(step: &Attributed) -> Option<Sized> {
    let attributes = step.ended.open.attributes.as_deref()?;
    let known = SizedStep::of(|name| match attributes.iter().find(|(known, _)| &**known == name)?.1 {
        Scalar::Int(value) => u64::try_from(value).ok(),
        _ => None,
    })?;
    let memory = step.gpus.iter().filter(|gpu| gpu.peak_bytes.is_some()).max_by_key(|gpu| gpu.peak_bytes)?;
    let uuid = step.uuid_of(memory)?.to_owned();
    Some((step.ended.open.begin_ns, known.batch_size, known.peaks(memory.peak_bytes?), uuid))
}

/// The last profile of this rank, or of the one with the most activations.
fn profile(site: &Site, job: &JobId, rank: Option<u32>) -> Option<(u32, Arc<Profile>)> {
    let jobs = site.state().ledger.open();
    let ranks = jobs.by_id().get(job)?.ranks.iter().filter(|(number, _)| rank.is_none_or(|rank| rank == **number));
    let profiles = ranks.filter_map(|(number, rank)| Some((*number, Arc::clone(rank.profile()?))));
    // Of equal ones, the first rank.
    profiles.min_by_key(|(_, profile)| std::cmp::Reverse(profile.totals.activations))
}
