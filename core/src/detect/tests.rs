//! The detectors together: what one turn sees, and what it hands to the board.

use super::*;
use crate::gpu::{Device, GpuState};
use crate::jobs::Limits;
use crate::ring;

/// GPUs of these UUIDs, without any reading.
fn join(uuids: &[&str]) -> Join {
    let (_writers, rings): (Vec<_>, Vec<_>) = uuids.iter().map(|_| ring::ring(hand::RING).expect("a ring")).unzip();
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
    assert_eq!((finding.sign.kind, detect.unseen()), (Kind::Xid, 0));
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
    assert!(detect.board().active().all(|finding| finding.sign.kind == Kind::Xid));
}

#[test]
fn a_trouble_meets_what_it_has_a_moment_in_common_with() {
    let trouble = Trouble { kind: Kind::LowHeadroom, key: ("j".into(), 0), from_ns: 10, to_ns: 20 };
    let meets = [(0, 9), (0, 10), (12, 13), (0, 99), (20, 30), (21, 30)].map(|(from, to)| trouble.meets(from, to));
    assert_eq!(meets, [false, true, true, true, true, false]);
}
