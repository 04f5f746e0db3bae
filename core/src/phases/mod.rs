//! Ended steps, phases and layers × memory: what each GPU's memory did between a begin and an end, and what that cost.
//!
//! Enters: what ended, rings, and the medium lane's series. Leaves: [`Attributed`] ones in the [`Log`], each rank's
//! statistics, pressure and flushes. Invariants: no I/O, time is an argument, so that live, replay and test share it; a gap
//! stays a gap; the log's bytes are bounded. Absent on purpose: any verdict on what is seen, and what is still open.

mod flush;
#[cfg(test)]
pub(crate) mod hand;
mod holders;
mod join;
mod ledger;
mod log;
mod low;
mod memory;
mod pressure;
mod rise;
mod stats;
mod trail;

pub use flush::{Flush, FlushDetector};
pub use join::{Derived, Join, advance_without_node};
pub use ledger::Ledger;
pub use log::{Attributions, Log, Shelf};
pub use low::{FREE_BELOW, LONGEST_WINDOW_S, LowMemory, MOST_FREE_BELOW};
pub use memory::{Attributed, PhaseMemory, attribute, attribute_one};
pub use pressure::{Pressure, THRESHOLDS};
pub use stats::{DURATION_BOUNDS_S, GpuTime, LastLayer, LayerStats, PhaseStats, RankStats, WINDOW_SLACK_NS, WINDOWS};
pub use trail::{Span, Trail, TrailBlock};

use crate::jobs::JobId;

/// Which process of which job.
pub type RankKey = (JobId, u32);
