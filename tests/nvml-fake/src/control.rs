//! The control file: the GPUs, and the behaviour of each of NVML's functions.
//!
//! Every field may be left out; a GPU without fields is a healthy, idle H200. Unknown fields and unknown functions are
//! errors, so that a test cannot pass because of a typing error.

use serde::Deserialize;
use std::collections::BTreeMap;

/// The whole file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Control {
    /// The answer of `nvmlSystemGetDriverVersion`.
    pub driver_version: String,
    /// The GPUs, in the order of their indexes.
    pub gpus: Vec<Gpu>,
    /// XID errors, delivered in this order, each once. Append to it to raise another.
    pub xids: Vec<Xid>,
    /// The behaviour of functions that belong to no GPU, such as `nvmlInit_v2`.
    #[serde(flatten)]
    pub behaviour: Behaviour,
}

/// How functions misbehave, by their names.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Behaviour {
    /// The return code in place of an answer.
    pub errors: BTreeMap<String, u32>,
    /// Microseconds that a call spins for.
    pub delay_us: BTreeMap<String, f64>,
    /// Functions that do not return while they are named here.
    pub hang: Vec<String>,
}

/// One GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gpu {
    pub name: String,
    /// Made from the index if left out.
    pub uuid: Option<String>,
    /// Made from the index if left out.
    pub bus_id: Option<String>,
    /// Bytes.
    pub total: u64,
    /// Bytes reserved by the driver.
    pub reserved: u64,
    /// Bytes in use, without the reserve.
    pub used: Curve,
    pub utilization: Curve,
    pub memory_utilization: Curve,
    pub power_average_mw: Curve,
    pub power_instant_mw: Curve,
    pub power_limit_mw: Curve,
    pub temperature: Curve,
    /// Not supported if `null`.
    pub slowdown_celsius: Option<u32>,
    /// Not supported if `null`.
    pub shutdown_celsius: Option<u32>,
    pub sm_clock_mhz: Curve,
    pub memory_clock_mhz: Curve,
    pub throttle_reasons: Curve,
    pub energy_mj: Curve,
    pub bar1_used: Curve,
    pub pcie_tx_bytes: Curve,
    pub pcie_rx_bytes: Curve,
    /// Whether the PCIe counters are 32 bits wide, as on some GPUs.
    pub pcie_narrow: bool,
    /// The performance counters of Hopper and newer; none if left out.
    pub gpm: Option<Gpm>,
    /// One entry per link.
    pub nvlink: Vec<Link>,
    /// State and status of the fabric; not supported if `null`.
    pub fabric: Option<[u32; 2]>,
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    /// Generation and lanes of the PCIe link, and the best of both.
    pub pcie_link: [u32; 2],
    pub pcie_best: [u32; 2],
    pub rows_pending: bool,
    pub rows_failed: bool,
    /// Field 230.
    pub recovery_action: u64,
    pub rows_corrected: u32,
    pub rows_uncorrected: u32,
    pub processes: Vec<Process>,
    /// Whether lists of processes have eight more bytes per process, as those of drivers from 535.43 to 535.86 have.
    pub long_processes: bool,
    /// MIG instances by their slot; `null` is an empty slot. Any entry enables MIG mode.
    pub mig: Vec<Option<Mig>>,
    /// Whether every call returns that the GPU is lost.
    pub lost: bool,
    /// Handles of an older generation stay lost: increment it to imitate a reset.
    pub generation: u32,
    /// Return codes of fields, by their ids.
    pub field_errors: BTreeMap<u32, u32>,
    /// Microseconds that the answer of a field spins for, by its id.
    pub field_delay_us: BTreeMap<u32, f64>,
    #[serde(flatten)]
    pub behaviour: Behaviour,
}

/// The metrics of two GPM samples; one that is left out is not supported.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gpm {
    /// At the time of the later sample, as for all of them.
    pub pcie_tx_mib_per_second: Option<Curve>,
    pub pcie_rx_mib_per_second: Option<Curve>,
    /// Percents.
    pub sm: Option<Curve>,
    pub occupancy: Option<Curve>,
    pub tensor: Option<Curve>,
    pub dram: Option<Curve>,
}

/// One NVLink.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Link {
    pub tx_kib: u64,
    pub rx_kib: u64,
    pub replays: u64,
    pub recoveries: u64,
    pub crc: u64,
    pub is_down: bool,
}

/// One process.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    pub pid: u32,
    /// Bytes; `null` if the driver does not report them.
    pub used: Option<u64>,
    /// Whether it is in the graphics list too.
    #[serde(default)]
    pub graphics: bool,
    /// Whether it is in the compute list.
    #[serde(default = "yes")]
    pub compute: bool,
}

/// One MIG instance.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Mig {
    pub uuid: String,
    /// The whole name, such as `NVIDIA H200 MIG 1g.18gb`.
    pub name: String,
    pub total: u64,
    pub reserved: u64,
    pub used: Curve,
    pub gpu_instance: u32,
    pub compute_instance: u32,
    /// The number of its profile, and its first memory slice.
    pub profile_id: u32,
    pub start: u32,
    pub gpu_slices: u32,
    pub compute_slices: u32,
    pub processes: Vec<Process>,
    #[serde(flatten)]
    pub behaviour: Behaviour,
}

/// One XID error.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    pub gpu: usize,
    pub xid: u64,
    #[serde(default = "none")]
    pub gpu_instance: u32,
    #[serde(default = "none")]
    pub compute_instance: u32,
}

/// A value over the time since initialization.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Curve {
    /// Always this value.
    Constant(u64),
    /// The last point reached; 0 before the first.
    Points(Vec<Point>),
    /// The same, repeated.
    Cycle { points: Vec<Point>, repeat_ms: f64 },
    /// Grows by `step` each `every_ms`, and starts again at `from` after `steps` of them.
    Ramp { from: u64, step: u64, every_ms: f64, steps: Option<u64> },
}

/// A value from this time on.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    pub at_ms: f64,
    #[serde(alias = "used")]
    pub value: u64,
}

impl Curve {
    /// The value after `elapsed_ms`.
    pub fn at(&self, elapsed_ms: f64) -> u64 {
        match self {
            Curve::Constant(value) => *value,
            Curve::Points(points) => last(points, elapsed_ms),
            Curve::Cycle { points, repeat_ms } => last(points, elapsed_ms % repeat_ms.max(f64::MIN_POSITIVE)),
            Curve::Ramp { from, step, every_ms, steps } => {
                let taken = (elapsed_ms / every_ms.max(1e-6)) as u64;
                let taken = steps.map_or(taken, |steps| taken % steps.max(1));
                from.saturating_add(step.saturating_mul(taken))
            }
        }
    }
}

fn last(points: &[Point], elapsed_ms: f64) -> u64 {
    let come = points.partition_point(|point| point.at_ms <= elapsed_ms);
    come.checked_sub(1).and_then(|last| points.get(last)).map_or(0, |point| point.value)
}

fn yes() -> bool {
    true
}

fn none() -> u32 {
    u32::MAX
}

impl Default for Control {
    fn default() -> Self {
        Self {
            driver_version: "580.159.04".into(),
            gpus: Vec::new(),
            xids: Vec::new(),
            behaviour: Behaviour::default(),
        }
    }
}

impl Default for Gpu {
    fn default() -> Self {
        Self {
            name: "NVIDIA H200".into(),
            uuid: None,
            bus_id: None,
            total: 150_754_820_096,
            reserved: 615 << 20,
            used: Curve::Constant(0),
            utilization: Curve::Constant(0),
            memory_utilization: Curve::Constant(0),
            power_average_mw: Curve::Constant(76_000),
            power_instant_mw: Curve::Constant(77_000),
            power_limit_mw: Curve::Constant(700_000),
            temperature: Curve::Constant(30),
            slowdown_celsius: Some(89),
            shutdown_celsius: Some(95),
            sm_clock_mhz: Curve::Constant(345),
            memory_clock_mhz: Curve::Constant(3_201),
            throttle_reasons: Curve::Constant(1),
            // 77 W.
            energy_mj: Curve::Ramp { from: 1_000_000, step: 7_700, every_ms: 100.0, steps: None },
            bar1_used: Curve::Constant(1 << 20),
            pcie_tx_bytes: Curve::Constant(1 << 33),
            pcie_rx_bytes: Curve::Constant(1 << 34),
            pcie_narrow: false,
            gpm: None,
            nvlink: Vec::new(),
            fabric: None,
            ecc_corrected: 0,
            ecc_uncorrected: 0,
            pcie_link: [5, 16],
            pcie_best: [5, 16],
            rows_pending: false,
            rows_failed: false,
            recovery_action: 0,
            rows_corrected: 0,
            rows_uncorrected: 0,
            processes: Vec::new(),
            long_processes: false,
            mig: Vec::new(),
            lost: false,
            generation: 0,
            field_errors: BTreeMap::new(),
            field_delay_us: BTreeMap::new(),
            behaviour: Behaviour::default(),
        }
    }
}

impl Default for Mig {
    fn default() -> Self {
        Self {
            uuid: "MIG-00000000-0000-0000-0000-000000000000".into(),
            name: "NVIDIA H200 MIG 1g.18gb".into(),
            total: 16 << 30,
            reserved: 0,
            used: Curve::Constant(0),
            gpu_instance: 0,
            compute_instance: 0,
            profile_id: 19,
            start: 0,
            gpu_slices: 1,
            compute_slices: 1,
            processes: Vec::new(),
            behaviour: Behaviour::default(),
        }
    }
}
