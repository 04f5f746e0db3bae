//! The last events as they were taken, so that a recording can contain what jobs sent before it began.
//!
//! Enters: each accepted event, from any endpoint. Leaves: the kept ones, in the order in which they were taken.
//! Invariants: the bytes are limited, whatever jobs send; recording an event copies some 70 bytes under a lock that a
//! reader holds no longer than it takes to copy one block; the number of dropped events is reported. Absent on purpose:
//! refused events, and records of layers, of which recordings contain whole profiles.

pub(super) mod code;

use highwater_core::jobs::Event;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of one block: the most that is dropped at once, and that a reader copies.
const BLOCK_BYTES: usize = 32 << 10;

/// Most events need less than this: the room reserved for the last one of a block.
const EVENT_BYTES: usize = 512;

/// How much is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogLimits {
    /// For how long after their arrival, nanoseconds; older ones may be kept if the space is not needed.
    pub keep_ns: i64,
    /// Limit on the bytes of all of them; 0 keeps none.
    pub bytes: usize,
}

/// The last events.
#[derive(Debug, Default)]
pub struct EventLog {
    limits: LogLimits,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Full blocks, oldest first.
    closed: VecDeque<Arc<Block>>,
    open: Block,
    /// Events recorded so far: the number of the next one.
    count: u64,
}

#[derive(Debug, Default, Clone)]
struct Block {
    /// Number of its first event.
    first: u64,
    /// When its first and its last event arrived, nanoseconds of the timeline.
    arrived_ns: (i64, i64),
    bytes: Vec<u8>,
}

/// Kept events.
#[derive(Debug, Default)]
pub struct Taken {
    blocks: Vec<Arc<Block>>,
    from: u64,
    /// The number after the last of them: where to continue.
    pub next: u64,
    /// How many of the requested ones are no longer kept.
    pub lost: u64,
    /// Everything that arrived from this time on is included, nanoseconds of the timeline; `None` if nothing was ever
    /// dropped.
    pub whole_from_ns: Option<i64>,
}

impl EventLog {
    /// An empty log.
    #[must_use]
    pub fn new(limits: LogLimits) -> Self {
        Self { limits, inner: Mutex::default() }
    }

    /// Records an event that was taken at `now_ns`.
    pub(super) fn note(&self, event: &Event, now_ns: i64) {
        if self.limits.bytes == 0 {
            return;
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.append(event, now_ns);
        if inner.open.bytes.len() >= BLOCK_BYTES {
            inner.close();
            inner.forget(self.limits, now_ns);
        }
    }

    /// Drops everything, because positions of GPUs have a new meaning from now on.
    pub(super) fn clear(&self, now_ns: i64) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.closed.clear();
        inner.open = Block { first: inner.count, arrived_ns: (now_ns, now_ns), ..Block::default() };
    }

    /// Bytes that it keeps.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        // Full blocks have about as many bytes each, and the open one its room.
        inner.closed.len() * BLOCK_BYTES + inner.open.bytes.capacity()
    }

    /// The kept events from number `from` on, in the order in which they were taken.
    #[must_use]
    pub fn since(&self, from: u64) -> Taken {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = inner.closed.front().map_or(&inner.open, |block| block);
        let from = from.min(inner.count);
        let wanted = inner.closed.partition_point(|block| block.first <= from).saturating_sub(1);
        let mut blocks: Vec<_> = inner.closed.iter().skip(wanted).cloned().collect();
        if !inner.open.bytes.is_empty() {
            blocks.push(Arc::new(inner.open.clone()));
        }
        Taken {
            blocks,
            from,
            next: inner.count,
            lost: oldest.first.saturating_sub(from),
            whole_from_ns: (oldest.first > 0).then_some(oldest.arrived_ns.0),
        }
    }
}

impl Inner {
    fn append(&mut self, event: &Event, now_ns: i64) {
        if self.open.bytes.is_empty() {
            self.open.bytes.reserve_exact(BLOCK_BYTES + EVENT_BYTES);
            self.open.first = self.count;
            self.open.arrived_ns.0 = now_ns;
        }
        self.open.arrived_ns.1 = now_ns;
        code::encode(event, &mut self.open.bytes);
        self.count += 1;
    }

    fn close(&mut self) {
        let closed = std::mem::take(&mut self.open);
        self.closed.push_back(Arc::new(closed));
    }

    /// Drops blocks that are too old or exceed the limit.
    fn forget(&mut self, limits: LogLimits, now_ns: i64) {
        let mut bytes: usize = self.closed.iter().map(|block| block.bytes.len()).sum();
        while let Some(oldest) = self.closed.front() {
            let is_old = oldest.arrived_ns.1 < now_ns.saturating_sub(limits.keep_ns);
            if !is_old && bytes + BLOCK_BYTES <= limits.bytes {
                break;
            }
            bytes -= oldest.bytes.len();
            self.closed.pop_front();
        }
        if self.closed.is_empty() {
            (self.open.first, self.open.arrived_ns) = (self.count, (now_ns, now_ns));
        }
    }
}

impl Taken {
    /// Each event with its number.
    pub fn events(&self) -> impl Iterator<Item = (u64, Event)> {
        let events = self.blocks.iter().flat_map(|block| (block.first..).zip(code::Events::of(&block.bytes)));
        events.filter(|(number, _)| *number >= self.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::SECOND_NS;
    use highwater_core::wire::{EventType, Kind};

    fn event(n: i64) -> Event {
        Event {
            event: EventType::Begin,
            kind: Kind::Phase,
            name: format!("phase {n}"),
            job: "job".into(),
            scope: None,
            rank: 3,
            world_size: None,
            mesh: None,
            gpus: None,
            step: None,
            at_ns: n,
            memory: None,
            layer: None,
            attributes: None,
            pid: None,
            connection: None,
        }
    }

    fn numbers(taken: &Taken) -> Vec<i64> {
        taken.events().map(|(_, event)| event.at_ns).collect()
    }

    #[test]
    fn events_come_back_in_order_from_where_one_left_off() {
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 });
        (0..3_000).for_each(|n| log.note(&event(n), n));
        let first = log.since(0);
        assert_eq!(numbers(&first), (0..3_000).collect::<Vec<_>>());
        assert_eq!((first.next, first.lost, first.whole_from_ns), (3_000, 0, None));
        log.note(&event(3_000), 3_000);
        let rest = log.since(first.next);
        assert_eq!((numbers(&rest), rest.next), (vec![3_000], 3_001));
        assert!(numbers(&log.since(rest.next)).is_empty());
    }

    #[test]
    fn bytes_are_bounded_and_what_is_lost_is_reported() {
        let limits = LogLimits { keep_ns: i64::MAX, bytes: 256 << 10 };
        let log = EventLog::new(limits);
        (0..50_000).for_each(|n| log.note(&event(n), n));
        let taken = log.since(0);
        let kept = numbers(&taken);
        let bytes: usize = taken.blocks.iter().map(|block| block.bytes.len()).sum();
        assert!(bytes <= limits.bytes, "{bytes}");
        assert_eq!(taken.lost as usize, 50_000 - kept.len());
        assert_eq!(kept.first().copied(), taken.whole_from_ns);
        assert_eq!(kept.last(), Some(&49_999));
        assert!(kept.len() > 3_000, "{}", kept.len());
    }

    #[test]
    fn what_is_older_than_asked_for_gives_its_memory_back() {
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 8 << 20 });
        (0..5_000).for_each(|n| log.note(&event(n), n));
        (0..2_000).for_each(|n| log.note(&event(n), 10 * SECOND_NS + n));
        assert!(log.since(0).blocks.len() <= 4, "blocks of ten seconds ago are kept");
        assert!(log.since(0).whole_from_ns.is_some());
    }

    #[test]
    fn a_log_of_no_bytes_keeps_nothing_and_one_that_is_cleared_says_so() {
        let none = EventLog::default();
        none.note(&event(1), 1);
        assert_eq!((numbers(&none.since(0)), none.since(0).next), (vec![], 0));
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 });
        (0..10).for_each(|n| log.note(&event(n), n));
        log.clear(7);
        assert_eq!((numbers(&log.since(0)), log.since(0).lost), (vec![], 10));
        log.note(&event(10), 10);
        assert_eq!(numbers(&log.since(0)), [10]);
    }
}
