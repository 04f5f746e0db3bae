//! Finds the GPUs that the kubelet gave to a container, for jobs whose GPU is known neither from them nor from the
//! driver.
//!
//! Enters: the kubelet's PodResources socket, and the container to look up. Leaves: UUIDs as NVML reports them.
//! Invariants: a lookup never waits; the kubelet is asked only while a lookup needs it, at most once a second, and with
//! growing pauses for a container that it does not know; a lookup never gets a list from before its `since_ns`, because
//! an earlier pod of the same name may have had other GPUs. Absent on purpose: the API server.

mod container;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub mod fuzzing;
mod lists;
mod wire;

pub use container::Home;
pub use lists::{Kubelet, KubeletSettings};
