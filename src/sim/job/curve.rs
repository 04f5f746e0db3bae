//! Moves memory from one level to the next: the points of a curve.

use crate::sim::random::Random;
use crate::sim::scenario::Shape;

/// A caching allocator requests memory from the driver in multiples of this.
const GRANULE_BYTES: u64 = 2 << 20;
/// A curve has at most this many points.
const RAMP_POINTS: u64 = 64;
/// An uneven curve has one point per this many bytes, within limits.
const BYTES_A_STEP: u64 = 1 << 30;
const STEPS_POINTS: u64 = 24;

/// The changes (time, level) of a curve between two levels, in order of time. The last one is exactly the target and
/// comes before the end of the time; the levels are monotonic.
pub(super) fn points(
    shape: Shape,
    (from_bytes, to_bytes): (u64, u64),
    (begin_ns, lasting_ns): (i64, i64),
    mut random: Random,
) -> Vec<(i64, u64)> {
    let distance = to_bytes.abs_diff(from_bytes);
    if distance == 0 {
        return Vec::new();
    }
    let (times, shares) = match shape {
        Shape::Hold => return Vec::new(),
        Shape::Ramp => even(distance.div_ceil(GRANULE_BYTES).min(RAMP_POINTS)),
        Shape::Steps => uneven((distance / BYTES_A_STEP).clamp(4, STEPS_POINTS), &mut random),
    };
    let level = |share: u64| {
        let gone = scaled(distance, share) / GRANULE_BYTES * GRANULE_BYTES;
        if share == WHOLE {
            to_bytes
        } else if to_bytes > from_bytes {
            from_bytes + gone
        } else {
            from_bytes - gone
        }
    };
    let lasting = u64::try_from(lasting_ns).unwrap_or(0);
    let at = |share: u64| begin_ns.saturating_add_unsigned(scaled(lasting, share));
    times.into_iter().zip(shares).map(|(time, share)| (at(time), level(share))).collect()
}

/// The whole distance, in which shares are expressed.
const WHOLE: u64 = 1 << 16;

fn scaled(whole: u64, share: u64) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(share) / u128::from(WHOLE)).unwrap_or(u64::MAX)
}

/// Shares of time and of the distance, evenly spread; the last time is before the end.
fn even(count: u64) -> (Vec<u64>, Vec<u64>) {
    let times = (0..count).map(|i| i * WHOLE / count).collect();
    let shares = (1..=count).map(|i| i * WHOLE / count).collect();
    (times, shares)
}

/// The same with random distances between them.
fn uneven(count: u64, random: &mut Random) -> (Vec<u64>, Vec<u64>) {
    let mut times: Vec<u64> = (0..count).map(|_| random.below(WHOLE)).collect();
    times.sort_unstable();
    let weights: Vec<u64> = (0..count).map(|_| 1 + random.below(8)).collect();
    let sum: u64 = weights.iter().sum();
    let mut done = 0;
    let shares = weights.into_iter().map(|weight| {
        done += weight;
        done * WHOLE / sum
    });
    (times, shares.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_curve_goes_one_way_in_time_and_ends_at_its_target(
            steps in any::<bool>(),
            from in 0_u64..1 << 38,
            to in 0_u64..1 << 38,
            begin in -1_000_000_000_i64..1_000_000_000,
            lasting in 1_i64..10_000_000_000,
            seed in any::<u64>(),
        ) {
            let shape = if steps { Shape::Steps } else { Shape::Ramp };
            let points = points(shape, (from, to), (begin, lasting), Random::keyed(&[seed]));
            prop_assert!(points.is_sorted_by_key(|(at, _)| *at));
            prop_assert!(points.iter().all(|(at, _)| (begin..begin + lasting).contains(at)));
            let mut levels: Vec<u64> = std::iter::once(from).chain(points.iter().map(|(_, level)| *level)).collect();
            prop_assert_eq!(levels.last(), Some(&to));
            if to < from {
                levels.reverse();
            }
            prop_assert!(levels.is_sorted());
        }
    }

    #[test]
    fn between_its_ends_it_moves_by_whole_granules() {
        let points = points(Shape::Steps, (1 << 30, 41 << 30), (0, 1_000_000), Random::keyed(&[3]));
        assert_eq!(points.len(), 24);
        assert!(points.iter().all(|(_, level)| level % GRANULE_BYTES == 0));
    }

    #[test]
    fn to_hold_is_not_to_move() {
        assert_eq!(points(Shape::Hold, (0, 1), (0, 10), Random::keyed(&[1])), []);
        assert_eq!(points(Shape::Ramp, (5, 5), (0, 10), Random::keyed(&[1])), []);
    }
}
