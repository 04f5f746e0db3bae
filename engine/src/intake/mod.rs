//! Takes the annotations that jobs send: steps, phases, layers and marks, over HTTP and two Unix sockets. Every
//! endpoint uses [`Intake`]: parse, check, take, count, answer.
//!
//! Enters: JSON from untrusted peers. Leaves: jobs in the [`Ledger`](highwater_core::phases::Ledger). Invariants: a bad event is
//! refused alone, with a reason that is counted; everything kept is limited by [`Limits`](highwater_core::jobs::Limits), in bytes
//! per owner; no lock that senders share is held while another process is read. Absent on purpose: memory, which is joined
//! later.

mod admission;
mod answer;
mod batch;
mod complaints;
pub mod datagram;
mod devices;
mod ends;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub mod fuzzing;
mod kills;
mod log;
mod send;
mod senders;
pub mod seqpacket;
pub mod split;
mod unlinked;
mod waiting;

pub use admission::{GpuListener, Intake, MarkListener};
pub use answer::{Answer, Refused};
pub use batch::{Batch, MOST_BATCHED_BYTES};
pub use kills::MOST_KILLS_BYTES;
pub use log::{EventLog, Extent, LogLimits};
pub use send::{due, send_annotations};
