//! The recorder's settings, and the default directory.

use highwater_core::clock::SECOND_NS;
use highwater_engine::intake::LogLimits;
use std::path::PathBuf;

/// Bytes of the last events that are kept for recordings: a minute of 2,000 events a second.
const EVENT_BYTES: usize = 8 << 20;
/// The most sweeps whose times are kept: a minute at 1 ms, 0.75 MiB.
const MOST_SWEEPS: i64 = 1 << 16;
/// How much longer than `before` data is kept, so that the beginning is still there if a trigger comes a little late.
const SLACK_NS: i64 = 5 * SECOND_NS;
/// Further triggers can extend a capture to at most this many times `after`.
const LONGEST_AFTERS: i64 = 6;

/// How captures are taken and kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureSettings {
    /// Where they are written; `None` for no captures.
    pub directory: Option<PathBuf>,
    /// Whether everything is recorded, from the begin to the end of this process.
    pub is_recording: bool,
    /// How far before its trigger a capture begins, nanoseconds.
    pub before_ns: i64,
    /// How far after its trigger it ends, nanoseconds.
    pub after_ns: i64,
    /// How many are kept.
    pub most_files: usize,
    /// The most bytes that they take together.
    pub most_bytes: u64,
    /// How long after a capture no other one begins for the same reason, nanoseconds.
    pub cooldown_ns: i64,
    /// How many may be requested in an hour.
    pub asks_per_hour: usize,
}

impl Default for CaptureSettings {
    fn default() -> Self {
        Self {
            directory: default_directory(),
            is_recording: false,
            before_ns: 30 * SECOND_NS,
            after_ns: 10 * SECOND_NS,
            most_files: 20,
            most_bytes: 256 << 20,
            cooldown_ns: 300 * SECOND_NS,
            asks_per_hour: 36,
        }
    }
}

impl CaptureSettings {
    /// Whether anything is written, so that what it needs of the past must be kept.
    fn is_on(&self) -> bool {
        self.directory.is_some() || self.is_recording
    }

    /// How much the intake has to keep of the last events.
    #[must_use]
    pub fn event_log(&self) -> LogLimits {
        let bytes = if self.is_on() { EVENT_BYTES } else { 0 };
        LogLimits { keep_ns: self.before_ns.saturating_add(SLACK_NS), bytes }
    }

    /// How many sweeps' times to keep at this period.
    #[must_use]
    pub fn sweeps(&self, period_ns: i64) -> usize {
        let sweeps = self.before_ns.saturating_add(SLACK_NS) / period_ns.max(1);
        let kept = if self.is_on() { sweeps.clamp(0, MOST_SWEEPS) } else { 0 };
        usize::try_from(kept).unwrap_or(0)
    }

    /// How long after its first trigger a capture ends at the latest, however many triggers extend it, nanoseconds.
    #[must_use]
    pub fn longest_after_ns(&self) -> i64 {
        self.after_ns.saturating_mul(LONGEST_AFTERS)
    }

    /// The most bytes of one capture: a third of all, so that its journal and the reserve have room too.
    #[must_use]
    pub fn most_capture_bytes(&self) -> u64 {
        self.most_bytes / 3
    }
}

/// The default directory: below systemd's `STATE_DIRECTORY`, else `XDG_STATE_HOME`, else for root `/var/lib`, else the
/// home folder's `.local/state`.
#[must_use]
pub fn default_directory() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("HOME").map(|home| home.join(".local/state/highwater"));
    let root = || rustix::process::geteuid().is_root().then(|| PathBuf::from("/var/lib/highwater"));
    let user = variable("XDG_STATE_HOME").map(|state| state.join("highwater"));
    let state = variable("STATE_DIRECTORY").or(user).or_else(root).or_else(home)?;
    Some(state.join("captures"))
}
