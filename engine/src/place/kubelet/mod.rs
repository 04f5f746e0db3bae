//! Which GPUs the kubelet gave to each container.
//!
//! Enters: the kubelet's PodResources socket, and the container to look up. Leaves: names of GPUs, by UUID or device file.
//! Invariants: a lookup never waits; the kubelet is asked each five seconds, at most once a second while a lookup needs it, and
//! with growing pauses for a container that it does not know or while it does not answer; a lookup never gets a list from before its `since_ns`, because
//! an earlier pod of the same name may have had other GPUs. Absent on purpose: the API server.

mod container;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub mod fuzzing;
mod lists;
mod wire;

pub use container::Home;
pub use lists::{Kubelet, KubeletSettings, MOST_RESPONSE_BYTES};
