//! Sampling: from a [`Source`](highwater_core::source::Source) into the rings, in lanes of different periods.
//!
//! Enters: a source and a clock. Leaves: change points in one [`ring`](highwater_core::ring) per GPU, the medium and
//! slow lanes' latest readings, and the cost of sampling itself. Invariants: the fast lane never awaits, logs, or waits
//! for a lock that another thread holds for long; every due tick is counted as taken or as missed with its cause; a GPU
//! that fails leaves a gap, never its last value. Absent on purpose: everything that interprets readings.

mod alone;
mod aside;
mod backoff;
mod deadlines;
mod deferred;
mod fast;
#[cfg(test)]
mod hand;
mod idle;
mod lanes;
mod prefetch;
mod roll;
mod schedule;
mod sweep;
mod ticks;
mod units;
mod watch;

pub use backoff::{Backoff, Budget};
pub use deadlines::{Deadlines, Outcome};
pub use fast::{FastLaneSettings, run_paced, run_replay};
pub use lanes::{Lanes, run_events, run_unit, run_units};
pub use roll::RollCall;
pub use schedule::{PROCESS_TURNS, RARE_TURNS, Schedules, pcie_turns};
pub use sweep::{Cause, Sampler, TickStats, Ticked};
pub use ticks::{Sweep, TickLog};
pub use units::{Unit, Units};
pub use watch::watch;
