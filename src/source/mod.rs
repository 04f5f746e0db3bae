//! What the daemon reads: GPUs behind one trait, whether real, simulated or recorded.
//!
//! Enters: a driver, a scenario or a recording. Leaves: readings, each with `None` for "not available here".
//! Invariant: nothing above this module knows NVML. Absent on purpose: everything derived (windows, rates, phases).

pub mod calls;

pub use calls::{Call, CallStats};

use crate::annotate::wire::Annotation;
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

/// One GPU or MIG instance, as it was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// The index that `nvidia-smi` shows; `gpu:instance` for a MIG instance.
    pub index: String,
    /// NVML's UUID, with its `GPU-` or `MIG-` prefix.
    pub uuid: String,
    /// Product name.
    pub name: Option<String>,
    /// PCI bus id, as `00000000:1B:00.0`.
    pub pci_bus_id: Option<String>,
    /// The GPU that a MIG instance is part of.
    pub parent_uuid: Option<String>,
    /// MIG profile, as `1g.18gb`.
    pub mig_profile: Option<String>,
    /// Driver version.
    pub driver_version: Option<String>,
    /// Framebuffer, bytes.
    pub memory_total_bytes: Option<u64>,
    /// The part of it that the driver keeps for itself, bytes. `memory_used` does not count it.
    pub memory_reserved_bytes: Option<u64>,
}

impl Device {
    /// The bytes that jobs can have: total less what the driver reserves; `None` where the total is not known.
    #[must_use]
    pub fn usable_bytes(&self) -> Option<u64> {
        Some(self.memory_total_bytes? - self.memory_reserved_bytes.unwrap_or(0).min(self.memory_total_bytes?))
    }
}

/// The medium lane's readings of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Medium {
    /// Share of the driver's last window in which a kernel ran, 0 to 1.
    pub utilization_ratio: Option<f64>,
    /// Share of that window in which device memory was read or written, 0 to 1.
    pub memory_utilization_ratio: Option<f64>,
    /// Instant power draw, watts.
    pub power_watts: Option<f64>,
    /// Core temperature, degrees Celsius.
    pub temperature_celsius: Option<f64>,
    /// Streaming multiprocessors' clock, hertz.
    pub sm_clock_hertz: Option<f64>,
    /// Memory clock, hertz.
    pub memory_clock_hertz: Option<f64>,
    /// Bits of [`THROTTLE_REASONS`].
    pub throttle_reasons: Option<u64>,
}

/// Clock event reasons that slow a GPU down, by their bit in NVML's mask. Idle and application clocks settings are
/// left out: they are no trouble.
pub const THROTTLE_REASONS: &[(u64, &str)] = &[
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
];

/// The slow lane's readings of one GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Slow {
    /// Corrected ECC errors since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    /// Rows remapped because of corrected errors.
    pub remapped_rows_corrected: Option<u64>,
    /// Rows remapped because of uncorrected errors.
    pub remapped_rows_uncorrected: Option<u64>,
}

/// What one GPU has moved over PCIe: since the driver was loaded by its own counter, or since the source was opened as a
/// sum of rates times time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pcie {
    /// Bytes received by the GPU.
    pub received_bytes: Option<u64>,
    /// Bytes sent by the GPU.
    pub transmitted_bytes: Option<u64>,
}

/// What hardly changes, and what is dearest of all that is read again and again: on an H200 these calls take 3 ms
/// together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rare {
    /// Framebuffer, bytes.
    pub memory_total_bytes: Option<u64>,
    /// The driver's own part of it, bytes.
    pub memory_reserved_bytes: Option<u64>,
    /// BAR1 aperture in use, bytes.
    pub bar1_used_bytes: Option<u64>,
    /// NVLink payload bytes received, all links.
    pub nvlink_received_bytes: Option<u64>,
    /// NVLink payload bytes sent, all links.
    pub nvlink_transmitted_bytes: Option<u64>,
}

/// One process on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id, in the driver's view of this namespace.
    pub pid: u32,
    /// Its memory on this GPU, bytes; `None` where the driver will not say.
    pub used_bytes: Option<u64>,
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
