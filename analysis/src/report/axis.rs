//! Which recordings share a clock, so that one time axis shows what happened at the same time.
//!
//! Enters: reports. Leaves: for those that overlap the first one with a clock, directly or through others, how much
//! later than the earliest of them each began. Invariant: only Unix times are compared; all other recordings begin at
//! 0.

use super::model::Report;
use highwater_engine::recording::Times;

/// Finds the recordings that overlap the first one with a clock, directly or through others. Returns how much later than the
/// earliest of them each one began, nanoseconds; `None` for other recordings, and for all if nothing overlaps the first one.
pub(super) fn offsets(reports: &[Report]) -> Vec<Option<i64>> {
    let has_clock = |report: &&Report| report.origin.times == Times::Unix;
    let mut shared = vec![false; reports.len()];
    let Some(first) = reports.iter().position(|report| has_clock(&report)) else { return vec![None; reports.len()] };
    let (mut begin_ns, mut end_ns) = (reports[first].begin_ns, reports[first].end_ns);
    shared[first] = true;
    // A recording that joins widens the interval, so all others are checked again.
    while let Some(next) = (0..reports.len()).find(|nth| {
        let report = &reports[*nth];
        !shared[*nth] && has_clock(&report) && report.begin_ns <= end_ns && report.end_ns >= begin_ns
    }) {
        shared[next] = true;
        (begin_ns, end_ns) = (begin_ns.min(reports[next].begin_ns), end_ns.max(reports[next].end_ns));
    }
    let is_alone = shared.iter().filter(|shared| **shared).count() < 2;
    let offset =
        |(report, shared): (&Report, &bool)| (*shared && !is_alone).then(|| report.begin_ns.saturating_sub(begin_ns));
    reports.iter().zip(&shared).map(offset).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::hand;

    #[test]
    fn recordings_that_ran_at_the_same_time_share_an_axis() {
        let at = |times: Times, begin_ns: i64, end_ns: i64| {
            let mut report = hand::report("it", &[]);
            (report.origin.times, report.begin_ns, report.end_ns) = (times, begin_ns, end_ns);
            report
        };
        let unix = |begin_ns, end_ns| at(Times::Unix, begin_ns, end_ns);
        // The third reaches the first through the fourth; the fifth is of another day, the sixth has no times of day.
        let reports = [
            unix(1_000, 2_000),
            unix(1_500, 1_600),
            unix(3_100, 3_200),
            unix(900, 3_100),
            unix(90_000, 91_000),
            at(Times::Relative, 1_200, 1_300),
        ];
        assert_eq!(offsets(&reports), [Some(100), Some(600), Some(2_200), Some(0), None, None]);
        assert_eq!(offsets(&[unix(0, 10), unix(20, 30)]), [None, None], "before and after");
        assert_eq!(offsets(&[at(Times::Readings, 0, 9), unix(0, 10), unix(5, 30)]), [None, Some(0), Some(5)]);
        assert_eq!(offsets(&[unix(0, 10)]), [None]);
    }
}
