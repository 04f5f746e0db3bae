//! The memory of one GPU: its change points, and gaps in which nothing is known.

/// The bytes of a point that begins a gap.
const UNKNOWN: u64 = u64::MAX;

/// One GPU's change points.
#[derive(Debug)]
pub struct Track {
    /// The GPU's number in the recording.
    pub(super) gpu: u32,
    /// Times, each with the bytes from then on, in order of time.
    points: Vec<(i64, u64)>,
}

impl Track {
    /// Takes points in any order; of points at the same time the last counts. A point without known bytes begins a gap.
    pub fn new(gpu: u32, points: impl IntoIterator<Item = (i64, Option<u64>)>) -> Self {
        let known = |(at_ns, used): (i64, Option<u64>)| (at_ns, used.unwrap_or(UNKNOWN));
        let mut points: Vec<_> = points.into_iter().map(known).collect();
        points.sort_by_key(|(at_ns, _)| *at_ns);
        points.shrink_to_fit();
        Self { gpu, points }
    }

    /// All points in order of time; `None` begins a gap.
    pub fn points(&self) -> impl Iterator<Item = (i64, Option<u64>)> {
        self.points.iter().map(|(at_ns, used)| (*at_ns, (*used != UNKNOWN).then_some(*used)))
    }

    /// The first and the last time; `None` if there is no point.
    pub fn span(&self) -> Option<(i64, i64)> {
        Some((self.points.first()?.0, self.points.last()?.0))
    }

    /// Bytes in use at a recorded time; `None` before the first point and in a gap.
    pub fn used_at(&self, at_ns: i64) -> Option<u64> {
        let after = self.points.partition_point(|(since, _)| *since <= at_ns);
        self.points.get(after.checked_sub(1)?).map(|(_, used)| *used).filter(|used| *used != UNKNOWN)
    }

    /// The first recorded time after this one at which memory changes.
    pub fn next_change_ns(&self, after_ns: i64) -> Option<i64> {
        let next = self.points.partition_point(|(since, _)| *since <= after_ns);
        self.points.get(next).map(|(at_ns, _)| *at_ns)
    }
}
