//! What one GPU's memory did over a recording, in numbers.

use super::curve::{Curve, Point};

/// Memory in use, over time. Times are those of the recording, nanoseconds.
#[derive(Debug, Clone)]
pub struct MemoryUsage {
    /// The highest, bytes, and when it was first reached; `None` if no reading succeeded.
    pub peak: Option<(u64, i64)>,
    /// The lowest, bytes.
    pub lowest_bytes: Option<u64>,
    /// For how long it is known, nanoseconds.
    pub known_ns: i64,
    /// For how long it is not.
    pub gap_ns: i64,
    /// The curve over time.
    pub curve: Curve,
    byte_ns: u128,
    last: Point,
}

impl MemoryUsage {
    /// No readings yet: memory is unknown from `begin_ns` on. The curve will have at most `most` points.
    #[must_use]
    pub fn new(begin_ns: i64, most: usize) -> Self {
        let (last, curve) = (Point { at_ns: begin_ns, used: None }, Curve::new(most));
        Self { peak: None, lowest_bytes: None, known_ns: 0, gap_ns: 0, curve, byte_ns: 0, last }
    }

    /// Adds a change of memory, which must not be earlier than the one before.
    pub fn push(&mut self, point: Point) {
        if self.curve.points().is_empty() && point.at_ns > self.last.at_ns {
            self.curve.push(self.last);
        }
        self.hold_until(point.at_ns);
        self.last = point;
        self.curve.push(point);
        let Some(used) = point.used else { return };
        if self.peak.is_none_or(|(peak, _)| used > peak) {
            self.peak = Some((used, point.at_ns));
        }
        self.lowest_bytes = Some(self.lowest_bytes.map_or(used, |lowest| lowest.min(used)));
    }

    /// Ends the recording. The last value is true until `known_until_ns`, if it is given, and otherwise until the end.
    pub fn end(&mut self, known_until_ns: Option<i64>, end_ns: i64) {
        if let Some(until_ns) = known_until_ns
            && until_ns < end_ns
            && self.last.used.is_some()
        {
            self.push(Point { at_ns: until_ns.max(self.last.at_ns), used: None });
        }
        if self.curve.points().is_empty() {
            self.curve.push(self.last);
        }
        self.hold_until(end_ns);
        self.curve.finish();
    }

    /// The mean over the time that is known, bytes.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a mean")]
    pub fn mean_bytes(&self) -> Option<f64> {
        match (self.known_ns, self.peak) {
            (0, peak) => peak.map(|(bytes, _)| bytes as f64),
            (known_ns, _) => Some(self.byte_ns as f64 / known_ns as f64),
        }
    }

    fn hold_until(&mut self, at_ns: i64) {
        let for_ns = at_ns.saturating_sub(self.last.at_ns).max(0);
        match self.last.used {
            Some(used) => {
                self.known_ns += for_ns;
                self.byte_ns += u128::from(used) * u128::from(for_ns.unsigned_abs());
            }
            None => self.gap_ns += for_ns,
        }
        self.last.at_ns = self.last.at_ns.max(at_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_means_and_gaps_are_those_of_the_changes() {
        let mut usage = MemoryUsage::new(1_000, 100);
        for (at_ns, used) in [
            (1_050, Some(30)),
            (1_100, Some(70)),
            (1_100, Some(90)),
            (1_200, None),
            (1_300, Some(20)),
            (1_400, Some(90)),
        ] {
            usage.push(Point { at_ns, used });
        }
        usage.end(Some(1_900), 2_000);
        assert_eq!((usage.peak, usage.lowest_bytes), (Some((90, 1_100)), Some(20)));
        assert_eq!((usage.known_ns, usage.gap_ns), (50 + 100 + 100 + 500, 50 + 100 + 100));
        assert_eq!(usage.mean_bytes(), Some((30.0 * 50.0 + 90.0 * 100.0 + 20.0 * 100.0 + 90.0 * 500.0) / 750.0));
        assert_eq!(usage.curve.points().last(), Some(&Point { at_ns: 1_900, used: None }));
        let mut never = MemoryUsage::new(0, 100);
        never.end(None, 10);
        assert_eq!((never.peak, never.mean_bytes(), never.gap_ns), (None, None, 10));
    }
}
