//! What is advised, for programs and for people.

use serde_json::Value;

/// An answer in both forms.
pub(super) struct FileAdvice {
    pub json: Value,
    pub text: String,
}
