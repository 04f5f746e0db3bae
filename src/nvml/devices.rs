//! Finds the GPUs and MIG instances when NVML is opened.
//!
//! Enters: an initialized library. Leaves: the devices found, in NVML's order, each GPU followed by its MIG instances,
//! and the devices skipped, with the reason. Invariant: a GPU that does not answer affects no other GPU.

use super::errors::Code;
use super::progress::Progress;
use super::raw::{Handle, MemoryVersion, RawFunctions};
use super::unit::{Instance, Unit};
use highwater_core::gpu::Device;
use highwater_core::source::Skipped;
use nvml_wrapper::Nvml as Library;
use std::collections::HashSet;

/// The devices of the node, or of one GPU.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) devices: Vec<Device>,
    pub(super) units: Vec<Unit>,
    pub(super) skipped: Vec<Skipped>,
    /// Devices that this process may not access, because of permissions or its control group.
    pub(super) kept_back: Vec<Skipped>,
}

/// Opens one GPU, with its MIG instances.
pub(super) fn open(
    library: &Library,
    raw: &RawFunctions,
    index: u32,
    driver_version: Option<&str>,
    progress: &Progress,
) -> Found {
    let mut finder = Finder { library, raw, driver_version, progress, found: Found::default() };
    finder.add_gpu(index);
    finder.found
}

impl Found {
    /// The devices of several GPUs, in this order.
    pub(super) fn joined(all: impl Iterator<Item = Found>) -> Found {
        all.fold(Found::default(), |mut joined, mut next| {
            let before = joined.devices.len();
            next.units.iter_mut().filter_map(|unit| unit.instance.as_mut()).for_each(|own| own.parent += before);
            joined.devices.append(&mut next.devices);
            joined.units.append(&mut next.units);
            joined.skipped.append(&mut next.skipped);
            joined.kept_back.append(&mut next.kept_back);
            joined
        })
    }
}

struct Finder<'a> {
    library: &'a Library,
    raw: &'a RawFunctions,
    driver_version: Option<&'a str>,
    progress: &'a Progress,
    found: Found,
}

impl Finder<'_> {
    fn add_gpu(&mut self, index: u32) {
        match open_gpu(self.library, index, Some(self.progress)) {
            Ok((gpu, uuid)) => {
                let parent = self.found.devices.len();
                self.progress.at("nvmlDeviceGetMinorNumber");
                let minor = gpu.minor_number().ok();
                self.add(&gpu, Device { index: index.to_string(), uuid, minor, ..Device::default() }, None);
                self.add_instances(&gpu, parent);
            }
            Err(code) => self.skip(index.to_string(), code),
        }
    }

    fn add_instances(&mut self, gpu: &nvml_wrapper::Device<'_>, parent: usize) {
        let gpu_index = self.found.devices[parent].index.clone();
        self.progress.at("nvmlDeviceGetMigMode");
        for place in 0..instance_places(gpu).unwrap_or(0) {
            let index = format!("{gpu_index}:{place}");
            self.progress.at("nvmlDeviceGetMigDeviceHandleByIndex");
            match open_instance(gpu, place) {
                Ok(Some((mig, uuid))) => self.add_instance(&mig, index, uuid, (parent, handle_of(gpu))),
                Ok(None) => {}
                Err(code) => self.skip(index, code),
            }
        }
    }

    fn add_instance(
        &mut self,
        mig: &nvml_wrapper::Device<'_>,
        index: String,
        uuid: String,
        (parent, parent_handle): (usize, Handle),
    ) {
        let gpu = &self.found.devices[parent];
        let handle = handle_of(mig);
        let ids = self.raw.instance_ids(handle).ok();
        self.progress.at("nvmlDeviceGetGpuInstanceById");
        let mig_place = ids.and_then(|(gpu_instance, _)| self.raw.mig_place(parent_handle, gpu_instance).ok());
        let device = Device {
            index,
            uuid,
            parent_uuid: Some(gpu.uuid.clone()),
            mig_profile: self.profile(mig, handle, gpu.memory_total_bytes),
            pci_bus_id: gpu.pci_bus_id.clone(),
            minor: gpu.minor,
            gpu_instance: ids.map(|(gpu_instance, _)| gpu_instance),
            mig_place,
            ..Device::default()
        };
        self.add(mig, device, Some(Instance { parent, ids }));
    }

    /// Fills in the missing properties, and adds it to the list.
    fn add(&mut self, opened: &nvml_wrapper::Device<'_>, mut device: Device, instance: Option<Instance>) {
        let handle = handle_of(opened);
        self.progress.at("nvmlDeviceGetMemoryInfo");
        let unit = Unit::new(self.raw, handle, instance);
        let memory = self.raw.memory(unit.memory_version(), handle).ok();
        self.progress.at("nvmlDeviceGetName");
        device.name = opened.name().ok();
        if device.pci_bus_id.is_none() {
            self.progress.at("nvmlDeviceGetPciInfo");
            device.pci_bus_id = opened.pci_info().ok().map(|pci| pci.bus_id);
        }
        device.driver_version = self.driver_version.map(str::to_owned);
        device.memory_total_bytes = memory.map(|memory| memory.total);
        device.memory_reserved_bytes = memory.and_then(|memory| memory.reserved);
        if unit.memory_version() != MemoryVersion::V2 {
            tracing::warn!(gpu = device.index, call = ?unit.memory_version(), "this GPU does not answer the current memory call");
        }
        self.found.devices.push(device);
        self.found.units.push(unit);
    }

    fn skip(&mut self, index: String, code: Code) {
        let reason = code.to_string();
        tracing::warn!(gpu = index, reason, "this GPU cannot be opened and is left out");
        // A device that is withheld from this process works for others, so it is not reported as down.
        let is_kept_back = matches!(code, Code::NO_PERMISSION | Code::OPERATING_SYSTEM);
        let list = if is_kept_back { &mut self.found.kept_back } else { &mut self.found.skipped };
        list.push(Skipped { index, reason });
    }

    /// From the name, as in `NVIDIA H200 MIG 1g.18gb`; from the slices if the name has no profile.
    fn profile(&self, mig: &nvml_wrapper::Device<'_>, handle: Handle, gpu_memory_bytes: Option<u64>) -> Option<String> {
        let named = mig.name().ok().and_then(|name| Some(name.split_once(" MIG ")?.1.trim().to_owned()));
        named.filter(|profile| !profile.is_empty()).or_else(|| {
            let slices = self.raw.attributes(handle).ok()?;
            profile_of(
                slices.gpuInstanceSliceCount,
                slices.computeInstanceSliceCount,
                slices.memorySizeMB,
                gpu_memory_bytes?,
            )
        })
    }
}

fn open_gpu<'a>(
    library: &'a Library,
    index: u32,
    progress: Option<&Progress>,
) -> Result<(nvml_wrapper::Device<'a>, String), Code> {
    let at = |call| progress.into_iter().for_each(|progress| progress.at(call));
    at("nvmlDeviceGetHandleByIndex");
    let gpu = library.device_by_index(index)?;
    at("nvmlDeviceGetUUID");
    let uuid = gpu.uuid()?;
    Ok((gpu, uuid))
}

/// Slots for MIG instances; 0 if the GPU is not in MIG mode, or has none.
fn instance_places(gpu: &nvml_wrapper::Device<'_>) -> Result<u32, Code> {
    const ENABLED: u32 = 1;
    match gpu.mig_mode().map_err(Code::from) {
        Ok(mode) if mode.current == ENABLED => Ok(gpu.mig_device_count()?),
        Ok(_) => Ok(0),
        Err(Code::NOT_SUPPORTED) => Ok(0),
        Err(code) => Err(code),
    }
}

/// The MIG instance in this slot of a GPU; `None` if the slot is empty.
fn open_instance<'a>(
    gpu: &nvml_wrapper::Device<'a>,
    place: u32,
) -> Result<Option<(nvml_wrapper::Device<'a>, String)>, Code> {
    let opened = gpu.mig_device_by_index(place).and_then(|mig| mig.uuid().map(|uuid| (mig, uuid)));
    match opened.map_err(Code::from) {
        Ok(opened) => Ok(Some(opened)),
        Err(Code::NOT_FOUND | Code::INVALID_ARGUMENT) => Ok(None),
        Err(code) => Err(code),
    }
}

/// Whether NVML lists devices that are not among these, or no longer lists an instance of a GPU that answers. A missing
/// GPU does not count: its readings report it as lost. GPUs that are not `asked` are left alone.
pub(super) fn differ(library: &Library, devices: &[Device], asked: impl Fn(u32) -> bool) -> bool {
    let known: HashSet<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    let indices = (0..library.device_count().unwrap_or(0)).filter(|index| asked(*index));
    let gpus = indices.filter_map(|index| open_gpu(library, index, None).ok());
    for (gpu, uuid) in gpus {
        if !known.contains(uuid.as_str()) {
            return true;
        }
        // A GPU that does not answer shows nothing about its instances.
        let Ok(places) = instance_places(&gpu) else { continue };
        let (mut shown, mut is_whole) = (HashSet::new(), true);
        for place in 0..places {
            match open_instance(&gpu, place) {
                Ok(instance) => shown.extend(instance.map(|(_, uuid)| uuid)),
                Err(_) => is_whole = false,
            }
        }
        let mut of_gpu = devices.iter().filter(|device| device.parent_uuid.as_ref() == Some(&uuid));
        let has_lost_one = is_whole && of_gpu.any(|device| !shown.contains(&device.uuid));
        if has_lost_one || shown.iter().any(|uuid| !known.contains(uuid.as_str())) {
            return true;
        }
    }
    false
}

/// The handle inside the wrapper's device.
pub(super) fn handle_of(device: &nvml_wrapper::Device<'_>) -> Handle {
    // SAFETY: the handle is only passed back to the library that gave it out.
    Handle(unsafe { device.handle() })
}

/// The name of a profile as NVIDIA forms it. Its size is a number of eighths of the GPU's size in GiB. Both are rounded up, and
/// the product is rounded to the nearest GiB.
fn profile_of(gpu_slices: u32, compute_slices: u32, memory_mib: u64, gpu_memory_bytes: u64) -> Option<String> {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    if gpu_slices == 0 || gpu_memory_bytes == 0 {
        return None;
    }
    let eighths = memory_mib.checked_mul(MIB * 8)?.div_ceil(gpu_memory_bytes);
    let gigabytes = (eighths * gpu_memory_bytes.div_ceil(GIB) * 2 + 8) / 16;
    let gpu_part = format!("{gpu_slices}g.{gigabytes}gb");
    Some(if compute_slices == gpu_slices { gpu_part } else { format!("{compute_slices}c.{gpu_part}") })
}

#[cfg(test)]
mod tests {
    use super::profile_of;

    #[test]
    fn profiles_are_named_as_nvidia_names_them() {
        // A100-SXM4-40GB: 40,536 MiB; its instances have 4,864, 9,856 and 20,096 MiB.
        let a100 = 40_536 << 20;
        assert_eq!(profile_of(1, 1, 4_864, a100).as_deref(), Some("1g.5gb"));
        assert_eq!(profile_of(2, 2, 9_856, a100).as_deref(), Some("2g.10gb"));
        assert_eq!(profile_of(3, 3, 20_096, a100).as_deref(), Some("3g.20gb"));
        assert_eq!(profile_of(3, 1, 20_096, a100).as_deref(), Some("1c.3g.20gb"));
        assert_eq!(profile_of(0, 0, 0, a100), None);
        assert_eq!(profile_of(1, 1, 100, 0), None);
    }
}
