//! Long answers while clients take them, and what all of them may keep.
//!
//! A client that reads nothing keeps its answer in memory until its connection ends. So a long answer is kept here, once
//! for all who get the same, and goes out in pieces; where a new one needs room, the one of which nothing was read for
//! longest is withdrawn, and the connections of its readers end. Invariant: the answers under way take at most
//! [`MOST_BYTES`], or are one.

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// Bytes of all long answers under way.
pub(crate) const MOST_BYTES: usize = 8 << 20;
/// Bytes that are handed to a connection at once: what it keeps while its client reads nothing.
pub(crate) const PIECE_BYTES: usize = 8 << 10;

/// The long answers under way.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<Vec<Weak<Answer>>>);

/// One text, for everybody who is to get it.
#[derive(Debug)]
pub(super) struct Answer {
    text: Mutex<Text>,
    bytes: usize,
}

#[derive(Debug)]
struct Text {
    /// `None` once it was withdrawn.
    text: Option<Box<[u8]>>,
    /// When a piece was last taken.
    taken: Instant,
}

impl Answers {
    /// Keeps a text while somebody reads it; others make room.
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
        let mut text = self.text();
        text.taken = Instant::now();
        let text = text.text.as_deref().ok_or_else(|| io::Error::other("withdrawn: newer answers needed its room"))?;
        let piece = text.get(from..).unwrap_or_default();
        Ok(Bytes::copy_from_slice(piece.get(..PIECE_BYTES).unwrap_or(piece)))
    }

    /// Bytes that it takes.
    fn held(&self) -> usize {
        self.text().text.as_deref().map_or(0, <[u8]>::len)
    }

    /// Gives its bytes back, and returns how many.
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
        assert!(kept[1].piece(0).is_err(), "of which nothing was read for longest");
        assert!([&kept[0], &kept[2], &kept[3], &next].iter().all(|answer| answer.piece(0).is_ok()));
        let withdrawn = kept.remove(1).response("text/plain").into_body();
        assert!(withdrawn.collect().await.is_err());
        // What nobody reads any more takes no room.
        kept.truncate(2);
        let more = answers.keep(text);
        assert!([&kept[1], &next, &more].iter().all(|answer| answer.piece(0).is_ok()));
        let alone = answers.keep(vec![b'x'; 2 * MOST_BYTES]);
        assert!(alone.piece(0).is_ok() && next.piece(0).is_err(), "one may be longer than all");
    }
}
