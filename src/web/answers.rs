//! Long answers while clients read them, within a limit on memory.
//!
//! A client that does not read keeps its answer in memory until its connection ends. A long answer is therefore kept
//! here once for all clients that get the same one, and sent in pieces. If a new answer needs room, the one whose last
//! read is longest ago is withdrawn, and its readers' connections end. Invariant: the answers in progress take at most
//! [`MOST_BYTES`] together, or there is only one.

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use futures_util::Stream;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// Limit on the bytes of all long answers in progress.
pub(crate) const MOST_BYTES: usize = 8 << 20;
/// Bytes handed to a connection at once, which it keeps while its client does not read.
pub(crate) const PIECE_BYTES: usize = 8 << 10;

/// The long answers in progress.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<Vec<Weak<Answer>>>);

/// One text, shared by all clients that get it.
#[derive(Debug)]
pub(super) struct Answer {
    text: Mutex<Text>,
    bytes: usize,
}

#[derive(Debug)]
struct Text {
    /// `None` once withdrawn.
    text: Option<Box<[u8]>>,
    /// When a piece was last read.
    taken: Instant,
}

impl Answers {
    /// Keeps a text while a client reads it; others are withdrawn to make room.
    pub fn keep(&self, text: Vec<u8>) -> Arc<Answer> {
        let (bytes, text) = (text.len(), Text { text: Some(text.into_boxed_slice()), taken: Instant::now() });
        let answer = Arc::new(Answer { bytes, text: Mutex::new(text) });
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|answer| answer.strong_count() > 0);
        let mut others: Vec<_> = kept.iter().filter_map(Weak::upgrade).collect();
        let mut bytes: usize = answer.bytes + others.iter().map(|other| other.held()).sum::<usize>();
        others.sort_by_key(|other| std::cmp::Reverse(other.text().taken));
        while bytes > MOST_BYTES
            && let Some(stalled) = others.pop()
        {
            bytes -= stalled.withdraw();
        }
        kept.push(Arc::downgrade(&answer));
        answer
    }
}

impl Answer {
    /// The text as a response of this type.
    pub fn response(self: Arc<Self>, content_type: &'static str) -> Response {
        let length = self.bytes;
        let headers = [(header::CONTENT_TYPE, content_type.to_owned()), (header::CONTENT_LENGTH, length.to_string())];
        (headers, Body::from_stream(self.pieces())).into_response()
    }

    /// The text in pieces. The stream fails if the text is withdrawn meanwhile.
    pub fn pieces(self: Arc<Self>) -> impl Stream<Item = io::Result<Bytes>> {
        futures_util::stream::try_unfold((self, 0), |(answer, from)| async move {
            if from >= answer.bytes {
                return Ok(None);
            }
            let piece = answer.piece(from)?;
            let next = from + piece.len();
            Ok::<_, io::Error>(Some((piece, (answer, next))))
        })
    }

    /// A copy of a part of the text: a reference to a part would keep all of it.
    fn piece(&self, from: usize) -> io::Result<Bytes> {
        let mut text = self.text();
        text.taken = Instant::now();
        let text = text.text.as_deref().ok_or_else(|| io::Error::other("withdrawn to make room for newer answers"))?;
        let piece = text.get(from..).unwrap_or_default();
        Ok(Bytes::copy_from_slice(piece.get(..PIECE_BYTES).unwrap_or(piece)))
    }

    /// Bytes that it holds.
    fn held(&self) -> usize {
        self.text().text.as_deref().map_or(0, <[u8]>::len)
    }

    /// Frees its bytes, and returns how many.
    fn withdraw(&self) -> usize {
        self.text().text.take().map_or(0, |text| text.len())
    }

    fn text(&self) -> MutexGuard<'_, Text> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    #[tokio::test]
    async fn an_answer_goes_out_whole() {
        let text: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let response = Answers::default().keep(text.clone()).response("text/plain");
        assert_eq!(response.headers()[header::CONTENT_LENGTH], text.len().to_string());
        assert_eq!(response.into_body().collect().await.expect("whole").to_bytes(), text);
        let empty = Answers::default().keep(Vec::new()).response("text/plain").into_body();
        assert!(empty.collect().await.expect("whole").to_bytes().is_empty());
    }

    #[tokio::test]
    async fn the_answer_that_nobody_reads_makes_room_and_its_reader_knows() {
        let answers = Answers::default();
        let text = vec![b'x'; MOST_BYTES / 4];
        let mut kept: Vec<_> = (0..4).map(|_| answers.keep(text.clone())).collect();
        // The first was begun first, and is still being read.
        assert!([1, 2, 3, 0].iter().all(|number| kept[*number].piece(0).is_ok()));
        let next = answers.keep(text.clone());
        assert!(kept[1].piece(0).is_err(), "its last read is longest ago");
        assert!([&kept[0], &kept[2], &kept[3], &next].iter().all(|answer| answer.piece(0).is_ok()));
        let withdrawn = kept.remove(1).response("text/plain").into_body();
        assert!(withdrawn.collect().await.is_err());
        // An answer without readers takes no room.
        kept.truncate(2);
        let more = answers.keep(text);
        assert!([&kept[1], &next, &more].iter().all(|answer| answer.piece(0).is_ok()));
        let alone = answers.keep(vec![b'x'; 2 * MOST_BYTES]);
        assert!(alone.piece(0).is_ok() && next.piece(0).is_err(), "a single answer may exceed the limit");
    }
}
