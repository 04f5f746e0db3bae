//! The layer profiles of a recording: what each layer took in the last profiled step of each rank.
//!
//! Enters: profiles, record by record. Leaves: totals of all of their records, the layers with the most activations, and
//! records one by one as far as there is room. Invariant: what is left out one by one is counted, and is in the totals.

use super::Room;
use crate::recording::LayerRecord;
use crate::recording::rows::File;
use crate::recording::{refuse, short};
use crate::source::OpenError;
use highwater_core::jobs::{self, Totals};
use highwater_core::wire::{Direction, Layer};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Different layers of all profiles of a file: a job may have 4,096.
const MOST_NAMES: usize = 1 << 14;
/// The most characters that are kept of a name.
const LONGEST_NAME: usize = 200;
/// Layers that are listed.
const TOP: usize = 10;

/// All profiles of a recording.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// The layers' names, which are positions elsewhere.
    pub names: Vec<String>,
    /// A profile of each rank.
    pub profiles: Vec<Profile>,
    by_name: BTreeMap<String, usize>,
    left: usize,
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
    /// Records that the daemon had no room for.
    pub missing: u64,
    /// What all records are together, bytes.
    pub totals: Totals,
    /// The layers with the most activations, the largest first.
    pub top: Vec<Top>,
    /// Records in the order in which the layers ran.
    pub records: Vec<Record>,
    /// Records that are not listed, for lack of room.
    pub left_out: u64,
    each: BTreeMap<usize, Sums>,
}

/// A layer with many activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Top {
    /// Position in [`Layers::names`].
    pub name: usize,
    /// Its activations, bytes.
    pub activations: u64,
    /// Its parameters, bytes.
    pub parameters: Option<u64>,
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

/// One layer over all its records.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    activations: Option<u64>,
    parameters: Option<u64>,
}

impl Layers {
    /// No profiles yet.
    #[must_use]
    pub fn new(room: Room) -> Self {
        Self { left: room.records, ..Self::default() }
    }

    /// Reads the profiles of a recording in our own format.
    pub(super) fn read(file: &mut File, room: Room) -> Result<Self, OpenError> {
        let (mut layers, path) = (Self::new(room), file.path().to_owned());
        for head in file.profiles()? {
            let mut profile = Profile::new(short(&head.job, LONGEST_NAME), head.rank, head.step, head.missing);
            file.records(&head, |record| {
                layers.add(&mut profile, &record).ok_or_else(|| {
                    refuse("recording_too_large", &path, format!("has more than {MOST_NAMES} different layers"))
                })
            })?;
            layers.finish(profile);
        }
        Ok(layers)
    }

    /// Adds a rank's profile of a recording that was played.
    pub(super) fn played(&mut self, job: &str, rank: u32, of: &jobs::Profile) {
        let mut profile = Profile::new(job.to_owned(), rank, of.step, of.missing);
        for jobs::Record { name, at_ns, allocated, reserved, layer } in of.records() {
            let record = LayerRecord { name: name.to_string(), at_ns, allocated, reserved, layer };
            if self.add(&mut profile, &record).is_none() {
                profile.missing += 1;
            }
        }
        self.finish(profile);
    }

    /// Adds a record; `None` if there are too many different layers.
    fn add(&mut self, profile: &mut Profile, record: &LayerRecord) -> Option<()> {
        let name = self.position_of(&short(&record.name, LONGEST_NAME))?;
        let LayerRecord { at_ns, allocated, reserved, layer, .. } = *record;
        let (sums, totals) = (profile.each.entry(name).or_default(), &mut profile.totals);
        sums.parameters = sums.parameters.max(layer.parameters);
        if layer.direction == Direction::Forward {
            add(&mut sums.activations, layer.activations);
        }
        add(&mut totals.gathered, layer.gathered);
        totals.allocated_max = totals.allocated_max.max(allocated);
        totals.reserved_max = totals.reserved_max.max(reserved);
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            profile.records.push(Record { name, at_ns, allocated, reserved, layer });
        } else {
            profile.left_out += 1;
        }
        Some(())
    }

    fn position_of(&mut self, name: &str) -> Option<usize> {
        if let Some(known) = self.by_name.get(name) {
            return Some(*known);
        }
        if self.names.len() >= MOST_NAMES {
            return None;
        }
        let position = self.names.len();
        self.names.push(name.to_owned());
        self.by_name.insert(name.to_owned(), position);
        Some(position)
    }

    fn finish(&mut self, mut profile: Profile) {
        let each = std::mem::take(&mut profile.each);
        for sums in each.values() {
            profile.totals.layers += 1;
            add(&mut profile.totals.activations, sums.activations);
            add(&mut profile.totals.parameters, sums.parameters);
        }
        let top = each.iter().filter_map(|(name, sums)| {
            Some(Top { name: *name, activations: sums.activations?, parameters: sums.parameters })
        });
        profile.top = top.collect();
        profile.top.sort_by_key(|top| Reverse(top.activations));
        profile.top.truncate(TOP);
        self.profiles.push(profile);
    }
}

impl Profile {
    fn new(job: String, rank: u32, step: Option<u64>, missing: u64) -> Self {
        let (totals, top, records) = (Totals::default(), Vec::new(), Vec::new());
        Self { job, rank, step, missing, totals, top, records, left_out: 0, each: BTreeMap::new() }
    }
}

fn add(sum: &mut Option<u64>, bytes: Option<u64>) {
    if let Some(bytes) = bytes {
        *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, direction: Direction, activations: Option<u64>) -> LayerRecord {
        let layer = Layer { activations, parameters: Some(10), gathered: Some(1), ..Layer::new(direction) };
        LayerRecord { name: name.to_owned(), at_ns: 5, allocated: Some(7), reserved: None, layer }
    }

    #[test]
    fn what_is_left_out_one_by_one_is_in_the_totals() {
        let mut layers = Layers::new(Room { points: 0, spans: 0, records: 3 });
        for rank in 0..2 {
            let mut profile = Profile::new("j".to_owned(), rank, Some(9), 4);
            for n in 0..20_u64 {
                layers
                    .add(&mut profile, &record(&format!("layer {}", n % 15), Direction::Forward, Some(n)))
                    .expect("room");
            }
            layers.add(&mut profile, &record("layer 0", Direction::Backward, Some(1_000))).expect("room");
            layers.finish(profile);
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
        assert_eq!((listed, layers.names.len()), (vec![(3, 18), (0, 21)], 15));
        assert!(layers.profiles.iter().all(|profile| profile.totals == expected && profile.top.len() == TOP));
        let top: Vec<_> = layers.profiles[1].top.iter().map(|top| (top.name, top.activations)).collect();
        assert_eq!(top[..3], [(4, 4 + 19), (3, 3 + 18), (2, 2 + 17)]);
    }

    #[test]
    fn names_are_bounded() {
        let mut layers = Layers::new(Room::of(1));
        let mut profile = Profile::new("j".to_owned(), 0, None, 0);
        let long = "x".repeat(300);
        let mut add = |n: usize| layers.add(&mut profile, &record(&format!("{n} {long}"), Direction::Forward, None));
        assert!((0..MOST_NAMES).all(|n| add(n).is_some()));
        assert_eq!((add(MOST_NAMES), add(0)), (None, Some(())));
        assert!(layers.names.iter().all(|name| name.chars().count() == LONGEST_NAME + 1));
    }
}
