//! What a source reads of one GPU, each with `None` for "not available here".

/// The medium lane's readings of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Medium {
    /// Share of the driver's last window in which a kernel ran, 0 to 1.
    pub utilization_ratio: Option<f64>,
    /// Share of that window in which device memory was read or written, 0 to 1.
    pub memory_busy_ratio: Option<f64>,
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
    /// What its multiprocessors did over the last 500 ms and more.
    pub activity: Activity,
}

/// What the multiprocessors and the memory of a GPU did over a stretch of time, as shares of that time, 0 to 1. The names are
/// DCGM's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Activity {
    /// Share of the multiprocessors, over time, with at least one warp.
    pub sm_active_ratio: Option<f64>,
    /// Warps on the multiprocessors, as a share of the most that they can hold.
    pub sm_occupancy_ratio: Option<f64>,
    /// Share of the cycles in which any tensor core worked.
    pub tensor_active_ratio: Option<f64>,
    /// Share of the memory's bandwidth that was used.
    pub dram_active_ratio: Option<f64>,
}

impl Activity {
    /// That of a GPU on which no kernel ran.
    pub const NONE: Self = Self {
        sm_active_ratio: Some(0.0),
        sm_occupancy_ratio: Some(0.0),
        tensor_active_ratio: Some(0.0),
        dram_active_ratio: Some(0.0),
    };
}

/// Clock event reasons that slow a GPU down: their bits in NVML's mask, and NVML's names. Idle and application
/// clock settings are left out, because they are no problem.
pub const THROTTLE_REASONS: &[(u64, &str)] = &[
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
];

/// The reasons of [`THROTTLE_REASONS`] for which the clocks are lower than the GPU's own power limit allows: heat, the board or
/// its power supply, or another GPU. At the power limit, `sw_power_cap`, a GPU works as intended.
pub const SLOWDOWN_MASK: u64 = 0xF8;

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
    /// Whether rows wait to be remapped, which a reset of the GPU does.
    pub row_remap_pending: Option<bool>,
    /// Whether a row could not be remapped.
    pub row_remap_failed: Option<bool>,
    /// What the driver asks for to recover the GPU, as NVML's number: 0 is nothing.
    pub recovery_action: Option<u64>,
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

/// Readings that seldom change, and those whose calls take longest: on an H200 the calls take 3 ms together.
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
    /// The power draw that the driver enforces as the highest, watts. An operator may change it.
    pub power_limit_watts: Option<f64>,
    /// Core temperature at which the hardware slows the GPU down, degrees Celsius.
    pub slowdown_celsius: Option<f64>,
    /// Core temperature at which the GPU shuts down, degrees Celsius.
    pub shutdown_celsius: Option<f64>,
    /// The PCIe link. An idle GPU may lower its generation to save power.
    pub pcie_link: Option<PcieLink>,
    /// Which NVLinks are up.
    pub nvlinks: Option<NvLinks>,
    /// Errors of the NVLinks.
    pub nvlink_errors: NvLinkErrors,
    /// The GPU's part in the NVLink fabric; `None` where there is no fabric to join.
    pub fabric: Option<Fabric>,
}

/// The NVLinks of one GPU, one bit each: bit 3 is link 3.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvLinks {
    /// Those that the GPU has. Not all need be connected.
    pub present: u32,
    /// Those that are up.
    pub up: u32,
}

impl NvLinks {
    /// How many are up, and how many are not.
    #[must_use]
    pub fn counts(&self) -> (u32, u32) {
        (self.up.count_ones(), (self.present & !self.up).count_ones())
    }
}

/// Errors of all NVLinks of one GPU, since the driver was loaded. Data is sent again after each of them, so nothing is lost but
/// time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvLinkErrors {
    /// Packets that were sent again.
    pub replays: Option<u64>,
    /// Links that were trained again.
    pub recoveries: Option<u64>,
    /// Packets with a wrong checksum.
    pub crc: Option<u64>,
}

/// A GPU's part in the fabric of NVSwitches. Until it has joined, CUDA does not start on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fabric {
    /// How far it has joined, as NVML's number: 1 has not begun, 2 is joining, 3 has ended, with [`status`](Self::status).
    pub state: u32,
    /// What joining ended with, as NVML's return code: 0 is success.
    pub status: u32,
}

impl Fabric {
    /// Whether the GPU has joined.
    #[must_use]
    pub fn has_joined(&self) -> bool {
        self.state == 3 && self.status == 0
    }
}

/// A PCIe link as it is, and the best that the GPU and the board can do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PcieLink {
    /// PCIe generation.
    pub generation: u32,
    /// Number of lanes.
    pub width: u32,
    /// Highest PCIe generation.
    pub max_generation: u32,
    /// Highest number of lanes.
    pub max_width: u32,
}

impl PcieLink {
    /// The most that it can move in one direction, bytes per second, and the most at its best; `None` where the generation is
    /// not known. The encoding of each generation is taken into account.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<(f64, f64)> {
        // Bytes per second and lane, from the transfers and the encoding of PCI Express Base Specification 6.0.
        let lane = |generation: u32| {
            Some(match generation {
                1 => 2.5e9 * 0.8 / 8.0,
                2 => 5e9 * 0.8 / 8.0,
                3 => 8e9 * 128.0 / 130.0 / 8.0,
                4 => 16e9 * 128.0 / 130.0 / 8.0,
                5 => 32e9 * 128.0 / 130.0 / 8.0,
                6 => 64e9 * 242.0 / 256.0 / 8.0,
                _ => return None,
            })
        };
        let of = |generation, width: u32| Some(lane(generation)? * f64::from(width));
        Some((of(self.generation, self.width)?, of(self.max_generation, self.max_width)?))
    }
}

/// One process on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id, in the driver's view of this namespace.
    pub pid: u32,
    /// Its memory on this GPU, bytes; `None` where the driver will not say.
    pub used_bytes: Option<u64>,
}
