//! What is known of a rank that ran out of host memory, from its mark `host_oom`.
//!
//! The daemon makes the mark when it sees that the kernel killed a process of the rank's control group; another sender that knows of
//! it, such as a scheduler, may send it. Kept beside the rank, as its failed allocation is.

use super::event::{Attributes, Event, is_hidden};
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::scope::Scope;
use crate::wire::{EventType, Scalar};
use std::sync::Arc;

/// The name of the mark, in any case.
const NAME: &str = "host_oom";
/// The most characters of a control group's name that are kept: its end.
const GROUP_CHARS: usize = 120;

/// The longest time that a mark may come after what it says.
const MOST_AGO_NS: i64 = 60 * SECOND_NS;

/// The last time that a rank ran out of host memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostOom {
    /// How many of them the rank has marked, with this one.
    pub count: u64,
    /// When, nanoseconds of the timeline: [`ago_ns`](Self::ago_ns) before its mark.
    pub at_ns: i64,
    /// How long before its mark the daemon counted it, nanoseconds.
    pub ago_ns: i64,
    /// In which step; not known of a mark that comes later than that.
    pub step: Option<u64>,
    /// In which phase, the innermost.
    pub phase: Option<Arc<str>>,
    /// Positions of the rank's GPUs then; empty where they were not known.
    pub gpus: Box<[usize]>,
    /// The process that ended then; `None` if none did, or if the mark does not say.
    pub pid: Option<u32>,
    /// How many processes the kernel killed.
    pub killed: Option<u64>,
    /// Whether a limit was reached; if not, the node had no memory left.
    pub is_limit: Option<bool>,
    /// The limit, bytes.
    pub limit_bytes: Option<u64>,
    /// The control group with the limit, or else the rank's own, as the kernel names it.
    pub group: Option<Box<str>>,
    /// Whether the rank's own process was killed, or another of its control group.
    pub is_own: Option<bool>,
    /// Whether the rank's process ended then.
    pub has_ended: Option<bool>,
}

/// Whether an event is such a mark.
pub(super) fn is_host_oom(event: &Event) -> bool {
    event.is_mark(NAME)
}

impl HostOom {
    /// What a mark itself says.
    pub(super) fn of(mark: &Event) -> Self {
        let truth = |name| if let Scalar::Bool(truth) = mark.attribute(name)? { Some(*truth) } else { None };
        let text = |name| if let Scalar::Text(text) = mark.attribute(name)? { Some(text.as_str()) } else { None };
        let has_ended = truth("ended");
        let ago_ns = mark.number("milliseconds_ago").map_or(0, |ago| i64::try_from(ago).unwrap_or(0));
        let ago_ns = ago_ns.saturating_mul(MILLISECOND_NS).min(MOST_AGO_NS);
        Self {
            at_ns: mark.at_ns.saturating_sub(ago_ns),
            ago_ns,
            pid: mark.pid.filter(|_| has_ended == Some(true)),
            killed: mark.number("killed"),
            is_limit: truth("at_limit"),
            limit_bytes: mark.number("limit"),
            group: text("control_group").map(end_of),
            is_own: truth("own"),
            has_ended,
            ..Self::default()
        }
    }

    /// Whether the mark comes so late that the rank may have begun other steps since.
    pub(super) fn is_late(&self) -> bool {
        self.ago_ns > SECOND_NS
    }

    /// The mark that says this of a rank.
    #[must_use]
    pub fn mark(&self, job: &str, scope: &Scope, rank: u32, at_ns: i64) -> Event {
        let number = |value: u64| Scalar::Int(i64::try_from(value).unwrap_or(i64::MAX));
        let attributes = [
            ("killed", self.killed.map(number)),
            ("at_limit", self.is_limit.map(Scalar::Bool)),
            ("limit", self.limit_bytes.map(number)),
            ("control_group", self.group.as_deref().map(|group| Scalar::Text(end_of(group).into()))),
            ("own", self.is_own.map(Scalar::Bool)),
            ("ended", self.has_ended.map(Scalar::Bool)),
            ("milliseconds_ago", Some(Scalar::Int(self.ago_ns / MILLISECOND_NS)).filter(|_| self.ago_ns > 0)),
        ];
        let attributes: Attributes =
            attributes.into_iter().filter_map(|(name, value)| Some((name.into(), value?))).collect();
        Event {
            event: EventType::Mark,
            name: NAME.to_owned(),
            scope: Some(scope.clone()),
            attributes: Some(attributes),
            ..Event::exit(job, rank, self.pid, at_ns)
        }
    }
}

/// The end of a name that is too long, where the names differ. Users choose names, so that what cannot be seen is replaced.
fn end_of(name: &str) -> Box<str> {
    let name: String = name.chars().map(|each| if is_hidden(each) { '\u{fffd}' } else { each }).collect();
    let left_out = name.chars().count().saturating_sub(GROUP_CHARS);
    if left_out == 0 {
        name.into_boxed_str()
    } else {
        format!("…{}", name.chars().skip(left_out).collect::<String>()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_daemon_marks_is_what_is_read_of_the_mark() {
        let group = format!("/kubepods.slice/{}\u{202e}.scope", "a".repeat(200));
        let oom = HostOom {
            at_ns: 7,
            pid: Some(12),
            killed: Some(2),
            is_limit: Some(true),
            limit_bytes: Some(8 << 30),
            group: Some(group.into()),
            is_own: Some(true),
            has_ended: Some(true),
            ..HostOom::default()
        };
        let late = HostOom { at_ns: -10 * SECOND_NS, ago_ns: 10 * SECOND_NS, ..HostOom::default() };
        assert_eq!(HostOom::of(&late.mark("j", &Scope::default(), 3, 0)), late);
        let longest = HostOom { ago_ns: i64::MAX, ..late };
        assert_eq!(HostOom::of(&longest.mark("j", &Scope::default(), 3, 0)).at_ns, -MOST_AGO_NS);
        let mark = oom.mark("j", &Scope::default(), 3, 7);
        assert!(is_host_oom(&mark) && mark.rank == 3 && mark.job == "j");
        let read = HostOom::of(&mark);
        let group = read.group.clone().expect("named");
        assert!(
            group.starts_with("…aaa") && group.ends_with("a\u{fffd}.scope") && group.chars().count() == 121,
            "{group}"
        );
        assert_eq!(HostOom { group: None, ..read }, HostOom { group: None, ..oom });
        let bare = HostOom { killed: Some(1), pid: Some(12), has_ended: Some(false), ..HostOom::default() };
        let read = HostOom::of(&bare.mark("j", &Scope::default(), 3, 7));
        assert_eq!((read.pid, read.is_limit, read.limit_bytes, read.group), (None, None, None, None));
        let other = Event { name: "oom".to_owned(), ..mark };
        assert!(!is_host_oom(&other));
    }
}
