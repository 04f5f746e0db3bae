//! Ended phases × memory: what each GPU's memory did between a begin and an end, and what that cost.
//!
//! Enters: ended phases, rings, and the medium lane's series. Leaves: [`Attributed`] phases, pressure and flushes.
//! Invariants: no I/O, time is an argument, so that live, replay and test share it; a gap stays a gap. Absent on
//! purpose: any verdict on what is seen.

mod flush;
mod phase;
mod pressure;

pub use flush::{Flush, FlushDetector};
pub use phase::{Attributed, PhaseMemory, attribute, attribute_one};
pub use pressure::{Pressure, THRESHOLDS};
