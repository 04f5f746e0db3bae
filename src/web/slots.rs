//! Slots for connections: how many there are, which connections have them, and which is closed when another client
//! comes.
//!
//! Enters: clients, and the activity of their connections. Leaves: a slot for every client. When all are taken, the
//! client with the most connections loses one at once: the one that has been silent longest. Connections that are being
//! answered are spared while they are at most half of that client's. If they are more, one of them is closed: otherwise
//! clients that request much and read nothing would leave a single slot to all others behind the same address. Among
//! them, those whose answer has not begun are closed last: there the daemon is silent, not the client.

use super::connection::{ConnectionState, ConnectionTurn};
use super::counts::{Ending, HttpStats, Listener, LogLimiter};
use super::sender::Client;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep_until, timeout};

/// How long to wait for an evicted connection to end before another one is evicted: its task may be busy.
const LEAVE_PATIENCE: Duration = Duration::from_millis(50);

/// How long a connection that is being answered may be silent when descriptors are short.
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);

/// All slots of one listener.
#[derive(Debug)]
pub(super) struct ConnectionSlots {
    listener: Listener,
    most: usize,
    free: Arc<Semaphore>,
    taken: Mutex<Vec<Arc<ConnectionState>>>,
    /// Signalled for each connection that has ended.
    left: Notify,
    stats: Arc<HttpStats>,
    full: LogLimiter,
}

/// A taken slot, which is free again when dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    /// The connection that has it.
    pub state: Arc<ConnectionState>,
    slots: Arc<ConnectionSlots>,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionSlots {
    pub(super) fn new(listener: Listener, most: usize, stats: Arc<HttpStats>) -> Arc<Self> {
        stats.connections(listener).switch_on();
        let (free, full) = (Arc::new(Semaphore::new(most)), LogLimiter::default());
        Arc::new(Self { listener, most, free, taken: Mutex::default(), left: Notify::new(), stats, full })
    }

    fn taken(&self) -> MutexGuard<'_, Vec<Arc<ConnectionState>>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for a new connection of this client. If none is free, another one is evicted.
    pub(super) async fn take(self: &Arc<Self>, client: Client) -> Option<ConnectionSlot> {
        let permit = loop {
            match Arc::clone(&self.free).try_acquire_owned() {
                Ok(permit) => break permit,
                Err(_) => self.evict_for_another(),
            }
            match timeout(LEAVE_PATIENCE, Arc::clone(&self.free).acquire_owned()).await {
                Ok(permit) => break permit.ok()?,
                Err(_) => continue,
            }
        };
        let state = Arc::new(ConnectionState::new(client));
        self.taken().push(Arc::clone(&state));
        self.stats.connections(self.listener).accept();
        Some(ConnectionSlot { state, slots: Arc::clone(self), _permit: permit })
    }

    /// The connection to evict for another client.
    fn victim_for_newcomer(&self) -> Option<Arc<ConnectionState>> {
        let taken = self.taken();
        let greediest = of_greediest(&taken, |_| true);
        let answering = greediest.iter().filter(|state| state.turn() == ConnectionTurn::Answer).count();
        let from_answering = answering * 2 > greediest.len();
        let of_class = greediest.into_iter().filter(|state| (state.turn() == ConnectionTurn::Answer) == from_answering);
        of_class.min_by_key(|state| (state.is_waiting(), state.heard())).cloned()
    }

    /// The connection to evict when descriptors are short: none that is being answered and recently active.
    fn victim_for_descriptor(&self) -> Option<Arc<ConnectionState>> {
        let taken = self.taken();
        let has_stopped = |state: &ConnectionState| !state.is_waiting() && state.is_silent_for(ANSWER_PATIENCE);
        let greediest = of_greediest(&taken, |state| state.turn() != ConnectionTurn::Answer || has_stopped(state));
        greediest.into_iter().min_by_key(|state| state.heard()).cloned()
    }

    fn evict_for_another(&self) {
        if !self.evict(self.victim_for_newcomer()) {
            return;
        }
        if let Some(since) = self.full.due() {
            tracing::warn!(
                listener = self.listener.label(),
                slots = self.most,
                closed = since,
                "every connection slot is taken; the client with the most loses those that have been silent longest"
            );
        }
    }

    /// Evicts a connection; returns whether there is one.
    fn evict(&self, state: Option<Arc<ConnectionState>>) -> bool {
        let Some(state) = state else { return false };
        self.taken().retain(|taken| !Arc::ptr_eq(taken, &state));
        state.leave.notify_one();
        true
    }

    /// Evicts a connection and waits until it has ended, when the system has no room for another one. Returns whether
    /// one ended.
    pub(super) async fn make_room(&self) -> bool {
        let left = self.left.notified();
        self.evict(self.victim_for_descriptor()) && timeout(LEAVE_PATIENCE, left).await.is_ok()
    }
}

/// The evictable connections of the client with the most connections, among the clients that have an evictable one. If
/// several clients have equally many, those of all of them.
fn of_greediest(
    taken: &[Arc<ConnectionState>],
    may_go: impl Fn(&ConnectionState) -> bool,
) -> Vec<&Arc<ConnectionState>> {
    let mut counts = HashMap::<Client, usize>::new();
    taken.iter().for_each(|state| *counts.entry(state.client).or_default() += 1);
    let count = |state: &Arc<ConnectionState>| counts.get(&state.client).copied().unwrap_or(0);
    let mut may_go: Vec<_> = taken.iter().filter(|state| may_go(state)).collect();
    let most = may_go.iter().map(|state| count(state)).max();
    may_go.retain(|state| Some(count(state)) == most);
    may_go
}

impl ConnectionSlot {
    /// Runs the connection until it ends, its client is too slow, or it is evicted.
    pub(super) async fn keep(self, connection: impl Future<Output = Ending>) {
        let state = Arc::clone(&self.state);
        let ending = {
            let (mut connection, mut leave) = (pin!(connection), pin!(state.leave.notified()));
            let mut patience = pin!(sleep_until(state.deadline()));
            poll_fn(|cx| {
                if leave.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ending::Evicted);
                }
                if let Poll::Ready(ending) = connection.as_mut().poll(cx) {
                    return Poll::Ready(if state.has_stalled() { Ending::TimedOut } else { ending });
                }
                // Only the connection itself moves its deadline, and it was polled just now.
                let deadline = state.deadline();
                if patience.deadline() != deadline {
                    patience.as_mut().reset(deadline);
                }
                let overdue = if state.turn() == ConnectionTurn::Idle { Ending::Idle } else { Ending::TimedOut };
                patience.as_mut().poll(cx).map(|()| overdue)
            })
            .await
        };
        // The slot becomes free only now that the connection is closed.
        self.slots.stats.connections(self.slots.listener).end(ending);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.taken().retain(|state| !Arc::ptr_eq(state, &self.state));
        self.slots.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::connection::{HEAD_PATIENCE, IDLE_PATIENCE};
    use std::future::pending;
    use tokio::time::Instant;

    const MOST: usize = 8;
    const ONE: Client = Client::User(1);

    fn slots() -> Arc<ConnectionSlots> {
        ConnectionSlots::new(Listener::Http, MOST, Arc::default())
    }

    fn ended(slots: &ConnectionSlots, ending: Ending) -> u64 {
        slots.stats.connections(Listener::Http).ended(ending)
    }

    /// Takes every slot, a millisecond apart each, with connections that never end.
    async fn fill(slots: &Arc<ConnectionSlots>) -> Vec<Arc<ConnectionState>> {
        let mut states = Vec::new();
        for _ in 0..MOST {
            let slot = slots.take(ONE).await.expect("a place");
            states.push(Arc::clone(&slot.state));
            tokio::spawn(slot.keep(pending()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        states
    }

    fn is_there(slots: &ConnectionSlots, state: &Arc<ConnectionState>) -> bool {
        slots.taken().iter().any(|taken| Arc::ptr_eq(taken, state))
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_silent_gives_way() {
        let slots = slots();
        let states = fill(&slots).await;
        states[0].read();
        states[1].wrote();
        let newcomer = slots.take(ONE).await.expect("a place");
        let there: Vec<_> = states.iter().map(|state| is_there(&slots, state)).collect();
        assert_eq!(there, [true, true, false, true, true, true, true, true]);
        assert!(is_there(&slots, &newcomer.state));
        assert_eq!(ended(&slots, Ending::Evicted), 1);
        assert_eq!(slots.stats.connections(Listener::Http).open(), MOST as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_being_answered_gives_way_last() {
        let slots = slots();
        let states = fill(&slots).await;
        states[0].asked(false);
        states[1].asked(true);
        tokio::time::advance(Duration::from_millis(1)).await;
        states[2..].iter().for_each(|state| state.read());
        // The body of the second has not arrived, so that it counts as silent.
        drop(slots.take(ONE).await);
        assert!(is_there(&slots, &states[0]) && !is_there(&slots, &states[1]));
    }

    /// Otherwise one slot would be left, and each new client would evict the one before.
    #[tokio::test(start_paused = true)]
    async fn those_who_are_being_answered_keep_half_of_the_places() {
        let slots = slots();
        let states = fill(&slots).await;
        states[..5].iter().for_each(|state| state.asked(false));
        tokio::time::advance(Duration::from_millis(1)).await;
        let first = slots.take(ONE).await.expect("a place");
        let second = slots.take(ONE).await.expect("a place");
        let there: Vec<_> = states.iter().map(|state| is_there(&slots, state)).collect();
        assert_eq!(there, [false, true, true, true, true, false, true, true], "one of the five, then one of the rest");
        assert!(is_there(&slots, &first.state) && is_there(&slots, &second.state));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_an_answer_gives_way_after_those_who_do_not_read_theirs() {
        let slots = slots();
        let states = fill(&slots).await;
        states[..6].iter().for_each(|state| state.asked(true));
        states[1].wrote();
        states[..6].iter().for_each(|state| state.heard_all());
        tokio::time::advance(Duration::from_millis(1)).await;
        states[4].wrote();
        tokio::time::advance(Duration::from_millis(1)).await;
        states[5].wrote();
        let mut newcomers = Vec::new();
        for gone in [4, 5, 6] {
            newcomers.push(slots.take(ONE).await.expect("a place"));
            assert!(!is_there(&slots, &states[gone]), "{gone}");
        }
        assert!(states[..4].iter().all(|state| is_there(&slots, state)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_most_connections_gives_way_whatever_the_others_do() {
        let slots = slots();
        let honest = slots.take(Client::User(2)).await.expect("a place");
        tokio::time::advance(Duration::from_secs(2)).await;
        let newcomers = fill_rest(&slots, MOST - 1).await;
        // The honest one has been silent longest, in every turn.
        for turn in [ConnectionTurn::Head, ConnectionTurn::Body, ConnectionTurn::Answer] {
            match turn {
                ConnectionTurn::Body => honest.state.asked(true),
                ConnectionTurn::Answer => honest.state.heard_all(),
                _ => {}
            }
            newcomers.iter().for_each(|state| state.wrote());
            drop(slots.take(ONE).await);
            assert!(is_there(&slots, &honest.state), "{turn:?}");
            tokio::spawn(slots.take(ONE).await.expect("a place").keep(pending()));
        }
        assert!(slots.make_room().await && is_there(&slots, &honest.state));
        // One of each client: the longest silent, as among those of one.
        let slots = self::slots();
        let mut all = Vec::new();
        for user in 0..8 {
            let slot = slots.take(Client::User(user)).await.expect("a place");
            all.push(Arc::clone(&slot.state));
            tokio::spawn(slot.keep(pending()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        all[0].read();
        let _newcomer = slots.take(Client::Unknown).await.expect("a place");
        assert!(is_there(&slots, &all[0]) && !is_there(&slots, &all[1]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_three_seconds_and_a_kept_connection_twenty() {
        let slots = slots();
        let slot = slots.take(ONE).await.expect("a place");
        let begun = Instant::now();
        // Sends slowly, and never completes its head.
        let state = Arc::clone(&slot.state);
        slot.keep(async {
            loop {
                tokio::time::sleep(Duration::from_millis(700)).await;
                state.read();
            }
        })
        .await;
        assert_eq!((begun.elapsed(), ended(&slots, Ending::TimedOut)), (HEAD_PATIENCE, 1));
        let slot = slots.take(ONE).await.expect("a place");
        slot.state.asked(false);
        slot.state.flushed();
        assert_eq!(slot.state.turn(), ConnectionTurn::Answer, "what was flushed is not the whole answer");
        slot.state.answered();
        slot.state.flushed();
        let begun = Instant::now();
        slot.keep(pending()).await;
        assert_eq!((begun.elapsed(), ended(&slots, Ending::Idle)), (IDLE_PATIENCE, 1));
        assert_eq!(slots.stats.connections(Listener::Http).open(), 0);
        assert_eq!(slots.free.available_permits(), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn one_whose_task_is_busy_is_not_waited_for() {
        let slots = slots();
        let mut busy = Vec::new();
        for _ in 0..2 {
            busy.push(slots.take(ONE).await.expect("a place"));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        fill_rest(&slots, MOST - 2).await;
        // The two are the longest silent, and are not polled, so that the third is evicted eventually.
        assert!(slots.take(ONE).await.is_some());
        assert_eq!(ended(&slots, Ending::Evicted), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn where_descriptors_are_short_nobody_who_is_being_answered_goes() {
        let slots = slots();
        let states = fill(&slots).await;
        states[1..].iter().for_each(|state| state.asked(false));
        assert!(slots.make_room().await);
        assert!(!is_there(&slots, &states[0]));
        assert!(!slots.make_room().await, "they are all being answered");
        tokio::time::advance(ANSWER_PATIENCE * 2).await;
        assert!(!slots.make_room().await, "it is not they who are silent");
        states[1].wrote();
        tokio::time::advance(ANSWER_PATIENCE * 2).await;
        states[2..].iter().for_each(|state| state.wrote());
        assert!(slots.make_room().await);
        assert!(!is_there(&slots, &states[1]) && is_there(&slots, &states[2]));
    }

    async fn fill_rest(slots: &Arc<ConnectionSlots>, count: usize) -> Vec<Arc<ConnectionState>> {
        let mut states = Vec::new();
        for _ in 0..count {
            let slot = slots.take(ONE).await.expect("a place");
            states.push(Arc::clone(&slot.state));
            tokio::spawn(slot.keep(pending()));
        }
        states
    }
}
