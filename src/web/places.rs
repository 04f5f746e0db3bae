//! Places for connections: how many there are, which connections have them, and which is closed when another client
//! comes.
//!
//! Enters: clients, and the activity of their connections. Leaves: a place for every client. When all are taken, a connection of
//! the client that has most of them is closed at once: the one that has been silent longest. Those whose request is being
//! answered are closed after its others, as long as they have no more than half of its places. Beyond that the longest silent of
//! them is next, so that clients that request much and read nothing cannot reduce the places for all others behind the same address
//! to a single one. Those whose answer has not begun come last: it is not they who are silent.

use super::counts::{Ending, Listener, Seldom, Stats};
use super::seat::{Seat, Turn};
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

/// All places of one listener.
#[derive(Debug)]
pub(super) struct Places {
    listener: Listener,
    most: usize,
    free: Arc<Semaphore>,
    taken: Mutex<Vec<Arc<Seat>>>,
    /// Signalled for each connection that has ended.
    left: Notify,
    stats: Arc<Stats>,
    full: Seldom,
}

/// A taken place, which is free again when dropped.
#[derive(Debug)]
pub(super) struct Place {
    /// The connection that has it.
    pub seat: Arc<Seat>,
    places: Arc<Places>,
    _permit: OwnedSemaphorePermit,
}

impl Places {
    pub(super) fn new(listener: Listener, most: usize, stats: Arc<Stats>) -> Arc<Self> {
        stats.connections(listener).switch_on();
        let (free, full) = (Arc::new(Semaphore::new(most)), Seldom::default());
        Arc::new(Self { listener, most, free, taken: Mutex::default(), left: Notify::new(), stats, full })
    }

    fn taken(&self) -> MutexGuard<'_, Vec<Arc<Seat>>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection of this client. If none is free, another one is evicted.
    pub(super) async fn take(self: &Arc<Self>, client: Client) -> Option<Place> {
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
        let seat = Arc::new(Seat::new(client));
        self.taken().push(Arc::clone(&seat));
        self.stats.connections(self.listener).accept();
        Some(Place { seat, places: Arc::clone(self), _permit: permit })
    }

    /// The connection to evict for another client.
    fn next_of_all(&self) -> Option<Arc<Seat>> {
        let taken = self.taken();
        let greediest = of_greediest(&taken, |_| true);
        let answering = greediest.iter().filter(|seat| seat.turn() == Turn::Answer).count();
        let from_answering = answering * 2 > greediest.len();
        let of_class = greediest.into_iter().filter(|seat| (seat.turn() == Turn::Answer) == from_answering);
        of_class.min_by_key(|seat| (seat.is_waiting(), seat.heard())).cloned()
    }

    /// The connection to evict when descriptors are short: none that is being answered and recently active.
    fn next_but_answered(&self) -> Option<Arc<Seat>> {
        let taken = self.taken();
        let has_stopped = |seat: &Seat| !seat.is_waiting() && seat.is_silent_for(ANSWER_PATIENCE);
        let greediest = of_greediest(&taken, |seat| seat.turn() != Turn::Answer || has_stopped(seat));
        greediest.into_iter().min_by_key(|seat| seat.heard()).cloned()
    }

    fn evict_for_another(&self) {
        if !self.evict(self.next_of_all()) {
            return;
        }
        if let Some(since) = self.full.due() {
            tracing::warn!(
                listener = self.listener.label(),
                places = self.most,
                closed = since,
                "every place for connections is taken; the longest silent ones of who has most are closed"
            );
        }
    }

    /// Evicts a connection; returns whether there is one.
    fn evict(&self, seat: Option<Arc<Seat>>) -> bool {
        let Some(seat) = seat else { return false };
        self.taken().retain(|taken| !Arc::ptr_eq(taken, &seat));
        seat.leave.notify_one();
        true
    }

    /// Evicts a connection and waits until it has ended, when the system has no room for another one. Returns whether
    /// one ended.
    pub(super) async fn make_room(&self) -> bool {
        let left = self.left.notified();
        self.evict(self.next_but_answered()) && timeout(LEAVE_PATIENCE, left).await.is_ok()
    }
}

/// Those that may go, of the client that has most connections, or of all that have as many.
fn of_greediest(taken: &[Arc<Seat>], may_go: impl Fn(&Seat) -> bool) -> Vec<&Arc<Seat>> {
    let mut counts = HashMap::<Client, usize>::new();
    taken.iter().for_each(|seat| *counts.entry(seat.client).or_default() += 1);
    let count = |seat: &Arc<Seat>| counts.get(&seat.client).copied().unwrap_or(0);
    let mut may_go: Vec<_> = taken.iter().filter(|seat| may_go(seat)).collect();
    let most = may_go.iter().map(|seat| count(seat)).max();
    may_go.retain(|seat| Some(count(seat)) == most);
    may_go
}

impl Place {
    /// Runs the connection until it ends, its client is too slow, or it is evicted.
    pub(super) async fn keep(self, connection: impl Future<Output = Ending>) {
        let seat = Arc::clone(&self.seat);
        let ending = {
            let (mut connection, mut leave) = (pin!(connection), pin!(seat.leave.notified()));
            let mut patience = pin!(sleep_until(seat.deadline()));
            poll_fn(|cx| {
                if leave.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ending::Evicted);
                }
                if let Poll::Ready(ending) = connection.as_mut().poll(cx) {
                    return Poll::Ready(if seat.has_stalled() { Ending::TimedOut } else { ending });
                }
                // Only the connection itself moves its deadline, and it was polled just now.
                let deadline = seat.deadline();
                if patience.deadline() != deadline {
                    patience.as_mut().reset(deadline);
                }
                let overdue = if seat.turn() == Turn::Idle { Ending::Idle } else { Ending::TimedOut };
                patience.as_mut().poll(cx).map(|()| overdue)
            })
            .await
        };
        // The place becomes free only now that the connection is closed.
        self.places.stats.connections(self.places.listener).end(ending);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().retain(|seat| !Arc::ptr_eq(seat, &self.seat));
        self.places.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::seat::{HEAD_PATIENCE, IDLE_PATIENCE};
    use std::future::pending;
    use tokio::time::Instant;

    const MOST: usize = 8;
    const ONE: Client = Client::User(1);

    fn places() -> Arc<Places> {
        Places::new(Listener::Http, MOST, Arc::default())
    }

    fn ended(places: &Places, ending: Ending) -> u64 {
        places.stats.connections(Listener::Http).ended(ending)
    }

    /// Takes every place, a millisecond apart each, with connections that never end.
    async fn fill(places: &Arc<Places>) -> Vec<Arc<Seat>> {
        let mut seats = Vec::new();
        for _ in 0..MOST {
            let place = places.take(ONE).await.expect("a place");
            seats.push(Arc::clone(&place.seat));
            tokio::spawn(place.keep(pending()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        seats
    }

    fn is_there(places: &Places, seat: &Arc<Seat>) -> bool {
        places.taken().iter().any(|taken| Arc::ptr_eq(taken, seat))
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_silent_gives_way() {
        let places = places();
        let seats = fill(&places).await;
        seats[0].read();
        seats[1].wrote();
        let newcomer = places.take(ONE).await.expect("a place");
        let there: Vec<_> = seats.iter().map(|seat| is_there(&places, seat)).collect();
        assert_eq!(there, [true, true, false, true, true, true, true, true]);
        assert!(is_there(&places, &newcomer.seat));
        assert_eq!(ended(&places, Ending::Evicted), 1);
        assert_eq!(places.stats.connections(Listener::Http).open(), MOST as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_being_answered_gives_way_last() {
        let places = places();
        let seats = fill(&places).await;
        seats[0].asked(false);
        seats[1].asked(true);
        tokio::time::advance(Duration::from_millis(1)).await;
        seats[2..].iter().for_each(|seat| seat.read());
        // The body of the second has not arrived, so that it counts as silent.
        drop(places.take(ONE).await);
        assert!(is_there(&places, &seats[0]) && !is_there(&places, &seats[1]));
    }

    /// Otherwise one place would be left, and each new client would evict the one before.
    #[tokio::test(start_paused = true)]
    async fn those_who_are_being_answered_keep_half_of_the_places() {
        let places = places();
        let seats = fill(&places).await;
        seats[..5].iter().for_each(|seat| seat.asked(false));
        tokio::time::advance(Duration::from_millis(1)).await;
        let first = places.take(ONE).await.expect("a place");
        let second = places.take(ONE).await.expect("a place");
        let there: Vec<_> = seats.iter().map(|seat| is_there(&places, seat)).collect();
        assert_eq!(there, [false, true, true, true, true, false, true, true], "one of the five, then one of the rest");
        assert!(is_there(&places, &first.seat) && is_there(&places, &second.seat));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_an_answer_gives_way_after_those_who_do_not_read_theirs() {
        let places = places();
        let seats = fill(&places).await;
        seats[..6].iter().for_each(|seat| seat.asked(true));
        seats[1].wrote();
        seats[..6].iter().for_each(|seat| seat.heard_all());
        tokio::time::advance(Duration::from_millis(1)).await;
        seats[4].wrote();
        tokio::time::advance(Duration::from_millis(1)).await;
        seats[5].wrote();
        let mut newcomers = Vec::new();
        for gone in [4, 5, 6] {
            newcomers.push(places.take(ONE).await.expect("a place"));
            assert!(!is_there(&places, &seats[gone]), "{gone}");
        }
        assert!(seats[..4].iter().all(|seat| is_there(&places, seat)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_most_connections_gives_way_whatever_the_others_do() {
        let places = places();
        let honest = places.take(Client::User(2)).await.expect("a place");
        tokio::time::advance(Duration::from_secs(2)).await;
        let newcomers = fill_rest(&places, MOST - 1).await;
        // The honest one has been silent longest, in every turn.
        for turn in [Turn::Head, Turn::Body, Turn::Answer] {
            match turn {
                Turn::Body => honest.seat.asked(true),
                Turn::Answer => honest.seat.heard_all(),
                _ => {}
            }
            newcomers.iter().for_each(|seat| seat.wrote());
            drop(places.take(ONE).await);
            assert!(is_there(&places, &honest.seat), "{turn:?}");
            tokio::spawn(places.take(ONE).await.expect("a place").keep(pending()));
        }
        assert!(places.make_room().await && is_there(&places, &honest.seat));
        // One of each client: the longest silent, as among those of one.
        let places = self::places();
        let mut all = Vec::new();
        for user in 0..8 {
            let place = places.take(Client::User(user)).await.expect("a place");
            all.push(Arc::clone(&place.seat));
            tokio::spawn(place.keep(pending()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        all[0].read();
        let _newcomer = places.take(Client::Unknown).await.expect("a place");
        assert!(is_there(&places, &all[0]) && !is_there(&places, &all[1]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_three_seconds_and_a_kept_connection_twenty() {
        let places = places();
        let place = places.take(ONE).await.expect("a place");
        let begun = Instant::now();
        // Sends slowly, and never completes its head.
        let seat = Arc::clone(&place.seat);
        place
            .keep(async {
                loop {
                    tokio::time::sleep(Duration::from_millis(700)).await;
                    seat.read();
                }
            })
            .await;
        assert_eq!((begun.elapsed(), ended(&places, Ending::TimedOut)), (HEAD_PATIENCE, 1));
        let place = places.take(ONE).await.expect("a place");
        place.seat.asked(false);
        place.seat.flushed();
        assert_eq!(place.seat.turn(), Turn::Answer, "what was flushed is not the whole answer");
        place.seat.answered();
        place.seat.flushed();
        let begun = Instant::now();
        place.keep(pending()).await;
        assert_eq!((begun.elapsed(), ended(&places, Ending::Idle)), (IDLE_PATIENCE, 1));
        assert_eq!(places.stats.connections(Listener::Http).open(), 0);
        assert_eq!(places.free.available_permits(), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn one_whose_task_is_busy_is_not_waited_for() {
        let places = places();
        let mut busy = Vec::new();
        for _ in 0..2 {
            busy.push(places.take(ONE).await.expect("a place"));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        fill_rest(&places, MOST - 2).await;
        // The two are the longest silent, and are not polled, so that the third is evicted eventually.
        assert!(places.take(ONE).await.is_some());
        assert_eq!(ended(&places, Ending::Evicted), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn where_descriptors_are_short_nobody_who_is_being_answered_goes() {
        let places = places();
        let seats = fill(&places).await;
        seats[1..].iter().for_each(|seat| seat.asked(false));
        assert!(places.make_room().await);
        assert!(!is_there(&places, &seats[0]));
        assert!(!places.make_room().await, "they are all being answered");
        tokio::time::advance(ANSWER_PATIENCE * 2).await;
        assert!(!places.make_room().await, "it is not they who are silent");
        seats[1].wrote();
        tokio::time::advance(ANSWER_PATIENCE * 2).await;
        seats[2..].iter().for_each(|seat| seat.wrote());
        assert!(places.make_room().await);
        assert!(!is_there(&places, &seats[1]) && is_there(&places, &seats[2]));
    }

    async fn fill_rest(places: &Arc<Places>, count: usize) -> Vec<Arc<Seat>> {
        let mut seats = Vec::new();
        for _ in 0..count {
            let place = places.take(ONE).await.expect("a place");
            seats.push(Arc::clone(&place.seat));
            tokio::spawn(place.keep(pending()));
        }
        seats
    }
}
