//! Compares the traces among several reports as ranks of one job.

use super::model::Report;
use crate::timeline::{self, Ranks, RanksError, Trace};

/// How long ranks waited for each other, or why that is not known; `None` if fewer than two of these are traces.
#[must_use]
pub fn ranks(reports: &[Report]) -> Option<Result<Ranks, RanksError>> {
    let traces: Vec<&Trace> = reports.iter().filter_map(|report| report.trace.as_ref()?.trace.as_ref()).collect();
    (traces.len() > 1).then(|| timeline::compare(&traces))
}
