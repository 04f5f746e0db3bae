//! What recordings show, for people: numbers, a comparison, and a page that opens without a network.
//!
//! Enters: files of any format in the registry `formats`. Leaves: [`Report`], and from it a
//! summary for a terminal, JSON, an HTML page and a picture. Invariants: numbers are of every reading; only what is drawn
//! is thinned, and then every extreme is kept; what a recording does not contain is absent, never 0. Memory is bounded
//! whatever the recording's size: a file in the product's own format is read row by row.

mod advised;
mod allocator;
mod axis;
mod breakdown;
mod by_kernel;
mod by_phase;
mod by_place;
mod compare;
mod condition;
mod curve;
mod frames;
#[cfg(test)]
mod hand;
mod incidents;
mod json;
mod layers;
mod logged;
mod model;
mod packed;
mod page;
mod perfetto;
mod picture;
mod printed;
mod ranks;
mod readers;
mod room;
mod segments;
mod spans;
mod table;
mod text;
mod together;
mod trace;
mod usage;

pub use advised::{Advised, advised, of_modules};
pub use by_kernel::{ComparedKernel, KernelBeside};
pub use by_phase::{ComparedPhase, MedianBeside};
pub use by_place::{ComparedPlaces, PlaceBeside};
pub use compare::{Comparison, Difference};
pub use condition::{Condition, ConditionError, Failed};
pub use curve::{Curve, Point};
pub use json::json;
pub use layers::Layers;
#[cfg(feature = "testing")]
pub use layers::{MOST_NAME_BYTES, MOST_NAMES, MOST_TOP};
pub use model::{FirstSaid, Found, Gpu, Origin, Report};
pub use page::page;
pub use perfetto::perfetto;
pub use picture::picture;
pub use printed::{Printed, Terminal};
pub use ranks::ranks;
pub use room::Room;
pub use spans::{Ended, Row, Span, Spans};
pub use table::{Table, size};
pub use text::{comparison_of_ranks, summary};
pub use together::together;
pub use trace::Traced;
pub use usage::MemoryUsage;
