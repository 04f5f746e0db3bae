//! What spans are made with, beside what ended.

use highwater_core::detect::Finding;
use highwater_core::jobs::Mark;

/// What spans need beside what ended.
#[derive(Default)]
pub struct Context<'a> {
    /// Now, nanoseconds of the timeline.
    pub now_ns: i64,
    /// What to add to get Unix time.
    pub shift_ns: i64,
    /// What jobs marked of late.
    pub marks: &'a [Mark],
    /// What was found of late.
    pub findings: &'a [Finding],
}
