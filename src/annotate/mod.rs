//! What jobs say of themselves: steps, phases, layers and marks, over HTTP and two Unix sockets.
//!
//! Enters: JSON from untrusted peers. Leaves: ended phases for [`attribute`](highwater_core::phases) and the state of each
//! job for scrapes. Invariants: a bad event refuses itself alone, with a reason that is counted; everything kept is
//! bounded by [`Limits`]; a step's number is a value, never a label. Absent on purpose: memory, which is joined later.

mod batch;
mod complaints;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub(crate) mod fuzzing;
mod home;
pub mod http;
mod intake;
mod log;
pub(crate) mod peer;
pub(crate) mod process;
pub mod seqpacket;
pub mod socket;
mod speak;
pub(crate) mod split;
mod tcp;

pub use batch::{Batch, MOST_BATCHED_BYTES};
pub use intake::{Answer, Intake, Refused};
pub use log::{EventLog, LogLimits, Taken};
pub use speak::{due, speak};
