//! The context in which spans are made.

use super::metrics::unix;
use highwater_core::detect::Finding;
use highwater_core::jobs::Mark;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What spans need besides the steps and phases that ended.
#[derive(Default)]
pub struct Context<'a> {
    /// Now, nanoseconds of the timeline.
    pub now_ns: i64,
    /// What to add to get Unix time.
    pub shift_ns: i64,
    /// Recent marks of jobs.
    pub marks: &'a [Mark],
    /// Recent findings.
    pub findings: &'a [Finding],
}

impl Context<'_> {
    /// A time of the timeline in the SDK's form.
    pub(super) fn time(&self, at_ns: i64) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(unix(at_ns + self.shift_ns))
    }
}
