//! What a GPU did over a long time, as means of its readings.
//!
//! Enters: readings in order. Leaves: points, each the mean of some readings. Each reading counts for the time since the one before
//! it, at most for as long as readings hold: a GPU on which nothing runs is read once a second, and others ten times.

/// With a kernel, of multiprocessors with a warp, of tensor cores, of memory that transfers: shares of the time before a reading,
/// 0 to 1.
pub type ActivityShares = [Option<f64>; 4];

/// Means of the readings of one GPU.
#[derive(Debug, Clone)]
pub struct ActivityMeans {
    points: Vec<Mean>,
    readings_each: usize,
    most: usize,
    hold_ns: i64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    at_ns: i64,
    readings: usize,
    /// The shares times the time that each is about, nanoseconds, and these times, as far as they are known.
    sums: [f64; 4],
    times: [f64; 4],
}

impl Mean {
    fn add(&mut self, other: &Self) {
        self.at_ns = other.at_ns;
        self.readings += other.readings;
        for nth in 0..4 {
            self.sums[nth] += other.sums[nth];
            self.times[nth] += other.times[nth];
        }
    }
}

impl ActivityMeans {
    /// No points yet. Each will be the mean of `readings_each` readings, a number that doubles when there would be more than `most`
    /// points. A reading is about at most `hold_ns` before it.
    #[must_use]
    pub fn new(readings_each: usize, most: usize, hold_ns: i64) -> Self {
        Self { points: Vec::new(), readings_each: readings_each.max(1), most, hold_ns }
    }

    /// Adds a reading. What is no share is not known.
    pub fn push(&mut self, at_ns: i64, shares: ActivityShares) {
        // The first one of all says how much it counts only if it is alone.
        let since_ns = self.points.last().map_or(1, |last| at_ns.saturating_sub(last.at_ns).clamp(1, self.hold_ns));
        #[allow(clippy::cast_precision_loss, reason = "at most the hold time")]
        let own = since_ns as f64;
        let known = shares.map(|share| share.filter(|share| (0.0..=1.0).contains(share)));
        let reading = Mean {
            at_ns,
            readings: 1,
            sums: known.map(|share| share.unwrap_or(0.0) * own),
            times: known.map(|share| if share.is_some() { own } else { 0.0 }),
        };
        match self.points.last_mut() {
            Some(last) if last.readings < self.readings_each => last.add(&reading),
            _ => self.points.push(reading),
        }
        if self.points.len() > self.most {
            self.readings_each *= 2;
            let pairs = self.points.chunks(2).map(|pair| {
                let mut one = pair[0];
                pair[1..].iter().for_each(|other| one.add(other));
                one
            });
            self.points = pairs.collect();
        }
    }

    /// The time of each point's newest reading, and its means.
    pub fn points(&self) -> impl ExactSizeIterator<Item = (i64, ActivityShares)> + '_ {
        self.points.iter().map(|point| {
            let mean = |nth: usize| (point.times[nth] > 0.0).then(|| point.sums[nth] / point.times[nth]);
            (point.at_ns, [mean(0), mean(1), mean(2), mean(3)])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SECOND_NS;

    const HOLD_NS: i64 = SECOND_NS * 3 / 2;

    #[test]
    fn few_readings_are_kept_as_they_are_and_many_as_means_of_what_is_known() {
        let mut few = ActivityMeans::new(1, 4_096, HOLD_NS);
        few.push(5, [Some(0.5), None, Some(1.5), Some(f64::NAN)]);
        assert_eq!(few.points().collect::<Vec<_>>(), [(5, [Some(0.5), None, None, None])]);
        let mut many = ActivityMeans::new(1, 4_096, HOLD_NS);
        for nth in 0..3 * 4_096 {
            let tensor = (nth % 4 < 2).then_some(0.25);
            many.push(nth * 100, [Some((nth % 2) as f64), None, tensor, None]);
        }
        let points: Vec<_> = many.points().collect();
        assert!(points.len() <= 4_096 && points.len() > 2_048, "{}", points.len());
        assert_eq!(points[1], (700, [Some(0.5), None, Some(0.25), None]));
        assert_eq!(points.last().expect("some").0, (3 * 4_096 - 1) * 100);
    }

    #[test]
    fn a_reading_counts_for_the_time_since_the_one_before_it_and_no_longer_than_it_holds() {
        // Idle for ten seconds, read once a second; then busy for ten, read ten times a second.
        let mut mixed = ActivityMeans::new(1 << 20, usize::MAX, HOLD_NS);
        (0..=10).for_each(|second| mixed.push(second * SECOND_NS, [Some(0.0), None, None, None]));
        (1..=100).for_each(|nth| mixed.push((100 + nth) * SECOND_NS / 10, [Some(1.0), None, None, None]));
        // The first reading counts for a nanosecond, which a single precision does not see.
        let points: Vec<_> =
            mixed.points().map(|(at, shares)| (at, shares.map(|share| share.map(|it| it as f32)))).collect();
        assert_eq!(points, [(20 * SECOND_NS, [Some(0.5), None, None, None])]);
        // Two of a point, of which the second one comes after more than it holds.
        let mut apart = ActivityMeans::new(2, usize::MAX, 40);
        [(0, 0.5), (10, 0.0), (20, 1.0), (900, 0.0)].iter().for_each(|(at, busy)| apart.push(*at, [Some(*busy); 4]));
        let second = apart.points().nth(1).expect("two points");
        assert_eq!(second, (900, [Some(0.2); 4]));
        let mean_of = |hold_ns| {
            let mut means = ActivityMeans::new(3, usize::MAX, hold_ns);
            [-2, -1, 0].iter().for_each(|at| means.push(*at, [None; 4]));
            [(40, 0.0), (50, 1.0), (900, 1.0)].iter().for_each(|(at, busy)| means.push(*at, [Some(*busy); 4]));
            means.points().nth(1).and_then(|(_, shares)| shares[0]).map(|share| (share * 1e4).round() / 1e4)
        };
        assert_eq!((mean_of(1_000), mean_of(40)), (Some(0.9556), Some(0.5556)));
    }
}
