//! What a stretch of time held: the monoid that the tree is made of, and the answer that readers get.
//!
//! A [`Part`] describes one stretch; `a.then(&b)` describes `a` followed by `b`. It is associative, with
//! [`Part::NOTHING`] as its identity, so that any cutting of an interval into stretches gives the same answer.

/// A stretch of time, folded: what is kept per block and per node of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Time in which the value was known, nanoseconds.
    pub(super) known_ns: i64,
    /// Integral of the value over that time, byte-nanoseconds.
    pub(super) area: u128,
    /// Lowest value; above `max` where there was none.
    pub(super) min: u64,
    /// Highest value.
    pub(super) max: u64,
    /// Highest value from the first time that `min` was held.
    pub(super) max_after_min: u64,
    /// Largest fall, 0 where nothing fell.
    pub(super) fall: u64,
    /// Where that fall ended: of equally large ones, the first.
    pub(super) trough: u64,
    /// Highest value from that trough on.
    pub(super) max_after_trough: u64,
}

/// Words that a part takes in memory.
pub(super) const PART_WORDS: usize = 9;

impl Part {
    /// A stretch in which nothing was known.
    pub(super) const NOTHING: Self =
        Self { known_ns: 0, area: 0, min: u64::MAX, max: 0, max_after_min: 0, fall: 0, trough: 0, max_after_trough: 0 };

    /// Whether there was no value at all, not even one that was held for 0 ns.
    pub(super) fn is_nothing(&self) -> bool {
        self.min > self.max
    }

    /// Goes on with one value, held for a time that may be 0.
    #[inline]
    pub(super) fn hold(&mut self, used_bytes: u64, for_ns: i64) {
        self.known_ns += for_ns;
        self.area += u128::from(used_bytes) * u128::from(for_ns.unsigned_abs());
        let fall = self.max.saturating_sub(used_bytes);
        if fall > self.fall {
            (self.fall, self.trough, self.max_after_trough) = (fall, used_bytes, used_bytes);
        } else {
            self.max_after_trough = self.max_after_trough.max(used_bytes);
        }
        if used_bytes < self.min {
            (self.min, self.max_after_min) = (used_bytes, used_bytes);
        } else {
            self.max_after_min = self.max_after_min.max(used_bytes);
        }
        self.max = self.max.max(used_bytes);
    }

    /// This stretch followed by a later one.
    pub(super) fn then(&self, later: &Self) -> Self {
        if self.is_nothing() {
            return *later;
        }
        if later.is_nothing() {
            return *self;
        }
        let (min, max_after_min) = if later.min < self.min {
            (later.min, later.max_after_min)
        } else {
            (self.min, self.max_after_min.max(later.max))
        };
        let (fall, trough, max_after_trough) = self.deepest(later);
        Self {
            known_ns: self.known_ns + later.known_ns,
            area: self.area + later.area,
            min,
            max: self.max.max(later.max),
            max_after_min,
            fall,
            trough,
            max_after_trough,
        }
    }

    /// The largest fall of both and of the way from one into the other. Of equal ones the first trough counts: the
    /// earlier stretch's, then the one across (an equal fall inside the later stretch can only end after the later
    /// stretch's minimum), then the later one's.
    fn deepest(&self, later: &Self) -> (u64, u64, u64) {
        let mut deepest = (self.fall, self.trough, self.max_after_trough.max(later.max));
        for fall in [
            (self.max.saturating_sub(later.min), later.min, later.max_after_min),
            (later.fall, later.trough, later.max_after_trough),
        ] {
            if fall.0 > deepest.0 {
                deepest = fall;
            }
        }
        deepest
    }

    /// As words of the ring's memory.
    #[allow(clippy::cast_possible_truncation, reason = "the area is cut in two halves")]
    pub(super) fn to_words(self) -> [u64; PART_WORDS] {
        [
            self.known_ns.cast_unsigned(),
            self.area as u64,
            (self.area >> 64) as u64,
            self.min,
            self.max,
            self.max_after_min,
            self.fall,
            self.trough,
            self.max_after_trough,
        ]
    }

    /// From the words that [`Part::to_words`] made.
    pub(super) fn from_words(words: [u64; PART_WORDS]) -> Self {
        let [known, low, high, min, max, max_after_min, fall, trough, max_after_trough] = words;
        Self {
            known_ns: known.cast_signed(),
            area: u128::from(high) << 64 | u128::from(low),
            min,
            max,
            max_after_min,
            fall,
            trough,
            max_after_trough,
        }
    }
}

/// What one GPU's used memory did in an interval. The value held at its begin counts, and every change after its begin
/// and before its end. A change at the end counts only in [`Reader::summary_through`](super::Reader::summary_through).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Begin of the interval, nanoseconds.
    pub from_ns: i64,
    /// End of the interval, nanoseconds.
    pub to_ns: i64,
    /// Time of it in which the value was known, nanoseconds.
    pub known_ns: i64,
    /// Time of it in gaps, nanoseconds.
    pub gap_ns: i64,
    /// Value held at the begin, bytes; `None` in a gap.
    pub first: Option<u64>,
    /// Value held just before the end, bytes; `None` in a gap. Of an instant, and of `summary_through`, the value at
    /// it.
    pub last: Option<u64>,
    /// Lowest value, bytes; `None` where nothing was known.
    pub min: Option<u64>,
    /// Highest value, bytes; `None` where nothing was known.
    pub max: Option<u64>,
    /// Mean over the known time, bytes; of an instant its value; `None` where no time was known.
    pub mean: Option<f64>,
    /// Largest fall; `None` where the value never fell.
    pub drop: Option<Drop>,
}

/// The largest fall from a running maximum to a later minimum; of equally large ones the one that ended first. A
/// gap between the two does not part them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drop {
    /// How far the value fell, bytes.
    pub bytes: u64,
    /// The value that it fell to, bytes.
    pub trough_bytes: u64,
    /// How far it rose from there again at most within the interval, bytes.
    pub regrown_bytes: u64,
}

impl Summary {
    pub(super) fn new(from_ns: i64, to_ns: i64, part: &Part, first: Option<u64>, last: Option<u64>) -> Self {
        let known = |value: u64| (!part.is_nothing()).then_some(value);
        Self {
            from_ns,
            to_ns,
            known_ns: part.known_ns,
            gap_ns: to_ns - from_ns - part.known_ns,
            first,
            last,
            min: known(part.min),
            max: known(part.max),
            mean: mean(from_ns == to_ns, part, first),
            drop: (part.fall > 0).then(|| Drop {
                bytes: part.fall,
                trough_bytes: part.trough,
                regrown_bytes: part.max_after_trough - part.trough,
            }),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a mean is a measurement: 53 bits are more than enough")]
fn mean(instant: bool, part: &Part, first: Option<u64>) -> Option<f64> {
    if instant {
        return first.map(|used_bytes| used_bytes as f64);
    }
    (part.known_ns > 0).then(|| part.area as f64 / part.known_ns as f64)
}
