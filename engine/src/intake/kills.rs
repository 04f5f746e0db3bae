//! Follows the processes that the kernel kills for want of host memory, in the control groups of processes that send annotations.
//!
//! Enters: senders whose end is seen: processes, and connections. Leaves: a [`HostOom`] for each time that the kernel killed processes
//! of their groups, with the sender that ended by it. Rules: the groups are read once a second, and when a sender ends.
//! If a signal ends a sender's process within [`BLAMED_NS`] after a kill in its group, that process was killed; at most
//! as many as the kernel counted. If the process ends by itself in that time, another one was killed before. If no
//! sender ends, the kernel killed some other process. In a group with senders of several owners, kills are not
//! reported: the kernel does not say whose process it was. Invariants: senders and groups are bounded, and one owner
//! has at most half of each; no event waits for a file to be read.

use crate::place::cgroup::{Counts, Groups, MOST_PATH_BYTES, MemoryGroup, Reason, Search};
use crate::place::process::{Ending, ending, is_of, started};
use crate::place::waits::{self, MOST_THREADS, Threads};
use highwater_core::clock::SECOND_NS;
use highwater_core::detect::{HostWaits, MOST_SUSPECTS};
use highwater_core::jobs::{Account, HostOom, SenderId};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How often the count of kills of each group is read.
const LOOK_NS: i64 = SECOND_NS;
/// How often the counts of reached limits, of a group and of those above it, are read even without a new kill.
const LIMITS_NS: i64 = 10 * SECOND_NS;
/// How long after a kill the end of a process is due to it: a process whose GPU holds much memory takes seconds to end.
const BLAMED_NS: i64 = 10 * SECOND_NS;
/// Groups that are read, and senders that are followed.
const MOST_GROUPS: usize = 128;
const MOST_SENDERS: usize = 1024;
/// Senders whose group is looked for at a time.
const MOST_NEW: usize = 32;
/// Bytes of all that is kept.
pub const MOST_KILLS_BYTES: usize =
    MOST_GROUPS * (2 * MOST_PATH_BYTES + 512) + MOST_SENDERS * 256 + 2 * MOST_SUSPECTS * MOST_THREADS * THREAD_BYTES;
/// Bytes of one thread's total in a map, of which up to half is empty.
const THREAD_BYTES: usize = 40;

/// Control groups of senders' processes.
#[derive(Debug)]
pub(super) struct Kills {
    groups: Groups,
    /// Locked while files are read, before `senders`.
    watched: Mutex<State>,
    senders: Mutex<HashMap<SenderId, Follow>>,
    /// How many groups are read.
    count: AtomicUsize,
    /// The threads of processes whose waits are read, each with when it started.
    waiting: Mutex<HashMap<u32, (Option<u64>, Threads)>>,
}

#[derive(Debug, Default)]
struct State {
    looked_ns: Option<i64>,
    groups: BTreeMap<Arc<Path>, Watched>,
    /// What ended senders whose end has not been taken yet.
    ended: HashMap<SenderId, HostOom>,
}

/// A sender.
#[derive(Debug, Clone)]
struct Follow {
    pid: u32,
    account: Arc<Account>,
    /// When its process started, and since when it is followed; `None` until its group was looked for.
    start: Option<u64>,
    since_ns: Option<i64>,
    /// When its group was looked for last; `i64::MIN` if never.
    tried_ns: i64,
    /// Its group.
    folder: Option<Arc<Path>>,
}

#[derive(Debug)]
struct Watched {
    group: MemoryGroup,
    account: Arc<Account>,
    /// Whether another owner has sent from it too.
    is_shared: bool,
    counts: Counts,
    limits_ns: i64,
    pending: Option<Pending>,
}

/// Kills to which no end of a process is due yet.
#[derive(Debug)]
struct Pending {
    oom: HostOom,
    /// Killed processes whose end has not been seen, and whether one of these kills was reported.
    left: u64,
    is_reported: bool,
    since_ns: i64,
}

impl Kills {
    pub fn new(groups: Groups) -> Self {
        Self {
            groups,
            watched: Mutex::default(),
            senders: Mutex::default(),
            count: AtomicUsize::new(0),
            waiting: Mutex::default(),
        }
    }

    /// Follows the group of this sender's process. Its files are read later: an event must not wait for them.
    pub fn watch(&self, sender_id: SenderId, pid: u32, account: &Arc<Account>) {
        if !self.groups.is_on() {
            return;
        }
        let mut senders = self.senders();
        if senders.len() >= MOST_SENDERS || senders.contains_key(&sender_id) {
            return;
        }
        let own = senders.values().filter(|other| Arc::ptr_eq(&other.account, account)).count();
        if own < MOST_SENDERS / 2 {
            let account = Arc::clone(account);
            senders.insert(
                sender_id,
                Follow { pid, account, start: None, since_ns: None, tried_ns: i64::MIN, folder: None },
            );
        }
    }

    /// Reads the groups, at most once a second. Returns kills to which no sender's end was attributed within
    /// [`BLAMED_NS`], each with the senders that were in that group.
    pub fn look(&self, now_ns: i64) -> Vec<(Vec<SenderId>, HostOom)> {
        let mut state = self.state();
        if state.looked_ns.is_some_and(|looked_ns| now_ns.saturating_sub(looked_ns) < LOOK_NS) {
            return Vec::new();
        }
        state.looked_ns = Some(now_ns);
        for (sender_id, mut follow) in self.longest_unplaced() {
            follow.tried_ns = now_ns;
            if state.place(&self.groups, &mut follow, now_ns) {
                follow.since_ns = Some(now_ns);
            }
            if let Some(known) = self.senders().get_mut(&sender_id) {
                *known = follow;
            }
        }
        state.groups.retain(|_, watched| watched.read(now_ns) || watched.pending.is_some());
        self.forget_groups(&mut state);
        let mut nobodys = Vec::new();
        for (folder, watched) in &mut state.groups {
            let is_old = |pending: &mut Pending| now_ns.saturating_sub(pending.since_ns) > BLAMED_NS;
            if let Some(pending) = watched.pending.take_if(is_old).filter(|pending| !pending.is_reported) {
                let is_in = |follow: &Follow| follow.folder.as_ref() == Some(folder) && follow.is_before(&pending);
                let senders = self.senders();
                let beside =
                    senders.iter().filter(|(_, follow)| is_in(follow)).map(|(sender_id, _)| *sender_id).collect();
                let ago_ns = now_ns.saturating_sub(pending.since_ns);
                let oom = HostOom { ago_ns, is_own: Some(false), has_ended: Some(false), ..pending.oom };
                nobodys.push((beside, oom));
            }
        }
        nobodys
    }

    /// The senders whose group is looked for next: those that were not tried for longest, so that an owner's many senders whose
    /// groups are not found keep no other from being placed.
    fn longest_unplaced(&self) -> Vec<(SenderId, Follow)> {
        let senders = self.senders();
        let mut new: Vec<(&SenderId, &Follow)> =
            senders.iter().filter(|(_, follow)| follow.since_ns.is_none()).collect();
        new.sort_by_key(|(_, follow)| follow.tried_ns);
        new.into_iter().take(MOST_NEW).map(|(sender_id, follow)| (*sender_id, follow.clone())).collect()
    }

    /// Stops following a sender that has ended, and keeps the kill that explains its end, for [`take`](Self::take).
    pub fn note_end(&self, sender_id: SenderId, now_ns: i64) {
        if !self.senders().contains_key(&sender_id) {
            return;
        }
        let mut state = self.state();
        let Some(follow) = self.senders().remove(&sender_id) else { return };
        let watched = follow.folder.as_ref().and_then(|folder| state.groups.get_mut(folder));
        let oom = watched.and_then(|watched| {
            watched.read(now_ns);
            watched.end(&follow, ending(&self.groups.process(follow.pid), follow.start), now_ns)
        });
        if let Some(oom) = oom {
            state.ended.insert(sender_id, oom);
        }
        self.forget_groups(&mut state);
    }

    /// Returns and removes the kill that ended this sender, if there was one. Also stops following the sender: an event
    /// of it may have been taken, and may have called `watch` again, after its end was noted.
    pub fn take(&self, sender_id: SenderId) -> Option<HostOom> {
        self.senders().remove(&sender_id);
        if self.groups.is_on() { self.state().ended.remove(&sender_id) } else { None }
    }

    /// What a sender's process waits for on its host; `None` if it is not followed, or another process has its id by now.
    pub fn waits(&self, pid: u32) -> Option<HostWaits> {
        let follow = self.senders().values().find(|follow| follow.pid == pid && follow.start.is_some())?.clone();
        let process = self.groups.process(pid);
        if started(&process) != follow.start || !is_of(&process, &follow.account.owner) {
            return None;
        }
        let group = follow.folder.as_ref().and_then(|folder| Some(self.state().groups.get(folder)?.group.clone()));
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // Only a few processes are asked for at a time, so most of these are old. One that is dropped and asked for
        // again starts without a reading before.
        if waiting.len() >= 2 * MOST_SUSPECTS && !waiting.contains_key(&pid) {
            waiting.clear();
        }
        let (start, threads) = waiting.entry(pid).or_default();
        if *start != follow.start {
            (*start, *threads) = (follow.start, Threads::default());
        }
        waits::read(threads, &process, group.as_ref())
    }

    /// How many control groups are read.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Forgets groups from which nobody sends any more.
    fn forget_groups(&self, state: &mut State) {
        let senders = self.senders();
        let is_sent_from = |folder: &Arc<Path>| senders.values().any(|follow| follow.folder.as_ref() == Some(folder));
        state.groups.retain(|folder, _| is_sent_from(folder));
        self.count.store(state.groups.len(), Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn senders(&self) -> MutexGuard<'_, HashMap<SenderId, Follow>> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Finds the group of a sender. Returns false if it has to be searched later.
    fn place(&mut self, groups: &Groups, follow: &mut Follow, now_ns: i64) -> bool {
        let process = groups.process(follow.pid);
        follow.start = started(&process);
        let group = match groups.of(follow.pid, &follow.account.owner, now_ns) {
            Search::Found(group) => group,
            Search::Nowhere => return true,
            Search::Later => return false,
        };
        // Another's process may have its id by now.
        if !is_of(&process, &follow.account.owner) {
            return true;
        }
        let folder = Arc::clone(group.folder());
        if let Some(watched) = self.groups.get_mut(&folder) {
            watched.is_shared |= !watched.account.owner.speaks_for(&follow.account.owner);
        } else {
            let is_own = |watched: &&Watched| Arc::ptr_eq(&watched.account, &follow.account);
            let own = self.groups.values().filter(is_own).count();
            let Some(counts) = group.counts() else { return true };
            if self.groups.len() >= MOST_GROUPS || own >= MOST_GROUPS / 2 {
                return true;
            }
            let account = Arc::clone(&follow.account);
            let watched = Watched { group, account, is_shared: false, counts, limits_ns: now_ns, pending: None };
            self.groups.insert(Arc::clone(&folder), watched);
        }
        follow.folder = Some(folder);
        true
    }
}

impl Follow {
    /// Whether it was there when processes were killed: one that is started anew did not end by it.
    fn is_before(&self, pending: &Pending) -> bool {
        self.since_ns.is_some_and(|since_ns| since_ns <= pending.since_ns)
    }
}

impl Watched {
    /// Adds the kills since the last time. Returns whether the group is still there.
    fn read(&mut self, now_ns: i64) -> bool {
        let Some(kills) = self.group.kills() else { return false };
        if kills == self.counts.kills && now_ns.saturating_sub(self.limits_ns) < LIMITS_NS {
            return true;
        }
        let Some(now) = self.group.counts() else { return false };
        let killed = now.kills.saturating_sub(self.counts.kills);
        let reason = self.group.reason(&self.counts, &now);
        (self.counts, self.limits_ns) = (now, now_ns);
        if killed == 0 || self.is_shared {
            return true;
        }
        if let Some(pending) = &mut self.pending {
            // The kernel counts one kill after the other. The limit that was reached is counted before them.
            pending.left += killed;
            pending.oom.killed = pending.oom.killed.map(|before| before + killed);
            return true;
        }
        let (is_limit, limit) = match reason {
            Reason::Limit(limit) => (Some(true), Some(limit)),
            Reason::Node => (Some(false), None),
            Reason::Unknown => (None, None),
        };
        let group = limit.as_ref().map_or_else(|| self.group.own_name(), |limit| limit.group.clone());
        let oom = HostOom {
            killed: Some(killed),
            is_limit,
            limit_bytes: limit.and_then(|limit| limit.bytes),
            group: Some(group.into()),
            ..HostOom::default()
        };
        self.pending = Some(Pending { oom, left: killed, is_reported: false, since_ns: now_ns });
        true
    }

    /// What the end of this sender is due to.
    fn end(&mut self, follow: &Follow, ending: Ending, now_ns: i64) -> Option<HostOom> {
        let pending = self.pending.as_mut().filter(|pending| pending.left > 0 && follow.is_before(pending))?;
        let (is_own, has_ended) = match ending {
            Ending::Killed => (Some(true), Some(true)),
            Ending::Unknown => (None, Some(true)),
            Ending::None | Ending::Exits if pending.is_reported => return None,
            Ending::Exits => (Some(false), Some(true)),
            // Its connection ended, as a client closes it before its process ends.
            Ending::None => (Some(false), None),
        };
        pending.is_reported = true;
        pending.left -= u64::from(is_own != Some(false));
        // A process that was killed itself did nothing since.
        let ago_ns = if is_own == Some(true) { 0 } else { now_ns.saturating_sub(pending.since_ns) };
        Some(HostOom { pid: Some(follow.pid), ago_ns, is_own, has_ended, ..pending.oom.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::jobs::{Accounts, Limits, Owner, Within};

    /// Senders with processes in control groups of version 2.
    struct Rig {
        folder: tempfile::TempDir,
        kills: Kills,
        accounts: Accounts,
    }

    const SIGNALED: u32 = 0x404;

    impl Rig {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let groups = Groups::new(folder.path().join("proc"), Some(folder.path().join("cgroup")));
            Self { folder, kills: Kills::new(groups), accounts: Accounts::new(&Limits::default()) }
        }

        fn write(&self, path: String, text: String) {
            let path = self.folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        }

        /// A process with these flags, which started at this time.
        fn process(&self, pid: u32, flags: u32, start: u64) {
            self.write(
                format!("proc/{pid}/stat"),
                format!("{pid} (a) R 1 1 1 0 -1 {flags} {} {start} 0\n", "0 ".repeat(12)),
            );
        }

        fn watch(&self, pid: u32, group: &str, uid: u32) {
            self.process(pid, 0, 5);
            self.write(format!("proc/{pid}/cgroup"), format!("0::/{group}\n"));
            self.write(format!("proc/{pid}/status"), format!("Uid:\t{uid}\t{uid}\n"));
            if !self.folder.path().join("cgroup").join(group).exists() {
                self.counts(group, 0);
            }
            let account = self.accounts.of(&Owner::User { uid, within: Within::Node });
            self.kills.watch(SenderId::Process(pid), pid, &account);
        }

        fn counts(&self, group: &str, kills: u64) {
            self.write(format!("cgroup/{group}/memory.events.local"), format!("oom {kills}\n"));
            self.write(format!("cgroup/{group}/memory.max"), "1024\n".to_owned());
            self.write(format!("cgroup/{group}/memory.events"), format!("oom {kills}\noom_kill {kills}\n"));
        }

        /// The first senders whose group is looked for next.
        fn next(&self) -> Vec<SenderId> {
            self.kills.longest_unplaced().into_iter().map(|(sender_id, _)| sender_id).collect()
        }

        /// Looks after this many seconds, and returns the processes beside which one was killed.
        fn look(&self, seconds: i64) -> Vec<Vec<SenderId>> {
            let beside = self.kills.look(seconds * SECOND_NS);
            assert!(beside.iter().all(|(_, oom)| oom.has_ended == Some(false) && oom.pid.is_none()));
            assert!(beside.iter().all(|(_, oom)| oom.ago_ns > BLAMED_NS), "it has gone on since");
            beside
                .into_iter()
                .map(|(mut sender_ids, _)| {
                    sender_ids.sort_by_key(|sender_id| format!("{sender_id:?}"));
                    sender_ids
                })
                .collect()
        }

        /// Ends a process with these flags.
        fn ends(&self, pid: u32, flags: u32, seconds: i64) -> Option<HostOom> {
            self.process(pid, flags, 5);
            let sender_id = SenderId::Process(pid);
            self.kills.note_end(sender_id, seconds * SECOND_NS);
            self.kills.take(sender_id)
        }

        fn is_killed(&self, pid: u32, seconds: i64) -> bool {
            self.ends(pid, SIGNALED, seconds).is_some_and(|oom| oom.is_own == Some(true))
        }
    }

    #[test]
    fn senders_whose_groups_are_not_found_keep_no_other_from_being_placed() {
        let rig = Rig::new();
        (1..=40).for_each(|pid| rig.watch(pid, "a", 1));
        assert_eq!(rig.next().len(), MOST_NEW);
        rig.kills.senders().values_mut().for_each(|follow| follow.tried_ns = 5);
        rig.watch(99, "b", 2);
        assert_eq!(rig.next()[0], SenderId::Process(99));
        rig.kills.senders().get_mut(&SenderId::Process(7)).expect("one").tried_ns = 4;
        assert_eq!(
            rig.next()[..2],
            [SenderId::Process(99), SenderId::Process(7)],
            "then in the order of the last attempt"
        );
    }

    #[test]
    fn a_process_that_a_signal_ends_within_ten_seconds_of_a_kill_in_its_group_was_killed() {
        let rig = Rig::new();
        for pid in [1, 2, 3] {
            rig.watch(pid, "a", 1);
        }
        rig.watch(4, "b", 1);
        assert!(rig.look(0).is_empty());
        assert_eq!(rig.ends(3, SIGNALED, 1), None, "the kernel killed nothing");
        rig.counts("a", 1);
        let oom = rig.ends(1, SIGNALED, 2).expect("killed, as is read at its end");
        assert_eq!((oom.killed, oom.pid, oom.has_ended, oom.is_own), (Some(1), Some(1), Some(true), Some(true)));
        assert_eq!((oom.is_limit, oom.limit_bytes, oom.group.as_deref()), (Some(true), Some(1024), Some("/a")));
        assert_eq!(
            (rig.kills.take(SenderId::Process(1)), rig.ends(4, SIGNALED, 2)),
            (None, None),
            "once, in its group"
        );
        assert_eq!(rig.ends(2, SIGNALED, 3), None, "one was killed, and one has ended");
        assert_eq!(rig.kills.count(), 0);
    }

    #[test]
    fn waits_add_up_while_one_process_is_followed() {
        let rig = Rig::new();
        rig.watch(7, "ctr", 1);
        rig.look(0);
        let waited = |waited_ns: u64| {
            rig.write("proc/7/task/7/schedstat".to_owned(), format!("1 {waited_ns} 1\n"));
            rig.kills.waits(7).map(|waits| waits.cpu_ns)
        };
        assert_eq!([waited(10), waited(15), waited(18)], [Some(Some(0)), Some(Some(5)), Some(Some(8))]);
        rig.process(7, 0, 6);
        assert_eq!(waited(20), None, "another process has its id");
        assert_eq!(rig.kills.waits(8), None, "nobody sends from it");
        // The other one sends too: it has waited for nothing yet.
        rig.kills.note_end(SenderId::Process(7), SECOND_NS);
        rig.process(7, 0, 6);
        let account = rig.accounts.of(&Owner::User { uid: 1, within: Within::Node });
        rig.kills.watch(SenderId::Process(7), 7, &account);
        rig.look(20);
        assert_eq!([waited(50), waited(53)], [Some(Some(0)), Some(Some(3))]);
    }

    #[test]
    fn as_many_were_killed_as_the_kernel_counts_and_later_ends_are_others() {
        let rig = Rig::new();
        for pid in [1, 2, 3, 4, 5] {
            rig.watch(pid, "a", 1);
        }
        rig.look(0);
        rig.counts("a", 1);
        assert!(rig.look(1).is_empty());
        rig.counts("a", 2);
        assert!(rig.is_killed(1, 9) && rig.is_killed(2, 10) && !rig.is_killed(3, 10));
        assert!(rig.look(12).is_empty());
        rig.counts("a", 3);
        assert!(rig.look(20).is_empty());
        rig.watch(6, "a", 1);
        assert!(rig.look(30).is_empty(), "it may still end");
        assert_eq!(rig.look(31), [[SenderId::Process(4), SenderId::Process(5)]], "6 was not there");
        assert!(rig.look(45).is_empty() && !rig.is_killed(4, 46));
        rig.counts("a", 4);
        assert!(rig.look(45).is_empty(), "read once a second");
        assert!(rig.is_killed(5, 46) && rig.look(60).is_empty());
    }

    #[test]
    fn a_process_that_ends_by_itself_ended_after_another_and_one_that_lives_did_not() {
        let rig = Rig::new();
        for pid in [1, 2, 3, 4] {
            rig.watch(pid, "a", 1);
        }
        rig.look(0);
        rig.counts("a", 1);
        let oom = rig.ends(2, 0x4, 1).expect("its data loader was killed");
        assert_eq!((oom.is_own, oom.has_ended, oom.pid, oom.ago_ns), (Some(false), Some(true), Some(2), 0));
        assert_eq!((rig.ends(3, 0x4, 1), rig.ends(1, 0, 1)), (None, None), "reported once");
        assert!(rig.look(20).is_empty(), "reported");
        rig.watch(5, "a", 1);
        rig.look(21);
        rig.counts("a", 2);
        rig.look(30);
        // Also once the group is gone.
        std::fs::remove_dir_all(rig.folder.path().join("cgroup/a")).expect("gone");
        rig.look(31);
        let closed = rig.ends(5, 0, 31).map(|oom| (oom.is_own, oom.has_ended, oom.ago_ns));
        assert_eq!(closed, Some((Some(false), None, SECOND_NS)), "its connection ended a second later");
        std::fs::remove_dir_all(rig.folder.path().join("proc/4")).expect("gone");
        rig.kills.note_end(SenderId::Process(4), 31 * SECOND_NS);
        assert_eq!(
            rig.kills.take(SenderId::Process(4)).map(|oom| (oom.is_own, oom.has_ended)),
            Some((None, Some(true)))
        );
    }

    #[test]
    fn a_process_that_is_started_after_the_kill_does_not_end_by_it() {
        let rig = Rig::new();
        rig.watch(1, "a", 1);
        rig.look(0);
        rig.counts("a", 1);
        rig.look(1);
        rig.watch(2, "a", 1);
        rig.look(2);
        assert!(!rig.is_killed(2, 3) && rig.is_killed(1, 4));
    }

    #[test]
    fn a_worker_that_is_killed_again_and_again_is_reported_each_time() {
        let rig = Rig::new();
        rig.watch(1, "a", 1);
        let reported = (0..60).filter(|second| {
            rig.counts("a", u64::try_from(second / 5).expect("positive"));
            !rig.look(*second).is_empty()
        });
        assert_eq!(reported.collect::<Vec<_>>(), [16, 31, 46]);
    }

    #[test]
    fn what_is_not_known_is_nobodys() {
        let rig = Rig::new();
        rig.watch(1, "a", 1);
        rig.counts("a", 1);
        assert_eq!(rig.ends(1, SIGNALED, 0), None, "its group was not read");
        // Processes of two owners in one group.
        rig.watch(2, "a", 1);
        rig.watch(3, "a", 2);
        rig.look(0);
        rig.counts("a", 2);
        assert_eq!((rig.ends(2, SIGNALED, 1), rig.ends(3, SIGNALED, 1)), (None, None));
        // Another user's process has the id.
        rig.watch(4, "b", 1);
        rig.write("proc/4/status".to_owned(), "Uid:\t2\t2\n".to_owned());
        rig.look(10);
        assert_eq!(rig.kills.count(), 0);
        // A group that is gone.
        rig.watch(5, "c", 1);
        rig.look(20);
        assert_eq!(rig.kills.count(), 1);
        std::fs::remove_dir_all(rig.folder.path().join("cgroup/c")).expect("gone");
        assert!(rig.look(21).is_empty() && rig.kills.count() == 0);
        assert_eq!(rig.ends(5, SIGNALED, 22), None);
        // What a connection had sent was parked, and is taken after its end was noted.
        rig.kills.note_end(SenderId::Connection(5), 0);
        let account = rig.accounts.of(&Owner::User { uid: 1, within: Within::Node });
        rig.kills.watch(SenderId::Connection(5), 2, &account);
        assert_eq!(rig.kills.take(SenderId::Connection(5)), None);
        let senders: Vec<u32> = rig.kills.senders().values().map(|follow| follow.pid).collect();
        assert_eq!(senders, [4]);
    }

    #[test]
    fn of_the_groups_and_senders_one_owner_has_at_most_half() {
        let rig = Rig::new();
        let most = u32::try_from(MOST_GROUPS).expect("some");
        (0..most).for_each(|pid| rig.watch(1 + pid, &format!("one-{pid}"), 1));
        (0..most).for_each(|pid| rig.watch(1_000 + pid, &format!("other-{pid}"), 2));
        rig.watch(5_000, "third", 3);
        (0..10).for_each(|seconds| drop(rig.look(seconds)));
        let count = |pids: std::ops::Range<u32>| {
            let senders = rig.kills.senders();
            senders.values().filter(|follow| pids.contains(&follow.pid) && follow.folder.is_some()).count()
        };
        let (one, other, third) = (count(0..1_000), count(1_000..5_000), count(5_000..5_001));
        assert!(one <= MOST_GROUPS / 2 && other <= MOST_GROUPS / 2, "{one}, {other}");
        assert_eq!(one + other + third, MOST_GROUPS);
        let account = rig.accounts.of(&Owner::User { uid: 9, within: Within::Node });
        (0..2_000).for_each(|id| rig.kills.watch(SenderId::Connection(id), 1, &account));
        assert_eq!(rig.kills.senders().values().filter(|follow| Arc::ptr_eq(&follow.account, &account)).count(), 512);
    }
}
