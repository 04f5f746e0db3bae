//! What GPUs and subjects are called when a finding about them is raised or goes on.

use super::finding::Subject;
use crate::gpu::PodName;

/// The names of GPUs and subjects at one moment.
pub trait Names {
    /// Index and UUID of a GPU by its position.
    fn gpu(&self, position: usize) -> Option<(String, String)>;

    /// The pods of a subject, as of [`Finding::pods`](super::finding::Finding::pods); `None` if they are not known.
    fn pods(&self, subject: &Subject) -> Option<Vec<PodName>>;
}

#[cfg(test)]
impl<Gpu: Fn(usize) -> Option<(String, String)>> Names for Gpu {
    fn gpu(&self, position: usize) -> Option<(String, String)> {
        self(position)
    }

    fn pods(&self, _subject: &Subject) -> Option<Vec<PodName>> {
        None
    }
}
