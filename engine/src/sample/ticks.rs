//! The beginnings and ends of the last sweeps, so that a recording can contain every single reading: the rings keep
//! only changes.
//!
//! Enters: each sweep, from the one thread that samples. Leaves: the sweeps of an interval, for any number of readers.
//! Invariants: recording a sweep is four stores, without a lock or an allocation; a reader never makes the writer
//! wait, and drops sweeps that were overwritten while it read. Absent on purpose: memory, which the rings have.

use super::prefetch::prefetch;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// One sweep over all GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sweep {
    /// When it began, nanoseconds of the timeline.
    pub begin_ns: i64,
    /// When its last GPU had answered, nanoseconds of the timeline.
    pub end_ns: i64,
    /// The GPUs that were not due in it, as they are idle: bit n for position n.
    pub skipped: u64,
}

/// Number of GPUs that can be idle or aside: one bit each in a `u64`. A GPU at a higher position is read in every
/// sweep.
pub(super) const MOST_SKIPPED: usize = u64::BITS as usize;

impl Sweep {
    /// Records that the GPU at this position was not due.
    pub(super) fn skip(&mut self, position: usize) {
        self.skipped |= 1 << position;
    }

    /// Whether the GPU at this position was due.
    #[must_use]
    pub fn has(&self, position: usize) -> bool {
        position >= MOST_SKIPPED || self.skipped >> position & 1 == 0
    }
}

/// The last sweeps, or turns of the detectors, which begin and end at once. One thread writes, any number read.
#[derive(Debug)]
pub struct TickLog {
    begins_ns: Box<[AtomicI64]>,
    /// How long each took, nanoseconds, capped at 4.29 s.
    lengths_ns: Box<[AtomicU32]>,
    skipped: Box<[AtomicU64]>,
    /// Sweeps recorded so far, which gives the slot of the next one.
    head: AtomicU64,
}

impl TickLog {
    /// A log of the last `sweeps` sweeps, 20 bytes each. With 0 it keeps none.
    #[must_use]
    pub fn new(sweeps: usize) -> Self {
        Self {
            begins_ns: (0..sweeps).map(|_| AtomicI64::new(0)).collect(),
            lengths_ns: (0..sweeps).map(|_| AtomicU32::new(0)).collect(),
            skipped: (0..sweeps).map(|_| AtomicU64::new(0)).collect(),
            head: AtomicU64::new(0),
        }
    }

    /// Bytes that it takes, used or not.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.begins_ns.len() * (size_of::<AtomicI64>() + size_of::<AtomicU32>() + size_of::<AtomicU64>())
    }

    /// Records a sweep. Only one thread at a time may call this: the sampling thread, or the join's.
    pub(super) fn note(&self, sweep: Sweep) {
        let head = self.head.load(Ordering::Relaxed);
        let Some(place) = self.place(head) else { return };
        let length_ns = u32::try_from(sweep.end_ns.saturating_sub(sweep.begin_ns).max(0)).unwrap_or(u32::MAX);
        // Each with release ordering, so that a reader that sees one of these values also sees the head of the previous
        // sweep.
        self.begins_ns[place].store(sweep.begin_ns, Ordering::Release);
        self.lengths_ns[place].store(length_ns, Ordering::Release);
        self.skipped[place].store(sweep.skipped, Ordering::Release);
        self.head.store(head + 1, Ordering::Release);
    }

    /// Asks for the memory of the next sweep.
    pub(super) fn prefetch(&self) {
        let Some(place) = self.place(self.head.load(Ordering::Relaxed)) else { return };
        prefetch(&self.begins_ns[place]);
        prefetch(&self.lengths_ns[place]);
        prefetch(&self.skipped[place]);
    }

    /// Sweeps recorded so far: the number of the next one.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// The kept sweeps from number `from` on, in order, and the number after the last of them.
    #[must_use]
    pub fn since(&self, from: u64) -> (Vec<Sweep>, u64) {
        let head = self.count();
        let first = from.max(head.saturating_sub(self.begins_ns.len() as u64)).min(head);
        let read = |number| {
            let place = self.place(number)?;
            let begin_ns = self.begins_ns[place].load(Ordering::Acquire);
            let length_ns = self.lengths_ns[place].load(Ordering::Acquire);
            let skipped = self.skipped[place].load(Ordering::Acquire);
            Some(Sweep { begin_ns, end_ns: begin_ns.saturating_add(length_ns.into()), skipped })
        };
        let mut sweeps: Vec<Sweep> = (first..head).filter_map(read).collect();
        // The writer may have wrapped around meanwhile, and may be writing the slot of the next sweep.
        let oldest = (self.count() + 1).saturating_sub(self.begins_ns.len() as u64);
        let overwritten = usize::try_from(oldest.saturating_sub(first)).unwrap_or(usize::MAX);
        sweeps.drain(..overwritten.min(sweeps.len()));
        (sweeps, head)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below a usize")]
    fn place(&self, number: u64) -> Option<usize> {
        number.checked_rem(self.begins_ns.len() as u64).map(|place| place as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn the_last_sweeps_are_kept_in_order() {
        let log = TickLog::new(4);
        for n in 0..6 {
            log.note(Sweep { begin_ns: n * 10, end_ns: n * 10 + 3, skipped: 0 });
        }
        let (sweeps, next) = log.since(0);
        // One slot is always given up, because the next sweep may be being written there.
        let begins: Vec<_> = sweeps.iter().map(|sweep| sweep.begin_ns).collect();
        assert_eq!((begins, next), (vec![30, 40, 50], 6));
        assert_eq!(sweeps[0].end_ns, 33);
        assert_eq!(log.since(5).0.len(), 1);
        assert_eq!(log.since(6), (vec![], 6));
        assert_eq!(log.since(9), (vec![], 6), "a number not reached yet");
    }

    #[test]
    fn a_log_of_nothing_keeps_nothing() {
        let log = TickLog::new(0);
        log.note(Sweep { begin_ns: 1, end_ns: 2, skipped: 0 });
        assert_eq!(log.since(0), (vec![], 0));
    }

    /// Whatever a reader gets while the writer wraps around is a recorded sweep, and sweeps are in order.
    #[test]
    fn a_reader_sees_no_torn_sweep() {
        let (log, stop) = (TickLog::new(64), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..400_000_i64 {
                    let skipped = n.unsigned_abs();
                    log.note(Sweep { begin_ns: n * 1_000, end_ns: n * 1_000 + n % 1_000, skipped });
                }
                stop.store(true, Ordering::Release);
            });
            while !stop.load(Ordering::Acquire) {
                let (sweeps, _) = log.since(0);
                for pair in sweeps.windows(2) {
                    assert_eq!(pair[1].begin_ns - pair[0].begin_ns, 1_000);
                }
                for sweep in sweeps {
                    assert_eq!(sweep.end_ns - sweep.begin_ns, sweep.begin_ns / 1_000 % 1_000);
                    assert_eq!(sweep.skipped, (sweep.begin_ns / 1_000).unsigned_abs());
                }
            }
        });
    }
}
