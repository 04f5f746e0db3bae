//! The owners of a recording's jobs: the table `jobs`, which older files do not have.
//!
//! The other tables identify a job by a text: its name, or its name with its owner if another job of the file already has that
//! name as its text. So in a file of one owner, each text is just the name.

use super::problem::FileProblem;
use super::rows::{RecordingReader, text};
use highwater_core::jobs::{JobId, Scope};
use highwater_core::source::OpenError;
use std::collections::{BTreeMap, BTreeSet};

/// The most jobs of one recording that are read with their owners.
const MOST_JOBS: usize = 1 << 14;

/// The texts of the jobs of a file that is being written.
#[derive(Debug, Default)]
pub(super) struct Texts {
    of: BTreeMap<JobId, Text>,
    taken: BTreeSet<String>,
}

#[derive(Debug)]
struct Text {
    text: String,
    /// Whether the file's table has it, unless its transaction is rolled back.
    is_written: bool,
}

impl Texts {
    /// The job's text, and whether its row is still to be written.
    pub fn of(&mut self, id: &JobId) -> (String, bool) {
        let taken = &mut self.taken;
        let text = self.of.entry(id.clone()).or_insert_with(|| {
            let name = id.name().to_string();
            let text = if taken.contains(&name) { id.text() } else { name };
            taken.insert(text.clone());
            Text { text, is_written: false }
        });
        (text.text.clone(), !std::mem::replace(&mut text.is_written, true))
    }

    /// A transaction was rolled back: any row may be lost.
    pub fn roll_back(&mut self) {
        self.of.values_mut().for_each(|text| text.is_written = false);
    }
}

impl RecordingReader {
    /// The jobs by the text that the other tables have. A job that is not among them has that name, and no known owner.
    pub(super) fn jobs(&mut self) -> Result<BTreeMap<String, JobId>, OpenError> {
        if !self.has_table("jobs") {
            return Ok(BTreeMap::new());
        }
        let query = "SELECT job, name, namespace, user FROM jobs";
        let rows = self.rows("jobs", query, 0, MOST_JOBS, |row| {
            let needed = |at| text(row, at)?.ok_or(FileProblem::Missing("a name".into()));
            let (job, name) = (needed(0)?, needed(1)?);
            let scope = Scope::of(text(row, 2)?.as_deref(), text(row, 3)?.as_deref());
            Ok((job, JobId::new(scope, &name)))
        })?;
        Ok(rows.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_its_name_unless_another_of_the_file_has_it() {
        let (mut texts, of) = (Texts::default(), |user| JobId::new(Scope::of(None, Some(user)), "train"));
        assert_eq!(texts.of(&of("1")), ("train".to_owned(), true));
        assert_eq!(texts.of(&of("2")), ("2/train".to_owned(), true));
        assert_eq!([texts.of(&of("1")), texts.of(&of("2"))].map(|(_, is_new)| is_new), [false, false]);
        texts.roll_back();
        assert_eq!(texts.of(&of("2")), ("2/train".to_owned(), true), "its row may be lost");
    }
}
