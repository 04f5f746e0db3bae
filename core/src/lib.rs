//! The core of highwater: what is known of GPUs and jobs, and what follows from it.
//!
//! Pure: no I/O but the system's clock, no thread, no log, no driver. Everything takes time as an argument, so that live,
//! replay and test share it; only [`source::calls`] measures the time that the driver takes. The modules are in one order,
//! and each uses only those before it: [`clock`], [`mod@labels`], [`units`], [`varint`], [`histogram`], [`scope`], [`wire`],
//! [`mesh`], [`gpu`], [`source`], [`ring`], [`jobs`], [`shares`], [`phases`], [`detect`]. ARCHITECTURE.md is the map.

pub mod clock;
pub mod detect;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
#[doc(hidden)]
pub mod fuzzing;
pub mod gpu;
pub mod histogram;
pub mod jobs;
pub mod labels;
pub mod mesh;
pub mod phases;
pub mod ring;
pub mod scope;
pub mod shares;
pub mod source;
pub mod thinned;
pub mod units;
pub mod varint;
pub mod wire;
