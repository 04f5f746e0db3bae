//! Files and folders that the daemon makes in places where other users of the node may have prepared names.
//!
//! Enters: paths from the settings. Leaves: opened folders and files. Invariants: no file is written through a link;
//! files are created exclusively; an existing name that is not a regular file of this process's user or of root is an
//! error that names it; a folder that others could have prepared, or can write to, is refused. Everything in a folder is reached
//! through the folder's descriptor, so renaming the folder meanwhile changes nothing. Absent on purpose: changing the
//! permissions of anything that existed before.

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

/// Adds the path to an error and keeps its kind.
fn about(path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// An error about a path that may not be used.
fn refuse(path: &Path, problem: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {problem}", path.display()))
}

/// Whether this process trusts what a user made: its own user, and root, which can do anything anyway.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// The beginning of a file: all of it, or its first `most_bytes`.
///
/// # Errors
/// If it cannot be read, for example because it belongs to another user's process.
pub fn read_at_most(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file that a user names. The file may be a FIFO or a device, but at most `most_bytes` of it are
/// accepted.
///
/// # Errors
/// If it cannot be read, is longer, or is not UTF-8.
pub fn read_text(path: &Path, most_bytes: u64) -> io::Result<String> {
    let bytes = read_at_most(path, most_bytes.saturating_add(1))?;
    if bytes.len() as u64 > most_bytes {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is longer than {most_bytes} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Eight unpredictable bytes, in hexadecimal.
///
/// # Errors
/// If the system has no `/dev/urandom`.
fn unguessable() -> io::Result<String> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 8];
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).map_err(|error| about(path, error))?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}
