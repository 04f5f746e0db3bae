//! Where a reader of rings stands: what each ring has gained since it was last read.

use crate::node::Node;
use crate::ring::{Point, QueryError};
use std::sync::{Arc, Weak};

/// Positions in the rings of the node of the moment.
#[derive(Default)]
pub(super) struct Follow {
    node: Weak<Node>,
    read_until_ns: Vec<Option<i64>>,
}

/// What one ring has gained.
pub(super) struct Stretch {
    /// Whether it follows on the last one; if not, time in between was lost, or this is the first.
    pub continues: bool,
    /// Its begin, and the value that came into it.
    pub begin: Point,
    /// Every change from the begin on and before the end, one at the begin included. A gap begins at its last good
    /// reading, so that a change may stand before it at the same time.
    pub changes: Vec<Point>,
    /// The newest reading; without a value where a gap has begun at it. What changes there is among the next stretch's
    /// changes again.
    pub end: Point,
    /// What the newest reading told, also where a gap has begun at it.
    pub last: Option<u64>,
}

impl Follow {
    /// Whether the node is another one than at the last call; then every ring is read from its begin.
    pub fn is_new(&mut self, node: &Arc<Node>) -> bool {
        let is_new = !std::ptr::eq(self.node.as_ptr(), Arc::as_ptr(node));
        if is_new {
            self.node = Arc::downgrade(node);
            self.read_until_ns = vec![None; node.rings.len()];
        }
        is_new
    }

    /// What the ring at this position has gained; `None` where that is nothing.
    pub fn advance(&mut self, node: &Node, position: usize) -> Option<Stretch> {
        let (ring, read_until_ns) = (node.rings.get(position)?, self.read_until_ns.get_mut(position)?);
        let to_ns = ring.newest_ns()?;
        let mut begin_ns = read_until_ns.unwrap_or(ring.oldest_ns()?);
        // What is lost while it is read is found lost at the next turn at the latest: the oldest time only rises.
        for _ in 0..3 {
            if begin_ns >= to_ns {
                return None;
            }
            let continues = *read_until_ns == Some(begin_ns);
            // From just before, where there is something before: so that what changes at the begin is told as a change.
            let from_ns = if continues { begin_ns - 1 } else { begin_ns };
            match ring.points(from_ns, to_ns, usize::MAX) {
                Ok(mut points) => {
                    let held = points.first().and_then(|first| first.used);
                    let changes = points.split_off(1.min(points.len()));
                    *read_until_ns = Some(to_ns);
                    let begin = Point { at_ns: begin_ns, used: held };
                    let end = Point { at_ns: to_ns, used: ring.at(to_ns).ok().flatten() };
                    // What is not kept any more is not looked at again.
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
