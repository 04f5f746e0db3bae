//! The running exporter: a producer on a timer, and a lane for each signal that empties the queue in order.
//!
//! A lane sends one request at a time, and the next one only when the last is settled, so points arrive in the order of
//! their times. A request that fails for now is retried until it is accepted or refused, or the full queue drops it. Requests
//! do not expire. When the daemon stops, everything known is queued, and sending goes on for at most [`GRACE`].

use super::backoff::Backoff;
use super::disk::Disk;
use super::producer::Producer;
use super::queue::{Batch, Next, Queue};
use super::reply::Reply;
use super::settings::OtlpSettings;
use super::stats::{Attempt, OtlpStats, Signal};
use super::transport::ReceiverClient;
use crate::heap;
use crate::metrics::Snapshots;
use highwater_core::clock::SECOND_NS;
use highwater_engine::dial::Dial;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

/// How long sending the rest may take at the end.
pub const GRACE: Duration = Duration::from_secs(1);
/// How often raw points and spans are produced.
const FOLLOW: Duration = Duration::from_secs(1);
/// The shortest time between two log lines of a lane about what its receiver or the disk reported.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// An exporter, ready to run.
pub struct Exporter {
    producer: Producer,
    interval: Duration,
    lanes: Vec<Lane>,
    queue: Arc<Queue>,
}

impl Exporter {
    /// An exporter of `snapshots` that counts in `stats` and connects with `dial`.
    ///
    /// # Errors
    /// If TLS cannot be configured, or the queue's folder cannot be used.
    pub fn new(
        settings: OtlpSettings,
        snapshots: Snapshots,
        stats: &Arc<OtlpStats>,
        dial: &Arc<dyn Dial>,
    ) -> Result<Self, String> {
        let disk = settings
            .queue_dir
            .as_deref()
            .map(|folder| Disk::open(folder).map_err(|error| format!("otlp.queue_dir: {error}")));
        let queue = Arc::new(Queue::new(settings.queue_bytes, disk.transpose()?, Arc::clone(stats)));
        let peer = |endpoint| ReceiverClient::new(endpoint, Arc::clone(dial)).map(Arc::new);
        let metrics = settings.metrics.clone().map(peer).transpose()?;
        let traces = settings.traces.clone().map(peer).transpose()?;
        let of = |signal: Signal| if signal == Signal::Spans { &traces } else { &metrics };
        let lane = |signal| {
            let peer = of(signal).clone()?;
            Some(Lane { signal, peer, queue: Arc::clone(&queue), stats: Arc::clone(stats) })
        };
        let lanes = Signal::ALL.into_iter().filter_map(lane).collect();
        let interval =
            Duration::from_nanos(u64::try_from(settings.interval_ns.max(SECOND_NS / 10)).unwrap_or(u64::MAX));
        let producer = Producer::new(settings, snapshots, Arc::clone(&queue), Arc::clone(stats));
        Ok(Self { producer, interval, lanes, queue })
    }

    /// Exports until `stop`, then sends what is left.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        let (closing, _) = watch::channel(false);
        let mut lanes = tokio::task::JoinSet::new();
        for lane in self.lanes.drain(..) {
            lanes.spawn(lane.run(closing.subscribe()));
        }
        let now = Instant::now();
        let mut snapshots = interval_at(now + self.interval, self.interval);
        let mut follows = interval_at(now + FOLLOW, FOLLOW);
        snapshots.set_missed_tick_behavior(MissedTickBehavior::Skip);
        follows.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                _ = follows.tick() => heap::making(|| self.producer.follow()),
                _ = snapshots.tick() => heap::making(|| self.producer.snapshot()),
            }
        }
        heap::making(|| self.producer.finish());
        closing.send_replace(true);
        let emptied = timeout(GRACE, async { while lanes.join_next().await.is_some() {} }).await;
        lanes.abort_all();
        let lost = self.queue.abandon();
        if lost > 0 {
            tracing::warn!(points = lost, in_time = emptied.is_ok(), "OTLP: points not sent before the end are lost");
        }
    }
}

/// The lane of one signal to its receiver.
struct Lane {
    signal: Signal,
    peer: Arc<ReceiverClient>,
    queue: Arc<Queue>,
    stats: Arc<OtlpStats>,
}

impl Lane {
    async fn run(self, mut closing: watch::Receiver<bool>) {
        let (mut backoff, mut reading) = (Backoff::new(), Backoff::new());
        let mut logged = None;
        loop {
            let next = tokio::select! {
                biased;
                next = self.queue.take(self.signal) => next,
                () = closed(&mut closing) => return,
            };
            let wait = match next {
                Next::Nothing => continue,
                Next::Unreadable(error) => {
                    self.log(&mut logged, &format!("a queued request cannot be read, will be tried again: {error}"));
                    Some(reading.wait(None))
                }
                Next::Batch(batch) => {
                    reading.reset();
                    self.send(batch, &mut backoff, &mut logged).await
                }
            };
            let Some(wait) = wait else { continue };
            if *closing.borrow() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                // One more attempt: the receiver or the disk may be back.
                () = closed(&mut closing) => {}
            }
        }
    }

    /// Sends a request. Returns how long to wait before the next attempt if it must be retried.
    async fn send(&self, batch: Batch, backoff: &mut Backoff, logged: &mut Option<Instant>) -> Option<Duration> {
        let (signal, url, bytes) = (self.signal.label(), self.peer.uri(), batch.payload.len() as u64);
        match self.peer.send(self.signal, batch.payload).await {
            Reply::Taken { rejected, message } => {
                self.stats.add_attempt(self.signal, Attempt::Sent);
                self.stats.add_sent_bytes(self.signal, bytes);
                self.queue.exported(self.signal, rejected);
                tracing::debug!(signal, %url, points = batch.points, bytes, rejected, "OTLP: sent");
                if !backoff.is_reset() {
                    tracing::info!(signal, %url, "OTLP: the receiver accepts points again");
                }
                backoff.reset();
                if rejected > 0 || !message.is_empty() {
                    let message = format!("{rejected} of {} points were rejected: {message}", batch.points);
                    self.log(logged, &message);
                }
                None
            }
            Reply::Refused(why) => {
                self.stats.add_attempt(self.signal, Attempt::Refused);
                self.queue.refused(self.signal);
                self.log(logged, &format!("refused, and dropped: {why}"));
                None
            }
            Reply::Retry { after, why } => {
                self.stats.add_attempt(self.signal, Attempt::Failed);
                self.queue.give_back(self.signal);
                if backoff.is_reset() {
                    tracing::warn!(signal, %url, "OTLP: not sent, will be tried again: {why}");
                }
                Some(backoff.wait(after))
            }
        }
    }

    /// Logs what a receiver or the disk reported, at most once a minute, because the text may differ each time. The
    /// counters include everything.
    fn log(&self, logged: &mut Option<Instant>, message: &str) {
        if logged.is_none_or(|at| at.elapsed() >= LOG_PERIOD) {
            let (signal, url) = (self.signal.label(), self.peer.uri());
            tracing::warn!(signal, %url, "OTLP: {message}");
            *logged = Some(Instant::now());
        }
    }
}

/// Waits until the exporter closes.
async fn closed(closing: &mut watch::Receiver<bool>) {
    // An exporter that was dropped closes too.
    let _ = closing.wait_for(|closing| *closing).await;
}
