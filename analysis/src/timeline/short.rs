//! Short kernels: those that take about as long as launching them, so that a GPU runs them no faster than the host launches them.
//!
//! Invariant: what is not known is `None`. Absent on purpose: finding them.

use serde::Serialize;

/// A kernel that takes less is short, nanoseconds: a launch takes the host 5 to 10 µs.
pub(super) const SHORT_NS: u64 = 10_000;

/// The short kernels of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShortKernels {
    /// The GPU's number in its process.
    pub device: u32,
    /// A kernel that takes less is short, nanoseconds.
    pub below_ns: u64,
    /// How many kernels ran, short or not.
    pub kernels: u64,
    /// Their durations, nanoseconds; two that ran at once count twice.
    pub kernels_ns: u64,
    /// How many are short.
    pub count: u64,
    /// The durations of these, nanoseconds.
    pub total_ns: u64,
    /// Time before them in which nothing ran on the GPU, nanoseconds, if it was at most 100 µs.
    pub idle_before_ns: u64,
    /// Sequences that recur, those with the most kernels after the first come first; `None` if there are too many to count.
    pub sequences: Option<Vec<KernelSequence>>,
}

impl ShortKernels {
    /// Whether launching them may cost more than they do: half of the kernels are short, and the idle time before them is a tenth of this.
    #[must_use]
    pub fn bound(&self, window_ns: u64) -> bool {
        let is_much = window_ns > 0 && self.idle_before_ns >= window_ns / 10;
        is_much && self.count > 0 && self.count >= self.kernels / 2
    }
}

/// Short kernels that ran one after another on one stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelSequence {
    /// Their names.
    pub kernels: Vec<String>,
    /// How often, without overlaps.
    pub count: u64,
    /// The durations of their kernels in all, nanoseconds.
    pub total_ns: u64,
    /// The time on the stream between their kernels, nanoseconds.
    pub between_ns: u64,
}
