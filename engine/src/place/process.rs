//! Reads the start time of a sender's process, and limits how long facts about a process are kept.

use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::Owner;
use std::collections::HashMap;
use std::hash::Hash;
use std::path::Path;

/// Processes remembered at a time, per kind of file.
pub const MOST_PROCESSES: usize = 1024;
/// How long a result is used before the process's start time is checked again: its id can be reused.
pub(super) const KEEP_NS: i64 = 10 * SECOND_NS;
/// How long it is remembered that a process is unknown.
pub(super) const LOOK_AGAIN_NS: i64 = SECOND_NS;
/// How many bytes of a process's state are read.
const MOST_STAT_BYTES: u64 = 64 << 10;
/// Position of the flags in `/proc/PID/stat`, counted after the process's name, and two of them (`PF_EXITING`, `PF_SIGNALED`).
const FLAGS_FIELD: usize = 9 - 3;
const FLAG_EXITING: u64 = 0x4;
const FLAG_SIGNALED: u64 = 0x400;
/// Position of the start time in `/proc/PID/stat`, counted after the process's name.
const START_FIELD: usize = 22 - 3;

/// When a process started, in ticks since boot; `None` if it has ended. `process` is its folder in `/proc`.
pub(crate) fn started(process: &Path) -> Option<u64> {
    Stat::read(process).map(|stat| stat.started)
}

/// What the kernel says of a process.
struct Stat {
    flags: u64,
    started: u64,
}

impl Stat {
    fn read(process: &Path) -> Option<Self> {
        let stat = crate::files::read_at_most(&process.join("stat"), MOST_STAT_BYTES).ok()?;
        // The name may contain any bytes, including brackets.
        let behind = stat.iter().rposition(|byte| *byte == b')')?;
        let fields = std::str::from_utf8(stat.get(behind + 1..)?).ok()?;
        let number = |field: usize| fields.split_ascii_whitespace().nth(field)?.parse().ok();
        Some(Self { flags: number(FLAGS_FIELD)?, started: number(START_FIELD)? })
    }
}

/// How a process is ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It is not.
    None,
    /// A signal ended it.
    Killed,
    /// It ended by itself.
    Exits,
    /// It is gone already, or another process has its id.
    Unknown,
}

/// How the process that started at this time is ending. `process` is its folder in `/proc`.
pub(crate) fn ending(process: &Path, start: Option<u64>) -> Ending {
    let Some(stat) = Stat::read(process).filter(|stat| start.is_none_or(|start| stat.started == start)) else {
        return Ending::Unknown;
    };
    match (stat.flags & FLAG_EXITING != 0, stat.flags & FLAG_SIGNALED != 0) {
        (_, true) => Ending::Killed,
        (true, false) => Ending::Exits,
        (false, false) => Ending::None,
    }
}

/// Now, in ticks since boot.
pub(crate) fn ticks_now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    let a_second = rustix::param::clock_ticks_per_second();
    seconds.saturating_mul(a_second).saturating_add(nanoseconds.saturating_mul(a_second) / 1_000_000_000)
}

/// Whether the process that has this id now started after `ticks` since boot; false if its start time cannot be read.
pub(crate) fn started_after(pid: u32, ticks: u64) -> bool {
    started(&Path::new("/proc").join(pid.to_string())).is_some_and(|started| started > ticks)
}

/// Whether one of a process's user ids is the sender's: the kernel reports one of them when a process connects. `process` is its
/// folder in `/proc`. Always true for an owner without a user, such as that of a recording.
pub(crate) fn is_of(process: &Path, owner: &Owner) -> bool {
    let Owner::User { uid, .. } = owner else { return true };
    users(process).contains(uid)
}

/// A process's user ids, the real one first; none if they cannot be read. `process` is its folder in `/proc`.
pub(super) fn users(process: &Path) -> Vec<u32> {
    let status = crate::files::read_at_most(&process.join("status"), MOST_STAT_BYTES).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.into_iter().flat_map(str::split_ascii_whitespace).filter_map(|id| id.parse().ok()).collect()
}

/// Adds an entry to a map of at most `most` entries. If it is full, evicts the entry with the smallest `at_ns`.
pub(super) fn insert_evicting<K: Eq + Hash + Clone, T>(
    known: &mut HashMap<K, T>,
    key: K,
    one: T,
    most: usize,
    at_ns: impl Fn(&T) -> i64,
) {
    if known.len() >= most && !known.contains_key(&key) {
        let oldest = known.iter().min_by_key(|(_, one)| at_ns(one)).map(|(key, _)| key.clone());
        oldest.and_then(|oldest| known.remove(&oldest));
    }
    known.insert(key, one);
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::jobs::Within;

    #[test]
    fn a_process_is_its_users_and_no_others() {
        let own = Path::new("/proc/self");
        let uid = rustix::process::getuid().as_raw();
        let user = |uid| Owner::User { uid, within: Within::Node };
        assert!(is_of(own, &user(uid)) && is_of(own, &Owner::Daemon));
        assert!(!is_of(own, &user(uid + 1_000)) && !is_of(Path::new("/proc/none"), &user(uid)));
    }

    #[test]
    fn how_a_process_ends_is_known_until_it_is_collected() {
        let run = |script: &str| std::process::Command::new("sh").args(["-c", script]).spawn().expect("sh");
        let folder = |child: &std::process::Child| Path::new("/proc").join(child.id().to_string());
        let own = Path::new("/proc/self");
        assert_eq!((ending(own, started(own)), ending(own, Some(1))), (Ending::None, Ending::Unknown));
        for (script, expected) in [("kill -9 $$", Ending::Killed), ("exit 1", Ending::Exits)] {
            let mut child = run(script);
            let (process, began) = (folder(&child), started(&folder(&child)));
            // Until its parent collects it, it is still there.
            while ending(&process, began) == Ending::None {
                std::thread::yield_now();
            }
            assert_eq!(ending(&process, began), expected, "{script}");
            child.wait().expect("it ended");
            assert_eq!(ending(&process, began), Ending::Unknown);
        }
    }

    #[test]
    fn the_oldest_gives_way_and_one_that_is_known_does_not() {
        let mut known = HashMap::new();
        let most = u32::try_from(MOST_PROCESSES).expect("some");
        (0..most).for_each(|pid| insert_evicting(&mut known, pid, i64::from(pid) + 10, MOST_PROCESSES, |ns| *ns));
        insert_evicting(&mut known, 5, 1, MOST_PROCESSES, |ns| *ns);
        assert_eq!((known.len(), known[&5]), (MOST_PROCESSES, 1), "known already");
        insert_evicting(&mut known, most, 2, MOST_PROCESSES, |ns| *ns);
        assert!(!known.contains_key(&5) && known.contains_key(&most) && known.len() == MOST_PROCESSES);
    }
}
