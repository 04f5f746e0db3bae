//! Any sequence of readings and gaps, any interval: the ring answers as the model does.

use super::model::Model;
use crate::ring::{Config, Point, QueryError, Reader, Writer, create::with_layout, layout::Layout};
use proptest::prelude::*;

const GRANULE: u64 = 2 << 20;

#[derive(Debug, Clone)]
enum Op {
    Push { after_ns: i64, value: Value },
    Unchanged { after_ns: i64 },
    Gap { after_ns: i64 },
    Backward { before_ns: i64 },
}

#[derive(Debug, Clone)]
enum Value {
    By(i64),
    Granules(u64),
    Any(u64),
}

fn distance() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => 970_000..1_030_000_i64,
        2 => 0..3_000_i64,
        2 => 0..20_000_000_i64,
        1 => 0..10_000_000_000_i64,
        1 => Just(0),
        1 => 0..1_000_000_000_000_000_i64,
    ]
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => prop::sample::select(vec![1, -1, 8, -8, 20]).prop_map(|granules| Value::By(granules << 21)),
        2 => (-4096..=4096_i64).prop_map(|granules| Value::By(granules << 21)),
        2 => (-40..40_i64).prop_map(|steps| Value::By(steps << 16)),
        1 => (-70_000..70_000_i64).prop_map(Value::By),
        2 => (0..70_000_u64).prop_map(|granules| Value::Granules(granules * GRANULE)),
        1 => any::<u64>().prop_map(Value::Any),
        1 => prop::sample::select(vec![0, 1, u64::MAX, u64::MAX - 65_536]).prop_map(Value::Any),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (distance(), value()).prop_map(|(after_ns, value)| Op::Push { after_ns, value }),
        3 => distance().prop_map(|after_ns| Op::Unchanged { after_ns }),
        2 => (-2_000_000..3_000_000_i64).prop_map(|after_ns| Op::Gap { after_ns }),
        1 => (1..5_000_000_i64).prop_map(|before_ns| Op::Backward { before_ns }),
    ]
}

/// A ring and its model, driven alike.
struct Pair {
    writer: Writer,
    reader: Reader,
    model: Model,
    now_ns: i64,
    used_bytes: u64,
}

impl Pair {
    fn new(layout: Layout, config: Config, begin_ns: i64) -> Self {
        let (writer, reader) = with_layout(layout, &config);
        Self { writer, reader, model: Model::new(config), now_ns: begin_ns, used_bytes: 700 << 20 }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Push { after_ns, value } => {
                self.used_bytes = match value {
                    Value::By(bytes) => self.used_bytes.saturating_add_signed(*bytes),
                    Value::Granules(bytes) | Value::Any(bytes) => *bytes,
                };
                self.push(self.now_ns + after_ns);
            }
            Op::Unchanged { after_ns } => self.push(self.now_ns + after_ns),
            Op::Backward { before_ns } => self.push(self.now_ns - before_ns),
            Op::Gap { after_ns } => {
                self.writer.gap(self.now_ns + after_ns).unwrap();
                self.model.gap(self.now_ns + after_ns);
            }
        }
        assert_eq!(self.reader.newest_ns(), self.model.newest_ns);
        assert_eq!(self.reader.point_count(), self.model.changes.len() as u64);
        assert!(self.reader.bytes() <= self.reader.capacity_bytes());
    }

    fn push(&mut self, at_ns: i64) {
        let taken = self.writer.push(at_ns, self.used_bytes);
        assert_eq!(taken, self.model.push(at_ns, self.used_bytes));
        if taken.is_ok() {
            self.now_ns = at_ns;
        }
    }

    /// A time worth asking for: near a change, near an end, or anywhere.
    fn time(&self, pick: (u8, prop::sample::Index, i64)) -> i64 {
        let (Some(oldest_ns), Some(newest_ns)) = (self.reader.oldest_ns(), self.reader.newest_ns()) else { return 0 };
        let (kind, index, off_ns) = pick;
        match kind {
            0 => oldest_ns + off_ns.signum(),
            1 => newest_ns + off_ns.signum(),
            2 => oldest_ns + off_ns.rem_euclid(newest_ns - oldest_ns + 1),
            _ => index.get(&self.model.changes).at_ns + off_ns.signum(),
        }
    }

    fn check(&self, from_ns: i64, to_ns: i64, threshold_bytes: u64, max_points: usize) {
        let expected_error = self.expected_error(from_ns, to_ns);
        if let Some(error) = expected_error {
            assert_eq!(self.reader.summary(from_ns, to_ns), Err(error));
            assert_eq!(self.reader.above_ns(from_ns, to_ns, [threshold_bytes]), Err(error));
            assert_eq!(self.reader.points(from_ns, to_ns, max_points), Err(error));
            return;
        }
        assert_eq!(self.reader.summary(from_ns, to_ns).unwrap(), self.model.summary(from_ns, to_ns));
        let through = self.reader.summary_through(from_ns, to_ns).unwrap();
        assert_eq!(through, self.model.summary_through(from_ns, to_ns));
        let thresholds_bytes = [threshold_bytes, threshold_bytes / 2, 0];
        let above_ns = thresholds_bytes.map(|threshold_bytes| self.model.above_ns(from_ns, to_ns, threshold_bytes));
        assert_eq!(self.reader.above_ns(from_ns, to_ns, thresholds_bytes), Ok(above_ns));
        assert_eq!(self.reader.at(from_ns).unwrap(), self.model.held(from_ns, from_ns)[0].used);
        if self.reader.oldest_ns() < Some(from_ns) {
            assert_eq!(self.reader.known_at(from_ns).unwrap(), self.model.known_at(from_ns));
        }
        self.check_points(from_ns, to_ns, max_points);
    }

    fn expected_error(&self, from_ns: i64, to_ns: i64) -> Option<QueryError> {
        if from_ns > to_ns {
            return Some(QueryError::Reversed);
        }
        let (Some(oldest_ns), Some(newest_ns)) = (self.reader.oldest_ns(), self.model.newest_ns) else {
            return Some(QueryError::Empty);
        };
        if from_ns < oldest_ns {
            return Some(QueryError::Overtaken { oldest_ns });
        }
        (to_ns > newest_ns).then_some(QueryError::Ahead { newest_ns })
    }

    fn check_points(&self, from_ns: i64, to_ns: i64, max_points: usize) {
        assert_eq!(self.reader.changes_after(from_ns, to_ns).unwrap(), self.model.changes_after(from_ns, to_ns));
        let from = self.reader.changes_from(from_ns, to_ns).unwrap();
        let wanted = self.model.changes_from(from_ns, to_ns);
        // What was held before the oldest time is not known any more, nor what else changed at it in a block that is lost.
        let is_oldest = Some(from_ns) == self.reader.oldest_ns();
        assert!(from == wanted || (is_oldest && !from.is_empty() && wanted.ends_with(&from)), "{from:?} {wanted:?}");
        let points = self.reader.points(from_ns, to_ns, max_points).unwrap();
        check_thinned(&points.points, &self.model.points(from_ns, to_ns), (from_ns, to_ns), max_points);
        // Every point of an interval that is not thinned is there, and no bucket of one that is lies beyond it.
        let all = self.model.points(from_ns, to_ns).len();
        assert_eq!(points.bucket_ns.is_none(), all <= max_points.max(7), "{all} points of {max_points}");
        assert!(points.bucket_ns.is_none_or(|bucket_ns| bucket_ns > 0 && bucket_ns <= to_ns - from_ns));
        let through = self.reader.points_through(from_ns, to_ns, max_points).unwrap();
        check_thinned(&through.points, &self.model.points_through(from_ns, to_ns), (from_ns, to_ns + 1), max_points);
        // Both of one walk are what each is of its own.
        let both = |through_end| self.reader.points_and_summary((from_ns, to_ns), through_end, max_points);
        let summaries =
            (self.reader.summary(from_ns, to_ns).unwrap(), self.reader.summary_through(from_ns, to_ns).unwrap());
        assert_eq!((both(false), both(true)), (Ok((points, summaries.0)), Ok((through, summaries.1))));
    }
}

/// These points of an interval are all, or of each of its buckets what matters.
fn check_thinned(thinned: &[Point], all: &[Point], (from_ns, to_ns): (i64, i64), max_points: usize) {
    if all.len() <= max_points {
        assert_eq!(thinned, all);
        return;
    }
    assert!(thinned.len() <= max_points.max(7), "{} points", thinned.len());
    assert_eq!(thinned[0], all[0]);
    assert_eq!(thinned.last(), all.last());
    check_order_and_gaps(thinned, all);
    let buckets = ((max_points - 1) / 6).max(1) as i64;
    let width_ns = (to_ns - from_ns) / buckets + i64::from((to_ns - from_ns) % buckets != 0);
    for bucket in 0..buckets {
        let inside = |point: &&Point| (point.at_ns - from_ns) / width_ns == bucket;
        let (all, kept): (Vec<_>, Vec<_>) =
            (all.iter().filter(inside).collect(), thinned.iter().filter(inside).collect());
        assert_eq!(extremes(&kept), extremes(&all));
        assert_eq!(kept.last(), all.last());
        assert_eq!(longest_gap_ns(&kept), longest_gap_ns(&all));
    }
}

/// Thinning takes points away and adds none, and never takes the end of a gap that it leaves.
fn check_order_and_gaps(thinned: &[Point], all: &[Point]) {
    let mut rest = 0..all.len();
    for (index, point) in thinned.iter().enumerate() {
        let ended = |at: usize| point.used.is_some() || all.get(at + 1) == thinned.get(index + 1);
        assert!(rest.any(|at| all[at] == *point && ended(at)), "made up, out of order, or a gap without its end");
    }
}

fn extremes(points: &[&Point]) -> Option<(u64, u64)> {
    let values = || points.iter().filter_map(|point| point.used);
    values().min().zip(values().max())
}

/// Of the gaps that begin and end among these points.
fn longest_gap_ns(points: &[&Point]) -> Option<i64> {
    let gaps = points.windows(2).filter(|pair| pair[0].used.is_none());
    gaps.map(|pair| pair[1].at_ns - pair[0].at_ns).max()
}

fn pick() -> impl Strategy<Value = (u8, prop::sample::Index, i64)> {
    (0..6_u8, any::<prop::sample::Index>(), prop_oneof![-1..=1_i64, 0..i64::MAX])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_ring_answers_as_the_model(
        ops in prop::collection::vec(op(), 1..500),
        queries in prop::collection::vec((pick(), pick(), any::<prop::sample::Index>(), prop_oneof![7..60_usize, Just(usize::MAX)]), 1..40),
        (data_words, blocks, fanout_shift) in (0..12_usize, 2..60_usize, 1..4_u32),
        (mark_every, marks) in (1..6_u32, 0..6_usize),
        retention_ns in prop::sample::select(vec![1, 50_000_000, 10_000_000_000, i64::MAX]),
        resolution_ns in prop::sample::select(vec![1, 7, 1_000, 1_000_000]),
        begin_ns in prop::sample::select(vec![0, -5_000_000, 1_795_207_211_009_094_564]),
        halfway in any::<prop::sample::Index>(),
    ) {
        let config = Config { retention_ns, max_bytes: 0, resolution_ns };
        let layout = Layout::of(data_words, blocks, fanout_shift).with_marks(mark_every, marks);
        let mut pair = Pair::new(layout, config, begin_ns);
        let (early, late) = ops.split_at(halfway.index(ops.len()));
        for ops in [early, late] {
            let mut oldest_ns = pair.reader.oldest_ns();
            for op in ops {
                pair.apply(op);
                prop_assert!(pair.reader.oldest_ns() >= oldest_ns, "what was lost came back");
                oldest_ns = pair.reader.oldest_ns();
            }
            for (from, to, threshold, max_points) in &queries {
                if pair.model.changes.is_empty() {
                    pair.check(0, 0, 0, *max_points);
                    continue;
                }
                let threshold = threshold.get(&pair.model.changes).used.unwrap_or(GRANULE);
                let (from_ns, to_ns) = (pair.time(*from), pair.time(*to));
                pair.check(from_ns, to_ns, threshold, *max_points);
                pair.check(from_ns, from_ns, threshold, *max_points);
            }
        }
    }

    #[test]
    fn where_memory_suffices_the_retention_alone_decides_what_is_kept(
        ops in prop::collection::vec(op(), 1..300),
        retention_ns in prop::sample::select(vec![1, 50_000_000, 10_000_000_000, i64::MAX]),
        resolution_ns in prop::sample::select(vec![1, 1_000]),
        data_words in 0..4_usize,
    ) {
        let config = Config { retention_ns, max_bytes: 0, resolution_ns };
        let mut pair = Pair::new(Layout::of(data_words, 400, 3), config, 1_000_000_000);
        for op in &ops {
            pair.apply(op);
            if let Some(newest_ns) = pair.model.newest_ns {
                let retained_ns = newest_ns.saturating_sub(retention_ns);
                let first_kept = pair.reader.oldest_ns().unwrap();
                let begin_ns = pair.model.changes[0].at_ns;
                prop_assert!(first_kept == retained_ns.max(begin_ns), "{first_kept} {retained_ns} {begin_ns}");
            }
        }
    }
}
