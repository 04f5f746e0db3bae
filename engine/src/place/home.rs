//! Finds the container of a sending process by its control groups.
//!
//! Unlike reading the environment ([`peer`](super::peer)), reading control groups takes no lock that the process could
//! hold. It is therefore done at once, before a sender's first event is taken: an owner is a user in a pod. Invariant:
//! what is known of a process is kept for a minute after it has ended; a process with the same id that started at
//! another time does not inherit it; a new container's link is awaited for a bounded time, counted from the container's
//! first process that sent.

use super::process::{KEEP_NS, LOOK_AGAIN_NS, MOST_PROCESSES, insert_evicting, started};
use crate::files::read_at_most;
use crate::place::kubelet::{Home, Kubelet};
use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::{Pod, Within};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many bytes of the list of control groups are read.
const MOST_FILE_BYTES: u64 = 64 << 10;
/// How long the last result is used for a process that can no longer be read.
const REMEMBER_NS: i64 = 60 * SECOND_NS;
/// How long the kubelet may take to link a container whose processes send already. It makes the link right after the
/// start, so this allows for a busy node. A container that is not the kubelet's has no link ever.
pub(crate) const LINK_WAIT_NS: i64 = 5 * SECOND_NS;
/// Maximum number of containers without a link that are remembered. Beyond it, the one whose wait ends first is forgotten, and
/// awaited again if it sends.
pub const MOST_UNLINKED: usize = 64;

/// Where a process runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct At {
    pub home: Home,
    /// Since when it is known to run there, nanoseconds of the timeline.
    pub since_ns: i64,
}

/// Processes read recently.
pub(crate) struct Homes {
    proc: PathBuf,
    /// Identifies the containers; `None` if no kubelet is configured.
    kubelet: Option<Arc<Kubelet>>,
    known: Mutex<HashMap<u32, Known>>,
    /// Containers without a link, each with the time until which its link is awaited, nanoseconds of the timeline.
    unlinked: Mutex<HashMap<Arc<str>, i64>>,
}

struct Known {
    read_ns: i64,
    started: Option<u64>,
    at: At,
}

impl Homes {
    /// Homes of a node with this kubelet, read from files below `proc`.
    pub fn new(kubelet: Option<Arc<Kubelet>>, proc: PathBuf) -> Self {
        Self { proc, kubelet, known: Mutex::default(), unlinked: Mutex::default() }
    }

    /// Where this process runs; unknown if no kubelet is configured.
    pub fn of(&self, pid: u32, now_ns: i64) -> At {
        let Some(kubelet) = &self.kubelet else { return At { home: Home::Unknown, since_ns: now_ns } };
        let known = self.known().get(&pid).map(|known| (known.read_ns, known.at.clone()));
        if let Some((read_ns, at)) = known {
            // A link can appear at any time, also when the process has ended.
            if let Home::Unlinked(id) = &at.home
                && let Some(container) = kubelet.container(id, now_ns)
            {
                return self.learn(pid, started(&self.process(pid)), Home::Container(container), now_ns);
            }
            if now_ns.saturating_sub(read_ns) <= at.home.keep_ns() {
                return at;
            }
        }
        let cgroups = read_at_most(&self.process(pid).join("cgroup"), MOST_FILE_BYTES).ok();
        let home = cgroups.map(|cgroups| kubelet.home_of(&String::from_utf8_lossy(&cgroups), now_ns));
        self.learn(pid, started(&self.process(pid)), home.unwrap_or_default(), now_ns)
    }

    /// Whether the process has not ended.
    pub fn is_there(&self, pid: u32) -> bool {
        self.process(pid).exists()
    }

    /// The container of this process, if the kubelet is still to link it.
    pub fn unlinked(&self, pid: u32, now_ns: i64) -> Option<Arc<str>> {
        let Home::Unlinked(id) = self.of(pid, now_ns).home else { return None };
        self.is_link_awaited(&id, now_ns).then_some(id)
    }

    /// Whether the kubelet is still to link this container.
    pub fn is_link_awaited(&self, id: &str, now_ns: i64) -> bool {
        let is_early = self
            .unlinked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .is_some_and(|until_ns| now_ns < *until_ns);
        is_early && self.kubelet.as_ref().is_some_and(|kubelet| kubelet.container(id, now_ns).is_none())
    }

    /// Awaits the link of this container no longer.
    pub fn stop_waiting(&self, id: &str) {
        if let Some(until_ns) = self.unlinked.lock().unwrap_or_else(PoisonError::into_inner).get_mut(id) {
            *until_ns = i64::MIN;
        }
    }

    /// The place that belongs to the owner's account.
    pub fn within(&self, pid: Option<u32>, now_ns: i64) -> Within {
        match (&self.kubelet, pid) {
            (None, _) => Within::Node,
            (Some(_), None) => Within::Unknown,
            (Some(_), Some(pid)) => match self.of(pid, now_ns).home {
                Home::Host => Within::Node,
                Home::Unlinked(_) | Home::Unknown => Within::Unknown,
                Home::Container(container) => Within::Pod(Pod { namespace: container.namespace, name: container.pod }),
            },
        }
    }

    fn learn(&self, pid: u32, started: Option<u64>, home: Home, now_ns: i64) -> At {
        let mut all = self.known();
        let before = all.get(&pid).filter(|before| started.is_none() || started == before.started);
        if let Some(before) = before {
            let is_gone = home == Home::Unknown && now_ns.saturating_sub(before.read_ns) <= REMEMBER_NS;
            if is_gone && before.at.home != Home::Unknown {
                return before.at.clone();
            }
        }
        if let Home::Unlinked(id) = &home {
            let mut unlinked = self.unlinked.lock().unwrap_or_else(PoisonError::into_inner);
            if !unlinked.contains_key(id) {
                insert_evicting(
                    &mut unlinked,
                    Arc::clone(id),
                    now_ns.saturating_add(LINK_WAIT_NS),
                    MOST_UNLINKED,
                    |until_ns| *until_ns,
                );
            }
        }
        let since_ns = before.filter(|before| before.at.home == home).map_or(now_ns, |before| before.at.since_ns);
        let at = At { home, since_ns };
        insert_evicting(&mut all, pid, Known { read_ns: now_ns, started, at: at.clone() }, MOST_PROCESSES, |known| {
            known.read_ns
        });
        at
    }

    fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }

    fn known(&self) -> MutexGuard<'_, HashMap<u32, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Home {
    /// How long it is used before it is read again.
    fn keep_ns(&self) -> i64 {
        match self {
            Home::Host | Home::Container(_) => KEEP_NS,
            Home::Unlinked(_) | Home::Unknown => LOOK_AGAIN_NS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::kubelet::KubeletSettings;
    use highwater_core::jobs::Container;

    #[test]
    fn an_account_belongs_to_a_pod_or_to_the_node() {
        let (folder, id) = (tempfile::tempdir().expect("a folder"), "0a".repeat(32));
        let logs = folder.path().join("logs");
        std::fs::create_dir_all(&logs).expect("a folder");
        std::fs::write(logs.join(format!("llama-0_research_trainer-{id}.log")), "").expect("written");
        for (pid, cgroup) in
            [(5, "0::/user.slice\n".to_owned()), (6, format!("0::/kubepods/cri-containerd-{id}.scope\n"))]
        {
            let process = folder.path().join(pid.to_string());
            std::fs::create_dir_all(&process).expect("a folder");
            std::fs::write(process.join("cgroup"), cgroup).expect("written");
        }
        let settings = KubeletSettings { socket: Some("/nowhere".into()), container_logs: logs };
        let homes = Homes::new(Kubelet::new(&settings).map(Arc::new), folder.path().to_owned());
        assert_eq!(homes.within(Some(5), 0), Within::Node);
        let pod = Pod { namespace: "research".to_owned(), name: "llama-0".to_owned() };
        assert_eq!(homes.within(Some(6), 0), Within::Pod(pod));
        assert_eq!(homes.within(Some(7), 0), Within::Unknown, "there is no such process");
        assert_eq!(homes.within(None, 0), Within::Unknown, "a sender over HTTP");
        let without_kubelet = Homes::new(None, folder.path().to_owned());
        assert_eq!([Some(6), None].map(|pid| without_kubelet.within(pid, 0)), [Within::Node, Within::Node]);
    }

    #[test]
    fn control_groups_are_read_again_after_ten_seconds_and_a_process_may_move() {
        let (folder, id) = (tempfile::tempdir().expect("a folder"), "0a".repeat(32));
        let (process, logs) = (folder.path().join("8"), folder.path().join("logs"));
        for folder in [&process, &logs] {
            std::fs::create_dir_all(folder).expect("a folder");
        }
        std::fs::write(logs.join(format!("llama-0_research_trainer-{id}.log")), "").expect("written");
        std::fs::write(process.join("stat"), format!("8 (a) S {} 4711 0\n", "0 ".repeat(18))).expect("written");
        let write = |text: String| std::fs::write(process.join("cgroup"), text).expect("written");
        let settings = KubeletSettings { socket: Some("/nowhere".into()), container_logs: logs };
        let homes = Homes::new(Kubelet::new(&settings).map(Arc::new), folder.path().to_owned());
        write("0::/user.slice\n".to_owned());
        assert_eq!(homes.of(8, 0).home, Home::Host);
        write(format!("0::/kubepods/cri-containerd-{id}.scope\n"));
        assert_eq!(homes.of(8, 10 * SECOND_NS).home, Home::Host, "what was read is used for ten seconds");
        let moved = homes.of(8, 10 * SECOND_NS + 1);
        assert!(matches!(moved.home, Home::Container(_)), "{moved:?}");
        assert_eq!(moved.since_ns, 10 * SECOND_NS + 1);
    }

    #[test]
    fn a_process_that_ended_keeps_its_pod_and_one_of_the_same_id_has_its_own() {
        let (folder, id) = (tempfile::tempdir().expect("a folder"), "0a".repeat(32));
        let process = folder.path().join("77");
        let write = |name: &str, text: &str| std::fs::write(process.join(name), text).expect("written");
        std::fs::create_dir_all(&process).expect("a folder");
        write("cgroup", &format!("0::/kubepods.slice/cri-containerd-{id}.scope\n"));
        write("stat", &format!("77 (a ) name) S {} 4711 0\n", "0 ".repeat(18)));
        let logs = folder.path().join("logs");
        std::fs::create_dir_all(&logs).expect("a folder");
        let settings = KubeletSettings { socket: Some("/nowhere".into()), container_logs: logs.clone() };
        let homes = Homes::new(Kubelet::new(&settings).map(Arc::new), folder.path().to_owned());
        assert_eq!(homes.of(77, 0).home, Home::Unlinked(id.as_str().into()), "its link is not there yet");
        std::fs::write(logs.join(format!("llama-0_research_trainer-{id}.log")), "").expect("written");
        let (namespace, pod) = ("research".to_owned(), "llama-0".to_owned());
        let container = Home::Container(Container { namespace, pod, name: Some("trainer".into()), id: Some(id) });
        let read_ns = LOOK_AGAIN_NS + 1;
        assert_eq!(homes.of(77, read_ns), At { home: container.clone(), since_ns: read_ns });
        assert_eq!(started(&process), Some(4711));
        // It is ending: its control group is the root's.
        write("cgroup", "0::/\n");
        assert_eq!(homes.of(77, read_ns + KEEP_NS + 1).home, container);
        std::fs::remove_dir_all(&process).expect("gone");
        assert_eq!(homes.of(77, read_ns + KEEP_NS + 2).home, container);
        std::fs::create_dir_all(&process).expect("a folder");
        write("cgroup", "0::/user.slice\n");
        write("stat", &format!("77 (other) S {} 4712 0\n", "0 ".repeat(18)));
        assert_eq!(homes.of(77, read_ns + KEEP_NS + 3).home, Home::Host, "another process");
    }
}
