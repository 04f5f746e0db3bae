//! Counts of connections and requests, for `/metrics`, and rate limits for the log.

use crate::metrics::{Collect, Families, Part, catalogue as c};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

/// What a connection takes that reads a long answer: what hyper read of it, a piece in hyper's buffer, and its task. Measured
/// on 256 of them.
const CONNECTION_BYTES: u64 = 22 << 10;

/// The shortest time between two log lines of one kind.
const LOG_EVERY: Duration = Duration::from_secs(60);

highwater_core::labels! {
    /// How a connection ended.
    pub enum Ending {
        /// Closed by its client, or after its last answer.
        Closed = "closed",
        /// Kept open between two requests for the longest time allowed.
        Idle = "idle",
        /// Closed to make room: all slots of the listener were taken, or the process had no free file descriptor.
        /// `slots` describes which connection is chosen.
        Evicted = "evicted",
        /// Its client was too slow with the TLS handshake, a request's head, or reading an answer; or it reached the
        /// longest lifetime.
        TimedOut = "timed_out",
        /// The TLS handshake failed.
        HandshakeFailed = "handshake_failed",
    }
}

highwater_core::labels! {
    /// Why a request was refused before it reached its handler.
    pub enum Refused {
        /// Its `Host` is not one of the daemon's names.
        Host = "host",
        /// There were more requests than `rate_limit` allows.
        Rate = "rate",
        /// It had no valid user and password.
        Credentials = "credentials",
        /// Too many passwords were being checked.
        Busy = "busy",
    }
}

/// The connections of one listener.
#[derive(Debug, Default)]
pub struct Connections {
    is_on: AtomicBool,
    accepted: AtomicU64,
    ended: [AtomicU64; Ending::ALL.len()],
    failed: AtomicU64,
}

impl Connections {
    pub(super) fn switch_on(&self) {
        self.is_on.store(true, Relaxed);
    }

    pub(super) fn accept(&self) {
        self.accepted.fetch_add(1, Relaxed);
    }

    pub(super) fn end(&self, ending: Ending) {
        self.ended[ending as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn fail(&self) {
        self.failed.fetch_add(1, Relaxed);
    }

    /// How many ended this way.
    #[must_use]
    pub fn ended(&self, ending: Ending) -> u64 {
        self.ended[ending as usize].load(Relaxed)
    }

    /// How many could not be accepted.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// How many are open.
    #[must_use]
    pub fn open(&self) -> u64 {
        // Read first, so that connections that end meanwhile cannot make the difference negative.
        let ended: u64 = Ending::ALL.into_iter().map(|ending| self.ended(ending)).sum();
        self.accepted.load(Relaxed).saturating_sub(ended)
    }
}

highwater_core::labels! {
    /// The listeners.
    pub enum Listener {
        /// `listen`.
        Http = "http",
        /// `annotations.listen`.
        Annotations = "annotations",
        /// `health.listen`.
        Health = "health",
    }
}

/// Counts of connections and requests.
#[derive(Debug, Default)]
pub struct HttpStats {
    connections: [Connections; Listener::ALL.len()],
    refused: [AtomicU64; Refused::ALL.len()],
    /// Whether there is a web configuration file, how often it was loaded, and how often it could not be used.
    config: (AtomicBool, AtomicU64, AtomicU64),
}

impl HttpStats {
    /// The connections of one listener.
    #[must_use]
    pub fn connections(&self, of: Listener) -> &Connections {
        &self.connections[of as usize]
    }

    /// The listeners in use.
    pub fn listeners(&self) -> impl Iterator<Item = (Listener, &Connections)> {
        let all = Listener::ALL.into_iter().map(|listener| (listener, self.connections(listener)));
        all.filter(|(_, connections)| connections.is_on.load(Relaxed))
    }

    pub(super) fn refuse(&self, reason: Refused) {
        self.refused[reason as usize].fetch_add(1, Relaxed);
    }

    /// How many requests were refused for this reason.
    #[must_use]
    pub fn refused(&self, reason: Refused) -> u64 {
        self.refused[reason as usize].load(Relaxed)
    }

    pub(super) fn read_config(&self, is_good: bool) {
        self.config.0.store(true, Relaxed);
        if is_good { &self.config.1 } else { &self.config.2 }.fetch_add(1, Relaxed);
    }

    /// How often the web configuration file was loaded and refused; `None` if there is none.
    #[must_use]
    pub fn config_reads(&self) -> Option<(u64, u64)> {
        self.config.0.load(Relaxed).then(|| (self.config.1.load(Relaxed), self.config.2.load(Relaxed)))
    }
}

/// Limits one kind of log line, which may be due a thousand times a second, to one a minute.
#[derive(Debug)]
pub(super) struct LogLimiter {
    begin: Instant,
    /// When the last line was due, milliseconds after `begin`, plus one; 0 for never.
    last_ms: AtomicU64,
    since: AtomicU64,
}

impl Default for LogLimiter {
    fn default() -> Self {
        Self { begin: Instant::now(), last_ms: AtomicU64::new(0), since: AtomicU64::new(0) }
    }
}

impl LogLimiter {
    /// Counts one, and returns the number since the last line if another line is due.
    pub(super) fn due(&self) -> Option<u64> {
        self.since.fetch_add(1, Relaxed);
        let now_ms = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        let last_ms = self.last_ms.load(Relaxed);
        let is_due = last_ms == 0 || now_ms - last_ms.min(now_ms) >= LOG_EVERY.as_millis() as u64;
        let won = is_due && self.last_ms.compare_exchange(last_ms, now_ms, Relaxed, Relaxed).is_ok();
        won.then(|| self.since.swap(0, Relaxed))
    }
}

/// Exports the counts under the catalogue's names.
impl Collect for HttpStats {
    fn collect(&self, out: &mut Families) {
        for (listener, connections) in self.listeners() {
            let listener = listener.label();
            out.count(&c::HTTP_CONNECTIONS_OPEN, [listener], Some(connections.open()));
            for ending in Ending::ALL {
                out.count(&c::HTTP_CONNECTIONS, [listener, ending.label()], Some(connections.ended(ending)));
            }
            out.count(&c::HTTP_ACCEPT_FAILURES, [listener], Some(connections.failed()));
        }
        let open: u64 = self.listeners().map(|(_, connections)| connections.open()).sum();
        out.memory(Part::Connections, usize::try_from(open * CONNECTION_BYTES).unwrap_or(usize::MAX));
        for reason in Refused::ALL {
            out.count(&c::HTTP_REQUESTS_REFUSED, [reason.label()], Some(self.refused(reason)));
        }
        if let Some((taken, refused)) = self.config_reads() {
            out.count(&c::WEB_CONFIG_READS, ["taken"], Some(taken));
            out.count(&c::WEB_CONFIG_READS, ["refused"], Some(refused));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn trouble_is_logged_once_a_minute_with_its_count() {
        let seldom = LogLimiter::default();
        assert_eq!(seldom.due(), Some(1));
        assert_eq!((seldom.due(), seldom.due()), (None, None));
        tokio::time::advance(LOG_EVERY).await;
        assert_eq!((seldom.due(), seldom.due()), (Some(3), None));
    }

    #[test]
    fn what_was_accepted_is_open_or_ended() {
        let connections = Connections::default();
        (0..7).for_each(|_| connections.accept());
        Ending::ALL.into_iter().for_each(|ending| connections.end(ending));
        assert_eq!(connections.open(), 2);
    }
}
