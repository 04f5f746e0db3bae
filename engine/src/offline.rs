//! Plays a recording at once, on the calling thread: the stages of the daemon without its threads.
//!
//! Enters: a recording. Leaves: what each turn of the join and the detectors found. Absent on purpose: pacing, logging
//! and everything that exports.

use crate::intake::{Intake, due};
use crate::node::{Node, Periods};
use crate::recording::Replay;
use crate::sample;
use highwater_core::clock::{Manual, SECOND_NS};
use highwater_core::detect::{self, Change, Detect};
use highwater_core::jobs::{Limits, Profile, Sender};
use highwater_core::phases::{Ledger, RankKey};
use highwater_core::ring;
use highwater_core::source::Source as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What a recording is played with.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// How often lanes read.
    pub periods: Periods,
    /// The ring of each GPU.
    pub ring: ring::Config,
    /// Limits on what jobs send.
    pub limits: Limits,
    /// Thresholds for findings.
    pub detect: detect::Settings,
    /// Whether the counts of the jobs' allocators are left out, as if the jobs had not sent them.
    pub without_counters: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let ring = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1 };
        Self {
            periods: Periods::default(),
            ring,
            limits: Limits::default(),
            detect: detect::Settings::default(),
            without_counters: false,
        }
    }
}

/// What is left after a recording was played.
pub struct Played {
    /// The detectors with the findings that had not ended.
    pub detect: Detect,
    /// How many annotations were refused.
    pub refused: usize,
    /// The last layer profile of each rank.
    pub profiles: Vec<(RankKey, Arc<Profile>)>,
}

/// Plays a whole recording, and calls `turn` with the time of each turn, the jobs and their phases after it, and what
/// the detectors found in it.
///
/// # Errors
/// There is not enough memory for the rings.
pub fn play(
    replay: &Arc<Replay>,
    settings: &Settings,
    mut turn: impl FnMut(i64, &Ledger, Change),
) -> anyhow::Result<Played> {
    let clock = Arc::new(Manual::at(replay.begin_ns().saturating_sub(1)));
    let (node, writers) =
        Node::new(Arc::clone(replay) as _, Arc::clone(&clock) as _, settings.ring, settings.periods, None)?;
    let intake = Intake::new(settings.limits, Arc::clone(&clock) as _, Arc::default());
    intake.set_devices(node.source.devices());
    let detect = Detect::new(settings.detect.clone());
    let mut annotations = replay.annotations().peekable();
    let (mut played_ns, mut refused) = (i64::MIN, 0);
    let before = |at_ns: i64| {
        replay.replay_changes(&node.gpus, std::mem::replace(&mut played_ns, at_ns), at_ns);
        for mut annotation in due(&mut annotations, at_ns) {
            if let Some(memory) = annotation.memory.as_mut().filter(|_| settings.without_counters) {
                (memory.alloc_retries, memory.ooms) = (None, None);
            }
            clock.advance_to(annotation.time_unix_nano.unwrap_or(at_ns));
            refused += usize::from(intake.take(annotation, &Sender::DAEMON).is_err());
        }
    };
    let after = |at_ns: i64| {
        node.read_recorded(at_ns);
        if !replay.is_turn(at_ns) {
            return;
        }
        node.advance(intake.ledger(), at_ns);
        let change = detect.advance(&node.join, intake.ledger(), at_ns);
        turn(at_ns, intake.ledger(), change);
    };
    sample::run_replay(node.sampler(writers), &clock, settings.periods.fast_ns, &AtomicBool::new(false), before, after);
    let profiles = intake.jobs().profiles().collect();
    Ok(Played { detect, refused, profiles })
}
