//! Reads traces of PyTorch's profiler (Kineto's Chrome trace format).
//!
//! Enters: the text of a trace. Leaves: a `Trace` of `timeline`. Invariants: memory is bounded by `timeline`'s limits, not by the
//! file; what the text does not have is `None`, never 0. Absent on purpose: opening and unpacking files, and what is computed from
//! a trace.

mod bytes;
mod event;
mod read;
mod reading;
#[cfg(test)]
mod tests;
mod time;
mod value;

pub use read::{TraceError, read};

/// The most bytes of one file, unpacked.
pub const MOST_BYTES: u64 = 16 << 30;
