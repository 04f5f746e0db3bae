//! What jobs have in progress: who they are, their ranks, what is open, and what has ended and waits for its memory.
//!
//! Enters: annotations, checked into [`Event`]s, with their sender's account. Leaves: [`Ended`] ones for
//! [`phases`](crate::phases), and each rank's state. Invariants: a refused event changes nothing; everything kept is
//! bounded by [`Limits`], in number and in bytes of one owner. Absent on purpose: memory over time, and what has ended.

mod account;
mod apart;
mod event;
mod gpus;
mod host_oom;
mod id;
mod job;
mod limits;
mod oom;
mod place;
mod profile;
mod rank;
mod refusal;
mod sender_id;

pub use crate::scope::Scope;
pub use account::{Account, Accounts, Owner, Pod, Reservation, Resource, Sender, Shortage, Within};
pub use event::{Attributes, Context, Event, attribute, weight};
pub use gpus::{Gpus, UnknownGpu};
pub use host_oom::HostOom;
pub use id::JobId;
pub use job::Job;
pub use limits::Limits;
pub use oom::FailedAllocation;
pub use place::{Container, Place, Search};
pub use profile::{Cursor, Profile, Record, Tallied, Tally, Top, Totals};
pub use rank::{Open, Rank, SeriesPlace};
pub use refusal::{Outcome, OutcomeCounts, Refusal};
pub use sender_id::SenderId;

use crate::gpu::OnGpus;
use crate::wire::{EventType, Kind, Memory};
use apart::Apart;
use id::Key;
use job::{JOB_BYTES, NAME_BYTES};
use profile::Profiles;
use rank::{Closed, Plan, Taking};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// What ended a step, phase or layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndedBy {
    /// Its own end event.
    End = 0,
    /// Nothing yet: it is open. An allocation has failed in it, and its memory up to then is to count; or a recording ends.
    #[serde(rename = "open")]
    StillOpen = 1,
    /// Its rank, which ended while it was open: how long it would have taken is not known.
    Exit = 2,
}

/// A step, phase or layer that has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// The job.
    pub job: JobId,
    /// Which process of it.
    pub rank: u32,
    /// What had been open.
    pub open: Open,
    /// When it ended, nanoseconds of the timeline.
    pub end_ns: i64,
    /// What ended it.
    pub by: EndedBy,
    /// Allocator counters at its end.
    pub memory: Option<Memory>,
    /// Positions of the rank's GPUs, where known.
    pub gpus: Option<Arc<[usize]>>,
    /// The rank's process, where known.
    pub pid: Option<u32>,
    /// Its reservation among those that wait to be joined with memory.
    pub waiting: Option<Reservation>,
}

/// What the allocator of a rank has, bytes.
#[derive(Debug, Clone)]
pub struct RankMemory {
    /// Which rank of which job.
    pub key: (JobId, u32),
    /// Position of its GPU, or of one of them; `None` while none is known.
    pub gpu: Option<usize>,
    /// Its process, where known.
    pub pid: Option<u32>,
    /// When its first and its last event arrived, nanoseconds of the timeline.
    pub since_ns: i64,
    /// See above.
    pub heard_ns: i64,
    /// Bytes that are given out.
    pub allocated: Option<u64>,
    /// Bytes that are taken from the driver.
    pub reserved: Option<u64>,
}

/// The GPUs and the process of a rank, where known.
type Of = (Option<Arc<[usize]>>, Option<u32>);

/// Upper bounds of the memory of a rank (with its place) and of an open step, phase or layer, without their texts, with allocator
/// overhead.
const RANK_BYTES: usize = (3 << 10) + 512;
const OPEN_BYTES: usize = 512;
/// Bytes of the statistics of a phase of one rank: most are peaks of the last minute.
const SERIES_BYTES: usize = 5 << 10;

/// Minimum capacity, in entries, that is kept after a burst for what has ended and waits for its memory.
const PENDING_ROOM: usize = 256;

/// An instant that a job marked.
#[derive(Debug, Clone)]
pub struct Mark {
    /// The job.
    pub job: JobId,
    /// Which process of it.
    pub rank: u32,
    /// What happened.
    pub name: String,
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// The step in which it did.
    pub step: Option<u64>,
}

/// Steps, phases and layers that were dropped, by reason: values of the label `outcome` of `highwater_phases_total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unfinished {
    /// Begun again before it ended.
    pub superseded: u64,
    /// Still open when its step ended.
    pub step_ended: u64,
    /// Still open when its rank ended.
    pub exited: u64,
    /// Still open when its rank had been silent for too long.
    pub silent: u64,
    /// Ended while too many others waited for their memory.
    pub overflow: u64,
}

impl Unfinished {
    /// Every count with its label value.
    #[must_use]
    pub fn labelled(&self) -> [(&'static str, u64); 5] {
        [
            ("superseded", self.superseded),
            ("step_ended", self.step_ended),
            ("exited", self.exited),
            ("silent", self.silent),
            ("overflow", self.overflow),
        ]
    }
}

/// All jobs of the node.
#[derive(Debug)]
pub struct Jobs {
    limits: Limits,
    jobs: BTreeMap<JobId, Job>,
    apart: Apart,
    pending: VecDeque<Ended>,
    marks: VecDeque<Mark>,
    /// UUIDs of the GPUs that the positions of ranks and phases refer to.
    devices: Vec<String>,
    left: Unfinished,
    layer_records_dropped: u64,
    /// Whether a rank was forgotten since the last [`expire`](Self::expire).
    has_forgotten: bool,
}

/// Result of an event that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The job that it belongs to.
    pub job: JobId,
    /// It lies before the rank's newest one.
    pub out_of_order: bool,
    /// The sender whose end is to be watched for from now on.
    pub watch: Option<SenderId>,
}

impl Jobs {
    /// No jobs yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            jobs: BTreeMap::new(),
            apart: Apart::default(),
            pending: VecDeque::new(),
            marks: VecDeque::new(),
            devices: Vec::new(),
            left: Unfinished::default(),
            layer_records_dropped: 0,
            has_forgotten: false,
        }
    }

    /// The jobs by owner and name.
    #[must_use]
    pub fn by_id(&self) -> &BTreeMap<JobId, Job> {
        &self.jobs
    }

    /// Every rank with its job and its number, in the order of these.
    pub fn ranks(&self) -> impl Iterator<Item = (&JobId, u32, &Rank)> {
        self.jobs.iter().flat_map(|(id, job)| job.ranks.iter().map(move |(number, rank)| (id, *number, rank)))
    }

    /// The latest profile of layers of every rank that has one, with its job and number, in the order of these.
    pub fn profiles(&self) -> impl Iterator<Item = ((JobId, u32), Arc<Profile>)> {
        self.ranks().filter_map(|(job, number, rank)| Some(((job.clone(), number), Arc::clone(rank.profile()?))))
    }

    /// What never ended so far.
    #[must_use]
    pub fn left(&self) -> Unfinished {
        self.left
    }

    /// Records of layers that are in no profile: refused for lack of room, of a step whose profile was whole already, or of
    /// a step that began again.
    #[must_use]
    pub fn layer_records_dropped(&self) -> u64 {
        self.layer_records_dropped
    }

    /// UUIDs of the GPUs that positions mean.
    #[must_use]
    pub fn devices(&self) -> &[String] {
        &self.devices
    }

    /// Marks, newest first.
    pub fn marks(&self) -> impl Iterator<Item = &Mark> {
        self.marks.iter().rev()
    }

    /// Takes one event of the owner of this account.
    ///
    /// # Errors
    /// Why it is refused. Then nothing has changed, with two exceptions: ended ranks and old profiles of the owner may have been
    /// dropped to make room, and a layer's record without room is counted in the profile of its step, which completes the
    /// profile of another step.
    pub fn take(&mut self, event: &Event, account: &Arc<Account>, now_ns: i64) -> Result<Taken, Refusal> {
        let id = self.apart.of(self.id_of(event, account), event);
        self.check_holder(&id, event)?;
        let plan = match self.plan(&id, event, account) {
            Err(refusal) if refusal.is_want_of_room() && self.make_room(&id, event, account, &refusal) => {
                self.plan(&id, event, account)
            }
            plan => plan,
        };
        let plan = plan.inspect_err(|refusal| self.note_lack(&id, event, refusal))?;
        let place = self.place(&id, event, account);
        let top = self.limits.top_layers;
        let Self { jobs, .. } = self;
        let job = jobs.entry(id.clone()).or_insert_with_key(|id| Job::new(id, event.pid, account));
        job.adopt(&account.owner, event.pid);
        let (name, number) = job.intern(event, account);
        let rank = job.ranks.entry(event.rank).or_insert_with(|| {
            Rank::new([account.hold(Resource::Ranks, 1), account.hold(Resource::Bytes, RANK_BYTES)], now_ns)
        });
        let is_late = event.layer.is_some() && rank.is_late(event);
        let out_of_order = event.at_ns < rank.last_event_ns;
        let closed = rank.take(event, name, plan, place, now_ns);
        if rank.exited_ns.is_none() {
            rank.locate(event, now_ns);
        }
        if let Some(number) = number.filter(|_| event.layer.is_some()) {
            let step = rank.step_of(event);
            if is_late {
                self.layer_records_dropped += 1;
            } else {
                rank.profiles.record(event, step, (&job.layers, number), top, account);
            }
        }
        let watch = rank.heard(event.sender_id());
        let of = (rank.gpus.clone(), rank.pid);
        self.note(event, account, id.clone(), closed, of);
        Ok(Taken { job: id, out_of_order, watch })
    }

    /// The job that an event of this account belongs to: a job of its scope, or a job that was begun before the owner's pod was
    /// known and that the owner may send for.
    fn id_of(&self, event: &Event, account: &Account) -> JobId {
        let scope = event.scope.as_ref().unwrap_or(&account.scope);
        let begun_before = || {
            let (id, job) = self.known(&account.owner.scope_without_pod()?, &event.job)?;
            job.may_be_spoken_for(&account.owner, event.pid).then_some(id)
        };
        let known = self.known(scope, &event.job).map(|(id, _)| id).or_else(begun_before);
        known.cloned().unwrap_or_else(|| JobId::new(scope.clone(), &event.job))
    }

    /// Refuses the begin of a step if another running process holds the rank. Reserves nothing.
    fn check_holder(&self, id: &JobId, event: &Event) -> Result<(), Refusal> {
        match self.rank(id, event.rank).and_then(|rank| rank.held_against(event)) {
            Some(holder) => Err(Refusal::Contested { job: id.to_string(), rank: event.rank, holder }),
            None => Ok(()),
        }
    }

    /// Takes an event of a process for a rank that another running process holds. From now on, everything that the process sends
    /// for this rank belongs to a job of its own, which the result names.
    ///
    /// # Errors
    /// As of [`take`](Self::take).
    pub fn take_apart(&mut self, event: &Event, account: &Arc<Account>, now_ns: i64) -> Result<Taken, Refusal> {
        let id = self.id_of(event, account);
        let is_new = self.apart.keep(&id, event, self.limits.name_bytes);
        let taken = self.take(event, account, now_ns);
        if taken.is_err() && is_new {
            self.apart.forget(&id, event);
        }
        taken
    }

    /// How often two processes that ran at once sent steps for one rank of one job.
    #[must_use]
    pub fn conflicts(&self) -> u64 {
        self.apart.conflicts()
    }

    fn known(&self, scope: &Scope, name: &str) -> Option<(&JobId, &Job)> {
        self.jobs.get_key_value(&(scope, name) as &dyn Key)
    }

    /// What an event would do, if there is room for it everywhere.
    fn plan(&self, id: &JobId, event: &Event, account: &Arc<Account>) -> Result<Plan, Refusal> {
        let job = self.jobs.get(id);
        if job.is_some_and(|job| !job.may_be_spoken_for(&account.owner, event.pid)) {
            return Err(Refusal::NotOwner(event.job.clone()));
        }
        let rank = job.and_then(|job| job.ranks.get(&event.rank));
        let short = |resource, refusal: fn(_, _) -> Refusal| {
            account.may_hold(resource, 1).map_err(|short| refusal(short, account.limit(resource)))
        };
        if rank.is_none() {
            if matches!(event.event, EventType::End | EventType::Exit) {
                return Err(Refusal::EndWithoutBegin(format!("rank {} of job `{}`", event.rank, event.job)));
            }
            job.map_or_else(|| short(Resource::Jobs, Refusal::TooManyJobs), |_| Ok(()))?;
            short(Resource::Ranks, Refusal::TooManyRanks)?;
        }
        let is_new_name = job.map_or(Ok(true), |job| job.has_room_for(event, &self.limits).map(|known| !known))?;
        let plan = rank.map_or_else(|| Ok(Rank::plan_first(event)), |rank| rank.plan(event, self.limits.open))?;
        if event.layer.is_some() && !rank.is_some_and(|rank| rank.is_late(event)) {
            let (first, top) = (Profiles::default(), self.limits.top_layers);
            let step = rank.map_or(event.step, |rank| rank.step_of(event));
            rank.map_or(&first, |rank| &rank.profiles).may_record(step, top, account)?;
        }
        if needs_series(event, rank) {
            short(Resource::Series, Refusal::TooManySeries)?;
        }
        let text = |there: bool, text: &str, bytes: usize| if there { text.len() + bytes } else { 0 };
        let bytes = text(job.is_none(), &event.job, JOB_BYTES)
            + if rank.is_none() { RANK_BYTES } else { 0 }
            + text(is_new_name && event.adds_name(), &event.name, NAME_BYTES)
            + if needs_series(event, rank) { SERIES_BYTES } else { 0 }
            + open_bytes(event);
        let over = |short| Refusal::over_budget("bytes (annotations.max_bytes)", short, Resource::Bytes, account);
        // What ends frees more than it takes, and a mark of a rank that is known takes nothing on the account.
        if bytes > 0 {
            account.may_hold(Resource::Bytes, bytes).map_err(over)?;
        }
        Ok(plan)
    }

    /// Reserves what an event takes if it begins something.
    fn place(&self, id: &JobId, event: &Event, account: &Arc<Account>) -> Taking {
        let rank = self.rank(id, event.rank);
        let bytes = open_bytes(event);
        let held = (bytes > 0).then(|| account.hold(Resource::Bytes, bytes));
        let series = || [account.hold(Resource::Series, 1), account.hold(Resource::Bytes, SERIES_BYTES)];
        Taking { held, series: needs_series(event, rank).then(series) }
    }

    fn rank(&self, job: &JobId, rank: u32) -> Option<&Rank> {
        self.jobs.get(job)?.ranks.get(&rank)
    }

    fn rank_mut(&mut self, job: &JobId, rank: u32) -> Option<&mut Rank> {
        self.jobs.get_mut(job)?.ranks.get_mut(&rank)
    }

    fn note(&mut self, event: &Event, account: &Arc<Account>, job: JobId, closed: Closed, of: Of) {
        let (gpus, pid) = of;
        let gpus = closed.gpus.or(gpus);
        self.left.superseded += closed.superseded;
        self.left.step_ended += closed.step_ended;
        self.left.exited += closed.exited;
        self.layer_records_dropped += closed.records_dropped;
        let (rank, end_ns, memory) = (event.rank, event.at_ns, event.memory);
        let by = if event.event == EventType::Exit { EndedBy::Exit } else { EndedBy::StillOpen };
        for mut open in closed.cut.into_iter().filter(|open| open.begin_ns <= end_ns) {
            let is_held = open.held.is_some() || account.may_hold(Resource::Bytes, OPEN_BYTES).is_ok();
            let has_room = is_held && account.may_hold(Resource::Pending, 1).is_ok();
            self.left.overflow += u64::from(!has_room && by == EndedBy::Exit);
            if has_room {
                open.held.get_or_insert_with(|| account.hold(Resource::Bytes, OPEN_BYTES));
                let (job, gpus, waiting) = (job.clone(), gpus.clone(), Some(account.hold(Resource::Pending, 1)));
                self.pending.push_back(Ended { job, rank, open, end_ns, by, memory, gpus, pid, waiting });
            }
        }
        if event.layer.is_some() {
            // It is in its rank's profile, and none of the marks.
        } else if event.event == EventType::Mark {
            let (rank, name, at_ns, step) = (event.rank, event.name.clone(), event.at_ns, event.step);
            self.marks.push_back(Mark { job, rank, name, at_ns, step });
            if self.marks.len() > self.limits.marks {
                self.marks.pop_front();
            }
        } else if let Some(open) = closed.ended {
            // If steps and phases end faster than they are joined with memory, each owner loses only its own.
            if account.may_hold(Resource::Pending, 1).is_err() {
                self.left.overflow += 1;
                return;
            }
            let waiting = Some(account.hold(Resource::Pending, 1));
            self.pending.push_back(Ended { job, rank, open, end_ns, by: EndedBy::End, memory, gpus, pid, waiting });
        }
    }

    /// Sets the GPUs that positions refer to, by UUID. A rank keeps its GPUs only if all of them are still there. Returns whether
    /// positions refer to other GPUs than before.
    pub fn set_devices(&mut self, devices: Vec<String>) -> bool {
        let before = std::mem::replace(&mut self.devices, devices);
        if before.is_empty() || before == self.devices {
            return false;
        }
        let moved = |position: &usize| {
            let uuid = before.get(*position)?;
            self.devices.iter().position(|device| device == uuid)
        };
        for rank in self.jobs.values_mut().flat_map(|job| job.ranks.values_mut()) {
            rank.gpus = rank.gpus.take().and_then(|gpus| gpus.iter().map(moved).collect());
        }
        for ended in &mut self.pending {
            ended.gpus = ended.gpus.take().and_then(|gpus| gpus.iter().map(moved).collect());
        }
        true
    }

    /// Positions of the GPUs of a rank, where known.
    #[must_use]
    pub fn gpus_of(&self, job: &JobId, rank: u32) -> Option<Arc<[usize]>> {
        self.rank(job, rank)?.gpus.clone()
    }

    /// Sets the GPUs that a search found, for the rank and for what has ended of it and waits to be joined with memory. Does
    /// nothing if the search has ended or was restarted meanwhile.
    pub fn set_found(&mut self, job: &JobId, rank: u32, search: &Search, gpus: &Arc<[usize]>) {
        let Some(known) = self.jobs.get_mut(job).and_then(|job| job.ranks.get_mut(&rank)) else { return };
        if known.search.since_ns.is_none() || known.search.since_ns != search.since_ns {
            return;
        }
        let is_its = |ended: &&mut Ended| ended.job == *job && ended.rank == rank && ended.pid == known.pid;
        for ended in self.pending.iter_mut().filter(is_its) {
            ended.gpus.get_or_insert_with(|| Arc::clone(gpus));
        }
        known.gpus = Some(Arc::clone(gpus));
        known.search.since_ns = None;
    }

    /// Updates a rank's GPUs to those on which its process was seen, if its events name no GPU and all of its known GPUs are
    /// among the listed ones. Otherwise nothing can be concluded: a GPU that does not answer, or was not asked yet, is in no
    /// list, and the list of a MIG instance that does not answer is its parent's.
    pub fn set_listed(&mut self, job: &JobId, rank: u32, listed: &OnGpus) {
        let Some(known) = self.rank_mut(job, rank) else { return };
        let Some(before) = known.gpus.as_deref().filter(|_| !known.search.named) else { return };
        if !before.iter().all(|gpu| listed.works.contains(gpu) || listed.idles.contains(gpu)) {
            return;
        }
        let mut gpus: Vec<usize> = before.iter().filter(|gpu| !listed.idles.contains(gpu)).copied().collect();
        gpus.extend(listed.works.iter().filter(|gpu| !before.contains(gpu)));
        if *gpus != *before {
            known.gpus = Some(gpus.into());
        }
    }

    /// Whether this rank is in a step.
    #[must_use]
    pub fn is_in_step(&self, job: &JobId, rank: u32) -> bool {
        self.rank(job, rank).is_some_and(|rank| rank.open_step().is_some())
    }

    /// The search for this rank's GPUs; `None` where they are known.
    #[must_use]
    pub fn search(&self, job: &JobId, rank: u32) -> Option<Search> {
        let search = &self.rank(job, rank)?.search;
        search.since_ns.map(|_| Search::clone(search))
    }

    /// Ranks of this process whose GPUs are looked for: with their job, their owner's account and their search.
    #[must_use]
    pub fn searches_of(&self, pid: u32) -> Vec<(JobId, u32, Arc<Account>, Search)> {
        let searching = self.ranks().filter(|(_, _, rank)| rank.pid == Some(pid) && rank.search.since_ns.is_some());
        searching
            .map(|(id, number, rank)| (id.clone(), number, Arc::clone(rank.account()), Search::clone(&rank.search)))
            .collect()
    }

    /// What the allocators of ranks had at most since this was last called, of each of their GPUs, and without a GPU where none is known. Which GPU the counters of a rank with
    /// several are of is not known.
    pub fn memory_of_ranks(&mut self) -> Vec<RankMemory> {
        let mut all = Vec::new();
        for (id, number, rank) in self
            .jobs
            .iter_mut()
            .flat_map(|(id, job)| job.ranks.iter_mut().map(move |(number, rank)| (id, number, rank)))
        {
            let Memory { allocated, reserved, .. } = rank.take_most();
            let gpus = rank.gpus.as_deref().unwrap_or_default();
            let [allocated, reserved] = [allocated, reserved].map(|bytes| bytes.filter(|_| gpus.len() == 1));
            let (pid, since_ns, heard_ns) = (rank.pid, rank.since_ns, rank.last_heard_ns);
            let of = |gpu: Option<usize>| {
                let key = (id.clone(), *number);
                RankMemory { key, gpu, pid, since_ns, heard_ns, allocated, reserved }
            };
            // Of one that has just ended too: the driver's last list may still have its process.
            if gpus.is_empty() {
                all.push(of(None));
            }
            all.extend(gpus.iter().map(|gpu| of(Some(*gpu))));
        }
        all
    }

    /// Removes and returns those that ended at or before `known_ns`, until which memory is known; at most `most`.
    pub fn take_ended(&mut self, known_ns: i64, most: usize) -> Vec<Ended> {
        let mut ready = Vec::new();
        self.pending.retain(|ended| {
            let is_ready = ended.end_ns <= known_ns && ready.len() < most;
            if is_ready {
                ready.push(ended.clone());
            }
            !is_ready
        });
        // After a burst, which is seldom, the room for it is given back.
        if self.pending.capacity() > 4 * PENDING_ROOM.max(self.pending.len()) {
            self.pending.shrink_to(PENDING_ROOM);
        }
        ready
    }

    /// Ends the ranks that end with this sender: no other sender is counted on for them, and it began all that they
    /// have open. Returns the exit events. These skip the checks of other events, because the daemon saw the end
    /// itself, and because the pod of the rank's owner may have become known since the rank began.
    pub fn end_with(&mut self, sender_id: SenderId, at_ns: i64) -> Vec<(Event, Arc<Account>)> {
        let mut ended = Vec::new();
        for (id, job) in &mut self.jobs {
            let with = |(number, rank): (&u32, &mut Rank)| rank.ends_with(sender_id).then_some((*number, rank.pid));
            ended.extend(job.ranks.iter_mut().filter_map(with).map(|(number, pid)| (id.clone(), number, pid)));
        }
        ended.into_iter().filter_map(|(id, number, pid)| self.end(&id, number, pid, at_ns)).collect()
    }

    /// Marks that host memory ran out, for ranks that count on one of these senders, and returns the marks. If the
    /// senders go on (`has_ended` is `Some(false)`), only the lowest such rank of each job is marked.
    pub fn mark_host_oom(&mut self, sender_ids: &[SenderId], oom: &HostOom, at_ns: i64) -> Vec<(Event, Arc<Account>)> {
        let mut of: Vec<(JobId, u32, HostOom)> = Vec::new();
        for (id, number, rank) in self.ranks().filter(|(_, _, rank)| rank.exited_ns.is_none()) {
            if !sender_ids.iter().any(|sender_id| rank.counts_on(*sender_id)) {
                continue;
            }
            // A process that shares the rank, such as one of its data loader.
            let is_beside = rank.holder_pid().is_some_and(|holder| oom.pid.is_some_and(|pid| pid != holder));
            let (is_own, has_ended) = if is_beside { (Some(false), Some(false)) } else { (oom.is_own, oom.has_ended) };
            match of.last() {
                // Ranks come in the order of jobs and numbers.
                Some((known, ..)) if oom.has_ended == Some(false) && known == id => {}
                _ => of.push((id.clone(), number, HostOom { is_own, has_ended, ..oom.clone() })),
            }
        }
        of.into_iter().filter_map(|(id, number, oom)| self.mark(&id, number, &oom, at_ns)).collect()
    }

    /// Takes a mark of the daemon's own for a rank, without the checks of other events.
    fn mark(&mut self, id: &JobId, number: u32, oom: &HostOom, at_ns: i64) -> Option<(Event, Arc<Account>)> {
        let mut mark = oom.mark(id.name(), id.scope(), number, at_ns);
        let rank = self.rank_mut(id, number)?;
        // From another process than before, the rank would count as started anew.
        mark.pid = mark.pid.filter(|pid| rank.pid == Some(*pid));
        let account = Arc::clone(rank.account());
        let taking = Taking { held: None, series: None };
        let closed = rank.take(&mark, mark.name.as_str().into(), Plan::Mark, taking, at_ns);
        let of = (rank.gpus.clone(), rank.pid);
        self.note(&mark, &account, id.clone(), closed, of);
        Some((mark, account))
    }

    /// Ends the ranks whose steps this process began, even if other senders send for them. Returns the exits.
    pub fn end_held_by(&mut self, pid: u32, at_ns: i64) -> Vec<(Event, Arc<Account>)> {
        let held = |(_, _, rank): &(&JobId, u32, &Rank)| rank.is_held_by(pid);
        let ranks: Vec<_> = self.ranks().filter(held).map(|(id, number, _)| (id.clone(), number)).collect();
        ranks.into_iter().filter_map(|(id, number)| self.end(&id, number, Some(pid), at_ns)).collect()
    }

    /// Ends one rank; `None` where it is not known. Returns the exit, and whose it is.
    fn end(&mut self, id: &JobId, number: u32, pid: Option<u32>, at_ns: i64) -> Option<(Event, Arc<Account>)> {
        let exit = Event { scope: Some(id.scope().clone()), ..Event::exit(id.name(), number, pid, at_ns) };
        let rank = self.rank_mut(id, number)?;
        let account = Arc::clone(rank.account());
        let taking = Taking { held: None, series: None };
        let closed = rank.take(&exit, exit.name.as_str().into(), Plan::Exit, taking, at_ns);
        self.note(&exit, &account, id.clone(), closed, (None, pid));
        Some((exit, account))
    }

    /// Forgets ranks that ended a while ago, or have been silent for too long, and jobs without ranks. Returns whether one was
    /// forgotten since the last time.
    pub fn expire(&mut self, now_ns: i64) -> bool {
        let Limits { silence_ns, shown_after_exit_ns, .. } = self.limits;
        self.forget(|rank| match rank.exited_ns {
            Some(exited_ns) => now_ns.saturating_sub(exited_ns) > shown_after_exit_ns,
            None => now_ns.saturating_sub(rank.last_heard_ns) > silence_ns,
        });
        std::mem::take(&mut self.has_forgotten)
    }

    /// Makes room for an event. Drops ended ranks of its owner and, if bytes of profiles are short, a profile of that owner that
    /// is about to be replaced. Returns whether anything was dropped.
    fn make_room(&mut self, id: &JobId, event: &Event, account: &Arc<Account>, refusal: &Refusal) -> bool {
        let needs_profile = event.layer.is_some() && refusal.is_over_budget_of(Resource::Layers);
        let of_event = self.rank_mut(id, event.rank);
        let was_refused = of_event.as_ref().is_some_and(|rank| rank.profiles.was_refused());
        let own = needs_profile && of_event.is_some_and(|rank| rank.profiles.forget());
        if event.layer.is_some() && was_refused {
            return own;
        }
        let has_exited = self.forget_exited(account);
        let mut ranks = self.jobs.values_mut().flat_map(|job| job.ranks.values_mut());
        let replaces = |rank: &mut Rank| Arc::ptr_eq(rank.account(), account) && rank.profiles.make_room();
        own || (needs_profile && ranks.any(replaces)) || has_exited
    }

    /// Counts a layer's record that found no room.
    fn note_lack(&mut self, id: &JobId, event: &Event, refusal: &Refusal) {
        if event.layer.is_none() || !refusal.is_lack_for_record() {
            return;
        }
        self.layer_records_dropped += 1;
        let top = self.limits.top_layers;
        if let Some(job) = self.jobs.get_mut(id)
            && let Some(rank) = job.ranks.get_mut(&event.rank)
        {
            let step = rank.step_of(event);
            if !rank.is_late(event) {
                rank.profiles.lack(step, &job.layers, top);
            }
        }
    }

    /// Forgets ranks of this owner that have ended, for others of it. Returns whether there was one.
    fn forget_exited(&mut self, account: &Arc<Account>) -> bool {
        self.forget(|rank| rank.exited_ns.is_some() && Arc::ptr_eq(rank.account(), account))
    }

    fn forget(&mut self, is_over: impl Fn(&Rank) -> bool) -> bool {
        let mut forgotten = false;
        let silent = &mut self.left.silent;
        self.jobs.retain(|_, job| {
            job.ranks.retain(|_, rank| {
                let is_over = is_over(rank);
                *silent += if is_over { rank.open.len() as u64 } else { 0 };
                forgotten |= is_over;
                !is_over
            });
            !job.ranks.is_empty()
        });
        self.apart.retain(|job| self.jobs.contains_key(job));
        self.has_forgotten |= forgotten;
        forgotten
    }
}

/// Whether an event begins the first phase of its name of this rank.
fn needs_series(event: &Event, rank: Option<&Rank>) -> bool {
    let begins_phase = event.event == EventType::Begin && event.kind == Kind::Phase;
    begins_phase && !rank.is_some_and(|rank| rank.has_series(&event.name))
}

/// Bytes of what an event begins, until that has ended and has its memory.
fn open_bytes(event: &Event) -> usize {
    if event.event != EventType::Begin {
        return 0;
    }
    let name = if event.kind == Kind::Step { event.name.len() } else { 0 };
    OPEN_BYTES + name + event.attributes.as_ref().map_or(0, weight)
}

#[cfg(test)]
mod tests;
