//! The one writer of a ring: wait-free, without allocation, a few stores a change point.

use super::{
    code::{Code, Coder, MAX_POINT_BITS},
    errors::PushError,
    marks::SeekPoint,
    store::{Begin, Block, Store},
    summary::Part,
    sync::{Arc, AtomicI64, Ordering},
};

/// Times beyond this (the years 1823 and 2116) are refused, so that no distance and no integral overflows.
const LIMIT_NS: i64 = 1 << 62;
/// How many blocks that are past the retention one change point gives back at most: about a microsecond of work.
const MOST_PAST_BLOCKS: usize = 64;

/// Writes one GPU's readings; there is exactly one for a ring. The fields that an unchanged reading needs come first, next to
/// each other, because after a sleep each cache line has to be loaded again.
#[derive(Debug)]
#[repr(C)]
pub struct Writer {
    /// The value now held; `None` in a gap.
    held: Option<u64>,
    /// The last good reading, or the begin of a gap if that is later: nothing earlier may follow.
    frontier_ns: i64,
    newest_ns: i64,
    resolution_ns: i64,
    store: Arc<Store>,
    open: Option<Open>,
    /// Slots that no block lies in, of those below `fresh_slot`.
    free_slots: Vec<u32>,
    /// Slots from here on were never used, and cost no memory yet.
    fresh_slot: u32,
    /// By level of the tree above the blocks: what its next node holds so far.
    growing: Box<[Part]>,
}

/// The block that is being written.
#[derive(Debug)]
struct Open {
    id: u64,
    slot: u32,
    coder: Coder,
    length_bits: u32,
    /// The bits of the last word, from the highest down; 0 where that word is not begun.
    word: u64,
    /// Time of the last change point.
    at_ns: i64,
    /// Change points since the last mark, or since its begin.
    unmarked: u32,
    /// Of all of the block up to the last change point.
    part: Part,
}

impl Writer {
    pub(super) fn new(store: Arc<Store>) -> Self {
        let layout = &store.layout;
        Self {
            held: None,
            frontier_ns: i64::MIN,
            newest_ns: i64::MIN,
            resolution_ns: store.resolution_ns,
            open: None,
            free_slots: Vec::with_capacity(layout.blocks),
            fresh_slot: 0,
            growing: vec![Part::NOTHING; layout.levels.len()].into(),
            store,
        }
    }

    /// Takes a good reading: this many bytes were in use at this time (nanoseconds, floored to the resolution). An
    /// unchanged value only moves the newest time.
    ///
    /// # Errors
    /// The reading is not taken, and nothing changes, if its time is before the newest reading or before the begin
    /// of the gap that it would end, or so far from 1970 that times would overflow.
    pub fn push(&mut self, at_ns: i64, used_bytes: u64) -> Result<(), PushError> {
        let at_ns = self.floor(at_ns)?;
        if at_ns < self.frontier_ns {
            return Err(PushError::Backward { not_before_ns: self.frontier_ns });
        }
        if self.held != Some(used_bytes) {
            self.record(at_ns, Some(used_bytes));
        }
        self.frontier_ns = at_ns;
        self.newest_ns = at_ns;
        self.store.newest_ns.store(at_ns, Ordering::Release);
        Ok(())
    }

    /// The address of the newest time, which every reading moves.
    #[must_use]
    pub fn newest_place(&self) -> *const AtomicI64 {
        &raw const self.store.newest_ns
    }

    /// Says that nothing is known from this time (nanoseconds; from the newest reading if that is later) until the
    /// next reading. Within a gap, and before the first reading, it changes nothing.
    ///
    /// # Errors
    /// Nothing changes if the time is so far from 1970 that times would overflow.
    pub fn gap(&mut self, from_ns: i64) -> Result<(), PushError> {
        let from_ns = self.floor(from_ns)?;
        if self.held.is_none() {
            return Ok(());
        }
        self.frontier_ns = self.frontier_ns.max(from_ns);
        self.record(self.frontier_ns, None);
        Ok(())
    }

    fn floor(&self, at_ns: i64) -> Result<i64, PushError> {
        if at_ns <= -LIMIT_NS + self.resolution_ns || at_ns >= LIMIT_NS {
            return Err(PushError::OutOfRange { at_ns });
        }
        Ok(at_ns - at_ns.rem_euclid(self.resolution_ns))
    }

    /// Writes a change point: into the open block, or as the begin of the next one where it does not fit.
    fn record(&mut self, at_ns: i64, used_bytes: Option<u64>) {
        let Self { store, open, held, .. } = self;
        let full = match open {
            Some(open) => {
                open.hold(*held, at_ns);
                !open.append(store, at_ns, used_bytes)
            }
            None => true,
        };
        if full {
            self.turn(at_ns, used_bytes);
        }
        self.held = used_bytes;
        // The writer is the only one who adds: no read-modify-write is needed.
        let points = self.store.points.load(Ordering::Relaxed) + 1;
        self.store.points.store(points, Ordering::Relaxed);
        self.store.set_last(points, at_ns, used_bytes);
    }

    /// Closes the open block, if there is one, and opens the next with this change point.
    fn turn(&mut self, at_ns: i64, used_bytes: Option<u64>) {
        let closed = self.open.take();
        if let Some(closed) = &closed {
            self.store.block(closed.slot).close(&closed.part);
            self.grow(closed.id, closed.part);
        }
        let id = closed.as_ref().map_or(0, |closed| closed.id + 1);
        // A block that begins in a gap still knows the last value, for the differences that follow.
        let last_bytes = used_bytes.or(self.held).unwrap_or(0);
        let begin = Begin { at_ns, used_bytes: last_bytes, gap: used_bytes.is_none() };
        let slot = self.claim_slot(id);
        if id == 0 {
            self.store.oldest_begin_ns.store(at_ns, Ordering::Release);
        }
        self.store.block(slot).open(id, begin);
        self.store.set_slot(id, slot);
        self.store.head.store(id + 1, Ordering::Release);
        let coder = Coder::new(self.store.resolution_ns, last_bytes);
        let open = Open { id, slot, coder, length_bits: 0, word: 0, at_ns, unmarked: 0, part: Part::NOTHING };
        open.publish_bytes(&self.store, 0);
        self.open = Some(open);
    }

    /// Folds a closed block into the tree, and each level that it completes into the next.
    fn grow(&mut self, id: u64, part: Part) {
        let (mut index, mut part) = (id, part);
        let children = 1 << self.store.layout.fanout_shift;
        for (level, growing) in (1..).zip(&mut self.growing) {
            *growing = growing.then(&part);
            if !(index + 1).is_multiple_of(children) {
                return;
            }
            index /= children;
            part = std::mem::replace(growing, Part::NOTHING);
            self.store.set_part(level, index, &part);
        }
    }

    /// A slot for the next block. Slots of blocks that are past the retention are freed and used first, so that a
    /// quiet ring touches no new pages. If none is free at the cap, the oldest block is evicted.
    fn claim_slot(&mut self, next_id: u64) -> u32 {
        for _ in 0..MOST_PAST_BLOCKS {
            if !self.oldest_is_past(next_id) {
                break;
            }
            self.drop_oldest();
        }
        if self.free_slots.is_empty() && (self.fresh_slot as usize) < self.store.layout.blocks {
            self.fresh_slot += 1;
            return self.fresh_slot - 1;
        }
        if self.free_slots.is_empty() {
            self.drop_oldest();
        }
        // Dropping the oldest block has put its slot there. Slot 0 would be used only in a ring without blocks, which cannot be.
        self.free_slots.pop().unwrap_or(0)
    }

    /// Whether the oldest block ends before the retention begins.
    fn oldest_is_past(&self, next_id: u64) -> bool {
        let second = self.store.tail.load(Ordering::Relaxed) + 1;
        second < next_id && self.block(second).begin_ns() <= self.newest_ns.saturating_sub(self.store.retention_ns)
    }

    fn drop_oldest(&mut self) {
        let tail = self.store.tail.load(Ordering::Relaxed);
        let begin_ns = self.block(tail + 1).begin_ns();
        self.free_slots.push(self.store.slot(tail));
        self.store.oldest_begin_ns.store(begin_ns, Ordering::Release);
        self.store.tail.store(tail + 1, Ordering::Release);
    }

    fn block(&self, id: u64) -> Block<'_> {
        self.store.block(self.store.slot(id))
    }
}

impl Open {
    /// Adds the value held since the last change point, with its time until `until_ns`, to the block's part.
    fn hold(&mut self, held: Option<u64>, until_ns: i64) {
        if let Some(used_bytes) = held {
            self.part.hold(used_bytes, until_ns - self.at_ns);
        }
    }

    /// Writes a change point if it fits. If it does not, the coder has moved on and the block must be closed.
    fn append(&mut self, store: &Store, at_ns: i64, used_bytes: Option<u64>) -> bool {
        let time = self.coder.encode_time((at_ns - self.at_ns) / store.resolution_ns);
        let value = self.coder.encode_value(used_bytes);
        let bits = time.len() + value.len();
        debug_assert!(bits <= MAX_POINT_BITS);
        if self.length_bits + bits > store.layout.data_bits() {
            return false;
        }
        let block = store.block(self.slot);
        let words = self.length_bits.div_ceil(64);
        self.put_code(block, time);
        self.put_code(block, value);
        block.publish(self.length_bits);
        self.at_ns = at_ns;
        self.unmarked += 1;
        if self.unmarked >= store.layout.mark_every {
            self.unmarked = 0;
            let coder = self.coder.clone();
            store.marks.put(&SeekPoint { block: self.id, at_ns, held: used_bytes, position: self.length_bits, coder });
        }
        if self.length_bits.div_ceil(64) != words {
            self.publish_bytes(store, self.length_bits.div_ceil(64));
        }
        true
    }

    fn put_code(&mut self, block: Block<'_>, code: Code) {
        self.put(block, code.bits, code.width);
        if let Some(raw) = code.raw {
            self.put(block, raw, 64);
        }
    }

    /// Writes 1 to 64 bits.
    fn put(&mut self, block: Block<'_>, bits: u64, width: u32) {
        let index = (self.length_bits / 64) as usize;
        let room = 64 - self.length_bits % 64;
        if width < room {
            self.word |= bits << (room - width);
            block.set_word(index, self.word);
        } else {
            let spill = width - room;
            block.set_word(index, self.word | bits >> spill);
            self.word = if spill == 0 { 0 } else { bits << (64 - spill) };
            if spill > 0 {
                block.set_word(index + 1, self.word);
            }
        }
        self.length_bits += width;
    }

    fn publish_bytes(&self, store: &Store, words: u32) {
        let closed = self.id - store.tail.load(Ordering::Relaxed);
        let bytes = store.layout.used_bytes(usize::try_from(closed).unwrap_or(usize::MAX), words as usize);
        store.bytes.store(bytes as u64, Ordering::Relaxed);
    }
}
