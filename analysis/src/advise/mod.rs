//! What to change so that a job needs less memory, in numbers.
//!
//! Enters: what was recorded of a job's layers, its steps, and its framework's plans. Leaves: where to checkpoint activations,
//! which batch size fits, which plans to enable, and the memory that this leaves.
//! Invariants: divisions into checkpointed parts are optimal; what is not known is absent, never 0. Absent on purpose: where
//! the answers are shown, which the command line and the API decide.

pub mod allocations;
mod answer;
pub mod batch;
mod best;
mod checkpoints;
mod file;
mod history;
mod layers;
mod modules;
mod partition;
pub mod recompute;

pub use best::ProfileChoice;
pub use checkpoints::{CHECKPOINTS, CheckpointSegment, Checkpoints, CheckpointsError, checkpoints};
pub use file::{Advisable, advisable, is_history, read};
pub use layers::{Layer, LayersError, StepLayers};
pub use modules::{ByCount, CheckpointedModule, ModuleAdvice};
pub use partition::{Partition, partition};

/// The most checkpoints that are advised: with more, a model would be a list of single layers.
pub const MOST_CHECKPOINTS: usize = 4_096;
