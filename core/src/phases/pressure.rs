//! Counters of the time that memory was nearly full. They are exact to the nanosecond, except that time which a ring
//! drops before it is counted is lost, as is time while the GPU's size is unknown.

use crate::ring;

/// A share of the usable memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// The value of the label `above`.
    pub label: &'static str,
    percent: u64,
}

/// The shares above which time is counted.
pub const THRESHOLDS: [Threshold; 4] = [
    Threshold { label: "0.90", percent: 90 },
    Threshold { label: "0.95", percent: 95 },
    Threshold { label: "0.97", percent: 97 },
    Threshold { label: "0.99", percent: 99 },
];

impl Threshold {
    /// This share of the bytes that jobs can have, rounded up.
    #[must_use]
    pub fn bytes_of(self, usable_bytes: u64) -> u64 {
        usable_bytes / 100 * self.percent + (usable_bytes % 100 * self.percent).div_ceil(100)
    }
}

/// Time at or above each threshold of one GPU since the start. Time in gaps does not count.
#[derive(Debug, Clone, Default)]
pub struct Pressure {
    counted_until_ns: Option<i64>,
    above_ns: [i64; THRESHOLDS.len()],
}

impl Pressure {
    /// Adds the time until `until_ns`, which the ring must have passed.
    pub fn advance(&mut self, ring: &ring::Reader, usable_bytes: u64, until_ns: i64) {
        let Some(oldest_ns) = ring.oldest_ns() else { return };
        let from_ns = self.counted_until_ns.unwrap_or(oldest_ns).max(oldest_ns);
        if from_ns >= until_ns {
            return;
        }
        let thresholds_bytes = THRESHOLDS.map(|threshold| threshold.bytes_of(usable_bytes));
        // Where the ring was overtaken meanwhile, the next turn begins at what it still has.
        if let Ok(above_ns) = ring.above_ns(from_ns, until_ns, thresholds_bytes) {
            for (total_ns, ns) in self.above_ns.iter_mut().zip(above_ns) {
                *total_ns += ns;
            }
            self.counted_until_ns = Some(until_ns);
        }
    }

    /// The same totals over a ring that begins anew.
    #[must_use]
    pub fn go_on(&self) -> Self {
        Self { counted_until_ns: None, above_ns: self.above_ns }
    }

    /// Nanoseconds above each of [`THRESHOLDS`].
    #[must_use]
    pub fn above_ns(&self) -> [i64; THRESHOLDS.len()] {
        self.above_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phases::hand;

    fn ring_of(readings: &[(i64, u64)]) -> (ring::Writer, ring::Reader) {
        let (mut writer, reader) = hand::ring();
        readings.iter().for_each(|(us, bytes)| writer.push(us * 1_000, *bytes).expect("in order"));
        (writer, reader)
    }

    #[test]
    fn a_share_is_exact_and_rounded_up() {
        let of = |usable| THRESHOLDS.map(|threshold| threshold.bytes_of(usable));
        assert_eq!((of(1_000), of(1_001), of(1)), ([900, 950, 970, 990], [901, 951, 971, 991], [1; 4]));
        assert_eq!(of(u64::MAX)[0], u64::MAX / 100 * 90 + 14, "it does not overflow");
    }

    #[test]
    fn time_near_full_adds_up_turn_by_turn_and_once() {
        let (mut writer, reader) = ring_of(&[(0, 500), (10, 950), (30, 990), (35, 100), (50, 100)]);
        let mut pressure = Pressure::default();
        for until_us in [20, 20, 15, 34, 50] {
            pressure.advance(&reader, 1_000, until_us * 1_000);
        }
        let whole = [25_000, 25_000, 5_000, 5_000];
        assert_eq!(pressure.above_ns(), whole);
        let mut again = Pressure::default();
        again.advance(&reader, 1_000, 50_000);
        assert_eq!(again.above_ns(), whole, "at once as in turns");
        writer.push(60_000, 100).expect("in order");
        pressure.advance(&reader, 1_000, 60_000);
        assert_eq!(pressure.above_ns(), whole);
        // Over a ring that begins anew it goes on, from that ring's begin.
        let (_other, other) = ring_of(&[(40, 999), (45, 999)]);
        let mut pressure = pressure.go_on();
        pressure.advance(&other, 1_000, 45_000);
        assert_eq!(pressure.above_ns(), whole.map(|ns| ns + 5_000));
        let (_none, empty) = ring_of(&[]);
        pressure.advance(&empty, 1_000, 90_000);
        assert_eq!(pressure.above_ns(), whole.map(|ns| ns + 5_000));
    }
}
