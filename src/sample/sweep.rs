//! One tick of the fast lane: read every GPU's memory, push it into its ring, count.

use super::ticks::TickLog;
use crate::source::{Call, CallStats, Error, Source};
use highwater_core::clock::Clock;
use highwater_core::gpu::GpuState;
use highwater_core::histogram::Histogram;
use highwater_core::ring;
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

/// The sampler's account of itself, written by the sampling thread, and while that hangs in the driver by its watchdog.
#[derive(Debug)]
pub struct TickStats {
    /// Deadlines that passed.
    pub due: AtomicU64,
    /// Those at which memory was read.
    pub taken: AtomicU64,
    /// Those missed because the thread woke late.
    pub missed_late: AtomicU64,
    /// Those missed because the driver blocked.
    pub missed_driver: AtomicU64,
    /// The period in force, nanoseconds.
    pub period_ns: AtomicI64,
    /// How late ticks began.
    pub lateness: Histogram,
    /// When the last sweeps were, where someone wants to know.
    log: OnceLock<TickLog>,
    /// When the detectors last looked, likewise.
    turns: OnceLock<TickLog>,
    /// Until when deadlines are accounted for, nanoseconds of the timeline.
    pub(super) accounted_ns: AtomicI64,
    /// The call that is being made: its number, and in the lowest bits its GPU plus one; only the number between calls.
    /// The watchdog reads it.
    call: AtomicU64,
    /// When that call began, nanoseconds of the timeline.
    call_since_ns: AtomicI64,
    /// Whose sweeps are taken: a thread of an older generation has been replaced.
    generation: AtomicU64,
}

/// Bits of a call's mark that hold its GPU.
const GPU_BITS: u32 = 16;

/// A call that takes long.
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
            lateness: Histogram::new(LATENESS_BOUNDS_S),
            log: OnceLock::new(),
            turns: OnceLock::new(),
            accounted_ns: AtomicI64::new(0),
            call: AtomicU64::new(0),
            call_since_ns: AtomicI64::new(0),
            generation: AtomicU64::new(0),
        }
    }

    /// From now on the times of the last `sweeps` sweeps and of the last `turns` turns of the detectors are kept. Only the
    /// first call says how many.
    pub fn keep_log(&self, sweeps: usize, turns: usize) {
        // Refused where there is one already, which goes on.
        let _ = self.log.set(TickLog::new(sweeps));
        let _ = self.turns.set(TickLog::new(turns));
    }

    /// Notes that the detectors look now. Only the thread of the join may call this.
    pub fn note_turn(&self, now_ns: i64) {
        self.turns.get().into_iter().for_each(|turns| turns.note(now_ns, now_ns));
    }

    /// When the detectors last looked; `None` unless asked for.
    #[must_use]
    pub fn turns(&self) -> Option<&TickLog> {
        self.turns.get()
    }

    /// When the last sweeps were; `None` unless asked for.
    #[must_use]
    pub fn log(&self) -> Option<&TickLog> {
        self.log.get()
    }

    /// Counts deadlines missed for `cause`.
    pub fn miss(&self, cause: Cause, count: u64) {
        let counter = match cause {
            Cause::Late => &self.missed_late,
            Cause::Driver => &self.missed_driver,
        };
        counter.fetch_add(count, Ordering::Relaxed);
        self.due.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts one tick that was taken.
    pub fn take(&self, lateness_ns: i64) {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.due.fetch_add(1, Ordering::Relaxed);
        self.lateness.observe_ns(lateness_ns);
    }

    /// The call that has been under way since before `before_ns`, if any.
    pub(super) fn stuck_since(&self, before_ns: i64) -> Option<Stuck> {
        let mark = self.call.load(Ordering::SeqCst);
        let gpu = usize::try_from(mark & ((1 << GPU_BITS) - 1)).ok()?.checked_sub(1)?;
        let since_ns = self.call_since_ns.load(Ordering::SeqCst);
        (since_ns < before_ns).then_some(Stuck { mark, gpu, since_ns })
    }

    /// Whether this call still has not come back.
    pub(super) fn is_stuck(&self, stuck: Stuck) -> bool {
        self.call.load(Ordering::SeqCst) == stuck.mark
    }

    /// Notes the call that is being made.
    pub(super) fn begin_call(&self, gpu: usize, at_ns: i64) {
        self.call_since_ns.store(at_ns, Ordering::SeqCst);
        let number = (self.call.load(Ordering::Relaxed) >> GPU_BITS) + 1;
        self.call.store((number << GPU_BITS) | (gpu as u64 + 1), Ordering::SeqCst);
    }

    /// Notes that it has returned.
    pub(super) fn end_call(&self) {
        let number = self.call.load(Ordering::Relaxed) >> GPU_BITS;
        self.call.store(number << GPU_BITS, Ordering::SeqCst);
    }

    /// Counts the deadlines since the last accounted one as missed for `cause`: the thread that should have counted them
    /// hangs in the driver, or is not there.
    pub(super) fn account_missed(&self, now_ns: i64, cause: Cause) {
        let period_ns = self.period_ns.load(Ordering::Relaxed).max(1);
        let missed = (now_ns - self.accounted_ns.swap(now_ns, Ordering::Relaxed)) / period_ns;
        self.miss(cause, u64::try_from(missed).unwrap_or(0));
    }
}

/// What became of one tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ticked {
    /// Every GPU that is up was asked, but for those that are left alone.
    Taken,
    /// Every GPU that is up is left alone: the driver answers for none of them.
    Blocked,
    /// No GPU is up: nothing was due.
    Nothing,
    /// Another thread has taken over: this one must end.
    Replaced,
}

/// One ring's writer with what is needed to see a gap coming.
struct Sink {
    writer: ring::Writer,
    last_good_ns: Option<i64>,
}

/// The writing ends of all rings. A sampling thread holds the lock only while it pushes what it has already read, so
/// that a thread that hangs in the driver holds nothing, and its successor can take over.
type Sinks = Vec<Sink>;

/// A GPU that has given no good reading for this long does not answer, whatever it calls the reason.
const FAILING_NS: i64 = 2 * highwater_core::clock::SECOND_NS;

/// Reads all GPUs of one source, tick by tick.
pub struct Sampler {
    source: Arc<dyn Source>,
    clock: Arc<dyn Clock>,
    calls: Arc<CallStats>,
    stats: Arc<TickStats>,
    gpus: Arc<[GpuState]>,
    sinks: Arc<Mutex<Sinks>>,
    generation: u64,
    /// Spacing of good readings beyond which the time between is a gap, nanoseconds.
    gap_after_ns: i64,
    readings: Vec<(i64, Option<u64>)>,
    /// When the last sweep began, nanoseconds of the timeline.
    swept_ns: i64,
    /// Since when each GPU has given no good reading, nanoseconds of the timeline.
    failing_since_ns: Vec<Option<i64>>,
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
        let (readings, failing_since_ns) = (Vec::with_capacity(sinks.len()), vec![None; sinks.len()]);
        // A thread of the node before may still hang in the driver: what it writes when it comes back is discarded too.
        let (sinks, generation) = (Arc::new(Mutex::new(sinks)), stats.generation.fetch_add(1, Ordering::SeqCst) + 1);
        stats.end_call();
        let (gap_after_ns, swept_ns) = (i64::MAX, 0);
        Self {
            source,
            clock,
            calls,
            stats,
            gpus,
            sinks,
            generation,
            gap_after_ns,
            readings,
            swept_ns,
            failing_since_ns,
        }
    }

    /// From here on, a spacing of good readings of more than `gap_after_ns` is a gap.
    pub fn set_gap_after(&mut self, gap_after_ns: i64) {
        self.gap_after_ns = gap_after_ns;
    }

    /// The same sampler for another thread. From now on the sweeps of the one that called are discarded: it may hang
    /// in the driver for ever and come back at any time.
    #[must_use]
    pub fn successor(&self) -> Self {
        // Under the lock, so that no sweep of the old generation is half pushed.
        let sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.stats.generation.fetch_add(1, Ordering::SeqCst) + 1;
        drop(sinks);
        self.stats.end_call();
        Self { generation, ..self.share() }
    }

    /// The same sampler in the same generation, for the watchdog to make a successor of.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            source: Arc::clone(&self.source),
            clock: Arc::clone(&self.clock),
            calls: Arc::clone(&self.calls),
            stats: Arc::clone(&self.stats),
            gpus: Arc::clone(&self.gpus),
            sinks: Arc::clone(&self.sinks),
            generation: self.generation,
            gap_after_ns: self.gap_after_ns,
            readings: Vec::with_capacity(self.gpus.len()),
            swept_ns: 0,
            failing_since_ns: vec![None; self.gpus.len()],
        }
    }

    pub(super) fn stats(&self) -> &TickStats {
        &self.stats
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

    /// Reads every GPU that is up and pushes what it read, telling `observe` each call's duration.
    pub fn tick(&mut self, at_ns: i64, mut observe: impl FnMut(i64)) -> Ticked {
        match self.read(at_ns, &mut observe) {
            Ticked::Replaced => Ticked::Replaced,
            read => {
                if self.commit(read) {
                    read
                } else {
                    Ticked::Replaced
                }
            }
        }
    }

    fn read(&mut self, at_ns: i64, observe: &mut impl FnMut(i64)) -> Ticked {
        self.readings.clear();
        let mut ticked = Ticked::Nothing;
        let mut begin_ns = self.clock.now_ns();
        self.swept_ns = begin_ns;
        for position in 0..self.gpus.len() {
            let gpu = &self.gpus[position];
            if !gpu.is_sampled() || gpu.is_left_alone() {
                if gpu.is_sampled() && ticked == Ticked::Nothing {
                    ticked = Ticked::Blocked;
                }
                self.readings.push((begin_ns, None));
                continue;
            }
            ticked = Ticked::Taken;
            self.stats.begin_call(position, begin_ns);
            gpu.begin_fast_call();
            let answer = self.source.memory_used(position, at_ns);
            // A GPU whose call hung answers after all: it is tried again before it is sampled.
            gpu.end_fast_call();
            if !self.is_current() {
                return Ticked::Replaced;
            }
            self.stats.end_call();
            let end_ns = self.clock.now_ns();
            self.calls.observe_ns(Call::MemoryInfo, end_ns - begin_ns);
            observe(end_ns - begin_ns);
            self.note(position, answer, end_ns);
            begin_ns = end_ns;
        }
        ticked
    }

    fn note(&mut self, position: usize, answer: Result<u64, Error>, at_ns: i64) {
        let (gpu, failing_since_ns) = (&self.gpus[position], &mut self.failing_since_ns[position]);
        match &answer {
            Ok(_) => {
                *failing_since_ns = None;
                gpu.set_with_memory();
            }
            Err(Error::NotYet) => *failing_since_ns = None,
            // Believed of a GPU that has never answered. One that has, and says this now, is failing like any other.
            Err(Error::Unsupported) if !gpu.has_answered() => gpu.set_without_memory(),
            Err(error) => {
                self.calls.fail(Call::MemoryInfo);
                let since_ns = *failing_since_ns.get_or_insert(at_ns);
                if matches!(error, Error::Lost(_)) || at_ns - since_ns >= FAILING_NS {
                    *failing_since_ns = None;
                    gpu.lose(&error.to_string());
                }
            }
        }
        self.readings.push((at_ns, answer.ok()));
    }

    fn is_current(&self) -> bool {
        self.stats.generation.load(Ordering::SeqCst) == self.generation
    }

    /// Pushes what was read, unless another thread has taken over.
    fn commit(&mut self, ticked: Ticked) -> bool {
        let mut sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_current() {
            return false;
        }
        for (sink, (at_ns, used_bytes)) in sinks.iter_mut().zip(&self.readings) {
            match used_bytes {
                Some(used_bytes) => sink.push(*at_ns, *used_bytes, self.gap_after_ns),
                None => sink.fail(),
            }
        }
        // After the readings, so that whoever sees a sweep in the log finds its readings in the rings.
        if let (Ticked::Taken, Some(log), Some((end_ns, _))) = (ticked, self.stats.log(), self.readings.last()) {
            log.note(self.swept_ns, *end_ns);
        }
        true
    }
}

impl Sink {
    fn push(&mut self, at_ns: i64, used_bytes: u64, gap_after_ns: i64) {
        if self.last_good_ns.is_some_and(|last_ns| at_ns.saturating_sub(last_ns) > gap_after_ns) {
            self.fail();
        }
        // Refused only where a thread that hung reads a time before its successor's: that one is the newer truth.
        if self.writer.push(at_ns, used_bytes).is_ok() {
            self.last_good_ns = Some(at_ns);
        }
    }

    /// Nothing is known from the last good reading on.
    fn fail(&mut self) {
        if let Some(last_ns) = self.last_good_ns.take() {
            // Refused only for times out of range, of which there is no last good one.
            let _ = self.writer.gap(last_ns);
        }
    }
}
