//! Where to checkpoint activations, so that the largest part of them is as small as can be, and what is left to hold.
//!
//! Enters: layers, how many checkpoints there may be, how many layers to leave out at the begin. Leaves: the layers before
//! which to checkpoint, the most activations of one part, and the peak of the allocator that is to be expected. Invariant:
//! the largest part and the layers are FairScale's `suggest_checkpoint_location`; all else is beside them.

use super::layers::{Layer, StepLayers};
use super::modules::{ModuleAdvice, modules};
use super::partition::partition;
use serde::Serialize;
use std::ops::Range;

/// Where to checkpoint. Bytes and seconds; `null` if not known.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "testing", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "testing", schema(as = CheckpointAdvice))]
pub struct Checkpoints {
    /// The activations of the part that has the most.
    pub max_memory: u64,
    /// The layers with which parts begin, but for the first: checkpoint before each.
    pub split_modules: Vec<String>,
    /// The parts. Each but the last is to be checkpointed: the backward pass begins with the last, which would gain nothing.
    pub segments: Vec<CheckpointSegment>,
    /// How many checkpoints were asked for; the parts then have [`CHECKPOINTS`] if it was left out.
    pub checkpoints: usize,
    /// Which modules to checkpoint, each by itself. `null` if the layer profile does not have the peaks of the step.
    pub modules: Option<ModuleAdvice>,
    /// The largest part's activations by number of checkpoints, from none.
    pub max_memory_by_checkpoints: Vec<u64>,
    /// How many layers were divided.
    pub layers: usize,
    /// How many layers were left out at the begin.
    pub skipped_layers: usize,
    /// How many layers were left out because their activations are not known.
    pub unknown_layers: usize,
    /// How many records of layers are missing, because the daemon had no room for them.
    pub missing_records: u64,
    /// The activations of all layers, also of those that were left out at the begin.
    pub activation_bytes: u64,
    /// The maximum in live tensors that was observed.
    pub observed_peak_bytes: Option<u64>,
    /// The maximum in live tensors that is expected with these checkpoints.
    pub predicted_peak_bytes: Option<u64>,
    /// The duration of the forward passes that run a second time.
    pub recomputed_seconds: Option<f64>,
    /// The job whose layers they are.
    pub job: Option<String>,
    /// The rank.
    pub rank: Option<u32>,
    /// The step.
    pub step: Option<u64>,
}

/// Consecutive layers that are checkpointed together, except in the last segment, which is not checkpointed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "testing", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "testing", schema(as = CheckpointSegment))]
pub struct CheckpointSegment {
    /// The first layer.
    pub first: String,
    /// The last layer.
    pub last: String,
    /// How many layers.
    pub layers: usize,
    /// What they leave for the backward pass, bytes.
    pub activation_bytes: u64,
}

/// Why no checkpoints can be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointsError {
    /// No layer ran forward.
    #[error("there is no layer that ran forward")]
    NoLayer,
    /// This number of layers ran forward.
    #[error("the activations of none of the {0} layers are known")]
    UnknownActivations(usize),
    /// All layers are left out.
    #[error("{skipped} layers are to be left out, and there are {layers}")]
    AllSkipped {
        /// How many are to be left out.
        skipped: usize,
        /// How many there are.
        layers: usize,
    },
    /// No GPU has as much.
    #[error("the layers' activations add up to more than 2^64 bytes")]
    TooLarge,
}

/// How many checkpoints are placed if no number is asked for.
pub const CHECKPOINTS: usize = 4;

/// Places `most` checkpoints, or one before each divided layer but the first if that is fewer; [`CHECKPOINTS`] if no number is
/// asked for, and as many modules as bring the peak near the lowest that can be reached. The first `skipped` layers are left
/// out.
///
/// # Errors
/// No layer ran forward, no layer's activations are known, all layers are left out, or the sizes add up to more than
/// 2^64 bytes.
pub fn checkpoints(of: &StepLayers, asked: Option<usize>, skipped: usize) -> Result<Checkpoints, CheckpointsError> {
    let (all, most) = (&of.layers, asked.unwrap_or(CHECKPOINTS));
    if all.is_empty() {
        return Err(match of.unknown {
            0 => CheckpointsError::NoLayer,
            unknown => CheckpointsError::UnknownActivations(unknown),
        });
    }
    let Some((left_out, divided)) = all.split_at_checked(skipped).filter(|(_, divided)| !divided.is_empty()) else {
        return Err(CheckpointsError::AllSkipped { skipped, layers: all.len() });
    };
    let sizes: Vec<u64> = divided.iter().map(|layer| layer.activations).collect();
    let found = partition(&sizes, most).ok_or(CheckpointsError::TooLarge)?;
    let begins: Vec<usize> = [0].into_iter().chain(found.cuts.iter().copied()).collect();
    let ends = found.cuts.iter().copied().chain([divided.len()]);
    let parts: Vec<&[Layer]> = begins.iter().zip(ends).map(|(begin, end)| &divided[*begin..end]).collect();
    Ok(Checkpoints {
        max_memory: found.by_cuts.last().copied().unwrap_or(0),
        split_modules: found.cuts.iter().map(|cut| divided[*cut].name.clone()).collect(),
        segments: parts.iter().filter_map(|part| CheckpointSegment::of(part)).collect(),
        checkpoints: most,
        modules: modules(&of.history, asked, skipped),
        max_memory_by_checkpoints: found.by_cuts,
        layers: divided.len(),
        skipped_layers: left_out.len(),
        unknown_layers: of.unknown,
        missing_records: of.missing,
        activation_bytes: of.activations(),
        observed_peak_bytes: of.highest,
        predicted_peak_bytes: predicted(of, left_out.len(), &found.cuts),
        recomputed_seconds: recomputed_seconds(&parts),
        job: of.job.clone(),
        rank: of.rank,
        step: of.step,
    })
}

impl CheckpointSegment {
    fn of(part: &[Layer]) -> Option<Self> {
        let (first, last) = (part.first()?, part.last()?);
        let (first, last, layers) = (first.name.clone(), last.name.clone(), part.len());
        Some(Self { first, last, layers, activation_bytes: sum(part, |layer| layer.activations) })
    }
}

/// The expected maximum in live tensors: the observed one, plus the modelled peak of a step with these parts, minus the modelled
/// peak without checkpoints.
fn predicted(of: &StepLayers, skipped: usize, cuts: &[usize]) -> Option<u64> {
    let (highest, before) = (of.highest?, of.before?);
    let all = of.layers.len();
    let begins = [skipped].into_iter().chain(cuts.iter().map(|cut| skipped + cut));
    let ends = cuts.iter().map(|cut| skipped + cut).chain([all]);
    // What is left out is not checkpointed.
    let parts = [Part { layers: 0..skipped, is_whole: true }].into_iter();
    let parts: Vec<Part> = parts
        .chain(begins.zip(ends).map(|(begin, end)| Part { layers: begin..end, is_whole: cuts.is_empty() }))
        .collect();
    let (with, without) = (peak(&of.layers, &parts)?, peak(&of.layers, &[Part { layers: 0..all, is_whole: true }])?);
    u64::try_from(i128::from(highest) + with - without).ok().map(|predicted| predicted.max(before))
}

/// Consecutive layers.
struct Part {
    /// Their positions.
    layers: Range<usize>,
    /// Whether they keep all that they hold until their backward pass, and not only what they hand on.
    is_whole: bool,
}

/// The modelled peak of a step, relative to the memory before its layers, bytes. While the backward pass is in a layer, the job
/// holds what the parts before keep, what the layers of its own part up to it hold, the gradients of its output and input, and
/// the gradients of its own parameters and of those of all later layers.
fn peak(layers: &[Layer], parts: &[Part]) -> Option<i128> {
    let held = |range: &Range<usize>| {
        layers[range.clone()].iter().map(|layer| layer.held.map(i128::from)).sum::<Option<i128>>()
    };
    let (outputs, mut kept, mut begun) = (outputs(layers), 0, Vec::with_capacity(parts.len()));
    for part in parts {
        begun.push(kept);
        kept += if part.is_whole { held(&part.layers)? } else { output(&outputs, part.layers.end) };
    }
    let (mut gradients, mut most) = (0, 0);
    for (part, kept) in parts.iter().zip(begun).rev() {
        let mut own = held(&part.layers)?;
        for at in part.layers.clone().rev() {
            gradients += layers[at].parameters.map_or(0, i128::from);
            most = most.max(kept + own + gradients + output(&outputs, at + 1) + output(&outputs, at));
            own -= layers[at].held.map_or(0, i128::from);
        }
    }
    Some(most)
}

/// The size of each layer's output, bytes: its activations, or the output of the layer before if it has none.
fn outputs(layers: &[Layer]) -> Vec<i128> {
    let mut last = 0;
    let each = layers.iter().map(|layer| {
        last = if layer.activations > 0 { i128::from(layer.activations) } else { last };
        last
    });
    each.collect()
}

/// What the layer before a position hands on.
fn output(outputs: &[i128], position: usize) -> i128 {
    position.checked_sub(1).and_then(|before| outputs.get(before)).copied().unwrap_or(0)
}

/// The forward passes of all parts but the last, seconds. `None` if that of a layer is not known.
#[allow(clippy::cast_precision_loss, reason = "seconds to a microsecond")]
fn recomputed_seconds(parts: &[&[Layer]]) -> Option<f64> {
    let (_, again) = parts.split_last()?;
    let mut each = again.iter().flat_map(|part| part.iter()).map(|layer| layer.duration_ns);
    let all_ns = each.try_fold(0_u64, |sum, duration_ns| Some(sum.saturating_add(duration_ns?)))?;
    Some(all_ns as f64 * 1e-9)
}

fn sum(layers: &[Layer], of: impl Fn(&Layer) -> u64) -> u64 {
    layers.iter().fold(0, |sum, layer| sum.saturating_add(of(layer)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::wire::{self, Direction};

    /// Layers of these activations, each with `parameters` bytes of parameters and a forward pass of a millisecond, in a step
    /// that began with 1,000 bytes.
    fn layers(activations: &[u64], parameters: u64) -> StepLayers {
        let (mut layers, mut allocated) = (StepLayers::default(), 1_000_u64);
        for (nth, bytes) in activations.iter().enumerate() {
            allocated = allocated.saturating_add(*bytes);
            let layer = wire::Layer {
                activations: Some(*bytes),
                growth: i64::try_from(*bytes).ok(),
                parameters: Some(parameters),
                duration_ns: Some(1_000_000),
                ..wire::Layer::new(Direction::Forward)
            };
            layers.add(&format!("l{nth}"), Some(allocated), &layer).expect("room");
        }
        layers
    }

    #[test]
    fn the_parts_are_named_and_add_up() {
        let of = layers(&[10, 8, 8, 9, 7, 7, 5, 4, 4], 0);
        let advice = checkpoints(&of, Some(2), 0).expect("advice");
        assert_eq!(
            (advice.max_memory, advice.split_modules.as_slice()),
            (24, ["l2".to_owned(), "l5".to_owned()].as_slice())
        );
        assert_eq!(advice.max_memory_by_checkpoints, [62, 35, 24]);
        let parts: Vec<_> =
            advice.segments.iter().map(|part| (&*part.first, &*part.last, part.activation_bytes)).collect();
        assert_eq!(parts, [("l0", "l1", 18), ("l2", "l4", 24), ("l5", "l8", 20)]);
        assert!(advice.recomputed_seconds.is_some_and(|seconds| (seconds - 0.005).abs() < 1e-9), "{advice:?}");
        // Without: all 62, and two gradients of 4. With, in the second part: its 24, the 8 that the first hands on, and gradients
        // of 7 and 9.
        assert_eq!((advice.observed_peak_bytes, advice.predicted_peak_bytes), (Some(1_062), Some(1_062 - 70 + 48)));
    }

    #[test]
    fn gradients_are_held_beside_the_parts_that_come_later() {
        let of = layers(&[50, 50, 10, 10], 100);
        let advice = checkpoints(&of, Some(1), 0).expect("advice");
        assert_eq!((advice.max_memory, advice.split_modules.as_slice()), (70, ["l1".to_owned()].as_slice()));
        // The peak is 500 with and without the checkpoint. In the first layer: its 50, the gradient of its output, and the
        // gradients of four layers' parameters. In the second: 50 of each layer, two gradients of 50, and three of parameters.
        assert_eq!(advice.predicted_peak_bytes, advice.observed_peak_bytes);
        let mut unknown = of.clone();
        unknown.layers[1].held = None;
        assert_eq!(checkpoints(&unknown, Some(1), 0).expect("advice").predicted_peak_bytes, None);
    }

    #[test]
    fn layers_left_out_keep_what_they_have() {
        let of = layers(&[100, 8, 8, 8], 0);
        let advice = checkpoints(&of, Some(2), 1).expect("advice");
        assert_eq!((advice.max_memory, advice.layers, advice.skipped_layers), (8, 3, 1));
        assert_eq!(advice.split_modules, ["l2", "l3"]);
        assert_eq!((advice.activation_bytes, advice.predicted_peak_bytes), (124, Some(1_124)));
        let mut unknown = layers(&[], 0);
        unknown.unknown = 3;
        for (of, skipped, problem) in [
            (&of, 4, CheckpointsError::AllSkipped { skipped: 4, layers: 4 }),
            (&StepLayers::default(), 0, CheckpointsError::NoLayer),
            (&unknown, 0, CheckpointsError::UnknownActivations(3)),
            (&layers(&[u64::MAX, 1], 0), 0, CheckpointsError::TooLarge),
        ] {
            assert_eq!(checkpoints(of, Some(1), skipped).err(), Some(problem));
        }
        let none = checkpoints(&of, Some(0), 0).expect("advice");
        assert_eq!((none.max_memory, none.split_modules.len(), none.recomputed_seconds), (124, 0, Some(0.0)));
        assert_eq!(none.predicted_peak_bytes, none.observed_peak_bytes);
    }
}
