//! The peaks of a job's steps by batch size.
//!
//! Enters: steps of each run in order of time. Leaves: the fit of the rank where the largest batch is smallest. Where steps say
//! the most in live tensors, that is what is fitted, and what the allocator needs beside them is added: live tensors grow
//! with the batch exactly, and the allocator keeps blocks of every size. Invariants: a step counts only if no earlier step of its
//! run had a larger batch. PyTorch's allocator keeps memory, so a smaller batch after a larger one would seem to need as
//! much. The number of such steps is reported. Of live tensors, which are known as the most since the process began, a step
//! counts only if they rose in it.

use super::fit::{BatchPeak, Fit, FitError, Slack, fit};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
#[cfg(feature = "testing")]
use utoipa::ToSchema;

/// Different batch sizes that are kept of one run, and ranks that are kept of all.
const MOST_SIZES: usize = 1 << 10;
const MOST_RANKS: usize = 1 << 12;
/// What the allocator needs beside live tensors when memory is short: a share of them, as it rounds sizes up, and the largest
/// allocation, as free memory in smaller pieces is of no use to it. Where the largest allocation is not known, a larger share of
/// live tensors. Set by ten jobs on an H200, which needed up to 17.5 % of live tensors (docs/performance.md).
const ROUNDING: f64 = 0.01;
const SLACK: f64 = 0.18;

/// The highest memory up to the end of a step, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Of its GPU in the step.
    pub gpu: u64,
    /// In live tensors, since the process began.
    pub allocated: Option<u64>,
    /// Reserved by the allocator, since the process began.
    pub reserved: Option<u64>,
    /// The largest allocation of the step.
    pub largest: Option<u64>,
}

/// The steps of one process.
#[derive(Debug, Default)]
pub struct Run {
    largest: u64,
    sizes: BTreeMap<u64, (u64, u64)>,
    left_out: u64,
    /// The same of live tensors, and the most that there have been.
    allocated: BTreeMap<u64, (u64, u64)>,
    most_allocated: u64,
    /// The least that the GPU had in use beside what the allocator reserved.
    outside: Option<u64>,
    /// The largest allocation for each sample.
    largest_each: Option<f64>,
}

impl Run {
    /// Adds a step: its batch size, and its peaks.
    pub fn add(&mut self, batch_size: u64, peaks: Peaks) {
        self.add_allocated(batch_size, peaks);
        let peak_bytes = peaks.gpu;
        let has_room = self.sizes.contains_key(&batch_size) || self.sizes.len() < MOST_SIZES;
        if batch_size < self.largest.max(1) || !has_room {
            self.left_out += 1;
            return;
        }
        self.largest = batch_size;
        let (peak, steps) = self.sizes.entry(batch_size).or_default();
        (*peak, *steps) = ((*peak).max(peak_bytes), *steps + 1);
    }

    fn add_allocated(&mut self, batch_size: u64, peaks: Peaks) {
        let Some((allocated, reserved)) = peaks.allocated.zip(peaks.reserved) else { return };
        let outside = peaks.gpu.checked_sub(reserved);
        self.outside = self.outside.into_iter().chain(outside).min();
        #[allow(clippy::cast_precision_loss, reason = "bytes below 2^53")]
        let largest = peaks.largest.filter(|_| batch_size > 0).map(|bytes| bytes as f64 / batch_size as f64);
        self.largest_each = self.largest_each.into_iter().chain(largest).reduce(f64::max);
        let has_risen = allocated > self.most_allocated;
        let known = self.allocated.len();
        match self.allocated.get_mut(&batch_size) {
            Some((peak, steps)) => {
                *steps += 1;
                *peak = if has_risen { allocated } else { *peak };
            }
            None if has_risen && batch_size > 0 && known < MOST_SIZES => {
                self.allocated.insert(batch_size, (allocated, 1));
            }
            None => {}
        }
        self.most_allocated = self.most_allocated.max(allocated);
    }
}

/// The runs of all ranks.
#[derive(Debug, Default)]
pub struct Observed {
    ranks: BTreeMap<u32, Of>,
    left_out: u64,
    several_in_one_process: bool,
}

/// The runs of one rank.
#[derive(Debug, Default)]
struct Of {
    points: Vec<BatchPeak>,
    allocated: Vec<BatchPeak>,
    /// The most of what its runs had outside the allocator, and of the largest allocation for each sample.
    outside: Option<u64>,
    largest_each: Option<f64>,
    /// Of the smallest of its GPUs.
    limit_bytes: Option<u64>,
}

/// The rank for which the largest batch is smallest, and its line.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "testing", derive(ToSchema))]
pub struct Rank {
    /// The rank.
    pub rank: u32,
    /// Its line.
    #[serde(flatten)]
    pub fit: Fit,
    /// What the peaks are of.
    pub basis: Basis,
    /// What the GPU has in use beside what the allocator reserves, bytes. `null` if the peaks are the GPU's.
    pub outside_bytes: Option<u64>,
    /// Steps that do not count: they came after a step with a larger batch, whose memory the allocator kept.
    pub left_out_steps: u64,
    /// Whether a process had several batch sizes. Its allocator keeps blocks of each, so that memory seems to grow faster.
    pub several_in_one_process: bool,
    /// Why nothing is known of other ranks.
    pub unknown_ranks: BTreeMap<u32, String>,
}

/// What the peaks of steps are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "testing", derive(ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The memory of the GPU, as the driver says it.
    Gpu,
    /// Live tensors, as the job's allocator says it.
    LiveTensors,
}

/// Why no batch size can be advised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// No step says how large its batch was.
    #[error("no step has the attribute `{}` and a known peak", super::ATTRIBUTE)]
    NoSteps,
    /// The first rank of which it is not known, and why.
    #[error("rank {0}: {1}")]
    Rank(u32, RankProblem),
}

/// Why no batch size can be advised for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RankProblem {
    /// Nothing says how much memory there is.
    #[error("the size of its GPU is not known")]
    UnknownLimit,
    /// Its steps do not show it.
    #[error("{0}")]
    Fit(#[from] FitError),
}

impl Observed {
    /// Adds a run of a rank, whose GPU may have at most `limit_bytes` bytes in use.
    pub fn add(&mut self, rank: u32, run: Run, limit_bytes: Option<u64>) {
        self.left_out += run.left_out;
        self.several_in_one_process |= run.sizes.len() > 1;
        if self.ranks.len() >= MOST_RANKS && !self.ranks.contains_key(&rank) {
            return;
        }
        let of = self.ranks.entry(rank).or_default();
        of.limit_bytes = of.limit_bytes.into_iter().chain(limit_bytes).min();
        of.outside = of.outside.max(run.outside);
        of.largest_each = of.largest_each.into_iter().chain(run.largest_each).reduce(f64::max);
        for (points, sizes) in [(&mut of.points, run.sizes), (&mut of.allocated, run.allocated)] {
            let room = MOST_SIZES.saturating_sub(points.len());
            let more = sizes.into_iter().take(room);
            points.extend(more.map(|(batch_size, (peak_bytes, steps))| BatchPeak { batch_size, peak_bytes, steps }));
        }
    }

    /// The batch size that fits on every rank of which it is known.
    ///
    /// # Errors
    /// It is known of none.
    pub fn advise(mut self) -> Result<Rank, BatchError> {
        let mut unknown_ranks = BTreeMap::new();
        let mut best: Option<(u32, Fit, Option<u64>)> = None;
        for (rank, of) in std::mem::take(&mut self.ranks) {
            match of.fit() {
                Ok((fit, outside)) => {
                    if best.as_ref().is_none_or(|(_, known, _)| fit.largest_batch_size < known.largest_batch_size) {
                        best = Some((rank, fit, outside));
                    }
                }
                Err(problem) => drop(unknown_ranks.insert(rank, problem)),
            }
        }
        let Some((rank, fit, outside_bytes)) = best else {
            let first = unknown_ranks.into_iter().next();
            return Err(first.map_or(BatchError::NoSteps, |(rank, problem)| BatchError::Rank(rank, problem)));
        };
        let basis = if outside_bytes.is_some() { Basis::LiveTensors } else { Basis::Gpu };
        let Self { left_out: left_out_steps, several_in_one_process, .. } = self;
        let unknown_ranks = unknown_ranks.into_iter().map(|(rank, problem)| (rank, problem.to_string())).collect();
        Ok(Rank { rank, fit, basis, outside_bytes, left_out_steps, several_in_one_process, unknown_ranks })
    }
}

impl Of {
    /// The line through live tensors where two batch sizes have them, and what is outside the allocator then; else the line
    /// through the GPU's memory.
    fn fit(self) -> Result<(Fit, Option<u64>), RankProblem> {
        let limit_bytes = self.limit_bytes.ok_or(RankProblem::UnknownLimit)?;
        let sizes: BTreeSet<u64> = self.allocated.iter().map(|point| point.batch_size).collect();
        let Some(outside) = self.outside.filter(|_| sizes.len() > 1) else {
            return Ok((fit(self.points, limit_bytes, Slack::default())?, None));
        };
        let unknown = Slack { share: SLACK, per_sample: 0.0 };
        let slack = self.largest_each.map_or(unknown, |each| Slack { share: ROUNDING, per_sample: each });
        Ok((fit(self.allocated, limit_bytes.saturating_sub(outside), slack)?, Some(outside)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(steps: &[(u64, u64)]) -> Run {
        let mut run = Run::default();
        steps.iter().for_each(|(batch, gpu)| run.add(*batch, Peaks { gpu: *gpu, ..Peaks::default() }));
        run
    }

    #[test]
    fn a_batch_after_a_larger_one_does_not_count() {
        let mut observed = Observed::default();
        // In the second run, 8 comes after 16, whose memory was kept.
        observed.add(0, run(&[(4, 30), (4, 40), (8, 80), (8, 70), (16, 160), (8, 160), (0, 1)]), Some(1_000));
        observed.add(0, run(&[(16, 164), (8, 164)]), Some(900));
        // Less memory is left here.
        observed.add(1, run(&[(4, 50), (8, 90)]), Some(300));
        observed.add(2, run(&[(4, 50)]), Some(300));
        observed.add(3, run(&[(4, 50), (8, 90)]), None);
        let advised = observed.advise().expect("known of two ranks");
        assert_eq!((advised.rank, advised.fit.largest_batch_size, advised.left_out_steps), (1, Some(29), 3));
        let why: Vec<_> = advised.unknown_ranks.iter().map(|(rank, why)| (*rank, why.as_str())).collect();
        let two = "two batch sizes are needed to see how memory grows: all steps have 4";
        assert_eq!(why, [(2, two), (3, "the size of its GPU is not known")]);
        let mut observed = Observed::default();
        observed.add(0, run(&[(4, 30), (4, 40), (8, 80), (8, 70), (16, 160), (8, 160)]), Some(1_000));
        observed.add(0, run(&[(16, 164), (8, 164)]), Some(900));
        let advised = observed.advise().expect("known");
        let points: Vec<_> =
            advised.fit.points.iter().map(|point| (point.batch_size, point.peak_bytes, point.steps)).collect();
        assert_eq!(points, [(4, 40, 2), (8, 80, 2), (16, 160, 1), (16, 164, 1)]);
        assert_eq!(advised.fit.limit_bytes, 900, "of the smaller GPU");
        assert!(advised.several_in_one_process);
        let mut apart = Observed::default();
        [[(4, 40)], [(8, 80)]].iter().for_each(|steps| apart.add(0, run(steps), Some(1_000)));
        assert!(!apart.advise().expect("known").several_in_one_process);
        assert_eq!(Observed::default().advise().err(), Some(BatchError::NoSteps));
        assert_eq!(BatchError::NoSteps.to_string(), "no step has the attribute `batch_size` and a known peak");
        let mut unknown = Observed::default();
        unknown.add(2, run(&[(4, 40), (8, 80)]), None);
        assert_eq!(unknown.advise().err(), Some(BatchError::Rank(2, RankProblem::UnknownLimit)));
    }

    /// A process with growing batches, whose allocator keeps blocks of each: its GPU's memory grows by more than 10 a sample,
    /// live tensors by 10.
    #[test]
    fn live_tensors_are_fitted_where_steps_say_them() {
        let step = |gpu, allocated, reserved| Peaks {
            gpu,
            allocated: Some(allocated),
            reserved: Some(reserved),
            largest: None,
        };
        let mut run = Run::default();
        // The second step of each size is no higher; nor is a smaller batch later.
        for (batch, peaks) in [
            (4, step(170, 1_040, 140)),
            (4, step(180, 1_050, 150)),
            (4, step(180, 1_050, 150)),
            (8, step(300, 1_090, 270)),
            (16, step(500, 1_170, 460)),
            (8, step(500, 1_170, 470)),
        ] {
            run.add(batch, peaks);
        }
        let mut observed = Observed::default();
        observed.add(0, run, Some(2_175));
        let advised = observed.advise().expect("a line");
        let points: Vec<_> = advised.fit.points.iter().map(|point| (point.batch_size, point.peak_bytes)).collect();
        assert_eq!(points, [(4, 1_050), (8, 1_090), (16, 1_170)]);
        // The least difference of the GPU's memory and what was reserved is outside.
        assert_eq!((advised.basis, advised.outside_bytes), (Basis::LiveTensors, Some(30)));
        // 1,010 and 10 a sample: 80 samples take 1,810, and 18 % of that are for the allocator.
        assert_eq!((advised.fit.limit_bytes, advised.fit.largest_batch_size), (2_145, Some(80)));
        assert_eq!((advised.fit.slack_bytes, advised.fit.possible_batch_size), (Some(326), Some(113)));
    }

    /// A step of 8 samples had an allocation of 40: the allocator may need as much, 5 a sample, and 1 % of all.
    #[test]
    fn the_allocator_needs_room_for_its_largest_allocation() {
        let mut run = Run::default();
        for (batch, allocated, largest) in [(4, 1_050, None), (8, 1_090, Some(40)), (16, 1_170, None)] {
            run.add(batch, Peaks { gpu: 2_000, allocated: Some(allocated), reserved: Some(2_000), largest });
        }
        let mut observed = Observed::default();
        observed.add(0, run, Some(2_000));
        let advised = observed.advise().expect("a line");
        // 64 samples: 1,650 + 16.5 + 320.
        assert_eq!((advised.fit.largest_batch_size, advised.fit.slack_bytes), (Some(64), Some(337)));
    }

    #[test]
    fn the_gpus_memory_is_fitted_where_one_size_alone_has_live_tensors() {
        let mut run = Run::default();
        run.add(4, Peaks { gpu: 40, allocated: Some(30), reserved: Some(35), largest: None });
        run.add(8, Peaks { gpu: 80, allocated: Some(30), reserved: Some(35), largest: None });
        let mut observed = Observed::default();
        observed.add(0, run, Some(1_000));
        let advised = observed.advise().expect("a line");
        assert_eq!(
            (advised.basis, advised.outside_bytes, advised.fit.largest_batch_size),
            (Basis::Gpu, None, Some(100))
        );
    }

    #[test]
    fn what_one_run_can_make_us_keep_is_bounded() {
        let mut one = Run::default();
        let peaks = |bytes| Peaks { gpu: bytes, allocated: Some(bytes), reserved: Some(bytes), largest: None };
        (1..=5_000).for_each(|batch| one.add(batch, peaks(batch)));
        assert_eq!(one.allocated.len(), MOST_SIZES);
        assert_eq!((one.sizes.len(), one.left_out), (MOST_SIZES, 5_000 - MOST_SIZES as u64));
    }
}
