//! Metrics of GPUs under the names, units and labels of NVIDIA's dcgm-exporter, for the dashboards and alerts that people have.
//!
//! Enters: collected families, and the node's GPUs. Leaves: families with copies of their samples, for `/metrics` alone. Invariant: a
//! value that is not known has no sample here either. Absent on purpose: fields that no metric here corresponds to;
//! docs/from-dcgm-exporter.md has the expression for each, or says that there is none.

use super::catalogue::{self as c, Metric, MetricKind};
use super::families::{Families, Family, Labels, Sample, Value};
use highwater_core::gpu::{GpuState, Workload};
use highwater_engine::node::Node;
use std::collections::BTreeMap;

/// The labels of every field. Those that are empty are left out of the exposition. The last four are of the workload.
const LABELS: &[&str] = &[
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "GPU_I_PROFILE",
    "GPU_I_ID",
    "Hostname",
    "DCGM_FI_DRIVER_VERSION",
    "container",
    "namespace",
    "pod",
    "hpc_job",
];

/// A field of DCGM with what it is here.
pub(super) struct DcgmField {
    metric: Metric,
    from: &'static Metric,
    /// The value of `from`'s third label, if it has three.
    part: Option<&'static str>,
    /// What a value of `from` is multiplied by.
    factor: f64,
}

macro_rules! fields {
    ($($name:literal $kind:ident $help:literal = $from:ident $([$part:literal])? * $factor:literal;)*) => {
        &[$(DcgmField {
            metric: Metric { name: $name, kind: MetricKind::$kind, labels: LABELS, help: $help, place: usize::MAX },
            from: &c::$from,
            part: fields!(@part $($part)?),
            factor: $factor,
        }),*]
    };
    (@part) => { None };
    (@part $part:literal) => { Some($part) };
}

/// Every field but the last XID, which is no copy of one sample.
pub(super) static FIELDS: &[DcgmField] = fields! {
    "DCGM_FI_DEV_SM_CLOCK" Gauge "Clock of the multiprocessors, MHz." = GPU_SM_CLOCK * 1e-6;
    "DCGM_FI_DEV_MEM_CLOCK" Gauge "Clock of the memory, MHz." = GPU_MEMORY_CLOCK * 1e-6;
    "DCGM_FI_DEV_GPU_TEMP" Gauge "Temperature of the GPU, degrees Celsius." = GPU_TEMPERATURE * 1.0;
    "DCGM_FI_DEV_POWER_USAGE" Gauge "Power draw, watts." = GPU_POWER * 1.0;
    "DCGM_FI_DEV_POWER_MGMT_LIMIT" Gauge "Power limit in force, watts." = GPU_POWER_LIMIT * 1.0;
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION" Counter "Energy since the driver was loaded, millijoules." = GPU_ENERGY * 1e3;
    "DCGM_FI_DEV_GPU_UTIL" Gauge "Time in which a kernel ran, percent." = GPU_UTILIZATION * 100.0;
    "DCGM_FI_DEV_MEM_COPY_UTIL" Gauge "Time in which memory was read or written, percent." = GPU_MEMORY_BUSY * 100.0;
    "DCGM_FI_DEV_FB_TOTAL" Gauge "Framebuffer, MiB." = GPU_MEMORY_TOTAL * 9.5367431640625e-7;
    "DCGM_FI_DEV_FB_FREE" Gauge "Framebuffer free, MiB." = GPU_MEMORY_FREE * 9.5367431640625e-7;
    "DCGM_FI_DEV_FB_USED" Gauge "Framebuffer in use without the driver's reserve, MiB." = GPU_MEMORY_USED * 9.5367431640625e-7;
    "DCGM_FI_DEV_FB_RESERVED" Gauge "Framebuffer that the driver reserves, MiB." = GPU_MEMORY_RESERVED * 9.5367431640625e-7;
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL" Counter "Corrected ECC errors since the driver was loaded." = GPU_ECC_ERRORS ["corrected"] * 1.0;
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" Counter "Uncorrected ECC errors since the driver was loaded." = GPU_ECC_ERRORS ["uncorrected"] * 1.0;
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS" Counter "Rows remapped for correctable errors." = GPU_REMAPPED_ROWS ["corrected"] * 1.0;
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS" Counter "Rows remapped for uncorrectable errors." = GPU_REMAPPED_ROWS ["uncorrected"] * 1.0;
    "DCGM_FI_DEV_ROW_REMAP_FAILURE" Gauge "Whether a row could not be remapped." = GPU_ROW_REMAP_FAILED * 1.0;
    "DCGM_FI_DEV_ROW_REMAP_PENDING" Gauge "Whether rows wait to be remapped." = GPU_ROW_REMAP_PENDING * 1.0;
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE" Gauge "Share of time in which a kernel ran, by NVML's utilization." = GPU_UTILIZATION * 1.0;
    "DCGM_FI_PROF_SM_ACTIVE" Gauge "Share of the multiprocessors with a warp." = GPU_SM_ACTIVE * 1.0;
    "DCGM_FI_PROF_SM_OCCUPANCY" Gauge "Warps, as a share of the most." = GPU_SM_OCCUPANCY * 1.0;
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" Gauge "Share of cycles in which a tensor core worked." = GPU_TENSOR_ACTIVE * 1.0;
    "DCGM_FI_PROF_DRAM_ACTIVE" Gauge "Share of the memory's bandwidth in use." = GPU_DRAM_ACTIVE * 1.0;
};

static XID: Metric = Metric {
    name: "DCGM_FI_DEV_XID_ERRORS",
    kind: MetricKind::Gauge,
    labels: LABELS,
    help: "The number of the last XID error. Absent where none was seen since the daemon started.",
    place: usize::MAX,
};

/// The same samples under DCGM's names; `host` is the node's name.
pub(super) fn families(families: &Families, node: &Node, host: &str) -> Vec<Family> {
    let labels = all_labels(node, host);
    let of = |field: &'static DcgmField| {
        let own = families.samples_of(field.from).iter();
        let own = own
            .filter(|sample| field.part.is_none_or(|part| sample.labels.get(2).is_some_and(|label| **label == *part)));
        let copy = |sample: &Sample| {
            let Value::Number(value) = sample.value else { return None };
            let labels = labels.get(&**sample.labels.get(1)?)?.clone();
            Some(Sample { labels, value: Value::Number(scaled(value, field.factor)) })
        };
        (&field.metric, own.filter_map(copy).collect::<Vec<_>>())
    };
    // A GPU without one may be a GPU whose driver reports none: 0 would be a claim.
    let xid = |gpu: &GpuState| {
        let (xid, _) = gpu.xids().into_iter().max_by_key(|(_, seen)| seen.last_ns)?;
        #[allow(clippy::cast_precision_loss, reason = "a number of some digits")]
        Some(Sample { labels: labels.get(&*gpu.device.uuid)?.clone(), value: Value::Number(xid as f64) })
    };
    let all = FIELDS.iter().map(of).chain([(&XID, node.gpus.iter().filter_map(xid).collect())]);
    all.filter(|(_, samples)| !samples.is_empty())
        .map(|(metric, samples)| Family::of_numbers(metric, samples))
        .collect()
}

/// The labels of each GPU, by its UUID. Two compute instances of one GPU instance have equal ones, and so has every instance of a
/// profile whose number the driver does not say: these are left out, as Prometheus would take one and drop the others.
fn all_labels<'a>(node: &'a Node, host: &str) -> BTreeMap<&'a str, Labels> {
    let all: Vec<_> = node.gpus.iter().map(|gpu| (&*gpu.device.uuid, labels(gpu, node, host))).collect();
    // The workload's labels do not count: they would be the only difference between an instance with a pod and one without.
    let device = |labels: &Labels| labels.iter().take(LABELS.len() - 4).cloned().collect::<Vec<_>>();
    let is_alone = |own: &Labels| all.iter().filter(|(_, other)| device(other) == device(own)).count() == 1;
    all.iter().filter(|(_, own)| is_alone(own)).cloned().collect()
}

/// Percentages come from whole ones: 0.57 is 57, and not 56.99999999999999.
fn scaled(value: f64, factor: f64) -> f64 {
    let scaled = value * factor;
    if factor == 100.0 { (scaled * 1e6).round() / 1e6 } else { scaled }
}

/// A MIG instance has the index and the UUID of its GPU, and its own profile and number. The pod, or the Slurm job, is named where one alone has the GPU:
/// dcgm-exporter names one of several.
fn labels(gpu: &GpuState, node: &Node, host: &str) -> Labels {
    let device = &gpu.device;
    let parent = node.gpus.iter().find(|other| device.parent_uuid.as_ref() == Some(&other.device.uuid));
    let whole = parent.map_or(device, |parent| &parent.device);
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let number = |number: Option<u32>| number.map(|number| number.to_string()).unwrap_or_default();
    let file = device.minor.map(|minor| format!("nvidia{minor}")).unwrap_or_default();
    let workloads = gpu.workloads();
    let one = workloads.as_ref().and_then(|workloads| match &*workloads.rows {
        [one] => Some(&one.name),
        _ => None,
    });
    let pod = one.and_then(Workload::pod);
    let [container, namespace, pod] = pod.map_or([""; 3], |name| [&name.container, &name.namespace, &name.pod]);
    // A job has several steps: its script, and what that started.
    let mut jobs = workloads
        .iter()
        .flat_map(|workloads| &workloads.rows)
        .filter_map(|row| row.name.slurm())
        .map(|step| &*step.job);
    let first = jobs.next().unwrap_or_default();
    let job = if jobs.all(|other| other == first) { first } else { "" };
    Labels::found(&[
        &whole.index,
        &whole.uuid,
        &text(&whole.pci_bus_id),
        &file,
        &text(&whole.name),
        &text(&device.mig_profile),
        &number(device.gpu_instance),
        host,
        &text(&device.driver_version),
        container,
        namespace,
        pod,
        job,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::Manual;
    use highwater_core::gpu::{Device, GpuWorkloads, PodName, WorkloadRow, Xid};
    use std::sync::Arc;

    fn row(pod: &str) -> WorkloadRow {
        let [namespace, container] = ["ml", "main"].map(str::to_owned);
        let name = Workload::Pod(PodName { namespace, pod: pod.into(), container });
        WorkloadRow { name, used_bytes: None }
    }

    /// A GPU with an XID and a pod, and one that is split, with one instance that two pods share.
    fn node() -> Node {
        let whole = |index: &str, uuid: &str| Device {
            index: index.into(),
            uuid: uuid.into(),
            minor: index.parse().ok(),
            name: Some("NVIDIA H200".into()),
            pci_bus_id: Some("00000000:1B:00.0".into()),
            driver_version: Some("580.1".into()),
            ..Device::default()
        };
        let instance = Device {
            parent_uuid: Some("GPU-b".into()),
            gpu_instance: Some(7),
            mig_profile: Some("1g.18gb".into()),
            ..whole("1:0", "MIG-x")
        };
        let devices = vec![whole("0", "GPU-a"), whole("1", "GPU-b"), Device { minor: Some(1), ..instance }];
        let (node, _) = Node::of_devices(Arc::new(Manual::at(9)), devices, true);
        let seen = |last_ns| Xid { count: 1, last_ns };
        node.gpus[0].set_xids([(79, seen(5)), (31, seen(8))].into());
        node.gpus[0].set_workloads(Some(GpuWorkloads { rows: vec![row("llama")], ..GpuWorkloads::default() }));
        node.gpus[2].set_workloads(Some(GpuWorkloads { rows: vec![row("a"), row("b")], ..GpuWorkloads::default() }));
        node
    }

    #[test]
    fn values_and_labels_are_dcgms() {
        let node = node();
        let mut collected = Families::default();
        for (gpu, used) in [(["0", "GPU-a"], 3 << 20), (["1:0", "MIG-x"], 5 << 20)] {
            collected.count(&c::GPU_MEMORY_USED, Labels::found(&gpu), Some(used));
            collected.number(&c::GPU_SM_CLOCK, Labels::found(&gpu), Some(1.98e9));
        }
        collected.number(&c::GPU_UTILIZATION, Labels::found(&["0", "GPU-a"]), Some(0.57));
        for part in ["corrected", "uncorrected"] {
            let errors = Labels::found(&["0", "GPU-a"]).with(part);
            collected.count(&c::GPU_ECC_ERRORS, errors, Some(part.len() as u64));
        }
        collected.count(&c::GPU_MEMORY_TOTAL, Labels::found(&["9", "GPU-of-another-node"]), Some(1));
        let found = families(&collected, &node, "node-7");
        let value = |name: &str, at: usize| {
            let family = found.iter().find(|family| family.metric.name == name)?;
            let sample = family.samples.get(at)?;
            let Value::Number(value) = sample.value else { return None };
            Some((value, sample.labels.iter().map(|label| (**label).to_owned()).collect::<Vec<_>>().join(" ")))
        };
        let whole = "0 GPU-a 00000000:1B:00.0 nvidia0 NVIDIA H200   node-7 580.1 main ml llama ".to_owned();
        // Two pods share the instance: neither is named.
        let instance = "1 GPU-b 00000000:1B:00.0 nvidia1 NVIDIA H200 1g.18gb 7 node-7 580.1    ".to_owned();
        assert_eq!(value("DCGM_FI_DEV_FB_USED", 0), Some((3.0, whole.clone())));
        assert_eq!(value("DCGM_FI_DEV_FB_USED", 1), Some((5.0, instance)));
        assert_eq!(value("DCGM_FI_DEV_SM_CLOCK", 0).map(|(value, _)| value.round()), Some(1980.0));
        assert_eq!(value("DCGM_FI_DEV_GPU_UTIL", 0), Some((57.0, whole.clone())));
        assert_eq!(value("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0), Some((0.57, whole.clone())));
        assert_eq!(value("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 0), Some((9.0, whole.clone())));
        assert_eq!(value("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0).map(|(value, _)| value), Some(11.0));
        assert_eq!(value("DCGM_FI_DEV_XID_ERRORS", 0), Some((31.0, whole)), "the last one, not the highest");
        assert_eq!(value("DCGM_FI_DEV_XID_ERRORS", 1), None, "none was seen, or none is reported");
        assert_eq!(value("DCGM_FI_DEV_GPU_TEMP", 0), None, "it is not known");
        assert_eq!(value("DCGM_FI_DEV_FB_TOTAL", 0), None, "of a GPU that the node does not have");
    }

    #[test]
    fn no_two_instances_have_one_label_set() {
        let instance = |uuid: &str, gpu_instance| Device {
            index: uuid.into(),
            uuid: uuid.into(),
            parent_uuid: Some("GPU-a".into()),
            gpu_instance,
            mig_profile: Some("1c.3g.40gb".into()),
            ..Device::default()
        };
        let whole = Device { index: "0".into(), uuid: "GPU-a".into(), ..Device::default() };
        let devices = vec![
            whole,
            instance("MIG-a", Some(1)),
            instance("MIG-b", Some(1)),
            instance("MIG-c", Some(2)),
            instance("MIG-d", None),
            instance("MIG-e", None),
        ];
        let (node, _) = Node::of_devices(Arc::new(Manual::at(9)), devices, true);
        node.gpus[1].set_workloads(Some(GpuWorkloads { rows: vec![row("llama")], ..GpuWorkloads::default() }));
        let labels = all_labels(&node, "n");
        assert_eq!(labels.keys().copied().collect::<Vec<_>>(), ["GPU-a", "MIG-c"]);
    }

    #[test]
    fn each_field_is_documented_and_copies_a_metric_with_its_labels() {
        let page = include_str!("../../docs/from-dcgm-exporter.md");
        for field in FIELDS {
            let row = format!("| `{}` | `{}", field.metric.name, field.from.name);
            assert!(page.contains(&row), "docs/from-dcgm-exporter.md has no row that begins {row}");
            assert_eq!(field.from.labels.len(), 2 + usize::from(field.part.is_some()), "{}", field.metric.name);
            assert_eq!(field.metric.kind, field.from.kind, "{}", field.metric.name);
        }
        assert!(page.contains(&format!("| `{}` |", XID.name)));
    }
}
