//! The records of a simulated model's layers in profiled steps.
//!
//! Enters: a phase with its levels of memory. Leaves: records as a transformer's would be: live memory rises from layer to layer in the forward pass, and falls in
//! the backward pass. Invariant: the layers' activations add up to the growth of the phase's memory. Absent on purpose: noise,
//! so that the same layer of every rank has the same memory.

use super::modules::{FIRST_OF_BLOCK, LAST_OF_BLOCK, Module};
use super::moment::{RankEvent, Select, What};
use super::plan::Plan;
use super::timeline::{Timeline, live_bytes};
use crate::sim::scenario::{BACKWARD, FORWARD, Layers, Phase};
use highwater_core::wire::{Annotation, Direction, EventType, GpuList, Kind, Layer, Memory};

/// Bytes of weights and optimizer state for each byte of weights: with Adam in mixed precision, 16 bytes a parameter of 2.
const BASE_PER_PARAMETER: u64 = 8;

/// Splits `bytes` bytes into parts, one for each weight. They add up to all of it, but for a tensor's alignment.
fn parts(bytes: u64, weights: impl Iterator<Item = u64> + Clone) -> Vec<u64> {
    let (all, mut sum, mut before) = (weights.clone().sum::<u64>().max(1), 0, 0);
    let part = |weight: u64| {
        sum += weight;
        let up_to = u128::from(bytes) * u128::from(sum) / u128::from(all);
        let up_to = u64::try_from(up_to).unwrap_or(u64::MAX) & !511;
        up_to - std::mem::replace(&mut before, up_to)
    };
    weights.map(part).collect()
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
        let activations = parts(risen_bytes, plan.modules.iter().map(|module| module.activations));
        let parameters = parts(plan.parameter_bytes(), plan.modules.iter().map(|module| module.parameters));
        let all_time = plan.modules.iter().map(|module| module.time).sum::<u64>().cast_signed().max(1);
        let after_ns = |time: u64| (lasting_ns / 1_000).saturating_mul(time.cast_signed()) / all_time * 1_000;
        let end_of_block = if is_forward { LAST_OF_BLOCK } else { FIRST_OF_BLOCK };
        let (mut time, mut up_to_bytes, mut gathered_sum) = (0, 0, 0_u64);
        for n in 0..plan.modules.len() {
            let n = if is_forward { n } else { plan.modules.len() - 1 - n };
            let (module, own_bytes, part_bytes) = (&plan.modules[n], activations[n], parameters[n]);
            let before_ns = after_ns(time);
            time += module.time;
            up_to_bytes += own_bytes;
            let at_ns = begin_ns + after_ns(time);
            let gathered_bytes = part_bytes.saturating_mul(self.ranks.len() as u64);
            gathered_sum = gathered_sum.saturating_add(gathered_bytes);
            let layer = Layer {
                growth: is_forward.then_some(own_bytes.cast_signed()),
                activations: Some(own_bytes),
                parameters: Some(part_bytes),
                gathered: layers.sharded.then_some(gathered_bytes),
                gathered_sum: layers.sharded.then_some(gathered_sum),
                duration_ns: Some((after_ns(time) - before_ns).unsigned_abs()),
                ..Layer::new(direction)
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
            self.say_layer(plan, rank, (module, layer), memory, at_ns);
        }
    }

    fn say_layer(&mut self, plan: &Plan, rank: usize, (module, layer): (&Module, Layer), memory: Memory, at_ns: i64) {
        let annotation = Annotation {
            event: EventType::Mark,
            kind: Kind::Layer,
            name: Some(module.name.clone()),
            job: Some(plan.job.name.clone()),
            scope: None,
            rank: self.number(rank),
            world_size: None,
            mesh: None,
            gpu: Some(GpuList::One(plan.ranks[rank].gpu.clone())),
            step: Some(self.step),
            time_unix_nano: Some(at_ns),
            memory: Some(memory),
            layer: Some(Box::new(layer)),
            lost: None,
            answer: None,
            attributes: None,
        };
        self.queue.push_back(RankEvent { at_ns, rank, what: What::Says(Box::new(annotation)) });
    }
}
