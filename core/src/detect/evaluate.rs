//! How good detection is on a recording whose truth is known: precision, recall and delay, by kind.
//!
//! Enters: the known truths, and every sign with the time at which it was seen. Leaves: a [`Score`]. A truth is found if a
//! sign of its kind and rank overlaps it. A sign is right if it overlaps a truth of its kind and rank, even one that need not
//! be found. Any other sign is wrong, unless it lies where the recording is not judged. Signs of one step within ten
//! seconds count once, and so do signs without a step within one second. Signs of severity `info` are not scored,
//! except those of `slow_steps`, which begins with that severity. A truth of a kind that slows steps is also a truth
//! of `slow_steps`. Pure: the command reads the files.

use super::finding::{FindingKind, LagCause, Severity, Sign};
use super::incident::slows_steps;
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// How long after the end of a truth, or of an unjudged stretch, a sign may begin and still overlap it, nanoseconds.
const SLACK_NS: i64 = 500 * MILLISECOND_NS;

/// What is true of a recording.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Truth {
    /// What is there to be found.
    pub findings: Vec<True>,
    /// Stretches in which no sign counts as wrong. A missing begin or end is that of the recording.
    #[serde(default)]
    pub unjudged: Vec<Stretch>,
}

/// One thing that is there. Times are Unix nanoseconds of the recording.
#[derive(Debug, Clone, Deserialize)]
pub struct True {
    /// What it is.
    pub finding: FindingKind,
    /// The rank that it concerns.
    pub rank: Option<u32>,
    /// Why the rank is late; `None` if that is not judged.
    #[serde(default)]
    pub lag_cause: Option<LagCause>,
    /// The ranks that wait for it. A sign that lists any other rank does not match. `None`: waiting ranks are not judged.
    #[serde(default)]
    pub waiting_ranks: Option<Vec<u32>>,
    /// When it began.
    pub begin_unix_nano: i64,
    /// When it ended.
    pub end_unix_nano: i64,
    /// Whether it must be found. A sign that matches a truth that need not be found is right.
    pub must_find: bool,
}

/// A stretch of time, Unix nanoseconds.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Stretch {
    /// Its begin; the recording's where left out.
    pub begin_unix_nano: Option<i64>,
    /// Its end.
    pub end_unix_nano: Option<i64>,
}

/// How one kind came out.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Score {
    /// Truths that must be found.
    pub must_find: usize,
    /// Of these, found.
    pub found: usize,
    /// Signs that are judged.
    pub signs: usize,
    /// Of these, right.
    pub right: usize,
    /// Of the truths that were found, those with a cause.
    pub caused: usize,
    /// Of these, those whose last sign with a cause has that cause.
    pub same_cause: usize,
    /// For each truth that was found, the time from its begin until its first sign was seen, milliseconds.
    pub delays_ms: Vec<i64>,
    /// The first wrong signs, in words.
    pub wrong: Vec<String>,
}

impl Score {
    /// Share of the signs that are right; `None` of none.
    #[must_use]
    pub fn precision(&self) -> Option<f64> {
        share(self.right, self.signs)
    }

    /// Share of the truths that must be found that were found; `None` if there are none.
    #[must_use]
    pub fn recall(&self) -> Option<f64> {
        share(self.found, self.must_find)
    }

    /// Share of the truths with a cause, of those that were found, whose cause was named; `None` if there are none.
    #[must_use]
    pub fn cause(&self) -> Option<f64> {
        share(self.same_cause, self.caused)
    }

    /// Compares the truth's cause with that of the last sign that has one, because readers see the newest. Signs that
    /// are seen more than [`SLACK_NS`] after the truth's end do not count.
    fn judge_cause(&mut self, truth: &True, of_kind: &[&(i64, Sign)]) {
        let Some(cause) = truth.lag_cause else { return };
        let about = of_kind
            .iter()
            .filter(|(seen_ns, sign)| truth.has(*seen_ns, sign) && *seen_ns <= truth.end_unix_nano + SLACK_NS);
        let told = about.filter_map(|(_, sign)| sign.lag_cause).next_back();
        self.caused += 1;
        self.same_cause += usize::from(told == Some(cause));
    }

    /// The median delay, that which 95 % do not exceed, and the longest, milliseconds; `None` if nothing was found.
    #[must_use]
    pub fn delay_ms(&self) -> Option<[i64; 3]> {
        let mut delays = self.delays_ms.clone();
        delays.sort_unstable();
        let below_95 = (delays.len() * 95).div_ceil(100).saturating_sub(1);
        Some([*delays.get(delays.len() / 2)?, *delays.get(below_95)?, *delays.last()?])
    }

    /// This and another recording's together.
    pub fn add(&mut self, other: &Self) {
        self.must_find += other.must_find;
        self.found += other.found;
        (self.caused, self.same_cause) = (self.caused + other.caused, self.same_cause + other.same_cause);
        self.signs += other.signs;
        self.right += other.right;
        self.delays_ms.extend(&other.delays_ms);
        self.wrong.extend(other.wrong.iter().cloned());
    }
}

/// The 95 % interval of a share of which `part` of `of` were seen (Wilson's, which holds for few and for all); `None` of none.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "counts of signs")]
pub fn interval(part: usize, of: usize) -> Option<(f64, f64)> {
    const Z: f64 = 1.959_964;
    let (n, share) = (of as f64, share(part, of)?);
    let middle = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    Some((((middle - half) / scale).max(0.0), ((middle + half) / scale).min(1.0)))
}

#[allow(clippy::cast_precision_loss, reason = "counts of signs")]
fn share(part: usize, of: usize) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

/// Scores one kind on one recording; each sign comes with the time at which it was seen.
#[must_use]
pub fn score(kind: FindingKind, truth: &Truth, signs: &[(i64, Sign)]) -> Score {
    let truths = truths(kind, truth);
    let is_scored = |sign: &Sign| sign.severity > Severity::Info || kind == FindingKind::SlowSteps;
    let of_kind = signs.iter().filter(|(_, sign)| sign.kind == kind && is_scored(sign));
    let of_kind: Vec<&(i64, Sign)> = of_kind.collect();
    let mut score = Score::default();
    for one in truths.iter().filter(|one| one.must_find) {
        score.must_find += 1;
        if let Some((seen_ns, _)) = of_kind.iter().find(|(seen_ns, sign)| one.has(*seen_ns, sign)) {
            score.found += 1;
            score.judge_cause(one, &of_kind);
            score.delays_ms.push((seen_ns - one.begin_unix_nano) / MILLISECOND_NS);
        }
    }
    let mut counted = BTreeSet::new();
    for (seen_ns, sign) in of_kind {
        let is_right = truths.iter().any(|one| one.has(*seen_ns, sign));
        // A restarted run uses the same step numbers again, so a step counts once in ten seconds.
        let second = seen_ns / if sign.step.is_some() { 10 * SECOND_NS } else { SECOND_NS };
        if !is_right && truth.unjudged.iter().any(|stretch| stretch.has(*seen_ns, sign)) {
            continue;
        }
        if counted.insert((sign.subject.clone(), sign.step, second, is_right)) {
            score.signs += 1;
            score.right += usize::from(is_right);
            if !is_right {
                score.wrong.push(format!("{} ({seen_ns})", sign.text.what));
            }
        }
    }
    score
}

/// The truths of a kind. For `slow_steps` that includes truths of kinds that slow steps. Of these, only a late rank
/// must be found: other causes may cost less than the usual difference between steps.
fn truths(kind: FindingKind, truth: &Truth) -> Vec<True> {
    let of_kind = |one: &True| {
        if one.finding == kind {
            return Some(one.clone());
        }
        let must_find = one.must_find && one.finding == FindingKind::Straggler;
        let slows = kind == FindingKind::SlowSteps && slows_steps(one.finding);
        slows.then(|| True { rank: None, lag_cause: None, waiting_ranks: None, must_find, ..one.clone() })
    };
    truth.findings.iter().filter_map(of_kind).collect()
}

impl True {
    fn has(&self, seen_ns: i64, sign: &Sign) -> bool {
        let same_rank = self.rank.is_none() || sign.subject.rank.is_none() || self.rank == sign.subject.rank;
        let waits = |rank: &u32| self.waiting_ranks.as_ref().is_none_or(|ranks| ranks.contains(rank));
        let same_waiting = sign.waiting_ranks.iter().all(waits);
        same_rank && same_waiting && sign.begin_ns <= self.end_unix_nano + SLACK_NS && self.begin_unix_nano <= seen_ns
    }
}

impl Stretch {
    fn has(&self, seen_ns: i64, sign: &Sign) -> bool {
        let after = self.begin_unix_nano.is_none_or(|begin_ns| begin_ns <= seen_ns);
        after && self.end_unix_nano.is_none_or(|end_ns| sign.begin_ns <= end_ns + SLACK_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Certainty, Subject, Text};
    use super::*;

    fn sign(rank: u32, severity: Severity, begin_s: i64, step: u64) -> Sign {
        Sign {
            kind: FindingKind::Straggler,
            subject: Subject { rank: Some(rank), ..Subject::default() },
            severity,
            certainty: Certainty::Observed,
            begin_ns: begin_s * SECOND_NS,
            until_ns: 0,
            step: Some(step),
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: Vec::new(),
            text: Text::default(),
        }
    }

    fn truth(findings: &[(u32, i64, i64, bool)], unjudged: &[(Option<i64>, Option<i64>)]) -> Truth {
        let ns = |seconds: i64| seconds * SECOND_NS;
        let findings = findings.iter().map(|&(rank, begin_s, end_s, must_find)| True {
            finding: FindingKind::Straggler,
            rank: Some(rank),
            lag_cause: None,
            waiting_ranks: None,
            begin_unix_nano: ns(begin_s),
            end_unix_nano: ns(end_s),
            must_find,
        });
        let unjudged = unjudged
            .iter()
            .map(|(begin_s, end_s)| Stretch { begin_unix_nano: begin_s.map(ns), end_unix_nano: end_s.map(ns) });
        Truth { findings: findings.collect(), unjudged: unjudged.collect() }
    }

    fn seen(signs: &[(i64, Sign)], truth: &Truth) -> (usize, usize, usize, usize) {
        let signs: Vec<_> = signs.iter().map(|(seen_s, sign)| (seen_s * SECOND_NS, sign.clone())).collect();
        let score = score(FindingKind::Straggler, truth, &signs);
        (score.found, score.must_find, score.right, score.signs)
    }

    #[test]
    fn a_sign_of_the_right_rank_at_the_right_time_is_right() {
        let truth = truth(&[(1, 10, 20, true), (1, 40, 50, true)], &[]);
        let right = sign(1, Severity::Warning, 12, 1);
        assert_eq!(seen(&[(13, right)], &truth), (1, 2, 1, 1));
        assert_eq!(seen(&[(13, sign(0, Severity::Warning, 12, 1))], &truth), (0, 2, 0, 1), "another rank");
        assert_eq!(seen(&[(31, sign(1, Severity::Warning, 30, 1))], &truth), (0, 2, 0, 1), "between the two");
    }

    #[test]
    fn signs_of_one_step_count_once_and_information_never() {
        let truth = truth(&[(1, 10, 20, true)], &[]);
        let twice = [(13, sign(1, Severity::Warning, 12, 1)), (14, sign(1, Severity::Critical, 12, 1))];
        assert_eq!(seen(&twice, &truth), (1, 1, 1, 1));
        assert_eq!(seen(&[(13, sign(1, Severity::Info, 12, 1))], &truth), (0, 1, 0, 0));
    }

    #[test]
    fn what_is_not_judged_is_neither_and_what_need_not_be_found_is_not_wrong() {
        let truth = truth(&[(1, 10, 20, false)], &[(None, Some(5)), (Some(60), None)]);
        let signs = [
            (2, sign(1, Severity::Warning, 1, 1)),
            (13, sign(1, Severity::Warning, 12, 2)),
            (70, sign(1, Severity::Warning, 69, 3)),
        ];
        assert_eq!(seen(&signs, &truth), (0, 0, 1, 1));
    }

    #[test]
    fn delays_are_reported_at_the_middle_and_at_most() {
        let truth = truth(&[(1, 10, 20, true), (1, 40, 50, true), (1, 70, 80, true), (1, 90, 99, true)], &[]);
        let signs = [(18, 10, 1), (41, 40, 2), (73, 70, 3), (95, 90, 4)]
            .map(|(seen_s, begin_s, step)| (seen_s * SECOND_NS, sign(1, Severity::Warning, begin_s, step)));
        assert_eq!(score(FindingKind::Straggler, &truth, &signs).delay_ms(), Some([5_000, 8_000, 8_000]));
        assert_eq!(Score::default().delay_ms(), None);
    }

    #[test]
    fn a_late_rank_makes_its_jobs_steps_slow_and_information_is_scored_there() {
        let mut truth = truth(&[(1, 10, 20, true), (1, 40, 50, true)], &[]);
        truth.findings[1].finding = FindingKind::AllocatorThrash;
        let slow = |seen_s: i64| {
            let sign = sign(0, Severity::Info, seen_s, 1);
            (seen_s * SECOND_NS, Sign { kind: FindingKind::SlowSteps, subject: Subject::default(), ..sign })
        };
        let score = score(FindingKind::SlowSteps, &truth, &[slow(11), slow(30), slow(45)]);
        assert_eq!((score.found, score.must_find, score.right, score.signs), (1, 1, 2, 3));
    }

    #[test]
    fn of_twenty_delays_the_longest_is_not_among_the_95_percent() {
        let score = |count: i64| Score { delays_ms: (1..=count).collect(), ..Score::default() };
        assert_eq!(score(20).delay_ms(), Some([11, 19, 20]));
        assert_eq!(score(21).delay_ms(), Some([11, 20, 21]));
    }

    #[test]
    fn the_cause_is_that_of_the_last_sign_that_has_one_and_is_about_the_truth() {
        let mut truth = truth(&[(1, 10, 20, true), (1, 40, 50, true), (1, 70, 80, true), (1, 90, 99, true)], &[]);
        truth.findings[..3].iter_mut().for_each(|one| one.lag_cause = Some(LagCause::Host));
        let signs = [
            (12, 11, Some(LagCause::Computes)),
            (13, 11, Some(LagCause::Host)),
            (14, 11, None),
            (22, 11, Some(LagCause::Data)),
            (41, 40, Some(LagCause::Data)),
            (95, 90, Some(LagCause::Host)),
        ];
        let signs = signs.map(|(seen_s, begin_s, lag_cause)| {
            (seen_s * SECOND_NS, Sign { lag_cause, ..sign(1, Severity::Warning, begin_s, 1) })
        });
        let score = score(FindingKind::Straggler, &truth, &signs);
        assert_eq!((score.found, score.caused, score.same_cause, score.cause()), (3, 2, 1, Some(0.5)));
        let mut twice = score.clone();
        twice.add(&score);
        assert_eq!((twice.caused, twice.same_cause), (4, 2));
    }

    /// The values are those of Wilson's formula as published: 10 of 10, 81 of 263.
    #[test]
    fn an_interval_is_narrow_where_many_were_seen_and_never_beyond_all() {
        let near = |part, of, low: f64, high: f64| {
            interval(part, of).is_some_and(|it| (it.0 - low).abs() < 5e-4 && (it.1 - high).abs() < 5e-4)
        };
        assert!(near(10, 10, 0.7225, 1.0) && near(0, 10, 0.0, 0.2775) && near(81, 263, 0.2553, 0.3662));
        assert_eq!(interval(0, 0), None);
    }

    #[test]
    fn signs_may_be_half_a_second_off_and_no_more() {
        let truth = truth(&[(1, 10, 20, true)], &[(Some(50), Some(60))]);
        let at = |begin_ns: i64| Sign { begin_ns, ..sign(1, Severity::Warning, 0, 1) };
        let of = |seen_ns, begin_ns| {
            let score = score(FindingKind::Straggler, &truth, &[(seen_ns, at(begin_ns))]);
            (score.right, score.signs)
        };
        let late_ns = 20 * SECOND_NS + 500 * MILLISECOND_NS;
        assert_eq!((of(late_ns, late_ns), of(late_ns + 1, late_ns + 1)), ((1, 1), (0, 1)));
        assert_eq!((of(10 * SECOND_NS, 0), of(10 * SECOND_NS - 1, 0)), ((1, 1), (0, 1)), "seen before it was so");
        let late_ns = 60 * SECOND_NS + 500 * MILLISECOND_NS;
        assert_eq!((of(late_ns, late_ns), of(late_ns + 1, late_ns + 1)), ((0, 0), (0, 1)));
        assert_eq!((of(50 * SECOND_NS, 50 * SECOND_NS), of(50 * SECOND_NS - 1, 50 * SECOND_NS - 1)), ((0, 0), (0, 1)));
    }

    #[test]
    fn a_rank_that_is_not_reported_is_any() {
        let mut truth = truth(&[(1, 10, 20, true)], &[]);
        let nobody = Sign { subject: Subject::default(), ..sign(1, Severity::Warning, 12, 1) };
        assert_eq!(seen(&[(13, nobody)], &truth), (1, 1, 1, 1));
        truth.findings[0].rank = None;
        assert_eq!(seen(&[(13, sign(5, Severity::Warning, 12, 1))], &truth), (1, 1, 1, 1));
        truth.findings[0].finding = FindingKind::Xid;
        assert_eq!(seen(&[(13, sign(5, Severity::Warning, 12, 1))], &truth), (0, 0, 0, 1), "another kind");
        let other = Sign { kind: FindingKind::IdleGpu, ..sign(1, Severity::Warning, 12, 1) };
        assert_eq!(seen(&[(13, other)], &truth), (0, 0, 0, 0));
    }

    #[test]
    fn a_sign_that_lists_a_rank_that_does_not_wait_is_wrong() {
        let mut truth = truth(&[(1, 10, 20, true)], &[]);
        let waits = |ranks: &[u32]| (13, Sign { waiting_ranks: ranks.to_vec(), ..sign(1, Severity::Warning, 12, 1) });
        assert_eq!(seen(&[waits(&[7])], &truth), (1, 1, 1, 1), "not judged");
        truth.findings[0].waiting_ranks = Some(vec![0, 2]);
        assert_eq!(seen(&[waits(&[0])], &truth), (1, 1, 1, 1));
        assert_eq!(seen(&[waits(&[0, 3])], &truth), (0, 1, 0, 1));
    }

    #[test]
    fn a_step_counts_once_in_ten_seconds_and_what_has_none_once_in_one() {
        let truth = truth(&[(1, 10, 90, true)], &[]);
        let step = |seen_s| (seen_s, sign(1, Severity::Warning, 10, 4));
        assert_eq!(seen(&[step(10), step(19), step(20)], &truth).3, 2, "a run that began anew");
        let none = |seen_s| (seen_s, Sign { step: None, ..sign(1, Severity::Warning, 10, 4) });
        assert_eq!(seen(&[none(10), none(10), none(11)], &truth).3, 2);
    }

    #[test]
    fn shares_are_of_what_there_is_and_recordings_add_up() {
        let text = |text: &str| vec![text.to_owned()];
        let one = Score {
            must_find: 4,
            found: 3,
            signs: 5,
            right: 2,
            delays_ms: vec![7],
            wrong: text("a"),
            ..Score::default()
        };
        assert_eq!((one.precision(), one.recall()), (Some(0.4), Some(0.75)));
        assert_eq!((Score::default().precision(), Score::default().recall()), (None, None));
        let mut both = one.clone();
        both.add(&Score {
            must_find: 1,
            found: 1,
            signs: 2,
            right: 1,
            delays_ms: vec![9],
            wrong: text("b"),
            ..Score::default()
        });
        let wrong = ["a", "b"].map(str::to_owned).to_vec();
        assert_eq!(
            both,
            Score { must_find: 5, found: 4, signs: 7, right: 3, delays_ms: vec![7, 9], wrong, ..Score::default() }
        );
        let wrong = [(31 * SECOND_NS, sign(1, Severity::Warning, 30, 1))];
        assert_eq!(score(FindingKind::Straggler, &Truth::default(), &wrong).wrong, [" (31000000000)"]);
    }
}
