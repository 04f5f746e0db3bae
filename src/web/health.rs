//! Whether the daemon lives, and whether it has something to tell.

use super::Site;
use super::problem::Problem;
use axum::extract::State;
use axum::http::StatusCode;

/// 200 while the process answers: a node without a GPU is no reason to restart it.
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// 200 once a source is open and its first sample taken; 503 with the reason until then.
pub(super) async fn ready(State(site): State<Site>) -> Result<&'static str, Problem> {
    let unready = |detail: String| Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail));
    let Some(node) = site.slot.node() else {
        let trouble = site.slot.trouble();
        return unready(trouble.map_or_else(|| "starting".into(), |trouble| trouble.message.clone()));
    };
    if node.rings.iter().all(|ring| ring.newest_ns().is_none()) {
        return unready("no memory has been read yet".into());
    }
    Ok("ready\n")
}
