//! The samples of the pods and Slurm steps that have GPUs.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::gpu::{GpuState, PodName, SlurmStep, Workload};
use highwater_engine::node::Node;
use highwater_engine::place::kubelet::Kubelet;

/// Collects the workloads of each GPU, and whether the kubelet answers.
pub(super) fn collect(kubelet: Option<&Kubelet>, node: Option<&Node>, out: &mut Families) {
    out.count(&c::KUBELET_UP, (), kubelet.and_then(Kubelet::is_up).map(u64::from));
    node.into_iter().flat_map(|node| node.gpus.iter()).for_each(|gpu| of_gpu(gpu, out));
}

fn of_gpu(gpu: &GpuState, out: &mut Families) {
    let Some(workloads) = gpu.workloads() else { return };
    let [index, uuid] = [&gpu.device.index, &gpu.device.uuid];
    for row in &workloads.rows {
        match &row.name {
            Workload::Pod(PodName { namespace, pod, container }) => {
                let labels = Labels::found(&[index, uuid, namespace, pod, container]);
                out.number(&c::GPU_POD_INFO, &labels, Some(1.0));
                out.count(&c::POD_MEMORY_USED, &labels, row.used_bytes);
            }
            Workload::Slurm(SlurmStep { job, step, user }) => {
                let user = user.map(|user| user.to_string()).unwrap_or_default();
                let labels = Labels::found(&[index, uuid, job, step, &user]);
                out.number(&c::GPU_SLURM_INFO, &labels, Some(1.0));
                out.count(&c::SLURM_MEMORY_USED, &labels, row.used_bytes);
            }
        }
    }
    // Not a series of the metrics above without a name: where scrape targets have a label `pod` of their own, it would get that of
    // the daemon's pod.
    out.count(&c::GPU_MEMORY_OUTSIDE_WORKLOADS, Labels::found(&[index, uuid]), workloads.rest_bytes);
}
