//! One GPU's memory as a curve of bounded size that keeps every extreme.
//!
//! Enters: change points in order of time. Leaves: the same points if they are few; otherwise, of each bucket of time,
//! the first and last point, the lowest and highest, and the longest gap, all at their own times. A spike of one
//! reading is therefore in the curve whatever its resolution (this selection is known as M4).

/// From `at_ns` on, `used` bytes are in use; `None` begins a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// Nanoseconds of Unix time, or since the recording's begin if it has no other times.
    pub at_ns: i64,
    /// Bytes; `None` if they are not known.
    pub used: Option<u64>,
}

/// A curve of bounded size.
#[derive(Debug, Clone)]
pub struct Curve {
    points: Vec<Point>,
    most: usize,
    /// The width of a bucket, nanoseconds; 0 while every point is kept.
    bucket_ns: i64,
    changes: u64,
}

/// Number of points that are usually kept of each bucket: first, last, lowest and highest. The longest gap takes two more.
const USUAL_OF_EACH: usize = 4;

impl Curve {
    /// An empty curve of at most `most` points, at least 64.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { points: Vec::new(), most: most.max(64), bucket_ns: 0, changes: 0 }
    }

    /// Adds a point that is not earlier than the one before.
    pub fn push(&mut self, point: Point) {
        if self.points.last().is_some_and(|last| last.used == point.used) {
            return;
        }
        self.changes += 1;
        self.points.push(point);
        if self.points.len() >= 2 * self.most {
            // The current width may be enough: it thins the points since the last time.
            self.thin();
            self.finish();
        }
    }

    /// Widens the buckets until the curve has at most the given number of points.
    pub fn finish(&mut self) {
        while self.points.len() > self.most {
            // Two whole buckets become one, so that the extremes of the new one are among those of the old ones.
            self.bucket_ns = self.bucket_ns.saturating_mul(2);
            self.thin();
        }
    }

    /// The points, in order of time.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The width of the buckets whose extremes are kept, nanoseconds; `None` if every change is kept.
    #[must_use]
    pub fn bucket_ns(&self) -> Option<i64> {
        (self.bucket_ns > 0).then_some(self.bucket_ns)
    }

    /// How many changes the recording has.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Keeps the extremes of each bucket. The first time, buckets are as wide as the bound suggests.
    fn thin(&mut self) {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else { return };
        if self.bucket_ns == 0 {
            let buckets = i64::try_from(self.most / USUAL_OF_EACH).unwrap_or(i64::MAX).max(1);
            self.bucket_ns = (last.at_ns.saturating_sub(first.at_ns) / buckets).max(1);
        }
        let mut kept = Vec::with_capacity(self.points.len() / 2);
        let mut begin = 0;
        while begin < self.points.len() {
            let bucket = self.points[begin].at_ns.div_euclid(self.bucket_ns);
            let is_inside = |point: &Point| point.at_ns.div_euclid(self.bucket_ns) == bucket;
            let end = begin + self.points[begin..].partition_point(is_inside);
            keep_extremes(&self.points, begin..end, &mut kept);
            begin = end;
        }
        self.points = kept;
    }
}

/// Adds the extremes of the points in this range to `kept`, in their order.
fn keep_extremes(points: &[Point], range: std::ops::Range<usize>, kept: &mut Vec<Point>) {
    let known = |at: &usize| points[*at].used;
    let mut keep = vec![range.start, range.end - 1];
    keep.extend(range.clone().filter(|at| known(at).is_some()).min_by_key(known));
    // Of equal peaks the first, as in the statistics.
    keep.extend(range.clone().rev().filter(|at| known(at).is_some()).max_by_key(known));
    let ends_ns = |at: usize| points.get(at + 1).map_or(points[at].at_ns, |next| next.at_ns);
    let gaps = range.clone().filter(|at| points[*at].used.is_none());
    if let Some(gap) = gaps.max_by_key(|at| ends_ns(*at) - points[*at].at_ns) {
        keep.extend([gap, gap + 1].into_iter().filter(|at| range.contains(at)));
    }
    keep.sort_unstable();
    keep.dedup();
    kept.extend(keep.into_iter().map(|at| points[at]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(most: usize, points: &[(i64, Option<u64>)]) -> Curve {
        let mut curve = Curve::new(most);
        points.iter().for_each(|(at_ns, used)| curve.push(Point { at_ns: *at_ns, used: *used }));
        curve.finish();
        curve
    }

    #[test]
    fn few_points_are_all_kept_and_repeated_values_are_no_change() {
        let curve = curve(64, &[(0, None), (5, Some(1)), (6, Some(1)), (9, Some(2))]);
        let expected = [(0, None), (5, Some(1)), (9, Some(2))].map(|(at_ns, used)| Point { at_ns, used });
        assert_eq!((curve.points(), curve.bucket_ns(), curve.changes()), (expected.as_slice(), None, 3));
    }

    proptest! {
        /// Whatever the resolution, the curve is bounded, in order, made of points that were given, and has the highest
        /// and the lowest of each of its buckets.
        #[test]
        fn extremes_survive_every_resolution(
            steps in proptest::collection::vec((1_i64..50, proptest::option::weighted(0.95, 0_u64..1_000)), 1..4_000),
            most in 64_usize..400,
        ) {
            let mut at_ns = 0;
            let points: Vec<(i64, Option<u64>)> = steps.iter().map(|(by, used)| { at_ns += by; (at_ns, *used) }).collect();
            let thinned = curve(most, &points);
            prop_assert!(thinned.points().len() <= most);
            prop_assert!(thinned.points().is_sorted_by_key(|point| point.at_ns));
            prop_assert!(thinned.points().iter().all(|point| points.contains(&(point.at_ns, point.used))));
            let mut distinct = points.clone();
            distinct.dedup_by_key(|(_, used)| *used);
            let bucket_ns = thinned.bucket_ns().unwrap_or(1);
            let extremes = |points: &[(i64, Option<u64>)]| {
                let mut all = std::collections::BTreeMap::<i64, (u64, u64, bool)>::new();
                for (at_ns, used) in points {
                    let of = all.entry(at_ns.div_euclid(bucket_ns)).or_insert((u64::MAX, 0, false));
                    match used {
                        Some(used) => *of = (of.0.min(*used), of.1.max(*used), of.2),
                        None => of.2 = true,
                    }
                }
                all
            };
            let kept: Vec<_> = thinned.points().iter().map(|point| (point.at_ns, point.used)).collect();
            prop_assert_eq!(extremes(&kept), extremes(&distinct));
        }
    }
}
