//! Some values of a stream, evenly over all of it, and at no fixed distance: what comes back every 16th time is not all that is kept.

/// At most `MOST` values: when there is no room, every other one is dropped, and from then on twice as many are passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thinned<T, const MOST: usize> {
    kept: Vec<T>,
    /// One value is kept of each block of this length, as a power of two.
    every: u32,
    /// How many came.
    count: u64,
}

impl<T, const MOST: usize> Default for Thinned<T, MOST> {
    fn default() -> Self {
        Self { kept: Vec::new(), every: 0, count: 0 }
    }
}

impl<T, const MOST: usize> Thinned<T, MOST> {
    /// Adds a value, or passes it over.
    pub fn push(&mut self, value: T) {
        let (block, place) = (self.count >> self.every, self.count & ((1 << self.every) - 1));
        self.count = self.count.wrapping_add(1);
        if place != scattered(block) & ((1 << self.every) - 1) {
            return;
        }
        if self.kept.len() >= MOST {
            let mut nth = 0;
            self.kept.retain(|_| {
                nth += 1;
                scattered((nth - 1) / 2) & 1 == (nth - 1) % 2
            });
            self.every += 1;
        }
        self.kept.push(value);
    }

    /// Those that are kept, in their order.
    #[must_use]
    pub fn values(&self) -> &[T] {
        &self.kept
    }
}

/// A number without a pattern that follows from another: the finalizer of `SplitMix64` (Steele, Lea and Flood 2014).
fn scattered(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_lies_evenly_over_all_that_came() {
        let mut thinned = Thinned::<usize, 8>::default();
        (0..8).for_each(|value| thinned.push(value));
        assert_eq!(thinned.values(), [0, 1, 2, 3, 4, 5, 6, 7]);
        (8..1_000).for_each(|value| thinned.push(value));
        let values = thinned.values();
        assert!((3..=8).contains(&values.len()) && values.is_sorted(), "{values:?}");
    }

    #[test]
    fn what_comes_back_at_a_fixed_distance_is_no_more_of_what_is_kept_than_of_all() {
        for every in [16, 32, 64] {
            let mut thinned = Thinned::<bool, 256>::default();
            (0..20_000).for_each(|nth| thinned.push(nth % every == 0));
            let (all, often) = (thinned.values().len(), thinned.values().iter().filter(|is_it| **is_it).count());
            assert!(all > 100 && often * 5 < all, "{often} of {all}");
        }
    }
}
