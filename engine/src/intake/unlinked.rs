//! Events from containers that the kubelet has started and not linked yet: they wait until it is known whose they are.
//!
//! The kubelet links a container's log just after the container has started, so a job that sends at once is early. Its
//! pod names a job without a name, and is part of its owner: taken before the link, such events would be refused, or
//! belong to an owner of their own. Enters: events of one container, and the ends of its connections. Leaves: the same, in
//! the order of their arrival, when the link is there, or is awaited no longer. Invariants: what waits is held by its
//! owner's account, at most [`MOST_PARKED`] events of a container; a sender whose events may not wait is taken at once.

use super::Parked;
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

    /// Lets this wait with its container's; returns it if there is no room, or, unless the link is awaited, if nothing of the
    /// container waits.
    pub fn park(&self, container: &Arc<str>, is_awaited: bool, parked: Parked) -> Option<Parked> {
        let mut queues = self.queues();
        if !queues.contains_key(container) {
            if !is_awaited || queues.len() >= MOST_CONTAINERS {
                return Some(parked);
            }
            self.count.fetch_add(1, Ordering::Release);
        }
        let queue = queues.entry(Arc::clone(container)).or_default();
        // Ends are as many as connections at most, which they count as.
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

    /// Hands what waits for this container to `take`, in order, until nothing is left. What arrives meanwhile waits behind
    /// it, so that nothing is overtaken. Does nothing while another thread does this.
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
