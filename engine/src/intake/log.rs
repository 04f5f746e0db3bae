//! The last events as they were taken, so that a recording can contain what jobs sent before it began.
//!
//! Enters: each accepted event, from any endpoint, with its sender's account. Leaves: the kept events, each owner's in the
//! order in which they were taken. Invariants: the bytes are limited, including those that only a reader still holds; if
//! room is needed, the owner with the most bytes loses its oldest block; recording an event copies some 70 bytes under a
//! lock, which a reader holds while it decodes at most two blocks of each owner; event numbers show how many events were
//! dropped. Absent on purpose: refused events, and records of layers, because recordings contain whole profiles.

pub(super) mod code;

use highwater_core::jobs::{Account, Event};
use highwater_core::shares::{Given, OwnerKey, Shares, Weigh};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of one block: the most that is dropped at once.
const BLOCK_BYTES: usize = 32 << 10;

/// Maximum bytes of the blocks that a reader takes at a time, unless a single block is larger. Until they are read, the
/// log has less room by these bytes.
const TAKEN_BYTES: usize = 1 << 20;

/// Minimum spare capacity for the next event of a block, bytes. Most events need less.
const EVENT_BYTES: usize = 512;

/// How much is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogLimits {
    /// For how long after their arrival, nanoseconds. Older events are dropped in whole blocks, whenever a block
    /// becomes full.
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
    /// When the newest event arrived that is no longer kept, nanoseconds of the timeline.
    dropped_ns: Option<i64>,
    lent: Lent,
}

/// Bytes that are no longer in the log and that a reader still references.
#[derive(Debug, Default)]
struct Lent(Vec<Weak<Vec<u8>>>);

impl Lent {
    /// Notes bytes that the log has dropped or is about to change. They stay in memory while a reader references them.
    fn note(&mut self, bytes: &Arc<Vec<u8>>) {
        if Arc::strong_count(bytes) > 1 {
            self.0.retain(|lent| lent.strong_count() > 0);
            self.0.push(Arc::downgrade(bytes));
        }
    }

    fn bytes(&self) -> usize {
        // Most of the time there is no reader.
        self.0.iter().filter_map(Weak::upgrade).map(|bytes| bytes.capacity()).sum()
    }
}

/// Some events of one owner.
#[derive(Debug, Clone)]
struct Block {
    /// Numbers of its first and its last event.
    numbers: (u64, u64),
    count: u64,
    /// When its last event arrived, nanoseconds of the timeline.
    arrived_ns: i64,
    /// Largest capacity of `bytes` so far.
    room: usize,
    /// Copied before a change if a reader references it.
    bytes: Arc<Vec<u8>>,
}

/// The events that there are for a reader at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The number of the first that it has not read.
    pub from: u64,
    /// The number of the next event: where to continue.
    pub next: u64,
    /// How many of those between are kept.
    pub kept: u64,
}

/// Kept events that a reader took.
#[derive(Debug)]
struct Taken {
    owners: Vec<Own>,
    /// The number after the last of them, kept or not.
    next: u64,
}

/// Those of one owner.
#[derive(Debug)]
struct Own {
    blocks: VecDeque<Block>,
    /// The number after the last requested one, which may be within the last block.
    until: u64,
    /// Bytes and events of the first block that come before the requested ones. Numbers are stored as differences:
    /// `before` is the number to which the first requested event's difference is added.
    skip: (usize, u64),
    before: u64,
    /// Maximum bytes of them that the reader gets.
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
        let Inner { kept, lent, .. } = &mut *inner;
        kept.each_of().flat_map(|(_, own)| own).for_each(|block| lent.note(&block.bytes));
        inner.kept = Shares::default();
        inner.dropped_ns = Some(now_ns);
    }

    /// Bytes that it keeps, and those that are still in memory because somebody reads them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.kept.bytes() + inner.lent.bytes()
    }

    /// Everything that arrived from this time on is kept, nanoseconds of the timeline; `None` if nothing was ever dropped.
    #[must_use]
    pub fn whole_from_ns(&self) -> Option<i64> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.dropped_ns.map(|last_ns| last_ns.saturating_add(1))
    }

    /// How many events there are from number `from` on, now.
    #[must_use]
    pub fn extent(&self, from: u64) -> Extent {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = inner.kept.each_of().map(|(_, own)| Own::of(own, &(from..inner.count)).count()).sum();
        Extent { from, next: inner.count, kept }
    }

    /// The kept events of an extent, each with its number: in order within each owner and, roughly, among owners. The reader gets
    /// at most `most_bytes`, including what it got before according to `given`. If an owner has more than its share, its newest
    /// events are left out. While it reads, the reader holds about a mebibyte.
    pub fn read(&self, extent: Extent, given: &mut Given, most_bytes: usize) -> impl Iterator<Item = (u64, Event)> {
        let mut next = extent.from;
        let taken = std::iter::from_fn(move || {
            let taken = (next < extent.next).then(|| self.take(next..extent.next, given, most_bytes))?;
            next = taken.next;
            Some(taken)
        });
        taken.flat_map(|taken| taken.owners.into_iter().flat_map(Own::into_events))
    }

    /// The first of the kept events with these numbers, as they are kept.
    fn take(&self, numbers: Range<u64>, given: &mut Given, most_bytes: usize) -> Taken {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let numbers = numbers.start.min(inner.count)..numbers.end.min(inner.count);
        let numbers = numbers.start..inner.first_of(&numbers, TAKEN_BYTES);
        let owners = inner.kept.each_of().map(|(whose, own)| (whose, Own::of(own, &numbers)));
        let owners: Vec<(OwnerKey, Own)> = owners.filter(|(_, own)| !own.blocks.is_empty()).collect();
        drop(inner);
        let (whose, mut owners): (Vec<_>, Vec<_>) = owners.into_iter().unzip();
        let wants: Vec<_> = whose.into_iter().zip(owners.iter().map(Own::bytes)).collect();
        for (own, share) in owners.iter_mut().zip(given.share_out(&wants, most_bytes)) {
            own.limit(share);
        }
        Taken { owners, next: numbers.end }
    }
}

impl Inner {
    /// Returns whether a block is full.
    fn append(&mut self, event: &Event, account: &Arc<Account>, now_ns: i64) -> bool {
        let number = self.count;
        self.count += 1;
        let mut is_full = false;
        let Self { kept, lent, .. } = self;
        kept.add(Some(account), |own| {
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
            lent.note(&last.bytes);
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
        let Self { kept, dropped_ns, lent, .. } = self;
        let oldest_ns = now_ns.saturating_sub(keep_ns);
        let dropped = |block: Block| {
            note_dropped(dropped_ns, &block);
            lent.note(&block.bytes);
        };
        kept.forget_old(|block| block.arrived_ns < oldest_ns, dropped);
    }

    /// Shortens `numbers` so that the blocks of their events have at most `most_bytes` together, or are a single block. Returns
    /// the new end.
    fn first_of(&self, numbers: &Range<u64>, most_bytes: usize) -> u64 {
        let blocks = self.kept.each_of().flat_map(|(_, own)| own);
        let mut blocks: Vec<_> =
            blocks.filter(|block| block.has(numbers)).map(|block| (block.numbers.1, block.bytes.len())).collect();
        blocks.sort_unstable();
        let mut bytes = 0;
        let beyond = blocks.iter().position(|(_, of_one)| {
            bytes += of_one;
            bytes > most_bytes
        });
        let last = beyond.and_then(|beyond| blocks.get(beyond.saturating_sub(1)));
        last.map_or(numbers.end, |(last, _)| numbers.end.min(last + 1))
    }

    /// Drops what exceeds the limit.
    fn make_room(&mut self, most_bytes: usize) {
        while self.kept.bytes() + self.lent.bytes() > most_bytes
            && let Some(block) = self.kept.forget_one()
        {
            note_dropped(&mut self.dropped_ns, &block);
            self.lent.note(&block.bytes);
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

    /// Whether some of its numbers are among these.
    fn has(&self, numbers: &Range<u64>) -> bool {
        self.numbers.0 < numbers.end && self.numbers.1 >= numbers.start
    }

    /// Bytes and events before the first event with number `from` or higher, and the number from which later ones count on.
    fn place_of(&self, from: u64) -> ((usize, u64), u64) {
        if self.numbers.1 < from {
            return ((self.bytes.len(), self.count), self.numbers.1);
        }
        let (mut events, mut place, mut before) = (self.events(0), (0, 0), self.numbers.0);
        if before < from {
            while let Some((after, _)) = events.next()
                && before + after < from
            {
                (place, before) = ((self.bytes.len() - events.bytes_left(), place.1 + 1), before + after);
            }
        }
        (place, before)
    }

    /// Its events after the first `skip` bytes.
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
    /// Those of an owner's blocks with these numbers.
    fn of(blocks: &VecDeque<Block>, numbers: &Range<u64>) -> Self {
        let before = blocks.partition_point(|block| block.numbers.1 < numbers.start);
        let blocks: VecDeque<_> = blocks.iter().skip(before).take_while(|block| block.has(numbers)).cloned().collect();
        let until = numbers.end;
        let Some(first) = blocks.front() else { return Self { blocks, until, skip: (0, 0), before: 0, share: 0 } };
        let (skip, before) = first.place_of(numbers.start);
        Self { until, skip, before, blocks, share: 0 }
    }

    /// Bytes and number of the requested ones.
    fn size(&self) -> (usize, u64) {
        let Some(last) = self.blocks.back() else { return (0, 0) };
        let whole = self.blocks.iter().take(self.blocks.len() - 1);
        let (bytes, count) =
            whole.fold((0, 0), |(bytes, count), block| (bytes + block.bytes.len(), count + block.count));
        let ((in_last, of_last), _) = last.place_of(self.until);
        ((bytes + in_last).saturating_sub(self.skip.0), (count + of_last).saturating_sub(self.skip.1))
    }

    fn bytes(&self) -> usize {
        self.size().0
    }

    fn count(&self) -> u64 {
        self.size().1
    }

    /// Leaves out what exceeds `share` bytes, so that it does not stay in memory until the rest is read.
    fn limit(&mut self, share: usize) {
        let mut until = share.saturating_add(self.skip.0);
        let needed = self.blocks.iter().take_while(|block| {
            let is_needed = until > 0;
            until = until.saturating_sub(block.bytes.len());
            is_needed
        });
        let needed = needed.count();
        self.blocks.truncate(needed);
        self.share = share;
    }

    /// Each event that there is a share for, with its number. What was read does not stay in memory.
    fn into_events(mut self) -> impl Iterator<Item = (u64, Event)> {
        let (mut left, mut number, mut at) = (self.share, self.before, self.skip.0);
        std::iter::from_fn(move || {
            loop {
                let block = self.blocks.front()?;
                let mut events = block.events(at);
                let before = events.bytes_left();
                if let Some((after, event)) = events.next() {
                    let read = before - events.bytes_left();
                    left = left.checked_sub(read)?;
                    at += read;
                    number += after;
                    return (number < self.until).then_some((number, event));
                }
                self.blocks.pop_front();
                at = 0;
                number = self.blocks.front().map_or(number, |block| block.numbers.0);
            }
        })
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

    fn numbers(taken: Taken) -> Vec<i64> {
        taken.owners.into_iter().flat_map(Own::into_events).map(|(_, event)| event.at_ns).collect()
    }

    fn user(accounts: &Accounts, uid: u32) -> Arc<Account> {
        accounts.of(&Owner::User { uid, within: Within::Node })
    }

    fn note(log: &EventLog, account: &Arc<Account>, n: i64) {
        log.note(&event(n), account, n);
    }

    /// All from a number on, for a reader that gets at most `most_bytes`, and how far it could read.
    fn read(log: &EventLog, from: u64, given: &mut Given, most_bytes: usize) -> (Vec<i64>, Extent) {
        let extent = log.extent(from);
        (log.read(extent, given, most_bytes).map(|(_, event)| event.at_ns).collect(), extent)
    }

    fn since(log: &EventLog, from: u64) -> (Vec<i64>, Extent) {
        read(log, from, &mut Given::default(), usize::MAX)
    }

    #[test]
    fn events_come_back_in_order_from_where_one_left_off() {
        let (log, one) = (EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 }), Account::alone());
        (0..3_000).for_each(|n| note(&log, &one, n));
        let (first, extent) = since(&log, 0);
        assert_eq!(first, (0..3_000).collect::<Vec<_>>());
        assert_eq!((extent, log.whole_from_ns()), (Extent { from: 0, next: 3_000, kept: 3_000 }, None));
        note(&log, &one, 3_000);
        assert_eq!(since(&log, 3_000), (vec![3_000], Extent { from: 3_000, next: 3_001, kept: 1 }));
        assert_eq!(since(&log, 3_001), (vec![], Extent { from: 3_001, next: 3_001, kept: 0 }));
    }

    #[test]
    fn a_reader_takes_a_mebibyte_at_a_time_and_every_event_once() {
        let accounts = Accounts::new(&Limits::default());
        let users: Vec<_> = (0..5).map(|uid| user(&accounts, uid)).collect();
        let log = EventLog::new(LogLimits { keep_ns: i64::MAX, bytes: 8 << 20 });
        // One sends half of all, the others in turns, one of them hardly ever.
        let of = |n: i64| {
            if n % 2 == 0 {
                0
            } else if n % 9_999 == 0 {
                4
            } else {
                1 + usize::try_from(n / 2 % 3).expect("few")
            }
        };
        (0..80_000).for_each(|n| note(&log, &users[of(n)], n));
        let (mut next, mut seen, mut times) = (0, Vec::new(), 0);
        while next < 80_000 {
            let taken = log.take(next..80_000, &mut Given::default(), usize::MAX);
            let bytes: usize = taken.owners.iter().flat_map(|own| &own.blocks).map(|block| block.bytes.len()).sum();
            assert!(bytes <= TAKEN_BYTES + users.len() * (BLOCK_BYTES + EVENT_BYTES), "{bytes}");
            assert!((next + 1..=80_000).contains(&taken.next), "it goes on, and ends");
            let until = i64::try_from(taken.next).expect("few");
            next = taken.next;
            let mut numbers = numbers(taken);
            numbers.sort_unstable();
            assert_eq!(numbers, (seen.len() as i64..until).collect::<Vec<_>>());
            seen.extend(numbers);
            times += 1;
        }
        assert!(times >= 3, "{times}");
    }

    #[test]
    fn bytes_are_bounded_and_what_is_lost_is_reported() {
        let limits = LogLimits { keep_ns: i64::MAX, bytes: 256 << 10 };
        let (log, one) = (EventLog::new(limits), Account::alone());
        (0..50_000).for_each(|n| {
            note(&log, &one, n);
            assert!(log.bytes() <= limits.bytes, "{}", log.bytes());
        });
        let (kept, extent) = since(&log, 0);
        assert_eq!(extent, Extent { from: 0, next: 50_000, kept: kept.len() as u64 });
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
                let (numbers, _) = read(&log, from, &mut given, (seen.len() + 1) * (64 << 10));
                assert!(
                    (600..3_000).contains(&numbers.len()),
                    "the flood has its share, and no more: {}",
                    numbers.len()
                );
                seen.push(numbers.into_iter().filter(is_honest).collect::<Vec<_>>());
            }
        }
        assert_eq!(seen.concat(), (0..100_000).filter(is_honest).collect::<Vec<_>>());
        let kept: Vec<i64> = since(&log, 0).0.into_iter().filter(is_honest).collect();
        assert_eq!(kept.len(), 1_000);
    }

    #[test]
    fn many_owners_of_few_events_take_few_bytes() {
        let accounts = Accounts::new(&Limits::default());
        let log = EventLog::new(LogLimits { keep_ns: i64::MAX, bytes: 8 << 20 });
        (0..200).for_each(|n| note(&log, &user(&accounts, n), n.into()));
        assert!(log.bytes() < 200 * 1_200, "{}", log.bytes());
        assert_eq!(log.extent(150).kept, 50);
    }

    #[test]
    fn a_reader_keeps_what_it_took() {
        let (log, one) = (EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 }), Account::alone());
        (0..10).for_each(|n| note(&log, &one, n));
        let taken = log.take(3..10, &mut Given::default(), usize::MAX);
        (10..20).for_each(|n| note(&log, &one, n));
        assert_eq!(numbers(taken), (3..10).collect::<Vec<_>>());
        assert_eq!(since(&log, 10).0, (10..20).collect::<Vec<_>>());
    }

    #[test]
    fn what_only_a_reader_still_has_counts_until_it_was_read() {
        const BYTES: usize = 256 << 10;
        let (log, one) = (EventLog::new(LogLimits { keep_ns: i64::MAX, bytes: BYTES }), Account::alone());
        let fill = || (0..10_000).for_each(|n| note(&log, &one, n));
        let take = |most_bytes| log.take(0..u64::MAX, &mut Given::default(), most_bytes);
        let blocks = || log.inner.lock().expect("no panic").kept.bytes();
        fill();
        let kept = blocks();
        // It has all of them: there is no room for others until it was read.
        let taken = take(usize::MAX);
        fill();
        assert!(log.bytes() <= BYTES + BLOCK_BYTES && blocks() <= 2 * BLOCK_BYTES, "{} {}", log.bytes(), blocks());
        let mut events = taken.owners.into_iter().flat_map(Own::into_events);
        assert!(events.by_ref().take(4_000).count() == 4_000 && log.bytes() < BYTES * 3 / 4, "{}", log.bytes());
        drop(events);
        fill();
        assert!(blocks() >= kept - 2 * BLOCK_BYTES, "{}", blocks());
        // What a reader does not get, it does not keep.
        let little = take(1_000);
        fill();
        assert!(blocks() >= kept - 2 * BLOCK_BYTES, "{}", blocks());
        assert!((1..100).contains(&numbers(little).len()));
        let taken = take(usize::MAX);
        log.clear(1);
        assert!(log.bytes() > BYTES / 2);
        drop(taken);
        assert_eq!(log.bytes(), 0);
    }

    #[test]
    fn what_is_older_than_asked_for_gives_its_memory_back() {
        let accounts = Accounts::new(&Limits::default());
        let (one, gone) = (user(&accounts, 1), user(&accounts, 2));
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 8 << 20 });
        note(&log, &gone, 0);
        (0..5_000).for_each(|n| note(&log, &one, n));
        (0..2_000).for_each(|n| log.note(&event(n), &one, 10 * SECOND_NS + n));
        let taken = log.take(0..u64::MAX, &mut Given::default(), usize::MAX);
        assert!(taken.owners.len() == 1 && taken.owners[0].blocks.len() <= 4, "blocks of ten seconds ago are kept");
        assert!(log.whole_from_ns().is_some());
    }

    #[test]
    fn a_log_of_no_bytes_keeps_nothing_and_one_that_is_cleared_says_so() {
        let (none, one) = (EventLog::default(), Account::alone());
        note(&none, &one, 1);
        assert_eq!(since(&none, 0), (vec![], Extent { from: 0, next: 0, kept: 0 }));
        let log = EventLog::new(LogLimits { keep_ns: SECOND_NS, bytes: 1 << 20 });
        (0..10).for_each(|n| note(&log, &one, n));
        log.clear(7);
        assert_eq!((since(&log, 0), log.whole_from_ns()), ((vec![], Extent { from: 0, next: 10, kept: 0 }), Some(8)));
        note(&log, &one, 10);
        assert_eq!(since(&log, 0).0, [10]);
    }
}
