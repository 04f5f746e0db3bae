//! Long answers while clients read them, within a limit on memory.
//!
//! A client that does not read keeps its answer in memory until its connection ends. A long answer is therefore kept
//! here once for all clients that get the same one, and sent in pieces. If a new answer needs room, the one whose last
//! read is longest ago is withdrawn, and its readers' connections end. Invariants: the answers in progress take at most
//! [`MOST_BYTES`] together, or there is only one; a scraper that keeps reading has [`PINNED`] to finish, whatever others request.

use super::problem::Problem;
use crate::metrics::{Collect, Families, Part};
use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::Stream;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::time::Instant;

/// Limit on the bytes of all long answers in progress.
pub(crate) const MOST_BYTES: usize = 8 << 20;
/// Bytes handed to a connection at once, which it keeps while its client does not read.
pub(crate) const PIECE_BYTES: usize = 8 << 10;

/// How long an answer that a scraper reads is pinned, from when it was made: it is not withdrawn for others.
const PINNED: Duration = Duration::from_secs(6);
/// An answer is being read if a piece of it was read within this time. On a busy machine a scraper may get no processor for a
/// second or two, while what it has not read yet fills its socket's buffer.
const READ_WITHIN: Duration = Duration::from_secs(3);

/// The long answers in progress.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<Vec<Weak<Answer>>>);

/// One text, shared by all clients that get it.
#[derive(Debug)]
pub(super) struct Answer {
    text: Mutex<Text>,
    bytes: usize,
    made: Instant,
    is_scrape: bool,
}

#[derive(Debug)]
struct Text {
    /// `None` once withdrawn.
    text: Option<Box<[u8]>>,
    /// When a piece was last read.
    taken: Instant,
}

impl Answers {
    /// Keeps a text while clients read it, and withdraws others to make room. If scrapers are reading too much to leave room,
    /// the text itself is withdrawn at once, and no other.
    pub fn keep(&self, text: Vec<u8>) -> Arc<Answer> {
        self.keep_one(text, false)
    }

    /// Keeps the text of a scrape. Unlike [`keep`](Self::keep), it may withdraw even pinned answers, so check
    /// [`fits`](Self::fits) before.
    pub fn keep_scrape(&self, text: Vec<u8>) -> Arc<Answer> {
        self.keep_one(text, true)
    }

    /// Whether a scrape of `bytes` bytes leaves room for the scrapes that are being read.
    pub fn fits(&self, bytes: usize) -> bool {
        has_room(&in_progress(&mut self.all()), bytes)
    }

    fn keep_one(&self, text: Vec<u8>, is_scrape: bool) -> Arc<Answer> {
        let made = Instant::now();
        let (bytes, text) = (text.len(), Text { text: Some(text.into_boxed_slice()), taken: made });
        let answer = Arc::new(Answer { bytes, text: Mutex::new(text), made, is_scrape });
        // Until it is one of them, no other may be added.
        let mut all = self.all();
        let mut others = in_progress(&mut all);
        if !is_scrape && !has_room(&others, answer.bytes) {
            answer.withdraw();
            return answer;
        }
        let mut bytes: usize = answer.bytes + others.iter().map(|other| other.held()).sum::<usize>();
        others.sort_by_cached_key(|other| std::cmp::Reverse((other.is_pinned(), other.text().taken)));
        while bytes > MOST_BYTES
            && let Some(stalled) = others.pop()
        {
            bytes -= stalled.withdraw();
        }
        all.push(Arc::downgrade(&answer));
        answer
    }

    /// Bytes of all of them.
    fn held(&self) -> usize {
        in_progress(&mut self.all()).iter().map(|answer| answer.held()).sum()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Weak<Answer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collect for Answers {
    fn collect(&self, out: &mut Families) {
        out.memory(Part::Answers, self.held());
    }
}

/// Those that a client still has; the rest is forgotten.
fn in_progress(all: &mut Vec<Weak<Answer>>) -> Vec<Arc<Answer>> {
    all.retain(|answer| answer.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// Whether `bytes` more bytes leave room for what scrapers are reading.
fn has_room(others: &[Arc<Answer>], bytes: usize) -> bool {
    let pinned: usize = others.iter().filter(|other| other.is_pinned()).map(|other| other.held()).sum();
    pinned == 0 || pinned + bytes <= MOST_BYTES
}

impl Answer {
    /// The text as a response of this type.
    pub fn response(self: Arc<Self>, content_type: &'static str) -> Response {
        if self.is_withdrawn() {
            let why = "scrapers are reading as much as there is room for; ask again in some seconds";
            return Problem::new(StatusCode::SERVICE_UNAVAILABLE, why).into_response();
        }
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

    /// How long ago it was made.
    pub fn age(&self) -> Duration {
        self.made.elapsed()
    }

    /// Whether its readers get no more of it.
    pub fn is_withdrawn(&self) -> bool {
        self.text().text.is_none()
    }

    /// Whether it is not withdrawn for others: a scraper is reading it, and has not had its time.
    fn is_pinned(&self) -> bool {
        self.is_scrape && self.age() < PINNED && self.text().taken.elapsed() < READ_WITHIN
    }

    /// Bytes that it holds.
    fn held(&self) -> usize {
        self.text().text.as_deref().map_or(0, <[u8]>::len)
    }

    /// Its first byte, as a reader gets it; `None` once it is withdrawn.
    #[cfg(test)]
    pub fn first_byte(&self) -> Option<u8> {
        self.piece(0).ok().and_then(|piece| piece.first().copied())
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
        let reader = Arc::clone(&kept[1]).response("text/plain").into_body();
        let next = answers.keep(text.clone());
        assert!(kept[1].piece(0).is_err(), "its last read is longest ago");
        assert!([&kept[0], &kept[2], &kept[3], &next].iter().all(|answer| answer.piece(0).is_ok()));
        drop(kept.remove(1));
        assert!(reader.collect().await.is_err());
        // An answer without readers takes no room.
        kept.truncate(2);
        let more = answers.keep(text);
        assert!([&kept[1], &next, &more].iter().all(|answer| answer.piece(0).is_ok()));
        let alone = answers.keep(vec![b'x'; 2 * MOST_BYTES]);
        assert!(alone.piece(0).is_ok() && next.piece(0).is_err(), "a single answer may exceed the limit");
    }

    #[test]
    fn answers_that_come_at_the_same_moment_have_no_more_room_together() {
        let answers = Answers::default();
        let start = std::sync::Barrier::new(4);
        for round in 0..100 {
            let keep = || {
                let text = vec![b'x'; MOST_BYTES / 2 + 1];
                start.wait();
                answers.keep(text)
            };
            let kept: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(keep)).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(kept.iter().filter(|answer| !answer.is_withdrawn()).count(), 1, "{round}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_scrape_that_is_read_makes_no_room_until_it_has_had_its_time() {
        let answers = Answers::default();
        let text = |part: usize| vec![b'x'; MOST_BYTES / part];
        let scrape = answers.keep_scrape(text(2));
        let wait = |milliseconds| tokio::time::advance(Duration::from_millis(milliseconds));
        wait(900).await;
        let small = answers.keep(text(4));
        assert!(scrape.piece(0).is_ok());
        wait(900).await;
        let large = answers.keep(text(1));
        assert_eq!(answers.held(), MOST_BYTES * 3 / 4);
        assert!(scrape.piece(0).is_ok() && large.is_withdrawn() && !small.is_withdrawn(), "nothing is won by its end");
        assert_eq!(large.response("text/plain").status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answers.fits(MOST_BYTES / 2) && !answers.fits(MOST_BYTES / 2 + 1));
        wait(3_100).await;
        assert!(answers.fits(MOST_BYTES), "nobody has read it for a while");
        assert!(scrape.piece(0).is_ok() && !answers.fits(MOST_BYTES));
        wait(900).await;
        assert!(scrape.piece(0).is_ok() && !answers.fits(MOST_BYTES));
        wait(300).await;
        assert!(answers.fits(MOST_BYTES), "it has had its time");
        let other = answers.keep(text(1));
        assert!(scrape.is_withdrawn() && !other.is_withdrawn());
        let urgent = answers.keep_scrape(text(2));
        assert!(other.is_withdrawn() && !urgent.is_withdrawn());
        let next = answers.keep_scrape(text(1));
        assert!(urgent.is_withdrawn() && !next.is_withdrawn(), "its maker has checked `fits`");
    }
}
