//! The current state, for everything that publishes it: exporters, the API, the recorder.
//!
//! Enters: the current node, the jobs' ledger, findings. Leaves: the same, from one place for all. Invariants: the node
//! comes and goes, jobs and findings stay; clones share their state. Absent on purpose: how the state is obtained.

use crate::node::{Node, Slot};
use crate::place::kubelet::Kubelet;
use highwater_core::clock::Clock;
use highwater_core::detect::{self, Change, Detect};
use highwater_core::phases::{Ledger, advance_without_node};
use std::sync::Arc;

/// The current state.
#[derive(Clone)]
pub struct SharedState {
    /// The current node.
    pub slot: Arc<Slot>,
    /// The open and the ended steps and phases of jobs.
    pub ledger: Arc<Ledger>,
    /// The findings of all nodes so far: a finding about a GPU stays when its node goes away.
    pub findings: Arc<Detect>,
    /// The node's kubelet, if it is asked which pods have the GPUs.
    pub kubelet: Option<Arc<Kubelet>>,
    /// The timeline: the system's, or a recording's.
    pub clock: Arc<dyn Clock>,
}

impl SharedState {
    /// The state of one node whose source stays, as in a bench or a test, without findings.
    #[must_use]
    pub fn of(node: &Arc<Node>, ledger: &Arc<Ledger>) -> Self {
        let slot = Slot::empty(false);
        slot.fill(Arc::clone(node));
        let (ledger, findings) = (Arc::clone(ledger), Arc::new(Detect::new(detect::Settings::default())));
        Self { slot: Arc::new(slot), ledger, findings, kubelet: None, clock: Arc::clone(&node.clock) }
    }

    /// The timeline of the current node, or the daemon's if there is none.
    #[must_use]
    pub fn clock_of<'a>(&'a self, node: Option<&'a Node>) -> &'a dyn Clock {
        node.map_or(&*self.clock, |node| &*node.clock)
    }

    /// The difference to add to a time of the current timeline to get the system's Unix time, with a node or without.
    #[must_use]
    pub fn unix_shift_ns(&self) -> i64 {
        self.clock_of(self.slot.node().as_deref()).unix_shift_ns()
    }

    /// Updates the values derived from a node's readings and phases, then runs the detectors.
    pub fn advance(&self, node: &Node, now_ns: i64) -> Change {
        node.advance(&self.ledger, now_ns);
        // The join may have taken a while, so what follows uses the time after it.
        let now_ns = node.clock.now_ns().max(now_ns);
        node.ticks.note_turn(now_ns);
        node.changes.note(now_ns, &node.gpus);
        self.findings.advance(&node.join, &self.ledger, now_ns)
    }

    /// The same while there is no node.
    pub fn advance_without_node(&self, now_ns: i64) -> Change {
        advance_without_node(&self.ledger, now_ns);
        self.findings.advance_without_node(&self.ledger, now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::Manual;
    use highwater_core::jobs::Limits;

    /// A clock of a system whose time was stepped by this much.
    struct Stepped(i64);

    impl Clock for Stepped {
        fn now_ns(&self) -> i64 {
            0
        }

        fn unix_shift_ns(&self) -> i64 {
            self.0
        }

        fn sleep_until(&self, _at_ns: i64) {}
    }

    #[test]
    fn times_are_shifted_by_the_systems_step_while_there_is_no_node_too() {
        let (node, _writer) = Node::of_one_gpu(Arc::new(Manual::at(0)));
        let state = SharedState::of(&node, &Arc::new(Ledger::new(Limits::default())));
        let state = SharedState { clock: Arc::new(Stepped(7)), ..state };
        assert_eq!(state.unix_shift_ns(), 0, "the node's");
        state.slot.clear(highwater_core::source::OpenError { reason: "no_gpus", message: String::new() });
        assert_eq!(state.unix_shift_ns(), 7);
    }
}
