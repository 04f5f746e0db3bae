//! The samples of the pods that have GPUs.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_core::gpu::{GpuState, PodName};
use highwater_engine::node::Node;
use highwater_engine::place::kubelet::Kubelet;

/// Collects the pods of each GPU, and whether the kubelet answers.
pub(super) fn collect(kubelet: Option<&Kubelet>, node: Option<&Node>, out: &mut Families) {
    out.count(&c::KUBELET_UP, (), kubelet.and_then(Kubelet::is_up).map(u64::from));
    node.into_iter().flat_map(|node| node.gpus.iter()).for_each(|gpu| of_gpu(gpu, out));
}

fn of_gpu(gpu: &GpuState, out: &mut Families) {
    let Some(pods) = gpu.pods() else { return };
    let [index, uuid] = [&gpu.device.index, &gpu.device.uuid];
    for row in &pods.rows {
        let PodName { namespace, pod, container } = &row.name;
        let labels = Labels::found(&[index, uuid, namespace, pod, container]);
        out.number(&c::GPU_POD_INFO, &labels, Some(1.0));
        out.count(&c::POD_MEMORY_USED, &labels, row.used_bytes);
    }
    // Not a series of the metric above without a pod: where scrape targets have labels of these names, it would get those of
    // the daemon's pod.
    out.count(&c::GPU_MEMORY_OUTSIDE_PODS, Labels::found(&[index, uuid]), pods.rest_bytes);
}
