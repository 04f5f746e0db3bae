//! `memory_growth`: the peak of memory rises step after step, and when it will be full.
//!
//! The peaks of all steps of a run since its warm-up are kept, thinned so that they stay few. They grow if, over all of
//! them or over their last half, quarter and so on, five blocks of equal length rise from each to the next, the last ones
//! not much less than the first: a run that meets ever longer sequences rises too, but ever more slowly. At the pace of the
//! blocks the forecast tells when the usable memory ends.

use super::finding::{Certainty, Evidence, Kind, Severity, Sign, Span, Subject, Text, number, seconds};
use super::steps::Step;
use super::view::{View, bytes, human};
use super::{Detector, Ratios, Trouble};
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use std::collections::BTreeMap;

/// Peaks that are kept of a rank; when there are more, neighbours become one.
const MOST_PEAKS: usize = 256;
/// Peaks that a judgement needs.
const LEAST_PEAKS: usize = 40;
const BLOCKS: usize = 5;
/// Each block must rise by this part of the mean rise.
const LEAST_RISE: f64 = 0.3;
/// Growth over all blocks that is worth a finding: bytes, and as a part of the usable memory one in this many.
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

/// What the blocks tell.
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
                continue;
            }
            let Some(peak_bytes) = step.peak_bytes else { continue };
            run.push(step.end_ns, peak_bytes);
            let usable_bytes = step.gpus.iter().filter_map(|gpu| view.gpus.get(*gpu)?.usable_bytes()).min();
            let growth = run.growth(usable_bytes);
            run.full_ns = growth.as_ref().and_then(|growth| growth.full_in_ns).map(|full_ns| step.end_ns + full_ns);
            signs.extend(growth.and_then(|growth| growth.sign(view, step, peak_bytes)));
        }
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
        // The last of an odd number stands alone, for half of what the others do from now on.
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
    // Nearly all of a block lies above the middle of the one before: peaks that only vary do not do that.
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
            |full_in_ns| format!("At this pace it is full in {}.", Span(full_in_ns)),
        );
        let is_near = self.full_in_ns.is_some_and(|full_in_ns| full_in_ns < NEAR_NS);
        Some(Sign {
            kind: Kind::MemoryGrowth,
            subject: Subject { gpu: step.gpus.first().copied(), job: Some(job.clone()), rank: Some(rank) },
            severity: if is_near { Severity::Critical } else { Severity::Warning },
            certainty: Certainty::Observed,
            begin_ns: step.end_ns - self.over_ns,
            until_ns: view.now_ns + view.settings.hold_ns,
            step: step.number,
            code: None,
            evidence,
            text: Text {
                what: format!("The peak of memory of rank {rank} of {job} rises from step to step. {when}"),
                why: format!(
                    "It rose by {} within {} and is now {}, in five stretches that each rose.",
                    human(self.grown_bytes),
                    Span(self.over_ns),
                    human(peak_bytes)
                ),
                advice:
                    "Look for tensors that outlive their step: losses summed without .item() or .detach(), growing \
                         lists, caches keyed by shape. torch.cuda.memory._record_memory_history tells who allocates."
                        .to_owned(),
            },
        })
    }
}
