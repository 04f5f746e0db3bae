//! The layers of a simulated model, and their records in profiled steps.
//!
//! Enters: the number of layers, and a phase with its levels of memory. Leaves: records as a transformer's would be: an
//! embedding, blocks of seven layers, and a head; live memory rises from layer to layer in the forward pass, and falls in
//! the backward pass. Invariant: what the layers add up to is what the phase's memory grows by. Absent on purpose: noise,
//! so that the same layer of every rank has the same memory.

use super::{Moment, Plan, Select, Timeline, What, live_bytes};
use crate::sim::scenario::{BACKWARD, FORWARD, Layers, Phase};
use highwater_core::wire::{Annotation, Direction, EventType, Gpus, Kind, Layer, Memory};

/// A layer's parts of what all layers have together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Module {
    name: String,
    activations: u64,
    parameters: u64,
    time: u64,
}

/// The layers of a block: activations, parameters and time, relative to each other.
const BLOCK: [(&str, u64, u64, u64); 7] = [
    ("input_norm", 4, 0, 2),
    ("attention.qkv", 12, 12, 12),
    ("attention.core", 10, 0, 20),
    ("attention.out", 4, 4, 5),
    ("post_norm", 4, 0, 2),
    ("mlp.up", 16, 16, 16),
    ("mlp.down", 5, 16, 16),
];

const FIRST_OF_BLOCK: &str = "input_norm";
const LAST_OF_BLOCK: &str = "mlp.down";

/// Bytes of weights and optimizer state for each byte of weights: with Adam in mixed precision, 16 bytes a parameter of 2.
const BASE_PER_PARAMETER: u64 = 8;

/// The layers of a model, in the order of the forward pass.
pub(super) fn modules(count: usize) -> Vec<Module> {
    let module = |name: String, (activations, parameters, time)| Module { name, activations, parameters, time };
    let inner = (0..count.saturating_sub(2)).map(|n| {
        let (name, activations, parameters, time) = BLOCK[n % BLOCK.len()];
        module(format!("layers.{}.{name}", n / BLOCK.len()), (activations, parameters, time))
    });
    let mut all = vec![module("embedding".to_owned(), (4, 60, 3))];
    all.extend(inner);
    all.push(module("head".to_owned(), (40, 60, 30)));
    all.truncate(count);
    all
}

/// What the layers before this one had, and what it has itself: parts of a whole that are never lost to rounding.
#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    before: u64,
    after: u64,
}

impl Sum {
    fn add(&mut self, part: u64) {
        (self.before, self.after) = (self.after, self.after + part);
    }

    /// The part of `bytes` up to here; tensors are aligned to 512 bytes.
    fn share(part: u64, all: u64, bytes: u64) -> u64 {
        let share = u128::from(bytes) * u128::from(part) / u128::from(all.max(1));
        u64::try_from(share).unwrap_or(u64::MAX) & !511
    }

    fn own(&self, all: u64, bytes: u64) -> u64 {
        Self::share(self.after, all, bytes) - Self::share(self.before, all, bytes)
    }
}

impl Plan {
    /// The job's layers, if this step is profiled.
    fn profiled(&self, step: u64) -> Option<&Layers> {
        self.job.layers.as_ref().filter(|layers| step.is_multiple_of(layers.every_steps))
    }

    /// Bytes of weights of one rank.
    fn parameter_bytes(&self) -> u64 {
        self.job.base.0 / BASE_PER_PARAMETER
    }
}

impl Timeline {
    /// Queues a rank's record of each layer in a forward or backward phase, if the step is profiled. Layers run while the
    /// phase's memory changes.
    pub(super) fn say_layers(&mut self, plan: &Plan, rank: usize, phase: &Phase, (begin_ns, lasting_ns): (i64, i64)) {
        let direction = match phase.name.as_str() {
            FORWARD => Direction::Forward,
            BACKWARD => Direction::Backward,
            _ => return,
        };
        let Some(layers) = plan.profiled(self.step).filter(|_| matches!(self.select, Select::Annotations)) else {
            return;
        };
        let is_forward = direction == Direction::Forward;
        let from_bytes = self.ranks[rank].state.allocator_bytes;
        let to_bytes = phase.to.map_or(from_bytes, |to| to.0.min(self.room_bytes(plan, rank)));
        let held = self.curve(rank, to_bytes, phase.shape, (begin_ns, lasting_ns));
        let low_bytes = live_bytes(if is_forward { from_bytes } else { plan.job.base.0 });
        let high_bytes = live_bytes(if is_forward { to_bytes } else { from_bytes });
        let risen_bytes = high_bytes.saturating_sub(low_bytes);
        let all = |of: fn(&Module) -> u64| plan.modules.iter().map(of).sum::<u64>();
        let (all_activations, all_parameters) = (all(|module| module.activations), all(|module| module.parameters));
        let all_time = all(|module| module.time);
        let end_of_block = if is_forward { LAST_OF_BLOCK } else { FIRST_OF_BLOCK };
        let (mut activations, mut parameters, mut time) = (Sum::default(), Sum::default(), Sum::default());
        let mut gathered_sum = 0_u64;
        for n in 0..plan.modules.len() {
            let module = &plan.modules[if is_forward { n } else { plan.modules.len() - 1 - n }];
            activations.add(module.activations);
            parameters.add(module.parameters);
            time.add(module.time);
            let after_ns = |time: u64| {
                (lasting_ns / 1_000).saturating_mul(time.cast_signed()) / all_time.cast_signed().max(1) * 1_000
            };
            let at_ns = begin_ns + after_ns(time.after);
            let own_bytes = activations.own(all_activations, risen_bytes);
            let up_to_bytes = Sum::share(activations.after, all_activations, risen_bytes);
            let part_bytes = parameters.own(all_parameters, plan.parameter_bytes());
            let gathered_bytes = part_bytes.saturating_mul(self.ranks.len() as u64);
            gathered_sum = gathered_sum.saturating_add(gathered_bytes);
            let layer = Layer {
                direction,
                growth: is_forward.then_some(own_bytes.cast_signed()),
                activations: Some(own_bytes),
                parameters: Some(part_bytes),
                gathered: layers.sharded.then_some(gathered_bytes),
                gathered_sum: layers.sharded.then_some(gathered_sum),
                duration_ns: Some((after_ns(time.after) - after_ns(time.before)).unsigned_abs()),
            };
            if module.name.ends_with(end_of_block) {
                gathered_sum = 0;
            }
            let reserved =
                held.iter().take_while(|(held_ns, _)| *held_ns <= at_ns).last().map_or(from_bytes, |held| held.1);
            let live = if is_forward { low_bytes + up_to_bytes } else { high_bytes - up_to_bytes };
            // The allocator takes memory in larger pieces than layers do, so that it may lag behind.
            let allocated = live.min(live_bytes(reserved));
            let memory = Memory { allocated: Some(allocated), reserved: Some(reserved), ..Memory::default() };
            let annotation = Annotation {
                event: EventType::Mark,
                kind: Kind::Layer,
                name: Some(module.name.clone()),
                job: Some(plan.job.name.clone()),
                rank: u32::try_from(rank).ok(),
                world_size: None,
                gpu: Some(Gpus::One(plan.ranks[rank].gpu.clone())),
                step: Some(self.step),
                time_unix_nano: Some(at_ns),
                memory: Some(memory),
                layer: Some(Box::new(layer)),
                lost: None,
                attributes: None,
            };
            self.queue.push_back(Moment { at_ns, rank, what: What::Says(Box::new(annotation)) });
        }
    }
}
