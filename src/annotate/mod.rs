//! What jobs say of themselves: steps, phases, layers and marks, over HTTP and two Unix sockets.
//!
//! Enters: JSON from untrusted peers. Leaves: ended phases for [`attribute`](crate::attribute) and the state of each
//! job for scrapes. Invariants: a bad event refuses itself alone, with a reason that is counted; everything kept is
//! bounded by [`Limits`]; a step's number is a value, never a label. Absent on purpose: memory, which is joined later.

mod account;
mod batch;
mod complaints;
mod ended;
mod event;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub(crate) mod fuzzing;
pub mod gpus;
mod home;
pub mod http;
mod intake;
mod jobs;
mod limits;
mod log;
pub(crate) mod peer;
mod place;
pub(crate) mod process;
mod rank;
mod refusal;
pub mod seqpacket;
pub mod socket;
mod speak;
pub(crate) mod split;
mod stats;
mod tcp;

pub use account::{Account, Accounts, Owner, Pod, Resource, Sender, Within};
pub use batch::{Batch, MOST_BATCHED_BYTES};
pub use event::{Attributes, Event};
pub use intake::{Answer, Intake, Refused};
pub use jobs::{Ended, Job, Jobs, Mark, PhaseOutcome};
pub use limits::Limits;
pub use log::{EventLog, LogLimits, Taken};
pub use rank::{Open, Rank, SeriesPlace};
pub use refusal::{Outcome, Refusal};
pub use speak::{due, speak};
pub use stats::{DURATION_BOUNDS_S, PhaseStats, WINDOW_SLACK_NS, WINDOWS};
