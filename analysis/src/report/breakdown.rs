//! Who held a GPU's memory over a recording.
//!
//! Enters: points in order. Leaves: as many points as a page has room for; of several seconds, the one in which the most was held.

use highwater_core::gpu::{BreakdownPoint, Parts};

/// Points at most: a second each for half an hour.
const MOST_POINTS: usize = 2_048;

/// Points over time, thinned.
#[derive(Debug, Clone, Default)]
pub struct Breakdown {
    points: Vec<BreakdownPoint>,
    /// How many times neighbours were put together.
    halved: u32,
    /// How many came since the last that is kept.
    since: usize,
}

fn held(parts: &Parts) -> u64 {
    parts.all().into_iter().flatten().fold(0, u64::saturating_add)
}

/// Of two the one in which more was held, from the begin of the first.
fn fuller(first: BreakdownPoint, second: BreakdownPoint) -> BreakdownPoint {
    let parts = if held(&second.parts) > held(&first.parts) { second.parts } else { first.parts };
    BreakdownPoint { at_ns: first.at_ns, parts }
}

impl Breakdown {
    /// Adds what held from a time on, which is later than the last.
    pub fn push(&mut self, point: BreakdownPoint) {
        self.since += 1;
        match self.points.last_mut() {
            Some(last) if self.since < 1 << self.halved => *last = fuller(*last, point),
            _ => {
                self.since = 0;
                self.points.push(point);
            }
        }
        if self.points.len() > MOST_POINTS {
            self.halved += 1;
            self.points =
                self.points.chunks(2).map(|pair| pair.iter().copied().reduce(fuller).unwrap_or(pair[0])).collect();
        }
    }

    /// The points, oldest first.
    #[must_use]
    pub fn points(&self) -> &[BreakdownPoint] {
        &self.points
    }

    /// What held at a time; `None` before the first, and where nothing is known.
    #[must_use]
    pub fn at(&self, at_ns: i64) -> Option<Parts> {
        let after = self.points.partition_point(|point| point.at_ns <= at_ns);
        let parts = self.points.get(after.checked_sub(1)?)?.parts;
        (parts != Parts::default()).then_some(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(at_ns: i64, allocated: u64) -> BreakdownPoint {
        BreakdownPoint { at_ns, parts: Parts { allocated: Some(allocated), ..Parts::default() } }
    }

    #[test]
    fn of_a_long_recording_the_fullest_seconds_stay() {
        let mut breakdown = Breakdown::default();
        let most = MOST_POINTS as i64;
        (0..5 * most).for_each(|second| breakdown.push(point(second, if second % 100 == 57 { 90 } else { 5 })));
        let points = breakdown.points();
        assert!((MOST_POINTS / 2..=MOST_POINTS).contains(&points.len()), "{}", points.len());
        assert!(points.windows(2).all(|pair| pair[0].at_ns < pair[1].at_ns));
        let full = points.iter().filter(|point| point.parts.allocated == Some(90)).count() as i64;
        assert_eq!(full, 5 * most / 100, "none is lost");
        assert_eq!(breakdown.at(57), Some(point(0, 90).parts));
        assert_eq!((breakdown.at(-1), Breakdown::default().at(3)), (None, None));
    }
}
