//! `xid`: an error that the driver reported, with NVIDIA's meaning of its number.
//!
//! Meanings and the action that they call for follow NVIDIA's catalogue of XID errors. A number that is not in the
//! table is reported without a meaning.

use super::detector::{Detector, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Text, number};
use super::view::View;
use crate::clock::SECOND_NS;
use std::collections::BTreeMap;

/// A finding of an XID lasts this long after the last error of that number on its GPU.
const HOLD_NS: i64 = 300 * SECOND_NS;

/// Follows the counts of each GPU.
#[derive(Debug, Default)]
pub(super) struct XidDetector {
    seen: Option<Vec<BTreeMap<u64, u64>>>,
}

/// One number of the catalogue.
struct Meaning {
    xid: u64,
    severity: Severity,
    means: &'static str,
    advice: &'static str,
}

const APPLICATION: &str = "Look at the program first: run it under compute-sanitizer, and on another GPU.";
const RESET: &str = "Drain the node and reset the GPU; if it comes back, have the GPU replaced.";
const REBOOT: &str = "Drain the node and reboot it; if it comes back, have the GPU replaced.";
const WATCH: &str = "Let the job go on; if it comes again, drain the node and reset the GPU.";

#[rustfmt::skip]
const CATALOGUE: &[Meaning] = &[
    Meaning { xid: 13, severity: Severity::Warning, means: "graphics engine exception, mostly an illegal access by a kernel", advice: APPLICATION },
    Meaning { xid: 31, severity: Severity::Warning, means: "GPU memory page fault, mostly an illegal address used by the program", advice: APPLICATION },
    Meaning { xid: 32, severity: Severity::Warning, means: "invalid or corrupted push buffer stream", advice: APPLICATION },
    Meaning { xid: 38, severity: Severity::Warning, means: "driver firmware error", advice: WATCH },
    Meaning { xid: 43, severity: Severity::Info, means: "the program hit an error of its own and its channel was stopped", advice: APPLICATION },
    Meaning { xid: 45, severity: Severity::Info, means: "work was removed because the program ended, or because of an earlier error", advice: APPLICATION },
    Meaning { xid: 48, severity: Severity::Critical, means: "uncorrectable double-bit ECC error", advice: RESET },
    Meaning { xid: 61, severity: Severity::Critical, means: "internal micro-controller breakpoint", advice: RESET },
    Meaning { xid: 62, severity: Severity::Critical, means: "internal micro-controller halt", advice: RESET },
    Meaning { xid: 63, severity: Severity::Warning, means: "a memory row was remapped", advice: WATCH },
    Meaning { xid: 64, severity: Severity::Critical, means: "remapping a memory row failed", advice: RESET },
    Meaning { xid: 68, severity: Severity::Warning, means: "video processor exception", advice: APPLICATION },
    Meaning { xid: 69, severity: Severity::Warning, means: "graphics engine class error", advice: APPLICATION },
    Meaning { xid: 74, severity: Severity::Critical, means: "NVLink error", advice: "Look at both ends of the link (nvidia-smi nvlink -s), reset the GPUs, and have the link checked if it comes back." },
    Meaning { xid: 79, severity: Severity::Critical, means: "the GPU has fallen off the bus", advice: REBOOT },
    Meaning { xid: 92, severity: Severity::Warning, means: "high rate of corrected ECC errors", advice: WATCH },
    Meaning { xid: 94, severity: Severity::Warning, means: "contained uncorrectable memory error: only the program that met it is affected", advice: "Restart the program; reset the GPU when it is convenient." },
    Meaning { xid: 95, severity: Severity::Critical, means: "uncontained uncorrectable memory error", advice: RESET },
    Meaning { xid: 109, severity: Severity::Critical, means: "context switch timeout", advice: RESET },
    Meaning { xid: 110, severity: Severity::Critical, means: "security fault", advice: REBOOT },
    Meaning { xid: 119, severity: Severity::Critical, means: "the GPU's system processor (GSP) did not answer in time", advice: RESET },
    Meaning { xid: 120, severity: Severity::Critical, means: "error of the GPU's system processor (GSP)", advice: RESET },
    Meaning { xid: 121, severity: Severity::Warning, means: "corrected error on the chip-to-chip link", advice: WATCH },
    Meaning { xid: 140, severity: Severity::Critical, means: "unrecovered ECC error", advice: RESET },
    Meaning { xid: 143, severity: Severity::Critical, means: "the GPU could not be initialized", advice: RESET },
];

impl Detector for XidDetector {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        let counts: Vec<BTreeMap<u64, u64>> =
            view.gpus.iter().map(|gpu| gpu.xids().into_iter().map(|(xid, seen)| (xid, seen.count)).collect()).collect();
        if let Some(before) = &self.seen {
            for (gpu, counts) in counts.iter().enumerate() {
                let count_before = |xid| before.get(gpu).and_then(|counts| counts.get(xid)).copied().unwrap_or(0);
                let new = counts.iter().filter(|(xid, count)| **count > count_before(xid));
                signs.extend(new.map(|(xid, count)| sign(view, gpu, *xid, *count)));
            }
        }
        self.seen = Some(counts);
    }
}

fn sign(view: &View<'_>, gpu: usize, xid: u64, count: u64) -> Sign {
    let known = CATALOGUE.iter().find(|meaning| meaning.xid == xid);
    let means = known.map_or("a number that this program has no text for", |meaning| meaning.means);
    let at_ns =
        view.gpus.get(gpu).and_then(|gpu| gpu.xids().get(&xid).copied()).map_or(view.now_ns, |seen| seen.last_ns);
    Sign {
        kind: FindingKind::Xid,
        subject: view.subject_of(gpu),
        severity: known.map_or(Severity::Warning, |meaning| meaning.severity),
        certainty: Certainty::Observed,
        begin_ns: at_ns,
        until_ns: view.now_ns + HOLD_NS,
        step: view.step_at(gpu, at_ns),
        code: Some(xid),
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: vec![
            Evidence { name: "xid", value: number(xid) },
            Evidence { name: "xid_errors_count", value: number(count) },
        ],
        text: Text {
            what: format!("{} reported XID {xid}: {means}.", view.gpu_name(gpu)),
            why: format!("The driver has reported {count} of this number since the daemon started."),
            advice: known
                .map_or("Look the number up in NVIDIA's catalogue of XID errors.", |meaning| meaning.advice)
                .to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::Hand;
    use super::super::view::OpenStep;
    use super::*;
    use crate::clock::MILLISECOND_NS;

    #[test]
    fn each_new_error_is_reported_once_and_what_was_counted_before_is_not() {
        let (mut hand, mut detector) = (Hand::new(2), XidDetector::default());
        hand.gpus[0].count_xid(31, 0);
        let mut look = |hand: &mut Hand, second: i64| {
            hand.now_ns = second * SECOND_NS;
            let (signs, troubles) = hand.look(&mut detector);
            assert!(troubles.is_empty());
            signs
        };
        assert!(look(&mut hand, 1).is_empty(), "it was there when the daemon first looked");
        hand.gpus[1].count_xid(79, SECOND_NS + 5);
        hand.gpus[1].count_xid(4_711, SECOND_NS + 6);
        let [fell, unknown] = look(&mut hand, 2).try_into().expect("two");
        assert_eq!((fell.code, fell.severity, fell.subject.gpu), (Some(79), Severity::Critical, Some(1)));
        assert_eq!((fell.begin_ns, fell.until_ns), (SECOND_NS + 5, 302 * SECOND_NS));
        assert!(fell.text.what.contains("XID 79: the GPU has fallen off the bus"));
        assert_eq!((unknown.code, unknown.severity), (Some(4_711), Severity::Warning));
        assert!(look(&mut hand, 3).is_empty(), "found already");
        hand.gpus[0].count_xid(31, 3 * SECOND_NS);
        let [again] = look(&mut hand, 4).try_into().expect("one");
        assert_eq!((again.code, again.subject.gpu, again.severity), (Some(31), Some(0), Severity::Warning));
        assert_eq!(again.evidence.last().map(|evidence| evidence.value), Some(number(2)));
    }

    #[test]
    fn an_error_is_of_the_step_in_which_it_came_although_another_has_begun() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), XidDetector::default());
        assert!(hand.look(&mut detector).0.is_empty());
        // Of each rank steps 7 and 8 have ended, of 100 ms and one after the other, and 9 has begun.
        for rank in [0, 1] {
            let begin_ns = SECOND_NS + i64::try_from(rank).expect("small") * 50 * MILLISECOND_NS;
            let step = |nth: i64| {
                Hand::step(rank, nth.unsigned_abs(), begin_ns + (nth - 7) * 100 * MILLISECOND_NS, &[("forward", 100)])
            };
            hand.steps.extend([step(7), step(8)]);
            let begin_ns = begin_ns + 200 * MILLISECOND_NS;
            hand.ranks[rank].step = Some(OpenStep { number: Some(9), begin_ns, retries: None, refills: false });
        }
        hand.now_ns = 2 * SECOND_NS;
        let mut count = 0;
        let mut step_of = |gpu: usize, ms: i64| {
            count += 1;
            hand.gpus[gpu].count_xid(count, SECOND_NS + ms * MILLISECOND_NS);
            let [sign] = hand.look(&mut detector).0.try_into().expect("one");
            sign.step
        };
        let of_first = [0, 99, 100, 199, 200, 900].map(|ms| step_of(0, ms));
        assert_eq!(of_first, [7, 7, 8, 8, 9, 9].map(Some));
        assert_eq!([120, 160, 260].map(|ms| step_of(1, ms)), [7, 8, 9].map(Some));
    }

    #[test]
    fn no_number_of_the_catalogue_stands_in_it_twice() {
        assert!(CATALOGUE.windows(2).all(|two| two[0].xid < two[1].xid));
    }
}
