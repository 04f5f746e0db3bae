//! A complete profile, its totals, and the names of its layers.

use super::code::{self, Last, Numbered};
use super::tally::{Tallied, Tally, Totals};
use crate::jobs::account::Reservation;
use crate::wire::Layer;
use std::sync::{Arc, Mutex, PoisonError};

/// The names of a job's layers by their numbers, which profiles have, each with its bytes on the account of its first sender.
/// It only grows. The job and its profiles share it, so names stay on their account for as long as either is kept.
#[derive(Debug, Default)]
pub(in crate::jobs) struct LayerNames(Mutex<Vec<(Arc<str>, Reservation)>>);

impl LayerNames {
    pub fn push(&self, name: &Arc<str>, held: Reservation) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((Arc::clone(name), held));
    }

    /// The name of this number.
    pub fn get(&self, number: usize) -> Option<Arc<str>> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.get(number).map(|(name, _)| Arc::clone(name))
    }
}

/// One layer in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The layer's name.
    pub name: Arc<str>,
    /// When it was recorded, after the layer, nanoseconds of the timeline.
    pub at_ns: i64,
    /// Bytes in live tensors then.
    pub allocated: Option<u64>,
    /// Bytes that the allocator held from the driver then.
    pub reserved: Option<u64>,
    /// What else is known of it.
    pub layer: Layer,
}

/// One of the layers with the most activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Top {
    /// Its name.
    pub name: Arc<str>,
    /// Its activations over all of its forward records, bytes.
    pub activations: u64,
    /// Its parameters, bytes.
    pub parameters: Option<u64>,
}

/// The profile of one step of one rank.
#[derive(Debug)]
pub struct Profile {
    /// The step.
    pub step: Option<u64>,
    /// The earliest and the latest time of its records, nanoseconds of the timeline.
    pub begin_ns: i64,
    /// See above.
    pub end_ns: i64,
    /// Records of its step that are not in it: there was no room for them, or for the name of their layer.
    pub missing: u64,
    /// How many records it has.
    pub count: usize,
    /// What they are together.
    pub totals: Totals,
    /// The layers with the most activations, the largest first.
    pub top: Box<[Top]>,
    pub(super) names: Arc<LayerNames>,
    pub(super) encoded: Box<[u8]>,
    pub(super) _held: Reservation,
}

/// Where a reader of a profile's records is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cursor {
    at: usize,
    last: Last,
}

impl Profile {
    /// Its records, in the order of their arrival.
    pub fn records(&self) -> impl Iterator<Item = Record> {
        let mut cursor = Cursor::default();
        std::iter::from_fn(move || self.next(&mut cursor))
    }

    /// The record at the cursor, which advances past it. `None` at the end.
    pub fn next(&self, cursor: &mut Cursor) -> Option<Record> {
        let Numbered { number, at_ns, allocated, reserved, layer } =
            code::decode(&self.encoded, &mut cursor.at, &mut cursor.last)?;
        Some(Record { name: self.names.get(number)?, at_ns, allocated, reserved, layer })
    }
}

/// The totals of records, and at most `most` layers with the most activations. Time and memory grow with the number of records,
/// not with the numbers of their layers.
pub(super) fn totals(encoded: &[u8], names: &LayerNames, most: usize) -> (Totals, Box<[Top]>) {
    let (mut at, mut last, mut tally) = (0, Last::default(), Tally::default());
    while let Some(Numbered { number, allocated, reserved, layer, .. }) = code::decode(encoded, &mut at, &mut last) {
        tally.add(number, allocated, reserved, &layer);
    }
    let (totals, top) = tally.finish(most);
    let named = top.into_iter().filter_map(|Tallied { number, activations, parameters }| {
        Some(Top { name: names.get(number)?, activations, parameters })
    });
    (totals, named.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Direction;

    #[test]
    fn totals_take_no_room_for_layers_that_have_no_record() {
        let (mut encoded, mut last) = (Vec::new(), Last::default());
        let layer = Layer { activations: Some(7), ..Layer::new(Direction::Forward) };
        for number in [1 << 40, 3, 1 << 40] {
            let record = Numbered { number, at_ns: 1, allocated: None, reserved: None, layer };
            code::encode(&mut encoded, &mut last, &record);
        }
        let (totals, top) = totals(&encoded, &LayerNames::default(), 10);
        assert_eq!((totals.layers, totals.activations, top.len()), (2, Some(21), 0));
    }
}
