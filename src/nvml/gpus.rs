//! The open library, with the handles of its GPUs.
//!
//! Enters: what `opening` found. Leaves: the state that all calls need. Invariant: whatever points into the library is
//! dropped before it. Absent on purpose: the readings, which are in `source` and `lanes`.

use super::devices;
use super::errors::Code;
use super::events::Events;
use super::gpm::Gpm;
use super::progress::Hung;
use super::raw::{Handle, MemoryVersion, RawFunctions};
use super::unit::{Ask, Unit};
use highwater_core::gpu::Device;
use highwater_core::source::{Error, Skipped};
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use std::sync::{Arc, OnceLock};

/// The GPUs and MIG instances of this node.
///
/// Dropping it frees the event set and shuts NVML down.
#[derive(Debug)]
pub struct Nvml {
    // Fields drop in this order: the event set, the samples inside the units and the pointers go before the library
    // that they point into.
    /// Opened by the thread that waits for events, because a GPU may hang while it is registered. The inner `None`: no GPU
    /// reports events.
    pub(super) events: OnceLock<Option<Events>>,
    pub(super) raw: Arc<RawFunctions>,
    pub(super) gpm: Option<Gpm>,
    pub(super) devices: Vec<Device>,
    pub(super) units: Vec<Unit>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) driver_version: Option<String>,
    /// Indices of the GPUs that hung when this source was opened, and the shared set of all that still hang.
    pub(super) hung: (Vec<u32>, Hung),
    pub(super) library: Arc<nvml_wrapper::Nvml>,
}

impl Nvml {
    pub(super) fn of(
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

    /// Whether [`power_watts`](highwater_core::gpu::Medium::power_watts) is this GPU's instant power; otherwise it is the
    /// driver's average over a second.
    #[must_use]
    pub fn power_is_instant(&self, gpu: usize) -> bool {
        self.units.get(gpu).is_some_and(|unit| !unit.is_unsupported(Ask::PowerInstant))
    }

    /// Whether [`memory_used`](highwater_core::source::Source::memory_used) of this GPU leaves out the driver's reserve. If
    /// the driver has only the first version of the memory call, the reserve is unknown, so nothing is subtracted.
    #[must_use]
    pub fn used_excludes_reserve(&self, gpu: usize) -> bool {
        self.units.get(gpu).is_some_and(|unit| unit.memory_version() == MemoryVersion::V2)
    }

    /// The wrapper's view of a handle.
    pub(super) fn device(&self, handle: Handle) -> nvml_wrapper::Device<'_> {
        // SAFETY: all handles come from this library, which outlives the returned value.
        unsafe { nvml_wrapper::Device::new(handle.0, &self.library) }
    }

    /// Whether a GPU answers a query that nearly every GPU supports. "Not supported" counts as an answer.
    pub(super) fn is_there(&self, handle: Handle) -> Result<(), Error> {
        let asked = self.device(handle).temperature(TemperatureSensor::Gpu).map(drop);
        match asked.map_err(|error| Code::from(error).of_presence()) {
            Err(Error::Unsupported) => Ok(()),
            answer => answer,
        }
    }

    pub(super) fn unit(&self, gpu: usize) -> Result<&Unit, Error> {
        self.units.get(gpu).ok_or_else(|| Error::Failed(format!("no GPU at position {gpu}")))
    }
}
