//! The bytes of the event log.

use super::log::code::{Events, encode};
use highwater_core::jobs::Event;

/// Reads the input as events that were kept; those that can be read are kept again, read again, and kept as the same bytes.
pub fn event_log(data: &[u8]) {
    let events: Vec<_> = Events::of(data).collect();
    let bytes = |events: &[Event]| {
        let mut bytes = Vec::new();
        events.iter().for_each(|event| encode(event, &mut bytes));
        bytes
    };
    let kept = bytes(&events);
    let again: Vec<_> = Events::of(&kept).collect();
    assert_eq!(again.len(), events.len());
    // Not the events: a number that is none is not the same as itself.
    assert_eq!(bytes(&again), kept);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs of another form than the log's would be read as nothing, and find nothing.
    #[test]
    fn the_corpus_has_events() {
        assert_eq!(Events::of(include_bytes!("../../fuzz/corpus/event_log/all")).count(), 4);
        assert_eq!(Events::of(include_bytes!("../../fuzz/corpus/event_log/long")).count(), 2);
        assert_eq!(Events::of(include_bytes!("../../fuzz/corpus/event_log/cut")).count(), 1);
    }
}
