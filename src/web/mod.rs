//! HTTP: the live page, the exposition, health, annotations, and the read API.
//!
//! Enters: requests. Leaves: the routes, whose handlers answer from the node's state (`site`); every error is an RFC 9457
//! problem. Absent on purpose: anything that waits for a lane or the driver.

mod accept;
mod activity;
mod advice;
pub mod annotations;
pub(crate) mod answers;
mod api;
mod breakdown;
mod captures;
mod connection;
pub mod counts;
pub mod descriptors;
mod exposition;
mod findings;
pub mod gate;
pub mod guard;
mod health;
pub mod hosts;
mod incidents;
mod job;
mod json;
mod layers;
pub mod live;
mod now;
mod openapi;
mod page;
mod phases;
mod pieces;
pub mod problem;
mod profiles;
mod sender;
pub mod serve;
mod site;
mod slots;
mod spans;
mod stream;
mod timeline;
mod workloads;

use crate::gzip;
use crate::heap;
use annotations::Door;
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing;
use exposition::{Expositions, Wanted};
use gate::Gate;
pub use now::{now, process_ids_of};
use problem::Problem;
use sender::Peer;
pub use site::{LongAnswers, Site};
use std::sync::Arc;

/// The routes of `listen`: everything, except what jobs send if that has a listener of its own.
pub fn router(site: Site, gate: Arc<Gate>, takes_annotations: bool) -> axum::Router {
    let captures = axum::Router::new()
        .route("/api/v1/captures", routing::get(captures::list))
        .route("/api/v1/captures/{id}", routing::get(captures::download))
        .route("/api/v1/captures/{id}/memory", routing::get(captures::memory))
        .route("/api/v1/captures/{id}/report", routing::get(captures::report))
        .with_state(captures::CaptureState::new(&site, &gate));
    let sent = if takes_annotations { sent(&site, &gate) } else { sent_elsewhere() };
    let expositions = Arc::<Expositions>::default();
    axum::Router::new()
        .route("/", routing::get(page::page))
        .route("/metrics", routing::get(move |site, peer, headers| metrics(site, peer, headers, expositions)))
        .route("/healthz", routing::get(health::live))
        .route("/readyz", routing::get(health::ready))
        .route("/api/v1/gpus", routing::get(api::gpus))
        .route("/api/v1/gpus/{gpu}/memory", routing::get(api::memory))
        .route("/api/v1/gpus/{gpu}/activity", routing::get(activity::activity))
        .route("/api/v1/gpus/{gpu}/breakdown", routing::get(breakdown::breakdown))
        .route("/api/v1/jobs", routing::get(api::jobs))
        .route("/api/v1/jobs/{job}", routing::get(job::job))
        .route("/api/v1/jobs/{job}/phases", routing::get(phases::phases))
        .route("/api/v1/jobs/{job}/layers", routing::get(layers::layers))
        .route("/api/v1/jobs/{job}/advice", routing::get(advice::advice))
        .route("/api/v1/findings", routing::get(findings::findings))
        .route("/api/v1/incidents", routing::get(incidents::incidents))
        .route("/api/v1/live", routing::get(live::live))
        .route("/api/v1/timeline", routing::get(timeline::timeline))
        .route("/api/v1/openapi.json", routing::get(openapi::openapi))
        .with_state(site)
        .merge(captures)
        .merge(sent)
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(gate, gate::pass))
}

/// The routes of `annotations.listen`: only what jobs send.
pub fn annotations(site: &Site, gate: Arc<Gate>) -> axum::Router {
    let elsewhere =
        || async { Problem::new(StatusCode::NOT_FOUND, "only annotations and capture requests are served here") };
    sent(site, &gate)
        .fallback(elsewhere)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(gate, gate::pass))
}

/// The routes for what jobs send.
fn sent(site: &Site, gate: &Gate) -> axum::Router {
    let door = Door { intake: Arc::clone(&site.intake), access: gate.access.clone() };
    let captures = axum::Router::new().route("/api/v1/captures", routing::post(captures::ask));
    let annotations = axum::Router::new().route("/api/v1/annotations", routing::post(annotations::post));
    annotations.with_state(door).merge(captures.with_state(captures::CaptureState::new(site, gate)))
}

fn sent_elsewhere() -> axum::Router {
    let elsewhere =
        || async { Problem::new(StatusCode::FORBIDDEN, "this endpoint is served only at `annotations.listen`") };
    gate::TAKE_TOKENS.into_iter().fold(axum::Router::new(), |routes, path| routes.route(path, routing::post(elsewhere)))
}

/// The probes of the kubelet, and nothing else.
pub fn probes(site: Site) -> axum::Router {
    let elsewhere = || async { Problem::new(StatusCode::NOT_FOUND, "only `/healthz` and `/readyz` are served here") };
    axum::Router::new()
        .route("/healthz", routing::get(health::live))
        .route("/readyz", routing::get(health::ready))
        .with_state(site)
        .fallback(elsewhere)
        .method_not_allowed_fallback(wrong_method)
}

async fn metrics(
    State(site): State<Site>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    expositions: Arc<Expositions>,
) -> Response {
    let wanted = Wanted { format: accept::format(&headers), is_compressed: accept::takes_gzip(&headers) };
    let format = wanted.format;
    site.note_scrape(peer.as_ref().map(|Extension(peer)| peer), &headers);
    // Compressing belongs to the making: until it is done, the whole text is there too.
    let make = || {
        heap::making(|| {
            let whole = format.encode(site.snapshots.expose());
            whole.map(|whole| if wanted.is_compressed { gzip::compress(&whole) } else { whole })
        })
    };
    let made = expositions.answer(wanted, &site.answers.0, make);
    match made.await {
        Ok(made) => {
            let mut response = made.response(format.content_type());
            let headers = response.headers_mut();
            headers.insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
            // An answer that was withdrawn is a problem in plain text.
            if wanted.is_compressed && response.status() == StatusCode::OK {
                response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            }
            response
        }
        Err(error) => {
            tracing::error!(%error, "exposition failed");
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the exposition failed; see the log").into_response()
        }
    }
}

async fn not_found(uri: axum::http::Uri) -> Problem {
    let detail = format!("there is no `{}`; `/` lists the endpoints", uri.path());
    Problem::new(StatusCode::NOT_FOUND, detail)
}

async fn wrong_method(method: axum::http::Method, uri: axum::http::Uri) -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("`{}` does not take {method}", uri.path()))
}
