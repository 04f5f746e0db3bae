//! What GPU memory did inside each step of training.
//!
//! The daemon: it opens a source ([`nvml`] or [`sim`]), which the engine samples into rings; [`metrics`] collects what is known
//! of GPUs and jobs, [`export`] and [`web`] publish it, and [`capture`] keeps the seconds around a finding. [`daemon`] wires it
//! all, and [`cli`] has its commands. ARCHITECTURE.md is the map.

pub mod capture;
pub mod cli;
mod code_pages;
pub mod config;
pub mod daemon;
pub mod export;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
#[doc(hidden)]
pub mod fuzzing;
mod gzip;
mod heap;
mod machine;
pub mod metrics;
pub mod nvml;
pub mod sim;
pub mod web;

/// The system's allocator, which also counts the memory of work in progress (`heap::making`).
#[global_allocator]
static ALLOCATOR: heap::Counting = heap::Counting;
