//! The version of the node's devices.
//!
//! Positions of GPUs are found without the jobs' lock, and hold for the devices at that time. Invariant: what was found for
//! other devices is not used.

use std::sync::atomic::{AtomicU64, Ordering};

/// Twice the number of changes of the devices; odd during a change.
#[derive(Debug, Default)]
pub(super) struct DevicesVersion(AtomicU64);

impl DevicesVersion {
    /// Changes the devices.
    pub fn change<T>(&self, change: impl FnOnce() -> T) -> T {
        self.0.fetch_add(1, Ordering::SeqCst);
        let changed = change();
        self.0.fetch_add(1, Ordering::SeqCst);
        changed
    }

    /// The version of the devices that positions found now refer to; `None` during a change.
    pub fn now(&self) -> Option<u64> {
        Some(self.0.load(Ordering::SeqCst)).filter(|changes| changes % 2 == 0)
    }

    /// Whether positions found for the device version `those` are still valid. Call it under the jobs' lock, which a
    /// change of the devices takes too.
    pub fn are_still(&self, those: Option<u64>) -> bool {
        those.is_some() && self.now() == those
    }
}
