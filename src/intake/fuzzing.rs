//! The bytes of the event log.

use super::log::code::{Events, encode};

/// Reads the input as events that were kept; those that can be read are kept again, and read again, the same.
pub fn event_log(data: &[u8]) {
    let events: Vec<_> = Events::of(data).collect();
    let mut bytes = Vec::new();
    events.iter().for_each(|event| encode(event, &mut bytes));
    assert_eq!(Events::of(&bytes).collect::<Vec<_>>(), events);
}
