//! The medium, slow and event lanes, which run beside the fast lane and never block it.
//!
//! Each physical GPU has a thread of its own for its medium and slow lanes, so that a hanging GPU does not delay the
//! others. The slow turns of several GPUs are spread over the period, so that they do not query the driver all at once.

use super::roll::{RollCall, Unit};
use crate::source::{Call, CallStats, Error, Event, Source};
use highwater_core::clock::{Clock, SECOND_NS};
use highwater_core::gpu::{CONTEXT_BYTES, GpuState, Health, IDLE_PERIOD_NS, OnGpus, Process, Processes};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a GPU's energy counter is read: each reading blocks the driver for all callers for 3 to 15 ms.
const ENERGY_PERIOD_NS: i64 = 60 * SECOND_NS;
/// Turns of the slow lane between readings of total memory, NVLink, BAR1 and limits, which take 3 ms a GPU.
pub const RARE_TURNS: i64 = 30;
/// The most turns between readings of PCIe bytes, which take 0.3 ms a GPU if GPM provides them.
const MOST_PCIE_TURNS: i64 = 5;
/// The longest time between readings of PCIe bytes, unless a turn is longer: GPM's windows must be short.
const LONGEST_PCIE_NS: i64 = 5 * SECOND_NS;
/// Turns between lists of processes, unless a process is being looked up: 2 ms a GPU beside a job on eight.
pub const PROCESS_TURNS: i64 = 10;
/// A process holds only a context on a GPU only if it holds at least this many times as much memory on another GPU.
const CONTEXT_PART: u64 = 4;
/// How long the event lane waits at a time, which is the longest that it delays a shutdown.
const EVENT_WAIT: Duration = Duration::from_millis(500);
/// XIDs that are logged in one minute; all are counted.
const MOST_XIDS_LOGGED: u32 = 20;

/// Turns of this period between readings of PCIe bytes.
#[must_use]
pub fn pcie_turns(slow_period_ns: i64) -> i64 {
    (LONGEST_PCIE_NS / slow_period_ns.max(1)).clamp(1, MOST_PCIE_TURNS)
}

/// The inputs and outputs of the medium and slow lanes.
pub struct Lanes<'a> {
    /// The source to read.
    pub source: &'a dyn Source,
    /// The clock.
    pub clock: &'a dyn Clock,
    /// Statistics of the calls.
    pub calls: &'a CallStats,
    /// Where the readings are stored.
    pub gpus: &'a [GpuState],
    /// The table of processes and their GPUs.
    pub processes: &'a Processes,
    /// Whether processes are listed at every slow turn, because their memory is exported.
    pub processes_always: bool,
    /// Period of the medium lane, nanoseconds.
    pub medium_period_ns: i64,
    /// Period of the slow lane, nanoseconds.
    pub slow_period_ns: i64,
}

/// Runs the medium and slow lanes of the physical GPU with this number until `stop`.
pub fn run_unit(lanes: &Lanes<'_>, roll: &RollCall, number: usize, stop: &AtomicBool) {
    let Some(unit) = roll.units().get(number) else { return };
    unit.begin();
    let begin_ns = lanes.clock.now_ns();
    // Each unit's turns have an offset, so that the driver is not queried for all GPUs at once, and so that with many
    // threads one soon notices that the fast lane is stuck.
    let offset_ns = |period_ns: i64| offset_ns(period_ns, number, roll.units().len());
    let mut medium_ns = begin_ns - lanes.medium_period_ns + offset_ns(lanes.medium_period_ns);
    let mut slow_ns = begin_ns + offset_ns(lanes.slow_period_ns);
    let mut turns = Turns::new(unit.positions.len(), lanes.slow_period_ns);
    while !stop.load(Ordering::Relaxed) {
        roll.look(lanes.clock.now_ns());
        roll.answer(unit, lanes.gpus, lanes.source, lanes.clock.now_ns());
        let is_idle = lanes.are_idle(unit);
        let medium_due_ns = if is_idle { with_slow_turn(medium_ns, slow_ns) } else { medium_ns };
        if lanes.clock.now_ns() >= medium_due_ns {
            unit.positions.iter().for_each(|position| lanes.read_medium(*position));
            medium_ns = (medium_due_ns + lanes.medium_period_ns).max(lanes.clock.now_ns());
            continue;
        }
        if lanes.clock.now_ns() >= slow_ns {
            lanes.slow_turn(&unit.positions, &mut turns);
            // A thread that hung in the driver while others took over must not overwrite their table.
            if !stop.load(Ordering::Relaxed) {
                lanes.processes.set(process_table(lanes.gpus));
            }
            slow_ns = (slow_ns + lanes.slow_period_ns).max(lanes.clock.now_ns());
            // When the medium lane of an idle unit is due depends on it.
            continue;
        }
        wait_in_steps(lanes.clock, medium_due_ns.min(slow_ns), || {
            stop.load(Ordering::Relaxed) || unit.is_called(lanes.gpus) || is_idle != lanes.are_idle(unit)
        });
    }
}

/// When the medium lane of an idle unit is due, whose next turn is due at `medium_ns` otherwise: with the slow turn, so that
/// one wake-up does both, but not much later than an idle period after the last.
fn with_slow_turn(medium_ns: i64, slow_ns: i64) -> i64 {
    medium_ns.max((medium_ns + IDLE_PERIOD_NS).min(slow_ns))
}

/// The offset, within a period, of the turn with this number out of `count` turns.
fn offset_ns(period_ns: i64, number: usize, count: usize) -> i64 {
    let [number, count] = [number, count.max(1)].map(|number| i64::try_from(number).unwrap_or(i64::MAX));
    (period_ns / count).saturating_mul(number)
}

/// Decides what is due in each slow turn of one physical GPU.
#[derive(Debug)]
struct Turns {
    number: i64,
    pcie_turns: i64,
    /// When energy is due, nanoseconds of the timeline.
    energy_ns: i64,
    /// Turns since processes were listed.
    since_processes: i64,
    /// Turns after which a lookup of an unknown process triggers a new list. It doubles each time that the list shows
    /// no other processes: a process that the driver knows by another id would be looked up forever.
    patience: i64,
    /// The number of failed lookups when processes were last listed.
    missed: u64,
    /// Each device's health as last logged.
    logged: Vec<Health>,
}

/// The readings due in one slow turn.
#[derive(Debug, Clone, Copy)]
struct Due {
    processes: bool,
    pcie: bool,
    rare: bool,
    energy: bool,
}

impl Turns {
    fn new(devices: usize, period_ns: i64) -> Self {
        Self {
            number: 0,
            pcie_turns: pcie_turns(period_ns),
            energy_ns: i64::MIN,
            since_processes: PROCESS_TURNS,
            patience: 1,
            missed: 0,
            logged: vec![Health::Up; devices],
        }
    }

    /// Returns what is due now.
    fn due(&mut self, now_ns: i64, missed: u64, processes_always: bool) -> Due {
        let wanted = missed != self.missed && self.since_processes >= self.patience;
        let due = Due {
            processes: processes_always || wanted || self.since_processes >= PROCESS_TURNS,
            pcie: self.number % self.pcie_turns == 0,
            rare: self.number % RARE_TURNS == 0,
            energy: now_ns >= self.energy_ns,
        };
        self.number += 1;
        self.since_processes += 1;
        if due.processes {
            (self.since_processes, self.missed) = (1, missed);
        }
        if due.energy {
            self.energy_ns = now_ns + ENERGY_PERIOD_NS;
        }
        due
    }

    /// Records whether a list of processes differed from the list before.
    fn listed(&mut self, changed: bool) {
        self.patience = if changed { 1 } else { (2 * self.patience).min(PROCESS_TURNS) };
    }
}

impl Lanes<'_> {
    /// Whether nothing runs on the devices of a unit.
    fn are_idle(&self, unit: &Unit) -> bool {
        let with_memory = unit.positions.iter().filter_map(|position| self.gpus.get(*position));
        with_memory.filter(|gpu| !gpu.is_without_memory()).all(GpuState::is_idle)
    }

    fn read_medium(&self, position: usize) {
        let Some(gpu) = self.gpus.get(position).filter(|gpu| gpu.health() == Health::Up) else { return };
        let at_ns = self.clock.now_ns();
        gpu.set_medium(at_ns, self.source.medium(position, at_ns, self.calls));
    }

    fn slow_turn(&self, unit: &[usize], turns: &mut Turns) {
        let due = turns.due(self.clock.now_ns(), self.processes.missed(), self.processes_always);
        let mut changed = false;
        for (number, position) in unit.iter().enumerate() {
            if let Some(logged) = turns.logged.get_mut(number) {
                self.log_change(*position, logged);
            }
            changed |= self.read_slow(*position, due);
        }
        if due.processes {
            turns.listed(changed);
        }
    }

    /// Reads what is due for one device, and whatever has no value yet. Returns whether its processes changed.
    fn read_slow(&self, position: usize, due: Due) -> bool {
        let Some(gpu) = self.gpus.get(position) else { return false };
        match gpu.health() {
            Health::Hung => {
                gpu.forget();
                return false;
            }
            Health::Lost => {
                gpu.forget();
                if self.calls.time(Call::Reacquire, || self.source.reacquire(position)).is_none() {
                    return false;
                }
                gpu.set_back();
            }
            Health::Up if gpu.is_without_memory() => {
                if let Err(Error::Lost(why)) = self.source.presence(position, self.calls) {
                    gpu.lose(&why);
                    return false;
                }
            }
            Health::Up => {}
        }
        let now_ns = || self.clock.now_ns();
        let at_ns = now_ns();
        gpu.set_slow(at_ns, self.source.slow(position, at_ns, self.calls));
        if due.pcie || gpu.pcie().is_none() {
            let at_ns = now_ns();
            gpu.set_pcie(at_ns, self.source.pcie(position, at_ns, self.calls));
        }
        if due.rare || gpu.rare().is_none() {
            let at_ns = now_ns();
            gpu.set_rare(at_ns, self.source.rare(position, at_ns, self.calls));
        }
        if due.energy || !gpu.energy.is_known() {
            let at_ns = now_ns();
            if let Some(joules) = self.source.energy_joules(position, at_ns, self.calls) {
                gpu.energy.set(at_ns, joules);
            }
        }
        if due.processes || gpu.processes().is_none() {
            let at_ns = now_ns();
            return gpu.set_processes(at_ns, self.source.processes(position, at_ns, self.calls));
        }
        false
    }

    /// Logs once that a GPU went away or came back.
    fn log_change(&self, position: usize, logged: &mut Health) {
        let Some(gpu) = self.gpus.get(position) else { return };
        let health = gpu.health();
        if std::mem::replace(logged, health) == health {
            return;
        }
        let (index, uuid) = (&gpu.device.index, &gpu.device.uuid);
        match health {
            Health::Up => tracing::info!(gpu = index, uuid, "GPU answers again"),
            Health::Lost => tracing::warn!(gpu = index, uuid, reason = gpu.trouble(), "GPU does not answer"),
            Health::Hung => tracing::warn!(gpu = index, uuid, "a call on the GPU hangs; other GPUs are still sampled"),
        }
    }
}

/// Waits until `until_ns` in steps short enough for a shutdown, or until there is other work.
fn wait_in_steps(clock: &dyn Clock, until_ns: i64, is_wanted: impl Fn() -> bool) {
    while !is_wanted() && clock.now_ns() < until_ns {
        clock.wait_until(until_ns.min(clock.now_ns() + SECOND_NS));
    }
}

/// The GPUs that each process works on. The driver also lists the processes of a MIG instance for its parent; they run
/// on the instance.
fn process_table(gpus: &[GpuState]) -> HashMap<u32, OnGpus> {
    let on = |gpu: &GpuState| -> Vec<Process> {
        let latest = gpu.processes().filter(|_| gpu.health() == Health::Up);
        latest.iter().flat_map(|latest| latest.reading.iter().copied()).collect()
    };
    let of_instances: HashSet<(&str, u32)> = gpus
        .iter()
        .filter_map(|gpu| Some((gpu.device.parent_uuid.as_deref()?, gpu)))
        .flat_map(|(parent, gpu)| on(gpu).into_iter().map(move |process| (parent, process.pid)))
        .collect();
    let mut table = HashMap::<u32, Vec<(usize, Option<u64>)>>::new();
    for (position, gpu) in gpus.iter().enumerate() {
        let is_its = |process: &Process| !of_instances.contains(&(gpu.device.uuid.as_str(), process.pid));
        for process in on(gpu).into_iter().filter(is_its) {
            table.entry(process.pid).or_default().push((position, process.used_bytes));
        }
    }
    table.into_iter().map(|(pid, held)| (pid, on_gpus(&held))).collect()
}

/// Splits the GPUs on which a process holds memory into those that it works on and those on which it holds only a
/// context, which frameworks often create on the first GPU by accident.
fn on_gpus(held: &[(usize, Option<u64>)]) -> OnGpus {
    let most_bytes = held.iter().filter_map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let is_context = |bytes: u64| bytes < CONTEXT_BYTES.min(most_bytes) && bytes <= most_bytes / CONTEXT_PART;
    let (idles, works): (Vec<_>, Vec<_>) = held.iter().partition(|(_, bytes)| bytes.is_some_and(is_context));
    let positions = |held: Vec<(usize, Option<u64>)>| held.into_iter().map(|(position, _)| position).collect();
    OnGpus { works: positions(works), idles: positions(idles) }
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
                    tracing::warn!(%error, "waiting for driver events failed; retrying");
                }
                wait_in_steps(clock, clock.now_ns() + SECOND_NS, || stop.load(Ordering::Relaxed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::MILLISECOND_NS;

    /// The turns, of the first `turns`, in which processes are listed, given each turn's count of failed lookups and
    /// whether each list shows other processes.
    fn listed(turns: i64, missed: impl Fn(i64) -> u64, changed: impl Fn(i64) -> bool) -> Vec<i64> {
        let mut state = Turns::new(1, SECOND_NS);
        let is_due = |turn: &i64| {
            let due = state.due(turn * SECOND_NS, missed(*turn), false).processes;
            if due {
                state.listed(changed(*turn));
            }
            due
        };
        (0..turns).filter(is_due).collect()
    }

    #[test]
    fn an_idle_gpu_is_looked_at_once_a_second() {
        const MEDIUM_NS: i64 = 100 * MILLISECOND_NS;
        for (slow_ns, most) in [(SECOND_NS, 1), (5 * SECOND_NS, 1), (SECOND_NS / 2, 2)] {
            // However the two lay when it became idle.
            let (mut medium_ns, mut slow_due_ns) = (30 * MILLISECOND_NS, slow_ns / 3);
            let mut wakes_ns = Vec::new();
            while medium_ns.min(slow_due_ns) < 60 * SECOND_NS {
                let now_ns = with_slow_turn(medium_ns, slow_due_ns).min(slow_due_ns);
                wakes_ns.push(now_ns);
                if now_ns >= with_slow_turn(medium_ns, slow_due_ns) {
                    medium_ns = now_ns + MEDIUM_NS;
                }
                if now_ns >= slow_due_ns {
                    slow_due_ns += slow_ns;
                }
            }
            let late = wakes_ns.iter().filter(|at_ns| **at_ns >= 10 * SECOND_NS && **at_ns < 60 * SECOND_NS).count();
            assert!(late <= 51 * most, "{late} wake-ups in 50 s, with a slow turn every {slow_ns} ns");
            let longest = wakes_ns.windows(2).map(|pair| pair[1] - pair[0]).max();
            assert!(longest <= Some(IDLE_PERIOD_NS + MEDIUM_NS), "{longest:?}");
        }
    }

    #[test]
    fn processes_are_listed_seldom_where_nobody_looks_for_one() {
        assert_eq!(listed(25, |_| 0, |_| false), [0, 10, 20]);
    }

    #[test]
    fn a_process_that_is_looked_for_is_listed_at_the_next_turn() {
        assert_eq!(listed(12, |turn| u64::from(turn >= 5), |_| true), [0, 5]);
    }

    #[test]
    fn one_that_never_comes_is_looked_for_ever_more_seldom() {
        assert_eq!(listed(40, |turn| turn.unsigned_abs(), |_| false), [0, 2, 6, 14, 24, 34]);
    }

    #[test]
    fn what_is_exported_is_listed_at_every_turn() {
        let mut turns = Turns::new(1, SECOND_NS);
        assert!((0..20).all(|turn| turns.due(turn * SECOND_NS, 0, true).processes));
    }

    #[test]
    fn what_is_dear_has_its_own_turns() {
        let mut turns = Turns::new(1, SECOND_NS);
        let dues: Vec<Due> = (0..61).map(|turn| turns.due(turn * SECOND_NS, 0, false)).collect();
        let count = |is_due: fn(&Due) -> bool| dues.iter().filter(|due| is_due(due)).count();
        assert_eq!([count(|due| due.pcie), count(|due| due.rare), count(|due| due.energy)], [13, 3, 2]);
    }

    #[test]
    fn a_process_does_not_work_where_it_has_a_context_alone() {
        const MIB: u64 = 1 << 20;
        let on = |mib: [Option<u64>; 3]| {
            let held: Vec<_> = mib.into_iter().map(|mib| mib.map(|mib| mib * MIB)).enumerate().collect();
            on_gpus(&held).works
        };
        assert_eq!(on([Some(520), Some(100_000), Some(40_000)]), [1, 2]);
        assert_eq!(on([Some(520), Some(2_080), None]), [1, 2], "unknown memory may be large");
        assert_eq!(on([Some(520), Some(1_500), Some(500)]), [0, 1, 2], "a small job");
        assert_eq!(on([Some(2_000), Some(100_000), Some(1_024)]), [0, 1, 2]);
        assert_eq!(on([Some(520), Some(520), Some(520)]), [0, 1, 2], "it has just begun");
        assert_eq!(on([None; 3]), [0, 1, 2]);
        assert_eq!(on([Some(0); 3]), [0, 1, 2]);
    }

    #[test]
    fn seldom_turns_leave_no_long_window_of_pcie_bytes() {
        let milliseconds = [100, 1_000, 1_001, 2_500, 3_000, 5_000];
        assert_eq!(milliseconds.map(|period| pcie_turns(period * MILLISECOND_NS)), [5, 5, 4, 2, 1, 1]);
    }
}
