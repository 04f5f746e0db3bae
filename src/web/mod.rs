//! HTTP: the landing page, the exposition, health, annotations, and the read API.
//!
//! Enters: requests. Leaves: answers from the node's state; every error is an RFC 9457 problem. Absent on purpose:
//! anything that waits for a lane or the driver.

mod answers;
mod api;
mod captures;
pub mod counts;
pub mod descriptors;
mod exposition;
mod findings;
mod health;
mod landing;
mod phases;
mod places;
pub mod problem;
pub mod serve;
mod stream;

use crate::annotate::Intake;
use crate::annotate::http::{Access, Door, post};
use crate::clock::Clock;
use crate::metrics::Snapshots;
use crate::node::Slot;
use crate::record::Recorder;
use answers::Answers;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing;
use exposition::Exposition;
use std::sync::Arc;

/// What the handlers look at.
#[derive(Clone)]
pub struct Site {
    /// The node of the moment.
    pub slot: Arc<Slot>,
    /// The jobs.
    pub intake: Arc<Intake>,
    /// The system's timeline, for times while there is no node.
    pub clock: Arc<dyn Clock>,
    /// Whether `/metrics` tells the memory of single processes.
    pub processes: bool,
    /// What became of points that were to be exported over OTLP, where they are.
    pub otlp: Option<Arc<crate::export::otlp::Stats>>,
    /// The flight recorder.
    pub recorder: Recorder,
    /// Long answers under way.
    pub answers: LongAnswers,
    /// What HTTP takes in.
    pub web: Arc<counts::Stats>,
}

/// Long answers under way: of their kind for each server.
#[derive(Clone, Debug, Default)]
pub struct LongAnswers(Arc<Answers>);

impl Site {
    /// What every exporter tells.
    #[must_use]
    pub fn snapshots(&self) -> Snapshots {
        Snapshots {
            slot: Arc::clone(&self.slot),
            intake: Arc::clone(&self.intake),
            clock: Arc::clone(&self.clock),
            processes: self.processes,
            otlp: self.otlp.clone(),
            recorder: self.recorder.clone(),
            web: Some(Arc::clone(&self.web)),
        }
    }
}

/// All routes.
pub fn router(site: Site, access: Access) -> axum::Router {
    let desk = captures::Desk { recorder: site.recorder.clone(), access: access.clone() };
    let door = Door { intake: Arc::clone(&site.intake), access };
    let captures = axum::Router::new()
        .route("/api/v1/captures", routing::get(captures::list).post(captures::ask))
        .route("/api/v1/captures/{id}", routing::get(captures::download))
        .with_state(desk);
    let exposition = Arc::<Exposition>::default();
    axum::Router::new()
        .route("/", routing::get(landing::page))
        .route("/metrics", routing::get(move |site| metrics(site, exposition)))
        .route("/healthz", routing::get(health::live))
        .route("/readyz", routing::get(health::ready))
        .route("/api/v1/gpus", routing::get(api::gpus))
        .route("/api/v1/gpus/{gpu}/memory", routing::get(api::memory))
        .route("/api/v1/jobs", routing::get(api::jobs))
        .route("/api/v1/jobs/{job}/phases", routing::get(phases::phases))
        .route("/api/v1/findings", routing::get(findings::findings))
        .with_state(site)
        .merge(axum::Router::new().route("/api/v1/annotations", routing::post(post)).with_state(door))
        .merge(captures)
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
}

/// What the kubelet asks, and nothing else.
pub fn probes(site: Site) -> axum::Router {
    let elsewhere = || async { problem::Problem::new(StatusCode::NOT_FOUND, "here are only `/healthz` and `/readyz`") };
    axum::Router::new()
        .route("/healthz", routing::get(health::live))
        .route("/readyz", routing::get(health::ready))
        .with_state(site)
        .fallback(elsewhere)
        .method_not_allowed_fallback(wrong_method)
}

async fn metrics(State(site): State<Site>, exposition: Arc<Exposition>) -> Response {
    let text = exposition.text(&site.answers.0, || crate::export::prometheus::encode(site.snapshots().collect()));
    match text.await {
        Ok(text) => text.response(crate::export::prometheus::CONTENT_TYPE),
        Err(error) => {
            tracing::error!(%error, "exposition failed");
            problem::Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the exposition failed; the log tells why")
                .into_response()
        }
    }
}

async fn not_found(uri: axum::http::Uri) -> problem::Problem {
    let detail = format!("there is no `{}`; `/` lists what there is", uri.path());
    problem::Problem::new(StatusCode::NOT_FOUND, detail)
}

async fn wrong_method(method: axum::http::Method, uri: axum::http::Uri) -> problem::Problem {
    problem::Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("`{}` does not take {method}", uri.path()))
}
