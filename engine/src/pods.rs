//! Which pods have each GPU, and how much of its memory their processes hold.
//!
//! Enters: the kubelet's lists, the driver's lists of processes, and the control groups of these processes. Leaves: the rows
//! of each GPU's state. A GPU may have several pods (time slicing, MPS, a pod that uses it without having asked for it), and each is
//! a row. Invariants: what is unknown is `None`, never 0; the bytes of a GPU's rows and its rest are what was in use when its
//! processes were listed; the number of rows is bounded. Absent on purpose: the API server, names of jobs.

use crate::node::Node;
use crate::place::home::Homes;
use crate::place::kubelet::{Home, Kubelet};
use crate::sample::PROCESS_TURNS;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{GpuPods, GpuState, Health, PodName, PodRow};
use highwater_core::jobs::{Container, Gpus};
use highwater_core::ring;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows of all GPUs together. The kubelet runs 110 pods by default.
pub const MOST_ROWS: usize = 1_024;
/// Bytes of namespace, pod and container. Kubernetes has no longer names: a DNS label has 63 bytes, and a pod's name is a DNS
/// subdomain. A container with longer ones is left out.
pub const MOST_NAME_BYTES: usize = 253 + 2 * 63;
/// A list of processes that is older, and older than three periods of such lists, says nothing about now.
const STALE_NS: i64 = 30 * SECOND_NS;

/// Finds the pods of each GPU.
pub struct PodWatch {
    kubelet: Arc<Kubelet>,
    homes: Homes,
    /// Whether the log already says that there are too many rows.
    warned: AtomicBool,
}

/// Processes that run in containers.
type InContainers = Vec<(u32, PodName)>;

impl PodWatch {
    /// A watch with the files of processes below `proc`.
    #[must_use]
    pub fn new(kubelet: Arc<Kubelet>, proc: PathBuf) -> Self {
        Self { homes: Homes::new(Some(Arc::clone(&kubelet)), proc), kubelet, warned: AtomicBool::new(false) }
    }

    /// Sets the pods of each of the node's GPUs. Without a list of the kubelet they are not known.
    pub fn refresh(&self, node: &Node, now_ns: i64) {
        match self.gpus(node, now_ns) {
            Some(pods) => node.gpus.iter().zip(pods).for_each(|(gpu, pods)| gpu.set_pods(Some(pods))),
            None => node.gpus.iter().for_each(|gpu| gpu.set_pods(None)),
        }
    }

    fn gpus(&self, node: &Node, now_ns: i64) -> Option<Vec<GpuPods>> {
        let listed = self.kubelet.last_list(now_ns)?;
        let names = Gpus::new(node.source.devices());
        let stale_ns = STALE_NS.max(3 * PROCESS_TURNS * node.periods.slow_ns);
        let mut given: Vec<BTreeMap<PodName, Option<u64>>> = vec![BTreeMap::new(); node.gpus.len()];
        let mut count = 0;
        for (namespace, pod, container, gpus) in listed.containers() {
            if namespace.len() + pod.len() + container.len() > MOST_NAME_BYTES {
                continue;
            }
            let [namespace, pod, container] = [namespace, pod, container].map(str::to_owned);
            let name = PodName { namespace, pod, container };
            for position in gpus.iter().filter_map(|gpu| names.find(gpu)) {
                count += 1;
                if count <= MOST_ROWS {
                    given[position].insert(name.clone(), None);
                }
            }
        }
        let mut left = MOST_ROWS;
        let is_split =
            |gpu: &GpuState| node.gpus.iter().any(|of| of.device.parent_uuid.as_ref() == Some(&gpu.device.uuid));
        let gpus = node.gpus.iter().zip(node.rings.iter()).zip(given).map(|((gpu, ring), mut rows)| {
            // The processes of its MIG instances are listed for the GPU too, and would count twice.
            let (of_processes, rest_bytes) = match is_split(gpu) {
                true => Default::default(),
                false => self.add_memory(gpu, ring, &mut rows, (now_ns, stale_ns)).unwrap_or_default(),
            };
            let is_whole = count <= MOST_ROWS && rows.len() <= left;
            let number = |name: &PodName| rows.keys().position(|one| one == name).filter(|number| *number < left);
            let processes = of_processes.iter().filter_map(|(pid, name)| Some((*pid, number(name)?))).collect();
            let rows: Vec<PodRow> =
                rows.into_iter().take(left).map(|(name, used_bytes)| PodRow { name, used_bytes }).collect();
            left -= rows.len();
            if !is_whole && !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(most = MOST_ROWS, "the GPUs of this node have more containers than are shown");
            }
            GpuPods { rows, rest_bytes, processes }
        });
        Some(gpus.collect())
    }

    /// Adds what each container's processes hold on a GPU, with containers that were not given it. Returns these processes, and
    /// what is left of the memory in use; `None` if they are not known.
    fn add_memory(
        &self,
        gpu: &GpuState,
        ring: &ring::Reader,
        rows: &mut BTreeMap<PodName, Option<u64>>,
        (now_ns, stale_ns): (i64, i64),
    ) -> Option<(InContainers, Option<u64>)> {
        // Of an incomplete list it is not known what a container without a process in it holds.
        let is_known = gpu.lists_all && gpu.health() == Health::Up;
        let processes = gpu.processes().filter(|list| is_known && now_ns - list.at_ns <= stale_ns)?;
        let (mut held, mut found, mut are_all_placed): (BTreeMap<PodName, Option<u64>>, _, _) =
            (BTreeMap::new(), Vec::new(), true);
        for process in &processes.reading {
            match self.homes.of(process.pid, now_ns).home {
                // The list is from before its end, or the container's. The next one shows what is so now.
                Home::Container(_) if !self.homes.is_there(process.pid) => {
                    gpu.want_processes();
                    are_all_placed = false;
                }
                Home::Container(container) => {
                    let name = name_of(container);
                    let bytes = held.entry(name.clone()).or_insert(Some(0));
                    *bytes = bytes.zip(process.used_bytes).map(|(held, more)| held.saturating_add(more));
                    found.push((process.pid, name));
                }
                // Not the kubelet's container, once its link is not awaited any more.
                Home::Unlinked(id) => are_all_placed &= !self.homes.is_link_awaited(&id, now_ns),
                // It may be any container's.
                Home::Unknown => are_all_placed = false,
                Home::Host => {}
            }
        }
        let of_pods = held.values().copied().sum::<Option<u64>>();
        // What a container holds is unknown if one of its processes may be missing.
        rows.values_mut().for_each(|bytes| *bytes = are_all_placed.then_some(0));
        for (name, bytes) in held {
            if rows.len() < MOST_ROWS || rows.contains_key(&name) {
                rows.insert(name, bytes.filter(|_| are_all_placed));
            }
        }
        let used = ring.newest_ns().and_then(|newest_ns| ring.at(processes.at_ns.min(newest_ns)).ok().flatten());
        let rest = used.zip(of_pods).filter(|_| are_all_placed).map(|(used, of_pods)| used.saturating_sub(of_pods));
        Some((found, rest))
    }
}

fn name_of(container: Container) -> PodName {
    PodName { namespace: container.namespace, pod: container.pod, container: container.name.unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::{Clock as _, Manual};
    use highwater_core::gpu::{Device, Process};
    use std::path::Path;

    /// GPU 0, and GPU 1 with an instance.
    fn node(clock: &Arc<Manual>) -> (Node, Vec<ring::Writer>) {
        let device = |index: &str, uuid: &str, parent_uuid: Option<&str>| Device {
            index: index.into(),
            uuid: uuid.into(),
            minor: index.parse().ok(),
            parent_uuid: parent_uuid.map(str::to_owned),
            ..Device::default()
        };
        let devices =
            vec![device("0", "GPU-0", None), device("1", "GPU-1", None), device("1:0", "MIG-1-0", Some("GPU-1"))];
        Node::of_devices(Arc::clone(clock) as _, devices, true)
    }

    /// Makes a process whose control group is of the container with this id, which the kubelet's link gives this pod.
    fn process(folder: &Path, pid: u32, container: Option<(&str, &str)>) {
        let cgroup = container.map_or("0::/user.slice\n".to_owned(), |(digits, link)| {
            let id = digits.repeat(32);
            std::fs::create_dir_all(folder.join("logs")).expect("a folder");
            std::fs::write(folder.join("logs").join(format!("{link}-{id}.log")), "").expect("written");
            format!("0::/kubepods/cri-containerd-{id}.scope\n")
        });
        std::fs::create_dir_all(folder.join(pid.to_string())).expect("a folder");
        std::fs::write(folder.join(pid.to_string()).join("cgroup"), cgroup).expect("written");
    }

    fn rows(gpu: &GpuPods) -> Vec<(String, Option<u64>)> {
        let row = |row: &PodRow| (row.name.to_string(), row.used_bytes);
        gpu.rows.iter().map(row).collect()
    }

    #[test]
    fn each_byte_of_a_gpu_is_a_pods_or_the_rest() {
        let folder = tempfile::tempdir().expect("a folder");
        process(folder.path(), 5, Some(("0a", "llama-0_research_trainer")));
        process(folder.path(), 6, Some(("0a", "llama-0_research_trainer")));
        process(folder.path(), 7, Some(("0b", "spy_other_main")));
        process(folder.path(), 8, None);
        let kubelet = Arc::new(Kubelet::with_one_pod(folder.path().join("logs"), &["GPU-0", "MIG-1-0"]));
        let clock = Arc::new(Manual::at(20 * SECOND_NS));
        let (node, mut writers) = node(&clock);
        let watch = PodWatch::new(kubelet, folder.path().to_owned());
        let refresh = || {
            watch.refresh(&node, clock.now_ns());
            node.gpus.iter().map(|gpu| (*gpu.pods().expect("listed")).clone()).collect::<Vec<_>>()
        };
        let trainer = "research/llama-0/trainer".to_owned();
        let given = refresh();
        assert_eq!(
            given.iter().map(rows).collect::<Vec<_>>(),
            [vec![(trainer.clone(), None)], vec![], vec![(trainer.clone(), None)]]
        );
        assert_eq!(given[0].rest_bytes, None, "nothing is listed yet");
        for (at_ns, bytes) in [(1, 100), (19 * SECOND_NS, 64), (20 * SECOND_NS, 999)] {
            writers[0].push(at_ns, bytes).expect("in order");
        }
        let held = |pid, used_bytes| Process { pid, used_bytes };
        let all = vec![held(5, Some(30)), held(6, Some(4)), held(7, Some(10)), held(8, Some(15))];
        node.gpus[0].set_processes(19 * SECOND_NS, Some(all.clone()));
        node.gpus[1].set_processes(19 * SECOND_NS, Some(vec![held(5, Some(9))]));
        node.gpus[2].set_processes(19 * SECOND_NS, Some(vec![held(5, Some(9))]));
        let known = refresh();
        // It was not given the GPU, but holds memory on it.
        let spy = "other/spy/main".to_owned();
        assert_eq!(rows(&known[0]), [(spy.clone(), Some(10)), (trainer.clone(), Some(34))]);
        assert_eq!(known[0].rest_bytes, Some(20), "of what was in use when they were listed");
        assert_eq!(known[0].processes, [(5, 1), (6, 1), (7, 0)].into());
        assert_eq!((rows(&known[1]), known[1].rest_bytes), (vec![], None), "its instance has it");
        assert_eq!(rows(&known[2]), [(trainer.clone(), Some(9))]);
        // A process of unknown size makes its pod and the rest unknown, and no other pod.
        let unsized_one = all.iter().map(|one| if one.pid == 6 { held(6, None) } else { *one }).collect();
        node.gpus[0].set_processes(20 * SECOND_NS, Some(unsized_one));
        let partly = refresh();
        assert_eq!(rows(&partly[0]), [(spy, Some(10)), (trainer.clone(), None)]);
        assert_eq!(partly[0].rest_bytes, None);
        // A process of which it is not known where it runs may be any container's.
        let stranger = |pid| [&all[..], &[held(pid, Some(1))]].concat();
        node.gpus[0].set_processes(20 * SECOND_NS, Some(stranger(9)));
        let unknown = refresh();
        assert_eq!(rows(&unknown[0]), [("other/spy/main".to_owned(), None), (trainer.clone(), None)]);
        assert_eq!(unknown[0].rest_bytes, None);
        // One that has ended since: a new list is wanted.
        node.gpus[0].set_processes(20 * SECOND_NS, Some(all.clone()));
        assert!(!node.gpus[0].take_processes_wanted());
        std::fs::remove_dir_all(folder.path().join("7")).expect("gone");
        assert_eq!(rows(&refresh()[0]), [(trainer.clone(), None)], "it holds nothing");
        assert!(node.gpus[0].take_processes_wanted());
        // An old list says nothing of now: the pod that was given the GPU is known, and no bytes.
        clock.advance_to(20 * SECOND_NS + STALE_NS + 1);
        assert_eq!(rows(&refresh()[0]), [(trainer, None)]);
    }
}
