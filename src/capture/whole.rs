//! One recording of everything, from its begin until it is stopped.
//!
//! Enters: a node, and the same state that captures read. Leaves: one file, which grows by the second. Invariant: what
//! was written stays written: a kill at any moment leaves a file that opens and lacks at most the last second.

use super::findings::OnBoard;
use super::recorder::{RecordingKind, Start};
use super::taking::{Capture, Sent, View};
use super::trigger::{Reason, Trigger};
use highwater_core::clock::park_for;
use highwater_engine::intake::Intake;
use highwater_engine::recording::State;
use highwater_engine::recording::schema::{self, WriteError};
use highwater_engine::shared_state::SharedState;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often new data is written.
pub(super) const WRITE_PERIOD: Duration = Duration::from_millis(250);
/// How often written data is synced.
const SYNC_PERIOD: Duration = Duration::from_secs(1);
/// No limit but the disk: the most pages that SQLite can count.
const MOST_BYTES: u64 = (u32::MAX as u64 - 1) * highwater_engine::recording::schema::PAGE_BYTES;

/// How a recording ended.
#[derive(Debug)]
pub enum Ended {
    /// It was stopped.
    Stopped,
    /// The source went away: every GPU is lost, or the devices have changed. What came before is in the file.
    SourceGone,
}

/// A recording.
pub struct Whole {
    path: PathBuf,
    capture: Capture,
    state: SharedState,
}

impl Whole {
    /// Begins the file, which must not exist yet, with the readings from now on. `note` says what is recorded.
    ///
    /// # Errors
    /// No GPU is read, or the file cannot be written.
    pub fn begin(path: PathBuf, note: &str, state: &SharedState, intake: &Intake) -> anyhow::Result<Self> {
        let node = state.slot.node().ok_or_else(|| anyhow::anyhow!("no GPU is read"))?;
        let (view, now_ns) = (View::of(&node), node.clock.now_ns());
        let trigger = Trigger { reason: Reason::Asked, at_ns: now_ns, note: note.to_owned(), owner: None };
        let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let start = Start { kind: RecordingKind::Recording, id, trigger, begin_ns: now_ns, end_ns: i64::MAX };
        let findings = Arc::new(OnBoard(Arc::clone(&state.findings)));
        let capture = Capture::begin(&path, MOST_BYTES, &start, view, Sent::of(intake), findings);
        let mut capture = capture.map_err(|trouble| about(&path, &trouble))?;
        match capture.advance(&[], &|| ()).and_then(|()| capture.sync()) {
            Ok(()) => Ok(Self { path, capture, state: state.clone() }),
            Err(error) => {
                // Without its first transaction the file cannot be played, and would block the next recording of this name.
                drop(capture);
                schema::remove(&path);
                Err(about(&path, &error.into()))
            }
        }
    }

    /// Writes until `stop`, and what comes late after it, at a lower priority than the sampler.
    ///
    /// # Errors
    /// The file can no longer be written, for example because the disk is full. It ends with what was written before.
    pub fn run(mut self, stop: &AtomicBool) -> anyhow::Result<Ended> {
        highwater_engine::thread::stand_back();
        let followed = self.follow(stop);
        let state = match &followed {
            Ok(Ended::Stopped) => State::Complete,
            Ok(Ended::SourceGone) => State::CutShort,
            Err(_) => State::Failed,
        };
        let finished = self.capture.finish(state).map_err(WriteError::from);
        // The first fault is the cause of the second.
        let ended = followed.map_err(|trouble| about(&self.path, &trouble))?;
        finished.map_err(|trouble| about(&self.path, &trouble))?;
        Ok(ended)
    }

    fn follow(&mut self, stop: &AtomicBool) -> Result<Ended, WriteError> {
        let (mut synced, mut is_ending) = (Instant::now(), false);
        loop {
            if stop.load(Ordering::Relaxed) && !is_ending {
                self.capture.end_now();
                is_ending = true;
            }
            let is_over = is_ending && self.capture.is_over();
            self.capture.advance(&[], &|| ())?;
            if is_over {
                return Ok(Ended::Stopped);
            }
            if !self.capture.is_of(self.state.slot.node().as_deref()) {
                return Ok(Ended::SourceGone);
            }
            if synced.elapsed() >= SYNC_PERIOD {
                self.capture.sync()?;
                synced = Instant::now();
            }
            if is_ending { std::thread::park_timeout(WRITE_PERIOD / 5) } else { park_for(WRITE_PERIOD, stop) }
        }
    }
}

fn about(path: &Path, trouble: &WriteError) -> anyhow::Error {
    anyhow::anyhow!("{}: {trouble}", path.display())
}
