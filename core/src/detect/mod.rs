//! The detectors, which report why steps are slow, or soon will be, while it happens and with the measured numbers.
//!
//! Enters, in each turn of the join: ended phases, rings, falls of memory, and each GPU's latest readings. Leaves: a [`Board`]
//! of findings and incidents, and the ratios of each rank's last steps. Invariants: detectors do no I/O and take time from their
//! view, so that live, replay and test share them; each is one file; a finding states what was observed and what coincided with it,
//! and claims no mechanism that the data does not show. Absent on purpose: alerting, which Prometheus does.
//!
//! To add a detector: a file with a `Detector`, its kind in `finding.rs`, and its line in `State::new`. A detector that looks
//! for a cause comes after the detectors that report it; otherwise the order does not matter. Its cause, and its place among what
//! follows from what, are two lines in `incident.rs`.

mod agree;
mod allocator_thrash;
mod beside;
mod board;
mod comm_starvation;
mod compare;
mod detector;
pub mod evaluate;
mod finding;
mod gpu_lost;
mod gpu_throttled;
mod gpu_unhealthy;
#[cfg(test)]
mod hand;
mod host_oom;
mod hosts;
mod idle_gpu;
mod incident;
mod input_stall;
mod lasting;
mod late;
mod low_headroom;
mod memory_growth;
mod names;
mod nvlink_degraded;
mod oom;
mod pcie_degraded;
mod peaks;
mod peers;
#[cfg(test)]
mod pipelines;
mod scrapes;
mod settings;
mod slow_steps;
mod stage_imbalance;
mod steps;
mod straggler;
mod tally;
#[cfg(test)]
mod tests;
mod trend;
mod uneven_work;
mod view;
mod work;
mod xid;

pub use board::{Board, Change};
pub use detector::{Looked, Ratios};
pub use finding::{Certainty, Evidence, Finding, FindingKind, LagCause, Said, Severity, Sign, Subject, Text};
pub use hosts::{HostWaits, MOST_SUSPECTS};
pub use incident::{Cause, Concerned, Incident, KindFound};
pub use names::Names;
pub use settings::Settings;
pub use steps::MOST_PHASES_BYTES;
pub use tally::{Counted, Incurred, Lost};

use crate::clock::SECOND_NS;
use crate::gpu::{PodName, Workload};
use crate::jobs::{EndedBy, JobId, Jobs, Rank};
use crate::phases::{Flush, Join, Ledger, RankKey};
use crate::shares;
use detector::{Detector, Trouble};
use hosts::Hosts;
use scrapes::Scrapes;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use steps::Steps;
use view::{OpenStep, RankNow, Subjects, View};

/// Troubles are remembered for this long, for those that look for a cause.
const TROUBLE_NS: i64 = 30 * SECOND_NS;
/// Troubles that are remembered at most.
const MOST_TROUBLES: usize = 4096;
/// For how many intervals of the slowest reader a finding stays in the metrics after its last sign.
const HELD_INTERVALS: i64 = 3;
/// For how many intervals of the slowest reader a new count is exported as 0, so that each reader reads the 0 at least once.
const SETTLE_INTERVALS: i64 = 2;
/// Marks of failed allocations are looked at for this long.
const OOM_NS: i64 = 60 * SECOND_NS;
/// Ranks of which nothing ended for this long are forgotten.
const SILENCE_NS: i64 = 300 * SECOND_NS;

/// All detectors with their memory, and the board that they write to.
pub struct Detect {
    settings: Settings,
    state: Mutex<State>,
    board: Mutex<Board>,
    hosts: Hosts,
    scrapes: Mutex<Scrapes>,
    /// Steps and phases that were forgotten before the detectors looked.
    unseen: AtomicU64,
}

struct State {
    detectors: Vec<Box<dyn Detector>>,
    steps: Steps,
    subjects: Subjects,
    troubles: Vec<Trouble>,
    /// The log's count of ended steps and phases at the last turn.
    ended: u64,
    /// UUIDs of the GPUs by position, and the number of falls that each of them had at the last turn.
    uuids: Vec<String>,
    flushes: Vec<u64>,
}

impl Detect {
    /// Detectors that have seen nothing.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let (state, board, scrapes) = (Mutex::new(State::new()), Mutex::default(), Mutex::default());
        Self { settings, state, board, hosts: Hosts::default(), scrapes, unseen: AtomicU64::new(0) }
    }

    /// The thresholds.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The findings. Held for microseconds, by the join, scrapes and the API.
    pub fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a scraper reads the metrics at this time. The name `reader` distinguishes it from other scrapers.
    pub fn note_scrape(&self, reader: &str, now_ns: i64) {
        self.scrapes().note(reader, now_ns);
    }

    fn scrapes(&self) -> MutexGuard<'_, Scrapes> {
        self.scrapes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The findings that metrics export at a time: the active ones, and ended ones whose last sign some reader of the metrics may
    /// not have read yet.
    #[must_use]
    pub fn shown(&self, now_ns: i64) -> Vec<Finding> {
        let held_ns = self.scrapes().interval_ns() * HELD_INTERVALS;
        let board = self.board();
        let is_held = |finding: &&Finding| now_ns - finding.seen_ns <= held_ns;
        board.active().chain(board.ended().filter(is_held)).cloned().collect()
    }

    /// The incidents that metrics export at a time, as [`shown`](Self::shown).
    #[must_use]
    pub fn shown_incidents(&self, now_ns: i64) -> Vec<Incident> {
        let held_ns = self.scrapes().interval_ns() * HELD_INTERVALS;
        let is_shown = |incident: &&Incident| incident.is_active() || now_ns - incident.seen_ns <= held_ns;
        self.board().incidents().filter(is_shown).cloned().collect()
    }

    /// How many findings have been raised of each kind and subject, as metrics show it at a time.
    #[must_use]
    pub fn counts(&self, now_ns: i64) -> Vec<(Counted, u64)> {
        self.board().counts(now_ns, self.settle_ns())
    }

    /// How often incidents were there, by cause and subject, as metrics show it at a time.
    #[must_use]
    pub fn incurred(&self, now_ns: i64) -> Vec<(Incurred, u64)> {
        self.board().incurred(now_ns, self.settle_ns())
    }

    /// Nanoseconds that ranks have lost, summed over them, by job and cause, as metrics show it at a time.
    #[must_use]
    pub fn lost(&self, now_ns: i64) -> Vec<(Lost, u64)> {
        self.board().lost(now_ns, self.settle_ns())
    }

    /// Nanoseconds that ranks have spent in steps and not lost, summed over them, by job, as metrics show it at a time.
    #[must_use]
    pub fn productive(&self, now_ns: i64) -> Vec<(JobId, u64)> {
        self.board().productive(now_ns, self.settle_ns())
    }

    fn settle_ns(&self) -> i64 {
        self.scrapes().known_interval_ns() * SETTLE_INTERVALS
    }

    /// By kind of finding, the steps that its detector has examined since the GPUs last changed.
    #[must_use]
    pub fn looked(&self) -> BTreeMap<FindingKind, Looked> {
        let (state, mut looked) = (self.state.lock().unwrap_or_else(PoisonError::into_inner), BTreeMap::new());
        state.detectors.iter().for_each(|detector| detector.looked(&mut looked));
        looked
    }

    /// Steps and phases that ended in such numbers that some were forgotten before the detectors looked.
    #[must_use]
    pub fn unseen(&self) -> u64 {
        self.unseen.load(Ordering::Relaxed)
    }

    /// Looks at what has happened since the last turn. `now_ns` is on the timeline of the node's samples.
    pub fn advance(&self, join: &Join, ledger: &Ledger, now_ns: i64) -> Change {
        if !self.settings.enabled {
            return Change::default();
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_anew = state.follow(join);
        let ended = {
            let log = ledger.ended();
            let (ended, lost) = log.phases.since(state.ended);
            // A change of GPUs clears the log: what it drops does not count as unseen.
            self.unseen.fetch_add(if is_anew { 0 } else { lost }, Ordering::Relaxed);
            state.ended = log.phases.count();
            ended
        };
        // How long what its rank ended would have taken is not known.
        let ended = ended.iter().filter(|attributed| attributed.ended.by == EndedBy::End);
        // After what has ended, so that no step is seen as both ended and open.
        let (ranks, ooms, host_ooms) = {
            let jobs = ledger.open();
            let ooms = marked(&jobs, now_ns, |rank| rank.oom.as_ref(), |oom| oom.at_ns);
            (
                ranks(&jobs, &self.settings, now_ns),
                ooms,
                marked(&jobs, now_ns, |rank| rank.host_oom.as_ref(), |oom| oom.at_ns),
            )
        };
        let steps: Vec<_> = ended.filter_map(|attributed| state.steps.take(attributed)).collect();
        let flushes = state.new_flushes(join);
        let mut subjects = std::mem::take(&mut state.subjects);
        subjects.note(join.gpus(), &ranks, now_ns);
        let view = View {
            now_ns,
            settings: &self.settings,
            gpus: join.gpus(),
            rings: join.rings(),
            steps: &steps,
            ranks: &ranks,
            ooms: &ooms,
            host_ooms: &host_ooms,
            flushes: &flushes,
            hosts: &self.hosts,
            on: &subjects.on,
            since_ns: &subjects.since_ns,
        };
        let (signs, ratios) = state.look(&view);
        let mut board = self.board();
        board.set_ratios(ratios);
        board.keep_lost(&state.uuids, now_ns);
        for (job, time_ns) in self.time_in_steps(&steps) {
            board.add_time(job, time_ns, now_ns);
        }
        let change = board.update(signs, now_ns, &view);
        state.subjects = subjects;
        change
    }

    /// The time that ranks spent in these steps, by job: without the warm-up, and without phases that only refill the GPU, as
    /// checkpoints.
    fn time_in_steps<'a>(&self, steps: &'a [steps::Step]) -> BTreeMap<&'a JobId, u64> {
        let mut times: BTreeMap<&JobId, u64> = BTreeMap::new();
        for step in steps.iter().filter(|step| step.nth >= self.settings.warm_up_steps) {
            let time_ns = step.length_ns() - step.time_in(&self.settings.refill_phases).unwrap_or(0);
            *times.entry(&step.key.0).or_default() += u64::try_from(time_ns).unwrap_or(0);
        }
        times
    }

    /// Calls `read` for the processes of ranks whose host seems to be late, and keeps the results. Call it in each
    /// turn. A process is read about once a second; one for which `read` returns `None` is tried again in the next
    /// turn.
    pub fn read_hosts(&self, now_ns: i64, mut read: impl FnMut(u32) -> Option<HostWaits>) {
        for (key, pid) in self.hosts.wanted(now_ns) {
            if let Some(waits) = read(pid) {
                self.hosts.note(&key, HostWaits { at_ns: now_ns, ..waits });
            }
        }
    }

    /// Ends findings that run out while there is no node.
    pub fn advance_without_node(&self, ledger: &Ledger, now_ns: i64) -> Change {
        let ranks = ranks(&ledger.open(), &self.settings, now_ns);
        self.board().advance_without_node(now_ns, |key| view::knows(&ranks, key))
    }
}

impl State {
    fn new() -> Self {
        Self {
            detectors: vec![
                Box::new(oom::OomDetector::default()),
                Box::new(host_oom::HostOomDetector::default()),
                Box::new(low_headroom::LowHeadroom::default()),
                Box::new(allocator_thrash::AllocatorThrash::default()),
                Box::new(comm_starvation::CommStarvation::default()),
                Box::new(input_stall::InputStall::default()),
                Box::new(compare::Compare::default()),
                Box::new(slow_steps::SlowSteps::default()),
                Box::new(memory_growth::MemoryGrowth::default()),
                Box::new(idle_gpu::IdleGpu::default()),
                Box::new(gpu_throttled::GpuThrottled::default()),
                Box::new(pcie_degraded::PcieDegraded::default()),
                Box::new(nvlink_degraded::NvlinkDegraded::default()),
                Box::new(gpu_unhealthy::GpuUnhealthy::default()),
                Box::new(gpu_lost::GpuLost::default()),
                Box::new(xid::XidDetector::default()),
            ],
            steps: Steps::default(),
            subjects: Subjects::default(),
            troubles: Vec::new(),
            ended: 0,
            uuids: Vec::new(),
            flushes: Vec::new(),
        }
    }

    /// Resets all state if positions refer to other GPUs than before. Returns whether it did.
    fn follow(&mut self, join: &Join) -> bool {
        let same = self.uuids.iter().eq(join.gpus().iter().map(|gpu| &gpu.device.uuid));
        if !same {
            let ended = self.ended;
            *self =
                Self { ended, uuids: join.gpus().iter().map(|gpu| gpu.device.uuid.clone()).collect(), ..Self::new() };
            self.flushes = (0..join.gpus().len()).map(|gpu| join.derived(gpu).flushes).collect();
        }
        !same
    }

    /// Each GPU's falls since the last turn, in the order of time.
    fn new_flushes(&mut self, join: &Join) -> Vec<(usize, Flush)> {
        let mut new = Vec::new();
        for (gpu, seen) in self.flushes.iter_mut().enumerate() {
            let (flushes, count) = join.flushes_since(gpu, *seen);
            new.extend(flushes.into_iter().map(|flush| (gpu, flush)));
            *seen = count;
        }
        new
    }

    fn look(&mut self, view: &View<'_>) -> (Vec<Sign>, BTreeMap<RankKey, Ratios>) {
        let (mut signs, mut ratios) = (Vec::new(), BTreeMap::new());
        self.troubles.retain(|trouble| view.now_ns - trouble.to_ns < TROUBLE_NS);
        shares::keep_newest(&mut self.troubles, MOST_TROUBLES, |trouble| trouble.key.0.scope().clone());
        for detector in &mut self.detectors {
            detector.look(view, &mut self.troubles, &mut signs);
            detector.ratios(&mut ratios);
        }
        self.steps.forget_before(view.now_ns - SILENCE_NS, |key| view.knows(key));
        (signs, ratios)
    }
}

/// The last of what each rank marked lately: failed allocations, or missing host memory.
fn marked<Mark>(
    jobs: &Jobs,
    now_ns: i64,
    last: impl Fn(&Rank) -> Option<&Arc<Mark>>,
    at_ns: impl Fn(&Mark) -> i64,
) -> Vec<(RankKey, Arc<Mark>)> {
    let is_late = |mark: &&Arc<Mark>| now_ns - at_ns(mark) < OOM_NS;
    let of = |(job, number, rank): (&JobId, u32, &Rank)| {
        Some(((job.clone(), number), Arc::clone(last(rank).filter(is_late)?)))
    };
    jobs.ranks().filter_map(of).collect()
}

/// Every rank that has not ended, as it is now, in the order of their keys.
fn ranks(jobs: &Jobs, settings: &Settings, now_ns: i64) -> Vec<RankNow> {
    // Few steps are open for long, so that the names of their phases are compared for these only.
    let refills = |rank: &Rank, begin_ns: i64| {
        now_ns - begin_ns > slow_steps::OPEN_NS
            && rank.open.iter().any(|open| steps::is_one_of(&open.name, &settings.refill_phases))
    };
    let now = |(job, number, rank): (&JobId, u32, &Rank)| RankNow {
        key: (job.clone(), number),
        pid: rank.pid,
        pod: rank.pod().map(|pod| {
            let (namespace, pod, container) = (pod.namespace.clone(), pod.name.clone(), String::new());
            Workload::Pod(PodName { namespace, pod, container })
        }),
        gpus: rank.gpus.as_deref().unwrap_or_default().to_vec(),
        step: rank.open_step().map(|open| OpenStep {
            number: open.step,
            begin_ns: open.begin_ns,
            retries: open.memory.and_then(|memory| memory.alloc_retries),
            refills: refills(rank, open.begin_ns),
        }),
        retries: rank.memory.alloc_retries,
        ooms: rank.memory.ooms,
        mesh: rank.mesh.clone(),
        world_size: rank.world_size,
        since_ns: rank.since_ns,
        heard_ns: rank.last_heard_ns,
        is_at_rest: rank.open.is_empty(),
    };
    jobs.ranks().filter(|(_, _, rank)| rank.exited_ns.is_none()).map(now).collect()
}
