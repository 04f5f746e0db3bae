//! Holds events from containers that the kubelet has started but not yet linked, until their pod is known.
//!
//! The kubelet links a container's log just after the container has started, so a job that sends at once is early. The pod is
//! part of the owner, and gives its name to a job whose events name none. Without the link, such events would be refused, or
//! charged to another owner. Enters: events of one container, and ends of its processes and connections. Leaves: the same, in
//! the order of their arrival, once the link exists or the wait is over. Invariants: events that wait are charged to their
//! owner's account, at most [`MOST_PARKED`] for each container; an event that may not wait is taken at once.

use super::waiting::Parked;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Events of one container that may wait.
pub(super) const MOST_PARKED: usize = 1_024;
/// Containers whose events may wait.
const MOST_CONTAINERS: usize = 64;

/// The events that wait, by the id of their container.
#[derive(Debug, Default)]
pub(super) struct Unlinked {
    queues: Mutex<HashMap<Arc<str>, Queue>>,
    /// How many there are, so that an event usually takes no lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    parked: Vec<Parked>,
    /// Whether a thread is taking them.
    is_draining: bool,
}

impl Unlinked {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Parks an event or an end behind the others of its container. Returns it if it need not or cannot wait: nothing
    /// of the container is parked and its link is not awaited, or there is no room for the container or the event. An
    /// end always has room.
    pub fn park(&self, container: &Arc<str>, is_awaited: bool, parked: Parked) -> Option<Parked> {
        let mut queues = self.queues();
        if !queues.contains_key(container) {
            if !is_awaited || queues.len() >= MOST_CONTAINERS {
                return Some(parked);
            }
            self.count.fetch_add(1, Ordering::Release);
        }
        let queue = queues.entry(Arc::clone(container)).or_default();
        // Ends are not limited here: the end of a connection still counts as one of its owner's connections.
        if queue.parked.len() >= MOST_PARKED && matches!(parked, Parked::Event { .. }) {
            return Some(parked);
        }
        queue.parked.push(parked);
        None
    }

    /// The containers whose events wait.
    pub fn containers(&self) -> Vec<Arc<str>> {
        self.queues().keys().cloned().collect()
    }

    /// Passes what is parked for this container to `take`, in order, until nothing is left. Events that arrive meanwhile are
    /// parked behind, so that none overtakes another. Does nothing while another thread drains this container.
    pub fn drain(&self, container: &Arc<str>, mut take: impl FnMut(Parked)) {
        let mut is_first = true;
        loop {
            let parked = {
                let mut queues = self.queues();
                let Some(queue) = queues.get_mut(container) else { return };
                if std::mem::replace(&mut queue.is_draining, true) && is_first {
                    return;
                }
                let parked = std::mem::take(&mut queue.parked);
                if parked.is_empty() {
                    queues.remove(container);
                    self.count.fetch_sub(1, Ordering::Release);
                    return;
                }
                parked
            };
            is_first = false;
            parked.into_iter().for_each(&mut take);
        }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<Arc<str>, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
