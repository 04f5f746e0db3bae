//! One process of one job: what it has open, and what its events mean.

use super::event::{Attributes, Event};
use super::place::Search;
use super::refusal::Refusal;
use super::stats::{DURATION_BOUNDS_S, PhaseStats};
use super::wire::{EventType, Kind, Memory};
use crate::metrics::histogram::Durations;
use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// What else the job told at its begin.
    pub attributes: Option<Attributes>,
}

/// One process of a job.
#[derive(Debug)]
pub struct Rank {
    /// How many processes the job has.
    pub world_size: Option<u32>,
    /// Positions of its GPUs, where known.
    pub gpus: Option<Arc<[usize]>>,
    /// The search for its GPUs.
    pub(super) search: Box<Search>,
    /// Its process id, where the socket told it.
    pub pid: Option<u32>,
    /// The newest event's time, nanoseconds of the timeline.
    pub last_event_ns: i64,
    /// When its last event arrived.
    pub last_heard_ns: i64,
    /// The last step's number.
    pub step: Option<u64>,
    /// When the event was that told it, nanoseconds of the timeline.
    step_ns: i64,
    /// Steps that ended.
    pub steps: u64,
    /// Their durations.
    pub step_durations: Durations,
    /// Allocator counters as last told.
    pub memory: Memory,
    /// When the last event was that told of them.
    memory_ns: i64,
    /// Memory of its process outside the allocator, at the end of the last phase that told, bytes.
    pub outside_allocator_bytes: Option<u64>,
    /// What is open, in the order of its begin.
    pub open: Vec<Open>,
    /// Phases by name.
    pub phases: BTreeMap<Arc<str>, PhaseStats>,
}

/// What an event ended, and what it left without an end.
#[derive(Debug, Default)]
pub(super) struct Closed {
    pub ended: Option<Open>,
    /// Open things that a new begin replaced.
    pub superseded: u64,
    /// Open things whose step ended before them.
    pub step_ended: u64,
}

impl Rank {
    pub(super) fn new() -> Self {
        Self {
            world_size: None,
            gpus: None,
            search: Box::default(),
            pid: None,
            last_event_ns: i64::MIN,
            last_heard_ns: i64::MIN,
            step: None,
            step_ns: i64::MIN,
            steps: 0,
            step_durations: Durations::new(DURATION_BOUNDS_S),
            memory: Memory::default(),
            memory_ns: i64::MIN,
            outside_allocator_bytes: None,
            open: Vec::new(),
            phases: BTreeMap::new(),
        }
    }

    /// Phases that have series of their own, or will have them when they end.
    pub(super) fn series(&self) -> usize {
        let is_new = |open: &&Open| open.kind == Kind::Phase && !self.phases.contains_key(&open.name);
        self.phases.len() + self.open.iter().filter(is_new).count()
    }

    /// Whether this phase is one of them.
    pub(super) fn has_series(&self, phase: &str) -> bool {
        let is_open = || self.open.iter().any(|open| open.kind == Kind::Phase && &*open.name == phase);
        self.phases.contains_key(phase) || is_open()
    }

    /// The step that is open.
    #[must_use]
    pub fn open_step(&self) -> Option<&Open> {
        self.open.iter().find(|open| open.kind == Kind::Step)
    }

    /// The number of the step that is open, or else of the last one.
    fn current_step(&self) -> Option<u64> {
        self.open_step().map_or(self.step, |open| open.step)
    }

    /// Takes one event whose name is `name`; a refused one changes nothing.
    pub(super) fn take(&mut self, event: &Event, name: Arc<str>, most_open: usize) -> Result<Closed, Refusal> {
        let closed = match event.event {
            EventType::Mark => Closed::default(),
            EventType::Begin => self.begin(event, name, most_open)?,
            EventType::End => self.end(event, &name)?,
        };
        self.world_size = event.world_size.or(self.world_size);
        if event.pid.is_some() && self.pid.is_some() && event.pid != self.pid {
            // The job was started anew, perhaps elsewhere; or another process of the rank speaks.
            self.gpus = None;
            self.outside_allocator_bytes = None;
        }
        self.pid = event.pid.or(self.pid);
        self.last_event_ns = self.last_event_ns.max(event.at_ns);
        // What is told late is not the last that is known: counters would fall.
        if let Some(step) = event.step.filter(|_| event.at_ns >= self.step_ns) {
            (self.step, self.step_ns) = (Some(step), event.at_ns);
        }
        if let Some(memory) = event.memory {
            let is_newest = event.at_ns >= self.memory_ns;
            self.memory = if is_newest { merge(self.memory, memory) } else { merge(memory, self.memory) };
            self.memory_ns = self.memory_ns.max(event.at_ns);
        }
        Ok(closed)
    }

    /// Takes what an event tells of the rank's GPUs and of where it runs.
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

    fn begin(&mut self, event: &Event, name: Arc<str>, most_open: usize) -> Result<Closed, Refusal> {
        // A new step means that the last one will never end, nor anything in it; what was begun before goes on around it.
        let last_step = self.open.iter().position(|open| open.kind == Kind::Step).unwrap_or(usize::MAX);
        let replaced = |position: usize, open: &Open| match event.kind {
            Kind::Step => position >= last_step,
            kind => open.kind == kind && open.name == name,
        };
        let superseded = self.open.iter().enumerate().filter(|(position, open)| replaced(*position, open)).count();
        if self.open.len() - superseded >= most_open {
            return Err(Refusal::TooManyOpen(most_open));
        }
        let mut position = 0;
        self.open.retain(|open| {
            position += 1;
            !replaced(position - 1, open)
        });
        let step = event.step.or_else(|| if event.kind == Kind::Step { None } else { self.current_step() });
        let (memory, attributes) = (event.memory, event.attributes.clone());
        self.open.push(Open { kind: event.kind, name, step, begin_ns: event.at_ns, memory, attributes });
        Ok(Closed { superseded: superseded as u64, ..Closed::default() })
    }

    fn end(&mut self, event: &Event, name: &Arc<str>) -> Result<Closed, Refusal> {
        let matches = |open: &Open| {
            let same_step = event.step.is_none() || open.step.is_none() || event.step == open.step;
            open.kind == event.kind && same_step && (event.kind == Kind::Step || open.name == *name)
        };
        let what = || describe(event);
        let position = self.open.iter().rposition(matches).ok_or_else(|| Refusal::EndWithoutBegin(what()))?;
        let begin_ns = self.open[position].begin_ns;
        if event.at_ns < begin_ns {
            return Err(Refusal::EndBeforeBegin { what: what(), by_ns: begin_ns - event.at_ns });
        }
        let ended = self.open.remove(position);
        let mut closed = Closed::default();
        if event.kind == Kind::Step {
            closed.step_ended = self.open.len().saturating_sub(position) as u64;
            self.open.truncate(position);
            self.steps += 1;
            self.step_durations.observe_ns(event.at_ns - begin_ns);
        } else if event.kind == Kind::Phase {
            self.phases.entry(Arc::clone(name)).or_default().durations.observe_ns(event.at_ns - begin_ns);
        }
        closed.ended = Some(ended);
        Ok(closed)
    }
}

fn describe(event: &Event) -> String {
    let step = event.step.map(|step| format!(" of step {step}")).unwrap_or_default();
    match event.kind {
        Kind::Step => event.step.map_or_else(|| "a step".to_owned(), |step| format!("step {step}")),
        Kind::Phase => format!("phase `{}`{step}", event.name),
        Kind::Layer => format!("layer `{}`{step}", event.name),
    }
}

/// The newer counters, with the older ones where the newer event told none.
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
