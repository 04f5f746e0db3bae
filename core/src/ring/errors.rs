//! Why a ring cannot be made, or does not take or answer something.

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
