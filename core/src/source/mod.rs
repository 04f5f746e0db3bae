//! The source of readings: GPUs behind one trait, whether real, simulated or recorded.
//!
//! Enters: a driver, a scenario or a recording. Leaves: readings, each with `None` for "not available here". Invariant:
//! no code above this module depends on NVML. Absent on purpose: everything derived (windows, rates, phases).

pub mod calls;
pub mod provenance;

pub use calls::{Call, CallStats};

use crate::gpu::{Device, Medium, Pcie, Process, Rare, Slow};
use crate::wire::Annotation;
use std::time::Duration;

/// Why a reading failed, grouped by what the caller can do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// This GPU or driver never supports this call: do not repeat it.
    #[error("not supported")]
    Unsupported,
    /// There is no reading of this GPU yet: keep asking.
    #[error("no reading of this GPU yet")]
    NotYet,
    /// The GPU is gone until it is [reacquired](Source::reacquire): stop reading it.
    #[error("GPU lost: {0}")]
    Lost(String),
    /// This one call failed: count it and continue.
    #[error("{0}")]
    Failed(String),
}

/// Why no source could be opened. The daemon logs it and retries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpenError {
    /// A short machine-readable reason: `library_missing`, `driver_mismatch`, `driver_not_loaded`, `no_gpus`, …
    pub reason: &'static str,
    /// A message for people, with how to fix it.
    pub message: String,
}

/// A GPU or MIG instance that the driver counts but that could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Its index, as in [`Device::index`].
    pub index: String,
    /// The driver's error message.
    pub reason: String,
}

/// An event reported by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverEvent {
    /// An XID error on the GPU at this position of [`Source::devices`].
    Xid {
        /// Position in [`Source::devices`].
        gpu: usize,
        /// NVIDIA's number of the error.
        xid: u64,
    },
}

/// When the memory of a source should be read next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTick {
    /// At the sampler's own period.
    Periodic,
    /// At exactly this time, because a recording changes then.
    At(i64),
    /// Never: the recording has ended.
    End,
}

/// The GPUs of one node. Every method may be called from several threads at once, and `gpu` is always a position in
/// [`devices`](Self::devices). `at_ns` is the time of the tick: the simulator and replays return the values of that
/// time; NVML uses it only for the time between two readings of PCIe bytes.
///
/// A value that a source does not provide is not available: that is the default of every method but the first three. By
/// default, a lost GPU counts as reacquired.
pub trait Source: Send + Sync {
    /// A description for people: `nvml 580.159.04`, `sim:demo`, `replay:PATH`, `replay:PATH of sim:demo`.
    fn description(&self) -> String;

    /// The GPUs and MIG instances, fixed for the life of the source.
    fn devices(&self) -> &[Device];

    /// Memory in use by everything but the driver's reserve, bytes. Called by the fast lane: must not allocate or wait.
    ///
    /// # Errors
    /// [`Error::NotYet`] before its first reading, [`Error::Lost`] for a GPU that is gone, [`Error::Failed`]
    /// for one bad reading.
    fn memory_used(&self, gpu: usize, at_ns: i64) -> Result<u64, Error>;

    /// The medium lane's readings; each call is timed into `calls`.
    fn medium(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Medium {
        let _ = (gpu, at_ns, calls);
        Medium::default()
    }

    /// The slow lane's readings; each call is timed into `calls`.
    fn slow(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Slow {
        let _ = (gpu, at_ns, calls);
        Slow::default()
    }

    /// Processes with a compute or graphics context; `None` if the driver does not report them, empty if there are
    /// none. Read separately and less often: beside a job on eight H200s the two calls take 2 ms a GPU.
    fn processes(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Option<Vec<Process>> {
        let _ = (gpu, at_ns, calls);
        None
    }

    /// Whether [`processes`](Self::processes) lists all processes that hold memory, including those of other
    /// containers.
    fn lists_all_processes(&self) -> bool {
        true
    }

    /// Whether a GPU whose memory can never be read is still present. All other GPUs show that by their memory reading.
    ///
    /// # Errors
    /// [`Error::Lost`] for a GPU that is gone; any other error means nothing.
    fn presence(&self, gpu: usize, calls: &CallStats) -> Result<(), Error> {
        let _ = (gpu, calls);
        Ok(())
    }

    /// Bytes over PCIe. Read separately and less often: a GPM sample takes 0.3 ms.
    fn pcie(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Pcie {
        let _ = (gpu, at_ns, calls);
        Pcie::default()
    }

    /// Readings that are too expensive for every turn of the slow lane; each call is timed into `calls`.
    fn rare(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Rare {
        let _ = (gpu, at_ns, calls);
        Rare::default()
    }

    /// Energy since the driver was loaded, joules. Read separately and rarely: the call holds the driver's lock for
    /// milliseconds, and every other call waits for it.
    fn energy_joules(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Option<f64> {
        let _ = (gpu, at_ns, calls);
        None
    }

    /// Devices that are present but could not be opened, except those that this process may not access. They stay out
    /// for the life of this source.
    fn skipped(&self) -> &[Skipped] {
        &[]
    }

    /// Whether new devices have appeared, or known MIG instances have been removed. If so, only a newly opened source
    /// is up to date. This queries the driver, so call it rarely.
    fn has_changed(&self, calls: &CallStats) -> bool {
        let _ = calls;
        false
    }

    /// Tries to get a lost GPU back.
    ///
    /// # Errors
    /// The same as [`memory_used`](Self::memory_used) while it is gone.
    fn reacquire(&self, gpu: usize) -> Result<(), Error> {
        let _ = gpu;
        Ok(())
    }

    /// Waits for the driver's next event, at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the source has no events at all: do not call again.
    fn wait_event(&self, timeout: Duration) -> Result<Option<DriverEvent>, Error> {
        let _ = timeout;
        Err(Error::Unsupported)
    }

    /// When to read next, after the tick at `after_ns`.
    fn next_tick(&self, after_ns: i64) -> NextTick {
        let _ = after_ns;
        NextTick::Periodic
    }

    /// Annotations of the source's own jobs, in order of time. Empty for real GPUs, whose jobs send their own.
    fn annotations(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        Box::new(std::iter::empty())
    }
}
