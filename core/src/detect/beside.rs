//! What lies on a GPU beside its rank's allocator: memory of the rank's own process outside of it, and other processes; and what
//! usually does.
//!
//! Enters: steps as they end. Leaves: an [`Excess`], if far more lies there than in earlier steps of the rank. Only steps in which the
//! GPU was not full count as usual. Invariant: what is kept of a rank is bounded, and thinned over its whole run, so that growth does not
//! become usual. Absent on purpose: ranks with several GPUs, whose memory outside the allocator is not known for each.

use super::steps::Step;
use super::view::View;
use crate::clock::SECOND_NS;
use crate::phases::RankKey;
use crate::thinned::Thinned;
use std::collections::BTreeMap;

/// Values of a run that are kept.
const MOST_VALUES: usize = 64;
/// And that must be known.
const FEWEST_VALUES: usize = 8;
/// For how long a step says what lay outside the allocator.
const FRESH_NS: i64 = 10 * SECOND_NS;
/// What is more by less than this is no cause.
const LEAST_BYTES: u64 = 512 << 20;

/// What is known of each rank.
#[derive(Debug, Default)]
pub(super) struct Beside(BTreeMap<RankKey, Known>);

#[derive(Debug, Default)]
struct Known {
    outside: Values,
    others: Values,
    /// The end of the last step in which the GPU was full, and the most that lay outside the allocator at the ends of such steps of late.
    full_outside: Option<(i64, u64)>,
}

/// Values over a whole run.
#[derive(Debug, Default)]
struct Values(Thinned<u64, MOST_VALUES>);

/// More than usual on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Excess {
    pub holder: Holder,
    pub bytes: u64,
    pub usual_bytes: u64,
}

/// Who holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// In the rank's process, outside its allocator.
    Outside,
    /// In other processes.
    Others,
}

impl Beside {
    /// Takes the steps of a turn.
    pub fn read(&mut self, view: &View<'_>) {
        self.0.retain(|key, _| view.knows(key));
        for step in view.steps {
            self.take(view, step);
        }
    }

    fn take(&mut self, view: &View<'_>, step: &Step) {
        let [gpu] = step.gpus[..] else { return };
        let Some(state) = view.gpus.get(gpu).filter(|_| view.rank_on(gpu).is_some_and(|rank| rank.key == step.key))
        else {
            return;
        };
        let known = self.0.entry(step.key.clone()).or_default();
        let (Some(usable_bytes), Some(peak_bytes)) = (state.usable_bytes(), step.peak_bytes) else { return };
        if usable_bytes.saturating_sub(peak_bytes) < view.settings.headroom_bytes {
            // In the last full step it may have been freed before the step's end.
            let most = step.outside_bytes.max(known.outside_when_full(step.end_ns));
            known.full_outside = most.map(|bytes| (step.end_ns, bytes));
            return;
        }
        let pid = view.rank(&step.key).and_then(|rank| rank.pid);
        known.outside.push(step.outside_bytes);
        known.others.push(state.used_by_others_bytes(pid, peak_bytes));
    }

    /// What is more than usual on a GPU with `free_bytes` left, and would leave enough if it were not.
    pub fn excess(&self, view: &View<'_>, gpu: usize, free_bytes: u64) -> Option<Excess> {
        let (rank, state) = (view.rank_on(gpu)?, view.gpus.get(gpu)?);
        let known = self.0.get(&rank.key)?;
        let used_bytes = state.usable_bytes()?.saturating_sub(free_bytes);
        let others = known.others.excess(Holder::Others, state.used_by_others_bytes(rank.pid, used_bytes));
        let outside = known.outside.excess(Holder::Outside, known.outside_when_full(view.now_ns));
        let all = [outside, others];
        let is_enough = |excess: &Excess| {
            excess.more_bytes() >= LEAST_BYTES.max(view.settings.headroom_bytes.saturating_sub(free_bytes))
        };
        all.into_iter().flatten().filter(is_enough).max_by_key(Excess::more_bytes)
    }
}

impl Known {
    /// What lay outside the allocator in the last full steps, if that is not too long ago.
    fn outside_when_full(&self, now_ns: i64) -> Option<u64> {
        self.full_outside.filter(|(end_ns, _)| now_ns - end_ns < FRESH_NS).map(|(_, bytes)| bytes)
    }
}

impl Excess {
    fn more_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.usual_bytes)
    }
}

impl Values {
    fn push(&mut self, value: Option<u64>) {
        value.into_iter().for_each(|value| self.0.push(value));
    }

    fn excess(&self, holder: Holder, bytes: Option<u64>) -> Option<Excess> {
        let mut sorted = self.0.values().to_vec();
        sorted.sort_unstable();
        let usual_bytes = *sorted.get(sorted.len() / 2).filter(|_| sorted.len() >= FEWEST_VALUES)?;
        Some(Excess { holder, bytes: bytes?, usual_bytes })
    }
}
