//! The flight recorder: when something happens, the seconds before it and after it are written to a file. The commands
//! `run` and `record` write everything from their begin to their end (`whole`).
//!
//! Enters: triggers (a finding, an `oom` mark, a request); and, only by reading, the rings, the last sweeps, the last
//! events and the ended phases. Leaves: [recordings](highwater_engine::recording), in a directory whose count and bytes are
//! bounded; `shares` decides by their reasons which of them stay. Invariants: the thread that writes captures
//! (`worker`) has a lower priority than the sampler's, and only reads what the sampler writes; a trigger is decided on
//! its caller's thread, which never waits for the writer; every trigger has one outcome, which is counted; a kill
//! leaves what was committed, which is all of the past once the file has any table. Absent on purpose: what makes a
//! finding, which `detect` knows.

mod admission;
mod allowance;
mod asking;
mod directory;
mod findings;
mod id;
mod layers;
mod profile;
mod recorder;
mod settings;
mod shares;
mod stats;
mod taking;
#[cfg(test)]
mod tests;
mod trigger;
mod whole;
mod worker;

pub use admission::Refusal;
pub use directory::Listed;
pub use profile::Profile;
pub use recorder::{Recorder, Request};
pub use settings::{CaptureSettings, default_directory};
pub use stats::{CaptureStats, Outcome};
pub use trigger::{Reason, Trigger};
pub use whole::{Ended, Whole};
pub use worker::Worker;

use highwater_engine::intake::Intake;
use highwater_engine::shared_state::SharedState;
use taking::Sent;

/// A recorder, which receives `oom` marks from the intake, and what its thread runs. Both are off if the settings name
/// no directory. The rings reach back by `retention_ns` at most.
#[must_use]
pub fn recorder(
    settings: &CaptureSettings,
    retention_ns: i64,
    state: &SharedState,
    intake: &Intake,
) -> (Recorder, Option<Worker>) {
    let (recorder, shared) = Recorder::new(settings, retention_ns, state);
    let worker = shared.map(|(shared, starts)| Worker::new(shared, starts, Sent::of(intake)));
    if worker.is_some() {
        let hears = recorder.clone();
        intake.on_mark(Box::new(move |mark| hears.hear(mark)));
    }
    (recorder, worker)
}
