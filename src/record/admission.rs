//! Which triggers begin a capture, which lengthen the one that is taken, and which are turned away. Pure.

use super::directory::{Listed, State};
use super::settings::Settings;
use super::stats::Outcome;
use super::trigger::Trigger;
use crate::files::Folder;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Further triggers that one capture tells of between two of its transactions; more only lengthen it.
const MOST_JOINED: usize = 64;

/// Why a capture that somebody asked for is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The recorder is switched off.
    #[error("captures are off: `captures.directory` is `none`")]
    Off,
    /// It asks for more than is kept, or for longer than is taken.
    #[error("{0}")]
    Limit(String),
    /// Another one is being taken.
    #[error("capture `{id}` is being taken; ask again when it is complete")]
    Busy {
        /// That one.
        id: String,
    },
    /// There is no directory that can be written to.
    #[error("captures cannot be written: {0}")]
    Unavailable(String),
    /// There is nothing to tell of.
    #[error("no GPU is read at the moment")]
    NoGpus,
    /// The daemon is about to end.
    #[error("the recorder takes no captures any more")]
    Ended,
}

impl Refusal {
    /// The outcome that counts it; none where nothing was tried.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match self {
            Refusal::Off | Refusal::Limit(_) => None,
            Refusal::Busy { .. } => Some(Outcome::Busy),
            Refusal::Unavailable(_) => Some(Outcome::Unavailable),
            Refusal::NoGpus => Some(Outcome::NoGpus),
            Refusal::Ended => Some(Outcome::Dropped),
        }
    }
}

/// The capture that is being taken.
#[derive(Debug, Clone)]
pub(super) struct Running {
    pub id: String,
    pub begin_ns: i64,
    pub end_ns: i64,
    longest_ns: i64,
    /// What it has to tell of beside its first trigger.
    pub joined: Vec<Trigger>,
    reasons: Vec<&'static str>,
}

/// Everything that decides about triggers. Behind a lock that is held for microseconds, and never while a file is
/// written.
#[derive(Debug, Default)]
pub(super) struct Desk {
    pub running: Option<Running>,
    /// Until when the last capture of each reason reached, nanoseconds of the timeline.
    ended: BTreeMap<&'static str, i64>,
    /// Why nothing can be written.
    pub trouble: Option<String>,
    /// Where they are; `None` before it could be had.
    pub folder: Option<Arc<Folder>>,
    /// All captures, oldest first.
    pub listed: BTreeMap<String, Listed>,
}

/// What becomes of a trigger.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admitted {
    Begin,
    Joined,
    Cooldown,
    /// One is being taken that does not reach back to it.
    Busy,
}

impl Desk {
    /// Decides about a trigger that comes by itself.
    pub fn admit(&mut self, trigger: &Trigger, settings: &Settings) -> Admitted {
        let label = trigger.reason.label();
        if let Some(running) = &mut self.running {
            if trigger.at_ns < running.begin_ns {
                return Admitted::Busy;
            }
            let end_ns = trigger.at_ns.saturating_add(settings.after_ns).min(running.longest_ns);
            running.end_ns = running.end_ns.max(end_ns);
            if running.joined.len() < MOST_JOINED {
                running.joined.push(trigger.clone());
            }
            if !running.reasons.contains(&label) {
                running.reasons.push(label);
            }
            return Admitted::Joined;
        }
        let is_cool = |end_ns: &i64| trigger.at_ns >= end_ns.saturating_add(settings.cooldown_ns);
        if self.ended.get(label).is_none_or(is_cool) { Admitted::Begin } else { Admitted::Cooldown }
    }

    /// Begins one.
    pub fn begin(&mut self, id: String, trigger: &Trigger, (begin_ns, end_ns): (i64, i64), settings: &Settings) {
        let longest_ns = end_ns.max(trigger.at_ns.saturating_add(settings.longest_after_ns()));
        let reasons = vec![trigger.reason.label()];
        self.running = Some(Running { id, begin_ns, end_ns, longest_ns, joined: Vec::new(), reasons });
    }

    /// The capture of this name is over; its reasons cool down.
    pub fn end(&mut self, id: &str) {
        let Some(running) = self.running.take_if(|running| running.id == id) else { return };
        for reason in running.reasons {
            let ended_ns = self.ended.entry(reason).or_insert(i64::MIN);
            *ended_ns = running.end_ns.max(*ended_ns);
        }
    }

    /// Until when the running capture goes on, and what it has to tell of.
    pub fn take_joined(&mut self) -> (i64, Vec<Trigger>) {
        let Some(running) = &mut self.running else { return (i64::MIN, Vec::new()) };
        (running.end_ns, std::mem::take(&mut running.joined))
    }

    /// Closes the capture of this name, of which all up to `end_ns` is written, for further triggers; `false` if one has
    /// come meanwhile.
    pub fn close(&mut self, id: &str, end_ns: i64) -> bool {
        let has_more =
            self.running.as_ref().is_some_and(|running| running.end_ns > end_ns || !running.joined.is_empty());
        if !has_more {
            self.end(id);
        }
        !has_more
    }

    /// Bytes of all captures that are whole.
    pub fn bytes(&self) -> u64 {
        let whole = self.listed.values().filter(|listed| listed.state != State::Writing);
        whole.map(|listed| listed.bytes).sum()
    }

    /// The folder was looked at anew; what is about to be written is not there yet.
    pub fn relist(&mut self, listed: BTreeMap<String, Listed>) {
        self.listed.retain(|_, listed| listed.state == State::Writing);
        self.listed.extend(listed);
    }

    /// What takes all captures beyond their bounds, oldest first; never one that is being written, which is one of them
    /// and among the `other_bytes`.
    pub fn to_remove(&self, settings: &Settings, other_bytes: u64) -> Vec<String> {
        let (mut files, mut bytes) = (self.listed.len(), self.bytes() + other_bytes);
        let mut remove = Vec::new();
        for listed in self.listed.values().filter(|listed| listed.state != State::Writing) {
            if files <= settings.most_files && bytes <= settings.most_bytes {
                break;
            }
            files -= 1;
            bytes -= listed.bytes;
            remove.push(listed.id.clone());
        }
        remove
    }
}

#[cfg(test)]
mod tests {
    use super::super::trigger::Reason;
    use super::*;
    use crate::clock::SECOND_NS;

    fn settings() -> Settings {
        let (before_ns, after_ns) = (30 * SECOND_NS, 10 * SECOND_NS);
        Settings { directory: None, before_ns, after_ns, most_files: 3, most_bytes: 100, cooldown_ns: 60 * SECOND_NS }
    }

    fn oom(at_s: i64) -> Trigger {
        let reason = Reason::Oom { job: "job".into(), rank: 0 };
        Trigger { reason, at_ns: at_s * SECOND_NS, note: String::new() }
    }

    fn begin(desk: &mut Desk, trigger: &Trigger) {
        let interval = (trigger.at_ns - 30 * SECOND_NS, trigger.at_ns + 10 * SECOND_NS);
        desk.begin("one".into(), trigger, interval, &settings());
    }

    #[test]
    fn further_triggers_lengthen_a_capture_up_to_its_limit() {
        let (mut desk, settings) = (Desk::default(), settings());
        assert_eq!(desk.admit(&oom(100), &settings), Admitted::Begin);
        begin(&mut desk, &oom(100));
        assert_eq!(desk.admit(&oom(105), &settings), Admitted::Joined);
        assert_eq!(desk.running.as_ref().unwrap().end_ns, 115 * SECOND_NS);
        for at_s in 106..200 {
            let trigger = Trigger { reason: Reason::Finding("low_headroom"), ..oom(at_s) };
            assert_eq!(desk.admit(&trigger, &settings), Admitted::Joined);
        }
        let running = desk.running.clone().unwrap();
        assert_eq!((running.end_ns, running.joined.len()), (160 * SECOND_NS, MOST_JOINED));
        assert_eq!(desk.admit(&oom(60), &settings), Admitted::Busy, "what lies before its begin is not in it");
        desk.end("one");
        let headroom = Trigger { reason: Reason::Finding("low_headroom"), ..oom(219) };
        assert_eq!(desk.admit(&headroom, &settings), Admitted::Cooldown, "what joined cools down too");
    }

    #[test]
    fn a_reason_cools_down_and_others_do_not() {
        let (mut desk, settings) = (Desk::default(), settings());
        begin(&mut desk, &oom(100));
        desk.end("one");
        assert_eq!(desk.admit(&oom(169), &settings), Admitted::Cooldown);
        assert_eq!(desk.admit(&Trigger { reason: Reason::Finding("xid"), ..oom(111) }, &settings), Admitted::Begin);
        assert_eq!(desk.admit(&oom(170), &settings), Admitted::Begin);
    }

    #[test]
    fn the_oldest_go_first_when_there_are_too_many_or_too_large_ones() {
        let mut desk = Desk::default();
        let mut list = |id: &str, bytes, state, other_bytes| {
            let (id, reason, note) = (id.to_owned(), "oom".to_owned(), String::new());
            let listed = Listed { id, reason, note, begin_unix_nano: None, end_unix_nano: None, bytes, state };
            desk.listed.insert(listed.id.clone(), listed);
            desk.to_remove(&settings(), other_bytes)
        };
        assert!(list("a", 10, State::Complete, 0).is_empty());
        assert!(list("b", 40, State::Interrupted, 0).is_empty());
        assert!(list("c", 40, State::Complete, 10).is_empty());
        assert_eq!(list("d", 0, State::Writing, 0), ["a"]);
        assert_eq!(list("d", 25, State::Writing, 25), ["a", "b"]);
        assert_eq!(list("d", 1_000, State::Writing, 1_000), ["a", "b", "c"], "and never the one that is written");
    }
}
