//! Where decoding may begin within a block, so that a question about the last second does not decode the minute before it.
//!
//! Enters: from the writer, at every few change points, where in the block's bits the next one lies and the coder's state
//! there. Leaves: the last mark of a block at or before a time. Invariants: only the newest marks are kept, of whichever
//! blocks; a mark is published after the bits before it, and never needed: without it a block is decoded from its begin.

use super::{
    code::{Coder, STATE_WORDS},
    seqlock::{Cell, TAG_WORDS},
    sync::{AtomicU64, Ordering, zeroed},
};

/// Words of a mark's content: block, time, bit and gap, and the coder's state.
const CONTENT_WORDS: usize = 3 + STATE_WORDS;
/// Words of a mark.
const WORDS: usize = TAG_WORDS + CONTENT_WORDS;
/// Bytes of a mark.
pub(super) const MARK_BYTES: usize = WORDS * size_of::<u64>();

/// A place in a block's bits, right after a change point.
#[derive(Debug)]
pub(super) struct SeekPoint {
    /// The block's number.
    pub(super) block: u64,
    /// Time of that change point, nanoseconds.
    pub(super) at_ns: i64,
    /// The value from there; `None` where a gap begins.
    pub(super) held: Option<u64>,
    /// Bits of the block before here.
    pub(super) position: u32,
    /// The coder after that change point.
    pub(super) coder: Coder,
}

/// The newest marks of a ring.
#[derive(Debug)]
pub(super) struct SeekPoints {
    words: Box<[AtomicU64]>,
    /// Marks ever made; the next one's number.
    head: AtomicU64,
}

impl SeekPoints {
    /// Room for `count` marks, of which none is made.
    pub(super) fn new(count: usize) -> Self {
        Self { words: zeroed(count * WORDS), head: AtomicU64::new(0) }
    }

    /// Adds a mark in place of the oldest.
    pub(super) fn put(&self, mark: &SeekPoint) {
        // The writer is the only one who adds.
        let number = self.head.load(Ordering::Relaxed);
        let Some(cell) = self.cell(number) else { return };
        cell.rewrite(number + 1, |content| {
            let bit_and_gap = u64::from(mark.position) << 1 | u64::from(mark.held.is_none());
            let head = [mark.block, mark.at_ns.cast_unsigned(), bit_and_gap];
            for (word, value) in content.iter().zip(head.into_iter().chain(mark.coder.to_words())) {
                word.store(value, Ordering::Relaxed);
            }
        });
        self.head.store(number + 1, Ordering::Release);
    }

    /// The last mark of a block at or before a time. `None` where none is kept, or the writer overtook the search.
    pub(super) fn before(&self, block: u64, at_ns: i64, resolution_ns: i64) -> Option<SeekPoint> {
        let head = self.head.load(Ordering::Acquire);
        let kept = (self.words.len() / WORDS) as u64;
        // They are in the order of blocks and times.
        let (mut low, mut high) = (head.saturating_sub(kept), head);
        while low < high {
            let middle = low + (high - low) / 2;
            let is_before = self.read(middle, |content| {
                let [of, made_ns] = [0, 1].map(|index| content[index].load(Ordering::Relaxed));
                (of, made_ns.cast_signed()) <= (block, at_ns)
            })?;
            (low, high) = if is_before { (middle + 1, high) } else { (low, middle) };
        }
        let mark = self.read(low.checked_sub(1)?, |content| load(content, resolution_ns))?;
        (mark.block == block).then_some(mark)
    }

    fn read<R>(&self, number: u64, read: impl FnOnce(&[AtomicU64]) -> R) -> Option<R> {
        self.cell(number)?.read(number + 1, read)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below a usize")]
    fn cell(&self, number: u64) -> Option<Cell<'_>> {
        let begin = number.checked_rem((self.words.len() / WORDS) as u64)? as usize * WORDS;
        Some(Cell::new(&self.words[begin..begin + WORDS]))
    }
}

fn load(content: &[AtomicU64], resolution_ns: i64) -> SeekPoint {
    let word = |index: usize| content[index].load(Ordering::Relaxed);
    let coder = Coder::from_words(resolution_ns, std::array::from_fn(|index| word(3 + index)));
    let (bit_and_gap, used_bytes) = (word(2), coder.used_bytes());
    #[allow(clippy::cast_possible_truncation, reason = "a block has 23,744 bits at most")]
    let position = (bit_and_gap >> 1) as u32;
    let held = (bit_and_gap & 1 == 0).then_some(used_bytes);
    SeekPoint { block: word(0), at_ns: word(1).cast_signed(), held, position, coder }
}
