//! The senders of a rank whose end the daemon can see: connections, and processes that send without one.
//!
//! A rank ends with the last sender that is counted on. A sender is counted on once it has sent two events in a row: if a shell
//! script starts a program for each mark, the end of a program is not the end of the job.

/// Maximum number of speakers of one rank that are counted on. Beyond it, the oldest is dropped.
const MOST: usize = 8;

/// A sender whose end may be the end of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Speaker {
    /// A process, by its id.
    Process(u32),
    /// A connection, by the daemon's number for it.
    Connection(u32),
}

/// Those who speak for one rank.
#[derive(Debug, Default)]
pub(super) struct Speakers {
    last: Option<Speaker>,
    counted: Vec<Speaker>,
}

impl Speakers {
    /// Notes who spoke; `None` stands for a speaker whose end nobody sees. Returns the speaker if it is counted on from now on
    /// and was not before: it sent two events in a row.
    pub fn heard(&mut self, speaker: Option<Speaker>) -> Option<Speaker> {
        let is_again = std::mem::replace(&mut self.last, speaker) == speaker;
        let new = speaker.filter(|speaker| is_again && !self.counted.contains(speaker))?;
        if self.counted.len() == MOST {
            self.counted.remove(0);
        }
        self.counted.push(new);
        Some(new)
    }

    /// Whether this one is counted on.
    pub fn counts_on(&self, speaker: Speaker) -> bool {
        self.counted.contains(&speaker)
    }

    /// Notes that one has ended. Returns whether it was counted on, and nobody else is.
    pub fn ended(&mut self, ended: Speaker) -> bool {
        let before = self.counted.len();
        self.counted.retain(|speaker| *speaker != ended);
        before > 0 && self.counted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::Speaker::{Connection, Process};
    use super::*;

    /// Speakers that have each spoken twice.
    fn counted(speakers: impl IntoIterator<Item = Speaker>) -> Speakers {
        let mut all = Speakers::default();
        for speaker in speakers {
            assert_eq!((all.heard(Some(speaker)), all.heard(Some(speaker))), (None, Some(speaker)));
        }
        all
    }

    #[test]
    fn one_that_says_a_single_thing_is_not_counted_on() {
        let mut speakers = Speakers::default();
        for pid in [1, 2, 1] {
            assert_eq!(speakers.heard(Some(Process(pid))), None);
        }
        assert!(!speakers.ended(Process(1)));
        assert_eq!(speakers.heard(Some(Process(1))), Some(Process(1)));
        assert_eq!(speakers.heard(Some(Process(1))), None, "returned once");
        assert!(!speakers.ended(Process(2)) && speakers.ended(Process(1)));
        assert!(!speakers.ended(Process(1)), "it has ended once");
    }

    #[test]
    fn nobody_sees_the_end_of_one_who_is_not_known() {
        let mut speakers = Speakers::default();
        assert_eq!((speakers.heard(None), speakers.heard(None)), (None, None));
    }

    #[test]
    fn a_rank_ends_with_the_last_who_speaks_for_it() {
        let mut speakers = counted([Process(7), Connection(7), Connection(8)]);
        assert!(!speakers.ended(Process(7)) && !speakers.ended(Connection(8)) && speakers.ended(Connection(7)));
    }

    #[test]
    fn of_too_many_the_oldest_is_forgotten() {
        assert_eq!(counted((1..=9).map(Process)).counted, (2..=9).map(Process).collect::<Vec<_>>());
    }
}
