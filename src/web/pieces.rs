//! A list of a job's rows, written in pieces while the client reads, so that even a complete answer takes hardly any
//! memory.

use super::json;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{self, Stream, StreamExt as _};
use serde::Serialize;
use std::iter::once;

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
    is_broken: bool,
}

/// Breaks off an answer, so that the client sees that it is incomplete.
#[derive(Debug, thiserror::Error)]
#[error("what was being written is no longer there")]
struct Gone;

impl Rows {
    pub fn push(&mut self, row: &impl Serialize) {
        let is_first = !std::mem::replace(&mut self.has_any, true);
        self.push_inner(row, is_first);
    }

    /// Begins a row with these members, at least one, and a list of this name.
    pub fn open(&mut self, members: &impl Serialize, list: &str) {
        self.push(members);
        let brace = self.json.pop();
        debug_assert_eq!(brace, Some(b'}'));
        self.json.extend_from_slice(format!(",\"{list}\":[").as_bytes());
    }

    /// Adds to the list of the row that was begun.
    pub fn push_inner(&mut self, row: &impl Serialize, is_first: bool) {
        if !is_first {
            self.json.push(b',');
        }
        // Writing plain structures to memory cannot fail.
        let written = serde_json::to_writer(&mut self.json, row);
        debug_assert!(written.is_ok(), "{written:?}");
    }

    /// Ends the answer here: the rest of the row that was begun is no longer there.
    pub fn break_off(&mut self) {
        self.is_broken = true;
    }

    /// Ends the list and the row that was begun.
    pub fn close(&mut self) {
        self.json.extend_from_slice(b"]}");
    }
}

/// `{"job": …, "NAME": [rows of all pages]}`
pub(super) fn list(job: &str, name: &str, page: impl Page) -> Response {
    answer(job, rows(name, page))
}

/// The same with two lists.
pub(super) fn lists(job: &str, first: (&str, impl Page), second: (&str, impl Page)) -> Response {
    answer(job, rows(first.0, first.1).chain(rows(second.0, second.1)))
}

fn answer(job: &str, lists: impl Stream<Item = Result<Vec<u8>, Gone>> + Send + 'static) -> Response {
    let head = format!("{{\"job\":{}", serde_json::Value::from(job));
    let (head, tail) = (once(Ok(head.into_bytes())), once(Ok(b"}\n".to_vec())));
    let parts = stream::iter(head).chain(lists).chain(stream::iter(tail));
    let parts = parts.map(|part| part.map(Bytes::from));
    ([(header::CONTENT_TYPE, json::TYPE)], Body::from_stream(parts)).into_response()
}

/// A list of this name, as a member that others come before.
fn rows<P: Page>(name: &str, page: P) -> impl Stream<Item = Result<Vec<u8>, Gone>> + Send + use<P> {
    let pieces = stream::unfold((page, false), |(mut page, has_any)| async move {
        let mut rows = Rows { json: Vec::with_capacity(ROWS * ROW_BYTES), has_any, is_broken: false };
        page.next(&mut rows);
        let part = if rows.is_broken { Err(Gone) } else { Ok(rows.json) };
        let is_over = part.as_ref().is_ok_and(Vec::is_empty);
        (!is_over).then_some((part, (page, true)))
    });
    let (head, tail) = (once(Ok(format!(",\"{name}\":[").into_bytes())), once(Ok(b"]".to_vec())));
    stream::iter(head).chain(pieces).chain(stream::iter(tail))
}
