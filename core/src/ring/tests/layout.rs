//! How much memory a ring takes, computed by hand, and that a cap is used up.

use crate::ring::layout::{HEADER_WORDS, Layout, NODE_WORDS, SLOT_BYTES, STORE_BYTES};

/// Bytes of a level's and of its newest part's entries.
const LEVEL_BYTES: usize = 16 + 80;

#[test]
fn the_tree_has_a_node_for_eight_of_the_level_below_and_one_that_only_touches() {
    let layout = Layout::of(4, 200, 3);
    let levels: Vec<_> = layout.levels.iter().map(|level| (level.begin, level.cells)).collect();
    assert_eq!(levels, [(0, 26), (26, 4)]);
    assert!(Layout::of(4, 7, 3).levels.is_empty());
}

#[test]
fn sizes_are_those_of_the_parts() {
    assert_eq!((HEADER_WORDS, NODE_WORDS, SLOT_BYTES), (12, 10, 8));
    let layout = Layout::of(4, 200, 3);
    assert_eq!((layout.block_words(), layout.block_bytes(), layout.data_bits()), (17, 136, 256));
    assert_eq!((layout.node_words(), layout.fixed_bytes()), (30 * 10, STORE_BYTES + 2 * LEVEL_BYTES));
    assert_eq!(layout.clone().with_marks(32, 64).fixed_bytes() - layout.fixed_bytes(), 64 * 12 * 8);
    assert_eq!(layout.total_bytes(), STORE_BYTES + 2 * LEVEL_BYTES + 200 * (136 + 8) + 30 * 10 * 8);
    // 70 closed blocks have 8 nodes of the first level and 1 of the second.
    let open_bytes = (1 + 12 + 3) * 8;
    let used_bytes = STORE_BYTES + 2 * LEVEL_BYTES + 70 * 136 + 71 * 8 + 9 * 10 * 8 + open_bytes;
    assert_eq!(layout.used_bytes(70, 3), used_bytes);
}

#[test]
fn a_cap_holds_as_many_blocks_as_fit_and_no_byte_more() {
    let smallest = Layout::usual(2).total_bytes();
    assert_eq!(Layout::within(smallest - 1).err(), Some(smallest));
    let caps = [smallest, smallest + 1, 50_000, 123_456, 1 << 20, 2 << 20, 50_000_000];
    let edges = [3, 8, 9, 64, 513].map(|blocks| Layout::usual(blocks).total_bytes());
    for cap in edges.into_iter().flat_map(|edge| [edge - 1, edge, edge + 1]).chain(caps) {
        let layout = Layout::within(cap).expect("it fits");
        assert!(layout.total_bytes() <= cap, "{cap}: {} blocks", layout.blocks);
        let larger = Layout::usual(layout.blocks + 1);
        assert!(larger.total_bytes() > cap, "{cap}: not only {} blocks", layout.blocks);
    }
}
