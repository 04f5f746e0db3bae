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
    /// The value at the begin, and every change before the end.
    pub points: Vec<Point>,
    /// Its end, nanoseconds of the timeline; what changes there belongs to the next one.
    pub to_ns: i64,
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
        let mut from_ns = read_until_ns.unwrap_or(ring.oldest_ns()?);
        // What is lost while it is read is found lost at the next turn at the latest: the oldest time only rises.
        for _ in 0..3 {
            if from_ns >= to_ns {
                return None;
            }
            match ring.points(from_ns, to_ns, usize::MAX) {
                Ok(points) => {
                    let continues = *read_until_ns == Some(from_ns);
                    *read_until_ns = Some(to_ns);
                    return Some(Stretch { continues, points, to_ns });
                }
                Err(QueryError::Overtaken { oldest_ns }) => from_ns = oldest_ns,
                Err(_) => return None,
            }
        }
        None
    }
}
