//! Liveness and readiness.

use super::problem::Problem;
use super::site::Site;
use axum::extract::State;
use axum::http::StatusCode;
use highwater_core::gpu::{GpuState, Health};

/// 200 while the process answers: a node without a GPU is no reason to restart it. 503 if only a new container can read GPUs, where
/// `health.restart_after` says so.
pub(super) async fn live(State(site): State<Site>) -> Result<&'static str, Problem> {
    match site.state().slot.needs_restart() {
        Some(why) => Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, why)),
        None => Ok("ok\n"),
    }
}

/// 200 once a source is open, its first sample has been taken, and a GPU answers; otherwise 503 with the reason.
pub(super) async fn ready(State(site): State<Site>) -> Result<&'static str, Problem> {
    let unready = |detail: String| Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail));
    let Some(node) = site.state().slot.node() else {
        let trouble = site.state().slot.trouble();
        return unready(trouble.map_or_else(|| "starting".into(), |trouble| trouble.message.clone()));
    };
    if node.rings.iter().all(|ring| ring.newest_ns().is_none()) {
        return unready("no memory has been read yet".into());
    }
    if node.gpus.iter().all(|gpu| gpu.health() != Health::Up) {
        let troubles = node.gpus.iter().map(|gpu| format!("{}: {}", gpu.device.index, trouble(gpu)));
        return unready(format!("no GPU answers: {}", troubles.collect::<Vec<_>>().join("; ")));
    }
    Ok("ready\n")
}

fn trouble(gpu: &GpuState) -> String {
    match (gpu.health(), gpu.trouble()) {
        (Health::Hung, _) => "a call on it has not returned".to_owned(),
        (_, trouble) if trouble.is_empty() => "lost".to_owned(),
        (_, trouble) => trouble,
    }
}
