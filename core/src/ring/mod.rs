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

pub use points::{Point, Points};
pub use reader::Reader;
pub use summary::{Drop, Summary};
pub use writer::Writer;

use layout::Layout;
use store::Store;
use sync::Arc;

/// What a ring keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How far before the newest reading can be asked for, nanoseconds; at least 1.
    pub retention_ns: i64,
    /// Bytes that the ring may take, all of it together.
    pub max_bytes: usize,
    /// Times are floored to multiples of this, nanoseconds, 1 to 1,000,000,000: 1,000 for live readings, 1 where
    /// times must be kept as they are. Each halving costs one more bit a change point.
    pub resolution_ns: i64,
}

/// Why a ring cannot be made with a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The cap is too small for any ring.
    #[error("max_bytes is {max_bytes}, but the smallest ring takes {min_bytes}")]
    TooSmall {
        /// The cap, bytes.
        max_bytes: usize,
        /// The smallest cap, bytes.
        min_bytes: usize,
    },
    /// The retention is not positive.
    #[error("retention_ns is {0}, but must be at least 1")]
    Retention(i64),
    /// The resolution is out of range.
    #[error("resolution_ns is {0}, but must be 1 to 1,000,000,000")]
    Resolution(i64),
}

/// A reading was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// Its time is before the newest reading, or before the begin of the gap that it would end.
    #[error("the reading is before {not_before_ns} ns, which was already reached")]
    Backward {
        /// The earliest time that is taken, nanoseconds.
        not_before_ns: i64,
    },
    /// Its time is 2^62 ns (146 years) or more away from 1970.
    #[error("{at_ns} ns is not a time that can be kept")]
    OutOfRange {
        /// The time, nanoseconds.
        at_ns: i64,
    },
}

/// Why a query cannot be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// It begins before what is kept, or the writer used its memory again while it was read.
    #[error("only times from {oldest_ns} ns on are kept")]
    Overtaken {
        /// The oldest time that can be asked for, nanoseconds: later than the interval's begin.
        oldest_ns: i64,
    },
    /// The interval ends after the newest reading. [`QueryError::Overtaken`] is checked first, so that no caller waits for the
    /// end of an interval whose begin is lost.
    #[error("only times up to {newest_ns} ns are known yet")]
    Ahead {
        /// Time of the newest reading, nanoseconds.
        newest_ns: i64,
    },
    /// There was no reading yet.
    #[error("there was no reading yet")]
    Empty,
    /// It ends before it begins.
    #[error("the interval ends before it begins")]
    Reversed,
}

/// Makes an empty ring: its one writer, and a reader that can be cloned.
///
/// # Errors
/// If the configuration is impossible.
pub fn ring(config: Config) -> Result<(Writer, Reader), ConfigError> {
    if config.retention_ns < 1 {
        return Err(ConfigError::Retention(config.retention_ns));
    }
    if !(1..=1_000_000_000).contains(&config.resolution_ns) {
        return Err(ConfigError::Resolution(config.resolution_ns));
    }
    let layout = Layout::within(config.max_bytes)
        .map_err(|min_bytes| ConfigError::TooSmall { max_bytes: config.max_bytes, min_bytes })?;
    Ok(with_layout(layout, &config))
}

/// An empty ring whose memory is laid out so; tests lay it out smaller than any cap would.
fn with_layout(layout: Layout, config: &Config) -> (Writer, Reader) {
    let store = Arc::new(Store::new(layout, config.resolution_ns, config.retention_ns));
    (Writer::new(Arc::clone(&store)), Reader::new(store))
}

#[cfg(test)]
mod tests;
