//! Reads a live source: opens it, runs its lanes, and opens it again when it is gone.
//!
//! Enters: the settings' source, NVML or a simulation. Leaves: the current node in its slot, or why there is none.
//! Invariants: jobs continue while there is no node; counts outlive a node.

use super::finding_log::FindingLog;
use super::shared::{JOIN_PERIOD_NS, SharedParts};
use super::threads::{DRAIN, join_all, spawn};
use crate::config::SourceSpec;
use crate::nvml::Opener;
use crate::sim::{Scenario, Sim};
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::{GpuState, Health, Processes};
use highwater_core::ring;
use highwater_core::source::{OpenError, Source};
use highwater_engine::footprint::Footprint;
use highwater_engine::node::{Counted, Node};
use highwater_engine::sample::{self, RARE_TURNS, RollCall};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// While NVML is opened, a call may take this many times `sampling.hang_after`: without persistence mode, the driver initializes
/// the GPU in that call.
const OPEN_HANG_FACTOR: u32 = 10;
/// How long to wait before retrying a source that cannot be opened, or whose GPUs are all lost.
const RETRY_NS: i64 = 5 * SECOND_NS;
/// How often the join runs while there is no job: for pressure, flushes and lost GPUs.
const IDLE_JOIN_PERIOD_NS: i64 = 500 * MILLISECOND_NS;
/// How often it runs while all GPUs are also idle, so that their memory does not change.
const RESTING_JOIN_PERIOD_NS: i64 = SECOND_NS;
/// How often jobs are updated while there is no node.
const WITHOUT_NODE_PERIOD_NS: i64 = 200 * MILLISECOND_NS;
/// The longest wait before devices that have changed are checked again: instances are created one by one.
const SETTLE_NS: i64 = 5 * SECOND_NS;
/// How often to check whether every GPU is lost.
const LOSS_PERIOD_NS: i64 = SECOND_NS;

/// Opens the source, runs its lanes until they stop or every GPU is lost, and opens it again.
pub(super) fn keep_open(shared: &SharedParts, scenario: Option<&Scenario>) {
    let (mut logged, mut counted) = (None, None);
    let patience = Duration::from_nanos(shared.settings.hang_after_ns.max(0).unsigned_abs()) * OPEN_HANG_FACTOR;
    let opener = Opener::new(shared.settings.nvml_library.clone(), patience);
    while !shared.stopped() {
        let Some(opened) = open(shared, scenario, &opener) else { return };
        match opened {
            Ok(source) => {
                logged = None;
                tracing::info!(source = source.description(), gpus = source.devices().len(), "reading");
                if let Some(now) = run_node(shared, source, counted.as_ref()) {
                    counted = Some(now.with(counted));
                }
            }
            Err(error) => {
                if logged.as_ref() != Some(&error) {
                    tracing::error!(reason = error.reason, "nothing to read: {error}");
                }
                logged = Some(error.clone());
                shared.state.slot.clear(error);
                wait_without_node(shared);
            }
        }
    }
}

/// Waits before the next attempt to open the source; jobs continue.
fn wait_without_node(shared: &SharedParts) {
    let until_ns = shared.state.clock.now_ns() + RETRY_NS;
    while !shared.stopped() && shared.state.clock.now_ns() < until_ns {
        go_on_without_node(shared);
        shared.wait(WITHOUT_NODE_PERIOD_NS);
    }
}

/// Opens the source, however long that takes; `None` if the daemon is stopped meanwhile.
fn open(
    shared: &SharedParts,
    scenario: Option<&Scenario>,
    opener: &Opener,
) -> Option<Result<Arc<dyn Source>, OpenError>> {
    if let Some(scenario) = scenario {
        // The scenario begins at a whole millisecond, aligned with the sampler's deadlines.
        let start_ns = shared.state.clock.now_ns() / MILLISECOND_NS * MILLISECOND_NS;
        return Some(Ok(Arc::new(Sim::new(scenario.clone(), start_ns))));
    }
    let (before, mut is_logged) = (Footprint::now(), false);
    let opened = opener.open(&mut |hangs| {
        if let Some(error) = hangs {
            if !std::mem::replace(&mut is_logged, true) {
                tracing::error!(reason = error.reason, "nothing to read: {error}");
            }
            shared.state.slot.clear(error.clone());
        }
        go_on_without_node(shared);
        !shared.stopped()
    })?;
    if opened.is_ok()
        && let Some((before, now)) = before.zip(Footprint::now())
    {
        shared.state.slot.set_library(now.since(before));
    }
    Some(opened.map(|nvml| Arc::new(nvml) as _))
}

/// Jobs continue while there is no node.
fn go_on_without_node(shared: &SharedParts) {
    shared.intake.advance();
    shared.state.advance_without_node(shared.state.clock.now_ns());
}

/// Runs one node from its first tick until the daemon stops or every GPU is lost. Returns its counts.
fn run_node(shared: &SharedParts, source: Arc<dyn Source>, before: Option<&Counted>) -> Option<Counted> {
    let made = Node::new(
        source,
        Arc::clone(&shared.state.clock),
        shared.settings.ring(1_000),
        shared.settings.periods(),
        before,
    );
    let (node, writers) = match made {
        Ok((mut node, writers)) => {
            node.join.count_free_below(&shared.settings.free_below);
            (Arc::new(node), writers)
        }
        Err(error) => {
            let message = format!("cannot create the rings: {error}");
            shared.state.slot.clear(OpenError { reason: "ring", message });
            wait_without_node(shared);
            return None;
        }
    };
    let mut lanes = Lanes { node: Arc::clone(&node), stop: Arc::default(), threads: Vec::new(), apart: Arc::default() };
    shared.put_in_place(&node);
    // A node with only some of its lanes would look alive and show stale values.
    let started = start_lanes(shared, &mut lanes, writers);
    let is_whole = started.is_ok();
    let end = match started {
        Ok(()) => wait_for_end(shared, &node),
        Err(error) => {
            let message = format!("cannot start every reader thread: {error:#}");
            Some(OpenError { reason: "threads", message })
        }
    };
    if let Some(end) = end {
        tracing::warn!(reason = end.reason, "{end}");
        shared.state.slot.clear(end);
    }
    lanes.stop.store(true, Ordering::Relaxed);
    lanes.threads.append(&mut lanes.apart.lock().unwrap_or_else(PoisonError::into_inner));
    lanes.threads.iter().for_each(|lane| lane.thread().unpark());
    if !join_all(lanes.threads, DRAIN - Duration::from_millis(300)) {
        tracing::warn!("a lane hangs in the driver and is left behind");
    }
    shared.processes.set(HashMap::default());
    if !is_whole {
        wait_without_node(shared);
    }
    Some(node.counted())
}

/// Waits until the source must be opened again, and returns why: every GPU has been lost for [`RETRY_NS`], or the
/// devices have changed. Returns `None` if the daemon stops.
fn wait_for_end(shared: &SharedParts, node: &Node) -> Option<OpenError> {
    let mut lost_since_ns = None;
    let mut devices = DeviceWatch::new(node, shared.state.clock.now_ns());
    while !shared.stopped() {
        shared.wait(LOSS_PERIOD_NS);
        let now_ns = shared.state.clock.now_ns();
        lost_since_ns = if node.is_lost() { lost_since_ns.or(Some(now_ns)) } else { None };
        if lost_since_ns.is_some_and(|since_ns| now_ns - since_ns >= RETRY_NS) {
            let message = "every GPU is lost; reopening NVML".to_owned();
            return Some(OpenError { reason: "all_gpus_lost", message });
        }
        if devices.have_changed(node, now_ns) {
            let message = "GPUs or MIG instances appeared or disappeared; reopening NVML".to_owned();
            return Some(OpenError { reason: "devices_changed", message });
        }
    }
    None
}

/// Checks periodically whether a node's devices have changed.
struct DeviceWatch {
    period_ns: i64,
    /// When to check next.
    next_ns: i64,
    /// The result of the last check.
    has_changed: bool,
    /// The answer of the check in progress.
    asked: Option<Receiver<bool>>,
}

impl DeviceWatch {
    fn new(node: &Node, now_ns: i64) -> Self {
        let period_ns = node.periods.slow_ns * RARE_TURNS;
        Self { period_ns, next_ns: now_ns + period_ns, has_changed: false, asked: None }
    }

    /// Whether two checks in a row found other devices. It skips the check while a call on any GPU may hang, because
    /// the check queries all GPUs; and checks on a thread of its own, because it may hang all the same.
    fn have_changed(&mut self, node: &Node, now_ns: i64) -> bool {
        match self.asked.as_ref().map(Receiver::try_recv) {
            Some(Ok(has_changed)) => {
                self.asked = None;
                let had_changed = std::mem::replace(&mut self.has_changed, has_changed);
                self.next_ns = now_ns + if has_changed { self.period_ns.min(SETTLE_NS) } else { self.period_ns };
                return had_changed && has_changed;
            }
            Some(Err(TryRecvError::Empty)) => return false,
            Some(Err(TryRecvError::Disconnected)) => self.asked = None,
            None => {}
        }
        if now_ns >= self.next_ns && !node.gpus.iter().any(may_hang) {
            let (source, calls, (answer, asked)) = (Arc::clone(&node.source), Arc::clone(&node.calls), channel());
            // Sending fails if the node ended meanwhile. If no thread can be started, the next call tries again.
            let check = move || {
                let _ = answer.send(source.has_changed(&calls));
            };
            self.asked = spawn("hw-devices", check).is_ok().then_some(asked);
        }
        false
    }
}

/// Whether a call on this GPU may hang: the GPU is hung, or a call of the fast lane has not returned.
fn may_hang(gpu: &GpuState) -> bool {
    gpu.health() == Health::Hung || gpu.is_doubted()
}

/// The threads of one node.
struct Lanes {
    node: Arc<Node>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// The further `hw-gpu` threads, each of which reads one GPU that must not wait for the others.
    apart: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Lanes {
    fn start(&mut self, name: &str, run: impl FnOnce(&Node, &Arc<AtomicBool>) + Send + 'static) -> anyhow::Result<()> {
        let (node, stop) = (Arc::clone(&self.node), Arc::clone(&self.stop));
        self.threads.push(spawn(name, move || run(&node, &stop))?);
        Ok(())
    }
}

/// Starts every lane of a node, and the join.
fn start_lanes(shared: &SharedParts, lanes: &mut Lanes, writers: Vec<ring::Writer>) -> anyhow::Result<()> {
    let sampler = lanes.node.sampler(writers);
    let (lane, watched) = (shared.lane(), sampler.share());
    let node = &lanes.node;
    let roll = Arc::new(RollCall::new(&node.gpus, &node.calls, Arc::clone(&node.ticks), lane.hang_after_ns));
    let watched_roll = Arc::clone(&roll);
    lanes.start("hw-fast", move |_, stop| sample::run_paced(sampler, lane, stop))?;
    lanes.start("hw-watch", move |_, stop| sample::watch(&watched, lane, &watched_roll, stop))?;
    start_units(shared, lanes, &roll)?;
    lanes.start("hw-events", |node, stop| sample::run_events(&*node.source, &*node.clock, &node.gpus, stop))?;
    let shared_by_join = shared.clone();
    lanes.start("hw-join", move |node, stop| run_join(node, &roll, &shared_by_join, stop))?;
    if matches!(shared.settings.source, SourceSpec::Sim(_)) {
        let (intake, socket) = (Arc::clone(&shared.intake), shared.settings.annotations_socket.clone());
        lanes.start("hw-sim-jobs", move |node, stop| {
            highwater_engine::intake::send_annotations(&*node.source, &*node.clock, socket.as_deref(), &intake, stop);
        })?;
    }
    Ok(())
}

/// What the threads of the medium and slow lanes share.
struct Slower {
    node: Arc<Node>,
    processes: Arc<Processes>,
    processes_always: bool,
    schedules: sample::Schedules,
}

impl Slower {
    fn lanes<'a>(&'a self, roll: &'a RollCall) -> sample::Lanes<'a> {
        sample::Lanes {
            source: &*self.node.source,
            clock: &*self.node.clock,
            gpus: &self.node.gpus,
            processes: &self.processes,
            processes_always: self.processes_always,
            schedules: &self.schedules,
            roll,
        }
    }
}

/// Starts the thread that reads all physical GPUs, and sets the function that gives one of them its own thread.
fn start_units(shared: &SharedParts, lanes: &mut Lanes, roll: &Arc<RollCall>) -> anyhow::Result<()> {
    let (node, periods) = (Arc::clone(&lanes.node), shared.settings.periods());
    let begin_ns = node.clock.now_ns();
    let slower = Arc::new(Slower {
        processes: Arc::clone(&shared.processes),
        processes_always: shared.settings.metrics.processes,
        schedules: sample::Schedules::new(roll.units(), begin_ns, periods.medium_ns, periods.slow_ns),
        node,
    });
    let (apart, stop) = (Arc::clone(&lanes.apart), Arc::clone(&lanes.stop));
    let (of_one, weak) = (Arc::clone(&slower), Arc::downgrade(roll));
    // The watchdog calls the function at each look; an error is logged once, until a thread starts.
    let has_failed = AtomicBool::new(false);
    roll.units().on_parting(Box::new(move |number| {
        let Some(roll) = weak.upgrade() else { return false };
        let mut apart = apart.lock().unwrap_or_else(PoisonError::into_inner);
        // Checked under the lock. `run_node` sets the flag before it takes the threads, so it misses none that starts
        // here.
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        apart.retain(|thread| !thread.is_finished());
        let (slower, stop) = (Arc::clone(&of_one), Arc::clone(&stop));
        match spawn("hw-gpu", move || sample::run_unit(&slower.lanes(&roll), number, &stop)) {
            Ok(thread) => apart.push(thread),
            Err(error) => {
                if !has_failed.swap(true, Ordering::Relaxed) {
                    tracing::error!("a GPU waits for another that hangs: {error:#}");
                }
                return false;
            }
        }
        has_failed.store(false, Ordering::Relaxed);
        true
    }));
    let roll = Arc::clone(roll);
    lanes.start("hw-gpu", move |_, stop| sample::run_units(&slower.lanes(&roll), stop))
}

fn run_join(node: &Node, roll: &RollCall, shared: &SharedParts, stop: &AtomicBool) {
    let mut next_ns = node.clock.now_ns();
    let mut log = FindingLog::default();
    while !stop.load(Ordering::Relaxed) {
        let now_ns = node.clock.now_ns();
        // The thread of the slower lanes may wait for the same GPU as the fast lane.
        roll.look(now_ns);
        shared.join(node, &mut log, now_ns);
        let period_ns = match shared.intake.jobs().by_id().is_empty() {
            false => JOIN_PERIOD_NS,
            true if node.gpus.iter().all(GpuState::is_idle) => RESTING_JOIN_PERIOD_NS,
            true => IDLE_JOIN_PERIOD_NS,
        };
        next_ns = (next_ns + period_ns).max(node.clock.now_ns());
        node.clock.wait_until(next_ns);
    }
    // A last turn, for phases and steps that ended since the previous one.
    shared.join(node, &mut log, node.clock.now_ns());
}
