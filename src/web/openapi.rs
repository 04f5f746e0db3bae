//! `GET /api/v1/openapi.json`: the description of the API, collected from the handlers that serve it.

use super::json;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::routing::{MethodRouter, get};
use utoipa::OpenApi;

/// What holds for all of it.
#[derive(OpenApi)]
#[openapi(info(
    title = "highwater",
    description = "GPU memory, steps and phases of one node. Times are Unix nanoseconds, sizes are bytes. Errors are RFC \
                   9457 problem details.",
    license(name = "Apache-2.0")
))]
pub(super) struct Common;

/// Serves this description.
pub(super) fn route<S: Clone + Send + Sync + 'static>(description: &utoipa::openapi::OpenApi) -> MethodRouter<S> {
    let text = json::line(description);
    get(move || async move { text.map(|text| ([(header::CONTENT_TYPE, json::TYPE)], text)).into_response() })
}
