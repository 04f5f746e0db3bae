//! What the environment of a sending process says, where its events do not: its job, its rank, its devices.
//!
//! Reading a process's environment takes that process's memory-map lock, and reads whatever memory it says that its
//! environment is: a process can make that slow, or endless. So it is read on threads that do nothing else, to a bounded
//! length, for a bounded time, once for each process; events that wait for it are parked with it and taken in their order,
//! and nobody else waits. Invariants: no lock is held while a process is read; of one owner at most [`MOST_STUCK`] reads
//! hang, after which its processes are not read; owners have their turns by how many of their processes are being read.

use super::process::{KEEP_NS, LOOK_AGAIN_NS, remember, started};
use crate::files::read_at_most;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::jobs::{Account, Place};
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Variables that name a job, in the order in which they are believed, with the prefix that makes the name clear.
const JOB_VARIABLES: [(&str, &str); 3] =
    [("HIGHWATER_JOB", ""), ("SLURM_JOB_ID", "slurm-"), ("TORCHELASTIC_RUN_ID", "torchrun-")];
/// All that is looked for: an environment may have any number of others.
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
/// A longer value of a variable is not kept, bytes: as of attributes.
pub(crate) const MOST_BYTES: usize = 1024;
/// How much of an environment is read: what the kernel lets a single variable have. A process may say that terabytes are
/// its environment.
pub(crate) const MOST_ENVIRON_BYTES: u64 = 128 << 10;
/// How long the reading of a process may take.
pub(crate) const DEADLINE_NS: i64 = SECOND_NS;
/// How long a process may wait until it is read: behind others that take their time.
const WAIT_NS: i64 = 3 * SECOND_NS;
/// How long the oldest waits before another thread is to read too.
const IMPATIENCE_NS: i64 = 100 * MILLISECOND_NS;
/// Processes of one owner that wait to be read.
const MOST_WAITING: usize = 32;
/// Events that wait for one process.
const MOST_PARKED: usize = 1024;
/// Reads of one owner that hang before no other process of it is read.
const MOST_STUCK: usize = 2;
/// Threads that read, those that hang among them.
pub(crate) const MOST_READERS: usize = 8;

/// What is known of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    pub job: Option<String>,
    pub rank: Option<u32>,
    pub place: Place,
    /// Whether its environment could be read: then what it does not name it does not have.
    pub is_read: bool,
}

/// What became of a question.
#[derive(Debug)]
pub(crate) enum Answer {
    /// This is known.
    Known(Arc<Peer>),
    /// It is being read, and the event waits for it.
    Later,
    /// Too much waits for this owner's processes already.
    Full,
}

/// Processes looked at lately. `Event` is what waits for them.
pub(crate) struct Peers<Event> {
    /// Where the system keeps files about processes.
    proc: PathBuf,
    /// Whether there are threads that read; else whoever asks reads: tools that play recordings, and tests.
    is_threaded: AtomicBool,
    state: Mutex<State<Event>>,
    wanted: Condvar,
}

struct State<Event> {
    known: HashMap<u32, Known>,
    /// Processes that are read, or will be.
    lookups: HashMap<u32, Lookup<Event>>,
    queue: VecDeque<u32>,
    /// Reads that were given up and have not come back, by process.
    stuck: Vec<(u32, Arc<Account>)>,
    readers: usize,
    is_ended: bool,
}

struct Known {
    read_ns: i64,
    /// When the process started; `None` of a guess, and where the system does not say.
    started: Option<u64>,
    keep_ns: i64,
    peer: Arc<Peer>,
}

struct Lookup<Event> {
    account: Arc<Account>,
    stage: Stage,
    parked: Vec<Event>,
}

/// How far a lookup has come, each since a time of the timeline, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting(i64),
    Reading(i64),
    /// What waited for it is being taken.
    Draining,
}

/// What a turn of [`Peers::advance`] leaves to do.
pub(crate) struct Overdue {
    /// Processes that are waited for no longer.
    pub pids: Vec<u32>,
    /// Whether another thread is to read.
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
    /// The same, by files elsewhere.
    #[cfg(test)]
    pub fn at(self, proc: PathBuf) -> Self {
        Self { proc, ..self }
    }

    /// What is known of this process, whose owner has this account. Where it has to be read first, `event` is kept with it,
    /// if there is one, until [`drain`](Self::drain) gives it back. Nothing is known of a process that may not be looked at,
    /// or is gone.
    pub fn ask(&self, pid: u32, account: &Arc<Account>, now_ns: i64, event: &mut Option<Event>) -> Answer {
        // Looked at before the lock is taken: the file of another process.
        let is_same = || started(&self.process(pid));
        if let Some(peer) = self.believed(pid, now_ns, is_same) {
            return Answer::Known(peer);
        }
        if !self.is_threaded.load(Ordering::Relaxed) {
            let peer = self.read(pid);
            return Answer::Known(self.state().learn(pid, peer, started(&self.process(pid)), KEEP_NS, now_ns));
        }
        let mut state = self.state();
        if let Some(lookup) = state.lookups.get_mut(&pid) {
            if event.is_some() && lookup.parked.len() >= MOST_PARKED {
                return Answer::Full;
            }
            lookup.parked.extend(event.take());
            return Answer::Later;
        }
        if state.stuck_of(account) >= MOST_STUCK {
            return Answer::Known(Arc::default());
        }
        if state.lookups.values().filter(|lookup| Arc::ptr_eq(&lookup.account, account)).count() >= MOST_WAITING {
            return Answer::Full;
        }
        let (account, stage, parked) =
            (Arc::clone(account), Stage::Waiting(now_ns), event.take().into_iter().collect());
        state.lookups.insert(pid, Lookup { account, stage, parked });
        state.queue.push_back(pid);
        drop(state);
        self.wanted.notify_one();
        Answer::Later
    }

    /// What is known of a process that nobody reads just now, if it can still be believed.
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
        // An environment is what a process began with. Where it has ended since, its last events are still on their way.
        let is_same = start().is_none_or(|started| started == known_start);
        if is_same && let Some(known) = self.state().known.get_mut(&pid) {
            known.read_ns = now_ns;
        }
        is_same.then_some(peer)
    }

    /// Reads processes as they are asked for, until [`end`](Self::end). `read` hears of each that is known now, and drains
    /// it. A thread whose read was given up ends when that comes back, where another has taken its place.
    pub fn read_until_ended(&self, now_ns: impl Fn() -> i64, read: impl Fn(u32)) {
        self.state().readers += 1;
        while let Some(pid) = self.next(&now_ns) {
            let (start, peer) = (started(&self.process(pid)), self.read(pid));
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

    /// The next process to be read: of an owner with the fewest that are.
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

    /// From now on threads read.
    pub fn set_threaded(&self) {
        self.is_threaded.store(true, Ordering::Relaxed);
    }

    /// Ends the threads that read.
    pub fn end(&self) {
        self.state().is_ended = true;
        self.wanted.notify_all();
    }

    /// Gives up what takes too long.
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
            // What was known before is likelier than nothing.
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

    /// Gives what waits for this process to `take`, in its order, until nothing more does. Events that come meanwhile wait
    /// behind it, so that none overtakes another; there are only so many of them.
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

    fn read(&self, pid: u32) -> Peer {
        // A process that has just ended has an empty one.
        let environ = read_at_most(&self.process(pid).join("environ"), MOST_ENVIRON_BYTES).ok();
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
        remember(&mut self.known, pid, known, |known| known.read_ns);
        peer
    }
}

fn parse(environ: &[u8]) -> Peer {
    let entries = environ.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='));
    let variables: HashMap<&str, &str> = entries.filter(|(name, _)| VARIABLES.contains(name)).collect();
    let kept = |name: &str| variables.get(name).copied().filter(|value| value.len() <= MOST_BYTES);
    let get = |name: &str| kept(name).filter(|value| !value.is_empty());
    let number = |names: [&str; 2]| names.into_iter().find_map(|name| get(name)?.parse::<u32>().ok());
    Peer {
        job: JOB_VARIABLES.iter().find_map(|(name, prefix)| Some(format!("{prefix}{}", get(name)?))),
        rank: number(["RANK", "SLURM_PROCID"]),
        place: Place::of_process(
            // Empty, it hides all of them.
            kept("CUDA_VISIBLE_DEVICES").map(str::to_owned),
            number(["LOCAL_RANK", "SLURM_LOCALID"]).map(|rank| rank as usize),
        ),
        is_read: true,
    }
}

#[cfg(test)]
mod tests;
