//! Why a file cannot be read, or a line, a row or a value in it: one error for the product's own files and for those of others.

use std::borrow::Cow;

/// Why a file cannot be read, or a part of it. The text names no file and no line: its reader adds them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileProblem {
    /// A value that every line or row must have is absent.
    #[error("{0} is not known")]
    Missing(Cow<'static, str>),
    /// The value of a column has another type, or is out of range.
    #[error("{column}: {problem}")]
    Column {
        /// The column's name.
        column: String,
        /// What is wrong with the value.
        problem: String,
    },
    /// A text cannot be parsed as what stands there.
    #[error("`{text}` is not a {wanted}")]
    NotA {
        /// The text.
        text: String,
        /// What is expected.
        wanted: &'static str,
    },
    /// It does not follow the grammar of its format.
    #[error("{0}")]
    Malformed(Cow<'static, str>),
    /// It has more of something than is read.
    #[error("it has more than {most} {what}")]
    TooMany {
        /// The limit.
        most: u64,
        /// What is counted.
        what: &'static str,
    },
    /// It exceeds another limit; the text has the limit.
    #[error("{0}")]
    TooLarge(Cow<'static, str>),
    /// It is well-formed, and a file of something else.
    #[error("{0}")]
    Foreign(&'static str),
    /// It ends before it is complete.
    #[error("it ends in the middle, after {after} bytes")]
    CutShort {
        /// Bytes that were read.
        after: u64,
    },
    /// The system reported an error.
    #[error("it cannot be read after {after} bytes: {error}")]
    Unreadable {
        /// Bytes that were read.
        after: u64,
        /// The system's message.
        error: String,
    },
    /// A byte is not what its place requires.
    #[error("{problem} byte {at}")]
    Damaged {
        /// The text before the position.
        problem: &'static str,
        /// Bytes before it.
        at: u64,
    },
    /// It would have its reader execute something.
    #[error("it would have Python make or call {0}: a snapshot has only data, and nothing is executed")]
    Code(String),
}

impl FileProblem {
    /// A value that must be there is absent.
    pub fn missing(name: impl Into<Cow<'static, str>>) -> Self {
        Self::Missing(name.into())
    }

    /// It does not follow the grammar of its format.
    pub fn malformed(problem: impl Into<Cow<'static, str>>) -> Self {
        Self::Malformed(problem.into())
    }

    /// A text is not what is expected.
    #[must_use]
    pub fn not_a(wanted: &'static str, text: &str) -> Self {
        Self::NotA { text: text.to_owned(), wanted }
    }

    /// It has more than `most` of something.
    #[must_use]
    pub fn too_many(most: usize, what: &'static str) -> Self {
        Self::TooMany { most: most as u64, what }
    }

    /// The reason for which a file with this problem is refused as a whole.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooMany { .. } | Self::TooLarge(_) => "recording_too_large",
            _ => "recording_unreadable",
        }
    }
}
