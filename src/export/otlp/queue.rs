//! The one bounded queue of everything to be sent: encoded requests of every signal, oldest dropped first.
//!
//! Enters: encoded requests, each with its number of points. Leaves: the same requests, one at a time for each signal.
//! Invariants: for each signal, points produced = exported + queued + dropped, also in a scrape that comes while a request
//! is being written to the disk; bytes never exceed the cap; within a signal the order is that of production. A request that
//! is being sent counts as queued, and is not dropped meanwhile, because it may arrive. A request whose file cannot be read
//! for now keeps its place. Absent on purpose: time and retries, which the lanes ([`run`](super::run)) handle.

use super::disk::{Disk, Read};
use super::stats::{Account, DropReason, OtlpStats, Signal};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// One encoded request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// What it carries.
    pub signal: Signal,
    /// Data points or spans in it.
    pub points: u64,
    /// The encoded request.
    pub payload: Bytes,
}

/// What a lane gets from the queue.
#[derive(Debug)]
pub enum Next {
    /// The oldest request. It must be acknowledged or given back before the next is taken.
    Batch(Batch),
    /// There is no request, or one is being sent.
    Nothing,
    /// The file of the oldest request cannot be read for now. It is still the oldest: try again later.
    Unreadable(io::Error),
}

/// The queue, shared by the producer and one lane for each signal.
pub struct Queue {
    state: Mutex<State>,
    arrived: [Notify; Signal::ALL.len()],
    stats: Arc<OtlpStats>,
}

struct State {
    cap_bytes: usize,
    bytes: usize,
    /// Of these, bytes of requests that are in no file.
    memory_bytes: usize,
    next_number: u64,
    lanes: [Lane; Signal::ALL.len()],
    disk: Option<Disk>,
}

#[derive(Default)]
struct Lane {
    waiting: VecDeque<Entry>,
    sending: Option<Entry>,
    /// Its queued points are those of all its requests, including the one being sent.
    account: Account,
}

/// A request's place. Its payload is here, or in the file with its number.
struct Entry {
    number: u64,
    points: u64,
    bytes: usize,
    payload: Option<Bytes>,
}

impl Entry {
    /// The bytes that it takes in memory.
    fn in_memory(&self) -> usize {
        self.payload.as_ref().map_or(0, Bytes::len)
    }
}

impl Queue {
    /// An empty queue of at most `cap_bytes`, or one with the requests that `disk` has from an earlier process.
    #[must_use]
    pub fn new(cap_bytes: usize, disk: Option<Disk>, stats: Arc<OtlpStats>) -> Self {
        let lanes = std::array::from_fn(|_| Lane::default());
        let mut state = State { cap_bytes, bytes: 0, memory_bytes: 0, next_number: 0, lanes, disk };
        state.restore();
        state.publish(&stats);
        Self { state: Mutex::new(state), arrived: std::array::from_fn(|_| Notify::new()), stats }
    }

    /// Adds a request. If it does not fit, the oldest waiting requests of all signals are dropped. If the requests being
    /// sent leave no room for it, nothing else is dropped, but it is.
    pub fn push(&self, batch: Batch) {
        let signal = batch.signal;
        let mut state = self.state();
        state.push(batch);
        state.publish(&self.stats);
        drop(state);
        self.arrived[signal as usize].notify_one();
    }

    /// Waits until the signal has a request, and takes the oldest. Never returns [`Next::Nothing`].
    pub async fn take(&self, signal: Signal) -> Next {
        loop {
            match self.try_take(signal) {
                Next::Nothing => self.arrived[signal as usize].notified().await,
                next => return next,
            }
        }
    }

    /// The oldest request of the signal, if none is being sent.
    pub fn try_take(&self, signal: Signal) -> Next {
        let mut state = self.state();
        let next = state.take(signal, &self.stats);
        state.publish(&self.stats);
        next
    }

    /// The request being sent has arrived, except `rejected` of its points, which the receiver refused.
    pub fn exported(&self, signal: Signal, rejected: u64) {
        self.finish(signal, |account, points| {
            let rejected = rejected.min(points);
            account.drop(DropReason::Rejected, rejected);
            account.export(points - rejected);
        });
    }

    /// The receiver will never accept the request being sent.
    pub fn refused(&self, signal: Signal) {
        self.finish(signal, |account, points| account.drop(DropReason::Refused, points));
    }

    /// The request being sent has not arrived. It is the oldest again.
    pub fn give_back(&self, signal: Signal) {
        let mut state = self.state();
        let lane = &mut state.lanes[signal as usize];
        if let Some(entry) = lane.sending.take() {
            lane.waiting.push_front(entry);
        }
    }

    /// Whether nothing waits and nothing is being sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.state().lanes.iter().all(|lane| lane.waiting.is_empty() && lane.sending.is_none())
    }

    /// Called at the end: requests that are only in memory are lost, and counted. Returns their points.
    pub fn abandon(&self) -> u64 {
        let mut state = self.state();
        let mut lost_points = 0;
        for signal in Signal::ALL {
            let lane = &mut state.lanes[signal as usize];
            let entries: Vec<_> = lane.sending.take().into_iter().chain(lane.waiting.drain(..)).collect();
            let (lost, kept) = entries.into_iter().partition::<Vec<_>, _>(|entry| entry.payload.is_some());
            lane.waiting = kept.into();
            for entry in lost {
                state.bytes -= entry.bytes;
                state.memory_bytes -= entry.in_memory();
                state.lanes[signal as usize].account.drop(DropReason::Shutdown, entry.points);
                lost_points += entry.points;
            }
        }
        state.publish(&self.stats);
        lost_points
    }

    fn finish(&self, signal: Signal, count: impl FnOnce(&mut Account, u64)) {
        let mut state = self.state();
        if let Some(entry) = state.lanes[signal as usize].sending.take() {
            state.forget(&entry);
            count(&mut state.lanes[signal as usize].account, entry.points);
        }
        state.publish(&self.stats);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, batch: Batch) {
        let Batch { signal, points, payload } = batch;
        let bytes = payload.len();
        self.lanes[signal as usize].account.queue(points);
        if bytes > self.cap_bytes {
            return self.lanes[signal as usize].account.drop(DropReason::TooLarge, points);
        }
        // Those that wait must not go for one that does not fit without them either.
        let sending: usize = self.lanes.iter().filter_map(|lane| Some(lane.sending.as_ref()?.bytes)).sum();
        let fits = sending + bytes <= self.cap_bytes;
        while fits && self.bytes + bytes > self.cap_bytes && self.drop_oldest() {}
        if self.bytes + bytes > self.cap_bytes {
            return self.lanes[signal as usize].account.drop(DropReason::Overflow, points);
        }
        let number = self.next_number;
        self.next_number += 1;
        self.bytes += bytes;
        let written = self.disk.as_mut().is_some_and(|disk| disk.write(number, signal, points, &payload));
        let payload = (!written).then_some(payload);
        let entry = Entry { number, points, bytes, payload };
        self.memory_bytes += entry.in_memory();
        self.lanes[signal as usize].waiting.push_back(entry);
    }

    /// Drops the oldest request that is not being sent; returns whether there was one.
    fn drop_oldest(&mut self) -> bool {
        let number = |signal: &Signal| self.lanes[*signal as usize].waiting.front().map(|entry| entry.number);
        let oldest = Signal::ALL.into_iter().filter(|signal| number(signal).is_some()).min_by_key(number);
        let Some((signal, entry)) =
            oldest.and_then(|signal| Some((signal, self.lanes[signal as usize].waiting.pop_front()?)))
        else {
            return false;
        };
        self.forget(&entry);
        self.lanes[signal as usize].account.drop(DropReason::Overflow, entry.points);
        true
    }

    fn take(&mut self, signal: Signal, stats: &OtlpStats) -> Next {
        if self.lanes[signal as usize].sending.is_some() {
            return Next::Nothing;
        }
        while let Some(entry) = self.lanes[signal as usize].waiting.pop_front() {
            let points = entry.points;
            match self.read(&entry) {
                Read::Whole(payload) => {
                    self.lanes[signal as usize].sending = Some(entry);
                    return Next::Batch(Batch { signal, points, payload });
                }
                Read::Damaged => {
                    self.forget(&entry);
                    self.lanes[signal as usize].account.drop(DropReason::Corrupt, points);
                }
                Read::Failed(error) => {
                    self.lanes[signal as usize].waiting.push_front(entry);
                    stats.add_read_failure(signal);
                    return Next::Unreadable(error);
                }
            }
        }
        Next::Nothing
    }

    fn read(&self, entry: &Entry) -> Read {
        match (&entry.payload, &self.disk) {
            (Some(payload), _) => Read::Whole(payload.clone()),
            (None, Some(disk)) => disk.read(entry.number, entry.bytes),
            (None, None) => Read::Damaged,
        }
    }

    fn forget(&mut self, entry: &Entry) {
        self.bytes -= entry.bytes;
        self.memory_bytes -= entry.in_memory();
        if let (None, Some(disk)) = (&entry.payload, &mut self.disk) {
            disk.remove(entry.number);
        }
    }

    /// Queues the requests that an earlier process left, oldest first. They count as produced, because this process now
    /// accounts for them.
    fn restore(&mut self) {
        let Some(disk) = &self.disk else { return };
        for left in disk.left() {
            self.next_number = self.next_number.max(left.number + 1);
            self.bytes += left.bytes;
            let entry = Entry { number: left.number, points: left.points, bytes: left.bytes, payload: None };
            let lane = &mut self.lanes[left.signal as usize];
            lane.account.queue(left.points);
            lane.waiting.push_back(entry);
        }
        while self.bytes > self.cap_bytes && self.drop_oldest() {}
    }

    fn publish(&self, stats: &OtlpStats) {
        let bytes = self.bytes as u64;
        stats.set_queued_bytes(bytes, self.memory_bytes as u64);
        stats.publish(std::array::from_fn(|signal| self.lanes[signal].account));
    }
}

#[cfg(test)]
mod tests;
