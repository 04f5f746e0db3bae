//! What GPUs and subjects are called when a finding about them is raised.

use super::finding::Subject;
use crate::gpu::PodName;

/// The names of GPUs and subjects at one moment.
pub trait Names {
    /// Index and UUID of a GPU by its position.
    fn gpu(&self, position: usize) -> Option<(String, String)>;

    /// The pods of a subject, as of [`Finding::pods`](super::finding::Finding::pods).
    fn pods(&self, _subject: &Subject) -> Vec<PodName> {
        Vec::new()
    }
}

impl<Gpu: Fn(usize) -> Option<(String, String)>> Names for Gpu {
    fn gpu(&self, position: usize) -> Option<(String, String)> {
        self(position)
    }
}
