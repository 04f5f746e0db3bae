//! The workloads of one GPU, pods or steps of Slurm's jobs: who was given it, and whose processes hold memory on it.
//!
//! Enters: what the engine learned from the kubelet, from Slurm and from control groups. Leaves: names for findings, metrics and
//! pages. Invariant: what is unknown is `None`, never 0.

use std::collections::BTreeMap;
use std::fmt;

/// Workloads that a finding or an incident names. A GPU that is shared may have more.
pub const MOST_NAMED: usize = 8;

/// What the node's scheduler started, by its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Workload {
    /// A container of a pod.
    Pod(PodName),
    /// A step of a Slurm job.
    Slurm(SlurmStep),
}

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

/// A step of a job, as Slurm names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlurmStep {
    /// The job's number.
    pub job: String,
    /// The step's: `0`, `batch`, `extern`; empty if not known.
    pub step: String,
    /// The number of the user whose processes they are; `None` if not known.
    pub user: Option<u32>,
}

/// `pod namespace/pod/container` or `Slurm step 77.0 of user 1000`, each without what is not known.
impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(PodName { namespace, pod, container }) => {
                write!(f, "pod {namespace}/{pod}")?;
                if container.is_empty() { Ok(()) } else { write!(f, "/{container}") }
            }
            Self::Slurm(SlurmStep { job, step, user }) => {
                if step.is_empty() {
                    write!(f, "Slurm job {job}")?
                } else {
                    write!(f, "Slurm step {job}.{step}")?
                }
                user.map_or(Ok(()), |user| write!(f, " of user {user}"))
            }
        }
    }
}

impl Workload {
    /// Bytes that it takes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let names = match self {
            Self::Pod(PodName { namespace, pod, container }) => namespace.len() + pod.len() + container.len(),
            Self::Slurm(SlurmStep { job, step, .. }) => job.len() + step.len(),
        };
        size_of::<Self>() + names
    }

    /// The container of a pod; `None` if it is none.
    #[must_use]
    pub fn pod(&self) -> Option<&PodName> {
        match self {
            Self::Pod(name) => Some(name),
            Self::Slurm(_) => None,
        }
    }

    /// The step of a Slurm job; `None` if it is none.
    #[must_use]
    pub fn slurm(&self) -> Option<&SlurmStep> {
        match self {
            Self::Slurm(step) => Some(step),
            Self::Pod(_) => None,
        }
    }
}

/// One workload on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadRow {
    /// Which.
    pub name: Workload,
    /// Bytes that its processes hold on the GPU; `None` if not known.
    pub used_bytes: Option<u64>,
}

/// The workloads of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuWorkloads {
    /// Those that were given it, or whose processes hold memory on it, by name.
    pub rows: Vec<WorkloadRow>,
    /// Bytes in use that none of their processes holds; `None` if not known.
    pub rest_bytes: Option<u64>,
    /// Their processes that hold memory on it, each with the number of its row.
    pub processes: BTreeMap<u32, usize>,
}

impl GpuWorkloads {
    /// The workload of this process.
    #[must_use]
    pub fn of_process(&self, pid: u32) -> Option<&WorkloadRow> {
        self.rows.get(*self.processes.get(&pid)?)
    }

    /// The same workloads without what they hold, which is not known any more.
    #[must_use]
    pub fn without_memory(&self) -> Self {
        let row = |row: &WorkloadRow| WorkloadRow { used_bytes: None, ..row.clone() };
        Self { rows: self.rows.iter().map(row).collect(), ..Self::default() }
    }
}

/// The names of these, each once, the one that holds most memory first, and at most [`MOST_NAMED`].
#[must_use]
pub fn most_first<'a>(rows: impl Iterator<Item = &'a WorkloadRow>) -> Vec<Workload> {
    let mut rows: Vec<&WorkloadRow> = rows.collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.used_bytes));
    let mut names: Vec<Workload> = Vec::new();
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

    fn name(pod: &str, container: &str) -> Workload {
        Workload::Pod(PodName { namespace: "ml".into(), pod: pod.into(), container: container.into() })
    }

    fn row(pod: &str, used_bytes: Option<u64>) -> WorkloadRow {
        WorkloadRow { name: name(pod, "main"), used_bytes }
    }

    #[test]
    fn the_pod_that_holds_most_comes_first_and_the_list_is_bounded() {
        let pods = GpuWorkloads {
            rows: vec![row("a", Some(1)), row("b", None), row("c", Some(9))],
            processes: [(7, 2), (8, 5)].into(),
            rest_bytes: None,
        };
        let pod = |name: &Workload| name.pod().map(|name| name.pod.clone()).expect("a pod");
        let named = |rows: &[WorkloadRow]| most_first(rows.iter()).iter().map(pod).collect::<Vec<_>>();
        assert_eq!(named(&pods.rows), ["c", "a", "b"]);
        let twice = [pods.rows.clone(), pods.rows.clone()].concat();
        assert_eq!(named(&twice), ["c", "a", "b"], "each once, as of a GPU and its instances");
        assert_eq!(pods.of_process(7), pods.rows.get(2));
        assert_eq!((pods.of_process(8), pods.of_process(9)), (None, None));
        let many: Vec<WorkloadRow> = (0..40).map(|nth| row(&format!("pod-{nth}"), Some(nth))).collect();
        assert_eq!((named(&many).len(), &*named(&many)[0]), (MOST_NAMED, "pod-39"));
        let without = pods.without_memory();
        assert_eq!((named(&without.rows), without.of_process(7)), (vec!["a".into(), "b".into(), "c".into()], None));
    }

    #[test]
    fn what_is_not_known_is_not_in_a_name() {
        let slurm = |step: &str, user| Workload::Slurm(SlurmStep { job: "77".into(), step: step.into(), user });
        let all = [name("a", "main"), name("a", ""), slurm("batch", Some(1000)), slurm("0", None), slurm("", None)];
        let expected =
            ["pod ml/a/main", "pod ml/a", "Slurm step 77.batch of user 1000", "Slurm step 77.0", "Slurm job 77"];
        assert_eq!(all.each_ref().map(ToString::to_string), expected);
        assert!(all[2].slurm().is_some() && all[2].pod().is_none() && all[0].slurm().is_none());
    }
}
