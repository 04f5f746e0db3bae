//! Questions to a ring: any number of readers, none of which the writer notices.
//!
//! A reader is wait-free as well: a query walks once, [`Reader::changes_from`] at most twice. If the writer overtook
//! the walk, the interval's begin is no longer kept, and the query returns [`QueryError::Overtaken`]. While the writer
//! makes several changes with the same timestamp, queries may differ in how many of them they return.

use super::{
    errors::QueryError,
    points::{Point, Points, Thinner},
    scan::{Sink, scan, scan_from, scan_through},
    store::{NEVER_NS, Store},
    summary::{Part, Summary},
    sync::{Arc, Ordering},
};

/// A walk over an interval into a sink; `None` where the writer overtook it.
type Walk<S> = fn(&Store, i64, i64, &mut S) -> Option<()>;

/// Reads one GPU's readings, beside their writer and any number of other readers.
#[derive(Debug, Clone)]
pub struct Reader {
    store: Arc<Store>,
}

impl Reader {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    /// Time of the last good reading, nanoseconds; `None` before the first one.
    #[must_use]
    pub fn newest_ns(&self) -> Option<i64> {
        let newest_ns = self.store.newest_ns.load(Ordering::Acquire);
        (newest_ns != NEVER_NS).then_some(newest_ns)
    }

    /// The oldest time that can still be asked for, nanoseconds; `None` before the first reading. It is the newest time minus the
    /// retention, or later if less has been written or fits into the memory.
    #[must_use]
    pub fn oldest_ns(&self) -> Option<i64> {
        self.newest_ns().map(|newest_ns| self.oldest_before(newest_ns))
    }

    /// Bytes in use: the fixed tables, and every kept block with its share of the tree. Never above the cap.
    #[must_use]
    pub fn bytes(&self) -> usize {
        usize::try_from(self.store.bytes.load(Ordering::Relaxed)).unwrap_or(usize::MAX)
    }

    /// Bytes that the ring may come to use: what it has reserved, at most the configured cap.
    #[must_use]
    pub fn capacity_bytes(&self) -> usize {
        self.store.layout.total_bytes()
    }

    /// What times are floored to, nanoseconds.
    #[must_use]
    pub fn resolution_ns(&self) -> i64 {
        self.store.resolution_ns
    }

    /// Change points ever written: changes of the value, and begins and ends of gaps.
    #[must_use]
    pub fn point_count(&self) -> u64 {
        self.store.points.load(Ordering::Relaxed)
    }

    /// The value held at a time, bytes; `None` in a gap.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn at(&self, at_ns: i64) -> Result<Option<u64>, QueryError> {
        self.query(at_ns, at_ns, Held(None)).map(|held| held.0)
    }

    /// The last known value at a time, bytes. If a gap begins at that very time, which is then the time of the last good reading,
    /// it is the value before the gap. `None` within a gap.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn known_at(&self, at_ns: i64) -> Result<Option<u64>, QueryError> {
        Ok(self.changes_from(at_ns, at_ns)?.iter().rev().find_map(|point| point.used))
    }

    /// What the value did between two times, in logarithmic time. Two equal times mean that instant.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn summary(&self, from_ns: i64, to_ns: i64) -> Result<Summary, QueryError> {
        self.fold(from_ns, to_ns, scan)
    }

    /// Like [`summary`](Self::summary), but with changes at the very end. So the newest reading counts in an interval that ends
    /// at it, although its value has been held for no time yet.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn summary_through(&self, from_ns: i64, to_ns: i64) -> Result<Summary, QueryError> {
        self.fold(from_ns, to_ns, scan_through)
    }

    /// For how many nanoseconds between two times the value was at least each of the thresholds, in one walk. Time in
    /// gaps does not count. Only blocks whose values lie on both sides of a threshold are looked into.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn above_ns<const N: usize>(
        &self,
        from_ns: i64,
        to_ns: i64,
        thresholds_bytes: [u64; N],
    ) -> Result<[i64; N], QueryError> {
        self.query(from_ns, to_ns, Above { thresholds_bytes, above_ns: [0; N] }).map(|above| above.above_ns)
    }

    /// The value held at the begin (`at_ns` of the first point is `from_ns`) and every change before the end. If
    /// they are more than `max_points`, they are thinned: no extreme value and no long gap is lost. `max_points`
    /// below 7 counts as 7, since fewer cannot hold what must be kept.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn points(&self, from_ns: i64, to_ns: i64, max_points: usize) -> Result<Points, QueryError> {
        self.check(from_ns, to_ns)?;
        self.query(from_ns, to_ns, Thinner::new(from_ns, to_ns, max_points)).map(Thinner::into_points)
    }

    /// As [`points`](Self::points), with what changed at the very end too.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn points_through(&self, from_ns: i64, to_ns: i64, max_points: usize) -> Result<Points, QueryError> {
        self.check(from_ns, to_ns)?;
        let thinner = Thinner::new(from_ns, to_ns.saturating_add(1), max_points);
        self.walk(from_ns, to_ns, thinner, scan_through).map(Thinner::into_points)
    }

    /// The points and the summary of an interval in one walk, so that both are of the same readings. With
    /// `through_end` as [`points_through`](Self::points_through) and [`summary_through`](Self::summary_through), else
    /// as [`points`](Self::points) and [`summary`](Self::summary). It visits each change, so it takes linear time.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn points_and_summary(
        &self,
        (from_ns, to_ns): (i64, i64),
        through_end: bool,
        max_points: usize,
    ) -> Result<(Points, Summary), QueryError> {
        self.check(from_ns, to_ns)?;
        let (walk, before_ns): (Walk<Both>, i64) =
            if through_end { (scan_through, to_ns.saturating_add(1)) } else { (scan, to_ns) };
        let both = Both { thinner: Thinner::new(from_ns, before_ns, max_points), folded: Folded::NOTHING };
        let both = self.walk(from_ns, to_ns, both, walk)?;
        Ok((both.thinner.into_points(), both.folded.summary(from_ns, to_ns)))
    }

    /// Asks `question` for the interval from `from_ns`, or from the oldest kept time if that is later. Returns the begin that was
    /// used, with the answer. The oldest time moves with each reading, so a begin may expire before the question is answered. The
    /// question is then asked again from a later begin, with a lead that doubles each time.
    ///
    /// # Errors
    /// Those of the question; [`QueryError::Overtaken`] only if nothing of the interval up to `to_ns` is kept.
    pub fn of_kept<T>(
        &self,
        from_ns: i64,
        to_ns: i64,
        question: impl Fn(i64) -> Result<T, QueryError>,
    ) -> Result<(i64, T), QueryError> {
        let mut begin_ns = from_ns.max(self.oldest_ns().ok_or(QueryError::Empty)?);
        if from_ns <= to_ns && begin_ns > to_ns {
            return Err(QueryError::Overtaken { oldest_ns: begin_ns });
        }
        let mut lead_ns = self.resolution_ns();
        loop {
            match question(begin_ns) {
                Err(QueryError::Overtaken { oldest_ns }) if oldest_ns <= to_ns => {
                    begin_ns = oldest_ns.saturating_add(lead_ns).min(to_ns);
                    lead_ns = lead_ns.saturating_mul(2);
                }
                answer => return answer.map(|answer| (begin_ns, answer)),
            }
        }
    }

    /// The value held just before the begin, as a point at the begin, and every change from the begin to the end, both included.
    /// If a gap begins at the very time of a reading, both are returned: the reading was good.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn changes_from(&self, from_ns: i64, to_ns: i64) -> Result<Vec<Point>, QueryError> {
        Ok(self.walk(from_ns, to_ns, Changes { from_ns, points: Vec::new() }, scan_from)?.points)
    }

    /// The value held at a time and every change after it, up to and including the end: the continuation of an earlier
    /// [`changes_from`](Self::changes_from) or of this.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn changes_after(&self, after_ns: i64, to_ns: i64) -> Result<Vec<Point>, QueryError> {
        let changes = Changes { from_ns: after_ns, points: Vec::new() };
        Ok(self.walk(after_ns, to_ns, changes, scan_through)?.points)
    }

    fn fold(&self, from_ns: i64, to_ns: i64, walk: Walk<Folded>) -> Result<Summary, QueryError> {
        Ok(self.walk(from_ns, to_ns, Folded::NOTHING, walk)?.summary(from_ns, to_ns))
    }

    fn query<S: Sink>(&self, from_ns: i64, to_ns: i64, sink: S) -> Result<S, QueryError> {
        self.walk(from_ns, to_ns, sink, scan)
    }

    fn walk<S: Sink>(
        &self,
        from_ns: i64,
        to_ns: i64,
        mut sink: S,
        walk: impl FnOnce(&Store, i64, i64, &mut S) -> Option<()>,
    ) -> Result<S, QueryError> {
        let newest_ns = self.check(from_ns, to_ns)?;
        match walk(&self.store, from_ns, to_ns, &mut sink) {
            Some(()) => Ok(sink),
            None => Err(QueryError::Overtaken { oldest_ns: self.oldest_before(newest_ns) }),
        }
    }

    /// Checks that a query for an interval can be answered. Returns the newest time, up to which the walk then sees all changes.
    fn check(&self, from_ns: i64, to_ns: i64) -> Result<i64, QueryError> {
        if from_ns > to_ns {
            return Err(QueryError::Reversed);
        }
        let newest_ns = self.newest_ns().ok_or(QueryError::Empty)?;
        let oldest_ns = self.oldest_before(newest_ns);
        if from_ns < oldest_ns {
            return Err(QueryError::Overtaken { oldest_ns });
        }
        if to_ns > newest_ns {
            return Err(QueryError::Ahead { newest_ns });
        }
        Ok(newest_ns)
    }

    fn oldest_before(&self, newest_ns: i64) -> i64 {
        let retained_ns = newest_ns.saturating_sub(self.store.retention_ns);
        retained_ns.max(self.store.oldest_begin_ns.load(Ordering::Acquire))
    }
}

/// Every change.
struct Changes {
    from_ns: i64,
    points: Vec<Point>,
}

impl Sink for Changes {
    fn whole(&mut self, _part: &Part) -> bool {
        false
    }

    fn held(&mut self, from_ns: i64, _to_ns: i64, used_bytes: Option<u64>) {
        self.points.push(Point { at_ns: from_ns.max(self.from_ns), used: used_bytes });
    }
}

/// The value at an instant.
struct Held(Option<u64>);

impl Sink for Held {
    fn whole(&mut self, _part: &Part) -> bool {
        false
    }

    fn held(&mut self, _from_ns: i64, _to_ns: i64, used_bytes: Option<u64>) {
        self.0 = used_bytes;
    }
}

/// Everything folded into one part.
struct Folded {
    part: Part,
    first: Option<Option<u64>>,
    last: Option<u64>,
}

impl Folded {
    const NOTHING: Self = Self { part: Part::NOTHING, first: None, last: None };

    fn summary(&self, from_ns: i64, to_ns: i64) -> Summary {
        Summary::new(from_ns, to_ns, &self.part, self.first.flatten(), self.last)
    }
}

impl Sink for Folded {
    fn whole(&mut self, part: &Part) -> bool {
        self.part = self.part.then(part);
        true
    }

    fn held(&mut self, from_ns: i64, to_ns: i64, used_bytes: Option<u64>) {
        self.first.get_or_insert(used_bytes);
        self.last = used_bytes;
        if let Some(used_bytes) = used_bytes {
            self.part.hold(used_bytes, to_ns - from_ns);
        }
    }
}

/// The points of an interval, and all of them folded.
struct Both {
    thinner: Thinner,
    folded: Folded,
}

impl Sink for Both {
    fn whole(&mut self, _part: &Part) -> bool {
        false
    }

    fn held(&mut self, from_ns: i64, to_ns: i64, used_bytes: Option<u64>) {
        self.thinner.held(from_ns, to_ns, used_bytes);
        self.folded.held(from_ns, to_ns, used_bytes);
    }
}

/// Time at or above each of some thresholds.
struct Above<const N: usize> {
    thresholds_bytes: [u64; N],
    above_ns: [i64; N],
}

impl<const N: usize> Above<N> {
    fn add(&mut self, used_bytes: u64, ns: i64) {
        for (threshold_bytes, above_ns) in self.thresholds_bytes.iter().zip(&mut self.above_ns) {
            *above_ns += if used_bytes >= *threshold_bytes { ns } else { 0 };
        }
    }
}

impl<const N: usize> Sink for Above<N> {
    fn whole(&mut self, part: &Part) -> bool {
        let on_one_side = |threshold_bytes: &u64| part.min >= *threshold_bytes || part.max < *threshold_bytes;
        let decided = self.thresholds_bytes.iter().all(on_one_side);
        if decided {
            self.add(part.min, part.known_ns);
        }
        decided
    }

    fn held(&mut self, from_ns: i64, to_ns: i64, used_bytes: Option<u64>) {
        if let Some(used_bytes) = used_bytes {
            self.add(used_bytes, to_ns - from_ns);
        }
    }
}
