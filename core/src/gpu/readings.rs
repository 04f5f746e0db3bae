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
}

/// One process on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id, in the driver's view of this namespace.
    pub pid: u32,
    /// Its memory on this GPU, bytes; `None` where the driver will not say.
    pub used_bytes: Option<u64>,
}
