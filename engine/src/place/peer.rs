//! Reads a sending process's environment for what its events leave out: its job, its rank, its devices.
//!
//! Reading a process's environment takes that process's memory-map lock, and reads whatever memory the process declares
//! as its environment: a process can make that slow, or endless. Environments are therefore read on dedicated threads,
//! up to a bounded length, for a bounded time, once for each process. Events that need the result are parked with the
//! process and taken in order; no other events wait. Invariants: no lock is held while a process is read; when
//! `MOST_STUCK` reads of one owner hang, no more of its processes are read; the next process read belongs to the
//! owner with the fewest reads in progress.

use super::process::{KEEP_NS, LOOK_AGAIN_NS, MOST_PROCESSES, insert_evicting, is_of, started};
use crate::files::read_at_most;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::jobs::{Account, Owner, Place};
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Variables that name a job, in order of precedence, each with the prefix that it gives the job's name.
const JOB_VARIABLES: [(&str, &str); 3] =
    [("HIGHWATER_JOB", ""), ("SLURM_JOB_ID", "slurm-"), ("TORCHELASTIC_RUN_ID", "torchrun-")];
/// What torchrun calls a job that was given no id: every such job of the node would have this name.
const NO_RUN_ID: &str = "none";
/// The variables that are read: an environment may have any number of others.
const VARIABLES: [&str; 8] = [
    "HIGHWATER_JOB",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "SLURM_PROCID",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "SLURM_LOCALID",
];
/// Maximum length of a variable's value, bytes; longer values are dropped. Attributes have the same limit.
pub const MOST_BYTES: usize = 1024;
/// How much of an environment is read: the kernel's limit for a single variable. A process may declare terabytes as its
/// environment.
pub const MOST_ENVIRON_BYTES: u64 = 128 << 10;
/// How long reading a process may take.
pub(crate) const DEADLINE_NS: i64 = SECOND_NS;
/// How long a process may wait behind others until it is read.
const WAIT_NS: i64 = 3 * SECOND_NS;
/// How long the oldest waits before another reader thread is started.
const IMPATIENCE_NS: i64 = 100 * MILLISECOND_NS;
/// Processes of one owner that may wait to be read.
const MOST_WAITING: usize = 32;
/// Events that may wait for one process.
const MOST_PARKED: usize = 1024;
/// Hanging reads of one owner after which no other process of it is read.
const MOST_STUCK: usize = 2;
/// Reader threads, including those that hang.
pub const MOST_READERS: usize = 8;

/// Facts read from one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    pub job: Option<String>,
    pub rank: Option<u32>,
    pub place: Place,
    /// Whether its environment could be read. If so, variables that are missing here are not set.
    pub is_read: bool,
}

/// The result of a lookup.
#[derive(Debug)]
pub(crate) enum LookupOutcome {
    /// The process is known.
    Known(Arc<Peer>),
    /// It is being read, and the event waits for it.
    Later,
    /// Too many events or processes of this owner are waiting already.
    Full,
}

/// Processes read recently. `Event` is the type that is parked.
pub(crate) struct Peers<Event> {
    /// Where the system keeps files about processes.
    proc: PathBuf,
    /// Whether there are reader threads. Without them the caller reads: in tools that play recordings, and in tests.
    is_threaded: AtomicBool,
    state: Mutex<State<Event>>,
    wanted: Condvar,
}

struct State<Event> {
    known: HashMap<u32, Known>,
    /// Processes that are being read, or will be.
    lookups: HashMap<u32, Lookup<Event>>,
    queue: VecDeque<u32>,
    /// Reads that were given up and have not returned, by process.
    stuck: Vec<(u32, Arc<Account>)>,
    readers: usize,
    is_ended: bool,
}

struct Known {
    read_ns: i64,
    /// When the process started; `None` for a guess, and if the system does not report it.
    started: Option<u64>,
    keep_ns: i64,
    peer: Arc<Peer>,
}

struct Lookup<Event> {
    account: Arc<Account>,
    stage: Stage,
    parked: Vec<Event>,
}

/// The stage of a lookup, each since a time of the timeline, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting(i64),
    Reading(i64),
    /// Its parked events are being taken.
    Draining,
}

/// What remains to be done after [`Peers::advance`].
pub(crate) struct Overdue {
    /// Processes whose lookup was given up.
    pub pids: Vec<u32>,
    /// Whether another reader thread is needed.
    pub needs_reader: bool,
}

impl<Event> Default for Peers<Event> {
    fn default() -> Self {
        let (known, lookups, queue) = (HashMap::new(), HashMap::new(), VecDeque::new());
        let state = State { known, lookups, queue, stuck: Vec::new(), readers: 0, is_ended: false };
        let (is_threaded, state, wanted) = (AtomicBool::new(false), Mutex::new(state), Condvar::new());
        Self { proc: "/proc".into(), is_threaded, state, wanted }
    }
}

impl<Event> Peers<Event> {
    /// The same, with files in another directory.
    #[cfg(test)]
    pub fn at(self, proc: PathBuf) -> Self {
        Self { proc, ..self }
    }

    /// Looks up this process, whose owner has this account. If it has to be read first, `event`, if given, is parked
    /// until [`drain`](Self::drain) hands it back. A process that may not be read, or has ended, yields an empty
    /// result.
    pub fn ask(&self, pid: u32, account: &Arc<Account>, now_ns: i64, event: &mut Option<Event>) -> LookupOutcome {
        // Another process's file, so it is read before the lock is taken.
        let is_same = || started(&self.process(pid));
        if let Some(peer) = self.believed(pid, now_ns, is_same) {
            return LookupOutcome::Known(peer);
        }
        if !self.is_threaded.load(Ordering::Relaxed) {
            let peer = self.read(pid, &account.owner);
            return LookupOutcome::Known(self.state().learn(pid, peer, started(&self.process(pid)), KEEP_NS, now_ns));
        }
        let mut state = self.state();
        if let Some(lookup) = state.lookups.get_mut(&pid) {
            if event.is_some() && lookup.parked.len() >= MOST_PARKED {
                return LookupOutcome::Full;
            }
            lookup.parked.extend(event.take());
            return LookupOutcome::Later;
        }
        if state.stuck_of(account) >= MOST_STUCK {
            return LookupOutcome::Known(Arc::default());
        }
        if state.lookups.values().filter(|lookup| Arc::ptr_eq(&lookup.account, account)).count() >= MOST_WAITING {
            return LookupOutcome::Full;
        }
        let (account, stage, parked) =
            (Arc::clone(account), Stage::Waiting(now_ns), event.take().into_iter().collect());
        state.lookups.insert(pid, Lookup { account, stage, parked });
        state.queue.push_back(pid);
        drop(state);
        self.wanted.notify_one();
        LookupOutcome::Later
    }

    /// Parks an event behind those that wait for this process; returns it if none does.
    pub fn park_behind(&self, pid: u32, event: Event) -> Option<Event> {
        match self.state().lookups.get_mut(&pid) {
            Some(lookup) => {
                lookup.parked.push(event);
                None
            }
            None => Some(event),
        }
    }

    /// The known result for a process that is not being read, if it is still valid.
    fn believed(&self, pid: u32, now_ns: i64, start: impl FnOnce() -> Option<u64>) -> Option<Arc<Peer>> {
        let (known_start, peer) = {
            let state = self.state();
            if state.lookups.contains_key(&pid) {
                return None;
            }
            let known = state.known.get(&pid)?;
            if now_ns.saturating_sub(known.read_ns) <= known.keep_ns {
                return Some(Arc::clone(&known.peer));
            }
            (known.started?, Arc::clone(&known.peer))
        };
        // The environment is fixed at the start of a process. If the process has ended since, its last events may still
        // arrive.
        let is_same = start().is_none_or(|started| started == known_start);
        if is_same && let Some(known) = self.state().known.get_mut(&pid) {
            known.read_ns = now_ns;
        }
        is_same.then_some(peer)
    }

    /// Reads processes as they are requested, until [`end`](Self::end). `read` is called for each process that became
    /// known, and drains it. A thread whose read was given up ends when that read returns, if another thread has taken
    /// its place.
    pub fn read_until_ended(&self, now_ns: impl Fn() -> i64, read: impl Fn(u32)) {
        self.state().readers += 1;
        while let Some(pid) = self.next(&now_ns) {
            let Some(owner) = self.state().lookups.get(&pid).map(|lookup| lookup.account.owner.clone()) else {
                continue;
            };
            let (start, peer) = (started(&self.process(pid)), self.read(pid, &owner));
            let was_given_up = {
                let mut state = self.state();
                state.learn(pid, peer, start, KEEP_NS, now_ns());
                let before = state.stuck.len();
                state.stuck.retain(|(stuck, _)| *stuck != pid);
                if let Some(lookup) = state.lookups.get_mut(&pid) {
                    lookup.stage = Stage::Draining;
                }
                before > state.stuck.len()
            };
            read(pid);
            if was_given_up && self.state().readers > 1 {
                break;
            }
        }
        self.state().readers -= 1;
    }

    /// The next process to read: one of the owner with the fewest reads in progress.
    fn next(&self, now_ns: &impl Fn() -> i64) -> Option<u32> {
        let mut state = self.state();
        loop {
            if state.is_ended {
                return None;
            }
            if let Some(pid) = state.next_of_least(now_ns()) {
                return Some(pid);
            }
            state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// From now on reader threads do the reading.
    pub fn set_threaded(&self) {
        self.is_threaded.store(true, Ordering::Relaxed);
    }

    /// Ends the reader threads.
    pub fn end(&self) {
        self.state().is_ended = true;
        self.wanted.notify_all();
    }

    /// Gives up lookups that take too long.
    pub fn advance(&self, now_ns: i64) -> Overdue {
        let mut state = self.state();
        let is_late = |stage| match stage {
            Stage::Waiting(since_ns) => now_ns.saturating_sub(since_ns) >= WAIT_NS,
            Stage::Reading(since_ns) => now_ns.saturating_sub(since_ns) >= DEADLINE_NS,
            Stage::Draining => false,
        };
        let late: Vec<(u32, Stage, Arc<Account>)> = state
            .lookups
            .iter_mut()
            .filter(|(_, lookup)| is_late(lookup.stage))
            .map(|(pid, lookup)| {
                (*pid, std::mem::replace(&mut lookup.stage, Stage::Draining), Arc::clone(&lookup.account))
            })
            .collect();
        for (pid, stage, account) in &late {
            state.queue.retain(|waiting| waiting != pid);
            if matches!(stage, Stage::Reading(_)) {
                state.stuck.push((*pid, Arc::clone(account)));
            }
            // What was known before is a better guess than nothing.
            let known = state.known.get(pid).map(|known| Peer::clone(&known.peer));
            state.learn(*pid, known.unwrap_or_default(), None, LOOK_AGAIN_NS, now_ns);
        }
        let is_impatient = state.queue.iter().any(|pid| match state.lookups.get(pid).map(|lookup| lookup.stage) {
            Some(Stage::Waiting(since_ns)) => now_ns.saturating_sub(since_ns) >= IMPATIENCE_NS,
            _ => false,
        });
        let is_short = (is_impatient || state.stuck.len() >= state.readers) && state.readers < MOST_READERS;
        let needs_reader = is_short && !state.is_ended && self.is_threaded.load(Ordering::Relaxed);
        Overdue { pids: late.into_iter().map(|(pid, ..)| pid).collect(), needs_reader }
    }

    /// Hands the events parked for this process to `take`, in order, until none is left. Events that arrive meanwhile
    /// are parked behind them, so that none overtakes another; their number is bounded.
    pub fn drain(&self, pid: u32, mut take: impl FnMut(&Arc<Peer>, Vec<Event>)) {
        loop {
            let (peer, parked) = {
                let mut state = self.state();
                let peer = state.known.get(&pid).map(|known| Arc::clone(&known.peer)).unwrap_or_default();
                let Some(lookup) = state.lookups.get_mut(&pid) else { return };
                let parked = std::mem::take(&mut lookup.parked);
                if parked.is_empty() {
                    state.lookups.remove(&pid);
                }
                (peer, parked)
            };
            if parked.is_empty() {
                return;
            }
            take(&peer, parked);
        }
    }

    fn state(&self) -> MutexGuard<'_, State<Event>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection may outlive its process, and the process's id may be another's by then: only the environment of a
    /// process of the sender's user is read.
    fn read(&self, pid: u32, owner: &Owner) -> Peer {
        let process = self.process(pid);
        // The environment of a process that has just ended is empty.
        let environ = read_at_most(&process.join("environ"), MOST_ENVIRON_BYTES).ok();
        // Checked after the read, because another process may have got the id meanwhile.
        let environ = environ.filter(|_| is_of(&process, owner));
        environ.filter(|environ| !environ.is_empty()).as_deref().map(parse).unwrap_or_default()
    }

    fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }
}

impl<Event> State<Event> {
    fn stuck_of(&self, account: &Arc<Account>) -> usize {
        self.stuck.iter().filter(|(_, of)| Arc::ptr_eq(of, account)).count()
    }

    fn next_of_least(&mut self, now_ns: i64) -> Option<u32> {
        let reading = |account: &Arc<Account>| {
            let is_reading = |lookup: &&Lookup<Event>| matches!(lookup.stage, Stage::Reading(_));
            let of = |lookup: &&Lookup<Event>| Arc::ptr_eq(&lookup.account, account);
            self.lookups.values().filter(is_reading).filter(of).count() + self.stuck_of(account)
        };
        let account = |pid: &u32| self.lookups.get(pid).map(|lookup| &lookup.account);
        let (position, _) = self.queue.iter().enumerate().min_by_key(|(_, pid)| account(pid).map_or(0, reading))?;
        let pid = self.queue.remove(position)?;
        self.lookups.get_mut(&pid)?.stage = Stage::Reading(now_ns);
        Some(pid)
    }

    fn learn(&mut self, pid: u32, peer: Peer, started: Option<u64>, keep_ns: i64, now_ns: i64) -> Arc<Peer> {
        let peer = Arc::new(peer);
        let known = Known { read_ns: now_ns, started, keep_ns, peer: Arc::clone(&peer) };
        insert_evicting(&mut self.known, pid, known, MOST_PROCESSES, |known| known.read_ns);
        peer
    }
}

fn parse(environ: &[u8]) -> Peer {
    let entries = environ.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='));
    let variables: HashMap<&str, &str> = entries.filter(|(name, _)| VARIABLES.contains(name)).collect();
    let kept = |name: &str| variables.get(name).copied().filter(|value| value.len() <= MOST_BYTES);
    let get = |name: &str| kept(name).filter(|value| !value.is_empty());
    let number = |names: [&str; 2]| names.into_iter().find_map(|name| get(name)?.parse::<u32>().ok());
    let is_job = |name: &str, value: &&str| name != "TORCHELASTIC_RUN_ID" || *value != NO_RUN_ID;
    let job =
        |(name, prefix): &(&str, &str)| Some(format!("{prefix}{}", get(name).filter(|value| is_job(name, value))?));
    Peer {
        job: JOB_VARIABLES.iter().find_map(job),
        rank: number(["RANK", "SLURM_PROCID"]),
        place: Place::of_process(
            // An empty value hides all devices.
            kept("CUDA_VISIBLE_DEVICES").map(str::to_owned),
            number(["LOCAL_RANK", "SLURM_LOCALID"]).map(|rank| rank as usize),
        ),
        is_read: true,
    }
}

#[cfg(test)]
mod tests;
