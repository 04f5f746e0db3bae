//! The recorder's thread: waits for triggers, takes one capture at a time, and keeps the folder within its bounds.
//!
//! A slow disk delays only this thread: the sampler and the intake do not know that it exists.

use super::directory::Directory;
use super::recorder::{Shared, Start, Starts};
use super::stats::Outcome;
use super::taking::{Capture, Sent, View};
use crate::heap;
use highwater_engine::recording::State;
use highwater_engine::recording::schema::WriteError;
use rusqlite::ErrorCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use std::{io, thread};

/// How often new data is written: what a kill can lose.
const WRITE_PERIOD: Duration = Duration::from_millis(250);
/// How often written data is synced: what a power failure can lose. The past is synced at once.
const SYNC_PERIOD: Duration = Duration::from_secs(1);
/// How long a folder that could not be opened, or a file that could not be finished, is left alone.
const RETRY: Duration = Duration::from_secs(30);
/// A capture whose timeline stands still for this long is over: the recording that is replayed has ended.
const STANDSTILL: Duration = Duration::from_secs(5);
/// A disk with more bytes left than this is not full.
const ROOM_BYTES: u64 = 1 << 20;
/// The shortest time between two failures that are logged.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// What the thread runs.
pub struct Worker {
    shared: Arc<Shared>,
    pub(super) starts: Starts,
    sent: Sent,
    directory: Option<Directory>,
    looked: Option<Instant>,
    /// Whether a file could not be finished and must be tried again.
    is_left: bool,
    warned: Option<Instant>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, starts: Starts, sent: Sent) -> Self {
        Self { shared, starts, sent, directory: None, looked: None, is_left: false, warned: None }
    }

    /// Takes captures until `stop`, at a lower priority than the sampler. A capture that is running then ends early.
    pub fn run(mut self, stop: &AtomicBool) {
        highwater_engine::thread::stand_back();
        while !stop.load(Ordering::Relaxed) {
            self.look_after_directory();
            match self.starts.recv_timeout(RETRY) {
                Ok(Some(start)) => self.take(&start, stop),
                Ok(None) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Opens the folder if it is not open, or finishes what is left; not more often than every [`RETRY`].
    fn look_after_directory(&mut self) {
        let is_well = self.directory.is_some() && !self.is_left;
        if is_well || self.looked.is_some_and(|looked| looked.elapsed() < RETRY) {
            return;
        }
        self.looked = Some(Instant::now());
        if std::mem::take(&mut self.is_left) {
            self.finish_what_is_left();
            return;
        }
        let Some(path) = self.shared.settings.directory.clone() else { return };
        let opened = Directory::open(&path).and_then(|directory| Ok((directory.recover_and_list()?, directory)));
        let mut admission = self.shared.admission();
        match opened {
            Ok(((listed, is_left), directory)) => {
                self.is_left = is_left;
                admission.relist(listed);
                admission.trouble = None;
                admission.folder = Some(Arc::clone(directory.folder()));
                drop(admission);
                self.directory = Some(directory);
                self.make_room();
            }
            Err(error) => {
                // The error names the path.
                let trouble = error.to_string();
                if admission.trouble.as_ref() != Some(&trouble) {
                    tracing::warn!("captures cannot be written (captures.directory): {trouble}");
                }
                admission.trouble = Some(trouble);
            }
        }
    }

    /// Takes one capture.
    fn take(&mut self, start: &Start, stop: &AtomicBool) {
        let view = self.shared.slot.node().map(|node| View::of(&node));
        let outcome = match (&self.directory, view) {
            (None, _) => {
                let trouble = self.shared.admission().trouble.clone();
                self.fail(start, Outcome::Unavailable, &trouble.unwrap_or_else(|| "the folder is not open yet".into()))
            }
            (_, None) => self.fail(start, Outcome::NoGpus, "no GPU is read"),
            (Some(_), Some(view)) => self.write(start, view, stop),
        };
        let mut admission = self.shared.admission();
        admission.end(&start.id);
        let next = admission.take_next();
        drop(admission);
        // Counted only now, because a client that sees the count may request the next capture.
        self.shared.stats.count(outcome);
        self.make_room();
        // The first begins the next capture, the others join it.
        next.into_iter().for_each(|trigger| self.shared.trigger(trigger));
    }

    /// Notes that the capture failed. It stays listed with the cause.
    fn fail(&self, start: &Start, outcome: Outcome, trouble: &str) -> Outcome {
        self.shared.admission().fail(&start.id, trouble);
        outcome
    }

    fn finish_what_is_left(&mut self) {
        let Some(listed) = self.directory.as_ref().map(Directory::recover_and_list) else { return };
        match listed {
            Ok((listed, is_left)) => {
                self.is_left = is_left;
                self.shared.admission().relist(listed);
                self.make_room();
            }
            Err(error) => {
                self.is_left = true;
                self.warn(&format!("the folder of captures cannot be read: {error}"));
            }
        }
    }

    fn write(&mut self, start: &Start, view: View, stop: &AtomicBool) -> Outcome {
        let written = self.begin(start, view).map(|mut capture| {
            let ended = self.follow(&mut capture, &start.id, stop);
            (capture, ended)
        });
        let (capture, ended) = match written {
            Ok((capture, ended)) if capture.is_committed() => (capture, ended),
            // Nothing was committed, so there is nothing to keep.
            failed => {
                let trouble = failed.and_then(|(_, ended)| ended).err();
                let trouble = trouble.map_or_else(|| "it ended before anything was written".into(), |e| e.to_string());
                self.warn(&format!("capture {}: {trouble}", start.id));
                self.discard(&start.id);
                return self.fail(start, Outcome::Failed, &trouble);
            }
        };
        let state = ended.unwrap_or_else(|trouble| self.end_early(start, &trouble));
        if let Err(trouble) = self.finish(capture, &start.id, state) {
            // What was committed stays where it is, and becomes one file when there is room.
            self.is_left = true;
            self.warn(&format!("capture {} cannot be finished: {trouble}", start.id));
            let trouble = format!("it cannot be finished, and is tried again every {} s: {trouble}", RETRY.as_secs());
            return self.fail(start, Outcome::Failed, &trouble);
        }
        match state {
            State::Complete => Outcome::Complete,
            State::CutShort => Outcome::CutShort,
            _ => Outcome::Failed,
        }
    }

    /// Notes why a capture ends early. What was committed is kept.
    fn end_early(&mut self, start: &Start, trouble: &WriteError) -> State {
        let (limit, state) = match self.is_limit(trouble) {
            true => (
                " (it has reached the limit for captures of its kind, at most a third of captures.most_bytes)",
                State::CutShort,
            ),
            false => ("", State::Failed),
        };
        self.warn(&format!("capture {} {}: {trouble}{limit}", start.id, state.label()));
        self.shared.admission().note_trouble(&start.id, &format!("{trouble}{limit}"));
        self.release();
        state
    }

    /// Whether a file grew to its own limit, which SQLite reports in the same way as a full disk.
    fn is_limit(&self, trouble: &WriteError) -> bool {
        let is_full =
            matches!(trouble, WriteError::Sql(error) if error.sqlite_error_code() == Some(ErrorCode::DiskFull));
        is_full && self.directory.as_ref().is_some_and(|directory| directory.free_bytes() > ROOM_BYTES)
    }

    fn begin(&self, start: &Start, view: View) -> Result<Capture, WriteError> {
        let Some(directory) = &self.directory else { return Err(io::Error::from(io::ErrorKind::NotFound).into()) };
        directory.reserve();
        self.make_room();
        let path = directory.path_of_partial(&start.id)?;
        let room =
            self.shared.admission().room(start.trigger.reason.label(), &self.shared.settings, directory.other_bytes());
        let most_bytes = room.ok_or_else(|| io::Error::other("captures that it must not push out leave no room"))?;
        let findings = Arc::clone(&self.shared.findings);
        Capture::begin(&path, most_bytes, start, view, self.sent.clone(), findings)
    }

    /// Writes until the capture is over, and returns how it ended.
    fn follow(&self, capture: &mut Capture, id: &str, stop: &AtomicBool) -> Result<State, WriteError> {
        let (mut synced, mut moved, mut now_ns) = (None::<Instant>, Instant::now(), capture.now_ns());
        loop {
            let (end_ns, joined) = self.shared.admission().take_joined();
            capture.set_end(end_ns);
            let is_over = capture.is_over();
            let advanced = heap::making(|| capture.advance(&joined, &|| self.account(id)));
            let outcome = if advanced.is_ok() { Outcome::Joined } else { Outcome::Failed };
            joined.iter().for_each(|_| self.shared.stats.count(outcome));
            advanced?;
            self.account(id);
            if is_over && self.shared.admission().close(id, end_ns) {
                return Ok(State::Complete);
            }
            if capture.now_ns() != now_ns {
                (now_ns, moved) = (capture.now_ns(), Instant::now());
            }
            let is_gone = !capture.is_of(self.shared.slot.node().as_deref());
            if stop.load(Ordering::Relaxed) || is_gone || moved.elapsed() > STANDSTILL {
                return Ok(State::CutShort);
            }
            if self.shared.admission().yields(id) {
                self.shared.admission().note_trouble(id, "it made way for a trigger to which it does not reach back");
                return Ok(State::CutShort);
            }
            if synced.is_none_or(|synced| synced.elapsed() >= SYNC_PERIOD) {
                capture.sync()?;
                synced = Some(Instant::now());
            }
            thread::park_timeout(WRITE_PERIOD);
        }
    }

    fn finish(&self, capture: Capture, id: &str, state: State) -> Result<(), WriteError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let end_unix_ns = capture.finish(state)?;
        let bytes = directory.publish(id)?;
        let mut admission = self.shared.admission();
        if let Some(listed) = admission.listed.get_mut(id) {
            (listed.state, listed.bytes, listed.end_unix_nano) = (state, bytes, Some(end_unix_ns));
        }
        drop(admission);
        tracing::info!(id, bytes, "capture {}", state.label());
        Ok(())
    }

    fn discard(&self, id: &str) {
        if let Some(directory) = &self.directory {
            directory.discard(id);
        }
    }

    fn release(&self) {
        if let Some(directory) = &self.directory {
            directory.release();
        }
    }

    /// Notes how large the file has become, and makes room for it.
    fn account(&self, id: &str) {
        let bytes = self.directory.as_ref().map_or(0, |directory| directory.partial_bytes(id));
        if let Some(listed) = self.shared.admission().listed.get_mut(id) {
            listed.bytes = bytes;
        }
        self.make_room();
    }

    /// Removes captures until the rest keeps to its bounds.
    fn make_room(&self) {
        let Some(directory) = &self.directory else { return };
        let other_bytes = directory.other_bytes();
        let remove = self.shared.admission().to_remove(&self.shared.settings, other_bytes);
        for id in remove {
            if let Err(error) = directory.remove(&id)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(id, %error, "an old capture cannot be removed");
                break;
            }
            self.shared.admission().listed.remove(&id);
            self.shared.stats.remove();
        }
        self.shared.stats.set_bytes(self.shared.admission().bytes() + other_bytes);
    }

    /// Logs a failure, unless one was just logged.
    fn warn(&mut self, failure: &str) {
        if self.warned.is_none_or(|warned| warned.elapsed() >= LOG_PERIOD) {
            tracing::warn!("{failure}");
            self.warned = Some(Instant::now());
        }
    }
}
