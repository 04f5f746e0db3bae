//! The devices of a scenario's GPUs: each GPU, followed by its MIG instances.

use super::{DeviceRef, GpuGroup, Scenario};
use crate::sim::random::Random;
use highwater_core::gpu::Device;

/// The devices of a node, in the order of [`highwater_core::source::Source::devices`].
#[derive(Debug)]
pub(in crate::sim) struct Fleet {
    pub(in crate::sim) devices: Vec<Device>,
    /// For each device, the GPU that it is an instance of.
    pub(in crate::sim) parents: Vec<Option<usize>>,
}

impl Fleet {
    pub(in crate::sim) fn of(scenario: &Scenario) -> Self {
        let mut fleet = Self { devices: Vec::new(), parents: Vec::new() };
        let groups = scenario.gpus.iter().flat_map(|group| std::iter::repeat_n(group, group.count));
        for (index, group) in groups.enumerate() {
            fleet.add(group, index, scenario.seed);
        }
        fleet
    }

    fn add(&mut self, group: &GpuGroup, index: usize, seed: u64) {
        let parent = self.devices.len();
        let uuid = uuid("GPU", &[seed, index as u64]);
        self.parents.push(None);
        self.devices.push(Device {
            index: index.to_string(),
            uuid: uuid.clone(),
            minor: u32::try_from(index).ok(),
            name: Some(group.name.clone()),
            pci_bus_id: Some(format!("00000000:{:02X}:00.0", index + 1)),
            memory_total_bytes: Some(group.total.0),
            memory_reserved_bytes: Some(group.reserved.0),
            ..Device::default()
        });
        for (position, instance) in group.mig.iter().enumerate() {
            self.parents.push(Some(parent));
            self.devices.push(Device {
                index: format!("{index}:{position}"),
                uuid: self::uuid("MIG", &[seed, index as u64, position as u64]),
                minor: u32::try_from(index).ok(),
                gpu_instance: u32::try_from(position + 1).ok(),
                name: Some(format!("{} MIG {}", group.name, instance.profile)),
                pci_bus_id: Some(format!("00000000:{:02X}:00.0", index + 1)),
                parent_uuid: Some(uuid.clone()),
                mig_profile: Some(instance.profile.clone()),
                memory_total_bytes: Some(instance.total.0),
                memory_reserved_bytes: Some(0),
                ..Device::default()
            });
        }
    }

    /// The position of a device; `None` if it does not exist.
    pub(in crate::sim) fn find(&self, device: &DeviceRef) -> Option<usize> {
        let index = device.to_string();
        self.devices.iter().position(|device| device.index == index)
    }

    /// Whether a GPU is split into MIG instances.
    pub(in crate::sim) fn is_split(&self, position: usize) -> bool {
        self.parents.contains(&Some(position))
    }

    /// Bytes of a device that jobs can use; 0 if the device does not exist.
    pub(in crate::sim) fn usable_bytes(&self, position: usize) -> u64 {
        self.devices.get(position).and_then(Device::usable_bytes).unwrap_or(0)
    }

    /// The device itself and, for a GPU, its instances: the devices that an event on it affects or comes from.
    pub(in crate::sim) fn within(&self, position: usize) -> impl Iterator<Item = usize> {
        (0..self.devices.len()).filter(move |other| *other == position || self.parents[*other] == Some(position))
    }
}

fn uuid(prefix: &str, key: &[u64]) -> String {
    let mut random = Random::keyed(key);
    let (high, low) = (random.bits(), random.bits());
    format!(
        "{prefix}-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_follow_their_gpu_and_name_it() {
        let text = "[[gpus]]\n[[gpus]]\nmig = [{ profile = \"1g.18gb\", total = \"16 GiB\" }]\n";
        let fleet = Fleet::of(&Scenario::parse(text, "mig.toml").expect("good"));
        let indexes: Vec<&str> = fleet.devices.iter().map(|device| device.index.as_str()).collect();
        assert_eq!(indexes, ["0", "1", "1:0"]);
        assert_eq!(fleet.devices[2].parent_uuid.as_deref(), Some(fleet.devices[1].uuid.as_str()));
        assert_eq!(fleet.find(&DeviceRef::Name("1:0".into())), Some(2));
        assert_eq!(fleet.find(&DeviceRef::Index(1)), Some(1));
        assert_eq!(fleet.within(1).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(fleet.usable_bytes(0), (143_771 - 615) << 20);
        assert_eq!(fleet.devices[0].uuid.len(), "GPU-".len() + 36);
    }
}
