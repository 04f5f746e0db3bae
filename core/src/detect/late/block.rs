//! The steps whose readings are compared with each other, and the blocks of them in a row in which one rank was late.

use crate::detect::finding::LagCause;
use crate::detect::view::{median, ratio};
use crate::phases::RankKey;
use std::collections::VecDeque;

/// The cause of a [`Run`] is the one with the most weight in this many of its last blocks.
const CAUSE_BLOCKS: usize = 4;
/// Steps are even if the longest but one takes at most this many times as long as the shortest.
const EVEN: f64 = 1.3;
/// Steps that take more than this many times as long as the median of their block are left out of it, if they are at most one in
/// [`RARE_OF`]. A rank that stops now and then, for a checkpoint that is not marked, is not late in each step; `slow_steps` reports such
/// steps.
const RARE: f64 = 2.0;
const RARE_OF: usize = 5;

/// The steps of a job whose readings are compared next.
#[derive(Debug, Default)]
pub(super) struct LateBlock {
    pub begin_ns: i64,
    /// The begin and end of each of its steps.
    pub spans_ns: Vec<(i64, i64)>,
    pub first: Option<u64>,
    /// The mean step of the last block that was long enough, and how many there were, without the rare ones.
    pub step_ns: i64,
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
    /// Takes the few steps out that were far longer than the others, and counts the others. Returns the begins and ends of those.
    pub fn take_rare(&mut self) -> Vec<(i64, i64)> {
        let whole_ns = self.spans_ns.first().zip(self.spans_ns.last()).map_or(0, |(first, last)| last.1 - first.0);
        let usual_ns = median(self.spans_ns.iter().map(length_ns)).unwrap_or(0);
        let is_rare = |span: &(i64, i64)| ratio(length_ns(span), usual_ns).is_some_and(|times| times > RARE);
        let (mut rare, rest): (Vec<_>, Vec<_>) = self.spans_ns.iter().copied().partition(is_rare);
        if rare.len() * RARE_OF > self.spans_ns.len() {
            rare.clear();
        } else {
            self.spans_ns = rest;
        }
        self.steps = self.spans_ns.len();
        let rest_ns = whole_ns - rare.iter().map(length_ns).sum::<i64>();
        self.step_ns = rest_ns / i64::try_from(self.steps).unwrap_or(i64::MAX).max(1);
        rare
    }

    /// Whether its steps are about as long.
    pub fn is_even(&self) -> bool {
        let mut lengths_ns: Vec<i64> = self.spans_ns.iter().map(length_ns).collect();
        lengths_ns.sort_unstable();
        let (shortest, longest) = (lengths_ns.first(), lengths_ns.iter().nth_back(1));
        shortest
            .zip(longest)
            .and_then(|(shortest, longest)| ratio(*longest, *shortest))
            .is_some_and(|times| times <= EVEN)
    }

    /// Why this rank is late, by the GPUs; `None` if the last block shows another rank, none, or ended before
    /// `since_ns`.
    pub fn cause_of(&self, key: &RankKey, since_ns: i64) -> Option<LagCause> {
        self.run.as_ref().filter(|run| run.key == *key && run.end_ns > since_ns)?.cause()
    }
}

fn length_ns((begin_ns, end_ns): &(i64, i64)) -> i64 {
    end_ns - begin_ns
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
