//! The segments of a device over a history: which there were at a time.
//!
//! Enters: what was reserved and released, in order; at the end, the segments of the snapshot. Leaves: the segments at any failure
//! and at the last peak. Invariants: what is released without having been reserved was there from the begin; memory is bounded by
//! a number of segments, beyond which they are not known.

use super::layout::Area;
use super::values::{Entry, SegmentKind};
use std::collections::BTreeMap;

/// Maximum number of segments of a device.
const MOST_AREAS: usize = 1 << 17;

/// A segment, or a part of one, with the entry that reserved or released it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dated {
    area: Area,
    event: u64,
}

/// The segments of a trace so far.
#[derive(Debug, Default)]
pub(super) struct Areas {
    /// By their begin, with the entry that reserved them.
    live: BTreeMap<u64, Dated>,
    /// Those of the last peak that were released since.
    since_peak: Vec<Area>,
    /// Those that were released without having been reserved, with the entry that released them.
    before: Vec<Dated>,
    /// There were more than are kept, or one has no address.
    is_partial: bool,
}

impl Areas {
    /// A segment comes, or a part of one.
    pub fn reserve(&mut self, entry: &Entry, event: u64, is_expandable: bool) {
        match entry.address.filter(|_| self.live.len() < MOST_AREAS) {
            Some(begin) => {
                let area = Area::traced(begin, entry.size, entry.stream, is_expandable);
                self.live.insert(begin, Dated { area, event });
            }
            None => self.is_partial = true,
        }
    }

    /// A segment goes, or a part of one. `peak` is the entry of the last peak.
    pub fn release(&mut self, entry: &Entry, event: u64, is_expandable: bool, peak: u64) {
        let Some(begin) = entry.address else {
            self.is_partial = true;
            return;
        };
        let whole = Area::traced(begin, entry.size, entry.stream, is_expandable);
        let mut at = begin;
        for gone in self.take(begin, whole.end()) {
            self.keep_before(Area { begin: at, bytes: gone.area.begin.saturating_sub(at), ..whole }, event);
            at = gone.area.end();
            if gone.event <= peak {
                self.since_peak.push(gone.area);
            }
        }
        self.keep_before(Area { begin: at, bytes: whole.end().saturating_sub(at), ..whole }, event);
        if self.since_peak.len().max(self.live.len()) > 2 * MOST_AREAS {
            *self = Self { is_partial: true, ..Self::default() };
        }
    }

    fn keep_before(&mut self, area: Area, event: u64) {
        if self.before.len() >= MOST_AREAS {
            self.is_partial = true;
        } else if area.bytes > 0 {
            self.before.push(Dated { area, event });
        }
    }

    /// Removes what lies between two addresses, and returns it in order. What lies across one of them is cut.
    fn take(&mut self, begin: u64, end: u64) -> Vec<Dated> {
        let across = self.live.range(..begin).next_back().map(|(_, one)| *one).filter(|one| one.area.end() > begin);
        let first = across.map_or(begin, |one| one.area.begin);
        let hit: Vec<Dated> = self.live.range(first..end.max(first)).map(|(_, one)| *one).collect();
        let mut gone = Vec::with_capacity(hit.len());
        for one in hit {
            self.live.remove(&one.area.begin);
            for (from, to) in [(one.area.begin, begin), (end, one.area.end())] {
                if from < to {
                    let area = Area { begin: from, bytes: to - from, ..one.area };
                    self.live.insert(from, Dated { area, ..one });
                }
            }
            let (from, to) = (one.area.begin.max(begin), one.area.end().min(end));
            gone.push(Dated { area: Area { begin: from, bytes: to - from, ..one.area }, ..one });
        }
        gone
    }

    /// There is a new peak.
    pub fn peak(&mut self) {
        self.since_peak.clear();
    }

    /// Those now, without those from before the history; `None` if that is not known.
    pub fn now(&self) -> Option<Vec<Area>> {
        (!self.is_partial).then(|| self.live.values().map(|one| one.area).collect())
    }

    /// Those at the last peak, likewise.
    pub fn at_peak(&self, peak: u64) -> Option<Vec<Area>> {
        let live = self.live.values().filter(|one| one.event <= peak).map(|one| one.area);
        (!self.is_partial).then(|| live.chain(self.since_peak.iter().copied()).collect())
    }

    /// Adds those from before the history that were there after an entry: of the snapshot's, what the history did not reserve, and
    /// what it released later. For segments that existed until the end, the snapshot also has their kinds.
    pub fn complete(&self, areas: Vec<Area>, event: u64, at_end: &[Area]) -> Vec<Area> {
        let kinds: BTreeMap<u64, SegmentKind> = at_end.iter().map(|area| (area.begin, area.kind)).collect();
        let known = areas.into_iter().map(|area| {
            let is_it = self.live.contains_key(&area.begin);
            let kind = kinds.range(..=area.begin).next_back().filter(|_| is_it && area.kind.is_expandable);
            let kind = kind.map(|(_, kind)| *kind).or_else(|| kinds.get(&area.begin).copied().filter(|_| is_it));
            Area { kind: kind.unwrap_or(area.kind), ..area }
        });
        let later = self.before.iter().filter(|one| one.event > event).map(|one| one.area);
        let mut all: Vec<Area> = known.chain(later).collect();
        for area in at_end {
            let mut at = area.begin;
            let traced =
                self.live.range(..area.begin).next_back().into_iter().chain(self.live.range(area.begin..area.end()));
            for (_, one) in traced.filter(|(_, one)| one.area.end() > area.begin) {
                all.push(Area { begin: at, bytes: one.area.begin.saturating_sub(at), ..*area });
                at = at.max(one.area.end());
            }
            all.push(Area { begin: at, bytes: area.end().saturating_sub(at), ..*area });
        }
        all.retain(|area| area.bytes > 0);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(address: u64, size: u64) -> Entry {
        Entry { action: 0, address: Some(address), size, time_us: None, stack: 0, device_free: None, stream: Some(0) }
    }

    fn spans(mut areas: Vec<Area>) -> Vec<(u64, u64)> {
        areas.sort_unstable_by_key(|area| area.begin);
        areas.into_iter().map(|area| (area.begin, area.end())).collect()
    }

    fn area(begin: u64, bytes: u64) -> Area {
        Area::traced(begin, bytes, Some(0), true)
    }

    #[test]
    fn parts_of_segments_that_grow_come_and_go() {
        let mut areas = Areas::default();
        areas.reserve(&entry(100, 20), 1, true);
        areas.reserve(&entry(120, 20), 2, true);
        areas.reserve(&entry(140, 20), 4, true);
        // The peak was at entry 3. Half of the first goes, all of the second and half of the third.
        areas.release(&entry(110, 40), 5, true, 3);
        assert_eq!(spans(areas.now().expect("known")), [(100, 110), (150, 160)]);
        assert_eq!(spans(areas.at_peak(3).expect("known")), [(100, 110), (110, 120), (120, 140)]);
        areas.peak();
        assert_eq!(spans(areas.at_peak(5).expect("known")), [(100, 110), (150, 160)]);
    }

    #[test]
    fn those_from_before_the_history_are_there_until_they_go() {
        let mut areas = Areas::default();
        areas.reserve(&entry(200, 10), 2, true);
        let at_3 = areas.now().expect("known");
        // The snapshot has 190 to 220, of which the history reserved the middle; 100 to 140 went at entry 4, but for a hole.
        areas.reserve(&entry(120, 10), 3, true);
        areas.release(&entry(100, 40), 4, true, 0);
        let all = areas.complete(at_3, 3, &[area(190, 30)]);
        assert_eq!(spans(all), [(100, 120), (130, 140), (190, 200), (200, 210), (210, 220)]);
        let all = areas.complete(areas.now().expect("known"), 4, &[area(190, 30)]);
        assert_eq!(spans(all), [(190, 200), (200, 210), (210, 220)]);
    }

    #[test]
    fn a_hostile_history_is_not_known() {
        let mut areas = Areas::default();
        for nth in 0..=MOST_AREAS as u64 {
            areas.release(&entry(nth * 10, 5), nth, false, 0);
        }
        assert_eq!(areas.now(), None);
        let mut areas = Areas::default();
        areas.reserve(&Entry { address: None, ..entry(0, 5) }, 1, false);
        assert_eq!((areas.now(), areas.at_peak(0)), (None, None));
        let mut areas = Areas::default();
        areas.reserve(&entry(u64::MAX - 1, 100), 1, false);
        areas.release(&entry(u64::MAX - 1, 100), 2, false, 0);
        areas.release(&entry(5, u64::MAX), 3, false, 0);
        assert_eq!(areas.now(), Some(vec![]));
    }
}
