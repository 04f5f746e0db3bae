//! `GET /`: the live page, one document with its script and style inside.
//!
//! Leaves: the page; its script gets everything else from the API of the same server. Invariant: its content security
//! policy allows no script but its own, no connection to another server, and no page around it.

use super::site::Site;
use axum::extract::State;
use axum::http::header;
use axum::response::{Html, IntoResponse as _, Response};
use highwater_analysis::viewer::{Document, Page};
use serde_json::json;

const BODY: &str = include_str!("page/body.html");
const SCRIPTS: [&str; 11] = [
    include_str!("page/activity.js"),
    include_str!("page/breakdown.js"),
    include_str!("page/memory.js"),
    include_str!("page/ranks.js"),
    include_str!("page/feed.js"),
    include_str!("page/panels.js"),
    include_str!("page/incidents.js"),
    include_str!("page/holders.js"),
    include_str!("page/profiles.js"),
    include_str!("page/search.js"),
    include_str!("page/routes.js"),
];

/// Headers of documents: no other page may show them inside itself, and browsers keep them no longer than they show
/// them.
pub(super) const CLOSED: [(header::HeaderName, &str); 4] = [
    (header::CONTENT_SECURITY_POLICY, "frame-ancestors 'none'"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

/// The page.
pub(super) async fn page(State(site): State<Site>) -> Response {
    let data = json!({ "headroom_bytes": site.state().findings.settings().headroom_bytes });
    let page = Page { title: "highwater", body: BODY, scripts: &SCRIPTS, data: &data, connects: true };
    let Document { html, policy } = page.document();
    let policy = format!("{policy}; frame-ancestors 'none'");
    (CLOSED, [(header::CONTENT_SECURITY_POLICY, policy)], Html(html)).into_response()
}
