//! The largest batch whose first steps fit, by rank.
//!
//! Enters: histories of two batch sizes or more of each rank. Leaves: of the rank that can have the fewest samples, the largest
//! batch that a simulation of its steps has room for, with the segments that the job had and with segments that grow.
//! Invariants: the simulation of a history as it was must reserve what the job reserved, or there is no answer.

use super::allocator::{AllocatorPeaks, OutOfMemory, SimulatedAllocator};
use super::growth::Growth;
use super::parts::BlockPool;
use crate::advise::batch::last_that;
use crate::import::allocator_history::{AllocationHistory, MOST_BYTES};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Histories that are kept of a rank, and ranks.
const MOST_OF_RANK: usize = 16;
const MOST_RANKS: usize = 64;
/// By what share of it a simulation may miss what the job reserved. Of 20 histories of an H200, 16 were met to 0.02 % and all to 5 %:
/// which of two free blocks of one size is taken depends on addresses, and those of the driver are not known.
const NEAR: f64 = 0.1;
/// By what share the numbers of requests of two runs of one job may differ: libraries choose by the batch what work space they use, and
/// a compiled model compiles anew. Of ten jobs on an H200 they differed by at most 9 %.
const ALIKE: f64 = 0.2;

/// Histories of all ranks.
#[derive(Debug, Default)]
pub struct Histories {
    ranks: BTreeMap<u32, Vec<AllocationHistory>>,
    left_out: usize,
}

/// The rank for which the largest batch is smallest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulatedRank {
    /// The rank.
    pub rank: u32,
    /// What its allocator may reserve, bytes.
    pub limit_bytes: u64,
    /// What its GPU has in use beside what the allocator reserves, bytes.
    pub outside_bytes: u64,
    /// Whether the job ran with segments that grow.
    pub is_expandable: bool,
    /// With the segments that the job ran with.
    #[serde(flatten)]
    pub batch: SimulatedBatch,
    /// With `expandable_segments:True`; `None` if the job ran with it.
    pub with_expandable_segments: Option<SimulatedBatch>,
    /// What was simulated as it was.
    pub histories: Vec<SimulatedSteps>,
    /// Why nothing is known of other ranks.
    pub unknown_ranks: BTreeMap<u32, String>,
    /// Files of further ranks or runs, which were not looked at.
    pub left_out_files: usize,
}

/// The largest batch, and what it needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SimulatedBatch {
    /// Samples; `None` if not even one fits.
    pub largest_batch_size: Option<u64>,
    /// What the allocator reserves at most with it, bytes.
    pub reserved_peak_bytes: Option<u64>,
    /// What is allocated at most with it, bytes.
    pub allocated_peak_bytes: Option<u64>,
    /// The ratio of this batch size to the largest observed one.
    pub times_observed: Option<f64>,
}

/// Steps that a job ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SimulatedSteps {
    /// Samples.
    pub batch_size: u64,
    /// How many steps.
    pub steps: u64,
    /// What the allocator reserved at most, bytes.
    pub reserved_peak_bytes: u64,
    /// The same in the simulation.
    pub simulated_peak_bytes: u64,
}

/// Why no batch size can be advised.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum HistoriesError {
    /// There are no histories.
    #[error("there is no history of allocations")]
    None,
    /// The first rank of which it is not known, and why.
    #[error("rank {0}: {1}")]
    Rank(u32, HistoryProblem),
}

/// Why no batch size can be advised for one rank.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum HistoryProblem {
    /// All its histories have this batch size.
    #[error("histories of two batch sizes are needed to see how memory grows: all have {0}")]
    OneSize(u64),
    /// It ran with settings of the allocator that are not simulated.
    #[error("the allocator's setting `{0}` is not simulated")]
    Setting(String),
    /// The histories ran with different segments.
    #[error("some of its histories ran with expandable segments, and some without")]
    Mixed,
    /// The runs do not do the same.
    #[error("its runs with {0} and {1} samples made {2} and {3} requests: they are not of one job")]
    Others(u64, u64, usize, usize),
    /// The simulation of what was observed reserves something else, bytes.
    #[error(
        "the job reserved {observed} bytes with a batch of {batch_size}, and a simulation of its steps {simulated}: it is no base for larger ones"
    )]
    Apart {
        /// Samples.
        batch_size: u64,
        /// What the job reserved.
        observed: u64,
        /// What the simulation did.
        simulated: u64,
    },
    /// No batch is too large.
    #[error("memory does not grow with the batch size")]
    NoGrowth,
}

impl Histories {
    /// Adds the history of a run.
    pub fn add(&mut self, history: AllocationHistory) {
        let has_room = self.ranks.len() < MOST_RANKS || self.ranks.contains_key(&history.rank);
        let Some(runs) = has_room.then(|| self.ranks.entry(history.rank).or_default()) else {
            self.left_out += 1;
            return;
        };
        if runs.len() < MOST_OF_RANK { runs.push(history) } else { self.left_out += 1 }
    }

    /// The batch size that fits on every rank of which it is known, with this much of each GPU left free, bytes.
    ///
    /// # Errors
    /// It is known of none.
    pub fn advise(self, headroom_bytes: u64) -> Result<SimulatedRank, HistoriesError> {
        let (mut unknown, mut best) = (BTreeMap::new(), None::<SimulatedRank>);
        for (rank, mut runs) in self.ranks {
            runs.sort_by_key(|run| run.batch_size);
            match of_rank(rank, &runs, headroom_bytes) {
                Ok(found) => {
                    let is_less = |best: &SimulatedRank| found.batch.largest_batch_size < best.batch.largest_batch_size;
                    if best.as_ref().is_none_or(is_less) {
                        best = Some(found);
                    }
                }
                Err(problem) => drop(unknown.insert(rank, problem)),
            }
        }
        let Some(mut best) = best else {
            let first = unknown.into_iter().next();
            return Err(first.map_or(HistoriesError::None, |(rank, problem)| HistoriesError::Rank(rank, problem)));
        };
        best.unknown_ranks = unknown.into_iter().map(|(rank, problem)| (rank, problem.to_string())).collect();
        best.left_out_files = self.left_out;
        Ok(best)
    }
}

/// The largest batch of a rank, from its runs in order of their batch sizes.
fn of_rank(rank: u32, runs: &[AllocationHistory], headroom_bytes: u64) -> Result<SimulatedRank, HistoryProblem> {
    let last = runs.last().ok_or(HistoryProblem::OneSize(0))?;
    let smaller = runs.iter().rev().find(|run| run.batch_size < last.batch_size);
    let smaller = smaller.ok_or(HistoryProblem::OneSize(last.batch_size))?;
    let is_expandable = last.is_expandable();
    for run in runs {
        if let Some(setting) = run.unknown_settings().first() {
            return Err(HistoryProblem::Setting((*setting).to_owned()));
        }
        if run.is_expandable() != is_expandable {
            return Err(HistoryProblem::Mixed);
        }
    }
    are_alike(smaller, last)?;
    let histories = runs.iter().map(as_it_was).collect::<Result<Vec<_>, _>>()?;
    let growth = Growth::of(smaller, last);
    let outside_bytes = runs.iter().map(|run| run.outside_bytes).max().unwrap_or(0);
    let total_bytes = runs.iter().map(|run| run.total_bytes).min().unwrap_or(0);
    let limit_bytes = total_bytes.saturating_sub(outside_bytes).saturating_sub(headroom_bytes);
    let largest = |is_expandable| largest(last, &growth, is_expandable, limit_bytes);
    Ok(SimulatedRank {
        rank,
        limit_bytes,
        outside_bytes,
        is_expandable,
        batch: largest(is_expandable)?,
        with_expandable_segments: if is_expandable { None } else { Some(largest(true)?) },
        histories,
        unknown_ranks: BTreeMap::new(),
        left_out_files: 0,
    })
}

/// Whether two runs make about as many requests. Their sizes do not tell: those of two models of one family are much the same.
#[allow(clippy::cast_precision_loss, reason = "a comparison of some per cent")]
fn are_alike(small: &AllocationHistory, large: &AllocationHistory) -> Result<(), HistoryProblem> {
    let [few, many] = [small, large].map(|run| run.events.0.iter().filter(|event| event.request.is_some()).count());
    if few.abs_diff(many) as f64 > ALIKE * few.max(many) as f64 {
        return Err(HistoryProblem::Others(small.batch_size, large.batch_size, few, many));
    }
    Ok(())
}

/// A history as it was, without a limit.
#[allow(clippy::cast_precision_loss, reason = "a comparison of some per cent")]
fn as_it_was(run: &AllocationHistory) -> Result<SimulatedSteps, HistoryProblem> {
    let peaks = simulate(run, |size| size, run.is_expandable(), MOST_BYTES);
    let simulated = peaks.map_or(u64::MAX, |peaks| peaks.reserved);
    let (batch_size, observed) = (run.batch_size, run.reserved_peak_bytes);
    if (simulated as f64 - observed as f64).abs() > NEAR * observed as f64 {
        return Err(HistoryProblem::Apart { batch_size, observed, simulated });
    }
    Ok(SimulatedSteps { batch_size, steps: run.steps, reserved_peak_bytes: observed, simulated_peak_bytes: simulated })
}

#[allow(clippy::cast_precision_loss, reason = "batches below 2^32")]
fn largest(
    run: &AllocationHistory,
    growth: &Growth,
    is_expandable: bool,
    limit_bytes: u64,
) -> Result<SimulatedBatch, HistoryProblem> {
    let with = |batch: u64| simulate(run, |size| growth.with(size, batch), is_expandable, limit_bytes);
    let Some(batch) = last_that(|batch| with(batch).is_ok()) else { return Ok(SimulatedBatch::default()) };
    if with(batch + 1).is_ok() {
        return Err(HistoryProblem::NoGrowth);
    }
    let peaks = with(batch).ok();
    Ok(SimulatedBatch {
        largest_batch_size: Some(batch),
        reserved_peak_bytes: peaks.map(|peaks| peaks.reserved),
        allocated_peak_bytes: peaks.map(|peaks| peaks.allocated),
        times_observed: Some(batch as f64 / run.batch_size as f64),
    })
}

/// Plays a history with other sizes. What there was at its begin does not depend on the batch.
fn simulate(
    run: &AllocationHistory,
    size_of: impl Fn(u64) -> u64,
    is_expandable: bool,
    limit_bytes: u64,
) -> Result<AllocatorPeaks, OutOfMemory> {
    let mut allocator = SimulatedAllocator::new(is_expandable, limit_bytes);
    let mut taken = HashMap::new();
    for segment in &run.segments.0 {
        let pool = BlockPool { stream: segment.stream, is_small: segment.is_small };
        let (parts, mut at) = (&segment.blocks.0, segment.address);
        let mut kept = Vec::new();
        for (bytes, is_taken) in parts {
            if *is_taken {
                kept.push((at, *bytes));
            }
            at = at.saturating_add(*bytes);
        }
        if is_expandable || segment.is_expandable {
            // How segments that grow lay at the begin matters little: they are filled again.
            for (address, bytes) in kept {
                taken.insert(address, allocator.allocate(segment.stream, bytes)?);
            }
        } else {
            let blocks = allocator.restore(pool, segment.address, parts);
            taken.extend(kept.into_iter().map(|(address, _)| address).zip(blocks));
        }
    }
    for event in &run.events.0 {
        match event.request {
            Some((size, stream)) => {
                taken.insert(event.address, allocator.allocate(stream, size_of(size))?);
            }
            None => taken.remove(&event.address).into_iter().for_each(|block| allocator.free(block)),
        }
    }
    Ok(allocator.peaks())
}
