//! Pseudo-random numbers that are a pure function of a key: the same scenario always plays the same.
//!
//! Every rank, step and phase has its own generator, so leaving out one rank's numbers does not change any other's.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, one multiply-and-shift chain per number.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

impl Random {
    /// The generator of this key. Keys that differ in any part give unrelated numbers.
    pub(super) fn keyed(key: &[u64]) -> Self {
        Self(key.iter().fold(GOLDEN, |state, part| mix(state ^ part.wrapping_mul(GOLDEN)).wrapping_add(GOLDEN)))
    }

    /// Any 64 bits.
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A whole number from 0 to `below` − 1; 0 if `below` is 0. Biased by less than `below` / 2⁶⁴.
    pub(super) fn below(&mut self, below: u64) -> u64 {
        u64::try_from((u128::from(self.bits()) * u128::from(below)) >> 64).unwrap_or(0)
    }

    /// A whole number from −`most` to `most`; 0 if `most` is not positive.
    pub(super) fn around(&mut self, most: i64) -> i64 {
        let most = u64::try_from(most).unwrap_or(0);
        let drawn = self.below(most.saturating_mul(2).saturating_add(1));
        drawn.cast_signed().wrapping_sub(most.cast_signed())
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_key_gives_the_same_numbers_and_another_key_others() {
        let draw = |key: &[u64]| -> Vec<u64> {
            let mut random = Random::keyed(key);
            (0..8).map(|_| random.bits()).collect()
        };
        assert_eq!(draw(&[1, 2, 3]), draw(&[1, 2, 3]));
        assert_ne!(draw(&[1, 2, 3]), draw(&[1, 3, 2]));
        assert_ne!(draw(&[0]), draw(&[0, 0]));
    }

    #[test]
    fn numbers_stay_in_range_and_reach_both_ends() {
        let mut random = Random::keyed(&[7]);
        let drawn: Vec<i64> = (0..1_000).map(|_| random.around(3)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&-3), Some(&3)));
        assert_eq!(random.around(0), 0);
        assert_eq!(random.around(-5), 0);
    }
}
