//! Findings: why steps are slow, or soon will be, said while it happens and with the numbers for it.
//!
//! Enters: what ended, rings, falls of memory, and each GPU's latest readings, once a turn of the join. Leaves: a
//! [`Board`] of findings, and by rank what its last steps were like. Invariants: detectors do no I/O and take time from
//! their view, so that live, replay and test share them; each is one file; a finding says what was observed and what it
//! goes with, and claims no mechanism that the data does not show. Absent on purpose: alerting, which is Prometheus'.
//!
//! To add a detector: a file with a `Detector`, its kind in `finding.rs`, and its line in `State::new`. Order
//! matters only in so far as those that look for a cause come after those that find it.

mod allocator_thrash;
mod board;
mod comm_starvation;
mod compare;
pub mod evaluate;
mod finding;
mod gpu_lost;
#[cfg(test)]
mod hand;
mod idle_gpu;
mod input_stall;
mod lasting;
mod low_headroom;
mod memory_growth;
mod peers;
#[cfg(test)]
mod pipelines;
mod scrapes;
mod settings;
mod stage_imbalance;
mod steps;
mod straggler;
mod tally;
#[cfg(test)]
mod tests;
mod uneven_work;
mod view;
mod work;
mod xid;

pub use board::{Board, Change};
pub use finding::{Certainty, Evidence, Finding, FindingKind, Said, Severity, Sign, Subject, Text};
pub use settings::Settings;
pub use tally::Counted;

use crate::clock::SECOND_NS;
use crate::jobs::{JobId, Jobs, Rank};
use crate::phases::{Flush, Join, Ledger, RankKey};
use crate::shares;
use scrapes::Scrapes;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use steps::Steps;
use view::{OpenStep, RankNow, Subjects, View};

/// Troubles are remembered for this long, for those that look for a cause.
const TROUBLE_NS: i64 = 30 * SECOND_NS;
/// Troubles that are remembered at most.
const MOST_TROUBLES: usize = 4096;
/// For how many intervals of the slowest reader a finding stays in the metrics after its last sign.
const HELD_INTERVALS: i64 = 3;
/// For how many a new count of findings is shown as 0: at least one reading falls into them, however unsteady.
const SETTLE_INTERVALS: i64 = 2;
/// Ranks of which nothing ended for this long are forgotten.
const SILENCE_NS: i64 = 300 * SECOND_NS;

/// One thing that is looked for.
trait Detector: Send {
    /// Looks at one moment. `troubles` is what ranks suffered lately, of this and the detectors before.
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>);

    /// Adds what it knows of each rank's last steps.
    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        let _ = out;
    }

    /// Adds in how many steps it looked for each of its kinds.
    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        let _ = out;
    }
}

/// In how many steps of ranks a kind of finding was looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Looked {
    /// Steps that ended.
    pub steps: u64,
    /// Of these, the steps of which nothing could be said, because what it takes was not known. A step that was judged says
    /// that the problem is there or not.
    pub abstained: u64,
}

impl Looked {
    /// Counts a step.
    fn note(&mut self, is_judged: bool) {
        self.steps += 1;
        self.abstained += u64::from(!is_judged);
    }

    /// This and another recording's together.
    pub fn add(&mut self, other: Self) {
        self.steps += other.steps;
        self.abstained += other.abstained;
    }

    /// The share of the steps of which nothing could be said; `None` without steps.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "counts of steps")]
    pub fn abstained_ratio(self) -> Option<f64> {
        (self.steps > 0).then(|| self.abstained as f64 / self.steps as f64)
    }
}

/// A stretch of time in which a rank was in trouble that others may have to wait for.
#[derive(Debug, Clone)]
struct Trouble {
    kind: FindingKind,
    key: RankKey,
    from_ns: i64,
    to_ns: i64,
}

impl Trouble {
    /// Whether it overlaps an interval.
    fn meets(&self, from_ns: i64, to_ns: i64) -> bool {
        self.from_ns <= to_ns && from_ns <= self.to_ns
    }
}

/// What a rank's last steps were like; a part that is not known is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Ratios {
    /// The last step's communication over its own healthy baseline.
    pub comm_slowdown: Option<f64>,
    /// The last step's work over the median of the ranks that are like it.
    pub compute_lag: Option<f64>,
    /// Whether its last step could be compared with that of a rank that is like it.
    pub compared: Option<bool>,
    /// Share of the last steps spent waiting for data.
    pub data_stall: Option<f64>,
    /// Time until memory is full at the present growth, seconds.
    pub memory_full_seconds: Option<f64>,
}

/// All detectors with their memory, and the board that they write to.
pub struct Detect {
    settings: Settings,
    state: Mutex<State>,
    board: Mutex<Board>,
    scrapes: Mutex<Scrapes>,
    /// Steps and phases that were forgotten before the detectors looked.
    unseen: AtomicU64,
}

struct State {
    detectors: Vec<Box<dyn Detector>>,
    steps: Steps,
    subjects: Subjects,
    troubles: Vec<Trouble>,
    /// How many phases had ended in the intake at the last turn.
    ended: u64,
    /// The GPUs that positions are of, and how many falls each of its GPUs had at the last turn.
    uuids: Vec<String>,
    flushes: Vec<u64>,
}

impl Detect {
    /// Detectors that have seen nothing.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let (state, board, scrapes) = (Mutex::new(State::new()), Mutex::default(), Mutex::default());
        Self { settings, state, board, scrapes, unseen: AtomicU64::new(0) }
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

    /// What metrics show at a time: findings that go on, and those whose last sign not everybody who reads the metrics has
    /// had time to read.
    #[must_use]
    pub fn shown(&self, now_ns: i64) -> Vec<Finding> {
        let held_ns = self.scrapes().interval_ns() * HELD_INTERVALS;
        let board = self.board();
        let is_held = |finding: &&Finding| now_ns - finding.seen_ns <= held_ns;
        board.active().chain(board.ended().filter(is_held)).cloned().collect()
    }

    /// How many findings have been raised of each kind and subject, as metrics show it at a time.
    #[must_use]
    pub fn counts(&self, now_ns: i64) -> Vec<(Counted, u64)> {
        let settle_ns = self.scrapes().known_interval_ns() * SETTLE_INTERVALS;
        self.board().counts(now_ns, settle_ns)
    }

    /// In how many steps each kind of finding was looked for since the GPUs are these.
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
            // What is forgotten because GPUs changed is none of theirs.
            self.unseen.fetch_add(if is_anew { 0 } else { lost }, Ordering::Relaxed);
            state.ended = log.phases.count();
            ended
        };
        // After what has ended, so that no step is seen as both ended and open.
        let ranks = ranks(&ledger.open());
        let steps: Vec<_> = ended.iter().filter_map(|attributed| state.steps.take(attributed)).collect();
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
            flushes: &flushes,
            on: &subjects.on,
            since_ns: &subjects.since_ns,
        };
        let (signs, ratios) = state.look(&view);
        state.subjects = subjects;
        let mut board = self.board();
        board.set_ratios(ratios);
        board.keep_lost(&state.uuids, now_ns);
        board.update(signs, now_ns, |gpu| {
            let device = &join.gpus().get(gpu)?.device;
            Some((device.index.clone(), device.uuid.clone()))
        })
    }

    /// What can be said while there is no node.
    pub fn advance_without_node(&self, ledger: &Ledger, now_ns: i64) -> Change {
        let ranks = ranks(&ledger.open());
        self.board().advance_without_node(now_ns, |key| view::knows(&ranks, key))
    }
}

impl State {
    fn new() -> Self {
        Self {
            detectors: vec![
                Box::new(low_headroom::LowHeadroom::default()),
                Box::new(allocator_thrash::AllocatorThrash::default()),
                Box::new(comm_starvation::CommStarvation::default()),
                Box::new(input_stall::InputStall::default()),
                Box::new(compare::Compare::default()),
                Box::new(memory_growth::MemoryGrowth::default()),
                Box::new(idle_gpu::IdleGpu::default()),
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

    /// Begins anew where positions mean other GPUs than before, and returns whether it did.
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
        self.steps.forget_before(view.now_ns - SILENCE_NS);
        (signs, ratios)
    }
}

/// Every rank that has not ended, as it is now, in the order of their keys.
fn ranks(jobs: &Jobs) -> Vec<RankNow> {
    let now = |(job, number, rank): (&JobId, u32, &Rank)| RankNow {
        key: (job.clone(), number),
        pid: rank.pid,
        gpus: rank.gpus.as_deref().unwrap_or_default().to_vec(),
        step: rank.open_step().map(|open| OpenStep {
            number: open.step,
            begin_ns: open.begin_ns,
            retries: open.memory.and_then(|memory| memory.alloc_retries),
        }),
        retries: rank.memory.alloc_retries,
        mesh: rank.mesh.clone(),
        world_size: rank.world_size,
        since_ns: rank.since_ns,
        heard_ns: rank.last_heard_ns,
        is_at_rest: rank.open.is_empty(),
    };
    jobs.ranks().filter(|(_, _, rank)| rank.exited_ns.is_none()).map(now).collect()
}
