//! Errors as RFC 9457 problem details: the client gets what it can fix, the log gets the cause.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};
#[cfg(test)]
use utoipa::ToSchema;

/// The body of an error, RFC 9457.
#[cfg(test)]
#[derive(ToSchema)]
#[schema(as = Problem)]
#[allow(dead_code, reason = "describes what `Problem` makes, for the API's description")]
pub(super) struct Body {
    r#type: String,
    title: String,
    status: u16,
    /// What the client can do about it.
    detail: String,
}

/// One problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    status: StatusCode,
    members: Map<String, Value>,
}

impl Problem {
    /// A problem with this status, and a detail that says what the client can do about it.
    #[must_use]
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let title = status.canonical_reason().unwrap_or("Error");
        let mut members = Map::new();
        members.insert("type".into(), json!("about:blank"));
        members.insert("title".into(), json!(title));
        members.insert("status".into(), json!(status.as_u16()));
        members.insert("detail".into(), json!(detail.into()));
        Self { status, members }
    }

    /// The same with one more member.
    #[must_use]
    pub fn with(mut self, name: &str, value: &impl Serialize) -> Self {
        self.members.insert(name.into(), serde_json::to_value(value).unwrap_or(Value::Null));
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = format!("{}\n", Value::Object(self.members));
        (self.status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}
