//! What the user says of a log that does not say it.

use super::columns::Columns;
use highwater_engine::recording::FileProblem;

/// What the user says of a log that does not say it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// The names of its columns, in their order; `-` for one that does not matter.
    pub columns: Option<Vec<String>>,
    /// The time from one poll to the next, nanoseconds, where the readings have no times.
    pub period_ns: Option<i64>,
}

impl Hints {
    /// Columns from a list with commas.
    ///
    /// # Errors
    /// None of them is the memory in use.
    pub fn columns_of(list: &str) -> Result<Vec<String>, FileProblem> {
        let names: Vec<String> = list.split(',').map(|name| name.trim().to_owned()).collect();
        match Columns::of_names(names.iter().map(String::as_str)).has_memory() {
            true => Ok(names),
            false => Err(FileProblem::malformed(
                "one of the columns must be memory.used, or memory.free beside memory.total",
            )),
        }
    }
}
