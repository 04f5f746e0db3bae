//! How long each GPU's memory was at each level: an exponential histogram fed from the ring.
//!
//! Enters: rings. Leaves: one histogram per GPU, with one count for every millisecond in which memory is known. It is
//! weighted by time, so the sampler's period does not matter. Invariant: it only reads; gaps are not counted.

use super::follow::Follow;
use highwater_core::clock::MILLISECOND_NS;
use highwater_core::histogram::Exponential;
use highwater_engine::node::Node;
use std::sync::Arc;

/// The memory levels of one GPU.
#[derive(Debug, Clone)]
pub struct Level {
    /// The GPU's index.
    pub index: String,
    /// The GPU's UUID.
    pub uuid: String,
    /// How many milliseconds the memory in use was at each level. The values are bytes, the counts milliseconds.
    pub histogram: Exponential,
}

/// The levels of every GPU of the current node.
#[derive(Default)]
pub struct Levels {
    follow: Follow,
    levels: Vec<Level>,
}

impl Levels {
    /// Adds what the rings have gained since the last call, and returns all levels.
    pub fn advance(&mut self, node: Option<&Arc<Node>>) -> &[Level] {
        let Some(node) = node else {
            *self = Self::default();
            return &self.levels;
        };
        if !self.follow.is_of(node) {
            self.follow.begin(node);
            let level = |gpu: &highwater_core::gpu::GpuState| Level {
                index: gpu.device.index.clone(),
                uuid: gpu.device.uuid.clone(),
                histogram: Exponential::default(),
            };
            self.levels = node.gpus.iter().map(level).collect();
        }
        for (position, level) in self.levels.iter_mut().enumerate() {
            let Some(stretch) = self.follow.advance(position) else { continue };
            let begins = [stretch.begin].into_iter().chain(stretch.changes.iter().copied());
            let ends = stretch.changes.iter().map(|point| point.at_ns).chain([stretch.end.at_ns]);
            for (point, end_ns) in begins.zip(ends) {
                // Whole milliseconds of the timeline, so that each is counted once, whenever the calls are made.
                let milliseconds = end_ns.div_euclid(MILLISECOND_NS) - point.at_ns.div_euclid(MILLISECOND_NS);
                if let (Some(used_bytes), Ok(milliseconds)) = (point.used, u64::try_from(milliseconds)) {
                    #[allow(clippy::cast_precision_loss, reason = "bytes below 2^53")]
                    level.histogram.record(used_bytes as f64, milliseconds);
                }
            }
        }
        &self.levels
    }
}
