//! How memory lies in segments: what blocks take, and the pieces between them.
//!
//! Enters: the segments and blocks of one device at one time. Leaves: sums by stream and kind. Invariants: what is reserved is in
//! blocks, free in pieces, or in idle segments; blocks that overlap or lie outside of every segment make the whole unknown.
//!
//! A history has the sizes that were asked for. What a block takes of its segment follows from PyTorch's rules: a multiple of 512
//! bytes, and in a large segment that does not grow also what is left behind it, up to 1 MiB, which is not split off.

use super::values::SegmentKind;
use highwater_engine::recording::allocator::{Layout, PoolLayout};
use std::collections::BTreeMap;

/// Sizes of blocks are multiples of this, bytes.
const ROUNDING: u64 = 512;
/// What is left of a large segment behind a block is split off only if it is more than this, bytes.
const NOT_SPLIT: u64 = 1 << 20;
/// The size of segments for requests up to 1 MiB, bytes. Those for larger ones are larger.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Maximum number of pools that are listed of a device. Further ones are added up.
const MOST_POOLS: usize = 32;

/// Memory that the allocator has from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub begin: u64,
    pub bytes: u64,
    pub kind: SegmentKind,
}

impl Area {
    /// The first address behind it.
    pub fn end(&self) -> u64 {
        self.begin.saturating_add(self.bytes)
    }

    /// One that a history's entry made, whose kind follows from its size.
    pub fn traced(begin: u64, bytes: u64, stream: Option<u64>, is_expandable: bool) -> Self {
        let kind = SegmentKind { stream, is_small: Some(bytes == SMALL_SEGMENT), is_private: None, is_expandable };
        Self { begin, bytes, kind }
    }
}

/// Memory of the program in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Taken {
    pub begin: u64,
    /// What it takes; if `is_exact` is not set, what was asked for.
    pub bytes: u64,
    pub is_exact: bool,
}

impl Taken {
    fn bytes(&self) -> u64 {
        if self.is_exact {
            self.bytes
        } else {
            self.bytes.max(1).checked_next_multiple_of(ROUNDING).unwrap_or(u64::MAX)
        }
    }
}

/// The sums; `None` if blocks and segments contradict each other. Segments that grow and touch are one.
pub(super) fn layout(mut areas: Vec<Area>, mut blocks: Vec<Taken>) -> Option<Layout> {
    areas.sort_unstable_by_key(|area| area.begin);
    blocks.sort_unstable_by_key(|block| block.begin);
    areas.dedup_by(|next, area| {
        let is_one = area.kind.is_expandable && next.kind == area.kind && area.end() == next.begin;
        if is_one {
            area.bytes = area.bytes.saturating_add(next.bytes);
        }
        is_one
    });
    let (mut pools, mut blocks, mut before) = (BTreeMap::<SegmentKind, PoolLayout>::new(), blocks.as_slice(), 0);
    for area in &areas {
        if area.begin < before {
            return None;
        }
        before = area.end();
        let count = blocks.iter().take_while(|block| block.begin < before).count();
        let (within, others) = blocks.split_at(count);
        blocks = others;
        let kind = if pools.len() < MOST_POOLS { area.kind } else { SegmentKind::default() };
        pools.entry(kind).or_default().add(&segment(area, within)?);
    }
    let named = |(kind, pool)| {
        let SegmentKind { stream, is_small, is_private, is_expandable } = kind;
        PoolLayout { stream, is_small, is_private, is_expandable, ..pool }
    };
    (blocks.is_empty() && !areas.is_empty()).then(|| Layout { pools: pools.into_iter().map(named).collect() })
}

/// One segment with its blocks, in order.
fn segment(area: &Area, blocks: &[Taken]) -> Option<PoolLayout> {
    let mut of = PoolLayout { segments: 1, reserved: area.bytes, ..PoolLayout::default() };
    if blocks.is_empty() {
        return Some(PoolLayout { idle_segments: 1, idle: area.bytes, ..of });
    }
    let is_large = area.kind.is_small == Some(false) && !area.kind.is_expandable;
    let mut at = area.begin;
    let mut is_behind_block = false;
    for next in blocks.iter().map(Some).chain([None]) {
        let gap = next.map_or(area.end(), |block| block.begin).checked_sub(at)?;
        if is_behind_block && is_large && gap <= NOT_SPLIT {
            of.in_blocks += gap;
        } else if gap > 0 {
            of.pieces += 1;
            of.free += gap;
            of.largest_piece = of.largest_piece.max(gap);
        }
        let Some(block) = next else { break };
        of.in_blocks = of.in_blocks.saturating_add(block.bytes());
        at = block.begin.checked_add(block.bytes())?;
        is_behind_block = !block.is_exact;
    }
    Some(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn large(begin: u64, bytes: u64) -> Area {
        Area::traced(begin, bytes, Some(0), false)
    }

    fn asked(begin: u64, bytes: u64) -> Taken {
        Taken { begin, bytes, is_exact: false }
    }

    #[test]
    fn pieces_lie_between_blocks() {
        let areas =
            vec![large(100 * MIB, 20 * MIB), large(200 * MIB, 40 * MIB), Area::traced(0, 2 * MIB, Some(0), false)];
        let blocks = vec![asked(100 * MIB, 5 * MIB), asked(108 * MIB, 4 * MIB + 1), asked(0, 512), asked(1024, 1)];
        let of = layout(areas, blocks).expect("consistent");
        let [large, small] = &of.pools[..] else { panic!("{of:?}") };
        assert_eq!((large.is_small, large.segments, large.idle_segments, large.idle), (Some(false), 2, 1, 40 * MIB));
        assert_eq!((large.pieces, large.free, large.largest_piece), (2, 11 * MIB - 512, 8 * MIB - 512));
        assert_eq!((small.pieces, small.free, small.in_blocks), (2, 2 * MIB - 1024, 1024));
        let whole = of.whole();
        assert_eq!((whole.pieces, whole.reserved), (4, 62 * MIB));
        assert_eq!(whole.reserved, whole.in_blocks + whole.free + whole.idle);
    }

    #[test]
    fn what_is_not_split_off_belongs_to_the_block_before_it() {
        let of = |behind: u64| {
            let areas = vec![large(0, 20 * MIB)];
            layout(areas, vec![asked(0, 20 * MIB - behind)]).expect("consistent").whole()
        };
        assert_eq!((of(MIB).pieces, of(MIB).in_blocks), (0, 20 * MIB));
        assert_eq!((of(MIB + 512).pieces, of(MIB + 512).free), (1, MIB + 512));
        // Segments that grow are split everywhere, and before a block there is none that it could belong to.
        let grows = vec![Area::traced(0, 20 * MIB, Some(0), true)];
        assert_eq!(layout(grows, vec![asked(0, 20 * MIB - 512)]).expect("consistent").whole().free, 512);
        assert_eq!(
            layout(vec![large(0, 20 * MIB)], vec![asked(512, 20 * MIB - 512)]).expect("consistent").whole().free,
            512
        );
        let exact = Taken { begin: 0, bytes: 19 * MIB, is_exact: true };
        assert_eq!(layout(vec![large(0, 20 * MIB)], vec![exact]).expect("consistent").whole().free, MIB);
    }

    #[test]
    fn segments_that_grow_are_one_where_they_touch() {
        let grows = |begin: u64| Area::traced(begin, 20 * MIB, Some(7), true);
        let of = layout(vec![grows(20 * MIB), grows(0), grows(60 * MIB)], vec![asked(10 * MIB, 20 * MIB)]);
        let whole = of.expect("consistent").whole();
        assert_eq!((whole.segments, whole.idle_segments, whole.pieces), (2, 1, 2));
    }

    #[test]
    fn a_contradiction_is_not_known() {
        let one = || vec![large(0, 20 * MIB)];
        for (areas, blocks) in [
            (one(), vec![asked(0, 600), asked(512, 512)]),
            (one(), vec![asked(0, 21 * MIB)]),
            (one(), vec![asked(30 * MIB, 512)]),
            (vec![large(0, 20 * MIB), large(MIB, 20 * MIB)], vec![]),
            (one(), vec![asked(512, u64::MAX)]),
            (vec![], vec![]),
        ] {
            assert_eq!(layout(areas.clone(), blocks.clone()), None, "{areas:?} {blocks:?}");
        }
    }

    #[test]
    fn the_pools_of_a_hostile_file_are_bounded() {
        let areas = (0..1_000).map(|nth| Area::traced(nth * MIB, MIB, Some(nth), false)).collect();
        let of = layout(areas, vec![]).expect("consistent");
        assert!(of.pools.len() <= MOST_POOLS + 1, "{}", of.pools.len());
        assert_eq!(of.whole().segments, 1_000);
    }
}
