//! The detectors together: what one turn sees, and what it hands to the board.

use super::*;
use crate::clock::MILLISECOND_NS;
use crate::gpu::{Device, GpuState};
use crate::jobs::{Account, Event, Limits};
use crate::wire::{self, EventType, Memory};
use crate::{phases, ring};
use std::sync::Arc;

/// GPUs of these UUIDs, without any reading.
fn join(uuids: &[&str]) -> Join {
    let (_writers, rings): (Vec<_>, Vec<_>) = uuids.iter().map(|_| phases::hand::ring()).unzip();
    let state = |(index, uuid): (usize, &&str)| {
        let device = Device { index: index.to_string(), uuid: (*uuid).into(), ..Device::default() };
        GpuState::new(device, SECOND_NS, SECOND_NS)
    };
    Join::new(uuids.iter().enumerate().map(state).collect(), rings.into())
}

/// How many signs each turn has.
fn signs(detect: &Detect, join: &Join, second: i64) -> usize {
    detect.advance(join, &Ledger::new(Limits::default()), second * SECOND_NS).signs.len()
}

#[test]
fn a_turn_sees_what_is_new_since_the_last_and_the_board_names_the_gpu() {
    let (detect, join) = (Detect::new(Settings::default()), join(&["GPU-a", "GPU-b"]));
    assert_eq!(signs(&detect, &join, 1), 0);
    join.gpus()[1].count_xid(79, 2 * SECOND_NS);
    assert_eq!(signs(&detect, &join, 2), 1);
    assert_eq!(signs(&detect, &join, 3), 0, "found already");
    let board = detect.board();
    let [finding] = board.active().collect::<Vec<_>>().try_into().expect("one");
    assert_eq!(finding.gpu, Some(("1".to_owned(), "GPU-b".to_owned())));
    assert_eq!((finding.sign.kind, detect.unseen()), (FindingKind::Xid, 0));
}

#[test]
fn other_gpus_begin_anew_and_detectors_that_are_off_see_nothing() {
    let (detect, first) = (Detect::new(Settings::default()), join(&["GPU-a"]));
    assert_eq!(signs(&detect, &first, 1), 0);
    let other = join(&["GPU-b"]);
    other.gpus()[0].count_xid(79, SECOND_NS);
    assert_eq!(signs(&detect, &other, 2), 0, "it was there when they first looked");
    other.gpus()[0].count_xid(79, 3 * SECOND_NS);
    assert_eq!(signs(&detect, &other, 3), 1);
    let off = Detect::new(Settings { enabled: false, ..Settings::default() });
    assert_eq!(signs(&off, &other, 4), 0);
    other.gpus()[0].count_xid(79, 5 * SECOND_NS);
    assert_eq!(signs(&off, &other, 5), 0);
}

/// An event of rank 0 of job `j` on the first GPU.
fn event(event: EventType, kind: wire::Kind, name: &str, at_ns: i64) -> Event {
    Event { event, kind, name: name.into(), gpus: Some(vec![0]), ..Event::exit("j", 0, Some(7), at_ns) }
}

/// What one sender says.
struct Sender {
    ledger: Ledger,
    account: Arc<Account>,
}

impl Sender {
    fn new(limits: Limits) -> Self {
        Self { ledger: Ledger::new(limits), account: Account::alone() }
    }

    fn say(&self, events: &[Event]) {
        for event in events {
            self.ledger.open().take(event, &self.account, event.at_ns).expect("taken");
        }
    }
}

fn step(begin_ns: i64, end_ns: i64) -> [Event; 2] {
    [(EventType::Begin, begin_ns), (EventType::End, end_ns)]
        .map(|(of, at_ns)| event(of, wire::Kind::Step, "step", at_ns))
}

/// An allocator whose counter rose within a step that has ended, and one whose counter rises within an open one.
#[test]
fn steps_that_ended_and_those_that_are_open_are_both_looked_at_and_once() {
    let (detect, join, sender) = (Detect::new(Settings::default()), join(&["GPU-a"]), Sender::new(Limits::default()));
    let retries = |count, event| {
        let memory = Some(Memory { alloc_retries: Some(count), ..Memory::default() });
        Event { memory, step: Some(4), ..event }
    };
    let advance = |now_ns| {
        join.advance(&sender.ledger, now_ns);
        detect.advance(&join, &sender.ledger, now_ns).signs
    };
    let [begins, ends] = step(SECOND_NS, 2 * SECOND_NS);
    sender.say(&[retries(1, begins), retries(3, ends)]);
    let [sign] = advance(5 * SECOND_NS).try_into().expect("one");
    assert_eq!((sign.kind, sign.step, sign.subject.gpu), (FindingKind::AllocatorThrash, Some(4), Some(0)));
    assert_eq!(sign.evidence[1].value, 2.0);
    assert_eq!(advance(6 * SECOND_NS).len(), 0, "reported already");
    let others = self::join(&["GPU-b"]);
    assert_eq!(detect.advance(&others, &sender.ledger, 6 * SECOND_NS).signs.len(), 0, "nor with other GPUs");
    let [begins, _] = step(7 * SECOND_NS, 0);
    let inside = retries(9, event(EventType::Mark, wire::Kind::Phase, "m", 8 * SECOND_NS));
    sender.say(&[retries(3, begins), inside]);
    let [sign] = advance(8 * SECOND_NS).try_into().expect("one");
    assert_eq!((sign.subject.gpu, sign.begin_ns, sign.evidence[1].value), (Some(0), 7 * SECOND_NS, 6.0));
    sender.say(&[Event::exit("j", 0, Some(7), 9 * SECOND_NS)]);
    assert!(ranks(&sender.ledger.open(), &Settings::default(), 0).is_empty(), "one that has ended is not looked at");
}

#[test]
fn a_rank_is_seen_as_it_is_now() {
    let sender = Sender::new(Limits::default());
    let memory = |retries| Some(Memory { alloc_retries: Some(retries), ..Memory::default() });
    let [begins, ends] = step(5, 9);
    sender.say(&[Event { step: Some(3), memory: memory(2), ..begins }]);
    let now = || ranks(&sender.ledger.open(), &Settings::default(), 0).pop().expect("one");
    let rank = now();
    assert_eq!((rank.key, rank.gpus, rank.retries, rank.is_at_rest), (("j".into(), 0), vec![0], Some(2), false));
    let open = rank.step.expect("open");
    assert_eq!((open.number, open.begin_ns, open.retries), (Some(3), 5, Some(2)));
    assert_eq!((rank.since_ns, rank.heard_ns), (5, 5));
    sender.say(&[Event { memory: memory(6), ..ends }]);
    let rank = now();
    assert!(rank.step.is_none() && rank.is_at_rest);
    assert_eq!((rank.retries, rank.since_ns, rank.heard_ns), (Some(6), 5, 9));
}

/// Memory of the only GPU falls by 10 GiB and regrows at once, at a second.
fn fall(writer: &mut ring::Writer, second: i64) {
    for (ms, gib) in [(0, 130), (10, 120), (30, 129)] {
        writer.push(second * SECOND_NS + ms * MILLISECOND_NS, gib << 30).expect("in order");
    }
}

#[test]
fn falls_are_those_since_the_last_turn_on_these_gpus() {
    let (mut writer, ring) = phases::hand::ring();
    let gpu = GpuState::new(Device::default(), SECOND_NS, SECOND_NS);
    let join = Join::new([gpu].into(), [ring].into());
    let (ledger, mut state) = (Ledger::new(Limits::default()), State::new());
    fall(&mut writer, 1);
    join.advance(&ledger, 2 * SECOND_NS);
    assert!(state.follow(&join) && state.new_flushes(&join).is_empty(), "before they first looked");
    fall(&mut writer, 2);
    join.advance(&ledger, 3 * SECOND_NS);
    assert!(!state.follow(&join));
    let new = state.new_flushes(&join);
    assert_eq!(new.iter().map(|(gpu, flush)| (*gpu, flush.trough_ns / SECOND_NS)).collect::<Vec<_>>(), [(0, 2)]);
    assert!(state.new_flushes(&join).is_empty());
}

#[test]
fn what_was_forgotten_before_they_looked_is_counted_but_for_other_gpus() {
    let limits = Limits { ended: 3, ..Limits::default() };
    let (detect, first, sender) = (Detect::new(Settings::default()), join(&["GPU-a"]), Sender::new(limits));
    let end = |count: i64| {
        (0..count).for_each(|at_ns| sender.say(&step(at_ns, at_ns)));
        first.advance(&sender.ledger, 10 * SECOND_NS);
    };
    end(5);
    detect.advance(&first, &sender.ledger, SECOND_NS);
    assert_eq!(detect.unseen(), 0, "they had not looked at these GPUs");
    end(7);
    detect.advance(&first, &sender.ledger, 2 * SECOND_NS);
    assert_eq!(detect.unseen(), 4);
    end(2);
    detect.advance(&first, &sender.ledger, 3 * SECOND_NS);
    assert_eq!(detect.unseen(), 4);
    end(9);
    detect.advance(&join(&["GPU-b"]), &sender.ledger, 4 * SECOND_NS);
    assert_eq!(detect.unseen(), 4);
}

#[test]
fn troubles_and_silent_ranks_are_kept_for_their_time_and_in_their_number() {
    let (mut state, mut hand) = (State::new(), hand::Hand::new(0));
    let trouble = |to_ns| Trouble { kind: FindingKind::LowHeadroom, key: ("j".into(), 0), from_ns: to_ns, to_ns };
    state.troubles = vec![trouble(0), trouble(1)];
    state.steps.take(&phases::hand::attributed(phases::hand::ended(wire::Kind::Step, 0, "s", None, 0, 0)));
    let mut look = |now_ns: i64| {
        hand.now_ns = now_ns;
        let ratios = hand.view(|view| state.look(view)).1;
        assert!(ratios.is_empty());
        (state.troubles.len(), state.steps.is_empty())
    };
    assert_eq!((look(30 * SECOND_NS - 1).0, look(30 * SECOND_NS).0, look(30 * SECOND_NS + 1).0), (2, 1, 0));
    assert_eq!((look(300 * SECOND_NS).1, look(300 * SECOND_NS + 1).1), (false, true));
    state.troubles = (0..5_000).map(trouble).collect();
    hand.now_ns = 5_000;
    hand.view(|view| state.look(view));
    assert_eq!((state.troubles.len(), state.troubles[0].to_ns), (MOST_TROUBLES, 904), "the newest");
}

/// A rank whose second step waits for data: its share is on the board.
#[test]
fn ratios_and_the_end_without_a_node_are_on_the_board() {
    let (detect, join, sender) = (Detect::new(Settings::default()), join(&["GPU-a"]), Sender::new(Limits::default()));
    for n in 0..5 {
        let at = |ms: i64| (10 * n + 1) * SECOND_NS + ms * MILLISECOND_NS;
        let [begins, ends] = step(at(0), at(100));
        let data = |of, ms| event(of, wire::Kind::Phase, "data", at(ms));
        sender.say(&[begins, data(EventType::Begin, 0), data(EventType::End, 80), ends]);
    }
    join.advance(&sender.ledger, 50 * SECOND_NS);
    let change = detect.advance(&join, &sender.ledger, 50 * SECOND_NS);
    assert_eq!(change.signs.iter().map(|sign| sign.kind).collect::<Vec<_>>(), [FindingKind::InputStall]);
    let share = detect.board().ratios().get(&("j".into(), 0)).and_then(|ratios| ratios.data_stall);
    assert_eq!(share, Some(0.8));
    let change = detect.advance_without_node(&sender.ledger, 70 * SECOND_NS);
    assert_eq!(change.ended.iter().map(|finding| finding.sign.kind).collect::<Vec<_>>(), [FindingKind::InputStall]);
}

/// The last step waits for data until it ends, or until its rank does.
#[test]
fn a_step_that_its_rank_ended_is_not_judged() {
    for exits in [false, true] {
        let (detect, join) = (Detect::new(Settings::default()), join(&["GPU-a"]));
        let sender = Sender::new(Limits::default());
        let at = |n: i64, ms: i64| (n + 1) * SECOND_NS + ms * MILLISECOND_NS;
        let data = |of, at_ns| event(of, wire::Kind::Phase, "data", at_ns);
        for n in 0..20 {
            let [begins, ends] = step(at(n, 0), at(n, 900));
            sender.say(&[begins, data(EventType::Begin, at(n, 0)), data(EventType::End, at(n, 1)), ends]);
        }
        let [begins, ends] = step(at(20, 0), at(30, 0));
        sender.say(&[begins, data(EventType::Begin, at(20, 0))]);
        let exit = Event::exit("j", 0, Some(7), at(30, 0));
        sender.say(&if exits { vec![exit] } else { vec![data(EventType::End, at(29, 900)), ends] });
        join.advance(&sender.ledger, at(40, 0));
        let signs = detect.advance(&join, &sender.ledger, at(40, 0)).signs;
        assert_eq!(signs.iter().any(|sign| sign.kind == FindingKind::InputStall), !exits, "{signs:?}");
        assert!(!exits || signs.is_empty(), "{signs:?}");
    }
}

#[test]
fn what_was_found_ends_in_time_without_a_node_too() {
    let (detect, join) = (Detect::new(Settings::default()), join(&["GPU-a"]));
    signs(&detect, &join, 1);
    join.gpus()[0].lose("gone");
    assert_eq!(signs(&detect, &join, 2), 1);
    join.gpus()[0].set_back();
    let change = detect.advance_without_node(&Ledger::new(Limits::default()), 100 * SECOND_NS);
    assert_eq!(
        (change.ended.len(), detect.board().active().count()),
        (0, 1),
        "a GPU that took its node with it stays found"
    );
    join.gpus()[0].count_xid(13, 101 * SECOND_NS);
    signs(&detect, &join, 101);
    assert!(detect.board().active().all(|finding| finding.sign.kind == FindingKind::Xid));
}

#[test]
fn a_trouble_meets_what_it_has_a_moment_in_common_with() {
    let trouble = Trouble { kind: FindingKind::LowHeadroom, key: ("j".into(), 0), from_ns: 10, to_ns: 20 };
    let meets = [(0, 9), (0, 10), (12, 13), (0, 99), (20, 30), (21, 30)].map(|(from, to)| trouble.meets(from, to));
    assert_eq!(meets, [false, true, true, true, true, false]);
}
