//! Who held a GPU's memory over a recording.
//!
//! Enters: points in order. Leaves: as many points as a page has room for, and what held at the GPU's peak. Of each part of a long
//! recording the fullest second counts; what holds on after it is what came last, also if that is not known.

use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{BreakdownPoint, Parts};

/// Parts of a recording at most, each with up to two points: a second each for half an hour.
const MOST_PARTS: i64 = 2_048;

/// Points over time, thinned.
#[derive(Debug, Clone, Default)]
pub struct Breakdown {
    points: Vec<BreakdownPoint>,
    begin_ns: i64,
    part_ns: i64,
    /// The part that points come for, and the last of them.
    current: Option<(i64, BreakdownPoint)>,
    peak_ns: Option<i64>,
    at_peak: Option<Parts>,
}

fn held(parts: &Parts) -> u64 {
    parts.all().into_iter().flatten().fold(0, u64::saturating_add)
}

impl Breakdown {
    /// None yet, of a recording from a time to another, in which the GPU had its peak at a time.
    #[must_use]
    pub fn new((begin_ns, end_ns): (i64, i64), peak_ns: Option<i64>) -> Self {
        let part_ns = (end_ns.saturating_sub(begin_ns) / MOST_PARTS).max(SECOND_NS);
        Self { begin_ns, part_ns, peak_ns, ..Self::default() }
    }

    /// Adds what held from a time on, which is later than the last.
    pub fn push(&mut self, point: BreakdownPoint) {
        if self.peak_ns.is_some_and(|peak_ns| point.at_ns <= peak_ns) {
            self.at_peak = Some(point.parts);
        }
        let part = point.at_ns.saturating_sub(self.begin_ns) / self.part_ns.max(1);
        if self.current.is_some_and(|(current, _)| current == part) {
            let fullest = self.points.last_mut();
            fullest.into_iter().filter(|fullest| held(&point.parts) > held(&fullest.parts)).for_each(|fullest| {
                fullest.parts = point.parts;
            });
        } else {
            self.end_part(point.at_ns);
            self.points.push(point);
        }
        self.current = Some((part, point));
    }

    /// Ends the last part.
    pub fn finish(&mut self) {
        self.end_part(i64::MAX);
    }

    /// Ends the part that points came for: from its end on what came last holds, until the next one.
    fn end_part(&mut self, next_ns: i64) {
        let Some((part, last)) = self.current.take() else { return };
        let at_ns = self.begin_ns.saturating_add(part.saturating_add(1).saturating_mul(self.part_ns));
        let at_ns = at_ns.max(last.at_ns);
        if at_ns < next_ns && self.points.last().is_some_and(|fullest| fullest.parts != last.parts) {
            self.points.push(BreakdownPoint { at_ns, ..last });
        }
    }

    /// The points, oldest first.
    #[must_use]
    pub fn points(&self) -> &[BreakdownPoint] {
        &self.points
    }

    /// What held at the GPU's peak; `None` where nothing is known of it.
    #[must_use]
    pub fn at_peak(&self) -> Option<Parts> {
        self.at_peak.filter(|parts| *parts != Parts::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(second: i64, gib: Option<u64>) -> BreakdownPoint {
        BreakdownPoint { at_ns: second * SECOND_NS, parts: Parts { allocated: gib, ..Parts::default() } }
    }

    fn of(seconds: i64, peak: i64, points: &[(i64, Option<u64>)]) -> Breakdown {
        let mut breakdown = Breakdown::new((0, seconds * SECOND_NS), Some(peak * SECOND_NS));
        points.iter().for_each(|(second, gib)| breakdown.push(point(*second, *gib)));
        breakdown.finish();
        breakdown
    }

    #[test]
    fn of_a_short_recording_each_second_is_there() {
        let all: Vec<_> = (0..1_000).map(|second| (second, Some(second as u64 % 7))).collect();
        let breakdown = of(1_000, 57, &all);
        assert_eq!(breakdown.points(), all.iter().map(|(second, gib)| point(*second, *gib)).collect::<Vec<_>>());
        assert_eq!(breakdown.at_peak(), Some(point(57, Some(1)).parts));
        assert_eq!((of(9, 3, &[(4, Some(1))]).at_peak(), of(9, 3, &[(1, None)]).at_peak()), (None, None));
    }

    #[test]
    fn of_a_long_one_the_fullest_seconds_stay_and_hold_no_longer_than_they_did() {
        let seconds = 10 * MOST_PARTS;
        let full = |second: i64| if second % 100 == 57 { Some(90) } else { Some(5) };
        let all: Vec<_> = (0..seconds).map(|second| (second, full(second))).collect();
        let breakdown = of(seconds, 157, &all);
        let points = breakdown.points();
        assert!(points.len() <= 2 * MOST_PARTS as usize, "{}", points.len());
        assert!(points.windows(2).all(|pair| pair[0].at_ns < pair[1].at_ns));
        let full = points.iter().filter(|point| point.parts.allocated == Some(90)).count() as i64;
        assert_eq!((full, breakdown.at_peak()), ((seconds - 57 + 99) / 100, Some(point(0, Some(90)).parts)));
        // A second of 100, then nothing known for hours.
        let breakdown = of(seconds, 3, &[(3, Some(100)), (4, None), (seconds - 1, Some(7))]);
        let wanted = [point(3, Some(100)), point(10, None), point(seconds - 1, Some(7))];
        assert_eq!(breakdown.points(), wanted);
    }
}
