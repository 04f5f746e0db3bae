//! One tick of the fast lane: it reads the memory of every GPU that is due, pushes it into the rings, and counts the
//! tick.
//!
//! Enters: a source, and the time of the tick. Leaves: points in the rings, the log of sweeps, and counters of ticks.
//! Invariant: a sampler of an older generation pushes nothing. Absent on purpose: when ticks are due, which `fast` and
//! `deadlines` decide.

use super::aside::{self, Aside};
use super::deferred::DeferredDurations;
use super::idle::Idle;
use super::prefetch::Prefetch;
use super::ticks::{Sweep, TickLog};
use highwater_core::clock::Clock;
use highwater_core::gpu::GpuState;
use highwater_core::histogram::Histogram;
use highwater_core::ring;
use highwater_core::source::{Call, CallStats, Error, Source};
use std::ptr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Upper bounds of the lateness histogram, seconds.
pub const LATENESS_BOUNDS_S: &[f64] = &[2.5e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5];

/// Why a due tick was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The thread woke after the next deadline had passed.
    Late,
    /// The driver answered after the next deadline had passed.
    Driver,
}

impl Cause {
    /// The label value.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Cause::Late => "late",
            Cause::Driver => "driver_blocked",
        }
    }
}

/// Counters of the sampler, written by the sampling thread, or by its watchdog while that thread hangs in the driver. The fields
/// that each tick writes come first, in one cache line: after a sleep, the thread finds none of them in a cache.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct TickStats {
    /// Deadlines that passed.
    pub due: AtomicU64,
    /// Deadlines at which memory was read.
    pub taken: AtomicU64,
    /// The time up to which deadlines are accounted for, nanoseconds of the timeline.
    pub(super) accounted_ns: AtomicI64,
    /// The current call: its number, and in the lowest bits its GPU plus one; only the number between calls. The
    /// watchdog reads it.
    call: AtomicU64,
    /// When that call began, nanoseconds of the timeline.
    call_since_ns: AtomicI64,
    /// The generation whose sweeps are accepted: a thread of an older generation has been replaced.
    generation: AtomicU64,
    /// The times of the last sweeps, if enabled.
    log: OnceLock<TickLog>,
    /// The times of the detectors' last turns, if enabled.
    turns: OnceLock<TickLog>,
    /// Deadlines missed because the thread woke late.
    pub missed_late: AtomicU64,
    /// Deadlines missed because the driver blocked.
    pub missed_driver: AtomicU64,
    /// The time between ticks, nanoseconds: the full rate's period, or a longer one while all GPUs are idle.
    pub period_ns: AtomicI64,
    /// The period of the full rate, nanoseconds: the configured one, or a longer one while the fast lane backs off.
    pub full_period_ns: AtomicI64,
    /// How late ticks began. The last ones are not in it yet.
    pub lateness: Histogram,
}

/// Bits of a call's mark that hold its GPU.
const GPU_BITS: u32 = 16;

/// A call of the fast lane that has been in progress for long, as `stuck_since` found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stuck {
    mark: u64,
    /// Position of its GPU.
    pub gpu: usize,
    /// When it began, nanoseconds of the timeline.
    pub since_ns: i64,
}

impl TickStats {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(period_ns: i64) -> Self {
        Self {
            due: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            missed_late: AtomicU64::new(0),
            missed_driver: AtomicU64::new(0),
            period_ns: AtomicI64::new(period_ns),
            full_period_ns: AtomicI64::new(period_ns),
            lateness: Histogram::new(LATENESS_BOUNDS_S),
            log: OnceLock::new(),
            turns: OnceLock::new(),
            accounted_ns: AtomicI64::new(0),
            call: AtomicU64::new(0),
            call_since_ns: AtomicI64::new(0),
            generation: AtomicU64::new(0),
        }
    }

    /// Keeps the times of the last `sweeps` sweeps and of the last `turns` turns of the detectors from now on. Only the
    /// first call sets the sizes.
    pub fn keep_log(&self, sweeps: usize, turns: usize) {
        // Refused if a log exists, which continues.
        let _ = self.log.set(TickLog::new(sweeps));
        let _ = self.turns.set(TickLog::new(turns));
    }

    /// Records that the detectors run now. Only the thread of the join may call this.
    pub fn note_turn(&self, now_ns: i64) {
        let turn = Sweep { begin_ns: now_ns, end_ns: now_ns, skipped: 0 };
        self.turns.get().into_iter().for_each(|turns| turns.note(turn));
    }

    /// The times of the detectors' last turns; `None` unless enabled.
    #[must_use]
    pub fn turns(&self) -> Option<&TickLog> {
        self.turns.get()
    }

    /// The times of the last sweeps; `None` unless enabled.
    #[must_use]
    pub fn log(&self) -> Option<&TickLog> {
        self.log.get()
    }

    /// Counts deadlines missed for `cause`.
    pub fn miss(&self, cause: Cause, count: u64) {
        if count > 0 {
            self.miss_some(cause, count);
        }
    }

    #[cold]
    fn miss_some(&self, cause: Cause, count: u64) {
        let counter = match cause {
            Cause::Late => &self.missed_late,
            Cause::Driver => &self.missed_driver,
        };
        counter.fetch_add(count, Ordering::Relaxed);
        self.due.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts one tick that was taken.
    pub fn take(&self) {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.due.fetch_add(1, Ordering::Relaxed);
    }

    /// The call that has been in progress since before `before_ns`, if any.
    pub(super) fn stuck_since(&self, before_ns: i64) -> Option<Stuck> {
        let mark = self.call.load(Ordering::SeqCst);
        let gpu = usize::try_from(mark & ((1 << GPU_BITS) - 1)).ok()?.checked_sub(1)?;
        let since_ns = self.call_since_ns.load(Ordering::SeqCst);
        (since_ns < before_ns).then_some(Stuck { mark, gpu, since_ns })
    }

    /// Whether this call still has not returned.
    pub(super) fn is_stuck(&self, stuck: Stuck) -> bool {
        self.call.load(Ordering::SeqCst) == stuck.mark
    }

    /// Records the beginning of a call.
    pub(super) fn begin_call(&self, gpu: usize, at_ns: i64) {
        self.call_since_ns.store(at_ns, Ordering::SeqCst);
        let number = (self.call.load(Ordering::Relaxed) >> GPU_BITS) + 1;
        self.call.store((number << GPU_BITS) | (gpu as u64 + 1), Ordering::SeqCst);
    }

    /// Records that it has returned.
    pub(super) fn end_call(&self) {
        let number = self.call.load(Ordering::Relaxed) >> GPU_BITS;
        self.call.store(number << GPU_BITS, Ordering::SeqCst);
    }

    /// Counts the deadlines since the last accounted one as missed for `cause`: the thread that should have counted
    /// them hangs in the driver, or could not be started.
    pub(super) fn account_missed(&self, now_ns: i64, cause: Cause) {
        let period_ns = self.period_ns.load(Ordering::Relaxed).max(1);
        let missed = (now_ns - self.accounted_ns.swap(now_ns, Ordering::Relaxed)) / period_ns;
        self.miss(cause, u64::try_from(missed).unwrap_or(0));
    }
}

/// The result of one tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ticked {
    /// At least one GPU is up and not left alone, or is set aside. Those that were due in this sweep were read.
    Taken,
    /// Every GPU that is up is left alone, because a call on it has not returned or it is doubted.
    Blocked,
    /// No GPU is up: nothing was due.
    Nothing,
    /// Another thread has taken over: this one must end.
    Replaced,
}

/// What a sweep has of one GPU.
#[derive(Debug, Clone, Copy)]
enum Reading {
    /// It was not due, as it is idle.
    NotDue,
    /// The call failed, or none was made because the GPU is not up or is left alone. A gap begins.
    Failed,
    /// A thread of its own reads it.
    Aside,
    /// The bytes in use at `at_ns`, nanoseconds of the timeline. If the last good reading is more than `gap_after_ns` older,
    /// the time in between is a gap.
    Used { at_ns: i64, used_bytes: u64, gap_after_ns: i64 },
}

/// One ring's writer, with the state needed to detect a gap. The order of fields and the alignment put what a reading without a
/// change needs into one cache line.
#[repr(C, align(64))]
struct Sink {
    last_good_ns: Option<i64>,
    writer: ring::Writer,
}

/// The writing ends of all rings. A sampling thread holds the lock only while it pushes what it has already read, so
/// that a thread that hangs in the driver holds no lock, and its successor can take over.
type Sinks = Vec<Sink>;

/// Maximum time for which durations are deferred, nanoseconds. The next tick then counts them.
const LONGEST_HELD_NS: i64 = 50 * highwater_core::clock::MILLISECOND_NS;

/// Maximum half periods between two good readings without a gap: one lost tick is held over, two are a gap. After one lost
/// tick, readings are two periods apart, after two they are three apart, each with some jitter. The bound is in the middle.
const GAP_AFTER_HALF_PERIODS: i64 = 5;

/// A GPU without a good reading for this long counts as lost, whatever error it returns.
const FAILING_NS: i64 = 2 * highwater_core::clock::SECOND_NS;

/// Reads all GPUs of one source, tick by tick.
pub struct Sampler {
    source: Arc<dyn Source>,
    clock: Arc<dyn Clock>,
    calls: Arc<CallStats>,
    stats: Arc<TickStats>,
    gpus: Arc<[GpuState]>,
    sinks: Arc<Mutex<Sinks>>,
    aside: Arc<Aside>,
    /// The GPU that is read first, so that the one before it, whose call last took long, is read last.
    first: usize,
    /// The GPUs that were set aside since the last call of [`take_newly_aside`](Self::take_newly_aside): bit n for position n.
    newly_aside: u64,
    generation: u64,
    idle: Idle,
    readings: Box<[Reading]>,
    sweep: Sweep,
    /// Whether the last sweep found only idle GPUs.
    is_idle: bool,
    /// The beginning of each GPU's current run of failures, nanoseconds of the timeline.
    failing_since_ns: Box<[Option<i64>]>,
    prefetch: Prefetch,
    /// How long calls took.
    call_durations: DeferredDurations,
    /// How late ticks began.
    latenesses: DeferredDurations,
    /// The end of the last sweep before deferred durations were last counted, nanoseconds of the timeline.
    counted_ns: i64,
}

impl Sampler {
    /// A sampler that writes into `writers`, one for each device of the source.
    #[must_use]
    pub fn new(
        source: Arc<dyn Source>,
        clock: Arc<dyn Clock>,
        calls: Arc<CallStats>,
        stats: Arc<TickStats>,
        gpus: Arc<[GpuState]>,
        writers: Vec<ring::Writer>,
    ) -> Self {
        let sinks = writers.into_iter().map(|writer| Sink { writer, last_good_ns: None }).collect::<Vec<_>>();
        // A thread of the previous node may still hang in the driver: what it writes when it returns is discarded too.
        let (sinks, generation) = (Arc::new(Mutex::new(sinks)), stats.generation.fetch_add(1, Ordering::SeqCst) + 1);
        stats.end_call();
        let aside = Arc::new(Aside::new(gpus.len()));
        Self::begin(source, clock, calls, stats, gpus, (sinks, aside), generation)
    }

    /// One that has read nothing yet.
    fn begin(
        source: Arc<dyn Source>,
        clock: Arc<dyn Clock>,
        calls: Arc<CallStats>,
        stats: Arc<TickStats>,
        gpus: Arc<[GpuState]>,
        (sinks, aside): (Arc<Mutex<Sinks>>, Arc<Aside>),
        generation: u64,
    ) -> Self {
        let count = gpus.len();
        let idle = Idle::new(count);
        let readings: Box<[Reading]> = vec![Reading::NotDue; count].into();
        let failing_since_ns: Box<[Option<i64>]> = vec![None; count].into();
        let mut prefetch = Prefetch::default();
        prefetch.add([Arc::as_ptr(&sinks)]);
        prefetch.add(gpus.iter().map(GpuState::fast_place));
        prefetch.add(idle.places());
        prefetch.add(readings.iter().map(ptr::from_ref));
        prefetch.add(failing_since_ns.iter().map(ptr::from_ref));
        let held = sinks.lock().unwrap_or_else(PoisonError::into_inner);
        prefetch.add(held.iter().map(ptr::from_ref));
        prefetch.add(held.iter().map(|sink| sink.writer.newest_place()));
        drop(held);
        Self {
            source,
            clock,
            calls,
            stats,
            gpus,
            sinks,
            aside,
            first: 0,
            newly_aside: 0,
            generation,
            idle,
            readings,
            sweep: Sweep::default(),
            is_idle: false,
            failing_since_ns,
            prefetch,
            call_durations: DeferredDurations::new(count),
            latenesses: DeferredDurations::new(1),
            counted_ns: 0,
        }
    }

    /// Sets the period of idle GPUs, `None` for the full rate, and the period of the full rate, nanoseconds. Without this
    /// call all GPUs are read in every tick, and no time between two readings is a gap.
    pub fn set_periods(&mut self, idle_ns: Option<i64>, full_ns: i64) {
        self.idle.set_periods(idle_ns, full_ns);
        self.publish_periods();
    }

    /// Sets the period of the full rate, nanoseconds.
    pub(super) fn set_full(&mut self, full_ns: i64) {
        self.idle.set_full(full_ns);
        self.publish_periods();
    }

    fn publish_periods(&self) {
        let aside = self.aside.gpus();
        let own = (0..self.gpus.len()).filter(|position| !aside::has(aside, *position));
        own.for_each(|position| self.publish_period(position));
    }

    #[cold]
    fn publish_period(&self, position: usize) {
        self.gpus[position].set_sampling_period_ns(self.idle.period_ns(position), self.idle.is_idle(position));
    }

    /// The time until the next tick is due, nanoseconds: the shortest period of the GPUs that the last sweep found up.
    pub(super) fn period_ns(&self) -> i64 {
        if self.is_idle { self.idle.period_ns_of_idle() } else { self.idle.full_ns() }
    }

    /// The same sampler for another thread. From now on the sweeps of the caller's generation are discarded: its thread
    /// may hang in the driver forever, or return at any time.
    #[must_use]
    pub fn successor(&self) -> Self {
        // Under the lock, so that no sweep of the old generation is half pushed.
        let sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.stats.generation.fetch_add(1, Ordering::SeqCst) + 1;
        drop(sinks);
        self.stats.end_call();
        Self { generation, ..self.share() }
    }

    /// The same sampler in the same generation, from which the watchdog can make a successor.
    #[must_use]
    pub fn share(&self) -> Self {
        Self::begin(
            Arc::clone(&self.source),
            Arc::clone(&self.clock),
            Arc::clone(&self.calls),
            Arc::clone(&self.stats),
            Arc::clone(&self.gpus),
            (Arc::clone(&self.sinks), Arc::clone(&self.aside)),
            self.generation,
        )
    }

    pub(super) fn aside(&self) -> &Arc<Aside> {
        &self.aside
    }

    /// Whether a GPU was set aside since the last call of [`take_newly_aside`](Self::take_newly_aside).
    pub(super) fn has_newly_aside(&self) -> bool {
        self.newly_aside != 0
    }

    /// The GPUs that were set aside since the last call: each needs a thread.
    pub(super) fn take_newly_aside(&mut self) -> u64 {
        std::mem::take(&mut self.newly_aside)
    }

    pub(super) fn stats(&self) -> &TickStats {
        &self.stats
    }

    /// When the last call of the last tick returned, nanoseconds of the timeline.
    pub(super) fn end_ns(&self) -> i64 {
        self.sweep.end_ns
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    pub(super) fn gpus(&self) -> &[GpuState] {
        &self.gpus
    }

    pub(super) fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// Reads every GPU that is up and due, and pushes the readings. `at_ns` is the current time; the clock is read only after
    /// each call. Once 64 durations are deferred, or after 50 ms, counts them and calls `observe` with each call's duration.
    pub fn tick(&mut self, at_ns: i64, observe: impl FnMut(i64)) -> Ticked {
        let read = self.read(at_ns);
        if read == Ticked::Replaced || !self.commit(read) {
            return Ticked::Replaced;
        }
        if self.has_to_count() {
            self.count_held(observe);
        }
        read
    }

    fn read(&mut self, at_ns: i64) -> Ticked {
        self.prefetch.issue();
        self.call_durations.prefetch();
        self.latenesses.prefetch();
        if let Some(log) = self.stats.log() {
            log.prefetch();
        }
        let (mut busy, mut ticked, mut begin_ns) = (0, Ticked::Nothing, at_ns);
        self.sweep = Sweep { begin_ns, end_ns: begin_ns, skipped: 0 };
        let (aside, gpus) = (self.aside.gpus(), self.gpus.len());
        let mut next = self.first;
        for _ in 0..gpus {
            let position = next;
            next = if position + 1 < gpus { position + 1 } else { 0 };
            if aside != 0 && aside::has(aside, position) {
                // Its own thread pushes its readings, at their own times. It counts as read and as busy in every sweep.
                (ticked, busy) = (Ticked::Taken, busy + 1);
                self.readings[position] = Reading::Aside;
                continue;
            }
            let gpu = &self.gpus[position];
            if !gpu.is_sampled() || gpu.is_left_alone() {
                if gpu.is_sampled() && ticked == Ticked::Nothing {
                    ticked = Ticked::Blocked;
                }
                self.readings[position] = Reading::Failed;
                continue;
            }
            ticked = Ticked::Taken;
            if !self.idle.is_due(position, at_ns) {
                self.readings[position] = Reading::NotDue;
                self.sweep.skip(position);
                continue;
            }
            self.stats.begin_call(position, begin_ns);
            gpu.begin_fast_call();
            let answer = self.source.memory_used(position, at_ns);
            // A GPU that counted as hung is lost from here on: the slow lane must get it back before it is sampled again.
            gpu.end_fast_call();
            let end_ns = self.clock.now_ns();
            if end_ns - begin_ns > aside::LONG_NS {
                self.note_long(position, end_ns - begin_ns, end_ns);
            }
            if !self.is_current() {
                return Ticked::Replaced;
            }
            self.stats.end_call();
            self.call_durations.add(end_ns - begin_ns);
            busy += usize::from(self.note(position, answer, at_ns, end_ns));
            self.sweep.end_ns = end_ns;
            begin_ns = end_ns;
        }
        // A GPU that is left alone does not count as busy. Once it answers, the next tick reads it, at most an idle period later.
        self.is_idle = ticked == Ticked::Taken && busy == 0;
        ticked
    }

    /// Notes that a call took so long that other GPUs waited.
    #[cold]
    fn note_long(&mut self, position: usize, took_ns: i64, now_ns: i64) {
        self.first = (position + 1) % self.gpus.len();
        if self.aside.note_long(position, took_ns, now_ns, &self.gpus) {
            self.newly_aside |= 1 << position;
        }
    }

    /// Reads a GPU that is set aside. Its own thread calls this, regardless of the generation. `idle_ns` is the period of an idle
    /// GPU. The period is at least `usual_ns`, which is 0 unless all its calls take long. Returns the period in force.
    /// All in nanoseconds.
    pub(super) fn tick_aside(&mut self, position: usize, at_ns: i64, idle_ns: Option<i64>, usual_ns: i64) -> i64 {
        let full_ns = self.stats.full_period_ns.load(Ordering::Relaxed).max(usual_ns);
        self.idle.set_periods(idle_ns, full_ns);
        let gpu = &self.gpus[position];
        self.aside.begin_call(position, at_ns);
        gpu.begin_fast_call();
        let answer = self.source.memory_used(position, at_ns);
        gpu.end_fast_call();
        self.aside.end_call(position);
        let end_ns = self.clock.now_ns();
        self.call_durations.add(end_ns - at_ns);
        self.sweep.end_ns = end_ns;
        self.note(position, answer, at_ns, end_ns);
        self.publish_period(position);
        let mut sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
        sinks[position].take(self.readings[position]);
        drop(sinks);
        if self.has_to_count() {
            self.count_held(|_| ());
        }
        self.idle.period_ns(position)
    }

    /// Counts the deferred durations and gives a GPU that is aside back to the fast lane. Its thread calls this last.
    pub(super) fn end_aside(&mut self, position: usize) {
        self.count_held(|_| ());
        self.idle.set_full(self.stats.full_period_ns.load(Ordering::Relaxed));
        self.publish_period(position);
        self.aside.end(position, self.clock.now_ns());
    }

    /// Notes a GPU's answer to a sweep that began at `due_ns`. Returns whether the GPU is busy.
    fn note(&mut self, position: usize, answer: Result<u64, Error>, due_ns: i64, at_ns: i64) -> bool {
        let used_bytes = match answer {
            Ok(used_bytes) => {
                self.failing_since_ns[position] = None;
                self.gpus[position].set_with_memory();
                Some(used_bytes)
            }
            Err(error) => {
                self.fail(position, &error, at_ns);
                None
            }
        };
        // The time since the reading before is judged by the period that was in force during it.
        let gap_after_ns = self.idle.period_ns(position).saturating_mul(GAP_AFTER_HALF_PERIODS) / 2;
        if self.idle.note(position, &self.gpus[position], due_ns, used_bytes) {
            self.publish_period(position);
        }
        self.readings[position] = match used_bytes {
            Some(used_bytes) => Reading::Used { at_ns, used_bytes, gap_after_ns },
            None => Reading::Failed,
        };
        !self.idle.is_idle(position)
    }

    /// Notes a GPU's error.
    #[cold]
    fn fail(&mut self, position: usize, error: &Error, at_ns: i64) {
        let (gpu, failing_since_ns) = (&self.gpus[position], &mut self.failing_since_ns[position]);
        match error {
            Error::NotYet => *failing_since_ns = None,
            // Accepted only from a GPU that has never answered. Any other GPU that returns this is failing.
            Error::Unsupported if !gpu.has_answered() => gpu.set_without_memory(),
            error => {
                self.calls.fail(Call::MemoryInfo);
                let since_ns = *failing_since_ns.get_or_insert(at_ns);
                if matches!(error, Error::Lost(_)) || at_ns - since_ns >= FAILING_NS {
                    *failing_since_ns = None;
                    gpu.lose(&error.to_string());
                }
            }
        }
    }

    /// Counts one tick that was taken, and how late it began.
    pub(super) fn count(&mut self, lateness_ns: i64) {
        self.stats.take();
        self.latenesses.add(lateness_ns);
    }

    /// Whether durations have waited long enough to be counted.
    fn has_to_count(&self) -> bool {
        self.call_durations.are_many()
            || self.latenesses.are_many()
            || self.sweep.end_ns - self.counted_ns >= LONGEST_HELD_NS
    }

    /// Counts all deferred durations, and calls `observe` with each call's duration.
    #[cold]
    pub(super) fn count_held(&mut self, observe: impl FnMut(i64)) {
        self.counted_ns = self.sweep.end_ns;
        self.call_durations.count_all(self.calls.durations(Call::MemoryInfo), observe);
        self.latenesses.count_all(&self.stats.lateness, |_| ());
    }

    fn is_current(&self) -> bool {
        self.stats.generation.load(Ordering::SeqCst) == self.generation
    }

    /// Pushes the readings, unless another thread has taken over.
    fn commit(&mut self, ticked: Ticked) -> bool {
        let mut sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_current() {
            return false;
        }
        sinks.iter_mut().zip(&*self.readings).for_each(|(sink, reading)| sink.take(*reading));
        // After the readings, so that a reader that sees a sweep in the log finds its readings in the rings.
        if let (Ticked::Taken, Some(log)) = (ticked, self.stats.log()) {
            log.note(self.sweep);
        }
        true
    }
}

impl Sink {
    #[inline]
    fn take(&mut self, reading: Reading) {
        match reading {
            Reading::Used { at_ns, used_bytes, gap_after_ns } => self.push(at_ns, used_bytes, gap_after_ns),
            Reading::Failed => self.fail(),
            Reading::NotDue | Reading::Aside => {}
        }
    }

    fn push(&mut self, at_ns: i64, used_bytes: u64, gap_after_ns: i64) {
        if self.last_good_ns.is_some_and(|last_ns| at_ns.saturating_sub(last_ns) > gap_after_ns) {
            self.fail();
        }
        // Refused only if another thread has already pushed a newer reading of this GPU.
        if self.writer.push(at_ns, used_bytes).is_ok() {
            self.last_good_ns = Some(at_ns);
        }
    }

    /// Marks everything after the last good reading as unknown.
    #[cold]
    fn fail(&mut self) {
        if let Some(last_ns) = self.last_good_ns.take() {
            // Refused only for times out of range, which a last good reading never has.
            let _ = self.writer.gap(last_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Node, Periods};
    use highwater_core::clock::{MILLISECOND_NS as MS, Manual, SECOND_NS};
    use highwater_core::gpu::Device;
    use highwater_core::source::Source;
    use std::sync::atomic::AtomicUsize;

    /// Answers with what was set.
    struct Scripted {
        devices: Vec<Device>,
        answers: Vec<Mutex<Result<u64, Error>>>,
        /// A GPU whose calls take 300 ms.
        slow: AtomicUsize,
        clock: Arc<Manual>,
    }

    impl Source for Scripted {
        fn description(&self) -> String {
            "a driver with set answers".to_owned()
        }

        fn devices(&self) -> &[Device] {
            &self.devices
        }

        fn memory_used(&self, gpu: usize, _at_ns: i64) -> Result<u64, Error> {
            if self.slow.load(Ordering::Relaxed) == gpu {
                self.clock.advance_to(self.clock.now_ns() + 300 * MS);
            }
            self.answers[gpu].lock().expect("whole").clone()
        }
    }

    /// A sampler at 1 ms, at 100 ms for idle GPUs, and what it writes to.
    struct Rig {
        clock: Arc<Manual>,
        source: Arc<Scripted>,
        node: Node,
        sampler: Sampler,
    }

    impl Rig {
        fn new(gpus: usize) -> Self {
            let devices = (0..gpus).map(|gpu| Device { uuid: format!("GPU-{gpu}"), ..Device::default() }).collect();
            let answers = (0..gpus).map(|_| Mutex::new(Ok(0))).collect();
            let (clock, slow) = (Arc::new(Manual::at(SECOND_NS)), AtomicUsize::new(usize::MAX));
            let source = Arc::new(Scripted { devices, answers, slow, clock: Arc::clone(&clock) });
            let config = ring::Config { retention_ns: 60 * SECOND_NS, max_bytes: 1 << 16, resolution_ns: 1_000 };
            let periods = Periods::default();
            let (node, writers) =
                Node::new(Arc::clone(&source) as _, Arc::clone(&clock) as _, config, periods, None).expect("rings");
            let mut sampler = node.sampler(writers);
            sampler.set_periods(Some(100 * MS), MS);
            Self { clock, source, node, sampler }
        }

        fn answer(&self, gpu: usize, answer: Result<u64, Error>) {
            *self.source.answers[gpu].lock().expect("whole") = answer;
        }

        fn tick_after(&mut self, wait_ns: i64) -> Ticked {
            self.clock.advance_to(self.clock.now_ns() + wait_ns);
            self.sampler.tick(self.clock.now_ns(), |_| ())
        }

        /// Ticks at 1 ms.
        fn run(&mut self, for_ns: i64) {
            (0..for_ns / MS).for_each(|_| assert_eq!(self.tick_after(MS), Ticked::Taken));
        }

        /// The last reading.
        fn newest(&self, gpu: usize) -> (i64, Option<u64>) {
            let newest_ns = self.node.rings[gpu].newest_ns().expect("read");
            (newest_ns, self.node.rings[gpu].at(newest_ns).expect("kept"))
        }

        /// The time in gaps since `from_ns`.
        fn gap_ns(&self, gpu: usize, from_ns: i64) -> i64 {
            let ring = &self.node.rings[gpu];
            ring.summary(from_ns, ring.newest_ns().expect("read")).expect("kept").gap_ns
        }
    }

    #[test]
    fn a_gpu_whose_calls_take_long_is_passed_over_until_it_comes_back() {
        let mut rig = Rig::new(3);
        rig.run(10 * MS);
        rig.answer(1, Ok(7));
        rig.source.slow.store(1, Ordering::Relaxed);
        let mut ticks = 0;
        while !rig.sampler.has_newly_aside() {
            assert_eq!(rig.tick_after(MS), Ticked::Taken);
            ticks += 1;
            assert!(ticks < 10 && rig.sampler.first == 2, "it is read last");
        }
        assert_eq!((rig.sampler.take_newly_aside(), ticks), (0b10, 9));
        rig.run(MS);
        let (newest, begin_ns) = (rig.newest(1), rig.clock.now_ns());
        rig.run(100 * MS);
        assert!(rig.newest(1) == newest && rig.gap_ns(0, begin_ns) == 0);
        // Its own thread reads it, and the others go on.
        let mut own = rig.sampler.share();
        rig.answer(1, Ok(9));
        let begin_ns = rig.clock.now_ns();
        assert_eq!(own.tick_aside(1, begin_ns, Some(100 * MS), 0), MS);
        assert_eq!(own.tick_aside(1, begin_ns, Some(100 * MS), 600 * MS), 600 * MS);
        assert_eq!(rig.node.gpus[1].sampling_period_ns(), Some(600 * MS));
        rig.sampler.set_periods(Some(100 * MS), MS);
        assert_eq!(rig.node.gpus[1].sampling_period_ns(), Some(600 * MS), "the lane says nothing of it");
        assert_eq!((rig.newest(1), rig.node.gpus[1].is_in_fast_call()), ((begin_ns + 600 * MS, Some(9)), false));
        rig.source.slow.store(usize::MAX, Ordering::Relaxed);
        own.end_aside(1);
        assert_eq!(rig.node.gpus[1].sampling_period_ns(), Some(MS));
        rig.answer(1, Ok(11));
        rig.run(10 * MS);
        assert_eq!(rig.newest(1), (rig.clock.now_ns(), Some(11)));
    }

    #[test]
    fn a_thread_that_was_replaced_reports_the_call_that_it_waited_for() {
        let mut rig = Rig::new(2);
        rig.source.slow.store(0, Ordering::Relaxed);
        for _ in 0..9 {
            let mut replaced = rig.sampler.share();
            rig.sampler = rig.sampler.successor();
            assert!(rig.sampler.take_newly_aside() == 0 && replaced.aside().gpus() == 0);
            assert_eq!(replaced.tick(rig.clock.now_ns(), |_| ()), Ticked::Replaced);
        }
        assert_eq!(rig.sampler.aside().gpus(), 1);
        assert_eq!(rig.tick_after(MS), Ticked::Taken);
    }

    #[test]
    fn one_lost_tick_is_held_over_and_two_are_a_gap_whatever_the_jitter() {
        const JITTER_NS: i64 = MS / 4;
        for jitter_ns in [-JITTER_NS, 0, JITTER_NS] {
            let mut rig = Rig::new(1);
            rig.run(2 * MS);
            let begin_ns = rig.clock.now_ns();
            rig.tick_after(2 * MS + jitter_ns);
            assert_eq!(rig.gap_ns(0, begin_ns), 0, "one lost tick, {jitter_ns} ns late");
            rig.tick_after(3 * MS + jitter_ns);
            assert_eq!(rig.gap_ns(0, begin_ns), 3 * MS + jitter_ns, "two lost ticks, {jitter_ns} ns late");
        }
    }

    #[test]
    fn a_gpu_that_is_left_alone_has_a_gap_at_once() {
        let mut rig = Rig::new(2);
        rig.run(2 * MS);
        let begin_ns = rig.clock.now_ns();
        rig.node.gpus[1].doubt();
        assert_eq!(rig.tick_after(MS), Ticked::Taken, "the other is read");
        rig.node.gpus[1].end_doubt();
        rig.tick_after(MS);
        assert_eq!([0, 1].map(|gpu| rig.gap_ns(gpu, begin_ns)), [0, 2 * MS]);
    }

    #[test]
    fn a_gpu_is_lost_after_two_seconds_of_failures_in_a_row() {
        let mut rig = Rig::new(1);
        for _ in 0..3 {
            rig.answer(0, Ok(0));
            rig.run(MS);
            rig.answer(0, Err(Error::Failed("code 999".to_owned())));
            rig.run(FAILING_NS - MS);
            assert!(rig.node.gpus[0].is_sampled(), "one answer begins a new count");
        }
        rig.run(2 * MS);
        assert!(!rig.node.gpus[0].is_sampled());
    }

    #[test]
    fn ticks_are_due_seldom_while_all_gpus_are_idle() {
        let mut rig = Rig::new(2);
        let now_ns = |rig: &Rig| rig.clock.now_ns();
        rig.run(MS);
        rig.clock.advance_to(now_ns(&rig) + MS);
        rig.node.gpus.iter().for_each(|gpu| _ = gpu.set_processes(now_ns(&rig), Some(vec![])));
        assert_eq!(rig.sampler.period_ns(), MS);
        rig.run(2 * SECOND_NS);
        assert_eq!(rig.sampler.period_ns(), 100 * MS);
        rig.answer(1, Ok(1 << 30));
        rig.tick_after(100 * MS);
        assert_eq!(rig.sampler.period_ns(), MS, "one GPU at work is enough");
        let periods = rig.node.gpus.iter().map(GpuState::sampling_period_ns).collect::<Vec<_>>();
        assert_eq!(periods, [Some(100 * MS), Some(MS)]);
    }

    #[test]
    fn latenesses_are_counted_without_calls_too() {
        let mut rig = Rig::new(0);
        for _ in 0..200 {
            rig.sampler.count(1_000);
            rig.sampler.tick(0, |_| ());
        }
        let counted = rig.node.ticks.lateness.counts().cumulative;
        assert_eq!(counted.last(), Some(&192));
    }
}
