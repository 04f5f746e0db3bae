//! What a ring is made with.

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
