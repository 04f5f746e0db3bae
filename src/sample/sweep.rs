//! One tick of the fast lane: read every GPU's memory, push it into its ring, count.

use super::latest::{GpuState, Health};
use crate::clock::Clock;
use crate::metrics::histogram::Histogram;
use crate::ring;
use crate::source::{Call, CallStats, Error, Source};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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

/// The sampler's account of itself. Every field is written by the sampling thread alone.
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
    /// The GPU that a call is being made for, plus one; 0 between calls. The watchdog reads it.
    in_call: AtomicUsize,
    /// When that call began, nanoseconds of the timeline.
    in_call_since_ns: AtomicI64,
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
            in_call: AtomicUsize::new(0),
            in_call_since_ns: AtomicI64::new(0),
        }
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

    /// The GPU whose call has been under way since before `before_ns`, if any.
    #[must_use]
    pub fn stuck_since(&self, before_ns: i64) -> Option<usize> {
        let gpu = self.in_call.load(Ordering::Acquire).checked_sub(1)?;
        (self.in_call_since_ns.load(Ordering::Acquire) < before_ns).then_some(gpu)
    }
}

/// One ring's writer with what is needed to see a gap coming.
struct Sink {
    writer: ring::Writer,
    last_good_ns: Option<i64>,
}

/// The writing ends of all rings. A sampling thread holds the lock only while it pushes what it has already read, so
/// that a thread that hangs in the driver holds nothing, and its successor can take over.
pub(super) struct Sinks {
    sinks: Vec<Sink>,
    /// Whose sweeps are taken: one that began under an older generation is discarded.
    generation: u64,
}

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
        let readings = Vec::with_capacity(sinks.len());
        let sinks = Arc::new(Mutex::new(Sinks { sinks, generation: 0 }));
        Self { source, clock, calls, stats, gpus, sinks, generation: 0, gap_after_ns: i64::MAX, readings }
    }

    /// From here on, a spacing of good readings of more than `gap_after_ns` is a gap.
    pub fn set_gap_after(&mut self, gap_after_ns: i64) {
        self.gap_after_ns = gap_after_ns;
    }

    /// The same sampler for another thread. From now on the sweeps of the one that called are discarded: it may hang
    /// in the driver for ever and come back at any time.
    #[must_use]
    pub fn successor(&self) -> Self {
        let generation = {
            let mut sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
            sinks.generation += 1;
            sinks.generation
        };
        self.stats.in_call.store(0, Ordering::Release);
        Self { generation, readings: Vec::with_capacity(self.gpus.len()), ..self.share() }
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
            readings: Vec::new(),
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

    /// Reads every GPU that is up and pushes what it read, telling `observe` each call's duration. Returns whether
    /// this sampler still is the one whose sweeps are taken.
    pub fn tick(&mut self, at_ns: i64, mut observe: impl FnMut(i64)) -> bool {
        self.read(at_ns, &mut observe);
        self.commit()
    }

    fn read(&mut self, at_ns: i64, observe: &mut impl FnMut(i64)) {
        self.readings.clear();
        let mut begin_ns = self.clock.now_ns();
        for (position, gpu) in self.gpus.iter().enumerate() {
            if gpu.health() != Health::Up {
                self.readings.push((begin_ns, None));
                continue;
            }
            self.stats.in_call_since_ns.store(begin_ns, Ordering::Relaxed);
            self.stats.in_call.store(position + 1, Ordering::Release);
            let answer = self.source.memory_used(position, at_ns);
            let end_ns = self.clock.now_ns();
            self.calls.observe_ns(Call::MemoryInfo, end_ns - begin_ns);
            observe(end_ns - begin_ns);
            let used_bytes = answer.map_err(|error| self.failed(gpu, &error)).ok();
            if gpu.health() == Health::Hung {
                // The call came back after all: the slow lane tries the GPU before it is sampled again.
                gpu.set_health(Health::Lost);
            }
            self.readings.push((end_ns, used_bytes));
            begin_ns = end_ns;
        }
        // A successor may have begun a call of its own by now; then its mark is not ours to clear.
        if self.is_current() {
            self.stats.in_call.store(0, Ordering::Release);
        }
    }

    fn failed(&self, gpu: &GpuState, error: &Error) {
        self.calls.fail(Call::MemoryInfo);
        if let Error::Lost(_) | Error::Unsupported = error {
            gpu.set_health(Health::Lost);
        }
    }

    fn is_current(&self) -> bool {
        self.sinks.lock().is_ok_and(|sinks| sinks.generation == self.generation)
    }

    fn commit(&mut self) -> bool {
        let mut sinks = self.sinks.lock().unwrap_or_else(PoisonError::into_inner);
        if sinks.generation != self.generation {
            return false;
        }
        for (sink, (at_ns, used_bytes)) in sinks.sinks.iter_mut().zip(&self.readings) {
            match used_bytes {
                Some(used_bytes) => sink.push(*at_ns, *used_bytes, self.gap_after_ns),
                None => sink.fail(),
            }
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
