//! What GPU memory did inside each step of training.
//!
//! The modules form a pipeline: a [`source`] ([`nvml`], [`sim`] or [`recording`]) is [`sample`]d into rings; the
//! [`intake`] takes the steps and phases that jobs report; the core joins the two and looks for causes; [`metrics`]
//! collects what is [`known`], and [`export`] and [`web`] publish it. [`daemon`] wires it all. ARCHITECTURE.md is the
//! map.

pub mod advise;
pub mod capture;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod dial;
pub mod export;
pub mod files;
pub mod footprint;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grpc;
mod heap;
mod html;
pub mod intake;
pub mod kineto;
pub mod known;
pub mod metrics;
pub mod node;
pub mod nvml;
pub mod offline;
pub mod place;
pub mod recording;
pub mod report;
pub mod sample;
pub mod sim;
pub mod source;
pub mod thread;
mod viewer;
pub mod web;
