//! Fuzzes annotation bodies and datagrams, through the intake, the join, the detectors and the exposition.

use super::{parts, world};
use crate::export::prometheus;
use crate::metrics::{Choice, Snapshots};
use highwater_core::clock::{Clock as _, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::jobs::{Limits, Resource, Sender};
use highwater_engine::intake::Batch;
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;

/// Bodies taken from one input.
const MOST_BODIES: usize = 64;
/// Time from one body to the next.
const BETWEEN_NS: i64 = 50 * MILLISECOND_NS;
/// Refusals listed in one answer.
const MOST_LISTED: usize = 100;

/// Takes each part of the input as one body, and joins after every eighth. For one in eight values of the input's last
/// byte, it also encodes the exposition, which takes ten times as long as the rest.
pub fn annotations(data: &[u8]) {
    let clock = Arc::new(Manual::at(world::END_NS - 4 * SECOND_NS));
    let intake = world::intake(&clock);
    let state = SharedState { clock: Arc::clone(&clock) as _, ..SharedState::of(&world::node(), intake.ledger()) };
    for (number, body) in parts(data).take(MOST_BODIES).enumerate() {
        clock.advance_to(clock.now_ns() + BETWEEN_NS);
        // Several users, whose events are kept apart, and bodies that arrive in pieces.
        let sender = Sender::process(None, u32::try_from(number % 3).unwrap_or(0));
        let mut batch = Batch::begin(&intake, &sender);
        body.chunks(if number % 2 == 0 { 7 } else { usize::MAX }).for_each(|piece| batch.push(piece));
        let answer = batch.end();
        assert!(answer.refusals.len() <= answer.refused.min(MOST_LISTED), "{answer:?}");
        if number % 8 == 7 {
            state.advance(&world::node(), clock.now_ns());
        }
    }
    state.advance(&world::node(), world::END_NS);
    assert!(intake.accounts().held(Resource::Bytes) <= Limits::default().bytes);
    if data.last().is_none_or(|last| last.is_multiple_of(8)) {
        let families =
            Snapshots { state, choice: Choice::default(), node_name: Arc::default(), parts: Vec::new() }.collect();
        check(&prometheus::encode(families).expect("the catalogue's families are encoded"));
    }
}

/// Each line of an exposition is a comment, or a series and a number.
fn check(text: &[u8]) {
    let text = std::str::from_utf8(text).expect("the exposition is text");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let value = line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
        assert!(value.is_some() && (line.starts_with("highwater_") || line.starts_with("process_")), "{line}");
    }
}
