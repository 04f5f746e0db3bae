//! One body of annotations while it arrives: split, parsed, sorted by time, taken.
//!
//! Enters: pieces of a body, from any endpoint. Leaves: an answer. Invariants: at most one event of the body is kept as
//! text; parsed events wait for others with earlier times only while all batches together hold no more than
//! [`MOST_BATCHED_BYTES`], and are otherwise taken at once. So a stalled body costs next to nothing, and no body is
//! refused because of another.

use super::admission::Intake;
use super::answer::Answer;
use super::split::{Element, MOST_EVENT_BYTES, Splitter};
use super::waiting::Arrival;
use highwater_core::jobs::{Outcome, Refusal, Sender};
use highwater_core::wire::Annotation;
use std::sync::atomic::Ordering;

/// Bytes of parsed events that all batches may hold together.
pub const MOST_BATCHED_BYTES: usize = 4 << 20;
/// Events of one batch that are sorted together: a longer batch is taken in portions of this size.
const MOST_EVENTS: usize = 4_096;

/// Malformed events of one body after which the rest is refused unread, because it is not a body of events.
const MOST_MALFORMED: usize = 100;

impl Intake {
    /// Takes a JSON object, a JSON array of objects, or one object per line. Events of one batch are taken in the order
    /// of their times.
    pub fn take_json(&self, body: &[u8], sender: &Sender) -> Answer {
        let mut batch = Batch::begin(self, sender);
        batch.push_whole(body);
        batch.end()
    }
}

/// A body in progress.
pub struct Batch<'a> {
    splitter: Splitter,
    taking: Taking<'a>,
}

/// Takes the events that were split off a body.
struct Taking<'a> {
    intake: &'a Intake,
    arrival: Arrival,
    window: Window,
    answer: Answer,
    /// Events that were refused unread: because the rate was exceeded, and because too many others were malformed.
    unseen: (u64, u64),
    is_over_rate: bool,
    malformed: usize,
}

/// Parsed events, with their positions in the body.
#[derive(Default)]
struct Window {
    events: Vec<(usize, Annotation)>,
    bytes: usize,
}

impl<'a> Batch<'a> {
    /// A body of this sender, still empty.
    #[must_use]
    pub fn begin(intake: &'a Intake, sender: &Sender) -> Self {
        let (arrival, answer) = (intake.arrival(sender), Answer::default());
        let window = Window::default();
        let taking = Taking { intake, arrival, window, answer, unseen: (0, 0), is_over_rate: false, malformed: 0 };
        Self { splitter: Splitter::new(), taking }
    }

    /// Takes a complete body.
    pub fn push_whole(&mut self, body: &[u8]) {
        // Most bodies are one event. Of several, each is a line.
        let is_object = body.first() == Some(&b'{') && body.last() == Some(&b'}');
        if body.len() > MOST_EVENT_BYTES || !is_object || body.contains(&b'\n') {
            return self.push(body);
        }
        // Before parsing, which costs more than everything else.
        match self.taking.within_rate().map(|()| serde_json::from_slice(body)) {
            Ok(Ok(annotation)) => self.take_one(Ok(annotation)),
            Err(refusal) => self.take_one(Err(refusal)),
            // The splitter says what is wrong, and charges the rate again.
            Ok(Err(_)) => self.push(body),
        }
    }

    /// Takes the one event of a body.
    fn take_one(&mut self, event: Result<Annotation, Refusal>) {
        self.splitter.skip_one();
        self.taking.take(0, event);
    }

    /// Takes one more piece, which arrives now.
    pub fn push(&mut self, piece: &[u8]) {
        self.taking.arrives_now();
        let Self { splitter, taking } = self;
        splitter.push(piece, |index, element| taking.found(index, &element));
    }

    /// Ends the body.
    #[must_use]
    pub fn end(self) -> Answer {
        let Self { mut splitter, mut taking } = self;
        if let Some((index, problem)) = splitter.end(|index, element| taking.found(index, &element)) {
            taking.take(index, Err(Refusal::Malformed(problem.to_owned())));
        }
        taking.end()
    }
}

impl Taking<'_> {
    fn arrives_now(&mut self) {
        self.intake.arrives_now(&mut self.arrival);
    }

    fn end(mut self) -> Answer {
        self.flush();
        let (over_rate, malformed) = self.unseen;
        self.intake.refuse_unseen(Outcome::OverRate, over_rate, &self.arrival);
        self.intake.refuse_unseen(Outcome::Malformed, malformed, &self.arrival);
        for (outcome, events) in [(Outcome::OverRate, over_rate), (Outcome::Malformed, malformed)] {
            self.answer.count(outcome, usize::try_from(events).unwrap_or(usize::MAX));
        }
        self.answer.refusals.sort_by_key(|refused| refused.index);
        std::mem::take(&mut self.answer)
    }

    fn take(&mut self, index: usize, event: Result<Annotation, Refusal>) {
        self.answer.is_asked_for |= matches!(&event, Ok(annotation) if annotation.answer == Some(true));
        self.intake.take_one(index, event, &self.arrival, &mut self.answer);
    }

    fn within_rate(&self) -> Result<(), Refusal> {
        let account = &self.arrival.account;
        let may = account.may_send(1, self.arrival.live_ns);
        if may { Ok(()) } else { Err(Refusal::OverRate(account.most_events())) }
    }

    fn found(&mut self, index: usize, element: &Element<'_>) {
        if self.is_over_rate {
            self.unseen.0 += 1;
            return;
        }
        if self.malformed >= MOST_MALFORMED {
            self.unseen.1 += 1;
            return;
        }
        // Before parsing, which costs more than everything else.
        let parsed = self.within_rate().and_then(|()| match element {
            Element::TooLong => Err(Refusal::TooLarge { limit: MOST_EVENT_BYTES }),
            Element::Text(json) => serde_json::from_slice(json).map_err(|error| Refusal::Malformed(error.to_string())),
        });
        match parsed {
            Ok(annotation) => self.wait(index, annotation),
            Err(refusal) => {
                self.is_over_rate = matches!(refusal, Refusal::OverRate(_));
                self.malformed += usize::from(matches!(refusal, Refusal::Malformed(_)));
                self.take(index, Err(refusal));
            }
        }
    }

    /// Keeps an event, to be sorted by time with others, until the body ends or there is no more room.
    fn wait(&mut self, index: usize, annotation: Annotation) {
        let bytes = size_of::<(usize, Annotation)>() + annotation.weight();
        let batched = self.intake.batched_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.window.bytes += bytes;
        self.window.events.push((index, annotation));
        if batched + bytes > MOST_BATCHED_BYTES || self.window.events.len() >= MOST_EVENTS {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let Window { mut events, bytes } = std::mem::take(&mut self.window);
        let arrived = self.arrival.at_ns.saturating_add(self.arrival.unix_shift_ns);
        events.sort_by_key(|(_, raw)| raw.time_unix_nano.unwrap_or(arrived));
        for (index, annotation) in events {
            self.take(index, Ok(annotation));
        }
        self.intake.batched_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Taking<'_> {
    /// If a body never ended, events that still waited are not taken, so that sending it again repeats none of them.
    fn drop(&mut self) {
        self.intake.batched_bytes.fetch_sub(self.window.bytes, Ordering::Relaxed);
    }
}
