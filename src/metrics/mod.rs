//! Every metric of the daemon: declared once, collected from the node's state, written by the exporters.
//!
//! Invariants: no metric exists outside the [`catalogue`], but for copies under DCGM's names; a value that is not known has no sample; collecting makes no
//! driver call and takes no lock that the sampler wants. Absent on purpose: any wire format.

pub mod catalogue;
mod collect;
mod dcgm;
mod families;
mod findings;
mod gpu;
mod intake;
mod job;
mod memory;
mod own;
mod workloads;

pub use collect::{Collect, Snapshots};
pub use families::{Buckets, Choice, Families, Family, LabelValue, Labels, Sample, Value};
#[cfg(test)]
pub(crate) use job::MOST_LAYERS;
pub(crate) use memory::Part;
