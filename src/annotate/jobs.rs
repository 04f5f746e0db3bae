//! All jobs of the node: who they are, what they have open, and what has ended and waits for its memory.

use super::event::Event;
use super::limits::Limits;
use super::place::Search;
use super::rank::{Closed, Open, Rank};
use super::refusal::Refusal;
use super::wire::{EventType, Kind, Memory};
use crate::attribute::Attributed;
use crate::sample::OnGpus;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// A step, phase or layer that has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// The job.
    pub job: Arc<str>,
    /// Which process of it.
    pub rank: u32,
    /// What had been open.
    pub open: Open,
    /// When it ended, nanoseconds of the timeline.
    pub end_ns: i64,
    /// Allocator counters at its end.
    pub memory: Option<Memory>,
    /// Positions of the rank's GPUs, where known.
    pub gpus: Option<Arc<[usize]>>,
    /// The rank's process, where known.
    pub pid: Option<u32>,
}

/// One job.
#[derive(Debug)]
pub struct Job {
    name: Arc<str>,
    /// Its processes on this node.
    pub ranks: BTreeMap<u32, Rank>,
    phase_names: BTreeSet<Arc<str>>,
    layer_names: BTreeSet<Arc<str>>,
}

/// An instant that a job marked.
#[derive(Debug, Clone)]
pub struct Mark {
    /// The job.
    pub job: Arc<str>,
    /// Which process of it.
    pub rank: u32,
    /// What happened.
    pub name: String,
    /// When, nanoseconds of the timeline.
    pub at_ns: i64,
    /// The step in which it did.
    pub step: Option<u64>,
}

/// What became of a step, phase or layer: the values of the label `outcome` of `highwater_phases_total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PhaseOutcome {
    /// Memory was found for all of it.
    pub attributed: u64,
    /// Memory was found, but not for all of the time: there is a gap in it.
    pub with_gap: u64,
    /// No GPU of the rank is known.
    pub without_gpu: u64,
    /// No memory is known at any of its time.
    pub without_memory: u64,
    /// Begun again before it ended.
    pub superseded: u64,
    /// Still open when its step ended.
    pub step_ended: u64,
    /// Still open when its rank had been silent for too long.
    pub silent: u64,
    /// Ended while too many others waited for their memory.
    pub overflow: u64,
}

/// All jobs of the node.
#[derive(Debug)]
pub struct Jobs {
    limits: Limits,
    jobs: BTreeMap<Arc<str>, Job>,
    pending: VecDeque<Ended>,
    ended: VecDeque<Arc<Attributed>>,
    ended_count: u64,
    marks: VecDeque<Mark>,
    /// Whose positions those of ranks and phases are, by UUID.
    devices: Vec<String>,
    outcomes: PhaseOutcome,
}

impl Jobs {
    /// No jobs yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            jobs: BTreeMap::new(),
            pending: VecDeque::new(),
            ended: VecDeque::new(),
            ended_count: 0,
            marks: VecDeque::new(),
            devices: Vec::new(),
            outcomes: PhaseOutcome::default(),
        }
    }

    /// The jobs by name.
    #[must_use]
    pub fn by_name(&self) -> &BTreeMap<Arc<str>, Job> {
        &self.jobs
    }

    /// What became of steps, phases and layers so far.
    #[must_use]
    pub fn outcomes(&self) -> PhaseOutcome {
        self.outcomes
    }

    /// Ended ones of one job with their memory, newest first.
    pub fn ended_of<'a>(&'a self, job: &'a str) -> impl Iterator<Item = &'a Arc<Attributed>> {
        self.ended.iter().rev().filter(move |attributed| &*attributed.ended.job == job)
    }

    /// How many have ended with their memory so far, over all jobs.
    #[must_use]
    pub fn ended_count(&self) -> u64 {
        self.ended_count
    }

    /// Those that ended since there were `count` of them, oldest first, and how many of these are not kept any more.
    #[must_use]
    pub fn ended_since(&self, count: u64) -> (Vec<Arc<Attributed>>, u64) {
        let new = self.ended_count.saturating_sub(count);
        let kept = usize::try_from(new).unwrap_or(usize::MAX).min(self.ended.len());
        (self.ended.iter().skip(self.ended.len() - kept).cloned().collect(), new - kept as u64)
    }

    /// UUIDs of the GPUs that positions mean.
    pub(crate) fn devices(&self) -> &[String] {
        &self.devices
    }

    /// Marks, newest first.
    pub fn marks(&self) -> impl Iterator<Item = &Mark> {
        self.marks.iter().rev()
    }

    /// Takes one event. Returns whether it lies before the rank's newest one.
    ///
    /// # Errors
    /// Why it is refused; then nothing has changed.
    pub fn take(&mut self, event: &Event, now_ns: i64) -> Result<bool, Refusal> {
        let begins_phase = event.event == EventType::Begin && event.kind == Kind::Phase;
        if begins_phase && !self.has_series(&event.job, event.rank, &event.name) {
            return Err(Refusal::TooManySeries(self.limits.phase_series));
        }
        if self.rank(&event.job, event.rank).is_none() {
            self.admit(event)?;
        }
        let Some(job) = self.jobs.get_mut(event.job.as_str()) else { return Ok(false) };
        let name = job.intern(event, &self.limits)?;
        let rank = job.ranks.entry(event.rank).or_insert_with(Rank::new);
        let out_of_order = event.at_ns < rank.last_event_ns;
        rank.last_heard_ns = now_ns;
        let closed = rank.take(event, name, self.limits.open)?;
        rank.locate(event, now_ns);
        let (job, gpus, pid) = (Arc::clone(&job.name), rank.gpus.clone(), rank.pid);
        self.note(event, job, closed, gpus, pid);
        Ok(out_of_order)
    }

    fn rank(&self, job: &str, rank: u32) -> Option<&Rank> {
        self.jobs.get(job)?.ranks.get(&rank)
    }

    fn rank_mut(&mut self, job: &str, rank: u32) -> Option<&mut Rank> {
        self.jobs.get_mut(job)?.ranks.get_mut(&rank)
    }

    /// Whether a phase of a rank has series of its own, will have them when it ends, or has room for them.
    fn has_series(&self, job: &str, rank: u32, phase: &str) -> bool {
        let all = || self.jobs.values().flat_map(|job| job.ranks.values()).map(Rank::series).sum::<usize>();
        self.rank(job, rank).is_some_and(|rank| rank.has_series(phase)) || all() < self.limits.phase_series
    }

    /// Makes a place for a new job or the first event of a new rank.
    fn admit(&mut self, event: &Event) -> Result<(), Refusal> {
        if event.event == EventType::End {
            return Err(Refusal::EndWithoutBegin(format!("rank {} of job `{}`", event.rank, event.job)));
        }
        let is_new_job = !self.jobs.contains_key(event.job.as_str());
        if is_new_job && self.jobs.len() >= self.limits.jobs {
            return Err(Refusal::TooManyJobs(self.limits.jobs));
        }
        if self.jobs.values().map(|job| job.ranks.len()).sum::<usize>() >= self.limits.ranks {
            return Err(Refusal::TooManyRanks(self.limits.ranks));
        }
        if is_new_job {
            let name: Arc<str> = event.job.as_str().into();
            self.jobs.insert(Arc::clone(&name), Job::new(name));
        }
        Ok(())
    }

    fn note(&mut self, event: &Event, job: Arc<str>, closed: Closed, gpus: Option<Arc<[usize]>>, pid: Option<u32>) {
        self.outcomes.superseded += closed.superseded;
        self.outcomes.step_ended += closed.step_ended;
        if event.event == EventType::Mark {
            let (rank, name, at_ns, step) = (event.rank, event.name.clone(), event.at_ns, event.step);
            self.marks.push_back(Mark { job, rank, name, at_ns, step });
            if self.marks.len() > self.limits.marks {
                self.marks.pop_front();
            }
        } else if let Some(open) = closed.ended {
            if self.pending.len() >= self.limits.pending {
                self.outcomes.overflow += 1;
                return;
            }
            let (rank, end_ns, memory) = (event.rank, event.at_ns, event.memory);
            self.pending.push_back(Ended { job, rank, open, end_ns, memory, gpus, pid });
        }
    }

    /// From now on positions are those of these GPUs, by UUID. Ranks keep the GPUs that are still there; phases that
    /// have ended are forgotten if their positions would mean others, which is told.
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
        self.ended.clear();
        true
    }

    /// Notes the GPUs that a search found, unless it has ended or begun anew since; for the rank and for what has ended and
    /// still waits for its memory.
    pub(super) fn set_found(&mut self, job: &str, rank: u32, search: &Search, gpus: &Arc<[usize]>) {
        let Some(known) = self.jobs.get_mut(job).and_then(|job| job.ranks.get_mut(&rank)) else { return };
        if known.search.since_ns.is_none() || known.search.since_ns != search.since_ns {
            return;
        }
        let is_its = |ended: &&mut Ended| &*ended.job == job && ended.rank == rank && ended.pid == known.pid;
        for ended in self.pending.iter_mut().filter(is_its) {
            ended.gpus.get_or_insert_with(|| Arc::clone(gpus));
        }
        known.gpus = Some(Arc::clone(gpus));
        known.search.since_ns = None;
    }

    /// Notes on which GPUs a rank's process was seen, if its events name none and all that are known of the rank are among
    /// them. Else nothing follows: a GPU that does not answer, or was not asked yet, is in no list, and the list of a MIG
    /// instance that does not answer is its parent's.
    pub(super) fn set_listed(&mut self, job: &str, rank: u32, listed: &OnGpus) {
        let Some(known) = self.rank_mut(job, rank) else { return };
        let Some(before) = known.gpus.as_deref().filter(|_| !known.search.named) else { return };
        if !before.iter().all(|gpu| listed.works.contains(gpu) || listed.idles.contains(gpu)) {
            return;
        }
        let mut gpus: Vec<usize> = before.iter().filter(|gpu| !listed.idles.contains(gpu)).copied().collect();
        gpus.extend(listed.works.iter().filter(|gpu| !before.contains(gpu)));
        if *gpus != *before {
            known.gpus = Some(gpus.into());
            // It was told of the GPU before, and nothing of several tells it anew.
            known.outside_allocator_bytes = None;
        }
    }

    /// Whether this rank is in a step.
    pub(super) fn is_in_step(&self, job: &str, rank: u32) -> bool {
        self.rank(job, rank).is_some_and(|rank| rank.open_step().is_some())
    }

    /// The search for this rank's GPUs; `None` where they are known.
    pub(super) fn search(&self, job: &str, rank: u32) -> Option<Search> {
        let search = &self.rank(job, rank)?.search;
        search.since_ns.map(|_| Search::clone(search))
    }

    /// Removes and returns those that ended at or before `known_ns`, until which memory is known.
    pub fn take_ended(&mut self, known_ns: i64) -> Vec<Ended> {
        let all = std::mem::take(&mut self.pending);
        let (ready, waiting) = all.into_iter().partition::<Vec<_>, _>(|ended| ended.end_ns <= known_ns);
        self.pending = waiting.into();
        ready
    }

    /// Keeps what memory did in one that ended.
    pub fn record(&mut self, attributed: Attributed) {
        self.outcomes.add(&attributed);
        let ended = &attributed.ended;
        if let Some(rank) = self.rank_mut(&ended.job, ended.rank) {
            // An allocator's counters are of one GPU: of several, nobody knows which. A rank that has spread over several
            // since this ended has none.
            if let [gpu] = attributed.gpus.as_slice()
                && rank.gpus.as_deref() == Some(&[gpu.gpu])
            {
                rank.outside_allocator_bytes = gpu.outside_allocator_bytes.or(rank.outside_allocator_bytes);
            }
            if ended.open.kind == Kind::Phase {
                rank.phases.entry(Arc::clone(&ended.open.name)).or_default().record(ended.end_ns, &attributed.gpus);
            }
        }
        self.ended_count += 1;
        self.ended.push_back(Arc::new(attributed));
        if self.ended.len() > self.limits.ended {
            self.ended.pop_front();
        }
    }

    /// Forgets ranks that have been silent for too long, and jobs without ranks.
    pub fn expire(&mut self, now_ns: i64) {
        let silence_ns = self.limits.silence_ns;
        let silent = &mut self.outcomes.silent;
        self.jobs.retain(|_, job| {
            job.ranks.retain(|_, rank| {
                let alive = now_ns.saturating_sub(rank.last_heard_ns) <= silence_ns;
                *silent += if alive { 0 } else { rank.open.len() as u64 };
                alive
            });
            !job.ranks.is_empty()
        });
    }
}

impl Job {
    fn new(name: Arc<str>) -> Self {
        Self { name, ranks: BTreeMap::new(), phase_names: BTreeSet::new(), layer_names: BTreeSet::new() }
    }

    /// The one copy of the event's name, if the job may have one more.
    fn intern(&mut self, event: &Event, limits: &Limits) -> Result<Arc<str>, Refusal> {
        let (names, most) = match event.kind {
            Kind::Phase => (&mut self.phase_names, limits.phase_names),
            Kind::Layer => (&mut self.layer_names, limits.layer_names),
            Kind::Step => return Ok(event.name.as_str().into()),
        };
        if let Some(name) = names.get(event.name.as_str()) {
            return Ok(Arc::clone(name));
        }
        let name: Arc<str> = event.name.as_str().into();
        // A mark's name is no label, and an end without begin must not take a place.
        if event.event == EventType::Begin {
            if names.len() >= most {
                return Err(Refusal::TooManyNames(most));
            }
            names.insert(Arc::clone(&name));
        }
        Ok(name)
    }
}

impl PhaseOutcome {
    fn add(&mut self, attributed: &Attributed) {
        let gpus = &attributed.gpus;
        let counter = if gpus.is_empty() {
            &mut self.without_gpu
        } else if gpus.iter().all(|gpu| gpu.peak_bytes.is_none()) {
            &mut self.without_memory
        } else if gpus.iter().any(|gpu| gpu.gap_ns > 0 || gpu.peak_bytes.is_none()) {
            &mut self.with_gap
        } else {
            &mut self.attributed
        };
        *counter += 1;
    }

    /// Every outcome with its label value.
    #[must_use]
    pub fn labelled(&self) -> [(&'static str, u64); 8] {
        [
            ("attributed", self.attributed),
            ("with_gap", self.with_gap),
            ("without_gpu", self.without_gpu),
            ("without_memory", self.without_memory),
            ("superseded", self.superseded),
            ("step_ended", self.step_ended),
            ("silent", self.silent),
            ("overflow", self.overflow),
        ]
    }
}
