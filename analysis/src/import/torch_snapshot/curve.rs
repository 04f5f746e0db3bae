//! A curve of allocated memory in bounded memory, which keeps the extremes of what it leaves out.
//!
//! Enters: a level after each event. Leaves: points, each of some consecutive events, with the lowest and the highest level of
//! allocated memory among them. Invariant: no more than a fixed number of points; when they are full, neighbours join.

/// The most points.
const MOST: usize = 1 << 13;

/// A level after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::import) struct Level {
    /// The event's number, from 1.
    pub event: u64,
    /// When it was, microseconds of Unix time.
    pub time_us: Option<i64>,
    /// Allocated, less what it was at the begin, bytes.
    pub allocated: i64,
}

/// Consecutive events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::import) struct AllocatorPoint {
    /// The first of the lowest levels.
    pub lowest: Level,
    /// The first of the highest.
    pub highest: Level,
    /// The last.
    pub last: Level,
}

/// The points so far.
#[derive(Debug)]
pub(in crate::import) struct AllocatorCurve {
    points: Vec<AllocatorPoint>,
    /// How many events make a point.
    each: u64,
    /// Events in the last point.
    open: u64,
}

impl Default for AllocatorCurve {
    fn default() -> Self {
        Self { points: Vec::new(), each: 1, open: 0 }
    }
}

impl AllocatorCurve {
    /// Adds the levels after an event.
    pub fn push(&mut self, level: Level) {
        let new = AllocatorPoint { lowest: level, highest: level, last: level };
        if self.open > 0 && self.open < self.each {
            if let Some(last) = self.points.last_mut() {
                *last = last.and(new);
            }
            self.open += 1;
            return;
        }
        if self.points.len() >= MOST {
            let pairs = self.points.chunks(2).filter_map(|pair| pair.iter().copied().reduce(AllocatorPoint::and));
            self.points = pairs.collect();
            self.each *= 2;
        }
        self.points.push(new);
        self.open = 1;
    }

    /// The levels, in order of events.
    pub fn levels(&self) -> impl Iterator<Item = Level> {
        self.points.iter().flat_map(|AllocatorPoint { lowest, highest, last }| {
            let (first, second) = if lowest.event < highest.event { (lowest, highest) } else { (highest, lowest) };
            let second = (second.event != first.event).then_some(*second);
            let last =
                (last.event != first.event && second.is_none_or(|second| second.event != last.event)).then_some(*last);
            [Some(*first), second, last].into_iter().flatten()
        })
    }
}

impl AllocatorPoint {
    fn and(self, next: Self) -> Self {
        let lowest = if next.lowest.allocated < self.lowest.allocated { next.lowest } else { self.lowest };
        let highest = if next.highest.allocated > self.highest.allocated { next.highest } else { self.highest };
        Self { lowest, highest, last: next.last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_extreme_is_kept_however_many_events_there_are() {
        let mut curve = AllocatorCurve::default();
        let level = |event: u64| {
            if event == 77_777 {
                1 << 40
            } else if event == 99_999 {
                -5
            } else {
                (event % 7).cast_signed()
            }
        };
        for event in 1..=1_000_003 {
            curve.push(Level { event, time_us: None, allocated: level(event) });
        }
        assert!(curve.points.len() <= MOST && curve.points.len() > MOST / 4, "{}", curve.points.len());
        let levels: Vec<Level> = curve.levels().collect();
        assert!(levels.iter().all(|one| one.allocated == level(one.event)), "each is the level of its event");
        for extreme in [77_777, 99_999, 1_000_003] {
            assert!(levels.iter().any(|one| one.event == extreme), "{extreme}");
        }
        assert!(levels.is_sorted_by(|one, other| one.event < other.event), "each event once, in order");
    }
}
