//! Which pods or Slurm steps have each GPU, and how much of its memory their processes hold.
//!
//! Enters: the kubelet's lists or Slurm's groups and files, the driver's lists of processes, and the control groups of these
//! processes. Leaves: the rows of each GPU's state. A GPU may have several workloads (time slicing, MPS, a pod that uses it without
//! having asked for it), and each is a row. Invariants: what is unknown is `None`, never 0; the bytes of a GPU's rows and its rest are
//! what was in use when its processes were listed; the number of rows is bounded. Absent on purpose: the API server, Slurm's
//! controller, names of jobs.

use crate::node::Node;
use crate::place::home::Homes;
use crate::place::kubelet::{Home, Kubelet};
use crate::place::slurm::{self, SlurmSettings};
use crate::sample::PROCESS_TURNS;
use highwater_core::clock::{Clock, SECOND_NS, park_for};
use highwater_core::gpu::{GpuState, GpuWorkloads, Health, PodName, SlurmStep, Workload, WorkloadRow};
use highwater_core::jobs::{Container, Gpus};
use highwater_core::ring;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Rows of all GPUs together. The kubelet runs 110 pods by default.
pub const MOST_ROWS: usize = 1_024;
/// Bytes of namespace, pod and container. Kubernetes has no longer names: a DNS label has 63 bytes, and a pod's name is a DNS
/// subdomain. A container with longer ones is left out. A Slurm step's are shorter.
pub const MOST_NAME_BYTES: usize = 253 + 2 * 63;
const _: () = assert!(2 * slurm::MOST_NAME_BYTES <= MOST_NAME_BYTES);
/// A list of processes that is older, and older than three periods of such lists, says nothing about now.
const STALE_NS: i64 = 30 * SECOND_NS;
/// How often Slurm's steps are looked for: as often as the kubelet is asked.
const PERIOD: Duration = Duration::from_secs(5);

/// Finds the workloads of each GPU.
pub struct WorkloadWatch {
    scheduler: Scheduler,
    /// Whether the log already says that there are too many rows.
    warned: AtomicBool,
}

/// What started them.
enum Scheduler {
    Kubernetes { kubelet: Arc<Kubelet>, homes: Homes },
    Slurm(Slurm),
}

/// Slurm, and what was seen of it.
struct Slurm {
    settings: SlurmSettings,
    /// Where the files of processes are.
    proc: PathBuf,
    /// Whether there was a step or a readable folder of jobs: before that this may be a node without Slurm.
    was_seen: AtomicBool,
    /// Whether the log already says that the folder of jobs cannot be read.
    warned: AtomicBool,
}

/// Where a process runs.
enum Placed {
    /// In this workload.
    In(Workload),
    /// In none.
    Outside,
    /// It may be any workload's.
    Unknown,
    /// It was in one, and has ended.
    Ended,
}

/// Processes that run in workloads.
type InWorkloads = Vec<(u32, Workload)>;

/// The workloads that were given each GPU, by its position, and how many there are.
type Given = (Vec<BTreeMap<Workload, Option<u64>>>, usize);

impl WorkloadWatch {
    /// A watch of pods, with the files of processes below `proc`.
    #[must_use]
    pub fn of_pods(kubelet: Arc<Kubelet>, proc: PathBuf) -> Self {
        let homes = Homes::new(Some(Arc::clone(&kubelet)), proc);
        Self { scheduler: Scheduler::Kubernetes { kubelet, homes }, warned: AtomicBool::new(false) }
    }

    /// A watch of Slurm's steps, with the files of processes below `proc`.
    #[must_use]
    pub fn of_slurm(settings: SlurmSettings, proc: PathBuf) -> Self {
        let slurm = Slurm { settings, proc, was_seen: AtomicBool::new(false), warned: AtomicBool::new(false) };
        Self { scheduler: Scheduler::Slurm(slurm), warned: AtomicBool::new(false) }
    }

    /// Looks every five seconds until it is stopped. `node` is the node of now.
    pub fn run(&self, clock: &dyn Clock, stop: &AtomicBool, node: &dyn Fn() -> Option<Arc<Node>>) {
        while !stop.load(Ordering::Relaxed) {
            if let Some(node) = node() {
                self.refresh(&node, clock.now_ns());
            }
            park_for(PERIOD, stop);
        }
    }

    /// Sets the workloads of each of the node's GPUs. Without a list of the kubelet they are not known, and without a step of
    /// Slurm.
    pub fn refresh(&self, node: &Node, now_ns: i64) {
        match self.gpus(node, now_ns) {
            Some(all) => node.gpus.iter().zip(all).for_each(|(gpu, workloads)| gpu.set_workloads(Some(workloads))),
            None => node.gpus.iter().for_each(|gpu| gpu.set_workloads(None)),
        }
    }

    fn gpus(&self, node: &Node, now_ns: i64) -> Option<Vec<GpuWorkloads>> {
        let stale_ns = STALE_NS.max(3 * PROCESS_TURNS * node.periods.slow_ns);
        let (given, count) = self.given(node, now_ns)?;
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
            let number = |name: &Workload| rows.keys().position(|one| one == name).filter(|number| *number < left);
            let processes = of_processes.iter().filter_map(|(pid, name)| Some((*pid, number(name)?))).collect();
            let rows: Vec<WorkloadRow> =
                rows.into_iter().take(left).map(|(name, used_bytes)| WorkloadRow { name, used_bytes }).collect();
            left -= rows.len();
            if !is_whole && !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(most = MOST_ROWS, "the GPUs of this node have more workloads than are shown");
            }
            GpuWorkloads { rows, rest_bytes, processes }
        });
        let gpus: Vec<_> = gpus.collect();
        if let Scheduler::Slurm(slurm) = &self.scheduler {
            slurm.was_seen.fetch_or(gpus.iter().any(|gpu| !gpu.rows.is_empty()), Ordering::Relaxed);
            if !slurm.was_seen.load(Ordering::Relaxed) {
                return None;
            }
        }
        Some(gpus)
    }

    /// The workloads that were given each GPU; `None` if they are not known.
    fn given(&self, node: &Node, now_ns: i64) -> Option<Given> {
        let mut given = vec![BTreeMap::new(); node.gpus.len()];
        let mut count = 0;
        let mut add = |position: usize, name: Workload| {
            count += 1;
            if count <= MOST_ROWS {
                given[position].insert(name, None);
            }
        };
        match &self.scheduler {
            Scheduler::Kubernetes { kubelet, .. } => {
                let names = Gpus::new(node.source.devices());
                let listed = kubelet.last_list(now_ns)?;
                for (namespace, pod, container, gpus) in listed.containers() {
                    if namespace.len() + pod.len() + container.len() > MOST_NAME_BYTES {
                        continue;
                    }
                    let [namespace, pod, container] = [namespace, pod, container].map(str::to_owned);
                    let name = Workload::Pod(PodName { namespace, pod, container });
                    gpus.iter().filter_map(|gpu| names.find(gpu)).for_each(|position| add(position, name.clone()));
                }
            }
            Scheduler::Slurm(slurm) => {
                for (gpu, job) in slurm.mapped() {
                    let is_it = |state: &GpuState| state.device.index == gpu || state.device.uuid == gpu;
                    if let Some(position) = node.gpus.iter().position(is_it) {
                        add(position, Workload::Slurm(job));
                    }
                }
            }
        }
        Some((given, count))
    }

    fn place(&self, pid: u32, now_ns: i64) -> Placed {
        match &self.scheduler {
            Scheduler::Kubernetes { homes, .. } => match homes.of(pid, now_ns).home {
                Home::Container(_) if !homes.is_there(pid) => Placed::Ended,
                Home::Container(container) => Placed::In(name_of(container)),
                // Not the kubelet's container, once its link is not awaited any more.
                Home::Unlinked(id) if !homes.is_link_awaited(&id, now_ns) => Placed::Outside,
                Home::Host => Placed::Outside,
                Home::Unlinked(_) | Home::Unknown => Placed::Unknown,
            },
            Scheduler::Slurm(slurm) => slurm.place(pid),
        }
    }

    /// Adds what each workload's processes hold on a GPU, with workloads that were not given it. Returns these processes, and
    /// what is left of the memory in use; `None` if they are not known.
    fn add_memory(
        &self,
        gpu: &GpuState,
        ring: &ring::Reader,
        rows: &mut BTreeMap<Workload, Option<u64>>,
        (now_ns, stale_ns): (i64, i64),
    ) -> Option<(InWorkloads, Option<u64>)> {
        // Of an incomplete list it is not known what a workload without a process in it holds.
        let is_known = gpu.lists_all && gpu.health() == Health::Up;
        let processes = gpu.processes().filter(|list| is_known && now_ns - list.at_ns <= stale_ns)?;
        let (mut held, mut found, mut are_all_placed): (BTreeMap<Workload, Option<u64>>, _, _) =
            (BTreeMap::new(), Vec::new(), true);
        for process in &processes.reading {
            match self.place(process.pid, now_ns) {
                // The list is from before its end, or the workload's. The next one shows what is so now.
                Placed::Ended => {
                    gpu.want_processes();
                    are_all_placed = false;
                }
                Placed::In(name) => {
                    let bytes = held.entry(name.clone()).or_insert(Some(0));
                    *bytes = bytes.zip(process.used_bytes).map(|(held, more)| held.saturating_add(more));
                    found.push((process.pid, name));
                }
                Placed::Unknown => are_all_placed = false,
                Placed::Outside => {}
            }
        }
        let (held, found) = with_one_user_a_step(held, found);
        rows.retain(|given, _| !held.keys().any(|name| is_step_of(name, given)));
        // A job without a process in its own group may have some in no group that is known.
        are_all_placed &= rows.keys().all(|given| given.slurm().is_none() || held.contains_key(given));
        let of_workloads = held.values().copied().sum::<Option<u64>>();
        // What a workload holds is unknown if one of its processes may be missing.
        rows.values_mut().for_each(|bytes| *bytes = are_all_placed.then_some(0));
        for (name, bytes) in held {
            if rows.len() < MOST_ROWS || rows.contains_key(&name) {
                rows.insert(name, bytes.filter(|_| are_all_placed));
            }
        }
        let used = ring.newest_ns().and_then(|newest_ns| ring.at(processes.at_ns.min(newest_ns)).ok().flatten());
        let rest = used.zip(of_workloads).filter(|_| are_all_placed);
        Some((found, rest.map(|(used, of_workloads)| used.saturating_sub(of_workloads))))
    }
}

impl Slurm {
    fn place(&self, pid: u32) -> Placed {
        if !self.settings.steps {
            return Placed::Unknown;
        }
        let process = self.proc.join(pid.to_string());
        match slurm::step_of(&process) {
            slurm::Found::Step(step) => Placed::In(Workload::Slurm(step)),
            slurm::Found::None => Placed::Outside,
            // Where even the first process is hidden, others that run are, too.
            slurm::Found::Unknown if process.exists() || !self.proc.join("1").exists() => Placed::Unknown,
            slurm::Found::Unknown => Placed::Ended,
        }
    }

    /// The jobs of each GPU by the folder; none if it cannot be read.
    fn mapped(&self) -> Vec<(String, SlurmStep)> {
        let Some(folder) = &self.settings.job_map else { return Vec::new() };
        match slurm::mapped(folder, MOST_ROWS + 1) {
            Ok(jobs) => {
                self.was_seen.store(true, Ordering::Relaxed);
                self.warned.store(false, Ordering::Relaxed);
                jobs
            }
            Err(error) => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "slurm.job_map is not used");
                }
                Vec::new()
            }
        }
    }
}

/// The same with one user for each step: processes of a container without root run as other users than their step. Where they differ, it
/// is not known whose the step is.
fn with_one_user_a_step(
    held: BTreeMap<Workload, Option<u64>>,
    found: InWorkloads,
) -> (BTreeMap<Workload, Option<u64>>, InWorkloads) {
    let key = |step: &SlurmStep| (step.job.clone(), step.step.clone());
    let mut users = BTreeMap::new();
    for step in held.keys().filter_map(Workload::slurm) {
        let user = users.entry(key(step)).or_insert(step.user);
        *user = user.filter(|user| step.user == Some(*user));
    }
    let named = |name: Workload| match name {
        Workload::Slurm(step) => Workload::Slurm(SlurmStep { user: users.get(&key(&step)).copied().flatten(), ..step }),
        pod @ Workload::Pod(_) => pod,
    };
    let mut all: BTreeMap<Workload, Option<u64>> = BTreeMap::new();
    for (name, bytes) in held {
        let sum = all.entry(named(name)).or_insert(Some(0));
        *sum = sum.zip(bytes).map(|(sum, bytes)| sum.saturating_add(bytes));
    }
    (all, found.into_iter().map(|(pid, name)| (pid, named(name))).collect())
}

/// Whether a workload is a step of this job, of which no step was known.
fn is_step_of(name: &Workload, given: &Workload) -> bool {
    let jobs = name.slurm().zip(given.slurm());
    jobs.is_some_and(|(step, given): (&SlurmStep, &SlurmStep)| given.step.is_empty() && step.job == given.job)
}

fn name_of(container: Container) -> Workload {
    let (namespace, pod) = (container.namespace, container.pod);
    Workload::Pod(PodName { namespace, pod, container: container.name.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::Manual;
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

    fn rows(gpu: &GpuWorkloads) -> Vec<(String, Option<u64>)> {
        let row = |row: &WorkloadRow| (row.name.to_string(), row.used_bytes);
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
        let watch = WorkloadWatch::of_pods(kubelet, folder.path().to_owned());
        let refresh = || {
            watch.refresh(&node, clock.now_ns());
            node.gpus.iter().map(|gpu| (*gpu.workloads().expect("listed")).clone()).collect::<Vec<_>>()
        };
        let trainer = "pod research/llama-0/trainer".to_owned();
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
        let spy = "pod other/spy/main".to_owned();
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
        assert_eq!(rows(&unknown[0]), [("pod other/spy/main".to_owned(), None), (trainer.clone(), None)]);
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

    #[test]
    fn each_byte_of_a_gpu_is_a_slurm_steps_or_the_rest() {
        let folder = tempfile::tempdir().expect("a folder");
        let (proc, map) = (folder.path().join("proc"), folder.path().join("map"));
        let process = |pid: u32, cgroup: &str| {
            let process = proc.join(pid.to_string());
            std::fs::create_dir_all(&process).expect("a folder");
            std::fs::write(process.join("cgroup"), cgroup).expect("written");
            std::fs::write(process.join("status"), "Uid:\t1000\t1000\t1000\t1000\n").expect("written");
        };
        process(5, "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n");
        process(6, "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_1\n");
        process(7, "0::/system.slice/slurmstepd.scope/job_78/step_batch/user/task_0\n");
        process(8, "0::/system.slice/nvidia-persistenced.service\n");
        process(1, "0::/init.scope\n");
        let clock = Arc::new(Manual::at(20 * SECOND_NS));
        let (node, mut writers) = node(&clock);
        for (at_ns, bytes) in [(1, 100), (19 * SECOND_NS, 64)] {
            writers[0].push(at_ns, bytes).expect("in order");
        }
        let refresh = |watch: &WorkloadWatch| {
            watch.refresh(&node, clock.now_ns());
            node.gpus
                .iter()
                .map(|gpu| gpu.workloads().map(|known| (rows(&known), known.rest_bytes)))
                .collect::<Vec<_>>()
        };
        let watch = WorkloadWatch::of_slurm(SlurmSettings::default(), proc.clone());
        assert_eq!(refresh(&watch), [None, None, None], "as on a node without Slurm");
        let held = |pid, used_bytes| Process { pid, used_bytes: Some(used_bytes) };
        node.gpus[0].set_processes(19 * SECOND_NS, Some(vec![held(5, 30), held(6, 4), held(7, 10), held(8, 15)]));
        let own = "Slurm step 77.0 of user 1000".to_owned();
        let batch = ("Slurm step 78.batch of user 1000".to_owned(), Some(10));
        let none = Some((vec![], None));
        assert_eq!(
            refresh(&watch),
            [Some((vec![(own.clone(), Some(34)), batch.clone()], Some(20))), none.clone(), none.clone()]
        );
        // The folder gives GPU 0 to the job of which a step is known, and to one that has no process; GPU 1's instance to another.
        std::fs::create_dir_all(&map).expect("a folder");
        for (gpu, jobs) in [("0", "77\n79 1001\n"), ("MIG-1-0", "80\n"), ("9", "81\n")] {
            std::fs::write(map.join(gpu), jobs).expect("written");
        }
        let settings = SlurmSettings { job_map: Some(map.clone()), ..SlurmSettings::default() };
        let watch = WorkloadWatch::of_slurm(settings, proc.clone());
        // Job 79 may have processes in groups that are not known to be its.
        let all = [own.clone(), batch.0.clone(), "Slurm job 79 of user 1001".to_owned()].map(|name| (name, None));
        let known = refresh(&watch);
        assert_eq!(known[0], Some((all.to_vec(), None)));
        assert_eq!((&known[1], &known[2]), (&none, &Some((vec![("Slurm job 80".to_owned(), None)], None))));
        // Without the control groups nothing is known of bytes.
        let watch = WorkloadWatch::of_slurm(SlurmSettings { steps: false, job_map: Some(map) }, proc.clone());
        let jobs = [("Slurm job 77".to_owned(), None), ("Slurm job 79 of user 1001".to_owned(), None)];
        assert_eq!(refresh(&watch)[0], Some((jobs.to_vec(), None)));
        // A folder that is not there gives none, and is no sign of Slurm.
        let none_there = SlurmSettings { steps: false, job_map: Some(proc.join("none")) };
        assert_eq!(refresh(&WorkloadWatch::of_slurm(none_there, proc.clone()))[0], None);
        // A container's process of a step runs as another user.
        std::fs::write(proc.join("6/status"), "Uid:\t100999\t100999\t100999\t100999\n").expect("written");
        let watch = WorkloadWatch::of_slurm(SlurmSettings::default(), proc.clone());
        assert_eq!(refresh(&watch)[0], Some((vec![("Slurm step 77.0".to_owned(), Some(34)), batch], Some(20))));
        assert_eq!(node.gpus[0].workloads().expect("known").processes, [(5, 0), (6, 0), (7, 1)].into());
        // One that has ended: a new list is wanted. Where even the first process is hidden, it may as well run.
        std::fs::remove_dir_all(proc.join("7")).expect("gone");
        node.gpus[0].take_processes_wanted();
        assert_eq!(refresh(&watch)[0], Some((vec![("Slurm step 77.0".to_owned(), None)], None)));
        assert!(node.gpus[0].take_processes_wanted());
        std::fs::remove_dir_all(proc.join("1")).expect("hidden");
        assert_eq!(refresh(&watch)[0], Some((vec![("Slurm step 77.0".to_owned(), None)], None)));
        assert!(!node.gpus[0].take_processes_wanted());
        // Once there was a step, there being none is known.
        node.gpus[0].set_processes(20 * SECOND_NS, Some(vec![held(8, 15)]));
        assert_eq!(refresh(&watch)[0].as_ref().map(|(rows, _)| rows.len()), Some(0));
    }
}
