//! One simulated device: the sum of its processes, by time.
//!
//! Times arrive nearly in order. The last [`KEEP_NS`] are kept, so that slower lanes may look back a little. An earlier
//! time is answered too, by replaying everything from the start. Absent on purpose: spikes and losses, which are not
//! processes; [`super::Sim`] adds them.

use super::job::{Plan, RankEvent, Select, State, Timeline, What};
use super::meters::{Meter, Meters};
use super::recent::Recent;
use highwater_core::gpu::Activity;
use std::sync::Arc;

/// How far a reader may look back without a replay.
const KEEP_NS: i64 = 1_000_000_000;
/// The span over which utilization is taken: that of NVML's own counter on an H200.
const UTILIZATION_SPAN_NS: i64 = 100_000_000;
/// The span over which activity is taken, as the NVML source does.
const ACTIVITY_SPAN_NS: i64 = 500_000_000;

/// Generates one device's readings.
#[derive(Debug)]
pub(super) struct Gpu {
    /// The jobs on this device, each with its ranks there.
    jobs: Vec<(Arc<Plan>, Vec<usize>)>,
    played: Played,
}

/// How far the jobs have been played, and their recent states.
#[derive(Debug)]
struct Played {
    timelines: Vec<(Timeline, Option<RankEvent>)>,
    /// When the next moment is; `i64::MAX` when there is none.
    next_ns: i64,
    /// The states of each job's ranks.
    states: Vec<Vec<Recent<State>>>,
    levels: Recent<DeviceLevel>,
}

/// The state of the whole device from one change to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DeviceLevel {
    /// Memory of all processes, bytes.
    pub(super) used_bytes: u64,
    pub(super) meters: Meters,
}

impl Gpu {
    pub(super) fn new(jobs: Vec<(Arc<Plan>, Vec<usize>)>) -> Self {
        let played = Played::nothing(&jobs);
        Self { jobs, played }
    }

    /// The state of the device at a time since the start, and how long it has lasted, nanoseconds.
    pub(super) fn at(&mut self, at_ns: i64) -> (DeviceLevel, i64) {
        let at_ns = at_ns.max(0);
        self.seek(at_ns);
        let (since_ns, level) = *self.played.levels.at(at_ns).unwrap_or(self.played.levels.newest());
        (level, at_ns - since_ns)
    }

    /// Share of the last 100 ms in which a kernel ran, 0 to 1.
    pub(super) fn utilization(&mut self, at_ns: i64) -> f64 {
        self.share(Meter::Busy, at_ns, UTILIZATION_SPAN_NS)
    }

    /// What its multiprocessors did over the last 200 ms. Occupancy and memory follow from them by a usual ratio.
    pub(super) fn activity(&mut self, at_ns: i64) -> Activity {
        let sm_active = self.share(Meter::Sm, at_ns, ACTIVITY_SPAN_NS);
        let tensor_active = self.share(Meter::Tensor, at_ns, ACTIVITY_SPAN_NS);
        Activity {
            sm_active_ratio: Some(sm_active),
            sm_occupancy_ratio: Some(sm_active / 4.0),
            tensor_active_ratio: Some(tensor_active),
            dram_active_ratio: Some(sm_active / 3.0),
        }
    }

    /// The mean of a meter in millionths over a span that ends now, 0 to 1.
    #[allow(clippy::cast_precision_loss, reason = "a ratio")]
    fn share(&mut self, meter: Meter, at_ns: i64, span_ns: i64) -> f64 {
        let end_ns = at_ns.max(0);
        let begin_ns = (end_ns - span_ns).max(0);
        let (begin, begin_elapsed_ns) = self.at(begin_ns);
        let (end, end_elapsed_ns) = self.at(end_ns);
        let passed = end.meters.total(meter, end_elapsed_ns) - begin.meters.total(meter, begin_elapsed_ns);
        passed as f64 * 1e-6 / (end_ns - begin_ns).max(1) as f64
    }

    /// The processes at a time, in order of job and rank.
    pub(super) fn processes(&mut self, at_ns: i64) -> impl Iterator<Item = State> {
        let at_ns = at_ns.max(0);
        self.seek(at_ns);
        let tracks = self.played.states.iter().flatten();
        tracks.filter_map(move |track| track.at(at_ns)).map(|(_, state)| *state).filter(|state| state.alive)
    }

    fn seek(&mut self, at_ns: i64) {
        if self.played.next_ns <= at_ns {
            self.played.advance(at_ns);
        } else if self.played.levels.at(at_ns).is_none() {
            self.played = Played::nothing(&self.jobs);
            self.played.advance(at_ns);
        }
    }
}

impl Played {
    fn nothing(jobs: &[(Arc<Plan>, Vec<usize>)]) -> Self {
        let timeline = |(plan, ranks): &(Arc<Plan>, Vec<usize>)| {
            let mut timeline = Timeline::new(Arc::clone(plan), Select::States(ranks.clone()));
            let first = timeline.next();
            (timeline, first)
        };
        let track = |(plan, _): &(Arc<Plan>, Vec<usize>)| {
            plan.devices().map(|_| Recent::new(0, State::default())).collect::<Vec<_>>()
        };
        let mut played = Self {
            timelines: jobs.iter().map(timeline).collect(),
            next_ns: i64::MAX,
            states: jobs.iter().map(track).collect(),
            levels: Recent::new(0, DeviceLevel { used_bytes: 0, meters: Meters::idle() }),
        };
        played.find_next();
        played
    }

    fn find_next(&mut self) {
        let times = self.timelines.iter().filter_map(|(_, next)| next.as_ref()).map(|moment| moment.at_ns);
        self.next_ns = times.min().unwrap_or(i64::MAX);
    }

    /// Plays all moments up to and at this time.
    fn advance(&mut self, at_ns: i64) {
        while self.next_ns <= at_ns {
            let now_ns = self.next_ns;
            for ((timeline, next), states) in self.timelines.iter_mut().zip(&mut self.states) {
                while let Some(moment) = next.take_if(|moment| moment.at_ns == now_ns) {
                    if let (What::State(state), Some(track)) = (moment.what, states.get_mut(moment.rank)) {
                        track.push(now_ns, state);
                    }
                    *next = timeline.next();
                }
            }
            self.measure(now_ns);
            self.find_next();
            self.levels.forget(now_ns - KEEP_NS);
            self.states.iter_mut().flatten().for_each(|track| track.forget(now_ns - KEEP_NS));
        }
    }

    /// Takes the sum of all processes from now on.
    fn measure(&mut self, now_ns: i64) {
        let (since_ns, before) = *self.levels.newest();
        let now = || self.states.iter().flatten().map(|track| &track.newest().1);
        let used_bytes = now().map(State::used_bytes).fold(0, u64::saturating_add);
        let level = DeviceLevel { used_bytes, meters: before.meters.after(now_ns - since_ns, now()) };
        self.levels.push(now_ns, level);
    }
}
