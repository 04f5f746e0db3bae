//! The medium and the slow lane: the queries made of each GPU, and the conversion from NVML's units.
//!
//! Enters: a unit, and the statistics that every call is timed into. Leaves: readings with `None` for "not available".
//! Invariants: a query that was once answered with "not supported" is not made again; properties of the whole GPU
//! (power, clocks, links, ECC) are read from the GPU and never from its MIG instances, so that nothing is counted
//! twice.

use super::errors::Code;
use super::gpus::Nvml;
use super::pcie::Bytes;
use super::processes;
use super::raw::{Field, Handle, MemoryVersion, ProcessKind};
use super::unit::{Ask, Unit};
use highwater_core::gpu::{Activity, Medium, NvLinkErrors, PcieLink, Process, Rare, Slow};
use highwater_core::source::{CallStats, Error};
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor, TemperatureThreshold};
use nvml_wrapper::error::NvmlError;

/// One GPU, while one lane queries it.
pub(super) struct Questions<'a> {
    pub(super) nvml: &'a Nvml,
    pub(super) unit: &'a Unit,
    pub(super) calls: &'a CallStats,
}

impl<'a> Questions<'a> {
    /// The medium lane.
    pub(super) fn medium(&self, at_ns: i64) -> Medium {
        if self.unit.instance.is_some() {
            return Medium::default();
        }
        let utilization = self.wrapped(Ask::Utilization, |gpu| gpu.utilization_rates());
        Medium {
            utilization_ratio: utilization.as_ref().map(|rates| f64::from(rates.gpu) / 100.0),
            // A GPU that has no memory of its own always reports 0.
            memory_busy_ratio: utilization
                .as_ref()
                .filter(|_| self.unit.memory_version() != MemoryVersion::None)
                .map(|rates| f64::from(rates.memory) / 100.0),
            power_watts: self.power_watts(),
            temperature_celsius: self
                .wrapped(Ask::Temperature, |gpu| gpu.temperature(TemperatureSensor::Gpu))
                .map(f64::from),
            sm_clock_hertz: self.wrapped(Ask::SmClock, |gpu| gpu.clock_info(Clock::SM)).map(hertz),
            memory_clock_hertz: self.wrapped(Ask::MemoryClock, |gpu| gpu.clock_info(Clock::Memory)).map(hertz),
            throttle_reasons: self.raw(Ask::ThrottleReasons, |gpu| self.nvml.raw.clock_event_reasons(gpu)),
            activity: self.activity(at_ns, utilization.is_some_and(|rates| rates.gpu == 0)),
        }
    }

    /// What the multiprocessors did. While no kernel runs they did nothing, so a GPU known to have GPM is not sampled
    /// then.
    fn activity(&self, at_ns: i64, is_idle: bool) -> Activity {
        let meter = &self.unit.activity;
        if self.unit.is_unsupported(Ask::Activity) {
            return Activity::default();
        }
        meter.still(at_ns, is_idle).unwrap_or_else(|| {
            self.raw(Ask::Activity, |gpu| meter.advance(self.nvml.gpm.as_ref(), gpu, at_ns)).unwrap_or_default()
        })
    }

    /// The slow lane.
    pub(super) fn slow(&self) -> Slow {
        if self.unit.instance.is_some() {
            return Slow::default();
        }
        let volatile = EccCounter::Volatile;
        let rows = self.raw(Ask::RemappedRows, |gpu| self.nvml.raw.remapped_rows(gpu));
        Slow {
            ecc_corrected: self
                .wrapped(Ask::EccCorrected, |gpu| gpu.total_ecc_errors(MemoryError::Corrected, volatile)),
            ecc_uncorrected: self
                .wrapped(Ask::EccUncorrected, |gpu| gpu.total_ecc_errors(MemoryError::Uncorrected, volatile)),
            remapped_rows_corrected: rows.map(|rows| u64::from(rows.corrected)),
            remapped_rows_uncorrected: rows.map(|rows| u64::from(rows.uncorrected)),
            row_remap_pending: rows.map(|rows| rows.is_pending),
            row_remap_failed: rows.map(|rows| rows.has_failed),
            recovery_action: self.raw(Ask::RecoveryAction, |gpu| self.nvml.raw.recovery_action(gpu)),
        }
    }

    /// Instant power, or the average over a second if the GPU has no instant reading;
    /// [`power_is_instant`](Nvml::power_is_instant) returns which.
    fn power_watts(&self) -> Option<f64> {
        let milliwatts = if self.unit.is_unsupported(Ask::PowerInstant) {
            self.wrapped(Ask::PowerUsage, |gpu| gpu.power_usage()).map(u64::from)
        } else {
            self.raw(Ask::PowerInstant, |gpu| self.nvml.raw.power_instant_mw(gpu))
        };
        milliwatts.map(thousandth)
    }

    /// Total memory, NVLink and its fabric, BAR1, limits and the PCIe link.
    pub(super) fn rare(&self) -> Rare {
        let memory = self.raw(Ask::Memory, |gpu| self.nvml.raw.memory(self.unit.memory_version(), gpu));
        let bar1_used_bytes = self.wrapped(Ask::Bar1, |gpu| gpu.bar1_memory_info()).map(|bar1| bar1.used);
        let memory = Rare {
            memory_total_bytes: memory.map(|memory| memory.total),
            memory_reserved_bytes: memory.and_then(|memory| memory.reserved),
            bar1_used_bytes,
            ..Rare::default()
        };
        if self.unit.instance.is_some() {
            return memory;
        }
        let [nvlink_transmitted_bytes, nvlink_received_bytes] = self
            .counters(Ask::Nvlink, |gpu| self.nvml.raw.nvlink_counters(gpu))
            .map(|kib| kib.and_then(|kib| kib.checked_mul(1024)));
        let [replays, recoveries, crc] = self.counters(Ask::NvlinkErrors, |gpu| self.nvml.raw.nvlink_errors(gpu));
        Rare {
            nvlink_received_bytes,
            nvlink_transmitted_bytes,
            nvlinks: self.raw(Ask::NvlinkState, |gpu| self.nvml.raw.nvlinks(gpu)),
            nvlink_errors: NvLinkErrors { replays, recoveries, crc },
            fabric: self.raw(Ask::Fabric, |gpu| self.nvml.raw.fabric(gpu)),
            power_limit_watts: self.power_limit_watts(),
            slowdown_celsius: self.threshold_celsius(Ask::Slowdown, TemperatureThreshold::Slowdown),
            shutdown_celsius: self.threshold_celsius(Ask::Shutdown, TemperatureThreshold::Shutdown),
            pcie_link: self.pcie_link(),
            ..memory
        }
    }

    /// The link of a whole GPU. A generation or a width of 0 is none.
    fn pcie_link(&self) -> Option<PcieLink> {
        let link = self.wrapped(Ask::PcieLink, |gpu| {
            Ok(PcieLink {
                generation: gpu.current_pcie_link_gen()?,
                width: gpu.current_pcie_link_width()?,
                max_generation: gpu.max_pcie_link_gen()?,
                max_width: gpu.max_pcie_link_width()?,
            })
        })?;
        let is_known = [link.generation, link.width, link.max_generation, link.max_width].iter().all(|part| *part > 0);
        is_known.then_some(link)
    }

    /// The lowest of all power limits: an operator's, the board's, and those set out of band.
    fn power_limit_watts(&self) -> Option<f64> {
        let milliwatts = self.limit(Ask::PowerLimit, |gpu| gpu.enforced_power_limit())?;
        Some(thousandth(milliwatts.into()))
    }

    /// `GPU_MAX` is no substitute where a threshold is not supported: it is where normal operation ends, on an H200 2 °C
    /// below `SLOWDOWN`.
    fn threshold_celsius(&self, ask: Ask, threshold: TemperatureThreshold) -> Option<f64> {
        self.limit(ask, |gpu| gpu.temperature_threshold(threshold)).map(f64::from)
    }

    /// A limit of a whole GPU. A limit of 0 cannot be one: the driver does not know it.
    fn limit(&self, ask: Ask, make: impl FnOnce(nvml_wrapper::Device<'a>) -> Result<u32, NvmlError>) -> Option<u32> {
        self.wrapped(ask, make).filter(|limit| *limit > 0)
    }

    /// The energy counter of a whole GPU.
    pub(super) fn energy_joules(&self) -> Option<f64> {
        if self.unit.instance.is_some() {
            return None;
        }
        self.wrapped(Ask::Energy, |gpu| gpu.total_energy_consumption()).map(thousandth)
    }

    /// The GPU's own counters, or GPM if those are too narrow or missing. If a counter only failed this time, GPM does
    /// not replace it, because the two count from different beginnings.
    pub(super) fn pcie_bytes(&self, at_ns: i64) -> Bytes {
        if self.unit.instance.is_some() {
            return Bytes::default();
        }
        let counters = self.counters(Ask::Pcie, |gpu| self.nvml.raw.pcie_counters(gpu));
        if !self.unit.is_unsupported(Ask::Pcie) {
            return counters;
        }
        let meter = &self.unit.pcie;
        meter.still(at_ns).unwrap_or_else(|| {
            self.raw(Ask::Gpm, |gpu| meter.advance(self.nvml.gpm.as_ref(), gpu, at_ns)).unwrap_or_default()
        })
    }

    /// All processes, or `None`: if one kind is missing because a call failed, its processes would look as if they had
    /// ended.
    pub(super) fn processes(&self) -> Option<Vec<Process>> {
        let list = |ask, kind| self.raw(ask, |gpu| self.nvml.raw.processes(kind, gpu));
        let compute = list(Ask::ComputeProcesses, ProcessKind::Compute)?;
        let graphics = list(Ask::GraphicsProcesses, ProcessKind::Graphics);
        // A GPU without graphics has no list of these; one that failed leaves the processes unknown.
        let is_whole = graphics.is_some() || self.unit.is_unsupported(Ask::GraphicsProcesses);
        is_whole.then(|| processes::merge(&[compute, graphics.unwrap_or_default()]))
    }

    /// The counters of one call, each `None` if it alone is not available.
    fn counters<const N: usize>(
        &self,
        ask: Ask,
        make: impl FnOnce(Handle) -> Result<[Result<Field, Code>; N], Code>,
    ) -> [Option<u64>; N] {
        let counters = self.raw(ask, |gpu| {
            let counters = make(gpu)?.map(|counter| counter.and_then(wide));
            match counters.first() {
                Some(Err(first)) if counters.iter().all(Result::is_err) => Err(*first),
                _ => Ok(counters.map(Result::ok)),
            }
        });
        counters.unwrap_or([None; N])
    }

    fn wrapped<T>(&self, ask: Ask, make: impl FnOnce(nvml_wrapper::Device<'a>) -> Result<T, NvmlError>) -> Option<T> {
        self.raw(ask, |handle| make(self.nvml.device(handle)).map_err(Code::from))
    }

    fn raw<T>(&self, ask: Ask, make: impl FnOnce(Handle) -> Result<T, Code>) -> Option<T> {
        if self.unit.is_unsupported(ask) {
            return None;
        }
        self.calls.time(ask.call(), || {
            make(self.unit.handle()).map_err(|code| {
                let error = code.of_lane();
                if error == Error::Unsupported {
                    tracing::debug!(?ask, %code, "not asked again");
                    self.unit.remember_unsupported(ask);
                }
                error
            })
        })
    }
}

/// A counter of bytes in 32 bits wraps several times a second at the speed of a PCIe bus, so the difference of two
/// readings is meaningless: such a counter counts as not supported.
fn wide(field: Field) -> Result<u64, Code> {
    if field.wide { Ok(field.value) } else { Err(Code::NOT_SUPPORTED) }
}

#[allow(clippy::cast_precision_loss, reason = "milliwatts and millijoules stay far below 2^53")]
fn thousandth(value: u64) -> f64 {
    value as f64 / 1000.0
}

fn hertz(megahertz: u32) -> f64 {
    f64::from(megahertz) * 1e6
}
