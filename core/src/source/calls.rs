//! The cost of driver calls: a histogram per call, and the share of time spent inside the driver.

use crate::clock::SECOND_NS;
use crate::histogram::Histogram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

crate::labels! {
    /// The driver calls that the lanes make, with their labels in `highwater_nvml_call_duration_seconds`.
    #[allow(missing_docs, reason = "each is named after its call")]
    pub enum Call {
        MemoryInfo = "memory_info",
        Utilization = "utilization",
        Power = "power",
        Temperature = "temperature",
        SmClock = "sm_clock",
        MemoryClock = "memory_clock",
        ThrottleReasons = "throttle_reasons",
        MemoryInfoSlow = "memory_info_slow",
        Bar1 = "bar1",
        Limits = "limits",
        Energy = "energy",
        PcieCounters = "pcie_counters",
        Gpm = "gpm",
        NvlinkCounters = "nvlink_counters",
        NvlinkState = "nvlink_state",
        EccErrors = "ecc_errors",
        RemappedRows = "remapped_rows",
        RecoveryAction = "recovery_action",
        PcieLink = "pcie_link",
        Processes = "processes",
        Reacquire = "reacquire",
        Devices = "devices",
    }
}

/// Upper bounds of the call histogram, seconds: from a cached answer to a driver that blocks for a second. They are few,
/// because they are series of every node for each call: four times as many were most of an idle node's series, and of the
/// cost of its scrape. Native and exponential histograms are finer.
pub const BOUNDS_S: &[f64] =
    &[1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0];

/// Durations and failures of every call, written by the lanes and read by scrapes without locks. Only
/// [`busy_ratio`](Self::busy_ratio) takes one.
#[derive(Debug, Default)]
pub struct CallStats {
    counted: Arc<Counted>,
    /// Incremented when a call begins and when it returns: odd while a call is in progress.
    progress: AtomicU64,
    busy: Mutex<Busy>,
}

/// Time spent inside the driver over the last second.
#[derive(Debug, Default)]
struct Busy {
    since_ns: i64,
    busy_ns: u64,
    ratio: Option<f64>,
}

/// Durations and failures of every call so far.
#[derive(Debug)]
struct Counted {
    durations: [Histogram; Call::ALL.len()],
    failures: [AtomicU64; Call::ALL.len()],
}

impl Default for Counted {
    fn default() -> Self {
        Self {
            durations: std::array::from_fn(|_| Histogram::new(BOUNDS_S)),
            failures: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl CallStats {
    /// The same counts, for calls that one thread at a time makes, so that their
    /// [`progress`](Self::progress) can be watched.
    #[must_use]
    pub fn for_one_thread(&self) -> Self {
        Self { counted: Arc::clone(&self.counted), ..Self::default() }
    }

    /// A number that is odd while the thread that makes calls through this waits in the driver, and that changes with
    /// each call: while it stays at the same odd number, one call has not returned.
    #[must_use]
    pub fn progress(&self) -> u64 {
        self.progress.load(Ordering::SeqCst)
    }

    /// Makes one call and records its duration. Any error returns `None`, and counts as a failure unless it is
    /// [`Unsupported`](super::Error::Unsupported).
    pub fn time<T>(&self, call: Call, make: impl FnOnce() -> Result<T, super::Error>) -> Option<T> {
        self.time_all(call, make).ok()
    }

    /// The same, but also returns the error.
    ///
    /// # Errors
    /// Those of the call.
    pub fn time_all<T>(&self, call: Call, make: impl FnOnce() -> Result<T, super::Error>) -> Result<T, super::Error> {
        let begin = Instant::now();
        self.progress.fetch_add(1, Ordering::SeqCst);
        let answer = make();
        self.progress.fetch_add(1, Ordering::SeqCst);
        self.durations(call).observe_ns(i64::try_from(begin.elapsed().as_nanos()).unwrap_or(i64::MAX));
        if answer.as_ref().is_err_and(|error| *error != super::Error::Unsupported) {
            self.fail(call);
        }
        answer
    }

    /// Counts one failed call.
    pub fn fail(&self, call: Call) {
        self.counted.failures[call as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The durations of one call. A caller that times a call elsewhere counts it here.
    #[must_use]
    pub fn durations(&self, call: Call) -> &Histogram {
        &self.counted.durations[call as usize]
    }

    /// How often one call failed.
    #[must_use]
    pub fn failures(&self, call: Call) -> u64 {
        self.counted.failures[call as usize].load(Ordering::Relaxed)
    }

    /// Nanoseconds spent inside the driver since the start, by all lanes.
    #[must_use]
    pub fn busy_ns(&self) -> u64 {
        self.counted.durations.iter().map(Histogram::sum_ns).sum()
    }

    /// Share of wall time that all lanes together spent inside the driver, between the last two updates, which are at
    /// least a second apart. Above 1 if several lanes wait at once; `None` before the second update.
    #[must_use]
    pub fn busy_ratio(&self) -> Option<f64> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).ratio
    }

    /// Updates [`busy_ratio`](Self::busy_ratio); called several times a second.
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    pub fn advance(&self, now_ns: i64) {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed_ns = now_ns - busy.since_ns;
        if elapsed_ns < SECOND_NS {
            return;
        }
        let total_ns = self.busy_ns();
        let ratio = (total_ns - busy.busy_ns) as f64 / elapsed_ns as f64;
        // The first update has no previous one to compare with.
        let ratio = (busy.since_ns != 0).then_some(ratio);
        *busy = Busy { since_ns: now_ns, busy_ns: total_ns, ratio };
    }
}
