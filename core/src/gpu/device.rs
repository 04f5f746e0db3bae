//! One GPU or MIG instance, as a source finds it.

/// The GPU instance of a GPU that is meant, before and after it exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigPlace {
    /// NVML's number of its profile: 19 for `1g.18gb`.
    pub profile: u32,
    /// Its first memory slice.
    pub start: u32,
}

/// One GPU or MIG instance, as it was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// The index that `nvidia-smi` shows; `gpu:instance` for a MIG instance.
    pub index: String,
    /// NVML's UUID, with its `GPU-` or `MIG-` prefix.
    pub uuid: String,
    /// The number of its device file: 3 for `/dev/nvidia3`. A MIG instance has its GPU's.
    pub minor: Option<u32>,
    /// The id of the GPU instance, of a MIG instance.
    pub gpu_instance: Option<u32>,
    /// Where that lies on its GPU.
    pub mig_place: Option<MigPlace>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_jobs_can_have_is_the_total_less_what_the_driver_reserves() {
        let usable = |memory_total_bytes, memory_reserved_bytes| {
            Device { memory_total_bytes, memory_reserved_bytes, ..Device::default() }.usable_bytes()
        };
        assert_eq!((usable(Some(100), Some(30)), usable(Some(100), None)), (Some(70), Some(100)));
        assert_eq!((usable(Some(100), Some(300)), usable(None, Some(30))), (Some(0), None));
    }
}
