//! Plays a recording in place of lanes: memory and annotations at their recorded times, on one thread.

use super::Shared;
use super::told::Told;
use crate::config::{Settings, SourceSpec};
use crate::intake::due;
use crate::node::Node;
use crate::recording::{Options, Replay};
use crate::sample;
use crate::source::Source as _;
use highwater_core::clock::{Clock, Manual};
use highwater_core::jobs::Sender;
use std::sync::Arc;

/// Bad lines of a recording that are logged individually.
const MOST_SKIPPED_TOLD: usize = 10;

/// A recording, opened as a source, with its clock.
pub(super) struct Playback {
    replay: Arc<Replay>,
    /// The recorded time, which everything uses as its clock.
    pub clock: Arc<Manual>,
}

impl Playback {
    /// Opens the recording that the settings name, if any, and logs its bad lines.
    ///
    /// # Errors
    /// The recording cannot be read.
    pub fn open(settings: &Settings, live: &dyn Clock) -> anyhow::Result<Option<Self>> {
        let SourceSpec::Replay(path) = &settings.source else { return Ok(None) };
        let shift_to_now = settings.replay_shift_to_now.then(|| live.now_ns());
        let replay = Replay::open(path, Options { shift_to_now })?;
        let skipped = replay.skipped();
        for line in skipped.first.iter().take(MOST_SKIPPED_TOLD) {
            tracing::warn!(file = %line.file.display(), line = line.line, "skipped: {}", line.message);
        }
        if skipped.count > MOST_SKIPPED_TOLD {
            tracing::warn!("{} lines of the recording were skipped in total", skipped.count);
        }
        let clock = Arc::new(Manual::at(replay.begin_ns().saturating_sub(1)));
        Ok(Some(Self { replay: Arc::new(replay), clock }))
    }

    /// Plays a recording: memory and annotations in the order of their times, with the join after each, so that the
    /// speed changes no result.
    pub fn play(self, shared: &Shared, live: &Arc<dyn Clock>) {
        let Self { replay, clock } = self;
        let begin_ns = replay.begin_ns();
        let mut annotations = replay.annotations().peekable();
        let recording = Arc::clone(&replay);
        let made = Node::new(replay, Arc::clone(&clock) as _, shared.settings.ring(1), shared.settings.periods(), None);
        let (node, writers) = match made {
            Ok((node, writers)) => (Arc::new(node), writers),
            Err(error) => return tracing::error!("cannot create the rings: {error}"),
        };
        shared.put_in_place(&node);
        tracing::info!(source = node.source.description(), gpus = node.gpus.len(), "replaying");
        let (started_ns, mut refused, mut played_ns) = (live.now_ns(), 0, i64::MIN);
        let before = |at_ns: i64| {
            // Before memory is read: a GPU that is down must not be read.
            recording.replay_changes(&node.gpus, std::mem::replace(&mut played_ns, at_ns), at_ns);
            pace(shared, &**live, started_ns, at_ns.saturating_sub(begin_ns));
            for annotation in due(&mut annotations, at_ns) {
                clock.advance_to(annotation.time_unix_nano.unwrap_or(at_ns));
                if let Err(refusal) = shared.intake.take(annotation, &Sender::DAEMON) {
                    refused += 1;
                    if refused <= MOST_SKIPPED_TOLD {
                        tracing::warn!("annotation of the recording refused: {refusal}");
                    }
                }
            }
        };
        let mut told = Told::default();
        let after = |at_ns: i64| {
            node.read_recorded(at_ns);
            if recording.is_turn(at_ns) {
                shared.join(&node, &mut told, at_ns);
            }
        };
        let period_ns = shared.settings.period_ns;
        if sample::run_replay(node.sampler(writers), &clock, period_ns, &shared.stop, before, after) {
            tracing::info!("the recording has ended; its last state stays available");
        }
    }
}

/// Waits until `offset_ns` of the recording is due at the configured speed.
fn pace(shared: &Shared, live: &dyn Clock, started_ns: i64, offset_ns: i64) {
    let Some(speed) = shared.settings.replay_speed else { return };
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "pacing to a microsecond")]
    let due_ns = started_ns.saturating_add((offset_ns as f64 / speed) as i64);
    shared.wait(due_ns.saturating_sub(live.now_ns()));
}
