//! The daemon without HTTP, OTLP and captures: for a recording, and for `top`.
//!
//! Enters: settings, and annotations over the sockets. Leaves: the state that readers share.

use super::live;
use super::parts::{intake, scenario, state, watch_workloads};
use super::shared::SharedParts;
use super::sockets::Sockets;
use super::threads::{DRAIN, join_all, spawn};
use crate::capture::Recorder;
use crate::config::Settings;
use crate::sim::Scenario;
use highwater_core::clock::{Clock, Live};
use highwater_core::gpu::{Health, Processes};
use highwater_engine::node::Node;
use highwater_engine::place::kubelet::Kubelet;
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the source may take to open: a driver that must be loaded first takes seconds.
const OPEN_WITHIN: Duration = Duration::from_secs(30);
/// How long to wait for the first readings; a driver that lists no processes takes all of it.
const READ_WITHIN: Duration = Duration::from_secs(2);
/// How often to check whether it is open, or has been read.
const OPEN_POLL: Duration = Duration::from_millis(2);

/// The threads that read the GPUs and take annotations.
pub struct Readers {
    pub(super) shared: SharedParts,
    sockets: Sockets,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Starts them without a recording.
    ///
    /// # Errors
    /// The scenario cannot be read, a socket cannot be bound, or a thread cannot be started.
    pub fn alone(mut settings: Settings) -> anyhow::Result<Self> {
        settings.captures.directory = None;
        let scenario = scenario(&settings)?;
        let sockets = Sockets::open(&settings)?;
        Self::start(settings, scenario, sockets)
    }

    /// What they have read.
    #[must_use]
    pub fn state(&self) -> &SharedState {
        &self.shared.state
    }

    pub(super) fn start(settings: Settings, scenario: Option<Scenario>, sockets: Sockets) -> anyhow::Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(Live::start());
        let (stop, processes) = (Arc::new(AtomicBool::new(false)), Arc::new(Processes::default()));
        let kubelet = Kubelet::new(&settings.kubelet).map(Arc::new);
        let intake = intake(&settings, &clock, &clock, &processes, kubelet.clone())?;
        let state = state(&settings, &intake, kubelet, Arc::clone(&clock));
        let (settings, recorder) = (Arc::new(settings), Recorder::default());
        let shared = SharedParts { settings, state, intake, processes, recorder, stop: Arc::clone(&stop) };
        let mut threads = Vec::new();
        sockets.serve(&shared.intake, &stop, &mut threads)?;
        watch_workloads(&shared.settings, &clock, &shared.state, &stop, &mut threads)?;
        let reads = shared.clone();
        threads.push(spawn("hw-source", move || live::keep_open(&reads, scenario.as_ref()))?);
        Ok(Self { shared, sockets, threads })
    }

    /// Waits until the source is open.
    ///
    /// # Errors
    /// It cannot be opened, or does not open in time.
    pub fn wait_for_node(&self) -> anyhow::Result<()> {
        let slot = &self.shared.state.slot;
        let until = Instant::now() + OPEN_WITHIN;
        while slot.node().is_none() {
            if let Some(trouble) = slot.trouble() {
                anyhow::bail!("no GPU can be read: {trouble}");
            }
            anyhow::ensure!(
                Instant::now() < until,
                "no GPU can be read: the driver has not answered for {OPEN_WITHIN:?}"
            );
            std::thread::sleep(OPEN_POLL);
        }
        Ok(())
    }

    /// Waits until each GPU that answers has been read once by every lane, for at most a few seconds.
    pub fn wait_for_readings(&self) {
        let until = Instant::now() + READ_WITHIN;
        let is_read = |node: &Node| {
            let mut gpus = node.gpus.iter().zip(node.rings.iter());
            gpus.all(|(gpu, ring)| {
                // The processes are what is read last.
                gpu.health() != Health::Up || (ring.newest_ns().is_some() && gpu.processes().is_some())
            })
        };
        while Instant::now() < until && !self.state().slot.node().is_some_and(|node| is_read(&node)) {
            std::thread::sleep(OPEN_POLL);
        }
    }

    /// Ends all threads.
    pub fn stop(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.intake.end_readers();
        self.threads.iter().for_each(|handle| handle.thread().unpark());
        self.sockets.close();
        if !join_all(self.threads, DRAIN) {
            tracing::warn!("a thread did not end in time; it is left behind");
        }
    }
}
