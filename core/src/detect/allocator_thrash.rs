//! `allocator_thrash`: the framework's allocator ran out, gave its cache back to the driver, and took it again.
//!
//! Seen from outside, memory falls by hundreds of MiB or more inside a step and enough of it is back within 100 ms. The
//! job's own retry counter decides. If it rose, the finding is confirmed, even if no fall was seen, as with expandable
//! segments. If it did not rise, the program emptied its cache on purpose, and nothing is reported. If the job does not send
//! the counter, a fall makes the finding suspected, but only if less memory was free before the fall than it released: an
//! allocator that finds enough memory does not flush. A fall inside a phase of `refill_phases` does not count.

use super::detector::{Detector, Looked, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Subject, Text, number};
use super::steps::{Step, is_one_of, title};
use super::view::{RankNow, View, bytes, human, median};
use crate::clock::SECOND_NS;
use crate::gpu::GpuState;
use crate::phases::{Flush, RankKey};
use std::collections::{BTreeMap, VecDeque};

/// Maximum number of falls that wait for the end of a step of their rank. Beyond it, the oldest is dropped.
const MOST_WAITING: usize = 256;
/// A fall that no step has claimed after this long did not lie in any step.
const PATIENCE_NS: i64 = 120 * SECOND_NS;
/// A fall is known only when it has regrown, which takes this long at most.
const REGROW_NS: i64 = 100_000_000;
/// Steps over which thrashing is counted.
const RECENT_STEPS: usize = 10;
/// Of these, how many make it critical.
const CRITICAL_STEPS: usize = 3;
/// Steps without a flush that show how long a step usually takes, at most and at least.
const MOST_HEALTHY: usize = 32;
const LEAST_HEALTHY: usize = 5;

/// Joins falls with steps and counters.
#[derive(Debug, Default)]
pub(super) struct AllocatorThrash {
    waiting: VecDeque<(usize, Flush)>,
    /// For each rank whether its last steps had retries or falls.
    recent: BTreeMap<RankKey, VecDeque<bool>>,
    /// The lengths of each rank's last steps without either, nanoseconds.
    healthy_ns: BTreeMap<RankKey, VecDeque<i64>>,
    /// When each rank's last step ended.
    ended_ns: BTreeMap<RankKey, i64>,
    /// The retries in the last sign of a rank's open step, so that each rise is reported once.
    reported: BTreeMap<RankKey, u64>,
    looked: Looked,
}

impl Detector for AllocatorThrash {
    fn look(&mut self, view: &View<'_>, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for (gpu, flush) in view.flushes {
            self.waiting.push_back((*gpu, *flush));
        }
        for step in view.steps {
            self.judge_step(view, step, troubles, signs);
        }
        for rank in view.ranks {
            self.judge_open_step(view, rank, troubles, signs);
        }
        self.waiting.retain(|(_, flush)| view.now_ns - flush.regrown_ns < PATIENCE_NS);
        while self.waiting.len() > MOST_WAITING {
            self.waiting.pop_front();
        }
        self.recent.retain(|key, _| view.knows(key));
        self.healthy_ns.retain(|key, _| view.knows(key));
        self.ended_ns.retain(|key, _| view.knows(key));
        self.reported.retain(|key, _| view.knows(key));
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::AllocatorThrash, self.looked);
    }
}

impl AllocatorThrash {
    /// A step that ended: its falls, and whether its counter rose.
    fn judge_step(&mut self, view: &View<'_>, step: &Step, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        // The counter decides, or else memory does.
        self.looked.note(step.retries.is_some() || step.peak_bytes.is_some());
        let last_end_ns = self.ended_ns.insert(step.key.clone(), step.end_ns).unwrap_or(i64::MIN);
        let flushes = self.claim(view, step, last_end_ns);
        let flushes: Vec<(usize, Flush)> = flushes
            .into_iter()
            .filter(|(_, flush)| {
                let phase = step.phase_at(flush.trough_ns);
                !phase.is_some_and(|phase| is_one_of(&phase.name, &view.settings.refill_phases))
            })
            .filter(|flush| step.retries.is_some() || was_short(view, flush))
            .collect();
        let certainty = match step.retries {
            Some(0) => None,
            Some(_) => Some(Certainty::Confirmed),
            None => (!flushes.is_empty()).then_some(Certainty::Suspected),
        };
        let recent = self.recent.entry(step.key.clone()).or_default();
        recent.push_back(certainty.is_some());
        while recent.len() > RECENT_STEPS {
            recent.pop_front();
        }
        let healthy_ns = self.healthy_ns.entry(step.key.clone()).or_default();
        let Some(certainty) = certainty else {
            if step.is_usual(view.settings) {
                healthy_ns.push_front(step.length_ns());
                healthy_ns.truncate(MOST_HEALTHY);
            }
            return;
        };
        let is_known = healthy_ns.len() >= LEAST_HEALTHY && step.is_usual(view.settings);
        let usual_ns = median(healthy_ns.iter().copied()).filter(|_| is_known);
        let lost_ns = usual_ns.map(|usual_ns| (step.length_ns() - usual_ns).max(0));
        let often = recent.iter().filter(|had| **had).count();
        let key = step.key.clone();
        troubles.push(Trouble { kind: FindingKind::AllocatorThrash, key, from_ns: step.begin_ns, to_ns: step.end_ns });
        let begin_ns = flushes.first().map_or(step.begin_ns, |(_, flush)| flush.trough_ns);
        let seen = Seen { flushes: &flushes, retries: step.retries, often, certainty, begin_ns, step: step.number };
        signs.push(Sign { lost_ns, ..seen.sign(view, &step.key, &step.gpus) });
    }

    /// A step that has not ended: a rise of its counter is a sign at once.
    fn judge_open_step(&mut self, view: &View<'_>, rank: &RankNow, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        let Some(open) = rank.step else { return };
        let rose = rank.retries.zip(open.retries).and_then(|(now, before)| now.checked_sub(before));
        // Without counters the whole step is looked at when it has ended: a phase in it may excuse a fall.
        if rank.retries.is_none() {
            return;
        }
        let is_reported = self.reported.get(&rank.key) == rank.retries.as_ref();
        if is_reported || rose.is_none_or(|rose| rose == 0) {
            return;
        }
        let inside = |(gpu, flush): &&(usize, Flush)| {
            rank.gpus.contains(gpu) && flush.trough_ns >= open.begin_ns && view.counts_on(&rank.key, *gpu)
        };
        let flushes: Vec<(usize, Flush)> = self.waiting.iter().filter(inside).copied().collect();
        if let Some(retries) = rank.retries {
            self.reported.insert(rank.key.clone(), retries);
        }
        let certainty = Certainty::Confirmed;
        let begin_ns = flushes.first().map_or(open.begin_ns, |(_, flush)| flush.trough_ns);
        let (key, from_ns, to_ns) = (rank.key.clone(), begin_ns, view.now_ns);
        troubles.push(Trouble { kind: FindingKind::AllocatorThrash, key, from_ns, to_ns });
        let often = 1 + self.recent.get(&rank.key).map_or(0, |recent| recent.iter().filter(|had| **had).count());
        let seen = Seen { flushes: &flushes, retries: rose, often, certainty, begin_ns, step: open.number };
        signs.push(seen.sign(view, &rank.key, &rank.gpus));
    }

    /// Takes the waiting falls of a step, and drops older ones on its GPUs, which lie between two steps. A rank takes no falls
    /// from a GPU that it names while only another owner's rank runs there ([`View::counts_on`]).
    fn claim(&mut self, view: &View<'_>, step: &Step, last_end_ns: i64) -> Vec<(usize, Flush)> {
        let mut claimed = Vec::new();
        self.waiting.retain(|(gpu, flush)| {
            if !step.gpus.contains(gpu) || flush.trough_ns > step.end_ns || !view.counts_on(&step.key, *gpu) {
                return true;
            }
            // A fall at the end of the previous step that regrew only after that step had ended.
            let was_late = flush.trough_ns <= last_end_ns && flush.trough_ns >= last_end_ns - REGROW_NS;
            if flush.trough_ns >= step.begin_ns || was_late {
                claimed.push((*gpu, *flush));
            }
            false
        });
        claimed
    }
}

/// Whether less memory was free before a fall than the fall released. True if the GPU's size is not known.
fn was_short(view: &View<'_>, (gpu, flush): &(usize, Flush)) -> bool {
    let usable_bytes = view.gpus.get(*gpu).and_then(GpuState::usable_bytes);
    usable_bytes.is_none_or(|usable_bytes| usable_bytes.saturating_sub(flush.high_bytes) < flush.drop_bytes)
}

/// What was seen in one step.
struct Seen<'a> {
    flushes: &'a [(usize, Flush)],
    retries: Option<u64>,
    /// In how many of the last steps.
    often: usize,
    certainty: Certainty,
    begin_ns: i64,
    step: Option<u64>,
}

impl Seen<'_> {
    fn sign(&self, view: &View<'_>, key: &RankKey, gpus: &[usize]) -> Sign {
        let gpu = self.flushes.first().map(|(gpu, _)| *gpu).or(gpus.first().copied());
        let is_often = self.often >= CRITICAL_STEPS;
        Sign {
            kind: FindingKind::AllocatorThrash,
            subject: Subject { gpu, job: Some(key.0.clone()), rank: Some(key.1) },
            severity: if is_often { Severity::Critical } else { Severity::Warning },
            certainty: self.certainty,
            begin_ns: self.begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: self.step,
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: self.evidence(),
            text: Text {
                what: format!(
                    "The allocator of rank {} of {} {} in {}.",
                    key.1,
                    key.0,
                    if self.certainty == Certainty::Suspected {
                        "seems to have flushed its cache for want of memory"
                    } else {
                        "ran out of memory and flushed its cache"
                    },
                    title(self.step)
                ),
                why: self.why(),
                advice:
                    "Use a smaller batch or sequence length, or recompute activations. If memory is fragmented, try \
                         PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. If ranks flush in turn, call \
                         torch.cuda.empty_cache() on all of them at the same step."
                        .to_owned(),
            },
        }
    }

    fn evidence(&self) -> Vec<Evidence> {
        let mut evidence = vec![Evidence { name: "steps_with_flushes_count", value: number(self.often as u64) }];
        if let Some(retries) = self.retries {
            evidence.push(Evidence { name: "allocator_retries_count", value: number(retries) });
        }
        if let Some((_, flush)) = self.flushes.iter().max_by_key(|(_, flush)| flush.drop_bytes) {
            evidence.push(bytes("fall_bytes", flush.drop_bytes));
        }
        evidence
    }

    fn why(&self) -> String {
        let fall = self.flushes.iter().max_by_key(|(_, flush)| flush.drop_bytes).map(|(_, flush)| {
            let back = HumanDuration(flush.regrown_ns - flush.trough_ns);
            let (fall, regrown) = (human(flush.drop_bytes), human(flush.regrown_bytes));
            format!("memory in use fell by {fall} and {regrown} was back {back} later")
        });
        let retries = self.retries.map(|retries| format!("the allocator counted {retries} failed allocations"));
        let said: Vec<String> = [fall, retries].into_iter().flatten().collect();
        let doubt = if self.certainty == Certainty::Suspected {
            " The job does not send its allocator's counters."
        } else {
            ""
        };
        format!("Inside the step {}.{doubt}", said.join(", and "))
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::{GIB, Hand};
    use super::super::steps::Phase;
    use super::super::view::{OpenStep, RankNow};
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::Process;
    use crate::jobs::JobId;
    use crate::phases::hand::key;
    use crate::scope::Scope;

    /// A second for each step; each lasts 500 ms.
    fn at(nth: u64) -> i64 {
        i64::try_from(nth).expect("a step") * SECOND_NS
    }

    /// A step of rank 0, whose counter of retries rose by `retries`.
    fn step(nth: u64, retries: Option<u64>) -> Step {
        Step { retries, ..Hand::step(0, nth, at(nth), &[("forward", 250), ("backward", 250)]) }
    }

    /// Memory of a GPU falls by 4 GiB of 139 and half of it is back 20 ms later.
    fn fall(trough_ns: i64) -> Flush {
        let regrown_ns = trough_ns + 20 * MILLISECOND_NS;
        Flush { trough_ns, regrown_ns, regrown_bytes: 2 * GIB, high_bytes: 139 * GIB, drop_bytes: 4 * GIB }
    }

    fn new() -> (Hand, AllocatorThrash) {
        (Hand::with_ranks(2), AllocatorThrash::default())
    }

    /// The signs for one step in which, or beside which, a GPU's memory fell.
    fn of(step: Step, gpu: usize, fall: Flush) -> Vec<Sign> {
        let (mut hand, mut detector) = new();
        hand.flushes = vec![(gpu, fall)];
        hand.steps_end(&mut detector, vec![step])
    }

    #[test]
    fn the_counter_decides_and_a_fall_alone_is_suspected() {
        let certainty = |retries, falls: bool| {
            let gpu = if falls { 0 } else { 1 };
            of(step(5, retries), gpu, fall(at(5) + 7)).first().map(|sign| (sign.certainty, sign.begin_ns - at(5)))
        };
        assert_eq!(certainty(Some(2), true), Some((Certainty::Confirmed, 7)));
        assert_eq!(certainty(Some(2), false), Some((Certainty::Confirmed, 0)), "expandable segments");
        assert_eq!((certainty(Some(0), true), certainty(Some(0), false)), (None, None), "emptied on purpose");
        assert_eq!((certainty(None, true), certainty(None, false)), (Some((Certainty::Suspected, 7)), None));
    }

    #[test]
    fn it_is_reported_with_the_largest_fall_and_is_a_trouble_of_its_step() {
        let (mut hand, mut detector) = new();
        let small = Flush { drop_bytes: 2 * GIB, ..fall(at(5) + 1) };
        hand.flushes = vec![(0, small), (0, fall(at(5) + 2))];
        (hand.now_ns, hand.steps) = (at(6), vec![step(5, Some(3))]);
        let (signs, troubles) = hand.look(&mut detector);
        let ([sign], [trouble]) = (&signs[..], &troubles[..]) else { panic!("one each: {signs:?}") };
        assert_eq!((trouble.kind, &trouble.key), (FindingKind::AllocatorThrash, &key(0)));
        assert_eq!((trouble.from_ns, trouble.to_ns), (at(5), at(5) + 500 * MILLISECOND_NS));
        assert_eq!(sign.subject, Subject { gpu: Some(0), job: Some("j".into()), rank: Some(0) });
        assert_eq!((sign.step, sign.begin_ns, sign.until_ns), (Some(5), at(5) + 1, at(6) + hand.settings.hold_ns));
        let values: Vec<_> = sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect();
        let expected =
            [("steps_with_flushes_count", 1.0), ("allocator_retries_count", 3.0), ("fall_bytes", number(4 * GIB))];
        assert_eq!(values, expected);
        assert_eq!(sign.text.what, "The allocator of rank 0 of j ran out of memory and flushed its cache in step 5.");
        assert_eq!(
            sign.text.why,
            "Inside the step memory in use fell by 4.0 GiB and 2.0 GiB was back 20 ms later, and the allocator \
             counted 3 failed allocations."
        );
        assert_eq!(sign.lost_ns, None, "no step without a flush is known");
        let [sign] = of(step(5, None), 0, fall(at(5))).try_into().expect("one");
        assert!(sign.text.what.contains("seems to have flushed") && sign.text.why.ends_with("allocator's counters."));
    }

    #[test]
    fn what_a_flush_costs_is_its_step_beside_the_steps_without_one() {
        let (mut hand, mut detector) = new();
        for nth in 3..9 {
            assert!(hand.steps_end(&mut detector, vec![step(nth, Some(0))]).is_empty());
        }
        let long = step(9, Some(1));
        let [sign] = hand
            .steps_end(&mut detector, vec![Step { end_ns: long.end_ns + 40 * MILLISECOND_NS, ..long }])
            .try_into()
            .expect("one");
        assert_eq!(sign.lost_ns, Some(40 * MILLISECOND_NS));
    }

    #[test]
    fn a_fall_is_suspected_only_where_less_was_free_than_it_gave_back() {
        let high = |high_bytes| of(step(5, None), 0, Flush { high_bytes, ..fall(at(5)) }).len();
        assert_eq!((high(136 * GIB), high(136 * GIB + 1), high(141 * GIB)), (0, 1, 1));
        assert_eq!(of(step(5, Some(1)), 0, Flush { high_bytes: GIB, ..fall(at(5)) })[0].evidence.len(), 3, "it counts");
        let unknown = Step { gpus: vec![7], ..step(5, None) };
        assert_eq!(of(unknown, 7, fall(at(5))).len(), 1, "a size that is not known");
    }

    /// A user marks short steps on a GPU that is another's, so that they end first.
    #[test]
    fn who_only_names_a_gpu_takes_no_falls_from_the_one_that_runs_there() {
        let (mut hand, mut detector) = new();
        let thief = (JobId::new(Scope::of(None, Some("2")), "thief"), 0);
        hand.ranks[0].pid = Some(11);
        hand.ranks.truncate(1);
        hand.ranks.push(RankNow { key: thief.clone(), pid: Some(22), ..Hand::rank_on(0) });
        hand.ranks.sort_by(|one, other| one.key.cmp(&other.key));
        hand.gpus[0].set_processes(1, Some(vec![Process { pid: 11, used_bytes: None }]));
        hand.flushes = vec![(0, fall(at(5) + 7))];
        let stolen = Step { key: thief.clone(), end_ns: at(5) + 100 * MILLISECOND_NS, ..step(5, None) };
        assert!(hand.steps_end(&mut detector, vec![stolen]).is_empty());
        hand.flushes.clear();
        let signs = hand.steps_end(&mut detector, vec![step(5, None)]);
        assert_eq!(signs.iter().map(|sign| sign.subject.job.clone()).collect::<Vec<_>>(), [Some("j".into())]);
    }

    #[test]
    fn a_phase_that_refills_memory_excuses_its_falls() {
        let within = |name: &str, inner: Option<&str>| {
            let mut step = Hand::step(0, 5, at(5), &[(name, 500)]);
            let part =
                |name: &str| Phase { name: name.into(), begin_ns: at(5) + 10, end_ns: at(5) + 20, retries: [None; 2] };
            step.phases.extend(inner.map(part));
            of(step, 0, fall(at(5) + 15)).len()
        };
        assert_eq!((within("forward", None), within("eval", None), within("checkpoint", None)), (1, 0, 0));
        assert_eq!((within("forward", Some("eval")), within("eval", Some("forward"))), (0, 1), "the innermost counts");
    }

    #[test]
    fn a_step_claims_what_fell_in_it_and_what_regrew_after_the_one_before() {
        let claimed = |trough_ns| {
            let (mut hand, mut detector) = new();
            hand.steps_end(&mut detector, vec![step(4, None)]);
            hand.flushes = vec![(0, fall(trough_ns))];
            hand.steps_end(&mut detector, vec![step(5, None)]).len()
        };
        let (last_end_ns, end_ns) = (at(4) + 500 * MILLISECOND_NS, at(5) + 500 * MILLISECOND_NS);
        assert_eq!([at(5), at(5) - 1, end_ns, end_ns + 1].map(claimed), [1, 0, 1, 0]);
        assert_eq!([last_end_ns, last_end_ns + 1].map(claimed), [1, 0], "between two steps it is neither's");
        assert_eq!([last_end_ns - 100 * MILLISECOND_NS, last_end_ns - 100 * MILLISECOND_NS - 1].map(claimed), [1, 0]);
        // One after the step waits for the next; one before it is dropped; another GPU's is left alone.
        let (mut hand, mut detector) = new();
        hand.flushes = vec![(0, fall(at(6))), (0, fall(at(4))), (1, fall(at(5)))];
        assert_eq!(hand.steps_end(&mut detector, vec![step(5, None)]), []);
        hand.flushes.clear();
        assert_eq!(detector.waiting.iter().map(|(gpu, _)| *gpu).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(hand.steps_end(&mut detector, vec![step(6, None)]).len(), 1);
    }

    #[test]
    fn three_of_the_last_ten_steps_are_critical() {
        let (mut hand, mut detector) = new();
        let mut reported = |nth: u64, retries| {
            let signs = hand.steps_end(&mut detector, vec![step(nth, Some(retries))]);
            signs.first().map(|sign| (sign.severity, sign.evidence[0].value))
        };
        let (warning, critical) = (Severity::Warning, Severity::Critical);
        assert_eq!(
            (reported(0, 1), reported(1, 1), reported(2, 1)),
            (Some((warning, 1.0)), Some((warning, 2.0)), Some((critical, 3.0)))
        );
        assert!((3..10).all(|nth| reported(nth, 0).is_none()));
        assert_eq!(reported(10, 1), Some((critical, 3.0)), "the first is out of the ten");
        assert_eq!(reported(11, 1), Some((critical, 3.0)));
        assert!((12..20).all(|nth| reported(nth, 0).is_none()));
        assert_eq!(reported(20, 1), Some((warning, 2.0)));
    }

    #[test]
    fn an_open_step_is_reported_once_for_each_rise_of_its_counter() {
        let (mut hand, mut detector) = new();
        hand.steps_end(&mut detector, vec![step(4, Some(1))]);
        hand.ranks[0].step = Some(OpenStep { number: Some(5), begin_ns: at(5), retries: Some(10), refills: false });
        let mut look = |hand: &mut Hand, ms: i64, retries| {
            (hand.now_ns, hand.ranks[0].retries) = (at(5) + ms * MILLISECOND_NS, retries);
            let (signs, troubles) = hand.look(&mut detector);
            assert_eq!(signs.len(), troubles.len());
            hand.flushes.clear();
            signs.into_iter().zip(troubles).next()
        };
        assert!(look(&mut hand, 10, None).is_none() && look(&mut hand, 20, Some(10)).is_none());
        hand.flushes = vec![(0, fall(at(5) - 1)), (1, fall(at(5) + 1)), (0, fall(at(5) + 3))];
        let (sign, trouble) = look(&mut hand, 30, Some(12)).expect("it rose");
        assert_eq!((sign.certainty, sign.step, sign.begin_ns), (Certainty::Confirmed, Some(5), at(5) + 3));
        assert_eq!(sign.evidence.iter().map(|one| one.value).collect::<Vec<_>>(), [2.0, 2.0, number(4 * GIB)]);
        assert_eq!((trouble.from_ns, trouble.to_ns), (at(5) + 3, hand.now_ns));
        assert!(look(&mut hand, 40, Some(12)).is_none(), "reported already");
        assert!(
            look(&mut hand, 50, Some(13)).is_some() && look(&mut hand, 60, Some(9)).is_none(),
            "a counter that fell"
        );
        hand.ranks[0].step = Some(OpenStep { number: Some(6), begin_ns: at(6), retries: Some(13), refills: false });
        let (sign, _) = look(&mut hand, 1_500, Some(14)).expect("of the next step");
        assert_eq!((sign.begin_ns, sign.evidence.len()), (at(6), 2), "no fall of its own");
        hand.ranks[0].step = None;
        assert!(look(&mut hand, 2_000, Some(20)).is_none(), "no step is open");
    }

    #[test]
    fn an_open_step_that_is_reported_is_critical_with_two_before() {
        let (mut hand, mut detector) = new();
        (0..2).for_each(|nth| assert_eq!(hand.steps_end(&mut detector, vec![step(nth, Some(1))]).len(), 1));
        hand.steps_end(&mut detector, vec![step(2, Some(0))]);
        hand.ranks[0].step = Some(OpenStep { number: Some(3), begin_ns: at(3), retries: Some(0), refills: false });
        hand.ranks[0].retries = Some(1);
        assert_eq!(hand.look(&mut detector).0[0].severity, Severity::Critical);
    }

    #[test]
    fn what_waits_is_bounded_in_time_and_number_and_ranks_that_have_gone_are_forgotten() {
        let (mut hand, mut detector) = new();
        hand.flushes = vec![(0, fall(0))];
        let regrown_ns = fall(0).regrown_ns;
        for (now_ns, waiting) in [(regrown_ns + 120 * SECOND_NS - 1, 1), (regrown_ns + 120 * SECOND_NS, 0)] {
            hand.now_ns = now_ns;
            hand.look(&mut detector);
            hand.flushes.clear();
            assert_eq!(detector.waiting.len(), waiting);
        }
        hand.flushes = (0..300).map(|ns| (0, fall(hand.now_ns + ns))).collect();
        hand.look(&mut detector);
        assert_eq!((detector.waiting.len(), detector.waiting[0].1), (MOST_WAITING, fall(hand.now_ns + 44)));
        hand.flushes.clear();
        hand.ranks[0].step = Some(OpenStep { number: None, begin_ns: 0, retries: Some(0), refills: false });
        hand.ranks[0].retries = Some(1);
        hand.steps_end(&mut detector, vec![step(500, Some(1))]);
        let kept =
            |detector: &AllocatorThrash| [detector.recent.len(), detector.ended_ns.len(), detector.reported.len()];
        assert_eq!(kept(&detector), [1; 3]);
        hand.ranks.remove(0);
        hand.look(&mut detector);
        assert_eq!(kept(&detector), [0; 3]);
    }
}
