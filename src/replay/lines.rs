//! Files read line by line, packed or not, with what could not be read told by file and line.

use super::folder::refuse;
use crate::source::OpenError;
use flate2::read::MultiGzDecoder;
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Cursor};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many skipped lines are kept for people to look at; all are counted.
const KEPT: usize = 1_000;

/// A line that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub message: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.message)
    }
}

/// The lines that could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SkippedLines {
    /// How many there are.
    pub count: usize,
    /// The first thousand of them.
    pub first: Vec<Skipped>,
}

impl SkippedLines {
    fn add(&mut self, file: &Path, line: usize, message: String) {
        self.count += 1;
        if self.first.len() < KEPT {
            self.first.push(Skipped { file: file.to_owned(), line, message });
        }
    }
}

/// A whole file, as it is stored: packed if it was packed.
#[derive(Debug, Clone)]
pub(super) struct File {
    path: PathBuf,
    stored: Arc<[u8]>,
}

impl File {
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let stored = fs::read(path).map_err(|error| refuse("recording_unreadable", path, error))?;
        Ok(Self { path: path.to_owned(), stored: stored.into() })
    }

    /// Its lines with their numbers from 1, without blank ones; a line that is no text, and the place from which a
    /// packed file is broken, as an error.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, Result<String, String>)> + Send + use<> {
        let stored = Cursor::new(Arc::clone(&self.stored));
        let mut reader: Box<dyn BufRead + Send> = if self.path.extension().is_some_and(|ending| ending == "gz") {
            Box::new(BufReader::new(MultiGzDecoder::new(stored)))
        } else {
            Box::new(stored)
        };
        let mut broken = false;
        let read = move || {
            let mut bytes = Vec::new();
            match reader.read_until(b'\n', &mut bytes) {
                _ if broken => None,
                Ok(0) => None,
                Ok(_) => Some(String::from_utf8(bytes).map_err(|_| "this is no UTF-8 text".to_owned())),
                Err(error) => {
                    broken = true;
                    Some(Err(format!("the file cannot be read from here on: {error}")))
                }
            }
        };
        let blank = |line: &Result<String, String>| line.as_ref().is_ok_and(|text| text.trim().is_empty());
        std::iter::from_fn(read).zip(1..).map(|(line, number)| (number, line)).filter(move |(_, line)| !blank(line))
    }

    /// All lines that `parse` takes. A line that it gives `None` for, such as a comment, is passed over.
    pub(super) fn parse<T>(
        &self,
        skipped: &mut SkippedLines,
        parse: impl Fn(&str) -> Result<Option<T>, String>,
        mut take: impl FnMut(T),
    ) -> Result<(), OpenError> {
        let mut taken = 0_usize;
        let mut first_problem = None;
        for (number, line) in self.lines() {
            match line.and_then(|text| parse(text.trim())) {
                Ok(Some(good)) => {
                    taken += 1;
                    take(good);
                }
                Ok(None) => {}
                Err(message) => {
                    first_problem.get_or_insert_with(|| format!("line {number}: {message}"));
                    skipped.add(&self.path, number, message);
                }
            }
        }
        let problem = || first_problem.unwrap_or_else(|| "the file is empty".to_owned());
        if taken > 0 {
            Ok(())
        } else {
            Err(refuse("recording_unreadable", &self.path, format!("no line is good: {}", problem())))
        }
    }
}
