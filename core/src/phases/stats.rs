//! Statistics of a rank's phases and layers that have ended: their durations and their memory.

use super::memory::{Attributed, LEAST_ACTIVE_NS, PhaseMemory};
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::histogram::Durations;
use crate::jobs::{Reservation, Resource};
use crate::wire::{Kind, Memory};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Upper bounds of step and phase durations, seconds: from a kernel to a checkpoint. Each line has a coarse bound and the
/// three that divide the bucket above it.
#[rustfmt::skip]
pub const DURATION_BOUNDS_S: &[f64] = &[
    0.001, 0.00125, 0.0016, 0.002,
    0.0025, 0.003, 0.0035, 0.0042,
    0.005, 0.006, 0.007, 0.0085,
    0.01, 0.0125, 0.016, 0.02,
    0.025, 0.03, 0.035, 0.042,
    0.05, 0.06, 0.07, 0.085,
    0.1, 0.125, 0.16, 0.2,
    0.25, 0.3, 0.35, 0.42,
    0.5, 0.6, 0.7, 0.85,
    1.0, 1.25, 1.6, 2.0,
    2.5, 3.0, 3.5, 4.2,
    5.0, 6.0, 7.0, 8.5,
    10.0, 13.0, 17.0, 23.0,
    30.0, 36.0, 42.0, 50.0,
    60.0, 90.0, 130.0, 200.0,
    300.0,
];

/// The sliding windows of every `{window}` metric: label value and length, nanoseconds.
pub const WINDOWS: [(&str, i64); 2] = [("15s", 15 * SECOND_NS), ("60s", 60 * SECOND_NS)];

/// Windows reach this much further back than their name says, so that a scraper whose interval is the window and
/// wobbles by some milliseconds misses nothing between two scrapes.
pub const WINDOW_SLACK_NS: i64 = 250 * MILLISECOND_NS;

/// What a rank's GPUs did in all steps, or in all phases of a name, so far, seconds; `None` until it is known of one. Of several
/// GPUs the mean, so that it is a part of the time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GpuTime {
    /// Without any kernel.
    pub idle_seconds: Option<f64>,
    /// Of multiprocessors with a warp, their mean.
    pub sm_active_seconds: Option<f64>,
    /// Of tensor cores.
    pub tensor_active_seconds: Option<f64>,
    /// Of memory that transfers.
    pub dram_active_seconds: Option<f64>,
    /// How long those took of which the idle time is known.
    pub idle_observed_seconds: Option<f64>,
    /// And those of which the activity of tensor cores is.
    pub active_observed_seconds: Option<f64>,
}

impl GpuTime {
    /// Adds one that ended; `has_active` is whether the activity of units counts.
    fn add(&mut self, gpus: &[PhaseMemory], length_ns: i64, has_active: bool) {
        #[allow(clippy::cast_precision_loss, reason = "nanoseconds below 2^53 are 104 days")]
        let seconds = length_ns as f64 / SECOND_NS as f64;
        if add_mean(&mut self.idle_seconds, gpus.iter().filter_map(|gpu| gpu.usage.idle_seconds)) {
            *self.idle_observed_seconds.get_or_insert(0.0) += seconds;
        }
        if has_active {
            let active = || gpus.iter().map(|gpu| gpu.usage.active);
            add_mean(&mut self.sm_active_seconds, active().filter_map(|active| active.sm.map(f64::from)));
            if add_mean(&mut self.tensor_active_seconds, active().filter_map(|active| active.tensor.map(f64::from))) {
                *self.active_observed_seconds.get_or_insert(0.0) += seconds;
            }
            add_mean(&mut self.dram_active_seconds, active().filter_map(|active| active.dram.map(f64::from)));
        }
    }
}

/// Adds the mean of what is known to a total; returns whether anything is.
fn add_mean(total: &mut Option<f64>, known: impl Iterator<Item = f64>) -> bool {
    let (count, sum) = known.fold((0_u32, 0.0), |(count, sum), one| (count + 1, sum + one));
    if count > 0 {
        *total.get_or_insert(0.0) += sum / f64::from(count);
    }
    count > 0
}

/// Bytes of what is kept of one layer beside its name, with what allocating it costs.
const LAYER_BYTES: usize = size_of::<LayerStats>() + 64;

/// What is kept of all that has ended of one rank.
#[derive(Debug)]
pub struct RankStats {
    /// Durations of its steps.
    pub step_durations: Durations,
    /// What its GPUs did in its steps.
    pub step_gpu_time: GpuTime,
    /// Phases by name.
    pub phases: BTreeMap<Arc<str>, PhaseStats>,
    /// Layers by name.
    pub layers: BTreeMap<Arc<str>, LayerStats>,
    outside: Option<Outside>,
}

/// Memory of a rank's process outside its allocator, when it was last known, with its GPU and process.
#[derive(Debug)]
struct Outside {
    bytes: u64,
    gpu: usize,
    pid: Option<u32>,
}

impl Default for RankStats {
    fn default() -> Self {
        Self {
            step_durations: Durations::new(DURATION_BOUNDS_S),
            step_gpu_time: GpuTime::default(),
            phases: BTreeMap::new(),
            layers: BTreeMap::new(),
            outside: None,
        }
    }
}

impl RankStats {
    /// Adds one that ended; returns whether there was room for it.
    pub(super) fn record(&mut self, attributed: &Attributed) -> bool {
        let ended = &attributed.ended;
        // An allocator's counters are of one GPU. If the rank has several, it is not known of which.
        if let [one] = attributed.gpus.as_slice()
            && let Some(bytes) = one.outside_allocator_bytes
        {
            self.outside = Some(Outside { bytes, gpu: one.gpu, pid: ended.pid });
        }
        let (begin_ns, end_ns) = (ended.open.begin_ns, ended.end_ns);
        match ended.open.kind {
            Kind::Step => {
                self.step_durations.observe_ns(end_ns - begin_ns);
                // Also of short ones: what the readings smear over two steps is in their sum.
                self.step_gpu_time.add(&attributed.gpus, end_ns - begin_ns, true);
            }
            Kind::Phase => {
                let stats = self.phases.entry(Arc::clone(&ended.open.name)).or_insert_with(PhaseStats::new);
                stats.record(begin_ns, end_ns, &attributed.gpus);
            }
            Kind::Layer => return self.record_layer(attributed),
        }
        true
    }

    /// Adds a step or phase that was open when the rank ended or an allocation of it failed.
    pub(super) fn record_cut(&mut self, attributed: &Attributed) {
        let (open, end_ns) = (&attributed.ended.open, attributed.ended.end_ns);
        if open.kind != Kind::Phase {
            return;
        }
        let stats = self.phases.entry(Arc::clone(&open.name)).or_insert_with(PhaseStats::new);
        stats.record_peak(end_ns, attributed.gpus.iter().filter_map(|gpu| gpu.peak_bytes).max());
    }

    fn record_layer(&mut self, attributed: &Attributed) -> bool {
        let open = &attributed.ended.open;
        if let Some(stats) = self.layers.get_mut(&open.name) {
            stats.record(attributed);
            return true;
        }
        let bytes = LAYER_BYTES + open.name.len();
        let account = open.held.as_ref().map(Reservation::account);
        if account.is_some_and(|account| account.may_hold(Resource::Layers, bytes).is_err()) {
            return false;
        }
        let place = account.map(|account| account.hold(Resource::Layers, bytes));
        let stats = LayerStats::new(self.layers.len(), place);
        self.layers.entry(Arc::clone(&open.name)).or_insert(stats).record(attributed);
        true
    }

    /// Memory outside the allocator of the rank while this process speaks for it on these GPUs, bytes. `None` where it was
    /// last known of another process, or of a GPU that is not the rank's only one any more.
    #[must_use]
    pub fn outside_allocator_bytes(&self, pid: Option<u32>, gpus: Option<&[usize]>) -> Option<u64> {
        let outside = self.outside.as_ref()?;
        (outside.pid == pid && gpus == Some(&[outside.gpu])).then_some(outside.bytes)
    }
}

/// What is kept of all layers of one name of one rank.
#[derive(Debug)]
pub struct LayerStats {
    /// Its place among the rank's layers, by the order in which they first ended.
    pub order: usize,
    /// How many have ended.
    pub count: u64,
    /// Time in all of them, by the job's own times, nanoseconds.
    pub total_ns: i64,
    /// The highest memory inside any of them, bytes, over its GPUs.
    pub peak_bytes: Option<u64>,
    /// The last one that ended.
    pub last: LastLayer,
    _place: Option<Reservation>,
}

/// What the last layer of a name did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LastLayer {
    /// The step that it belonged to.
    pub step: Option<u64>,
    /// When it began and ended, nanoseconds of the timeline.
    pub begin_ns: i64,
    /// See above.
    pub end_ns: i64,
    /// The highest memory inside it, bytes, over its GPUs.
    pub peak_bytes: Option<u64>,
    /// Memory at its end less memory at its begin, bytes.
    pub growth_bytes: Option<i64>,
    /// The same by the allocator: what the layer holds on to, its activations in a forward pass.
    pub allocated_growth_bytes: Option<i64>,
    /// The same of what the allocator holds from the driver.
    pub reserved_growth_bytes: Option<i64>,
}

impl LayerStats {
    fn new(order: usize, place: Option<Reservation>) -> Self {
        Self { order, count: 0, total_ns: 0, peak_bytes: None, last: LastLayer::default(), _place: place }
    }

    fn record(&mut self, attributed: &Attributed) {
        let (ended, open) = (&attributed.ended, &attributed.ended.open);
        let peak_bytes = attributed.gpus.iter().filter_map(|gpu| gpu.peak_bytes).max();
        let growth = |of: fn(&Memory) -> Option<u64>| {
            Some(of(ended.memory.as_ref()?)?.cast_signed().saturating_sub(of(open.memory.as_ref()?)?.cast_signed()))
        };
        let is_first = self.count == 0;
        self.count += 1;
        self.total_ns = self.total_ns.saturating_add(ended.end_ns.saturating_sub(open.begin_ns));
        self.peak_bytes = self.peak_bytes.max(peak_bytes);
        // One that arrives late is not the last one that ended.
        if is_first || ended.end_ns >= self.last.end_ns {
            self.last = LastLayer {
                step: open.step,
                begin_ns: open.begin_ns,
                end_ns: ended.end_ns,
                peak_bytes,
                growth_bytes: attributed.gpus.iter().filter_map(PhaseMemory::growth_bytes).max(),
                allocated_growth_bytes: growth(|memory| memory.allocated),
                reserved_growth_bytes: growth(|memory| memory.reserved),
            };
        }
    }
}

/// What is kept of all phases of one name of one rank.
#[derive(Debug)]
pub struct PhaseStats {
    /// Durations, by the job's own times.
    pub durations: Durations,
    /// Highest memory inside the last one that ended, or that was open when its rank ended or an allocation failed, bytes, over its GPUs.
    pub peak_bytes: Option<u64>,
    /// Memory at its end less memory at its begin, bytes; of one that ended by itself.
    pub growth_bytes: Option<i64>,
    /// Energy of all of them so far, joules; `None` until one is known.
    pub energy_joules: Option<f64>,
    /// What the GPUs did in all of them so far.
    pub gpu_time: GpuTime,
    recent_peaks: RecentMax,
    last_end_ns: i64,
}

impl PhaseStats {
    fn new() -> Self {
        Self {
            durations: Durations::new(DURATION_BOUNDS_S),
            peak_bytes: None,
            growth_bytes: None,
            energy_joules: None,
            gpu_time: GpuTime::default(),
            recent_peaks: RecentMax::default(),
            last_end_ns: i64::MIN,
        }
    }

    /// Adds one that ended.
    fn record(&mut self, begin_ns: i64, end_ns: i64, gpus: &[PhaseMemory]) {
        self.durations.observe_ns(end_ns - begin_ns);
        if self.record_peak(end_ns, gpus.iter().filter_map(|gpu| gpu.peak_bytes).max()) {
            self.growth_bytes = gpus.iter().filter_map(|gpu| gpu.growth_bytes()).max();
        }
        for joules in gpus.iter().filter_map(|gpu| gpu.usage.energy_joules) {
            *self.energy_joules.get_or_insert(0.0) += joules;
        }
        self.gpu_time.add(gpus, end_ns - begin_ns, end_ns - begin_ns >= LEAST_ACTIVE_NS);
    }

    /// Adds the highest memory of one; returns whether it is the last one that ended, which one that arrives late is not.
    fn record_peak(&mut self, end_ns: i64, peak_bytes: Option<u64>) -> bool {
        let is_last = end_ns >= self.last_end_ns;
        if is_last {
            (self.last_end_ns, self.peak_bytes) = (end_ns, peak_bytes);
        }
        if let Some(peak_bytes) = peak_bytes {
            self.recent_peaks.push(end_ns, peak_bytes);
        }
        is_last
    }

    /// The highest peak of those that ended within `window_ns` before `now_ns`, bytes.
    #[must_use]
    pub fn peak_max_bytes(&self, now_ns: i64, window_ns: i64) -> Option<u64> {
        self.recent_peaks.since(now_ns - window_ns - WINDOW_SLACK_NS)
    }
}

/// Sliding-window maximum: a monotonic queue of falling values, at most one for each slot of [`SLOT_NS`]. A lower
/// value in the slot of a higher one is dropped, so a maximum may leave a window early by one slot:
/// [`WINDOW_SLACK_NS`] covers it.
#[derive(Debug, Default)]
struct RecentMax {
    falling: VecDeque<(i64, u64)>,
}

const SLOT_NS: i64 = 250 * MILLISECOND_NS;

impl RecentMax {
    fn push(&mut self, at_ns: i64, value: u64) {
        // A value that arrives late counts at the time of the last one: it stays in the window a little longer, and is not lost.
        let at_ns = self.falling.back().map_or(at_ns, |(last_ns, _)| at_ns.max(*last_ns));
        while self.falling.back().is_some_and(|(_, last)| *last <= value) {
            self.falling.pop_back();
        }
        let same_slot = self.falling.back().is_some_and(|(last_ns, _)| last_ns / SLOT_NS == at_ns / SLOT_NS);
        if !same_slot {
            self.falling.push_back((at_ns, value));
        }
        let longest_ns = WINDOWS.iter().map(|(_, length_ns)| *length_ns).max().unwrap_or(0);
        while self.falling.front().is_some_and(|(first_ns, _)| *first_ns < at_ns - longest_ns - 2 * SLOT_NS) {
            self.falling.pop_front();
        }
    }

    fn since(&self, from_ns: i64) -> Option<u64> {
        let first = self.falling.partition_point(|(at_ns, _)| *at_ns < from_ns);
        self.falling.get(first).map(|(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{ActiveSeconds, Usage};
    use crate::histogram::BOUNDS_TO_A_COARSE_ONE;
    use crate::jobs::{Account, Ended};
    use crate::phases::hand;
    use proptest::prelude::*;

    /// Queries and alert rules name the coarse ones.
    #[test]
    fn bounds_divide_the_coarse_ones_evenly() {
        let coarse: Vec<f64> = DURATION_BOUNDS_S.iter().copied().step_by(BOUNDS_TO_A_COARSE_ONE).collect();
        let known = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
        assert_eq!(coarse, known);
        let ratios = DURATION_BOUNDS_S.windows(2).map(|pair| pair[1] / pair[0]);
        for (position, ratio) in ratios.enumerate() {
            let even = known[position / 4 + 1] / known[position / 4];
            assert!(
                (ratio.powi(4) / even).ln().abs() < 0.15 * even.ln().max(1.0),
                "after {}",
                DURATION_BOUNDS_S[position]
            );
            // What a quantile can be wrong by, for all but checkpoints.
            assert!(ratio < 1.29 || DURATION_BOUNDS_S[position] >= 10.0, "after {}", DURATION_BOUNDS_S[position]);
        }
    }

    #[test]
    fn of_several_gpus_energy_adds_up_and_idle_and_active_time_are_their_mean() {
        let on = |gpu: usize, idle_seconds: Option<f64>| {
            let active = ActiveSeconds { tensor: Some(0.5), ..ActiveSeconds::default() };
            let usage = Usage { energy_joules: Some(100.0), idle_seconds, active };
            PhaseMemory { usage, ..PhaseMemory::unknown(gpu) }
        };
        let mut stats = PhaseStats::new();
        stats.record(0, LEAST_ACTIVE_NS, &[on(0, Some(5.0)), on(1, Some(1.0)), on(2, None)]);
        assert_eq!((stats.energy_joules, stats.gpu_time.idle_seconds), (Some(300.0), Some(3.0)));
        let observed = (stats.gpu_time.idle_observed_seconds, stats.gpu_time.active_observed_seconds);
        assert_eq!(observed, (Some(2.0), Some(2.0)));
        let (tensor, dram) = (stats.gpu_time.tensor_active_seconds, stats.gpu_time.dram_active_seconds);
        assert_eq!((tensor, dram), (Some(0.5), None));
        // A shorter one has the mean of what is around it, and does not count.
        stats.record(1, LEAST_ACTIVE_NS, &[on(0, None)]);
        assert_eq!((stats.energy_joules, stats.gpu_time.idle_seconds), (Some(400.0), Some(3.0)));
        assert_eq!(stats.gpu_time.tensor_active_seconds, Some(0.5));
        let observed = (stats.gpu_time.idle_observed_seconds, stats.gpu_time.active_observed_seconds);
        assert_eq!(observed, (Some(2.0), Some(2.0)), "nothing of the second one was known");
    }

    #[test]
    fn a_peak_leaves_its_window_and_no_earlier() {
        let mut peaks = RecentMax::default();
        peaks.push(0, 80);
        peaks.push(10 * SECOND_NS, 40);
        assert_eq!(peaks.since(-SECOND_NS), Some(80));
        assert_eq!(peaks.since(SECOND_NS), Some(40));
        assert_eq!(peaks.since(11 * SECOND_NS), None);
    }

    fn on(gpu: usize, peak_bytes: u64) -> PhaseMemory {
        let (begin_bytes, end_bytes) = (Some(10), Some(peak_bytes / 2));
        PhaseMemory { begin_bytes, end_bytes, peak_bytes: Some(peak_bytes), ..PhaseMemory::unknown(gpu) }
    }

    #[test]
    fn the_last_phase_that_ended_is_shown_and_the_highest_of_a_window() {
        let mut stats = PhaseStats::new();
        stats.record(0, 10 * SECOND_NS, &[on(0, 100), on(1, 60)]);
        stats.record(0, 9 * SECOND_NS, &[on(0, 500)]);
        assert_eq!((stats.peak_bytes, stats.growth_bytes), (Some(100), Some(40)), "it arrived late");
        stats.record(0, 10 * SECOND_NS, &[on(0, 20)]);
        assert_eq!((stats.peak_bytes, stats.growth_bytes), (Some(20), Some(0)));
        assert_eq!(stats.durations.counts().cumulative.last(), Some(&3));
        stats.record(19 * SECOND_NS, 20 * SECOND_NS, &[]);
        assert!((stats.durations.counts().sum_s - 30.0).abs() < 1e-9, "ten, nine, ten and one");
        let highest = |now_ns| stats.peak_max_bytes(now_ns, 5 * SECOND_NS);
        let leaves_ns = 15 * SECOND_NS + 250 * MILLISECOND_NS;
        assert_eq!((highest(leaves_ns), highest(leaves_ns + 1)), (Some(500), None));
    }

    #[test]
    fn maxima_are_kept_for_the_longest_window_one_for_each_slot() {
        let mut peaks = RecentMax::default();
        assert_eq!(WINDOWS, [("15s", 15_000_000_000), ("60s", 60_000_000_000)]);
        assert_eq!((WINDOW_SLACK_NS, SLOT_NS, LAYER_BYTES - size_of::<LayerStats>()), (250_000_000, 250_000_000, 64));
        peaks.push(0, 90);
        peaks.push(SLOT_NS - 1, 80);
        assert_eq!(peaks.falling, [(0, 90)], "one slot");
        let mut later = RecentMax::default();
        [(4 * SLOT_NS, 90), (5 * SLOT_NS - 1, 80), (5 * SLOT_NS, 70)]
            .iter()
            .for_each(|(at_ns, value)| later.push(*at_ns, *value));
        assert_eq!(later.falling, [(4 * SLOT_NS, 90), (5 * SLOT_NS, 70)]);
        peaks.push(SLOT_NS, 80);
        peaks.push(2 * SLOT_NS, 80);
        assert_eq!(peaks.falling, [(0, 90), (2 * SLOT_NS, 80)], "as high, and later");
        let longest_ns = 60 * SECOND_NS + 2 * SLOT_NS;
        peaks.push(longest_ns, 7);
        assert_eq!(peaks.falling.len(), 3);
        peaks.push(longest_ns + SLOT_NS, 6);
        assert_eq!(peaks.falling.front(), Some(&(2 * SLOT_NS, 80)));
    }

    #[test]
    fn steps_phases_and_layers_are_counted_each_where_it_belongs() {
        let mut stats = RankStats::default();
        for (kind, name) in [(Kind::Step, "step"), (Kind::Phase, "a"), (Kind::Phase, "a"), (Kind::Layer, "l")] {
            assert!(stats.record(&hand::attributed(hand::ended(kind, 0, name, None, 5, 12))));
        }
        let count = |durations: &Durations| *durations.counts().cumulative.last().expect("all");
        assert_eq!((count(&stats.step_durations), count(&stats.phases["a"].durations)), (1, 2));
        assert!((stats.step_durations.counts().sum_s - 7e-9).abs() < 1e-15);
        assert_eq!((stats.phases.len(), stats.layers["l"].count, stats.layers["l"].total_ns), (1, 1, 7));
    }

    #[test]
    fn a_layer_takes_its_bytes_and_those_of_its_name() {
        let (mut stats, account) = (RankStats::default(), Account::alone());
        let mut one = hand::ended(Kind::Layer, 0, "attention", None, 0, 7);
        one.open.held = Some(account.hold(Resource::Bytes, 1));
        assert!(stats.record(&hand::attributed(one)));
        assert_eq!(account.holds(Resource::Layers), LAYER_BYTES + "attention".len());
    }

    #[test]
    fn what_is_outside_the_allocator_is_of_one_gpu_and_one_process() {
        let mut stats = RankStats::default();
        let outside = |bytes, gpu| PhaseMemory { outside_allocator_bytes: bytes, ..PhaseMemory::unknown(gpu) };
        let ended = || Ended { pid: Some(7), ..hand::ended(Kind::Phase, 0, "a", None, 0, 1) };
        stats.record(&Attributed { gpus: vec![outside(Some(5), 2)], ..hand::attributed(ended()) });
        stats.record(&Attributed { gpus: vec![outside(None, 2)], ..hand::attributed(ended()) });
        stats.record(&Attributed { gpus: vec![outside(Some(9), 2), outside(Some(9), 3)], ..hand::attributed(ended()) });
        let of = |pid, gpus: Option<&[usize]>| stats.outside_allocator_bytes(pid, gpus);
        assert_eq!(of(Some(7), Some(&[2])), Some(5));
        assert_eq!([of(Some(8), Some(&[2])), of(None, Some(&[2]))], [None; 2]);
        assert_eq!([of(Some(7), Some(&[3])), of(Some(7), Some(&[2, 3])), of(Some(7), None)], [None; 3]);
    }

    proptest! {
        /// The queue is at most one slot off the naive maximum, on the safe side of losing nothing.
        #[test]
        fn agrees_with_all_values(steps in prop::collection::vec((0i64..2_000, 0u64..100), 1..200), window_ms in 1i64..60_000) {
            let (mut peaks, mut now, mut all) = (RecentMax::default(), 0, Vec::new());
            for (ms, value) in steps {
                now += ms * MILLISECOND_NS;
                peaks.push(now, value);
                all.push((now, value));
            }
            let from = now - window_ms * MILLISECOND_NS;
            let naive = |from| all.iter().filter(|(at, _)| *at >= from).map(|(_, value)| *value).max();
            let got = peaks.since(from);
            prop_assert!(got <= naive(from));
            prop_assert!(got >= naive(from + SLOT_NS));
        }
    }
}
