//! The folder of captures: its contents, what a killed process left there, and making room.
//!
//! Only files whose names are [`id`]s are ever read or removed. One daemon at a time uses the folder, by a lock on
//! `.lock`. No other user may write to it, and no link in it is followed: [`Folder`] ensures both.

use super::id;
use highwater_engine::files::Folder;
use highwater_engine::recording::{State, schema};
use rusqlite::{Connection, ErrorCode};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(test)]
use utoipa::ToSchema;

/// The end of a finished file's name.
const WHOLE: &str = ".sqlite";
/// The end of the name while the file is written.
const PARTIAL: &str = ".partial.sqlite";
/// The file whose lock says that a daemon uses the folder.
const LOCK: &str = ".lock";

/// A file that reserves room on the disk. If the disk is full, it is removed, and the capture is finished in its room: the last
/// second is written once more. One mebibyte is four times what 8 GPUs need whose memory changes every millisecond.
const RESERVE: &str = ".reserve";
const RESERVE_BYTES: usize = 1 << 20;

/// One capture as it is listed. Times are Unix nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(test, derive(ToSchema))]
#[cfg_attr(test, schema(as = Capture))]
pub struct Listed {
    /// Its name.
    pub id: String,
    /// Why it was taken: a finding's kind, `oom`, or `asked`.
    pub reason: String,
    /// The reason, and those for which it went on for longer; each once.
    pub reasons: Vec<String>,
    /// The owners of the jobs that the triggers are about, each once; an empty text for the driver and for requests.
    #[serde(skip)]
    pub owners: Vec<String>,
    /// The note of the trigger.
    pub note: String,
    /// When it begins; `None` if it cannot be read.
    pub begin_unix_nano: Option<i64>,
    /// When it ends.
    pub end_unix_nano: Option<i64>,
    /// Its size, bytes.
    pub bytes: u64,
    /// Its state.
    pub state: State,
    /// What went wrong with it, if anything has since the daemon started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl Listed {
    /// It goes on for this reason too, which is about a job of this owner.
    pub(super) fn also_for(&mut self, reason: &str, owner: String) {
        if !self.reasons.iter().any(|known| known == reason) {
            self.reasons.push(reason.to_owned());
        }
        if !self.owners.contains(&owner) {
            self.owners.push(owner);
        }
    }
}

/// The folder, locked.
#[derive(Debug)]
pub(super) struct Directory {
    folder: Arc<Folder>,
    _lock: OwnedFd,
}

impl Directory {
    /// Creates the folder if it is missing, and locks it.
    ///
    /// # Errors
    /// If it cannot be created or written to, others may write to it, or another daemon uses it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let folder = Folder::open(path)?;
        let lock = folder.lock(LOCK, "another daemon writes captures here")?;
        folder.size(RESERVE)?;
        Ok(Self { folder: Arc::new(folder), _lock: lock })
    }

    /// The folder from which captures are read.
    pub fn folder(&self) -> &Arc<Folder> {
        &self.folder
    }

    /// The path for the file of a capture that begins.
    pub fn path_of_partial(&self, id: &str) -> io::Result<PathBuf> {
        self.folder.path_of(&partial(id))
    }

    /// Bytes of a file that is being written, with its journal.
    pub fn partial_bytes(&self, id: &str) -> u64 {
        let partial = partial(id);
        self.size(&partial) + self.size(&journal(&partial))
    }

    /// Bytes that can still be written; 0 if the system does not report it.
    pub fn free_bytes(&self) -> u64 {
        self.folder.free_bytes().unwrap_or(0)
    }

    /// Reserves room for finishing a capture when the disk is full. If there is no room, nothing is reserved.
    pub fn reserve(&self) {
        if self.size(RESERVE) >= RESERVE_BYTES as u64 {
            return;
        }
        let made = self.folder.create_anew(RESERVE).and_then(|mut file| file.write_all(&vec![0; RESERVE_BYTES]));
        if let Err(error) = made {
            tracing::debug!(%error, "no room is reserved");
            self.release();
        }
    }

    /// Gives the reserved room back to the disk.
    pub fn release(&self) {
        // The file is missing if there was no room for it.
        let _ = self.folder.remove(RESERVE);
    }

    /// Bytes of everything that is being written or could not be finished, and of the reserve.
    pub fn other_bytes(&self) -> u64 {
        // A folder that cannot be listed counts as 0; the next turn reads it again.
        let names = self.folder.names().unwrap_or_default();
        let is_other = |name: &&String| name.contains(PARTIAL) || *name == RESERVE;
        names.iter().filter(is_other).map(|name| self.size(name)).sum()
    }

    /// Gives a finished file its name, and makes the name survive a power failure.
    pub fn publish(&self, id: &str) -> io::Result<u64> {
        self.folder.rename(&partial(id), &whole(id))?;
        self.folder.sync()?;
        Ok(self.size(&whole(id)))
    }

    /// Removes a file that is being written.
    pub fn discard(&self, id: &str) {
        let partial = partial(id);
        for name in [journal(&partial), partial] {
            if let Err(error) = self.folder.remove(&name)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(%error, "an unfinished capture cannot be removed");
            }
        }
    }

    /// Removes a finished file.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        self.folder.remove(&whole(id))
    }

    /// Bytes of a file; 0 if it does not exist or is not ours.
    fn size(&self, name: &str) -> u64 {
        self.folder.size(name).ok().flatten().unwrap_or(0)
    }

    /// Finishes what a killed process or a full disk left, and lists all captures. Also returns whether something is
    /// still left.
    pub fn recover_and_list(&self) -> io::Result<(BTreeMap<String, Listed>, bool)> {
        let mut is_left = false;
        let names = self.folder.names()?;
        for id in names.iter().filter_map(|name| name.strip_suffix(PARTIAL)).filter(|id| id::is_id(id)) {
            match self.recover(id) {
                Ok(true) => tracing::info!(id, "an interrupted capture is kept as it was"),
                Ok(false) => self.discard(id),
                Err(error) => {
                    is_left = true;
                    tracing::debug!(id, %error, "an interrupted capture cannot be finished");
                }
            }
        }
        let names = self.folder.names()?;
        let mut listed = BTreeMap::new();
        for id in names.iter().filter_map(|name| name.strip_suffix(WHOLE)).filter(|id| id::is_id(id)) {
            let looked = self.look(id).unwrap_or_else(|error| {
                if is_damage(&*error) {
                    tracing::warn!(id, %error, "a capture cannot be read");
                } else {
                    is_left = true;
                    tracing::debug!(id, %error, "a capture cannot be read now, and will be tried again");
                }
                self.unreadable(id)
            });
            listed.insert(id.to_owned(), looked);
        }
        Ok((listed, is_left))
    }

    /// Makes one readable file from what was left; `false` if nothing was committed.
    fn recover(&self, id: &str) -> Result<bool, Box<dyn std::error::Error>> {
        let partial = partial(id);
        self.folder.check_sole(&partial)?;
        let connection = schema::reopen(&self.folder.path_of(&partial)?)?;
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

    fn look(&self, id: &str) -> Result<Listed, Box<dyn std::error::Error>> {
        let bytes = self.folder.size(&whole(id))?.unwrap_or(0);
        let connection = schema::look(&self.folder.path_of(&whole(id))?)?;
        Ok(Listed {
            id: id.to_owned(),
            reason: reason_of(id),
            reasons: reasons_of(&connection, id)?,
            owners: owners_of(&connection)?,
            note: schema::meta(&connection, "note")?,
            begin_unix_nano: schema::meta(&connection, "begin_ns")?,
            end_unix_nano: schema::meta(&connection, "end_ns")?,
            bytes,
            state: State::of(&schema::meta::<String>(&connection, "state")?),
            trouble: None,
        })
    }

    fn unreadable(&self, id: &str) -> Listed {
        Listed {
            id: id.to_owned(),
            reason: reason_of(id),
            reasons: vec![reason_of(id)],
            owners: Vec::new(),
            note: String::new(),
            begin_unix_nano: None,
            end_unix_nano: None,
            bytes: self.size(&whole(id)),
            state: State::Unreadable,
            trouble: None,
        }
    }
}

/// Whether the file itself is damaged, and will be the next time too. Other errors, such as too many open files, pass.
fn is_damage(error: &(dyn std::error::Error + 'static)) -> bool {
    let is_refused = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    let code = error.downcast_ref::<rusqlite::Error>().map(rusqlite::Error::sqlite_error_code);
    match code {
        Some(Some(code)) => matches!(code, ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt | ErrorCode::Unknown),
        // Its contents are not those of a recording.
        Some(None) => true,
        None => error.downcast_ref::<io::Error>().is_some_and(is_refused),
    }
}

/// Opens the file of a finished capture.
pub(super) fn open_whole(folder: &Folder, id: &str) -> io::Result<File> {
    folder.read(&whole(id))
}

/// The path of a finished file, for SQLite.
pub(super) fn path_of_whole(folder: &Folder, id: &str) -> io::Result<PathBuf> {
    folder.path_of(&whole(id))
}

fn reason_of(id: &str) -> String {
    id.split_once("Z-").map_or_else(String::new, |(_, reason)| reason.to_owned())
}

/// The reason in its name, and the other reasons of its triggers.
fn reasons_of(connection: &Connection, id: &str) -> rusqlite::Result<Vec<String>> {
    let mut reasons = vec![reason_of(id)];
    let mut of_triggers = connection.prepare("SELECT DISTINCT substr(reason, 1, 64) FROM triggers LIMIT 64")?;
    for reason in of_triggers.query_map([], |row| row.get::<_, String>(0))? {
        let reason = reason?;
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    Ok(reasons)
}

/// The owners of its triggers.
fn owners_of(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    let mut of_triggers = connection.prepare("SELECT DISTINCT substr(owner, 1, 300) FROM triggers LIMIT 128")?;
    let owners = of_triggers.query_map([], |row| row.get::<_, Option<String>>(0))?;
    owners.map(|owner| Ok(owner?.unwrap_or_default())).collect()
}

/// The file name of a finished capture.
fn whole(id: &str) -> String {
    format!("{id}{WHOLE}")
}

/// The file name of a capture that is being written.
fn partial(id: &str) -> String {
    format!("{id}{PARTIAL}")
}

fn journal(name: &str) -> String {
    format!("{name}{}", schema::WAL)
}
