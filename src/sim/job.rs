//! One training job as a stream of timed moments: its memory and activity, and its annotations.
//!
//! Enters: a job of a scenario. Leaves: [`RankEvent`]s in order of time, endless unless the job ends. Both the GPUs'
//! readings and the annotations come from this one generator, so they agree to the nanosecond. Each reader has its own
//! copy that computes only the part it [selects](Select). Invariant: a moment is a pure function of the scenario and
//! its seed; selecting less does not change the rest.

mod curve;
mod layers;
mod life;
mod modules;
mod moment;
mod pipeline;
mod plan;
mod step;
mod timeline;

pub(super) use moment::{RankEvent, Select, State, Traffic, What};
pub(super) use plan::Plan;
pub(super) use timeline::Timeline;
