//! One process of one job: what it has open, and what its events mean.

use super::account::{Account, Owner, Pod, Reservation, Within};
use super::event::{Attributes, Event, joined};
use super::host_oom::{HostOom, is_host_oom};
use super::oom::{FailedAllocation, is_failed_allocation};
use super::place::Search;
use super::profile::{Profile, Profiles};
use super::refusal::Refusal;
use super::sender_id::{CountedSenders, SenderId};
use crate::mesh::Mesh;
use crate::wire::{EventType, Kind, Memory};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The attribute of a step's end that has how many steps it stands for, where a sender marks one in a number; and the most that
/// are counted.
const STEPS: &str = "steps";
const MOST_STEPS: u64 = 1 << 16;

/// A step, phase or layer that has begun and not ended.
#[derive(Debug, Clone)]
pub struct Open {
    /// Step, phase or layer.
    pub kind: Kind,
    /// Its name.
    pub name: Arc<str>,
    /// The step that it belongs to.
    pub step: Option<u64>,
    /// When it began, nanoseconds of the timeline.
    pub begin_ns: i64,
    /// Allocator counters at its begin.
    pub memory: Option<Memory>,
    /// What else the job sent at its begin.
    pub attributes: Option<Attributes>,
    /// Who began it.
    pub by: Option<SenderId>,
    /// Its reservation on its owner's account. It is kept after the end too, until this has been joined with memory.
    pub held: Option<Reservation>,
    /// The reservation of its phase's series, if it is the first phase of its name.
    pub series: Option<SeriesPlace>,
}

impl Open {
    /// A copy without its attributes and reservations.
    #[must_use]
    pub fn bare(&self) -> Self {
        let (name, attributes, held, series) = (Arc::clone(&self.name), None, None, None);
        let &Self { kind, step, begin_ns, memory, by, .. } = self;
        Self { kind, name, step, begin_ns, memory, attributes, by, held, series }
    }
}

/// A phase's series and their bytes, on its owner's account.
pub type SeriesPlace = [Reservation; 2];

/// One process of a job.
#[derive(Debug)]
pub struct Rank {
    /// How many processes the job has.
    pub world_size: Option<u32>,
    /// Where it stands among them, as it last said.
    pub mesh: Option<Arc<Mesh>>,
    /// Positions of its GPUs, where known.
    pub gpus: Option<Arc<[usize]>>,
    /// The search for its GPUs.
    pub(super) search: Box<Search>,
    /// Its process id, if the socket's credentials have it.
    pub pid: Option<u32>,
    /// The newest event's time, nanoseconds of the timeline.
    pub last_event_ns: i64,
    /// When its last event arrived.
    pub last_heard_ns: i64,
    /// The last step's number.
    pub step: Option<u64>,
    /// The time of the event that had it, nanoseconds of the timeline.
    step_ns: i64,
    /// Steps that ended, with those that a marked one stands for.
    pub steps: u64,
    /// Allocator counters as last sent.
    pub memory: Memory,
    /// The most that its allocator had allocated and reserved since that was last read.
    most: Memory,
    /// The process that sent them.
    memory_pid: Option<u32>,
    /// The time of the last event that had them.
    memory_ns: i64,
    /// What is open, in the order of its begin.
    pub open: Vec<Open>,
    /// The last failed allocation that it marked. It stays after its end.
    pub oom: Option<Arc<FailedAllocation>>,
    /// The last time that it ran out of host memory. It stays after its end.
    pub host_oom: Option<Arc<HostOom>>,
    /// When its first event arrived, or the first after it had ended.
    pub since_ns: i64,
    /// When it ended. Then nothing of it is open, and it has no GPUs. Its next event reopens it.
    pub exited_ns: Option<i64>,
    sender_ids: CountedSenders,
    /// Who began its last step, and by which process.
    holder: Option<(SenderId, u32)>,
    pub(super) profiles: Profiles,
    /// Phases that have ended and have series of their own, each with its place on the owner's account.
    series: BTreeMap<Arc<str>, Option<SeriesPlace>>,
    /// The rank's place and its bytes on its owner's account.
    held: [Reservation; 2],
}

/// What an event will do to its rank. All checks have passed, so that applying it cannot fail.
#[derive(Debug)]
pub(super) enum Plan {
    /// It begins something.
    Begin,
    /// It ends what is open at this position.
    End(usize),
    /// It marks an instant.
    Mark,
    /// It ends the rank.
    Exit,
}

/// What something that begins takes on its owner's account.
#[derive(Debug)]
pub(super) struct Taking {
    pub held: Option<Reservation>,
    pub series: Option<SeriesPlace>,
}

/// What an event ended, and what it left without an end.
#[derive(Debug, Default)]
pub(super) struct Closed {
    pub ended: Option<Open>,
    /// Open things that a new begin replaced.
    pub superseded: u64,
    /// Open things whose step ended before them.
    pub step_ended: u64,
    /// Open things whose rank ended before them.
    pub exited: u64,
    /// What was open when its rank ended, or the phases in which an allocation of it failed: some never end.
    pub cut: Vec<Open>,
    /// The GPUs that the rank had until it ended.
    pub gpus: Option<Arc<[usize]>>,
    /// Records of layers of a step that has begun again.
    pub records_dropped: u64,
}

impl Rank {
    /// A rank that takes these on its owner's account.
    pub(super) fn new(held: [Reservation; 2], now_ns: i64) -> Self {
        Self {
            world_size: None,
            mesh: None,
            gpus: None,
            search: Box::default(),
            pid: None,
            last_event_ns: i64::MIN,
            last_heard_ns: i64::MIN,
            step: None,
            step_ns: i64::MIN,
            steps: 0,
            memory: Memory::default(),
            most: Memory::default(),
            memory_pid: None,
            memory_ns: i64::MIN,
            open: Vec::new(),
            oom: None,
            host_oom: None,
            since_ns: now_ns,
            exited_ns: None,
            sender_ids: CountedSenders::default(),
            holder: None,
            profiles: Profiles::default(),
            series: BTreeMap::new(),
            held,
        }
    }

    /// The most that its allocator had allocated and reserved since this was last called; what it last said if it has said nothing since.
    /// Nothing where another process sent it than the one that speaks for the rank now.
    pub(super) fn take_most(&mut self) -> Memory {
        let most = std::mem::take(&mut self.most);
        if self.memory_pid == self.pid { merge(self.memory, most) } else { Memory::default() }
    }

    /// The pod of the process that sent its first event, by the control group; `None` if it is in none, or that was not known.
    #[must_use]
    pub fn pod(&self) -> Option<&Pod> {
        match &self.account().owner {
            Owner::User { within: Within::Pod(pod), .. } => Some(pod),
            _ => None,
        }
    }

    /// The account of its owner.
    pub(super) fn account(&self) -> &Arc<Account> {
        self.held[0].account()
    }

    /// Whether this phase has series of its own, or will have them when it ends.
    pub(super) fn has_series(&self, phase: &str) -> bool {
        let is_open = || self.open.iter().any(|open| open.kind == Kind::Phase && &*open.name == phase);
        self.series.contains_key(phase) || is_open()
    }

    /// The process that began the rank's last step, if it is another one than the event's and is still counted on. Such
    /// a begin of a step must not replace it. `None` for all other events: processes may share the phases of a rank
    /// within a step, as its data loaders do.
    pub(super) fn held_against(&self, event: &Event) -> Option<u32> {
        let (sender_id, holder) = self.holder.filter(|_| self.exited_ns.is_none() && makes_holder(event))?;
        let is_other = event.pid.is_some_and(|pid| pid != holder);
        (is_other && self.sender_ids.counts_on(sender_id)).then_some(holder)
    }

    /// Whether this sender is counted on for the rank.
    pub(super) fn counts_on(&self, sender_id: SenderId) -> bool {
        self.sender_ids.counts_on(sender_id)
    }

    /// The process that began its last step.
    pub(super) fn holder_pid(&self) -> Option<u32> {
        self.holder.map(|(_, pid)| pid)
    }

    pub(super) fn is_held_by(&self, pid: u32) -> bool {
        self.holder.is_some_and(|(_, holder)| holder == pid)
    }

    /// The step that is open.
    #[must_use]
    pub fn open_step(&self) -> Option<&Open> {
        self.open.iter().find(|open| open.kind == Kind::Step)
    }

    /// The layers of its last profiled step that is over.
    #[must_use]
    pub fn profile(&self) -> Option<&Arc<Profile>> {
        self.profiles.whole()
    }

    /// Whether a layer's record comes after the end of its step's profile.
    pub(super) fn is_late(&self, record: &Event) -> bool {
        self.profiles.is_late(self.step_of(record), self.open_step().map(|open| open.step))
    }

    /// The step that a layer's record belongs to.
    pub(super) fn step_of(&self, record: &Event) -> Option<u64> {
        record.step.or_else(|| self.current_step())
    }

    /// The number of the step that is open, or else of the last one.
    fn current_step(&self) -> Option<u64> {
        self.open_step().map_or(self.step, |open| open.step)
    }

    /// What an event would do.
    ///
    /// # Errors
    /// Why it is refused.
    pub(super) fn plan(&self, event: &Event, most_open: usize) -> Result<Plan, Refusal> {
        match event.event {
            EventType::Mark => Ok(Plan::Mark),
            EventType::Exit => Ok(Plan::Exit),
            EventType::Begin => {
                let replaced = self.replaced_by(event);
                let kept = self.open.iter().enumerate().filter(|(position, open)| !replaced(*position, open)).count();
                if kept < most_open { Ok(Plan::Begin) } else { Err(Refusal::TooManyOpen(most_open)) }
            }
            EventType::End => self.plan_end(event),
        }
    }

    /// What the first event of a rank would do, which is no end and no exit.
    pub(super) fn plan_first(event: &Event) -> Plan {
        if event.event == EventType::Begin { Plan::Begin } else { Plan::Mark }
    }

    fn plan_end(&self, event: &Event) -> Result<Plan, Refusal> {
        let matches = |open: &Open| {
            let same_step = event.step.is_none() || open.step.is_none() || event.step == open.step;
            open.kind == event.kind && same_step && (event.kind == Kind::Step || *open.name == *event.name)
        };
        let what = || describe(event);
        let position = self.open.iter().rposition(matches).ok_or_else(|| Refusal::EndWithoutBegin(what()))?;
        let begin_ns = self.open.get(position).map_or(event.at_ns, |open| open.begin_ns);
        if event.at_ns < begin_ns {
            return Err(Refusal::EndBeforeBegin { what: what(), by_ns: begin_ns - event.at_ns });
        }
        Ok(Plan::End(position))
    }

    /// Which of the open things a begin replaces. A step replaces the open step and everything begun after it, because they will
    /// never end; what was begun before the open step stays. A phase or layer replaces the open one of its name.
    fn replaced_by<'a>(&self, event: &'a Event) -> impl Fn(usize, &Open) -> bool + use<'a> {
        let last_step = self.open.iter().position(|open| open.kind == Kind::Step).unwrap_or(usize::MAX);
        move |position, open| match event.kind {
            Kind::Step => position >= last_step,
            kind => open.kind == kind && *open.name == *event.name,
        }
    }

    /// Applies the plan of an event that arrived at `now_ns`; `name` is the shared copy of the event's name.
    pub(super) fn take(&mut self, event: &Event, name: Arc<str>, plan: Plan, place: Taking, now_ns: i64) -> Closed {
        self.last_heard_ns = now_ns;
        if self.exited_ns.take().is_some() {
            self.since_ns = now_ns;
        }
        // A step's layers are known when it ends, when the next one begins, or when there will be no more of it.
        let mut records_dropped = 0;
        match (event.event, event.kind) {
            (EventType::Begin, Kind::Step) => {
                let open = self.open_step().map(|open| open.step);
                records_dropped = self.profiles.begin_step(event.step, open);
            }
            (EventType::Exit, _) | (EventType::End, Kind::Step) => self.profiles.end_step(),
            _ => {}
        }
        let closed = match plan {
            Plan::Exit => return self.exit(now_ns),
            Plan::Mark if is_failed_allocation(event) => Closed { cut: self.open_phases(), ..Closed::default() },
            Plan::Mark => Closed::default(),
            Plan::Begin => Closed { records_dropped, ..self.begin(event, name, place) },
            Plan::End(position) => self.end(event, position),
        };
        self.world_size = event.world_size.or(self.world_size);
        if let Some(mesh) = event.mesh.as_ref().filter(|mesh| self.mesh.as_deref() != Some(mesh)) {
            self.mesh = Some(Arc::new(mesh.clone()));
        }
        if event.pid.is_some() && self.pid.is_some() && event.pid != self.pid {
            // The job was started anew, perhaps elsewhere; or another process of the rank speaks.
            self.gpus = None;
            self.most = Memory::default();
        }
        self.pid = event.pid.or(self.pid);
        if makes_holder(event) {
            self.holder = event.sender_id().zip(event.pid);
        }
        if is_failed_allocation(event) {
            self.oom = Some(Arc::new(self.failed_allocation(event)));
        }
        if is_host_oom(event) {
            self.host_oom = Some(Arc::new(self.out_of_host_memory(event)));
        }
        self.last_event_ns = self.last_event_ns.max(event.at_ns);
        // A late event does not replace newer values: counters would fall.
        if let Some(step) = event.step.filter(|_| event.at_ns >= self.step_ns) {
            (self.step, self.step_ns) = (Some(step), event.at_ns);
        }
        if let Some(memory) = event.memory {
            let is_newest = event.at_ns >= self.memory_ns;
            self.memory = if is_newest { merge(self.memory, memory) } else { merge(memory, self.memory) };
            self.memory_ns = self.memory_ns.max(event.at_ns);
            self.memory_pid = event.pid.or(self.pid);
            self.most.allocated = self.most.allocated.max(memory.allocated);
            self.most.reserved = self.most.reserved.max(memory.reserved);
        }
        closed
    }

    /// What a mark of a failed allocation says, and where the rank was.
    fn failed_allocation(&self, mark: &Event) -> FailedAllocation {
        let count = self.oom.as_ref().map_or(0, |before| before.count) + 1;
        let (step, phase, gpus) = self.place_of(mark);
        FailedAllocation { count, step, phase, gpus, pid: mark.pid.or(self.pid), ..FailedAllocation::of(mark) }
    }

    /// What a mark of missing host memory says, and where the rank was.
    fn out_of_host_memory(&self, mark: &Event) -> HostOom {
        let count = self.host_oom.as_ref().map_or(0, |before| before.count) + 1;
        let (step, phase, gpus) = self.place_of(mark);
        let oom = HostOom::of(mark);
        // Where it is by now is not where it was.
        let (step, phase) = if oom.is_late() { (None, None) } else { (step, phase) };
        HostOom { count, step, phase, gpus, ..oom }
    }

    /// The step, the innermost phase and the GPUs of the rank at a mark.
    fn place_of(&self, mark: &Event) -> (Option<u64>, Option<Arc<str>>, Box<[usize]>) {
        let phase = self.open.iter().rev().find(|open| open.kind == Kind::Phase);
        let gpus = mark.gpus.as_deref().or(self.gpus.as_deref()).unwrap_or_default();
        (self.step_of(mark), phase.map(|open| Arc::clone(&open.name)), gpus.into())
    }

    /// Takes the rank's GPUs and its place from an event.
    pub(super) fn locate(&mut self, event: &Event, now_ns: i64) {
        let note = |attributes| self.search.note(attributes, event.pid);
        if event.attributes.as_ref().is_some_and(note) && !self.search.named {
            self.gpus = None;
        }
        if let Some(gpus) = &event.gpus {
            self.search.named = true;
            if self.gpus.as_deref() != Some(gpus) {
                self.gpus = Some(gpus.as_slice().into());
            }
        }
        self.search.named &= self.gpus.is_some();
        self.search.since_ns = if self.gpus.is_some() { None } else { self.search.since_ns.or(Some(now_ns)) };
    }

    fn begin(&mut self, event: &Event, name: Arc<str>, place: Taking) -> Closed {
        let (before, replaced) = (self.open.len(), self.replaced_by(event));
        let (mut position, mut place) = (0, place);
        self.open.retain_mut(|open| {
            position += 1;
            let is_replaced = replaced(position - 1, open);
            if is_replaced && event.kind == Kind::Phase {
                // The same phase, begun again.
                place.series = place.series.take().or(open.series.take());
            }
            !is_replaced
        });
        let superseded = (before - self.open.len()) as u64;
        let step = event.step.or_else(|| if event.kind == Kind::Step { None } else { self.current_step() });
        let (memory, attributes) = (event.memory, event.attributes.clone());
        let (Taking { held, series }, kind, begin_ns) = (place, event.kind, event.at_ns);
        let by = event.sender_id();
        self.open.push(Open { kind, name, step, begin_ns, memory, attributes, by, held, series });
        Closed { superseded, ..Closed::default() }
    }

    /// Ends the rank. What is known of it is still shown for a while; its GPUs are free for others.
    fn exit(&mut self, now_ns: i64) -> Closed {
        self.exited_ns = Some(now_ns);
        (self.search, self.sender_ids, self.holder) = (Box::default(), CountedSenders::default(), None);
        self.most = Memory::default();
        let exited = self.open.len() as u64;
        let mut cut: Vec<Open> = self.open.drain(..).filter(|open| open.kind != Kind::Layer).collect();
        // As if each had ended: phases before their step.
        cut.sort_by_key(|open| open.kind == Kind::Step);
        cut.iter_mut().filter(|open| open.kind == Kind::Phase).for_each(|phase| keep_series(&mut self.series, phase));
        Closed { exited, cut, gpus: self.gpus.take(), ..Closed::default() }
    }

    /// Copies of the phases that are open.
    fn open_phases(&mut self) -> Vec<Open> {
        let phases = self.open.iter_mut().filter(|open| open.kind == Kind::Phase);
        let copied = phases.map(|phase| {
            keep_series(&mut self.series, phase);
            phase.bare()
        });
        copied.collect()
    }

    /// Notes the sender of an event. Returns the sender if it was just promoted: it sent two events in a row.
    pub(super) fn heard(&mut self, sender_id: Option<SenderId>) -> Option<SenderId> {
        if self.exited_ns.is_some() { None } else { self.sender_ids.heard(sender_id) }
    }

    /// Notes that a sender has ended. Returns whether the rank has ended with it: no other sender is counted on, and none
    /// has begun what is open.
    pub(super) fn ends_with(&mut self, ended: SenderId) -> bool {
        self.sender_ids.ended(ended) && self.open.iter().all(|open| open.by == Some(ended))
    }

    fn end(&mut self, event: &Event, position: usize) -> Closed {
        let mut ended = self.open.remove(position);
        let mut closed = Closed::default();
        if event.kind == Kind::Step {
            closed.step_ended = self.open.len().saturating_sub(position) as u64;
            self.open.truncate(position);
            self.steps += event.number(STEPS).unwrap_or(1).clamp(1, MOST_STEPS);
        } else if event.kind == Kind::Phase {
            keep_series(&mut self.series, &mut ended);
        }
        ended.attributes = joined(ended.attributes.take(), event.attributes.as_ref());
        closed.ended = Some(ended);
        closed
    }
}

/// Leaves the series of a phase that is open with its rank.
fn keep_series(all: &mut BTreeMap<Arc<str>, Option<SeriesPlace>>, phase: &mut Open) {
    let series = phase.series.take();
    all.entry(Arc::clone(&phase.name)).or_insert(series);
}

/// Whether the process that sends this holds the rank from now on.
fn makes_holder(event: &Event) -> bool {
    (event.event, event.kind) == (EventType::Begin, Kind::Step)
}

fn describe(event: &Event) -> String {
    let step = event.step.map(|step| format!(" of step {step}")).unwrap_or_default();
    match event.kind {
        Kind::Step => event.step.map_or_else(|| "a step".to_owned(), |step| format!("step {step}")),
        Kind::Phase => format!("phase `{}`{step}", event.name),
        Kind::Layer => format!("layer `{}`{step}", event.name),
    }
}

/// The newer counters, with the older ones where the newer event has none.
fn merge(old: Memory, new: Memory) -> Memory {
    Memory {
        allocated: new.allocated.or(old.allocated),
        reserved: new.reserved.or(old.reserved),
        active: new.active.or(old.active),
        inactive_split: new.inactive_split.or(old.inactive_split),
        alloc_retries: new.alloc_retries.or(old.alloc_retries),
        ooms: new.ooms.or(old.ooms),
    }
}
