//! How the ring's memory is cut up, and how much of it a byte cap allows.
//!
//! A block is a cell of `seqlock`: tag, header, data. A node of the tree is a cell of tag and
//! part. Level 0 of the tree lies in the headers; level `l` has one node for `8^l` blocks, kept at `index % cells`.

use super::{
    marks::MARK_BYTES,
    seqlock::TAG_WORDS,
    summary::{PART_WORDS, Part},
};

/// Maximum number of data words of a block. A reader copies them to its stack and decodes what lies before an interval, so more
/// words make every query more expensive. Fewer words need more memory for headers: with 300, a recorded job takes over 0.05
/// bytes a sample.
pub(super) const MAX_DATA_WORDS: usize = 371;
/// Change points from one mark to the next.
const MARK_EVERY: u32 = 32;
/// Marks that are kept: of the last 2,048 change points, which are one or two blocks of a job's.
const MARKS: usize = 64;
/// log2 of how many nodes of one level the next one folds into one.
const FANOUT_SHIFT: u32 = 3;

/// Maximum bytes of the `Store` itself, without its allocations. `store` asserts it.
pub(super) const STORE_BYTES: usize = 256;

/// Words of a block's content before its data.
pub(super) const HEADER_WORDS: usize = 3 + PART_WORDS;
/// Words of a node's cell.
pub(super) const NODE_WORDS: usize = TAG_WORDS + PART_WORDS;
/// Bytes of a block's entry in the table of slots and in the writer's list of free ones.
pub(super) const SLOT_BYTES: usize = 2 * size_of::<u32>();

const WORD_BYTES: usize = size_of::<u64>();
/// With fewer blocks, opening one would leave nothing to read.
const MIN_BLOCKS: usize = 2;

/// Sizes of the ring's parts.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Words of data in a block.
    pub(super) data_words: usize,
    /// Blocks that exist.
    pub(super) blocks: usize,
    /// log2 of the tree's fan-out.
    pub(super) fanout_shift: u32,
    /// The tree's levels above the blocks, lowest first.
    pub(super) levels: Vec<Level>,
    /// Change points from one mark to the next.
    pub(super) mark_every: u32,
    /// Marks that are kept.
    pub(super) marks: usize,
}

/// One level of the tree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Level {
    /// The node with which it begins among all nodes.
    pub(super) begin: usize,
    /// Nodes that it keeps: as many as can lie among the kept blocks, and one that only touches them.
    pub(super) cells: usize,
}

impl Layout {
    /// As many blocks of the usual size as fit, or the bytes that the smallest ring needs.
    pub(super) fn within(max_bytes: usize) -> Result<Self, usize> {
        let smallest = Self::usual(MIN_BLOCKS);
        if max_bytes < smallest.total_bytes() {
            return Err(smallest.total_bytes());
        }
        // Slots and free list are indexed by 32 bits.
        let mut blocks = (max_bytes / smallest.block_bytes()).min(u32::MAX as usize);
        loop {
            let layout = Self::usual(blocks);
            let over = layout.total_bytes().saturating_sub(max_bytes);
            if over == 0 {
                return Ok(layout);
            }
            blocks = (blocks - over.div_ceil(layout.block_bytes() + 2 * NODE_WORDS * WORD_BYTES)).max(MIN_BLOCKS);
        }
    }

    /// A ring of this many blocks of the usual size.
    pub(super) fn usual(blocks: usize) -> Self {
        Self::of(MAX_DATA_WORDS, blocks, FANOUT_SHIFT).with_marks(MARK_EVERY, MARKS)
    }

    /// A ring of this many blocks, without marks.
    pub(super) fn of(data_words: usize, blocks: usize, fanout_shift: u32) -> Self {
        let mut levels: Vec<Level> = Vec::new();
        let mut begin = 0;
        let mut nodes = blocks >> fanout_shift;
        while nodes > 0 {
            levels.push(Level { begin, cells: nodes + 1 });
            begin += nodes + 1;
            nodes >>= fanout_shift;
        }
        Self { data_words, blocks, fanout_shift, levels, mark_every: u32::MAX, marks: 0 }
    }

    /// The same layout with this many marks, one per `mark_every` change points of a block.
    pub(super) fn with_marks(self, mark_every: u32, marks: usize) -> Self {
        Self { mark_every, marks, ..self }
    }

    /// Words of one block, tag and header included.
    pub(super) fn block_words(&self) -> usize {
        TAG_WORDS + HEADER_WORDS + self.data_words
    }

    /// Bytes of one block, tag and header included.
    pub(super) fn block_bytes(&self) -> usize {
        self.block_words() * WORD_BYTES
    }

    /// Words of all nodes.
    pub(super) fn node_words(&self) -> usize {
        self.levels.iter().map(|level| level.cells).sum::<usize>() * NODE_WORDS
    }

    /// Bits of data that a block holds.
    #[allow(clippy::cast_possible_truncation, reason = "at most 371 words")]
    pub(super) fn data_bits(&self) -> u32 {
        self.data_words as u32 * u64::BITS
    }

    /// Bytes that do not depend on what is kept.
    pub(super) fn fixed_bytes(&self) -> usize {
        STORE_BYTES + self.levels.len() * (size_of::<Level>() + size_of::<Part>()) + self.marks * MARK_BYTES
    }

    /// Bytes of everything that a ring allocates.
    pub(super) fn total_bytes(&self) -> usize {
        self.fixed_bytes() + self.blocks * (self.block_bytes() + SLOT_BYTES) + self.node_words() * WORD_BYTES
    }

    /// Bytes in use when `closed` blocks are kept beside an open one that holds `open_words` words of data.
    pub(super) fn used_bytes(&self, closed: usize, open_words: usize) -> usize {
        let nodes: usize = (1..).zip(&self.levels).map(|(level, _)| closed >> (self.fanout_shift * level)).sum();
        let open = (TAG_WORDS + HEADER_WORDS + open_words) * WORD_BYTES;
        self.fixed_bytes()
            + closed * self.block_bytes()
            + (closed + 1) * SLOT_BYTES
            + nodes * NODE_WORDS * WORD_BYTES
            + open
    }
}
