//! What a question looks at: the tree's largest nodes, and of the blocks those at its two ends alone.

use crate::ring::{
    layout::Layout,
    scan::{Sink, scan},
    store::Store,
    summary::Part,
    writer::Writer,
};
use std::sync::Arc;

const MS: i64 = 1_000_000;
const GIB: u64 = 1 << 30;

/// Counts what a walk hands over; takes nodes whose known time is at most this.
struct Count {
    takes_ns: i64,
    whole: usize,
    refused: usize,
    held: usize,
}

impl Sink for Count {
    fn whole(&mut self, part: &Part) -> bool {
        let takes = part.known_ns <= self.takes_ns;
        *(if takes { &mut self.whole } else { &mut self.refused }) += 1;
        takes
    }

    fn held(&mut self, _from_ns: i64, _to_ns: i64, _used_bytes: Option<u64>) {
        self.held += 1;
    }
}

/// A value too far from those before it for a short code.
fn raw(tick: i64) -> u64 {
    tick.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Raw values, three to a block, one a millisecond, in 1,100 blocks (0 to 1,099, of which the last is open).
fn store() -> Arc<Store> {
    let store = Arc::new(Store::new(Layout::of(4, 2_000, 3), 1_000, i64::MAX));
    let mut writer = Writer::new(Arc::clone(&store));
    for tick in 0..1_100 * BLOCK {
        writer.push(tick * MS, raw(tick)).expect("in order");
    }
    assert_eq!(store.tail_and_head(), 0..1_100);
    store
}

/// Readings of a block: its begin, and what 256 bits hold at 77 and more each.
const BLOCK: i64 = 4;

fn count(store: &Store, blocks: (i64, i64), takes_ns: i64) -> (usize, usize, usize) {
    let mut count = Count { takes_ns, whole: 0, refused: 0, held: 0 };
    let (from_ns, to_ns) = (blocks.0 * BLOCK * MS, blocks.1 * BLOCK * MS);
    scan(store, from_ns + 1, to_ns + 1, &mut count).expect("kept");
    (count.whole, count.refused, count.held)
}

#[test]
fn a_long_interval_is_a_few_nodes_and_two_blocks() {
    let store = store();
    // Blocks 1 to 1,023: seven of level 0, seven of level 1, seven of level 2, one of level 3.
    assert_eq!(count(&store, (0, 1_024), i64::MAX), (22, 0, 4 + 1));
    // Blocks 1 to 1,098: and then nine of level 1 (one of them as its eight blocks would be more), two of level 0.
    assert_eq!(count(&store, (0, 1_099), i64::MAX), (22 + 1 + 1 + 3, 0, 4 + 1));
    assert_eq!(count(&store, (512, 1_024), i64::MAX).0, 7 + 7 + 7);
    assert_eq!(count(&store, (511, 1_024), i64::MAX).0, 1);
}

#[test]
fn what_a_question_does_not_take_whole_is_asked_of_what_is_below() {
    let store = store();
    let block_ns = BLOCK * MS;
    // Not a node of 512 blocks, but its eight of 64.
    assert_eq!(count(&store, (511, 1_024), 64 * block_ns), (8, 1, 5));
    assert_eq!(count(&store, (511, 1_024), 8 * block_ns), (64, 1 + 8, 5));
    // Not even a block: every value of it.
    assert_eq!(count(&store, (511, 1_024), 0), (0, 1 + 8 + 64 + 512, 5 + 512 * 4));
}

#[test]
fn an_interval_inside_one_block_asks_for_no_node() {
    let store = store();
    let mut inside = Count { takes_ns: i64::MAX, whole: 0, refused: 0, held: 0 };
    scan(&store, 7 * BLOCK * MS + 1, 7 * BLOCK * MS + 2 * MS, &mut inside).expect("kept");
    assert_eq!((inside.whole, inside.held), (0, 2));
    let two = count(&store, (7, 8), i64::MAX);
    assert_eq!(two, (0, 0, 5));
}

#[test]
fn memory_in_use_grows_word_by_word() {
    let layout = Layout::of(4, 2_000, 3);
    let store = Arc::new(Store::new(layout.clone(), 1_000, i64::MAX));
    let mut writer = Writer::new(Arc::clone(&store));
    let bytes = || store.bytes.load(std::sync::atomic::Ordering::Relaxed);
    let wanted = |closed, words| layout.used_bytes(closed, words) as u64;
    assert_eq!(bytes(), layout.fixed_bytes() as u64);
    // 77 bits a reading: 7 of time, 70 of a raw value.
    for (tick, words) in [(0, 0), (1, 2), (2, 3), (3, 4)] {
        writer.push(tick * MS, GIB + tick.cast_unsigned()).expect("in order");
        assert_eq!(bytes(), wanted(0, words), "after {tick}");
    }
    writer.push(4 * MS, 7).expect("in order");
    assert_eq!(bytes(), wanted(1, 0));
}

/// Without a mark an answer is right as well, but takes a whole block.
#[test]
fn decoding_begins_at_most_some_points_before_a_time_in_the_newest_blocks() {
    const EVERY: u32 = 8;
    let layout = Layout::of(64, 40, 3).with_marks(EVERY, 16);
    let every = i64::from(EVERY);
    let store = Arc::new(Store::new(layout, 1_000, i64::MAX));
    let mut writer = Writer::new(Arc::clone(&store));
    let mut begins = Vec::new();
    for tick in 0..2_000 {
        writer.push(tick * MS, raw(tick)).expect("in order");
        let head = store.tail_and_head().end;
        if begins.len() < usize::try_from(head).expect("few") {
            begins.push(tick);
        }
    }
    let (mut marked, mut oldest) = (0, i64::MAX);
    for tick in (0..2_000_i64).rev() {
        let block = begins.partition_point(|begin| *begin <= tick) - 1;
        let since = tick - begins[block];
        let mark = store.marks.before(block as u64, tick * MS, store.resolution_ns);
        // From the block's begin on there is one after every eighth change.
        let wanted = (since >= every).then(|| begins[block] + since / every * every);
        if let Some(mark) = mark {
            assert_eq!((mark.block, Some(mark.at_ns / MS)), (block as u64, wanted), "{tick}");
            (marked, oldest) = (marked + 1, mark.at_ns / MS);
        } else {
            assert!(wanted.is_none_or(|at| at < oldest), "{tick} has no mark, but {wanted:?} is kept");
        }
    }
    assert!(marked > 10 * every, "{marked}");
}
