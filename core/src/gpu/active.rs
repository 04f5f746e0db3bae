//! How long a GPU's units worked in an interval, by the readings of the medium lane.
//!
//! Enters: readings as they come. Leaves: seconds of an interval. Each reading is about the time since the one before it, unlike
//! power, which holds until the next; the last one holds as well. Invariant: an interval costs at most twice [`EVERY`] readings
//! however long it is, because a job decides how long and how many its phases are.

use crate::clock::SECOND_NS;
use std::collections::VecDeque;

/// Readings from one total that is kept to the next.
const EVERY: usize = 64;

/// How long a GPU's units worked in an interval, seconds: means of 500 ms, times time. An interval that is not much longer
/// than that has the mean of what is around it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ActiveSeconds {
    /// Multiprocessors with a warp, their mean.
    pub sm: Option<f32>,
    /// Tensor cores.
    pub tensor: Option<f32>,
    /// Memory that transfers.
    pub dram: Option<f32>,
}

/// A reading: its time, and the shares of multiprocessors, tensor cores and memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct ActiveReading {
    pub at_ns: i64,
    pub shares: [Option<f64>; 3],
}

/// Sums over an interval.
#[derive(Debug, Clone, Copy, Default)]
struct Total {
    seconds: [f64; 3],
    /// Time of which a share is not known.
    unknown_ns: [i64; 3],
}

/// The totals up to every [`EVERY`]th reading.
#[derive(Debug, Default)]
pub(super) struct ActiveTotals {
    running: Total,
    readings: usize,
    kept: VecDeque<(i64, Total)>,
}

impl Total {
    /// Adds the part of the time from one reading to the next.
    #[allow(clippy::cast_precision_loss, reason = "at most the hold time")]
    fn add(&mut self, before_ns: i64, reading: &ActiveReading, part_ns: i64, hold_ns: i64) {
        let is_near = reading.at_ns - before_ns <= hold_ns;
        for (nth, share) in reading.shares.iter().enumerate() {
            match share.filter(|_| is_near) {
                Some(share) => self.seconds[nth] += share * part_ns as f64 / SECOND_NS as f64,
                None => self.unknown_ns[nth] += part_ns,
            }
        }
    }

    fn plus(mut self, other: Self) -> Self {
        for nth in 0..3 {
            self.seconds[nth] += other.seconds[nth];
            self.unknown_ns[nth] += other.unknown_ns[nth];
        }
        self
    }

    fn minus(mut self, other: Self) -> Self {
        for nth in 0..3 {
            self.seconds[nth] -= other.seconds[nth];
            self.unknown_ns[nth] -= other.unknown_ns[nth];
        }
        self
    }
}

impl ActiveTotals {
    /// Takes a reading; `before_ns` is the time of the one before it.
    pub fn push(&mut self, before_ns: Option<i64>, reading: &ActiveReading, hold_ns: i64) {
        if let Some(before_ns) = before_ns {
            self.running.add(before_ns, reading, reading.at_ns - before_ns, hold_ns);
        }
        self.readings += 1;
        if self.readings.is_multiple_of(EVERY) {
            self.kept.push_back((reading.at_ns, self.running));
        }
    }

    /// Forgets what lies before a time.
    pub fn forget(&mut self, before_ns: i64) {
        while self.kept.front().is_some_and(|(at_ns, _)| *at_ns < before_ns) {
            self.kept.pop_front();
        }
    }

    /// What the totals of this many readings take at most, bytes: a queue that grows may reserve twice what it needs.
    pub fn most_bytes(readings: usize) -> usize {
        2 * (readings / EVERY + 1) * size_of::<(i64, Total)>()
    }

    /// Bytes that the totals take.
    pub fn bytes(&self) -> usize {
        self.kept.len() * size_of::<(i64, Total)>()
    }

    /// How long the units worked in an interval. `after` returns the readings from a time on, the last one at or before it first;
    /// `None` if there is none so early.
    pub fn of<Readings: Iterator<Item = ActiveReading>>(
        &self,
        from_ns: i64,
        to_ns: i64,
        hold_ns: i64,
        after: impl Fn(i64) -> Option<Readings>,
    ) -> ActiveSeconds {
        let walk = |from_ns: i64, to_ns: i64| {
            let mut readings = after(from_ns)?;
            let (mut total, mut before) = (Total::default(), readings.next()?);
            for reading in readings {
                if before.at_ns >= to_ns {
                    break;
                }
                let part_ns = reading.at_ns.min(to_ns) - before.at_ns.max(from_ns);
                total.add(before.at_ns, &reading, part_ns, hold_ns);
                before = reading;
            }
            if before.at_ns < to_ns {
                let held = ActiveReading { at_ns: to_ns, ..before };
                total.add(before.at_ns, &held, to_ns - before.at_ns.max(from_ns), hold_ns);
            }
            Some(total)
        };
        let first = self.kept.partition_point(|(at_ns, _)| *at_ns < from_ns);
        let last = self.kept.partition_point(|(at_ns, _)| *at_ns <= to_ns).checked_sub(1);
        let between =
            last.filter(|last| first < *last).and_then(|last| Some((self.kept.get(first)?, self.kept.get(last)?)));
        let total = match between {
            None => walk(from_ns, to_ns),
            Some((first, last)) => walk(from_ns, first.0)
                .zip(walk(last.0, to_ns))
                .map(|(begin, end)| begin.plus(last.1.minus(first.1)).plus(end)),
        };
        let Some(total) = total else { return ActiveSeconds::default() };
        #[allow(clippy::cast_possible_truncation, reason = "seconds of a step")]
        let known = |nth: usize| (total.unknown_ns[nth] == 0).then_some(total.seconds[nth] as f32);
        ActiveSeconds { sm: known(0), tensor: known(1), dram: known(2) }
    }
}
