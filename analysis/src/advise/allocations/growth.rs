//! How each size grows with the batch, from the histories of two batch sizes.
//!
//! Enters: the requests of two histories of one job. Leaves: what each request of the second would be with another batch.
//! Invariants: a size that both have as often is constant; one that the first has in the ratio of the batches grows with the batch,
//! in its square with the square, as the losses of contrastive models; what the first has in no form, as work space whose
//! size a library chooses, is taken to grow with the batch, which asks for more memory rather than for less.

use crate::import::allocator_history::AllocationHistory;
use std::collections::HashMap;

/// Sizes that are no longer than this and occur in both histories are constant: scalars and statistics.
const SMALL: u64 = 1 << 20;
/// No request is larger; an allocator refuses it.
const MOST: u64 = 1 << 60;

/// How a size follows the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Power {
    Constant,
    Linear,
    Square,
}

/// The sizes of a history with another batch.
#[derive(Debug)]
pub(super) struct Growth {
    batch: u64,
    powers: HashMap<u64, Power>,
}

impl Growth {
    /// How the sizes of `large` follow the batch.
    pub fn of(small: &AllocationHistory, large: &AllocationHistory) -> Self {
        let (before, now) = (counted(small), counted(large));
        let ratio = (u128::from(small.batch_size), u128::from(large.batch_size));
        let power = |size: u64, count: u64| {
            let often = |size: Option<u64>| size.and_then(|size| before.get(&size)).copied();
            let (same, linear) = (often(Some(size)), often(scaled(size, ratio)));
            match (same, linear) {
                (Some(_), _) if size <= SMALL => Power::Constant,
                (Some(_), None) => Power::Constant,
                (Some(same), Some(linear)) if same.abs_diff(count) < linear.abs_diff(count) => Power::Constant,
                (None, None) => {
                    let square = often(scaled(size, (ratio.0 * ratio.0, ratio.1 * ratio.1)));
                    if square.is_some() { Power::Square } else { Power::Linear }
                }
                _ => Power::Linear,
            }
        };
        let powers = now.iter().map(|(size, count)| (*size, power(*size, *count))).collect();
        Self { batch: large.batch_size, powers }
    }

    /// A request of the second history with this batch, bytes.
    pub fn with(&self, size: u64, batch: u64) -> u64 {
        let (size, batch, own) = (u128::from(size), u128::from(batch), u128::from(self.batch));
        let of = |size: u128| size.saturating_mul(batch).div_ceil(own);
        let grown = match self.powers.get(&u64::try_from(size).unwrap_or(MOST)) {
            Some(Power::Constant) => size,
            Some(Power::Square) => of(of(size)),
            Some(Power::Linear) | None => of(size),
        };
        u64::try_from(grown).unwrap_or(MOST).min(MOST)
    }
}

/// A size times a ratio, if that is whole.
fn scaled(size: u64, (by, over): (u128, u128)) -> Option<u64> {
    let product = u128::from(size).checked_mul(by)?;
    (product % over == 0).then(|| u64::try_from(product / over).ok()).flatten()
}

/// How often each size is requested.
fn counted(of: &AllocationHistory) -> HashMap<u64, u64> {
    let mut counts = HashMap::new();
    for (size, _) in of.events.0.iter().filter_map(|event| event.request) {
        *counts.entry(size).or_default() += 1;
    }
    counts
}
