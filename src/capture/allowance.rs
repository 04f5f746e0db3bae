//! Limits the bytes of jobs' events and phases in a capture, so that no flood fills the file or occupies the thread. Pure.
//!
//! Absent on purpose: who gets how much of it, which [`Given`](highwater_core::shares::Given) decides.

use highwater_core::clock::SECOND_NS;

/// This fraction of the file's limit may be written at once. By default, that is all that the daemon keeps.
const PART_AT_ONCE: u64 = 8;
/// This fraction more may be written each second. By default, that is 0.3 MiB or 4,000 events.
const PART_A_SECOND: u64 = 256;

/// Bytes that may be written, more as time passes.
#[derive(Debug)]
pub(super) struct Allowance {
    file_bytes: u64,
    begin_ns: i64,
}

impl Allowance {
    /// The allowance of a file of `file_bytes` bytes, whose writing begins at `now_ns` of the timeline.
    pub fn new(file_bytes: u64, now_ns: i64) -> Self {
        Self { file_bytes, begin_ns: now_ns }
    }

    /// All that may be written until now.
    pub fn so_far(&self, now_ns: i64) -> usize {
        let elapsed_ns = now_ns.saturating_sub(self.begin_ns).max(0).unsigned_abs();
        let later =
            u128::from(self.file_bytes / PART_A_SECOND) * u128::from(elapsed_ns) / u128::from(SECOND_NS.unsigned_abs());
        let all = (self.file_bytes / PART_AT_ONCE).saturating_add(u64::try_from(later).unwrap_or(u64::MAX));
        usize::try_from(all).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_an_eighth_at_once_and_more_with_time() {
        let allowance = Allowance::new(256 << 10, 5);
        assert_eq!((allowance.so_far(0), allowance.so_far(5)), (32 << 10, 32 << 10));
        assert_eq!(allowance.so_far(5 + SECOND_NS / 2), (32 << 10) + 512);
        assert_eq!(Allowance::new(u64::MAX, 0).so_far(i64::MAX), usize::MAX);
    }
}
