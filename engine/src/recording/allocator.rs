//! What a framework's own allocator did on a GPU, for reports.

use std::sync::Arc;

/// The allocator of one process on one GPU. Sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocator {
    /// Position of the GPU.
    pub gpu: usize,
    /// How many entries its history has.
    pub events: u64,
    /// When the most was allocated.
    pub peak: Moment,
    /// What it had from the driver when the snapshot was taken; `None` if the snapshot does not say.
    pub reserved: Option<u64>,
    /// Of that, what was in use.
    pub in_use: Option<u64>,
    /// Of that, what was asked for; the rest is lost to rounding.
    pub requested: Option<u64>,
    /// Whether holders are categories of tensors, as PyTorch's profiler finds them, instead of places in the program.
    pub is_by_category: bool,
    /// Who held memory at the peak.
    pub at_peak: HeldMemory,
    /// Who held memory when the snapshot was taken; `None` if it does not say.
    pub at_end: Option<HeldMemory>,
    /// The largest blocks at the peak, the largest first; none if they are not known.
    pub blocks_at_peak: Vec<HeldBlock>,
    /// Likewise when the snapshot was taken.
    pub blocks_at_end: Vec<HeldBlock>,
    /// How memory lay in segments at the peak; `None` if the history is not enough to know.
    pub layout_at_peak: Option<Layout>,
    /// Likewise when the snapshot was taken.
    pub layout_at_end: Option<Layout>,
    /// When it found no memory, in order of time.
    pub failures: Vec<Failure>,
    /// How many failures are not among them.
    pub failures_left_out: u64,
    /// Who held memory over time.
    pub bands: Bands,
}

/// The memory of the places in the program that held the most at any time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bands {
    /// The places, the one with the highest level first; `None` is one that is not known.
    pub sites: Vec<Option<String>>,
    /// In order of time, each until the next begins.
    pub moments: Vec<BandMoment>,
}

/// What was held at the highest moment of a stretch of time, bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandMoment {
    /// When the stretch begins, nanoseconds, as the times of the recording.
    pub from_ns: i64,
    /// By all places, also those that are not listed.
    pub total: u64,
    /// By each place.
    pub held: Vec<u64>,
}

impl Bands {
    /// The highest level of a place, bytes.
    #[must_use]
    pub fn highest(&self, site: usize) -> u64 {
        self.moments.iter().filter_map(|moment| moment.held.get(site)).copied().max().unwrap_or(0)
    }

    /// Keeps at most `most` places: those with the highest levels.
    #[must_use]
    pub fn largest(mut self, most: usize) -> Self {
        let mut order: Vec<usize> = (0..self.sites.len()).collect();
        order.sort_by_key(|site| std::cmp::Reverse(self.highest(*site)));
        order.truncate(most);
        for moment in &mut self.moments {
            moment.held = order.iter().filter_map(|site| moment.held.get(*site).copied()).collect();
        }
        self.sites = order.iter().filter_map(|site| self.sites.get(*site).cloned()).collect();
        self
    }
}

/// One moment of an allocator's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// After how many entries of the history; 0 is its begin.
    pub after_events: u64,
    /// When, nanoseconds, as the times of the recording.
    pub at_ns: Option<i64>,
    /// Allocated, bytes; `None` if the history contradicts itself.
    pub allocated: Option<u64>,
    /// What the allocator had from the driver, bytes; `None` if the history contradicts itself.
    pub reserved: Option<u64>,
}

impl Moment {
    /// What was reserved and not allocated, bytes.
    #[must_use]
    pub fn unused(&self) -> Option<u64> {
        self.reserved?.checked_sub(self.allocated?)
    }
}

/// Who held memory at a time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeldMemory {
    /// By stack, the most first.
    pub holders: Vec<Holder>,
    /// How many stacks are not among them, and what they held, bytes.
    pub others: (usize, u64),
}

impl HeldMemory {
    /// The largest holders, at most `most`, with how many others there are and what they held.
    #[must_use]
    pub fn largest(&self, most: usize) -> (&[Holder], (usize, u64)) {
        let (largest, rest) = self.holders.split_at(most.min(self.holders.len()));
        let bytes = rest.iter().fold(self.others.1, |sum, holder| sum.saturating_add(holder.bytes));
        (largest, (rest.len().saturating_add(self.others.0), bytes))
    }

    /// What all of them held, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.largest(0).1.1
    }
}

/// A block of memory that the program had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldBlock {
    /// What was asked for, bytes.
    pub bytes: u64,
    /// The entry of the history that allocated it, from 1; `None` if it is older than the history.
    pub entry: Option<u64>,
    /// Where in the program.
    pub place: Place,
}

/// How memory lay in an allocator's segments at a time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// By stream and kind.
    pub pools: Vec<PoolLayout>,
}

/// The segments of one stream and kind. Sizes are bytes; what is reserved is in blocks, free in pieces, or idle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolLayout {
    /// The stream whose requests they serve; `None` if it is not known, or if it is several.
    pub stream: Option<u64>,
    /// Whether they are for requests up to 1 MiB; `None` if that is not known.
    pub is_small: Option<bool>,
    /// Whether they belong to a CUDA graph or another pool of its own; `None` if that is not known.
    pub is_private: Option<bool>,
    /// Whether they grow (`expandable_segments`).
    pub is_expandable: bool,
    /// How many there are.
    pub segments: u64,
    /// What they take.
    pub reserved: u64,
    /// Of that, what blocks take that the program has, or that the GPU still uses.
    pub in_blocks: u64,
    /// How many segments have no such block, and their size: `torch.cuda.empty_cache()` would return them.
    pub idle_segments: u64,
    /// See above.
    pub idle: u64,
    /// How many pieces between blocks are free, their size together, and that of the largest.
    pub pieces: u64,
    /// See above.
    pub free: u64,
    /// See above.
    pub largest_piece: u64,
}

impl PoolLayout {
    /// Adds the segments of another pool.
    pub fn add(&mut self, other: &Self) {
        let sums = [
            (&mut self.segments, other.segments),
            (&mut self.reserved, other.reserved),
            (&mut self.in_blocks, other.in_blocks),
            (&mut self.idle_segments, other.idle_segments),
            (&mut self.idle, other.idle),
            (&mut self.pieces, other.pieces),
            (&mut self.free, other.free),
        ];
        sums.into_iter().for_each(|(sum, more)| *sum = sum.saturating_add(more));
        self.largest_piece = self.largest_piece.max(other.largest_piece);
        self.is_expandable |= other.is_expandable;
    }
}

impl Layout {
    /// All segments.
    #[must_use]
    pub fn whole(&self) -> PoolLayout {
        self.sum(|_| true)
    }

    /// The segments of some pools.
    #[must_use]
    pub fn sum(&self, of: impl Fn(&PoolLayout) -> bool) -> PoolLayout {
        let mut sum = PoolLayout::default();
        self.pools.iter().filter(|pool| of(pool)).for_each(|pool| sum.add(pool));
        sum
    }
}

/// What was allocated by one stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Bytes.
    pub bytes: u64,
    /// In how many allocations, if that is known.
    pub allocations: Option<u64>,
    /// Where in the program.
    pub place: Place,
}

/// Where in a program something happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Place {
    /// The innermost frame of the program's own code, as `file:line:function`; `None` if no frame is known.
    pub site: Option<String>,
    /// All frames, the innermost first, likewise. Stacks share them.
    pub frames: Vec<Arc<str>>,
    /// How many further frames there are, outside of these.
    pub more_frames: usize,
}

/// The allocator found no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// When, and what was allocated and reserved then.
    pub at: Moment,
    /// What was asked for, bytes.
    pub requested: u64,
    /// What the driver had free, bytes.
    pub device_free: Option<u64>,
    /// The stream that it was for, if that is known.
    pub stream: Option<u64>,
    /// How memory lay in segments; `None` if the history is not enough to know.
    pub layout: Option<Layout>,
    /// Where.
    pub place: Place,
}
