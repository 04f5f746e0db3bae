//! When the medium and slow lanes of each physical GPU are due, and what a slow turn reads.
//!
//! Enters: when turns were taken, and whether a GPU is idle. Leaves: when the next are due. Invariants: all GPUs share
//! one grid of times, so that a thread wakes once for several; only the slow turns of GPUs that are not idle have an
//! offset each, so that the driver is not queried for all of them at once.

use super::units::{Unit, Units};
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::{Health, IDLE_PERIOD_NS};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Turns of the slow lane between readings of total memory, NVLink, BAR1 and limits, which take 3 ms a GPU.
pub const RARE_TURNS: i64 = 30;
/// The most turns between readings of PCIe bytes, which take 0.3 ms a GPU if GPM provides them.
const MOST_PCIE_TURNS: i64 = 5;
/// The longest time between readings of PCIe bytes, unless a turn is longer: GPM's windows must be short.
const LONGEST_PCIE_NS: i64 = 5 * SECOND_NS;
/// Slow turns between lists of processes, unless an unknown process is looked up. A list takes 2 ms a GPU while a job
/// runs on eight.
pub const PROCESS_TURNS: i64 = 10;
/// How long a slow turn waits for a medium one.
const MOST_WAIT_NS: i64 = 100 * MILLISECOND_NS;

/// Slow turns between readings of PCIe bytes, if the slow lane has this period.
#[must_use]
pub fn pcie_turns(slow_period_ns: i64) -> i64 {
    (LONGEST_PCIE_NS / slow_period_ns.max(1)).clamp(1, MOST_PCIE_TURNS)
}

/// The schedule of each physical GPU. Whichever thread reads a GPU has its lock meanwhile.
pub struct Schedules(Vec<Mutex<Schedule>>);

impl Schedules {
    /// All are due from `begin_ns` on, with these periods, nanoseconds.
    #[must_use]
    pub fn new(units: &Units, begin_ns: i64, medium_period_ns: i64, slow_period_ns: i64) -> Self {
        let count = units.all().len();
        let schedule = |(number, unit): (usize, &Unit)| {
            Mutex::new(Schedule {
                begin_ns,
                medium_period_ns,
                slow_period_ns,
                medium_ns: begin_ns,
                slow_ns: begin_ns,
                offset_ns: offset_ns(slow_period_ns, number, count),
                turns: Turns::new(unit.positions.len(), slow_period_ns),
            })
        };
        Self(units.all().iter().enumerate().map(schedule).collect())
    }

    /// Locks the schedule of the unit with this number; `None` if there is no such unit.
    pub(super) fn lock(&self, number: usize) -> Option<MutexGuard<'_, Schedule>> {
        Some(self.0.get(number)?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// When the lanes of one physical GPU are due.
#[derive(Debug)]
pub(super) struct Schedule {
    begin_ns: i64,
    medium_period_ns: i64,
    slow_period_ns: i64,
    /// When the medium lane is due unless the GPU is idle.
    medium_ns: i64,
    /// When the slow lane is due, before the offset is added.
    slow_ns: i64,
    /// Offset of the slow lane's turns. It does not apply while the GPU is idle: no job waits for the driver then.
    offset_ns: i64,
    /// What each slow turn reads.
    pub(super) turns: Turns,
}

impl Schedule {
    fn offset_ns(&self, is_idle: bool) -> i64 {
        if is_idle { 0 } else { self.offset_ns }
    }

    /// When the slow lane is due.
    pub(super) fn slow_due_ns(&self, is_idle: bool) -> i64 {
        self.slow_ns + self.offset_ns(is_idle)
    }

    /// When the medium lane is due. While the GPU is idle, it is due together with the slow lane, so that one wake-up serves
    /// both, but at most an idle period after its last turn.
    pub(super) fn medium_due_ns(&self, is_idle: bool) -> i64 {
        if !is_idle {
            return self.medium_ns;
        }
        let last_ns = self.medium_ns - self.medium_period_ns;
        self.medium_ns.max((last_ns + IDLE_PERIOD_NS).min(self.slow_due_ns(true)))
    }

    /// When there is something to do. A slow turn waits a little for the medium one, for one wake-up.
    pub(super) fn due_ns(&self, is_idle: bool) -> i64 {
        let (medium_ns, slow_ns) = (self.medium_due_ns(is_idle), self.slow_due_ns(is_idle));
        let most_wait_ns = MOST_WAIT_NS.min(self.slow_period_ns / 10);
        if (0..=most_wait_ns).contains(&(medium_ns - slow_ns)) { medium_ns } else { medium_ns.min(slow_ns) }
    }

    /// The medium lane has had its turn.
    pub(super) fn medium_taken(&mut self, now_ns: i64) {
        self.medium_ns = self.after(now_ns, self.medium_period_ns);
    }

    /// The slow lane has had its turn.
    pub(super) fn slow_taken(&mut self, now_ns: i64, is_idle: bool) {
        self.slow_ns = self.after(now_ns - self.offset_ns(is_idle), self.slow_period_ns);
    }

    /// The first turn of this period after one at `at_ns`.
    fn after(&self, at_ns: i64, period_ns: i64) -> i64 {
        let next_ns = self.begin_ns + ((at_ns - self.begin_ns).div_euclid(period_ns) + 1) * period_ns;
        // If this turn was late and the next is due within half a period, that one is skipped.
        if next_ns - at_ns < period_ns / 2 { next_ns + period_ns } else { next_ns }
    }
}

/// The offset, within a period, of the turn with this number out of `count` turns.
fn offset_ns(period_ns: i64, number: usize, count: usize) -> i64 {
    let [number, count] = [number, count.max(1)].map(|number| i64::try_from(number).unwrap_or(i64::MAX));
    (period_ns / count).saturating_mul(number)
}

/// Decides what is due in each slow turn of one physical GPU.
#[derive(Debug)]
pub(super) struct Turns {
    number: i64,
    pcie_turns: i64,
    /// Turns since processes were listed.
    since_processes: i64,
    /// Turns after which a lookup of an unknown process triggers a new list. Doubles each time the list is unchanged: a process
    /// that the driver lists under another id would otherwise trigger lists forever.
    patience: i64,
    /// The number of failed lookups when processes were last listed.
    missed: u64,
    /// Each device's health as last logged.
    pub(super) logged: Vec<Health>,
}

/// The readings due in one slow turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Due {
    pub(super) processes: bool,
    pub(super) pcie: bool,
    pub(super) rare: bool,
    /// Attempts to get back a GPU that is lost, each of which the driver may log.
    pub(super) lost: bool,
}

impl Turns {
    fn new(devices: usize, period_ns: i64) -> Self {
        Self {
            number: 0,
            pcie_turns: pcie_turns(period_ns),
            since_processes: PROCESS_TURNS,
            patience: 1,
            missed: 0,
            logged: vec![Health::Up; devices],
        }
    }

    /// Returns what is due now.
    pub(super) fn due(&mut self, missed: u64, processes_always: bool) -> Due {
        let wanted = missed != self.missed && self.since_processes >= self.patience;
        let due = Due {
            processes: processes_always || wanted || self.since_processes >= PROCESS_TURNS,
            pcie: self.number % self.pcie_turns == 0,
            rare: self.number % RARE_TURNS == 0,
            lost: self.number % self.pcie_turns == 0,
        };
        self.number += 1;
        self.since_processes += 1;
        if due.processes {
            (self.since_processes, self.missed) = (1, missed);
        }
        due
    }

    /// Records whether a list of processes differed from the list before.
    pub(super) fn listed(&mut self, changed: bool) {
        self.patience = if changed { 1 } else { (2 * self.patience).min(PROCESS_TURNS) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The turns, of the first `turns`, in which processes are listed, given each turn's count of failed lookups and
    /// whether each list shows other processes.
    fn listed(turns: i64, missed: impl Fn(i64) -> u64, changed: impl Fn(i64) -> bool) -> Vec<i64> {
        let mut state = Turns::new(1, SECOND_NS);
        let is_due = |turn: &i64| {
            let due = state.due(missed(*turn), false).processes;
            if due {
                state.listed(changed(*turn));
            }
            due
        };
        (0..turns).filter(is_due).collect()
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
        assert!((0..20).all(|_| turns.due(0, true).processes));
    }

    #[test]
    fn what_is_dear_has_its_own_turns() {
        let mut turns = Turns::new(1, SECOND_NS);
        let dues: Vec<Due> = (0..61).map(|_| turns.due(0, false)).collect();
        let count = |is_due: fn(&Due) -> bool| dues.iter().filter(|due| is_due(due)).count();
        assert_eq!([count(|due| due.pcie), count(|due| due.rare), count(|due| due.lost)], [13, 3, 13]);
    }

    #[test]
    fn seldom_turns_leave_no_long_window_of_pcie_bytes() {
        let milliseconds = [100, 1_000, 1_001, 2_500, 3_000, 5_000];
        assert_eq!(milliseconds.map(|period| pcie_turns(period * MILLISECOND_NS)), [5, 5, 4, 2, 1, 1]);
    }
}
