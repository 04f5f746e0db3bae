//! Limited room that owners share: the owner that keeps most loses its oldest first, so that no owner's data displaces
//! another's.
//!
//! Three forms. [`Shares`] keeps entries by owner, and counts their bytes. [`Given`] divides a reader's limit evenly
//! among owners, over several calls (max-min fairness). The functions apply the same rule to entries that are kept
//! elsewhere, oldest first. Absent on purpose: how much room there is, and what is kept.

use crate::jobs::Account;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

/// Something that takes bytes.
pub trait Weigh {
    /// How many.
    fn bytes(&self) -> usize;
}

/// What all owners have.
#[derive(Debug)]
pub struct Shares<T> {
    /// By the address of the owner's account. Entries without an account, as in tests, are at 0.
    by_owner: BTreeMap<usize, Share<T>>,
    bytes: usize,
}

#[derive(Debug)]
struct Share<T> {
    /// `None` for entries without an account. The weak reference keeps the account's address from being reused, but does not keep
    /// the account.
    account: Option<Weak<Account>>,
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
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds to what an owner has. `add` returns how many bytes more that is.
    pub fn add(&mut self, account: Option<&Arc<Account>>, add: impl FnOnce(&mut VecDeque<T>) -> usize) {
        let owner = account.map_or(0, |account| Arc::as_ptr(account) as usize);
        let new = || Share { account: account.map(Arc::downgrade), kept: VecDeque::new(), bytes: 0 };
        let share = self.by_owner.entry(owner).or_insert_with(new);
        let bytes = add(&mut share.kept);
        share.bytes += bytes;
        self.bytes += bytes;
    }

    /// Forgets the oldest of the owner that has the most, and returns it.
    pub fn forget_one(&mut self) -> Option<T> {
        let (owner, _) = self.by_owner.iter().max_by_key(|(_, share)| share.bytes)?;
        self.forget_oldest_of(*owner, |_| true)
    }

    /// Forgets what is old, of each owner from its oldest on, and calls `gone` with each.
    pub fn forget_old(&mut self, is_old: impl Fn(&T) -> bool, mut gone: impl FnMut(T)) {
        let owners: Vec<usize> = self.by_owner.keys().copied().collect();
        for owner in owners {
            while let Some(old) = self.forget_oldest_of(owner, &is_old) {
                gone(old);
            }
        }
    }

    fn forget_oldest_of(&mut self, owner: usize, goes: impl Fn(&T) -> bool) -> Option<T> {
        let share = self.by_owner.get_mut(&owner)?;
        let gone = share.kept.front().is_some_and(goes).then(|| share.kept.pop_front()).flatten();
        let bytes = gone.as_ref().map_or(0, Weigh::bytes);
        share.bytes -= bytes;
        self.bytes -= bytes;
        if share.kept.is_empty() {
            self.by_owner.remove(&owner);
        }
        gone
    }

    /// What each owner has, oldest first.
    pub fn each(&self) -> impl Iterator<Item = &VecDeque<T>> {
        self.by_owner.values().map(|share| &share.kept)
    }

    /// The same, each with its owner.
    pub fn each_of(&self) -> impl Iterator<Item = (OwnerKey, &VecDeque<T>)> {
        self.by_owner.iter().map(|(at, share)| (OwnerKey { at: *at, _account: share.account.clone() }, &share.kept))
    }
}

/// One of the owners of [`Shares`].
#[derive(Debug, Clone)]
pub struct OwnerKey {
    at: usize,
    _account: Option<Weak<Account>>,
}

/// What each owner was given so far of what is handed out bit by bit.
#[derive(Debug, Clone, Default)]
pub struct Given {
    by_owner: BTreeMap<usize, (OwnerKey, usize)>,
}

impl Given {
    /// Gives each owner up to what it wants, and returns the amounts in the order of `wants`. Counted over all calls, owners that
    /// want more have equal amounts, and all together have at most `most`. An owner that was given more than its share before
    /// gets nothing now; then the sum may exceed `most`.
    pub fn share_out(&mut self, wants: &[(OwnerKey, usize)], most: usize) -> Vec<usize> {
        for (whose, _) in wants {
            self.by_owner.entry(whose.at).or_insert_with(|| (whose.clone(), 0));
        }
        let given = |whose: &OwnerKey| self.by_owner.get(&whose.at).map_or(0, |(_, given)| *given);
        let wanted: BTreeMap<usize, usize> = wants.iter().map(|(whose, want)| (whose.at, *want)).collect();
        let all =
            |(at, (_, given)): (&usize, &(OwnerKey, usize))| given.saturating_add(wanted.get(at).copied().unwrap_or(0));
        let each = share(self.by_owner.iter().map(all), most);
        let gets: Vec<usize> =
            wants.iter().map(|(whose, want)| (*want).min(each.saturating_sub(given(whose)))).collect();
        for ((whose, _), gets) in wants.iter().zip(&gets) {
            if let Some((_, given)) = self.by_owner.get_mut(&whose.at) {
                *given += gets;
            }
        }
        gets
    }
}

/// Keeps the newest of each owner, so that all together are at most `most`.
pub fn keep_newest<T, Owner: Ord>(kept: &mut Vec<T>, most: usize, owner: impl Fn(&T) -> Owner) {
    if kept.len() <= most {
        return;
    }
    let mut counts = counted(kept.iter().map(&owner));
    let each = share(counts.values().copied(), most);
    // The oldest are first: as many of them go as an owner has too many.
    kept.retain(|one| {
        let Some(left) = counts.get_mut(&owner(one)) else { return true };
        let is_kept = *left <= each;
        if !is_kept {
            *left -= 1;
        }
        is_kept
    });
}

/// The cap for each owner's amount at which the sum of all is at most `most` (max-min fair share). Owners that have
/// less leave their room to the others. Returns `most` if all amounts fit.
pub fn share(amounts: impl Iterator<Item = usize>, most: usize) -> usize {
    let mut amounts: Vec<usize> = amounts.collect();
    amounts.sort_unstable();
    let (mut room, mut owners) = (most, amounts.len());
    for amount in amounts {
        let each = room / owners.max(1);
        if amount > each {
            return each;
        }
        (room, owners) = (room - amount, owners - 1);
    }
    most
}

/// The owner who has most, and how many; of several the last in order.
pub fn largest<Owner: Ord>(owners: impl Iterator<Item = Owner>) -> Option<(Owner, usize)> {
    heaviest(owners.map(|owner| (owner, 1)))
}

/// The owner whose amounts are the most together, and how much that is; of several the last in order.
pub fn heaviest<Owner: Ord>(amounts: impl Iterator<Item = (Owner, usize)>) -> Option<(Owner, usize)> {
    summed(amounts).into_iter().max_by_key(|(_, amount)| *amount)
}

/// How often each owner comes.
fn counted<Owner: Ord>(owners: impl Iterator<Item = Owner>) -> BTreeMap<Owner, usize> {
    summed(owners.map(|owner| (owner, 1)))
}

/// What each owner's amounts are together.
fn summed<Owner: Ord>(amounts: impl Iterator<Item = (Owner, usize)>) -> BTreeMap<Owner, usize> {
    let mut sums = BTreeMap::new();
    for (owner, amount) in amounts {
        *sums.entry(owner).or_default() += amount;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{Accounts, Limits, Owner, Within};

    impl Weigh for u32 {
        fn bytes(&self) -> usize {
            10
        }
    }

    #[test]
    fn whoever_has_most_bytes_loses_its_oldest_and_the_old_go_of_everybody() {
        let accounts = Accounts::new(&Limits::default());
        let user = |uid| accounts.of(&Owner::User { uid, within: Within::Node });
        let (one, other) = (user(1), user(2));
        let mut shares = Shares::default();
        let mut push = |owner: &Arc<Account>, number: u32| {
            shares.add(Some(owner), |kept| {
                kept.push_back(number);
                10
            });
        };
        (0..3).for_each(|number| push(&one, number));
        push(&other, 3);
        assert_eq!((shares.bytes(), shares.forget_one(), shares.bytes()), (40, Some(0), 30));
        let mut gone = Vec::new();
        shares.forget_old(|number| number % 2 == 1, |number| gone.push(number));
        gone.sort_unstable();
        assert_eq!((gone, shares.bytes(), shares.each().count()), (vec![1, 3], 10, 1));
        assert_eq!((shares.forget_one(), shares.forget_one(), shares.bytes()), (Some(2), None, 0));
    }

    #[test]
    fn whoever_was_given_most_gets_nothing_until_the_others_have_as_much() {
        let accounts = Accounts::new(&Limits::default());
        let mut shares = Shares::default();
        for uid in [1, 2, 3] {
            shares.add(Some(&accounts.of(&Owner::User { uid, within: Within::Node })), |kept| {
                kept.push_back(uid);
                10
            });
        }
        let mut whose: Vec<_> = shares.each_of().map(|(whose, kept)| (kept[0], whose)).collect();
        whose.sort_by_key(|(uid, _)| *uid);
        let mut given = Given::default();
        let mut turn = |wants: [usize; 3], most| {
            let wants: Vec<_> = whose.iter().map(|(_, whose)| whose.clone()).zip(wants).collect();
            given.share_out(&wants, most)
        };
        assert_eq!(turn([100, 5, 0], 60), [55, 5, 0], "all that there is");
        assert_eq!(turn([100, 5, 0], 60), [0, 5, 0], "one that had most has none, another still has");
        assert_eq!(turn([100, 5, 50], 60), [0, 5, 22], "a third has as much as there is for each");
        assert_eq!(turn([100, 0, 100], 200), [37, 0, 70], "92 for each of two");
        assert_eq!(turn([7, 8, 9], usize::MAX), [7, 8, 9]);
    }

    #[test]
    fn whoever_has_most_loses_its_oldest() {
        let mut kept: Vec<(char, u32)> =
            (0..6).map(|n| ('a', n)).chain([('b', 6), ('c', 7), ('a', 8), ('b', 9)]).collect();
        keep_newest(&mut kept, 6, |(owner, _)| *owner);
        assert_eq!(kept, [('a', 4), ('a', 5), ('b', 6), ('c', 7), ('a', 8), ('b', 9)]);
        keep_newest(&mut kept, 6, |(owner, _)| *owner);
        assert_eq!(kept.len(), 6, "there is room");
        assert_eq!(largest(kept.iter().map(|(owner, _)| *owner)), Some(('a', 3)));
    }

    #[test]
    fn those_with_little_leave_their_room_to_the_others() {
        for (counts, most, each) in [(vec![10, 1, 1], 8, 6), (vec![10, 10], 9, 4), (vec![3, 3], 8, 8), (vec![], 8, 8)] {
            assert_eq!(share(counts.iter().copied(), most), each, "{counts:?}");
        }
    }
}
