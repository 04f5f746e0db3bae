//! What the processes of ranks wait for on their host: CPU, memory or storage, as the kernel counts it.
//!
//! Enters: ranks whose host seems to be late, from the detectors; readings of their processes, from the daemon. Leaves:
//! the processes to read, and the share of the time that each waited. Invariants: at most [`MOST_SUSPECTS`] are read at
//! a time; the owner with the most gives one up for an owner with at least two fewer; a rank is forgotten once no
//! detector has asked for it for a minute.

use crate::clock::SECOND_NS;
use crate::jobs::Scope;
use crate::phases::RankKey;
use crate::shares;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranks whose processes are read at a time: each has hundreds of threads.
pub const MOST_SUSPECTS: usize = 8;
/// How long a process is read after a detector has last asked for it. Two blocks of slow steps lie in it.
const HOLD_NS: i64 = 60 * SECOND_NS;
/// How often a process is read.
const PERIOD_NS: i64 = SECOND_NS;
/// Shares are taken over the readings of this long, and only if they span at least `FEWEST_NS`.
const KEPT_NS: i64 = 10 * SECOND_NS;
const FEWEST_NS: i64 = SECOND_NS / 2;

/// What a process waited for up to a moment: totals since any time, nanoseconds. `None` where the kernel does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostWaits {
    /// When it was read, nanoseconds of the timeline.
    pub at_ns: i64,
    /// For a CPU, though it could run: of all threads, each time the one that waited longest.
    pub cpu_ns: Option<u64>,
    /// How long the CPU limit of its control group stopped it, summed over CPUs.
    pub limited_ns: Option<u64>,
    /// For host memory, which the kernel had to reclaim: any task of its control group.
    pub memory_ns: Option<u64>,
    /// For storage, likewise.
    pub storage_ns: Option<u64>,
}

/// The share of the time that a process waited, 0 to 1, by what for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct WaitShares {
    pub cpu: Option<f64>,
    /// Whether the CPU limit of its control group explains the wait for a CPU: it stopped the group for at least half
    /// as long.
    pub is_limited: bool,
    pub memory: Option<f64>,
    pub storage: Option<f64>,
}

/// The ranks whose processes are read.
#[derive(Debug, Default)]
pub(super) struct Hosts(Mutex<BTreeMap<RankKey, Suspect>>);

#[derive(Debug)]
struct Suspect {
    pid: u32,
    asked_ns: i64,
    /// When it was last to be read, whether that succeeded or not.
    tried_ns: Option<i64>,
    readings: VecDeque<HostWaits>,
}

impl Hosts {
    /// Has a rank's process read from now on.
    pub fn want(&self, key: &RankKey, pid: u32, now_ns: i64) {
        let mut suspects = self.lock();
        if let Some(known) = suspects.get_mut(key).filter(|known| known.pid == pid) {
            known.asked_ns = now_ns;
            return;
        }
        suspects.remove(key);
        if suspects.len() >= MOST_SUSPECTS {
            let owner = |key: &RankKey| -> Scope { key.0.scope().clone() };
            let own = suspects.keys().filter(|other| other.0.scope() == key.0.scope()).count();
            let Some((most, count)) = shares::largest(suspects.keys().map(owner)) else { return };
            let given_up = suspects.iter().filter(|(other, _)| *other.0.scope() == most && count > own + 1);
            let Some(oldest) = given_up.min_by_key(|(_, known)| known.asked_ns).map(|(other, _)| other.clone()) else {
                return;
            };
            suspects.remove(&oldest);
        }
        suspects.insert(key.clone(), Suspect { pid, asked_ns: now_ns, tried_ns: None, readings: VecDeque::new() });
    }

    /// The ranks whose processes are to be read now, with these: each about once a second.
    pub fn wanted(&self, now_ns: i64) -> Vec<(RankKey, u32)> {
        let mut suspects = self.lock();
        suspects.retain(|_, known| now_ns - known.asked_ns <= HOLD_NS);
        let is_due = |known: &Suspect| known.tried_ns.is_none_or(|tried_ns| now_ns - tried_ns >= PERIOD_NS);
        let due = suspects.iter_mut().filter(|(_, known)| is_due(known));
        due.map(|(key, known)| {
            known.tried_ns = Some(now_ns);
            (key.clone(), known.pid)
        })
        .collect()
    }

    /// Takes a reading of a rank's process.
    pub fn note(&self, key: &RankKey, reading: HostWaits) {
        let mut suspects = self.lock();
        let Some(known) = suspects.get_mut(key) else { return };
        if known.readings.back().is_some_and(|last| last.at_ns >= reading.at_ns) {
            return;
        }
        known.readings.push_back(reading);
        while known.readings.front().is_some_and(|first| reading.at_ns - first.at_ns > KEPT_NS) {
            known.readings.pop_front();
        }
    }

    /// What a rank's process waited for lately; `None` if that is not known.
    pub fn shares(&self, key: &RankKey) -> Option<WaitShares> {
        let suspects = self.lock();
        let readings = &suspects.get(key)?.readings;
        let (first, last) = (readings.front()?, readings.back()?);
        let length_ns = last.at_ns - first.at_ns;
        if length_ns < FEWEST_NS {
            return None;
        }
        let rise = |of: fn(&HostWaits) -> Option<u64>| of(last)?.checked_sub(of(first)?);
        #[allow(clippy::cast_precision_loss, reason = "a share of seconds")]
        let share = |rise: u64| (rise as f64 / length_ns as f64).min(1.0);
        let (cpu, limited) = (rise(|reading| reading.cpu_ns), rise(|reading| reading.limited_ns));
        Some(WaitShares {
            cpu: cpu.map(share),
            is_limited: cpu.zip(limited).is_some_and(|(cpu, limited)| limited > 0 && limited >= cpu / 2),
            memory: rise(|reading| reading.memory_ns).map(share),
            storage: rise(|reading| reading.storage_ns).map(share),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RankKey, Suspect>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::jobs::JobId;

    fn key(user: &str, rank: u32) -> RankKey {
        (JobId::new(Scope::User(user.into()), "j"), rank)
    }

    fn at(ms: i64, cpu_ms: u64) -> HostWaits {
        HostWaits { at_ns: ms * MILLISECOND_NS, cpu_ns: Some(cpu_ms * 1_000_000), ..HostWaits::default() }
    }

    #[test]
    fn a_share_is_what_was_waited_in_the_last_ten_seconds() {
        let hosts = Hosts::default();
        hosts.note(&key("1", 0), at(0, 0));
        assert_eq!(hosts.shares(&key("1", 0)), None, "nobody asked for it");
        hosts.want(&key("1", 0), 7, 0);
        hosts.note(&key("1", 0), at(0, 5));
        assert_eq!(hosts.shares(&key("1", 0)), None, "one reading");
        hosts.note(&key("1", 0), at(1_000, 305));
        let shares = WaitShares { cpu: Some(0.3), ..WaitShares::default() };
        assert_eq!(hosts.shares(&key("1", 0)), Some(shares));
        hosts.note(&key("1", 0), HostWaits { limited_ns: Some(0), ..at(11_500, 305) });
        assert_eq!(hosts.shares(&key("1", 0)), None, "the others are too old");
        hosts.note(&key("1", 0), HostWaits { limited_ns: Some(200_000_000), memory_ns: Some(9), ..at(12_500, 705) });
        let shares = WaitShares { cpu: Some(0.4), is_limited: true, ..WaitShares::default() };
        assert_eq!(hosts.shares(&key("1", 0)), Some(shares), "what was not read twice is not known");
        let is_read_at = |ms: i64| !hosts.wanted(ms * MILLISECOND_NS).is_empty();
        assert!(is_read_at(12_500) && !is_read_at(13_499), "once a second");
        assert!(is_read_at(13_500) && !is_read_at(13_600), "and no sooner though it could not be read");
        // Another process: its totals are not the same.
        hosts.want(&key("1", 0), 8, 0);
        assert_eq!(hosts.shares(&key("1", 0)), None);
    }

    #[test]
    fn who_has_most_gives_one_up_and_what_is_not_asked_for_is_forgotten() {
        let hosts = Hosts::default();
        let of = |user: &str| hosts.lock().keys().filter(|it| it.0 == key(user, 0).0).count();
        (0..20).for_each(|rank| hosts.want(&key("1", rank), rank, 0));
        assert_eq!(of("1"), MOST_SUSPECTS);
        (0..20).for_each(|rank| hosts.want(&key("2", rank), rank, 0));
        hosts.want(&key("3", 0), 1, SECOND_NS);
        assert_eq!([of("1"), of("2"), of("3")], [4, 3, 1]);
        assert_eq!(hosts.wanted(HOLD_NS + SECOND_NS).len(), 1);
        hosts.wanted(HOLD_NS + SECOND_NS + 1);
        assert!(hosts.lock().is_empty());
    }
}
