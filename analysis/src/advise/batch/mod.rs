//! Which batch size fits, from the peaks of observed steps.

mod fit;
mod observed;
mod recorded;

pub use fit::{BatchPeak, Fit, FitError, fit};
pub use observed::{BatchError, Observed, Rank, RankProblem, Run};
pub use recorded::read;

/// The attribute of a step that has its batch size.
pub const ATTRIBUTE: &str = "batch_size";
