//! Which part of a recording is read, and the condition of a query for its rows.

/// A part of a recording. Times are nanoseconds since its begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Part {
    /// Where it begins; `None` for the recording's begin.
    pub from_ns: Option<i64>,
    /// Where it ends; `None` for the recording's end.
    pub until_ns: Option<i64>,
}

impl Part {
    /// The whole recording.
    pub const WHOLE: Self = Self { from_ns: None, until_ns: None };
}

/// Times of a file, nanoseconds of Unix time, from the first on and before the last.
pub(super) type Span = (i64, i64);

/// All times.
pub(super) const ALWAYS: Span = (i64::MIN + 1, i64::MAX);

/// The condition of a query that a row's time is one of these. Without a part there is none, so that a time that is no number is
/// reported as such.
pub(super) fn within((from_ns, to_ns): Span) -> String {
    if (from_ns, to_ns) == ALWAYS { "1".to_owned() } else { format!("at_ns >= {from_ns} AND at_ns < {to_ns}") }
}
