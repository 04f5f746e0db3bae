//! Logs of programs that poll GPUs: nvidia-smi in all its forms, dcgmi, gpustat, nvitop, W&B, scripts.
//!
//! Enters: the lines of a log. Leaves: a `Tape`. Each form has a module that turns lines into readings; `polls` makes the memory of
//! each GPU over time of them. Invariants: a reading that cannot be used is counted, and no other is lost; what is guessed is listed
//! in the tape's `assumed`; time that goes back hides nothing. Absent on purpose: free text, and shares of an unknown size.

mod clock;
mod columns;
pub(crate) mod csv;
mod hints;
pub(crate) mod json;
pub(crate) mod monitor;
mod polls;
pub(crate) mod query;
mod shape;
pub(crate) mod survey;
pub(crate) mod table;

pub use hints::Hints;
