//! The medium, slow and event lanes, beside the fast lane and never in its way.
//!
//! Each physical GPU has a thread of its own for its medium and slow lanes, so that one that hangs costs the others
//! nothing; the slow turns of several GPUs are spread over the period, so that the driver is never asked for all at once.

use super::latest::{GpuState, Health, ProcessTable};
use crate::clock::{Clock, SECOND_NS};
use crate::source::{Call, CallStats, Error, Event, Source};
use arc_swap::ArcSwap;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a GPU's energy counter is read: each time the driver answers nobody for 3 to 15 ms.
const ENERGY_PERIOD_NS: i64 = 60 * SECOND_NS;
/// Turns of the slow lane from one reading of what is dear to the next.
pub const RARE_TURNS: i64 = 10;
/// How long the event lane waits at a time: the longest that it keeps a shutdown waiting.
const EVENT_WAIT: Duration = Duration::from_millis(500);
/// XIDs that are logged in one minute; all are counted.
const MOST_XIDS_LOGGED: u32 = 20;

/// What the medium and slow lanes work on.
pub struct Lanes<'a> {
    /// What is read.
    pub source: &'a dyn Source,
    /// When.
    pub clock: &'a dyn Clock,
    /// What it costs.
    pub calls: &'a CallStats,
    /// Where it goes.
    pub gpus: &'a [GpuState],
    /// Which process runs where.
    pub processes: &'a ArcSwap<ProcessTable>,
    /// Period of the medium lane, nanoseconds.
    pub medium_period_ns: i64,
    /// Period of the slow lane, nanoseconds.
    pub slow_period_ns: i64,
}

/// Positions of the GPUs and instances that are one physical GPU each.
#[must_use]
pub fn units(gpus: &[GpuState]) -> Vec<Vec<usize>> {
    let mut units = BTreeMap::<&str, Vec<usize>>::new();
    for (position, gpu) in gpus.iter().enumerate() {
        let physical = gpu.device.parent_uuid.as_deref().unwrap_or(&gpu.device.uuid);
        units.entry(physical).or_default().push(position);
    }
    units.into_values().collect()
}

/// Runs the medium and slow lanes of one physical GPU until `stop`. Its slow turns begin `offset_ns` from now.
pub fn run_unit(lanes: &Lanes<'_>, unit: &[usize], offset_ns: i64, stop: &AtomicBool) {
    let mut medium_ns = lanes.clock.now_ns();
    let (mut slow_ns, mut energy_ns, mut turn) = (medium_ns + offset_ns, medium_ns, 0);
    let mut told = vec![Health::Up; unit.len()];
    while !stop.load(Ordering::Relaxed) {
        if lanes.clock.now_ns() >= medium_ns {
            unit.iter().for_each(|position| lanes.read_medium(*position));
            medium_ns = (medium_ns + lanes.medium_period_ns).max(lanes.clock.now_ns());
        }
        if lanes.clock.now_ns() >= slow_ns {
            let energy_due = lanes.clock.now_ns() >= energy_ns;
            for (position, told) in unit.iter().zip(&mut told) {
                lanes.tell(*position, told);
                lanes.read_slow(*position, turn % RARE_TURNS == 0, energy_due);
            }
            if energy_due {
                energy_ns = lanes.clock.now_ns() + ENERGY_PERIOD_NS;
            }
            turn += 1;
            lanes.processes.store(process_table(lanes.gpus).into());
            slow_ns = (slow_ns + lanes.slow_period_ns).max(lanes.clock.now_ns());
        }
        sleep_in_steps(lanes.clock, medium_ns.min(slow_ns), stop);
    }
}

impl Lanes<'_> {
    fn read_medium(&self, position: usize) {
        let Some(gpu) = self.gpus.get(position).filter(|gpu| gpu.health() == Health::Up) else { return };
        let at_ns = self.clock.now_ns();
        gpu.set_medium(at_ns, self.source.medium(position, at_ns, self.calls));
    }

    fn read_slow(&self, position: usize, rare_due: bool, energy_due: bool) {
        let Some(gpu) = self.gpus.get(position) else { return };
        match gpu.health() {
            Health::Hung => return gpu.forget(),
            Health::Lost => {
                gpu.forget();
                if self.calls.time(Call::Reacquire, || self.source.reacquire(position)).is_none() {
                    return;
                }
                gpu.set_back();
            }
            Health::Up => {}
        }
        let at_ns = self.clock.now_ns();
        gpu.set_slow(at_ns, self.source.slow(position, at_ns, self.calls));
        if rare_due || gpu.rare().is_none() {
            let at_ns = self.clock.now_ns();
            gpu.set_rare(at_ns, self.source.rare(position, at_ns, self.calls));
        }
        if energy_due || !gpu.energy.is_known() {
            let at_ns = self.clock.now_ns();
            if let Some(joules) = self.source.energy_joules(position, at_ns, self.calls) {
                gpu.energy.set(at_ns, joules);
            }
        }
    }

    /// Logs that a GPU went or came back, once.
    fn tell(&self, position: usize, told: &mut Health) {
        let Some(gpu) = self.gpus.get(position) else { return };
        let health = gpu.health();
        if std::mem::replace(told, health) == health {
            return;
        }
        let (index, uuid) = (&gpu.device.index, &gpu.device.uuid);
        match health {
            Health::Up => tracing::info!(gpu = index, uuid, "GPU answers again"),
            Health::Lost => tracing::warn!(gpu = index, uuid, reason = gpu.trouble(), "GPU does not answer"),
            Health::Hung => tracing::warn!(gpu = index, uuid, "a call on the GPU hangs; the other GPUs go on"),
        }
    }
}

/// Sleeps until `until_ns` in steps short enough for a shutdown.
fn sleep_in_steps(clock: &dyn Clock, until_ns: i64, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) && clock.now_ns() < until_ns {
        clock.sleep_until(until_ns.min(clock.now_ns() + SECOND_NS / 2));
    }
}

/// Which process runs on which GPUs. The processes of a MIG instance are listed for its parent too; they run on the
/// instance.
fn process_table(gpus: &[GpuState]) -> ProcessTable {
    let on = |gpu: &GpuState| -> Vec<u32> {
        let slow = gpu.slow().filter(|_| gpu.health() == Health::Up);
        slow.iter().filter_map(|slow| slow.reading.processes.as_ref()).flatten().map(|process| process.pid).collect()
    };
    let of_instances: HashSet<(&str, u32)> = gpus
        .iter()
        .filter_map(|gpu| Some((gpu.device.parent_uuid.as_deref()?, gpu)))
        .flat_map(|(parent, gpu)| on(gpu).into_iter().map(move |pid| (parent, pid)))
        .collect();
    let mut table = ProcessTable::new();
    for (position, gpu) in gpus.iter().enumerate() {
        for pid in on(gpu).into_iter().filter(|pid| !of_instances.contains(&(gpu.device.uuid.as_str(), *pid))) {
            table.entry(pid).or_default().push(position);
        }
    }
    table
}

/// Waits for the driver's events and counts XIDs, until `stop` or until the source has none.
pub fn run_events(source: &dyn Source, clock: &dyn Clock, gpus: &[GpuState], stop: &AtomicBool) {
    let (mut failing, mut minute_ns, mut logged) = (false, clock.now_ns(), 0);
    while !stop.load(Ordering::Relaxed) {
        match source.wait_event(EVENT_WAIT) {
            Ok(Some(Event::Xid { gpu, xid })) => {
                let Some(gpu) = gpus.get(gpu) else { continue };
                let now_ns = clock.now_ns();
                gpu.count_xid(xid, now_ns);
                if now_ns - minute_ns > 60 * SECOND_NS {
                    (minute_ns, logged) = (now_ns, 0);
                }
                logged += 1;
                if logged <= MOST_XIDS_LOGGED {
                    tracing::warn!(gpu = gpu.device.index, uuid = gpu.device.uuid, xid, "XID error");
                }
            }
            Ok(None) => failing = false,
            Err(Error::Unsupported) => return,
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "waiting for driver events fails; it goes on trying");
                }
                sleep_in_steps(clock, clock.now_ns() + SECOND_NS, stop);
            }
        }
    }
}
