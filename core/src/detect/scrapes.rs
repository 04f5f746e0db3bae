//! Who reads the metrics and how often, so that a finding stays in them until everyone has read it.
//!
//! Enters: each reading of the metrics, with a name of its reader. Leaves: the longest interval at which somebody reads.
//! Invariants: at most [`MOST_READERS`] are kept, of names of bounded length; nobody can make a finding stay longer than
//! [`MOST_INTERVAL_NS`] allows.

use crate::clock::SECOND_NS;
use std::collections::BTreeMap;

/// The interval of a reader that has read once only.
const USUAL_NS: i64 = 60 * SECOND_NS;
/// The longest interval that counts: findings stay for three of them.
const MOST_INTERVAL_NS: i64 = 100 * SECOND_NS;
/// After this time without a reading a reader is gone.
const GONE_NS: i64 = 600 * SECOND_NS;
const MOST_READERS: usize = 64;
const MOST_NAME_BYTES: usize = 128;
/// The number of last intervals of a reader, of which the longest counts. Two readers with the same name, such as a pair of
/// Prometheus servers behind one address, look like one whose intervals alternate between short and long.
const INTERVALS: usize = 4;

/// The readers of the metrics.
#[derive(Debug, Default)]
pub(super) struct Scrapes(BTreeMap<String, Reader>);

#[derive(Debug, Default)]
struct Reader {
    last_ns: i64,
    intervals_ns: [Option<i64>; INTERVALS],
    next: usize,
}

impl Reader {
    /// `None` if it has read once only.
    fn interval_ns(&self) -> Option<i64> {
        self.intervals_ns.iter().flatten().max().copied()
    }
}

impl Scrapes {
    /// A reader reads now.
    pub(super) fn note(&mut self, name: &str, now_ns: i64) {
        let name: String = name.chars().take(MOST_NAME_BYTES / 4).collect();
        self.0.retain(|_, reader| now_ns - reader.last_ns < GONE_NS);
        if let Some(reader) = self.0.get_mut(&name) {
            reader.intervals_ns[reader.next] = Some(now_ns - reader.last_ns);
            reader.next = (reader.next + 1) % INTERVALS;
            reader.last_ns = now_ns;
            return;
        }
        if self.0.len() >= MOST_READERS {
            let oldest = self.0.iter().min_by_key(|(_, reader)| reader.last_ns).map(|(name, _)| name.clone());
            oldest.and_then(|name| self.0.remove(&name));
        }
        self.0.insert(name, Reader { last_ns: now_ns, ..Reader::default() });
    }

    /// The longest interval of any reader. A reader that has read only once counts with [`USUAL_NS`], which is also returned if
    /// there are no readers.
    pub(super) fn interval_ns(&self) -> i64 {
        let intervals_ns = self.0.values().map(|reader| reader.interval_ns().unwrap_or(USUAL_NS));
        intervals_ns.max().unwrap_or(USUAL_NS).min(MOST_INTERVAL_NS)
    }

    /// The longest interval of those that have read before; 0 if nobody has.
    pub(super) fn known_interval_ns(&self) -> i64 {
        self.0.values().filter_map(Reader::interval_ns).max().unwrap_or(0).min(MOST_INTERVAL_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_reader_counts_and_one_that_is_gone_does_not() {
        let mut scrapes = Scrapes::default();
        assert_eq!((scrapes.interval_ns(), scrapes.known_interval_ns()), (USUAL_NS, 0));
        (0..5).for_each(|nth| scrapes.note("fast", nth * 15 * SECOND_NS));
        assert_eq!(scrapes.interval_ns(), 15 * SECOND_NS);
        scrapes.note("slow", 70 * SECOND_NS);
        let intervals_ns = (scrapes.interval_ns(), scrapes.known_interval_ns());
        assert_eq!(intervals_ns, (USUAL_NS, 15 * SECOND_NS), "nothing is known of it yet");
        scrapes.note("slow", 160 * SECOND_NS);
        assert_eq!(scrapes.interval_ns(), 90 * SECOND_NS);
        scrapes.note("slow", 460 * SECOND_NS);
        assert_eq!(scrapes.interval_ns(), MOST_INTERVAL_NS, "bounded");
        for nth in 0..=80 {
            scrapes.note("fast", (461 + nth * 15) * SECOND_NS);
        }
        assert_eq!(scrapes.interval_ns(), 15 * SECOND_NS, "the slow one is gone");
    }

    #[test]
    fn two_readers_of_one_name_count_by_the_longer_wait() {
        let mut scrapes = Scrapes::default();
        for turn in 0..4 {
            scrapes.note("pair", turn * 60 * SECOND_NS);
            scrapes.note("pair", (turn * 60 + 5) * SECOND_NS);
        }
        assert_eq!(scrapes.interval_ns(), 55 * SECOND_NS);
    }

    #[test]
    fn any_number_of_readers_with_any_names_takes_bounded_memory() {
        let mut scrapes = Scrapes::default();
        (0..1000).for_each(|nth| scrapes.note(&format!("{nth}{}", "ü".repeat(10_000)), nth));
        assert_eq!(scrapes.0.len(), MOST_READERS);
        assert!(scrapes.0.keys().all(|name| name.len() <= MOST_NAME_BYTES));
    }
}
