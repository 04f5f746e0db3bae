//! How large an exposition becomes.

use crate::metrics::{Family, Value};
use highwater_core::histogram::BOUNDS_TO_A_COARSE_ONE;

/// A family with more histograms than this exports every fourth bucket. It has room for 32 phases of each of 8 ranks.
pub(super) const MOST_FINE: usize = 256;

/// The number of a family's lines beside its two comments.
pub(super) fn lines(family: &Family) -> usize {
    let of_sample = match family.samples.first().map(|sample| &sample.value) {
        Some(Value::Histogram(counts)) => counts.bounds_s.len() / bucket_step(family) + 4,
        _ => 1,
    };
    of_sample * family.samples.len()
}

/// The approximate size of a family's text: 90 bytes for the line of each value, and its two comment lines.
pub(super) fn bytes(family: &Family) -> usize {
    256 + 90 * lines(family)
}

/// Which buckets of a family are exported: 1 for all, 4 for every fourth.
pub(super) fn bucket_step(family: &Family) -> usize {
    if family.samples.len() > MOST_FINE { BOUNDS_TO_A_COARSE_ONE } else { 1 }
}
