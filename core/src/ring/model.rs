//! What the ring means, written as plainly as can be: all change points in a vector, every question a loop over it.

use crate::ring::{Config, Drop, Point, PushError, Summary};

pub(super) struct Model {
    config: Config,
    /// Times and values (`None`: a gap begins). Times never decrease.
    pub(super) changes: Vec<Point>,
    pub(super) newest_ns: Option<i64>,
}

/// A value held from one time until another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeldValue {
    pub(super) from_ns: i64,
    pub(super) to_ns: i64,
    pub(super) used: Option<u64>,
}

impl Model {
    pub(super) fn new(config: Config) -> Self {
        Self { config, changes: Vec::new(), newest_ns: None }
    }

    fn floor(&self, at_ns: i64) -> i64 {
        at_ns.div_euclid(self.config.resolution_ns) * self.config.resolution_ns
    }

    pub(super) fn push(&mut self, at_ns: i64, used_bytes: u64) -> Result<(), PushError> {
        let at_ns = self.floor(at_ns);
        let reached = self.changes.last().map(|change| change.at_ns).max(self.newest_ns);
        if let Some(not_before_ns) = reached.filter(|reached| at_ns < *reached) {
            return Err(PushError::Backward { not_before_ns });
        }
        if self.changes.last().and_then(|change| change.used) != Some(used_bytes) {
            self.changes.push(Point { at_ns, used: Some(used_bytes) });
        }
        self.newest_ns = Some(at_ns);
        Ok(())
    }

    pub(super) fn gap(&mut self, from_ns: i64) {
        if self.changes.last().is_some_and(|change| change.used.is_some()) {
            let at_ns = self.newest_ns.unwrap().max(self.floor(from_ns));
            self.changes.push(Point { at_ns, used: None });
        }
    }

    /// What was held from the begin of an interval to its end, piece by piece.
    pub(super) fn held(&self, from_ns: i64, to_ns: i64) -> Vec<HeldValue> {
        let at_begin = self.changes.iter().rev().find(|change| change.at_ns <= from_ns).unwrap().used;
        let mut points = vec![Point { at_ns: from_ns, used: at_begin }];
        points.extend(self.changes.iter().filter(|change| from_ns < change.at_ns && change.at_ns < to_ns));
        let ends: Vec<i64> = points.iter().skip(1).map(|point| point.at_ns).chain([to_ns]).collect();
        points
            .iter()
            .zip(ends)
            .map(|(point, to_ns)| HeldValue { from_ns: point.at_ns, to_ns, used: point.used })
            .collect()
    }

    /// The last value among the one that was held until this time and those that are written at it.
    pub(super) fn known_at(&self, at_ns: i64) -> Option<u64> {
        let before = self.changes.iter().rev().find(|change| change.at_ns < at_ns);
        let at_it = self.changes.iter().filter(|change| change.at_ns == at_ns);
        before.into_iter().chain(at_it).filter_map(|change| change.used).next_back()
    }

    /// The value held at a time and every change after it, those at the very end too.
    pub(super) fn changes_after(&self, after_ns: i64, to_ns: i64) -> Vec<Point> {
        let held = self.changes.iter().rev().find(|change| change.at_ns <= after_ns).unwrap().used;
        let later = self.changes.iter().filter(|change| after_ns < change.at_ns && change.at_ns <= to_ns);
        std::iter::once(Point { at_ns: after_ns, used: held }).chain(later.copied()).collect()
    }

    /// The value held before a time and every change from it on, those at the very end too.
    pub(super) fn changes_from(&self, from_ns: i64, to_ns: i64) -> Vec<Point> {
        let before = self.changes.iter().rev().find(|change| change.at_ns < from_ns);
        let later = self.changes.iter().filter(|change| from_ns <= change.at_ns && change.at_ns <= to_ns);
        before.map(|change| Point { at_ns: from_ns, used: change.used }).into_iter().chain(later.copied()).collect()
    }

    pub(super) fn summary(&self, from_ns: i64, to_ns: i64) -> Summary {
        Self::fold(from_ns, to_ns, &self.held(from_ns, to_ns))
    }

    /// As `summary`, with what is written at the very end too, for no time.
    pub(super) fn summary_through(&self, from_ns: i64, to_ns: i64) -> Summary {
        let mut held = self.held(from_ns, to_ns);
        if from_ns < to_ns {
            let at_end = self.changes.iter().filter(|change| change.at_ns == to_ns);
            held.extend(at_end.map(|change| HeldValue { from_ns: to_ns, to_ns, used: change.used }));
        }
        Self::fold(from_ns, to_ns, &held)
    }

    fn fold(from_ns: i64, to_ns: i64, held: &[HeldValue]) -> Summary {
        let known: Vec<(u64, i64)> =
            held.iter().filter_map(|held| Some((held.used?, held.to_ns - held.from_ns))).collect();
        let values: Vec<u64> = known.iter().map(|known| known.0).collect();
        let known_ns: i64 = known.iter().map(|known| known.1).sum();
        let area: u128 = known.iter().map(|known| u128::from(known.0) * known.1 as u128).sum();
        let mean = if from_ns == to_ns {
            held[0].used.map(|used_bytes| used_bytes as f64)
        } else {
            (known_ns > 0).then(|| area as f64 / known_ns as f64)
        };
        Summary {
            from_ns,
            to_ns,
            known_ns,
            gap_ns: held.iter().filter(|held| held.used.is_none()).map(|held| held.to_ns - held.from_ns).sum(),
            first: held.first().unwrap().used,
            last: held.last().unwrap().used,
            min: values.iter().copied().min(),
            max: values.iter().copied().max(),
            mean,
            drop: largest_drop(&values),
        }
    }

    pub(super) fn above_ns(&self, from_ns: i64, to_ns: i64, threshold_bytes: u64) -> i64 {
        self.held(from_ns, to_ns)
            .iter()
            .filter(|held| held.used.is_some_and(|used_bytes| used_bytes >= threshold_bytes))
            .map(|held| held.to_ns - held.from_ns)
            .sum()
    }

    pub(super) fn points(&self, from_ns: i64, to_ns: i64) -> Vec<Point> {
        self.held(from_ns, to_ns).iter().map(|held| Point { at_ns: held.from_ns, used: held.used }).collect()
    }

    /// As `points`, with what is written at the very end too.
    pub(super) fn points_through(&self, from_ns: i64, to_ns: i64) -> Vec<Point> {
        let mut points = self.points(from_ns, to_ns);
        if from_ns < to_ns {
            points.extend(self.changes.iter().filter(|change| change.at_ns == to_ns));
        }
        points
    }
}

/// For every value, how far it lies below the highest before it; of the furthest falls the first.
fn largest_drop(values: &[u64]) -> Option<Drop> {
    let mut largest: Option<(u64, usize)> = None;
    let mut highest = 0;
    for (index, value) in values.iter().enumerate() {
        let fall = highest - highest.min(*value);
        if fall > largest.map_or(0, |(bytes, _)| bytes) {
            largest = Some((fall, index));
        }
        highest = highest.max(*value);
    }
    largest.map(|(bytes, index)| Drop {
        bytes,
        trough_bytes: values[index],
        regrown_bytes: values[index..].iter().max().unwrap() - values[index],
    })
}
