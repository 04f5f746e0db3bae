//! What the read API answers about this moment, for a program of this process: `highwater top` where no daemon runs.

use super::{api, incidents};
use highwater_engine::shared_state::SharedState;
use serde_json::{Value, json};

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
