//! The medium, slow and event lanes, which run beside the fast lane and never block it.
//!
//! One thread runs the medium and slow lanes of all physical GPUs, unless one may hang: `units` says which thread reads
//! which GPU, `schedule` when, and here each is read.

use super::roll::RollCall;
use super::schedule::{Due, Schedules, Turns};
use super::sweep::Stuck;
use super::units::Unit;
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::{CONTEXT_BYTES, GpuState, Health, OnGpus, Process, Processes};
use highwater_core::source::{Call, CallStats, DriverEvent, Error, Source};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A process has only a context on a GPU if it holds less than `CONTEXT_BYTES` there, and at least this many times as
/// much memory on another GPU.
const CONTEXT_PART: u64 = 4;
/// How long the common thread pauses while a call of the fast lane takes long: its own next call could hang too.
const PAUSE_NS: i64 = 20 * MILLISECOND_NS;
/// How long the event lane waits at a time, which is the longest that it delays a shutdown.
const EVENT_WAIT: Duration = Duration::from_millis(500);
/// XIDs that are logged in one minute; all are counted.
const MOST_XIDS_LOGGED: u32 = 20;

/// The inputs and outputs of the medium and slow lanes.
pub struct Lanes<'a> {
    /// The source to read.
    pub source: &'a dyn Source,
    /// The clock.
    pub clock: &'a dyn Clock,
    /// Where the readings are stored.
    pub gpus: &'a [GpuState],
    /// The table of processes and their GPUs.
    pub processes: &'a Processes,
    /// Whether processes are listed at every slow turn, because their memory is exported.
    pub processes_always: bool,
    /// When each physical GPU is read next.
    pub schedules: &'a Schedules,
    /// The physical GPUs, and the watchdog to wake.
    pub roll: &'a RollCall,
}

/// Runs the medium and slow lanes of all physical GPUs that have no thread of their own, until `stop`.
pub fn run_units(lanes: &Lanes<'_>, stop: &AtomicBool) {
    let units = lanes.roll.units();
    units.i_am_common();
    let mut doubts = Doubts::default();
    // Where the last round that was not finished broke off: the next begins there, so that each GPU has its turn.
    let mut first = 0;
    while !stop.load(Ordering::Relaxed) {
        let own = units.common();
        lanes.roll.look(lanes.clock.now_ns());
        // Read before the turns, so that a unit that is no longer idle after them has another turn at once.
        let idle: Vec<bool> = own.iter().map(|number| lanes.are_idle(*number)).collect();
        let (begin, mut due_ns) = (first, i64::MAX);
        for place in (0..own.len()).map(|place| (begin + place) % own.len()) {
            let now_ns = lanes.clock.now_ns();
            // No pause if a unit here has a doubted device: this thread must read it, so that the fast lane goes on.
            let may_pause = own.len() > 1 && !own.iter().any(|number| lanes.is_called(*number));
            if may_pause && doubts.has(lanes.roll.doubtful(now_ns)) {
                (due_ns, first) = (now_ns + PAUSE_NS, place);
                break;
            }
            if let (false, Some(_turn)) = (stop.load(Ordering::Relaxed), units.enter(own[place], now_ns)) {
                due_ns = due_ns.min(lanes.turn(own[place], stop));
            }
        }
        let has_changed =
            |(number, is_idle): (&usize, &bool)| lanes.is_called(*number) || lanes.are_idle(*number) != *is_idle;
        wait_in_steps(lanes.clock, due_ns, || {
            stop.load(Ordering::Relaxed) || units.common() != own || own.iter().zip(&idle).any(has_changed)
        });
    }
}

/// Decides whether the common thread pauses: while a call of the fast lane takes long, its GPU may hang, and the common thread's
/// next call could hang too.
#[derive(Debug, Default)]
struct Doubts {
    /// The call of the fast lane that caused the last pause.
    about: Option<Stuck>,
}

impl Doubts {
    /// Whether to pause. `call` is the fast lane's call that takes long, if one does. If it is not the call of the last
    /// pause, calls return: the driver is slow but does not hang, so there is no pause.
    fn has(&mut self, call: Option<Stuck>) -> bool {
        let has_gone_on = self.about.is_some() && self.about != call;
        self.about = if has_gone_on { None } else { call };
        self.about.is_some()
    }
}

/// Runs the medium and slow lanes of one physical GPU while it is apart, until `stop`.
pub fn run_unit(lanes: &Lanes<'_>, number: usize, stop: &AtomicBool) {
    let units = lanes.roll.units();
    units.i_am_apart(number);
    while !stop.load(Ordering::Relaxed) {
        lanes.roll.look(lanes.clock.now_ns());
        let is_idle = lanes.are_idle(number);
        let due_ns = lanes.turn(number, stop);
        let now_ns = lanes.clock.now_ns();
        if lanes.roll.doubtful(now_ns).is_none() && units.come_back(number, now_ns) {
            return;
        }
        wait_in_steps(lanes.clock, due_ns, || {
            stop.load(Ordering::Relaxed) || lanes.is_called(number) || is_idle != lanes.are_idle(number)
        });
    }
}

impl Lanes<'_> {
    fn unit(&self, number: usize) -> Option<&Unit> {
        self.roll.units().all().get(number)
    }

    /// Whether all devices of a unit that have memory are idle. Also true if none of them has memory.
    fn are_idle(&self, number: usize) -> bool {
        let positions = self.unit(number).into_iter().flat_map(|unit| &unit.positions);
        let with_memory = positions.filter_map(|position| self.gpus.get(*position));
        with_memory.filter(|gpu| !gpu.is_without_memory()).all(GpuState::is_idle)
    }

    /// Whether one of the unit's devices is doubted, so that the fast lane skips it until a thread here has read its memory.
    fn is_called(&self, number: usize) -> bool {
        self.unit(number).is_some_and(|unit| unit.is_called(self.gpus))
    }

    /// Answers the roll call for a unit and reads what is due. Returns the time at which more is due.
    fn turn(&self, number: usize, stop: &AtomicBool) -> i64 {
        let (Some(unit), Some(mut schedule)) = (self.unit(number), self.schedules.lock(number)) else {
            return i64::MAX;
        };
        self.roll.answer(unit, self.gpus, self.source, self.clock.now_ns());
        let is_idle = self.are_idle(number);
        if self.clock.now_ns() >= schedule.medium_due_ns(is_idle) {
            unit.positions.iter().for_each(|position| self.read_medium(unit, *position));
            schedule.medium_taken(self.clock.now_ns());
        }
        if self.clock.now_ns() >= schedule.slow_due_ns(is_idle) {
            self.slow_turn(unit, &mut schedule.turns);
            // A thread that hung in the driver while others took over must not overwrite their table.
            if !stop.load(Ordering::Relaxed) {
                self.processes.set(process_table(self.gpus));
            }
            schedule.slow_taken(self.clock.now_ns(), is_idle);
        }
        self.read_wanted(unit, stop);
        schedule.due_ns(self.are_idle(number))
    }

    /// Lists the processes of GPUs whose list is out of date.
    fn read_wanted(&self, unit: &Unit, stop: &AtomicBool) {
        let of_unit = || unit.positions.iter().filter_map(|position| Some((*position, self.gpus.get(*position)?)));
        // Of all, as the processes of an instance are those of its GPU too.
        if of_unit().filter(|(_, gpu)| gpu.take_processes_wanted() && gpu.health() == Health::Up).count() == 0 {
            return;
        }
        for (position, gpu) in of_unit().filter(|(_, gpu)| gpu.health() == Health::Up) {
            let at_ns = self.clock.now_ns();
            gpu.set_processes(at_ns, self.source.processes(position, at_ns, &unit.calls));
        }
        if !stop.load(Ordering::Relaxed) {
            self.processes.set(process_table(self.gpus));
        }
    }

    fn read_medium(&self, unit: &Unit, position: usize) {
        let Some(gpu) = self.gpus.get(position).filter(|gpu| gpu.health() == Health::Up) else { return };
        let at_ns = self.clock.now_ns();
        gpu.set_medium(at_ns, self.source.medium(position, at_ns, &unit.calls));
    }

    fn slow_turn(&self, unit: &Unit, turns: &mut Turns) {
        let due = turns.due(self.processes.missed(), self.processes_always);
        let mut changed = false;
        for (number, position) in unit.positions.iter().enumerate() {
            if let Some(logged) = turns.logged.get_mut(number) {
                self.log_change(*position, logged);
            }
            changed |= self.read_slow(&unit.calls, *position, due);
        }
        if due.processes {
            turns.listed(changed);
        }
    }

    /// Reads what is due for one device, and whatever has no value yet. Tries to get a lost GPU back if that is due.
    /// Returns whether the list of processes changed.
    fn read_slow(&self, calls: &CallStats, position: usize, due: Due) -> bool {
        let Some(gpu) = self.gpus.get(position) else { return false };
        match gpu.health() {
            Health::Hung => {
                gpu.forget();
                return false;
            }
            Health::Lost => {
                gpu.forget();
                if !due.lost || calls.time(Call::Reacquire, || self.source.reacquire(position)).is_none() {
                    return false;
                }
                gpu.set_back();
            }
            Health::Up if gpu.is_without_memory() => {
                if let Err(Error::Lost(why)) = self.source.presence(position, calls) {
                    gpu.lose(&why);
                    return false;
                }
            }
            Health::Up => {}
        }
        let now_ns = || self.clock.now_ns();
        let at_ns = now_ns();
        gpu.set_slow(at_ns, self.source.slow(position, at_ns, calls));
        if due.pcie || gpu.pcie().is_none() {
            let at_ns = now_ns();
            gpu.set_pcie(at_ns, self.source.pcie(position, at_ns, calls));
        }
        if due.rare || gpu.rare().is_none() {
            let at_ns = now_ns();
            gpu.set_rare(at_ns, self.source.rare(position, at_ns, calls));
        }
        let at_ns = now_ns();
        if gpu.energy.is_due(at_ns)
            && let Some(joules) = self.source.energy_joules(position, at_ns, calls)
        {
            gpu.energy.set(at_ns, joules, &gpu.series);
        }
        if due.processes || gpu.processes().is_none() {
            let at_ns = now_ns();
            return gpu.set_processes(at_ns, self.source.processes(position, at_ns, calls));
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

/// Waits until `until_ns` or until `is_wanted` returns true. It is checked at least once a second, and at each wake-up.
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
            Ok(Some(DriverEvent::Xid { gpu, xid })) => {
                failing = false;
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
    use crate::sample::TickStats;
    use highwater_core::clock::Manual;
    use highwater_core::gpu::{Device, IDLE_PERIOD_NS, Medium, Slow};
    use std::sync::Mutex;

    /// A driver that notes when each GPU's lanes are read.
    struct Noting {
        devices: Vec<Device>,
        medium: Mutex<Vec<(i64, usize)>>,
        slow: Mutex<Vec<(i64, usize)>>,
        energy: Mutex<Vec<(i64, usize)>>,
        processes: Mutex<Vec<(i64, usize)>>,
    }

    impl Source for Noting {
        fn description(&self) -> String {
            "a driver that notes".to_owned()
        }

        fn devices(&self) -> &[Device] {
            &self.devices
        }

        fn memory_used(&self, _gpu: usize, _at_ns: i64) -> Result<u64, Error> {
            Ok(0)
        }

        fn medium(&self, gpu: usize, at_ns: i64, _calls: &CallStats) -> Medium {
            self.medium.lock().expect("whole").push((at_ns, gpu));
            Medium::default()
        }

        fn slow(&self, gpu: usize, at_ns: i64, _calls: &CallStats) -> Slow {
            self.slow.lock().expect("whole").push((at_ns, gpu));
            Slow::default()
        }

        fn processes(&self, gpu: usize, at_ns: i64, _calls: &CallStats) -> Option<Vec<Process>> {
            self.processes.lock().expect("whole").push((at_ns, gpu));
            Some(Vec::new())
        }

        fn energy_joules(&self, gpu: usize, at_ns: i64, _calls: &CallStats) -> Option<f64> {
            self.energy.lock().expect("whole").push((at_ns, gpu));
            Some(1.0)
        }
    }

    /// A clock whose time passes while someone waits, until the end.
    struct Waits<'a> {
        now: Manual,
        wakes_ns: Mutex<Vec<i64>>,
        end_ns: i64,
        stop: &'a AtomicBool,
    }

    impl Clock for Waits<'_> {
        fn now_ns(&self) -> i64 {
            self.now.now_ns()
        }

        fn unix_shift_ns(&self) -> i64 {
            0
        }

        fn sleep_until(&self, at_ns: i64) {
            // Each wake-up is 70 µs late.
            self.now.advance_to(at_ns + 70_000);
            self.wakes_ns.lock().expect("whole").push(at_ns);
            self.stop.store(at_ns >= self.end_ns, Ordering::Relaxed);
        }
    }

    const BEGIN_NS: i64 = 1_000 * SECOND_NS;
    const RUN_S: i64 = 60;
    /// How far back power is known: energy is read after half of it.
    const KEEP_NS: i64 = 100 * SECOND_NS;

    /// Runs lanes over eight GPUs until the end, or until `run` returns. The first `busy` GPUs are not idle. Returns the times
    /// of the wake-ups, and the driver.
    fn run_lanes(
        busy: usize,
        slow_ns: i64,
        run: impl FnOnce(&Lanes<'_>, &AtomicBool, &TickStats),
    ) -> (Vec<i64>, Noting) {
        let device = |number| Device { uuid: format!("GPU-{number}"), ..Device::default() };
        let driver = Noting {
            devices: (0..8).map(device).collect(),
            medium: Mutex::default(),
            slow: Mutex::default(),
            energy: Mutex::default(),
            processes: Mutex::default(),
        };
        let gpus: Vec<_> =
            driver.devices.iter().map(|device| GpuState::new(device.clone(), KEEP_NS, SECOND_NS)).collect();
        gpus.iter().enumerate().for_each(|(number, gpu)| gpu.set_sampling_period_ns(MILLISECOND_NS, number >= busy));
        let stop = AtomicBool::new(false);
        let clock = Waits {
            now: Manual::at(BEGIN_NS),
            wakes_ns: Mutex::default(),
            end_ns: BEGIN_NS + RUN_S * SECOND_NS,
            stop: &stop,
        };
        let ticks = std::sync::Arc::new(TickStats::new(MILLISECOND_NS));
        let roll = RollCall::new(&gpus, &CallStats::default(), std::sync::Arc::clone(&ticks), SECOND_NS);
        let schedules = Schedules::new(roll.units(), BEGIN_NS, 100 * MILLISECOND_NS, slow_ns);
        let processes = Processes::default();
        let lanes = Lanes {
            source: &driver,
            clock: &clock,
            gpus: &gpus,
            processes: &processes,
            processes_always: false,
            schedules: &schedules,
            roll: &roll,
        };
        run(&lanes, &stop, &ticks);
        (clock.wakes_ns.into_inner().expect("whole"), driver)
    }

    /// What one thread reads in a minute.
    fn a_minute(busy: usize, slow_ns: i64) -> (Vec<i64>, Noting) {
        run_lanes(busy, slow_ns, |lanes, stop, _| run_units(lanes, stop))
    }

    /// How often each of the eight GPUs is in this list, and the most of them at one time.
    fn counted(read: &Mutex<Vec<(i64, usize)>>) -> (Vec<i64>, usize) {
        let read = read.lock().expect("whole");
        let counts = (0..8).map(|gpu| read.iter().filter(|(_, of)| *of == gpu).count() as i64).collect();
        let mut at_once = std::collections::BTreeMap::<i64, usize>::new();
        read.iter().for_each(|(at_ns, _)| *at_once.entry(*at_ns).or_default() += 1);
        (counts, at_once.into_values().max().unwrap_or(0))
    }

    #[test]
    fn idle_gpus_are_looked_at_once_a_second_and_all_at_once() {
        for (slow_ns, most) in [(SECOND_NS, 1), (5 * SECOND_NS, 1), (SECOND_NS / 2, 2)] {
            let (wakes_ns, driver) = a_minute(0, slow_ns);
            let longest = wakes_ns.windows(2).map(|pair| pair[1] - pair[0]).max();
            assert!(longest <= Some(IDLE_PERIOD_NS + 100 * MILLISECOND_NS), "{longest:?}");
            let wakes = wakes_ns.len() as i64;
            assert!(wakes <= (RUN_S + 2) * most, "{wakes} wake-ups with a slow turn every {slow_ns} ns");
            let slow = counted(&driver.slow).0;
            assert!(slow.iter().all(|count| (count - RUN_S * SECOND_NS / slow_ns).abs() <= 1), "{slow:?}");
            let medium = counted(&driver.medium).0;
            assert!(medium.iter().all(|count| (RUN_S * 9 / 10..=(RUN_S + 2) * most).contains(count)), "{medium:?}");
        }
    }

    #[test]
    fn gpus_at_work_are_read_in_the_same_wake_ups_and_their_slow_turns_are_spread() {
        for busy in [1, 2, 8] {
            let (wakes_ns, driver) = a_minute(busy, SECOND_NS);
            let wakes = wakes_ns.len() as i64;
            assert!((RUN_S * 10 - 5..=RUN_S * 10 + 5).contains(&wakes), "{wakes} wake-ups, {busy} GPUs at work");
            let (medium, at_once) = counted(&driver.medium);
            assert!(medium[..busy].iter().all(|count| (count - RUN_S * 10).abs() <= 5), "{medium:?}");
            assert!(medium[busy..].iter().all(|count| (count - RUN_S).abs() <= 2), "{medium:?}");
            assert_eq!(at_once, 8);
            let (slow, at_once) = counted(&driver.slow);
            assert!(slow.iter().all(|count| (count - RUN_S).abs() <= 1), "{slow:?}");
            // Those of idle GPUs come together, beside at most one other.
            assert!(at_once <= (8 - busy) + 1, "{at_once} slow turns at once, {busy} GPUs at work");
        }
    }

    #[test]
    fn energy_is_read_at_once_and_then_seldom() {
        let (_, driver) = a_minute(8, SECOND_NS);
        // The second reading confirms the first.
        assert_eq!(counted(&driver.energy).0, [3; 8]);
        let read = driver.energy.lock().expect("whole");
        assert!(read.iter().take(16).all(|(at_ns, _)| *at_ns < BEGIN_NS + 3 * SECOND_NS), "{read:?}");
    }

    #[test]
    fn a_list_of_processes_that_is_wanted_is_read_with_the_next_turn_and_once() {
        let lists = |wanted: Option<usize>| {
            let (_, driver) = run_lanes(8, SECOND_NS, |lanes, stop, _| {
                wanted.iter().for_each(|gpu| lanes.gpus[*gpu].want_processes());
                run_units(lanes, stop);
            });
            driver.processes.into_inner().expect("whole")
        };
        let (usual, more) = (lists(None), lists(Some(3)));
        let of = |list: &[(i64, usize)], gpu: usize| list.iter().filter(|(_, of)| *of == gpu).count();
        assert_eq!([0, 3].map(|gpu| of(&more, gpu)), [of(&usual, 0), of(&usual, 3) + 1]);
        let first = |list: &[(i64, usize)]| list.iter().find(|(_, gpu)| *gpu == 3).expect("a list").0;
        assert!(first(&more) < BEGIN_NS + 150 * MILLISECOND_NS && first(&usual) > first(&more), "{more:?}");
    }

    #[test]
    fn no_call_is_made_on_several_gpus_while_the_fast_lane_waits_for_one() {
        for (apart, wanted) in [(false, 0), (true, RUN_S * 10)] {
            let (_, driver) = run_lanes(8, SECOND_NS, |lanes, stop, ticks| {
                if apart {
                    // The thread that is left with one GPU keeps no other waiting.
                    lanes.roll.units().on_parting(Box::new(|number| number != 3));
                    lanes.roll.units().separate(BEGIN_NS);
                }
                ticks.begin_call(0, BEGIN_NS - SECOND_NS);
                run_units(lanes, stop);
            });
            let (medium, _) = counted(&driver.medium);
            assert!((medium[3] - wanted).abs() <= 5, "{medium:?}");
            assert_eq!([0, 1, 2, 4, 5, 6, 7].map(|gpu| medium[gpu]), [0; 7]);
        }
    }

    #[test]
    fn a_slow_driver_is_asked_again_and_a_call_that_hangs_is_not() {
        let ticks = TickStats::new(MILLISECOND_NS);
        let (mut doubts, mut call) = (Doubts::default(), 0);
        let mut next = || {
            call += 1;
            ticks.begin_call(0, call);
            ticks.stuck_since(i64::MAX)
        };
        assert!(!doubts.has(None));
        let first = next();
        assert!(first.is_some());
        assert_eq!([first, first, first].map(|call| doubts.has(call)), [true; 3]);
        // One pause for each call that is made.
        let calls = [next(), next(), next(), next()];
        assert_eq!(calls.map(|call| doubts.has(call)), [false, true, false, true]);
        assert_eq!([None, next()].map(|call| doubts.has(call)), [false, true]);
    }

    #[test]
    fn a_gpu_that_is_apart_comes_back_after_a_minute() {
        let (_, driver) = run_lanes(8, SECOND_NS, |lanes, stop, _| {
            let units = lanes.roll.units();
            units.on_parting(Box::new(|_| true));
            units.separate(BEGIN_NS - 20 * SECOND_NS);
            assert_eq!(units.common(), [] as [usize; 0]);
            run_unit(lanes, 5, stop);
            assert!(!stop.load(Ordering::Relaxed), "it ended by itself");
            assert_eq!(units.common(), [5]);
            run_units(lanes, stop);
        });
        // The same turns, whichever thread had it.
        let (medium, _) = counted(&driver.medium);
        assert_eq!([0, 4, 6, 7].map(|gpu| medium[gpu]), [0; 4]);
        assert!((medium[5] - RUN_S * 10).abs() <= 5, "{medium:?}");
        assert!((counted(&driver.slow).0[5] - RUN_S).abs() <= 1);
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
}
