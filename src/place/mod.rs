//! Where a sender is: from its process to its container, and to the GPUs that it works on.
//!
//! Enters: process ids that the kernel told, and what jobs say of their place. Leaves: the pod that an owner is in, and
//! positions of GPUs. Invariants: what the kernel and the driver tell goes before what a sender tells of itself; where one
//! of a container's GPUs is not known, none is guessed; no lock is held while another process is read. Absent on purpose:
//! what is done with it.

mod home;
pub mod kubelet;
pub(crate) mod peer;
pub(crate) mod process;

pub(crate) use kubelet::Kubelet;
pub(crate) use peer::{Answer, Peer, Peers};

use arc_swap::{ArcSwapOption, Guard};
use highwater_core::gpu::{Device, OnGpus, Processes};
use highwater_core::jobs::{Container, Gpus, Place, Search, Within};
use home::{At, Homes};
use kubelet::Home;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// All that is known of places on this node.
pub(crate) struct Places {
    gpus: ArcSwapOption<Gpus>,
    processes: Arc<Processes>,
    homes: Homes,
    kubelet: Option<Arc<Kubelet>>,
    /// Whether it was told that the kubelet and the driver do not agree.
    told_unknown: AtomicBool,
}

impl Places {
    /// Those of a node without a kubelet, whose driver lists these processes.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self {
            gpus: ArcSwapOption::empty(),
            processes,
            homes: Homes::new(None, "/proc".into()),
            kubelet: None,
            told_unknown: AtomicBool::new(false),
        }
    }

    /// The same with a kubelet, which knows the GPUs of each container.
    pub fn with_kubelet(self, kubelet: Option<Arc<Kubelet>>) -> Self {
        Self { homes: Homes::new(kubelet.clone(), "/proc".into()), kubelet, ..self }
    }

    /// The same, by files elsewhere.
    #[cfg(test)]
    pub fn at(self, proc: std::path::PathBuf) -> Self {
        Self { homes: Homes::new(self.kubelet.clone(), proc), ..self }
    }

    /// The processes that the driver lists.
    #[cfg(test)]
    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// From now on these are the node's GPUs.
    pub fn set_devices(&self, devices: &[Device]) {
        self.gpus.store(Some(Arc::new(Gpus::new(devices))));
    }

    /// The node's GPUs by their names; none while there is no source.
    pub fn gpus(&self) -> Guard<Option<Arc<Gpus>>> {
        self.gpus.load()
    }

    /// What an owner's account goes by.
    pub fn within(&self, pid: Option<u32>, now_ns: i64) -> Within {
        self.homes.within(pid, now_ns)
    }

    /// The GPUs that the driver lists a process on. Nobody looks again for one that is not known.
    pub fn listed_on(&self, pid: u32) -> Option<OnGpus> {
        self.processes.listed_on(pid)
    }

    /// Positions of the GPUs that the driver sees a process work on. One that is not known makes the lanes look again.
    pub fn works_on(&self, pid: u32) -> Option<Vec<usize>> {
        self.processes.gpus_of(pid)
    }

    /// The GPU that a rank's container, its visible devices and its local rank point to, by its events or by `own`, what its
    /// process's environment says.
    pub fn find(&self, pid: Option<u32>, own: Place, search: &Search, now_ns: i64) -> Option<Vec<usize>> {
        let gpus = self.gpus.load();
        let gpus = gpus.as_deref()?;
        let At { home, since_ns: home_since_ns } = pid.map(|pid| self.homes.of(pid, now_ns)).unwrap_or_default();
        let place = search.place_of(pid, own);
        let since_ns = search.since_ns.unwrap_or(now_ns);
        let asked = |kubelet: &Kubelet, container: &Container, since_ns: i64| {
            self.positions(gpus, &kubelet.gpus_of(container, since_ns, now_ns).unwrap_or_default())
        };
        let given = match (&self.kubelet, &home, place.container()) {
            (None, ..) | (Some(_), Home::Host, None) => None,
            // What the kernel tells of the sender goes before what the sender tells of itself.
            (Some(kubelet), Home::Container(container), _) => Some(asked(kubelet, container, home_since_ns)),
            (Some(kubelet), _, Some(container)) => Some(asked(kubelet, &container, since_ns)),
            // In which container is not known, so that no index tells anything.
            (Some(_), Home::Unknown, None) => Some(Vec::new()),
        };
        let found = gpus.visible(place.visible_devices.as_deref(), place.local_rank, given.as_deref())?;
        Some(vec![found])
    }

    /// The GPUs that a container was given. None where one of them is not this node's as the driver tells it: which of
    /// the others an index means is not known then.
    fn positions(&self, gpus: &Gpus, uuids: &[String]) -> Vec<usize> {
        gpus.with_uuids(uuids).unwrap_or_else(|unknown| {
            if !self.told_unknown.swap(true, Ordering::Relaxed) {
                tracing::warn!(uuid = unknown, "the kubelet gave a container a GPU that the driver does not show");
            }
            Vec::new()
        })
    }
}
