//! GPUs whose memory is read by a thread of their own, because their calls take so long that the others would wait.
//!
//! The fast lane reads one GPU after the other. A GPU whose calls take 5 ms, or 300, would cost every other GPU its ticks. It is
//! therefore set *aside*: the fast lane passes over it, and a thread of its own reads it as often as its calls allow. Once they
//! have been prompt for a while it comes back.
//!
//! A job that maps memory holds locks of the driver. Calls on its GPU wait for them, and sometimes all calls. So a GPU is set
//! aside only if its calls take long while those on another do not. The job mostly takes the lock between two sweeps, and the
//! first call of the next sweep waits, whichever GPU it is for. The fast lane therefore reads a GPU last once a call on it
//! took long. If calls on another GPU then take as long, the GPU itself is not slow.
//!
//! Enters: calls that took long. Leaves: which GPUs are set aside, and since when a call on each has been in progress, so that
//! the watchdog sees one that hangs. Invariant: no lock is taken unless a call took long.

use super::ticks::MOST_SKIPPED;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::GpuState;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A call that takes longer costs the other GPUs a tick.
pub(super) const LONG_NS: i64 = MILLISECOND_NS;
/// The time constant with which long calls are forgotten, nanoseconds.
const MEMORY_NS: f64 = 10e9;
/// A GPU is set aside only from this decayed total duration of its long calls on, nanoseconds: 1 % of the time
/// constant. That is the share of their ticks that the other GPUs may lose.
const LEAST_NS: f64 = MEMORY_NS / 100.0;
/// Minimum decayed number of long calls before a GPU is set aside. A few may all fall on one GPU by chance.
const LEAST_CALLS: f64 = 8.0;
/// Its long calls must take at least this many times as long, in total, as those of the least affected other GPU.
const FACTOR: f64 = 10.0;

/// How long all calls on a GPU must be prompt before it comes back, the first time.
const PATIENCE_NS: i64 = SECOND_NS;
/// Maximum of that time, however often the GPU is set aside again.
const MOST_PATIENCE_NS: i64 = 600 * SECOND_NS;
/// By how much that time is multiplied if the GPU is set aside again.
const PATIENCE_FACTOR: i64 = 4;
/// If a GPU is set aside this long or longer after it came back, that time starts again at [`PATIENCE_NS`].
const FORGET_NS: i64 = 3_600 * SECOND_NS;

/// What is known of each GPU's calls, for all threads that read a source.
#[derive(Debug)]
pub(super) struct Aside {
    /// Bit n for the GPU at position n. Further ones are never set aside.
    gpus: AtomicU64,
    costs: Mutex<Vec<Cost>>,
    /// When the call on a GPU that is aside began, nanoseconds of the timeline; [`NO_CALL`] if none is in progress.
    calls: Box<[AtomicI64]>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

const NO_CALL: i64 = i64::MIN;

/// What one GPU's long calls have cost the others.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// How long they took, and how many there were, as of `at_ns`: each weighs less the longer ago it was.
    took_ns: f64,
    calls: f64,
    at_ns: i64,
    patience_ns: i64,
    /// When it came back last.
    back_ns: Option<i64>,
}

impl Cost {
    const NOTHING: Self = Self { took_ns: 0.0, calls: 0.0, at_ns: 0, patience_ns: PATIENCE_NS, back_ns: None };

    /// The same as of now.
    #[allow(clippy::cast_precision_loss, reason = "a duration in nanoseconds")]
    fn at(self, now_ns: i64) -> Self {
        let weight = (-(now_ns.saturating_sub(self.at_ns).max(0) as f64) / MEMORY_NS).exp();
        Self { took_ns: self.took_ns * weight, calls: self.calls * weight, at_ns: now_ns, ..self }
    }

    #[allow(clippy::cast_precision_loss, reason = "a duration in nanoseconds")]
    fn add(&mut self, took_ns: i64, now_ns: i64) {
        *self = self.at(now_ns);
        self.took_ns += took_ns as f64;
        self.calls += 1.0;
    }
}

impl Aside {
    /// The state for `gpus` GPUs, none of which is aside.
    pub fn new(gpus: usize) -> Self {
        let calls = (0..gpus).map(|_| AtomicI64::new(NO_CALL)).collect();
        let (costs, threads) = (Mutex::new(vec![Cost::NOTHING; gpus]), Mutex::default());
        Self { gpus: AtomicU64::new(0), costs, calls, threads }
    }

    /// The GPUs that are aside: bit n for position n.
    pub fn gpus(&self) -> u64 {
        self.gpus.load(Ordering::Acquire)
    }

    /// Whether the GPU at this position is aside.
    pub fn has(&self, position: usize) -> bool {
        has(self.gpus(), position)
    }

    /// Notes that the fast lane's call on a GPU took long. Returns whether it is set aside because of that; its thread must
    /// then be started.
    pub fn note_long(&self, position: usize, took_ns: i64, now_ns: i64, gpus: &[GpuState]) -> bool {
        let mut costs = self.costs();
        let Some(cost) = costs.get_mut(position) else { return false };
        cost.add(took_ns, now_ns);
        let cost = *cost;
        if cost.calls < LEAST_CALLS || cost.took_ns < LEAST_NS || position >= MOST_SKIPPED || self.has(position) {
            return false;
        }
        let is_other = |other: &usize| *other != position && gpus[*other].is_sampled() && !self.has(*other);
        let others = (0..costs.len().min(gpus.len())).filter(is_other);
        let of_others = others.map(|other| costs[other].at(now_ns).took_ns);
        // Without another GPU, none waits for this one: it is never set aside.
        let least_ns = of_others.min_by(f64::total_cmp).unwrap_or(f64::INFINITY);
        let is_slow = least_ns * FACTOR <= cost.took_ns;
        if is_slow {
            self.gpus.fetch_or(1 << position, Ordering::AcqRel);
        }
        is_slow
    }

    /// Notes that the thread of a GPU that is aside begins a call on it.
    pub fn begin_call(&self, position: usize, at_ns: i64) {
        self.calls[position].store(at_ns, Ordering::SeqCst);
    }

    /// Notes that it has returned.
    pub fn end_call(&self, position: usize) {
        self.calls[position].store(NO_CALL, Ordering::SeqCst);
    }

    /// Gives the GPU back to the fast lane, and forgets its long calls.
    pub fn end(&self, position: usize, now_ns: i64) {
        if let Some(cost) = self.costs().get_mut(position) {
            *cost = Cost { patience_ns: cost.patience_ns, back_ns: Some(now_ns), ..Cost::NOTHING };
        }
        self.gpus.fetch_and(!(1 << position), Ordering::AcqRel);
    }

    /// How long all calls on this GPU must be prompt before it comes back, nanoseconds. Each call of this function
    /// counts as one more time aside: the result is four times the last one, at most ten minutes, if the GPU came back
    /// less than an hour ago.
    pub fn start_patience_ns(&self, position: usize, now_ns: i64) -> i64 {
        let mut costs = self.costs();
        let Some(cost) = costs.get_mut(position) else { return PATIENCE_NS };
        let is_again = cost.back_ns.is_some_and(|back_ns| now_ns.saturating_sub(back_ns) < FORGET_NS);
        cost.patience_ns =
            if is_again { (cost.patience_ns * PATIENCE_FACTOR).min(MOST_PATIENCE_NS) } else { PATIENCE_NS };
        cost.patience_ns
    }

    /// When the call on a GPU that is aside began, if one is in progress, nanoseconds of the timeline.
    pub fn call_since_ns(&self, position: usize) -> Option<i64> {
        let since_ns = self.calls.get(position)?.load(Ordering::SeqCst);
        (since_ns != NO_CALL).then_some(since_ns)
    }

    /// Waits until every thread has ended.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A panic has ended the process.
            let _ = thread.join();
        }
    }

    /// Keeps the thread of a GPU.
    pub fn keep(&self, thread: JoinHandle<()>) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
    }

    fn costs(&self) -> MutexGuard<'_, Vec<Cost>> {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the bit of this position is set.
pub(super) fn has(gpus: u64, position: usize) -> bool {
    position < MOST_SKIPPED && gpus >> position & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::MILLISECOND_NS as MS;
    use highwater_core::gpu::{Device, Health};

    fn gpus(count: usize) -> Vec<GpuState> {
        (0..count).map(|_| GpuState::new(Device::default(), SECOND_NS, SECOND_NS)).collect()
    }

    /// Notes long calls, each of a GPU at a time with a duration, until one is set aside: which, and how many were noted.
    fn first_aside(count: usize, calls: impl Iterator<Item = (usize, i64, i64)>) -> Option<(usize, usize)> {
        let (aside, gpus) = (Aside::new(count), gpus(count));
        let mut calls = calls.take(10_000).enumerate();
        calls.find_map(|(n, (gpu, took_ns, at_ns))| aside.note_long(gpu, took_ns, at_ns, &gpus).then_some((gpu, n + 1)))
    }

    #[test]
    fn a_gpu_whose_calls_alone_take_long_is_set_aside() {
        let slow = |took_ms: i64, every_ms: i64| (1..).map(move |n: i64| (2, took_ms * MS, n * every_ms * MS));
        assert_eq!(first_aside(8, slow(300, 301)), Some((2, 9)));
        assert_eq!(first_aside(8, slow(5, 6)), Some((2, 21)), "a tenth of a second");
        assert!(first_aside(8, slow(2, 50)).is_some(), "an idle one");
        assert_eq!(first_aside(8, slow(40, 4_000)), None, "a hundredth of the time is allowed");
        assert_eq!(first_aside(1, slow(300, 301)), None, "nobody waits for it");
        assert_eq!(first_aside(100, (1..).map(|n| (99, 300 * MS, n * 301 * MS))), None, "there is no bit for it");
    }

    #[test]
    fn several_slow_ones_are_set_aside_as_long_as_one_is_not_slow() {
        let (aside, gpus) = (Aside::new(4), gpus(4));
        // The fourth is lost.
        gpus[3].lose("gone");
        let mut now_ns = 0;
        for _ in 0..100 {
            for gpu in [0, 2] {
                now_ns += 300 * MS;
                aside.note_long(gpu, 300 * MS, now_ns, &gpus);
            }
        }
        assert_eq!(aside.gpus(), 0b101);
        (0..100).for_each(|n| assert!(!aside.note_long(1, 300 * MS, now_ns + n * 300 * MS, &gpus), "the last one"));
    }

    #[test]
    fn a_driver_that_makes_every_call_wait_sets_nobody_aside() {
        // The GPU that waited is called last, so that the next one to wait is another.
        for count in [2, 3, 8] {
            let turns = (0..).map(move |n: i64| (n as usize % count, 40 * MS, n * 50 * MS));
            assert_eq!(first_aside(count, turns), None, "{count} GPUs");
        }
        // A machine without a free core: waits fall on either, up to three in a row.
        let starved = (0..).map(|n: i64| ([0, 0, 0, 1, 0, 1, 1, 1, 0, 1][n as usize % 10], 8 * MS, n * 30 * MS));
        assert_eq!(first_aside(2, starved), None);
    }

    #[test]
    fn what_was_long_ago_protects_no_slow_gpu() {
        // A minute in which every call waits, whichever it is; then one of two is slow.
        let waits = (0..1_200).map(|n: i64| (n as usize % 2, 40 * MS, n * 50 * MS));
        let slow = (0..).map(|n: i64| (1, 300 * MS, 60 * SECOND_NS + n * 301 * MS));
        let (gpu, calls) = first_aside(2, waits.chain(slow)).expect("it is");
        assert!(gpu == 1 && (1_210..1_270).contains(&calls), "after 20 s at most: {calls}");
    }

    #[test]
    fn who_comes_back_and_is_set_aside_again_stays_longer() {
        let aside = Aside::new(2);
        let mut stays_s = Vec::new();
        let mut now_ns = 0;
        for _ in 0..6 {
            stays_s.push(aside.start_patience_ns(0, now_ns) / SECOND_NS);
            now_ns += 10 * SECOND_NS;
            aside.end(0, now_ns);
        }
        assert_eq!(stays_s, [1, 4, 16, 64, 256, 600]);
        assert_eq!(aside.start_patience_ns(0, now_ns + FORGET_NS), PATIENCE_NS);
        assert_eq!(aside.start_patience_ns(1, now_ns), PATIENCE_NS);
    }

    #[test]
    fn a_gpu_that_hangs_aside_is_not_read_again() {
        let gpu = &gpus(1)[0];
        gpu.begin_fast_call();
        gpu.hang();
        assert_eq!(gpu.health(), Health::Hung);
        gpu.end_fast_call();
        assert!(gpu.health() == Health::Lost && !gpu.is_sampled(), "its thread ends, and the slower lanes try it");
    }
}
