//! One GPU's used memory over the last minutes: what was read is kept as change points, and any interval of it can
//! be asked for while more is written.
//!
//! Readings enter through the one [`Writer`]; [`Reader`]s answer for any interval the extremes, the time-weighted
//! mean, the largest fall and regrowth, the time above a threshold, and the points. Time is an argument throughout:
//! nothing here asks for the time, does I/O, takes a lock, or allocates after `ring` except to return points.
//!
//! # Memory
//! ```text
//!  writer ──▶ blocks:  [tag│begin│value│state│part of the whole block│bits of change points ...]  × as the cap allows
//!             slots:   block number → where it lies
//!             tree:    level 1 [tag│part] of 8 blocks each, level 2 of 64, level 3 of 512, ...
//!             marks:   where in a block's bits decoding may begin, at every 32nd change point of the newest blocks
//!             newest, last change point, oldest begin, head, tail
//! ```
//! Change points are coded in bits (`code`); a block of 3 KiB holds some 200 to 2,600 of them, and decodes
//! without any other. When a block is full its part is written to its header, and each node of the `layout`'s tree
//! that it completes is folded from the nodes below. An interval decodes the two blocks at its edges and folds the
//! tree's parts between them: O(log n) nodes. In the newest blocks decoding begins at a mark (`marks`) right before the
//! interval, and an interval since the last change point decodes nothing.
//!
//! Everything is allocated at once and never grows, but pages cost nothing until they are first written, and slots
//! of blocks that are past the retention are used again first: a quiet GPU occupies a few pages whatever the cap is.
//! If what the retention asks for does not fit the cap, the oldest blocks are lost earlier, and
//! [`Reader::oldest_ns`] says so.
//!
//! # Invariants
//! 1. Times that a reader gets or may ask for lie between `oldest_ns` and `newest_ns`. Each only ever grows, and
//!    retention follows the newest reading, never a clock.
//! 2. The writer is wait-free: a change point is a few stores; one that closes a block folds one part a level.
//! 3. A block's published bits never change until its tag is cleared, and a tag is never used again. A reader takes
//!    no word whose block's tag was not the expected one before and after (`seqlock`).
//! 4. Where a reader finds a block gone, `oldest_ns` is already later than what it held, so that
//!    [`QueryError::Overtaken`] always holds a time that is later than the one asked for.
//! 5. A gap is a gap: no value is made up for it, and it counts for no minimum, mean or threshold.

mod code;
mod config;
mod create;
mod errors;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
#[doc(hidden)]
pub mod fuzzing;
mod layout;
mod marks;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
#[allow(dead_code, reason = "the stories ask it more than the fuzz target")]
mod model;
mod points;
mod reader;
mod scan;
mod seqlock;
mod store;
mod summary;
mod sync;
mod writer;

pub use config::Config;
pub use create::ring;
pub use errors::{ConfigError, PushError, QueryError};
pub use points::{Point, Points};
pub use reader::Reader;
pub use summary::{Drop, Summary};
pub use writer::Writer;

#[cfg(test)]
mod tests;
