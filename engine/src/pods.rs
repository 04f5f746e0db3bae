//! Which pods have each GPU, and how much of its memory their processes hold.
//!
//! Enters: the kubelet's lists, the driver's lists of processes, and the control groups of these processes. Leaves: a table for
//! everything that shows it. A GPU may have several pods (time slicing, MPS, a pod that uses it without having asked for it), and each is
//! a row. Invariants: what is unknown is `None`, never 0; the bytes of a GPU's rows and its rest are what was in use when its
//! processes were listed; the number of rows is bounded. Absent on purpose: the API server, names of jobs.

use crate::node::Node;
use crate::place::home::Homes;
use crate::place::kubelet::{Home, Kubelet};
use crate::sample::PROCESS_TURNS;
use arc_swap::ArcSwap;
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{GpuState, Health};
use highwater_core::jobs::{Container, Gpus};
use highwater_core::ring;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows of all GPUs together. The kubelet runs 110 pods by default.
pub const MOST_ROWS: usize = 1_024;
/// Kubernetes has no longer names. A container with one is left out.
pub const MOST_NAME_BYTES: usize = 253;
/// A list of processes that is older, and older than three periods of such lists, says nothing about now.
const STALE_NS: i64 = 30 * SECOND_NS;

/// The pods of a node's GPUs at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodTable {
    /// Whether the kubelet gave its last list when it was asked; `None` if it is not asked.
    pub kubelet_up: Option<bool>,
    /// Those of each GPU or MIG instance, in the node's order; empty if the kubelet's list is not known.
    pub gpus: Vec<GpuPods>,
}

/// The pods of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuPods {
    /// As of [`Device::index`](highwater_core::gpu::Device::index).
    pub index: String,
    /// As of [`Device::uuid`](highwater_core::gpu::Device::uuid).
    pub uuid: String,
    /// The containers that were given it, or whose processes hold memory on it, by name.
    pub rows: Vec<PodRow>,
    /// Bytes in use that no container's process holds; `None` if not known.
    pub rest_bytes: Option<u64>,
    /// The processes that hold memory on it and run in a container, each with the number of its row.
    pub processes: BTreeMap<u32, usize>,
}

/// One container on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRow {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name; empty if not known.
    pub container: String,
    /// Bytes that its processes hold on the GPU; `None` if not known.
    pub used_bytes: Option<u64>,
}

impl PodTable {
    /// The pods of the GPU with this UUID, if they are known.
    #[must_use]
    pub fn of(&self, uuid: &str) -> Option<&GpuPods> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }
}

impl GpuPods {
    /// The container of this process.
    #[must_use]
    pub fn of_process(&self, pid: u32) -> Option<&PodRow> {
        self.rows.get(*self.processes.get(&pid)?)
    }
}

/// The current table, which readers share.
#[derive(Debug, Default)]
pub struct CurrentPods(ArcSwap<PodTable>);

impl CurrentPods {
    /// The current table.
    #[must_use]
    pub fn now(&self) -> Arc<PodTable> {
        self.0.load_full()
    }
}

/// Makes the table.
pub struct PodWatch {
    kubelet: Arc<Kubelet>,
    homes: Homes,
    table: Arc<CurrentPods>,
    /// Whether the log already says that there are too many rows.
    warned: AtomicBool,
}

/// Namespace, pod, container.
type Key = (String, String, String);
/// Processes that run in containers.
type InContainers = Vec<(u32, Key)>;

impl PodWatch {
    /// A watch that writes this table, with files of processes below `proc`.
    #[must_use]
    pub fn new(kubelet: Arc<Kubelet>, table: Arc<CurrentPods>, proc: PathBuf) -> Self {
        Self { homes: Homes::new(Some(Arc::clone(&kubelet)), proc), kubelet, table, warned: AtomicBool::new(false) }
    }

    /// Makes the table of this time; `node` is `None` while no source is open.
    pub fn refresh(&self, node: Option<&Node>, now_ns: i64) {
        let gpus = node.and_then(|node| self.gpus(node, now_ns)).unwrap_or_default();
        self.table.0.store(Arc::new(PodTable { kubelet_up: self.kubelet.is_up(), gpus }));
    }

    fn gpus(&self, node: &Node, now_ns: i64) -> Option<Vec<GpuPods>> {
        let listed = self.kubelet.last_list(now_ns)?;
        let names = Gpus::new(node.source.devices());
        let stale_ns = STALE_NS.max(3 * PROCESS_TURNS * node.periods.slow_ns);
        let mut given: Vec<BTreeMap<Key, Option<u64>>> = vec![BTreeMap::new(); node.gpus.len()];
        let mut count = 0;
        for (namespace, pod, container, gpus) in listed.containers() {
            if [namespace, pod, container].iter().any(|name| name.len() > MOST_NAME_BYTES) {
                continue;
            }
            let key = (namespace.to_owned(), pod.to_owned(), container.to_owned());
            for position in gpus.iter().filter_map(|gpu| names.find(gpu)) {
                count += 1;
                if count <= MOST_ROWS {
                    given[position].insert(key.clone(), None);
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
            let row = |((namespace, pod, container), used_bytes)| PodRow { namespace, pod, container, used_bytes };
            let is_whole = count <= MOST_ROWS && rows.len() <= left;
            let number = |key: &Key| rows.keys().position(|one| one == key).filter(|number| *number < left);
            let processes = of_processes.iter().filter_map(|(pid, key)| Some((*pid, number(key)?))).collect();
            let rows: Vec<PodRow> = rows.into_iter().take(left).map(row).collect();
            left -= rows.len();
            if !is_whole && !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(most = MOST_ROWS, "the GPUs of this node have more containers than are shown");
            }
            GpuPods { index: gpu.device.index.clone(), uuid: gpu.device.uuid.clone(), rows, rest_bytes, processes }
        });
        Some(gpus.collect())
    }

    /// Adds what each container's processes hold on a GPU, with containers that were not given it. Returns these processes, and
    /// what is left of the memory in use; `None` if they are not known.
    fn add_memory(
        &self,
        gpu: &GpuState,
        ring: &ring::Reader,
        rows: &mut BTreeMap<Key, Option<u64>>,
        (now_ns, stale_ns): (i64, i64),
    ) -> Option<(InContainers, Option<u64>)> {
        // Of an incomplete list it is not known what a container without a process in it holds.
        let is_known = gpu.lists_all && gpu.health() == Health::Up;
        let processes = gpu.processes().filter(|list| is_known && now_ns - list.at_ns <= stale_ns)?;
        let (mut held, mut found, mut are_all_placed): (BTreeMap<Key, Option<u64>>, _, _) =
            (BTreeMap::new(), Vec::new(), true);
        for process in &processes.reading {
            match self.homes.of(process.pid, now_ns).home {
                // The list is from before its end, or the container's. The next one shows what is so now.
                Home::Container(_) if !self.homes.is_there(process.pid) => {
                    gpu.want_processes();
                    are_all_placed = false;
                }
                Home::Container(container) => {
                    let key = key_of(container);
                    let bytes = held.entry(key.clone()).or_insert(Some(0));
                    *bytes = bytes.zip(process.used_bytes).map(|(held, more)| held.saturating_add(more));
                    found.push((process.pid, key));
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
        for (key, bytes) in held {
            if rows.len() < MOST_ROWS || rows.contains_key(&key) {
                rows.insert(key, bytes.filter(|_| are_all_placed));
            }
        }
        let used = ring.newest_ns().and_then(|newest_ns| ring.at(processes.at_ns.min(newest_ns)).ok().flatten());
        let rest = used.zip(of_pods).filter(|_| are_all_placed).map(|(used, of_pods)| used.saturating_sub(of_pods));
        Some((found, rest))
    }
}

fn key_of(container: Container) -> Key {
    (container.namespace, container.pod, container.name.unwrap_or_default())
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
        let row = |row: &PodRow| (format!("{}/{}/{}", row.namespace, row.pod, row.container), row.used_bytes);
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
        let table = Arc::new(CurrentPods::default());
        let watch = PodWatch::new(kubelet, Arc::clone(&table), folder.path().to_owned());
        let refresh = || {
            watch.refresh(Some(&node), clock.now_ns());
            table.now()
        };
        let trainer = "research/llama-0/trainer".to_owned();
        let given = refresh();
        assert_eq!(
            given.gpus.iter().map(rows).collect::<Vec<_>>(),
            [vec![(trainer.clone(), None)], vec![], vec![(trainer.clone(), None)]]
        );
        assert_eq!(given.gpus[0].rest_bytes, None, "nothing is listed yet");
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
        assert_eq!(rows(&known.gpus[0]), [(spy.clone(), Some(10)), (trainer.clone(), Some(34))]);
        assert_eq!(known.gpus[0].rest_bytes, Some(20), "of what was in use when they were listed");
        assert_eq!(known.gpus[0].processes, [(5, 1), (6, 1), (7, 0)].into());
        assert_eq!((rows(&known.gpus[1]), known.gpus[1].rest_bytes), (vec![], None), "its instance has it");
        assert_eq!(rows(&known.gpus[2]), [(trainer.clone(), Some(9))]);
        assert_eq!(table.now().of("GPU-0"), Some(&known.gpus[0]));
        // A process of unknown size makes its pod and the rest unknown, and no other pod.
        let unsized_one = all.iter().map(|one| if one.pid == 6 { held(6, None) } else { *one }).collect();
        node.gpus[0].set_processes(20 * SECOND_NS, Some(unsized_one));
        let partly = refresh();
        assert_eq!(rows(&partly.gpus[0]), [(spy, Some(10)), (trainer.clone(), None)]);
        assert_eq!(partly.gpus[0].rest_bytes, None);
        // A process of which it is not known where it runs may be any container's.
        let stranger = |pid| [&all[..], &[held(pid, Some(1))]].concat();
        node.gpus[0].set_processes(20 * SECOND_NS, Some(stranger(9)));
        let unknown = refresh();
        assert_eq!(rows(&unknown.gpus[0]), [("other/spy/main".to_owned(), None), (trainer.clone(), None)]);
        assert_eq!(unknown.gpus[0].rest_bytes, None);
        // One that has ended since: a new list is wanted.
        node.gpus[0].set_processes(20 * SECOND_NS, Some(all.clone()));
        assert!(!node.gpus[0].take_processes_wanted());
        std::fs::remove_dir_all(folder.path().join("7")).expect("gone");
        assert_eq!(rows(&refresh().gpus[0]), [(trainer.clone(), None)], "it holds nothing");
        assert!(node.gpus[0].take_processes_wanted());
        // An old list says nothing of now: the pod that was given the GPU is known, and no bytes.
        clock.advance_to(20 * SECOND_NS + STALE_NS + 1);
        assert_eq!(rows(&refresh().gpus[0]), [(trainer, None)]);
        watch.refresh(None, clock.now_ns());
        assert_eq!(*table.now(), PodTable { kubelet_up: Some(true), gpus: vec![] }, "no source is open");
    }
}
