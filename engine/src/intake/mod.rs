//! Takes the annotations that jobs send: steps, phases, layers and marks, over HTTP and two Unix sockets. Every
//! endpoint uses [`Intake`]: parse, check, take, count, answer.
//!
//! Enters: JSON from untrusted peers. Leaves: jobs in the [`Ledger`]. Invariants: a bad event is refused alone, with a
//! reason that is counted; everything kept is limited by [`Limits`], in bytes per owner; no lock that senders share is
//! held while another process is read. Absent on purpose: memory, which is joined later.

mod answer;
mod batch;
mod complaints;
pub mod datagram;
mod ends;
#[cfg(all(any(test, feature = "fuzzing"), not(highwater_loom)))]
pub mod fuzzing;
mod log;
pub mod seqpacket;
mod speak;
pub mod split;
mod unlinked;

pub use answer::{Answer, Refused};
pub use batch::{Batch, MOST_BATCHED_BYTES};
pub use log::{EventLog, Extent, LogLimits};
pub use speak::{due, speak};

use crate::place::{Kubelet, LookupOutcome, Peer, Peers, Places};
use complaints::Complaints;
use ends::Ends;
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::{Device, OnGpus, Processes};
use highwater_core::jobs::{
    Account, Accounts, Context, Event, JobId, Jobs, Limits, Outcome, OutcomeCounts, Owner, Refusal, Reservation,
    Resource, Scope, Search, Sender, Shortage, Speaker, Taken as JobTaken, Within,
};
use highwater_core::phases::Ledger;
use highwater_core::wire::{Annotation, EventType, Kind};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use unlinked::Unlinked;

/// The longest time between two updates of time-dependent state, while events arrive.
const ADVANCE_NS: i64 = 100 * MILLISECOND_NS;
/// How often processes that could not be read in time are logged.
const LOG_NS: i64 = 60 * SECOND_NS;

/// Called for each mark when it is taken, on the endpoint's thread, so it must not wait.
pub type MarkListener = Box<dyn Fn(&Event) + Send + Sync>;

/// Gets the positions of the GPUs of each rank that sent an annotation, and when that arrived, nanoseconds of the
/// timeline.
pub type GpuListener = Box<dyn Fn(&[usize], i64) + Send + Sync>;

/// Takes annotations from any number of threads.
pub struct Intake {
    limits: Limits,
    clock: Arc<dyn Clock>,
    ledger: Arc<Ledger>,
    accounts: Accounts,
    places: Places,
    /// Twice the number of changes of the devices; odd during a change.
    devices: AtomicU64,
    peers: Peers<Parked>,
    /// Events that wait until the kubelet has linked their container.
    unlinked: Unlinked,
    /// The timeline for rates and deadlines, which continues when a recording has ended.
    live: Arc<dyn Clock>,
    /// When time-dependent state was last updated.
    advanced_ns: AtomicI64,
    /// When processes that could not be read in time were last logged.
    logged_overdue_ns: AtomicI64,
    /// A reference to itself, set when it has reader threads.
    itself: OnceLock<Weak<Intake>>,
    /// Bytes of the events that batches hold to put them in order.
    pub(super) batched_bytes: AtomicUsize,
    complaints: Mutex<Complaints>,
    log: EventLog,
    on_mark: OnceLock<MarkListener>,
    on_gpus: OnceLock<GpuListener>,
    /// Senders' processes that are watched for their end, set when an endpoint does so.
    ends: OnceLock<Ends>,
    /// How many events had each outcome.
    pub counts: OutcomeCounts,
}

impl Intake {
    /// An intake that knows no GPUs yet.
    #[must_use]
    pub fn new(limits: Limits, clock: Arc<dyn Clock>, processes: Arc<Processes>) -> Self {
        Self {
            limits,
            live: Arc::clone(&clock),
            clock,
            ledger: Arc::new(Ledger::new(limits)),
            accounts: Accounts::new(&limits),
            places: Places::new(processes),
            devices: AtomicU64::new(0),
            peers: Peers::default(),
            unlinked: Unlinked::default(),
            advanced_ns: AtomicI64::new(i64::MIN),
            logged_overdue_ns: AtomicI64::new(i64::MIN),
            itself: OnceLock::new(),
            batched_bytes: AtomicUsize::new(0),
            complaints: Mutex::default(),
            log: EventLog::default(),
            on_mark: OnceLock::new(),
            on_gpus: OnceLock::new(),
            ends: OnceLock::new(),
            counts: OutcomeCounts::default(),
        }
    }

    /// The same, which also keeps the last events.
    #[must_use]
    pub fn with_log(mut self, limits: LogLimits) -> Self {
        self.log = EventLog::new(limits);
        self
    }

    /// The same, which also asks the kubelet for the GPUs of senders' containers.
    #[must_use]
    pub fn with_kubelet(mut self, kubelet: Option<Arc<Kubelet>>) -> Self {
        self.places = self.places.with_kubelet(kubelet);
        self
    }

    /// The same, with this timeline for rates and deadlines: that of a recording stops at its end.
    #[must_use]
    pub fn with_live_clock(mut self, live: Arc<dyn Clock>) -> Self {
        self.live = live;
        self
    }

    /// The last events taken.
    #[must_use]
    pub fn log(&self) -> &EventLog {
        &self.log
    }

    /// Registers a listener for marks. Only the first call has an effect.
    pub fn on_mark(&self, listener: MarkListener) {
        // Refused if a listener exists, which stays.
        let _ = self.on_mark.set(listener);
    }

    /// Registers a listener for the GPUs of ranks that send annotations. Only the first call has an effect.
    pub fn on_gpus(&self, listener: GpuListener) {
        // Refused if a listener exists, which stays.
        let _ = self.on_gpus.set(listener);
    }

    /// Sets the devices that jobs' names for GPUs and positions refer to.
    pub fn set_devices(&self, devices: &[Device]) {
        self.devices.fetch_add(1, Ordering::SeqCst);
        self.places.set_devices(devices);
        let are_others = self.ledger.set_devices(devices.iter().map(|device| device.uuid.clone()).collect());
        self.devices.fetch_add(1, Ordering::SeqCst);
        if are_others {
            self.log.clear(self.clock.now_ns());
        }
    }

    /// The version of the devices that positions found now refer to; `None` during a change.
    fn devices_now(&self) -> Option<u64> {
        Some(self.devices.load(Ordering::SeqCst)).filter(|changes| changes % 2 == 0)
    }

    /// Whether positions found for the device version `those` are still valid. Call it under the jobs' lock, which a
    /// change of the devices takes too.
    fn are_still(&self, those: Option<u64>) -> bool {
        those.is_some() && self.devices_now() == those
    }

    /// The jobs, if positions found for the device version `those` are still valid.
    fn jobs_of(&self, those: Option<u64>) -> Option<MutexGuard<'_, Jobs>> {
        let jobs = self.jobs();
        self.are_still(those).then_some(jobs)
    }

    /// The state of all jobs.
    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The jobs with their open steps and phases.
    pub fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.ledger.open()
    }

    /// The resources that owners hold, and the owners whose events were refused.
    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Takes a JSON object, a JSON array of objects, or one object per line. Events of one batch are taken in the order
    /// of their times.
    pub fn take_json(&self, body: &[u8], sender: &Sender) -> Answer {
        let mut batch = Batch::begin(self, sender);
        batch.push_whole(body);
        batch.end()
    }

    /// Takes one annotation that needs no parsing, such as a replay's.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn take(&self, annotation: Annotation, sender: &Sender) -> Result<(), Refusal> {
        let arrival = self.arrival(sender);
        match self.check_and_take(annotation, &arrival) {
            Ok(outcome) => {
                outcome.into_iter().for_each(|accepted| self.counts.count(accepted.outcome));
                Ok(())
            }
            Err(refusal) => {
                self.refuse(&refusal, &arrival);
                Err(refusal)
            }
        }
    }

    /// Takes one event of a batch.
    pub(super) fn take_one(
        &self,
        index: usize,
        parsed: Result<Annotation, Refusal>,
        arrival: &Arrival,
        answer: &mut Answer,
    ) {
        match parsed.and_then(|raw| self.check_and_take(raw, arrival)) {
            Ok(outcome) => {
                if let Some(Accepted { outcome, apart }) = outcome {
                    self.counts.count(outcome);
                    answer.job = apart.map(|job| job.to_string()).or(answer.job.take());
                }
                answer.accepted += 1;
            }
            Err(refusal) => {
                self.refuse(&refusal, arrival);
                answer.refuse(index, &refusal);
            }
        }
    }

    /// Counts a refusal, and logs it with its sender.
    pub(super) fn refuse(&self, refusal: &Refusal, arrival: &Arrival) {
        self.counts.count(refusal.outcome());
        self.accounts.refused(&arrival.account.owner, 1);
        Complaints::refused(&self.complaints, &arrival.account.owner, arrival.sender.pid, refusal, arrival.live_ns);
    }

    /// Counts events that were refused unread.
    pub(super) fn refuse_unseen(&self, outcome: Outcome, events: u64, arrival: &Arrival) {
        if events > 0 {
            self.counts.add(outcome, events);
            self.accounts.refused(&arrival.account.owner, events);
        }
    }

    /// Counts a refusal of data that could not be read: a datagram that was too long.
    pub fn refuse_unread(&self, refusal: &Refusal, sender: &Sender) {
        self.refuse(refusal, &self.arrival(sender));
    }

    /// The moment at which a batch of this sender arrives.
    pub(super) fn arrival(&self, sender: &Sender) -> Arrival {
        let live_ns = self.live.now_ns();
        // The thread that calls `advance` regularly may be waiting for a driver.
        let advanced_ns = self.advanced_ns.load(Ordering::Relaxed);
        if live_ns.saturating_sub(advanced_ns) >= ADVANCE_NS {
            self.advance();
        }
        let (at_ns, unix_shift_ns) = (self.clock.now_ns(), self.clock.unix_shift_ns());
        let account = self.account_of(sender);
        let unlinked = match (&account.owner, sender.pid) {
            (Owner::User { within: Within::Unknown, .. }, Some(pid)) => self.places.unlinked(pid, live_ns),
            _ => None,
        };
        Arrival { at_ns, live_ns, unix_shift_ns, sender: *sender, account, unlinked }
    }

    /// Sets an arrival to now.
    pub(super) fn arrives_now(&self, arrival: &mut Arrival) {
        (arrival.at_ns, arrival.live_ns) = (self.clock.now_ns(), self.live.now_ns());
    }

    /// The account of a sender.
    pub(super) fn account_of(&self, sender: &Sender) -> Arc<Account> {
        let within =
            if sender.uid.is_some() { self.places.within(sender.pid, self.live.now_ns()) } else { Within::Node };
        self.accounts.of(&Owner::of(sender, within))
    }

    /// Updates time-dependent state: processes that take too long to read, and the owners that share the rate.
    pub fn advance(&self) {
        let now_ns = self.live.now_ns();
        self.advanced_ns.store(now_ns, Ordering::Relaxed);
        self.accounts.advance(now_ns);
        let overdue = self.peers.advance(now_ns);
        if let Some(pid) = overdue.pids.first()
            && now_ns.saturating_sub(self.logged_overdue_ns.load(Ordering::Relaxed)) >= LOG_NS
        {
            self.logged_overdue_ns.store(now_ns, Ordering::Relaxed);
            let processes = overdue.pids.len();
            tracing::warn!(
                pid,
                processes,
                "senders' processes could not be read in time; events are taken without the processes' environment"
            );
        }
        overdue.pids.iter().for_each(|pid| self.has_been_read(*pid));
        self.take_linked(now_ns);
        if overdue.needs_reader
            && let Some(intake) = self.itself.get().and_then(Weak::upgrade)
            && let Err(error) = intake.start_reader()
        {
            tracing::error!(%error, "cannot start another thread to read processes; retrying");
        }
    }

    /// Starts a thread that reads the processes of senders. Before the first call, the thread that needs a process
    /// reads it.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn start_reader(self: &Arc<Self>) -> std::io::Result<()> {
        self.peers.set_threaded();
        // Refused if it is set already.
        let _ = self.itself.set(Arc::downgrade(self));
        let intake = Arc::clone(self);
        // It may hang in another process forever, so it is never joined.
        crate::thread::spawn("hw-peer", move || {
            intake.peers.read_until_ended(|| intake.live.now_ns(), |pid| intake.has_been_read(pid));
        })
        .map(drop)
    }

    /// Ends the threads that read processes.
    pub fn end_readers(&self) {
        self.peers.end();
    }

    /// Takes the events that waited for a process, and looks for the GPUs of its ranks.
    fn has_been_read(&self, pid: u32) {
        self.peers.drain(pid, |peer, parked| parked.into_iter().for_each(|parked| self.take_parked(peer, parked)));
        let searches = self.jobs().searches_of(pid);
        for (job, rank, account, search) in searches {
            let devices = self.devices_now();
            if let Some(found) = self.find_gpus(Some(pid), &account, &search)
                && let Some(mut jobs) = self.jobs_of(devices)
            {
                jobs.set_found(&job, rank, &search, &found.into());
            }
        }
    }

    /// Takes what waited for a process that has been read.
    fn take_parked(&self, peer: &Arc<Peer>, parked: Parked) {
        match parked {
            Parked::Event { annotation, arrival, held } => {
                drop(held);
                self.has_been_taken(self.check_with(annotation, Some(peer), &arrival).map(Some), &arrival);
            }
            Parked::End { speaker, .. } => self.has_ended(speaker),
        }
    }

    /// Takes what waited for the kubelet to link its container, if that was done, or took too long.
    fn take_linked(&self, now_ns: i64) {
        if self.unlinked.is_empty() {
            return;
        }
        for container in self.unlinked.containers() {
            if !self.places.is_link_awaited(&container, now_ns) {
                self.take_unlinked(&container);
            }
        }
    }

    /// Takes what waited for the kubelet to link this container.
    fn take_unlinked(&self, container: &Arc<str>) {
        self.unlinked.drain(container, |parked| match parked {
            Parked::Event { annotation, arrival, held } => {
                drop(held);
                // The sender may belong to another account now, because its pod is known.
                let arrival = Arrival { account: self.account_of(&arrival.sender), ..arrival };
                self.has_been_taken(self.check_unless_parked(annotation, &arrival), &arrival);
            }
            Parked::End { pid, speaker, .. } => self.end_behind_reads(pid, speaker, parked),
        });
    }

    /// Counts the outcome of an event that waited.
    fn has_been_taken(&self, outcome: Result<Option<Accepted>, Refusal>, arrival: &Arrival) {
        match outcome {
            Ok(accepted) => accepted.into_iter().for_each(|accepted| self.counts.count(accepted.outcome)),
            Err(refusal) => self.refuse(&refusal, arrival),
        }
    }

    /// Ends a speaker once all that it sent before has been taken. `pid` is its process, `held` its reservation.
    fn has_ended_behind(&self, pid: Option<u32>, speaker: Speaker, held: Option<Reservation>) {
        let Some(pid) = pid else { return self.has_ended(speaker) };
        let mut end = Parked::End { pid, speaker, _held: held };
        if !self.unlinked.is_empty()
            && let Some(container) = self.places.container_id(pid, self.live.now_ns())
        {
            match self.unlinked.park(&container, false, end) {
                None => return,
                Some(returned) => end = returned,
            }
        }
        self.end_behind_reads(pid, speaker, end);
    }

    fn end_behind_reads(&self, pid: u32, speaker: Speaker, end: Parked) {
        if self.peers.park_behind(pid, end).is_some() {
            self.has_ended(speaker);
        }
    }

    /// Takes an annotation; `None` if it waits for its container to be linked, or for its sender's process to be read.
    fn check_and_take(&self, raw: Annotation, arrival: &Arrival) -> Result<Option<Accepted>, Refusal> {
        match self.wait_for_link(raw, arrival) {
            Some(raw) => self.check_unless_parked(raw, arrival),
            None => Ok(None),
        }
    }

    /// The annotation, unless it waits until it is known which pod its sender is in.
    fn wait_for_link(&self, raw: Annotation, arrival: &Arrival) -> Option<Annotation> {
        let awaited = arrival.unlinked.as_ref();
        if awaited.is_none() && self.unlinked.is_empty() {
            return Some(raw);
        }
        let behind = || self.places.container_id(arrival.sender.pid?, arrival.live_ns);
        let Some(container) = awaited.cloned().or_else(behind) else { return Some(raw) };
        if let Some(pid) = arrival.sender.pid {
            // Its environment is needed later. It is read now, because the process may end before its container is linked.
            self.peers.ask(pid, &arrival.account, arrival.live_ns, &mut None);
        }
        let (account, bytes) = (&arrival.account, size_of::<Parked>() + raw.weight());
        let raw = if account.may_hold(Resource::Bytes, bytes).is_ok() {
            let held = account.hold(Resource::Bytes, bytes);
            let parked = Parked::Event { annotation: raw, arrival: arrival.clone(), held };
            match self.unlinked.park(&container, awaited.is_some(), parked) {
                Some(Parked::Event { annotation, .. }) => annotation,
                None | Some(Parked::End { .. }) => return None,
            }
        } else {
            raw
        };
        // There is no room to park the event. All parked events of the container are taken first, so that it overtakes none.
        self.places.stop_waiting(&container);
        self.take_unlinked(&container);
        Some(raw)
    }

    /// Takes an annotation; `None` if it waits for its sender's process to be read.
    fn check_unless_parked(&self, raw: Annotation, arrival: &Arrival) -> Result<Option<Accepted>, Refusal> {
        let Some((raw, peer)) = self.peer_of(raw, arrival)? else { return Ok(None) };
        self.check_with(raw, peer.as_ref(), arrival).map(Some)
    }

    /// Takes an annotation with the information about its sender's process.
    fn check_with(&self, raw: Annotation, peer: Option<&Arc<Peer>>, arrival: &Arrival) -> Result<Accepted, Refusal> {
        let (devices, gpus) = (self.devices_now(), self.places.gpus());
        let (now_ns, sender, unix_shift_ns) = (arrival.at_ns, &arrival.sender, arrival.unix_shift_ns);
        let context = Context { limits: &self.limits, gpus: gpus.as_deref(), now_ns, unix_shift_ns, sender };
        let account = &arrival.account;
        let (job, rank) = if raw.job.is_none() { self.job_of(peer, arrival) } else { (None, None) };
        let lost = raw.lost;
        let mut event = context.check(raw, job, rank)?;
        if sender.pid == Some(std::process::id()) {
            // A simulated job, whose annotations the daemon itself sends over the socket.
            event.scope = Some(Scope::Daemon);
        }
        let (taken, mut gpus, search) = {
            let mut jobs = self.jobs();
            if !self.are_still(devices) {
                // The event's GPU positions refer to the previous devices, so they are dropped, as if there were no source. The
                // rank's next event that names GPUs sets them again.
                event.gpus = None;
            }
            let taken = match jobs.take(&event, account, now_ns) {
                Err(Refusal::Contested { holder, .. }) => self.take_contested(&mut jobs, &event, account, holder),
                taken => taken,
            }?;
            if let Some(listed) = self.listed_at(&event, &taken.job, &jobs) {
                jobs.set_listed(&taken.job, event.rank, &listed);
            }
            let (gpus, search) = (jobs.gpus_of(&taken.job, event.rank), jobs.search(&taken.job, event.rank));
            (taken, gpus, search)
        };
        // From here on it is an event of this job, regardless of its sender.
        event.scope = Some(taken.job.scope().clone());
        if let Some(lost) = lost.filter(|lost| *lost > 0) {
            self.accounts.lost(&account.owner, lost.into());
        }
        // Records of layers are hundreds in a step: recordings contain whole profiles instead.
        if event.layer.is_none() {
            self.log.note(&event, account, now_ns);
            if event.event == EventType::Mark
                && let Some(listener) = self.on_mark.get()
            {
                listener(&event);
            }
        }
        let mut knows_gpus = search.is_none();
        // Searched without the jobs' lock, which other senders wait for.
        if let Some(search) = search
            && let Some(found) = self.find_gpus(event.pid, account, &search)
            && let Some(mut jobs) = self.jobs_of(devices)
        {
            let found = found.into();
            jobs.set_found(&taken.job, event.rank, &search, &found);
            gpus = Some(found);
            knows_gpus = true;
        }
        if let (Some(gpus), Some(listener)) = (gpus, self.on_gpus.get()) {
            listener(&gpus, now_ns);
        }
        if let (Some(Speaker::Process(pid)), Some(ends)) = (taken.watch, self.ends.get()) {
            ends.watch(pid, account);
        }
        let outcome = match (taken.out_of_order, knows_gpus) {
            (true, _) => Outcome::AcceptedOutOfOrder,
            (false, true) => Outcome::Accepted,
            (false, false) => Outcome::AcceptedWithoutGpu,
        };
        let is_apart = **taken.job.name() != *event.job;
        Ok(Accepted { outcome, apart: is_apart.then(|| Arc::clone(taken.job.name())) })
    }

    /// Takes an event for a rank that another process holds. If that process still runs, the sender's events go to a job of
    /// their own.
    fn take_contested(
        &self,
        jobs: &mut Jobs,
        event: &Event,
        account: &Arc<Account>,
        holder: u32,
    ) -> Result<JobTaken, Refusal> {
        let now_ns = self.clock.now_ns();
        if !ends::is_running(holder) {
            // Its end has not been handled yet.
            self.end_process(jobs, holder, now_ns);
            return jobs.take(event, account, now_ns);
        }
        let taken = jobs.take_apart(event, account, now_ns)?;
        let (pid, rank, job, own) = (event.pid, event.rank, &event.job, &taken.job);
        tracing::warn!(
            pid,
            holder,
            "two processes that run at once send steps for rank {rank} of job `{job}`: what the second sends is kept as job \
             `{own}`; name each run (HIGHWATER_JOB)"
        );
        Ok(taken)
    }

    /// The annotation, with its sender's environment if needed: an event without a job belongs to its process's job.
    /// `None` if the process is read first, and the event waits.
    fn peer_of(&self, raw: Annotation, arrival: &Arrival) -> Result<Option<WithPeer>, Refusal> {
        let Some(pid) = arrival.sender.pid.filter(|_| raw.job.is_none()) else { return Ok(Some((raw, None))) };
        let (account, bytes) = (&arrival.account, size_of::<Parked>() + raw.weight());
        let over = |what, short| Refusal::over_budget(what, short, Resource::Bytes, account);
        account.may_hold(Resource::Bytes, bytes).map_err(|short| over("bytes", short))?;
        let held = account.hold(Resource::Bytes, bytes);
        let mut parked = Some(Parked::Event { annotation: raw, arrival: arrival.clone(), held });
        match (self.peers.ask(pid, account, arrival.live_ns, &mut parked), parked) {
            (LookupOutcome::Known(peer), Some(Parked::Event { annotation, .. })) => Ok(Some((annotation, Some(peer)))),
            (LookupOutcome::Full, _) => Err(over("events that wait for their process to be read", Shortage::Share)),
            (LookupOutcome::Later | LookupOutcome::Known(_), _) => Ok(None),
        }
    }

    /// The job and rank of a process that does not name them in its events.
    fn job_of(&self, peer: Option<&Arc<Peer>>, arrival: &Arrival) -> (Option<String>, Option<u32>) {
        let Some(peer) = peer else { return (None, None) };
        // Without the environment, the pod's name is not used: the environment may name another job, and the rank.
        let of_pod = || match &arrival.account.owner {
            Owner::User { within: Within::Pod(pod), .. } if peer.is_read => {
                Some(format!("{}/{}", pod.namespace, pod.name))
            }
            _ => None,
        };
        (peer.job.clone().or_else(of_pod), peer.rank)
    }

    /// At the begin of a step, or of anything outside of a step, the GPUs on which the driver lists the sender: a
    /// process may have begun on one and spread over several since.
    fn listed_at(&self, event: &Event, job: &JobId, jobs: &Jobs) -> Option<OnGpus> {
        let pid = event.pid.filter(|_| event.event == EventType::Begin)?;
        let begins = event.kind == Kind::Step || !jobs.is_in_step(job, event.rank);
        begins.then(|| self.places.listed_on(pid)).flatten()
    }

    /// The GPUs of a rank that has named none. `None` if they are unknown, or if its process is read first.
    fn find_gpus(&self, pid: Option<u32>, account: &Arc<Account>, search: &Search) -> Option<Vec<usize>> {
        if let Some(found) = pid.and_then(|pid| self.places.works_on(pid)) {
            return Some(found);
        }
        let now_ns = self.live.now_ns();
        let peer = match pid.map(|pid| self.peers.ask(pid, account, now_ns, &mut None)) {
            Some(LookupOutcome::Known(peer)) => Peer::clone(&peer),
            // The search is repeated once the process has been read, or, if the queue is full, at the rank's next event.
            Some(LookupOutcome::Later | LookupOutcome::Full) => return None,
            None => Peer::default(),
        };
        self.places.find(pid, peer.place, search, now_ns)
    }
}

/// The result of taking an event that was accepted.
struct Accepted {
    outcome: Outcome,
    /// The name of the job that it belongs to, if it is not the one that the sender gave.
    apart: Option<Arc<str>>,
}

/// When a batch arrived, and from which sender.
#[derive(Debug, Clone)]
pub(super) struct Arrival {
    pub at_ns: i64,
    /// On the timeline for rates and deadlines.
    pub live_ns: i64,
    pub unix_shift_ns: i64,
    pub sender: Sender,
    /// The sender's account.
    pub account: Arc<Account>,
    /// The sender's container, if the kubelet is still to link it.
    pub unlinked: Option<Arc<str>>,
}

/// An annotation with its sender's environment, if that was needed.
type WithPeer = (Annotation, Option<Arc<Peer>>);

/// What waits until more is known of its sender's process: its environment, or its pod.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all are events, and few wait")]
enum Parked {
    Event {
        annotation: Annotation,
        arrival: Arrival,
        held: Reservation,
    },
    /// The end of this process or of a connection of it, which comes after its events.
    End {
        pid: u32,
        speaker: Speaker,
        _held: Option<Reservation>,
    },
}

#[cfg(test)]
mod tests;
