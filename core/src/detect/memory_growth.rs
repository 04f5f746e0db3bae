//! `memory_growth`: peak memory rises from step to step, with a forecast of when memory will be full.
//!
//! The peaks of all steps of a run since its warm-up are kept, thinned to a bounded number. All of them, their last half, their
//! last quarter and so on are divided into five blocks of equal length. They grow if each block rises above the one before by
//! at least `LEAST_RISE` of the mean rise: a run that meets ever longer sequences rises too, but ever more slowly. The forecast
//! extrapolates the rise over the blocks to the usable memory.

use super::detector::{Detector, Looked, Ratios, Trouble};
use super::finding::{Certainty, Evidence, FindingKind, HumanDuration, Severity, Sign, Subject, Text, number, seconds};
use super::steps::Step;
use super::view::{View, bytes, human};
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use std::collections::BTreeMap;

/// Maximum number of peaks that are kept for a rank. Beyond it, each two neighbours are merged into one.
const MOST_PEAKS: usize = 256;
/// Peaks that a judgement needs.
const LEAST_PEAKS: usize = 40;
const BLOCKS: usize = 5;
/// Each block must rise by this part of the mean rise.
const LEAST_RISE: f64 = 0.3;
/// Minimum growth over all blocks for a finding: in bytes, and as the fraction 1 / `LEAST_GROWTH_PART` of the usable memory.
const LEAST_GROWTH_BYTES: u64 = 256 << 20;
const LEAST_GROWTH_PART: u64 = 100;
/// A forecast beyond this is no trouble yet, nanoseconds.
const FAR_NS: i64 = 24 * 3600 * SECOND_NS;
/// One below this is critical.
const NEAR_NS: i64 = 600 * SECOND_NS;

/// Follows each rank's peaks.
#[derive(Debug, Default)]
pub(super) struct MemoryGrowth {
    ranks: BTreeMap<RankKey, Run>,
    looked: Looked,
}

/// The peaks of one run.
#[derive(Debug, Default)]
struct Run {
    /// End of a step, nanoseconds of the timeline, and its peak, bytes.
    peaks: Vec<(i64, u64)>,
    /// How many steps one peak stands for, and how many the last one does so far.
    steps_each: u64,
    steps_in_last: u64,
    full_ns: Option<i64>,
}

/// The growth over the blocks.
struct Growth {
    grown_bytes: u64,
    over_ns: i64,
    /// When memory is full, from the last step on; `None` where the GPU's size is not known.
    full_in_ns: Option<i64>,
}

impl Detector for MemoryGrowth {
    fn look(&mut self, view: &View<'_>, _troubles: &mut Vec<Trouble>, signs: &mut Vec<Sign>) {
        self.ranks.retain(|key, _| view.knows(key));
        for step in view.steps {
            let run = self.ranks.entry(step.key.clone()).or_default();
            if step.nth < view.settings.warm_up_steps {
                *run = Run::default();
                self.looked.note(false);
                continue;
            }
            let Some(peak_bytes) = step.peak_bytes else {
                self.looked.note(false);
                continue;
            };
            run.push(step.end_ns, peak_bytes);
            self.looked.note(run.peaks.len() >= LEAST_PEAKS);
            let usable_bytes = step.gpus.iter().filter_map(|gpu| view.gpus.get(*gpu)?.usable_bytes()).min();
            let growth = run.growth(usable_bytes);
            run.full_ns = growth.as_ref().and_then(|growth| growth.full_in_ns).map(|full_ns| step.end_ns + full_ns);
            signs.extend(growth.and_then(|growth| growth.sign(view, step, peak_bytes)));
        }
    }

    fn looked(&self, out: &mut BTreeMap<FindingKind, Looked>) {
        out.insert(FindingKind::MemoryGrowth, self.looked);
    }

    fn ratios(&self, out: &mut BTreeMap<RankKey, Ratios>) {
        for (key, run) in &self.ranks {
            let last_ns = run.peaks.last().map(|(at_ns, _)| *at_ns);
            let full_in = run.full_ns.zip(last_ns).map(|(full_ns, last_ns)| seconds(full_ns - last_ns));
            out.entry(key.clone()).or_default().memory_full_seconds = full_in;
        }
    }
}

impl Run {
    fn push(&mut self, at_ns: i64, peak_bytes: u64) {
        self.steps_each = self.steps_each.max(1);
        match self.peaks.last_mut() {
            Some(last) if self.steps_in_last < self.steps_each => {
                *last = (at_ns, last.1.max(peak_bytes));
                self.steps_in_last += 1;
            }
            _ => {
                self.peaks.push((at_ns, peak_bytes));
                self.steps_in_last = 1;
            }
        }
        if self.peaks.len() > MOST_PEAKS {
            self.thin();
        }
    }

    /// Makes two neighbours one, the higher of them at the later time.
    fn thin(&mut self) {
        let pairs = self
            .peaks
            .chunks(2)
            .map(|pair| pair.iter().fold((i64::MIN, 0), |(at_ns, most), one| (one.0.max(at_ns), one.1.max(most))));
        self.peaks = pairs.collect();
        // Of an odd number of peaks, the last has no partner: it stands for half as many steps as the others.
        self.steps_each *= 2;
    }

    /// How memory grows over the longest stretch up to now that rises throughout.
    fn growth(&self, usable_bytes: Option<u64>) -> Option<Growth> {
        let lengths = std::iter::successors(Some(self.peaks.len()), |length| Some(length / 2));
        let stretches = lengths.take_while(|length| *length >= LEAST_PEAKS);
        let mut found =
            stretches.filter_map(|length| growth_of(&self.peaks[self.peaks.len() - length..], usable_bytes));
        found.next()
    }
}

/// How memory grows over one stretch; `None` where it does not rise from each block to the next.
fn growth_of(peaks: &[(i64, u64)], usable_bytes: Option<u64>) -> Option<Growth> {
    let size = peaks.len() / BLOCKS;
    let peaks = peaks.get(peaks.len() - size * BLOCKS..)?;
    let blocks: Vec<Vec<u64>> = peaks.chunks(size).map(sorted).collect();
    let medians: Vec<u64> = blocks.iter().filter_map(|block| block.get(block.len() / 2).copied()).collect();
    let (first, last) = (*medians.first()?, *medians.last()?);
    let grown_bytes = last.checked_sub(first)?;
    let least_bytes = LEAST_GROWTH_BYTES.max(usable_bytes.unwrap_or(0) / LEAST_GROWTH_PART);
    let mut rises = medians.windows(2).map(|pair| number(pair[1]) - number(pair[0]));
    #[allow(clippy::cast_precision_loss, reason = "five blocks")]
    let mean = number(grown_bytes) / (BLOCKS - 1) as f64;
    // Nine tenths of a block must lie at or above the median of the block before. Peaks that only fluctuate do not.
    let mut apart = medians.iter().zip(blocks.iter().skip(1)).map(|(before, block)| block[block.len() / 10] >= *before);
    if grown_bytes < least_bytes || rises.any(|rise| rise < LEAST_RISE * mean) || !apart.all(|apart| apart) {
        return None;
    }
    // The medians lie in the middles of the first and the last block.
    let over_ns = peaks.get(peaks.len() - 1 - size / 2)?.0 - peaks.get(size / 2)?.0;
    let newest = peaks.last().map_or(last, |peak| peak.1);
    let left = usable_bytes.map(|usable| number(usable.saturating_sub(newest)));
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a forecast saturates")]
    let full_in_ns = left.map(|left| (left / number(grown_bytes) * over_ns as f64) as i64);
    Some(Growth { grown_bytes, over_ns, full_in_ns })
}

fn sorted(block: &[(i64, u64)]) -> Vec<u64> {
    let mut peaks: Vec<u64> = block.iter().map(|(_, peak)| *peak).collect();
    peaks.sort_unstable();
    peaks
}

impl Growth {
    fn sign(&self, view: &View<'_>, step: &Step, peak_bytes: u64) -> Option<Sign> {
        if self.full_in_ns.is_some_and(|full_in_ns| full_in_ns > FAR_NS) {
            return None;
        }
        let (job, rank) = (&step.key.0, step.key.1);
        let mut evidence = vec![
            bytes("grown_bytes", self.grown_bytes),
            Evidence { name: "over_seconds", value: seconds(self.over_ns) },
            bytes("peak_bytes", peak_bytes),
        ];
        evidence.extend(self.full_in_ns.map(|full| Evidence { name: "full_in_seconds", value: seconds(full) }));
        let when = self.full_in_ns.map_or_else(
            || "How much memory the GPU has is not known.".to_owned(),
            |full_in_ns| format!("At that pace it would be full {} later.", HumanDuration(full_in_ns)),
        );
        let is_near = self.full_in_ns.is_some_and(|full_in_ns| full_in_ns < NEAR_NS);
        Some(Sign {
            kind: FindingKind::MemoryGrowth,
            subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
            severity: if is_near { Severity::Critical } else { Severity::Warning },
            certainty: Certainty::Observed,
            begin_ns: step.end_ns - self.over_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: step.number,
            code: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence,
            text: Text {
                what: format!("The peak of memory of rank {rank} of {job} rises from step to step. {when}"),
                why: format!(
                    "It rose by {} within {} and is now {}, in five stretches that each rose.",
                    human(self.grown_bytes),
                    HumanDuration(self.over_ns),
                    human(peak_bytes)
                ),
                advice:
                    "Look for tensors that outlive their step: losses summed without .item() or .detach(), growing \
                         lists, caches keyed by shape. torch.cuda.memory._record_memory_history records who allocates."
                        .to_owned(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::{GIB, Hand};
    use super::*;
    use crate::phases::hand::key;

    const MIB: u64 = 1 << 20;

    /// Peaks of steps of a second each.
    fn peaks(peaks: impl IntoIterator<Item = u64>) -> Vec<(i64, u64)> {
        (1..).map(|nth: i64| nth * SECOND_NS).zip(peaks).collect()
    }

    /// A step of rank 0 with this peak; the first three are its warm-up.
    fn step(nth: u64, peak_bytes: u64) -> Step {
        let begin_ns = i64::try_from(nth).expect("a step") * SECOND_NS;
        Step { peak_bytes: Some(peak_bytes), ..Hand::step(0, nth, begin_ns, &[("forward", 1_000)]) }
    }

    #[test]
    fn peaks_that_rise_from_block_to_block_grow_at_the_pace_of_the_blocks() {
        // 40 peaks of which each is 100 MiB above the one before: medians 32 steps and 3200 MiB apart.
        let rising = peaks((0..40).map(|nth| 10 * GIB + nth * 100 * MIB));
        let growth = growth_of(&rising, Some(140 * GIB)).expect("it grows");
        assert_eq!((growth.grown_bytes, growth.over_ns), (3_200 * MIB, 31 * SECOND_NS));
        let left_mib = 140 * 1_024 - (10 * 1_024 + 3_900);
        let full_in_ns = growth.full_in_ns.expect("a forecast");
        assert!((seconds(full_in_ns) - left_mib as f64 / 3_200.0 * 31.0).abs() < 1e-6, "{full_in_ns}");
        assert!(growth_of(&rising, None).expect("it grows all the same").full_in_ns.is_none());
        // A part block at the begin is left out, whatever is in it.
        let with_more = peaks([90 * GIB; 4].into_iter().chain((0..40).map(|nth| 10 * GIB + nth * 100 * MIB)));
        assert_eq!(growth_of(&with_more, None).map(|growth| growth.grown_bytes), Some(3_200 * MIB));
    }

    #[test]
    fn growth_counts_from_its_bounds_on() {
        let by = |each_bytes: u64, usable| {
            growth_of(&peaks((0..40).map(|nth| GIB + nth / 8 * each_bytes)), usable).is_some()
        };
        // Four rises: 256 MiB in all, or a hundredth of the usable memory.
        assert_eq!((by(64 * MIB, None), by(64 * MIB - 1, None)), (true, false));
        assert_eq!((by(64 * MIB, Some(25_600 * MIB)), by(64 * MIB, Some(25_700 * MIB))), (true, false));
        assert_eq!(
            growth_of(&peaks((0..40).map(|nth| 90 * GIB - nth * GIB)), None).map(|growth| growth.grown_bytes),
            None
        );
    }

    #[test]
    fn no_block_rises_much_less_than_the_others() {
        let blocks = |levels: [u64; 5]| {
            growth_of(&peaks(levels.into_iter().flat_map(|level| [GIB + level * MIB; 8])), None).is_some()
        };
        assert!(blocks([0, 1_000, 2_000, 3_000, 4_000]));
        // Three tenths of the mean of 1000 MiB.
        assert!(blocks([0, 300, 1_600, 2_800, 4_000]) && !blocks([0, 299, 1_600, 2_800, 4_000]));
        assert!(
            blocks([0, 1_200, 2_400, 3_700, 4_000]) && !blocks([0, 1_200, 2_400, 3_701, 4_000]),
            "ever more slowly"
        );
        assert!(!blocks([0, 2_000, 1_000, 3_000, 4_000]), "one falls");
        assert!(!blocks([0; 5]));
    }

    #[test]
    fn peaks_that_only_vary_do_not_grow() {
        // Medians rise by 1000 MiB; of each block of twenty, `low` peaks lie below the median of the block before.
        let with_low = |low: usize| {
            let block = move |level: u64| (0..20).map(move |nth| GIB + if nth < low { 0 } else { level * 1_000 * MIB });
            growth_of(&peaks((0..5).flat_map(block)), None).is_some()
        };
        assert_eq!((with_low(0), with_low(2), with_low(3)), (true, true, false));
    }

    #[test]
    fn the_longest_stretch_up_to_now_that_rises_is_taken() {
        let run = |values: Vec<u64>| Run { peaks: peaks(values), ..Run::default() };
        let rising = |from: u64, count: u64| (0..count).map(move |nth| from + nth * 100 * MIB);
        let grown = |values: Vec<u64>| run(values).growth(None).map(|growth| growth.grown_bytes / MIB);
        assert_eq!((grown(rising(GIB, 40).collect()), grown(rising(GIB, 39).collect())), (Some(3_200), None));
        assert_eq!(grown(rising(GIB, 80).collect()), Some(6_400), "all, not its last half");
        let late = |quiet: u64, count| grown((0..quiet).map(|_| 5 * GIB).chain(rising(5 * GIB, count)).collect());
        assert_eq!((late(40, 40), late(41, 38)), (Some(3_200), None), "the last half of eighty, none of seventy-nine");
        assert_eq!(late(120, 40), Some(3_200), "the last quarter");
    }

    #[test]
    fn many_peaks_become_fewer_that_stand_for_more_steps() {
        let mut run = Run::default();
        (1..=256).for_each(|nth| run.push(nth, 1_000 + u64::try_from(nth).unwrap()));
        assert_eq!((run.peaks.len(), run.steps_each), (256, 1));
        run.push(257, 3);
        assert_eq!((run.peaks.len(), run.steps_each), (129, 2));
        assert_eq!((run.peaks[0], run.peaks[127], run.peaks[128]), ((2, 1_002), (256, 1_256), (257, 3)));
        // The last stands for one so far, and takes the next.
        run.push(258, 9);
        run.push(259, 5);
        assert_eq!(run.peaks[128..], [(258, 9), (259, 5)]);
        run.push(260, 4);
        assert_eq!(run.peaks[128..], [(258, 9), (260, 5)], "the later time, the higher peak");
    }

    #[test]
    fn growth_is_reported_with_its_forecast_and_ends_with_the_run() {
        let (mut hand, mut detector) = (Hand::with_ranks(1), MemoryGrowth::default());
        let mut reported =
            |hand: &mut Hand, nth: u64, peak_bytes| hand.steps_end(&mut detector, vec![step(nth, peak_bytes)]).pop();
        let at = |nth: u64| 10 * GIB + nth * 100 * MIB;
        assert!((0..42).all(|nth| reported(&mut hand, nth, at(nth)).is_none()), "three of warm-up, then thirty-nine");
        let sign = reported(&mut hand, 42, at(42)).expect("forty");
        assert_eq!(
            (sign.kind, sign.severity, sign.certainty),
            (FindingKind::MemoryGrowth, Severity::Warning, Certainty::Observed)
        );
        assert_eq!(sign.subject, Subject { gpu: Some(0), job: Some("j".into()), rank: Some(0) });
        assert_eq!((sign.begin_ns, sign.until_ns), (hand.now_ns - 31 * SECOND_NS, hand.now_ns + hand.settings.hold_ns));
        let values: Vec<_> = sign.evidence.iter().map(|evidence| (evidence.name, evidence.value)).collect();
        let full_in = (140.0 * 1_024.0 - 14_440.0) / 3_200.0 * 31.0;
        assert_eq!(
            values[..3],
            [("grown_bytes", number(3_200 * MIB)), ("over_seconds", 31.0), ("peak_bytes", number(at(42)))]
        );
        assert!(values[3].0 == "full_in_seconds" && (values[3].1 - full_in).abs() < 1e-6, "{values:?}");
        assert!(sign.text.what.contains("At that pace it would be full 21 min later."), "{}", sign.text.what);
        let known = Hand::ratios(&detector, 0).memory_full_seconds.expect("a forecast");
        assert!((known - full_in).abs() < 1e-6);
        hand.steps_end(&mut detector, vec![step(2, at(45))]);
        assert_eq!(Hand::ratios(&detector, 0).memory_full_seconds, None, "another run");
        assert!(hand.steps_end(&mut detector, vec![step(46, at(46))]).is_empty());
        hand.ranks.clear();
        hand.look(&mut detector);
        assert!(!detector.ranks.contains_key(&key(0)));
    }

    #[test]
    fn a_forecast_beyond_a_day_is_no_trouble_and_one_within_ten_minutes_is_critical() {
        let (hand, step) = (Hand::with_ranks(1), step(50, GIB));
        let severity = |full_in_ns| {
            let growth = Growth { grown_bytes: GIB, over_ns: SECOND_NS, full_in_ns };
            hand.view(|view| growth.sign(view, &step, GIB)).map(|sign| sign.severity)
        };
        let (warning, critical) = (Some(Severity::Warning), Some(Severity::Critical));
        assert_eq!(
            (severity(Some(24 * 3_600 * SECOND_NS)), severity(Some(24 * 3_600 * SECOND_NS + 1)), severity(None)),
            (warning, None, warning)
        );
        assert_eq!((severity(Some(600 * SECOND_NS)), severity(Some(600 * SECOND_NS - 1))), (warning, critical));
    }

    #[test]
    fn steps_without_a_known_peak_say_nothing_and_the_smallest_gpu_fills_first() {
        let (mut hand, mut detector) = (Hand::with_ranks(2), MemoryGrowth::default());
        hand.gpus[1].device.memory_total_bytes = Some(20 * GIB);
        let on_both = |nth: u64| Step { gpus: vec![0, 1], ..step(nth, 10 * GIB + nth * 100 * MIB) };
        for nth in 3..42 {
            assert_eq!(hand.steps_end(&mut detector, vec![on_both(nth)]), []);
            assert_eq!(hand.steps_end(&mut detector, vec![Step { peak_bytes: None, ..on_both(nth) }]), []);
        }
        let [sign] = hand.steps_end(&mut detector, vec![on_both(42)]).try_into().expect("forty peaks");
        assert_eq!(sign.severity, Severity::Critical);
        let full_in = (20.0 * 1_024.0 - 14_440.0) / 3_200.0 * 31.0;
        assert!((sign.evidence[3].value - full_in).abs() < 1e-6);
    }
}
