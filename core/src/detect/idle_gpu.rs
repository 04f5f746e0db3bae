//! `idle_gpu`: memory is held, and nothing has run for a while.
//!
//! Based on the driver's utilization alone, so that a forgotten process is found without any annotation. A GPU
//! whose utilization is not known is not judged.

use super::detector::{Detector, Looked, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Text, seconds};
use super::view::{Since, View, bytes, human};
use crate::clock::SECOND_NS;
use std::collections::BTreeMap;

/// Follows since when each GPU is idle.
#[derive(Debug, Default)]
pub(super) struct IdleGpu {
    idle: Since,
    looked: Looked,
}

impl Detector for IdleGpu {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for step in view.steps {
            let is_known = |gpu: &usize| utilization(view, *gpu).is_some();
            self.looked.note(!step.gpus.is_empty() && step.gpus.iter().all(is_known));
        }
        for gpu in 0..view.gpus.len() {
            let held_bytes = idle(view, gpu);
            let since_ns =
                self.idle.note(gpu, held_bytes.map(|_| view.now_ns)).map(|ns| ns.max(view.subject_since_ns(gpu)));
            let (Some(held_bytes), Some(begin_ns)) = (held_bytes, since_ns) else { continue };
            if view.now_ns - begin_ns >= view.settings.idle_after_ns {
                signs.push(sign(view, gpu, held_bytes, begin_ns));
            }
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::IdleGpu, self.looked);
    }
}

/// What an idle GPU holds, bytes; `None` where it is busy, holds little, or is not known to be idle.
fn idle(view: &View<'_>, gpu: usize) -> Option<u64> {
    let ring = view.rings.get(gpu)?;
    if utilization(view, gpu)? > 0.0 {
        return None;
    }
    let newest_ns = ring.newest_ns().filter(|newest_ns| view.now_ns - newest_ns < 2 * SECOND_NS)?;
    let held_bytes = ring.at(newest_ns).ok()??;
    (held_bytes >= view.settings.idle_bytes).then_some(held_bytes)
}

/// The newest utilization of a GPU, where it is not old.
fn utilization(view: &View<'_>, gpu: usize) -> Option<f64> {
    let state = view.gpus.get(gpu)?;
    let hold_ns = state.reading_hold_ns().max(2 * SECOND_NS);
    let medium = state.medium().filter(|medium| view.now_ns - medium.at_ns < hold_ns)?;
    medium.reading.utilization_ratio
}

fn sign(view: &View<'_>, gpu: usize, held_bytes: u64, begin_ns: i64) -> Sign {
    let idle_ns = view.now_ns - begin_ns;
    Sign {
        kind: FindingKind::IdleGpu,
        subject: view.subject_of(gpu),
        severity: Severity::Info,
        certainty: Certainty::Observed,
        begin_ns,
        until_ns: view.now_ns + SECOND_NS,
        step: view.step_on(gpu),
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: vec![bytes("held_bytes", held_bytes), Evidence { name: "idle_seconds", value: seconds(idle_ns) }],
        text: Text {
            what: format!(
                "{} held {} and ran nothing for {}.",
                view.gpu_name(gpu),
                human(held_bytes),
                HumanDuration(idle_ns)
            ),
            why: "The driver reported 0 % utilization throughout.".to_owned(),
            advice:
                "Look whether the process still lives and what it waits for (py-spy dump), or end it to free the GPU."
                    .to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::{GIB, Hand};
    use super::*;
    use crate::gpu::{Device, GpuState};

    /// Reads and looks once a second: utilization, then GiB held; returns the begins of what was said, in seconds, by the
    /// second of the look.
    fn said(seconds: i64, of: impl Fn(i64) -> (Option<f64>, u64)) -> Vec<(i64, i64)> {
        let (mut hand, mut detector, mut said) = (Hand::new(1), IdleGpu::default(), Vec::new());
        for second in 0..=seconds {
            hand.now_ns = second * SECOND_NS;
            let (utilization, held) = of(second);
            hand.uses(0, held);
            hand.runs(0, utilization);
            let (signs, troubles) = hand.look(&mut detector);
            assert!(troubles.is_empty());
            said.extend(signs.iter().map(|sign| (second, sign.begin_ns / SECOND_NS)));
            for sign in &signs {
                assert_eq!(sign.until_ns, hand.now_ns + SECOND_NS);
                let idle_ns = hand.now_ns - sign.begin_ns;
                let evidence =
                    [bytes("held_bytes", held), Evidence { name: "idle_seconds", value: super::seconds(idle_ns) }];
                assert_eq!(sign.evidence, evidence);
            }
        }
        said
    }

    #[test]
    fn memory_that_is_held_with_nothing_running_is_reported_after_a_minute() {
        let found = said(100, |second| (Some(if (10..95).contains(&second) { 0.0 } else { 0.5 }), 4 * GIB));
        assert_eq!(found, (70..95).map(|second| (second, 10)).collect::<Vec<_>>());
        let again = said(140, |second| (Some(if second == 70 { 0.01 } else { 0.0 }), 4 * GIB));
        assert_eq!(again.first(), Some(&(60, 0)));
        assert!(again.contains(&(131, 71)) && !again.iter().any(|(second, _)| (70..131).contains(second)));
    }

    #[test]
    fn what_is_not_known_or_little_is_not_reported() {
        assert!(said(90, |_| (None, 4 * GIB)).is_empty(), "no utilization");
        assert!(said(90, |second| ((second != 30).then_some(0.0), 4 * GIB)).is_empty(), "unknown for a moment");
        assert!(said(90, |_| (Some(0.0), GIB - 1)).is_empty());
        assert_eq!(said(60, |_| (Some(0.0), GIB)), [(60, 0)]);
    }

    #[test]
    fn old_readings_are_not_judged() {
        let ages = |medium_ns: i64, memory_ns: i64| {
            let (mut hand, mut detector) = (Hand::new(1), IdleGpu::default());
            hand.settings.idle_after_ns = 0;
            hand.now_ns = 10 * SECOND_NS - memory_ns;
            hand.uses(0, 4 * GIB);
            hand.now_ns = 10 * SECOND_NS - medium_ns;
            hand.runs(0, Some(0.0));
            hand.now_ns = 10 * SECOND_NS;
            hand.look(&mut detector).0.len()
        };
        let old = 2 * SECOND_NS;
        // Times of memory are floored to a microsecond.
        assert_eq!([ages(old - 1, old - 1_000), ages(old, old - 1_000), ages(old - 1, old)], [1, 0, 0]);
    }

    #[test]
    fn rare_readings_hold_for_longer() {
        let (mut hand, mut detector) = (Hand::new(1), IdleGpu::default());
        hand.settings.idle_after_ns = 0;
        hand.gpus[0] = GpuState::new(Device::default(), 600 * SECOND_NS, 10 * SECOND_NS);
        hand.runs(0, Some(0.0));
        let mut said = |at_ns: i64| {
            hand.now_ns = at_ns;
            hand.uses(0, 4 * GIB);
            hand.look(&mut detector).0.len()
        };
        assert_eq!([said(9 * SECOND_NS), said(31 * SECOND_NS)], [1, 0]);
    }
}
