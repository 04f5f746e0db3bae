//! `low_headroom`: memory so full that communication would not get its buffers.
//!
//! NCCL allocates outside the framework's pool: on an H200 about 0.9 GiB for a process's first communicator and 0.5 GiB
//! for each further one. It fails if it does not get them. A GPU is reported if its free memory was below `headroom_bytes` for
//! at least `headroom_ns` of the last second.

use super::beside::{Beside, Excess, Holder};
use super::detector::{Detector, Looked, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Text};
use super::view::{Since, View, bytes, human};
use crate::clock::SECOND_NS;
use crate::gpu::GpuState;
use crate::ring;
use std::collections::BTreeMap;

/// Looks at the last second of each GPU.
#[derive(Debug, Default)]
pub(super) struct LowHeadroom {
    full: Since,
    beside: Beside,
    looked: Looked,
}

impl Detector for LowHeadroom {
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for step in view.steps {
            let is_usable_known = |gpu: &usize| view.gpus.get(*gpu).and_then(GpuState::usable_bytes).is_some();
            self.looked.note(step.peak_bytes.is_some() && step.gpus.iter().all(is_usable_known));
        }
        self.beside.read(view);
        for gpu in 0..view.gpus.len() {
            let found = full(view, gpu);
            let since_ns =
                self.full.note(gpu, found.map(|full| full.onset_ns)).map(|ns| ns.max(view.subject_since_ns(gpu)));
            let (Some(Full { from_ns, to_ns, free_bytes, .. }), Some(begin_ns)) = (found, since_ns) else { continue };
            if let Some(rank) = view.rank_on(gpu) {
                troubles.push(Trouble { kind: FindingKind::LowHeadroom, key: rank.key.clone(), from_ns, to_ns });
            }
            let excess = self.beside.excess(view, gpu, free_bytes);
            signs.push(Sign { begin_ns, ..sign(view, gpu, free_bytes, excess) });
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::LowHeadroom, self.looked);
    }
}

/// A second in which a GPU was too full.
#[derive(Debug, Clone, Copy)]
struct Full {
    from_ns: i64,
    to_ns: i64,
    /// When it first was, within that second.
    onset_ns: i64,
    /// The least free memory, bytes.
    free_bytes: u64,
}

/// The last second of a GPU; `None` unless its memory was too full for long enough.
fn full(view: &View<'_>, gpu: usize) -> Option<Full> {
    let (ring, usable_bytes) = (view.rings.get(gpu)?, view.gpus.get(gpu)?.usable_bytes()?);
    let to_ns = ring.newest_ns()?;
    // A GPU without a recent reading is not judged.
    if view.now_ns - to_ns > SECOND_NS {
        return None;
    }
    let from_ns = (to_ns - SECOND_NS).max(ring.oldest_ns()?).max(view.subject_since_ns(gpu));
    if from_ns > to_ns {
        return None;
    }
    let free_bytes = usable_bytes.saturating_sub(ring.summary_through(from_ns, to_ns).ok()?.max?);
    if free_bytes >= view.settings.headroom_bytes {
        return None;
    }
    let full_bytes = usable_bytes.saturating_sub(view.settings.headroom_bytes);
    let [full_ns] = ring.above_ns(from_ns, to_ns, [full_bytes]).ok()?;
    if full_ns < view.settings.headroom_ns {
        return None;
    }
    let is_full = |point: &&ring::Point| point.used.is_some_and(|used_bytes| used_bytes >= full_bytes);
    let onset_ns = ring.changes_from(from_ns, to_ns).ok()?.iter().find(is_full)?.at_ns;
    Some(Full { from_ns, to_ns, onset_ns, free_bytes })
}

fn sign(view: &View<'_>, gpu: usize, free_bytes: u64, excess: Option<Excess>) -> Sign {
    let settings = view.settings;
    let is_critical = free_bytes < settings.critical_headroom_bytes;
    let needed_bytes = if is_critical { settings.critical_headroom_bytes } else { settings.headroom_bytes };
    Sign {
        kind: FindingKind::LowHeadroom,
        subject: view.subject_of(gpu),
        severity: if is_critical { Severity::Critical } else { Severity::Warning },
        certainty: Certainty::Observed,
        begin_ns: view.now_ns,
        until_ns: view.now_ns + settings.hold_ns,
        step: view.step_on(gpu),
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: [bytes("least_free_bytes", free_bytes), bytes("needed_bytes", needed_bytes)]
            .into_iter()
            .chain(excess.iter().flat_map(|excess| evidence(*excess)))
            .collect(),
        text: Text {
            what: format!("{} had only {} free{}.", view.gpu_name(gpu), human(free_bytes), cause(view, gpu, excess)),
            why: format!(
                "NCCL allocates outside the framework's pool and needs {} for {}; below that it fails.",
                human(needed_bytes),
                if is_critical { "a new communicator" } else { "a process's first communicator" },
            ),
            advice: match excess.map(|excess| excess.holder) {
                Some(Holder::Outside) => {
                    "Find what in this process allocates beside the framework's allocator now and did not before: another \
                     framework or library, communicators, CUDA graphs, a profiler. A smaller batch would only make room for it."
                }
                Some(Holder::Others) => {
                    "End the other processes on this GPU, or move them: the job itself holds no more than usual."
                }
                None => {
                    "Use a smaller batch or sequence, recompute activations, or keep part of the memory from the \
                     framework (torch.cuda.set_per_process_memory_fraction); create communicators before memory fills."
                }
            }
            .to_owned(),
        },
    }
}

/// What is more than usual, as the end of a sentence.
fn cause(view: &View<'_>, gpu: usize, excess: Option<Excess>) -> String {
    let (Some(Excess { holder, bytes, usual_bytes }), Some(rank)) = (excess, view.rank_on(gpu)) else {
        return String::new();
    };
    let (job, rank) = &rank.key;
    let usual = if usual_bytes == 0 { "none".to_owned() } else { human(usual_bytes).to_string() };
    match holder {
        Holder::Outside => {
            format!(": {} lie outside the allocator of rank {rank} of {job}, usually {usual}", human(bytes))
        }
        Holder::Others => {
            format!(": processes other than that of rank {rank} of {job} hold {}, usually {usual}", human(bytes))
        }
    }
}

fn evidence(excess: Excess) -> [Evidence; 2] {
    let [now, usual] = match excess.holder {
        Holder::Outside => ["outside_allocator_bytes", "usual_outside_allocator_bytes"],
        Holder::Others => ["other_processes_bytes", "usual_other_processes_bytes"],
    };
    [bytes(now, excess.bytes), bytes(usual, excess.usual_bytes)]
}

#[cfg(test)]
mod tests {
    use super::super::hand::{GIB, Hand};
    use super::*;
    use crate::clock::MILLISECOND_NS;

    /// Looks every 100 ms while a GPU's memory follows a curve of (milliseconds, MiB free), read every millisecond up to
    /// `end_ms`; returns what was said, by the time of the look in milliseconds.
    fn said(curve: &[(i64, u64)], end_ms: i64) -> Vec<(i64, Sign)> {
        let (mut hand, mut detector, mut said) = (Hand::new(1), LowHeadroom::default(), Vec::new());
        hand.ranks.push(Hand::rank_on(0));
        for ms in 0..=end_ms {
            hand.now_ns = ms * MILLISECOND_NS;
            let free_mib = curve.iter().rev().find(|(from_ms, _)| *from_ms <= ms).expect("a value").1;
            hand.uses(0, 140 * GIB - (free_mib << 20));
            if ms % 100 == 0 {
                let (signs, troubles) = hand.look(&mut detector);
                assert_eq!(signs.len(), troubles.len());
                assert!(troubles.iter().all(|trouble| trouble.to_ns == hand.now_ns));
                said.extend(signs.into_iter().map(|sign| (ms, sign)));
            }
        }
        said
    }

    #[test]
    fn it_begins_when_memory_became_too_full() {
        let said = said(&[(0, 40_000), (5_310, 900), (5_900, 40_000), (8_050, 100)], 9_000);
        let times: Vec<i64> = said.iter().map(|(ms, _)| *ms).collect();
        let expected: Vec<i64> = (5_400..=6_800).chain(8_100..=9_000).filter(|ms| ms % 100 == 0).collect();
        assert_eq!(times, expected, "for a second after memory was freed");
        let (first, last) = (&said.first().expect("said").1, &said.last().expect("said").1);
        assert_eq!(first.begin_ns, 5_310 * MILLISECOND_NS);
        assert!(said.iter().take_while(|(ms, _)| *ms < 7_000).all(|(_, sign)| sign.begin_ns == first.begin_ns));
        assert_eq!(last.begin_ns, 8_050 * MILLISECOND_NS, "once more");
        assert_eq!((first.severity, last.severity), (Severity::Warning, Severity::Critical));
        assert_eq!(first.until_ns, 5_400 * MILLISECOND_NS + 10 * SECOND_NS);
        assert_eq!((first.subject.gpu, first.subject.rank), (Some(0), Some(0)));
        assert_eq!(first.evidence, [bytes("least_free_bytes", 900 << 20), bytes("needed_bytes", GIB)]);
        assert_eq!(last.evidence, [bytes("least_free_bytes", 100 << 20), bytes("needed_bytes", GIB / 2)]);
    }

    /// Steps of a rank whose process holds 3 GiB outside its allocator and others none, until 21 GiB more are held by one of them.
    #[test]
    fn what_holds_more_than_usual_is_named_and_what_to_do_about_it() {
        let last = |outside_gib: u64, others_gib: u64, before: u64| {
            let (mut hand, mut detector) = (Hand::new(1), LowHeadroom::default());
            hand.ranks.push(super::super::view::RankNow { pid: Some(7), ..Hand::rank_on(0) });
            let mut signs = Vec::new();
            for nth in 0..=before {
                let is_full = nth == before;
                let (outside, others) = if is_full { (outside_gib, others_gib) } else { (3, 0) };
                let used_bytes = if is_full { 140 * GIB - (200 << 20) } else { 118 * GIB };
                let of = |pid, gib: u64| crate::gpu::Process { pid, used_bytes: Some(gib * GIB) };
                let beside = (others > 0).then(|| of(9, others));
                hand.gpus[0].set_processes(hand.now_ns, Some([of(7, 110)].into_iter().chain(beside).collect()));
                (0..1_100).for_each(|_| {
                    hand.now_ns += MILLISECOND_NS;
                    hand.uses(0, used_bytes);
                });
                let step = Hand::step(0, nth, hand.now_ns - 100 * MILLISECOND_NS, &[("forward", 90)]);
                let step = super::super::steps::Step {
                    peak_bytes: Some(used_bytes),
                    outside_bytes: Some(outside * GIB),
                    ..step
                };
                signs.extend(hand.steps_end(&mut detector, vec![step]));
            }
            signs.pop().expect("it is full")
        };
        let outside = last(24, 0, 100);
        assert_eq!(
            outside.text.what,
            "GPU 0 had only 200 MiB free: 24.0 GiB lie outside the allocator of rank 0 of j, usually 3.0 GiB."
        );
        assert!(outside.text.advice.starts_with("Find what in this process"), "{}", outside.text.advice);
        let expected = [bytes("outside_allocator_bytes", 24 * GIB), bytes("usual_outside_allocator_bytes", 3 * GIB)];
        assert_eq!(outside.evidence[2..], expected);
        let others = last(3, 21, 100);
        let what = "GPU 0 had only 200 MiB free: processes other than that of rank 0 of j hold 21.0 GiB, usually none.";
        assert_eq!(others.text.what, what);
        assert!(others.text.advice.starts_with("End the other processes"), "{}", others.text.advice);
        let usual = "GPU 0 had only 200 MiB free.";
        assert_eq!(last(3, 0, 100).text.what, usual, "the job itself takes more");
        assert_eq!(last(24, 0, 7).text.what, usual, "too few steps to know what is usual");
    }

    #[test]
    fn what_is_enough_or_too_short_is_nothing() {
        assert!(said(&[(0, 1_024)], 3_000).is_empty(), "just what is needed");
        assert_eq!(said(&[(0, 1_023)], 3_000).len(), 30, "one less");
        assert!(said(&[(0, 40_000), (2_000, 100), (2_009, 40_000)], 4_000).is_empty(), "9 ms");
        assert!(!said(&[(0, 40_000), (2_000, 100), (2_010, 40_000)], 4_000).is_empty(), "10 ms");
        assert!(said(&[(0, 512)], 1_000).iter().all(|(_, sign)| sign.severity == Severity::Warning));
        assert!(said(&[(0, 511)], 1_000).iter().all(|(_, sign)| sign.severity == Severity::Critical));
    }

    /// A job fills the GPU for 22 s and ends; the next one begins 100 ms after the memory was freed, or 5 s before.
    #[test]
    fn what_the_job_before_did_is_not_the_next_ones() {
        let begins_of = |freed_ms: i64| {
            let (mut hand, mut detector, mut begins) = (Hand::new(1), LowHeadroom::default(), Vec::new());
            for ms in 0..=28_000 {
                hand.now_ns = ms * MILLISECOND_NS;
                hand.uses(0, if ms < freed_ms { 140 * GIB } else { 100 * GIB });
                if ms == 22_000 {
                    let (key, since_ns) = (("k".into(), 0), hand.now_ns);
                    hand.ranks = vec![super::super::view::RankNow { key, since_ns, ..Hand::rank_on(0) }];
                }
                if ms % 100 == 0 {
                    begins.extend(hand.look(&mut detector).0.into_iter().filter(|sign| sign.subject.job.is_some()));
                }
            }
            begins.iter().map(|sign| sign.begin_ns / MILLISECOND_NS).collect::<std::collections::BTreeSet<_>>()
        };
        assert!(begins_of(21_900).is_empty(), "it was free when the job began");
        assert_eq!(
            begins_of(27_000).into_iter().collect::<Vec<_>>(),
            [22_000],
            "and no sooner than the job's first mark"
        );
    }

    #[test]
    fn a_gpu_of_which_nothing_new_is_known_is_not_judged() {
        let (mut hand, mut detector) = (Hand::new(2), LowHeadroom::default());
        hand.uses(0, 140 * GIB);
        hand.now_ns = 20 * MILLISECOND_NS;
        hand.uses(0, 140 * GIB);
        let read_ns = hand.now_ns;
        hand.now_ns = read_ns + SECOND_NS;
        let (signs, troubles) = hand.look(&mut detector);
        assert_eq!((signs.len(), troubles.len()), (1, 0), "nobody is on it");
        hand.now_ns += 1;
        assert!(hand.look(&mut detector).0.is_empty());
    }
}
