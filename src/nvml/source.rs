//! The GPUs as a [`Source`].
//!
//! Enters: the open library. Leaves: readings, events and the presence of GPUs; the queries of the slower lanes are in
//! `lanes`.

use super::devices;
use super::errors::Code;
use super::events::Events;
use super::gpus::Nvml;
use super::lanes::Questions;
use super::processes;
use super::raw::MemoryVersion;
use highwater_core::gpu::{Device, Medium, Pcie, Process, Rare, Slow};
use highwater_core::source::{Call, CallStats, DriverEvent, Error, Skipped, Source};
use std::time::Duration;

impl Nvml {
    fn questions<'a>(&'a self, gpu: usize, calls: &'a CallStats) -> Option<Questions<'a>> {
        Some(Questions { nvml: self, unit: self.units.get(gpu)?, calls })
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
