//! The points of an interval, thinned so that no extreme is lost.
//!
//! Up to the number asked for, all points are there. Beyond it the interval is cut into buckets of equal time, and
//! each keeps its first and last point, its lowest and highest, and its longest gap with the point that ends it.
//! A chart of the result shows every peak, and no gap longer than it was.

use super::{scan::Sink, summary::Part};

/// One change of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Point {
    /// When, nanoseconds.
    pub at_ns: i64,
    /// The value from here on, bytes; `None` where a gap begins.
    pub used: Option<u64>,
}

/// The points of an interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Points {
    /// In the order of time.
    pub points: Vec<Point>,
    /// The length of the intervals whose extremes are kept, nanoseconds; `None` if every point is there.
    pub bucket_ns: Option<i64>,
}

/// What a bucket keeps at most.
const POINTS_PER_BUCKET: usize = 6;
/// Fewer cannot hold the value at the begin and the extremes of the interval.
pub(super) const LEAST_POINTS: usize = 1 + POINTS_PER_BUCKET;

/// Collects points, all of them or thinned.
pub(super) struct Thinner {
    from_ns: i64,
    bucket_ns: i64,
    max_points: usize,
    /// All points so far; once they are too many, the first and those that the ended buckets have kept.
    points: Vec<Point>,
    /// The bucket being filled; `None` while all points are kept.
    bucket: Option<Bucket>,
}

/// What a bucket has kept so far, each point with its number in the bucket.
#[derive(Default)]
struct Bucket {
    index: i64,
    points: usize,
    /// The first point, unless a gap begins there: a gap is kept only together with its end.
    first: Option<(usize, Point)>,
    last: Option<(usize, Point)>,
    lowest: Option<(usize, Point)>,
    highest: Option<(usize, Point)>,
    /// The longest gap that has ended. One that ends in a later bucket is `last` here and ended by `first` there.
    gap: Option<(usize, Point)>,
    gap_ns: i64,
    after_gap: Option<(usize, Point)>,
}

impl Thinner {
    /// For an interval of which at most `max_points` are wanted, at least [`LEAST_POINTS`].
    pub(super) fn new(from_ns: i64, to_ns: i64, max_points: usize) -> Self {
        let max_points = max_points.max(LEAST_POINTS);
        let buckets = i64::try_from((max_points - 1) / POINTS_PER_BUCKET).unwrap_or(i64::MAX);
        let span_ns = to_ns - from_ns;
        // Rounded up, so that the last bucket is the last; by division and remainder, which cannot overflow.
        let bucket_ns = (span_ns / buckets + i64::from(span_ns % buckets != 0)).max(1);
        Self { from_ns, bucket_ns, max_points, points: Vec::new(), bucket: None }
    }

    /// The points, in the order of time.
    pub(super) fn into_points(mut self) -> Points {
        let bucket = self.bucket.take();
        let bucket_ns = bucket.as_ref().map(|_| self.bucket_ns);
        if let Some(bucket) = bucket {
            bucket.keep(&mut self.points);
        }
        Points { points: self.points, bucket_ns }
    }

    /// Puts a point into its bucket, and ends the one before.
    fn thin(&mut self, point: Point) {
        let index = (point.at_ns - self.from_ns) / self.bucket_ns;
        let bucket = self.bucket.get_or_insert_default();
        if bucket.index != index {
            std::mem::replace(bucket, Bucket { index, ..Bucket::default() }).keep(&mut self.points);
        }
        bucket.add(point);
    }

    /// From keeping all to keeping the extremes: all but the first point go into buckets, as if from the start.
    fn begin_thinning(&mut self) {
        self.bucket = Some(Bucket::default());
        for point in self.points.split_off(1) {
            self.thin(point);
        }
    }
}

impl Sink for Thinner {
    fn whole(&mut self, _part: &Part) -> bool {
        false
    }

    fn held(&mut self, from_ns: i64, _to_ns: i64, used_bytes: Option<u64>) {
        let point = Point { at_ns: from_ns, used: used_bytes };
        if self.bucket.is_none() && self.points.len() < self.max_points {
            self.points.push(point);
            return;
        }
        if self.bucket.is_none() {
            self.begin_thinning();
        }
        self.thin(point);
    }
}

impl Bucket {
    fn add(&mut self, point: Point) {
        let numbered = (self.points, point);
        if let Some((number, gap)) = self.last.filter(|(_, last)| last.used.is_none()) {
            let gap_ns = point.at_ns - gap.at_ns;
            if self.gap.is_none() || gap_ns > self.gap_ns {
                (self.gap, self.gap_ns, self.after_gap) = (Some((number, gap)), gap_ns, Some(numbered));
            }
        }
        if point.used.is_some() {
            if self.points == 0 {
                self.first = Some(numbered);
            }
            if self.lowest.is_none_or(|(_, lowest)| point.used < lowest.used) {
                self.lowest = Some(numbered);
            }
            if self.highest.is_none_or(|(_, highest)| point.used > highest.used) {
                self.highest = Some(numbered);
            }
        }
        self.last = Some(numbered);
        self.points += 1;
    }

    /// Appends what was kept, in order and each point once.
    fn keep(self, points: &mut Vec<Point>) {
        let mut kept = [self.first, self.last, self.lowest, self.highest, self.gap, self.after_gap];
        kept.sort_unstable_by_key(|kept| kept.map(|(number, _)| number));
        let mut last_number = None;
        for (number, point) in kept.into_iter().flatten() {
            if last_number != Some(number) {
                points.push(point);
            }
            last_number = Some(number);
        }
    }
}
