//! What the system says of a sending process, where its events do not: its environment its job and its rank, its
//! control groups its container.
//!
//! Reading a process's environment takes that process's memory-map lock, and reads whatever memory it says that its
//! environment is: a process can make that slow, or endless. So it is read on threads that do nothing else, to a bounded
//! length, for a bounded time; events that wait for it are parked with it, and nobody else waits. Invariants: no lock is
//! held while a process is read; of one owner at most [`MOST_STUCK`] reads hang, after which its processes are not read.

use super::account::{Account, Pod};
use super::place::Place;
use crate::clock::SECOND_NS;
use crate::kubelet::{Home, Kubelet};
use std::collections::{HashMap, VecDeque};
use std::io::Read as _;
use std::path::{Path, PathBuf};
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
/// Processes remembered at a time.
pub(crate) const MOST_PEERS: usize = 1024;
/// A longer value of a variable is not kept, bytes: as of attributes.
pub(crate) const MOST_BYTES: usize = 1024;
/// How much of an environment is read: what the kernel lets a single variable have. A process may say that terabytes are
/// its environment.
pub(crate) const MOST_ENVIRON_BYTES: u64 = 128 << 10;
/// How much of the list of control groups is read.
const MOST_CGROUP_BYTES: u64 = 64 << 10;
/// How long what was read is believed: a process id can be used again.
const KEEP_NS: i64 = 10 * SECOND_NS;
/// How long it is believed that a process's container is not known.
const LOOK_AGAIN_NS: i64 = SECOND_NS;
/// How long a process is waited for.
pub(super) const DEADLINE_NS: i64 = SECOND_NS;
/// Processes of one owner that wait to be read.
const MOST_WAITING: usize = 32;
/// Events that wait for one process.
const MOST_PARKED: usize = 256;
/// Reads of one owner that hang before no other process of it is read.
const MOST_STUCK: usize = 2;
/// Threads that read, those that hang among them.
pub(crate) const MOST_READERS: usize = 8;
/// How often what has been parked meanwhile is looked for, before its order counts for less than the end.
const MOST_ROUNDS: usize = 16;

/// What is known of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peer {
    pub job: Option<String>,
    pub rank: Option<u32>,
    pub place: Place,
    /// Which container it is in; not known where no kubelet is asked.
    pub home: Home,
    /// Since when it is known to be there, nanoseconds of the timeline.
    pub since_ns: i64,
}

impl Peer {
    /// The pod that it is in, where known.
    pub fn pod(&self) -> Option<Pod> {
        let Home::Container(container) = &self.home else { return None };
        Some(Pod { namespace: container.namespace.clone(), name: container.pod.clone() })
    }
}

/// What became of a question.
#[derive(Debug)]
pub(super) enum Told {
    /// This is known.
    Known(Arc<Peer>),
    /// It is being read.
    Later,
    /// Too much waits for this owner's processes already.
    Full,
}

/// Processes looked at lately. `Event` is what waits for them.
pub(super) struct Peers<Event> {
    /// Where the system tells of processes.
    proc: PathBuf,
    /// Who knows which container is which; `None` where nobody is to be asked.
    kubelet: Option<Arc<Kubelet>>,
    /// Whether there are threads that read; else whoever asks reads: tools that play recordings, and tests.
    is_threaded: AtomicBool,
    state: Mutex<State<Event>>,
    wanted: Condvar,
}

struct State<Event> {
    known: HashMap<u32, (i64, Arc<Peer>)>,
    /// Processes that are read, or will be.
    lookups: HashMap<u32, Lookup<Event>>,
    queue: VecDeque<u32>,
    /// Reads that were given up and have not come back, by process.
    stuck: Vec<(u32, Arc<Account>)>,
    readers: usize,
    is_ended: bool,
}

struct Lookup<Event> {
    account: Arc<Account>,
    asked_ns: i64,
    is_begun: bool,
    /// What is known already: its container.
    so_far: Peer,
    parked: Vec<Event>,
}

/// What a turn of [`Peers::advance`] leaves to do.
pub(super) struct Overdue {
    /// Processes that are waited for no longer.
    pub pids: Vec<u32>,
    /// Whether another thread is to read, because one hangs.
    pub needs_reader: bool,
}

impl<Event> Default for Peers<Event> {
    fn default() -> Self {
        let (known, lookups, queue) = (HashMap::new(), HashMap::new(), VecDeque::new());
        let state = State { known, lookups, queue, stuck: Vec::new(), readers: 0, is_ended: false };
        let (is_threaded, state, wanted) = (AtomicBool::new(false), Mutex::new(state), Condvar::new());
        Self { proc: "/proc".into(), kubelet: None, is_threaded, state, wanted }
    }
}

impl<Event> Peers<Event> {
    /// Those of a node with this kubelet.
    pub fn with_kubelet(kubelet: Option<Arc<Kubelet>>) -> Self {
        Self { kubelet, ..Self::default() }
    }

    /// The same, told by files elsewhere.
    #[cfg(test)]
    pub fn at(self, proc: PathBuf) -> Self {
        Self { proc, ..self }
    }

    /// What is known of this process, whose owner has this account. Where it has to be read first, `event` is kept with it,
    /// if there is one, until [`drain`](Self::drain) gives it back. A process that may not be looked at, or is gone, has
    /// nothing known.
    pub fn ask(&self, pid: u32, account: &Arc<Account>, now_ns: i64, event: &mut Option<Event>) -> Told {
        if !self.is_threaded.load(Ordering::Relaxed) {
            return self.ask_here(pid, now_ns);
        }
        let mut state = self.state();
        if let Some(lookup) = state.lookups.get_mut(&pid) {
            if event.is_some() && lookup.parked.len() >= MOST_PARKED {
                return Told::Full;
            }
            lookup.parked.extend(event.take());
            return Told::Later;
        }
        if let Some(peer) = state.fresh(pid, self.kubelet.is_some(), now_ns) {
            return Told::Known(peer);
        }
        if state.stuck.iter().filter(|(_, of)| Arc::ptr_eq(of, account)).count() >= MOST_STUCK {
            return Told::Known(Arc::new(Peer { since_ns: now_ns, ..Peer::default() }));
        }
        if state.lookups.values().filter(|lookup| Arc::ptr_eq(&lookup.account, account)).count() >= MOST_WAITING {
            return Told::Full;
        }
        let parked = event.take().into_iter().collect();
        let (account, so_far) = (Arc::clone(account), Peer::default());
        state.lookups.insert(pid, Lookup { account, asked_ns: now_ns, is_begun: false, so_far, parked });
        state.queue.push_back(pid);
        drop(state);
        self.wanted.notify_one();
        Told::Later
    }

    fn ask_here(&self, pid: u32, now_ns: i64) -> Told {
        if let Some(peer) = self.state().fresh(pid, self.kubelet.is_some(), now_ns) {
            return Told::Known(peer);
        }
        let peer = self.read_environ(pid, self.read_home(pid, now_ns));
        Told::Known(self.state().learn(pid, peer, now_ns))
    }

    /// Reads processes as they are asked for, until [`end`](Self::end). `read` hears of each that is known now, and drains
    /// it. A thread whose read was given up ends when that comes back, where another has taken its place.
    pub fn read_until_ended(&self, now_ns: impl Fn() -> i64, read: impl Fn(u32)) {
        self.state().readers += 1;
        while let Some(pid) = self.next() {
            let so_far = self.read_home(pid, now_ns());
            if let Some(lookup) = self.state().lookups.get_mut(&pid) {
                lookup.so_far.clone_from(&so_far);
            }
            let peer = self.read_environ(pid, so_far);
            let was_given_up = {
                let mut state = self.state();
                state.learn(pid, peer, now_ns());
                let before = state.stuck.len();
                state.stuck.retain(|(stuck, _)| *stuck != pid);
                before > state.stuck.len()
            };
            read(pid);
            if was_given_up && self.state().readers > 1 {
                break;
            }
        }
        self.state().readers -= 1;
    }

    fn next(&self) -> Option<u32> {
        let mut state = self.state();
        loop {
            if state.is_ended {
                return None;
            }
            if let Some(pid) = state.queue.pop_front() {
                if let Some(lookup) = state.lookups.get_mut(&pid) {
                    lookup.is_begun = true;
                    return Some(pid);
                }
                continue;
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
        let is_late = |lookup: &Lookup<Event>| now_ns.saturating_sub(lookup.asked_ns) >= DEADLINE_NS;
        let late: Vec<u32> = state.lookups.iter().filter(|(_, lookup)| is_late(lookup)).map(|(pid, _)| *pid).collect();
        for pid in &late {
            let Some((account, is_begun, peer)) = state
                .lookups
                .get(pid)
                .map(|lookup| (Arc::clone(&lookup.account), lookup.is_begun, lookup.so_far.clone()))
            else {
                continue;
            };
            state.queue.retain(|waiting| waiting != pid);
            if is_begun && !state.stuck.iter().any(|(stuck, _)| stuck == pid) {
                state.stuck.push((*pid, account));
            }
            // What was known before is likelier than nothing.
            let known = state.known.get(pid).map(|(_, peer)| Peer::clone(peer));
            state.learn(*pid, known.unwrap_or(peer), now_ns);
        }
        let is_short = state.stuck.len() >= state.readers && state.readers < MOST_READERS;
        Overdue { pids: late, needs_reader: is_short && !state.is_ended && self.is_threaded.load(Ordering::Relaxed) }
    }

    /// What waited for this process, until nothing more does; each round is given to `take`.
    pub fn drain(&self, pid: u32, mut take: impl FnMut(Vec<Event>)) {
        for round in 0.. {
            let parked = {
                let mut state = self.state();
                let Some(lookup) = state.lookups.get_mut(&pid) else { return };
                let parked = std::mem::take(&mut lookup.parked);
                if parked.is_empty() || round >= MOST_ROUNDS {
                    state.lookups.remove(&pid);
                }
                parked
            };
            if parked.is_empty() {
                return;
            }
            take(parked);
        }
    }

    fn state(&self) -> MutexGuard<'_, State<Event>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_home(&self, pid: u32, now_ns: i64) -> Peer {
        let cgroup = || read_at_most(&self.process(pid).join("cgroup"), MOST_CGROUP_BYTES);
        let home =
            self.kubelet.as_ref().and_then(|kubelet| Some(kubelet.home_of(&String::from_utf8_lossy(&cgroup()?))));
        Peer { since_ns: now_ns, home: home.unwrap_or_default(), ..Peer::default() }
    }

    fn read_environ(&self, pid: u32, so_far: Peer) -> Peer {
        // A process that has just ended has an empty one.
        let environ = read_at_most(&self.process(pid).join("environ"), MOST_ENVIRON_BYTES);
        let environ = environ.filter(|environ| !environ.is_empty());
        let parsed = environ.as_deref().map(parse).unwrap_or_default();
        let mut peer = Peer { home: so_far.home, since_ns: so_far.since_ns, ..parsed };
        // Where the environment may not be read, it may name the job, and does name the rank.
        if let (Some(_), Home::Container(container)) = (environ, &peer.home) {
            peer.job.get_or_insert_with(|| format!("{}/{}", container.namespace, container.pod));
        }
        peer
    }

    fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }
}

impl<Event> State<Event> {
    /// What is known of a process and can still be believed.
    fn fresh(&self, pid: u32, asks_kubelet: bool, now_ns: i64) -> Option<Arc<Peer>> {
        let (read_ns, peer) = self.known.get(&pid)?;
        // A container that has just begun gets its link a little later.
        let keep_ns = if asks_kubelet && peer.home == Home::Unknown { LOOK_AGAIN_NS } else { KEEP_NS };
        (now_ns.saturating_sub(*read_ns) <= keep_ns).then(|| Arc::clone(peer))
    }

    fn learn(&mut self, pid: u32, mut peer: Peer, now_ns: i64) -> Arc<Peer> {
        if let Some((_, before)) = self.known.get(&pid).filter(|(_, before)| before.home == peer.home) {
            peer.since_ns = before.since_ns;
        }
        if self.known.len() >= MOST_PEERS && !self.known.contains_key(&pid) {
            self.known.retain(|_, (read_ns, _)| now_ns.saturating_sub(*read_ns) <= LOOK_AGAIN_NS);
            if self.known.len() >= MOST_PEERS {
                self.known.clear();
            }
        }
        let peer = Arc::new(peer);
        self.known.insert(pid, (now_ns, Arc::clone(&peer)));
        peer
    }
}

/// The begin of a file; `None` where it cannot be read, as of a process of another user.
fn read_at_most(path: &Path, most_bytes: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(most_bytes).read_to_end(&mut bytes).ok()?;
    Some(bytes)
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
        ..Peer::default()
    }
}

#[cfg(test)]
mod tests;
