//! The one way in for annotations, from either door: parse, check, take, count, answer.

use super::event::{Context, Event};
use super::gpus::Gpus;
use super::jobs::Jobs;
use super::limits::Limits;
use super::log::{EventLog, LogLimits};
use super::peer::Peers;
use super::place::Search;
use super::refusal::{Outcome, OutcomeCounts, Refusal};
use super::wire::{Annotation, EventType, Kind};
use crate::clock::Clock;
use crate::kubelet::{Container, Home, Kubelet};
use crate::sample::{OnGpus, Processes};
use crate::source::Device;
use arc_swap::ArcSwapOption;
use serde::Serialize;
use serde_json::value::RawValue;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Refusals that one answer lists; the others are counted in it.
const MOST_LISTED: usize = 100;

/// What is told of one batch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// Events taken.
    pub accepted: usize,
    /// Events refused.
    pub refused: usize,
    /// Why, by index; the first hundred.
    pub refusals: Vec<Refused>,
}

/// One refused event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// Its position in the batch, from 0.
    pub index: usize,
    /// The reason as the counter's label has it.
    pub reason: &'static str,
    /// What is wrong with it.
    pub detail: String,
}

/// Hears of each mark when it is taken. It runs on the thread of the door, so it must not wait.
pub type MarkListener = Box<dyn Fn(&Event) + Send + Sync>;

/// Takes annotations from any number of threads.
pub struct Intake {
    limits: Limits,
    clock: Arc<dyn Clock>,
    jobs: Mutex<Jobs>,
    peers: Mutex<Peers>,
    gpus: ArcSwapOption<Gpus>,
    processes: Arc<Processes>,
    kubelet: Option<Arc<Kubelet>>,
    /// Whether it was told that the kubelet and the driver do not agree.
    told_unknown: AtomicBool,
    log: EventLog,
    on_mark: OnceLock<MarkListener>,
    /// How many events had each outcome.
    pub counts: OutcomeCounts,
}

impl Intake {
    /// An intake that knows no GPUs yet.
    #[must_use]
    pub fn new(limits: Limits, clock: Arc<dyn Clock>, processes: Arc<Processes>) -> Self {
        Self {
            limits,
            clock,
            jobs: Mutex::new(Jobs::new(limits)),
            peers: Mutex::default(),
            gpus: ArcSwapOption::empty(),
            processes,
            kubelet: None,
            told_unknown: AtomicBool::new(false),
            log: EventLog::default(),
            on_mark: OnceLock::new(),
            counts: OutcomeCounts::default(),
        }
    }

    /// The same, which also keeps the last events as they were taken.
    #[must_use]
    pub fn with_log(mut self, limits: LogLimits) -> Self {
        self.log = EventLog::new(limits);
        self
    }

    /// The same, which also asks the kubelet which GPUs the senders' containers have.
    #[must_use]
    pub fn with_kubelet(mut self, kubelet: Option<Arc<Kubelet>>) -> Self {
        self.peers = Mutex::new(Peers::with_kubelet(kubelet.clone()));
        self.kubelet = kubelet;
        self
    }

    /// The last events that were taken.
    #[must_use]
    pub fn log(&self) -> &EventLog {
        &self.log
    }

    /// From now on this hears of each mark. Only the first call counts.
    pub fn on_mark(&self, listener: MarkListener) {
        // Refused where there is a listener already, which goes on.
        let _ = self.on_mark.set(listener);
    }

    /// From now on jobs' names for GPUs mean these, and positions are theirs.
    pub fn set_devices(&self, devices: &[Device]) {
        self.gpus.store(Some(Arc::new(Gpus::new(devices))));
        if self.jobs().set_devices(devices.iter().map(|device| device.uuid.clone()).collect()) {
            self.log.clear(self.clock.now_ns());
        }
    }

    /// The jobs. Held for microseconds, by intake, attribution and scrapes, never by the sampler.
    pub fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a JSON object, a JSON array of objects, or one object a line. Events of one batch are taken in the order
    /// of their times; `pid` is the sender, where the socket told it.
    pub fn take_json(&self, body: &[u8], pid: Option<u32>) -> Answer {
        let mut answer = Answer::default();
        let now = self.now(pid);
        match serde_json::from_slice::<Annotation>(body) {
            Ok(annotation) => self.take_one(0, Ok(annotation), &now, &mut answer),
            Err(error) => {
                let mut batch = split(body, &error);
                if batch.len() > 1 {
                    let arrived = now.at_ns.saturating_add(now.unix_shift_ns);
                    let time = |raw: &Annotation| raw.time_unix_nano.unwrap_or(arrived);
                    batch.sort_by_key(|(_, parsed)| parsed.as_ref().map_or(i64::MIN, time));
                }
                for (index, parsed) in batch {
                    self.take_one(index, parsed, &now, &mut answer);
                }
            }
        }
        answer
    }

    /// Takes one annotation that needs no parsing: a replay's.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn take(&self, annotation: Annotation, pid: Option<u32>) -> Result<(), Refusal> {
        let taken = self.check_and_take(annotation, &self.now(pid));
        self.counts.count(taken.as_ref().map_or_else(Refusal::outcome, |outcome| *outcome));
        taken.map(|_| ())
    }

    /// Counts what could not even be read: a datagram that was too long.
    pub fn refuse(&self, refusal: &Refusal) {
        self.counts.count(refusal.outcome());
    }

    fn take_one(&self, index: usize, parsed: Result<Annotation, String>, now: &Arrival, answer: &mut Answer) {
        let taken = parsed.map_err(Refusal::Malformed).and_then(|raw| self.check_and_take(raw, now));
        match taken {
            Ok(outcome) => {
                self.counts.count(outcome);
                answer.accepted += 1;
            }
            Err(refusal) => {
                self.counts.count(refusal.outcome());
                answer.refused += 1;
                if answer.refusals.len() < MOST_LISTED {
                    let (reason, detail) = (refusal.outcome().label(), refusal.to_string());
                    answer.refusals.push(Refused { index, reason, detail });
                }
            }
        }
    }

    /// The moment at which a batch of this sender arrives.
    fn now(&self, pid: Option<u32>) -> Arrival {
        Arrival { at_ns: self.clock.now_ns(), unix_shift_ns: self.clock.unix_shift_ns(), pid }
    }

    fn check_and_take(&self, raw: Annotation, arrival: &Arrival) -> Result<Outcome, Refusal> {
        let gpus = self.gpus.load();
        let (now_ns, pid) = (arrival.at_ns, arrival.pid);
        let unix_shift_ns = arrival.unix_shift_ns;
        let context = Context { limits: &self.limits, gpus: gpus.as_deref(), now_ns, unix_shift_ns, pid };
        let (job, rank) = if raw.job.is_none() { self.peer_job(pid, now_ns) } else { (None, None) };
        let event = context.check(raw, job, rank)?;
        let (out_of_order, search) = {
            let mut jobs = self.jobs();
            let out_of_order = jobs.take(&event, now_ns)?;
            if let Some(listed) = self.listed_at(&event, &jobs) {
                jobs.set_listed(&event.job, event.rank, &listed);
            }
            (out_of_order, jobs.search(&event.job, event.rank))
        };
        self.log.note(&event, now_ns);
        if event.event == EventType::Mark
            && let Some(listener) = self.on_mark.get()
        {
            listener(&event);
        }
        let mut knows_gpus = search.is_none();
        // Looked for without the jobs, because it may read another process's environment.
        if let Some(search) = search
            && let Some(found) = self.find_gpus(&event, &search, gpus.as_deref(), now_ns)
        {
            self.jobs().set_found(&event.job, event.rank, &search, &found.into());
            knows_gpus = true;
        }
        Ok(match (out_of_order, knows_gpus) {
            (true, _) => Outcome::AcceptedOutOfOrder,
            (false, true) => Outcome::Accepted,
            (false, false) => Outcome::AcceptedWithoutGpu,
        })
    }

    /// At the begin of a step, or of what is in no step, the GPUs on which the driver lists the sender: a process may have
    /// begun on one and spread over several since.
    fn listed_at(&self, event: &Event, jobs: &Jobs) -> Option<OnGpus> {
        let pid = event.pid.filter(|_| event.event == EventType::Begin)?;
        let begins = event.kind == Kind::Step || !jobs.is_in_step(&event.job, event.rank);
        begins.then(|| self.processes.listed_on(pid)).flatten()
    }

    fn peer_job(&self, pid: Option<u32>, now_ns: i64) -> (Option<String>, Option<u32>) {
        let Some(pid) = pid else { return (None, None) };
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = peers.get(pid, now_ns);
        (peer.job.clone(), peer.rank)
    }

    /// The GPUs of a rank that has named none: those that the driver sees its process on, or the one that its
    /// container, its visible devices and its local rank point to, by its events or its process.
    fn find_gpus(&self, event: &Event, search: &Search, gpus: Option<&Gpus>, now_ns: i64) -> Option<Vec<usize>> {
        if let Some(found) = event.pid.and_then(|pid| self.processes.gpus_of(pid)) {
            return Some(found);
        }
        let gpus = gpus?;
        let peer = event.pid.map(|pid| {
            let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.get(pid, now_ns).clone()
        });
        let peer = peer.unwrap_or_default();
        let place = search.place_of(event.pid, peer.place);
        let since_ns = search.since_ns.unwrap_or(now_ns);
        let asked = |kubelet: &Kubelet, container: &Container, since_ns: i64| {
            self.positions(gpus, &kubelet.gpus_of(container, since_ns, now_ns).unwrap_or_default())
        };
        let given = match (&self.kubelet, &peer.home, place.container()) {
            (None, ..) | (Some(_), Home::Host, None) => None,
            // What the kernel tells of the sender goes before what the sender tells of itself.
            (Some(kubelet), Home::Container(container), _) => Some(asked(kubelet, container, peer.since_ns)),
            (Some(kubelet), _, Some(container)) => Some(asked(kubelet, &container, since_ns)),
            // In which container is not known, so that no index tells anything.
            (Some(_), Home::Unknown, None) => Some(Vec::new()),
        };
        let found = gpus.visible(place.visible_devices.as_deref(), place.local_rank, given.as_deref())?;
        Some(vec![found])
    }

    /// The GPUs that a container was given. None where one of them is not this node's as the driver tells it: which of
    /// the others an index means is not known then.
    fn positions(&self, gpus: &Gpus, uuids: &[String]) -> Vec<usize> {
        gpus.with_uuids(uuids).unwrap_or_else(|unknown| {
            if !self.told_unknown.swap(true, Ordering::Relaxed) {
                tracing::warn!(uuid = unknown, "the kubelet gave a container a GPU that the driver does not show");
            }
            Vec::new()
        })
    }
}

/// When a batch arrived, and from whom.
struct Arrival {
    at_ns: i64,
    unix_shift_ns: i64,
    pid: Option<u32>,
}

/// The events of a body that is not one valid event: of an array, or one a line. `whole` is what was wrong with the
/// body as one event.
fn split(body: &[u8], whole: &serde_json::Error) -> Vec<(usize, Result<Annotation, String>)> {
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'[') {
        return match serde_json::from_slice::<Vec<&RawValue>>(body) {
            Ok(elements) => elements.into_iter().map(|element| parse(element.get().as_bytes())).enumerate().collect(),
            Err(error) => vec![(0, Err(error.to_string()))],
        };
    }
    let is_blank = |line: &[u8]| line.iter().all(u8::is_ascii_whitespace);
    let mut lines = body.split(|byte| *byte == b'\n').filter(|line| !is_blank(line));
    // One object over several lines is one event, whose fault is known already.
    if serde_json::from_slice::<&RawValue>(body).is_ok() || lines.clone().nth(1).is_none() {
        return vec![(0, Err(whole.to_string()))];
    }
    lines.by_ref().map(parse).enumerate().collect()
}

fn parse(json: &[u8]) -> Result<Annotation, String> {
    serde_json::from_slice(json).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
