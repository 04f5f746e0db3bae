//! The activity of one connection: what it waits for, when it was last active, and its deadline.
//!
//! Enters: events from the stream and the server. Leaves: its silence and its deadline, for its slot.

use super::sender::Client;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How long a client may take for the TLS handshake and the head of its request.
pub(super) const HEAD_PATIENCE: Duration = Duration::from_secs(3);
/// How long a kept connection may be silent.
pub(super) const IDLE_PATIENCE: Duration = Duration::from_secs(20);
/// The longest lifetime of a connection. At its end the connection is closed even in the middle of an answer, as is the
/// live page's stream; clients connect again.
const LIFETIME: Duration = Duration::from_secs(600);

/// What a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum ConnectionTurn {
    /// The rest of the handshake or of a request's head.
    Head,
    /// The next request.
    Idle,
    /// The rest of a request's body.
    Body,
    /// The answer, or its client to read it.
    Answer,
}

/// The activity of one connection.
#[derive(Debug)]
pub(super) struct ConnectionState {
    /// Whose it is.
    pub client: Client,
    begin: Instant,
    /// When it last received or sent a byte, or its turn changed: microseconds after `begin`.
    heard_us: AtomicU64,
    /// When its turn began: microseconds after `begin`.
    since_us: AtomicU64,
    turn: AtomicU8,
    /// Whether the client has had some of the answer.
    has_begun: AtomicBool,
    /// Whether the whole answer has been handed to the stream.
    is_answered: AtomicBool,
    /// Whether its client read nothing for too long.
    has_stalled: AtomicBool,
    /// Signalled when it is evicted.
    pub leave: Notify,
    born: Instant,
}

impl ConnectionState {
    pub(super) fn new(client: Client) -> Self {
        /// The origin of all times, so that they compare.
        static BEGIN: OnceLock<Instant> = OnceLock::new();
        let now = Instant::now();
        let state = Self {
            client,
            begin: *BEGIN.get_or_init(|| now),
            heard_us: AtomicU64::new(0),
            since_us: AtomicU64::new(0),
            turn: AtomicU8::new(0),
            has_begun: AtomicBool::new(false),
            is_answered: AtomicBool::new(false),
            has_stalled: AtomicBool::new(false),
            leave: Notify::new(),
            born: now,
        };
        state.begin_turn(ConnectionTurn::Head);
        state
    }

    fn now_us(&self) -> u64 {
        u64::try_from(Instant::now().saturating_duration_since(self.begin).as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn turn(&self) -> ConnectionTurn {
        match self.turn.load(Relaxed) {
            0 => ConnectionTurn::Head,
            1 => ConnectionTurn::Idle,
            2 => ConnectionTurn::Body,
            _ => ConnectionTurn::Answer,
        }
    }

    fn begin_turn(&self, turn: ConnectionTurn) {
        let now_us = self.now_us();
        self.heard_us.store(now_us, Relaxed);
        self.since_us.store(now_us, Relaxed);
        // What was written before the request was whole, such as `100 Continue`, is no part of its answer.
        self.has_begun.store(false, Relaxed);
        self.turn.store(turn as u8, Relaxed);
    }

    /// When it was last active, comparable with other connections.
    pub(super) fn heard(&self) -> u64 {
        self.heard_us.load(Relaxed)
    }

    /// Whether it has been silent for longer than this.
    pub(super) fn is_silent_for(&self, time: Duration) -> bool {
        u128::from(self.now_us().saturating_sub(self.heard())) > time.as_micros()
    }

    /// When it times out, if nothing changes. Bodies and answers have limits elsewhere: `serve::in_time`, and the
    /// kernel's timeout that `serve::listen` sets.
    pub(super) fn deadline(&self) -> Instant {
        let since = self.begin + Duration::from_micros(self.since_us.load(Relaxed));
        let end = self.born + LIFETIME;
        match self.turn() {
            ConnectionTurn::Head => end.min(since + HEAD_PATIENCE),
            ConnectionTurn::Idle => end.min(since + IDLE_PATIENCE),
            ConnectionTurn::Body | ConnectionTurn::Answer => end,
        }
    }

    /// Bytes arrived from the client.
    pub(super) fn read(&self) {
        if self.turn() == ConnectionTurn::Idle { self.begin_turn(ConnectionTurn::Head) } else { self.hear() }
    }

    /// The client read some bytes.
    pub(super) fn wrote(&self) {
        self.hear();
        self.has_begun.store(true, Relaxed);
    }

    fn hear(&self) {
        self.heard_us.store(self.now_us(), Relaxed);
    }

    /// Whether its client waits for an answer that has not begun: its silence is not the client's.
    pub(super) fn is_waiting(&self) -> bool {
        self.turn() == ConnectionTurn::Answer && !self.has_begun.load(Relaxed)
    }

    /// The client has read nothing for too long.
    pub(super) fn stall(&self) {
        self.has_stalled.store(true, Relaxed);
    }

    /// Whether the client read nothing for too long.
    pub(super) fn has_stalled(&self) -> bool {
        self.has_stalled.load(Relaxed)
    }

    /// The TLS handshake succeeded.
    pub(super) fn shook_hands(&self) {
        self.begin_turn(ConnectionTurn::Head);
    }

    /// The head of a request arrived, and its body, if it has one, is still to come.
    pub(super) fn asked(&self, has_body: bool) {
        self.is_answered.store(false, Relaxed);
        self.begin_turn(if has_body { ConnectionTurn::Body } else { ConnectionTurn::Answer });
    }

    /// The whole request has arrived, or is answered without the rest of it.
    pub(super) fn heard_all(&self) {
        if self.turn() == ConnectionTurn::Body {
            self.begin_turn(ConnectionTurn::Answer);
        }
    }

    /// The whole answer has been handed to the stream.
    pub(super) fn answered(&self) {
        self.is_answered.store(true, Relaxed);
    }

    /// The stream has handed all its bytes to the kernel.
    pub(super) fn flushed(&self) {
        if self.turn() == ConnectionTurn::Answer && self.is_answered.load(Relaxed) {
            self.begin_turn(ConnectionTurn::Idle);
        }
    }
}
