//! What the lanes read last, for scrapes and attribution to look at without waiting for any lane.

use super::breakdown::Breakdown;
use super::changes::Changed;
use super::energy::Energy;
use super::series::{Series, UsagePoint};
use super::{Device, GpuWorkloads, Medium, Pcie, Process, Rare, Slow, THROTTLE_REASONS};
use arc_swap::{ArcSwap, ArcSwapOption};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

crate::labels! {
    /// Whether a GPU answers.
    pub enum Health {
        /// It answers.
        Up = "up",
        /// The driver says that it is gone.
        Lost = "lost",
        /// A call on it has not returned: it is asked again only after that call returned.
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
    /// Who held its memory over time.
    pub breakdown: Breakdown,
    /// Its energy counter.
    pub energy: Energy,
    /// Whether the lists of its processes include every process that holds memory on it.
    pub lists_all: bool,
    health: AtomicU8,
    /// What is known of its memory call, as [`Memory`].
    memory: AtomicU8,
    /// Calls of the fast lane on it that have not returned: one of a thread that was replaced, and one of its successor.
    fast_calls: AtomicU32,
    /// Whether a thread of the slower lanes has yet to read its memory before the fast lane asks it again.
    doubted: AtomicBool,
    /// The time between two readings of its memory, nanoseconds; 0 before the first.
    sampling_period_ns: AtomicI64,
    /// Whether nothing runs on it, so that its lanes read it seldom.
    idle: AtomicBool,
    /// When an annotation last named it, nanoseconds of the timeline.
    annotated_ns: AtomicI64,
    /// Why it does not answer.
    trouble: Mutex<String>,
    medium: ArcSwapOption<Latest<Medium>>,
    slow: ArcSwapOption<Latest<Slow>>,
    processes: ArcSwapOption<Latest<Vec<Process>>>,
    /// Whether that list is out of date.
    wants_processes: AtomicBool,
    workloads: ArcSwapOption<GpuWorkloads>,
    pcie: ArcSwapOption<Latest<Pcie>>,
    rare: ArcSwapOption<Latest<Rare>>,
    /// How long each of [`THROTTLE_REASONS`] was active, nanoseconds.
    throttled_ns: [AtomicU64; THROTTLE_REASONS.len()],
    xids: Mutex<BTreeMap<u64, Xid>>,
}

/// Upper bound of what a context alone takes on a GPU: on an H200 it takes 0.5 GiB, and less than this bound with the
/// libraries' workspaces.
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
        let series = Series::new(keep_ns, medium_period_ns);
        Self {
            device,
            energy: Energy::new(series.keep_ns()),
            series,
            breakdown: Breakdown::default(),
            lists_all: true,
            health: AtomicU8::new(Health::Up as u8),
            memory: AtomicU8::new(Memory::Unknown as u8),
            fast_calls: AtomicU32::new(0),
            doubted: AtomicBool::new(false),
            sampling_period_ns: AtomicI64::new(0),
            idle: AtomicBool::new(false),
            annotated_ns: AtomicI64::new(i64::MIN),
            trouble: Mutex::default(),
            medium: ArcSwapOption::empty(),
            slow: ArcSwapOption::empty(),
            processes: ArcSwapOption::empty(),
            wants_processes: AtomicBool::new(false),
            workloads: ArcSwapOption::empty(),
            pcie: ArcSwapOption::empty(),
            rare: ArcSwapOption::empty(),
            throttled_ns: Default::default(),
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

    /// Whether its memory can never be read.
    pub fn is_without_memory(&self) -> bool {
        self.memory.load(Ordering::Relaxed) == Memory::Never as u8
    }

    /// Records that its memory can never be read. Its other readings are not affected.
    pub fn set_without_memory(&self) {
        self.memory.store(Memory::Never as u8, Ordering::Relaxed);
    }

    /// Its memory was read.
    pub fn set_with_memory(&self) {
        // Loaded first: this is the hot path, and a store would take the cache line from other cores.
        if !self.has_answered() {
            self.memory.store(Memory::Answered as u8, Ordering::Relaxed);
        }
    }

    /// Whether its memory was ever read.
    pub fn has_answered(&self) -> bool {
        self.memory.load(Ordering::Relaxed) == Memory::Answered as u8
    }

    /// Records that it answers again. What is known of its memory call does not change.
    pub fn set_back(&self) {
        self.set_health(Health::Up);
    }

    /// Why it was last lost; empty if it never was. It stays after the GPU answers again, and is not set by a hang.
    #[must_use]
    pub fn trouble(&self) -> String {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It does not answer, for this reason.
    pub fn lose(&self, trouble: &str) {
        trouble.clone_into(&mut self.trouble.lock().unwrap_or_else(PoisonError::into_inner));
        self.set_health(Health::Lost);
    }

    /// Records that the call that hung has returned. The GPU counts as lost, so it is retried before it is sampled again. Does
    /// nothing if no call hung.
    pub fn lose_if_hung(&self) {
        if self.health() == Health::Hung {
            self.lose("a call on it hung");
        }
    }

    /// Records that a call on it has not returned for too long. If the call has returned meanwhile, the GPU counts as lost at
    /// once, because the thread that made the call may have checked the health before it was set.
    pub fn hang(&self) {
        self.set_health(Health::Hung);
        if !self.is_left_alone() {
            self.lose_if_hung();
        }
    }

    /// The address of the counter that the fast lane writes in each tick, so that it can be prefetched.
    #[must_use]
    pub fn fast_place(&self) -> *const AtomicU32 {
        &raw const self.fast_calls
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

    /// From now on the fast lane leaves it alone until a thread of the slower lanes has read its memory.
    pub fn doubt(&self) {
        self.doubted.store(true, Ordering::SeqCst);
    }

    /// A thread of the slower lanes has read its memory, or was refused: it answers.
    pub fn end_doubt(&self) {
        self.doubted.store(false, Ordering::SeqCst);
        if !self.is_in_fast_call() {
            self.lose_if_hung();
        }
    }

    /// Whether a thread of the slower lanes has yet to read its memory, because a call of the fast lane does not return.
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

    /// The period in which its memory is read, nanoseconds: longer than that of other GPUs while nothing runs on it.
    /// `None` before the first reading, and in a replay.
    #[must_use]
    pub fn sampling_period_ns(&self) -> Option<i64> {
        Some(self.sampling_period_ns.load(Ordering::Relaxed)).filter(|period_ns| *period_ns > 0)
    }

    /// Sets the period in which its memory is read, nanoseconds, and whether that is because nothing runs on it.
    pub fn set_sampling_period_ns(&self, period_ns: i64, is_idle: bool) {
        self.sampling_period_ns.store(period_ns, Ordering::Relaxed);
        self.idle.store(is_idle, Ordering::Relaxed);
    }

    /// Whether nothing runs on it, so that its lanes read it seldom.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.idle.load(Ordering::Relaxed)
    }

    /// Records that a job that runs on it sent an annotation at this time, nanoseconds of the timeline.
    pub fn note_annotation(&self, at_ns: i64) {
        self.annotated_ns.fetch_max(at_ns, Ordering::Relaxed);
    }

    /// When an annotation of a job on it arrived last, nanoseconds of the timeline; the least number if none did.
    #[must_use]
    pub fn annotated_ns(&self) -> i64 {
        self.annotated_ns.load(Ordering::Relaxed)
    }

    /// The last list of its processes; `None` if the driver did not report one.
    #[must_use]
    pub fn processes(&self) -> Option<std::sync::Arc<Latest<Vec<Process>>>> {
        self.processes.load_full()
    }

    /// The workloads that have it; `None` where that is not known. They stay when it does not answer any more.
    #[must_use]
    pub fn workloads(&self) -> Option<std::sync::Arc<GpuWorkloads>> {
        self.workloads.load_full()
    }

    /// From now on these are the workloads that have it.
    pub fn set_workloads(&self, workloads: Option<GpuWorkloads>) {
        self.workloads.store(workloads.map(std::sync::Arc::new));
    }

    /// The list of its processes is out of date, and is to be read before it is due.
    pub fn want_processes(&self) {
        self.wants_processes.store(true, Ordering::Relaxed);
    }

    /// Whether it is out of date; from now on it is not.
    pub fn take_processes_wanted(&self) -> bool {
        // Most often it is not, and a load disturbs no other core.
        self.wants_processes.load(Ordering::Relaxed) && self.wants_processes.swap(false, Ordering::Relaxed)
    }

    /// Keeps a list of its processes. Returns whether the process ids differ from those before, also because there was no list.
    /// Their order is the driver's, and says nothing.
    pub fn set_processes(&self, at_ns: i64, reading: Option<Vec<Process>>) -> bool {
        let latest = reading.map(|reading| std::sync::Arc::new(Latest { at_ns, reading }));
        let pids = |latest: &Option<std::sync::Arc<Latest<Vec<Process>>>>| -> Option<Vec<u32>> {
            let latest = latest.as_ref()?;
            let mut pids: Vec<u32> = latest.reading.iter().map(|process| process.pid).collect();
            pids.sort_unstable();
            Some(pids)
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

    /// The memory that there is, NVLink, BAR1 and limits, as they were read last.
    #[must_use]
    pub fn rare(&self) -> Option<std::sync::Arc<Latest<Rare>>> {
        self.rare.load_full()
    }

    /// Keeps the memory that there is, NVLink, BAR1 and limits.
    pub fn set_rare(&self, at_ns: i64, reading: Rare) {
        self.rare.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// Keeps the medium lane's reading.
    pub fn set_medium(&self, at_ns: i64, reading: Medium) {
        let Medium { power_watts, utilization_ratio, throttle_reasons, activity, .. } = reading;
        self.series.push(UsagePoint { at_ns, power_watts, utilization_ratio, throttle_reasons, activity });
        if let (Some(reasons), Some(before)) = (throttle_reasons, self.medium()) {
            self.add_throttled(reasons, at_ns - before.at_ns);
        }
        self.medium.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// Adds the time since the last reading to the reasons that are active now. After a pause in the readings, only the time for
    /// which a reading holds counts.
    fn add_throttled(&self, reasons: u64, elapsed_ns: i64) {
        let elapsed_ns = elapsed_ns.clamp(0, self.reading_hold_ns()).unsigned_abs();
        for ((bit, _), total) in THROTTLE_REASONS.iter().zip(&self.throttled_ns) {
            if reasons & bit != 0 {
                total.fetch_add(elapsed_ns, Ordering::Relaxed);
            }
        }
    }

    /// How long each of [`THROTTLE_REASONS`] was active, nanoseconds, in their order.
    #[must_use]
    pub fn throttled_ns(&self) -> [u64; THROTTLE_REASONS.len()] {
        std::array::from_fn(|at| self.throttled_ns.get(at).map_or(0, |total| total.load(Ordering::Relaxed)))
    }

    /// Goes on with what another state of the same GPU has counted.
    pub fn set_throttled_ns(&self, counted: [u64; THROTTLE_REASONS.len()]) {
        self.throttled_ns.iter().zip(counted).for_each(|(total, counted)| total.store(counted, Ordering::Relaxed));
    }

    /// For how long a reading of the medium lane holds, nanoseconds: three of its periods, and 1.5 s at least.
    #[must_use]
    pub fn reading_hold_ns(&self) -> i64 {
        self.series.hold_ns()
    }

    /// Keeps the slow lane's reading.
    pub fn set_slow(&self, at_ns: i64, reading: Slow) {
        self.slow.store(Some(std::sync::Arc::new(Latest { at_ns, reading })));
    }

    /// Applies a change of this GPU, as it was recorded.
    pub fn replay(&self, change: &Changed) {
        match change {
            Changed::Health { health: Health::Up, .. } => self.set_back(),
            Changed::Health { health: Health::Lost, trouble } => {
                self.forget();
                self.lose(trouble);
            }
            Changed::Health { health: Health::Hung, .. } => {
                self.forget();
                self.set_health(Health::Hung);
            }
            Changed::Xid { xid, seen } => {
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

    /// Bytes that all processes except this one use on the GPU, by the driver's last list; `used_bytes` is the memory in use in
    /// all. If `pid` is `None` or not listed, a single listed process is taken for it, because the driver may know it by another
    /// id. `None` if the list is missing or incomplete, does not show which process it is, or lacks another process's memory.
    #[must_use]
    pub fn used_by_others_bytes(&self, pid: Option<u32>, used_bytes: u64) -> Option<u64> {
        let latest = self.processes()?;
        let processes = &latest.reading;
        // A list that may be incomplete counts as complete if it accounts for all memory in use but less than a context.
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

/// The GPUs of each process, as the lanes saw them last, and the number of lookups of unknown processes.
#[derive(Debug, Default)]
pub struct Processes {
    by_pid: ArcSwap<HashMap<u32, OnGpus>>,
    missed: AtomicU64,
}

impl Processes {
    /// Positions of the GPUs that this process works on. A lookup of an unknown process is counted, and makes the lanes list
    /// processes again.
    #[must_use]
    pub fn gpus_of(&self, pid: u32) -> Option<Vec<usize>> {
        let found = self.listed_on(pid);
        if found.is_none() {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
        found.map(|on| on.works)
    }

    /// The GPUs that this process was seen on. A lookup of an unknown process is not counted.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> GpuState {
        let device =
            Device { memory_total_bytes: Some(100 << 30), memory_reserved_bytes: Some(1 << 30), ..Device::default() };
        GpuState::new(device, 1_000, 10)
    }

    fn process(pid: u32, used_bytes: Option<u64>) -> Process {
        Process { pid, used_bytes }
    }

    #[test]
    fn a_reason_counts_for_as_long_as_its_reading_holds_however_rare_readings_are() {
        const SECOND_NS: i64 = crate::clock::SECOND_NS;
        let of = |period_ns: i64, times_ns: &[i64]| {
            let gpu = GpuState::new(Device::default(), 600 * SECOND_NS, period_ns);
            let braked = Medium { throttle_reasons: Some(0x88), ..Medium::default() };
            times_ns.iter().for_each(|at_ns| gpu.set_medium(at_ns * SECOND_NS, braked));
            gpu.throttled_ns().into_iter().max().map(|most_ns| most_ns.cast_signed() / SECOND_NS)
        };
        assert_eq!(of(SECOND_NS / 10, &[0, 1, 2]), Some(2));
        assert_eq!(of(10 * SECOND_NS, &[0, 10, 20]), Some(20));
        assert_eq!(of(10 * SECOND_NS, &[0, 500]), Some(30), "a pause");
    }

    #[test]
    fn a_gpu_is_sampled_while_it_answers_and_has_memory() {
        let gpu = gpu();
        assert_eq!((gpu.health(), gpu.is_sampled(), gpu.has_answered()), (Health::Up, true, false));
        gpu.set_with_memory();
        assert!(gpu.has_answered() && !gpu.is_without_memory());
        gpu.lose("fell off");
        assert_eq!((gpu.health(), gpu.is_sampled(), gpu.trouble()), (Health::Lost, false, "fell off".to_owned()));
        gpu.set_back();
        assert!(gpu.is_sampled() && gpu.has_answered());
        gpu.set_without_memory();
        assert!(gpu.is_without_memory() && !gpu.is_sampled() && !gpu.has_answered());
        gpu.set_with_memory();
        assert!(gpu.is_sampled());
    }

    #[test]
    fn a_call_that_hung_and_came_back_is_tried_before_it_is_sampled_again() {
        let gpu = gpu();
        gpu.end_doubt();
        gpu.lose_if_hung();
        assert_eq!(gpu.health(), Health::Up, "none hung");
        gpu.begin_fast_call();
        gpu.hang();
        assert_eq!((gpu.health(), gpu.is_in_fast_call(), gpu.is_left_alone()), (Health::Hung, true, true));
        gpu.begin_fast_call();
        gpu.end_fast_call();
        assert!(gpu.is_in_fast_call(), "one of two has returned");
        assert_eq!((gpu.health(), gpu.trouble()), (Health::Lost, "a call on it hung".to_owned()));
        gpu.end_fast_call();
        assert!(!gpu.is_in_fast_call() && !gpu.is_left_alone());
        gpu.hang();
        assert_eq!(gpu.health(), Health::Lost, "the call came back meanwhile");
    }

    #[test]
    fn a_gpu_in_doubt_is_left_alone_until_its_own_thread_has_read_it() {
        let gpu = gpu();
        gpu.doubt();
        gpu.hang();
        assert_eq!((gpu.is_doubted(), gpu.is_left_alone(), gpu.health()), (true, true, Health::Hung));
        gpu.begin_fast_call();
        gpu.end_doubt();
        assert_eq!((gpu.is_doubted(), gpu.health()), (false, Health::Hung), "a call of the fast lane still hangs");
        gpu.end_fast_call();
        gpu.doubt();
        gpu.hang();
        gpu.end_doubt();
        assert_eq!((gpu.is_left_alone(), gpu.health()), (false, Health::Lost));
    }

    #[test]
    fn what_was_read_is_there_until_it_is_forgotten() {
        let gpu = gpu();
        let medium = Medium { power_watts: Some(100.0), utilization_ratio: Some(0.5), ..Medium::default() };
        let slow = Slow { ecc_corrected: Some(3), ..Slow::default() };
        let pcie = Pcie { received_bytes: Some(4), ..Pcie::default() };
        let rare = Rare { memory_total_bytes: Some(50), ..Rare::default() };
        gpu.set_medium(1, medium);
        gpu.set_slow(2, slow.clone());
        gpu.set_pcie(3, pcie);
        gpu.set_rare(4, rare.clone());
        gpu.set_processes(5, Some(vec![process(7, Some(8))]));
        gpu.energy.set(6, 10.0, &gpu.series);
        gpu.energy.set(6, 10.0, &gpu.series);
        gpu.count_xid(79, 7);
        assert_eq!(gpu.medium().as_deref(), Some(&Latest { at_ns: 1, reading: medium }));
        assert_eq!(gpu.slow().as_deref(), Some(&Latest { at_ns: 2, reading: slow }));
        assert_eq!(gpu.pcie().as_deref(), Some(&Latest { at_ns: 3, reading: pcie }));
        assert_eq!(gpu.rare().as_deref(), Some(&Latest { at_ns: 4, reading: rare }));
        assert_eq!(gpu.processes().as_deref(), Some(&Latest { at_ns: 5, reading: vec![process(7, Some(8))] }));
        assert_eq!(gpu.series.points(0, 9).len(), 1, "kept for attribution");
        gpu.forget();
        assert!(gpu.medium().is_none() && gpu.slow().is_none() && gpu.pcie().is_none() && gpu.rare().is_none());
        assert!(gpu.processes().is_none() && gpu.energy.joules(9, &gpu.series).is_none());
        assert_eq!((gpu.series.points(0, 9).len(), gpu.xids().len()), (1, 1), "what has happened has happened");
    }

    #[test]
    fn sizes_are_those_read_last_or_those_found_at_the_start() {
        let gpu = gpu();
        let sizes = || (gpu.total_bytes(), gpu.reserved_bytes(), gpu.usable_bytes());
        assert_eq!(sizes(), (Some(100 << 30), Some(1 << 30), Some(99 << 30)));
        gpu.set_rare(0, Rare { memory_total_bytes: Some(50), memory_reserved_bytes: Some(20), ..Rare::default() });
        assert_eq!(sizes(), (Some(50), Some(20), Some(30)));
        gpu.set_rare(0, Rare { memory_total_bytes: Some(50), ..Rare::default() });
        assert_eq!(sizes(), (Some(50), Some(1 << 30), Some(0)));
        let unknown = GpuState::new(Device::default(), 1, 1);
        assert_eq!((unknown.total_bytes(), unknown.usable_bytes()), (None, None));
        unknown.set_rare(0, Rare { memory_total_bytes: Some(50), ..Rare::default() });
        assert_eq!(unknown.usable_bytes(), Some(50), "what the driver keeps for itself is not known");
    }

    #[test]
    fn other_processes_than_before_are_noticed() {
        let gpu = gpu();
        assert!(gpu.set_processes(0, Some(vec![process(7, Some(1))])));
        assert!(!gpu.set_processes(1, Some(vec![process(7, Some(2))])), "the same with more memory");
        assert!(gpu.set_processes(2, Some(vec![process(8, Some(2))])));
        assert!(gpu.set_processes(3, None) && !gpu.set_processes(4, None));
        assert!(gpu.set_processes(5, Some(Vec::new())), "nobody is not the same as not known");
    }

    #[test]
    fn what_others_use_is_reported_where_it_can_be() {
        let mut gpu = gpu();
        assert_eq!(gpu.used_by_others_bytes(Some(7), 100), None, "no list");
        gpu.set_processes(0, Some(vec![process(7, Some(60)), process(8, Some(30)), process(9, Some(4))]));
        assert_eq!(gpu.used_by_others_bytes(Some(7), 100), Some(34));
        assert_eq!((gpu.used_by_others_bytes(Some(1), 100), gpu.used_by_others_bytes(None, 100)), (None, None));
        gpu.set_processes(0, Some(vec![process(7, Some(60))]));
        assert_eq!((gpu.used_by_others_bytes(Some(1), 100), gpu.used_by_others_bytes(None, 100)), (Some(0), Some(0)));
        gpu.set_processes(0, Some(vec![process(7, Some(60)), process(8, None)]));
        assert_eq!((gpu.used_by_others_bytes(Some(7), 100), gpu.used_by_others_bytes(Some(8), 100)), (None, Some(60)));
        // A list that may lack some counts where less than a context is left over.
        gpu.lists_all = false;
        gpu.set_processes(0, Some(vec![process(7, Some(60)), process(8, Some(40))]));
        let of = |used_bytes| gpu.used_by_others_bytes(Some(7), used_bytes);
        assert_eq!((of(100 + CONTEXT_BYTES - 1), of(100 + CONTEXT_BYTES), of(50)), (Some(40), None, Some(40)));
        gpu.set_processes(0, Some(vec![process(7, None)]));
        assert_eq!(gpu.used_by_others_bytes(Some(7), 0), None);
    }

    #[test]
    fn errors_are_counted_by_number_and_only_so_many_numbers() {
        let gpu = gpu();
        (0..300).for_each(|xid| gpu.count_xid(xid, 1));
        gpu.count_xid(5, 9);
        gpu.count_xid(299, 9);
        gpu.replay(&Changed::Xid { xid: 298, seen: Xid { count: 1, last_ns: 1 } });
        gpu.replay(&Changed::Xid { xid: 6, seen: Xid { count: 40, last_ns: 3 } });
        let xids = gpu.xids();
        assert_eq!((xids.len(), xids.contains_key(&299), xids.contains_key(&298)), (256, false, false));
        assert_eq!((xids[&5], xids[&6]), (Xid { count: 2, last_ns: 9 }, Xid { count: 40, last_ns: 3 }));
        let other = GpuState::new(Device::default(), 1, 1);
        other.set_xids(xids.clone());
        assert_eq!(other.xids(), xids);
    }

    #[test]
    fn what_was_recorded_of_its_health_happens_again() {
        let (gpu, text) = (gpu(), |text: &str| text.to_owned());
        let becomes = |health, trouble: &str| {
            gpu.set_slow(0, Slow::default());
            gpu.replay(&Changed::Health { health, trouble: trouble.to_owned() });
            (gpu.health(), gpu.trouble(), gpu.slow().is_some())
        };
        assert_eq!(becomes(Health::Lost, "gone"), (Health::Lost, text("gone"), false));
        assert_eq!(becomes(Health::Up, ""), (Health::Up, text("gone"), true));
        assert_eq!(becomes(Health::Hung, ""), (Health::Hung, text("gone"), false));
    }

    #[test]
    fn a_process_is_where_it_was_seen_and_one_that_is_not_is_missed() {
        let processes = Processes::default();
        assert_eq!((processes.gpus_of(7), processes.missed()), (None, 1));
        let on = OnGpus { works: vec![2, 3], idles: vec![1] };
        processes.set([(7, on.clone())].into());
        assert_eq!((processes.gpus_of(7), processes.listed_on(7)), (Some(vec![2, 3]), Some(on)));
        assert_eq!((processes.listed_on(8), processes.missed()), (None, 1), "nobody looks again");
        assert_eq!((processes.gpus_of(8), processes.missed()), (None, 2));
    }
}
