//! The engine of highwater: it samples memory, takes the annotations of jobs, and writes and plays recordings.
//!
//! A node is an open source whose memory is [`sample`]d into rings; the [`intake`] takes the steps and phases that jobs report,
//! and [`place`] finds where they run; [`shared_state`] is all state that readers share; a [`recording`] keeps it for later, and
//! [`offline`] plays one at once. Absent on purpose: drivers, exporters, servers, files of other tools.

pub mod dial;
pub mod files;
pub mod footprint;
pub mod grpc;
pub mod intake;
pub mod node;
pub mod offline;
pub mod place;
pub mod recording;
pub mod sample;
pub mod shared_state;
pub mod thread;
pub mod workloads;
