//! What many records are together: totals, and the layers with the most activations.
//!
//! Enters: records, each with the number of its layer. Leaves: totals of all. Invariants: memory grows with the number of
//! different layers, whatever their numbers are; sums of untrusted numbers saturate. Absent on purpose: names.

use crate::wire::{Direction, Layer};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Totals of a profile's records, in bytes except for the number of layers; `None` if no record has the value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Different layers.
    pub layers: u64,
    /// Sum of the activations of all forward records.
    pub activations: Option<u64>,
    /// Sum of the layers' parameters, each layer once.
    pub parameters: Option<u64>,
    /// Sum of what was gathered.
    pub gathered: Option<u64>,
    /// The most that was in live tensors after a layer, or at all where the records say it.
    pub allocated_max: Option<u64>,
    /// The most that the allocator held after a layer.
    pub reserved_max: Option<u64>,
}

/// The records so far.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    totals: Totals,
    each: BTreeMap<usize, Sums>,
}

/// What is known of one layer over all its records.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    activations: Option<u64>,
    parameters: Option<u64>,
}

/// A layer whose activations are known, over all its records. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tallied {
    /// The layer's number.
    pub number: usize,
    /// Its activations over all of its forward records.
    pub activations: u64,
    /// Its parameters.
    pub parameters: Option<u64>,
}

impl Tally {
    /// Adds a record of the layer with this number, and the allocator's counters after it, bytes.
    pub fn add(&mut self, number: usize, allocated: Option<u64>, reserved: Option<u64>, layer: &Layer) {
        let totals = &mut self.totals;
        totals.allocated_max = totals.allocated_max.max(allocated).max(layer.peak);
        totals.reserved_max = totals.reserved_max.max(reserved);
        if layer.is_around_others() {
            // The records inside it have all of it.
            return;
        }
        let sums = self.each.entry(number).or_default();
        sums.parameters = sums.parameters.max(layer.parameters);
        if layer.direction == Direction::Forward {
            add(&mut sums.activations, layer.activations);
        }
        add(&mut totals.gathered, layer.gathered);
    }

    /// The totals, and at most `most` layers with the most activations, the largest first. Of equal ones, the lower number.
    #[must_use]
    pub fn finish(self, most: usize) -> (Totals, Vec<Tallied>) {
        let Self { mut totals, each } = self;
        totals.layers = each.len() as u64;
        for sums in each.values() {
            add(&mut totals.activations, sums.activations);
            add(&mut totals.parameters, sums.parameters);
        }
        let known = each.into_iter().filter_map(|(number, Sums { activations, parameters })| {
            Some(Tallied { number, activations: activations?, parameters })
        });
        let mut top: Vec<Tallied> = known.collect();
        // Stable: equal ones stay in the order of their numbers.
        top.sort_by_key(|tallied| Reverse(tallied.activations));
        top.truncate(most);
        (totals, top)
    }
}

/// Adds where something is known.
fn add(sum: &mut Option<u64>, bytes: Option<u64>) {
    if let Some(bytes) = bytes {
        *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
    }
}
