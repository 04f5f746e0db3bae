//! What the daemon reads: GPUs behind one trait, whether real, simulated or recorded.
//!
//! Enters: a driver, a scenario or a recording. Leaves: readings, each with `None` for "not available here".
//! Invariant: nothing above this module knows NVML. Absent on purpose: everything derived (windows, rates, phases).

pub mod calls;

pub use calls::{Call, CallStats};

use highwater_core::gpu::{Device, Medium, Pcie, Process, Rare, Slow};
use highwater_core::wire::Annotation;
use std::time::Duration;

/// Why a reading was not had, by what the caller can do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// This GPU or driver never answers this call: ask once and leave it.
    #[error("not supported")]
    Unsupported,
    /// There is nothing of this GPU yet: go on asking.
    #[error("there is nothing of this GPU yet")]
    NotYet,
    /// The GPU is gone until it is [reacquired](Source::reacquire): stop asking it.
    #[error("GPU lost: {0}")]
    Lost(String),
    /// This one call failed: count it and go on.
    #[error("{0}")]
    Failed(String),
}

/// Why there is no source at all; the daemon tells it and tries again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpenError {
    /// A short machine-readable reason: `library_missing`, `driver_mismatch`, `driver_not_loaded`, `no_gpus`, …
    pub reason: &'static str,
    /// What a person needs to know to mend it.
    pub message: String,
}

/// A GPU or MIG instance that the driver counts and that could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Its index, as [`Device::index`].
    pub index: String,
    /// What the driver said.
    pub reason: String,
}

/// What the driver reports by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
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
    /// At exactly this time: a recording changes then.
    At(i64),
    /// Never: the recording is over.
    End,
}

/// The GPUs of one node. Every method may be called from several threads at once, and `gpu` is always a position in
/// [`devices`](Self::devices). `at_ns` is the time of the tick: the simulator and a
/// replay answer for it, NVML takes from it only the time between two readings of PCIe bytes.
///
/// What a source does not tell of is not available: every method but the first three has that for its default, and
/// a GPU that was lost is back by default.
pub trait Source: Send + Sync {
    /// What is read, for people: `nvml 580.159.04`, `sim:demo`, `replay:PATH`.
    fn description(&self) -> String;

    /// The GPUs and MIG instances, fixed for the life of the source.
    fn devices(&self) -> &[Device];

    /// Memory in use by everything but the driver's reserve, bytes. Fast lane: no allocation, no waiting.
    ///
    /// # Errors
    /// [`Error::NotYet`] before its first reading, [`Error::Lost`] for a GPU that is gone, [`Error::Failed`] for one bad reading.
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

    /// Processes with a compute or graphics context; `None` where the driver will not say, empty where there are none.
    /// Asked for apart and more seldom: beside a job on eight H200s the two calls take 2 ms a GPU.
    fn processes(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Option<Vec<Process>> {
        let _ = (gpu, at_ns, calls);
        None
    }

    /// Whether [`processes`](Self::processes) tells of all that hold memory, those of other containers too.
    fn lists_all_processes(&self) -> bool {
        true
    }

    /// Whether a GPU whose memory is never to be had is still there. The memory of all others tells that.
    ///
    /// # Errors
    /// [`Error::Lost`] for a GPU that is gone; any other tells nothing.
    fn presence(&self, gpu: usize, calls: &CallStats) -> Result<(), Error> {
        let _ = (gpu, calls);
        Ok(())
    }

    /// Bytes over PCIe. Asked for apart and more seldom: a sample of GPM takes 0.3 ms.
    fn pcie(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Pcie {
        let _ = (gpu, at_ns, calls);
        Pcie::default()
    }

    /// What is too dear for every turn of the slow lane; each call is timed into `calls`.
    fn rare(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Rare {
        let _ = (gpu, at_ns, calls);
        Rare::default()
    }

    /// Energy since the driver was loaded, joules. Asked for apart from the others and seldom: the call holds the
    /// driver's lock for milliseconds, and every other call waits for it.
    fn energy_joules(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Option<f64> {
        let _ = (gpu, at_ns, calls);
        None
    }

    /// Devices that are there and could not be opened, but for those that this process is kept from. They stay out for the
    /// life of this source.
    fn skipped(&self) -> &[Skipped] {
        &[]
    }

    /// Whether devices are there that were not found, or MIG instances that were found were since taken away: then only
    /// a source that is opened anew tells the truth. Asks the driver, and is to be asked seldom.
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
    /// [`Error::Unsupported`] where there are no events at all: do not call again.
    fn wait_event(&self, timeout: Duration) -> Result<Option<Event>, Error> {
        let _ = timeout;
        Err(Error::Unsupported)
    }

    /// When to read next, after the tick at `after_ns`.
    fn next_tick(&self, after_ns: i64) -> NextTick {
        let _ = after_ns;
        NextTick::Periodic
    }

    /// What the source's own jobs say of their steps and phases, in order of time; empty for real GPUs, whose jobs
    /// speak for themselves.
    fn annotations(&self) -> Box<dyn Iterator<Item = Annotation> + Send> {
        Box::new(std::iter::empty())
    }
}
