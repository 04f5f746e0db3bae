//! Numbers in as few bytes as they need: unsigned LEB128, and signed ones folded so that small ones stay small.

/// 0, -1, 1, -2, … as 0, 1, 2, 3, …
#[must_use]
pub fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63).cast_unsigned()
}

/// The number that [`zigzag`] folded.
#[must_use]
pub fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

/// Appends a number.
pub fn put(encoded: &mut Vec<u8>, mut number: u64) {
    while number > 127 {
        encoded.push((number & 127) as u8 | 128);
        number >>= 7;
    }
    encoded.push((number & 127) as u8);
}

/// The number at a position, which advances past it. `None` if the bytes end before the number does.
pub fn take(encoded: &[u8], at: &mut usize) -> Option<u64> {
    let (mut number, mut shift) = (0_u64, 0);
    loop {
        let byte = *encoded.get(*at)?;
        *at += 1;
        number |= u64::from(byte & 127).checked_shl(shift).unwrap_or(0);
        shift += 7;
        if byte < 128 {
            return Some(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_numbers_are_small() {
        assert_eq!([0, -1, 1, -2, i64::MAX, i64::MIN].map(zigzag), [0, 1, 2, 3, u64::MAX - 1, u64::MAX]);
        let mut encoded = Vec::new();
        [0, 127, 128, 300].iter().for_each(|number| put(&mut encoded, *number));
        assert_eq!(encoded, [0, 127, 128, 1, 172, 2]);
        assert_eq!((take(&[128], &mut 0), take(&[], &mut 0)), (None, None), "they end early");
    }

    proptest! {
        #[test]
        fn what_is_put_is_taken(numbers in prop::collection::vec(any::<i64>(), 0..50)) {
            let mut encoded = Vec::new();
            numbers.iter().for_each(|number| put(&mut encoded, zigzag(*number)));
            let mut at = 0;
            let taken: Vec<_> = std::iter::from_fn(|| take(&encoded, &mut at)).map(unzigzag).collect();
            prop_assert_eq!((taken, at), (numbers, encoded.len()));
        }
    }
}
