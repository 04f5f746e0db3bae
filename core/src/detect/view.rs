//! What detectors look at, brought together once a turn.
//!
//! Enters: GPUs, rings, what ended, and who is running. Leaves: a [`View`] of one moment. Invariant: nothing in it
//! reads the system, so that a replay shows the same views as the live run did.

use super::finding::{Evidence, HumanBytes, Subject, number};
use super::hosts::Hosts;
use super::names::Names;
use super::settings::Settings;
use super::steps::Step;
use crate::clock::SECOND_NS;
use crate::gpu::{GpuState, Latest, Rare, Workload, most_first};
use crate::jobs::{FailedAllocation, HostOom};
use crate::mesh::Mesh;
use crate::phases::{Flush, RankKey};
use crate::ring;
use crate::scope::Scope;
use std::sync::Arc;

/// Without another of the readings that are made every 30 s for this long, nothing of them is known any more.
pub(super) const RARE_OLD_NS: i64 = 120 * SECOND_NS;

/// One rank as it is now.
#[derive(Debug, Clone)]
pub(super) struct RankNow {
    pub key: RankKey,
    /// The process that sends for it.
    pub pid: Option<u32>,
    /// The pod that its process is in, without its container, if it is in one.
    pub pod: Option<Workload>,
    /// Positions of its GPUs; empty where they are not known.
    pub gpus: Vec<usize>,
    /// The step that it is in.
    pub step: Option<OpenStep>,
    /// Retries of its allocator so far, and allocations that failed.
    pub retries: Option<u64>,
    pub ooms: Option<u64>,
    /// Where it stands in its job, and how many ranks that has.
    pub mesh: Option<Arc<Mesh>>,
    pub world_size: Option<u32>,
    /// When its first event arrived, and its last.
    pub since_ns: i64,
    pub heard_ns: i64,
    /// Whether it has nothing open.
    pub is_at_rest: bool,
}

impl RankNow {
    /// Whose it is.
    fn owner(&self) -> &Scope {
        self.key.0.scope()
    }

    /// Whether it seems to have ended: it has nothing open, and has sent nothing since `other`, a rank of another job, began.
    /// For a job that sends over TCP, this is the only indication of its end.
    fn is_followed_by(&self, other: &Self) -> bool {
        self.is_at_rest && self.key.0 != other.key.0 && self.heard_ns < other.since_ns
    }
}

/// A step that has begun and not ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenStep {
    pub number: Option<u64>,
    pub begin_ns: i64,
    /// Retries of the allocator at its begin.
    pub retries: Option<u64>,
    /// Whether a phase of `refill_phases` is open. Only looked up, and so only true, once the step has been open for
    /// longer than [`OPEN_NS`](super::slow_steps::OPEN_NS).
    pub refills: bool,
}

/// One moment.
pub(super) struct View<'a> {
    pub now_ns: i64,
    pub settings: &'a Settings,
    pub gpus: &'a [GpuState],
    pub rings: &'a [ring::Reader],
    /// Steps that ended since the last view.
    pub steps: &'a [Step],
    pub ranks: &'a [RankNow],
    /// The last failed allocation that each rank has marked in the last minute, also of ranks that have ended since.
    pub ooms: &'a [(RankKey, Arc<FailedAllocation>)],
    /// The last time that each rank ran out of host memory in the last minute, likewise.
    pub host_ooms: &'a [(RankKey, Arc<HostOom>)],
    /// Falls and regrowths since the last view, each with the position of its GPU.
    pub flushes: &'a [(usize, Flush)],
    /// What processes wait for on their host, of ranks whose host seems late.
    pub hosts: &'a Hosts,
    /// By GPU, the positions of the ranks that run on it, and when the last other rank left it ([`Subjects`]).
    pub on: &'a [Vec<usize>],
    pub since_ns: &'a [i64],
}

/// What the driver's list of a GPU's processes says of a rank that names the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// Its process is not there.
    Absent,
    /// There is no list since its first event, or its process is not known.
    Unknown,
    /// Its process is there.
    Listed,
}

impl View<'_> {
    /// The ranks that run on a GPU ([`running`]).
    fn ranks_on(&self, gpu: usize) -> impl Iterator<Item = &RankNow> {
        self.on.get(gpu).into_iter().flatten().filter_map(|position| self.ranks.get(*position))
    }

    /// Whether this rank, which named a GPU in a step that ended, may have caused what the GPU shows. A rank that still names the
    /// GPU must be among the ranks that run on it. For a rank that no longer names it, all ranks that run on it must have the
    /// same owner.
    pub fn counts_on(&self, key: &RankKey, gpu: usize) -> bool {
        let names_it = self.ranks.iter().any(|rank| rank.key == *key && rank.gpus.contains(&gpu));
        let mut ranks = self.ranks_on(gpu);
        if names_it { ranks.any(|rank| rank.key == *key) } else { ranks.all(|rank| rank.owner() == key.0.scope()) }
    }

    /// The rank that runs on a GPU, where exactly one does.
    pub fn rank_on(&self, gpu: usize) -> Option<&RankNow> {
        let on = || self.ranks_on(gpu);
        let mut here = on().filter(|rank| !on().any(|other| rank.is_followed_by(other)));
        here.next().filter(|_| here.next().is_none())
    }

    /// The time from which on the one rank on a GPU may have caused what the GPU shows: the rank's first mark, or the end of
    /// another rank that was there at the same time. Earlier readings are not attributed to it. If no single rank is known, the
    /// subject is the GPU itself, and all of its past counts.
    pub fn subject_since_ns(&self, gpu: usize) -> i64 {
        let since_ns = self.since_ns.get(gpu).copied().unwrap_or(i64::MIN);
        self.rank_on(gpu).map_or(i64::MIN, |rank| rank.since_ns.max(since_ns))
    }

    /// What is read of a GPU every 30 s, unless it is old.
    pub fn rare(&self, gpu: usize) -> Option<Arc<Latest<Rare>>> {
        self.gpus.get(gpu)?.rare().filter(|rare| self.now_ns - rare.at_ns < RARE_OLD_NS)
    }

    /// `GPU 3`, by its index.
    pub fn gpu_name(&self, gpu: usize) -> String {
        let index = self.gpus.get(gpu).map_or("?", |state| state.device.index.as_str());
        format!("GPU {index}")
    }

    /// A GPU, with the rank that runs on it where exactly one does.
    pub fn subject_of(&self, gpu: usize) -> Subject {
        let (job, rank) = self.rank_on(gpu).map(|rank| rank.key.clone()).unzip();
        Subject { gpu: Some(gpu), job, rank }
    }

    /// The step that the one rank on a GPU is in.
    pub fn step_on(&self, gpu: usize) -> Option<u64> {
        self.rank_on(gpu)?.step?.number
    }

    /// The step that the one rank on a GPU was in at a moment since the last view. If the moment lies between two steps, or in a
    /// step whose end is not attributed yet, it is the step that the rank is in now.
    pub fn step_at(&self, gpu: usize, at_ns: i64) -> Option<u64> {
        let rank = self.rank_on(gpu)?;
        let was_in = |step: &&Step| step.key == rank.key && step.begin_ns <= at_ns && at_ns < step.end_ns;
        let ended = self.steps.iter().rev().find(was_in);
        ended.map_or_else(|| rank.step?.number, |step| step.number)
    }

    /// The workloads that have a GPU, or an instance of it.
    fn workloads_on(&self, gpu: usize) -> Option<Vec<Workload>> {
        let whole = self.gpus.get(gpu)?;
        let is_on = |state: &&GpuState| {
            std::ptr::eq(*state, whole) || state.device.parent_uuid.as_ref() == Some(&whole.device.uuid)
        };
        let pods: Vec<_> = self.gpus.iter().filter(is_on).map(GpuState::workloads).collect::<Option<_>>()?;
        Some(most_first(pods.iter().flat_map(|pods| &pods.rows)))
    }

    /// A rank that has not ended.
    pub fn rank(&self, key: &RankKey) -> Option<&RankNow> {
        self.ranks.get(position(self.ranks, key)?)
    }

    /// Whether a rank is known and has not ended. Detectors drop what they keep about other ranks.
    pub fn knows(&self, key: &RankKey) -> bool {
        knows(self.ranks, key)
    }
}

impl Names for &View<'_> {
    fn gpu(&self, position: usize) -> Option<(String, String)> {
        let device = &self.gpus.get(position)?.device;
        Some((device.index.clone(), device.uuid.clone()))
    }

    /// What a job says of its GPUs is not enough to name who else is there: only its process shows where a rank runs.
    fn workloads(&self, subject: &Subject) -> Option<Vec<Workload>> {
        let Some(job) = &subject.job else { return self.workloads_on(subject.gpu?) };
        let rank = self.rank(&(job.clone(), subject.rank?))?;
        let of_process = |pid| self.gpus.iter().find_map(|gpu| Some(gpu.workloads()?.of_process(pid)?.name.clone()));
        Some(vec![rank.pid.and_then(of_process).or_else(|| rank.pod.clone())?])
    }
}

/// Whether a rank is among these, which are in the order of their keys.
pub(super) fn knows(ranks: &[RankNow], key: &RankKey) -> bool {
    position(ranks, key).is_some()
}

fn position(ranks: &[RankNow], key: &RankKey) -> Option<usize> {
    ranks.binary_search_by(|rank| rank.key.cmp(key)).ok()
}

/// By GPU, the positions of the ranks that run on it. Candidates are the ranks that name the GPU, and ranks without known GPUs
/// whose process the driver lists there. Any job may name any GPU. So if the candidates have several owners, only the owners
/// count that have a candidate of the best [`Standing`]. While the GPU of another owner's new rank is still searched for, no
/// rank counts unless a candidate's standing is certain.
pub(super) fn running(gpus: &[GpuState], ranks: &[RankNow], on: &mut Vec<Vec<usize>>) {
    on.resize_with(gpus.len(), Vec::new);
    on.iter_mut().for_each(Vec::clear);
    let mut is_any_sought = false;
    for (position, rank) in ranks.iter().enumerate() {
        is_any_sought |= rank.gpus.is_empty();
        for gpu in &rank.gpus {
            if let Some(on) = on.get_mut(*gpu) {
                on.push(position);
            }
        }
    }
    for (state, on) in gpus.iter().zip(on) {
        let first = on.first().and_then(|position| ranks.get(*position)).map(RankNow::owner);
        let is_others = |rank: &RankNow| Some(rank.owner()) != first;
        if is_any_sought || on.iter().filter_map(|position| ranks.get(*position)).any(is_others) {
            settle(state, ranks, on);
        }
    }
}

/// Reduces the candidates of one GPU, which may have several owners, to the ranks that count.
fn settle(gpu: &GpuState, ranks: &[RankNow], on: &mut Vec<usize>) {
    let sought = || ranks.iter().enumerate().filter(|(_, rank)| rank.gpus.is_empty());
    on.extend(sought().filter(|(_, rank)| standing(gpu, rank) == Standing::Listed).map(|(position, _)| position));
    on.sort_unstable();
    let here: Vec<(usize, &RankNow, Standing)> = on
        .iter()
        .filter_map(|position| ranks.get(*position).map(|rank| (*position, rank, standing(gpu, rank))))
        .collect();
    let first = here.first().map(|(_, rank, _)| rank.owner());
    let is_others = |rank: &RankNow| Some(rank.owner()) != first;
    // A rank is new if the driver's last list is older than its first event: the next list will show whether its process is
    // there. If lists cannot be read, no rank is new.
    let has_lists = gpu.processes().is_some();
    let is_new = |rank: &RankNow| has_lists && rank.pid.is_some() && standing(gpu, rank) == Standing::Unknown;
    let is_one_begun = sought().any(|(_, rank)| is_others(rank) && is_new(rank));
    if !is_one_begun && !here.iter().any(|(_, rank, _)| is_others(rank)) {
        return;
    }
    let best = here.iter().map(|(_, _, standing)| *standing).max();
    let is_best = |one: &(usize, &RankNow, Standing)| Some(one.2) == best;
    let counts = |one: &&(usize, &RankNow, Standing)| {
        is_best(one) || here.iter().any(|other| other.1.owner() == one.1.owner() && is_best(other))
    };
    on.clear();
    // If a candidate is new as well, only the next list shows whether it or the other owner's rank runs there.
    let is_certain = |one: &(usize, &RankNow, Standing)| one.2 != Standing::Absent && !is_new(one.1);
    if !is_one_begun || here.iter().any(is_certain) {
        on.extend(here.iter().filter(counts).map(|(position, ..)| *position));
    }
}

fn standing(gpu: &GpuState, rank: &RankNow) -> Standing {
    let list = gpu.processes().filter(|list| list.at_ns >= rank.since_ns);
    match (rank.pid, list) {
        (Some(pid), Some(list)) if list.reading.iter().any(|process| process.pid == pid) => Standing::Listed,
        (Some(_), Some(_)) => Standing::Absent,
        _ => Standing::Unknown,
    }
}

/// Which ranks have been running on each GPU. If two ranks shared a GPU, nothing from before the end of the first is attributed
/// to the other, nor anything while the driver still lists the first one's process there.
#[derive(Debug, Default)]
pub(super) struct Subjects {
    last_ns: Option<i64>,
    before: Vec<Vec<Ran>>,
    leaving: Vec<Vec<Ran>>,
    /// By GPU, as in a [`View`].
    pub on: Vec<Vec<usize>>,
    pub since_ns: Vec<i64>,
}

/// A rank that ran on a GPU in the last turn, or that has ended while the driver still lists its process there. A process
/// reports its end before it frees its GPU: with PyTorch some 100 ms before.
#[derive(Debug)]
struct Ran {
    key: RankKey,
    pid: Option<u32>,
}

impl Ran {
    fn of(rank: &RankNow) -> Self {
        Self { key: rank.key.clone(), pid: rank.pid }
    }

    /// Whether it has ended, and the driver lists its process on this GPU.
    fn is_leaving(&self, gpu: &GpuState, ranks: &[RankNow]) -> bool {
        let is_listed = |pid| gpu.processes().is_some_and(|list| list.reading.iter().any(|process| process.pid == pid));
        !knows(ranks, &self.key) && self.pid.is_some_and(is_listed)
    }
}

impl Subjects {
    /// Notes who runs on each GPU now.
    pub fn note(&mut self, gpus: &[GpuState], ranks: &[RankNow], now_ns: i64) {
        running(gpus, ranks, &mut self.on);
        self.before.resize_with(gpus.len(), Vec::new);
        self.leaving.resize_with(gpus.len(), Vec::new);
        self.since_ns.resize(gpus.len(), i64::MIN);
        // A rank that is new has its first mark for a begin.
        let is_new = |rank: &RankNow| self.last_ns.is_none_or(|last_ns| rank.since_ns > last_ns);
        let states = self.on.iter_mut().zip(&mut self.before).zip(&mut self.leaving).zip(&mut self.since_ns);
        for (gpu, (((on, before), leaving), since_ns)) in gpus.iter().zip(states) {
            let now = || on.iter().filter_map(|position| ranks.get(*position));
            let is_as_before = now().map(|rank| (&rank.key, rank.pid)).eq(before.iter().map(|ran| (&ran.key, ran.pid)));
            if leaving.is_empty() && is_as_before {
                continue;
            }
            let now: Vec<&RankNow> = now().collect();
            let mut has_left = !leaving.is_empty();
            let gone = before.drain(..).filter(|ran| !now.iter().any(|rank| rank.key == ran.key));
            leaving.extend(gone.inspect(|_| has_left = true));
            leaving.retain(|ran| ran.is_leaving(gpu, ranks));
            if has_left && !now.iter().all(|rank| is_new(rank)) {
                *since_ns = now_ns;
            }
            if now.iter().any(|rank| leaving.iter().any(|ran| ran.key.0 != rank.key.0)) {
                on.clear();
            } else {
                before.extend(now.into_iter().map(Ran::of));
            }
        }
        self.last_ns = Some(now_ns);
    }
}

/// Since when a condition has held for each GPU.
#[derive(Debug, Default)]
pub(super) struct Since(Vec<Option<i64>>);

impl Since {
    /// Notes whether the condition holds for a GPU now: `latest_ns` is `None` if it does not, else the latest time at which it
    /// can have begun. Returns since when it has held.
    pub fn note(&mut self, gpu: usize, latest_ns: Option<i64>) -> Option<i64> {
        if self.0.len() <= gpu {
            self.0.resize(gpu + 1, None);
        }
        let since_ns = self.0.get_mut(gpu)?;
        *since_ns = latest_ns.map(|latest_ns| since_ns.unwrap_or(latest_ns));
        *since_ns
    }
}

/// Evidence of bytes.
pub(super) fn bytes(name: &'static str, bytes: u64) -> Evidence {
    Evidence { name, value: number(bytes) }
}

/// Bytes for people.
pub(super) fn human(bytes: u64) -> HumanBytes {
    HumanBytes(number(bytes))
}

/// The median of a list in order, without one of the values that equal `own`; of an even number the lower one.
pub(super) fn median_of_others(sorted: &[i64], own: i64) -> Option<i64> {
    let middle = sorted.len().checked_sub(2)? / 2;
    let own_at = sorted.binary_search(&own).ok()?;
    sorted.get(if middle < own_at { middle } else { middle + 1 }).copied()
}

/// The median; `None` of nothing.
pub(super) fn median(values: impl IntoIterator<Item = i64>) -> Option<i64> {
    let mut values: Vec<i64> = values.into_iter().collect();
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// One duration over another; `None` over nothing.
#[allow(clippy::cast_precision_loss, reason = "a ratio of durations")]
pub(super) fn ratio(part_ns: i64, of_ns: i64) -> Option<f64> {
    (of_ns > 0).then(|| part_ns as f64 / of_ns as f64)
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::gpu::{GpuWorkloads, PodName, Process, WorkloadRow};
    use crate::jobs::JobId;

    #[test]
    fn a_gpu_is_its_one_ranks_and_of_two_that_of_neither() {
        let mut hand = Hand::new(2);
        let of = |job: &str, rank: u32, gpu: usize| RankNow { key: (job.into(), rank), ..Hand::rank_on(gpu) };
        hand.ranks = vec![of("a", 0, 0), of("b", 0, 1)];
        let job_on = |hand: &Hand, gpu| hand.view(|view| view.rank_on(gpu).map(|rank| rank.key.0.to_string()));
        assert_eq!((job_on(&hand, 0), job_on(&hand, 1)), (Some("a".to_owned()), Some("b".to_owned())));
        hand.ranks.push(of("c", 0, 1));
        assert_eq!((job_on(&hand, 0), job_on(&hand, 1)), (Some("a".to_owned()), None));
    }

    #[test]
    fn a_finding_names_its_ranks_pod_by_the_process_or_those_on_its_gpu() {
        let mut hand = Hand::new(3);
        let named = |pod: &str, container: &str| {
            let [namespace, pod, container] = ["ml", pod, container].map(str::to_owned);
            Workload::Pod(PodName { namespace, pod, container })
        };
        let of = |user: Option<&str>, rank: u32, pid: Option<u32>, pod: Option<&str>| RankNow {
            key: (JobId::new(Scope::of(user.is_none().then_some("ml"), user), "train"), rank),
            pid,
            pod: pod.map(|pod| named(pod, "")),
            ..Hand::rank_on(0)
        };
        hand.ranks =
            vec![of(None, 0, Some(7), Some("a")), of(None, 1, Some(8), Some("b")), of(Some("1000"), 0, None, None)];
        hand.ranks.sort_by(|a, b| a.key.cmp(&b.key));
        let row = |pod: &str, used_bytes| WorkloadRow { name: named(pod, "main"), used_bytes: Some(used_bytes) };
        let set = |hand: &Hand, gpu: usize, rows: Vec<WorkloadRow>| {
            hand.gpus[gpu].set_workloads(Some(GpuWorkloads { rows, rest_bytes: None, processes: [(7, 0)].into() }));
        };
        set(&hand, 0, vec![row("a", 1), row("b", 2), row("c", 9)]);
        let pods = |hand: &Hand, gpu, job: Option<&JobId>, rank| {
            let subject = Subject { gpu, job: job.cloned(), rank };
            let names = hand.view(|view| (&view).workloads(&subject))?;
            Some(names.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let [ours, users] =
            [Scope::of(Some("ml"), None), Scope::of(None, Some("1000"))].map(|scope| JobId::new(scope, "train"));
        let all = ["pod ml/c/main", "pod ml/b/main", "pod ml/a/main"].map(str::to_owned).to_vec();
        assert_eq!(pods(&hand, Some(0), None, None), Some(all), "the one that holds most comes first");
        let one = |name: &str| Some(vec![name.to_owned()]);
        assert_eq!(
            pods(&hand, Some(0), Some(&ours), Some(0)),
            one("pod ml/a/main"),
            "its process is in that container"
        );
        assert_eq!(pods(&hand, None, Some(&ours), Some(0)), one("pod ml/a/main"));
        assert_eq!(pods(&hand, Some(0), Some(&ours), Some(1)), one("pod ml/b"), "its process holds no memory yet");
        assert_eq!(pods(&hand, Some(0), Some(&users), Some(0)), None, "anyone can say that a job runs on a pod's GPU");
        assert_eq!(pods(&hand, None, Some(&ours), None), None, "of a job without a rank");
        assert_eq!(pods(&hand, Some(1), None, None), None, "the kubelet was not asked");
        // Of a GPU that is split, its instances have the pods.
        hand.gpus[1].device.uuid = "GPU-1".into();
        hand.gpus[2].device.parent_uuid = Some("GPU-1".into());
        hand.gpus[2].device.uuid = "MIG-1".into();
        set(&hand, 1, vec![]);
        assert_eq!(pods(&hand, Some(1), None, None), None, "those of its instance are not known");
        set(&hand, 2, vec![row("d", 1)]);
        assert_eq!(pods(&hand, Some(1), None, None), one("pod ml/d/main"));
        assert_eq!(pods(&hand, Some(2), None, None), one("pod ml/d/main"));
        set(&hand, 2, vec![]);
        assert_eq!(pods(&hand, Some(1), None, None), Some(vec![]), "no pod has it");
    }

    /// Any user can say that a job runs on any GPU.
    #[test]
    fn a_gpu_is_that_owners_whose_process_the_driver_lists_there() {
        let mut hand = Hand::new(1);
        let of = |user: &str, number: u32, pid: Option<u32>| {
            let job = JobId::new(Scope::of(None, Some(user)), "train");
            RankNow { key: (job, number), pid, ..Hand::rank_on(0) }
        };
        let (honest, thief) = (of("1", 0, Some(11)), of("2", 0, Some(22)));
        hand.ranks = vec![honest.clone(), thief.clone()];
        let whose =
            |hand: &Hand| hand.view(|view| view.rank_on(0).and_then(|rank| rank.owner().user().map(str::to_owned)));
        let counts = |hand: &Hand| hand.view(|view| [&honest, &thief].map(|rank| view.counts_on(&rank.key, 0)));
        assert_eq!((whose(&hand), counts(&hand)), (None, [true, true]), "there is no list");
        let sought = RankNow { gpus: Vec::new(), ..honest.clone() };
        hand.ranks = vec![sought, thief.clone()];
        assert_eq!(whose(&hand).as_deref(), Some("2"), "nor will there be one that says where the other runs");
        hand.ranks = vec![honest.clone(), thief.clone()];
        let list = |hand: &Hand, pids: &[u32]| {
            let process = |pid: &u32| Process { pid: *pid, used_bytes: Some(1) };
            hand.gpus[0].set_processes(5, Some(pids.iter().map(process).collect()));
        };
        list(&hand, &[11, 33]);
        assert_eq!((whose(&hand), counts(&hand)), (Some("1".to_owned()), [true, false]));
        list(&hand, &[11, 22]);
        assert_eq!((whose(&hand), counts(&hand)), (None, [true, true]), "they share it");
        list(&hand, &[33]);
        assert_eq!((whose(&hand), counts(&hand)), (None, [true, true]), "the list leaves processes out");
        // One whose process is not known, as over HTTP, counts before one that is known not to be there.
        hand.ranks[0].pid = None;
        assert_eq!(whose(&hand).as_deref(), Some("1"));
        // Another rank of the owner, on whose behalf another process sends.
        hand.ranks = vec![honest.clone(), of("1", 1, Some(12)), thief.clone()];
        list(&hand, &[11]);
        assert_eq!((whose(&hand), counts(&hand)), (None, [true, false]), "two ranks of one owner");
        // A list from before the first event of a rank says nothing of it.
        hand.ranks = vec![RankNow { since_ns: 6, ..honest.clone() }, thief.clone()];
        assert_eq!(whose(&hand).as_deref(), Some("1"));
        // One that names no GPU runs where the driver lists it. Until that is known, the GPU is not the thief's either.
        list(&hand, &[11]);
        hand.ranks = vec![RankNow { gpus: Vec::new(), ..honest.clone() }, thief.clone()];
        assert_eq!((whose(&hand).as_deref(), counts(&hand)), (Some("1"), [true, false]));
        hand.ranks[0].since_ns = 6;
        assert_eq!((whose(&hand), counts(&hand)), (None, [true, false]));
        hand.ranks[1].since_ns = 6;
        assert_eq!((whose(&hand), counts(&hand)), (None, [true, false]), "nor while no list is newer than the thief");
        hand.ranks[1].pid = None;
        assert_eq!(whose(&hand).as_deref(), Some("2"), "of one without a process no list says anything");
        list(&hand, &[]);
        hand.ranks = vec![RankNow { gpus: Vec::new(), ..honest.clone() }, thief.clone()];
        assert_eq!(whose(&hand).as_deref(), Some("2"), "it runs nowhere that is known");
        list(&hand, &[11]);
        // A thief that has gone takes nothing either.
        hand.ranks = vec![honest.clone()];
        assert_eq!(counts(&hand), [true, false]);
    }

    #[test]
    fn who_was_beside_another_answers_for_nothing_from_before_its_end() {
        let (mut hand, mut subjects) = (Hand::new(1), Subjects::default());
        let of = |job: &str, since_ns: i64| RankNow { key: (job.into(), 0), since_ns, ..Hand::rank_on(0) };
        let mut since = |now_ns: i64, ranks: Vec<RankNow>| {
            (hand.now_ns, hand.ranks) = (now_ns, ranks);
            subjects.note(&hand.gpus, &hand.ranks, now_ns);
            hand.since_ns = subjects.since_ns.clone();
            hand.view(|view| view.subject_since_ns(0))
        };
        assert_eq!(since(10, Vec::new()), i64::MIN);
        assert_eq!(since(20, vec![of("a", 15)]), 15, "its first mark");
        assert_eq!(since(30, vec![of("a", 15), of("b", 25)]), i64::MIN, "nobody's");
        assert_eq!(since(40, vec![of("b", 25)]), 40, "what was before may be the other's");
        assert_eq!(since(50, vec![of("b", 25)]), 40);
        assert_eq!(since(60, vec![of("c", 55)]), 55, "the next one has come since");
        assert_eq!(since(70, Vec::new()), i64::MIN);
        assert_eq!(since(80, vec![of("d", 65)]), 65, "its GPU has become known");
    }

    /// A process says that it ends before it frees its GPU.
    #[test]
    fn a_gpu_is_nobodys_while_a_process_whose_rank_has_ended_is_listed_there() {
        let (mut hand, mut subjects) = (Hand::new(1), Subjects::default());
        let of = |user: &str, pid: u32| {
            let job = JobId::new(Scope::of(None, Some(user)), "train");
            RankNow { key: (job, 0), pid: Some(pid), ..Hand::rank_on(0) }
        };
        let (full, other) = (of("1", 11), of("2", 22));
        let mut at = |now_ns: i64, ranks: &[&RankNow], listed: &[u32]| {
            let list = listed.iter().map(|pid| Process { pid: *pid, used_bytes: None }).collect();
            hand.gpus[0].set_processes(now_ns, Some(list));
            hand.ranks = ranks.iter().map(|rank| (*rank).clone()).collect();
            subjects.note(&hand.gpus, &hand.ranks, now_ns);
            let users = subjects.on[0].iter().map(|at| hand.ranks[*at].owner().user().expect("a user").to_owned());
            let users: Vec<String> = users.collect();
            let since_ns = (!users.is_empty()).then_some(subjects.since_ns[0]);
            (users, since_ns)
        };
        let (nobodys, firsts, seconds) = ((Vec::new(), None), vec!["1".to_owned()], vec!["2".to_owned()]);
        assert_eq!(at(10, &[&full, &other], &[11]), (firsts, Some(i64::MIN)));
        assert_eq!(at(20, &[&other], &[11]), nobodys.clone(), "it still holds the memory");
        assert_eq!(at(30, &[&other], &[11]), nobodys.clone());
        assert_eq!(at(40, &[&other], &[]), (seconds.clone(), Some(40)), "what was before is the first one's");
        assert_eq!(at(50, &[&other], &[11]), (seconds.clone(), Some(40)), "a process of its number that came later");
        assert_eq!(at(60, &[&other], &[22]), (seconds.clone(), Some(40)));
        let next = RankNow { since_ns: 65, ..of("3", 33) };
        assert_eq!(at(70, &[&next], &[22, 33]), nobodys, "the next job began before this one had left the GPU");
        assert_eq!(at(80, &[&next], &[33]), (vec!["3".to_owned()], Some(80)));
        // Another rank of the same job answers for what is left.
        let again = RankNow { key: (next.key.0.clone(), 1), since_ns: 85, ..of("3", 34) };
        assert_eq!(at(90, &[&again], &[33]).0, ["3"]);
    }

    #[test]
    fn a_job_that_is_at_rest_and_silent_since_another_began_has_gone() {
        let mut hand = Hand::new(1);
        let first = RankNow { key: ("a".into(), 0), since_ns: 10, heard_ns: 50, is_at_rest: true, ..Hand::rank_on(0) };
        let second = RankNow { key: ("b".into(), 0), since_ns: 51, heard_ns: 60, ..Hand::rank_on(0) };
        let peer = RankNow { key: ("a".into(), 1), ..second.clone() };
        for (first, second, whose) in [
            (first.clone(), second.clone(), Some("b")),
            (RankNow { is_at_rest: false, ..first.clone() }, second.clone(), None),
            (RankNow { heard_ns: 51, ..first.clone() }, second, None),
            (first, peer, None),
        ] {
            hand.ranks = vec![first, second];
            let on = hand.view(|view| view.rank_on(0).map(|rank| rank.key.0.to_string()));
            assert_eq!(on.as_deref(), whose, "{:?}", hand.ranks);
        }
    }

    #[test]
    fn a_gpu_has_its_index_for_a_name_and_its_rank_and_step_where_there_is_one() {
        let mut hand = Hand::new(2);
        let step = OpenStep { number: Some(9), begin_ns: 0, retries: None, refills: false };
        hand.ranks = vec![RankNow { key: ("a".into(), 4), step: Some(step), ..Hand::rank_on(1) }];
        hand.view(|view| {
            assert_eq!((view.gpu_name(1), view.gpu_name(7)), ("GPU 1".to_owned(), "GPU ?".to_owned()));
            assert_eq!((view.step_on(1), view.step_on(0)), (Some(9), None));
            assert_eq!((view.step_at(1, 5), view.step_at(0, 5)), (Some(9), None));
            assert_eq!(view.subject_of(1), Subject { gpu: Some(1), job: Some("a".into()), rank: Some(4) });
            assert_eq!(view.subject_of(0), Subject { gpu: Some(0), job: None, rank: None });
            assert!(view.knows(&("a".into(), 4)) && !view.knows(&("a".into(), 3)));
        });
    }

    #[test]
    fn something_is_so_since_it_was_first_and_anew_after_it_was_not() {
        let mut since = Since::default();
        assert_eq!([since.note(2, Some(5)), since.note(2, Some(7)), since.note(0, None)], [Some(5), Some(5), None]);
        assert_eq!([since.note(2, None), since.note(2, Some(9))], [None, Some(9)]);
    }

    #[test]
    fn medians_and_ratios_are_of_what_there_is() {
        assert_eq!(
            [median([]), median([4]), median([9, 1, 5]), median([4, 1, 3, 2])],
            [None, Some(4), Some(5), Some(2)]
        );
        assert_eq!((ratio(3, 4), ratio(0, 1), ratio(3, 0), ratio(3, -1)), (Some(0.75), Some(0.0), None, None));
    }
}
