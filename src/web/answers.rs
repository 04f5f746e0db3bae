//! Long answers while clients take them, and what all of them may keep.
//!
//! A client that reads nothing keeps its answer in memory until its connection ends. So a long answer is kept here, once
//! for all who get the same, and goes out in pieces; where a new one needs room, the oldest is withdrawn, and the
//! connections of those who still read it end. Invariant: the answers under way take at most [`MOST_BYTES`], or are one.

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of all long answers under way.
pub(crate) const MOST_BYTES: usize = 8 << 20;
/// Bytes that are handed to a connection at once: what it keeps while its client reads nothing.
pub(crate) const PIECE_BYTES: usize = 8 << 10;

/// The long answers under way, oldest first.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<VecDeque<Weak<Answer>>>);

/// One text, for everybody who is to get it.
#[derive(Debug)]
pub(super) struct Answer {
    /// `None` once it was withdrawn.
    text: Mutex<Option<Box<[u8]>>>,
    bytes: usize,
}

impl Answers {
    /// Keeps a text while somebody reads it; older ones make room.
    pub fn keep(&self, text: Vec<u8>) -> Arc<Answer> {
        let answer = Arc::new(Answer { bytes: text.len(), text: Mutex::new(Some(text.into_boxed_slice())) });
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|answer| answer.strong_count() > 0);
        let mut bytes: usize =
            answer.bytes + kept.iter().filter_map(Weak::upgrade).map(|kept| kept.bytes).sum::<usize>();
        while bytes > MOST_BYTES
            && let Some(oldest) = kept.pop_front()
        {
            let Some(oldest) = oldest.upgrade() else { continue };
            bytes -= oldest.bytes;
            oldest.withdraw();
        }
        kept.push_back(Arc::downgrade(&answer));
        answer
    }
}

impl Answer {
    /// The text as an answer of this type.
    pub fn response(self: Arc<Self>, content_type: &'static str) -> Response {
        let length = self.bytes;
        let pieces = futures_util::stream::try_unfold((self, 0), |(answer, from)| async move {
            if from >= answer.bytes {
                return Ok(None);
            }
            let piece = answer.piece(from)?;
            let next = from + piece.len();
            Ok::<_, io::Error>(Some((piece, (answer, next))))
        });
        let headers = [(header::CONTENT_TYPE, content_type.to_owned()), (header::CONTENT_LENGTH, length.to_string())];
        (headers, Body::from_stream(pieces)).into_response()
    }

    /// A copy of some of the text: a part of the text itself would keep all of it.
    fn piece(&self, from: usize) -> io::Result<Bytes> {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let text = text.as_deref().ok_or_else(|| io::Error::other("withdrawn: newer answers needed its room"))?;
        let piece = text.get(from..).unwrap_or_default();
        Ok(Bytes::copy_from_slice(piece.get(..PIECE_BYTES).unwrap_or(piece)))
    }

    fn withdraw(&self) {
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = None;
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
    async fn the_oldest_answer_makes_room_and_its_reader_knows() {
        let answers = Answers::default();
        let text = vec![b'x'; MOST_BYTES / 4];
        let mut kept: Vec<_> = (0..4).map(|_| answers.keep(text.clone())).collect();
        assert!(kept.iter().all(|answer| answer.piece(0).is_ok()));
        let next = answers.keep(text.clone());
        assert!(kept[0].piece(0).is_err() && kept[1..].iter().chain([&next]).all(|answer| answer.piece(0).is_ok()));
        let of_oldest = Arc::clone(&kept[0]).response("text/plain").into_body();
        assert!(of_oldest.collect().await.is_err());
        // What nobody reads any more takes no room.
        kept.truncate(2);
        let more = answers.keep(text);
        assert!([&kept[1], &next, &more].iter().all(|answer| answer.piece(0).is_ok()));
        let alone = answers.keep(vec![b'x'; 2 * MOST_BYTES]);
        assert!(alone.piece(0).is_ok() && next.piece(0).is_err(), "one may be longer than all");
    }
}
