//! Incidents: findings that have one cause, as one.
//!
//! Enters: findings as they are raised, go on and end. Leaves: [`Incident`]s. Rules: findings of one job with causes of one kind are
//! one incident, and so are those of a GPU that no job is known on; a rank that lags belongs to the incident that explains it, for as
//! long as that names the rank, and slow steps of a job to the incident that explains them. What comes back within [`QUIET_NS`] is the same incident again, and names those of the present time
//! only. Invariants: an incident with an active finding is kept; of the others at most [`MOST_OVER`] are, and the owner with the most
//! of them loses its oldest. Absent on purpose: any rule about when something is found, and what happens on other nodes.

use super::finding::{Certainty, Finding, FindingKind, MOST_WAITING, Severity, Text};
use crate::clock::SECOND_NS;
use crate::gpu::{MOST_NAMED, Workload};
use crate::jobs::JobId;
use crate::scope::Scope;
use crate::shares;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// What ends and comes back within this is one incident.
pub const QUIET_NS: i64 = 15 * 60 * SECOND_NS;
/// Incidents without an active finding that are kept.
const MOST_OVER: usize = 64;
/// Ranks that an incident lists, and GPUs.
const MOST_RANKS: usize = MOST_WAITING;
const MOST_GPUS: usize = 16;
/// How many kinds and subjects an incident remembers as reported. Once it is full, being new no longer makes a finding
/// news.
const MOST_KNOWN: usize = 64;
/// A symptom that was raised longer ago than this keeps its own incident: what begins now does not explain it.
const EXPLAINED_NS: i64 = 60 * SECOND_NS;

crate::labels! {
    /// What kind of cause an incident has: the label `cause`.
    pub enum Cause {
        /// A GPU is lost, unhealthy or reported an error.
        Gpu = "gpu",
        /// A GPU's clocks or its link are held back.
        HeldBack = "held_back",
        /// Too little memory.
        Memory = "memory",
        /// Too little memory of the host.
        HostMemory = "host_memory",
        /// Input that comes late.
        Input = "input",
        /// A rank that the others wait for, with no cause that is known.
        LateRank = "late_rank",
        /// Work that the ranks do not share evenly.
        Imbalance = "imbalance",
        /// A GPU that does nothing.
        Idle = "idle",
        /// Steps that take longer, with no cause that is known.
        Unexplained = "unexplained",
    }
}

impl Cause {
    /// The cause that a kind of finding speaks for.
    #[must_use]
    pub fn of(kind: FindingKind) -> Self {
        match kind {
            FindingKind::Oom
            | FindingKind::LowHeadroom
            | FindingKind::AllocatorThrash
            | FindingKind::CommStarvation
            | FindingKind::MemoryGrowth => Cause::Memory,
            FindingKind::HostOom => Cause::HostMemory,
            FindingKind::InputStall => Cause::Input,
            FindingKind::Straggler => Cause::LateRank,
            FindingKind::StageImbalance | FindingKind::UnevenWork => Cause::Imbalance,
            FindingKind::IdleGpu => Cause::Idle,
            FindingKind::SlowSteps => Cause::Unexplained,
            FindingKind::GpuThrottled | FindingKind::PcieDegraded | FindingKind::NvlinkDegraded => Cause::HeldBack,
            FindingKind::GpuUnhealthy | FindingKind::GpuLost | FindingKind::Xid => Cause::Gpu,
        }
    }

    /// Whether it may be why a rank is late.
    fn explains_a_late_rank(self) -> bool {
        matches!(self, Cause::Gpu | Cause::HeldBack | Cause::Memory | Cause::HostMemory | Cause::Input)
    }
}

/// Whether findings of this kind follow from others, and belong to their incident.
fn is_symptom(kind: FindingKind) -> bool {
    matches!(kind, FindingKind::Straggler | FindingKind::SlowSteps)
}

/// Whether a finding of this kind is enough of a reason for slow steps. Memory that is almost full, or grows, slows nothing yet.
pub(super) fn slows_steps(kind: FindingKind) -> bool {
    match kind {
        FindingKind::AllocatorThrash
        | FindingKind::CommStarvation
        | FindingKind::InputStall
        | FindingKind::Straggler
        | FindingKind::StageImbalance
        | FindingKind::UnevenWork
        | FindingKind::Oom
        | FindingKind::HostOom
        | FindingKind::GpuThrottled
        | FindingKind::PcieDegraded
        | FindingKind::NvlinkDegraded
        | FindingKind::GpuUnhealthy
        | FindingKind::GpuLost
        | FindingKind::Xid => true,
        FindingKind::LowHeadroom | FindingKind::MemoryGrowth | FindingKind::IdleGpu | FindingKind::SlowSteps => false,
    }
}

impl FindingKind {
    /// Where a kind of finding stands in the text of an incident: causes come before what follows from them. Memory that ran out
    /// comes first, as nothing goes on after it.
    #[must_use]
    pub fn order_in_incident(self) -> u8 {
        match self {
            FindingKind::Oom | FindingKind::HostOom | FindingKind::Xid => 0,
            FindingKind::MemoryGrowth | FindingKind::GpuLost | FindingKind::GpuThrottled => 1,
            FindingKind::LowHeadroom
            | FindingKind::GpuUnhealthy
            | FindingKind::PcieDegraded
            | FindingKind::NvlinkDegraded => 2,
            FindingKind::AllocatorThrash | FindingKind::InputStall | FindingKind::StageImbalance => 3,
            FindingKind::CommStarvation | FindingKind::UnevenWork | FindingKind::IdleGpu => 4,
            FindingKind::Straggler => 5,
            FindingKind::SlowSteps => 6,
        }
    }
}

/// Whom an incident concerns: a job, or a GPU on which no job is known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Concerned {
    /// A job.
    Job(JobId),
    /// Index and UUID of a GPU.
    Gpu(String, String),
}

impl Concerned {
    fn of(finding: &Finding) -> Self {
        match (&finding.sign.subject.job, &finding.gpu) {
            (Some(job), _) => Concerned::Job(job.clone()),
            (None, Some((index, uuid))) => Concerned::Gpu(index.clone(), uuid.clone()),
            (None, None) => Concerned::Gpu(String::new(), String::new()),
        }
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> Option<&JobId> {
        match self {
            Concerned::Job(job) => Some(job),
            Concerned::Gpu(..) => None,
        }
    }

    /// The owner of the job; `None` without one.
    #[must_use]
    pub fn owner(&self) -> Option<&Scope> {
        self.job().map(JobId::scope)
    }
}

/// What findings of one kind said.
#[derive(Debug, Clone, PartialEq)]
pub struct KindFound {
    /// What kind.
    pub kind: FindingKind,
    /// How many findings of it the incident has had.
    pub findings: u64,
    /// The last one's id.
    pub last_id: u64,
    /// When its newest sign was seen, nanoseconds of the timeline.
    pub seen_ns: i64,
    /// What its newest sign said.
    pub what: String,
    /// Whether there was one since the incident came last.
    pub is_now: bool,
}

/// One cause with all that followed from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Incident {
    /// Number of the incident since the daemon started.
    pub id: u64,
    /// Whom it concerns.
    pub whose: Concerned,
    /// What kind of cause.
    pub cause: Cause,
    /// The highest severity and certainty of its findings since it came last.
    pub severity: Severity,
    /// How certain it is.
    pub certainty: Certainty,
    /// When its first finding began, nanoseconds of the timeline.
    pub begin_ns: i64,
    /// When it began the last time that it came back, or `begin_ns`.
    pub again_ns: i64,
    /// When its newest sign was seen.
    pub seen_ns: i64,
    /// When its last finding ended; `None` while one goes on.
    pub ended_ns: Option<i64>,
    /// How many times it was there: 1 more than how often it came back.
    pub times: u64,
    /// The ranks that are named as the cause since it came last, at most 64.
    pub ranks: BTreeSet<u32>,
    /// Index and UUID of the GPUs that are named, at most 16.
    pub gpus: BTreeSet<(String, String)>,
    /// The workloads that its findings are about since it came last, at most [`MOST_NAMED`]; empty if they are not known.
    pub workloads: BTreeSet<Workload>,
    /// Ranks that wait for these, at most 64.
    pub waiting_ranks: BTreeSet<u32>,
    /// Time that ranks lost by it, summed over the ranks, nanoseconds; `None` if no finding of it knows.
    pub lost_ns: Option<u64>,
    /// The newest text of its cause, which is the first of `parts` since it came last.
    pub text: Text,
    /// What was found, causes first; one part for each kind.
    pub parts: Vec<KindFound>,
    /// Its findings that go on: of which kind, and of which rank.
    active: BTreeMap<u64, (FindingKind, Option<u32>)>,
    /// The highest severity that it ever had.
    worst: Severity,
    /// Hashes of the kinds and subjects that it has had.
    known: BTreeSet<u64>,
    /// When it ended before it came back; `i64::MIN` if it never did. A lower bound for `again_ns`.
    before_ns: i64,
}

impl Incident {
    fn new(id: u64, finding: &Finding) -> Self {
        Self {
            id,
            whose: Concerned::of(finding),
            cause: Cause::of(finding.sign.kind),
            severity: finding.sign.severity,
            certainty: finding.sign.certainty,
            begin_ns: finding.sign.begin_ns,
            again_ns: finding.sign.begin_ns,
            seen_ns: finding.seen_ns,
            ended_ns: None,
            times: 1,
            ranks: BTreeSet::new(),
            gpus: BTreeSet::new(),
            workloads: BTreeSet::new(),
            waiting_ranks: BTreeSet::new(),
            lost_ns: None,
            text: Text::default(),
            parts: Vec::new(),
            active: BTreeMap::new(),
            worst: finding.sign.severity,
            known: BTreeSet::new(),
            before_ns: i64::MIN,
        }
    }

    /// Takes a finding that was just raised, or that comes from another incident. Returns whether the incident has come with it, for
    /// the first time or again.
    fn add(&mut self, finding: &Finding) -> bool {
        let has_come = self.active.is_empty();
        if has_come && !self.parts.is_empty() {
            self.come_back(finding);
        }
        self.active.insert(finding.id, (finding.sign.kind, finding.sign.subject.rank));
        self.ended_ns = None;
        self.part(finding.sign.kind).findings += 1;
        self.take(finding);
        has_come
    }

    /// It is there again: what it says is of this time from now on.
    fn come_back(&mut self, finding: &Finding) {
        self.times += 1;
        self.before_ns = self.ended_ns.unwrap_or(self.seen_ns);
        self.again_ns = finding.sign.begin_ns.max(self.before_ns);
        (self.severity, self.certainty) = (finding.sign.severity, finding.sign.certainty);
        self.ranks.clear();
        self.gpus.clear();
        self.workloads.clear();
        self.waiting_ranks.clear();
        self.text = Text::default();
        self.parts.iter_mut().for_each(|part| part.is_now = false);
    }

    /// Takes what a finding says now.
    fn take(&mut self, finding: &Finding) {
        let sign = &finding.sign;
        self.severity = self.severity.max(sign.severity);
        self.worst = self.worst.max(sign.severity);
        self.certainty = self.certainty.max(sign.certainty);
        self.again_ns = self.again_ns.min(sign.begin_ns.max(self.before_ns));
        if self.times == 1 {
            self.begin_ns = self.again_ns;
        }
        self.seen_ns = self.seen_ns.max(finding.seen_ns);
        list(&mut self.ranks, MOST_RANKS, sign.subject.rank);
        let new_gpu = finding.gpu.as_ref().filter(|gpu| !self.gpus.contains(gpu)).cloned();
        list(&mut self.gpus, MOST_GPUS, new_gpu);
        let new_workloads =
            finding.workloads.iter().filter(|workload| !self.workloads.contains(workload)).cloned().collect::<Vec<_>>();
        list(&mut self.workloads, MOST_NAMED, new_workloads);
        list(&mut self.waiting_ranks, MOST_RANKS, sign.waiting_ranks.iter().copied());
        let part = self.part(sign.kind);
        (part.last_id, part.seen_ns, part.is_now) = (finding.id, finding.seen_ns, true);
        part.what.clone_from(&sign.text.what);
        if self.parts.iter().find(|part| part.is_now).is_some_and(|first| first.kind == sign.kind) {
            self.text.clone_from(&sign.text);
        }
    }

    fn part(&mut self, kind: FindingKind) -> &mut KindFound {
        let place = self
            .parts
            .binary_search_by_key(&(kind.order_in_incident(), kind), |part| (part.kind.order_in_incident(), part.kind));
        let place = place.unwrap_or_else(|place| {
            let what = String::new();
            self.parts.insert(place, KindFound { kind, findings: 0, last_id: 0, seen_ns: 0, what, is_now: true });
            place
        });
        &mut self.parts[place]
    }

    /// Whether a finding is worth a capture and a line in the log, and remembers its kind and subject. It is if its
    /// kind is new for its rank and GPU in this incident, if it is more severe than all findings before, or if its kind
    /// ends jobs.
    fn is_news(&mut self, finding: &Finding) -> bool {
        let sign = &finding.sign;
        let mut hasher = DefaultHasher::new();
        (sign.kind as usize, sign.subject.rank, finding.gpu.as_ref().map(|(_, uuid)| uuid)).hash(&mut hasher);
        let is_new = self.known.len() < MOST_KNOWN && self.known.insert(hasher.finish());
        let ends_jobs =
            matches!(sign.kind, FindingKind::Oom | FindingKind::HostOom | FindingKind::Xid | FindingKind::GpuLost);
        is_new || ends_jobs || sign.severity > self.worst
    }

    /// Whether a finding that goes on explains another, which is a symptom: why its rank is late, or why its job's steps are slow.
    fn explains(&self, symptom: &Finding) -> bool {
        let rank = symptom.sign.subject.rank;
        match symptom.sign.kind {
            FindingKind::Straggler => {
                let is_cause = |(kind, of): &(FindingKind, Option<u32>)| !is_symptom(*kind) && *of == rank;
                self.cause.explains_a_late_rank() && rank.is_some() && self.active.values().any(is_cause)
            }
            FindingKind::SlowSteps => self.active.values().any(|(kind, _)| slows_steps(*kind)),
            _ => false,
        }
    }

    /// Whether one of its findings goes on.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.ended_ns.is_none()
    }

    /// Bytes that it takes in memory, with its texts and lists.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let part = |part: &KindFound| part.what.len() + size_of::<KindFound>();
        let text = self.text.what.len() + self.text.why.len() + self.text.advice.len();
        let gpu = |(index, uuid): &(String, String)| index.len() + uuid.len() + 2 * size_of::<String>();
        let numbers = (self.ranks.len() + self.waiting_ranks.len() + self.known.len()) * 8 + self.active.len() * 24;
        size_of::<Self>()
            + text
            + self.parts.iter().map(part).sum::<usize>()
            + self.gpus.iter().map(gpu).sum::<usize>()
            + self.workloads.iter().map(Workload::bytes).sum::<usize>()
            + numbers
    }
}

/// Adds to a list, up to its bound.
fn list<T: Ord>(list: &mut BTreeSet<T>, most: usize, more: impl IntoIterator<Item = T>) {
    for one in more {
        if list.len() < most {
            list.insert(one);
        }
    }
}

/// How a finding belongs to an incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Joined {
    /// The incident.
    pub id: u64,
    /// Whether the incident has come with it, for the first time or again.
    pub has_come: bool,
    /// Whether it is worth a capture and a line in the log.
    pub is_news: bool,
}

/// All incidents of the daemon.
#[derive(Debug, Default)]
pub(super) struct Incidents {
    /// Those with an active finding, and those that may come back.
    open: BTreeMap<u64, Incident>,
    /// Those that are over, oldest first.
    over: VecDeque<Incident>,
    next_id: u64,
}

impl Incidents {
    /// Takes a finding that was just raised.
    pub fn raise(&mut self, finding: &Finding, now_ns: i64) -> Joined {
        self.close(now_ns);
        let id = self.find(finding).unwrap_or_else(|| {
            self.next_id += 1;
            self.next_id
        });
        let incident = self.open.entry(id).or_insert_with(|| Incident::new(id, finding));
        let is_news = incident.is_news(finding);
        let has_come = incident.add(finding);
        self.bound();
        Joined { id, has_come, is_news }
    }

    /// Takes a further sign of an active finding. Returns whether the incident is more severe for it than it ever was.
    pub fn prolong(&mut self, finding: &Finding) -> bool {
        let Some(incident) = self.open.get_mut(&finding.incident) else { return false };
        let is_worse = finding.sign.severity > incident.worst;
        incident.take(finding);
        is_worse
    }

    /// Adds time that was lost.
    pub fn lose(&mut self, id: u64, lost_ns: u64) {
        if let Some(incident) = self.open.get_mut(&id) {
            incident.lost_ns = Some(incident.lost_ns.unwrap_or(0).saturating_add(lost_ns));
        }
    }

    /// Notes that a finding has ended, or goes to another incident. Returns the incident if nothing of it goes on any more.
    pub fn end(&mut self, finding: &Finding) -> Option<Incident> {
        let incident = self.open.get_mut(&finding.incident)?;
        incident.active.remove(&finding.id)?;
        // A GPU that is lost is seen without signs.
        incident.seen_ns = incident.seen_ns.max(finding.seen_ns);
        if !incident.active.is_empty() {
            return None;
        }
        incident.ended_ns = Some(incident.seen_ns);
        let ended = incident.clone();
        self.bound();
        Some(ended)
    }

    /// Whether an active finding should be in another incident. That is so for a late rank or slow steps whose cause
    /// has just been found, or is over.
    pub fn is_misplaced(&self, finding: &Finding, now_ns: i64) -> bool {
        let Some(own) = self.open.get(&finding.incident).filter(|_| is_symptom(finding.sign.kind)) else {
            return false;
        };
        if own.cause != Cause::of(finding.sign.kind) {
            return !own.explains(finding);
        }
        let is_new = now_ns.saturating_sub(finding.raised_ns) < EXPLAINED_NS;
        is_new && self.open.values().any(|incident| incident.whose == own.whose && incident.explains(finding))
    }

    /// Removes incident `id` if its only finding of its own cause was a symptom that has moved to `to`, and nothing of
    /// it is active. Its lost time is added to `to`.
    pub fn absorb(&mut self, id: u64, to: u64) {
        let is_empty = |incident: &&Incident| {
            let own = incident.parts.iter().filter(|part| Cause::of(part.kind) == incident.cause);
            let had = own.map(|part| part.findings).sum::<u64>();
            matches!(incident.cause, Cause::LateRank | Cause::Unexplained) && !incident.is_active() && had == 1
        };
        if self.open.get(&id).filter(is_empty).is_none() {
            return;
        }
        if let Some(lost_ns) = self.open.remove(&id).and_then(|incident| incident.lost_ns) {
            self.lose(to, lost_ns);
        }
    }

    /// The incident of a finding: one that explains it, if it is a symptom, or one of its cause.
    fn find(&self, finding: &Finding) -> Option<u64> {
        let (whose, cause) = (Concerned::of(finding), Cause::of(finding.sign.kind));
        let own = || self.open.values().filter(|incident| incident.whose == whose);
        let found = own()
            .find(|incident| incident.explains(finding))
            .or_else(|| own().find(|incident| incident.cause == cause));
        found.map(|incident| incident.id)
    }

    /// Puts those that will not come back to those that are over.
    fn close(&mut self, now_ns: i64) {
        let is_over =
            |incident: &&Incident| incident.ended_ns.is_some_and(|ended_ns| now_ns.saturating_sub(ended_ns) > QUIET_NS);
        let over: Vec<u64> = self.open.values().filter(is_over).map(|incident| incident.id).collect();
        self.over.extend(over.iter().filter_map(|id| self.open.remove(id)));
    }

    /// Forgets the oldest without an active finding of the owner that has most of them, until few enough are left.
    fn bound(&mut self) {
        loop {
            let ended = || self.over.iter().chain(self.open.values().filter(|incident| !incident.is_active()));
            if ended().count() <= MOST_OVER {
                return;
            }
            let largest = shares::largest(ended().map(|incident| incident.whose.owner()));
            let owner = largest.map(|(owner, _)| owner.cloned());
            let is_its = |incident: &Incident| Some(incident.whose.owner().cloned()) == owner;
            if let Some(oldest) = self.over.iter().position(is_its) {
                self.over.remove(oldest);
                continue;
            }
            let its = self.open.values().filter(|incident| !incident.is_active() && is_its(incident));
            let oldest = its.min_by_key(|incident| incident.ended_ns).map(|incident| incident.id);
            let Some(oldest) = oldest else { return };
            self.open.remove(&oldest);
        }
    }

    /// All of them, newest first.
    pub fn all(&self) -> impl Iterator<Item = &Incident> {
        let mut all: Vec<&Incident> = self.open.values().chain(&self.over).collect();
        all.sort_by_key(|incident| std::cmp::Reverse(incident.id));
        all.into_iter()
    }

    /// One that has not been forgotten.
    pub fn get(&self, id: u64) -> Option<&Incident> {
        self.open.get(&id).or_else(|| self.over.iter().find(|incident| incident.id == id))
    }
}

#[cfg(test)]
mod tests {
    use super::super::board::{Board, Change};
    use super::super::finding::{Evidence, Sign, Subject};
    use super::*;

    const HOLD_NS: i64 = 10 * SECOND_NS;

    fn job(user: &str, name: &str) -> JobId {
        JobId::new(Scope::of(None, Some(user)), name)
    }

    /// A sign about a rank of a job of user 1, on the GPU of that number, which counts for ten seconds.
    fn sign(kind: FindingKind, rank: u32, at_s: i64) -> Sign {
        let subject = Subject { gpu: Some(rank as usize), job: Some(job("1", "train")), rank: Some(rank) };
        Sign {
            kind,
            subject,
            severity: Severity::Warning,
            certainty: Certainty::Observed,
            begin_ns: at_s * SECOND_NS,
            until_ns: at_s * SECOND_NS + HOLD_NS,
            step: None,
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: Vec::<Evidence>::new(),
            text: Text { what: format!("{} of rank {rank}", kind.label()), ..Text::default() },
        }
    }

    fn see(board: &mut Board, signs: Vec<Sign>, at_s: i64) -> Change {
        board.update(signs, at_s * SECOND_NS, |gpu: usize| Some((gpu.to_string(), format!("GPU-{gpu}"))))
    }

    fn kinds(incident: &Incident) -> Vec<&'static str> {
        incident.parts.iter().map(|part| part.kind.label()).collect()
    }

    fn all(board: &Board) -> Vec<Incident> {
        board.incidents().cloned().collect()
    }

    #[test]
    fn one_starved_rank_of_64_is_one_incident_with_its_cause_first_and_who_waits() {
        let mut board = Board::default();
        let waiting_ranks = (1..64).collect();
        let starved = Sign { waiting_ranks, lost_ns: Some(63_000), ..sign(FindingKind::CommStarvation, 0, 3) };
        let flush = Sign { lost_ns: Some(500), ..sign(FindingKind::AllocatorThrash, 0, 2) };
        let change = see(&mut board, vec![flush, starved, sign(FindingKind::LowHeadroom, 0, 1)], 4);
        let [incident] = all(&board).try_into().expect("one");
        assert_eq!(kinds(&incident), ["low_headroom", "allocator_thrash", "comm_starvation"]);
        assert_eq!((incident.text.what.as_str(), incident.cause), ("low_headroom of rank 0", Cause::Memory));
        assert_eq!((incident.ranks, incident.waiting_ranks.len()), ([0].into(), 63));
        assert_eq!((incident.begin_ns, incident.lost_ns, incident.times), (SECOND_NS, Some(63_500), 1));
        assert!(change.raised.iter().all(|finding| finding.incident == incident.id));
        assert_eq!((change.notable.len(), change.begun.len(), change.begun[0].parts.len()), (3, 1, 3));
    }

    #[test]
    fn what_comes_back_is_the_same_incident_until_it_has_been_quiet_for_long() {
        let mut board = Board::default();
        let mut times = 0;
        for minute in 0..60 {
            let change = see(&mut board, vec![sign(FindingKind::LowHeadroom, 0, 60 * minute)], 60 * minute);
            assert_eq!((change.begun.len(), change.notable.len()), (1, usize::from(minute == 0)), "minute {minute}");
            times = change.begun[0].times;
            let over = see(&mut board, Vec::new(), 60 * minute + 11).over;
            assert_eq!(over.iter().map(|incident| incident.times).collect::<Vec<_>>(), [times]);
        }
        let [incident] = all(&board).try_into().expect("one");
        let spans = (incident.begin_ns, incident.again_ns, incident.seen_ns, incident.ended_ns);
        let last_ns = 59 * 60 * SECOND_NS;
        assert_eq!((times, spans), (60, (0, last_ns, last_ns, Some(last_ns))));
        assert_eq!(incident.parts[0].findings, 60);
        // A more severe one is news again.
        let severe = Sign { severity: Severity::Critical, ..sign(FindingKind::LowHeadroom, 0, 3600) };
        assert_eq!(see(&mut board, vec![severe], 3600).notable.len(), 1);
        see(&mut board, Vec::new(), 3611);
        let quiet_s = QUIET_NS / SECOND_NS;
        see(&mut board, vec![sign(FindingKind::LowHeadroom, 0, 3600 + quiet_s)], 3600 + quiet_s);
        see(&mut board, Vec::new(), 3600 + quiet_s + 11);
        assert_eq!(all(&board).len(), 1);
        let later_s = 3600 + 2 * quiet_s + 1;
        see(&mut board, vec![sign(FindingKind::LowHeadroom, 0, later_s)], later_s);
        assert_eq!(all(&board).iter().map(|incident| incident.times).collect::<Vec<_>>(), [1, 62]);
    }

    #[test]
    fn jobs_owners_and_gpus_without_a_job_are_apart_and_so_are_causes() {
        let mut board = Board::default();
        let of = |job, signed: Sign| Sign { subject: Subject { job, ..signed.subject }, ..signed };
        let low = || sign(FindingKind::LowHeadroom, 0, 0);
        let no_job = |gpu| Sign { subject: Subject { gpu: Some(gpu), ..Subject::default() }, ..low() };
        see(
            &mut board,
            vec![
                low(),
                of(Some(job("1", "other")), low()),
                of(Some(job("2", "train")), low()),
                sign(FindingKind::InputStall, 0, 0),
                sign(FindingKind::InputStall, 1, 0),
                no_job(6),
                no_job(7),
            ],
            0,
        );
        let found: Vec<_> = all(&board).into_iter().rev().map(|one| (one.whose, one.cause, one.gpus.len())).collect();
        let of_gpu = |gpu: usize| (Concerned::Gpu(gpu.to_string(), format!("GPU-{gpu}")), Cause::Memory, 1);
        let of_job = |user, name, cause, gpus| (Concerned::Job(job(user, name)), cause, gpus);
        assert_eq!(
            found,
            [
                of_job("1", "train", Cause::Memory, 1),
                of_job("1", "other", Cause::Memory, 1),
                of_job("2", "train", Cause::Memory, 1),
                of_job("1", "train", Cause::Input, 2),
                of_gpu(6),
                of_gpu(7),
            ]
        );
    }

    #[test]
    fn what_it_says_is_of_the_last_time_that_it_came() {
        let mut board = Board::default();
        let oom = Sign { severity: Severity::Critical, waiting_ranks: vec![1, 2], ..sign(FindingKind::Oom, 3, 0) };
        see(&mut board, vec![oom], 0);
        see(&mut board, Vec::new(), 11);
        // A begin of before the end of the time before is no begin of this time.
        let low = Sign { begin_ns: -50 * SECOND_NS, ..sign(FindingKind::LowHeadroom, 0, 60) };
        let change = see(&mut board, vec![low], 60);
        let [incident] = all(&board).try_into().expect("one");
        assert_eq!((incident.text.what.as_str(), incident.severity), ("low_headroom of rank 0", Severity::Warning));
        assert_eq!((incident.ranks, incident.waiting_ranks.len(), incident.gpus.len()), ([0].into(), 0, 1));
        assert_eq!((incident.begin_ns, incident.again_ns, incident.times), (0, 0, 2));
        assert_eq!(incident.parts.iter().map(|part| part.is_now).collect::<Vec<_>>(), [false, true]);
        assert_eq!(change.notable.len(), 1, "the first of its kind and rank");
        see(&mut board, Vec::new(), 71);
        assert_eq!(see(&mut board, vec![sign(FindingKind::LowHeadroom, 0, 80)], 80).notable.len(), 0);
        assert_eq!(
            see(&mut board, vec![sign(FindingKind::LowHeadroom, 5, 81)], 81).notable.len(),
            1,
            "of another rank"
        );
        assert_eq!(see(&mut board, vec![sign(FindingKind::Oom, 3, 82)], 82).notable.len(), 1, "each that ends a job");
    }

    #[test]
    fn a_lost_gpu_is_over_when_it_answers() {
        let mut board = Board::default();
        see(&mut board, vec![sign(FindingKind::GpuLost, 0, 0)], 0);
        board.advance_without_node(3600 * SECOND_NS, |_| true);
        let over = see(&mut board, Vec::new(), 3601).over;
        assert_eq!(over[0].ended_ns, Some(3600 * SECOND_NS));
    }

    #[test]
    fn a_late_rank_belongs_to_what_explains_it_whichever_is_found_first() {
        for late_first in [true, false] {
            let mut board = Board::default();
            let signs = [sign(FindingKind::Straggler, 1, 0), sign(FindingKind::GpuThrottled, 1, 1)];
            let at = |nth: usize| if late_first { nth } else { 1 - nth };
            (0..2).for_each(|nth| drop(see(&mut board, vec![signs[at(nth)].clone()], 1)));
            let [incident] = all(&board).try_into().expect("one");
            assert_eq!((incident.cause, kinds(&incident)), (Cause::HeldBack, vec!["gpu_throttled", "straggler"]));
            assert_eq!(incident.text.what, "gpu_throttled of rank 1");
        }
        // Of another rank it explains nothing.
        let mut board = Board::default();
        see(&mut board, vec![sign(FindingKind::Straggler, 1, 0), sign(FindingKind::GpuThrottled, 2, 0)], 0);
        let causes = |board: &Board| all(board).iter().map(|one| (one.cause, one.is_active())).collect::<Vec<_>>();
        assert_eq!(causes(&board), [(Cause::HeldBack, true), (Cause::LateRank, true)]);
    }

    #[test]
    fn a_rank_that_stays_late_without_its_cause_is_an_incident_of_its_own() {
        let mut board = Board::default();
        let late = |at_s| Sign { lost_ns: Some(10), ..sign(FindingKind::Straggler, 1, at_s) };
        see(&mut board, vec![sign(FindingKind::GpuThrottled, 1, 0), late(0)], 0);
        see(&mut board, vec![late(9)], 9);
        let change = see(&mut board, vec![late(18)], 18);
        assert_eq!(change.over.iter().map(|one| one.cause).collect::<Vec<_>>(), [Cause::HeldBack]);
        assert_eq!(change.begun.iter().map(|one| one.cause).collect::<Vec<_>>(), [Cause::LateRank]);
        let found: Vec<_> = all(&board).iter().map(|one| (one.cause, one.is_active(), one.lost_ns)).collect();
        assert_eq!(found, [(Cause::LateRank, true, Some(10)), (Cause::HeldBack, false, Some(20))]);
        assert_eq!(board.active().next().map(|finding| finding.incident), Some(2));
        // A moment of low memory does not explain what has gone on for long.
        for at_s in (27..200).step_by(9) {
            see(&mut board, vec![late(at_s)], at_s);
        }
        see(&mut board, vec![late(198), sign(FindingKind::LowHeadroom, 1, 198)], 198);
        let active: Vec<_> = all(&board).iter().filter(|one| one.is_active()).map(|one| one.cause).collect();
        assert_eq!(active, [Cause::Memory, Cause::LateRank]);
    }

    /// Steps of the job of [`sign`] are slow.
    fn slow(at_s: i64) -> Sign {
        let slow = sign(FindingKind::SlowSteps, 0, at_s);
        Sign { subject: Subject { gpu: None, rank: None, ..slow.subject }, ..slow }
    }

    #[test]
    fn slow_steps_belong_to_what_explains_them_whichever_is_found_first() {
        let mut board = Board::default();
        let change = see(&mut board, vec![slow(0), sign(FindingKind::LowHeadroom, 2, 0)], 0);
        let causes: Vec<_> = change.begun.iter().map(|one| one.cause).collect();
        assert_eq!(causes, [Cause::Unexplained, Cause::Memory], "memory that is nearly full slows nothing yet");
        see(&mut board, vec![slow(3), sign(FindingKind::Straggler, 1, 3)], 3);
        let causes = |board: &Board| all(board).iter().map(|one| (one.cause, kinds(one))).collect::<Vec<_>>();
        let memory = (Cause::Memory, vec!["low_headroom"]);
        assert_eq!(causes(&board), [(Cause::LateRank, vec!["straggler", "slow_steps"]), memory.clone()]);
        // Found in one turn, they are one incident that has begun.
        let mut at_once = Board::default();
        let change = see(
            &mut at_once,
            vec![slow(0), sign(FindingKind::Straggler, 1, 0), sign(FindingKind::GpuThrottled, 1, 0)],
            0,
        );
        assert_eq!(change.begun.iter().map(|one| one.cause).collect::<Vec<_>>(), [Cause::HeldBack]);
        // The reason of the reason takes both, and leaves no incident behind.
        see(&mut board, vec![sign(FindingKind::GpuThrottled, 1, 5)], 5);
        let held_back = (Cause::HeldBack, vec!["gpu_throttled", "straggler", "slow_steps"]);
        assert_eq!(causes(&board), [held_back, memory]);
        // Steps that stay slow without it are an incident of their own.
        see(&mut board, vec![slow(12)], 12);
        see(&mut board, vec![slow(20)], 20);
        assert_eq!(causes(&board)[0], (Cause::Unexplained, vec!["slow_steps"]));
    }

    #[test]
    fn slow_steps_of_another_job_are_not_explained() {
        let mut board = Board::default();
        let others = Sign { subject: Subject { job: Some(job("2", "train")), ..Subject::default() }, ..slow(0) };
        see(&mut board, vec![others, sign(FindingKind::Straggler, 1, 0)], 0);
        assert_eq!(all(&board).iter().map(|one| one.cause).collect::<Vec<_>>(), [Cause::LateRank, Cause::Unexplained]);
    }

    #[test]
    fn memory_that_ran_out_leads_and_an_xid_leads_the_loss_of_its_gpu() {
        let mut board = Board::default();
        see(&mut board, vec![sign(FindingKind::CommStarvation, 0, 0), sign(FindingKind::Oom, 0, 0)], 0);
        see(&mut board, vec![sign(FindingKind::GpuLost, 0, 0), sign(FindingKind::Xid, 0, 0)], 0);
        let found: Vec<_> = all(&board).iter().map(kinds).collect();
        assert_eq!(found, [["xid", "gpu_lost"], ["oom", "comm_starvation"]]);
    }

    #[test]
    fn what_is_kept_is_bounded_and_one_owners_incidents_push_out_none_of_another() {
        let mut board = Board::default();
        see(&mut board, vec![sign(FindingKind::LowHeadroom, 0, 0)], 0);
        see(&mut board, Vec::new(), 11);
        for nth in 0..300 {
            let at_s = 20 + nth;
            let subject = Subject { job: Some(job("666", &format!("job {nth}"))), gpu: Some(1), rank: Some(0) };
            let lies = Sign { subject, until_ns: at_s * SECOND_NS, ..sign(FindingKind::LowHeadroom, 1, at_s) };
            see(&mut board, vec![lies], at_s);
        }
        see(&mut board, Vec::new(), 400);
        let incidents = all(&board);
        let honest = |incident: &&Incident| incident.whose == Concerned::Job(job("1", "train"));
        assert_eq!((incidents.len(), incidents.iter().filter(honest).count()), (MOST_OVER, 1));
        assert_eq!(incidents[0].id, 301, "newest first");
    }

    #[test]
    fn lists_are_bounded_and_count_as_bytes() {
        let mut board = Board::default();
        see(&mut board, (0..200).map(|rank| sign(FindingKind::MemoryGrowth, rank, 0)).collect(), 0);
        let [incident] = all(&board).try_into().expect("one");
        assert_eq!((incident.ranks.len(), incident.gpus.len()), (MOST_RANKS, MOST_GPUS));
        let bare = Incident::new(1, board.active().next().expect("some")).bytes();
        assert!(incident.bytes() > bare + 64 * 8 + 16 * 48, "{} and {bare}", incident.bytes());
    }
}
