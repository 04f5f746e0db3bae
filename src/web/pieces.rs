//! A list of a job's rows, written in pieces while the client reads, so that even a complete answer takes hardly any
//! memory.

use super::json;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use serde::Serialize;
use std::convert::Infallible;

/// Rows in one piece: some 64 KiB.
pub(super) const ROWS: usize = 100;
/// Room for a row's JSON, bytes.
const ROW_BYTES: usize = 768;

/// The rest of an answer. It holds references to neither the kept rows nor the node, which a slow client would keep
/// alive. Such a client gets the rows that still exist when it reads them.
pub(super) trait Page: Sized + Send + 'static {
    /// Appends the next rows, at most [`ROWS`], and advances past them. If there are none, the answer is complete.
    fn next(&mut self, rows: &mut Rows);
}

/// Rows as JSON, separated by commas.
#[derive(Debug, Default)]
pub(super) struct Rows {
    json: Vec<u8>,
    has_any: bool,
}

impl Rows {
    pub fn push(&mut self, row: &impl Serialize) {
        if self.has_any {
            self.json.push(b',');
        }
        self.has_any = true;
        // Writing plain structures to memory cannot fail.
        let written = serde_json::to_writer(&mut self.json, row);
        debug_assert!(written.is_ok(), "{written:?}");
    }
}

/// `{"job": …, "NAME": [rows of all pages]}`
pub(super) fn list(job: &str, name: &str, page: impl Page) -> Response {
    let head = format!("{{\"job\":{},\"{name}\":[", serde_json::Value::from(job));
    let pieces = futures_util::stream::unfold((page, false), |(mut page, has_any)| async move {
        let mut rows = Rows { json: Vec::with_capacity(ROWS * ROW_BYTES), has_any };
        page.next(&mut rows);
        (!rows.json.is_empty()).then_some((rows.json, (page, true)))
    });
    let (head, tail) = (std::iter::once(head.into_bytes()), std::iter::once(b"]}\n".to_vec()));
    let parts = futures_util::stream::iter(head).chain(pieces).chain(futures_util::stream::iter(tail));
    let parts = parts.map(|part| Ok::<_, Infallible>(Bytes::from(part)));
    ([(header::CONTENT_TYPE, json::TYPE)], Body::from_stream(parts)).into_response()
}
