//! A folder that exists as long as the process runs. No other user can have prepared it or can look into it.

use super::about;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum length of the folder's path. The kernel limits the path of a socket to 108 bytes; the rest is for the socket's name.
const MOST_PATH_BYTES: usize = 80;
/// A folder that is older than this and not locked was left by a process that was killed.
const LEFT_OVER: Duration = Duration::from_secs(60);

/// The folder. It is removed with its contents when this is dropped.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
    /// Locked as long as the process runs; `None` where the file system has no locks.
    _lock: Option<OwnedFd>,
}

impl OwnFolder {
    /// Creates a folder named `PREFIX-` and an unpredictable suffix, in which sockets can be bound: below `$XDG_RUNTIME_DIR` if
    /// that belongs to this user, else in the folder for temporary files, else in `/tmp`. Removes folders there that killed
    /// processes of this user have left.
    ///
    /// # Errors
    /// If it can be made in none of them. The error is that of the first.
    pub fn make(prefix: &str) -> io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| is_ours(path));
        Self::make_in_one(runtime.into_iter().chain([std::env::temp_dir(), PathBuf::from("/tmp")]), prefix)
    }

    fn make_in_one(mut folders: impl Iterator<Item = PathBuf>, prefix: &str) -> io::Result<Self> {
        let first = folders.next().map(|above| Self::make_in(&above, prefix));
        let Some(Err(error)) = first else { return first.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into())) };
        folders.find_map(|above| Self::make_in(&above, prefix).ok()).ok_or(error)
    }

    fn make_in(above: &Path, prefix: &str) -> io::Result<Self> {
        let path = above.join(format!("{prefix}-{}", super::unguessable()?));
        if path.as_os_str().len() > MOST_PATH_BYTES {
            return Err(about(&path, io::Error::new(io::ErrorKind::InvalidFilename, "too long for a socket in it")));
        }
        remove_left_over(above, prefix);
        // This fails if the name is taken, even by a link.
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|error| about(&path, error))?;
        let lock = lock(&path);
        Ok(Self { path, _lock: lock })
    }

    /// The folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The lock on a folder, if nobody else has it.
fn lock(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = open(path, flags, Mode::empty()).ok()?;
    flock(&folder, FlockOperation::NonBlockingLockExclusive).ok().map(|()| folder)
}

/// Removes folders of this prefix that belong to no process any more. What cannot be removed is left where it is.
fn remove_left_over(above: &Path, prefix: &str) {
    let is_named = |name: &std::ffi::OsStr| {
        let suffix = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_prefix('-'));
        suffix.is_some_and(|suffix| suffix.len() == 16 && suffix.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let is_old = |path: &Path| {
        let age = path.symlink_metadata().and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
        age.is_some_and(|age| age >= LEFT_OVER)
    };
    let names = std::fs::read_dir(above).into_iter().flatten().flatten();
    for path in names.filter(|entry| is_named(&entry.file_name())).map(|entry| entry.path()) {
        if is_ours(&path) && is_old(&path) && lock(&path).is_some() {
            // `remove_dir_all` follows no link.
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

/// Whether a folder belongs to this process's user, and no other user can write to it.
fn is_ours(path: &Path) -> bool {
    let is_ours = |found: std::fs::Metadata| {
        found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0
    };
    path.is_absolute() && std::fs::symlink_metadata(path).is_ok_and(is_ours)
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // `remove_dir_all` follows no link.
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the process's temporary folder cannot be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as a process of ours left it, last changed so long ago.
    fn left(above: &Path, name: &str, age: Duration) -> PathBuf {
        let path = above.join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        std::fs::write(path.join("annotations.sock"), "").unwrap();
        let at = std::time::SystemTime::now() - age;
        std::fs::File::open(&path).unwrap().set_modified(at).unwrap();
        path
    }

    #[test]
    fn it_is_made_where_a_socket_has_room() {
        let above = tempfile::tempdir().unwrap();
        let long = above.path().join("x".repeat(90));
        std::fs::create_dir(&long).unwrap();
        let candidates = [long.clone(), above.path().join("missing"), above.path().to_owned()];
        let own = OwnFolder::make_in_one(candidates.into_iter(), "t").unwrap();
        assert_eq!(own.path().parent(), Some(above.path()));
        let error = OwnFolder::make_in_one([long].into_iter(), "t").unwrap_err();
        assert!(error.to_string().contains("too long for a socket in it"), "{error}");
        let path = own.path().to_owned();
        drop(own);
        assert!(!path.exists());
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let (above, hour) = (tempfile::tempdir().unwrap(), Duration::from_secs(3_600));
        let of_a_killed = left(above.path(), "t-0123456789abcdef", hour);
        let young = left(above.path(), "t-0123456789abcdee", Duration::ZERO);
        let of_another_kind = left(above.path(), "t-0123456789abcde", hour);
        let running = left(above.path(), "t-0123456789abcdea", hour);
        let _lock = lock(&running).unwrap();
        let link = above.path().join("t-0123456789abcdeb");
        std::os::unix::fs::symlink(&of_another_kind, &link).unwrap();
        let own = OwnFolder::make_in(above.path(), "t").unwrap();
        assert!(!of_a_killed.exists(), "left over");
        assert!(young.exists() && of_another_kind.exists() && running.exists() && link.exists() && own.path().exists());
    }
}
