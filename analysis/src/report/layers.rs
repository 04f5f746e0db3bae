//! The layer profiles of a recording: what each layer took in the last profiled step of each rank.
//!
//! Enters: profiles, record by record. Leaves: totals of all of their records, the layers with the most activations, and
//! records one by one as far as there is room. Invariant: what is left out one by one is counted, and is in the totals.

use super::room::Room;
use highwater_core::jobs::{self, Tallied, Tally, Totals};
use highwater_core::source::OpenError;
use highwater_core::wire::Layer;
use highwater_engine::recording::LayerRecord;
use highwater_engine::recording::rows::RecordingReader;
use std::collections::BTreeMap;

/// Different layers of all profiles of a file: a job may have 4,096.
pub const MOST_NAMES: usize = 1 << 13;
/// Maximum bytes of their names. While a page is built, each name is in memory several times.
pub const MOST_NAME_BYTES: usize = 1 << 18;
/// Layers that are listed of a profile.
const TOP: usize = 10;
/// Maximum number of layers listed of all profiles together; each profile lists at least one.
pub const MOST_TOP: usize = 1 << 10;

/// All profiles of a recording.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// The layers' names, which are positions elsewhere.
    pub names: Vec<String>,
    /// A profile of each rank.
    pub profiles: Vec<Profile>,
    by_name: BTreeMap<String, usize>,
    name_bytes: usize,
    room: usize,
    /// The most records of one profile that are listed.
    most: usize,
}

/// The layers of one rank in one step.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The job.
    pub job: String,
    /// The rank.
    pub rank: u32,
    /// The step.
    pub step: Option<u64>,
    /// Records that are missing: the daemon or this report had no room for them.
    pub missing: u64,
    /// Totals over all records, bytes.
    pub totals: Totals,
    /// The layers with the most activations, the largest first; their numbers are positions in [`Layers::names`].
    pub top: Vec<Tallied>,
    /// Records in the order in which the layers ran.
    pub records: Vec<Record>,
    /// Records that are not listed, for lack of room.
    pub left_out: u64,
    tally: Tally,
}

/// One layer in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Position in [`Layers::names`].
    pub name: usize,
    /// When it ended, nanoseconds.
    pub at_ns: i64,
    /// Counters of the job's allocator then, bytes.
    pub allocated: Option<u64>,
    /// See above.
    pub reserved: Option<u64>,
    /// What else is known of it.
    pub layer: Layer,
}

impl Layers {
    /// No profiles yet.
    #[must_use]
    pub fn new(room: Room) -> Self {
        Self { room: room.records, ..Self::default() }
    }

    /// Divides the room for records evenly among profiles. `counts` has each profile's number of records. Room that one
    /// profile does not need goes to the others.
    pub(super) fn divide(&mut self, counts: impl IntoIterator<Item = usize>) {
        let mut counts: Vec<usize> = counts.into_iter().collect();
        counts.sort_unstable();
        let (mut left, mut profiles) = (self.room, counts.len());
        self.most = usize::MAX;
        for count in counts {
            let share = left / profiles;
            if count > share {
                self.most = share;
                return;
            }
            (left, profiles) = (left - count, profiles - 1);
        }
    }

    /// Reads the profiles of a recording in our own format.
    pub(super) fn read(file: &mut RecordingReader, room: Room) -> Result<Self, OpenError> {
        let (mut layers, heads) = (Self::new(room), file.profiles()?);
        layers.divide(file.record_counts(&heads)?);
        let new = heads.iter().map(|head| Profile::new(head.job.clone(), head.rank, head.step, head.missing));
        let (mut profiles, mut last): (Vec<_>, _) = (new.collect(), None::<usize>);
        file.records(&heads, |position, record| {
            if let Some(whole) = last.replace(position).filter(|last| *last != position) {
                profiles[whole].finish();
            }
            layers.add(&mut profiles[position], record.as_ref());
        })?;
        if let Some(whole) = last {
            profiles[whole].finish();
        }
        layers.profiles = profiles;
        Ok(layers)
    }

    /// One profile of rank 0, of the records that `read` passes on.
    pub(super) fn of_one<E>(
        job: &str,
        room: Room,
        read: impl FnOnce(&mut dyn FnMut(&LayerRecord)) -> Result<(), E>,
    ) -> Result<Self, E> {
        let (mut layers, mut profile) = (Self::new(room), Profile::new(job.to_owned(), 0, None, 0));
        layers.most = layers.room;
        read(&mut |record| layers.add(&mut profile, Some(record)))?;
        profile.finish();
        layers.profiles.push(profile);
        Ok(layers)
    }

    /// Adds a rank's profile of a recording that was played.
    pub(super) fn played(&mut self, job: &str, rank: u32, of: &jobs::Profile) {
        let mut profile = Profile::new(job.to_owned(), rank, of.step, of.missing);
        for jobs::Record { name, at_ns, allocated, reserved, layer } in of.records() {
            let record = LayerRecord { name: name.to_string(), at_ns, allocated, reserved, layer };
            self.add(&mut profile, Some(&record));
        }
        profile.finish();
        self.profiles.push(profile);
    }

    /// Adds a record. `None` stands for a record beyond the bounds of the file. It counts as missing, as does the record of a
    /// layer beyond the bounds of this report.
    fn add(&mut self, profile: &mut Profile, record: Option<&LayerRecord>) {
        let Some((record, name)) = record.and_then(|record| Some((record, self.position_of(&record.name)?))) else {
            profile.missing = profile.missing.saturating_add(1);
            return;
        };
        let LayerRecord { at_ns, allocated, reserved, layer, .. } = *record;
        profile.tally.add(name, allocated, reserved, &layer);
        if profile.records.len() < self.most {
            profile.records.push(Record { name, at_ns, allocated, reserved, layer });
        } else {
            profile.left_out += 1;
        }
    }

    fn position_of(&mut self, name: &str) -> Option<usize> {
        if let Some(known) = self.by_name.get(name) {
            return Some(*known);
        }
        if self.names.len() >= MOST_NAMES || self.name_bytes + name.len() > MOST_NAME_BYTES {
            return None;
        }
        self.name_bytes += name.len();
        let position = self.names.len();
        self.names.push(name.to_owned());
        self.by_name.insert(name.to_owned(), position);
        Some(position)
    }

    /// How many layers of each profile a page lists.
    pub(super) fn top(&self) -> usize {
        (MOST_TOP / self.profiles.len().max(1)).clamp(1, TOP)
    }
}

impl Profile {
    /// The records of layers one by one: those of modules around others have the same again.
    pub(super) fn of_layers(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| !record.layer.is_around_others())
    }

    /// Makes the totals, once all records are there.
    fn finish(&mut self) {
        let (totals, top) = std::mem::take(&mut self.tally).finish(TOP);
        (self.totals, self.top) = (totals, top);
    }

    fn new(job: String, rank: u32, step: Option<u64>, missing: u64) -> Self {
        let (totals, top, records) = (Totals::default(), Vec::new(), Vec::new());
        Self { job, rank, step, missing, totals, top, records, left_out: 0, tally: Tally::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::wire::Direction;

    fn record(name: &str, direction: Direction, activations: Option<u64>) -> LayerRecord {
        let layer = Layer { activations, parameters: Some(10), gathered: Some(1), ..Layer::new(direction) };
        LayerRecord { name: name.to_owned(), at_ns: 5, allocated: Some(7), reserved: None, layer }
    }

    #[test]
    fn what_is_left_out_one_by_one_is_in_the_totals_and_no_profile_goes_without() {
        let mut layers = Layers::new(Room { records: 7, ..Room::of(1) });
        layers.divide([21, 21, 1]);
        for (rank, count) in [(0, 20), (1, 20), (2, 0)] {
            let mut profile = Profile::new("j".to_owned(), rank, Some(9), 4);
            for n in 0..count {
                let name = format!("layer {}", n % 15);
                layers.add(&mut profile, Some(&record(&name, Direction::Forward, Some(n))));
            }
            layers.add(&mut profile, Some(&record("layer 0", Direction::Backward, Some(1_000))));
            profile.finish();
            layers.profiles.push(profile);
        }
        let expected = Totals {
            layers: 15,
            activations: Some(190),
            parameters: Some(150),
            gathered: Some(21),
            allocated_max: Some(7),
            reserved_max: None,
        };
        let listed: Vec<_> = layers.profiles.iter().map(|profile| (profile.records.len(), profile.left_out)).collect();
        assert_eq!((listed, layers.names.len()), (vec![(3, 18), (3, 18), (1, 0)], 15));
        let large = &layers.profiles[..2];
        assert!(large.iter().all(|profile| profile.totals == expected && profile.top.len() == TOP));
        let top: Vec<_> = layers.profiles[1].top.iter().map(|top| (top.number, top.activations)).collect();
        assert_eq!(top[..3], [(4, 4 + 19), (3, 3 + 18), (2, 2 + 17)]);
    }

    #[test]
    fn names_are_bounded_and_records_without_one_are_missing() {
        let mut layers = Layers::new(Room::of(1));
        layers.divide([1 << 20]);
        let mut profile = Profile::new("j".to_owned(), 0, None, 0);
        let mut add = |name: &str| {
            layers.add(&mut profile, Some(&record(name, Direction::Forward, None)));
            (layers.names.len(), profile.missing, profile.records.len())
        };
        // As many names of 128 bytes as fit, then what is known already.
        let most = MOST_NAME_BYTES / 128;
        let last = (0..=most).map(|n| add(&format!("{n:0>128}"))).last();
        assert_eq!((last, add(&format!("{:0>128}", 0))), (Some((most, 1, most)), (most, 1, most + 1)));
        let (mut layers, mut profile) = (Layers::new(Room::of(1)), Profile::new("j".to_owned(), 0, None, 0));
        layers.add(&mut profile, None);
        (0..MOST_NAMES + 2)
            .for_each(|n| layers.add(&mut profile, Some(&record(&n.to_string(), Direction::Forward, None))));
        assert_eq!((layers.names.len(), profile.missing), (MOST_NAMES, 1 + 2));
    }

    #[test]
    fn a_page_lists_fewer_layers_of_each_of_many_profiles() {
        let mut layers = Layers::default();
        assert_eq!(layers.top(), TOP);
        for (count, top) in [(100, 10), (512, 2), (5_000, 1)] {
            layers.profiles.resize_with(count, || Profile::new("j".to_owned(), 0, None, 0));
            assert_eq!(layers.top(), top);
        }
    }
}
