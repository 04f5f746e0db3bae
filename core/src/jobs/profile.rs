//! A layer profile: what each layer of a rank did in one profiled step, in the order in which they ran.
//!
//! Enters: records, one per layer and pass. Leaves: the rank's last whole profile with its totals. Invariants: a profile is
//! shown only when its step is over, at once and as a whole; its bytes are on the account of its sender for as long as
//! anybody keeps it; what found no room is counted. Absent on purpose: names, of which the job keeps one copy, and
//! profiles of earlier steps.

mod building;
mod code;
mod complete;
mod tally;

pub(super) use building::Profiles;
pub(super) use complete::LayerNames;
pub use complete::{Cursor, Profile, Record, Top};
pub use tally::{Tallied, Tally, Totals};
