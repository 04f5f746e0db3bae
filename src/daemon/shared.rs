//! What the threads of a daemon share, and what those that read a source do with it.

use super::finding_log::FindingLog;
use crate::capture::Recorder;
use crate::config::Settings;
use highwater_core::clock::{MILLISECOND_NS, park_for};
use highwater_core::gpu::Processes;
use highwater_engine::intake::Intake;
use highwater_engine::node::Node;
use highwater_engine::sample::{Budget, FastLaneSettings};
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often the join processes new readings.
pub(super) const JOIN_PERIOD_NS: i64 = 100 * MILLISECOND_NS;

/// The parts that every thread shares.
#[derive(Clone)]
pub(super) struct SharedParts {
    pub(super) settings: Arc<Settings>,
    pub(super) state: SharedState,
    pub(super) intake: Arc<Intake>,
    pub(super) processes: Arc<Processes>,
    pub(super) recorder: Recorder,
    pub(super) stop: Arc<AtomicBool>,
}

impl SharedParts {
    /// Makes this the node that every part of the daemon uses.
    pub(super) fn put_in_place(&self, node: &Arc<Node>) {
        let kept = |period_ns| self.settings.captures.sweeps(period_ns);
        node.ticks.keep_log(kept(self.settings.period_ns), kept(JOIN_PERIOD_NS));
        self.intake.set_devices(node.source.devices());
        self.state.slot.fill(Arc::clone(node));
    }

    /// Runs the join and the detectors, passes new findings to the recorder, and logs them.
    pub(super) fn join(&self, node: &Node, log: &mut FindingLog, now_ns: i64) {
        self.intake.advance();
        self.state.findings.read_hosts(now_ns, |pid| self.intake.host_waits(pid));
        let change = self.state.advance(node, now_ns);
        self.recorder.found(&change);
        log.log(&change, now_ns);
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits until the daemon is stopped, which wakes the thread, and at most for this long.
    pub(super) fn wait(&self, duration_ns: i64) {
        park_for(Duration::from_nanos(duration_ns.max(0).unsigned_abs()), &self.stop);
    }

    pub(super) fn lane(&self) -> FastLaneSettings {
        let settings = &self.settings;
        let budget = Budget {
            period_ns: settings.period_ns,
            max_period_ns: settings.max_period_ns,
            busy_ratio: settings.budget,
        };
        FastLaneSettings { budget, idle_period_ns: settings.idle_period_ns, hang_after_ns: settings.hang_after_ns }
    }
}
