//! `GET /api/v1/timeline`: the steps and phases of an interval, as a chart draws them.
//!
//! Enters: an interval. Leaves: a row per rank, with the longest spans if there are more than one answer may have.
//! Invariant: spans are decoded without a lock.

use super::api::bad_query;
use super::json;
use super::problem::Problem;
use super::site::Site;
use super::spans::{self, RankSpans};
use crate::heap;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use highwater_core::jobs::JobId;
use highwater_core::phases::Span;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
#[cfg(test)]
use utoipa::{IntoParams, ToSchema};

/// The most spans of one answer: half a megabyte.
const MOST_SPANS: usize = 4_096;

/// The interval.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct TimelineQuery {
    /// Begin, Unix nanoseconds.
    from: i64,
    /// End, Unix nanoseconds.
    to: i64,
    /// Only spans of this job, as `/api/v1/jobs` has it under `id`.
    job: Option<String>,
    /// Only spans of these ranks, as `0,1,7`. With few ranks, fewer spans are left out.
    ranks: Option<String>,
}

impl TimelineQuery {
    /// The ranks that are asked for; `None` for all.
    fn ranks(&self) -> Result<Option<BTreeSet<u32>>, Problem> {
        let Some(ranks) = &self.ranks else { return Ok(None) };
        let of = |rank: &str| rank.trim().parse().map_err(|_| format!("ranks: {rank:?} is no number of a rank"));
        let ranks: Result<_, String> = ranks.split(',').map(of).collect();
        ranks.map(Some).map_err(|why| Problem::new(StatusCode::BAD_REQUEST, why))
    }
}

/// The answer.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct TimelineAnswer {
    /// Unix time that the times of spans are relative to, nanoseconds.
    base_unix_nano: i64,
    ranks: Vec<RankSpans>,
    /// How many spans of the interval are left out. None is longer than a span that is there.
    left_out: usize,
}

/// Steps and phases that overlap an interval, and all that are open now.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/timeline", tag = "live", params(TimelineQuery),
    responses((status = 200, body = TimelineAnswer), (status = 400, body = super::problem::Body))))]
pub(super) async fn timeline(
    State(site): State<Site>,
    query: Result<Query<TimelineQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let state = site.state();
    let node = state.slot.node();
    let shift_ns = state.unix_shift_ns();
    let (job, numbers) = (query.job.clone(), query.ranks()?);
    let (from_ns, to_ns) = (query.from.saturating_sub(shift_ns), query.to.saturating_sub(shift_ns));
    let blocks = state.ledger.ended().trail.blocks(from_ns, to_ns);
    // Decoding everything takes tens of milliseconds, and the threads that serve HTTP have scrapes to answer. One at a time,
    // also if the client goes away meanwhile.
    let alone = site.live.alone().await;
    let decoded = tokio::task::spawn_blocking(move || {
        let _alone = alone;
        let all = blocks.iter().flat_map(|block| block.spans());
        let mut is_asked = asked(job, numbers);
        heap::making(|| longest(all.filter(|span| span.end_ns >= from_ns && span.begin_ns <= to_ns && is_asked(span))))
    });
    let failed = |error: tokio::task::JoinError| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    let (longest, left_out) = decoded.await.map_err(failed)?;
    let mut ranks = spans::open(state, node.as_deref(), from_ns);
    longest.into_iter().for_each(|span| spans::add(&mut ranks, span, from_ns));
    let ranks = ranks.into_values().collect();
    let answer = TimelineAnswer { base_unix_nano: from_ns.saturating_add(shift_ns), ranks, left_out };
    Ok(site.answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

/// Whether a span is of this job, and of one of these ranks. The text of a job's id is made once for successive spans of one job.
fn asked(job: Option<String>, ranks: Option<BTreeSet<u32>>) -> impl FnMut(&Span) -> bool {
    let mut last: Option<(JobId, bool)> = None;
    move |span| {
        if ranks.as_ref().is_some_and(|ranks| !ranks.contains(&span.rank)) {
            return false;
        }
        let Some(job) = &job else { return true };
        match &last {
            Some((known, is_it)) if *known == span.job => *is_it,
            _ => {
                let is_it = span.job.text() == *job;
                last = Some((span.job.clone(), is_it));
                is_it
            }
        }
    }
}

/// The longest spans in the order of their numbers, and how many others there are.
fn longest(spans: impl Iterator<Item = Span>) -> (Vec<Span>, usize) {
    let mut kept = BTreeMap::new();
    let mut left_out = 0;
    for span in spans {
        kept.insert((span.end_ns.saturating_sub(span.begin_ns), span.number), span);
        if kept.len() > MOST_SPANS {
            kept.pop_first();
            left_out += 1;
        }
    }
    let mut kept: Vec<Span> = kept.into_values().collect();
    kept.sort_unstable_by_key(|span| span.number);
    (kept, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::wire::Kind;

    #[test]
    fn spans_are_those_of_the_job_and_the_ranks_that_are_asked_for() {
        let span = |job: &str, rank: u32| Span {
            number: 0,
            job: job.into(),
            rank,
            kind: Kind::Phase,
            name: "a".into(),
            step: None,
            begin_ns: 0,
            end_ns: 1,
            is_cut: false,
            peak_bytes: None,
        };
        let all = [span("j", 0), span("k", 0), span("j", 1), span("j", 7)];
        let found = |job: Option<&str>, ranks: Option<&str>| {
            let query = TimelineQuery { from: 0, to: 1, job: job.map(str::to_owned), ranks: ranks.map(str::to_owned) };
            let is_asked = asked(query.job.clone(), query.ranks().expect("numbers"));
            all.iter().map(is_asked).collect::<Vec<_>>()
        };
        let id = all[0].job.text();
        assert_eq!(found(None, None), [true; 4]);
        assert_eq!(found(Some(&id), None), [true, false, true, true]);
        assert_eq!(found(Some(&id), Some("7, 0")), [true, false, false, true]);
        assert_eq!(found(None, Some("0")), [true, true, false, false]);
        let bad = TimelineQuery { from: 0, to: 1, job: None, ranks: Some("1,x".to_owned()) };
        assert!(bad.ranks().is_err());
    }

    #[test]
    fn of_too_many_spans_the_longest_stay() {
        let span = |number: u64| Span {
            number,
            job: "j".into(),
            rank: 0,
            kind: Kind::Phase,
            name: "a".into(),
            step: None,
            begin_ns: 0,
            end_ns: (number % 100).cast_signed(),
            is_cut: false,
            peak_bytes: None,
        };
        let (kept, left_out) = longest((0..5_000).map(span));
        assert_eq!((kept.len(), left_out), (MOST_SPANS, 5_000 - MOST_SPANS));
        // 904 left out of 50 of each length: eighteen lengths, and four of the next.
        assert!(kept.iter().all(|span| span.end_ns >= 18));
        assert!(kept.is_sorted_by_key(|span| span.number));
        assert_eq!(longest((0..10).map(span)).1, 0);
    }
}
