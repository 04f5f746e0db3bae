//! The folder of captures: what is in it, what a killed process left there, and making room.
//!
//! Only files whose names are [`id`]s are ever looked at or removed. One daemon at a time has the folder, by
//! a lock on `.lock`.

use super::{id, schema};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What a file ends in once it is whole.
const WHOLE: &str = ".sqlite";
/// What it ends in while it is written.
const PARTIAL: &str = ".partial.sqlite";
/// What SQLite adds to the name for its journal.
const JOURNAL: &str = "-wal";

/// A file that is there to be removed: what a full disk needs to let a capture be finished, which is the last second of
/// it once more. One mebibyte is 8 GPUs whose memory changes every millisecond, four times over.
const RESERVE: &str = ".reserve";
const RESERVE_BYTES: usize = 1 << 20;

/// How far a capture has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It is being written.
    Writing,
    /// It has all of its interval.
    Complete,
    /// It ended before its time.
    CutShort,
    /// It could not be written further.
    Failed,
    /// The daemon was killed while it was written.
    Interrupted,
    /// It cannot be read.
    Unreadable,
}

impl State {
    /// As the file and the API have it.
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

    fn of(label: &str) -> Self {
        let all = [State::Complete, State::CutShort, State::Failed, State::Interrupted];
        all.into_iter().find(|state| state.label() == label).unwrap_or(State::Unreadable)
    }
}

/// One capture as it is listed. Times are Unix nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listed {
    /// Its name.
    pub id: String,
    /// Why it was taken: a finding's kind, `oom`, or `asked`.
    pub reason: String,
    /// What is said of that.
    pub note: String,
    /// From when on it tells; `None` where it cannot be read.
    pub begin_unix_nano: Option<i64>,
    /// Until when.
    pub end_unix_nano: Option<i64>,
    /// Its size, bytes.
    pub bytes: u64,
    /// How far it has come.
    pub state: State,
}

/// The folder, locked.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    _lock: OwnedFd,
}

impl Directory {
    /// Makes the folder where it is missing, and locks it.
    ///
    /// # Errors
    /// Where it cannot be made or written to, or another daemon has it.
    pub fn open(path: &Path) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let lock = fs::File::options().create(true).truncate(false).write(true).open(path.join(".lock"))?;
        let lock = OwnedFd::from(lock);
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            let is_taken = error == rustix::io::Errno::WOULDBLOCK;
            if is_taken { io::Error::other("another daemon writes to it") } else { error.into() }
        })?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    fn whole(&self, id: &str) -> PathBuf {
        whole(&self.path, id)
    }

    fn partial(&self, id: &str) -> PathBuf {
        partial(&self.path, id)
    }

    /// Bytes of a file that is being written, with its journal.
    pub fn partial_bytes(&self, id: &str) -> u64 {
        let partial = self.partial(id);
        size(&partial) + size(&journal(&partial))
    }

    /// Bytes that can still be written; 0 where the system does not say.
    pub fn free_bytes(&self) -> u64 {
        rustix::fs::statvfs(&self.path).map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    /// Takes room for finishing a capture when the disk is full. Where there is none, there is no reserve.
    pub fn reserve(&self) {
        let path = self.path.join(RESERVE);
        if size(&path) < RESERVE_BYTES as u64
            && let Err(error) = fs::write(&path, vec![0; RESERVE_BYTES])
        {
            tracing::debug!(path = %path.display(), %error, "no room is reserved");
            self.release();
        }
    }

    /// Gives that room back to the disk.
    pub fn release(&self) {
        // Not there where there was no room for it.
        let _ = fs::remove_file(self.path.join(RESERVE));
    }

    /// Bytes of everything that is being written or could not be finished, and of the reserve.
    pub fn other_bytes(&self) -> u64 {
        let names = self.names().unwrap_or_default();
        let is_other = |name: &&String| name.contains(PARTIAL) || *name == RESERVE;
        names.iter().filter(is_other).map(|name| size(&self.path.join(name))).sum()
    }

    /// Gives a finished file its name, and makes that outlast a power failure.
    pub fn publish(&self, id: &str) -> io::Result<u64> {
        let whole = self.whole(id);
        fs::rename(self.partial(id), &whole)?;
        fs::File::open(&self.path)?.sync_all()?;
        Ok(size(&whole))
    }

    /// Removes a file that is being written.
    pub fn discard(&self, id: &str) {
        let partial = self.partial(id);
        for path in [journal(&partial), partial] {
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "cannot be removed");
            }
        }
    }

    /// Removes a finished file.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        fs::remove_file(self.whole(id))
    }

    /// Finishes what a killed process or a full disk left, and lists everything; and whether something is still left.
    pub fn recover_and_list(&self) -> io::Result<(BTreeMap<String, Listed>, bool)> {
        let mut is_left = false;
        let names = self.names()?;
        for id in names.iter().filter_map(|name| name.strip_suffix(PARTIAL)).filter(|id| id::is_id(id)) {
            match self.recover(id) {
                Ok(true) => tracing::info!(id, "a capture that was interrupted is kept as it was"),
                Ok(false) => self.discard(id),
                Err(error) => {
                    is_left = true;
                    tracing::debug!(id, %error, "a capture that was interrupted cannot be finished");
                }
            }
        }
        let ids = self.names()?.into_iter().filter_map(|name| name.strip_suffix(WHOLE).map(str::to_owned));
        let listed = ids.filter(|id| id::is_id(id)).map(|id| (id.clone(), self.look(id))).collect();
        Ok((listed, is_left))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names = fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    /// Makes one readable file of what was left; `false` if nothing was committed.
    fn recover(&self, id: &str) -> Result<bool, Box<dyn std::error::Error>> {
        let connection = schema::reopen(&self.partial(id))?;
        let tables: i64 =
            connection.query_row("SELECT count(*) FROM sqlite_master WHERE name = 'meta'", [], |row| row.get(0))?;
        if tables == 0 {
            return Ok(false);
        }
        let set = "UPDATE meta SET value = ?1 WHERE key = 'state' AND value = 'writing'";
        connection.execute(set, [State::Interrupted.label()])?;
        schema::close(connection)?;
        self.publish(id)?;
        Ok(true)
    }

    fn look(&self, id: String) -> Listed {
        let path = self.whole(&id);
        let reason = id.split_once("Z-").map_or_else(String::new, |(_, reason)| reason.to_owned());
        let bytes = size(&path);
        let unreadable = Listed {
            id,
            reason,
            note: String::new(),
            begin_unix_nano: None,
            end_unix_nano: None,
            bytes,
            state: State::Unreadable,
        };
        let read = || -> rusqlite::Result<Listed> {
            let connection = schema::look(&path)?;
            Ok(Listed {
                note: schema::meta(&connection, "note")?,
                begin_unix_nano: schema::meta(&connection, "begin_ns")?,
                end_unix_nano: schema::meta(&connection, "end_ns")?,
                state: State::of(&schema::meta::<String>(&connection, "state")?),
                ..unreadable.clone()
            })
        };
        read().unwrap_or_else(|error| {
            tracing::warn!(id = unreadable.id, %error, "a capture cannot be read");
            unreadable.clone()
        })
    }
}

/// The file of a capture that is whole.
pub(super) fn whole(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}{WHOLE}"))
}

/// The file of one that is being written.
pub(super) fn partial(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}{PARTIAL}"))
}

fn journal(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(JOURNAL);
    name.into()
}

fn size(path: &Path) -> u64 {
    // A file that is not there takes no bytes.
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}
