//! What the read API answers about this moment, for a program of this process: `highwater top` where no daemon runs.

use super::{api, incidents};
use highwater_engine::shared_state::SharedState;
use serde_json::{Value, json};
use std::sync::OnceLock;

/// The answers of `/api/v1/gpus`, `/api/v1/jobs` and `/api/v1/incidents?active=true`, by the last part of their paths. The
/// first is `{"detail": …}` if nothing is read.
///
/// # Errors
/// Never: these answers always have a JSON.
pub fn now(state: &SharedState) -> serde_json::Result<Value> {
    let gpus = api::gpus_now(state).map_or_else(|why| Ok(json!({ "detail": why })), serde_json::to_value)?;
    let jobs = serde_json::to_value(api::jobs_now(state))?;
    let incidents = serde_json::to_value(incidents::active(state))?;
    Ok(json!({ "gpus": gpus, "jobs": jobs, "incidents": incidents }))
}

/// Where the numbers of processes hold that this process reads: the boot of the node, and the PID namespace; `None` if `/proc` does not
/// say. Another process can look them up only if it is there too, and not at the other end of a tunnel or of a container.
pub fn process_ids_of() -> Option<&'static str> {
    static PLACE: OnceLock<Option<String>> = OnceLock::new();
    let read = || {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
        Some(format!("{} {}", boot.trim(), namespace.to_str()?))
    };
    PLACE.get_or_init(read).as_deref()
}
