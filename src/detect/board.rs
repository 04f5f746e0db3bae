//! Findings: which go on, and which there have been.
//!
//! Enters: signs. Leaves: findings with numbers of their own. Invariants: a sign of what goes on already prolongs it; one
//! whose signs have run out has ended and does not come back, another one is raised instead; both lists are bounded.

use super::Ratios;
use super::finding::{Finding, Kind, Sign, Subject};
use super::steps::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Findings that go on at a time; further ones are counted and not kept.
const MOST_ACTIVE: usize = 256;
/// Findings that have ended and are kept.
const MOST_ENDED: usize = 256;

/// All findings of the daemon.
#[derive(Debug, Default)]
pub struct Board {
    active: BTreeMap<Key, Finding>,
    ended: VecDeque<Finding>,
    raised: [u64; Kind::ALL.len()],
    next_id: u64,
    ratios: BTreeMap<RankKey, Ratios>,
}

type Key = (Kind, Subject, Option<u64>);

/// What one turn changed.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Change {
    /// Findings that were raised.
    pub raised: Vec<Finding>,
    /// Findings that ended.
    pub ended: Vec<Finding>,
    /// All that was seen.
    pub signs: Vec<Sign>,
}

impl Board {
    /// Takes a turn's signs; `gpu` tells index and UUID of a GPU by its position.
    pub fn update(&mut self, signs: Vec<Sign>, now_ns: i64, gpu: impl Fn(usize) -> Option<(String, String)>) -> Change {
        let mut change = Change { signs: signs.clone(), ..Change::default() };
        let ended: Vec<Key> = self
            .active
            .iter()
            .filter(|(_, finding)| finding.sign.until_ns < now_ns)
            .map(|(key, _)| key.clone())
            .collect();
        for mut finding in ended.iter().filter_map(|key| self.active.remove(key)) {
            finding.ended_ns = Some(now_ns);
            self.ended.push_back(finding.clone());
            change.ended.push(finding);
        }
        while self.ended.len() > MOST_ENDED {
            self.ended.pop_front();
        }
        for sign in signs {
            let key = (sign.kind, sign.subject.clone(), sign.code);
            if let Some(finding) = self.active.get_mut(&key) {
                finding.prolong(sign, now_ns);
                continue;
            }
            self.raised[sign.kind as usize] += 1;
            self.next_id += 1;
            let (id, gpu) = (self.next_id, sign.subject.gpu.and_then(&gpu));
            let finding = Finding { id, gpu, sign, raised_ns: now_ns, seen_ns: now_ns, ended_ns: None, signs: 1 };
            change.raised.push(finding.clone());
            if self.active.len() < MOST_ACTIVE {
                self.active.insert(key, finding);
            }
        }
        change
    }

    /// From now on these are the ranks' ratios.
    pub(super) fn set_ratios(&mut self, ratios: BTreeMap<RankKey, Ratios>) {
        self.ratios = ratios;
    }

    /// By rank, what its last steps were like.
    #[must_use]
    pub fn ratios(&self) -> &BTreeMap<RankKey, Ratios> {
        &self.ratios
    }

    /// Findings that go on.
    pub fn active(&self) -> impl Iterator<Item = &Finding> {
        self.active.values()
    }

    /// Findings that have ended, newest first.
    pub fn ended(&self) -> impl Iterator<Item = &Finding> {
        self.ended.iter().rev()
    }

    /// How many of a kind have been raised since the start.
    #[must_use]
    pub fn raised(&self, kind: Kind) -> u64 {
        self.raised[kind as usize]
    }
}

impl Finding {
    fn prolong(&mut self, sign: Sign, now_ns: i64) {
        let before = &self.sign;
        let severity = before.severity.max(sign.severity);
        let certainty = before.certainty.max(sign.certainty);
        let begin_ns = before.begin_ns.min(sign.begin_ns);
        let until_ns = before.until_ns.max(sign.until_ns);
        self.sign = Sign { severity, certainty, begin_ns, until_ns, ..sign };
        self.seen_ns = now_ns;
        self.signs += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Certainty, Severity, Text};
    use super::*;

    fn sign(kind: Kind, gpu: usize, severity: Severity, until_ns: i64) -> Sign {
        Sign {
            kind,
            subject: Subject { gpu: Some(gpu), ..Subject::default() },
            severity,
            certainty: Certainty::Suspected,
            begin_ns: 0,
            until_ns,
            step: None,
            code: None,
            evidence: Vec::new(),
            text: Text::default(),
        }
    }

    #[test]
    fn signs_prolong_what_goes_on_and_raise_anew_what_has_ended() {
        let mut board = Board::default();
        let raised = board.update(vec![sign(Kind::GpuLost, 1, Severity::Warning, 10)], 0, |_| None).raised;
        assert_eq!(raised.len(), 1);
        for (severity, until_ns, now_ns) in [(Severity::Critical, 20, 5), (Severity::Info, 12, 8)] {
            let change = board.update(vec![sign(Kind::GpuLost, 1, severity, until_ns)], now_ns, |_| None);
            assert!(change.raised.is_empty() && change.ended.is_empty() && change.signs.len() == 1);
        }
        let finding = board.active().next().expect("it goes on");
        assert_eq!((finding.signs, finding.sign.severity, finding.sign.until_ns), (3, Severity::Critical, 20));
        assert_eq!(board.update(Vec::new(), 21, |_| None).ended[0].id, raised[0].id);
        assert_eq!(board.active().count(), 0);
        let again = board.update(vec![sign(Kind::GpuLost, 1, Severity::Info, 40)], 30, |_| None).raised;
        assert_ne!(again[0].id, raised[0].id);
        assert_eq!(board.raised(Kind::GpuLost), 2);
    }

    #[test]
    fn gpus_kinds_and_codes_are_apart() {
        let mut board = Board::default();
        let xid = |code| Sign { code: Some(code), ..sign(Kind::Xid, 0, Severity::Info, 10) };
        let signs = vec![
            sign(Kind::GpuLost, 0, Severity::Info, 10),
            sign(Kind::GpuLost, 1, Severity::Info, 10),
            sign(Kind::IdleGpu, 0, Severity::Info, 10),
            xid(13),
            xid(79),
        ];
        assert_eq!(board.update(signs, 0, |_| None).raised.len(), 5);
    }

    #[test]
    fn both_lists_are_bounded_and_all_are_counted() {
        let mut board = Board::default();
        for turn in 0..3 {
            let signs = (0..1000).map(|gpu| sign(Kind::IdleGpu, gpu, Severity::Info, turn * 10 + 1)).collect();
            board.update(signs, turn * 10, |_| None);
        }
        assert!(board.active().count() <= MOST_ACTIVE && board.ended().count() <= MOST_ENDED);
        assert_eq!(board.raised(Kind::IdleGpu), 3000);
    }
}
