//! Which GPU a job means: by index, UUID or PCI bus id, or by the devices that are visible to it.

use crate::gpu::{Device, MigPlace};
use crate::wire::{Gpu, GpuList as Named};
use std::collections::{BTreeSet, HashMap, HashSet};

/// A name that no GPU of the node has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no GPU `{0}` on this node")]
pub struct UnknownGpu(pub String);

/// The node's GPUs by every name that a job may give them.
#[derive(Debug, Default)]
pub struct Gpus {
    by_index: Vec<Option<usize>>,
    by_name: HashMap<String, usize>,
}

impl Gpus {
    /// The names of these devices.
    #[must_use]
    pub fn new(devices: &[Device]) -> Self {
        let (mut by_name, mut shared) = (HashMap::new(), HashSet::new());
        for (position, device) in devices.iter().enumerate() {
            by_name.insert(device.index.clone(), position);
            by_name.insert(device.uuid.to_ascii_lowercase(), position);
            for name in device_file(device).into_iter().chain(claimed_name(device)) {
                // Two compute instances of one GPU instance: the name says neither.
                if by_name.remove(&name).is_none() && !shared.contains(&name) {
                    by_name.insert(name, position);
                } else {
                    shared.insert(name);
                }
            }
            // A MIG instance shares its parent's bus id, and the parent stands before it.
            if let Some(bus_id) = &device.pci_bus_id {
                by_name.entry(bus_id_key(bus_id)).or_insert(position);
            }
        }
        let indexes = (0..devices.len()).map(|index| by_name.get(&index.to_string()).copied());
        Self { by_index: indexes.collect(), by_name }
    }

    /// The positions of the GPUs that a job names, each once and in order.
    ///
    /// # Errors
    /// The first name that no GPU has.
    pub fn resolve(&self, named: &Named) -> Result<Vec<usize>, UnknownGpu> {
        let one = |gpu: &Gpu| match gpu {
            Gpu::Index(index) => {
                let known = self.by_index.get(*index as usize).copied().flatten();
                known.or_else(|| self.find(&index.to_string())).ok_or_else(|| UnknownGpu(index.to_string()))
            }
            Gpu::Name(name) => self.find(name).ok_or_else(|| UnknownGpu(name.clone())),
        };
        match named {
            Named::One(gpu) => Ok(vec![one(gpu)?]),
            Named::Many(gpus) => {
                let named: BTreeSet<usize> = gpus.iter().map(one).collect::<Result<_, _>>()?;
                Ok(named.into_iter().collect())
            }
        }
    }

    /// The GPU that process number `local_rank` of a node uses if its `CUDA_VISIBLE_DEVICES` is `visible`. Without a local rank,
    /// only a single visible device is conclusive. For a process in a container, `given` has the container's GPUs: indexes refer
    /// to these, and without `visible` all of them are visible.
    #[must_use]
    pub fn visible(&self, visible: Option<&str>, local_rank: Option<usize>, given: Option<&[usize]>) -> Option<usize> {
        let of_name = |name: &str| match (given, name.parse::<usize>()) {
            (Some(given), Ok(index)) => given.get(index).copied(),
            _ => self.find(name),
        };
        let seen: Vec<Option<usize>> = match (visible, given) {
            (Some(visible), _) => {
                let names = visible.split(',').map(str::trim).filter(|name| !name.is_empty());
                names.take(64).map(of_name).collect()
            }
            (None, Some(given)) => given.iter().copied().map(Some).collect(),
            (None, None) => return None,
        };
        // Launchers either give each process one device or all of them to each.
        *if seen.len() == 1 { seen.first() } else { seen.get(local_rank?) }?
    }

    /// Positions of the GPUs with these UUIDs or device files, in the node's order, which is CUDA's among equal GPUs.
    ///
    /// # Errors
    /// The first name that is not known.
    pub fn with_names<'a>(&self, names: &'a [String]) -> Result<Vec<usize>, &'a str> {
        let found: BTreeSet<usize> =
            names.iter().map(|name| self.find(name).ok_or(name.as_str())).collect::<Result<_, _>>()?;
        Ok(found.into_iter().collect())
    }

    /// The position of the device with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        let key = name.to_ascii_lowercase();
        self.by_name.get(&key).or_else(|| self.by_name.get(&bus_id_key(&key))).copied()
    }
}

/// The name of a device by its file: `/dev/nvidia3`, and `/dev/nvidia3/gi7` of the GPU instance 7 on it.
fn device_file(device: &Device) -> Option<String> {
    let gpu = format!("/dev/nvidia{}", device.minor?);
    match (&device.parent_uuid, device.gpu_instance) {
        (None, _) => Some(gpu),
        (Some(_), Some(instance)) => Some(format!("{gpu}/gi{instance}")),
        (Some(_), None) => None,
    }
}

/// The name of a MIG instance in claims of dynamic resource allocation, without what NVIDIA's driver adds to it: `gpu-3-mig-19-4`.
fn claimed_name(device: &Device) -> Option<String> {
    let MigPlace { profile, start } = device.mig_place?;
    Some(format!("gpu-{}-mig-{profile}-{start}", device.minor?))
}

/// `0000:1b:00.0`, `00000000:1B:00.0` and `1b:00.0` are one bus id.
fn bus_id_key(bus_id: &str) -> String {
    let bus_id = bus_id.to_ascii_lowercase();
    match bus_id.matches(':').count() {
        2 => bus_id.trim_start_matches('0').trim_start_matches(':').to_owned(),
        _ => bus_id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Gpus {
        let device = |index: &str, uuid: &str, bus_id: &str| Device {
            index: index.into(),
            uuid: uuid.into(),
            pci_bus_id: Some(bus_id.into()),
            ..Device::default()
        };
        Gpus::new(&[
            device("0", "GPU-aa", "00000000:1B:00.0"),
            device("0:0", "MIG-bb", "00000000:1B:00.0"),
            device("1", "GPU-cc", "00000001:43:00.0"),
        ])
    }

    #[test]
    fn every_usual_name_finds_the_gpu() {
        let named = |text: &str| node().resolve(&Named::One(Gpu::Name(text.into())));
        assert_eq!(node().resolve(&Named::One(Gpu::Index(1))), Ok(vec![2]));
        let twice = Named::Many(vec![Gpu::Index(1), Gpu::Name("GPU-cc".into()), Gpu::Index(0), Gpu::Index(1)]);
        assert_eq!(node().resolve(&twice), Ok(vec![0, 2]), "each once");
        for name in ["0", "GPU-aa", "gpu-AA", "00000000:1b:00.0", "0000:1B:00.0", "1b:00.0"] {
            assert_eq!(named(name), Ok(vec![0]), "{name}");
        }
        assert_eq!(named("0:0"), Ok(vec![1]));
        assert_eq!(named("0001:43:00.0"), Ok(vec![2]));
        assert_eq!(named("GPU-dd"), Err(UnknownGpu("GPU-dd".into())));
    }

    #[test]
    fn a_device_file_names_a_gpu_or_an_instance_on_it() {
        let gpu = |uuid: &str, minor| Device { uuid: uuid.into(), minor, ..Device::default() };
        let instance = |uuid: &str, gpu_instance| Device {
            parent_uuid: Some("GPU-aa".into()),
            gpu_instance,
            ..gpu(uuid, Some(4))
        };
        let instances = [instance("MIG-bb", Some(7)), instance("MIG-cc", None), instance("MIG-dd", Some(1))];
        let gpus = Gpus::new(&[&[gpu("GPU-aa", Some(4))], &instances[..], &[gpu("GPU-ee", None)]].concat());
        let find = |file| gpus.find(file);
        assert_eq!(find("/dev/nvidia4"), Some(0), "an instance does not take its GPU's name");
        assert_eq!([find("/dev/nvidia4/gi7"), find("/dev/nvidia4/gi1")], [Some(1), Some(3)]);
        assert_eq!([find("/dev/nvidia0"), find("/dev/nvidia4/gi2")], [None, None]);
    }

    #[test]
    fn a_claim_names_an_instance_by_its_profile_and_its_place() {
        let instance = |uuid: &str, start| Device {
            uuid: uuid.into(),
            minor: Some(4),
            mig_place: Some(MigPlace { profile: 19, start }),
            ..Device::default()
        };
        let gpus = Gpus::new(&[instance("MIG-bb", 0), instance("MIG-cc", 4)]);
        let names = ["gpu-4-mig-19-0", "gpu-4-mig-19-4", "gpu-4-mig-19-5", "gpu-3-mig-19-4"];
        assert_eq!(names.map(|name| gpus.find(name)), [Some(0), Some(1), None, None]);
        let shared = Gpus::new(&[instance("MIG-bb", 0), instance("MIG-cc", 0), instance("MIG-dd", 0)]);
        assert_eq!(shared.find("gpu-4-mig-19-0"), None, "compute instances of one GPU instance");
    }

    #[test]
    fn visible_devices_with_the_local_rank_find_the_gpu() {
        let visible = |visible, local_rank| node().visible(Some(visible), local_rank, None);
        assert_eq!(visible("0,1", Some(1)), Some(2));
        assert_eq!(visible("GPU-cc", Some(3)), Some(2), "one device a process");
        assert_eq!(visible("GPU-cc", None), Some(2));
        assert_eq!(visible("0,1", Some(2)), None);
        assert_eq!(visible("0,1", None), None, "no guess");
        assert_eq!(visible("", Some(0)), None);
        assert_eq!(node().visible(None, Some(0), None), None);
    }

    #[test]
    fn in_a_container_indexes_count_among_the_gpus_that_it_was_given() {
        let uuids = |uuids: &[&str]| uuids.iter().map(|uuid| (*uuid).to_owned()).collect::<Vec<_>>();
        let given = node().with_names(&uuids(&["GPU-cc"])).expect("known");
        assert_eq!(given, [2]);
        assert_eq!(node().with_names(&uuids(&["GPU-cc", "GPU-aa"])), Ok(vec![0, 2]), "in the node's order");
        // Its second would be taken for its first.
        assert_eq!(node().with_names(&uuids(&["GPU-a", "GPU-cc"])), Err("GPU-a"));
        let visible = |visible, local_rank| node().visible(visible, local_rank, Some(&given));
        assert_eq!(visible(Some("0"), None), Some(2), "its first, which is the node's second");
        assert_eq!(visible(None, None), Some(2), "its only one");
        assert_eq!(visible(Some("1"), None), None);
        assert_eq!(visible(Some("GPU-aa"), None), Some(0), "a UUID is what it is");
        let both = [0, 2];
        assert_eq!(node().visible(None, Some(1), Some(&both)), Some(2));
        assert_eq!(node().visible(None, None, Some(&both)), None, "no guess");
        assert_eq!(node().visible(Some("0"), None, Some(&[])), None, "not known what it was given");
    }
}
