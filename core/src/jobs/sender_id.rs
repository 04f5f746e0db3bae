//! The senders of a rank whose end the daemon can see: connections, and processes that send without one.
//!
//! A rank ends with the last sender that is counted on. A sender is counted on once it has sent two events in a row: if a shell
//! script starts a program for each mark, the end of a program is not the end of the job.

/// Maximum number of senders of one rank that are counted on. Beyond it, the oldest is dropped.
const MOST: usize = 8;

/// A sender whose end may be the end of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SenderId {
    /// A process, by its id.
    Process(u32),
    /// A connection, by the daemon's number for it.
    Connection(u32),
}

/// The senders of one rank.
#[derive(Debug, Default)]
pub(super) struct CountedSenders {
    last: Option<SenderId>,
    counted: Vec<SenderId>,
}

impl CountedSenders {
    /// Notes the sender of an event; `None` if its end cannot be seen. Returns the sender if it was just promoted: it sent two events
    /// in a row.
    pub fn heard(&mut self, sender_id: Option<SenderId>) -> Option<SenderId> {
        let is_again = std::mem::replace(&mut self.last, sender_id) == sender_id;
        let new = sender_id.filter(|sender_id| is_again && !self.counted.contains(sender_id))?;
        if self.counted.len() == MOST {
            self.counted.remove(0);
        }
        self.counted.push(new);
        Some(new)
    }

    /// Whether this one is counted on.
    pub fn counts_on(&self, sender_id: SenderId) -> bool {
        self.counted.contains(&sender_id)
    }

    /// Notes that one has ended. Returns whether it was counted on, and nobody else is.
    pub fn ended(&mut self, ended: SenderId) -> bool {
        let before = self.counted.len();
        self.counted.retain(|sender_id| *sender_id != ended);
        before > 0 && self.counted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::SenderId::{Connection, Process};
    use super::*;

    /// Senders with two events in a row each.
    fn counted(sender_ids: impl IntoIterator<Item = SenderId>) -> CountedSenders {
        let mut all = CountedSenders::default();
        for sender_id in sender_ids {
            assert_eq!((all.heard(Some(sender_id)), all.heard(Some(sender_id))), (None, Some(sender_id)));
        }
        all
    }

    #[test]
    fn one_that_says_a_single_thing_is_not_counted_on() {
        let mut sender_ids = CountedSenders::default();
        for pid in [1, 2, 1] {
            assert_eq!(sender_ids.heard(Some(Process(pid))), None);
        }
        assert!(!sender_ids.ended(Process(1)));
        assert_eq!(sender_ids.heard(Some(Process(1))), Some(Process(1)));
        assert_eq!(sender_ids.heard(Some(Process(1))), None, "returned once");
        assert!(!sender_ids.ended(Process(2)) && sender_ids.ended(Process(1)));
        assert!(!sender_ids.ended(Process(1)), "it has ended once");
    }

    #[test]
    fn nobody_sees_the_end_of_one_who_is_not_known() {
        let mut sender_ids = CountedSenders::default();
        assert_eq!((sender_ids.heard(None), sender_ids.heard(None)), (None, None));
    }

    #[test]
    fn a_rank_ends_with_the_last_who_speaks_for_it() {
        let mut sender_ids = counted([Process(7), Connection(7), Connection(8)]);
        assert!(!sender_ids.ended(Process(7)) && !sender_ids.ended(Connection(8)) && sender_ids.ended(Connection(7)));
    }

    #[test]
    fn of_too_many_the_oldest_is_forgotten() {
        assert_eq!(counted((1..=9).map(Process)).counted, (2..=9).map(Process).collect::<Vec<_>>());
    }
}
