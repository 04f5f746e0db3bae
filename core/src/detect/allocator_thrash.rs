//! `allocator_thrash`: the framework's allocator ran out, gave its cache back to the driver, and took it again.
//!
//! Seen from outside, memory falls by hundreds of MiB or more inside a step and half of it is back within 100 ms. The
//! job's own counter of retries decides: where it rose, the finding is confirmed, also where no fall was seen, as with
//! expandable segments; where it stood still, the program emptied its cache on purpose and nothing is found. Where the
//! job does not tell it, the fall alone makes it suspected, if less was free before than the fall gave back: an allocator
//! that finds what it needs does not flush. A phase that refills memory by its nature excuses a fall too.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Span, Subject, Text, number};
use super::steps::{Step, is_one_of, title};
use super::view::{RankNow, View, bytes, human};
use super::{Detector, Trouble};
use crate::clock::SECOND_NS;
use crate::gpu::GpuState;
use crate::phases::{Flush, RankKey};
use std::collections::{BTreeMap, VecDeque};

/// Falls that wait for the word of their rank; more are not kept.
const MOST_WAITING: usize = 256;
/// A fall that no step has claimed after this long lay in none.
const PATIENCE_NS: i64 = 120 * SECOND_NS;
/// A fall is known only when it has regrown, which takes this long at most.
const REGROW_NS: i64 = 100_000_000;
/// Steps over which thrashing is counted.
const RECENT_STEPS: usize = 10;
/// Of these, how many make it critical.
const CRITICAL_STEPS: usize = 3;

/// Joins falls with steps and counters.
#[derive(Debug, Default)]
pub(super) struct AllocatorThrash {
    waiting: VecDeque<(usize, Flush)>,
    /// For each rank whether its last steps had retries or falls.
    recent: BTreeMap<RankKey, VecDeque<bool>>,
    /// When each rank's last step ended.
    ended_ns: BTreeMap<RankKey, i64>,
    /// The retries that a rank's open step was last told with, so that each rise is told once.
    told: BTreeMap<RankKey, u64>,
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
        self.ended_ns.retain(|key, _| view.knows(key));
        self.told.retain(|key, _| view.knows(key));
    }
}

impl AllocatorThrash {
    /// A step that ended: its falls, and whether its counter rose.
    fn judge_step(&mut self, view: &View<'_>, step: &Step, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        let last_end_ns = self.ended_ns.insert(step.key.clone(), step.end_ns).unwrap_or(i64::MIN);
        let flushes = self.claim(step, last_end_ns);
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
        let Some(certainty) = certainty else { return };
        let often = recent.iter().filter(|had| **had).count();
        let key = step.key.clone();
        troubles.push(Trouble { kind: Kind::AllocatorThrash, key, from_ns: step.begin_ns, to_ns: step.end_ns });
        let begin_ns = flushes.first().map_or(step.begin_ns, |(_, flush)| flush.trough_ns);
        let seen = Seen { flushes: &flushes, retries: step.retries, often, certainty, begin_ns, step: step.number };
        signs.push(seen.sign(view, &step.key, &step.gpus));
    }

    /// A step that has not ended: what its counters tell already, or, where it tells none, what its memory did.
    fn judge_open_step(&mut self, view: &View<'_>, rank: &RankNow, troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        let Some(open) = rank.step else { return };
        let rose = rank.retries.zip(open.retries).and_then(|(now, before)| now.checked_sub(before));
        // Without counters the whole step is looked at when it has ended: a phase in it may excuse a fall.
        if rank.retries.is_none() {
            return;
        }
        let is_told = self.told.get(&rank.key) == rank.retries.as_ref();
        if is_told || rose.is_none_or(|rose| rose == 0) {
            return;
        }
        let inside = |(gpu, flush): &&(usize, Flush)| rank.gpus.contains(gpu) && flush.trough_ns >= open.begin_ns;
        let flushes: Vec<(usize, Flush)> = self.waiting.iter().filter(inside).copied().collect();
        if let Some(retries) = rank.retries {
            self.told.insert(rank.key.clone(), retries);
        }
        let certainty = Certainty::Confirmed;
        let begin_ns = flushes.first().map_or(open.begin_ns, |(_, flush)| flush.trough_ns);
        let (key, from_ns, to_ns) = (rank.key.clone(), begin_ns, view.now_ns);
        troubles.push(Trouble { kind: Kind::AllocatorThrash, key, from_ns, to_ns });
        let often = 1 + self.recent.get(&rank.key).map_or(0, |recent| recent.iter().filter(|had| **had).count());
        let seen = Seen { flushes: &flushes, retries: rose, often, certainty, begin_ns, step: open.number };
        signs.push(seen.sign(view, &rank.key, &rank.gpus));
    }

    /// Takes the waiting falls of a step, and drops older ones of its GPUs: those between two steps lie in none.
    fn claim(&mut self, step: &Step, last_end_ns: i64) -> Vec<(usize, Flush)> {
        let mut claimed = Vec::new();
        self.waiting.retain(|(gpu, flush)| {
            if !step.gpus.contains(gpu) || flush.trough_ns > step.end_ns {
                return true;
            }
            // One at the end of the step before, which has regrown only since that ended.
            let was_late = flush.trough_ns <= last_end_ns && flush.trough_ns >= last_end_ns - REGROW_NS;
            if flush.trough_ns >= step.begin_ns || was_late {
                claimed.push((*gpu, *flush));
            }
            false
        });
        claimed
    }
}

/// Whether less was free before a fall than it gave back; where the GPU's size is not known, it may have been.
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
            kind: Kind::AllocatorThrash,
            subject: Subject { gpu, job: Some(key.0.clone()), rank: Some(key.1) },
            severity: if is_often { Severity::Critical } else { Severity::Warning },
            certainty: self.certainty,
            begin_ns: self.begin_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: self.step,
            code: None,
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
            let (fall, back) = (human(flush.drop_bytes), Span(flush.regrown_ns - flush.trough_ns));
            format!("memory in use fell by {fall} and half of it was back {back} later")
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
