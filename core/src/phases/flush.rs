//! Detects cache flushes of an allocator from outside: memory falls, and grows again at once.
//!
//! A framework's allocator that cannot get memory frees every cached block and tries again, so `used` falls by
//! hundreds of MiB or more and regrows within tens of milliseconds. One fall counts once, when enough has come back:
//! half of it, or, on a nearly full GPU, as much as had been free, if that is less. The allocator flushed because its
//! request exceeded what was free, so at least that much comes back. Half would miss most: of ten flushes on an H200
//! only three had regrown by half within 100 ms. A program that frees memory to keep it free takes none of it back. Seen from outside this is a sign, not a proof: a checkpoint that frees and refills
//! looks alike.

use crate::clock::MILLISECOND_NS;

/// The smallest fall, bytes.
const MIN_DROP_BYTES: u64 = 256 << 20;
/// A GPU is nearly full if less than one in this many bytes of the usable memory is free.
const NEARLY_FULL_PART: u64 = 32;
/// The least that must come back on a nearly full GPU, bytes: the smallest segment that PyTorch's allocator takes.
const MIN_REGROWN_BYTES: u64 = 2 << 20;
/// The smallest fall as a part of the usable memory, unless the GPU is nearly full: one in this many.
const MIN_DROP_PART: u64 = 100;
/// A fall must reach its minimum size within this time after the high, nanoseconds: a flush frees as fast as the driver can.
const FALL_NS: i64 = 500 * MILLISECOND_NS;
/// Enough of the fall must have come back this soon after the low, nanoseconds: on an H200 an allocator that flushed had
/// it back within 23 ms, and all within 90. What frees between two steps takes longer.
const REGROW_NS: i64 = 100 * MILLISECOND_NS;

/// One fall and regrowth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flush {
    /// When memory was at its low, nanoseconds of the timeline. If a gap hides the low, the begin of the gap.
    pub trough_ns: i64,
    /// When enough of the fall had come back.
    pub regrown_ns: i64,
    /// How much had come back then, bytes.
    pub regrown_bytes: u64,
    /// In use when it began to fall, bytes.
    pub high_bytes: u64,
    /// How far it fell, bytes.
    pub drop_bytes: u64,
}

/// Finds flushes in the change points of one GPU, fed in order of time.
#[derive(Debug, Clone, Default)]
pub struct FlushDetector {
    /// The high that a fall is measured from, and when memory last was there.
    high: Option<(i64, u64)>,
    /// The low of the current fall.
    low: Option<(i64, u64)>,
    last: Option<(i64, u64)>,
    gap_since_ns: Option<i64>,
}

impl FlushDetector {
    /// Takes the next change point; a `used_bytes` of `None` is the begin of a gap. Returns a flush when enough has
    /// come back.
    pub fn push(&mut self, at_ns: i64, used_bytes: Option<u64>, usable_bytes: Option<u64>) -> Option<Flush> {
        let Some(used_bytes) = used_bytes else {
            self.gap_since_ns.get_or_insert(at_ns);
            return None;
        };
        // While memory is mapped, the driver may not answer, so a short gap may hide a flush. Over a longer gap, nothing is
        // concluded.
        let gap_since_ns = self.gap_since_ns.take();
        if gap_since_ns.is_some_and(|since_ns| at_ns - since_ns > REGROW_NS) {
            *self = Self::default();
        }
        // A fall within a gap is timed at the gap's begin. If it were timed at the end, an ordinary release within the gap would
        // seem to regrow at once.
        let fell_ns = gap_since_ns.unwrap_or(at_ns);
        // The value held until this change: the high lasts until memory leaves it.
        let held_until = self.last.map(|(_, used_bytes)| (at_ns, used_bytes));
        self.last = Some((at_ns, used_bytes));
        let high_bytes = match (self.high, held_until) {
            (Some(high), Some(held)) if held.1 >= high.1 || (self.low.is_none() && at_ns - high.0 > FALL_NS) => {
                self.high.insert(held).1
            }
            (Some(high), _) => high.1,
            (None, held) => self.high.insert(held.unwrap_or((at_ns, used_bytes))).1,
        };
        if used_bytes >= high_bytes && self.low.is_none() {
            self.high = Some((at_ns, used_bytes));
            return None;
        }
        match self.low {
            None => self.start_fall(fell_ns, used_bytes, high_bytes, usable_bytes),
            Some((_, low_bytes)) if used_bytes < low_bytes => self.low = Some((fell_ns, used_bytes)),
            Some((low_ns, _)) if at_ns - low_ns > REGROW_NS => self.restart(at_ns, used_bytes),
            Some((low_ns, low_bytes)) => {
                let (drop_bytes, regrown_bytes) = (high_bytes - low_bytes, used_bytes - low_bytes);
                let short = free_if_short(high_bytes, drop_bytes, usable_bytes);
                let enough_bytes = short.map_or(drop_bytes.div_ceil(2), |free| free.max(MIN_REGROWN_BYTES));
                if regrown_bytes >= enough_bytes.min(drop_bytes.div_ceil(2)) {
                    self.restart(at_ns, used_bytes);
                    return Some(Flush { trough_ns: low_ns, regrown_ns: at_ns, regrown_bytes, high_bytes, drop_bytes });
                }
            }
        }
        None
    }

    fn start_fall(&mut self, fell_ns: i64, used_bytes: u64, high_bytes: u64, usable_bytes: Option<u64>) {
        let drop_bytes = high_bytes - used_bytes;
        let is_short = free_if_short(high_bytes, drop_bytes, usable_bytes).is_some();
        let part = if is_short { 0 } else { usable_bytes.unwrap_or(0) / MIN_DROP_PART };
        if drop_bytes >= MIN_DROP_BYTES.max(part) {
            self.low = Some((fell_ns, used_bytes));
        }
    }

    fn restart(&mut self, at_ns: i64, used_bytes: u64) {
        self.high = Some((at_ns, used_bytes));
        self.low = None;
    }
}

/// What was free before a fall, bytes, if the GPU was nearly full, and the fall freed more.
fn free_if_short(high_bytes: u64, drop_bytes: u64, usable_bytes: Option<u64>) -> Option<u64> {
    let free_bytes = usable_bytes?.saturating_sub(high_bytes);
    (free_bytes < drop_bytes.min(usable_bytes? / NEARLY_FULL_PART)).then_some(free_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn on_a_full_gpu_as_much_must_come_back_as_was_free() {
        // Of 140 GiB half a GiB was free.
        assert_eq!(falls(&[(0, 139.5), (1000, 130.0), (1040, 130.4)]), [0.0; 0], "the allocator asked for more");
        assert_eq!(falls(&[(0, 139.5), (1000, 130.0), (1040, 130.6)]), [9.5]);
        assert_eq!(falls(&[(0, 139.5), (1000, 130.0), (1101, 130.6)]), [0.0; 0], "too late");
        assert_eq!(falls(&[(0, 139.5), (1000, 60.0), (5000, 139.0)]), [0.0; 0], "freed to stay free");
        assert_eq!(falls(&[(0, 139.8), (1000, 139.2), (1010, 139.5)]).len(), 1, "less than a hundredth of its memory");
        assert_eq!(falls(&[(0, 137.0), (1000, 134.5), (1010, 135.0)]), [0.0; 0], "three were free");
        assert_eq!(falls(&[(0, 135.0), (1000, 100.0), (1010, 110.0)]), [0.0; 0], "it was not nearly full");
    }

    /// Runs a curve of (milliseconds, GiB; a negative value is a gap) and returns the falls, GiB.
    fn falls(curve: &[(i64, f64)]) -> Vec<f64> {
        let mut detector = FlushDetector::default();
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        curve
            .iter()
            .filter_map(|(ms, gib)| {
                let used = (*gib >= 0.0).then_some((gib * GIB as f64) as u64);
                detector.push(ms * MILLISECOND_NS, used, Some(140 * GIB))
            })
            .map(|flush| flush.drop_bytes as f64 / GIB as f64)
            .collect()
    }

    #[test]
    fn a_fall_that_regrows_is_one_flush() {
        assert_eq!(falls(&[(0, 130.0), (1000, 126.0), (1010, 120.0), (1030, 124.0), (1060, 129.0)]), [10.0]);
    }

    #[test]
    fn two_falls_are_two() {
        let curve = [(0, 130.0), (1000, 120.0), (1060, 129.0), (1200, 121.0), (1260, 128.0), (1300, 129.0)];
        assert_eq!(falls(&curve), [10.0, 8.0]);
    }

    #[test]
    fn a_dip_that_was_too_small_hides_no_later_fall() {
        for fall_ms in [590, 601, 700] {
            let curve = [(0, 130.0), (100, 129.5), (fall_ms, 120.0), (fall_ms + 30, 129.0)];
            assert_eq!(falls(&curve).len(), 1, "at {fall_ms} ms");
        }
    }

    #[test]
    fn a_fall_that_stays_down_is_none() {
        assert_eq!(falls(&[(0, 130.0), (1000, 20.0), (4000, 125.0)]), [0.0; 0], "a job that ended, another began");
    }

    #[test]
    fn a_regrowth_as_slow_as_a_step_is_none() {
        assert_eq!(falls(&[(0, 130.0), (1000, 60.0), (1090, 80.0), (1150, 110.0)]), [0.0; 0]);
    }

    #[test]
    fn a_small_or_a_slow_fall_is_none() {
        assert_eq!(falls(&[(0, 130.0), (1000, 129.0), (1010, 130.0)]), [0.0; 0]);
        let slow: Vec<_> = (0..20).map(|n| (n * 600, 130.0 - n as f64)).chain([(12_000, 130.0)]).collect();
        assert_eq!(falls(&slow), [0.0; 0]);
    }

    #[test]
    fn a_short_gap_hides_no_flush_and_over_a_long_one_nothing_is_concluded() {
        assert_eq!(falls(&[(0, 130.0), (1000, 120.0), (1010, -1.0), (1060, 129.0)]), [10.0]);
        assert_eq!(falls(&[(0, 130.0), (1000, 120.0), (1010, -1.0), (1300, 129.0)]), [0.0; 0]);
    }

    /// A healthy job releases 60 GiB at a step's end and takes them again over 150 ms, and nobody answers while it does.
    #[test]
    fn a_release_that_a_gap_hides_is_no_flush() {
        let release = |gap_ms: i64| {
            let curve = [(0, 130.0), (1000, 130.0), (1000, -1.0), (1000 + gap_ms, 70.0), (1120, 100.0), (1150, 130.0)];
            falls(&curve)
        };
        for gap_ms in [1, 20, 60, 92] {
            assert_eq!(release(gap_ms), [0.0; 0], "{gap_ms} ms");
        }
        // One that has regrown so soon after the gap's begin is a flush whenever it fell.
        assert_eq!(falls(&[(0, 130.0), (1000, -1.0), (1060, 120.0), (1095, 129.0)]), [10.0]);
        // The same of what falls further in the gap.
        assert_eq!(falls(&[(0, 130.0), (1000, 125.0), (1001, -1.0), (1090, 70.0), (1102, 110.0)]), [0.0; 0]);
    }

    /// Feeds changes of (nanoseconds, bytes) of a GPU of this size and returns what was found.
    fn flushes(usable_bytes: Option<u64>, changes: &[(i64, u64)]) -> Vec<Flush> {
        let mut detector = FlushDetector::default();
        changes.iter().filter_map(|(at_ns, bytes)| detector.push(*at_ns, Some(*bytes), usable_bytes)).collect()
    }

    #[test]
    fn a_flush_has_its_high_its_fall_and_its_times() {
        let found = flushes(
            None,
            &[(0, 3 * GIB), (50, 5 * GIB), (60, 4 * GIB), (70, 2 * GIB), (90, 3 * GIB), (95, 7 * GIB / 2)],
        );
        let regrown_bytes = 3 * GIB / 2;
        let expected = Flush { trough_ns: 70, regrown_ns: 95, regrown_bytes, high_bytes: 5 * GIB, drop_bytes: 3 * GIB };
        assert_eq!(found, [expected], "half of three");
    }

    #[test]
    fn a_fall_counts_from_its_smallest_size_on() {
        let falls = |usable, bytes| flushes(usable, &[(0, 90 * GIB), (10, 90 * GIB - bytes), (20, 90 * GIB)]).len();
        assert_eq!((falls(None, GIB / 4), falls(None, GIB / 4 - 1)), (1, 0));
        let usable = Some(140 * GIB);
        let part = 140 * GIB / 100;
        assert_eq!((falls(usable, part), falls(usable, part - 1)), (1, 0));
        assert_eq!(falls(Some(GIB), GIB / 4 - 1), 0);
    }

    #[test]
    fn it_regrows_by_half_within_its_time() {
        let regrows = |at_ns, bytes| flushes(None, &[(0, 9 * GIB), (10, 5 * GIB), (at_ns, bytes)]).len();
        assert_eq!((regrows(20, 7 * GIB), regrows(20, 7 * GIB - 1)), (1, 0));
        assert_eq!((regrows(10 + 100 * MILLISECOND_NS, 7 * GIB), regrows(11 + 100 * MILLISECOND_NS, 7 * GIB)), (1, 0));
    }

    #[test]
    fn a_high_is_forgotten_after_the_time_that_a_fall_takes() {
        // It leaves its high by a little, and falls later: from the high, or from where it was.
        let dropped = |fall_ns| {
            let found = flushes(None, &[(0, 9 * GIB), (100, 9 * GIB - 1), (fall_ns, 5 * GIB), (fall_ns + 1, 9 * GIB)]);
            found.first().map(|flush| flush.high_bytes)
        };
        assert_eq!(
            (dropped(100 + 500 * MILLISECOND_NS), dropped(101 + 500 * MILLISECOND_NS)),
            (Some(9 * GIB), Some(9 * GIB - 1))
        );
    }

    #[test]
    fn gaps_hide_what_is_within_their_bounds() {
        let across = |gap_ns: i64| {
            let mut detector = FlushDetector::default();
            let readings =
                [(0, Some(9 * GIB)), (10, Some(5 * GIB)), (11, None), (11, None), (11 + gap_ns, Some(9 * GIB))];
            readings.into_iter().filter_map(|(at_ns, bytes)| detector.push(at_ns, bytes, None)).count()
        };
        assert_eq!((across(100 * MILLISECOND_NS - 1), across(100 * MILLISECOND_NS)), (1, 0), "its low was at 10");
        let mut detector = FlushDetector::default();
        let after = |detector: &mut FlushDetector, gap_ns: i64| {
            *detector = FlushDetector::default();
            detector.push(0, Some(9 * GIB), None);
            detector.push(10, None, None);
            detector.push(10 + gap_ns, Some(5 * GIB), None);
            detector.push(11 + gap_ns, Some(9 * GIB), None).is_some()
        };
        assert!(
            !after(&mut detector, 100 * MILLISECOND_NS)
                && !after(&mut detector, 100 * MILLISECOND_NS + 1)
                && after(&mut detector, 100 * MILLISECOND_NS - 1)
        );
    }

    #[test]
    fn what_was_before_a_long_gap_is_forgotten() {
        // A tenth of a second long, a gap hides a fall from 9 to 8 GiB; longer, 8 GiB is the high that comes next.
        let across = |gap_ns: i64| {
            let mut detector = FlushDetector::default();
            let end_ns = 10 + gap_ns;
            let tenths = |tenths: u64| Some(tenths * GIB / 10);
            let readings =
                [(0, tenths(90)), (10, None), (end_ns, tenths(80)), (end_ns + 5, tenths(50)), (end_ns + 9, tenths(66))];
            readings.into_iter().filter_map(|(at_ns, bytes)| detector.push(at_ns, bytes, None)).count()
        };
        assert_eq!((across(100 * MILLISECOND_NS), across(100 * MILLISECOND_NS + 1)), (0, 1));
    }

    #[test]
    fn a_low_counts_from_when_it_was_first_reached() {
        let ms = MILLISECOND_NS;
        let found = flushes(None, &[(0, 9 * GIB), (10 * ms, 5 * GIB), (70 * ms, 5 * GIB), (130 * ms, 9 * GIB)]);
        assert_eq!(found, []);
    }
}
