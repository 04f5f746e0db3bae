//! What detectors look at, brought together once a turn.
//!
//! Enters: GPUs, rings, what ended, and who is running. Leaves: a [`View`] of one moment. Invariant: nothing in it
//! reads the system, so that a replay shows the same views as the live run did.

use super::finding::{Bytes, Evidence, Subject, number};
use super::settings::Settings;
use super::steps::Step;
use crate::gpu::GpuState;
use crate::phases::{Flush, RankKey};
use crate::ring;

/// One rank as it is now.
#[derive(Debug, Clone)]
pub(super) struct RankNow {
    pub key: RankKey,
    /// Positions of its GPUs; empty where they are not known.
    pub gpus: Vec<usize>,
    /// The step that it is in.
    pub step: Option<OpenStep>,
    /// Retries of its allocator so far.
    pub retries: Option<u64>,
}

/// A step that has begun and not ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenStep {
    pub number: Option<u64>,
    pub begin_ns: i64,
    /// Retries of the allocator at its begin.
    pub retries: Option<u64>,
}

/// One moment.
pub(super) struct View<'a> {
    pub now_ns: i64,
    pub settings: &'a Settings,
    pub gpus: &'a [GpuState],
    pub rings: &'a [ring::Reader],
    /// Steps that ended since the last view.
    pub steps: &'a [Step],
    pub ranks: &'a [RankNow],
    /// Falls and regrowths since the last view, each with the position of its GPU.
    pub flushes: &'a [(usize, Flush)],
}

impl View<'_> {
    /// The rank that runs on a GPU, where exactly one does.
    pub fn rank_on(&self, gpu: usize) -> Option<&RankNow> {
        let mut on = self.ranks.iter().filter(|rank| rank.gpus.contains(&gpu));
        on.next().filter(|_| on.next().is_none())
    }

    /// `GPU 3`, by its index.
    pub fn gpu_name(&self, gpu: usize) -> String {
        let index = self.gpus.get(gpu).map_or("?", |state| state.device.index.as_str());
        format!("GPU {index}")
    }

    /// A GPU, with the rank that runs on it where exactly one does.
    pub fn subject_of(&self, gpu: usize) -> Subject {
        let (job, rank) = self.rank_on(gpu).map(|rank| rank.key.clone()).unzip();
        Subject { gpu: Some(gpu), job, rank }
    }

    /// The step that the one rank on a GPU is in.
    pub fn step_on(&self, gpu: usize) -> Option<u64> {
        self.rank_on(gpu)?.step?.number
    }

    /// Whether a rank still speaks: what is kept of others is forgotten.
    pub fn knows(&self, key: &RankKey) -> bool {
        knows(self.ranks, key)
    }
}

/// Whether a rank is among these, which are in the order of their keys.
pub(super) fn knows(ranks: &[RankNow], key: &RankKey) -> bool {
    ranks.binary_search_by(|rank| rank.key.cmp(key)).is_ok()
}

/// Since when something is so of each GPU.
#[derive(Debug, Default)]
pub(super) struct Since(Vec<Option<i64>>);

impl Since {
    /// Notes whether it is so of a GPU now, and if, since when it would be at the latest. Returns since when it has been.
    pub fn note(&mut self, gpu: usize, latest_ns: Option<i64>) -> Option<i64> {
        if self.0.len() <= gpu {
            self.0.resize(gpu + 1, None);
        }
        let since_ns = self.0.get_mut(gpu)?;
        *since_ns = latest_ns.map(|latest_ns| since_ns.unwrap_or(latest_ns));
        *since_ns
    }
}

/// Evidence of bytes.
pub(super) fn bytes(name: &'static str, bytes: u64) -> Evidence {
    Evidence { name, value: number(bytes) }
}

/// Bytes for people.
pub(super) fn human(bytes: u64) -> Bytes {
    Bytes(number(bytes))
}

/// The median; `None` of nothing.
pub(super) fn median(values: impl IntoIterator<Item = i64>) -> Option<i64> {
    let mut values: Vec<i64> = values.into_iter().collect();
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// One duration over another; `None` over nothing.
#[allow(clippy::cast_precision_loss, reason = "a ratio of durations")]
pub(super) fn ratio(part_ns: i64, of_ns: i64) -> Option<f64> {
    (of_ns > 0).then(|| part_ns as f64 / of_ns as f64)
}
