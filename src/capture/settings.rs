//! What can be set of the recorder, and where it writes unless told.

use crate::intake::LogLimits;
use highwater_core::clock::SECOND_NS;
use std::path::PathBuf;

/// Bytes of the last events that are kept for recordings: a minute of 2,000 events a second.
const EVENT_BYTES: usize = 8 << 20;
/// Sweeps whose times are kept at most: a minute at 1 ms, 0.75 MiB.
const MOST_SWEEPS: i64 = 1 << 16;
/// How much longer than `before` things are kept, so that a trigger that comes a little late still finds its begin.
const SLACK_NS: i64 = 5 * SECOND_NS;
/// By how many times `after` further triggers can lengthen a capture.
const LONGEST_AFTERS: i64 = 6;

/// How captures are taken and kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where they are written; `None` for nowhere: no captures.
    pub directory: Option<PathBuf>,
    /// How far before its trigger a capture begins, nanoseconds.
    pub before_ns: i64,
    /// How far after its trigger it ends, nanoseconds.
    pub after_ns: i64,
    /// How many are kept.
    pub most_files: usize,
    /// How many bytes they take together.
    pub most_bytes: u64,
    /// How long after a capture no other one begins for the same reason, nanoseconds.
    pub cooldown_ns: i64,
    /// How many may be asked for in an hour.
    pub asks_per_hour: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            directory: default_directory(),
            before_ns: 30 * SECOND_NS,
            after_ns: 10 * SECOND_NS,
            most_files: 20,
            most_bytes: 256 << 20,
            cooldown_ns: 300 * SECOND_NS,
            asks_per_hour: 36,
        }
    }
}

impl Settings {
    /// What the intake has to keep of the last events.
    #[must_use]
    pub fn event_log(&self) -> LogLimits {
        let bytes = if self.directory.is_some() { EVENT_BYTES } else { 0 };
        LogLimits { keep_ns: self.before_ns.saturating_add(SLACK_NS), bytes }
    }

    /// How many sweeps' times are to be kept at this period.
    #[must_use]
    pub fn sweeps(&self, period_ns: i64) -> usize {
        let sweeps = self.before_ns.saturating_add(SLACK_NS) / period_ns.max(1);
        let kept = if self.directory.is_some() { sweeps.clamp(0, MOST_SWEEPS) } else { 0 };
        usize::try_from(kept).unwrap_or(0)
    }

    /// How far after its first trigger a capture that further ones lengthen ends at the latest, nanoseconds.
    #[must_use]
    pub fn longest_after_ns(&self) -> i64 {
        self.after_ns.saturating_mul(LONGEST_AFTERS)
    }

    /// Bytes that one capture may take: a third of all, so that its journal and the reserve have room too.
    #[must_use]
    pub fn most_capture_bytes(&self) -> u64 {
        self.most_bytes / 3
    }
}

/// Where captures go unless told: where systemd says, else the user's state, else `/var/lib` for root.
#[must_use]
pub fn default_directory() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("HOME").map(|home| home.join(".local/state/highwater"));
    let root = || rustix::process::geteuid().is_root().then(|| PathBuf::from("/var/lib/highwater"));
    let user = variable("XDG_STATE_HOME").map(|state| state.join("highwater"));
    let state = variable("STATE_DIRECTORY").or(user).or_else(root).or_else(home)?;
    Some(state.join("captures"))
}
