//! Whether the driver's list of processes is to be read anew, because memory has grown since it was read.
//!
//! Enters: memory in use, and when the list is from. Leaves: an answer. The list is read seldom, as it changes seldom: a process that
//! fills a GPU between two lists, and fails there, would be in none, and nobody would know who held the memory.

use crate::clock::SECOND_NS;
use crate::ring;

/// Growth of less than this part of the usable memory does not count.
const PART: u64 = 16;
/// Growth is above the most of this time before the list, nanoseconds: the memory of a job whose steps rise and fall has been listed before.
const BEFORE_NS: i64 = 10 * SECOND_NS;

/// What was in use when the list was read.
#[derive(Debug, Clone, Default)]
pub(super) struct Rise {
    listed_ns: Option<i64>,
    listed_bytes: Option<u64>,
}

impl Rise {
    /// Whether a list of a time is out of date with this memory in use now. The memory at its time is looked up once.
    pub fn is_steep(&mut self, ring: &ring::Reader, listed_ns: i64, used_bytes: u64, usable_bytes: u64) -> bool {
        if self.listed_ns != Some(listed_ns) {
            self.listed_ns = Some(listed_ns);
            let from_ns = listed_ns.saturating_sub(BEFORE_NS).max(ring.oldest_ns().unwrap_or(i64::MIN));
            let before = ring.summary_through(from_ns, listed_ns).ok();
            // What the ring has no more counts as no growth.
            self.listed_bytes = Some(before.and_then(|summary| summary.max).unwrap_or(used_bytes));
        }
        let least_bytes = (usable_bytes / PART).max(1);
        self.listed_bytes.is_some_and(|listed| used_bytes.saturating_sub(listed) >= least_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::phases::hand;

    #[test]
    fn a_list_is_out_of_date_once_memory_has_grown_by_a_sixteenth_since_its_time() {
        let (mut writer, ring) = hand::ring();
        for (ms, bytes) in [(0, 100), (10, 500), (20, 900), (30, 300)] {
            writer.push(ms * MILLISECOND_NS, bytes).expect("in order");
        }
        let mut rise = Rise::default();
        let mut at = |listed_ms: i64, used: u64| rise.is_steep(&ring, listed_ms * MILLISECOND_NS, used, 1_600);
        assert_eq!([at(5, 150), at(5, 199), at(5, 200)], [false, false, true]);
        // The list that is read then is of its own time, and what falls is no growth.
        assert_eq!([at(20, 950), at(20, 300), at(20, 1_000)], [false, false, true]);
        // One that is read in a trough of steps that rise and fall is not out of date at their next top.
        assert_eq!([at(30, 900), at(30, 1_000)], [false, true]);
        assert!(!rise.is_steep(&ring, 30 * MILLISECOND_NS, 900, 0), "a GPU without usable memory");
    }

    #[test]
    fn what_was_in_use_at_an_unknown_time_counts_as_what_is_now() {
        let (mut writer, ring) = hand::ring();
        writer.push(MILLISECOND_NS, 100).expect("in order");
        let mut rise = Rise::default();
        assert!(!rise.is_steep(&ring, -5, 1_000, 1_600));
        assert!(rise.is_steep(&ring, -5, 1_100, 1_600));
    }
}
