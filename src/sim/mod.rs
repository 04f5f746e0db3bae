//! A simulated node: GPUs and training jobs from a [`Scenario`], read through the same trait as real ones.
//!
//! Enters: a scenario and the time at which it starts. Leaves: readings for any time, and the annotations that the
//! scenario's jobs would send. Invariant: all of it is a pure function of the scenario, its seed and the time since its
//! start, so two simulators, or one asked twice, always agree. Absent on purpose: a clock. Losing a GPU does not end
//! the job on it, unless the scenario says so.

mod gpu;
mod job;
mod meters;
mod random;
mod recent;
pub mod scenario;
#[cfg(test)]
mod tests;
mod window;

pub use scenario::{Scenario, ScenarioError};

use gpu::{DeviceLevel, Gpu};
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{Device, Fabric, Medium, NvLinkErrors, NvLinks, Pcie, PcieLink, Process, Rare, Slow};
use highwater_core::source::{Call, CallStats, DriverEvent, Error, Source};
use highwater_core::wire::Annotation;
use job::{Plan, RankEvent, Select, Timeline, What};
use meters::{Meter, Meters};
use scenario::fleet::Fleet;
use scenario::{Degraded, Lost, NVLINKS, Spike, Xid};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use window::Window;

/// How often a wait for events checks whether one is due.
const EVENT_POLL: Duration = Duration::from_millis(5);

/// A simulated node.
#[derive(Debug)]
pub struct Sim {
    name: String,
    start_ns: i64,
    fleet: Fleet,
    gpus: Vec<Mutex<Gpu>>,
    plans: Vec<Arc<Plan>>,
    /// By device.
    spikes: Vec<Vec<(Window, u64)>>,
    /// By device.
    lost: Vec<Vec<Window>>,
    /// By device.
    degraded: Vec<Vec<(Window, Degraded)>>,
    /// Each XID with its device and the last time at which it was reported.
    xids: Mutex<Vec<(Xid, usize, i64)>>,
    /// The latest time that was asked for, since the start: losses and events have no time of their own.
    latest_ns: AtomicI64,
}

impl Sim {
    /// A node that begins to play the scenario at `start_ns`; before that its GPUs are idle.
    #[must_use]
    pub fn new(scenario: Scenario, start_ns: i64) -> Self {
        let fleet = Fleet::of(&scenario);
        let plan = |(index, job)| Arc::new(Plan::new(&scenario, index, job, &fleet));
        let plans: Vec<Arc<Plan>> = scenario.jobs.iter().enumerate().map(plan).collect();
        let positions = 0..fleet.devices.len();
        Self {
            gpus: positions.clone().map(|device| Mutex::new(Gpu::new(jobs_on(&plans, &fleet, device)))).collect(),
            spikes: positions.clone().map(|device| spikes_on(&scenario.spikes, &fleet, device)).collect(),
            lost: positions.clone().map(|device| losses_of(&scenario.lost, &fleet, device)).collect(),
            degraded: positions.map(|device| degraded_on(&scenario.degraded, &fleet, device)).collect(),
            xids: Mutex::new(xids_of(scenario.xids, &fleet)),
            latest_ns: AtomicI64::new(i64::MIN),
            name: scenario.name,
            start_ns,
            fleet,
            plans,
        }
    }

    /// The time since the start. Records that this time was asked for.
    fn since_start(&self, at_ns: i64) -> i64 {
        let since_ns = at_ns.saturating_sub(self.start_ns);
        self.latest_ns.fetch_max(since_ns, Ordering::Relaxed);
        since_ns
    }

    fn check_present(&self, gpu: usize, since_ns: i64) -> Result<(), Error> {
        let gone = self.lost.get(gpu).is_some_and(|windows| windows.iter().any(|window| window.contains(since_ns)));
        if gone { Err(Error::Lost("the scenario takes it off the bus".to_owned())) } else { Ok(()) }
    }

    /// Reads one device, unless it is lost.
    fn read<T>(&self, gpu: usize, since_ns: i64, read: impl FnOnce(&mut Gpu) -> T) -> Result<T, Error> {
        self.check_present(gpu, since_ns)?;
        let device = self.gpus.get(gpu).ok_or_else(|| Error::Failed(format!("there is no GPU at position {gpu}")))?;
        Ok(read(&mut device.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The part of its usual clock at which a device runs.
    fn clock(&self, gpu: usize, since_ns: i64) -> f64 {
        let throttled = self.degraded(gpu, since_ns).filter(|degraded| degraded.throttle.is_some());
        throttled.map(|degraded| degraded.clock).fold(1.0, f64::min)
    }

    /// A device's PCIe link. Unlike that of a real GPU, it keeps its generation while the GPU is idle.
    fn pcie_link(&self, gpu: usize, since_ns: i64) -> PcieLink {
        let best = PcieLink { generation: 5, width: 16, max_generation: 5, max_width: 16 };
        self.degraded(gpu, since_ns).fold(best, |link, degraded| PcieLink {
            generation: degraded.pcie_generation.unwrap_or(link.generation),
            width: degraded.pcie_width.unwrap_or(link.width),
            ..link
        })
    }

    /// A device's NVLinks, of which those with the highest numbers go down.
    fn nvlinks(&self, gpu: usize, since_ns: i64) -> NvLinks {
        let down = self.degraded(gpu, since_ns).map(|degraded| degraded.nvlinks_down).max().unwrap_or(0);
        NvLinks { present: (1 << NVLINKS) - 1, up: (1 << NVLINKS.saturating_sub(down)) - 1 }
    }

    /// Errors of a device's NVLinks until a time.
    fn nvlink_errors(&self, gpu: usize, since_ns: i64) -> NvLinkErrors {
        let all = self.degraded.get(gpu).into_iter().flatten();
        let replays = all.map(|(window, degraded)| {
            let open_seconds = u64::try_from(window.open_ns_until(since_ns) / SECOND_NS).unwrap_or(0);
            open_seconds.saturating_mul(degraded.nvlink_replays.into())
        });
        NvLinkErrors { replays: Some(replays.sum()), recoveries: Some(0), crc: Some(0) }
    }

    /// Whether a device has joined the fabric: its state is "in progress" until then.
    fn fabric(&self, gpu: usize, since_ns: i64) -> Fabric {
        let is_outside = self.degraded(gpu, since_ns).any(|degraded| degraded.outside_fabric);
        Fabric { state: if is_outside { 2 } else { 3 }, status: 0 }
    }

    /// In which ways a device is degraded at a time.
    fn degraded(&self, gpu: usize, since_ns: i64) -> impl Iterator<Item = &Degraded> {
        let all = self.degraded.get(gpu).into_iter().flatten();
        all.filter(move |(window, _)| window.contains(since_ns)).map(|(_, degraded)| degraded)
    }

    /// The spikes of a device; none at an unknown position.
    fn spikes(&self, gpu: usize) -> &[(Window, u64)] {
        self.spikes.get(gpu).map_or(&[], Vec::as_slice)
    }

    fn spike_bytes(&self, gpu: usize, since_ns: i64) -> u64 {
        let open = self.spikes(gpu).iter().filter(|(window, _)| window.contains(since_ns));
        open.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }
}

impl Source for Sim {
    fn description(&self) -> String {
        format!("sim:{}", self.name)
    }

    fn devices(&self) -> &[Device] {
        &self.fleet.devices
    }

    fn memory_used(&self, gpu: usize, at_ns: i64) -> Result<u64, Error> {
        let since_ns = self.since_start(at_ns);
        let (level, _) = self.read(gpu, since_ns, |device| device.at(since_ns))?;
        let used = level.used_bytes.saturating_add(self.spike_bytes(gpu, since_ns));
        Ok(used.min(self.fleet.usable_bytes(gpu)))
    }

    fn medium(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Medium {
        let since_ns = self.since_start(at_ns);
        if self.fleet.parents.get(gpu).is_none_or(Option::is_some) {
            // As with NVML, a MIG instance has memory of its own and no other reading.
            return Medium::default();
        }
        let level = || self.read(gpu, since_ns, |device| device.at(since_ns));
        let meters = || level().map(|(DeviceLevel { meters, .. }, _)| meters);
        let utilization =
            calls.time(Call::Utilization, || self.read(gpu, since_ns, |device| device.utilization(since_ns)));
        Medium {
            utilization_ratio: utilization,
            // A training kernel waits for memory about half of the time.
            memory_busy_ratio: utilization.map(|ratio| ratio / 2.0),
            power_watts: calls.time(Call::Power, || meters().map(|meters| meters.watts())),
            temperature_celsius: calls.time(Call::Temperature, || {
                level().map(|(DeviceLevel { meters, .. }, elapsed_ns)| meters.celsius_after(elapsed_ns).round())
            }),
            sm_clock_hertz: calls
                .time(Call::SmClock, || meters().map(|meters| meters.sm_hertz() * self.clock(gpu, since_ns))),
            memory_clock_hertz: calls.time(Call::MemoryClock, || meters().map(|meters| meters.memory_hertz())),
            throttle_reasons: calls.time(Call::ThrottleReasons, || {
                let reasons = self.degraded(gpu, since_ns).filter_map(Degraded::throttle_bit);
                meters().map(|meters| reasons.fold(meters.throttle_reasons(), |mask, bit| mask | bit))
            }),
            activity: calls
                .time(Call::Gpm, || self.read(gpu, since_ns, |device| device.activity(since_ns)))
                .unwrap_or_default(),
        }
    }

    fn slow(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Slow {
        let since_ns = self.since_start(at_ns);
        if self.fleet.devices.get(gpu).is_none_or(|device| device.parent_uuid.is_some()) {
            return Slow::default();
        }
        let level = || self.read(gpu, since_ns, |device| device.at(since_ns));
        let ecc = calls.time(Call::EccErrors, || level().map(|_| 0));
        let remapped = calls.time(Call::RemappedRows, || level().map(|_| 0));
        Slow {
            ecc_corrected: ecc,
            ecc_uncorrected: ecc,
            remapped_rows_corrected: remapped,
            remapped_rows_uncorrected: remapped,
            row_remap_pending: remapped
                .map(|_| self.degraded(gpu, since_ns).any(|degraded| degraded.row_remap_pending)),
            row_remap_failed: remapped.map(|_| self.degraded(gpu, since_ns).any(|degraded| degraded.row_remap_failed)),
            recovery_action: calls.time(Call::RecoveryAction, || {
                let mut actions = self.degraded(gpu, since_ns).filter_map(|degraded| degraded.recovery_action);
                level().map(|_| actions.next().unwrap_or(0))
            }),
        }
    }

    fn processes(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Option<Vec<Process>> {
        let since_ns = self.since_start(at_ns);
        calls.time(Call::Processes, || {
            let bursting = (!self.spikes(gpu).is_empty()).then_some(BURSTING);
            self.read(gpu, since_ns, |device| device.processes(since_ns).filter_map(process).chain(bursting).collect())
        })
    }

    fn pcie(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Pcie {
        let since_ns = self.since_start(at_ns);
        if self.fleet.devices.get(gpu).is_none_or(|device| device.parent_uuid.is_some()) {
            return Pcie::default();
        }
        let level = || self.read(gpu, since_ns, |device| device.at(since_ns));
        let units = |meter| level().map(|(level, elapsed_ns)| level.meters.total_units(meter, elapsed_ns));
        let bytes =
            calls.time(Call::PcieCounters, || Ok((units(Meter::PcieReceived)?, units(Meter::PcieTransmitted)?)));
        let (received_bytes, transmitted_bytes) = bytes.unzip();
        Pcie { received_bytes, transmitted_bytes }
    }

    fn rare(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Rare {
        let since_ns = self.since_start(at_ns);
        let present = calls.time(Call::MemoryInfoSlow, || self.check_present(gpu, since_ns));
        let device = present.and_then(|()| self.fleet.devices.get(gpu));
        let memory = Rare {
            memory_total_bytes: device.and_then(|device| device.memory_total_bytes),
            memory_reserved_bytes: device.and_then(|device| device.memory_reserved_bytes),
            ..Rare::default()
        };
        if device.is_none_or(|device| device.parent_uuid.is_some()) {
            return memory;
        }
        let level = || self.read(gpu, since_ns, |device| device.at(since_ns));
        let nvlink = calls.time(Call::NvlinkCounters, || {
            level().map(|(level, elapsed_ns)| level.meters.total_units(Meter::Nvlink, elapsed_ns))
        });
        let limits = calls.time(Call::Limits, || self.check_present(gpu, since_ns));
        Rare {
            power_limit_watts: limits.map(|()| Meters::limit_watts()),
            slowdown_celsius: limits.map(|()| meters::SLOWDOWN_CELSIUS),
            shutdown_celsius: limits.map(|()| meters::SHUTDOWN_CELSIUS),
            bar1_used_bytes: calls.time(Call::Bar1, || level().map(|_| 2 << 20)),
            nvlink_received_bytes: nvlink,
            nvlink_transmitted_bytes: nvlink,
            pcie_link: calls.time(Call::PcieLink, || level().map(|_| self.pcie_link(gpu, since_ns))),
            nvlinks: calls.time(Call::NvlinkState, || level().map(|_| self.nvlinks(gpu, since_ns))),
            nvlink_errors: calls
                .time(Call::NvlinkCounters, || level().map(|_| self.nvlink_errors(gpu, since_ns)))
                .unwrap_or_default(),
            fabric: calls.time(Call::NvlinkState, || level().map(|_| self.fabric(gpu, since_ns))),
            ..memory
        }
    }

    fn energy_joules(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Option<f64> {
        let since_ns = self.since_start(at_ns);
        self.fleet.devices.get(gpu).filter(|device| device.parent_uuid.is_none())?;
        calls.time(Call::Energy, || {
            self.read(gpu, since_ns, |device| device.at(since_ns))
                .map(|(now, elapsed_ns)| now.meters.joules(elapsed_ns))
        })
    }

    fn reacquire(&self, gpu: usize) -> Result<(), Error> {
        self.check_present(gpu, self.latest_ns.load(Ordering::Relaxed))
    }

    fn wait_event(&self, timeout: Duration) -> Result<Option<DriverEvent>, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.due_event()? {
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(left.min(EVENT_POLL));
        }
    }

    fn annotations(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        let voice = |plan: &Arc<Plan>| {
            let mut timeline = Timeline::new(Arc::clone(plan), Select::Annotations);
            let first = timeline.next();
            (timeline, first)
        };
        Box::new(Voices { start_ns: self.start_ns, jobs: self.plans.iter().map(voice).collect() })
    }
}

impl Sim {
    /// The earliest XID that is due and has not been reported yet.
    fn due_event(&self) -> Result<Option<DriverEvent>, Error> {
        let mut xids = self.xids.lock().unwrap_or_else(PoisonError::into_inner);
        if xids.is_empty() {
            return Err(Error::Unsupported);
        }
        let latest_ns = self.latest_ns.load(Ordering::Relaxed);
        let due = xids.iter_mut().filter_map(|(xid, gpu, logged_ns)| {
            let window = Window::new(xid.at, xid.every, highwater_core::units::Nanoseconds(1));
            let opening_ns = window.next_opening_ns(*logged_ns).filter(|opening| *opening <= latest_ns)?;
            Some((opening_ns, logged_ns, DriverEvent::Xid { gpu: *gpu, xid: xid.xid }))
        });
        Ok(due.min_by_key(|(opening_ns, ..)| *opening_ns).map(|(opening_ns, logged_ns, event)| {
            *logged_ns = opening_ns;
            event
        }))
    }
}

/// The annotations of all jobs, in order of time.
struct Voices {
    start_ns: i64,
    jobs: Vec<(Timeline, Option<RankEvent>)>,
}

impl Iterator for Voices {
    type Item = Annotation;

    fn next(&mut self) -> Option<Annotation> {
        loop {
            let waiting = self.jobs.iter_mut().filter(|(_, next)| next.is_some());
            let (timeline, next) = waiting.min_by_key(|(_, next)| next.as_ref().map(|moment| moment.at_ns))?;
            let moment = std::mem::replace(next, timeline.next())?;
            if let What::Says(mut annotation) = moment.what {
                annotation.time_unix_nano = self.start_ns.checked_add(moment.at_ns);
                return Some(*annotation);
            }
        }
    }
}

fn jobs_on(plans: &[Arc<Plan>], fleet: &Fleet, device: usize) -> Vec<(Arc<Plan>, Vec<usize>)> {
    let within: Vec<usize> = fleet.within(device).collect();
    let ranks = |plan: &Arc<Plan>| -> Vec<usize> {
        plan.devices().enumerate().filter(|(_, on)| within.contains(on)).map(|(rank, _)| rank).collect()
    };
    plans.iter().map(|plan| (Arc::clone(plan), ranks(plan))).filter(|(_, ranks)| !ranks.is_empty()).collect()
}

fn spikes_on(spikes: &[Spike], fleet: &Fleet, device: usize) -> Vec<(Window, u64)> {
    let here =
        |spike: &&Spike| fleet.find(&spike.gpu).is_some_and(|at| fleet.within(device).any(|within| within == at));
    let window = |spike: &Spike| (Window::new(spike.offset, spike.every, spike.duration), spike.bytes.0);
    spikes.iter().filter(here).map(window).collect()
}

fn losses_of(lost: &[Lost], fleet: &Fleet, device: usize) -> Vec<Window> {
    let here = |lost: &&Lost| fleet.find(&lost.gpu).is_some_and(|at| fleet.within(at).any(|within| within == device));
    lost.iter().filter(here).map(|lost| Window::new(lost.at, lost.every, lost.lasting)).collect()
}

fn degraded_on(degraded: &[Degraded], fleet: &Fleet, device: usize) -> Vec<(Window, Degraded)> {
    let here = degraded.iter().filter(|one| fleet.find(&one.gpu) == Some(device));
    here.map(|one| (Window::new(one.at, one.every, one.lasting), one.clone())).collect()
}

fn xids_of(xids: Vec<Xid>, fleet: &Fleet) -> Vec<(Xid, usize, i64)> {
    let place = |xid: Xid| fleet.find(&xid.gpu).map(|gpu| (xid, gpu, i64::MIN));
    xids.into_iter().filter_map(place).collect()
}

/// The process that spikes belong to: memory of a GPU changes only where a process has a context. Its id is above Linux's limit
/// of 4,194,304, so no real process has it.
const BURSTING: Process = Process { pid: (1 << 22) + 1, used_bytes: None };

/// A simulated job sends its annotations from this process, so this is the process that the driver would list for it.
fn process(state: job::State) -> Option<Process> {
    state.alive.then(|| Process { pid: std::process::id(), used_bytes: Some(state.used_bytes()) })
}
