//! What PyTorch's allocator had given out, from the `[memory]` events of `profile_memory=True`.
//!
//! Enters: the events of all GPUs. Leaves: the level of each GPU after each of them. Older versions of PyTorch write only what was
//! allocated or freed: then the level is a lower bound, which is 0 at its lowest, because what was there before and stayed is in no
//! event. Times are the host's: the allocator hands out memory before the GPU uses it.

use super::trace::{MemoryEvent, Trace};
use std::collections::BTreeMap;

/// The memory of a GPU over time, as its process's allocator saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    /// The GPU's number in its process.
    pub device: u32,
    /// Whether the events have no totals, so that what was there before and stayed is missing.
    pub is_lower_bound: bool,
    /// The level after each event, in order of time.
    pub levels: Vec<AllocatorLevel>,
}

/// A level that holds until the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocatorLevel {
    /// Since when, nanoseconds on the trace's clock.
    pub at_ns: i64,
    /// Bytes given to the program.
    pub allocated: u64,
    /// Bytes that the allocator held of the GPU, if that is known.
    pub reserved: Option<u64>,
}

/// The levels of each GPU of the trace.
#[must_use]
pub fn levels(trace: &Trace) -> Vec<Levels> {
    let mut by_device: BTreeMap<u32, Vec<&MemoryEvent>> = BTreeMap::new();
    for event in &trace.memory {
        by_device.entry(event.device).or_default().push(event);
    }
    let of = |(device, events): (u32, Vec<&MemoryEvent>)| {
        let totals: Option<Vec<u64>> = events.iter().map(|event| event.allocated).collect();
        let is_lower_bound = totals.is_none();
        let allocated = totals.unwrap_or_else(|| sums(&events));
        let level = |(event, allocated): (&&MemoryEvent, u64)| AllocatorLevel {
            at_ns: event.at_ns,
            allocated,
            reserved: event.reserved,
        };
        Levels { device, is_lower_bound, levels: events.iter().zip(allocated).map(level).collect() }
    };
    by_device.into_iter().map(of).collect()
}

/// The sum of what was allocated and not freed after each event, above its lowest.
fn sums(events: &[&MemoryEvent]) -> Vec<u64> {
    let mut sum = 0_i128;
    let sums: Vec<i128> = events
        .iter()
        .map(|event| {
            sum += i128::from(event.bytes);
            sum
        })
        .collect();
    let lowest = sums.iter().copied().min().unwrap_or(0).min(0);
    sums.into_iter().map(|sum| u64::try_from(sum - lowest).unwrap_or(u64::MAX)).collect()
}

impl Levels {
    /// The highest allocated and reserved level from `begin_ns` to `end_ns`, the one in force at the begin included; `None` if none
    /// is known.
    #[must_use]
    pub fn highest(&self, begin_ns: i64, end_ns: i64) -> (Option<u64>, Option<u64>) {
        let first = self.levels.partition_point(|level| level.at_ns <= begin_ns).saturating_sub(1);
        let within =
            || self.levels[first..].iter().take_while(|level| level.at_ns < end_ns.max(begin_ns.saturating_add(1)));
        (within().map(|level| level.allocated).max(), within().filter_map(|level| level.reserved).max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(events: &[(i64, i64, Option<u64>)]) -> Trace {
        let event = |(at_ns, bytes, allocated): &(i64, i64, Option<u64>)| MemoryEvent {
            at_ns: *at_ns,
            device: 0,
            bytes: *bytes,
            allocated: *allocated,
            reserved: allocated.map(|allocated| 2 * allocated),
        };
        Trace { memory: events.iter().map(event).collect(), ..Trace::default() }
    }

    #[test]
    fn totals_are_levels() {
        let of = &levels(&trace(&[(10, 5, Some(105)), (20, 70, Some(175)), (30, -75, Some(100))]))[0];
        assert!(!of.is_lower_bound);
        assert_eq!(of.highest(20, 30), (Some(175), Some(350)));
        assert_eq!(of.highest(25, 40), (Some(175), Some(350)), "it still holds");
        assert_eq!(of.highest(31, 40), (Some(100), Some(200)));
        assert_eq!(of.highest(0, 10), (None, None));
        assert_eq!(of.highest(10, 10), (Some(105), Some(210)));
    }

    #[test]
    fn without_totals_the_lowest_level_is_0() {
        let of = &levels(&trace(&[(10, 5, None), (20, -30, None), (30, 40, None)]))[0];
        let allocated: Vec<u64> = of.levels.iter().map(|level| level.allocated).collect();
        assert_eq!((of.is_lower_bound, allocated), (true, vec![30, 0, 40]));
        assert_eq!(of.highest(10, 20), (Some(30), None));
    }
}
