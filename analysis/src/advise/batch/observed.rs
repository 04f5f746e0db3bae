//! The peaks of a job's steps by batch size.
//!
//! Enters: steps of each run in order of time. Leaves: the fit of the rank where the largest batch is smallest. Invariant: a
//! step counts only if no earlier step of its run had a larger batch. PyTorch's allocator keeps memory, so a smaller batch
//! after a larger one would seem to need as much. The number of such steps is reported.

use super::fit::{BatchPeak, Fit, FitError, fit};
use serde::Serialize;
use std::collections::BTreeMap;
#[cfg(feature = "testing")]
use utoipa::ToSchema;

/// Different batch sizes that are kept of one run, and ranks that are kept of all.
const MOST_SIZES: usize = 1 << 10;
const MOST_RANKS: usize = 1 << 12;

/// The steps of one process.
#[derive(Debug, Default)]
pub struct Run {
    largest: u64,
    sizes: BTreeMap<u64, (u64, u64)>,
    left_out: u64,
}

impl Run {
    /// Adds a step: its batch size, and the highest memory of its GPU in it, bytes.
    pub fn add(&mut self, batch_size: u64, peak_bytes: u64) {
        let has_room = self.sizes.contains_key(&batch_size) || self.sizes.len() < MOST_SIZES;
        if batch_size < self.largest.max(1) || !has_room {
            self.left_out += 1;
            return;
        }
        self.largest = batch_size;
        let (peak, steps) = self.sizes.entry(batch_size).or_default();
        (*peak, *steps) = ((*peak).max(peak_bytes), *steps + 1);
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
    /// Steps that do not count: they came after a step with a larger batch, whose memory the allocator kept.
    pub left_out_steps: u64,
    /// Whether a process had several batch sizes. Its allocator keeps blocks of each, so that memory seems to grow faster.
    pub several_in_one_process: bool,
    /// Why nothing is known of other ranks.
    pub unknown_ranks: BTreeMap<u32, String>,
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
        let room = MOST_SIZES.saturating_sub(of.points.len());
        let points = run.sizes.into_iter().take(room);
        of.points.extend(points.map(|(batch_size, (peak_bytes, steps))| BatchPeak { batch_size, peak_bytes, steps }));
    }

    /// The batch size that fits on every rank of which it is known.
    ///
    /// # Errors
    /// It is known of none.
    pub fn advise(mut self) -> Result<Rank, BatchError> {
        let mut unknown_ranks = BTreeMap::new();
        let mut best: Option<(u32, Fit)> = None;
        for (rank, of) in std::mem::take(&mut self.ranks) {
            let limit = of.limit_bytes.ok_or(RankProblem::UnknownLimit);
            match limit.and_then(|limit_bytes| Ok(fit(of.points, limit_bytes)?)) {
                Ok(fit) => {
                    if best.as_ref().is_none_or(|(_, known)| fit.largest_batch_size < known.largest_batch_size) {
                        best = Some((rank, fit));
                    }
                }
                Err(problem) => drop(unknown_ranks.insert(rank, problem)),
            }
        }
        let Some((rank, fit)) = best else {
            let first = unknown_ranks.into_iter().next();
            return Err(first.map_or(BatchError::NoSteps, |(rank, problem)| BatchError::Rank(rank, problem)));
        };
        let Self { left_out: left_out_steps, several_in_one_process, .. } = self;
        let unknown_ranks = unknown_ranks.into_iter().map(|(rank, problem)| (rank, problem.to_string())).collect();
        Ok(Rank { rank, fit, left_out_steps, several_in_one_process, unknown_ranks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(steps: &[(u64, u64)]) -> Run {
        let mut run = Run::default();
        steps.iter().for_each(|(batch, peak)| run.add(*batch, *peak));
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

    #[test]
    fn what_one_run_can_make_us_keep_is_bounded() {
        let mut one = Run::default();
        (1..=5_000).for_each(|batch| one.add(batch, batch));
        assert_eq!((one.sizes.len(), one.left_out), (MOST_SIZES, 5_000 - MOST_SIZES as u64));
    }
}
