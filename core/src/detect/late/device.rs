//! The rule by what the GPUs did: a GPU that waits in a collective is busy and uses no tensor cores, one that computes longer uses
//! them more, and one whose host is late is less busy.
//!
//! Enters: each GPU's readings, and the ranks of a block of steps. Leaves: the one rank that is late in it, and the cause. Where
//! two are late, or the readings do not decide, nobody.

use super::block::LateBlock;
use super::lag::{Found, SLOWDOWN};
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::detect::finding::{Certainty, Evidence, LagCause};
use crate::detect::peers::{Group, Member};
use crate::detect::view::{View, median, ratio};
use crate::gpu::{Medium, SLOWDOWN_MASK};
use std::collections::VecDeque;

/// How long readings are kept: for a block of steps of a few seconds.
const KEPT_NS: i64 = 60 * SECOND_NS;
/// Readings of a GPU in a block that are needed at least.
const FEWEST_READINGS: usize = 4;
/// How far before it what a reading says may have begun.
const WINDOW_NS: i64 = 250 * MILLISECOND_NS;
/// A late host must make steps take at least this many times as long as they would without the lag. It is more than
/// [`SLOWDOWN`], because where no host keeps up with its GPU, as under FSDP2, one GPU is less busy by chance.
const HOST_SLOWDOWN: f64 = 1.15;
/// Tensor cores that are active at least this many times as much as the peers' show that a rank computes longer.
const MORE_TENSOR: f64 = 1.2;
/// A GPU that is busy at most this part of the time that its peers are shows that its host is late.
const LESS_BUSY: f64 = 0.85;
/// A rank that computes longer is busy for at least this part of the time that its peers are.
const AS_BUSY: f64 = 0.9;
/// Below this the tensor cores are hardly used, and their ratio says nothing.
const LEAST_TENSOR: f64 = 0.005;

/// The readings of each GPU, oldest first.
#[derive(Debug, Default)]
pub(super) struct Readings(Vec<VecDeque<Reading>>);

/// What one reading says of a GPU.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at_ns: i64,
    tensor: f64,
    busy: f64,
    is_throttled: bool,
}

/// What a GPU did on average.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mean {
    tensor: f64,
    busy: f64,
    is_throttled: bool,
}

impl Readings {
    /// Takes the readings of a turn.
    pub fn take(&mut self, view: &View<'_>) {
        self.0.resize_with(view.gpus.len(), VecDeque::new);
        for (gpu, readings) in view.gpus.iter().zip(&mut self.0) {
            let latest = gpu.medium().filter(|latest| readings.back().is_none_or(|last| last.at_ns < latest.at_ns));
            readings.extend(latest.and_then(|latest| Reading::of(latest.at_ns, &latest.reading)));
            while readings.front().is_some_and(|oldest| view.now_ns - oldest.at_ns > KEPT_NS) {
                readings.pop_front();
            }
        }
    }

    /// Whether it is known what a GPU did lately.
    pub fn knows(&self, gpu: usize) -> bool {
        self.0.get(gpu).is_some_and(|readings| !readings.is_empty())
    }

    /// What the GPU of a rank did on average between two moments, but for some stretches; `None` if it has several, or too few
    /// readings.
    pub fn mean_of(
        &self,
        view: &View<'_>,
        member: &Member<'_>,
        (begin_ns, end_ns): (i64, i64),
        without: &[(i64, i64)],
    ) -> Option<Mean> {
        let [gpu] = member.step.gpus[..] else { return None };
        if view.rank_on(gpu).is_none_or(|rank| rank.key != member.step.key) {
            return None;
        }
        let is_without =
            |at_ns: i64| without.iter().any(|(from_ns, to_ns)| (*from_ns..=*to_ns + WINDOW_NS).contains(&at_ns));
        let is_meant = |at_ns: i64| (begin_ns..=end_ns).contains(&at_ns) && !is_without(at_ns);
        let readings = self.0.get(gpu)?.iter().filter(|reading| is_meant(reading.at_ns));
        let (mut sum, mut count, mut throttled) = (Mean::default(), 0, 0);
        for reading in readings {
            (sum.tensor, sum.busy) = (sum.tensor + reading.tensor, sum.busy + reading.busy);
            count += 1;
            throttled += usize::from(reading.is_throttled);
        }
        #[allow(clippy::cast_precision_loss, reason = "readings of a minute")]
        let of = |sum: f64| sum / count as f64;
        let is_throttled = throttled * 2 >= count;
        (count >= FEWEST_READINGS).then(|| Mean { tensor: of(sum.tensor), busy: of(sum.busy), is_throttled })
    }
}

impl Reading {
    fn of(at_ns: i64, medium: &Medium) -> Option<Self> {
        let (tensor, busy) = (medium.activity.tensor_active_ratio?, medium.utilization_ratio?);
        let is_throttled = medium.throttle_reasons.is_some_and(|reasons| reasons & SLOWDOWN_MASK != 0);
        Some(Self { at_ns, tensor, busy, is_throttled })
    }
}

/// What the readings of one block show.
pub(super) enum Verdict<'a> {
    /// No rank is late by enough.
    Even,
    /// One is.
    Late(Found<'a>),
    /// More than one is: which they wait for is not known.
    Unclear,
}

/// How the GPU of a rank differs from those of the others.
struct Lag {
    position: usize,
    cause: LagCause,
    /// The part of a step that the lag takes at most.
    share: f64,
    own: Mean,
    /// The medians of the others.
    tensor: f64,
    busy: f64,
}

impl Lag {
    /// Whether the rank at a position is late, by its GPU alone.
    fn of(position: usize, own: Mean, means: &[Mean]) -> Option<Self> {
        let others = |of: fn(&Mean) -> f64| {
            let others = means.iter().enumerate().filter(|(other, _)| *other != position);
            let mut others: Vec<f64> = others.map(|(_, mean)| of(mean)).collect();
            others.sort_unstable_by(f64::total_cmp);
            others.get(others.len().checked_sub(1)? / 2).copied()
        };
        let (tensor, busy) = (others(|mean| mean.tensor)?, others(|mean| mean.busy)?);
        let tensor_ratio = (tensor >= LEAST_TENSOR).then(|| own.tensor / tensor);
        let busy_ratio = (busy > 0.0).then(|| own.busy / busy)?;
        let (cause, share) = if busy_ratio <= LESS_BUSY {
            (LagCause::Host, busy - own.busy)
        } else if busy_ratio >= AS_BUSY && tensor_ratio.is_some_and(|ratio| ratio >= MORE_TENSOR) {
            let cause = if own.is_throttled { LagCause::Clocks } else { LagCause::Computes };
            (cause, 1.0 - tensor / own.tensor)
        } else {
            return None;
        };
        Some(Self { position, cause, share, own, tensor, busy })
    }

    /// What was measured, in words.
    fn numbers(&self, first: Option<u64>) -> String {
        let from = first.map_or_else(|| "the last steps".to_owned(), |first| format!("the steps from {first} on"));
        let percent = |share: f64| share * 100.0;
        format!(
            "In {from} the tensor cores of its GPU were active in {:.1} % of the time, those of the other ranks in {:.1} % at \
             the median; the GPU was busy in {:.0} % of it, theirs in {:.0} %. The steps of all ranks take the \
             same time, because they wait for each other.",
            percent(self.own.tensor),
            percent(self.tensor),
            percent(self.own.busy),
            percent(self.busy),
        )
    }
}

/// Which rank is late in a block of steps by what the GPUs did, if it is one.
pub(super) fn judge<'a>(view: &View<'_>, group: &'a Group<'_>, means: &[Mean], block: &LateBlock) -> Verdict<'a> {
    let mut late = means.iter().enumerate().filter_map(|(position, own)| Lag::of(position, *own, means));
    let (first, second) = (late.next(), late.next());
    let Some(lag) = first else { return Verdict::Even };
    let Some(member) = group.members.get(lag.position).filter(|_| second.is_none()) else { return Verdict::Unclear };
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a part of a step")]
    let most_ns = (block.step_ns as f64 * lag.share) as i64;
    // What is done in the late part may use the tensor cores more than the rest. What steps took before is the better bound.
    let longer_ns = median(block.healthy_ns.iter().copied()).map(|healthy_ns| block.step_ns - healthy_ns);
    let lag_ns = longer_ns.map_or(most_ns, |ns| ns.min(most_ns));
    let least = if lag.cause == LagCause::Host { HOST_SLOWDOWN } else { SLOWDOWN };
    let slows = ratio(block.step_ns, block.step_ns - lag_ns).is_some_and(|slowdown| slowdown >= least);
    if lag_ns < view.settings.lag_ns || !slows {
        return Verdict::Even;
    }
    Verdict::Late(Found {
        member,
        phase: None,
        cause: Some(lag.cause),
        lag_ns,
        collected_ns: 0,
        host_share: 0.0,
        step_ns: block.step_ns,
        lost_ns: lag_ns.saturating_mul(i64::try_from(block.steps).unwrap_or(i64::MAX)),
        begin_ns: block.begin_ns,
        // The next block may take as long.
        hold_ns: 2 * (view.now_ns - block.begin_ns),
        evidence: vec![
            Evidence { name: "tensor_active_ratio", value: lag.own.tensor },
            Evidence { name: "peers_tensor_active_ratio", value: lag.tensor },
            Evidence { name: "busy_ratio", value: lag.own.busy },
            Evidence { name: "peers_busy_ratio", value: lag.busy },
        ],
        numbers: lag.numbers(block.first),
        certainty: Certainty::Suspected,
    })
}
