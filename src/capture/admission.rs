//! Which triggers begin a capture, which extend the running one, and which are turned away. Pure.

use super::asking::Asking;
use super::directory::Listed;
use super::settings::CaptureSettings;
use super::shares::{Class, Shares};
use super::stats::Outcome;
use super::trigger::{Reason, Trigger};
use highwater_core::jobs::Scope;
use highwater_engine::files::Folder;
use highwater_engine::recording::State;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The most triggers that wait to be recorded by the running capture; further ones of a known cause only extend it. As
/// many wait for the next capture; then further ones of a cause that waits already are refused.
const MOST_JOINED: usize = 64;

/// The most failed captures that stay listed.
const MOST_FAILED: usize = 16;
/// The longest trouble that is listed, characters.
const LONGEST_TROUBLE: usize = 300;

/// Why a requested capture is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The recorder is switched off.
    #[error("captures are off: `captures.directory` is `none`")]
    Off,
    /// It asks for more than is kept, or for longer than is allowed.
    #[error("{0}")]
    Limit(String),
    /// Another capture is being taken.
    #[error("capture `{id}` is being taken; ask again when it is complete")]
    Busy {
        /// Its name.
        id: String,
    },
    /// Captures were requested too often.
    #[error("captures are requested too often; `captures.asks_per_hour` is the limit")]
    TooOften {
        /// How long to wait.
        wait: Duration,
    },
    /// Captures that it must not push out take all the room.
    #[error(
        "captures of findings and `oom` marks leave no room; `captures.most_bytes` and `captures.most_files` limit it"
    )]
    NoRoom,
    /// No directory can be written to.
    #[error("captures cannot be written: {0}")]
    Unavailable(String),
    /// No GPU is being read.
    #[error("no GPU is read at the moment")]
    NoGpus,
    /// The daemon is about to end.
    #[error("the recorder no longer takes captures")]
    Ended,
}

impl Refusal {
    /// The outcome that counts it; `None` if nothing was tried.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match self {
            Refusal::Off | Refusal::Limit(_) => None,
            Refusal::Busy { .. } => Some(Outcome::Busy),
            Refusal::TooOften { .. } => Some(Outcome::TooOften),
            Refusal::NoRoom => Some(Outcome::NoRoom),
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
    /// Triggers to record besides the first.
    pub joined: Vec<Trigger>,
    /// The causes of the capture, each with the end that its last trigger asked for, nanoseconds of the timeline. A cause cools
    /// down from its own end, not from that of the capture.
    reasons: Vec<(Cause, i64)>,
    /// Whether it ends to make way for another capture, which was not requested.
    pub yields: bool,
}

/// A reason, and the owner of the job that it is about. Each cause cools down on its own, so no owner delays another's captures.
type Cause = (&'static str, Option<Scope>);

/// Everything that decides about triggers. It is behind a lock that is held for microseconds, and never while a file is
/// written.
#[derive(Debug, Default)]
pub(super) struct Admission {
    pub running: Option<Running>,
    /// Until when each reason and owner wanted its last capture, nanoseconds of the timeline.
    ended: BTreeMap<Cause, i64>,
    /// Why nothing can be written.
    pub trouble: Option<String>,
    /// The folder of captures; `None` until it could be opened.
    pub folder: Option<Arc<Folder>>,
    /// All captures that have a file, oldest first.
    pub listed: BTreeMap<String, Listed>,
    /// The last captures that failed, oldest first.
    pub failed: VecDeque<Listed>,
    /// When the next capture may be requested.
    pub asking: Asking,
    /// The triggers that the running capture cannot have, for the one after it.
    next: Vec<Trigger>,
}

/// The decision about a trigger.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admitted {
    Begin,
    /// The running capture records it. It is counted then: if that capture ends first, it is for the next one.
    Joined,
    /// It extends the running capture and is not recorded: its cause is known, and [`MOST_JOINED`] triggers wait
    /// already.
    Covered,
    Cooldown,
    /// It is refused: it is older than the begin of the running capture, which was not only requested; or it would wait
    /// for the next capture, and [`MOST_JOINED`] triggers wait already, one of them with its cause.
    Busy,
    /// It waits for the next capture. Either it is later than any end that the running capture may have; or the running
    /// capture was only requested and began too late to cover it, and now ends early.
    Next,
}

impl Admission {
    /// Decides about a trigger that is not a request.
    pub fn admit(&mut self, trigger: &Trigger, settings: &CaptureSettings) -> Admitted {
        let cause = cause(trigger);
        if let Some(running) = &mut self.running {
            let is_missed = trigger.at_ns.saturating_sub(settings.before_ns) < running.begin_ns;
            let makes_way = is_missed && running.is_only_asked_for();
            if makes_way || trigger.at_ns >= running.longest_ns {
                running.yields |= makes_way;
                if self.next.len() >= MOST_JOINED && self.next.iter().any(|next| self::cause(next) == cause) {
                    return Admitted::Busy;
                }
                self.next.push(trigger.clone());
                return Admitted::Next;
            }
            if trigger.at_ns < running.begin_ns {
                return Admitted::Busy;
            }
            let end_ns = trigger.at_ns.saturating_add(settings.after_ns).min(running.longest_ns);
            running.end_ns = running.end_ns.max(end_ns);
            let known = running.reasons.iter_mut().find(|(known, _)| *known == cause);
            let is_recorded = known.is_none() || running.joined.len() < MOST_JOINED;
            if is_recorded {
                running.joined.push(trigger.clone());
            }
            if let Some((_, wanted_ns)) = known {
                *wanted_ns = end_ns.max(*wanted_ns);
                return if is_recorded { Admitted::Joined } else { Admitted::Covered };
            }
            // From now on its class and its owners also follow from this reason.
            if let Some(listed) = self.listed.get_mut(&running.id) {
                listed.also_for(cause.0, trigger.owner_text());
            }
            running.reasons.push((cause, end_ns));
            return Admitted::Joined;
        }
        let is_cool = |end_ns: i64| trigger.at_ns >= end_ns.saturating_add(settings.cooldown_ns);
        self.ended.retain(|_, end_ns| !is_cool(*end_ns));
        if self.ended.contains_key(&cause) { Admitted::Cooldown } else { Admitted::Begin }
    }

    /// Begins a capture.
    pub fn begin(&mut self, id: String, trigger: &Trigger, (begin_ns, end_ns): (i64, i64), settings: &CaptureSettings) {
        let longest_ns = end_ns.max(trigger.at_ns.saturating_add(settings.longest_after_ns()));
        let reasons = vec![(cause(trigger), end_ns)];
        self.running = Some(Running { id, begin_ns, end_ns, longest_ns, joined: Vec::new(), reasons, yields: false });
    }

    /// Whether the capture of this name must end for another one.
    pub fn yields(&self, id: &str) -> bool {
        self.running.as_ref().is_some_and(|running| running.id == id && running.yields)
    }

    /// The triggers that the last capture could not have.
    pub fn take_next(&mut self) -> Vec<Trigger> {
        std::mem::take(&mut self.next)
    }

    /// Lists the capture of this name as failed: nothing was written, or its file cannot be finished.
    pub fn fail(&mut self, id: &str, trouble: &str) {
        let Some(mut listed) = self.listed.remove(id) else { return };
        (listed.state, listed.bytes, listed.trouble) = (State::Failed, 0, Some(one_line(trouble)));
        self.failed.push_back(listed);
        if self.failed.len() > MOST_FAILED {
            self.failed.pop_front();
        }
    }

    /// Notes a problem of the capture of this name, which has a file all the same.
    pub fn note_trouble(&mut self, id: &str, trouble: &str) {
        if let Some(listed) = self.listed.get_mut(id) {
            listed.trouble = Some(one_line(trouble));
        }
    }

    /// The capture of this name is over; its reasons cool down. Triggers that joined it and are not recorded, because it
    /// ended early, are for the next one.
    pub fn end(&mut self, id: &str) {
        let Some(running) = self.running.take_if(|running| running.id == id) else { return };
        let left: Vec<Cause> = running.joined.iter().map(cause).collect();
        for (reason, wanted_ns) in running.reasons.into_iter().filter(|(reason, _)| !left.contains(reason)) {
            let ended_ns = self.ended.entry(reason).or_insert(i64::MIN);
            *ended_ns = wanted_ns.max(*ended_ns);
        }
        self.next.extend(running.joined);
    }

    /// When the running capture ends, and the triggers that it has yet to record.
    pub fn take_joined(&mut self) -> (i64, Vec<Trigger>) {
        let Some(running) = &mut self.running else { return (i64::MIN, Vec::new()) };
        (running.end_ns, std::mem::take(&mut running.joined))
    }

    /// Closes the capture of this name to further triggers, once everything up to `end_ns` is written. Returns `false`
    /// if a trigger has come meanwhile.
    pub fn close(&mut self, id: &str, end_ns: i64) -> bool {
        let has_more =
            self.running.as_ref().is_some_and(|running| running.end_ns > end_ns || !running.joined.is_empty());
        if !has_more {
            self.end(id);
        }
        !has_more
    }

    /// Bytes of all finished captures.
    pub fn bytes(&self) -> u64 {
        let whole = self.listed.values().filter(|listed| listed.state != State::Writing);
        whole.map(|listed| listed.bytes).sum()
    }

    /// Replaces the list after the folder was read again. A capture that is about to be written is not in the folder
    /// yet.
    pub fn relist(&mut self, listed: BTreeMap<String, Listed>) {
        let known = std::mem::take(&mut self.listed);
        self.listed = listed;
        for (id, before) in known {
            match self.listed.get_mut(&id) {
                Some(now) => now.trouble = before.trouble,
                None if before.state == State::Writing => drop(self.listed.insert(id, before)),
                None => {}
            }
        }
        let listed = &self.listed;
        // A capture that could not be finished before may be finished by now.
        self.failed.retain(|failed| !listed.contains_key(&failed.id));
    }

    /// The captures to remove so that the rest keeps to its bounds, in order. Never the capture being written, which
    /// counts as one of them, and whose bytes are among the `other_bytes`.
    pub fn to_remove(&self, settings: &CaptureSettings, other_bytes: u64) -> Vec<String> {
        Shares::new(self.listed.values(), settings, other_bytes).removals()
    }

    /// Bytes that the file of a capture for this reason may take; `None` if there is no room for it.
    pub fn room(&self, reason: &str, settings: &CaptureSettings, other_bytes: u64) -> Option<u64> {
        Shares::new(self.listed.values(), settings, other_bytes).room(Class::of([reason]))
    }
}

impl Running {
    fn is_only_asked_for(&self) -> bool {
        self.reasons.iter().all(|((reason, _), _)| *reason == Reason::Asked.label())
    }
}

fn cause(trigger: &Trigger) -> Cause {
    (trigger.reason.label(), trigger.owner.clone())
}

/// A trouble in the form in which it is listed.
fn one_line(trouble: &str) -> String {
    let plain = trouble.chars().map(|character| if character.is_control() { ' ' } else { character });
    plain.take(LONGEST_TROUBLE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::SECOND_NS;

    fn settings() -> CaptureSettings {
        let (before_ns, after_ns) = (30 * SECOND_NS, 10 * SECOND_NS);
        CaptureSettings {
            directory: None,
            before_ns,
            after_ns,
            cooldown_ns: 60 * SECOND_NS,
            ..CaptureSettings::default()
        }
    }

    fn oom(at_s: i64) -> Trigger {
        let reason = Reason::Oom { job: "job".into(), rank: 0 };
        Trigger { reason, at_ns: at_s * SECOND_NS, note: String::new(), owner: Some(Scope::Daemon) }
    }

    fn begin(admission: &mut Admission, trigger: &Trigger) {
        let interval = (trigger.at_ns - 30 * SECOND_NS, trigger.at_ns + 10 * SECOND_NS);
        admission.begin("one".into(), trigger, interval, &settings());
    }

    #[test]
    fn further_triggers_lengthen_a_capture_up_to_its_limit() {
        let (mut admission, settings) = (Admission::default(), settings());
        assert_eq!(admission.admit(&oom(100), &settings), Admitted::Begin);
        begin(&mut admission, &oom(100));
        assert_eq!(admission.admit(&oom(105), &settings), Admitted::Joined);
        assert_eq!(admission.running.as_ref().unwrap().end_ns, 115 * SECOND_NS);
        for at_s in 106..160 {
            let trigger = Trigger { reason: Reason::Finding("low_headroom"), ..oom(at_s) };
            assert_eq!(admission.admit(&trigger, &settings), Admitted::Joined);
        }
        assert_eq!(admission.take_joined().1.len(), 55);
        let many = (0..200).map(|_| admission.admit(&oom(110), &settings));
        let joined = many.filter(|admitted| *admitted == Admitted::Joined).count();
        assert_eq!((joined, admission.admit(&oom(110), &settings)), (MOST_JOINED, Admitted::Covered));
        let running = admission.running.clone().unwrap();
        assert_eq!((running.end_ns, running.joined.len()), (160 * SECOND_NS, MOST_JOINED));
        assert_eq!(admission.admit(&oom(60), &settings), Admitted::Busy, "what lies before its begin is not in it");
        admission.take_joined();
        admission.end("one");
        let headroom = Trigger { reason: Reason::Finding("low_headroom"), ..oom(219) };
        assert_eq!(admission.admit(&headroom, &settings), Admitted::Cooldown, "what joined cools down too");
    }

    #[test]
    fn a_reason_cools_down_and_others_do_not() {
        let (mut admission, settings) = (Admission::default(), settings());
        begin(&mut admission, &oom(100));
        admission.end("one");
        assert_eq!(admission.admit(&oom(169), &settings), Admitted::Cooldown);
        assert_eq!(
            admission.admit(&Trigger { reason: Reason::Finding("xid"), ..oom(111) }, &settings),
            Admitted::Begin
        );
        assert_eq!(admission.admit(&oom(170), &settings), Admitted::Begin);
    }

    #[test]
    fn what_one_owner_does_makes_nobody_else_wait() {
        let (mut admission, settings) = (Admission::default(), settings());
        let of = |user: &str, at_s: i64| Trigger { owner: Some(Scope::of(None, Some(user))), ..oom(at_s) };
        begin(&mut admission, &of("666", 100));
        for at_s in 101..200 {
            admission.admit(&of("666", at_s.min(108)), &settings);
        }
        assert_eq!(admission.admit(&of("1", 109), &settings), Admitted::Joined);
        let joined = &admission.running.as_ref().expect("it runs").joined;
        assert_eq!(joined.last(), Some(&of("1", 109)), "it is recorded, however many came before");
        admission.take_joined();
        admission.end("one");
        let admitted = ["666", "1", "2"].map(|user| admission.admit(&of(user, 130), &settings));
        assert_eq!(admitted, [Admitted::Cooldown, Admitted::Cooldown, Admitted::Begin]);
        assert_eq!(admission.admit(&of("1", 10_000), &settings), Admitted::Begin);
        assert!(admission.ended.is_empty(), "what has cooled down is forgotten");
    }

    #[test]
    fn who_lengthens_a_capture_makes_nobody_else_wait() {
        let (mut admission, settings) = (Admission::default(), settings());
        let of = |user: &str, at_s: i64| Trigger { owner: Some(Scope::of(None, Some(user))), ..oom(at_s) };
        begin(&mut admission, &of("1", 100));
        (101..160).for_each(|at_s| assert_eq!(admission.admit(&of("666", at_s), &settings), Admitted::Joined));
        // The capture ends at 160 s, and is not closed yet.
        let late: Vec<_> = (0..200).map(|_| of("666", 161)).chain([of("2", 161)]).collect();
        let admitted: Vec<_> = late.iter().map(|trigger| admission.admit(trigger, &settings)).collect();
        assert!(admitted[..MOST_JOINED].iter().all(|one| *one == Admitted::Next));
        assert!(admitted[MOST_JOINED..200].iter().all(|one| *one == Admitted::Busy), "none without an outcome");
        assert_eq!(admitted.last(), Some(&Admitted::Next));
        assert!(!admission.yields("one"), "it is whole");
        admission.take_joined();
        admission.end("one");
        let next = admission.take_next();
        assert_eq!((next.len(), next.last()), (MOST_JOINED + 1, late.last()));
        assert_eq!(admission.admit(&of("1", 169), &settings), Admitted::Cooldown, "60 s after its own 10");
        assert_eq!(admission.admit(&of("1", 170), &settings), Admitted::Begin);
        assert_eq!(admission.admit(&of("666", 219), &settings), Admitted::Cooldown);
    }

    #[test]
    fn what_a_capture_that_ends_early_has_not_recorded_is_for_the_next() {
        let (mut admission, settings) = (Admission::default(), settings());
        let xid = |at_s| Trigger { reason: Reason::Finding("xid"), ..oom(at_s) };
        begin(&mut admission, &oom(100));
        admission.admit(&oom(101), &settings);
        admission.take_joined();
        admission.admit(&xid(102), &settings);
        admission.end("one");
        assert_eq!(admission.take_next(), [xid(102)]);
        assert_eq!(
            [oom(103), xid(102)].map(|one| admission.admit(&one, &settings)),
            [Admitted::Cooldown, Admitted::Begin]
        );
    }

    #[test]
    fn what_is_asked_for_makes_way_for_what_it_does_not_reach_back_to() {
        let (mut admission, settings) = (Admission::default(), settings());
        let asked = Trigger { reason: Reason::Asked, ..oom(100) };
        admission.begin("one".into(), &asked, (100 * SECOND_NS, 400 * SECOND_NS), &settings);
        assert_eq!(admission.admit(&oom(120), &settings), Admitted::Next, "it would have 20 of 30 seconds");
        assert!(admission.yields("one") && !admission.yields("two"));
        admission.end("one");
        assert_eq!(admission.take_next(), [oom(120)]);
        admission.begin("two".into(), &asked, (70 * SECOND_NS, 400 * SECOND_NS), &settings);
        assert_eq!(admission.admit(&oom(120), &settings), Admitted::Joined);
        assert!(!admission.yields("two"));
    }

    #[test]
    fn the_last_failures_are_listed_in_one_line_each() {
        let mut admission = Admission::default();
        for n in 0..20 {
            let (id, reason) = (format!("{n:02}"), "oom".to_owned());
            let (note, begin_unix_nano, end_unix_nano, trouble) = (String::new(), None, None, None);
            let (reasons, state, bytes) = (vec![reason.clone()], State::Writing, 9);
            let owners = Vec::new();
            let listed =
                Listed { id, reason, reasons, owners, note, begin_unix_nano, end_unix_nano, bytes, state, trouble };
            let id = listed.id.clone();
            admission.listed.insert(id.clone(), listed);
            admission.fail(&id, &format!("disk\nfull {}", "x".repeat(1_000)));
        }
        assert!(admission.listed.is_empty() && admission.failed.len() == MOST_FAILED);
        let last = admission.failed.back().unwrap();
        assert!(last.id == "19" && last.state == State::Failed && last.bytes == 0);
        let trouble = last.trouble.clone().unwrap();
        assert!(trouble.starts_with("disk full x") && trouble.len() == LONGEST_TROUBLE, "{trouble}");
    }
}
