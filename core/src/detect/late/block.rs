//! The steps whose readings are compared with each other, and the blocks of them in a row in which one rank was late.

use crate::detect::finding::LagCause;
use crate::phases::RankKey;
use std::collections::VecDeque;

/// The cause of a [`Run`] is the one with the most weight in this many of its last blocks.
const CAUSE_BLOCKS: usize = 4;

/// The steps of a job whose readings are compared next.
#[derive(Debug, Default)]
pub(super) struct LateBlock {
    pub begin_ns: i64,
    /// How long each of its steps took.
    pub lengths_ns: Vec<i64>,
    pub first: Option<u64>,
    pub step_ns: i64,
    /// How many there were.
    pub steps: usize,
    /// The mean step of each of the last blocks in which no rank was late, nanoseconds.
    pub healthy_ns: VecDeque<i64>,
    /// The last blocks that show anything, if one rank was late in each of them.
    pub run: Option<Run>,
}

/// Blocks in a row in which one rank was late.
#[derive(Debug)]
pub(super) struct Run {
    pub key: RankKey,
    /// When the first began, and the last ended.
    pub since_ns: i64,
    pub end_ns: i64,
    /// The sum of their weights.
    pub weight: u32,
    /// How long each peer waited in those that are not reported yet, nanoseconds.
    pub lost_ns: i64,
    /// What the last of them showed as the cause, each with its weight.
    pub last: VecDeque<(LagCause, u32)>,
}

impl LateBlock {
    /// Why this rank is late, by the GPUs; `None` if the last block shows another rank, none, or ended before
    /// `since_ns`.
    pub fn cause_of(&self, key: &RankKey, since_ns: i64) -> Option<LagCause> {
        self.run.as_ref().filter(|run| run.key == *key && run.end_ns > since_ns)?.cause()
    }
}

impl Run {
    /// An empty run of a rank that is late since `since_ns`.
    pub fn new(key: &RankKey, since_ns: i64) -> Self {
        Self { key: key.clone(), since_ns, end_ns: since_ns, weight: 0, lost_ns: 0, last: VecDeque::new() }
    }

    /// Adds a block.
    pub fn add(&mut self, cause: LagCause, weight: u32, end_ns: i64, lost_ns: i64) {
        self.end_ns = end_ns;
        self.lost_ns = self.lost_ns.saturating_add(lost_ns);
        self.weight = self.weight.saturating_add(weight);
        self.last.push_back((cause, weight));
        if self.last.len() > CAUSE_BLOCKS {
            self.last.pop_front();
        }
    }

    /// The cause with the most weight in the last blocks. Of two with equal weight it is the older, so a brief
    /// interruption does not replace it.
    pub fn cause(&self) -> Option<LagCause> {
        let weight_of = |cause: LagCause| {
            self.last.iter().filter(|(known, _)| *known == cause).map(|(_, weight)| weight).sum::<u32>()
        };
        self.last.iter().rev().max_by_key(|(cause, _)| weight_of(*cause)).map(|(cause, _)| *cause)
    }
}
