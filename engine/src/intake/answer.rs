//! The answer to one batch of events, and the shorter form that fits into a message of the seqpacket socket.
//!
//! Invariants: every refused event is counted with its reason; what is listed and what is sent is bounded.

use super::complaints::detail;
use highwater_core::jobs::{Outcome, Refusal};
use serde::Serialize;
use std::collections::BTreeMap;

/// Refusals listed in one answer; further ones are only counted.
pub(super) const MOST_LISTED: usize = 100;
/// Maximum bytes of a reply on the seqpacket socket, which the kernel keeps until the sender reads it. A reply lists the first
/// refusal of each reason, as many as fit.
pub(super) const MOST_REPLY_BYTES: usize = 2 << 10;
/// The text with which clients ask for a reply. It is searched for if an event was refused before it was parsed.
const ASKS: &[u8] = br#""answer":true"#;

/// The answer to one batch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// Events taken, or kept until their sender's process has been read.
    pub accepted: usize,
    /// Events refused.
    pub refused: usize,
    /// How many were refused for each reason, as in the counter's label.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<&'static str, usize>,
    /// The reasons, by index; the first hundred.
    pub refusals: Vec<Refused>,
    /// The name under which the sender's events are kept, if it is not the one that it sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Whether an event asked for it.
    #[serde(skip)]
    pub(super) is_asked_for: bool,
}

/// One refused event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// Its position in the batch, from 0.
    pub index: usize,
    /// The reason, as in the counter's label.
    pub reason: &'static str,
    /// What is wrong with it.
    pub detail: String,
}

impl Answer {
    /// Notes a refused event.
    pub(super) fn refuse(&mut self, index: usize, refusal: &Refusal) {
        self.count(refusal.outcome(), 1);
        if self.refusals.len() < MOST_LISTED {
            self.refusals.push(Refused { index, reason: refusal.outcome().label(), detail: detail(refusal) });
        }
    }

    /// Counts refused events without listing them.
    pub(super) fn count(&mut self, outcome: Outcome, events: usize) {
        if events > 0 {
            self.refused += events;
            *self.reasons.entry(outcome.label()).or_default() += events;
        }
    }

    /// The reply to a message, if one of its events asks for it.
    pub(super) fn reply_to(mut self, message: &[u8]) -> Option<Vec<u8>> {
        // An event that was refused unread may be the one that asks.
        let asks = self.is_asked_for || self.refused > 0 && message.windows(ASKS.len()).any(|part| part == ASKS);
        if asks { self.shorten() } else { None }
    }

    /// Its JSON, with as many refusals as fit: the first of each reason.
    fn shorten(&mut self) -> Option<Vec<u8>> {
        let mut reasons = Vec::new();
        self.refusals.retain(|refused| {
            let is_first = !reasons.contains(&refused.reason);
            reasons.push(refused.reason);
            is_first
        });
        loop {
            let json = serde_json::to_vec(self).ok()?;
            if json.len() <= MOST_REPLY_BYTES {
                return Some(json);
            }
            self.refusals.pop()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::jobs::UnknownGpu;
    use serde_json::{Value, json};

    fn of(refusals: &[Refusal]) -> Answer {
        let mut answer = Answer { accepted: 2, is_asked_for: true, ..Answer::default() };
        refusals.iter().enumerate().for_each(|(index, refusal)| answer.refuse(index, refusal));
        answer
    }

    fn reply(answer: Answer) -> Value {
        let json = answer.reply_to(b"{}").expect("it is asked for");
        assert!(json.len() <= MOST_REPLY_BYTES, "{}", json.len());
        serde_json::from_slice(&json).expect("JSON")
    }

    #[test]
    fn a_reply_counts_every_reason_and_lists_the_first_of_each() {
        let refused = [Refusal::NotOwner("j".into()), Refusal::OverRate(9), Refusal::NotOwner("k".into())];
        let reply = reply(of(&refused));
        assert_eq!(
            (&reply["accepted"], &reply["refused"], &reply["reasons"]),
            (&json!(2), &json!(3), &json!({"not_owner": 2, "over_rate": 1}))
        );
        let listed = reply["refusals"].as_array().expect("a list").iter().map(|refused| &refused["index"]);
        assert_eq!(listed.collect::<Vec<_>>(), [&json!(0), &json!(1)]);
        assert_eq!(reply.get("job"), None);
    }

    #[test]
    fn a_reply_is_as_documented() {
        let document = include_str!("../../../docs/annotations.md");
        let block = document.split("```json\n").nth(2).and_then(|rest| rest.split("```").next()).expect("a block");
        let mut answer = Answer { accepted: 58, ..of(&[]) };
        [3, 5].into_iter().for_each(|index| answer.refuse(index, &Refusal::NotOwner("train".into())));
        assert_eq!(reply(answer), serde_json::from_str::<Value>(block).expect("JSON"));
    }

    #[test]
    fn a_reply_has_a_bound_and_still_counts() {
        let text = || "\u{1}".repeat(5_000);
        let refused = [
            Refusal::Malformed(text()),
            Refusal::NotOwner(text()),
            Refusal::UnknownGpu(UnknownGpu(text())),
            Refusal::EndWithoutBegin(text()),
        ];
        let reply = reply(of(&refused));
        assert_eq!(reply["refused"], json!(4));
        assert!(reply["refusals"].as_array().expect("a list").len() < 4, "{reply}");
    }

    #[test]
    fn only_who_asks_gets_a_reply() {
        let answer = |refused: &[Refusal]| Answer { is_asked_for: false, ..of(refused) };
        assert_eq!(answer(&[]).reply_to(br#"{"answer":true}"#), None, "all were read, and none asked");
        let unread = [Refusal::OverRate(1)];
        assert!(answer(&unread).reply_to(br#"{"answer":true,"event":"mark"}"#).is_some(), "the rate hid the question");
        assert_eq!(answer(&unread).reply_to(br#"{"event":"mark"}"#), None);
    }
}
