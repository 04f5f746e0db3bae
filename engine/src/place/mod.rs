//! Finds where a sender runs: from its process to its container, and to the GPUs that it uses.
//!
//! Enters: process ids from the kernel, and the place that jobs state. Leaves: the pod that an owner is in, and
//! positions of GPUs. Invariants: the kernel and the driver take precedence over what a sender states about itself; if
//! one of a container's GPUs is unknown, none is guessed; no lock is held while another process is read. Absent on
//! purpose: the use of the results.

pub(crate) mod cgroup;
pub mod home;
pub mod kubelet;
pub mod peer;
pub mod process;
pub mod slurm;
pub(crate) mod waits;

pub(crate) use kubelet::Kubelet;
pub(crate) use peer::{LookupOutcome, Peer, Peers};

use arc_swap::{ArcSwapOption, Guard};
use highwater_core::gpu::{Device, OnGpus, Processes};
use highwater_core::jobs::{Container, Gpus, Place, Search, Within};
use home::{At, Homes};
use kubelet::Home;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The places of senders on this node.
pub(crate) struct Places {
    gpus: ArcSwapOption<Gpus>,
    processes: Arc<Processes>,
    homes: Homes,
    kubelet: Option<Arc<Kubelet>>,
    /// Whether the log already says that the kubelet and the driver disagree.
    warned_unknown: AtomicBool,
}

impl Places {
    /// Places of a node without a kubelet, whose driver lists these processes.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self {
            gpus: ArcSwapOption::empty(),
            processes,
            homes: Homes::new(None, "/proc".into()),
            kubelet: None,
            warned_unknown: AtomicBool::new(false),
        }
    }

    /// The same with a kubelet, which knows the GPUs of each container.
    pub fn with_kubelet(self, kubelet: Option<Arc<Kubelet>>) -> Self {
        Self { homes: Homes::new(kubelet.clone(), "/proc".into()), kubelet, ..self }
    }

    /// The same, with files in another directory.
    #[cfg(test)]
    pub fn at(self, proc: std::path::PathBuf) -> Self {
        Self { homes: Homes::new(self.kubelet.clone(), proc), ..self }
    }

    /// The processes that the driver lists.
    #[cfg(test)]
    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// Sets the node's GPUs.
    pub fn set_devices(&self, devices: &[Device]) {
        self.gpus.store(Some(Arc::new(Gpus::new(devices))));
    }

    /// The node's GPUs by name; none while there is no source.
    pub fn gpus(&self) -> Guard<Option<Arc<Gpus>>> {
        self.gpus.load()
    }

    /// The place that belongs to the owner's account.
    pub fn within(&self, pid: Option<u32>, now_ns: i64) -> Within {
        self.homes.within(pid, now_ns)
    }

    /// The container of this process, if the kubelet is still to link it, so that its pod is not known yet.
    pub fn unlinked(&self, pid: u32, now_ns: i64) -> Option<Arc<str>> {
        self.homes.unlinked(pid, now_ns)
    }

    /// The id of this process's container, linked or not; `None` if it is in none, or unknown.
    pub fn container_id(&self, pid: u32, now_ns: i64) -> Option<Arc<str>> {
        match self.homes.of(pid, now_ns).home {
            Home::Unlinked(id) => Some(id),
            Home::Container(container) => container.id.map(Arc::from),
            Home::Host | Home::Unknown => None,
        }
    }

    /// Whether the kubelet is still to link this container.
    pub fn is_link_awaited(&self, container: &str, now_ns: i64) -> bool {
        self.homes.is_link_awaited(container, now_ns)
    }

    /// Awaits the link of this container no longer.
    pub fn stop_waiting(&self, container: &str) {
        self.homes.stop_waiting(container);
    }

    /// The GPUs on which the driver lists a process. An unknown process does not cause another listing.
    pub fn listed_on(&self, pid: u32) -> Option<OnGpus> {
        self.processes.listed_on(pid)
    }

    /// Positions of the GPUs on which the driver sees a process work. An unknown process makes the lanes list processes
    /// again.
    pub fn works_on(&self, pid: u32) -> Option<Vec<usize>> {
        self.processes.gpus_of(pid)
    }

    /// The GPU given by a rank's container, visible devices and local rank, from its events or from `own`, the
    /// environment of its process.
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
            // The kernel's information about the sender takes precedence over the sender's own.
            (Some(kubelet), Home::Container(container), _) => Some(asked(kubelet, container, home_since_ns)),
            (Some(kubelet), _, Some(container)) => Some(asked(kubelet, &container, since_ns)),
            // The container is unknown, so an index identifies nothing.
            (Some(_), Home::Unlinked(_) | Home::Unknown, None) => Some(Vec::new()),
        };
        let found = gpus.visible(place.visible_devices.as_deref(), place.local_rank, given.as_deref())?;
        Some(vec![found])
    }

    /// Positions of the GPUs that a container was given. If the driver does not list every one of them, returns no
    /// position at all: it would be unknown which GPU an index means.
    fn positions(&self, gpus: &Gpus, names: &[String]) -> Vec<usize> {
        gpus.with_names(names).unwrap_or_else(|unknown| {
            if !self.warned_unknown.swap(true, Ordering::Relaxed) {
                tracing::warn!(device = unknown, "the kubelet gave a container a GPU that the driver does not list");
            }
            Vec::new()
        })
    }
}
