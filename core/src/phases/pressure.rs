//! Time spent near full, exact over any range because it only ever adds up.

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

/// Time above each threshold of one GPU since the start. A gap counts for none.
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
