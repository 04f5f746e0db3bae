//! Which batch size fits, from the peaks of observed steps.

mod fit;
mod observed;
mod recorded;

pub(super) use fit::last_that;
pub use fit::{BatchPeak, Fit, FitError};
pub use observed::{Basis, BatchError, Observed, Peaks, Rank, RankProblem, Run};
pub use recorded::{SizedStep, read};

/// The attribute of a step that has its batch size.
pub const ATTRIBUTE: &str = "batch_size";
/// The attributes that have the most in live tensors, and the most that the allocator reserved, up to the step's end, bytes.
pub const ALLOCATED_PEAK: &str = "allocated_peak_bytes";
/// See above.
pub const RESERVED_PEAK: &str = "reserved_peak_bytes";
/// The attribute that has the largest allocation of the step, bytes.
pub const LARGEST_ALLOCATION: &str = "largest_allocation_bytes";
