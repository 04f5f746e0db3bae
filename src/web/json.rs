//! Answers in JSON that end with a line feed, so that a terminal's prompt does not follow them on the same line.

use super::problem::Problem;
use crate::heap;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// The media type of these answers.
pub(super) const TYPE: &str = "application/json";

/// A value as the body of an answer.
#[derive(Debug)]
pub(super) struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        line(&self.0).map(|body| ([(header::CONTENT_TYPE, TYPE)], body)).into_response()
    }
}

/// A value as one line of JSON.
///
/// # Errors
/// The value has no JSON.
pub(super) fn line(value: &impl Serialize) -> Result<Vec<u8>, Problem> {
    let json = heap::making(|| serde_json::to_vec(value));
    let mut json = json.map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    json.push(b'\n');
    Ok(json)
}
