//! The handle on the recorder. Any part of the daemon can trigger it, and never waits.

use super::admission::{Admission, Admitted, Refusal};
use super::directory::{self, Listed};
use super::findings::{self, OnBoard};
use super::id;
use super::settings::CaptureSettings;
use super::stats::{CaptureStats, Outcome};
use super::trigger::{Findings, Reason, Trigger};
use crate::metrics::{Collect, Families};
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::detect::Change;
use highwater_core::jobs::{Event, JobId};
use highwater_engine::node::Slot;
use highwater_engine::recording::State;
use highwater_engine::shared_state::SharedState;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The longest time after the request for which a requested capture may go on, nanoseconds.
const MOST_ASKED_AFTER_NS: i64 = 300 * SECOND_NS;

/// A capture that begins.
#[derive(Debug)]
pub(super) struct Start {
    pub kind: RecordingKind,
    pub id: String,
    pub trigger: Trigger,
    pub begin_ns: i64,
    pub end_ns: i64,
}

/// What a recording is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordingKind {
    /// The seconds around a trigger.
    Capture,
    /// Everything while a command ran, or until it was stopped.
    Recording,
}

impl RecordingKind {
    /// Its word in the file.
    pub fn label(self) -> &'static str {
        match self {
            RecordingKind::Capture => "capture",
            RecordingKind::Recording => "recording",
        }
    }

    /// The mode of its file. The daemon's captures are for everyone who may look into their folder. A recording has the
    /// line of a user's command.
    pub fn mode(self) -> u32 {
        match self {
            RecordingKind::Capture => 0o644,
            RecordingKind::Recording => 0o600,
        }
    }
}

/// A request for a capture. A field that is not set takes its value from the settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// How far back, nanoseconds.
    pub before_ns: Option<i64>,
    /// How far ahead, nanoseconds.
    pub after_ns: Option<i64>,
    /// Why.
    pub note: String,
}

/// What the handle and the thread share.
pub(super) struct Shared {
    pub settings: CaptureSettings,
    pub stats: CaptureStats,
    pub slot: Arc<Slot>,
    pub findings: Arc<dyn Findings>,
    /// How far back the rings reach at most, nanoseconds.
    retention_ns: i64,
    admission: Mutex<Admission>,
    starts: SyncSender<Option<Start>>,
}

/// The handle. Clones are the same recorder; the default is switched off.
#[derive(Clone, Default)]
pub struct Recorder(pub(super) Option<Arc<Shared>>);

impl Recorder {
    /// A recorder, and the channel on which its thread receives captures to take. Both are off if the settings name no
    /// directory. The rings reach back by `retention_ns` at most.
    pub(super) fn new(
        settings: &CaptureSettings,
        retention_ns: i64,
        state: &SharedState,
    ) -> (Self, Option<(Arc<Shared>, Starts)>) {
        if settings.directory.is_none() {
            return (Self(None), None);
        }
        let (settings, (starts, taken)) = (settings.clone(), sync_channel(1));
        let (slot, stats, admission) = (Arc::clone(&state.slot), CaptureStats::default(), Mutex::default());
        let findings = Arc::new(OnBoard(Arc::clone(&state.findings)));
        let shared = Arc::new(Shared { settings, stats, slot, findings, retention_ns, admission, starts });
        (Self(Some(Arc::clone(&shared))), Some((shared, taken)))
    }

    /// Reports that something happened. Returns at once; the outcome is counted.
    pub fn trigger(&self, trigger: Trigger) {
        if let Some(shared) = &self.0 {
            shared.trigger(trigger);
        }
    }

    /// Wakes the thread, which then checks whether it must stop.
    pub fn wake(&self) {
        if let Some(shared) = &self.0 {
            // The channel is full only if a capture waits to be taken, which wakes the thread too.
            let _ = shared.starts.try_send(None);
        }
    }

    /// Triggers a capture for each notable finding of a detector turn whose severity is above `info`.
    pub fn found(&self, change: &Change) {
        findings::triggers(change).for_each(|trigger| self.trigger(trigger));
    }

    /// Triggers a capture if the mark is `oom`, in any case of letters. Ignores all other marks.
    pub(super) fn hear(&self, mark: &Event) {
        if mark.name.eq_ignore_ascii_case("oom") {
            let job = JobId::new(mark.scope.clone().unwrap_or_default(), &mark.job);
            let note = format!("rank {} of job `{job}` marked `oom`", mark.rank);
            let owner = Some(job.scope().clone());
            let reason = Reason::Oom { job, rank: mark.rank };
            self.trigger(Trigger { reason, at_ns: mark.at_ns, note, owner });
        }
    }

    /// Requests a capture of now. Returns its name at once.
    ///
    /// # Errors
    /// Why it is not taken.
    pub fn ask(&self, request: Request) -> Result<String, Refusal> {
        let shared = self.0.as_ref().ok_or(Refusal::Off)?;
        let asked = shared.ask(request);
        if let Some(outcome) = asked.as_ref().err().and_then(Refusal::outcome) {
            shared.stats.count(outcome);
        }
        asked
    }

    /// How far back a requested capture may reach, nanoseconds; `None` if captures are off.
    #[must_use]
    pub fn most_before_ns(&self) -> Option<i64> {
        self.0.as_ref().map(|shared| shared.retention_ns)
    }

    /// All captures, newest first.
    #[must_use]
    pub fn list(&self) -> Vec<Listed> {
        let Some(shared) = &self.0 else { return Vec::new() };
        let admission = shared.admission();
        let mut listed: Vec<_> = admission.listed.values().chain(&admission.failed).cloned().collect();
        drop(admission);
        listed.sort_by(|left, right| right.id.cmp(&left.id));
        listed
    }

    /// Why the capture of this name failed, if it is one of the last that did.
    #[must_use]
    pub fn failure(&self, id: &str) -> Option<String> {
        let admission = self.0.as_ref()?.admission();
        admission.failed.iter().find(|failed| failed.id == id)?.trouble.clone()
    }

    /// The capture of this name. Only listed captures are found.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<Listed> {
        self.0.as_ref()?.admission().listed.get(id).cloned()
    }

    /// Opens the file of a finished capture.
    ///
    /// # Errors
    /// If it no longer exists, or cannot be opened. The name must be that of a capture that was found.
    pub fn open(&self, listed: &Listed) -> io::Result<File> {
        let folder = self.0.as_ref().and_then(|shared| shared.admission().folder.clone());
        directory::open_whole(&*folder.ok_or(io::ErrorKind::NotFound)?, &listed.id)
    }

    /// The path of a finished capture, for readers of SQLite.
    ///
    /// # Errors
    /// If the folder of captures was moved or replaced. The name must be that of a capture that was found.
    pub fn path_of(&self, listed: &Listed) -> io::Result<PathBuf> {
        let folder = self.0.as_ref().and_then(|shared| shared.admission().folder.clone());
        directory::path_of_whole(&*folder.ok_or(io::ErrorKind::NotFound)?, &listed.id)
    }

    /// Counters of the outcomes of triggers; `None` if the recorder is off.
    #[must_use]
    pub fn stats(&self) -> Option<&CaptureStats> {
        self.0.as_ref().map(|shared| &shared.stats)
    }

    /// Why nothing can be written at the moment.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.0.as_ref()?.admission().trouble.clone()
    }
}

impl Shared {
    pub fn admission(&self) -> MutexGuard<'_, Admission> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a trigger.
    pub fn trigger(&self, trigger: Trigger) {
        let interval = (self.settings.before_ns, self.settings.after_ns);
        let mut admission = self.admission();
        let turned_away = match admission.admit(&trigger, &self.settings) {
            Admitted::Begin => {
                self.begin(&mut admission, trigger, interval).err().and_then(|refusal| refusal.outcome())
            }
            Admitted::Covered => Some(Outcome::Joined),
            Admitted::Cooldown => Some(Outcome::Cooldown),
            Admitted::Busy => Some(Outcome::Busy),
            // Counted when the running capture records it, or has ended.
            Admitted::Joined | Admitted::Next => None,
        };
        if let Some(outcome) = turned_away {
            self.stats.count(outcome);
        }
    }

    fn ask(&self, request: Request) -> Result<String, Refusal> {
        let before_ns = request.before_ns.unwrap_or(self.settings.before_ns);
        let after_ns = request.after_ns.unwrap_or(self.settings.after_ns);
        for (what, asked_ns, most_ns) in
            [("seconds_before", before_ns, self.retention_ns), ("seconds_after", after_ns, MOST_ASKED_AFTER_NS)]
        {
            if !(0..=most_ns).contains(&asked_ns) {
                return Err(Refusal::Limit(format!("{what}: is not between 0 and {}", most_ns / SECOND_NS)));
            }
        }
        let node = self.slot.node().ok_or(Refusal::NoGpus)?;
        let mut admission = self.admission();
        if let Some(running) = &admission.running {
            return Err(Refusal::Busy { id: running.id.clone() });
        }
        // The bytes of other files are not known here; the thread counts them when it begins.
        let has_room = admission.room(Reason::Asked.label(), &self.settings, 0).is_some();
        let (now, per_hour) = (Instant::now(), self.settings.asks_per_hour);
        if !has_room {
            return Err(Refusal::NoRoom);
        }
        if let Some(wait) = admission.asking.wait(now, per_hour) {
            return Err(Refusal::TooOften { wait });
        }
        let trigger = Trigger { reason: Reason::Asked, at_ns: node.clock.now_ns(), note: request.note, owner: None };
        let id = self.begin(&mut admission, trigger, (before_ns, after_ns))?;
        admission.asking.spend(now, per_hour);
        Ok(id)
    }

    /// Begins a capture and hands it to the thread.
    fn begin(
        &self,
        admission: &mut Admission,
        trigger: Trigger,
        (before_ns, after_ns): (i64, i64),
    ) -> Result<String, Refusal> {
        if let Some(trouble) = &admission.trouble {
            return Err(Refusal::Unavailable(trouble.clone()));
        }
        let node = self.slot.node().ok_or(Refusal::NoGpus)?;
        let mut unix_ns = trigger.at_ns.saturating_add(node.clock.unix_shift_ns());
        let mut id = id::id(unix_ns, trigger.reason.label());
        while admission.listed.contains_key(&id) || admission.failed.iter().any(|failed| failed.id == id) {
            unix_ns = unix_ns.saturating_add(MILLISECOND_NS);
            id = id::id(unix_ns, trigger.reason.label());
        }
        let (begin_ns, end_ns) = (trigger.at_ns.saturating_sub(before_ns), trigger.at_ns.saturating_add(after_ns));
        let listed = Listed {
            id: id.clone(),
            reason: trigger.reason.label().to_owned(),
            reasons: vec![trigger.reason.label().to_owned()],
            owners: vec![trigger.owner_text()],
            note: trigger.note.clone(),
            begin_unix_nano: Some(begin_ns.saturating_add(node.clock.unix_shift_ns())),
            end_unix_nano: None,
            bytes: 0,
            state: State::Writing,
            trouble: None,
        };
        admission.begin(id.clone(), &trigger, (begin_ns, end_ns), &self.settings);
        let start = Start { kind: RecordingKind::Capture, id: id.clone(), trigger, begin_ns, end_ns };
        if self.starts.try_send(Some(start)).is_err() {
            admission.running = None;
            return Err(Refusal::Ended);
        }
        admission.listed.insert(id.clone(), listed);
        Ok(id)
    }
}

/// Captures for the thread to take; `None` if it only has to check whether it must stop.
pub(super) type Starts = Receiver<Option<Start>>;

impl Collect for Recorder {
    fn collect(&self, out: &mut Families) {
        if let Some(stats) = self.stats() {
            stats.collect(out);
        }
    }
}
