//! The daemon's view of the machine at one time: its GPUs, their rings, and the join over them.
//!
//! Enters: an open source. Leaves: everything that scrapes, the API and attribution use. Invariant: a node's GPUs are
//! fixed; when the driver goes away, the node goes with it and a new one replaces it. Absent on purpose: threads, which
//! the daemon starts.

use crate::footprint::Footprint;
use crate::sample::{Sampler, TickStats};
use arc_swap::ArcSwapOption;
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::{ChangeLog, Device, Energy, GpuState, GpuWorkloads, Health, Medium, THROTTLE_REASONS, Xid};
use highwater_core::phases::{Derived, Join, Ledger};
use highwater_core::ring;
#[cfg(any(test, feature = "testing"))]
use highwater_core::source::Error;
use highwater_core::source::{CallStats, OpenError, Source};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// One open source with everything that is read from it.
pub struct Node {
    /// The source.
    pub source: Arc<dyn Source>,
    /// The timeline of its readings: the system's, or a recording's.
    pub clock: Arc<dyn Clock>,
    /// One GPU or MIG instance each, in the source's order.
    pub gpus: Arc<[GpuState]>,
    /// Their memory, in the same order.
    pub rings: Arc<[ring::Reader]>,
    /// Durations and failures of driver calls.
    pub calls: Arc<CallStats>,
    /// Statistics of ticks.
    pub ticks: Arc<TickStats>,
    /// How often each lane reads, as configured.
    pub periods: Periods,
    /// Values derived from readings and phases.
    pub join: Join,
    /// Changes of its GPUs' state, one entry per turn of the detectors.
    pub changes: Arc<ChangeLog>,
}

impl Node {
    /// A node over `source`, with the writing ends of its rings. It continues the previous node's counts, GPU by GPU.
    ///
    /// # Errors
    /// The rings cannot be created with this configuration.
    pub fn new(
        source: Arc<dyn Source>,
        clock: Arc<dyn Clock>,
        ring: ring::Config,
        periods: Periods,
        before: Option<&Counted>,
    ) -> Result<(Self, Vec<ring::Writer>), ring::ConfigError> {
        let devices = source.devices();
        let rings = devices.iter().map(|_| ring::ring(ring)).collect::<Result<Vec<_>, _>>()?;
        let (writers, readers): (Vec<_>, Vec<_>) = rings.into_iter().unzip();
        let counted = |device: &Device| before.and_then(|before| before.by_uuid.get(&device.uuid));
        let lists_all = source.lists_all_processes();
        let state_of = |device: &Device| {
            let mut gpu = GpuState::new(device.clone(), ring.retention_ns, periods.medium_ns);
            gpu.lists_all = lists_all;
            if let Some(counted) = counted(device) {
                gpu.set_xids(counted.xids.clone());
                gpu.set_throttled_ns(counted.throttled_ns);
                gpu.energy = counted.energy.go_on();
                // Until the kubelet's next list: its devices are the same.
                gpu.set_workloads(counted.pods.as_deref().map(GpuWorkloads::without_memory));
            }
            gpu
        };
        let gpus: Arc<[GpuState]> = devices.iter().map(state_of).collect();
        let rings: Arc<[ring::Reader]> = readers.into();
        let calls = before.map_or_else(Arc::default, |before| Arc::clone(&before.calls));
        let ticks =
            before.map_or_else(|| Arc::new(TickStats::new(periods.fast_ns)), |before| Arc::clone(&before.ticks));
        let join = Join::new(Arc::clone(&gpus), Arc::clone(&rings));
        for (position, device) in devices.iter().enumerate() {
            if let Some(counted) = counted(device) {
                join.inherit(position, &counted.derived);
            }
        }
        let changes = Arc::default();
        Ok((Self { source, clock, gpus, rings, calls, ticks, periods, join, changes }, writers))
    }

    /// Updates the values derived from readings and phases. `now_ns` is on the timeline of its samples.
    pub fn advance(&self, ledger: &Ledger, now_ns: i64) {
        self.join.advance(ledger, now_ns);
        self.calls.advance(now_ns);
    }

    /// Reads a recording's medium lane, at its period: a replay has no lanes.
    pub fn read_recorded(&self, at_ns: i64) {
        for (position, gpu) in self.gpus.iter().enumerate().filter(|(_, gpu)| gpu.health() == Health::Up) {
            let is_due = gpu.medium().is_none_or(|last| at_ns - last.at_ns >= self.periods.medium_ns);
            let medium = if is_due { self.source.medium(position, at_ns, &self.calls) } else { Medium::default() };
            if medium != Medium::default() {
                gpu.set_medium(at_ns, medium);
            }
        }
    }

    /// The only sampler, which writes into its rings.
    #[must_use]
    pub fn sampler(&self, writers: Vec<ring::Writer>) -> Sampler {
        Sampler::new(
            Arc::clone(&self.source),
            Arc::clone(&self.clock),
            Arc::clone(&self.calls),
            Arc::clone(&self.ticks),
            Arc::clone(&self.gpus),
            writers,
        )
    }

    /// Its counts, for the next node. Keeps nothing of the source, which must be closed before it can be opened again.
    #[must_use]
    pub fn counted(&self) -> Counted {
        let of = |(position, gpu): (usize, &GpuState)| {
            let (xids, throttled_ns, energy) = (gpu.xids(), gpu.throttled_ns(), gpu.energy.go_on());
            let derived = self.join.derived(position);
            (
                gpu.device.uuid.clone(),
                CountedOfGpu { away: 0, xids, throttled_ns, energy, derived, pods: gpu.workloads() },
            )
        };
        Counted {
            calls: Arc::clone(&self.calls),
            ticks: Arc::clone(&self.ticks),
            by_uuid: self.gpus.iter().enumerate().map(of).collect(),
        }
    }

    /// Whether every GPU is lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        !self.gpus.is_empty() && self.gpus.iter().all(|gpu| gpu.health() == Health::Lost)
    }
}

#[cfg(any(test, feature = "testing"))]
impl Node {
    /// One GPU, whose memory the test writes by hand.
    ///
    /// # Panics
    /// There is no memory for its ring.
    #[must_use]
    pub fn of_one_gpu(clock: Arc<dyn Clock>) -> (Arc<Self>, ring::Writer) {
        let device = Device { index: "0".into(), uuid: "GPU-0".into(), ..Device::default() };
        let (node, mut writers) = Self::of_devices(clock, vec![device], false);
        (Arc::new(node), writers.remove(0))
    }

    /// These GPUs and MIG instances, whose memory the test writes by hand. `lists_all`: whether lists of processes are complete.
    ///
    /// # Panics
    /// There is no memory for their rings.
    #[must_use]
    pub fn of_devices(clock: Arc<dyn Clock>, devices: Vec<Device>, lists_all: bool) -> (Self, Vec<ring::Writer>) {
        struct ByHand(Vec<Device>, bool);
        impl Source for ByHand {
            fn description(&self) -> String {
                "GPUs by hand".into()
            }
            fn devices(&self) -> &[Device] {
                &self.0
            }
            fn memory_used(&self, _: usize, _: i64) -> Result<u64, Error> {
                Err(Error::NotYet)
            }
            fn lists_all_processes(&self) -> bool {
                self.1
            }
        }
        let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 1 << 20, resolution_ns: 1_000 };
        let source = Arc::new(ByHand(devices, lists_all));
        Self::new(source, clock, config, Periods::default(), None).expect("rings")
    }
}

impl Counted {
    /// Adds the earlier counts of GPUs that are away now, unless they were away for so long that they will not come
    /// back, such as MIG instances that were created anew.
    #[must_use]
    pub fn with(mut self, before: Option<Self>) -> Self {
        for (uuid, mut counted) in before.into_iter().flat_map(|before| before.by_uuid) {
            counted.away += 1;
            if counted.away <= MOST_AWAY {
                self.by_uuid.entry(uuid).or_insert(counted);
            }
        }
        self
    }
}

/// Maximum number of successive nodes without a GPU before its counts are dropped.
const MOST_AWAY: u32 = 16;

/// The counts of a node, which must not fall when the driver goes away and comes back.
pub struct Counted {
    calls: Arc<CallStats>,
    ticks: Arc<TickStats>,
    by_uuid: HashMap<String, CountedOfGpu>,
}

struct CountedOfGpu {
    /// How many successive nodes have been without it.
    away: u32,
    xids: BTreeMap<u64, Xid>,
    throttled_ns: [u64; THROTTLE_REASONS.len()],
    energy: Energy,
    derived: Derived,
    pods: Option<Arc<GpuWorkloads>>,
}

/// How often each lane reads, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Periods {
    /// Memory.
    pub fast_ns: i64,
    /// Utilization, power, clocks.
    pub medium_ns: i64,
    /// Counters and processes.
    pub slow_ns: i64,
}

impl Default for Periods {
    fn default() -> Self {
        Self { fast_ns: MILLISECOND_NS, medium_ns: 100 * MILLISECOND_NS, slow_ns: SECOND_NS }
    }
}

/// The current node, or why there is none.
pub struct Slot {
    node: ArcSwapOption<Node>,
    trouble: ArcSwapOption<OpenError>,
    is_nvml: bool,
    library: OnceLock<Footprint>,
    /// Since when the driver's library is missing or does not fit the driver.
    unfit_since: Mutex<Option<Instant>>,
    restart_after: Option<Duration>,
}

/// What is wrong for as long as this process, and its container, live: both have the driver's library that they began with.
const UNFIT: [&str; 2] = ["library_missing", "driver_mismatch"];

impl Slot {
    /// An empty slot. `is_nvml`: whether the configured source is the driver.
    #[must_use]
    pub fn empty(is_nvml: bool) -> Self {
        Self {
            node: ArcSwapOption::empty(),
            trouble: ArcSwapOption::empty(),
            is_nvml,
            library: OnceLock::new(),
            unfit_since: Mutex::default(),
            restart_after: None,
        }
    }

    /// The same, which [needs a restart](Self::needs_restart) once the library has been missing or unfit for this long.
    #[must_use]
    pub fn with_restart_after(self, restart_after: Option<Duration>) -> Self {
        Self { restart_after, ..self }
    }

    /// The reason to restart the container, once it has lasted for `restart_after`: a container gets its library when it is created.
    #[must_use]
    pub fn needs_restart(&self) -> Option<String> {
        let patience = self.restart_after?;
        let since = (*self.unfit_since.lock().unwrap_or_else(PoisonError::into_inner))?;
        let trouble = self.trouble().filter(|_| since.elapsed() >= patience)?;
        Some(format!("for {patience:?} and longer: {}", trouble.message))
    }

    fn note_fitness(&self, is_unfit: bool) {
        let mut since = self.unfit_since.lock().unwrap_or_else(PoisonError::into_inner);
        *since = is_unfit.then(|| since.unwrap_or_else(Instant::now));
    }

    /// The current node.
    #[must_use]
    pub fn node(&self) -> Option<Arc<Node>> {
        self.node.load_full()
    }

    /// Why there is none.
    #[must_use]
    pub fn trouble(&self) -> Option<Arc<OpenError>> {
        self.trouble.load_full()
    }

    /// Whether the configured source is the driver.
    #[must_use]
    pub fn is_nvml(&self) -> bool {
        self.is_nvml
    }

    /// What the driver's library added to the process's memory when it was opened first; `None` before. The process keeps
    /// it while there is no node.
    #[must_use]
    pub fn library(&self) -> Option<Footprint> {
        self.library.get().copied()
    }

    /// Sets what the driver's library added. Only the first call has an effect: when the library is opened again, it adds
    /// little, because most of its memory is still mapped.
    pub fn set_library(&self, added: Footprint) {
        // Refused if it is known.
        let _ = self.library.set(added);
    }

    /// Sets the current node.
    pub fn fill(&self, node: Arc<Node>) {
        self.trouble.store(None);
        self.node.store(Some(node));
        self.note_fitness(false);
    }

    /// Removes the node, or updates why there is none.
    pub fn clear(&self, trouble: OpenError) {
        let is_unfit = UNFIT.contains(&trouble.reason);
        self.trouble.store(Some(Arc::new(trouble)));
        self.node.store(None);
        self.note_fitness(is_unfit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::Manual;
    use highwater_core::gpu::Rare;

    #[test]
    fn a_turn_derives_from_readings_and_moves_the_windows_of_calls() {
        let (node, mut writer) = Node::of_one_gpu(Arc::new(Manual::at(0)));
        let ledger = Ledger::new(highwater_core::jobs::Limits::default());
        node.gpus[0].set_rare(0, Rare { memory_total_bytes: Some(100), ..Rare::default() });
        for (at_ns, bytes) in [(1_000, 99), (SECOND_NS, 99), (2 * SECOND_NS, 10)] {
            writer.push(at_ns, bytes).expect("in order");
        }
        node.advance(&ledger, 2 * SECOND_NS);
        let above_ns = node.join.derived(0).pressure.above_ns();
        assert!(above_ns.iter().all(|ns| *ns > SECOND_NS), "it was nearly full: {above_ns:?}");
    }

    #[test]
    fn only_a_library_that_stays_unfit_needs_a_new_container() {
        let error = |reason| OpenError { reason, message: format!("because of {reason}") };
        let of = |patience: Option<Duration>| Slot::empty(true).with_restart_after(patience);
        let slot = of(Some(Duration::ZERO));
        assert_eq!(slot.needs_restart(), None);
        for reason in ["driver_not_loaded", "no_gpus", "driver_hangs"] {
            slot.clear(error(reason));
            assert_eq!(slot.needs_restart(), None, "{reason} can end by itself");
        }
        for reason in UNFIT {
            slot.clear(error(reason));
            assert!(slot.needs_restart().is_some_and(|why| why.contains(&format!("because of {reason}"))), "{reason}");
        }
        slot.fill(Node::of_one_gpu(Arc::new(Manual::at(0))).0);
        assert_eq!(slot.needs_restart(), None);
        let (patient, never) = (of(Some(Duration::from_secs(3600))), of(None));
        for slot in [&patient, &never] {
            slot.clear(error("library_missing"));
            assert_eq!(slot.needs_restart(), None);
        }
        // Each retry reports the same; the time counts from the first.
        let first = *patient.unfit_since.lock().expect("no panic");
        patient.clear(error("driver_mismatch"));
        assert_eq!(*patient.unfit_since.lock().expect("no panic"), first);
        patient.clear(error("no_gpus"));
        assert_eq!(*patient.unfit_since.lock().expect("no panic"), None);
    }

    #[test]
    fn counts_of_a_gpu_that_stays_away_are_given_up_in_the_end() {
        let counted = || Node::of_one_gpu(Arc::new(Manual::at(0))).0.counted();
        let mut kept = counted();
        for away in 1..MOST_AWAY + 3 {
            kept = Counted { by_uuid: HashMap::new(), ..counted() }.with(Some(kept));
            assert_eq!(kept.by_uuid.len(), usize::from(away <= MOST_AWAY), "{away}");
        }
        kept = counted().with(Some(kept));
        assert_eq!(kept.by_uuid.values().map(|counted| counted.away).collect::<Vec<_>>(), [0], "it came back");
    }
}
