//! NVIDIA's GPUs, read through NVML: the only part of the program that uses it.
//!
//! Enters: the driver's library, loaded at run time. Leaves: a [`Source`]. The wrapper crate loads the library,
//! enumerates devices, and makes the calls for which milliseconds do not matter. The fast lane calls the resolved
//! function with the stored handle, without the wrapper's overhead. Invariants: no method takes a lock that the fast
//! lane needs; an unsupported query is made once; a value that NVML does not report is `None`. Absent on purpose: a
//! second initialization while the daemon runs, which would invalidate every other GPU's handle under its lane. A GPU
//! that came back is found by its UUID; if NVML needs a fresh start, the daemon drops this source and opens another.

mod activity;
mod devices;
mod errors;
mod events;
mod gpm;
mod lanes;
mod opening;
mod pcie;
pub mod probe;
mod processes;
mod progress;
mod raw;
mod unit;

use errors::Code;
use events::Events;
use gpm::Gpm;
use highwater_core::gpu::{Device, Medium, Pcie, Process, Rare, Slow};
use highwater_core::source::{Call, CallStats, DriverEvent, Error, OpenError, Skipped, Source};
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
pub use opening::Opener;
use progress::Hung;
use raw::{Handle, MemoryVersion, RawFunctions};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use unit::{Ask, Unit};

/// How long a call may take while [`open`] opens NVML, which takes no patience as an argument.
const PATIENCE: Duration = Duration::from_secs(10);

/// The GPUs and MIG instances of this node.
///
/// Dropping it frees the event set and shuts NVML down.
#[derive(Debug)]
pub struct Nvml {
    // Fields drop in this order: the event set, the samples inside the units and the pointers go before the library
    // that they point into.
    /// Opened by the thread that waits for events, because a GPU may hang while it is registered. The inner `None`: no GPU
    /// reports events.
    events: OnceLock<Option<Events>>,
    raw: Arc<RawFunctions>,
    gpm: Option<Gpm>,
    devices: Vec<Device>,
    units: Vec<Unit>,
    skipped: Vec<Skipped>,
    driver_version: Option<String>,
    /// Indices of the GPUs that hung when this source was opened, and the shared set of all that still hang.
    hung: (Vec<u32>, Hung),
    library: Arc<nvml_wrapper::Nvml>,
}

/// Loads NVML, from `library` or from where the driver installs it, and finds the GPUs.
///
/// # Errors
/// [`OpenError`] with one of the reasons `library_missing`, `driver_mismatch`, `driver_not_loaded`,
/// `no_permission`, `no_gpus`, `init_failed`, `driver_hangs`, and a message that says how to fix it. A single GPU that
/// cannot be opened, or hangs, is not an error: it is listed in [skipped](Source::skipped).
pub fn open(library: Option<&Path>) -> Result<Nvml, OpenError> {
    let mut hangs = None;
    let opener = Opener::new(library.map(Path::to_owned), PATIENCE);
    let opened = opener.open(&mut |trouble| {
        hangs = trouble.cloned();
        hangs.is_none()
    });
    opened.unwrap_or_else(|| Err(hangs.unwrap_or_else(|| opening::hangs("NVML"))))
}

fn no_gpus(count: u32, skipped: &[Skipped]) -> OpenError {
    let reasons: Vec<String> = skipped.iter().map(|gpu| format!("GPU {}: {}", gpu.index, gpu.reason)).collect();
    let message = if count == 0 {
        "NVML runs and sees no GPU. To fix it: `lspci | grep -i nvidia` shows whether the node has one; a container \
         sees only the GPUs that it asked for (NVIDIA_VISIBLE_DEVICES, or nvidia.com/gpu in its limits)"
            .to_owned()
    } else {
        format!("NVML counts {count} GPUs and can open none. {}", reasons.join("; "))
    };
    OpenError { reason: "no_gpus", message }
}

impl Nvml {
    fn of(
        library: Arc<nvml_wrapper::Nvml>,
        raw: Arc<RawFunctions>,
        found: devices::Found,
        driver_version: Option<String>,
        hung: (Vec<u32>, Hung),
    ) -> Self {
        if !raw.lists_processes() {
            tracing::warn!(
                "this NVML lists no processes: ranks cannot be found by process, and memory of processes is not available"
            );
        }
        let gpm = Gpm::of(library.lib());
        let devices::Found { devices, units, skipped, .. } = found;
        Self { events: OnceLock::new(), raw, gpm, devices, units, skipped, driver_version, hung, library }
    }

    /// The driver's version, such as `580.159.04`.
    #[must_use]
    pub fn driver_version(&self) -> Option<&str> {
        self.driver_version.as_deref()
    }

    /// Whether [`Medium::power_watts`] is this GPU's instant power; otherwise it is the driver's average over a second.
    #[must_use]
    pub fn power_is_instant(&self, gpu: usize) -> bool {
        self.units.get(gpu).is_some_and(|unit| !unit.is_unsupported(Ask::PowerInstant))
    }

    /// Whether [`memory_used`](Source::memory_used) of this GPU leaves out the driver's reserve. If the driver has only
    /// the first version of the memory call, the reserve is unknown, so nothing is subtracted.
    #[must_use]
    pub fn used_excludes_reserve(&self, gpu: usize) -> bool {
        self.units.get(gpu).is_some_and(|unit| unit.memory_version() == MemoryVersion::V2)
    }

    /// The wrapper's view of a handle.
    fn device(&self, handle: Handle) -> nvml_wrapper::Device<'_> {
        // SAFETY: all handles come from this library, which outlives the returned value.
        unsafe { nvml_wrapper::Device::new(handle.0, &self.library) }
    }

    /// Whether a GPU answers a query that nearly every GPU supports. "Not supported" counts as an answer.
    fn is_there(&self, handle: Handle) -> Result<(), Error> {
        let asked = self.device(handle).temperature(TemperatureSensor::Gpu).map(drop);
        match asked.map_err(|error| Code::from(error).of_presence()) {
            Err(Error::Unsupported) => Ok(()),
            answer => answer,
        }
    }

    fn unit(&self, gpu: usize) -> Result<&Unit, Error> {
        self.units.get(gpu).ok_or_else(|| Error::Failed(format!("no GPU at position {gpu}")))
    }

    fn questions<'a>(&'a self, gpu: usize, calls: &'a CallStats) -> Option<lanes::Questions<'a>> {
        Some(lanes::Questions { nvml: self, unit: self.units.get(gpu)?, calls })
    }
}

impl Source for Nvml {
    fn description(&self) -> String {
        let version = self.driver_version.as_deref().unwrap_or("of unknown version");
        let older = self.units.iter().any(|unit| unit.memory_version() == MemoryVersion::V1);
        let remark = if older { " (old memory call: used counts the driver's reserve)" } else { "" };
        format!("nvml {version}{remark}")
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn memory_used(&self, gpu: usize, _at_ns: i64) -> Result<u64, Error> {
        let unit = self.unit(gpu)?;
        match self.raw.memory(unit.memory_version(), unit.handle()) {
            Ok(memory) => Ok(memory.used),
            Err(code) => Err(code.of_presence()),
        }
    }

    fn medium(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Medium {
        self.questions(gpu, calls).map(|questions| questions.medium(at_ns)).unwrap_or_default()
    }

    fn slow(&self, gpu: usize, _at_ns: i64, calls: &CallStats) -> Slow {
        self.questions(gpu, calls).map(|questions| questions.slow()).unwrap_or_default()
    }

    fn processes(&self, gpu: usize, _at_ns: i64, calls: &CallStats) -> Option<Vec<Process>> {
        self.questions(gpu, calls).and_then(|questions| questions.processes())
    }

    fn lists_all_processes(&self) -> bool {
        processes::are_all_seen()
    }

    fn presence(&self, gpu: usize, calls: &CallStats) -> Result<(), Error> {
        let unit = self.unit(gpu)?;
        // A MIG instance supports few queries; its parent GPU is checked instead.
        if unit.instance.is_some() {
            return Ok(());
        }
        calls.time_all(Call::Temperature, || self.is_there(unit.handle()))
    }

    fn pcie(&self, gpu: usize, at_ns: i64, calls: &CallStats) -> Pcie {
        let bytes = self.questions(gpu, calls).map(|questions| questions.pcie_bytes(at_ns));
        let [transmitted_bytes, received_bytes] = bytes.unwrap_or_default();
        Pcie { received_bytes, transmitted_bytes }
    }

    fn rare(&self, gpu: usize, _at_ns: i64, calls: &CallStats) -> Rare {
        self.questions(gpu, calls).map(|questions| questions.rare()).unwrap_or_default()
    }

    fn energy_joules(&self, gpu: usize, _at_ns: i64, calls: &CallStats) -> Option<f64> {
        self.questions(gpu, calls).and_then(|questions| questions.energy_joules())
    }

    fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    fn has_changed(&self, calls: &CallStats) -> bool {
        let (hung, still) = &self.hung;
        if hung.iter().any(|index| !still.contains(*index)) {
            return true;
        }
        let asked = |index| !still.contains(index);
        calls.time(Call::Devices, || Ok(devices::differ(&self.library, &self.devices, asked))).unwrap_or(false)
    }

    fn reacquire(&self, gpu: usize) -> Result<(), Error> {
        let unit = self.unit(gpu)?;
        let uuid = self.devices.get(gpu).map(|device| device.uuid.as_str()).unwrap_or_default();
        let found = self.library.device_by_uuid(uuid).map_err(|error| Code::from(error).of_presence())?;
        let handle = devices::handle_of(&found);
        // NVML hands out handles of GPUs that do not answer: only a reading shows that this one is back.
        match self.raw.memory_version(handle) {
            // A GPU that had a memory call and now has none is not back.
            MemoryVersion::None if unit.memory_version() == MemoryVersion::None => self.is_there(handle)?,
            version => self.raw.memory(version, handle).map(drop).map_err(Code::of_presence)?,
        }
        unit.replace(&self.raw, handle);
        Ok(())
    }

    fn wait_event(&self, timeout: Duration) -> Result<Option<DriverEvent>, Error> {
        let events = self.events.get_or_init(|| Events::open(self.library.lib(), &self.units));
        events.as_ref().ok_or(Error::Unsupported)?.wait(&self.units, timeout)
    }
}
