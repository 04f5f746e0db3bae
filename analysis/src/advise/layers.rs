//! A model's layers in the order in which they run, as far as advice needs them.
//!
//! Enters: the records of one profiled step. Leaves: each layer that ran forward, once, where it ran first. Invariants: a
//! layer whose activations are not known is counted and left out; names and their bytes are bounded.

use super::history::StepHistory;
use highwater_core::wire::{self, Direction};
use std::collections::HashSet;

/// The most different layers of one model.
pub(super) const MOST_LAYERS: usize = 1 << 16;
/// The most bytes of their names, and of one.
const MOST_NAME_BYTES: usize = 1 << 24;
const LONGEST_NAME: usize = 1 << 12;

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its name, such as `layer1.1.bn3`.
    pub name: String,
    /// What it leaves for the backward pass: its outputs that share no memory with its inputs, bytes.
    pub activations: u64,
    /// By how much live tensors grew from the end of the forward record before it to its own end, bytes. Includes the growth with
    /// records after it that are not among the layers, such as a layer that runs again.
    pub held: Option<i64>,
    /// Its parameters, bytes.
    pub parameters: Option<u64>,
    /// How long its forward pass took, nanoseconds.
    pub duration_ns: Option<u64>,
}

/// The layers of one rank in one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepLayers {
    /// The job, where that is known.
    pub job: Option<String>,
    /// The rank, where that is known.
    pub rank: Option<u32>,
    /// The step, where that is known.
    pub step: Option<u64>,
    /// In the order in which they ran forward.
    pub layers: Vec<Layer>,
    /// How many further layers ran forward with unknown activations.
    pub unknown: usize,
    /// How many records found no room where the profile was kept.
    pub missing: u64,
    /// In live tensors before the first layer, bytes.
    pub before: Option<u64>,
    /// The most in live tensors after any layer, or at all where that is known, bytes.
    pub highest: Option<u64>,
    /// The step, record by record.
    pub history: StepHistory,
    names: HashSet<String>,
    name_bytes: usize,
    has_begun: bool,
    /// In live tensors after the last forward record.
    after: Option<u64>,
}

/// Why a layer cannot be one of a step's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayersError {
    /// Its name has this number of bytes.
    #[error("the name of a layer has {0} bytes, and may have {LONGEST_NAME}")]
    NameTooLong(usize),
    /// There are too many layers.
    #[error("it has more than {MOST_LAYERS} layers, or {MOST_NAME_BYTES} bytes of their names")]
    TooManyLayers,
    /// There are too many records.
    #[error("its layer profiles have too many records")]
    TooManyRecords,
}

impl StepLayers {
    /// Of one rank.
    #[must_use]
    pub fn of(job: Option<String>, rank: Option<u32>, step: Option<u64>) -> Self {
        Self { job, rank, step, ..Self::default() }
    }

    /// Adds what a layer did in one pass, in the order in which the layers ran, and what was in live tensors after it, bytes.
    ///
    /// # Errors
    /// There are too many layers, or the name is too long.
    pub fn add(&mut self, name: &str, allocated: Option<u64>, layer: &wire::Layer) -> Result<(), LayersError> {
        self.highest = self.highest.max(allocated).max(layer.peak);
        if name.len() > LONGEST_NAME {
            return Err(LayersError::NameTooLong(name.len()));
        }
        self.history.add(name, allocated, layer);
        if layer.is_around_others() {
            return Ok(());
        }
        if layer.direction != Direction::Forward {
            return Ok(());
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            let before = allocated.zip(layer.growth).map(|(after, growth)| i128::from(after) - i128::from(growth));
            self.before = before.and_then(|before| u64::try_from(before).ok());
        }
        let grown = allocated.zip(self.after.or(self.before)).map(|(now, then)| i128::from(now) - i128::from(then));
        let held = grown.and_then(|grown| i64::try_from(grown).ok());
        self.after = allocated;
        if self.names.contains(name) {
            self.hold(held);
            return Ok(());
        }
        if self.names.len() >= MOST_LAYERS || self.name_bytes + name.len() > MOST_NAME_BYTES {
            return Err(LayersError::TooManyLayers);
        }
        self.name_bytes += name.len();
        self.names.insert(name.to_owned());
        match layer.activations {
            Some(activations) => self.layers.push(Layer {
                name: name.to_owned(),
                activations,
                held,
                parameters: layer.parameters,
                duration_ns: layer.duration_ns,
            }),
            None => {
                self.unknown += 1;
                self.hold(held);
            }
        }
        Ok(())
    }

    /// Adds what a record that is not among the layers holds, such as that of a layer that runs again, to the last layer.
    fn hold(&mut self, more: Option<i64>) {
        if let Some(layer) = self.layers.last_mut() {
            layer.held = layer.held.zip(more).and_then(|(held, more)| held.checked_add(more));
        }
    }

    /// Whose they are, for people.
    #[must_use]
    pub fn whose(&self) -> String {
        let named = [
            self.job.as_ref().map(|job| format!("job {job}")),
            self.rank.map(|rank| format!("rank {rank}")),
            self.step.map(|step| format!("step {step}")),
        ];
        let named: Vec<String> = named.into_iter().flatten().collect();
        if named.is_empty() { "an unnamed job".to_owned() } else { named.join(", ") }
    }

    /// The sum of all activations, bytes, saturating.
    #[must_use]
    pub fn activations(&self) -> u64 {
        self.layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.activations))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(activations: Option<u64>) -> wire::Layer {
        wire::Layer { activations, growth: Some(30), parameters: Some(4), ..wire::Layer::new(Direction::Forward) }
    }

    #[test]
    fn each_layer_is_where_it_first_ran_forward() {
        let mut layers = StepLayers::default();
        for (name, direction, activations) in [
            ("a", Direction::Forward, Some(7)),
            ("b", Direction::Forward, None),
            ("c", Direction::Forward, Some(0)),
            ("a", Direction::Forward, Some(9)),
            ("c", Direction::Backward, Some(5)),
        ] {
            layers.add(name, Some(100), &wire::Layer { direction, ..forward(activations) }).expect("room");
        }
        let expected = [("a", 7), ("c", 0)];
        let known: Vec<_> = layers.layers.iter().map(|layer| (layer.name.as_str(), layer.activations)).collect();
        assert_eq!((known, layers.unknown), (expected.to_vec(), 1));
        assert_eq!((layers.before, layers.highest, layers.activations()), (Some(70), Some(100), 7));
    }

    #[test]
    fn more_layers_than_there_may_be_are_refused() {
        let mut layers = StepLayers::default();
        for nth in 0..MOST_LAYERS {
            layers.add(&nth.to_string(), None, &forward(Some(1))).expect("room");
        }
        layers.add("7", None, &forward(Some(1))).expect("known");
        assert_eq!(layers.add("more", None, &forward(Some(1))), Err(LayersError::TooManyLayers));
        assert!(LayersError::TooManyLayers.to_string().contains("65536 layers"));
        let long = "x".repeat(LONGEST_NAME + 1);
        let refused = StepLayers::default().add(&long, None, &forward(Some(1)));
        assert_eq!(refused, Err(LayersError::NameTooLong(LONGEST_NAME + 1)));
    }
}
