//! The medium, slow and event lanes: one thread each, beside the fast lane and never in its way.

use super::latest::{GpuState, Health, ProcessTable};
use crate::clock::{Clock, SECOND_NS};
use crate::source::{Call, CallStats, Error, Event, Source};
use arc_swap::ArcSwap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a GPU's energy counter is read: each time the driver answers nobody for 3 to 15 ms.
const ENERGY_PERIOD_NS: i64 = 60 * SECOND_NS;
/// How long the event lane waits at a time: the longest that it keeps a shutdown waiting.
const EVENT_WAIT: Duration = Duration::from_millis(500);

/// Reads utilization, power, temperature, clocks and throttle reasons of every GPU that is up, every `period_ns`.
pub fn run_medium(
    source: &dyn Source,
    clock: &dyn Clock,
    calls: &CallStats,
    gpus: &[GpuState],
    period_ns: i64,
    stop: &AtomicBool,
) {
    let mut next_ns = clock.now_ns();
    while !stop.load(Ordering::Relaxed) {
        for (position, gpu) in gpus.iter().enumerate().filter(|(_, gpu)| gpu.health() == Health::Up) {
            let at_ns = clock.now_ns();
            let reading = source.medium(position, at_ns, calls);
            if gpu.health() == Health::Up {
                gpu.set_medium(at_ns, reading);
            }
        }
        next_ns = (next_ns + period_ns).max(clock.now_ns());
        clock.sleep_until(next_ns);
    }
}

/// Reads what is dear and changes slowly, one GPU after the other spread over `period_ns`, so that the driver is never
/// asked for all of it at once; tries to get lost GPUs back; and keeps the table of processes.
pub fn run_slow(
    source: &dyn Source,
    clock: &dyn Clock,
    calls: &CallStats,
    gpus: &[GpuState],
    processes: &ArcSwap<ProcessTable>,
    period_ns: i64,
    stop: &AtomicBool,
) {
    let spacing_ns = period_ns / i64::try_from(gpus.len().max(1)).unwrap_or(i64::MAX);
    let mut next_ns = clock.now_ns();
    let mut energy_due_ns = vec![next_ns; gpus.len()];
    while !stop.load(Ordering::Relaxed) {
        for ((position, gpu), energy_due_ns) in gpus.iter().enumerate().zip(&mut energy_due_ns) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            read_slow(source, clock, calls, position, gpu);
            if gpu.health() == Health::Up && (clock.now_ns() >= *energy_due_ns || !gpu.energy.is_known()) {
                read_energy(source, clock, calls, position, gpu);
                *energy_due_ns = clock.now_ns() + ENERGY_PERIOD_NS;
            }
            next_ns = (next_ns + spacing_ns).max(clock.now_ns());
            sleep_in_steps(clock, next_ns, stop);
        }
        if gpus.is_empty() {
            next_ns += period_ns.max(1);
            sleep_in_steps(clock, next_ns, stop);
        }
        processes.store(process_table(gpus).into());
    }
}

fn read_slow(source: &dyn Source, clock: &dyn Clock, calls: &CallStats, position: usize, gpu: &GpuState) {
    match gpu.health() {
        Health::Hung => return,
        Health::Lost => {
            if calls.time(Call::Reacquire, || source.reacquire(position)).is_none() {
                return;
            }
            tracing::info!(gpu = gpu.device.index, uuid = gpu.device.uuid, "GPU answers again");
            gpu.set_health(Health::Up);
        }
        Health::Up => {}
    }
    let at_ns = clock.now_ns();
    let reading = source.slow(position, at_ns, calls);
    if gpu.health() == Health::Up {
        gpu.set_slow(at_ns, reading);
    }
}

fn read_energy(source: &dyn Source, clock: &dyn Clock, calls: &CallStats, position: usize, gpu: &GpuState) {
    let at_ns = clock.now_ns();
    if let Some(joules) = source.energy_joules(position, at_ns, calls)
        && gpu.health() == Health::Up
    {
        gpu.energy.set(at_ns, joules);
    }
}

/// Sleeps until `until_ns` in steps short enough for a shutdown.
fn sleep_in_steps(clock: &dyn Clock, until_ns: i64, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) && clock.now_ns() < until_ns {
        clock.sleep_until(until_ns.min(clock.now_ns() + SECOND_NS / 2));
    }
}

fn process_table(gpus: &[GpuState]) -> ProcessTable {
    let mut table = ProcessTable::new();
    for (position, gpu) in gpus.iter().enumerate() {
        let slow = gpu.slow();
        let processes = slow.iter().filter_map(|slow| slow.reading.processes.as_ref()).flatten();
        for process in processes {
            table.entry(process.pid).or_default().push(position);
        }
    }
    table
}

/// Waits for the driver's events and counts XIDs, until `stop` or until the source has none.
pub fn run_events(source: &dyn Source, clock: &dyn Clock, gpus: &[GpuState], stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match source.wait_event(EVENT_WAIT) {
            Ok(Some(Event::Xid { gpu, xid })) => {
                if let Some(gpu) = gpus.get(gpu) {
                    tracing::warn!(gpu = gpu.device.index, uuid = gpu.device.uuid, xid, "XID error");
                    gpu.count_xid(xid, clock.now_ns());
                }
            }
            Ok(None) => {}
            Err(Error::Unsupported) => return,
            Err(error) => {
                tracing::warn!(%error, "waiting for driver events failed");
                clock.sleep_until(clock.now_ns() + SECOND_NS);
            }
        }
    }
}
