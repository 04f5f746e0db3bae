//! The pods of one GPU: who was given it, and whose processes hold memory on it.
//!
//! Enters: what the engine learned from the kubelet and from control groups. Leaves: names for findings, metrics and pages.
//! Invariant: what is unknown is `None`, never 0.

use std::collections::BTreeMap;
use std::fmt;

/// Pods that a finding or an incident names. A GPU that is shared may have more.
pub const MOST_NAMED: usize = 8;

/// A container of a pod, as Kubernetes names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name; empty if not known.
    pub container: String,
}

/// `namespace/pod/container`, or `namespace/pod` where the container is not known.
impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.pod)?;
        if self.container.is_empty() { Ok(()) } else { write!(f, "/{}", self.container) }
    }
}

impl PodName {
    /// Bytes that it takes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.namespace.len() + self.pod.len() + self.container.len()
    }
}

/// One container on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRow {
    /// The container.
    pub name: PodName,
    /// Bytes that its processes hold on the GPU; `None` if not known.
    pub used_bytes: Option<u64>,
}

/// The pods of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuPods {
    /// The containers that were given it, or whose processes hold memory on it, by name.
    pub rows: Vec<PodRow>,
    /// Bytes in use that no container's process holds; `None` if not known.
    pub rest_bytes: Option<u64>,
    /// The processes that hold memory on it and run in a container, each with the number of its row.
    pub processes: BTreeMap<u32, usize>,
}

impl GpuPods {
    /// The container of this process.
    #[must_use]
    pub fn of_process(&self, pid: u32) -> Option<&PodRow> {
        self.rows.get(*self.processes.get(&pid)?)
    }

    /// The same containers without what they hold, which is not known any more.
    #[must_use]
    pub fn without_memory(&self) -> Self {
        let row = |row: &PodRow| PodRow { used_bytes: None, ..row.clone() };
        Self { rows: self.rows.iter().map(row).collect(), ..Self::default() }
    }
}

/// The names of these, each once, the one that holds most memory first, and at most [`MOST_NAMED`].
#[must_use]
pub fn most_first<'a>(rows: impl Iterator<Item = &'a PodRow>) -> Vec<PodName> {
    let mut rows: Vec<&PodRow> = rows.collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.used_bytes));
    let mut names: Vec<PodName> = Vec::new();
    for row in rows {
        if names.len() < MOST_NAMED && !names.contains(&row.name) {
            names.push(row.name.clone());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pod: &str, used_bytes: Option<u64>) -> PodRow {
        PodRow { name: PodName { namespace: "ml".into(), pod: pod.into(), container: "main".into() }, used_bytes }
    }

    #[test]
    fn the_pod_that_holds_most_comes_first_and_the_list_is_bounded() {
        let pods = GpuPods {
            rows: vec![row("a", Some(1)), row("b", None), row("c", Some(9))],
            processes: [(7, 2), (8, 5)].into(),
            rest_bytes: None,
        };
        let named = |rows: &[PodRow]| most_first(rows.iter()).iter().map(|name| name.pod.clone()).collect::<Vec<_>>();
        assert_eq!(named(&pods.rows), ["c", "a", "b"]);
        let twice = [pods.rows.clone(), pods.rows.clone()].concat();
        assert_eq!(named(&twice), ["c", "a", "b"], "each once, as of a GPU and its instances");
        assert_eq!(pods.of_process(7), pods.rows.get(2));
        assert_eq!((pods.of_process(8), pods.of_process(9)), (None, None));
        let many: Vec<PodRow> = (0..40).map(|nth| row(&format!("pod-{nth}"), Some(nth))).collect();
        assert_eq!((named(&many).len(), &*named(&many)[0]), (MOST_NAMED, "pod-39"));
        let without = pods.without_memory();
        assert_eq!((named(&without.rows), without.of_process(7)), (vec!["a".into(), "b".into(), "c".into()], None));
    }

    #[test]
    fn a_container_without_a_name_leaves_none() {
        let named = row("a", None).name;
        assert_eq!(named.to_string(), "ml/a/main");
        assert_eq!(PodName { container: String::new(), ..named }.to_string(), "ml/a");
    }
}
