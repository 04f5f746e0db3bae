//! Peaks of memory that follow one another, and how they grow.
//!
//! Enters: the peak of each step, or of each minute, with the names of the phases that it had. Leaves: a [`Growth`].
//! Four series are kept: the whole run, thinned to a bounded number of peaks, and the last peaks at three scales, of
//! which each stands for 1, 8 or 64 values by their maximum. So growth shows soon after it begins, also in a long run.
//! A stretch of peaks is divided into five blocks of equal length. They grow if each block rises above the one before
//! by at least `LEAST_RISE` of the mean rise: a run that meets ever longer sequences rises too, but ever more slowly.
//! The line through them is the pace. Invariant: the numbers of peaks, of names and of gaps are bounded. Pure.

use super::finding::number;
use super::steps::Step;
use super::trend::{Trend, middle};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of peaks of a whole run. Beyond it, each two neighbours are merged into one.
const MOST_PEAKS: usize = 128;
/// Values (steps or minutes) that one peak stands for in the series of the last [`MOST_LAST`] peaks. It is their
/// maximum.
const SCALES: [u64; 3] = [1, 8, 64];
const MOST_LAST: usize = 80;
/// Peaks that a judgement needs.
const LEAST_PEAKS: usize = 40;
const BLOCKS: usize = 5;
/// Each block must rise by this part of the mean rise.
const LEAST_RISE: f64 = 0.3;
/// Minimum growth over all blocks for a finding: in bytes, and as the fraction 1 / `LEAST_GROWTH_PART` of the usable memory.
const LEAST_GROWTH_BYTES: u64 = 256 << 20;
const LEAST_GROWTH_PART: u64 = 100;
/// Names of phases of which it is known in how many steps they were: as many as a job has by default.
const MOST_NAMES: usize = 32;
/// A phase is rare if one step of this many has it, or fewer.
const RARE: u64 = 4;
/// Gaps with rare phases that are kept.
const MOST_GAPS: usize = 64;
/// A rare phase explains growth if at least `LEAST_GAPS` gaps have it, memory rose in these by at least the part
/// `MOSTLY` of the growth, and that rise less two standard deviations is at least the part `SURELY`.
const MOSTLY: f64 = 0.8;
const SURELY: f64 = 0.5;
const LEAST_GAPS: usize = 3;

/// The peaks of one run.
#[derive(Debug)]
pub(super) struct Peaks {
    /// All of the run, thinned; then the last ones by [`SCALES`], the longest first.
    series: [Series; 1 + SCALES.len()],
    rare: Rare,
}

/// Peaks that stand for equally many values each.
#[derive(Debug)]
struct Series {
    peaks: VecDeque<Peak>,
    /// How many values one peak stands for, and how many the last one does so far.
    each: u64,
    in_last: u64,
    /// Whether the oldest peaks are dropped where there are too many, instead of merged.
    drops: bool,
    /// How they grew when the last of them was whole.
    growth: Option<Growth>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Peak {
    /// Nanoseconds of the timeline.
    at_ns: i64,
    bytes: u64,
}

/// Which phases are rare, and what memory rose by while they were.
#[derive(Debug, Default)]
struct Rare {
    names: Vec<Named>,
    steps: u64,
    /// The peak of the last step without a rare phase, and the names of rare phases since, as bits.
    ordinary_bytes: Option<u64>,
    since: u32,
    gaps: VecDeque<Gap>,
}

#[derive(Debug)]
struct Named {
    name: Arc<str>,
    steps: u64,
}

/// What was between a step without a rare phase and the next one.
#[derive(Debug, Clone, Copy)]
struct Gap {
    at_ns: i64,
    grown_kib: i32,
    /// Its rare phases, as bits.
    names: u32,
}

/// How memory grows over one stretch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Growth {
    /// From the median of the first block to that of the last, and how long that took.
    pub grown_bytes: u64,
    pub over_ns: i64,
    /// When it began.
    pub onset_ns: i64,
    /// Where the line is now, bytes.
    pub level_bytes: u64,
    /// Growth per value (a step or a minute), bytes: the slope, then its lower and upper 90 % bound.
    pub each_bytes: [f64; 3],
    /// `None` where the GPU's size is not known.
    pub full: Option<Full>,
    /// The phases with which memory rises, and by how much each time, bytes.
    pub with: Option<(String, u64)>,
}

/// When memory is full, with 90 % bounds, nanoseconds of the timeline; the latest is `i64::MAX` if it may never be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full {
    pub at_ns: i64,
    pub soonest_ns: i64,
    pub latest_ns: i64,
}

impl Default for Peaks {
    fn default() -> Self {
        let series = |each, drops| Series { peaks: VecDeque::new(), each, in_last: 0, drops, growth: None };
        let [one, eight, many] = SCALES;
        Self {
            series: [series(1, false), series(many, true), series(eight, true), series(one, true)],
            rare: Rare::default(),
        }
    }
}

impl Peaks {
    /// Takes the peak of a step.
    pub fn push_step(&mut self, step: &Step, peak_bytes: u64, usable_bytes: Option<u64>) {
        self.rare.take(step, peak_bytes);
        self.push(step.end_ns, peak_bytes, usable_bytes);
    }

    /// Takes a peak of a GPU of this size.
    pub fn push(&mut self, at_ns: i64, bytes: u64, usable_bytes: Option<u64>) {
        for series in &mut self.series {
            if series.push(Peak { at_ns, bytes }) {
                series.growth = series.grows(usable_bytes, &self.rare);
            }
        }
    }

    /// Whether there are enough for a judgement.
    pub fn are_enough(&self) -> bool {
        self.series.iter().any(|series| series.peaks.len() >= LEAST_PEAKS)
    }

    /// How memory grows, over the longest stretch up to now that rises throughout.
    pub fn growth(&self) -> Option<&Growth> {
        self.series.iter().find_map(|series| series.growth.as_ref())
    }
}

impl Series {
    /// Takes a peak. Returns whether the last one is whole now.
    fn push(&mut self, peak: Peak) -> bool {
        match self.peaks.back_mut() {
            Some(last) if self.in_last < self.each => {
                *last = Peak { bytes: last.bytes.max(peak.bytes), ..peak };
                self.in_last += 1;
            }
            _ => {
                self.peaks.push_back(peak);
                self.in_last = 1;
            }
        }
        if self.drops && self.peaks.len() > MOST_LAST {
            self.peaks.pop_front();
        } else if self.peaks.len() > MOST_PEAKS {
            self.thin();
        }
        self.in_last == self.each
    }

    /// Makes two neighbours one, the higher of them at the later time.
    fn thin(&mut self) {
        let merged = |pair: &[Peak]| {
            let bytes = pair.iter().map(|peak| peak.bytes).max()?;
            Some(Peak { bytes, ..*pair.last()? })
        };
        self.peaks = self.peaks.make_contiguous().chunks(2).filter_map(merged).collect();
        // The number of peaks is odd here, so the last one has no partner: it stands for one value so far, and takes
        // more.
        self.each *= 2;
    }

    /// How memory grows over the longest stretch up to now that rises throughout.
    fn grows(&mut self, usable_bytes: Option<u64>, rare: &Rare) -> Option<Growth> {
        let each = self.each;
        let peaks: &[Peak] = self.peaks.make_contiguous();
        let lengths = std::iter::successors(Some(peaks.len()), |length| Some(length / 2));
        let mut stretches = lengths.take_while(|length| *length >= LEAST_PEAKS);
        stretches.find_map(|length| growth_of(peaks, length, each, usable_bytes, rare))
    }
}

/// How memory grows over the last peaks; `None` where it does not rise from each block to the next.
fn growth_of(all: &[Peak], length: usize, each: u64, usable_bytes: Option<u64>, rare: &Rare) -> Option<Growth> {
    let size = length / BLOCKS;
    let (before, peaks) = all.split_at_checked(all.len() - size * BLOCKS)?;
    let blocks: Vec<Vec<u64>> = peaks.chunks(size).map(sorted).collect();
    let medians: Vec<u64> = blocks.iter().filter_map(|block| middle(block)).collect();
    let grown_bytes = medians.last()?.checked_sub(*medians.first()?)?;
    let least_bytes = LEAST_GROWTH_BYTES.max(usable_bytes.unwrap_or(0) / LEAST_GROWTH_PART);
    let mut rises = medians.windows(2).map(|pair| number(pair[1]) - number(pair[0]));
    #[allow(clippy::cast_precision_loss, reason = "five blocks")]
    let mean = number(grown_bytes) / (BLOCKS - 1) as f64;
    // Nine tenths of a block must lie at or above the median of the block before. Peaks that only fluctuate do not.
    let mut apart = medians.iter().zip(blocks.iter().skip(1)).map(|(before, block)| block[block.len() / 10] >= *before);
    if grown_bytes < least_bytes || rises.any(|rise| rise < LEAST_RISE * mean) || !apart.all(|apart| apart) {
        return None;
    }
    let trend = pace(peaks)?;
    let (first, last, steps) = (peaks.first()?, peaks.last()?, number((peaks.len() - 1) as u64));
    #[allow(clippy::cast_precision_loss, reason = "nanoseconds of days")]
    let peak_ns = (last.at_ns - first.at_ns) as f64 / steps;
    let left = usable_bytes.map(|usable| number(usable) - trend.end);
    let (in_peaks, soonest, latest) = trend.until(left.unwrap_or(0.0))?;
    #[allow(clippy::cast_possible_truncation, reason = "a forecast saturates")]
    // As a number saturates, so does a time.
    let after = |peaks: f64| last.at_ns.saturating_add((peaks * peak_ns) as i64);
    let full = Full { at_ns: after(in_peaks), soonest_ns: after(soonest), latest_ns: after(latest) };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a GPU")]
    let level_bytes = trend.end.max(0.0) as u64;
    Some(Growth {
        grown_bytes,
        // The medians lie in the middles of the first and the last block.
        over_ns: peaks.get(peaks.len() - size + size / 2)?.at_ns - peaks.get(size / 2)?.at_ns,
        onset_ns: onset_ns(before, peaks, &trend)?,
        level_bytes,
        each_bytes: [trend.slope, trend.low, trend.high].map(|bytes| bytes / number(each)),
        full: left.map(|_| full),
        with: rare.cause(first.at_ns, last.at_ns, trend.end - trend.begin, each * (peaks.len() as u64)),
    })
}

/// The line through the peaks. If the last half surely rises more slowly, its slope and end are used, because growth
/// goes on at that pace. The lower bound is the lower of both.
fn pace(peaks: &[Peak]) -> Option<Trend> {
    let line = |peaks: &[Peak]| Trend::of(&peaks.iter().map(|peak| number(peak.bytes)).collect::<Vec<f64>>());
    let (all, half) = (line(peaks)?, line(&peaks[peaks.len() / 2..])?);
    let low = all.low.min(half.low);
    let pace = if half.high < all.slope { Trend { begin: all.begin, ..half } } else { all };
    Some(Trend { low, highest: all.highest, ..pace })
}

/// Where the line through the peaks leaves the level of those before them; at their first one if none are before, or if they
/// had risen by then.
fn onset_ns(before: &[Peak], peaks: &[Peak], trend: &Trend) -> Option<i64> {
    let level = middle(&sorted(&before[before.len().saturating_sub(peaks.len() / BLOCKS)..]));
    let last = number((peaks.len() - 1) as u64);
    let rise = (trend.end - trend.begin) / last;
    let above = level.map_or(0.0, |level| (number(level) - trend.begin) / rise);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the number of a peak")]
    let at = above.clamp(0.0, last) as usize;
    Some(peaks.get(at)?.at_ns)
}

fn sorted(block: &[Peak]) -> Vec<u64> {
    let mut peaks: Vec<u64> = block.iter().map(|peak| peak.bytes).collect();
    peaks.sort_unstable();
    peaks
}

impl Rare {
    /// Notes the phases of a step, and those before it, and by what memory rose while rare ones were: from the last step
    /// without one to the next.
    fn take(&mut self, step: &Step, peak_bytes: u64) {
        self.steps += 1;
        let inside = self.note(step.phases.iter().map(|phase| &phase.name));
        self.since |= inside | self.note(step.before.iter());
        if inside != 0 {
            return;
        }
        let (names, last_bytes) = (std::mem::take(&mut self.since), self.ordinary_bytes.replace(peak_bytes));
        let Some(last_bytes) = last_bytes.filter(|_| names != 0) else { return };
        let grown_bytes = peak_bytes.cast_signed() - last_bytes.cast_signed();
        let grown_kib = i32::try_from(grown_bytes >> 10).unwrap_or(if grown_bytes > 0 { i32::MAX } else { i32::MIN });
        if self.gaps.len() >= MOST_GAPS {
            self.gaps.pop_front();
        }
        self.gaps.push_back(Gap { at_ns: step.end_ns, grown_kib, names });
    }

    /// Counts a step with phases of these names. Returns the rare ones, as bits.
    fn note<'a>(&mut self, names: impl Iterator<Item = &'a Arc<str>>) -> u32 {
        let mut noted: u32 = 0;
        for name in names {
            let known = self.names.iter().position(|named| named.name == *name);
            let at = known.unwrap_or(self.names.len());
            if known.is_none() {
                if at >= MOST_NAMES {
                    continue;
                }
                self.names.push(Named { name: Arc::clone(name), steps: 0 });
            }
            noted |= 1 << at;
        }
        let mut rare = 0;
        for (at, named) in self.names.iter_mut().enumerate().filter(|(at, _)| noted & 1 << at != 0) {
            named.steps += 1;
            rare |= u32::from(named.steps * RARE <= self.steps) << at;
        }
        rare
    }

    /// The rare phases with which memory rose between two times, by `grown` bytes in all over `steps` steps, if it did: the rarest
    /// that explain it, and all that are always there with them.
    fn cause(&self, from_ns: i64, to_ns: i64, grown: f64, steps: u64) -> Option<(String, u64)> {
        // Of more gaps than are kept, the last ones stand for their part of the time.
        let oldest_ns =
            self.gaps.front().filter(|_| self.gaps.len() >= MOST_GAPS).map_or(from_ns, |gap| gap.at_ns.max(from_ns));
        #[allow(clippy::cast_precision_loss, reason = "nanoseconds of days")]
        let part = (to_ns - oldest_ns) as f64 / (to_ns - from_ns) as f64;
        let gaps = || self.gaps.iter().filter(|gap| gap.at_ns > oldest_ns && gap.at_ns <= to_ns);
        let explains = |name: u32| {
            let own: Vec<f64> =
                gaps().filter(|gap| gap.names & 1 << name != 0).map(|gap| f64::from(gap.grown_kib)).collect();
            #[allow(clippy::cast_precision_loss, reason = "some dozens")]
            let count = own.len() as f64;
            let sum: f64 = own.iter().sum();
            let spread = own.iter().map(|one| (one - sum / count).powi(2)).sum::<f64>() * count / (count - 1.0);
            let is_rare = number(RARE) * count <= number(steps) * part;
            let [least, mostly] = [SURELY, MOSTLY].map(|share| share * grown * part / 1024.0);
            let does = own.len() >= LEAST_GAPS && is_rare && sum >= mostly && sum - 2.0 * spread.sqrt() >= least;
            does.then_some((own.len(), sum / count))
        };
        let (rarest, (count, each_kib)) = (0..)
            .take(self.names.len())
            .filter_map(|name| Some((name, explains(name)?)))
            .min_by_key(|(_, found)| found.0)?;
        let with = gaps().filter(|gap| gap.names & 1 << rarest != 0).fold(u32::MAX, |with, gap| with & gap.names);
        let always = |name: &u32| with & 1 << *name != 0 && explains(*name).is_some_and(|found| found.0 == count);
        let names = self.names.iter().zip(0..).filter(|(_, name)| always(name)).map(|(named, _)| &*named.name);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a GPU")]
        let each_bytes = (each_kib * 1024.0) as u64;
        Some((names.collect::<Vec<_>>().join(" and "), each_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::super::hand::{GIB, Hand};
    use super::super::trend::tests::random;
    use super::*;
    use crate::clock::SECOND_NS;

    const MIB: u64 = 1 << 20;

    /// Peaks a second from one another.
    fn peaks(values: impl IntoIterator<Item = u64>) -> Peaks {
        let mut peaks = Peaks::default();
        (1..).zip(values).for_each(|(nth, bytes): (i64, u64)| peaks.push(nth * SECOND_NS, bytes, None));
        peaks
    }

    /// How such peaks grow on a GPU of this size.
    fn grown(values: impl IntoIterator<Item = u64>, usable_bytes: Option<u64>) -> Option<Growth> {
        let mut peaks = Peaks::default();
        (1..).zip(values).for_each(|(nth, bytes): (i64, u64)| peaks.push(nth * SECOND_NS, bytes, usable_bytes));
        peaks.growth().cloned()
    }

    /// A number up to `most` bytes.
    fn chance(state: &mut u64, most: u64) -> u64 {
        ((random(state) + 1.0) / 2.0 * number(most)) as u64
    }

    fn rising(from: u64, count: u64) -> impl Iterator<Item = u64> {
        (0..count).map(move |nth| from + nth * 100 * MIB)
    }

    #[test]
    fn peaks_that_rise_from_block_to_block_grow_at_the_pace_of_the_line_through_them() {
        // 40 peaks of which each is 100 MiB above the one before: medians 32 steps and 3200 MiB apart.
        let found = grown(rising(10 * GIB, 40), Some(140 * GIB)).expect("it grows");
        assert_eq!((found.grown_bytes, found.over_ns, found.onset_ns), (3_200 * MIB, 32 * SECOND_NS, SECOND_NS));
        assert!(found.each_bytes.iter().all(|bytes| (bytes - number(100 * MIB)).abs() < 1.0), "{found:?}");
        let full_ns = 40 * SECOND_NS + (140 * 1_024 - (10 * 1_024 + 3_900)) * 10_000_000;
        let full = found.full.expect("a forecast");
        for ns in [full.at_ns, full.soonest_ns, full.latest_ns] {
            assert!((ns - full_ns).abs() < SECOND_NS / 1_000, "{full:?}");
        }
        let unknown = grown(rising(10 * GIB, 40), None).expect("it grows all the same");
        assert_eq!((unknown.full, unknown.with), (None, None));
        // A part block at the begin is left out, whatever is in it.
        let with_more = grown([90 * GIB; 4].into_iter().chain(rising(10 * GIB, 40)), None);
        assert_eq!(with_more.map(|found| found.grown_bytes), Some(3_200 * MIB));
    }

    #[test]
    fn bounds_hold_what_comes_and_are_wider_for_peaks_that_vary() {
        // 256 MiB a step, and up to 2 GiB more by chance, until 80 GiB are full.
        let (mut held, mut state, mut all) = (0, 11_u64, 0);
        for _ in 0..200 {
            let mut values = Vec::new();
            let mut bytes = 0;
            while bytes < 80 * GIB {
                bytes = 20 * GIB + values.len() as u64 * 256 * MIB + chance(&mut state, 2 * GIB);
                values.push(bytes);
            }
            let full_ns = values.len() as i64 * SECOND_NS;
            let Some(found) = grown(values[..100].iter().copied(), Some(80 * GIB)) else { continue };
            let [each, least, most] = found.each_bytes;
            assert!(least < each && each < most && each / number(256 * MIB) > 0.9 && each / number(256 * MIB) < 1.1);
            let full = found.full.expect("known");
            assert!(full.latest_ns - full.soonest_ns < 30 * SECOND_NS, "{full:?}");
            assert!((full.soonest_ns..=full.latest_ns).contains(&full.at_ns));
            held += i64::from((full.soonest_ns..=full.latest_ns + SECOND_NS).contains(&full_ns));
            all += 1;
        }
        assert!(all > 190 && held * 100 >= all * 85, "{held} of {all}");
    }

    #[test]
    fn evaluations_that_take_more_change_neither_pace_nor_sign() {
        let straight = |nth: u64| 10 * GIB + nth * 12 * MIB;
        for at in [[8, 18], [30, 60], [80, 90]] {
            let values = (0..100).map(|nth| straight(nth) + if at.contains(&nth) { 20 * GIB } else { 0 });
            let found = grown(values, Some(80 * GIB)).expect("it grows");
            let full = found.full.expect("known");
            let left_s = (80 * 1_024 - (10 * 1_024 + 99 * 12)) / 12;
            assert!((full.at_ns / SECOND_NS - (100 + left_s)).abs() < 60, "{at:?}: {found:?}");
            assert!((100 * SECOND_NS..full.at_ns).contains(&full.soonest_ns), "the next such evaluation: {full:?}");
        }
    }

    #[test]
    fn what_rises_ever_more_slowly_is_full_later_than_by_the_whole_line() {
        // It ends at 50 GiB, and has three fifths of the way left.
        let values: Vec<u64> = (0..100)
            .map(|nth| 20 * GIB + (30.0 * number(GIB) * (1.0 - (-f64::from(nth) / 100.0).exp())) as u64)
            .collect();
        let found = grown(values.clone(), Some(80 * GIB)).expect("it grows");
        let whole = number(values[99] - values[0]) / 99.0;
        assert!(found.each_bytes[0] < 0.85 * whole && found.each_bytes[1] < 0.75 * whole, "{whole}: {found:?}");
    }

    #[test]
    fn growth_counts_from_its_bounds_on() {
        let by = |each_bytes: u64, usable| grown((0..40).map(|nth| GIB + nth / 8 * each_bytes), usable).is_some();
        // Four rises: 256 MiB in all, or a hundredth of the usable memory.
        assert_eq!((by(64 * MIB, None), by(64 * MIB - 1, None)), (true, false));
        assert_eq!((by(64 * MIB, Some(25_600 * MIB)), by(64 * MIB, Some(25_700 * MIB))), (true, false));
        assert_eq!(grown((0..40).map(|nth| 90 * GIB - nth * GIB), None), None);
    }

    #[test]
    fn no_block_rises_much_less_than_the_others() {
        let blocks =
            |levels: [u64; 5]| grown(levels.into_iter().flat_map(|level| [GIB + level * MIB; 8]), None).is_some();
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
            grown((0..5).flat_map(block), None).is_some()
        };
        assert_eq!((with_low(0), with_low(2), with_low(3)), (true, true, false));
    }

    #[test]
    fn the_longest_stretch_up_to_now_that_rises_is_taken_and_begins_where_it_leaves_the_level_before() {
        let mib = |values: Vec<u64>| grown(values, None).map(|found| found.grown_bytes / MIB);
        assert_eq!((mib(rising(GIB, 40).collect()), mib(rising(GIB, 39).collect())), (Some(3_200), None));
        assert_eq!(mib(rising(GIB, 80).collect()), Some(6_400), "all, not its last half");
        let late = |quiet: usize, count| std::iter::repeat_n(5 * GIB, quiet).chain(rising(5 * GIB, count)).collect();
        assert_eq!(
            (mib(late(40, 40)), mib(late(41, 38))),
            (Some(3_200), None),
            "the last half of eighty, none of seventy-nine"
        );
        let onset_s = |values: Vec<u64>| grown(values, None).expect("it grows").onset_ns / SECOND_NS;
        assert_eq!(onset_s(late(60, 40)), 61);
        // The first fifth of the last half is level, or had risen before.
        assert!((45..=48).contains(&onset_s(late(46, 34))));
        assert_eq!(onset_s(rising(GIB, 80).collect()), 1);
    }

    #[test]
    fn growth_is_found_as_soon_after_a_quiet_week_as_in_the_first_hour() {
        for quiet in [0, 100, 1_000, 10_000, 100_000] {
            let mut peaks = peaks(std::iter::repeat_n(GIB / 2, quiet));
            let fast = (1..).zip(rising(GIB, 200)).find(|(nth, bytes)| {
                peaks.push((quiet as i64 + nth) * SECOND_NS, *bytes, None);
                peaks.growth().is_some()
            });
            assert!(fast.is_some_and(|(nth, _)| nth <= 41), "{quiet}: {fast:?}");
            // A megabyte a step is seen in 256 steps at the earliest.
            let mut slow = self::peaks(std::iter::repeat_n(GIB / 2, quiet));
            let found = (1..5_000).find(|nth| {
                slow.push((quiet as i64 + nth) * SECOND_NS, GIB / 2 + nth.unsigned_abs() * MIB, None);
                slow.growth().is_some()
            });
            assert!(found.is_some_and(|nth| (256..=640).contains(&nth)), "{quiet}: {found:?}");
        }
    }

    #[test]
    fn many_peaks_become_fewer_that_stand_for_more_steps() {
        let mut run = peaks((1..=128).map(|nth| 1_000 + nth));
        let all = |run: &Peaks| (run.series[0].peaks.len(), run.series[0].each);
        assert_eq!(all(&run), (128, 1));
        run.push(129 * SECOND_NS, 3, None);
        assert_eq!(all(&run), (65, 2));
        let known = |run: &Peaks, at: usize| (run.series[0].peaks[at].at_ns / SECOND_NS, run.series[0].peaks[at].bytes);
        assert_eq!([0, 63, 64].map(|at| known(&run, at)), [(2, 1_002), (128, 1_128), (129, 3)]);
        // The last stands for one so far, and takes the next.
        run.push(130 * SECOND_NS, 9, None);
        run.push(131 * SECOND_NS, 5, None);
        assert_eq!([64, 65].map(|at| known(&run, at)), [(130, 9), (131, 5)]);
        run.push(132 * SECOND_NS, 4, None);
        assert_eq!([64, 65].map(|at| known(&run, at)), [(130, 9), (132, 5)], "the later time, the higher peak");
        let many = grown((0..2_000).map(|nth| GIB + nth * MIB), None).expect("it grows");
        assert!((many.each_bytes[0] / number(MIB) - 1.0).abs() < 0.02, "of a step, not of a peak: {many:?}");
        let lengths = peaks((0..20_000).map(|_| GIB)).series.map(|series| series.peaks.len());
        assert!(lengths[0] <= MOST_PEAKS && lengths[1..] == [MOST_LAST; 3], "{lengths:?}");
    }

    /// Growth over some steps, in MiB: by `each_step`, and up to `chance` more that does not stay. Each phase has a name, after how many
    /// steps it comes again, and what stays each time. It is between two steps, or in one that takes 20 GiB more.
    struct Run {
        steps: u64,
        each_step: u64,
        chance: u64,
        phases: &'static [(&'static str, u64, u64)],
        is_inside: bool,
    }

    impl Run {
        fn with(&self, seed: u64) -> Option<Option<(String, u64)>> {
            let (mut peaks, mut state, mut level) = (Peaks::default(), seed, GIB);
            for nth in 0..self.steps {
                let here = || self.phases.iter().filter(|(_, every, _)| nth % every == 0 && nth > 0);
                level += (self.each_step + here().map(|phase| phase.2).sum::<u64>()) * MIB;
                let names: Vec<_> = here().map(|phase| phase.0).collect();
                let mut own = vec![("forward", 500), ("backward", 500)];
                own.extend(names.iter().filter(|_| self.is_inside).map(|name| (*name, 10)));
                let mut step = Hand::step(0, nth, nth as i64 * 2 * SECOND_NS, &own);
                step.before.extend(names.iter().filter(|_| !self.is_inside).map(|name| Arc::from(*name)));
                let more = if self.is_inside && !names.is_empty() { 20 * GIB } else { 0 };
                peaks.push_step(&step, level + more + chance(&mut state, self.chance * MIB), None);
            }
            Some(peaks.growth()?.with.clone())
        }
    }

    #[test]
    fn growth_with_each_checkpoint_is_not_growth_of_each_step() {
        let run = |each_step, save, is_inside| {
            let phases: &[(&str, u64, u64)] = match save {
                0 => &[("save", 10, 0)],
                300 => &[("save", 10, 300)],
                _ => &[("save", 10, 500)],
            };
            Run { steps: 120, each_step, chance: 0, phases, is_inside }.with(1).expect("it grows")
        };
        let saved = Some(("save".to_owned(), 500 * MIB));
        for is_inside in [false, true] {
            assert_eq!(run(0, 500, is_inside), saved, "{is_inside}");
            assert_eq!((run(50, 0, is_inside), run(30, 300, is_inside)), (None, None), "all, and half: {is_inside}");
        }
    }

    #[test]
    fn of_several_rare_phases_the_rarest_that_explains_it_is_named_with_those_that_are_always_there() {
        let with = |steps, phases, chance| {
            Run { steps, each_step: 0, chance, phases, is_inside: false }.with(3).expect("it grows")
        };
        let saved = |found: Option<(String, u64)>| {
            let (name, bytes) = found.expect("a phase");
            assert!((bytes / MIB).abs_diff(500) < 60, "{bytes}");
            name
        };
        assert_eq!(saved(with(1_500, &[("log", 10, 0), ("save", 100, 500)], 0)), "save");
        assert_eq!(saved(with(1_500, &[("log", 10, 0), ("save", 100, 500)], 60)), "save");
        assert_eq!(
            saved(with(400, &[("eval", 20, 500), ("save", 20, 0)], 20)),
            "eval and save",
            "which of them is not known"
        );
    }

    #[test]
    fn chance_and_phases_that_take_turns_are_no_cause() {
        let blamed = |run: &Run| (1..=60).filter_map(|seed| run.with(seed)).filter(Option::is_some).count();
        for (steps, each_step, chance) in [(500, 20, 4_000), (1_000, 10, 4_000), (2_000, 5, 4_000)] {
            let run = Run { steps, each_step, chance, phases: &[("save", 10, 0)], is_inside: false };
            assert!(blamed(&run) <= 3, "{each_step}: {}", blamed(&run));
        }
        // One of five data sets before each step, of which none is there more often than another.
        let mut peaks = Peaks::default();
        for nth in 0..200_u64 {
            let mut step = Hand::step(0, nth, nth as i64 * SECOND_NS, &[("forward", 500)]);
            step.before.push(format!("data_{}", nth % 5).into());
            peaks.push_step(&step, GIB + nth * 100 * MIB, None);
        }
        assert_eq!(peaks.growth().expect("it grows").with, None);
    }

    #[test]
    fn names_and_gaps_are_bounded_and_phases_of_most_steps_are_not_rare() {
        let mut rare = Rare::default();
        for nth in 0..100_u64 {
            let mut step = Hand::step(0, nth, 0, &[("forward", 1)]);
            step.before = vec![format!("phase {nth}").into(), "data".into()];
            rare.take(&step, nth * GIB);
        }
        for nth in 0..300 {
            let mut step = Hand::step(0, 100 + nth, 0, &[("forward", 1)]);
            step.before.extend((nth % 4 == 0).then(|| "phase 7".into()));
            rare.take(&step, GIB);
        }
        assert_eq!((rare.names.len(), rare.gaps.len(), rare.since), (MOST_NAMES, MOST_GAPS, 0));
        let ordinary = rare.names.iter().filter(|named| named.steps * RARE > rare.steps).map(|named| &*named.name);
        assert_eq!(ordinary.collect::<Vec<_>>(), ["forward"]);
    }
}
