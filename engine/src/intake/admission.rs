//! Admits events: parse, check, take, count, answer.

use super::answer::Answer;
use super::complaints::Complaints;
use super::devices::DevicesVersion;
use super::ends::{self, Ends};
use super::kills::Kills;
use super::log::{EventLog, LogLimits};
use super::senders::Senders;
use super::waiting::{Arrival, Parked};
use crate::place::cgroup::Groups;
use crate::place::{Kubelet, Peer};
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS};
use highwater_core::detect::HostWaits;
use highwater_core::gpu::{Device, Processes};
use highwater_core::jobs::{
    Account, Accounts, Context, Event, Jobs, Limits, Outcome, OutcomeCounts, Owner, Refusal, Reservation, Resource,
    Scope, Sender, SenderId, Taken as JobTaken, Within,
};
use highwater_core::phases::Ledger;
use highwater_core::wire::{Annotation, EventType};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

/// The longest time between two updates of time-dependent state, while events arrive.
const ADVANCE_NS: i64 = 100 * MILLISECOND_NS;
/// How often processes that could not be read in time are logged.
const LOG_NS: i64 = 60 * SECOND_NS;

/// Called for each mark when it is taken, on the endpoint's thread, so it must not wait.
pub type MarkListener = Box<dyn Fn(&Event) + Send + Sync>;

/// Called for each accepted annotation of a rank whose GPUs are known, with their positions and when the annotation
/// arrived, nanoseconds of the timeline. It runs on the endpoint's thread, so it must not wait.
pub type GpuListener = Box<dyn Fn(&[usize], i64) + Send + Sync>;

/// Takes annotations from any number of threads.
pub struct Intake {
    limits: Limits,
    clock: Arc<dyn Clock>,
    ledger: Arc<Ledger>,
    devices: DevicesVersion,
    pub(super) senders: Senders,
    /// When time-dependent state was last updated.
    advanced_ns: AtomicI64,
    /// When processes that could not be read in time were last logged.
    logged_overdue_ns: AtomicI64,
    /// A reference to itself, set when it has reader threads.
    itself: OnceLock<Weak<Intake>>,
    /// Bytes of the events that batches hold to put them in order.
    pub(super) batched_bytes: AtomicUsize,
    complaints: Mutex<Complaints>,
    log: Arc<EventLog>,
    on_mark: OnceLock<MarkListener>,
    on_gpus: OnceLock<GpuListener>,
    /// Senders' processes that are watched for their end, set when an endpoint does so.
    ends: OnceLock<Ends>,
    kills: Kills,
    /// How many events had each outcome.
    pub counts: OutcomeCounts,
}

impl Intake {
    /// An intake that knows no GPUs yet.
    #[must_use]
    pub fn new(limits: Limits, clock: Arc<dyn Clock>, processes: Arc<Processes>) -> Self {
        Self {
            limits,
            senders: Senders::new(&limits, Arc::clone(&clock), processes),
            clock,
            ledger: Arc::new(Ledger::new(limits)),
            devices: DevicesVersion::default(),
            advanced_ns: AtomicI64::new(i64::MIN),
            logged_overdue_ns: AtomicI64::new(i64::MIN),
            itself: OnceLock::new(),
            batched_bytes: AtomicUsize::new(0),
            complaints: Mutex::default(),
            log: Arc::default(),
            on_mark: OnceLock::new(),
            on_gpus: OnceLock::new(),
            ends: OnceLock::new(),
            kills: Kills::new(Groups::new("/proc".into(), None)),
            counts: OutcomeCounts::default(),
        }
    }

    /// The same, which also keeps the last events.
    #[must_use]
    pub fn with_log(mut self, limits: LogLimits) -> Self {
        self.log = Arc::new(EventLog::new(limits));
        self
    }

    /// The same, which also asks the kubelet for the GPUs of senders' containers.
    #[must_use]
    pub fn with_kubelet(mut self, kubelet: Option<Arc<Kubelet>>) -> Self {
        self.senders = self.senders.with_kubelet(kubelet);
        self
    }

    /// The same, which also sees in the control groups that are mounted in this folder which senders' processes the kernel kills
    /// for want of host memory.
    #[must_use]
    pub fn with_cgroups(mut self, root: Option<PathBuf>) -> Self {
        self.kills = Kills::new(Groups::new("/proc".into(), root));
        self
    }

    /// The same, with this clock for rates and deadlines, because a recording's clock stops at the recording's end.
    #[must_use]
    pub fn with_live_clock(mut self, live: Arc<dyn Clock>) -> Self {
        self.senders.live = live;
        self
    }

    /// What a sender's process waits for on its host: see [`HostWaits`].
    pub fn host_waits(&self, pid: u32) -> Option<HostWaits> {
        self.kills.waits(pid)
    }

    /// How many control groups are read for processes that the kernel kills.
    #[must_use]
    pub fn cgroups(&self) -> usize {
        self.kills.count()
    }

    /// The last events taken.
    #[must_use]
    pub fn log(&self) -> &Arc<EventLog> {
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
        let are_others = self.devices.change(|| {
            self.senders.places.set_devices(devices);
            self.ledger.set_devices(devices.iter().map(|device| device.uuid.clone()).collect())
        });
        if are_others {
            self.log.clear(self.clock.now_ns());
        }
    }

    /// The jobs, if positions found for the device version `those` are still valid.
    fn jobs_of(&self, those: Option<u64>) -> Option<MutexGuard<'_, Jobs>> {
        let jobs = self.jobs();
        self.devices.are_still(those).then_some(jobs)
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
        &self.senders.accounts
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
        self.senders.accounts.refused(&arrival.account.owner, 1);
        Complaints::refused(&self.complaints, &arrival.account.owner, arrival.sender.pid, refusal, arrival.live_ns);
    }

    /// Counts events that were refused unread.
    pub(super) fn refuse_unseen(&self, outcome: Outcome, events: u64, arrival: &Arrival) {
        if events > 0 {
            self.counts.add(outcome, events);
            self.senders.accounts.refused(&arrival.account.owner, events);
        }
    }

    /// Counts a refusal of data that could not be read: a datagram that was too long.
    pub fn refuse_unread(&self, refusal: &Refusal, sender: &Sender) {
        self.refuse(refusal, &self.arrival(sender));
    }

    /// The moment at which a batch of this sender arrives.
    pub(super) fn arrival(&self, sender: &Sender) -> Arrival {
        let live_ns = self.senders.live.now_ns();
        // The thread that calls `advance` regularly may be waiting for a driver.
        let advanced_ns = self.advanced_ns.load(Ordering::Relaxed);
        if live_ns.saturating_sub(advanced_ns) >= ADVANCE_NS {
            self.advance();
        }
        let (at_ns, unix_shift_ns) = (self.clock.now_ns(), self.clock.unix_shift_ns());
        let account = self.senders.account_of(sender);
        let unlinked = match (&account.owner, sender.pid) {
            (Owner::User { within: Within::Unknown, .. }, Some(pid)) => self.senders.places.unlinked(pid, live_ns),
            _ => None,
        };
        Arrival { at_ns, live_ns, unix_shift_ns, sender: sender.clone(), account, unlinked }
    }

    /// Sets an arrival to now.
    pub(super) fn arrives_now(&self, arrival: &mut Arrival) {
        (arrival.at_ns, arrival.live_ns) = (self.clock.now_ns(), self.senders.live.now_ns());
    }

    /// Updates time-dependent state: the owners that share the rate, processes that take too long to read, events that
    /// wait for the kubelet, and kills by the kernel.
    pub fn advance(&self) {
        let now_ns = self.senders.live.now_ns();
        self.advanced_ns.store(now_ns, Ordering::Relaxed);
        self.senders.accounts.advance(now_ns);
        let overdue = self.senders.peers.advance(now_ns);
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
        self.take_kills(now_ns);
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
        self.senders.peers.set_threaded();
        // Refused if it is set already.
        let _ = self.itself.set(Arc::downgrade(self));
        let intake = Arc::clone(self);
        // It may hang in another process forever, so it is never joined.
        crate::thread::spawn("hw-peer", move || {
            intake.senders.peers.read_until_ended(|| intake.senders.live.now_ns(), |pid| intake.has_been_read(pid));
        })
        .map(drop)
    }

    /// Ends the threads that read processes.
    pub fn end_readers(&self) {
        self.senders.peers.end();
    }

    /// Takes the events that waited for a process, and looks for the GPUs of its ranks.
    fn has_been_read(&self, pid: u32) {
        self.senders
            .peers
            .drain(pid, |peer, parked| parked.into_iter().for_each(|parked| self.take_parked(peer, parked)));
        let searches = self.jobs().searches_of(pid);
        for (job, rank, account, search) in searches {
            let devices = self.devices.now();
            if let Some(found) = self.senders.find_gpus(Some(pid), &account, &search)
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
            Parked::End { sender_id, .. } => self.has_ended(sender_id),
        }
    }

    /// Takes what waited for the kubelet to link its container, if that was done, or took too long.
    fn take_linked(&self, now_ns: i64) {
        if self.senders.unlinked.is_empty() {
            return;
        }
        for container in self.senders.unlinked.containers() {
            if !self.senders.places.is_link_awaited(&container, now_ns) {
                self.take_unlinked(&container);
            }
        }
    }

    /// Takes what waited for the kubelet to link this container.
    fn take_unlinked(&self, container: &Arc<str>) {
        self.senders.unlinked.drain(container, |parked| match parked {
            Parked::Event { annotation, arrival, held } => {
                drop(held);
                // The sender may belong to another account now, because its pod is known.
                let arrival = Arrival { account: self.senders.account_of(&arrival.sender), ..arrival };
                self.has_been_taken(self.check_unless_parked(annotation, &arrival), &arrival);
            }
            Parked::End { pid, sender_id, .. } => self.end_behind_reads(pid, sender_id, parked),
        });
    }

    /// Counts the outcome of an event that waited.
    fn has_been_taken(&self, outcome: Result<Option<Accepted>, Refusal>, arrival: &Arrival) {
        match outcome {
            Ok(accepted) => accepted.into_iter().for_each(|accepted| self.counts.count(accepted.outcome)),
            Err(refusal) => self.refuse(&refusal, arrival),
        }
    }

    /// Ends a sender once everything that it sent has been taken: at once, or parked behind its events that wait.
    /// `pid` is its process, `held` the reservation to release then.
    pub(super) fn end_after_parked(&self, pid: Option<u32>, sender_id: SenderId, held: Option<Reservation>) {
        // Now, because its process and its control group may be gone a moment later.
        self.kills.note_end(sender_id, self.senders.live.now_ns());
        let Some(pid) = pid else { return self.has_ended(sender_id) };
        let mut end = Parked::End { pid, sender_id, _held: held };
        if !self.senders.unlinked.is_empty()
            && let Some(container) = self.senders.places.container_id(pid, self.senders.live.now_ns())
        {
            match self.senders.unlinked.park(&container, false, end) {
                None => return,
                Some(returned) => end = returned,
            }
        }
        self.end_behind_reads(pid, sender_id, end);
    }

    fn end_behind_reads(&self, pid: u32, sender_id: SenderId, end: Parked) {
        if self.senders.peers.park_behind(pid, end).is_some() {
            self.has_ended(sender_id);
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
        if awaited.is_none() && self.senders.unlinked.is_empty() {
            return Some(raw);
        }
        let behind = || self.senders.places.container_id(arrival.sender.pid?, arrival.live_ns);
        let Some(container) = awaited.cloned().or_else(behind) else { return Some(raw) };
        if let Some(pid) = arrival.sender.pid {
            // Its environment is needed later. It is read now, because the process may end before its container is linked.
            self.senders.peers.ask(pid, &arrival.account, arrival.live_ns, &mut None);
        }
        let (account, bytes) = (&arrival.account, size_of::<Parked>() + raw.weight());
        let raw = if account.may_hold(Resource::Bytes, bytes).is_ok() {
            let held = account.hold(Resource::Bytes, bytes);
            let parked = Parked::Event { annotation: raw, arrival: arrival.clone(), held };
            match self.senders.unlinked.park(&container, awaited.is_some(), parked) {
                Some(Parked::Event { annotation, .. }) => annotation,
                None | Some(Parked::End { .. }) => return None,
            }
        } else {
            raw
        };
        // There is no room to park the event. All parked events of the container are taken first, so that it overtakes none.
        self.senders.places.stop_waiting(&container);
        self.take_unlinked(&container);
        Some(raw)
    }

    /// Takes an annotation; `None` if it waits for its sender's process to be read.
    fn check_unless_parked(&self, raw: Annotation, arrival: &Arrival) -> Result<Option<Accepted>, Refusal> {
        let Some((raw, peer)) = self.senders.peer_of(raw, arrival)? else { return Ok(None) };
        self.check_with(raw, peer.as_ref(), arrival).map(Some)
    }

    /// Takes an annotation with the information about its sender's process.
    fn check_with(&self, raw: Annotation, peer: Option<&Arc<Peer>>, arrival: &Arrival) -> Result<Accepted, Refusal> {
        let (devices, gpus) = (self.devices.now(), self.senders.places.gpus());
        let (now_ns, sender, unix_shift_ns) = (arrival.at_ns, &arrival.sender, arrival.unix_shift_ns);
        let context = Context { limits: &self.limits, gpus: gpus.as_deref(), now_ns, unix_shift_ns, sender };
        let account = &arrival.account;
        let (job, rank) = if raw.job.is_none() { Senders::job_of(peer, arrival) } else { (None, None) };
        let lost = raw.lost;
        let mut event = context.check(raw, job, rank)?;
        if sender.pid == Some(std::process::id()) {
            // A simulated job, whose annotations the daemon itself sends over the socket.
            event.scope = Some(Scope::Daemon);
        }
        let (taken, mut gpus, search) = {
            let mut jobs = self.jobs();
            if !self.devices.are_still(devices) {
                // The event's GPU positions refer to the previous devices, so they are dropped, as if there were no source. The
                // rank's next event that names GPUs sets them again.
                event.gpus = None;
            }
            let taken = match jobs.take(&event, account, now_ns) {
                Err(Refusal::Contested { holder, .. }) => self.take_contested(&mut jobs, &event, account, holder),
                taken => taken,
            }?;
            if let Some(listed) = self.senders.listed_at(&event, &taken.job, &jobs) {
                jobs.set_listed(&taken.job, event.rank, &listed);
            }
            let (gpus, search) = (jobs.gpus_of(&taken.job, event.rank), jobs.search(&taken.job, event.rank));
            (taken, gpus, search)
        };
        // From here on it is an event of this job, regardless of its sender.
        event.scope = Some(taken.job.scope().clone());
        if let Some(lost) = lost.filter(|lost| *lost > 0) {
            self.senders.accounts.lost(&account.owner, lost.into());
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
            && let Some(found) = self.senders.find_gpus(event.pid, account, &search)
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
        let followed = taken.watch.filter(|sender_id| match (sender_id, self.ends.get()) {
            (SenderId::Process(pid), Some(ends)) => ends.watch(*pid, account),
            (SenderId::Process(_), None) => false,
            (SenderId::Connection(_), _) => true,
        });
        if let (Some(sender_id), Some(pid)) = (followed, event.pid) {
            self.kills.watch(sender_id, pid, account);
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
}

impl Intake {
    /// Starts watching for the ends of senders' processes; `None` if the system cannot provide a descriptor.
    pub(super) fn see_ends(&self) -> Option<&Ends> {
        match Ends::new() {
            // The first caller's value is kept.
            Ok(ends) => Some(self.ends.get_or_init(|| ends)),
            Err(error) => {
                tracing::warn!(%error, "cannot watch for the ends of senders' processes; their ranks end by silence");
                None
            }
        }
    }

    /// Ends the ranks of processes that have ended.
    pub(super) fn take_ended(&self, ends: &Ends) {
        ends.take().into_iter().for_each(|pid| self.end_after_parked(Some(pid), SenderId::Process(pid), None));
    }

    /// Marks the ranks beside which the kernel killed a process for want of host memory.
    fn take_kills(&self, now_ns: i64) {
        for (sender_ids, oom) in self.kills.look(now_ns) {
            let at_ns = self.clock.now_ns();
            let marks = self.jobs().mark_host_oom(&sender_ids, &oom, at_ns);
            marks.iter().for_each(|(mark, account)| self.log.note(mark, account, at_ns));
        }
    }

    /// Ends the ranks that only this sender sent events for.
    fn has_ended(&self, sender_id: SenderId) {
        let at_ns = self.clock.now_ns();
        let oom = self.kills.take(sender_id);
        let mut jobs = self.jobs();
        let mut events = oom.map_or_else(Vec::new, |oom| jobs.mark_host_oom(&[sender_id], &oom, at_ns));
        events.extend(jobs.end_with(sender_id, at_ns));
        for (event, account) in events {
            self.log.note(&event, &account, at_ns);
        }
    }

    /// Ends the ranks that an ended process held.
    pub(super) fn end_process(&self, jobs: &mut Jobs, pid: u32, at_ns: i64) {
        for (event, account) in jobs.end_held_by(pid, at_ns) {
            self.log.note(&event, &account, at_ns);
        }
    }
}

/// The result of taking an event that was accepted.
struct Accepted {
    outcome: Outcome,
    /// The name of the job that it belongs to, if it is not the one that the sender gave.
    apart: Option<Arc<str>>,
}

#[cfg(test)]
mod tests;
