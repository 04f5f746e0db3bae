//! Fuzzes the bytes of the event log.

use super::log::code::{Events, encode};
use highwater_core::jobs::Event;

/// Decodes the input as kept events, encodes and decodes them again, and checks that the bytes stay the same.
pub fn event_log(data: &[u8]) {
    let events: Vec<_> = Events::of(data).collect();
    let bytes = |events: &[(u64, Event)]| {
        let mut bytes = Vec::new();
        events.iter().for_each(|(after, event)| encode(*after, event, &mut bytes));
        bytes
    };
    let kept = bytes(&events);
    let again: Vec<_> = Events::of(&kept).collect();
    assert_eq!(again.len(), events.len());
    // Compares the bytes and not the events, because NaN does not equal itself.
    assert_eq!(bytes(&again), kept);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs of another form than the log's would decode to nothing, and find nothing.
    #[test]
    fn the_corpus_has_events() {
        assert_eq!(Events::of(include_bytes!("../../../fuzz/corpus/event_log/all")).count(), 4);
        assert_eq!(Events::of(include_bytes!("../../../fuzz/corpus/event_log/long")).count(), 2);
        assert_eq!(Events::of(include_bytes!("../../../fuzz/corpus/event_log/cut")).count(), 1);
    }
}
