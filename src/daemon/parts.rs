//! The parts of a daemon that `run` and `record` need too: the intake, the state that readers share, the thread that finds pods and
//! Slurm steps, and the scenario of a simulation.
//!
//! Enters: settings. Leaves: each part, built.

use super::threads::spawn;
use crate::config::{Settings, SourceSpec};
use crate::sim::Scenario;
use anyhow::Context as _;
use highwater_core::clock::Clock;
use highwater_core::detect::Detect;
use highwater_core::gpu::Processes;
use highwater_engine::intake::Intake;
use highwater_engine::node::Slot;
use highwater_engine::place::kubelet::Kubelet;
use highwater_engine::shared_state::SharedState;
use highwater_engine::workloads::WorkloadWatch;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;

/// Builds the intake, and starts its first `hw-peer` thread, which reads senders' processes.
pub(super) fn intake(
    settings: &Settings,
    clock: &Arc<dyn Clock>,
    live: &Arc<dyn Clock>,
    processes: &Arc<Processes>,
    kubelet: Option<Arc<Kubelet>>,
) -> anyhow::Result<Arc<Intake>> {
    let intake = Intake::new(settings.limits, Arc::clone(clock), Arc::clone(processes));
    let intake = intake.with_log(settings.captures.event_log()).with_kubelet(kubelet).with_live_clock(Arc::clone(live));
    let intake = intake.with_cgroups(settings.cgroups.clone());
    let intake = Arc::new(intake);
    intake.start_reader().context("cannot start the thread that reads senders' processes")?;
    Ok(intake)
}

/// Makes every annotation of a job a sign that its GPUs are in use, so that they are read at the full rate.
fn note_annotated_gpus(intake: &Intake, slot: &Arc<Slot>) {
    let slot = Arc::clone(slot);
    intake.on_gpus(Box::new(move |positions, at_ns| {
        let Some(node) = slot.node() else { return };
        positions.iter().filter_map(|position| node.gpus.get(*position)).for_each(|gpu| gpu.note_annotation(at_ns));
    }));
}

/// Builds the state that readers share. Its slot stays empty until the source is open.
pub(super) fn state(
    settings: &Settings,
    intake: &Intake,
    kubelet: Option<Arc<Kubelet>>,
    clock: Arc<dyn Clock>,
) -> SharedState {
    let restart_after = settings.health_restart_after_ns.map(|ns| Duration::from_nanos(ns.unsigned_abs()));
    let slot = Arc::new(Slot::empty(settings.source == SourceSpec::Nvml).with_restart_after(restart_after));
    note_annotated_gpus(intake, &slot);
    SharedState {
        slot,
        ledger: Arc::clone(intake.ledger()),
        findings: Arc::new(Detect::new(settings.detect.clone())),
        kubelet,
        clock,
    }
}

/// Starts the thread that sets the workloads of each GPU: the kubelet's pods if its socket is set, else Slurm's steps. It uses the live
/// clock even in a replay, because the kubelet's answers are about the present; a replay's GPUs are not this node's.
pub(super) fn watch_workloads(
    settings: &Settings,
    live: &Arc<dyn Clock>,
    state: &SharedState,
    stop: &Arc<AtomicBool>,
    threads: &mut Vec<JoinHandle<()>>,
) -> anyhow::Result<()> {
    let (clock, stop, slot) = (Arc::clone(live), Arc::clone(stop), Arc::clone(&state.slot));
    let is_live = Arc::ptr_eq(live, &state.clock);
    let node = move || slot.node().filter(|_| is_live);
    if let Some(kubelet) = state.kubelet.clone() {
        let watch = WorkloadWatch::of_pods(Arc::clone(&kubelet), "/proc".into());
        let after = move |now_ns| {
            if let Some(node) = node() {
                watch.refresh(&node, now_ns);
            }
        };
        threads.push(spawn("hw-kubelet", move || kubelet.run(&*clock, &stop, &after))?);
    } else if is_live && (settings.slurm.steps || settings.slurm.job_map.is_some()) {
        let watch = WorkloadWatch::of_slurm(settings.slurm.clone(), "/proc".into());
        threads.push(spawn("hw-slurm", move || watch.run(&*clock, &stop, &node))?);
    }
    Ok(())
}

/// The scenario that a simulation plays; `None` if the source is no simulation.
pub(super) fn scenario(settings: &Settings) -> anyhow::Result<Option<Scenario>> {
    let name = match &settings.source {
        SourceSpec::Sim(None) => return Ok(Some(Scenario::demo())),
        SourceSpec::Sim(Some(name)) => name,
        _ => return Ok(None),
    };
    if let Some(shipped) = Scenario::shipped(name) {
        return Ok(Some(shipped));
    }
    let text = Scenario::text(Path::new(name));
    let text = text.with_context(|| {
        let shipped = Scenario::shipped_names().collect::<Vec<_>>().join(", ");
        format!("`{name}` is neither a shipped scenario ({shipped}) nor a file that can be read")
    })?;
    Ok(Some(Scenario::parse(&text, name)?))
}
