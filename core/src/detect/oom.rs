//! `oom`: an allocation failed.
//!
//! Confirmed by the rank's mark `oom`, or by its allocator's counter of failed allocations. Suspected from outside, of a job that
//! sends neither, if one of its ranks alone ends in the middle of a step after its GPU was nearly full, and most of the GPU's memory
//! is free then: several ranks that end at once were ended by someone. The text has who held what, and whether the memory was
//! there in pieces.

use super::detector::{Detector, Looked, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, Severity, Sign, Subject, Text, capitalized};
use super::steps::{place, title};
use super::view::{OpenStep, View, bytes, human};
use crate::clock::SECOND_NS;
use crate::gpu::{CONTEXT_BYTES, GpuState};
use crate::jobs::FailedAllocation;
use crate::phases::RankKey;
use crate::shares::keep_newest;
use std::collections::BTreeMap;

/// Until when it goes on after its last sign: for as long as an alert needs to see it.
const HOLD_NS: i64 = 60 * SECOND_NS;
/// The time before a rank's end in which its GPU must have been nearly full.
const BEFORE_NS: i64 = 3 * SECOND_NS;
/// How long after a rank's end its memory may be freed, and other ranks of its job may end as it did.
const FREED_WITHIN_NS: i64 = 3 * SECOND_NS;
/// Ranks that are followed after their end.
const MOST_GONE: usize = 256;

/// Follows the failed allocations of all ranks.
#[derive(Debug, Default)]
pub(super) struct OomDetector {
    /// By rank, the number of its last mark that was reported.
    marked: BTreeMap<RankKey, u64>,
    ranks: BTreeMap<RankKey, Before>,
    /// Ranks that have ended lately in a step on a nearly full GPU, also those that are decided: they show whether
    /// another rank ended alone.
    gone: Vec<Gone>,
    looked: Looked,
}

/// What was known of a rank in the last turn.
#[derive(Debug, Clone, Default)]
struct Before {
    /// Its GPU; `None` if it has several.
    gpu: Option<usize>,
    /// The step that it is in.
    step: Option<OpenStep>,
    /// Failed allocations by its counter.
    ooms: Option<u64>,
    /// The peak of its last step that ended, bytes.
    peak_bytes: Option<u64>,
}

/// A rank that has ended in a step on a full GPU.
#[derive(Debug)]
struct Gone {
    key: RankKey,
    before: Before,
    gpu: usize,
    at_ns: i64,
    /// The most that was in use on its GPU, bytes.
    used_bytes: u64,
    is_freed: bool,
    /// Whether it was decided whether to report it.
    is_decided: bool,
}

/// How it is known.
enum Cause<'a> {
    Marked(&'a FailedAllocation),
    Counted(u64),
    Gone(&'a Gone),
}

impl Detector for OomDetector {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        for step in view.steps {
            self.looked.note(step.peak_bytes.is_some());
            if let Some(before) = self.ranks.get_mut(&step.key) {
                before.peak_bytes = step.peak_bytes;
            }
        }
        self.look_at_marks(view, signs);
        self.look_at_counters(view, signs);
        self.look_at_ends(view, signs);
        self.ranks.retain(|key, _| view.knows(key));
        for rank in view.ranks {
            let before = self.ranks.entry(rank.key.clone()).or_default();
            (before.gpu, before.step, before.ooms) = (only_gpu(&rank.gpus), rank.step, rank.ooms);
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::Oom, self.looked);
    }
}

impl OomDetector {
    fn look_at_marks(&mut self, view: &View<'_>, signs: &mut Vec<Sign>) {
        for (key, oom) in view.ooms {
            let is_new = self.marked.get(key).is_none_or(|count| *count < oom.count);
            if is_new {
                let gpu = if oom.gpus.is_empty() { self.gpu_of(view, key) } else { only_gpu(&oom.gpus) };
                signs.push(sign(view, key, gpu, self.peak_of(key), &Cause::Marked(oom)));
            }
        }
        self.marked = view.ooms.iter().map(|(key, oom)| (key.clone(), oom.count)).collect();
    }

    fn look_at_counters(&self, view: &View<'_>, signs: &mut Vec<Sign>) {
        for rank in view.ranks {
            let before = self.ranks.get(&rank.key).and_then(|before| before.ooms);
            let rose = rank.ooms.zip(before).and_then(|(now, before)| now.checked_sub(before)).filter(|rose| *rose > 0);
            if let Some(rose) = rose.filter(|_| !is_marked(view, &rank.key)) {
                let (gpu, peak_bytes) = (only_gpu(&rank.gpus), self.peak_of(&rank.key));
                signs.push(sign(view, &rank.key, gpu, peak_bytes, &Cause::Counted(rose)));
            }
        }
    }

    /// Notes ranks that were in a step in the last turn and have ended. Reports each one after [`FREED_WITHIN_NS`], if
    /// its memory was freed and no other rank of its job ended with it.
    fn look_at_ends(&mut self, view: &View<'_>, signs: &mut Vec<Sign>) {
        let ended = self.ranks.iter().filter(|(key, before)| before.step.is_some() && !view.knows(key));
        let gone = ended.filter_map(|(key, before)| {
            let gpu = before.gpu.filter(|_| before.ooms.is_none())?;
            let used_bytes = most_used(view, gpu)?;
            Some(Gone {
                key: key.clone(),
                before: before.clone(),
                gpu,
                at_ns: view.now_ns,
                used_bytes,
                is_freed: false,
                is_decided: false,
            })
        });
        let gone: Vec<Gone> = gone.collect();
        self.gone.extend(gone);
        keep_newest(&mut self.gone, MOST_GONE, |gone| gone.key.0.scope().clone());
        for gone in &mut self.gone {
            gone.is_freed |= in_use(view, gone.gpu).is_some_and(|bytes| bytes < gone.used_bytes / 2);
        }
        let is_due = |gone: &Gone| !gone.is_decided && view.now_ns - gone.at_ns > FREED_WITHIN_NS;
        for gone in self.gone.iter().filter(|gone| is_due(gone) && gone.is_freed) {
            let job = &gone.key.0;
            let ended_with_it =
                |other: &&Gone| other.key.0 == *job && (other.at_ns - gone.at_ns).abs() <= FREED_WITHIN_NS;
            let is_alone = self.gone.iter().filter(ended_with_it).count() == 1;
            let is_marked = view.ooms.iter().any(|((marked, _), _)| marked == job)
                || view.host_ooms.iter().any(|((marked, _), _)| marked == job);
            if is_alone && !is_marked {
                signs.push(sign(view, &gone.key, Some(gone.gpu), gone.before.peak_bytes, &Cause::Gone(gone)));
            }
        }
        self.gone.iter_mut().filter(|gone| is_due(gone)).for_each(|gone| gone.is_decided = true);
        // One is kept for as long as others that ended with it are undecided.
        self.gone.retain(|gone| view.now_ns - gone.at_ns <= 2 * FREED_WITHIN_NS + SECOND_NS);
    }

    fn peak_of(&self, key: &RankKey) -> Option<u64> {
        self.ranks.get(key).and_then(|before| before.peak_bytes)
    }

    /// The GPU of a rank, which may have ended since the last turn.
    fn gpu_of(&self, view: &View<'_>, key: &RankKey) -> Option<usize> {
        view.rank(key).map_or_else(|| self.ranks.get(key).and_then(|before| before.gpu), |rank| only_gpu(&rank.gpus))
    }
}

/// The GPU of a rank that has one. Which of several was full is not known.
fn only_gpu(gpus: &[usize]) -> Option<usize> {
    gpus.first().copied().filter(|_| gpus.len() == 1)
}

/// Whether a rank has marked a failed allocation lately.
fn is_marked(view: &View<'_>, key: &RankKey) -> bool {
    view.ooms.binary_search_by(|(marked, _)| marked.cmp(key)).is_ok()
}

/// The most that was in use on a GPU just before now, if it was nearly full, bytes.
fn most_used(view: &View<'_>, gpu: usize) -> Option<u64> {
    let (ring, usable_bytes) = (view.rings.get(gpu)?, view.gpus.get(gpu)?.usable_bytes()?);
    let to_ns = ring.newest_ns()?;
    let from_ns = (to_ns - BEFORE_NS).max(ring.oldest_ns()?).max(view.subject_since_ns(gpu));
    let used_bytes = ring.summary_through(from_ns.min(to_ns), to_ns).ok()?.max?;
    (usable_bytes.saturating_sub(used_bytes) < view.settings.headroom_bytes).then_some(used_bytes)
}

/// What is in use on a GPU now, bytes.
fn in_use(view: &View<'_>, gpu: usize) -> Option<u64> {
    let ring = view.rings.get(gpu)?;
    ring.at(ring.newest_ns()?).ok()?
}

fn sign(view: &View<'_>, key: &RankKey, gpu: Option<usize>, peak_bytes: Option<u64>, cause: &Cause<'_>) -> Sign {
    // A GPU that another owner's process runs on is not the rank's to be full.
    let gpu = gpu.filter(|gpu| view.counts_on(key, *gpu));
    let state = gpu.and_then(|gpu| view.gpus.get(gpu));
    let known = Known::of(view, key, state, peak_bytes, cause);
    let (certainty, severity, begin_ns, step) = match cause {
        Cause::Marked(oom) => (Certainty::Confirmed, Severity::Critical, oom.at_ns, oom.step),
        // A counter comes with the begin or the end of something: in which step it rose is not known.
        Cause::Counted(_) => (Certainty::Confirmed, Severity::Critical, view.now_ns, None),
        Cause::Gone(gone) => {
            let step = gone.before.step.and_then(|open| open.number);
            (Certainty::Suspected, Severity::Warning, gone.at_ns, step)
        }
    };
    Sign {
        kind: FindingKind::Oom,
        subject: Subject { gpu, job: Some(key.0.clone()), rank: Some(key.1) },
        severity,
        certainty,
        begin_ns,
        until_ns: view.now_ns + HOLD_NS,
        step,
        code: None,
        lag_cause: None,
        waiting_ranks: Vec::new(),
        lost_ns: None,
        evidence: known.evidence(),
        text: Text { what: what(key, step, cause, &known), why: known.why(cause), advice: known.advice().to_owned() },
    }
}

/// The bytes that explain a failed allocation; each is `None` where it is not known.
#[derive(Debug, Default)]
struct Known {
    requested_bytes: Option<u64>,
    /// Free on the device then.
    free_bytes: Option<u64>,
    usable_bytes: Option<u64>,
    /// Held by the allocator, and not allocated: where it is not fragmented, it can be used.
    unallocated_bytes: Option<u64>,
    /// Held by other processes on the GPU, in all, and the largest of them.
    others_bytes: Option<u64>,
    other: Option<(u32, u64)>,
    /// Free at the peak of the last step that ended.
    last_free_bytes: Option<u64>,
}

impl Known {
    fn of(
        view: &View<'_>,
        key: &RankKey,
        state: Option<&GpuState>,
        peak_bytes: Option<u64>,
        cause: &Cause<'_>,
    ) -> Self {
        let usable_bytes = state.and_then(GpuState::usable_bytes);
        let free_of = |used: Option<u64>| Some(usable_bytes?.saturating_sub(used?));
        let known = Self { usable_bytes, last_free_bytes: free_of(peak_bytes), ..Self::default() };
        match cause {
            Cause::Marked(oom) => {
                let others = state.map_or_else(Vec::new, |state| others(view, key, state, oom.pid));
                Self {
                    requested_bytes: oom.requested_bytes,
                    free_bytes: oom.free_bytes,
                    unallocated_bytes: oom
                        .memory
                        .reserved
                        .zip(oom.memory.allocated)
                        .map(|(held, used)| held.saturating_sub(used)),
                    others_bytes: (!others.is_empty()).then(|| others.iter().map(|(_, bytes)| bytes).sum()),
                    other: others.into_iter().max_by_key(|(_, bytes)| *bytes),
                    ..known
                }
            }
            Cause::Counted(_) => known,
            Cause::Gone(gone) => Self { free_bytes: free_of(Some(gone.used_bytes)), ..known },
        }
    }

    /// Whether what the allocator holds without using it would have been enough.
    fn is_fragmented(&self) -> bool {
        self.unallocated_bytes
            .zip(self.requested_bytes)
            .is_some_and(|(unallocated, requested)| unallocated >= requested)
    }

    /// Whether the request would have fitted without the other processes on the GPU.
    fn is_crowded(&self) -> bool {
        let others_bytes = self.others_bytes.filter(|bytes| *bytes >= CONTEXT_BYTES);
        others_bytes.is_some_and(|others| self.requested_bytes.is_none_or(|requested| others >= requested))
    }

    fn evidence(&self) -> Vec<Evidence> {
        let numbers = [
            ("requested_bytes", self.requested_bytes),
            ("free_bytes", self.free_bytes),
            ("reserved_unallocated_bytes", self.unallocated_bytes),
            ("held_by_others_bytes", self.others_bytes),
            ("last_step_free_bytes", self.last_free_bytes),
        ];
        numbers.into_iter().filter_map(|(name, value)| Some(bytes(name, value?))).collect()
    }

    fn why(&self, cause: &Cause<'_>) -> String {
        let how = match cause {
            Cause::Marked(_) => "The job marked it.".to_owned(),
            Cause::Counted(rose) => format!("The allocator's counter of failed allocations rose by {rose}."),
            Cause::Gone(_) => {
                "The rank ended in the middle of a step, and its memory was freed. It may also have been ended by \
                               someone: the \
                 job sends neither marks nor counters of failed allocations."
                    .to_owned()
            }
        };
        let free = self.free_bytes.map(|free| {
            let of = self.usable_bytes.map_or_else(String::new, |usable| format!(" of {}", human(usable)));
            format!("{}{of} was free on the GPU", human(free))
        });
        let pieces = self
            .unallocated_bytes
            .map(|unallocated| format!("the allocator held {} that it had not given out", human(unallocated)));
        let others = self.others_bytes.zip(self.other).map(|(others, (pid, most))| {
            let whose =
                if others == most { format!("process {pid}") } else { format!("other processes ({pid} the most)") };
            format!("{whose} held {}", human(others))
        });
        let last =
            self.last_free_bytes.map(|free| format!("the last step that ended left {} free at its peak", human(free)));
        let said: Vec<String> = [free, pieces, others, last].into_iter().flatten().collect();
        if said.is_empty() { how } else { format!("{how} {}.", capitalized(&said.join("; "))) }
    }

    fn advice(&self) -> &'static str {
        if self.is_fragmented() {
            "What the allocator held would have been enough, but in pieces: set \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        } else if self.is_crowded() {
            "Another process holds memory on this GPU: end it or move it, and the job has room."
        } else {
            "Use a smaller batch or sequence, recompute activations, or shard the state over more ranks; highwater advise \
             says what each of them would free."
        }
    }
}

/// The processes on a GPU that are not the job's, with what each of them holds. Empty if the rank's own is not listed, because the
/// driver may know it by another id.
fn others(view: &View<'_>, key: &RankKey, state: &GpuState, pid: Option<u32>) -> Vec<(u32, u64)> {
    let Some(list) = state.processes() else { return Vec::new() };
    if !list.reading.iter().any(|process| Some(process.pid) == pid) {
        return Vec::new();
    }
    let is_of_job = |other: u32| view.ranks.iter().any(|rank| rank.key.0 == key.0 && rank.pid == Some(other));
    let others = list.reading.iter().filter(|process| Some(process.pid) != pid && !is_of_job(process.pid));
    others.filter_map(|process| Some((process.pid, process.used_bytes?))).collect()
}

fn what(key: &RankKey, step: Option<u64>, cause: &Cause<'_>, known: &Known) -> String {
    let (job, rank) = key;
    match cause {
        Cause::Gone(_) => {
            format!("Rank {rank} of {job} seems to have run out of memory: it ended in {} on a full GPU.", title(step))
        }
        Cause::Counted(_) => format!("Rank {rank} of {job} ran out of memory."),
        Cause::Marked(oom) => {
            let place = place(oom.phase.as_deref(), step);
            let asked =
                known.requested_bytes.map_or_else(String::new, |bytes| format!(": it asked for {}", human(bytes)));
            format!("Rank {rank} of {job} ran out of memory{place}{asked}.")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::{GIB, Hand};
    use super::super::view::OpenStep;
    use super::*;
    use crate::clock::MILLISECOND_NS;
    use crate::gpu::Process;
    use crate::phases::hand::key;
    use crate::wire::Memory;
    use std::sync::Arc;

    fn marked(count: u64, requested_gib: u64, allocated_gib: u64) -> FailedAllocation {
        FailedAllocation {
            count,
            at_ns: SECOND_NS,
            step: Some(12),
            phase: Some("forward".into()),
            gpus: [0].into(),
            pid: Some(7),
            memory: Memory { allocated: Some(allocated_gib * GIB), reserved: Some(130 * GIB), ..Memory::default() },
            requested_bytes: Some(requested_gib * GIB),
            free_bytes: Some(GIB / 2),
        }
    }

    fn look(hand: &mut Hand, detector: &mut OomDetector, ms: i64) -> Vec<Sign> {
        hand.now_ns = ms * MILLISECOND_NS;
        hand.look(detector).0
    }

    #[test]
    fn a_mark_is_reported_once_with_what_was_asked_for_and_who_held_what() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), OomDetector::default());
        hand.gpus[0].set_processes(
            0,
            Some(vec![
                Process { pid: 7, used_bytes: Some(131 * GIB) },
                Process { pid: 9, used_bytes: Some(3 * GIB) },
                Process { pid: 8, used_bytes: Some(5 * GIB) },
            ]),
        );
        assert!(look(&mut hand, &mut detector, 900).is_empty());
        hand.steps = vec![step_of_peak(139)];
        assert!(look(&mut hand, &mut detector, 950).is_empty());
        hand.steps.clear();
        hand.ooms = vec![(key(0), Arc::new(marked(1, 2, 129)))];
        let [sign] = look(&mut hand, &mut detector, 1_050).try_into().expect("one");
        assert_eq!(
            (sign.kind, sign.certainty, sign.severity),
            (FindingKind::Oom, Certainty::Confirmed, Severity::Critical)
        );
        assert_eq!(
            (sign.subject.gpu, sign.subject.rank, sign.step, sign.begin_ns),
            (Some(0), Some(0), Some(12), SECOND_NS)
        );
        assert_eq!(sign.text.what, "Rank 0 of j ran out of memory in forward of step 12: it asked for 2.0 GiB.");
        assert_eq!(
            sign.text.why,
            "The job marked it. 512 MiB of 140.0 GiB was free on the GPU; the allocator held 1.0 GiB that it had not given out; \
             other processes (8 the most) held 8.0 GiB; the last step that ended left 1.0 GiB free at its peak."
        );
        assert!(sign.text.advice.starts_with("Another process"), "{}", sign.text.advice);
        assert!(look(&mut hand, &mut detector, 1_150).is_empty(), "reported already");
        hand.ooms = vec![(key(0), Arc::new(marked(2, 2, 129)))];
        assert_eq!(look(&mut hand, &mut detector, 1_250).len(), 1, "another one");
    }

    fn step_of_peak(gib: u64) -> super::super::steps::Step {
        super::super::steps::Step { peak_bytes: Some(gib * GIB), ..Hand::step(0, 11, 0, &[("forward", 100)]) }
    }

    #[test]
    fn what_the_allocator_held_in_pieces_is_named_if_it_would_have_been_enough() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), OomDetector::default());
        let mut advice = |oom: FailedAllocation| {
            hand.ooms = vec![(key(0), Arc::new(oom))];
            let [sign] = look(&mut hand, &mut detector, 1_050).try_into().expect("one");
            sign.text.advice
        };
        assert!(advice(marked(1, 2, 127)).contains("expandable_segments"));
        assert!(advice(marked(2, 4, 127)).contains("smaller batch"));
        let unknown = FailedAllocation { requested_bytes: None, memory: Memory::default(), ..marked(3, 0, 0) };
        assert!(advice(unknown).contains("smaller batch"));
    }

    #[test]
    fn a_rank_that_has_ended_is_reported_all_the_same() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), OomDetector::default());
        look(&mut hand, &mut detector, 900);
        hand.ranks.clear();
        hand.ooms = vec![(key(0), Arc::new(FailedAllocation { gpus: [].into(), ..marked(1, 2, 129) }))];
        let [sign] = look(&mut hand, &mut detector, 1_000).try_into().expect("one");
        assert_eq!(sign.subject.gpu, Some(0), "where it ran");
    }

    #[test]
    fn a_counter_that_rises_without_a_mark_is_one_too() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), OomDetector::default());
        hand.ranks[0].step = Some(OpenStep { number: Some(5), begin_ns: 0, retries: None, refills: false });
        hand.ranks[0].ooms = Some(3);
        assert!(look(&mut hand, &mut detector, 1_000).is_empty(), "those of before");
        hand.ranks[0].ooms = Some(4);
        let [sign] = look(&mut hand, &mut detector, 1_100).try_into().expect("one");
        assert_eq!((sign.certainty, sign.step), (Certainty::Confirmed, None));
        assert_eq!(sign.text.what, "Rank 0 of j ran out of memory.");
        assert!(look(&mut hand, &mut detector, 1_200).is_empty());
        (hand.ranks[0].ooms, hand.ooms) = (Some(5), vec![(key(0), Arc::new(marked(1, 2, 129)))]);
        assert_eq!(look(&mut hand, &mut detector, 1_300).len(), 1, "the mark, and not the counter beside it");
        hand.ranks[0].ooms = Some(0);
        assert!(look(&mut hand, &mut detector, 1_400).is_empty(), "another process");
    }

    /// Fills the GPU to that many GiB for two seconds with a rank in a step, ends the rank, and frees the GPU to that many GiB
    /// after that many milliseconds; returns the signs.
    fn ends(full_gib: u64, is_in_step: bool, freed_gib: u64, freed_ms: i64) -> Vec<Sign> {
        let (mut hand, mut detector, mut signs) = (Hand::with_ranks(1), OomDetector::default(), Vec::new());
        hand.ranks[0].step =
            is_in_step.then_some(OpenStep { number: Some(5), begin_ns: 0, retries: None, refills: false });
        for ms in (0..8_000).step_by(100) {
            hand.now_ns = ms * MILLISECOND_NS;
            let used_gib = if ms < 2_000 + freed_ms { full_gib } else { freed_gib };
            hand.uses(0, used_gib * GIB);
            if ms == 2_000 {
                hand.ranks.clear();
            }
            signs.extend(hand.look(&mut detector).0);
        }
        signs
    }

    #[test]
    fn a_rank_that_is_gone_in_the_middle_of_a_step_on_a_full_gpu_is_suspected() {
        let [sign] = ends(140, true, 0, 300).try_into().expect("one");
        assert_eq!((sign.certainty, sign.severity, sign.step), (Certainty::Suspected, Severity::Warning, Some(5)));
        assert_eq!((sign.begin_ns, sign.subject.rank), (2 * SECOND_NS, Some(0)));
        assert!(sign.text.what.contains("seems to have run out of memory"), "{}", sign.text.what);
        assert!(sign.text.why.contains("0 MiB of 140.0 GiB was free"), "{}", sign.text.why);
        assert!(ends(139, true, 0, 300).is_empty(), "a GiB was free");
        assert!(ends(140, false, 0, 300).is_empty(), "between two steps");
        assert!(ends(140, true, 100, 300).is_empty(), "it held little of it");
        assert!(ends(140, true, 0, 4_000).is_empty(), "others' memory, freed later");
    }

    #[test]
    fn many_ranks_of_one_owner_that_end_at_once_hide_no_other_owners() {
        use crate::jobs::JobId;
        use crate::scope::Scope;
        let (mut hand, mut detector) = (Hand::new(2), OomDetector::default());
        let step = Some(OpenStep { number: Some(5), begin_ns: 0, retries: None, refills: false });
        let of = |user: &str, job: usize, gpu: usize| {
            let job = JobId::new(Scope::User(user.into()), &format!("j-{job:04}"));
            super::super::view::RankNow { key: (job, 0), step, ..Hand::rank_on(gpu) }
        };
        hand.ranks = (0..2 * MOST_GONE).map(|job| of("1001", job, 0)).chain([of("1002", 0, 1)]).collect();
        let mut whose = Vec::new();
        for ms in (0..8_000).step_by(100) {
            hand.now_ns = ms * MILLISECOND_NS;
            (0..2).for_each(|gpu| hand.uses(gpu, if ms < 2_000 { 140 * GIB } else { 0 }));
            if ms == 2_000 {
                hand.ranks.clear();
            }
            let signs = hand.look(&mut detector).0;
            whose.extend(signs.into_iter().filter_map(|sign| sign.subject.job?.scope().user().map(str::to_owned)));
        }
        assert_eq!(whose.iter().filter(|user| *user == "1002").count(), 1);
        assert!(whose.len() <= MOST_GONE, "{}", whose.len());
    }

    /// Two ranks on full GPUs end 500 ms after one another, in a step, with `ooms` for counters and a mark of the second.
    fn two_end(ooms: Option<u64>, after_ms: i64, is_marked: bool) -> Vec<Option<u32>> {
        let (mut hand, mut detector, mut signs) = (Hand::with_ranks(2), OomDetector::default(), Vec::new());
        for rank in &mut hand.ranks {
            rank.step = Some(OpenStep { number: Some(5), begin_ns: 0, retries: None, refills: false });
            rank.ooms = ooms;
        }
        for ms in (0..12_000).step_by(100) {
            hand.now_ns = ms * MILLISECOND_NS;
            for gpu in [0, 1] {
                let is_there = ms < 2_000 + i64::try_from(gpu).expect("small") * after_ms;
                hand.uses(gpu, if is_there { 140 * GIB } else { 0 });
            }
            if ms == 2_000 {
                hand.ranks.remove(0);
                hand.ooms = if is_marked { vec![(key(1), Arc::new(marked(1, 2, 129)))] } else { Vec::new() };
            }
            if ms == 2_000 + after_ms {
                hand.ranks.clear();
            }
            let found = hand.look(&mut detector).0;
            signs.extend(
                found.iter().filter(|sign| sign.certainty == Certainty::Suspected).map(|sign| sign.subject.rank),
            );
        }
        signs
    }

    #[test]
    fn ranks_that_end_together_and_those_that_would_have_counted_it_are_not_suspected() {
        assert_eq!(two_end(None, 500, false), [], "a scheduler ended the job");
        assert_eq!(two_end(None, 5_000, false), [Some(0), Some(1)], "each by itself");
        assert_eq!(two_end(Some(0), 5_000, false), [], "their counters said no");
        assert_eq!(two_end(None, 5_000, true), [], "it was the other that ran out of memory");
    }
}
