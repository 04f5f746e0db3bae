//! What a GPU did over a recording: the shares of time of its readings, as means where there are too many readings.

use highwater_core::clock::SECOND_NS;

/// The most points of a GPU: more than a screen has columns.
const MOST_POINTS: usize = 1 << 12;
/// A reading is about at most this much of the time before it. A GPU on which nothing runs is read once a second.
const HOLD_NS: i64 = SECOND_NS * 3 / 2;

/// With a kernel, of multiprocessors with a warp, of tensor cores, of memory that transfers: shares of the time before a reading,
/// 0 to 1.
pub type Shares = [Option<f64>; 4];

/// The readings of a GPU, in order.
#[derive(Debug, Clone, Default)]
pub struct GpuActivity {
    points: Vec<Mean>,
    /// How many readings a point has, once it is full.
    readings_each: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    at_ns: i64,
    readings: u32,
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

impl GpuActivity {
    /// Adds a reading. What is no share is not known. If there are too many points, each two become one.
    pub fn push(&mut self, at_ns: i64, shares: Shares) {
        // The first one of all says how much it counts only if it is alone.
        let since_ns = self.points.last().map_or(1, |last| at_ns.saturating_sub(last.at_ns).clamp(1, HOLD_NS));
        #[allow(clippy::cast_precision_loss, reason = "at most HOLD_NS")]
        let own = since_ns as f64;
        let known = shares.map(|share| share.filter(|share| (0.0..=1.0).contains(share)));
        let reading = Mean {
            at_ns,
            readings: 1,
            sums: known.map(|share| share.unwrap_or(0.0) * own),
            times: known.map(|share| if share.is_some() { own } else { 0.0 }),
        };
        self.readings_each = self.readings_each.max(1);
        match self.points.last_mut() {
            Some(last) if last.readings < self.readings_each => last.add(&reading),
            _ => self.points.push(reading),
        }
        if self.points.len() > MOST_POINTS {
            self.readings_each *= 2;
            let pairs = self.points.chunks(2).map(|pair| {
                let mut one = pair[0];
                pair[1..].iter().for_each(|other| one.add(other));
                one
            });
            self.points = pairs.collect();
        }
    }

    /// The time of each point's newest reading, nanoseconds like the recording's, and its means.
    pub fn points(&self) -> impl ExactSizeIterator<Item = (i64, [Option<f32>; 4])> + '_ {
        self.points.iter().map(|point| {
            #[allow(clippy::cast_possible_truncation, reason = "a share")]
            let mean = |nth: usize| (point.times[nth] > 0.0).then(|| (point.sums[nth] / point.times[nth]) as f32);
            (point.at_ns, [mean(0), mean(1), mean(2), mean(3)])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_readings_are_kept_as_they_are_and_many_as_means_of_what_is_known() {
        let mut few = GpuActivity::default();
        few.push(5, [Some(0.5), None, Some(1.5), Some(f64::NAN)]);
        assert_eq!(few.points().collect::<Vec<_>>(), [(5, [Some(0.5), None, None, None])]);
        let mut many = GpuActivity::default();
        for nth in 0..3 * MOST_POINTS as i64 {
            let tensor = (nth % 4 < 2).then_some(0.25);
            many.push(nth * 100, [Some((nth % 2) as f64), None, tensor, None]);
        }
        let points: Vec<_> = many.points().collect();
        assert!(points.len() <= MOST_POINTS && points.len() > MOST_POINTS / 2, "{}", points.len());
        assert_eq!(points[1], (700, [Some(0.5), None, Some(0.25), None]));
        assert_eq!(points.last().expect("some").0, (3 * MOST_POINTS as i64 - 1) * 100);
    }

    #[test]
    fn a_reading_counts_for_the_time_since_the_one_before_it() {
        // Idle for ten seconds, read once a second; then busy for ten, read ten times a second.
        let mut mixed = GpuActivity { readings_each: 1 << 20, ..GpuActivity::default() };
        (0..=10).for_each(|second| mixed.push(second * SECOND_NS, [Some(0.0), None, None, None]));
        (1..=100).for_each(|nth| mixed.push((100 + nth) * SECOND_NS / 10, [Some(1.0), None, None, None]));
        let points: Vec<_> = mixed.points().collect();
        assert_eq!(points, [(20 * SECOND_NS, [Some(0.5), None, None, None])]);
    }
}
