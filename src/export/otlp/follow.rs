//! A reader's positions in rings: what each ring has gained since it was last read.

use highwater_core::ring::{Point, Points, QueryError, Reader};
use highwater_engine::node::Node;
use std::sync::Arc;

/// Positions in the rings of a node. It holds the rings, so it can read the last readings of a node that is gone. It
/// does not hold the node, because the driver cannot be opened again while something holds it.
#[derive(Default)]
pub(super) struct Follow {
    rings: Arc<[Reader]>,
    read_until_ns: Vec<Option<i64>>,
}

/// What one ring has gained.
pub(super) struct Stretch {
    /// Whether it follows directly on the last one. If not, time in between was lost, or this is the first.
    pub continues: bool,
    /// Its begin, and the value held at that time.
    pub begin: Point,
    /// Every change from the begin, inclusive, to the end, exclusive. A gap begins at the time of the last good reading. If
    /// that reading is a change, the change and the begin of the gap have the same time, in this order.
    pub changes: Vec<Point>,
    /// The newest reading; without a value if a gap has begun at it. A change at this time is also among the next
    /// stretch's changes.
    pub end: Point,
    /// The value of the newest reading, even if a gap has begun at it.
    pub last: Option<u64>,
}

impl Follow {
    /// Begins to read the rings of this node, each from its begin.
    pub fn begin(&mut self, node: &Node) {
        *self = Self { rings: Arc::clone(&node.rings), read_until_ns: vec![None; node.rings.len()] };
    }

    /// Whether it reads the rings of this node.
    pub fn is_of(&self, node: &Node) -> bool {
        Arc::ptr_eq(&self.rings, &node.rings)
    }

    /// What the ring at this position has gained; `None` if nothing.
    pub fn advance(&mut self, position: usize) -> Option<Stretch> {
        let (ring, read_until_ns) = (self.rings.get(position)?, self.read_until_ns.get_mut(position)?);
        let to_ns = ring.newest_ns()?;
        let mut begin_ns = read_until_ns.unwrap_or(ring.oldest_ns()?);
        // If the ring overwrites what is being read, retries from its oldest time; after three attempts, the next call does.
        for _ in 0..3 {
            if begin_ns >= to_ns {
                return None;
            }
            let continues = *read_until_ns == Some(begin_ns);
            // A stretch that continues is read from 1 ns earlier, so that a change at its begin is returned as a change.
            let from_ns = if continues { begin_ns - 1 } else { begin_ns };
            match ring.points(from_ns, to_ns, usize::MAX) {
                Ok(Points { mut points, .. }) => {
                    let held = points.first().and_then(|first| first.used);
                    let changes = points.split_off(1.min(points.len()));
                    *read_until_ns = Some(to_ns);
                    let begin = Point { at_ns: begin_ns, used: held };
                    let end = Point { at_ns: to_ns, used: ring.at(to_ns).ok().flatten() };
                    // If the ring no longer keeps this time, it is not read again.
                    let last = ring.known_at(to_ns).ok().flatten();
                    return Some(Stretch { continues, begin, changes, end, last });
                }
                Err(QueryError::Overtaken { oldest_ns }) => begin_ns = oldest_ns.max(begin_ns + 1),
                Err(_) => return None,
            }
        }
        None
    }
}
