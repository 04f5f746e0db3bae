//! The NVML calls of the daemon's lanes, and calls that it avoids but people ask about, each ready to be timed. Not
//! here: GPM's activity metrics (`activity`), uncorrected ECC errors, events, and the calls that open NVML.
//!
//! Enters: one GPU's position. Leaves: a list of [`Probe`]s. Absent on purpose: clocks and statistics, which are in
//! [`measure`], and tables, which belong to the command.

pub mod measure;
mod pcie;

use super::errors::Code;
use super::raw::{Field, Handle, ProcessKind};
use super::{Nvml, devices};
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, PcieUtilCounter, Sampling, TemperatureSensor, TemperatureThreshold,
};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;
use sys::field_id::NVML_FI_DEV_POWER_AVERAGE;

/// Which lane of the daemon makes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MadeIn {
    /// Each millisecond.
    Fast,
    /// Ten times a second.
    Medium,
    /// Each second, or in each 5th, 10th or 30th turn of the slow lane.
    Slow,
    /// Once in five minutes: the call blocks every other call on its GPU while it lasts.
    Seldom,
    /// Never. It is timed to show why, or because other tools use it.
    Never,
}

/// Whether a call's answer is a value whose update period can be measured, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// The answer says nothing about an update period.
    No,
    /// A cheap reading in this unit. It may be watched together with others.
    Cheap(&'static str),
    /// A reading in this unit that takes long enough to disturb others. It is watched alone.
    Dear(&'static str),
}

/// The answer of a probe: a number that changes when the reading does, if there is one, or NVML's error message.
pub type ProbeAnswer = Result<Option<u64>, String>;

/// One call, ready to be made.
pub struct Probe<'a> {
    /// What it reads, for display.
    pub name: &'static str,
    /// NVML's function, with the field ids if it takes any.
    pub function: &'static str,
    /// Which lane of the daemon makes it.
    pub made_in: MadeIn,
    /// Whether its answer is worth watching.
    pub watch: Watch,
    /// Status text for the report, in place of a plain "ok".
    pub remark: Option<&'static str>,
    /// Makes the call once.
    pub ask: Box<dyn FnMut() -> ProbeAnswer + 'a>,
}

impl Probe<'_> {
    fn remarked(mut self, remark: &'static str) -> Self {
        self.remark = Some(remark);
        self
    }
}

impl Nvml {
    /// The probes of one GPU; empty if there is none at this position.
    #[must_use]
    pub fn probes(&self, gpu: usize) -> Vec<Probe<'_>> {
        let Some(unit) = self.units.get(gpu) else { return Vec::new() };
        let build = Builder { nvml: self, handle: unit.handle() };
        let mut probes = build.fast_and_medium();
        probes.extend(build.slow());
        probes.extend(build.pcie(unit.instance.is_none()));
        probes.extend(build.never());
        probes
    }
}

#[derive(Clone, Copy)]
struct Builder<'a> {
    nvml: &'a Nvml,
    handle: Handle,
}

impl<'a> Builder<'a> {
    fn fast_and_medium(self) -> Vec<Probe<'a>> {
        use MadeIn::{Fast, Medium, Never};
        use Watch::{Cheap, No};
        let Self { nvml, handle } = self;
        vec![
            self.raw("memory used", "nvmlDeviceGetMemoryInfo_v2", Fast, Cheap("bytes"), move || {
                nvml.raw.memory_info_v2(handle).map(|memory| memory.used)
            }),
            self.raw("memory used, old call", "nvmlDeviceGetMemoryInfo", Never, No, move || {
                nvml.raw.memory_info_v1(handle).map(|memory| memory.used)
            }),
            self.wrapped("utilization", "nvmlDeviceGetUtilizationRates", Medium, Cheap("%"), |gpu| {
                gpu.utilization_rates().map(|rates| rates.gpu.into())
            }),
            self.raw("power, instant", "nvmlDeviceGetFieldValues(186)", Medium, Cheap("mW"), move || {
                nvml.raw.power_instant_mw(handle)
            }),
            self.wrapped("power, as PowerUsage", "nvmlDeviceGetPowerUsage", Never, Cheap("mW"), |gpu| {
                gpu.power_usage().map(u64::from)
            }),
            self.wrapped("temperature", "nvmlDeviceGetTemperature", Medium, Cheap("degrees Celsius"), |gpu| {
                gpu.temperature(TemperatureSensor::Gpu).map(u64::from)
            }),
            self.wrapped("SM clock", "nvmlDeviceGetClockInfo(SM)", Medium, Cheap("MHz"), |gpu| {
                gpu.clock_info(Clock::SM).map(u64::from)
            }),
            self.wrapped("memory clock", "nvmlDeviceGetClockInfo(MEM)", Medium, Cheap("MHz"), |gpu| {
                gpu.clock_info(Clock::Memory).map(u64::from)
            }),
            self.raw("clock event reasons", "nvmlDeviceGetCurrentClocksEventReasons", Medium, No, move || {
                nvml.raw.clock_event_reasons(handle)
            }),
        ]
    }

    fn slow(self) -> Vec<Probe<'a>> {
        use MadeIn::{Seldom, Slow};
        use Watch::{Dear, No};
        let Self { nvml, handle } = self;
        let mut all = vec![
            self.wrapped("energy", "nvmlDeviceGetTotalEnergyConsumption", Seldom, Dear("mJ"), |gpu| {
                gpu.total_energy_consumption()
            })
            .remarked("ok; blocks every other call on its GPU, so it is made once in five minutes"),
            self.wrapped("BAR1", "nvmlDeviceGetBAR1MemoryInfo", Slow, No, |gpu| {
                gpu.bar1_memory_info().map(|bar1| bar1.used)
            }),
            self.wrapped("power limit", "nvmlDeviceGetEnforcedPowerLimit", Slow, No, |gpu| {
                gpu.enforced_power_limit().map(u64::from)
            }),
            self.wrapped("slowdown temperature", "nvmlDeviceGetTemperatureThreshold(SLOWDOWN)", Slow, No, |gpu| {
                gpu.temperature_threshold(TemperatureThreshold::Slowdown).map(u64::from)
            }),
            self.wrapped("shutdown temperature", "nvmlDeviceGetTemperatureThreshold(SHUTDOWN)", Slow, No, |gpu| {
                gpu.temperature_threshold(TemperatureThreshold::Shutdown).map(u64::from)
            }),
        ];
        all.extend(self.nvlinks());
        all.extend(self.health());
        all.extend(self.pcie_link());
        all.extend([
            self.raw("compute processes", "nvmlDeviceGetComputeRunningProcesses_v3", Slow, No, move || {
                nvml.raw.processes(ProcessKind::Compute, handle).map(|processes| processes.len() as u64)
            }),
            self.raw("graphics processes", "nvmlDeviceGetGraphicsRunningProcesses_v3", Slow, No, move || {
                nvml.raw.processes(ProcessKind::Graphics, handle).map(|processes| processes.len() as u64)
            }),
            self.raw("all devices", "nvmlDeviceGetHandleByIndex_v2, GetUUID, GetMigMode", Slow, No, move || {
                Ok(u64::from(devices::differ(&nvml.library, &nvml.devices, |_| true)))
            }),
        ]);
        all
    }

    fn nvlinks(self) -> [Probe<'a>; 4] {
        use MadeIn::Slow;
        use Watch::{Dear, No};
        let Self { nvml, handle } = self;
        [
            self.raw("NVLink counters, both ways", "nvmlDeviceGetFieldValues(138,139)", Slow, Dear("KiB"), move || {
                sum(nvml.raw.nvlink_counters(handle)?)
            }),
            self.raw("NVLink errors", "nvmlDeviceGetFieldValues(161,162,163)", Slow, Dear("errors"), move || {
                sum(nvml.raw.nvlink_errors(handle)?)
            }),
            self.raw("NVLinks that are up", "nvmlDeviceGetNvLinkState", Slow, No, move || {
                nvml.raw.nvlinks(handle).map(|links| links.counts().0.into())
            }),
            self.raw("NVLink fabric, state", "nvmlDeviceGetGpuFabricInfo", Slow, No, move || {
                nvml.raw.fabric(handle).map(|fabric| fabric.state.into())
            }),
        ]
    }

    fn health(self) -> [Probe<'a>; 3] {
        use MadeIn::Slow;
        use Watch::No;
        let Self { nvml, handle } = self;
        [
            self.wrapped("ECC errors, corrected", "nvmlDeviceGetTotalEccErrors", Slow, No, |gpu| {
                gpu.total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile)
            }),
            self.raw("remapped rows", "nvmlDeviceGetRemappedRows", Slow, No, move || {
                nvml.raw.remapped_rows(handle).map(|rows| u64::from(rows.corrected) + u64::from(rows.uncorrected))
            }),
            self.raw("recovery action", "nvmlDeviceGetFieldValues(230)", Slow, No, move || {
                nvml.raw.recovery_action(handle)
            }),
        ]
    }

    fn pcie_link(self) -> [Probe<'a>; 4] {
        use MadeIn::Slow;
        use Watch::No;
        [
            self.wrapped("PCIe link generation", "nvmlDeviceGetCurrPcieLinkGeneration", Slow, No, |gpu| {
                gpu.current_pcie_link_gen().map(u64::from)
            }),
            self.wrapped("PCIe link width", "nvmlDeviceGetCurrPcieLinkWidth", Slow, No, |gpu| {
                gpu.current_pcie_link_width().map(u64::from)
            }),
            self.wrapped("PCIe link generation, best", "nvmlDeviceGetMaxPcieLinkGeneration", Slow, No, |gpu| {
                gpu.max_pcie_link_gen().map(u64::from)
            }),
            self.wrapped("PCIe link width, best", "nvmlDeviceGetMaxPcieLinkWidth", Slow, No, |gpu| {
                gpu.max_pcie_link_width().map(u64::from)
            }),
        ]
    }

    fn never(self) -> Vec<Probe<'a>> {
        use MadeIn::Never;
        use Watch::{Dear, No};
        let Self { nvml, handle } = self;
        vec![
            self.raw("power, average", "nvmlDeviceGetFieldValues(185)", Never, Dear("mW"), move || {
                let [average] = nvml.raw.fields(handle, [(NVML_FI_DEV_POWER_AVERAGE, 0)])?;
                average.map(|field| field.value)
            }),
            self.wrapped("PCIe throughput, sent", "nvmlDeviceGetPcieThroughput(TX)", Never, No, |gpu| {
                gpu.pcie_throughput(PcieUtilCounter::Send).map(u64::from)
            }),
            self.wrapped("PCIe throughput, received", "nvmlDeviceGetPcieThroughput(RX)", Never, No, |gpu| {
                gpu.pcie_throughput(PcieUtilCounter::Receive).map(u64::from)
            }),
            self.wrapped("utilization samples", "nvmlDeviceGetSamples(GPU_UTILIZATION)", Never, No, |gpu| {
                gpu.samples(Sampling::GpuUtilization, None).map(|samples| samples.len() as u64)
            }),
            self.wrapped("power samples", "nvmlDeviceGetSamples(TOTAL_POWER)", Never, No, |gpu| {
                gpu.samples(Sampling::Power, None).map(|samples| samples.len() as u64)
            }),
        ]
    }

    fn raw(
        self,
        name: &'static str,
        function: &'static str,
        made_in: MadeIn,
        watch: Watch,
        mut ask: impl FnMut() -> Result<u64, Code> + 'a,
    ) -> Probe<'a> {
        Probe { name, function, made_in, watch, remark: None, ask: Box::new(move || ask().map(Some).map_err(said)) }
    }

    fn wrapped(
        self,
        name: &'static str,
        function: &'static str,
        made_in: MadeIn,
        watch: Watch,
        ask: impl Fn(&nvml_wrapper::Device<'a>) -> Result<u64, NvmlError> + 'a,
    ) -> Probe<'a> {
        let device = self.nvml.device(self.handle);
        self.raw(name, function, made_in, watch, move || ask(&device).map_err(Code::from))
    }
}

fn said(code: Code) -> String {
    code.to_string()
}

/// The sum of the counters that are available.
fn sum<const N: usize>(counters: [Result<Field, Code>; N]) -> Result<u64, Code> {
    let known = counters.iter().flatten().map(|field| field.value).reduce(u64::wrapping_add);
    known.ok_or_else(|| counters.into_iter().find_map(Result::err).unwrap_or(Code::NO_DATA))
}
