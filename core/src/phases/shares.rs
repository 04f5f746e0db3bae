//! What several owners make the daemon keep, each owner's oldest first.
//!
//! Invariant: when room is needed, the owner with the most bytes loses its oldest, so nobody can take the room of all.
//! Absent on purpose: how much room there is, and what is kept.

use crate::jobs::Account;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

/// Something that takes bytes.
pub(super) trait Weigh {
    fn bytes(&self) -> usize;
}

/// What all owners have.
#[derive(Debug)]
pub(super) struct Shares<T> {
    /// By the address of their accounts; what nobody answers for, a test's, is at 0.
    by_owner: BTreeMap<usize, Share<T>>,
    bytes: usize,
}

#[derive(Debug)]
struct Share<T> {
    /// Keeps the account's address from becoming another's, and not the account.
    _account: Option<Weak<Account>>,
    kept: VecDeque<T>,
    bytes: usize,
}

impl<T> Default for Shares<T> {
    fn default() -> Self {
        Self { by_owner: BTreeMap::new(), bytes: 0 }
    }
}

impl<T: Weigh> Shares<T> {
    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds to what an owner has. `add` returns how many bytes more that is.
    pub fn add(&mut self, account: Option<&Arc<Account>>, add: impl FnOnce(&mut VecDeque<T>) -> usize) {
        let owner = account.map_or(0, |account| Arc::as_ptr(account) as usize);
        let new = || Share { _account: account.map(Arc::downgrade), kept: VecDeque::new(), bytes: 0 };
        let share = self.by_owner.entry(owner).or_insert_with(new);
        let bytes = add(&mut share.kept);
        share.bytes += bytes;
        self.bytes += bytes;
    }

    /// Forgets the oldest of the owner that has the most; returns whether there was one.
    pub fn forget_one(&mut self) -> bool {
        let largest = self.by_owner.iter_mut().max_by_key(|(_, share)| share.bytes);
        let Some((owner, share)) = largest.map(|(owner, share)| (*owner, share)) else { return false };
        let gone = share.kept.pop_front();
        let bytes = gone.as_ref().map_or(0, Weigh::bytes);
        share.bytes -= bytes;
        self.bytes -= bytes;
        if share.kept.is_empty() {
            self.by_owner.remove(&owner);
        }
        gone.is_some()
    }

    /// What each owner has, oldest first.
    pub fn each(&self) -> impl Iterator<Item = &VecDeque<T>> {
        self.by_owner.values().map(|share| &share.kept)
    }
}
