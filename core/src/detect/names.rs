//! What GPUs and subjects are called when a finding about them is raised or goes on.

use super::finding::Subject;
use crate::gpu::Workload;

/// The names of GPUs and subjects at one moment.
pub trait Names {
    /// Index and UUID of a GPU by its position.
    fn gpu(&self, position: usize) -> Option<(String, String)>;

    /// The workloads of a subject, as of [`Finding::workloads`](super::finding::Finding::workloads); `None` if they are not known.
    fn workloads(&self, subject: &Subject) -> Option<Vec<Workload>>;
}

#[cfg(test)]
impl<Gpu: Fn(usize) -> Option<(String, String)>> Names for Gpu {
    fn gpu(&self, position: usize) -> Option<(String, String)> {
        self(position)
    }

    fn workloads(&self, _subject: &Subject) -> Option<Vec<Workload>> {
        None
    }
}
