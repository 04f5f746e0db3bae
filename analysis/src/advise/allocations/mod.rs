//! The largest batch that fits, by a simulation of PyTorch's allocator.
//!
//! What the allocator reserves beside live tensors depends on the order and the sizes of all allocations, so no rule about peaks
//! says it. Here the first steps of a process are played again, as a larger batch would have made them, with the rules of
//! PyTorch's `c10/cuda/CUDACachingAllocator.cpp`.

mod allocator;
mod growth;
mod largest;
mod parts;

pub use crate::import::allocator_history::{AllocationHistory, read};
#[cfg(test)]
mod tests;

pub use largest::{Histories, HistoriesError, HistoryProblem, SimulatedBatch, SimulatedRank, SimulatedSteps};
