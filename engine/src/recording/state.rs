//! The state of a recording.

use serde::Serialize;
#[cfg(feature = "testing")]
use utoipa::ToSchema;

/// The state of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "testing", derive(ToSchema))]
#[cfg_attr(feature = "testing", schema(as = CaptureState))]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It is being written.
    Writing,
    /// It covers all of its interval.
    Complete,
    /// It ended early.
    CutShort,
    /// It could not be written further.
    Failed,
    /// The daemon was killed while it was written.
    Interrupted,
    /// It cannot be read.
    Unreadable,
}

impl State {
    /// The label in the file and in the API.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            State::Writing => "writing",
            State::Complete => "complete",
            State::CutShort => "cut_short",
            State::Failed => "failed",
            State::Interrupted => "interrupted",
            State::Unreadable => "unreadable",
        }
    }

    /// The state of a finished file with this label. Any other label, `writing` included, is `Unreadable`.
    pub fn of(label: &str) -> Self {
        let all = [State::Complete, State::CutShort, State::Failed, State::Interrupted];
        all.into_iter().find(|state| state.label() == label).unwrap_or(State::Unreadable)
    }
}
