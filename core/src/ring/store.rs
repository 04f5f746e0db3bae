//! The memory that one writer and all readers of a ring share, and the order in which it may be touched.
//!
//! Block `id` lies in the slot `slots[id % blocks]`, its cell tagged `id + 1`. Content of a block: begin (ns), value
//! at the begin, state, the part of the whole block (once closed), data. The writer publishes from the inside out:
//! data, state, cell, slot, `head`, `newest`; a reader loads `newest` first and so finds all that it covers.
//! The last change point lies in a cell of its own as well: most questions are of the time since then.
//! Before a slot is used anew, `oldest_begin` and `tail` say so: a reader that meets a block with another tag than
//! it expected therefore finds an oldest time that is later than all that the lost block held.

use super::{
    code::{Bits, Coder},
    layout::{HEADER_WORDS, Layout, MAX_DATA_WORDS, NODE_WORDS},
    marks::{SeekPoint, SeekPoints},
    seqlock::{Cell, TAG_WORDS},
    summary::{PART_WORDS, Part},
    sync::{AtomicI64, AtomicU32, AtomicU64, Ordering, zeroed},
};
use std::fmt;

/// Words of the last change point: time and value.
const LAST_WORDS: usize = 2;

const BEGIN: usize = 0;
const USED: usize = 1;
const STATE: usize = 2;
const PART: usize = 3;

/// Bit of the state: the block is complete, and its part with it.
const CLOSED: u64 = 1 << 63;
/// Bit of the state: the block begins in a gap.
const GAP: u64 = 1 << 62;
/// The state's other bits: how many bits of data are there.
const LENGTH: u64 = GAP - 1;

/// `newest_ns` before the first reading.
pub(super) const NEVER_NS: i64 = i64::MIN;

/// A ring's shared memory.
pub(super) struct Store {
    pub(super) layout: Layout,
    pub(super) resolution_ns: i64,
    pub(super) retention_ns: i64,
    /// Time of the last good reading.
    pub(super) newest_ns: AtomicI64,
    /// Begin of the oldest block that is kept.
    pub(super) oldest_begin_ns: AtomicI64,
    /// The oldest block that is kept.
    pub(super) tail: AtomicU64,
    /// The block after the open one.
    pub(super) head: AtomicU64,
    /// Bytes in use.
    pub(super) bytes: AtomicU64,
    /// Change points ever written.
    pub(super) points: AtomicU64,
    pub(super) marks: SeekPoints,
    last: [AtomicU64; TAG_WORDS + LAST_WORDS],
    slots: Box<[AtomicU32]>,
    blocks: Box<[AtomicU64]>,
    nodes: Box<[AtomicU64]>,
}

// Loom's atomics have another size.
#[cfg(not(highwater_loom))]
const _: () = assert!(size_of::<Store>() <= super::layout::STORE_BYTES);

impl fmt::Debug for Store {
    /// Without the memory itself, which is megabytes.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Store")
            .field("newest_ns", &self.newest_ns)
            .field("oldest_begin_ns", &self.oldest_begin_ns)
            .field("tail", &self.tail)
            .field("head", &self.head)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

/// What a block says of itself before its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Begin {
    /// Its first change point, nanoseconds.
    pub(super) at_ns: i64,
    /// The value from there, or the last one known before the gap.
    pub(super) used_bytes: u64,
    /// Whether it begins in a gap.
    pub(super) gap: bool,
}

/// A block, copied.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) begin: Begin,
    length_bits: u32,
    words: [u64; MAX_DATA_WORDS],
}

impl Begin {
    /// The value held from there; `None` in a gap.
    pub(super) fn held(&self) -> Option<u64> {
        (!self.gap).then_some(self.used_bytes)
    }
}

impl Copied {
    /// A block of these words, which need not come from a writer: from a time on, with a value, in a gap or not.
    #[cfg(any(all(test, not(highwater_loom)), feature = "fuzzing"))]
    pub(super) fn of_words(data: &[u64], (at_ns, used_bytes, gap): (i64, u64, bool)) -> Self {
        let mut words = [0; MAX_DATA_WORDS];
        let length = data.len().min(words.len());
        words[..length].copy_from_slice(&data[..length]);
        #[allow(clippy::cast_possible_truncation, reason = "371 words at most")]
        let length_bits = length as u32 * u64::BITS;
        Self { begin: Begin { at_ns, used_bytes, gap }, length_bits, words }
    }

    /// Its change points after the first, which is its begin.
    pub(super) fn points(&self, resolution_ns: i64) -> BlockPoints<'_> {
        BlockPoints {
            bits: Bits::new(&self.words),
            length_bits: self.length_bits,
            coder: Coder::new(resolution_ns, self.begin.used_bytes),
            resolution_ns,
            at_ns: self.begin.at_ns,
        }
    }

    /// Its change points after a mark, from whose word on it was copied.
    pub(super) fn points_after(&self, mark: SeekPoint, resolution_ns: i64) -> BlockPoints<'_> {
        let SeekPoint { at_ns, position, coder, .. } = mark;
        let bits = Bits::new(&self.words).from(position);
        BlockPoints { bits, length_bits: self.length_bits, coder, resolution_ns, at_ns }
    }
}

/// The change points of a block: time, and the value from there or `None` where a gap begins.
pub(super) struct BlockPoints<'a> {
    bits: Bits<'a>,
    length_bits: u32,
    coder: Coder,
    resolution_ns: i64,
    at_ns: i64,
}

impl Iterator for BlockPoints<'_> {
    type Item = (i64, Option<u64>);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.bits.position() >= self.length_bits {
            return None;
        }
        // Words that no encoder wrote may decode to any time. A check here would make each query 5 % slower.
        let distance_ns = self.coder.decode_time(&mut self.bits).wrapping_mul(self.resolution_ns);
        self.at_ns = self.at_ns.wrapping_add(distance_ns);
        Some((self.at_ns, self.coder.decode_value(&mut self.bits)))
    }
}

impl Store {
    /// Memory in which nothing is kept.
    pub(super) fn new(layout: Layout, resolution_ns: i64, retention_ns: i64) -> Self {
        Self {
            resolution_ns,
            retention_ns,
            newest_ns: AtomicI64::new(NEVER_NS),
            oldest_begin_ns: AtomicI64::new(NEVER_NS),
            tail: AtomicU64::new(0),
            head: AtomicU64::new(0),
            bytes: AtomicU64::new(layout.fixed_bytes() as u64),
            points: AtomicU64::new(0),
            marks: SeekPoints::new(layout.marks),
            last: std::array::from_fn(|_| AtomicU64::new(0)),
            slots: (0..layout.blocks).map(|_| AtomicU32::new(0)).collect(),
            blocks: zeroed(layout.blocks * layout.block_words()),
            nodes: zeroed(layout.node_words()),
            layout,
        }
    }

    /// The last change point: its time, and the value from there or `None` where a gap begins. `None` before the first,
    /// and while it changes.
    pub(super) fn last(&self) -> Option<(i64, Option<u64>)> {
        Cell::new(&self.last).read_current(|tag, content| {
            let [at_ns, used_bytes] = [0, 1].map(|word| content[word].load(Ordering::Relaxed));
            (at_ns.cast_signed(), (tag & 1 == 0).then_some(used_bytes))
        })
    }

    /// Says that this is the last change point, number `count` of all.
    pub(super) fn set_last(&self, count: u64, at_ns: i64, used_bytes: Option<u64>) {
        // Whether a gap begins there is in the tag: a word less.
        Cell::new(&self.last).rewrite(count << 1 | u64::from(used_bytes.is_none()), |content| {
            content[0].store(at_ns.cast_unsigned(), Ordering::Relaxed);
            content[1].store(used_bytes.unwrap_or(0), Ordering::Relaxed);
        });
    }

    /// The block in a slot.
    pub(super) fn block(&self, slot: u32) -> Block<'_> {
        let words = self.layout.block_words();
        let begin = slot as usize * words;
        Block(Cell::new(&self.blocks[begin..begin + words]))
    }

    /// Where a kept block lies.
    pub(super) fn slot(&self, id: u64) -> u32 {
        self.entry(id).load(Ordering::Acquire)
    }

    /// The blocks that are kept, by their numbers.
    pub(super) fn tail_and_head(&self) -> std::ops::Range<u64> {
        let head = self.head.load(Ordering::Acquire);
        self.tail.load(Ordering::Acquire)..head
    }

    /// Says where a block lies.
    pub(super) fn set_slot(&self, id: u64, slot: u32) {
        self.entry(id).store(slot, Ordering::Release);
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below a usize")]
    fn entry(&self, id: u64) -> &AtomicU32 {
        &self.slots[(id % self.slots.len() as u64) as usize]
    }

    /// When a block begins, or `None` if it is no longer kept.
    pub(super) fn begin_ns(&self, id: u64) -> Option<i64> {
        self.block(self.slot(id)).0.read(id + 1, |content| content[BEGIN].load(Ordering::Relaxed).cast_signed())
    }

    /// Copies a block, with its data from this bit on; `None` if it is no longer kept.
    pub(super) fn copy(&self, id: u64, from_bit: u32) -> Option<Copied> {
        self.block(self.slot(id)).0.read(id + 1, |content| {
            let state = content[STATE].load(Ordering::Acquire);
            let mut words = [0; MAX_DATA_WORDS];
            #[allow(clippy::cast_possible_truncation, reason = "a block has 23,744 bits at most")]
            let length_bits = (state & LENGTH) as u32;
            let (first, end) = ((from_bit / 64) as usize, length_bits.div_ceil(64) as usize);
            for (word, shared) in words.iter_mut().zip(&content[HEADER_WORDS..]).take(end).skip(first) {
                *word = shared.load(Ordering::Relaxed);
            }
            let begin = Begin {
                at_ns: content[BEGIN].load(Ordering::Relaxed).cast_signed(),
                used_bytes: content[USED].load(Ordering::Relaxed),
                gap: state & GAP != 0,
            };
            Copied { begin, length_bits, words }
        })
    }

    /// The part of a node: of a closed block at level 0, above it of `8^level` blocks; `None` if it is not kept.
    pub(super) fn part(&self, level: u32, index: u64) -> Option<Part> {
        if level > 0 {
            return self.node(level, index)?.read(index + 1, load_part);
        }
        let closed = |content: &[AtomicU64]| {
            (content[STATE].load(Ordering::Acquire) & CLOSED != 0).then(|| load_part(&content[PART..]))
        };
        self.block(self.slot(index)).0.read(index + 1, closed).flatten()
    }

    /// Writes the part of a node above level 0.
    pub(super) fn set_part(&self, level: u32, index: u64, part: &Part) {
        if let Some(node) = self.node(level, index) {
            node.rewrite(index + 1, |content| store_part(content, part));
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below a usize")]
    fn node(&self, level: u32, index: u64) -> Option<Cell<'_>> {
        let level = self.layout.levels.get(level.checked_sub(1)? as usize)?;
        let begin = (level.begin + (index % level.cells as u64) as usize) * NODE_WORDS;
        Some(Cell::new(&self.nodes[begin..begin + NODE_WORDS]))
    }
}

fn load_part(content: &[AtomicU64]) -> Part {
    let mut words = [0; PART_WORDS];
    for (word, shared) in words.iter_mut().zip(content) {
        *word = shared.load(Ordering::Relaxed);
    }
    Part::from_words(words)
}

fn store_part(content: &[AtomicU64], part: &Part) {
    for (shared, word) in content.iter().zip(part.to_words()) {
        shared.store(word, Ordering::Relaxed);
    }
}

/// A block as its writer sees it.
#[derive(Clone, Copy)]
pub(super) struct Block<'a>(Cell<'a>);

impl Block<'_> {
    /// Begins the block anew, as `id`.
    pub(super) fn open(&self, id: u64, begin: Begin) {
        self.0.rewrite(id + 1, |content| {
            content[BEGIN].store(begin.at_ns.cast_unsigned(), Ordering::Relaxed);
            content[USED].store(begin.used_bytes, Ordering::Relaxed);
            content[STATE].store(if begin.gap { GAP } else { 0 }, Ordering::Relaxed);
        });
    }

    /// When the block begins, nanoseconds.
    pub(super) fn begin_ns(&self) -> i64 {
        self.0.content()[BEGIN].load(Ordering::Relaxed).cast_signed()
    }

    /// Writes one word of data; what of it was published before must stay as it was.
    pub(super) fn set_word(&self, index: usize, word: u64) {
        self.0.content()[HEADER_WORDS + index].store(word, Ordering::Relaxed);
    }

    /// Publishes the data up to this length.
    pub(super) fn publish(&self, length_bits: u32) {
        let state = &self.0.content()[STATE];
        state.store(state.load(Ordering::Relaxed) & GAP | u64::from(length_bits), Ordering::Release);
    }

    /// Completes the block with the part of all of it.
    pub(super) fn close(&self, part: &Part) {
        store_part(&self.0.content()[PART..], part);
        let state = &self.0.content()[STATE];
        state.store(state.load(Ordering::Relaxed) | CLOSED, Ordering::Release);
    }
}
