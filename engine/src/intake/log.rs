//! The last events as they were taken, so that a recording can contain what jobs sent before it began.
//!
//! Enters: each accepted event, from any endpoint, with its sender's account. Leaves: the kept ones, each owner's in the
//! order in which they were taken. Invariants: the bytes are limited, whatever jobs send; where room is needed, the owner
//! with the most bytes loses its oldest; recording an event copies some 70 bytes under a lock that a reader holds no longer
//! than it takes to count the blocks; the number of dropped events follows from the numbers. Absent on purpose: refused
//! events, and records of layers, of which recordings contain whole profiles.

pub(super) mod code;

use highwater_core::jobs::{Account, Event};
use highwater_core::shares::{Given, Shares, Weigh, Whose};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of one block: the most that is dropped at once.
const BLOCK_BYTES: usize = 32 << 10;

/// Most events need less than this: the room that there is for the next one of a block.
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
    kept: Shares<Block>,
    /// Events recorded so far: the number of the next one.
    count: u64,
    /// When the newest of those arrived that are no longer kept, nanoseconds of the timeline.
    dropped_ns: Option<i64>,
}

/// Some events of one owner.
#[derive(Debug, Clone)]
struct Block {
    /// Numbers of its first and its last event.
    numbers: (u64, u64),
    count: u64,
    /// When its last event arrived, nanoseconds of the timeline.
    arrived_ns: i64,
    /// The most that the bytes had room for.
    room: usize,
    /// What a reader looks at is not changed any more.
    bytes: Arc<Vec<u8>>,
}

/// Kept events.
#[derive(Debug, Default)]
pub struct Taken {
    owners: Vec<Own>,
    /// How many have come since, whether they are kept or not.
    pub requested: u64,
    /// How many of these are kept, whether there is a share for them or not.
    pub kept: u64,
    /// The number after the last of them: where to continue.
    pub next: u64,
}

/// Those of one owner.
#[derive(Debug)]
struct Own {
    blocks: VecDeque<Block>,
    /// Of the first block, how many bytes and how many events come before the requested ones, and the number before these.
    skip: (usize, u64),
    before: u64,
    /// Bytes of them that there is a share for.
    share: usize,
}

impl EventLog {
    /// An empty log.
    #[must_use]
    pub fn new(limits: LogLimits) -> Self {
        Self { limits, inner: Mutex::default() }
    }

    /// Records an event of this account's owner that was taken at `now_ns`.
    pub(super) fn note(&self, event: &Event, account: &Arc<Account>, now_ns: i64) {
        if self.limits.bytes == 0 {
            return;
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.append(event, account, now_ns) {
            inner.forget_old(self.limits.keep_ns, now_ns);
        }
        inner.make_room(self.limits.bytes);
    }

    /// Drops everything, because positions of GPUs have a new meaning from now on.
    pub(super) fn clear(&self, now_ns: i64) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.kept = Shares::default();
        inner.dropped_ns = Some(now_ns);
    }

    /// Bytes that it keeps.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).kept.bytes()
    }

    /// Everything that arrived from this time on is kept, nanoseconds of the timeline; `None` if nothing was ever dropped.
    #[must_use]
    pub fn whole_from_ns(&self) -> Option<i64> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.dropped_ns.map(|last_ns| last_ns.saturating_add(1))
    }

    /// The kept events from number `from` on, for one reader that takes `most_bytes` in all so far, as they are kept. Of an owner
    /// with more than its share, the newest are left out.
    #[must_use]
    pub fn since(&self, from: u64, given: &mut Given, most_bytes: usize) -> Taken {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let from = from.min(inner.count);
        let new = |own: &VecDeque<Block>| own.partition_point(|block| block.numbers.1 < from);
        let of = |own: &VecDeque<Block>| own.iter().skip(new(own)).cloned().collect::<VecDeque<_>>();
        let owners = inner.kept.each_of().map(|(whose, own)| (whose, of(own)));
        let owners: Vec<(Whose, _)> = owners.filter(|(_, own)| !own.is_empty()).collect();
        let next = inner.count;
        drop(inner);
        let (whose, mut owners): (Vec<_>, Vec<_>) =
            owners.into_iter().map(|(whose, own)| (whose, Own::from(own, from))).unzip();
        let wants: Vec<_> = whose.into_iter().zip(owners.iter().map(Own::bytes)).collect();
        for (own, share) in owners.iter_mut().zip(given.share_out(&wants, most_bytes)) {
            own.share = share;
        }
        let kept = owners.iter().map(Own::count).sum();
        Taken { owners, requested: next - from, kept, next }
    }
}

impl Inner {
    /// Returns whether a block is full.
    fn append(&mut self, event: &Event, account: &Arc<Account>, now_ns: i64) -> bool {
        let number = self.count;
        self.count += 1;
        let mut is_full = false;
        self.kept.add(Some(account), |own| {
            let (mut last, before) = match own.pop_back() {
                Some(last) if last.bytes.len() < BLOCK_BYTES => {
                    let before = Weigh::bytes(&last);
                    (last, before)
                }
                full => {
                    own.extend(full);
                    (Block::begin(number), 0)
                }
            };
            last.append(number, event, now_ns);
            is_full = last.bytes.len() >= BLOCK_BYTES;
            let grown = Weigh::bytes(&last) - before;
            own.push_back(last);
            grown
        });
        is_full
    }

    /// Drops blocks that are too old.
    fn forget_old(&mut self, keep_ns: i64, now_ns: i64) {
        let Self { kept, dropped_ns, .. } = self;
        let oldest_ns = now_ns.saturating_sub(keep_ns);
        kept.forget_old(|block| block.arrived_ns < oldest_ns, |block| note_dropped(dropped_ns, &block));
    }

    /// Drops what exceeds the limit.
    fn make_room(&mut self, most_bytes: usize) {
        while self.kept.bytes() > most_bytes
            && let Some(block) = self.kept.forget_one()
        {
            note_dropped(&mut self.dropped_ns, &block);
        }
    }
}

fn note_dropped(dropped_ns: &mut Option<i64>, block: &Block) {
    *dropped_ns = (*dropped_ns).max(Some(block.arrived_ns));
}

impl Block {
    fn begin(number: u64) -> Self {
        Self { numbers: (number, number), count: 0, arrived_ns: i64::MIN, room: 0, bytes: Arc::default() }
    }

    fn append(&mut self, number: u64, event: &Event, now_ns: i64) {
        let bytes = Arc::make_mut(&mut self.bytes);
        if bytes.capacity() - bytes.len() < EVENT_BYTES {
            // Twice as many, so that owners of few events take few bytes.
            let left = BLOCK_BYTES.saturating_sub(bytes.len());
            bytes.reserve_exact(bytes.len().min(left).max(2 * EVENT_BYTES));
        }
        code::encode(number - self.numbers.1, event, bytes);
        self.room = self.room.max(bytes.capacity());
        self.numbers.1 = number;
        self.count += 1;
        self.arrived_ns = self.arrived_ns.max(now_ns);
    }

    /// Its events after so many bytes.
    fn events(&self, skip: usize) -> code::Events<'_> {
        code::Events::of(self.bytes.get(skip..).unwrap_or_default())
    }
}

impl Weigh for Block {
    fn bytes(&self) -> usize {
        // The counts and the length of what is shared with readers.
        self.room + size_of::<Self>() + 2 * size_of::<usize>() + size_of::<Vec<u8>>()
    }
}

impl Own {
    /// Those from number `from` on.
    fn from(blocks: VecDeque<Block>, from: u64) -> Self {
        let Some(first) = blocks.front() else { return Self { blocks, skip: (0, 0), before: 0, share: 0 } };
        let (mut events, mut skip, mut before) = (first.events(0), (0, 0), first.numbers.0);
        if before < from {
            while let Some((after, _)) = events.next()
                && before + after < from
            {
                (skip, before) = ((first.bytes.len() - events.bytes_left(), skip.1 + 1), before + after);
            }
        }
        Self { blocks, skip, before, share: 0 }
    }

    fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.bytes.len()).sum::<usize>() - self.skip.0
    }

    fn count(&self) -> u64 {
        self.blocks.iter().map(|block| block.count).sum::<u64>() - self.skip.1
    }

    /// Each event that there is a share for, with its number.
    fn events(&self) -> impl Iterator<Item = (u64, Event)> {
        let mut left = self.share;
        let mut blocks = self.blocks.iter();
        let mut number = self.before;
        let mut events = blocks.next().map(|block| block.events(self.skip.0));
        std::iter::from_fn(move || {
            loop {
                let now = events.as_mut()?;
                let before = now.bytes_left();
                if let Some((after, event)) = now.next() {
                    left = left.checked_sub(before - now.bytes_left())?;
                    number += after;
                    return Some((number, event));
                }
                let next = blocks.next();
                number = next.map_or(number, |block| block.numbers.0);
                events = next.map(|block| block.events(0));
            }
        })
    }
}

impl Taken {
    /// Each event with its number: of each owner in the order in which they were taken.
    pub fn events(&self) -> impl Iterator<Item = (u64, Event)> {
        self.owners.iter().flat_map(Own::events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::SECOND_NS;
    use highwater_core::jobs::{Accounts, Limits, Owner, Within};
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

    fn user(accounts: &Accounts, uid: u32) -> Arc<Account> {
        accounts.of(&Owner::User { uid, within: Within::Node })
    }

    fn note(log: &EventLog, account: &Arc<Account>, n: i64) {
        log.note(&event(n), account, n);
    }

    /// All from a number on.
    fn since(log: &EventLog, from: u64) -> Taken {
        log.since(from, &mut Given::default(), usize::MAX)
    }

    #[test]
    fn events_come_back_in_order_from_where_one_left_off() {
        let (log, one) = (EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 }), Account::alone());
        (0..3_000).for_each(|n| note(&log, &one, n));
        let first = since(&log, 0);
        assert_eq!(numbers(&first), (0..3_000).collect::<Vec<_>>());
        assert_eq!((first.next, first.requested, first.kept, log.whole_from_ns()), (3_000, 3_000, 3_000, None));
        note(&log, &one, 3_000);
        let rest = since(&log, first.next);
        assert_eq!((numbers(&rest), rest.requested, rest.kept, rest.next), (vec![3_000], 1, 1, 3_001));
        assert!(numbers(&since(&log, rest.next)).is_empty());
    }

    #[test]
    fn bytes_are_bounded_and_what_is_lost_is_reported() {
        let limits = LogLimits { keep_ns: i64::MAX, bytes: 256 << 10 };
        let (log, one) = (EventLog::new(limits), Account::alone());
        (0..50_000).for_each(|n| {
            note(&log, &one, n);
            assert!(log.bytes() <= limits.bytes, "{}", log.bytes());
        });
        let taken = since(&log, 0);
        let kept = numbers(&taken);
        assert_eq!((taken.requested, taken.kept), (50_000, kept.len() as u64));
        assert_eq!(kept.first().copied(), log.whole_from_ns());
        assert_eq!(kept.last(), Some(&49_999));
        assert!(kept.len() > 3_000, "{}", kept.len());
    }

    #[test]
    fn a_flood_drops_none_of_anothers_events() {
        let accounts = Accounts::new(&Limits::default());
        let (honest, flood) = (user(&accounts, 1), user(&accounts, 2));
        let log = EventLog::new(LogLimits { keep_ns: i64::MAX, bytes: 1 << 20 });
        let is_honest = |n: &i64| n % 100 == 0;
        let (mut seen, mut given) = (Vec::new(), Given::default());
        for n in 0..100_000 {
            note(&log, if is_honest(&n) { &honest } else { &flood }, n);
            if n % 25_000 == 24_999 {
                // A reader that looks now and then, and takes no more than this.
                let from = seen.len() as u64 * 25_000;
                let numbers = numbers(&log.since(from, &mut given, (seen.len() + 1) * (64 << 10)));
                assert!(
                    (600..3_000).contains(&numbers.len()),
                    "the flood has its share, and no more: {}",
                    numbers.len()
                );
                seen.push(numbers.into_iter().filter(is_honest).collect::<Vec<_>>());
            }
        }
        assert_eq!(seen.concat(), (0..100_000).filter(is_honest).collect::<Vec<_>>());
        let kept: Vec<i64> = numbers(&since(&log, 0)).into_iter().filter(is_honest).collect();
        assert_eq!(kept.len(), 1_000);
    }

    #[test]
    fn many_owners_of_few_events_take_few_bytes() {
        let accounts = Accounts::new(&Limits::default());
        let log = EventLog::new(LogLimits { keep_ns: i64::MAX, bytes: 8 << 20 });
        (0..200).for_each(|n| note(&log, &user(&accounts, n), n.into()));
        assert!(log.bytes() < 200 * 1_200, "{}", log.bytes());
        assert_eq!(since(&log, 150).kept, 50);
    }

    #[test]
    fn a_reader_keeps_what_it_took() {
        let (log, one) = (EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 }), Account::alone());
        (0..10).for_each(|n| note(&log, &one, n));
        let taken = since(&log, 3);
        (10..20).for_each(|n| note(&log, &one, n));
        assert_eq!(numbers(&taken), (3..10).collect::<Vec<_>>());
        assert_eq!(numbers(&since(&log, 10)), (10..20).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_older_than_asked_for_gives_its_memory_back() {
        let accounts = Accounts::new(&Limits::default());
        let (one, gone) = (user(&accounts, 1), user(&accounts, 2));
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 8 << 20 });
        note(&log, &gone, 0);
        (0..5_000).for_each(|n| note(&log, &one, n));
        (0..2_000).for_each(|n| log.note(&event(n), &one, 10 * SECOND_NS + n));
        let taken = since(&log, 0);
        assert!(taken.owners.len() == 1 && taken.owners[0].blocks.len() <= 4, "blocks of ten seconds ago are kept");
        assert!(log.whole_from_ns().is_some());
    }

    #[test]
    fn a_log_of_no_bytes_keeps_nothing_and_one_that_is_cleared_says_so() {
        let (none, one) = (EventLog::default(), Account::alone());
        note(&none, &one, 1);
        assert_eq!((numbers(&since(&none, 0)), since(&none, 0).next), (vec![], 0));
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 });
        (0..10).for_each(|n| note(&log, &one, n));
        log.clear(7);
        let taken = since(&log, 0);
        assert_eq!((numbers(&taken), taken.requested, taken.kept, log.whole_from_ns()), (vec![], 10, 0, Some(8)));
        note(&log, &one, 10);
        assert_eq!(numbers(&since(&log, 0)), [10]);
    }
}
