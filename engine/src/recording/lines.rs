//! Reads files line by line, packed or not, in UTF-8 or UTF-16, and reports lines that cannot be read by file and line.
//!
//! Invariant: only one line of a file is in memory, however large the file is and however far it unpacks; a file beyond
//! the bounds of `docs/recordings.md` is refused with its name and the bound.

use super::problem::FileProblem;
use super::utf16;
use flate2::read::MultiGzDecoder;
use highwater_core::source::OpenError;
use std::io::{self, BufRead as _, BufReader, Read};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs};

/// How many skipped lines are kept to be shown; all are counted.
const KEPT: usize = 1_000;
/// The longest message of one of them, characters: it may quote the line.
const LONGEST_MESSAGE: usize = 200;
/// The longest line, bytes.
const MOST_LINE_BYTES: usize = 1 << 20;
/// The most bytes of a file, unpacked.
const MOST_FILE_BYTES: u64 = 1 << 30;
/// A packed file may unpack to this many times its size, or to [`EASY_BYTES`] if that is more: a guard against gzip
/// bombs. Recordings pack 3 to 20 times.
const MOST_RATIO: u64 = 100;
const EASY_BYTES: u64 = 64 << 20;
/// The most lines of a file that are kept: 256 MiB of points.
const MOST_LINES: usize = 1 << 24;

/// An error about a recording that cannot be replayed.
pub fn refuse(reason: &'static str, path: &Path, problem: impl fmt::Display) -> OpenError {
    OpenError { reason, message: format!("{}: {problem}", path.display()) }
}

/// A line that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The file.
    pub file: PathBuf,
    /// The line or row, from 1; 0 if it is not one line.
    pub line: usize,
    /// What is wrong with it.
    pub message: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file.display(), self.message),
            line => write!(f, "{}:{line}: {}", self.file.display(), self.message),
        }
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
    /// Counts a line of a file that could not be used, and why; keeps the first thousand.
    pub fn add(&mut self, file: &Path, line: usize, problem: impl fmt::Display) {
        self.count += 1;
        if self.first.len() < KEPT {
            self.first.push(Skipped { file: file.to_owned(), line, message: shortened(&problem.to_string()) });
        }
    }
}

impl SkippedLines {
    /// Adds those of another part of the file.
    pub fn extend(&mut self, others: Self) {
        self.count += others.count;
        self.first.extend(others.first);
        self.first.truncate(KEPT);
    }

    /// Counts several things that could not be used, for one reason.
    pub fn add_many(&mut self, file: &Path, count: usize, message: &str) {
        self.add(file, 0, format_args!("{count} {message}"));
        self.count += count - 1;
    }
}

/// The first characters of a text.
pub fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// Replaces control characters, which a terminal would obey: names and lines come from untrusted files.
pub fn printable(text: &str) -> String {
    text.chars().map(|one| if one.is_control() { char::REPLACEMENT_CHARACTER } else { one }).collect()
}

fn shortened(message: &str) -> String {
    printable(&short(message, LONGEST_MESSAGE))
}

/// A file that stays open, so that each read sees the same file.
#[derive(Debug, Clone)]
pub struct LineFile {
    path: PathBuf,
    stored: Arc<fs::File>,
    most_bytes: u64,
    most_lines: usize,
}

/// A problem in a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// One line is wrong.
    Line(FileProblem),
    /// The whole file is wrong, and is read no further.
    File(FileProblem),
}

impl LineFile {
    /// Opens a regular file of text, plain or packed by gzip.
    ///
    /// # Errors
    /// It cannot be opened, or is no regular file.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let unreadable = |error| refuse("recording_unreadable", path, error);
        let special = || refuse("recording_unreadable", path, "is not a regular file");
        // Opening a FIFO would wait for a writer.
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(special());
        }
        let stored = fs::File::open(path).map_err(unreadable)?;
        let found = stored.metadata().map_err(unreadable)?;
        if !found.is_file() {
            return Err(special());
        }
        let unpacked = found.len().saturating_mul(MOST_RATIO).clamp(EASY_BYTES, MOST_FILE_BYTES);
        let most_bytes = if is_packed(path) { unpacked } else { MOST_FILE_BYTES };
        Ok(Self { path: path.to_owned(), stored: Arc::new(stored), most_bytes, most_lines: MOST_LINES })
    }

    /// Its bytes, unpacked. Reading more than the limit is an error.
    pub fn bytes(&self) -> impl Read + use<> {
        self.bytes_up_to(self.most_bytes)
    }

    /// The same with a limit of its own, for formats of which little is kept.
    pub fn bytes_up_to(&self, most_bytes: u64) -> impl Read + use<> {
        let file = Self { most_bytes, ..self.clone() };
        Bytes { reader: file.reader(), left: most_bytes, file }
    }

    /// At most `most` of its first bytes, as they are stored.
    pub fn stored(&self, most: usize) -> io::Result<Vec<u8>> {
        let mut begin = Vec::new();
        Stored { file: Arc::clone(&self.stored), at: 0 }.take(most as u64).read_to_end(&mut begin)?;
        Ok(begin)
    }

    fn reader(&self) -> BufReader<Box<dyn Read + Send>> {
        let unpacked = || -> Box<dyn Read + Send> {
            let stored = Stored { file: Arc::clone(&self.stored), at: 0 };
            match is_packed(&self.path) {
                true => Box::new(MultiGzDecoder::new(BufReader::new(stored))),
                false => Box::new(stored),
            }
        };
        let mut begin = Vec::new();
        // Where it cannot be read, its reader reports that.
        let _ = unpacked().take(4).read_to_end(&mut begin);
        BufReader::new(match utf16::is_big_endian(&begin) {
            Some(is_big_endian) => Box::new(utf16::Utf16::new(unpacked(), is_big_endian)),
            None => unpacked(),
        })
    }

    fn beyond(&self) -> FileProblem {
        let most = self.most_bytes;
        if is_packed(&self.path) && most < MOST_FILE_BYTES {
            FileProblem::TooLarge(
                format!(
                    "it decompresses to more than {most} bytes: {EASY_BYTES}, or {MOST_RATIO} times its size if that is more"
                )
                .into(),
            )
        } else {
            FileProblem::TooMany { most, what: "bytes, unpacked" }
        }
    }

    /// Its lines that are not blank, with their numbers from 1. A line that is not UTF-8, and the place where a packed
    /// file breaks off or a file becomes too large, is a fault.
    pub fn lines(&self) -> Lines {
        Lines { reader: self.reader(), number: 0, left_bytes: self.most_bytes, file: self.clone(), is_over: false }
    }

    /// Passes every line that `parse` accepts to `take`. A line for which `parse` returns `None`, such as a comment, is
    /// ignored; an error of `take` is a fault of the whole file. Returns the file's bytes, unpacked.
    pub(super) fn parse<T>(
        &self,
        skipped: &mut SkippedLines,
        parse: impl Fn(&str) -> Result<Option<T>, FileProblem>,
        mut take: impl FnMut(T) -> Result<(), FileProblem>,
    ) -> Result<u64, OpenError> {
        let mut taken = 0_usize;
        let mut first_problem = None;
        let mut lines = self.lines();
        for (number, line) in &mut lines {
            match line.and_then(|text| parse(text.trim()).map_err(Fault::Line)) {
                Ok(Some(good)) => {
                    taken += 1;
                    let most = || FileProblem::too_many(self.most_lines, "lines");
                    let kept = if taken > self.most_lines { Err(most()) } else { take(good) };
                    kept.map_err(|problem| self.refused(&problem))?;
                }
                Ok(None) => {}
                Err(Fault::File(problem)) => return Err(self.refused(&problem)),
                Err(Fault::Line(problem)) => {
                    first_problem.get_or_insert_with(|| format!("line {number}: {}", shortened(&problem.to_string())));
                    skipped.add(&self.path, number, problem);
                }
            }
        }
        let problem = || first_problem.unwrap_or_else(|| "the file is empty".to_owned());
        if taken > 0 {
            Ok(self.most_bytes - lines.left_bytes)
        } else {
            Err(refuse("recording_unreadable", &self.path, format!("no valid line: {}", problem())))
        }
    }

    /// An error about the whole file.
    pub fn refused(&self, problem: &FileProblem) -> OpenError {
        refuse(problem.reason(), &self.path, problem)
    }
}

/// The problem that is reported for the line at which reading fails.
pub fn broken_off(error: &io::Error) -> FileProblem {
    FileProblem::malformed(format!("the file cannot be read from here on: {error}"))
}

fn is_packed(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "gz")
}

/// A reader of a file, with a position of its own.
struct Stored {
    file: Arc<fs::File>,
    at: u64,
}

impl Read for Stored {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// The bytes of a file.
struct Bytes {
    reader: BufReader<Box<dyn Read + Send>>,
    left: u64,
    file: LineFile,
}

impl Read for Bytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        let left = self.left.checked_sub(read as u64);
        self.left = left.ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, self.file.beyond().to_string()))?;
        Ok(read)
    }
}

/// The lines of a file.
pub struct Lines {
    reader: BufReader<Box<dyn Read + Send>>,
    number: usize,
    left_bytes: u64,
    file: LineFile,
    is_over: bool,
}

impl Lines {
    /// The next line, blank or not.
    fn read(&mut self) -> Option<Result<String, Fault>> {
        let mut bytes = Vec::new();
        // Reading one byte more than allowed is enough to detect a line that is too long.
        let read = (&mut self.reader).take(MOST_LINE_BYTES as u64 + 1).read_until(b'\n', &mut bytes);
        self.number += 1;
        self.is_over = true;
        if let Err(error) = read {
            return Some(Err(Fault::Line(broken_off(&error))));
        }
        if bytes.is_empty() {
            return None;
        }
        let Some(left_bytes) = self.left_bytes.checked_sub(bytes.len() as u64) else {
            return Some(Err(Fault::File(self.file.beyond())));
        };
        if bytes.len() > MOST_LINE_BYTES {
            let problem = format!("line {} is longer than {MOST_LINE_BYTES} bytes", self.number);
            return Some(Err(Fault::File(FileProblem::TooLarge(problem.into()))));
        }
        (self.left_bytes, self.is_over) = (left_bytes, false);
        Some(String::from_utf8(bytes).map_err(|_| Fault::Line(FileProblem::malformed("this is not UTF-8 text"))))
    }
}

impl Iterator for Lines {
    type Item = (usize, Result<String, Fault>);

    fn next(&mut self) -> Option<Self::Item> {
        while !self.is_over {
            let line = self.read()?;
            if !line.as_ref().is_ok_and(|text| text.trim().is_empty()) {
                return Some((self.number, line));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_lines_are_kept_than_there_may_be() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it.csv");
        fs::write(&path, "#\n1\n2\n\n3\n").expect("written");
        let parse = |most_lines| {
            let file = LineFile { most_lines, ..LineFile::open(&path).expect("there") };
            let take = |line: &str| Ok((line != "#").then(|| line.to_owned()));
            file.parse(&mut SkippedLines::default(), take, |_| Ok(()))
        };
        assert_eq!(parse(3).expect("as many as there may be"), 9);
        let error = parse(2).expect_err("one more");
        assert!(
            error.reason == "recording_too_large" && error.message.ends_with("it has more than 2 lines"),
            "{error:?}"
        );
        assert_eq!(LineFile::open(&path).expect("there").most_lines, 16_777_216);
    }
}
