//! The name of a Unix socket, in a folder that other users may share, such as `/tmp`.
//!
//! The kernel follows no link when it binds. A name that others could have prepared is refused with an error that names
//! it, unless it is a socket that nobody listens on, which is removed. Permissions are set on the bound socket through
//! its descriptor, because by then the name could refer to something else.

use super::walk::reach;
use super::{about, is_trusted, refuse};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, statat, unlinkat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// A bound socket's name. It is removed on drop, if it still names that socket.
#[derive(Debug)]
pub struct Bound {
    folder: OwnedFd,
    name: OsString,
    path: PathBuf,
    /// The socket itself, kept open so that no other socket gets its inode number.
    itself: OwnedFd,
}

impl Bound {
    /// Binds `path` with permissions `mode`. A socket that nobody listens on any more is replaced; missing folders are
    /// created.
    ///
    /// # Errors
    /// If the folder cannot be reached or created, the name belongs to something other than a socket, or a process
    /// listens on that socket.
    pub fn socket(path: &Path, kind: SocketType, mode: u32) -> io::Result<(OwnedFd, Self)> {
        let name = path.file_name().ok_or_else(|| refuse(path, "is not a socket name"))?.to_owned();
        let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = reach(above, true)?;
        let address = address(path)?;
        let unbound = |flags| socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | flags, None);
        // The probe does not block, because a listener may keep others waiting.
        remove_stale(&folder, &name, path, &unbound(SocketFlags::NONBLOCK)?, &address)?;
        let socket = unbound(SocketFlags::empty())?;
        bind(&socket, &address).map_err(|error| about(path, error))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let bound = openat(&folder, &name, flags, Mode::empty()).map_err(|error| about(path, error))?;
        let stat = fstat(&bound).map_err(|error| about(path, error))?;
        if !is_socket(&stat) || !is_trusted(stat.st_uid) {
            return Err(refuse(path, "was replaced while it was bound"));
        }
        // This is the only way to change what the descriptor refers to; a path could refer to something else by now.
        let by_descriptor = format!("/proc/self/fd/{}", bound.as_raw_fd());
        std::fs::set_permissions(by_descriptor, std::fs::Permissions::from_mode(mode)).map_err(|error| {
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            if is_missing {
                refuse(path, "cannot get its permissions, because /proc is not mounted")
            } else {
                about(path, error)
            }
        })?;
        Ok((socket, Self { folder, name, path: path.to_owned(), itself: bound }))
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let (found, itself) = (statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW), fstat(&self.itself));
        let is_ours = found.and_then(|found| Ok(identity(&found) == identity(&itself?)));
        if is_ours != Ok(true) {
            tracing::debug!(path = %self.path.display(), "the socket's name is gone, or belongs to another socket");
        } else if let Err(error) = unlinkat(&self.folder, &self.name, AtFlags::empty()) {
            tracing::debug!(path = %self.path.display(), %error, "the socket's name cannot be removed");
        }
    }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn is_socket(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Socket
}

fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|error| about(path, error))
}

fn remove_stale(
    folder: &OwnedFd,
    name: &OsString,
    path: &Path,
    probe: &OwnedFd,
    address: &SocketAddrUnix,
) -> io::Result<()> {
    let found = match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => found,
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(error) => return Err(about(path, error)),
    };
    let taken = |kind, problem: String| Err(io::Error::new(kind, format!("{}: {problem}", path.display())));
    if !is_socket(&found) {
        return taken(io::ErrorKind::AlreadyExists, "the path exists and is not a socket".into());
    }
    // A listener of another socket type answers `PROTOTYPE`.
    if matches!(connect(probe, address), Ok(()) | Err(rustix::io::Errno::PROTOTYPE | rustix::io::Errno::AGAIN)) {
        let problem = format!("another daemon listens on it, a process of user {}", found.st_uid);
        return taken(io::ErrorKind::AddrInUse, problem);
    }
    // This removes only the name. Even if a link has replaced the socket by now, its target stays.
    unlinkat(folder, name, AtFlags::empty()).map_err(|error| about(path, error))
}
