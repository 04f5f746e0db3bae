//! NVIDIA's GPUs, read through NVML: the only part of the program that uses it.
//!
//! Enters: the driver's library, loaded at run time. Leaves: a [`Source`](highwater_core::source::Source).
//! The wrapper crate loads the library, enumerates devices, and makes the calls for which milliseconds do not matter. The
//! fast lane calls the resolved function with the stored handle, without the wrapper's overhead. Invariants: no method takes a lock that the fast
//! lane needs; an unsupported query is made once; a value that NVML does not report is `None`. Absent on purpose: a
//! second initialization while the daemon runs, which would invalidate every other GPU's handle under its lane. A GPU
//! that came back is found by its UUID; if NVML needs a fresh start, the daemon drops this source and opens another.

mod activity;
mod devices;
mod errors;
mod events;
mod gpm;
mod gpus;
mod lanes;
mod opening;
mod pcie;
pub mod probe;
mod processes;
mod progress;
mod raw;
mod source;
mod unit;

pub use gpus::Nvml;
pub use opening::{Opener, open};
