//! Files and folders that the daemon makes where other users of the node may have prepared names.
//!
//! Enters: paths of the settings. Leaves: opened folders and files. Invariants: no link is followed to a file that is
//! written; what is made is made exclusively; what is there already and is not a regular file of this process's user is
//! an error that names it; a folder that others could have prepared, or can write to, is refused. Everything in a folder
//! is reached by its descriptor, so that a folder that is renamed meanwhile changes nothing. Absent on purpose: changing
//! the permissions of anything that was there before.

mod folder;
mod own;
mod socket;
#[cfg(test)]
mod tests;
mod walk;

pub use folder::Folder;
pub use own::OwnFolder;
pub use socket::Bound;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Adds to an error what it is about, and keeps its kind.
fn about(path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// An error about a path that may not be used.
fn refuse(path: &Path, problem: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {problem}", path.display()))
}

/// Whether a user may have made what this process uses: itself, and root, who can do anything anyway.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// The begin of a file: all of it, or as much as may be.
///
/// # Errors
/// Where it cannot be read, as of a process of another user.
pub fn read_at_most(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file that somebody names: a FIFO or a device too, but at most `most_bytes` of it.
///
/// # Errors
/// Where it cannot be read, is longer, or is no UTF-8.
pub fn read_text(path: &Path, most_bytes: u64) -> io::Result<String> {
    let bytes = read_at_most(path, most_bytes.saturating_add(1))?;
    if bytes.len() as u64 > most_bytes {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is longer than {most_bytes} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no UTF-8 text"))
}

/// Eight bytes that nobody can guess, in hexadecimal.
///
/// # Errors
/// Where the system has no `/dev/urandom`.
fn unguessable() -> io::Result<String> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 8];
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).map_err(|error| about(path, error))?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}
