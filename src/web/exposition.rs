//! `/metrics`: one body for all scrapers that ask for the same format at the same time.
//!
//! Scrapers that request at the same time share a body. A scraper gets a body that was begun after its request. If there is
//! no room for another body beside those being read, the scraper gets the last one if it is at most two seconds old, or
//! waits for room. Only one body is made at a time, whatever its format, because making it takes more memory than the body.

use super::answers::{Answer, Answers};
use crate::export::prometheus::Format;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// How old a body may be that is returned where there is no room for another.
const OLDEST: Duration = Duration::from_secs(2);
/// How often to look whether there is.
const LOOK: Duration = Duration::from_millis(20);

/// An exposition for each format, and for each of these compressed by gzip.
#[derive(Debug, Default)]
pub(super) struct Expositions {
    text: Exposition,
    protobuf: Exposition,
    gzip_text: Exposition,
    gzip_protobuf: Exposition,
    making: Mutex<()>,
}

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) format: Format,
    pub(super) is_compressed: bool,
}

impl Expositions {
    /// Returns an exposition in this format that another request began to make after this call, or else the result of
    /// `make`, which makes what is wanted.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) async fn answer<E>(
        &self,
        wanted: Wanted,
        answers: &Answers,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<Answer>, E> {
        let (plain, compressed) = match wanted.format {
            Format::Text => (&self.text, &self.gzip_text),
            Format::Protobuf => (&self.protobuf, &self.gzip_protobuf),
        };
        let exposition = if wanted.is_compressed { compressed } else { plain };
        exposition.answer(&self.making, answers, make).await
    }
}

/// The body being made, for the requests that wait for it.
#[derive(Debug, Default)]
struct Exposition {
    last: Mutex<Last>,
    /// The number of requests without a body yet.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Last {
    /// The body for the requests that wait for it.
    made: Option<Made>,
    /// The body that was made last, while a client has it, and its bytes.
    newest: Weak<Answer>,
    bytes: usize,
}

#[derive(Debug)]
struct Made {
    begun: Instant,
    body: Arc<Answer>,
}

impl Exposition {
    /// Returns a body that another request began to make after this call, or else the result of `make`.
    ///
    /// # Errors
    /// Those of `make`.
    async fn answer<E>(
        &self,
        making: &Mutex<()>,
        answers: &Answers,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<Answer>, E> {
        let asked = Instant::now();
        let waiting = Waiting::begin(&self.waiting);
        let mut last = self.last.lock().await;
        let made = match last.made.take().filter(|made| made.begun >= asked) {
            Some(made) => made,
            None => {
                let _alone = making.lock().await;
                if let Some(body) = last.until_it_fits(answers).await {
                    return Ok(body);
                }
                let begun = Instant::now();
                let text = make()?;
                last.bytes = text.len();
                let body = answers.keep_scrape(text);
                last.newest = Arc::downgrade(&body);
                Made { begun, body }
            }
        };
        let answer = Arc::clone(&made.body);
        // If all other waiting requests go away, the body stays until the next request, which drops it as begun too
        // early.
        if !waiting.is_last() {
            last.made = Some(made);
        }
        Ok(answer)
    }
}

impl Last {
    /// Waits until there is room for another body. Returns the last one, if there is none and it is young enough.
    async fn until_it_fits(&self, answers: &Answers) -> Option<Arc<Answer>> {
        while !answers.fits(self.bytes) {
            let newest = self.newest.upgrade();
            if let Some(body) = newest.filter(|body| body.age() <= OLDEST && !body.is_withdrawn()) {
                return Some(body);
            }
            tokio::time::sleep(LOOK).await;
        }
        None
    }
}

/// One waiting request, until it has been answered or its client has gone away.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn begin(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }

    fn is_last(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 1
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;
    use std::convert::Infallible;

    /// Asks for the body, which is the number of bodies made before it.
    async fn ask(exposition: Arc<Exposition>, made: Arc<AtomicUsize>) -> String {
        let make = || Ok::<_, Infallible>(made.fetch_add(1, Ordering::Relaxed).to_string().into());
        read(exposition.answer(&Mutex::default(), &Answers::default(), make).await.expect("it cannot fail")).await
    }

    fn plain(format: Format) -> Wanted {
        Wanted { format, is_compressed: false }
    }

    async fn read(answer: Arc<Answer>) -> String {
        let body = answer.response("text/plain").into_body().collect().await.expect("it is not withdrawn").to_bytes();
        String::from_utf8(body.to_vec()).expect("text")
    }

    #[tokio::test]
    async fn those_who_wait_together_get_one_body_and_the_next_gets_its_own() {
        let (exposition, made) = (Arc::new(Exposition::default()), Arc::new(AtomicUsize::new(0)));
        let being_made = exposition.last.lock().await;
        let asked: Vec<_> = (0..50).map(|_| tokio::spawn(ask(Arc::clone(&exposition), Arc::clone(&made)))).collect();
        while exposition.waiting.load(Ordering::Relaxed) < 50 {
            tokio::task::yield_now().await;
        }
        // One of the requests is dropped.
        asked[7].abort();
        drop(being_made);
        for (number, asked) in asked.into_iter().enumerate().filter(|(number, _)| *number != 7) {
            assert_eq!(asked.await.expect("it is served"), "0", "{number}");
        }
        assert!(exposition.last.lock().await.made.is_none(), "nothing is kept");
        assert_eq!(ask(Arc::clone(&exposition), Arc::clone(&made)).await, "1");
        assert_eq!(exposition.waiting.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn what_was_made_before_somebody_asked_is_not_reported() {
        let (exposition, made) = (Arc::new(Exposition::default()), Arc::new(AtomicUsize::new(0)));
        exposition.last.lock().await.made =
            Some(Made { begun: Instant::now(), body: Answers::default().keep(b"old".into()) });
        assert_eq!(ask(exposition, made).await, "0");
    }

    /// Two bodies of this size have no room together.
    #[tokio::test(start_paused = true)]
    async fn nobody_who_reads_is_cut_off_by_those_who_ask() {
        let (expositions, answers) = (Expositions::default(), Answers::default());
        let text = |first: u8| move || Ok::<_, Infallible>(vec![first; super::super::answers::MOST_BYTES * 3 / 4]);
        let read = |answer: &Arc<Answer>| answer.first_byte();
        let ask = async |format, first| {
            expositions.answer(plain(format), &answers, text(first)).await.expect("it cannot fail")
        };
        let one = ask(Format::Text, b'1').await;
        let begun = tokio::time::Instant::now();
        tokio::time::advance(Duration::from_millis(900)).await;
        assert_eq!(read(&one), Some(b'1'));
        let same = ask(Format::Text, b'2').await;
        assert!(Arc::ptr_eq(&one, &same) && begun.elapsed() < Duration::from_secs(1), "at once, and without another");
        tokio::time::advance(Duration::from_millis(900)).await;
        assert_eq!(read(&one), Some(b'1'));
        tokio::time::advance(Duration::from_millis(900)).await;
        assert_eq!(read(&one), Some(b'1'));
        // It is too old now: the next scraper waits until nobody reads it any more.
        let next = ask(Format::Text, b'3').await;
        assert_eq!((read(&one), read(&next)), (None, Some(b'3')));
        assert!(begun.elapsed() >= Duration::from_millis(3_700), "{:?}", begun.elapsed());
        drop((one, same, next));
        let after = tokio::time::Instant::now();
        assert_eq!(read(&ask(Format::Protobuf, b'4').await), Some(b'4'));
        assert_eq!(after.elapsed(), Duration::ZERO, "with room nobody waits");
    }

    #[tokio::test]
    async fn a_failure_is_reported_to_its_own_asker_alone() {
        let exposition = Exposition::default();
        let (making, answers) = (Mutex::default(), Answers::default());
        assert_eq!(exposition.answer(&making, &answers, || Err("broken")).await.err(), Some("broken"));
        let whole =
            exposition.answer(&making, &answers, || Ok::<_, Infallible>("whole".into())).await.expect("it cannot fail");
        assert_eq!(read(whole).await, "whole");
    }

    #[tokio::test]
    async fn formats_share_nothing_but_their_turn() {
        let (expositions, answers) = (Arc::new(Expositions::default()), Answers::default());
        let one = expositions.answer(plain(Format::Text), &answers, || Ok::<_, Infallible>("text".into())).await;
        let other =
            expositions.answer(plain(Format::Protobuf), &answers, || Ok::<_, Infallible>("protobuf".into())).await;
        assert_eq!(read(one.expect("it cannot fail")).await, "text");
        assert_eq!(read(other.expect("it cannot fail")).await, "protobuf");
        // While one is made, the other waits.
        let being_made = expositions.making.lock().await;
        let waiting = Arc::clone(&expositions);
        let asked = tokio::spawn(async move {
            let answers = Answers::default();
            let made = waiting.answer(plain(Format::Protobuf), &answers, || Ok::<_, Infallible>("later".into()));
            read(made.await.expect("it cannot fail")).await
        });
        while expositions.protobuf.waiting.load(Ordering::Relaxed) < 1 && !asked.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(!asked.is_finished());
        drop(being_made);
        assert_eq!(asked.await.expect("it is served"), "later");
    }
}
