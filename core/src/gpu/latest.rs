//! What the lanes read last, for scrapes and attribution to look at without waiting for any lane.

use super::changes::Became;
use super::energy::Energy;
use super::series::{Series, UsagePoint};
use super::{Device, Medium, Pcie, Process, Rare, Slow};
use arc_swap::{ArcSwap, ArcSwapOption};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

crate::labels! {
    /// Whether a GPU answers.
    pub enum Health {
        /// It answers.
        Up = "up",
        /// The driver says that it is gone.
        Lost = "lost",
        /// A call on it has not come back: it is asked again only after that call returned.
        Hung = "hung",
    }
}

/// Whether a GPU answers the memory call.
#[repr(u8)]
enum Memory {
    /// It has not been asked.
    Unknown = 0,
    /// It has answered.
    Answered = 1,
    /// It does not have the call.
    Never = 2,
}

/// A reading and when it was taken.
#[derive(Debug, Clone, PartialEq)]
pub struct Latest<T> {
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// What.
    pub reading: T,
}

/// All that is known of one GPU beside its ring.
pub struct GpuState {
    /// The GPU as it was found.
    pub device: Device,
    /// Power and idleness over time, for attribution.
    pub series: Series,
    /// Its energy counter.
    pub energy: Energy,
    /// Whether the lists of its processes have all that hold memory.
    pub lists_all: bool,
    health: AtomicU8,
    /// What is known of its memory call, as [`Memory`].
    memory: AtomicU8,
    /// Calls of the fast lane on it that have not returned: one of a thread that was replaced, and one of its successor.
    fast_calls: AtomicU32,
    /// Whether its own thread has yet to read its memory before the fast lane asks it again.
    doubted: AtomicBool,
    /// Why it does not answer.
    trouble: Mutex<String>,
    medium: ArcSwapOption<Latest<Medium>>,
    slow: ArcSwapOption<Latest<Slow>>,
    processes: ArcSwapOption<Latest<Vec<Process>>>,
    pcie: ArcSwapOption<Latest<Pcie>>,
    rare: ArcSwapOption<Latest<Rare>>,
    xids: Mutex<BTreeMap<u64, Xid>>,
}

/// More than a process holds on a GPU by its context alone: 0.5 GiB on an H200, with the libraries' workspaces less than
/// this.
pub const CONTEXT_BYTES: u64 = 1 << 30;

/// How often one XID was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// Times since the start.
    pub count: u64,
    /// When last, nanoseconds of the timeline.
    pub last_ns: i64,
}

/// NVIDIA has some 200 XIDs; a driver or a recording that makes them up must not fill the memory.
fn has_room(xids: &BTreeMap<u64, Xid>, xid: u64) -> bool {
    xids.len() < 256 || xids.contains_key(&xid)
}

impl GpuState {
    /// A GPU of which nothing has been read yet.
    #[must_use]
    pub fn new(device: Device, keep_ns: i64, medium_period_ns: i64) -> Self {
        Self {
            device,
            series: Series::new(keep_ns, medium_period_ns),
            energy: Energy::default(),
            lists_all: true,
            health: AtomicU8::new(Health::Up as u8),
            memory: AtomicU8::new(Memory::Unknown as u8),
            fast_calls: AtomicU32::new(0),
            doubted: AtomicBool::new(false),
            trouble: Mutex::default(),
            medium: ArcSwapOption::empty(),
            slow: ArcSwapOption::empty(),
            processes: ArcSwapOption::empty(),
            pcie: ArcSwapOption::empty(),
            rare: ArcSwapOption::empty(),
            xids: Mutex::default(),
        }
    }

    /// Whether it answers.
    #[must_use]
    pub fn health(&self) -> Health {
        Health::ALL[usize::from(self.health.load(Ordering::SeqCst))]
    }

    /// Notes whether it answers.
    pub fn set_health(&self, health: Health) {
        self.health.store(health as u8, Ordering::SeqCst);
    }

    /// Whether it is worth asking for its memory.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.health() == Health::Up && !self.is_without_memory()
    }

    /// Whether its memory is never to be had.
    pub fn is_without_memory(&self) -> bool {
        self.memory.load(Ordering::Relaxed) == Memory::Never as u8
    }

    /// Its memory is never to be had; everything else of it is.
    pub fn set_without_memory(&self) {
        self.memory.store(Memory::Never as u8, Ordering::Relaxed);
    }

    /// Its memory was read.
    pub fn set_with_memory(&self) {
        // Read first: this is the hot path, and the cache line is everybody's.
        if !self.has_answered() {
            self.memory.store(Memory::Answered as u8, Ordering::Relaxed);
        }
    }

    /// Whether its memory was ever read.
    pub fn has_answered(&self) -> bool {
        self.memory.load(Ordering::Relaxed) == Memory::Answered as u8
    }

    /// It answers again, whatever it can.
    pub fn set_back(&self) {
        self.set_health(Health::Up);
    }

    /// Why it does not answer.
    #[must_use]
    pub fn trouble(&self) -> String {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It does not answer, for this reason.
    pub fn lose(&self, trouble: &str) {
        trouble.clone_into(&mut self.trouble.lock().unwrap_or_else(PoisonError::into_inner));
        self.set_health(Health::Lost);
    }

    /// The call on it that hung has come back: it is tried before it is sampled again. Nothing where none hung.
    pub fn lose_if_hung(&self) {
        if self.health() == Health::Hung {
            self.lose("a call on it hung");
        }
    }

    /// A call on it has not come back for too long. Nothing where it came back meanwhile: whoever made it may have looked
    /// before.
    pub fn hang(&self) {
        self.set_health(Health::Hung);
        if !self.is_left_alone() {
            self.lose_if_hung();
        }
    }

    /// The fast lane begins a call on it.
    pub fn begin_fast_call(&self) {
        self.fast_calls.fetch_add(1, Ordering::SeqCst);
    }

    /// A call of the fast lane on it has returned.
    pub fn end_fast_call(&self) {
        self.fast_calls.fetch_sub(1, Ordering::SeqCst);
        self.lose_if_hung();
    }

    /// Whether a call of the fast lane on it has not returned.
    pub fn is_in_fast_call(&self) -> bool {
        self.fast_calls.load(Ordering::SeqCst) > 0
    }

    /// From now on the fast lane leaves it alone until its own thread has read its memory.
    pub fn doubt(&self) {
        self.doubted.store(true, Ordering::SeqCst);
    }

    /// Its own thread has read its memory, or was refused: it answers.
    pub fn end_doubt(&self) {
        self.doubted.store(false, Ordering::SeqCst);
        if !self.is_in_fast_call() {
            self.lose_if_hung();
        }
    }

    /// Whether its own thread has yet to read its memory, because a call of the fast lane does not return.
    #[must_use]
    pub fn is_doubted(&self) -> bool {
        self.doubted.load(Ordering::SeqCst)
    }

    /// Whether the fast lane asks it nothing for now: it may not answer, while others do.
    pub fn is_left_alone(&self) -> bool {
        self.is_doubted() || self.is_in_fast_call()
    }

    /// Forgets what was read of a GPU that does not answer: it is not known any more.
    pub fn forget(&self) {
        self.medium.store(None);
        self.slow.store(None);
        self.processes.store(None);
        self.pcie.store(None);
        self.rare.store(None);
        self.energy.lose();
    }

    /// Takes over the XIDs that another state of the same GPU has counted.
    pub fn set_xids(&self, xids: BTreeMap<u64, Xid>) {
        *self.xids.lock().unwrap_or_else(PoisonError::into_inner) = xids;
    }

    /// The medium lane's last reading.
    #[must_use]
    pub fn medium(&self) -> Option<std::sync::Arc<Latest<Medium>>> {
        self.medium.load_full()
    }

    /// The slow lane's last reading.
    #[must_use]
    pub fn slow(&self) -> Option<std::sync::Arc<Latest<Slow>>> {
        self.slow.load_full()
    }

    /// Its processes, as they were listed last; nothing where the driver would not say.
    #[must_use]
    pub fn processes(&self) -> Option<std::sync::Arc<Latest<Vec<Process>>>> {
        self.processes.load_full()
    }

    /// Keeps a list of its processes. Returns whether other processes are there than before.
    pub fn set_processes(&self, at_ns: i64, reading: Option<Vec<Process>>) -> bool {
        let latest = reading.map(|reading| std::sync::Arc::new(Latest { at_ns, reading }));
        let pids = |latest: &Option<std::sync::Arc<Latest<Vec<Process>>>>| -> Option<Vec<u32>> {
            latest.as_ref().map(|latest| latest.reading.iter().map(|process| process.pid).collect())
        };
        let now = pids(&latest);
        pids(&self.processes.swap(latest)) != now
    }

    /// What it has moved over PCIe, as it was read last.
    #[must_use]
    pub fn pcie(&self) -> Option<std::sync::Arc<Latest<Pcie>>> {
        self.pcie.load_full()
    }

    /// Keeps what it has moved over PCIe.
    pub fn set_pcie(&self, at_ns: i64, reading: Pcie) {
        self.pcie.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// The memory that there is, NVLink and BAR1, as they were read last.
    #[must_use]
    pub fn rare(&self) -> Option<std::sync::Arc<Latest<Rare>>> {
        self.rare.load_full()
    }

    /// Keeps the memory that there is, NVLink and BAR1.
    pub fn set_rare(&self, at_ns: i64, reading: Rare) {
        self.rare.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// Keeps the medium lane's reading.
    pub fn set_medium(&self, at_ns: i64, reading: Medium) {
        let Medium { power_watts, utilization_ratio, throttle_reasons, .. } = reading;
        self.series.push(UsagePoint { at_ns, power_watts, utilization_ratio, throttle_reasons });
        self.medium.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// Keeps the slow lane's reading.
    pub fn set_slow(&self, at_ns: i64, reading: Slow) {
        self.slow.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// Takes over what became of it, as it was recorded.
    pub fn replay(&self, change: &Became) {
        match change {
            Became::Health { health: Health::Up, .. } => self.set_back(),
            Became::Health { health: Health::Lost, trouble } => {
                self.forget();
                self.lose(trouble);
            }
            Became::Health { health: Health::Hung, .. } => {
                self.forget();
                self.set_health(Health::Hung);
            }
            Became::Xid { xid, seen } => {
                let mut xids = self.xids.lock().unwrap_or_else(PoisonError::into_inner);
                if has_room(&xids, *xid) {
                    xids.insert(*xid, *seen);
                }
            }
        }
    }

    /// Counts one XID.
    pub fn count_xid(&self, xid: u64, at_ns: i64) {
        let mut xids = self.xids.lock().unwrap_or_else(PoisonError::into_inner);
        if has_room(&xids, xid) {
            let seen = xids.entry(xid).or_insert(Xid { count: 0, last_ns: at_ns });
            seen.count += 1;
            seen.last_ns = at_ns;
        }
    }

    /// The XIDs seen since the start.
    #[must_use]
    pub fn xids(&self) -> BTreeMap<u64, Xid> {
        self.xids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Of `used_bytes` in use on this GPU those of all processes but this one, as they were listed last. Where the process is
    /// not known, or goes by another id in the driver's view, the only process that there is must be it. `None` where that
    /// cannot be told, or the driver will not say how much the others have.
    #[must_use]
    pub fn used_by_others_bytes(&self, pid: Option<u32>, used_bytes: u64) -> Option<u64> {
        let latest = self.processes()?;
        let processes = &latest.reading;
        // A list that may lack some is taken for whole where it explains what is in use.
        let explains = |listed_bytes: u64| used_bytes.saturating_sub(listed_bytes) < CONTEXT_BYTES;
        if !self.lists_all
            && !processes.iter().map(|process| process.used_bytes).sum::<Option<u64>>().is_some_and(explains)
        {
            return None;
        }
        let is_seen = processes.iter().any(|process| Some(process.pid) == pid);
        if !is_seen {
            return (processes.len() == 1).then_some(0);
        }
        processes.iter().filter(|process| Some(process.pid) != pid).map(|process| process.used_bytes).sum()
    }

    /// The driver's framebuffer size, bytes: what was read last, or what was found at the start.
    #[must_use]
    pub fn total_bytes(&self) -> Option<u64> {
        self.rare().and_then(|rare| rare.reading.memory_total_bytes).or(self.device.memory_total_bytes)
    }

    /// The driver's own part of it, bytes.
    #[must_use]
    pub fn reserved_bytes(&self) -> Option<u64> {
        self.rare().and_then(|rare| rare.reading.memory_reserved_bytes).or(self.device.memory_reserved_bytes)
    }

    /// The bytes that jobs can have.
    #[must_use]
    pub fn usable_bytes(&self) -> Option<u64> {
        Some(self.total_bytes()?.saturating_sub(self.reserved_bytes().unwrap_or(0)))
    }
}

/// Positions of the GPUs that a process is on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnGpus {
    /// Where it works.
    pub works: Vec<usize>,
    /// Where it has no more than a context, while it works elsewhere.
    pub idles: Vec<usize>,
}

/// Which process runs on which GPUs, as the lanes saw it last; and whether somebody looked for one that is not there.
#[derive(Debug, Default)]
pub struct Processes {
    by_pid: ArcSwap<HashMap<u32, OnGpus>>,
    missed: AtomicU64,
}

impl Processes {
    /// Positions of the GPUs that this process works on. One that is not known makes the lanes look again.
    #[must_use]
    pub fn gpus_of(&self, pid: u32) -> Option<Vec<usize>> {
        let found = self.listed_on(pid);
        if found.is_none() {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
        found.map(|on| on.works)
    }

    /// The GPUs that this process was seen on. Nobody looks again for one that is not known.
    #[must_use]
    pub fn listed_on(&self, pid: u32) -> Option<OnGpus> {
        self.by_pid.load().get(&pid).cloned()
    }

    /// How often a process was looked for that is not known.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// From now on these processes are known, by their ids.
    pub fn set(&self, by_pid: HashMap<u32, OnGpus>) {
        self.by_pid.store(by_pid.into());
    }
}
