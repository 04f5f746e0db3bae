//! Plays a recording in place of lanes: memory and annotations at their recorded times, on one thread.

use super::finding_log::FindingLog;
use super::shared::SharedParts;
use crate::config::{Settings, SourceSpec};
use highwater_analysis::replay;
use highwater_core::clock::{Clock, Manual, SECOND_NS};
use highwater_core::jobs::Sender;
use highwater_core::source::Source as _;
use highwater_engine::intake::due;
use highwater_engine::node::Node;
use highwater_engine::recording::{Options, Replay};
use highwater_engine::sample;
use std::sync::Arc;

/// How many bad lines of a recording, and how many of its refused annotations, are logged one by one.
const MOST_SKIPPED_LISTED: usize = 10;

/// How often progress is reported at most.
const REPORTED_EVERY_NS: i64 = 2 * SECOND_NS;

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
        // A large one takes seconds to read.
        tracing::info!(recording = %path.display(), "reading");
        let replay = replay::open(path, Options { shift_to_now, part: settings.replay_part })?;
        let skipped = replay.skipped();
        for line in skipped.first.iter().take(MOST_SKIPPED_LISTED) {
            tracing::warn!(file = %line.file.display(), line = line.line, "skipped: {}", line.message);
        }
        if skipped.count > MOST_SKIPPED_LISTED {
            tracing::warn!("{} lines of the recording were skipped in total", skipped.count);
        }
        let clock = Arc::new(Manual::at(replay.begin_ns().saturating_sub(1)));
        Ok(Some(Self { replay: Arc::new(replay), clock }))
    }

    /// What is replayed, and what that was recorded from.
    pub fn description(&self) -> String {
        self.replay.description()
    }

    /// Plays a recording: memory and annotations in the order of their times, with the join after each, so that the
    /// speed changes no result.
    pub fn play(self, shared: &SharedParts, live: &Arc<dyn Clock>) {
        let Self { replay, clock } = self;
        let begin_ns = replay.begin_ns();
        let mut annotations = replay.annotations().peekable();
        let recording = Arc::clone(&replay);
        let made = Node::new(replay, Arc::clone(&clock) as _, shared.settings.ring(1), shared.settings.periods(), None);
        let (node, writers) = match made {
            Ok((mut node, writers)) => {
                node.join.count_free_below(&shared.settings.free_below);
                (Arc::new(node), writers)
            }
            Err(error) => return tracing::error!("cannot create the rings: {error}"),
        };
        shared.put_in_place(&node);
        let span_ns = recording.end_ns().saturating_sub(begin_ns);
        let (source, gpus) = (node.source.description(), node.gpus.len());
        tracing::info!(source, gpus, seconds = span_ns / SECOND_NS, "replaying");
        let (started_ns, mut refused, mut played_ns) = (live.now_ns(), 0, i64::MIN);
        let mut progress = Progress { begin_ns, span_ns, tenths: 0, last_ns: started_ns };
        let before = |at_ns: i64| {
            // Before memory is read: a GPU that is down must not be read.
            recording.replay_changes(&node.gpus, std::mem::replace(&mut played_ns, at_ns), at_ns);
            pace(shared, &**live, started_ns, at_ns.saturating_sub(begin_ns));
            for annotation in due(&mut annotations, at_ns) {
                clock.advance_to(annotation.time_unix_nano.unwrap_or(at_ns));
                if let Err(refusal) = shared.intake.take(annotation, &Sender::DAEMON) {
                    refused += 1;
                    if refused <= MOST_SKIPPED_LISTED {
                        tracing::warn!("annotation of the recording refused: {refusal}");
                    }
                }
            }
        };
        let mut log = FindingLog::default();
        let after = |at_ns: i64| {
            node.read_recorded(at_ns);
            if let Some(percent) = progress.reached(at_ns, || live.now_ns()) {
                tracing::info!("{percent} % of the recording is played");
            }
            if recording.is_turn(at_ns) {
                shared.join(&node, &mut log, at_ns);
            }
        };
        let period_ns = shared.settings.period_ns;
        if sample::run_replay(node.sampler(writers), &clock, period_ns, &shared.stop, before, after) {
            tracing::info!("the recording has ended; its last state stays available");
        }
    }
}

/// How much of a recording has been played, for the log.
struct Progress {
    begin_ns: i64,
    span_ns: i64,
    /// The tenths that were last reported.
    tenths: i64,
    /// When they were, in live time.
    last_ns: i64,
}

impl Progress {
    /// The percentage to report when the playback has reached this recorded time: each tenth, but at any speed not more often
    /// than every [`REPORTED_EVERY_NS`] of live time.
    fn reached(&mut self, at_ns: i64, now_ns: impl FnOnce() -> i64) -> Option<i64> {
        let tenths = at_ns.saturating_sub(self.begin_ns).saturating_mul(10) / self.span_ns.max(1);
        if tenths <= self.tenths || tenths >= 10 {
            return None;
        }
        let now_ns = now_ns();
        if now_ns.saturating_sub(self.last_ns) < REPORTED_EVERY_NS {
            return None;
        }
        (self.tenths, self.last_ns) = (tenths, now_ns);
        Some(tenths * 10)
    }
}

/// Waits until `offset_ns` of the recording is due at the configured speed.
fn pace(shared: &SharedParts, live: &dyn Clock, started_ns: i64, offset_ns: i64) {
    let Some(speed) = shared.settings.replay_speed else { return };
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "pacing to a microsecond")]
    let due_ns = started_ns.saturating_add((offset_ns as f64 / speed) as i64);
    shared.wait(due_ns.saturating_sub(live.now_ns()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_reported_once_and_at_full_speed_not_too_often() {
        let mut progress = Progress { begin_ns: 1_000, span_ns: 200, tenths: 0, last_ns: 0 };
        let mut at = |at_ns, seconds: i64| progress.reached(at_ns, || seconds * SECOND_NS);
        assert_eq!([at(1_019, 5), at(1_020, 5), at(1_039, 9), at(1_040, 9)], [None, Some(10), None, Some(20)]);
        assert_eq!([at(1_100, 10), at(1_101, 11), at(1_101, 20)], [None, Some(50), None], "2 s after the last one");
        assert_eq!(at(1_200, 99), None, "the end has its own line");
        let mut instant = Progress { begin_ns: 0, span_ns: 0, tenths: 0, last_ns: 0 };
        assert_eq!(instant.reached(0, || 99), None);
    }
}
