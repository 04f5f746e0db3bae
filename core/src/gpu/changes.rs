//! The log of GPU changes other than readings, for recordings: whether each GPU answers, and its XIDs. It is updated in each
//! turn of the detectors, so a recording has what the detectors saw, except for changes in the microseconds between the update
//! and the detectors.

use super::{GpuState, Health, Xid};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Maximum number of changes that are kept individually. Of older changes, only the last of each GPU and kind is kept.
const MOST_KEPT: usize = 1_024;

/// Maximum length of the reason why a GPU is lost, in characters.
pub const MOST_TROUBLE: usize = 64;

/// Maximum bytes of the log for this number of GPUs: the individual changes, and the last health and 256 XIDs of each GPU.
#[must_use]
pub const fn most_bytes(gpus: usize) -> usize {
    const OF_XID: usize = size_of::<GpuChange>() + 32;
    (MOST_KEPT + 2 * gpus) * (size_of::<GpuChange>() + 4 * MOST_TROUBLE) + gpus * 256 * OF_XID
}

/// One change of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuChange {
    /// The turn in which it was seen, nanoseconds of the timeline.
    pub at_ns: i64,
    /// The GPU's position.
    pub gpu: usize,
    /// What it is now.
    pub what: Changed,
}

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// Whether it answers.
    Health {
        /// Whether it does.
        health: Health,
        /// Why it is lost; empty otherwise.
        trouble: String,
    },
    /// Errors of one number.
    Xid {
        /// NVIDIA's number.
        xid: u64,
        /// How often, and when last.
        seen: Xid,
    },
}

/// The changes of a node's GPUs. One thread notes, any other looks.
#[derive(Debug, Default)]
pub struct ChangeLog {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// By position, as it was noted last.
    gpus: Vec<State>,
    /// Of the changes that were removed from `kept`, the last of each GPU and kind, oldest first.
    before: Vec<GpuChange>,
    kept: VecDeque<GpuChange>,
    /// Changes noted so far: the number of the next one.
    count: u64,
}

#[derive(Debug)]
struct State {
    health: Health,
    trouble: String,
    /// How often each was seen.
    xids: BTreeMap<u64, u64>,
}

impl Default for State {
    fn default() -> Self {
        Self { health: Health::Up, trouble: String::new(), xids: BTreeMap::new() }
    }
}

impl ChangeLog {
    /// Notes what has changed since the last time, in the turn at `at_ns`. Before the first time all GPUs answered and had
    /// no XID.
    pub fn note(&self, at_ns: i64, gpus: &[GpuState]) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.gpus.resize_with(gpus.len(), State::default);
        for (gpu, state) in gpus.iter().enumerate() {
            let changed = inner.gpus[gpu].changed(state);
            for what in changed {
                inner.push(GpuChange { at_ns, gpu, what });
            }
        }
    }

    /// The changes from number `next` on, oldest first, and the number to ask for next. If some of these were dropped,
    /// the result begins with the last dropped change of each GPU and kind, which may be older than `next`.
    #[must_use]
    pub fn since(&self, next: u64) -> (Vec<GpuChange>, u64) {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let first = inner.count - inner.kept.len() as u64;
        let skipped = usize::try_from(next.saturating_sub(first)).unwrap_or(usize::MAX);
        let before = if next < first { inner.before.as_slice() } else { &[] };
        (before.iter().chain(inner.kept.iter().skip(skipped)).cloned().collect(), inner.count)
    }
}

impl Inner {
    fn push(&mut self, change: GpuChange) {
        if self.kept.len() >= MOST_KEPT
            && let Some(oldest) = self.kept.pop_front()
        {
            self.before.retain(|earlier| !oldest.replaces(earlier));
            self.before.push(oldest);
        }
        self.kept.push_back(change);
        self.count += 1;
    }
}

impl State {
    /// Updates this state to that of the GPU. Returns what changed.
    fn changed(&mut self, of: &GpuState) -> Vec<Changed> {
        let mut changed = Vec::new();
        let health = of.health();
        let trouble = if health == Health::Lost { of.trouble() } else { String::new() };
        let trouble: String = trouble.chars().take(MOST_TROUBLE).collect();
        if (self.health, &self.trouble) != (health, &trouble) {
            (self.health, self.trouble) = (health, trouble.clone());
            changed.push(Changed::Health { health, trouble });
        }
        for (xid, seen) in of.xids() {
            if self.xids.insert(xid, seen.count) != Some(seen.count) {
                changed.push(Changed::Xid { xid, seen });
            }
        }
        changed
    }
}

impl GpuChange {
    /// Whether this change makes an earlier one obsolete: it is of the same GPU and kind, and for XIDs of the same number.
    #[must_use]
    pub fn replaces(&self, earlier: &Self) -> bool {
        let is_same = match (&self.what, &earlier.what) {
            (Changed::Health { .. }, Changed::Health { .. }) => true,
            (Changed::Xid { xid, .. }, Changed::Xid { xid: other, .. }) => xid == other,
            _ => false,
        };
        is_same && self.gpu == earlier.gpu
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Device;

    fn gpus() -> Vec<GpuState> {
        ["0", "1"].map(|index| GpuState::new(Device { index: index.into(), ..Device::default() }, 1, 1)).into()
    }

    fn health(at_ns: i64, gpu: usize, health: Health, trouble: &str) -> GpuChange {
        GpuChange { at_ns, gpu, what: Changed::Health { health, trouble: trouble.into() } }
    }

    fn xid(at_ns: i64, gpu: usize, xid: u64, count: u64, last_ns: i64) -> GpuChange {
        GpuChange { at_ns, gpu, what: Changed::Xid { xid, seen: Xid { count, last_ns } } }
    }

    #[test]
    fn each_change_is_returned_once_with_the_turn_that_saw_it() {
        let (log, gpus) = (ChangeLog::default(), gpus());
        log.note(10, &gpus);
        assert_eq!(log.since(0), (Vec::new(), 0), "all is well");
        gpus[1].lose("gone");
        gpus[0].count_xid(79, 11);
        gpus[0].count_xid(79, 12);
        log.note(20, &gpus);
        let (first, next) = log.since(0);
        assert_eq!(first, [xid(20, 0, 79, 2, 12), health(20, 1, Health::Lost, "gone")]);
        log.note(30, &gpus);
        assert_eq!(log.since(next), (Vec::new(), 2));
        gpus[1].lose("gone for good");
        log.note(40, &gpus);
        gpus[1].set_back();
        gpus[0].count_xid(79, 41);
        log.note(50, &gpus);
        let later =
            [health(40, 1, Health::Lost, "gone for good"), xid(50, 0, 79, 3, 41), health(50, 1, Health::Up, "")];
        assert_eq!(log.since(next), (later.to_vec(), 5));
    }

    #[test]
    fn of_what_is_not_kept_any_more_the_last_of_each_kind_is_known() {
        let (log, gpus) = (ChangeLog::default(), gpus());
        gpus[0].count_xid(13, 1);
        gpus[1].lose("gone");
        log.note(5, &gpus);
        for turn in 0..MOST_KEPT as i64 {
            gpus[0].count_xid(31, turn);
            log.note(10 + turn, &gpus);
        }
        let (all, next) = log.since(0);
        assert_eq!((all.len(), next), (MOST_KEPT + 2, MOST_KEPT as u64 + 2));
        assert_eq!(all[..3], [xid(5, 0, 13, 1, 1), health(5, 1, Health::Lost, "gone"), xid(10, 0, 31, 1, 0)]);
        gpus[1].set_back();
        gpus[0].count_xid(31, 7);
        log.note(9_999, &gpus);
        let (all, _) = log.since(0);
        assert_eq!(all[2], xid(11, 0, 31, 2, 1), "which takes the place of the one before");
        assert_eq!(all.len(), MOST_KEPT + 3);
        assert_eq!(log.since(next).0.len(), 2, "whoever follows has nothing twice");
        let oldest_kept = next + 2 - MOST_KEPT as u64;
        assert_eq!(log.since(oldest_kept).0.len(), MOST_KEPT, "nor who follows from the oldest that is kept");
    }

    #[test]
    fn why_a_gpu_is_lost_is_kept_in_part_and_the_bytes_are_bounded() {
        let (log, gpus) = (ChangeLog::default(), gpus());
        gpus[0].lose(&"é".repeat(MOST_TROUBLE + 1));
        log.note(1, &gpus);
        assert_eq!(log.since(0).0, [health(1, 0, Health::Lost, &"é".repeat(MOST_TROUBLE))]);
        gpus[0].set_health(Health::Hung);
        log.note(2, &gpus);
        assert_eq!(log.since(1).0, [health(2, 0, Health::Hung, "")], "there is no reason why it hangs");
        let one = size_of::<GpuChange>() + 4 * MOST_TROUBLE;
        let xids = 256 * (size_of::<GpuChange>() + 32);
        assert_eq!(most_bytes(8), (MOST_KEPT + 16) * one + 8 * xids);
    }

    #[test]
    fn a_change_replaces_earlier_ones_of_its_gpu_and_kind() {
        let (lost, fell) = (health(1, 0, Health::Lost, "gone"), xid(1, 0, 79, 1, 1));
        assert!(health(2, 0, Health::Up, "").replaces(&lost) && !health(2, 1, Health::Up, "").replaces(&lost));
        assert!(xid(2, 0, 79, 2, 2).replaces(&fell) && !xid(2, 1, 79, 2, 2).replaces(&fell));
        assert!(!xid(2, 0, 31, 1, 2).replaces(&fell) && !fell.replaces(&lost) && !lost.replaces(&fell));
    }
}
