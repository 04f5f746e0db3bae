//! What GPU memory did inside each step of training.
//!
//! The house is the pipeline: a [`source`] (of [`nvml`], [`sim`] or [`recording`]) is [`sample`]d into rings; jobs tell the
//! [`intake`] of their steps and phases; the core joins the two and looks for causes; [`metrics`] collects what is
//! [`known`], and [`export`] and [`web`] tell it. [`daemon`] wires all of it. ARCHITECTURE.md is the map.

pub mod capture;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod dial;
pub mod export;
pub mod files;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grpc;
pub mod intake;
pub mod known;
pub mod metrics;
pub mod node;
pub mod nvml;
pub mod place;
pub mod recording;
pub mod sample;
pub mod sim;
pub mod source;
pub mod thread;
pub mod web;
