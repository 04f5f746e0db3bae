//! The walk over an interval: whole blocks and nodes where the tree has them, single values at the edges.
//!
//! Every query is one walk with its own [`Sink`]. An interval after the last change point decodes nothing. Otherwise the walk
//! decodes the two blocks in which the interval begins and ends, the first one from a mark on if it has one, and the blocks
//! whose part the sink refuses. For all other blocks, the parts in the tree suffice.

use super::{
    store::{BlockPoints, Store},
    summary::Part,
};
use std::ops::Range;

/// Takes what a walk meets, in the order of time and without holes.
pub(super) trait Sink {
    /// A stretch of whole blocks. `false` asks for what is in it.
    fn whole(&mut self, part: &Part) -> bool;

    /// A value (`None`: a gap) held from here until there, which may be the same instant.
    fn held(&mut self, from_ns: i64, to_ns: i64, used_bytes: Option<u64>);
}

/// Which change points of a block count: those after `after_ns` and before `before_ns`. The value held at `after_ns` comes first.
#[derive(Clone, Copy)]
struct Edges {
    after_ns: i64,
    before_ns: i64,
    /// Until when the last value is held.
    end_ns: i64,
}

/// Walks over an interval that lies within what is kept and known. `None`: the writer overtook the walk; the oldest
/// time that is kept is now later than the interval's begin.
pub(super) fn scan(store: &Store, from_ns: i64, to_ns: i64, sink: &mut impl Sink) -> Option<()> {
    scan_until(store, from_ns, Until { to_ns, before_ns: to_ns }, sink)
}

/// As [`scan`], with what changed at the very end of the interval too.
pub(super) fn scan_through(store: &Store, from_ns: i64, to_ns: i64, sink: &mut impl Sink) -> Option<()> {
    scan_until(store, from_ns, through(to_ns), sink)
}

fn scan_until(store: &Store, from_ns: i64, until: Until, sink: &mut impl Sink) -> Option<()> {
    if since_the_last(store, from_ns, until.to_ns, sink) {
        return Some(());
    }
    let blocks = store.tail_and_head();
    let first = last_block(store, blocks.clone(), |begin_ns| begin_ns <= from_ns)?;
    walk_from(store, first..blocks.end, from_ns, until, sink)
}

/// As [`scan_through`], with what changed at the very begin too, and what was held right before it where that is kept.
pub(super) fn scan_from(store: &Store, from_ns: i64, to_ns: i64, sink: &mut impl Sink) -> Option<()> {
    let after_ns = from_ns - 1;
    if since_the_last(store, after_ns, to_ns, sink) {
        return Some(());
    }
    let blocks = store.tail_and_head();
    // If the interval begins with a block, the block before may be lost, or get lost during the walk. Then the walk is tried from
    // the later block. Blocks are lost in order: if the first walk handed something to the sink before it was overtaken, the
    // later block is lost as well, so the sink gets nothing twice.
    [after_ns, from_ns].into_iter().find_map(|latest_ns| {
        let first = last_block(store, blocks.clone(), |begin_ns| begin_ns <= latest_ns)?;
        walk_from(store, first..blocks.end, after_ns, through(to_ns), sink)
    })
}

/// If the value has not changed since the interval's begin, hands it to the sink and returns true. A change that the writer makes
/// meanwhile is not earlier than the newest reading that the reader saw, and so not earlier than the interval's end: the answer
/// is as if the change came after the query.
fn since_the_last(store: &Store, from_ns: i64, to_ns: i64, sink: &mut impl Sink) -> bool {
    let last = store.last().filter(|(at_ns, _)| *at_ns <= from_ns);
    if let Some((_, used_bytes)) = last {
        sink.held(from_ns, to_ns, used_bytes);
    }
    last.is_some()
}

/// Where an interval ends.
#[derive(Clone, Copy)]
struct Until {
    /// Until when the last value is held.
    to_ns: i64,
    /// Change points before this count.
    before_ns: i64,
}

/// An end with what changes at it.
fn through(to_ns: i64) -> Until {
    Until { to_ns, before_ns: to_ns + 1 }
}

/// Walks from the first of these blocks on.
fn walk_from(store: &Store, blocks: Range<u64>, from_ns: i64, until: Until, sink: &mut impl Sink) -> Option<()> {
    let Until { to_ns, before_ns } = until;
    let first = blocks.start;
    let last = if from_ns == before_ns { first } else { last_block(store, blocks, |begin_ns| begin_ns < before_ns)? };
    if first == last {
        return decode(store, first, Edges { after_ns: from_ns, before_ns, end_ns: to_ns }, sink);
    }
    let end_ns = store.begin_ns(first + 1)?;
    decode(store, first, Edges { after_ns: from_ns, before_ns: i64::MAX, end_ns }, sink)?;
    walk(store, first + 1..last, sink)?;
    decode(store, last, Edges { after_ns: i64::MIN, before_ns, end_ns: to_ns }, sink)
}

/// The last of these blocks whose begin satisfies `passes`; `None` if none does. Binary search: blocks that satisfy it
/// precede those that do not. A block that is no longer kept counts as one that does, because it is older than any
/// kept.
fn last_block(store: &Store, blocks: Range<u64>, passes: impl Fn(i64) -> bool) -> Option<u64> {
    let (mut low, mut high) = (blocks.start, blocks.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if store.begin_ns(middle).is_none_or(&passes) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low.checked_sub(1).filter(|last| *last >= blocks.start)
}

/// Goes over closed blocks by the largest nodes that lie among them.
fn walk(store: &Store, blocks: Range<u64>, sink: &mut impl Sink) -> Option<()> {
    let shift = store.layout.fanout_shift;
    let mut at = blocks.start;
    while at < blocks.end {
        let mut level = 0;
        while fits(store, level + 1, at, blocks.end) {
            level += 1;
        }
        descend(store, level, at >> (shift * level), sink)?;
        at += 1 << (shift * level);
    }
    Some(())
}

/// Whether a node of this level begins at a block and ends before another one.
fn fits(store: &Store, level: u32, at: u64, end: u64) -> bool {
    let blocks = 1 << (store.layout.fanout_shift * level);
    level as usize <= store.layout.levels.len() && at.is_multiple_of(blocks) && at + blocks <= end
}

/// Hands a node to the sink, or what is below it where it is not there or not wanted.
fn descend(store: &Store, level: u32, index: u64, sink: &mut impl Sink) -> Option<()> {
    if store.part(level, index).is_some_and(|part| sink.whole(&part)) {
        return Some(());
    }
    if level == 0 {
        let end_ns = store.begin_ns(index + 1)?;
        return decode(store, index, Edges { after_ns: i64::MIN, before_ns: i64::MAX, end_ns }, sink);
    }
    let children = 1 << store.layout.fanout_shift;
    (index * children..(index + 1) * children).try_for_each(|child| descend(store, level - 1, child, sink))
}

/// Hands a block's values to the sink.
fn decode(store: &Store, id: u64, edges: Edges, sink: &mut impl Sink) -> Option<()> {
    // What lies before the interval need not be decoded.
    let mark =
        if edges.after_ns == i64::MIN { None } else { store.marks.before(id, edges.after_ns, store.resolution_ns) };
    let copied = store.copy(id, mark.as_ref().map_or(0, |mark| mark.position))?;
    match mark {
        Some(mark) => {
            let first = (mark.at_ns, mark.held);
            hand(first, copied.points_after(mark, store.resolution_ns), edges, sink);
        }
        None => hand((copied.begin.at_ns, copied.begin.held()), copied.points(store.resolution_ns), edges, sink),
    }
    Some(())
}

/// Hands a change point and those that follow it to the sink.
#[inline]
fn hand(first: (i64, Option<u64>), points: BlockPoints<'_>, edges: Edges, sink: &mut impl Sink) {
    let (mut at_ns, mut held) = first;
    for (later_ns, used_bytes) in points {
        if later_ns > edges.after_ns {
            if later_ns >= edges.before_ns {
                break;
            }
            sink.held(at_ns.max(edges.after_ns), later_ns, held);
        }
        (at_ns, held) = (later_ns, used_bytes);
    }
    sink.held(at_ns.max(edges.after_ns), edges.end_ns, held);
}
