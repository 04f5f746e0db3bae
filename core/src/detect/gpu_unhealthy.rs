//! `gpu_unhealthy`: the driver says that a GPU needs a reset, a reboot or to be replaced.
//!
//! Based on the state of row remapping and on NVIDIA's recovery action, which stay until someone acts. Jobs may go on
//! meanwhile, so that nothing else shows them. A GPU on which nothing runs and that has not joined the NVLink fabric in two
//! readings, 30 s apart, cannot start any.

use super::agree::InARow;
use super::detector::{Detector, Trouble};
use super::finding::{Certainty, FindingKind, Severity, Sign, Text};
use super::view::{Since, View};
use crate::clock::SECOND_NS;
use crate::gpu::{Fabric, Slow};

/// A reading that is older says nothing.
const OLD_NS: i64 = 60 * SECOND_NS;

/// What is wrong with a GPU, each a finding of its own.
struct Ailment {
    /// Distinguishes the findings of one GPU.
    code: u64,
    severity: Severity,
    /// The sentence after the GPU's name.
    what: &'static str,
    why: &'static str,
    advice: &'static str,
}

const REMAP_FAILED: Ailment = Ailment {
    code: 1,
    severity: Severity::Critical,
    what: "could not remap a faulty row of its memory",
    why: "The driver reports that remapping failed: there are no spare rows left in that bank.",
    advice: "Drain the node and have the GPU replaced: further errors in that row end the jobs on it.",
};
const REMAP_PENDING: Ailment = Ailment {
    code: 2,
    severity: Severity::Warning,
    what: "waits for a reset to remap a faulty row of its memory",
    why: "The driver reports that remapping is pending.",
    advice: "Reset the GPU when its job has ended (nvidia-smi --gpu-reset), or reboot the node.",
};
const NOT_STARTED: Ailment = unjoined("It has not begun to join.");
const JOINING: Ailment = unjoined("It has been joining for more than 30 s.");
const NOT_JOINED: Ailment = unjoined("It tried to join, and failed.");
/// NVIDIA's recovery actions, by their number in NVML.
const ACTIONS: &[(u64, Ailment)] = &[
    (
        1,
        Ailment {
            code: 0x101,
            severity: Severity::Critical,
            what: "needs a reset",
            why: "The driver's recovery action is: reset the GPU.",
            advice: "End the job on it, reset it (nvidia-smi --gpu-reset), and keep new jobs off it until then.",
        },
    ),
    (
        2,
        Ailment {
            code: 0x102,
            severity: Severity::Critical,
            what: "needs a reboot of the node",
            why: "The driver's recovery action is: reboot the node.",
            advice: "Drain the node and reboot it.",
        },
    ),
    (
        3,
        Ailment {
            code: 0x103,
            severity: Severity::Warning,
            what: "needs its peer-to-peer traffic to be drained",
            why: "The driver's recovery action is: drain P2P.",
            advice: "End the jobs that use several GPUs of the node; the driver recovers when no peer-to-peer traffic is left.",
        },
    ),
    (
        4,
        Ailment {
            code: 0x104,
            severity: Severity::Critical,
            what: "needs to be drained and reset",
            why: "The driver's recovery action is: drain and reset.",
            advice: "Keep new jobs off the GPU, let those on it end, and then reset it (nvidia-smi --gpu-reset).",
        },
    ),
];
/// A recovery action of a newer driver.
const OTHER_ACTION: Ailment = Ailment {
    code: 0x100,
    severity: Severity::Warning,
    what: "needs an action that this program has no text for",
    why: "The driver reports a recovery action whose number this program does not know.",
    advice: "Look at it with nvidia-smi -q, and act on it.",
};

/// A GPU outside of the fabric that it belongs to.
const fn unjoined(why: &'static str) -> Ailment {
    Ailment {
        code: 3,
        severity: Severity::Critical,
        what: "has not joined the NVLink fabric",
        why,
        advice: "CUDA does not start on it until then (error 802: system not yet initialized). Look whether \
                 nvidia-fabricmanager runs, with the driver's version, and what it logs; nvidia-smi -q shows the state \
                 under Fabric.",
    }
}

/// Follows since when each GPU has each of them.
#[derive(Debug, Default)]
pub(super) struct GpuUnhealthy {
    failed: Since,
    pending: Since,
    action: Since,
    unjoined: Vec<InARow>,
}

impl Detector for GpuUnhealthy {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for (gpu, state) in view.gpus.iter().enumerate() {
            let latest = state.slow().filter(|latest| view.now_ns - latest.at_ns < OLD_NS);
            let slow = latest.as_ref().map(|latest| &latest.reading);
            let found = [
                (&mut self.failed, slow.filter(|slow| slow.row_remap_failed == Some(true)).map(|_| &REMAP_FAILED)),
                (&mut self.pending, slow.filter(|slow| slow.row_remap_pending == Some(true)).map(|_| &REMAP_PENDING)),
                (&mut self.action, slow.and_then(action)),
            ];
            for (since, ailment) in found {
                let begin_ns = since.note(gpu, ailment.map(|_| view.now_ns));
                signs.extend(begin_ns.zip(ailment).map(|(begin_ns, ailment)| ailment.sign(view, gpu, begin_ns)));
            }
        }
        self.unjoined.resize_with(view.gpus.len(), InARow::default);
        for (gpu, unjoined) in self.unjoined.iter_mut().enumerate() {
            let found = outside_fabric(unjoined, view, gpu);
            signs.extend(found.map(|(begin_ns, ailment)| ailment.sign(view, gpu, begin_ns)));
        }
    }
}

/// Since when a GPU on which nothing runs is outside of its fabric, and how.
fn outside_fabric(seen: &mut InARow, view: &View<'_>, gpu: usize) -> Option<(i64, &'static Ailment)> {
    // A process has a context, so CUDA works there, whatever the driver says of the fabric.
    let is_unused = view.gpus.get(gpu)?.processes().is_some_and(|processes| processes.reading.is_empty());
    let read = view.rare(gpu).and_then(|rare| Some((rare.at_ns, rare.reading.fabric.filter(|_| is_unused)?)));
    let Some((at_ns, fabric)) = read else {
        *seen = InARow::default();
        return None;
    };
    seen.note(at_ns, !fabric.has_joined());
    seen.since_ns().map(|begin_ns| (begin_ns, outside(fabric)))
}

/// What a GPU that has not joined lacks.
fn outside(fabric: Fabric) -> &'static Ailment {
    match fabric.state {
        1 => &NOT_STARTED,
        2 => &JOINING,
        _ => &NOT_JOINED,
    }
}

/// The recovery action that the driver asks for.
fn action(slow: &Slow) -> Option<&'static Ailment> {
    let number = slow.recovery_action.filter(|number| *number != 0)?;
    Some(ACTIONS.iter().find(|(action, _)| *action == number).map_or(&OTHER_ACTION, |(_, ailment)| ailment))
}

impl Ailment {
    fn sign(&self, view: &View<'_>, gpu: usize, begin_ns: i64) -> Sign {
        Sign {
            kind: FindingKind::GpuUnhealthy,
            subject: view.subject_of(gpu),
            severity: self.severity,
            certainty: Certainty::Observed,
            begin_ns: begin_ns.max(view.subject_since_ns(gpu)),
            until_ns: view.now_ns + view.settings.hold_ns,
            step: None,
            code: Some(self.code),
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: Vec::new(),
            text: Text {
                what: format!("{} {}.", view.gpu_name(gpu), self.what),
                why: self.why.to_owned(),
                advice: self.advice.to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::*;

    fn look(hand: &mut Hand, detector: &mut GpuUnhealthy, second: i64, slow: Slow) -> Vec<Sign> {
        hand.now_ns = second * SECOND_NS;
        hand.gpus[1].set_slow(hand.now_ns, slow);
        hand.look(detector).0
    }

    #[test]
    fn what_the_driver_asks_for_is_reported_until_it_is_done() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), GpuUnhealthy::default());
        let well = Slow {
            row_remap_pending: Some(false),
            row_remap_failed: Some(false),
            recovery_action: Some(0),
            ..Slow::default()
        };
        assert!(look(&mut hand, &mut detector, 1, well.clone()).is_empty());
        assert!(look(&mut hand, &mut detector, 2, Slow::default()).is_empty(), "a GPU that does not say");
        let ill = Slow { row_remap_pending: Some(true), recovery_action: Some(1), ..well.clone() };
        for second in [3, 4] {
            let signs = look(&mut hand, &mut detector, second, ill.clone());
            let said: Vec<_> = signs.iter().map(|sign| (sign.code, sign.severity, sign.begin_ns / SECOND_NS)).collect();
            assert_eq!(said, [(Some(2), Severity::Warning, 3), (Some(0x101), Severity::Critical, 3)]);
            assert!(signs.iter().all(|sign| sign.subject.gpu == Some(1) && sign.subject.rank == Some(1)));
            assert_eq!(signs[1].text.what, "GPU 1 needs a reset.");
        }
        let failed = Slow { row_remap_failed: Some(true), ..well.clone() };
        let [sign] = look(&mut hand, &mut detector, 5, failed).try_into().expect("one");
        assert_eq!((sign.code, sign.severity), (Some(1), Severity::Critical));
        assert!(look(&mut hand, &mut detector, 6, well).is_empty());
        look(&mut hand, &mut detector, 7, ill);
        hand.now_ns += OLD_NS;
        assert!(hand.look(&mut detector).0.is_empty(), "an old reading");
    }

    #[test]
    fn a_gpu_that_stays_outside_of_its_fabric_is_reported_unless_something_runs_on_it() {
        use crate::gpu::{Process, Rare};
        let (mut hand, mut detector) = (Hand::new(2), GpuUnhealthy::default());
        let mut at = |second: i64, fabric: Option<(u32, u32)>, runs: bool| {
            hand.now_ns = second * SECOND_NS;
            let fabric = fabric.map(|(state, status)| Fabric { state, status });
            hand.gpus[1].set_rare(hand.now_ns, Rare { fabric, ..Rare::default() });
            let process = Process { pid: 7, used_bytes: None };
            hand.gpus[1].set_processes(hand.now_ns, Some(if runs { vec![process] } else { Vec::new() }));
            let signs = hand.look(&mut detector).0;
            assert_eq!(hand.look(&mut detector).0.len(), signs.len(), "the same reading again");
            signs.into_iter().map(|sign| (sign.begin_ns / SECOND_NS, sign.text.what, sign.text.why)).collect::<Vec<_>>()
        };
        assert!(at(0, Some((3, 0)), false).is_empty() && at(30, Some((3, 0)), false).is_empty(), "joined");
        assert!(at(60, Some((2, 0)), false).is_empty(), "it may be on its way");
        let what = "GPU 1 has not joined the NVLink fabric.".to_owned();
        assert_eq!(at(90, Some((2, 0)), false), [(60, what.clone(), JOINING.why.to_owned())]);
        assert_eq!(at(120, Some((3, 999)), false), [(60, what, NOT_JOINED.why.to_owned())]);
        assert!(at(150, Some((1, 0)), true).is_empty(), "CUDA works there");
        assert!(at(180, Some((1, 0)), false).is_empty() && at(210, None, false).is_empty(), "no fabric");
        assert!(at(240, Some((1, 0)), false).is_empty());
        assert_eq!(at(270, Some((1, 0)), false)[0].2, NOT_STARTED.why);
    }

    #[test]
    fn each_action_has_its_words_and_a_new_one_is_reported_without() {
        let (mut hand, mut detector) = (Hand::new(2), GpuUnhealthy::default());
        let mut what = |number: u64| {
            let slow = Slow { recovery_action: Some(number), ..Slow::default() };
            let [sign] = look(&mut hand, &mut detector, 1, slow).try_into().expect("one");
            sign.text.what
        };
        assert_eq!([1, 2, 3, 4].map(&mut what).map(|what| what.len() > 15), [true; 4]);
        assert!(what(2).contains("reboot of the node") && what(77).contains("no text for"));
    }
}
