//! Room that owners share: whoever keeps most loses first, so that what one owner does costs no other one anything.
//!
//! Enters: what is kept, in the order of its age, each with its owner. Leaves: at most so many, of which each owner has as
//! many as it had, or as many as any other.

use std::collections::BTreeMap;

/// Keeps the newest of each owner, so that all together are at most `most`.
pub(super) fn keep_newest<T, Owner: Ord>(kept: &mut Vec<T>, most: usize, owner: impl Fn(&T) -> Owner) {
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

/// How many each owner may have, of owners with so many, so that all together have at most `most`.
fn share(counts: impl Iterator<Item = usize>, most: usize) -> usize {
    let mut counts: Vec<usize> = counts.collect();
    counts.sort_unstable();
    let (mut room, mut owners) = (most, counts.len());
    for count in counts {
        let each = room / owners.max(1);
        if count > each {
            return each;
        }
        (room, owners) = (room - count, owners - 1);
    }
    most
}

/// The owner who has most, and how many; of several the last in order.
pub(super) fn largest<Owner: Ord>(owners: impl Iterator<Item = Owner>) -> Option<(Owner, usize)> {
    counted(owners).into_iter().max_by_key(|(_, count)| *count)
}

/// How often each owner comes.
fn counted<Owner: Ord>(owners: impl Iterator<Item = Owner>) -> BTreeMap<Owner, usize> {
    let mut counts = BTreeMap::new();
    owners.for_each(|owner| *counts.entry(owner).or_default() += 1);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

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
