//! The samples of the pods that have GPUs.
//!
//! Invariant: only of GPUs that the current node has; the table may be seconds older.

use super::catalogue as c;
use super::families::{Families, Labels};
use highwater_engine::node::Node;
use highwater_engine::pods::PodTable;

/// Collects the rows of the table.
pub(super) fn collect(table: &PodTable, node: Option<&Node>, out: &mut Families) {
    out.count(&c::KUBELET_UP, (), table.kubelet_up.map(u64::from));
    let is_here = |uuid: &str| node.is_some_and(|node| node.gpus.iter().any(|gpu| gpu.device.uuid == uuid));
    for gpu in table.gpus.iter().filter(|gpu| is_here(&gpu.uuid)) {
        for row in &gpu.rows {
            let labels = Labels::found(&[&gpu.index, &gpu.uuid, &row.namespace, &row.pod, &row.container]);
            out.number(&c::GPU_POD_INFO, &labels, Some(1.0));
            out.count(&c::POD_MEMORY_USED, &labels, row.used_bytes);
        }
        // Not a series of the metric above without a pod: where scrape targets have labels of these names, it would get those of
        // the daemon's pod.
        out.count(&c::GPU_MEMORY_OUTSIDE_PODS, Labels::found(&[&gpu.index, &gpu.uuid]), gpu.rest_bytes);
    }
}
