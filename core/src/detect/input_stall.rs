//! `input_stall`: a rank waits for its data while its GPU is idle.
//!
//! The stalled time of a step is its time in the `data` phases, at most the time in which the GPU was idle. The share is the
//! stalled time of the last steps over their length. If the GPU's idle time is not known, the time in `data` counts in full,
//! and the finding is only suspected.

use super::detector::{Detector, Looked, Ratios, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Subject, Text, seconds};
use super::steps::Step;
use super::view::{View, ratio};
use crate::phases::RankKey;
use std::collections::{BTreeMap, VecDeque};

/// Steps over which the share is computed.
const STEPS: usize = 10;
/// This number of last steps suffices for a finding if their share is twice the configured one.
const SUDDEN_STEPS: usize = 2;
/// Upper bound of that doubled share.
const MOST_SHARE: f64 = 0.9;

/// Follows each rank's last steps.
#[derive(Debug, Default)]
pub(super) struct InputStall {
    ranks: BTreeMap<RankKey, VecDeque<Waited>>,
    looked: Looked,
}

#[derive(Debug, Clone, Copy)]
struct Waited {
    begin_ns: i64,
    step_ns: i64,
    stalled_ns: i64,
    is_idle_known: bool,
}

impl Detector for InputStall {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        for step in view.steps {
            let Some(data_ns) = step.time_in(&view.settings.data_phases) else {
                self.looked.note(false);
                continue;
            };
            let steps = self.ranks.entry(step.key.clone()).or_default();
            if step.nth < view.settings.warm_up_steps {
                steps.clear();
                self.looked.note(false);
                continue;
            }
            let stalled_ns = step.idle_ns.map_or(data_ns, |idle_ns| data_ns.min(idle_ns));
            let (begin_ns, step_ns, is_idle_known) = (step.begin_ns, step.length_ns(), step.idle_ns.is_some());
            steps.push_back(Waited { begin_ns, step_ns, stalled_ns, is_idle_known });
            while steps.len() > STEPS {
                steps.pop_front();
            }
            self.looked.note(steps.len() >= SUDDEN_STEPS);
            signs.extend(judge(view, step, steps));
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::InputStall, self.looked);
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, steps) in &self.ranks {
            out.entry(key.clone()).or_default().data_stall = share(steps.iter());
        }
    }
}

fn share<'a>(steps: impl Iterator<Item = &'a Waited> + Clone) -> Option<f64> {
    ratio(steps.clone().map(|step| step.stalled_ns).sum(), steps.map(|step| step.step_ns).sum())
}

fn judge(view: &View<'_>, step: &Step, steps: &VecDeque<Waited>) -> Option<Sign> {
    let least = view.settings.stall_share;
    let sudden = share(steps.iter().rev().take(SUDDEN_STEPS)).filter(|_| steps.len() >= SUDDEN_STEPS);
    let lasting = share(steps.iter()).filter(|_| steps.len() >= STEPS);
    let sudden = sudden.filter(|share| *share >= (2.0 * least).min(MOST_SHARE));
    let found = sudden.or(lasting.filter(|share| *share >= least))?;
    let judged = if sudden.is_some() { SUDDEN_STEPS } else { STEPS };
    // The earliest step that stalls, and from which on the steps together do.
    let stalls = |from: usize| {
        let own = share(steps.iter().skip(from).take(1));
        own.zip(share(steps.iter().skip(from))).is_some_and(|(own, all)| own >= least && all >= least)
    };
    let onset = (0..steps.len()).find(|from| stalls(*from)).and_then(|from| steps.get(from));
    let is_idle_known = steps.iter().all(|step| step.is_idle_known);
    let stalled_ns: i64 = steps.iter().rev().take(judged).map(|step| step.stalled_ns).sum();
    let (job, rank) = (&step.key.0, step.key.1);
    let idle = if is_idle_known { "with its GPU idle" } else { "(whether its GPU was idle is not known)" };
    Some(Sign {
        kind: FindingKind::InputStall,
        subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
        severity: Severity::Warning,
        certainty: if is_idle_known { Certainty::Observed } else { Certainty::Suspected },
        begin_ns: onset.map_or(step.begin_ns, |onset| onset.begin_ns),
        until_ns: view.now_ns + view.settings.hold_ns,
        step: step.number,
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: steps.back().map(|step| step.stalled_ns),
        evidence: vec![
            Evidence { name: "stalled_ratio", value: found },
            Evidence { name: "stalled_seconds", value: seconds(stalled_ns) },
        ],
        text: Text {
            what: format!("Rank {rank} of {job} spent {:.0} % of its time waiting for data.", 100.0 * found),
            why: format!("In its last {judged} steps it was {:.2} s in its data phase {idle}.", seconds(stalled_ns)),
            advice:
                "Raise the data loader's num_workers and prefetch_factor, pin memory, move decoding and augmentation \
                     off the critical path, and look at the storage's throughput."
                    .to_owned(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;
    use crate::clock::MILLISECOND_NS;

    /// A step of 100 ms, of which the rank waits `data_ms` ms for data with the GPU idle.
    fn step(nth: u64, data_ms: i64) -> Step {
        let step = Hand::step(0, nth, 0, &[("data", data_ms), ("forward", 100 - data_ms)]);
        Step { idle_ns: Some(data_ms * MILLISECOND_NS), ..step }
    }

    /// The numbers of the steps in which a sign is returned, with the share.
    fn reported(steps: impl Iterator<Item = Step>) -> Vec<(u64, f64)> {
        let (mut hand, mut detector) = (Hand::with_ranks(1), InputStall::default());
        let signs = steps.flat_map(|step| hand.steps_end(&mut detector, vec![step]));
        signs.map(|sign| (sign.step.expect("a number"), sign.evidence[0].value)).collect()
    }

    #[test]
    fn ten_steps_of_three_tenths_or_two_of_six_are_a_stall() {
        assert_eq!(reported((0..14).map(|nth| step(nth, 30))), [(12, 0.3), (13, 0.3)], "three of warm-up, then ten");
        assert_eq!(reported((0..40).map(|nth| step(nth, 29))), []);
        assert_eq!(reported((0..6).map(|nth| step(nth, 60))), [(4, 0.6), (5, 0.6)]);
        assert_eq!(reported((0..10).map(|nth| step(nth, 59))), [], "not sudden, and not ten yet");
        // Only the last ten count, and the last two.
        assert_eq!(reported((0..24).map(|nth| step(nth, if nth < 6 { 58 } else { 24 }))), [(12, 0.342), (13, 0.308)]);
        let at_last = reported((0..9).map(|nth| step(nth, if nth < 7 { 0 } else { 70 })));
        assert_eq!(at_last, [(8, 0.7)]);
    }

    #[test]
    fn a_stall_began_with_the_first_step_that_stalled_of_those_that_do_together() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), InputStall::default());
        let mut began = |nth: u64, data_ms| {
            let begin_ns = i64::try_from(nth).expect("small") * 100 * MILLISECOND_NS;
            let step = Step { begin_ns, end_ns: begin_ns + 100 * MILLISECOND_NS, ..step(nth, data_ms) };
            hand.steps_end(&mut detector, vec![step]).pop().map(|sign| sign.begin_ns / 100 / MILLISECOND_NS)
        };
        // Once by chance, and for good from the twentieth on.
        let began: Vec<_> = (0..30).map(|nth| began(nth, if nth == 12 || nth >= 20 { 40 } else { 2 })).collect();
        assert_eq!(began.iter().flatten().collect::<Vec<_>>(), [&20, &20, &20]);
        assert_eq!(began.iter().position(Option::is_some), Some(27));
    }

    #[test]
    fn the_seconds_are_those_of_the_steps_whose_share_is_named() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), InputStall::default());
        let mut last = |steps: std::ops::Range<u64>, data_ms: i64| {
            let signs = steps.flat_map(|nth| hand.steps_end(&mut detector, vec![step(nth, data_ms)]));
            let sign = signs.reduce(|_, newer| newer).expect("a stall");
            (sign.text.what, sign.text.why, sign.evidence[1].value)
        };
        let said = |percent: u32, steps: usize, stalled_s: f64| {
            (
                format!("Rank 0 of j spent {percent} % of its time waiting for data."),
                format!("In its last {steps} steps it was {stalled_s:.2} s in its data phase with its GPU idle."),
                stalled_s,
            )
        };
        assert_eq!(last(0..10, 70), said(70, 2, 0.14));
        assert_eq!(last(10..30, 30), said(30, 10, 0.3));
    }

    #[test]
    fn nine_tenths_are_a_stall_whatever_is_asked_for() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), InputStall::default());
        hand.settings.stall_share = 0.6;
        let count = |hand: &mut Hand, detector: &mut InputStall, ms| {
            (3..7).flat_map(|nth| hand.steps_end(detector, vec![step(nth, ms)])).count()
        };
        assert_eq!(count(&mut hand, &mut detector, 89), 0);
        assert_eq!(count(&mut hand, &mut InputStall::default(), 90), 3);
    }

    #[test]
    fn what_the_gpu_worked_through_is_no_stall_and_unknown_idleness_is_reported() {
        let busy = |nth| Step { idle_ns: Some(10 * MILLISECOND_NS), ..step(nth, 80) };
        assert_eq!(reported((0..40).map(busy)), []);
        let idle = |nth| Step { idle_ns: Some(70 * MILLISECOND_NS), ..step(nth, 40) };
        assert_eq!(reported((0..13).map(idle)), [(12, 0.4)], "no more than it waited");
        let look = |steps: Vec<Step>| {
            let (mut hand, mut detector) = (Hand::with_ranks(1), InputStall::default());
            let sign = steps.into_iter().flat_map(|step| hand.steps_end(&mut detector, vec![step])).last();
            (sign.expect("one"), Hand::ratios(&detector, 0).data_stall, hand)
        };
        let (sign, share, hand) = look((3..5).map(|nth| step(nth, 60)).collect());
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (FindingKind::InputStall, Severity::Warning, Certainty::Observed)
        );
        assert_eq!(sign.subject, Subject { gpu: Some(0), job: Some("j".into()), rank: Some(0) });
        assert_eq!((share, sign.evidence[1].value), (Some(0.6), 0.12));
        assert_eq!(sign.lost_ns, Some(60 * MILLISECOND_NS), "of its own step");
        assert_eq!((sign.begin_ns, sign.until_ns), (0, hand.now_ns + hand.settings.hold_ns));
        assert_eq!(sign.text.what, "Rank 0 of j spent 60 % of its time waiting for data.");
        assert_eq!(sign.text.why, "In its last 2 steps it was 0.12 s in its data phase with its GPU idle.");
        let one_unknown = vec![step(3, 60), Step { idle_ns: None, ..step(4, 60) }];
        let (sign, ..) = look(one_unknown);
        assert_eq!(sign.certainty, Certainty::Suspected);
        assert!(sign.text.why.contains("not known"));
    }

    #[test]
    fn a_new_run_and_a_rank_that_has_gone_begin_anew() {
        assert_eq!(reported([3, 0, 4].map(|nth| step(nth, 60)).into_iter()), []);
        let unmarked = Step { phases: Vec::new(), ..step(4, 60) };
        assert_eq!(
            reported([step(3, 60), unmarked, step(5, 60)].into_iter()),
            [(5, 0.6)],
            "one without data says nothing"
        );
        let (mut hand, mut detector) = (Hand::with_ranks(1), InputStall::default());
        hand.steps_end(&mut detector, vec![step(3, 60)]);
        hand.ranks.clear();
        hand.look(&mut detector);
        assert_eq!(Hand::ratios(&detector, 0).data_stall, None);
    }
}
