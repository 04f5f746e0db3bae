//! How large an exposition becomes.

use crate::metrics::{Buckets, Family, Value};
use highwater_core::histogram::BOUNDS_TO_A_COARSE_ONE;

/// A family with more histograms than this exports every fourth bucket. It has room for 32 phases of each of 8 ranks.
pub(super) const MOST_FINE: usize = 256;

/// The number of a family's lines beside its two comments.
pub(super) fn lines(family: &Family) -> usize {
    let of_sample = match family.samples.first().map(|sample| &sample.value) {
        Some(Value::Histogram(counts)) => {
            let kept = kept(family);
            kept.of(counts.bounds_s).len() / kept.step + 4
        }
        _ => 1,
    };
    of_sample * family.samples.len()
}

/// The approximate size of a family's text: 90 bytes for the line of each value, and its two comment lines.
pub(super) fn bytes(family: &Family) -> usize {
    256 + 90 * lines(family)
}

/// Which buckets of a family are exported: every `step`-th, if any.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) step: usize,
    has_any: bool,
}

impl Kept {
    /// Those to take each `step`-th of.
    pub(super) fn of<T>(self, all: &[T]) -> &[T] {
        if self.has_any { all } else { &[] }
    }
}

/// Which buckets of a family are exported, beside the one of all observations.
pub(super) fn kept(family: &Family) -> Kept {
    let is_fine = family.buckets == Buckets::Fine && family.samples.len() <= MOST_FINE;
    Kept { step: if is_fine { 1 } else { BOUNDS_TO_A_COARSE_ONE }, has_any: family.buckets != Buckets::None }
}
