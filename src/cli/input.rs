//! A file that a command was given: a path, or what comes through a pipe.
//!
//! Enters: a path, `-` for standard input, or a path of an open descriptor, as shells make of `<(…)`. Leaves: a regular file with the
//! same contents. Formats are recognized by the begin of a file, which is then read again, and SQLite reads in any order, so what
//! comes through a pipe is first copied to a temporary file, unpacked. Invariants: the copy is bounded, only this user may read it,
//! and it has no name, so that none is left if the process is killed. Only SQLite needs a name, which is removed in the end; a
//! kill leaves that file.

use super::common::Misuse;
use anyhow::Context as _;
use flate2::read::MultiGzDecoder;
use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::{self, BufReader, Cursor, IsTerminal as _, Read, Seek as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The most bytes that a pipe may bring, unpacked.
const MOST_BYTES: u64 = 16 << 30;
/// How often another name is tried for a temporary file.
const MOST_TRIES: u32 = 8;
/// What standard input is called in reports and messages.
const STANDARD_INPUT: &str = "standard input";
const SQLITE: &[u8] = b"SQLite format 3\0";
const GZIP: &[u8] = &[0x1f, 0x8b];

/// A regular file to be read.
#[derive(Debug)]
pub(super) struct Input {
    /// Where its contents are.
    pub path: PathBuf,
    /// What to call it, if that is not its path.
    pub name: Option<String>,
    /// Kept as long as the file is read.
    _copy: Option<Copied>,
}

/// A temporary file.
#[derive(Debug)]
struct Copied {
    /// Keeps the contents of a file without a name.
    file: File,
    /// The name of one that has one.
    name: Option<PathBuf>,
}

impl Drop for Copied {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Nothing is left to do if it is gone.
            let _ = fs::remove_file(name);
        }
    }
}

impl Input {
    /// The files of a command line, in order.
    ///
    /// # Errors
    /// See [`open`](Self::open); or standard input is named twice.
    pub fn all(given: &[PathBuf]) -> anyhow::Result<Vec<Self>> {
        if given.iter().filter(|path| path.as_os_str() == "-").count() > 1 {
            return Err(Misuse("`-`, which is standard input, can be given once".to_owned()).into());
        }
        given.iter().map(|path| Self::open(path)).collect()
    }

    /// A file, or a copy of what a pipe brings.
    ///
    /// # Errors
    /// Standard input is a terminal, or what it brings cannot be copied.
    pub fn open(given: &Path) -> anyhow::Result<Self> {
        if given.as_os_str() == "-" {
            return Self::standard_input();
        }
        let is_pipe = is_descriptor(given) && fs::metadata(given).is_ok_and(|found| found.file_type().is_fifo());
        if !is_pipe {
            return Ok(Self { path: given.to_owned(), name: None, _copy: None });
        }
        let name = given.display().to_string();
        let pipe = File::open(given).with_context(|| name.clone())?;
        copied(pipe, &name).with_context(|| name.clone())
    }

    fn standard_input() -> anyhow::Result<Self> {
        if io::stdin().is_terminal() {
            return Err(
                Misuse("`-` is standard input, which is a terminal here: pipe a file into it".to_owned()).into()
            );
        }
        // A file that was redirected is read where it is.
        let real = fs::canonicalize("/proc/self/fd/0").ok().filter(|path| path.is_file());
        match real {
            Some(path) => Ok(Self { path, name: None, _copy: None }),
            None => copied(io::stdin().lock(), STANDARD_INPUT).context(STANDARD_INPUT),
        }
    }

    /// An outcome whose error calls the file what the user called it.
    pub fn named<T>(&self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        let Some(name) = &self.name else { return outcome };
        let path = self.path.display().to_string();
        outcome.map_err(|error| anyhow::anyhow!("{}", format!("{error:#}").replace(&path, name)))
    }

    /// What to call it.
    pub fn shown(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.path.display().to_string())
    }
}

/// Whether a path is that of an open descriptor: opening it does not wait for a writer, as opening another FIFO does.
fn is_descriptor(path: &Path) -> bool {
    path == Path::new("/dev/stdin") || path.starts_with("/dev/fd") || path.starts_with("/proc/self/fd")
}

/// A copy of what a pipe brings, unpacked.
fn copied(pipe: impl Read, name: &str) -> anyhow::Result<Input> {
    let (begin, all) = peeked(pipe, GZIP.len())?;
    if begin == GZIP {
        return kept(MultiGzDecoder::new(BufReader::new(all)), name);
    }
    kept(all, name)
}

fn kept(bytes: impl Read, name: &str) -> anyhow::Result<Input> {
    let (begin, all) = peeked(bytes, SQLITE.len())?;
    let (path, mut file) = temporary().context("a temporary file")?;
    let mut copy = Copied { file: file.try_clone()?, name: Some(path.clone()) };
    let is_sqlite = begin == SQLITE;
    if !is_sqlite {
        fs::remove_file(&path)?;
        copy.name = None;
    }
    let count = io::copy(&mut all.take(MOST_BYTES + 1), &mut file)?;
    anyhow::ensure!(
        count <= MOST_BYTES,
        "brings more than {} GiB: write it to a file, and name that",
        MOST_BYTES >> 30
    );
    file.rewind()?;
    let path = if is_sqlite { path } else { PathBuf::from(format!("/proc/self/fd/{}", copy.file.as_raw_fd())) };
    Ok(Input { path, name: Some(name.to_owned()), _copy: Some(copy) })
}

/// The first bytes, and a reader of all.
fn peeked(mut bytes: impl Read, most: usize) -> io::Result<(Vec<u8>, impl Read)> {
    let mut begin = Vec::with_capacity(most);
    bytes.by_ref().take(most as u64).read_to_end(&mut begin)?;
    Ok((begin.clone(), Cursor::new(begin).chain(bytes)))
}

/// A new file that only this user may read. Its name is not known before: others may write in the same folder.
fn temporary() -> io::Result<(PathBuf, File)> {
    let mut tries = MOST_TRIES;
    loop {
        let number = RandomState::new().build_hasher().finish();
        let path = std::env::temp_dir().join(format!("highwater-{number:016x}"));
        match File::options().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries > 0 => tries -= 1,
            made => return made.map(|file| (path, file)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write as _;

    fn read(input: &Input) -> Vec<u8> {
        fs::read(&input.path).expect("it is there")
    }

    #[test]
    fn what_a_pipe_brings_is_a_file_without_a_name() {
        let input = copied(&b"index, memory.used [MiB]\n"[..], "it").expect("copied");
        assert_eq!((read(&input), input.shown()), (b"index, memory.used [MiB]\n".to_vec(), "it".to_owned()));
        assert!(input.path.is_file() && input.path.starts_with("/proc/self/fd"), "{input:?}");
        assert_eq!(read(&copied(&b""[..], "it").expect("empty")), b"");
    }

    #[test]
    fn packed_bytes_are_unpacked() {
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(b"0 1000 5\n").expect("packed");
        let packed = packed.finish().expect("packed");
        assert_eq!(read(&copied(&packed[..], "it").expect("copied")), b"0 1000 5\n");
        assert!(copied(&packed[..packed.len() - 4], "it").is_err(), "cut short");
    }

    #[test]
    fn a_database_has_a_name_until_it_is_read() {
        let input = copied(&[SQLITE, &[0; 100]].concat()[..], "it").expect("copied");
        let path = input.path.clone();
        assert!(path.starts_with(std::env::temp_dir()) && path.is_file());
        let outcome = input.named::<()>(Err(anyhow::anyhow!("{}: is damaged", path.display())));
        assert_eq!(outcome.expect_err("an error").to_string(), "it: is damaged");
        drop(input);
        assert!(!path.exists());
    }

    #[test]
    fn only_descriptors_are_read_as_pipes() {
        assert!(is_descriptor(Path::new("/dev/fd/63")) && is_descriptor(Path::new("/dev/stdin")));
        assert!(!is_descriptor(Path::new("/tmp/fifo")) && !is_descriptor(Path::new("stdin")));
        let file = Input::open(Path::new("/nonexistent")).expect("its reader reports that");
        assert_eq!((file.path.as_path(), file.name), (Path::new("/nonexistent"), None));
    }
}
