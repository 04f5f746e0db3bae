//! Answers in JSON that end with a line feed, so that a terminal's prompt does not follow them on the same line.

use super::problem::Problem;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// A value as the body of an answer.
#[derive(Debug)]
pub(super) struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        let Ok(mut body) = serde_json::to_vec(&self.0) else {
            return Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer cannot be written as JSON")
                .into_response();
        };
        body.push(b'\n');
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}
