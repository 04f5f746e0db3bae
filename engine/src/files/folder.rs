//! A folder that only this process writes to: captures, the queue of OTLP.

use super::walk::{is_open_to_others, reach};
use super::{about, is_trusted, refuse};
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, fstatvfs, fsync, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The mode of a file that is created.
const MADE: Mode = Mode::from_raw_mode(0o644);
/// Flags of every open: no link is followed, and an open does not wait for the other end of a FIFO.
const SAFELY: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC).union(OFlags::NOCTTY);

/// An opened folder. Names in it are single components.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    /// The path as it was given, for errors.
    path: PathBuf,
    /// The path without links, for code that opens files by their path.
    real_path: PathBuf,
}

impl Folder {
    /// Opens the folder, and creates it if it is missing.
    ///
    /// # Errors
    /// If it cannot be created or listed; if it is a symbolic link, belongs neither to this process's user nor to root,
    /// or others may write to it. Each error names the path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let found = reach(path, false)?;
        let fd = openat(&found, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        Self::of(fd.map_err(|error| about(path, error))?, path)
    }

    /// Opens a folder that another program fills, and which must be there.
    ///
    /// # Errors
    /// As of [`open`](Self::open), and if it is missing.
    pub fn existing(path: &Path) -> io::Result<Self> {
        let fd = rustix::fs::open(path, SAFELY | OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
        Self::of(fd.map_err(|error| about(path, error))?, path)
    }

    fn of(fd: OwnedFd, path: &Path) -> io::Result<Self> {
        let stat = fstat(&fd).map_err(|error| about(path, error))?;
        if !is_trusted(stat.st_uid) {
            return Err(refuse(path, format!("belongs to user {}", stat.st_uid)));
        }
        if is_open_to_others(&stat) {
            let mode = stat.st_mode & 0o7777;
            let problem =
                format!("others may write to it (mode {mode:04o}) and prepare names in it; use a folder below it");
            return Err(refuse(path, problem));
        }
        let real_path = std::fs::canonicalize(path).map_err(|error| about(path, error))?;
        Ok(Self { fd, path: path.to_owned(), real_path })
    }

    /// The path as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file, without links, for code that cannot use descriptors.
    ///
    /// # Errors
    /// If the folder was moved or replaced.
    pub fn path_of(&self, name: &str) -> io::Result<PathBuf> {
        let (here, there) = (fstat(&self.fd)?, rustix::fs::lstat(&self.real_path));
        let is_there = there.is_ok_and(|there| (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino));
        if is_there { Ok(self.real_path.join(name)) } else { Err(refuse(&self.path, "was moved or replaced")) }
    }

    fn about(&self, name: &str, error: impl Into<io::Error>) -> io::Error {
        about(&self.path.join(name), error)
    }

    fn stat(&self, name: &str) -> io::Result<Stat> {
        statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|error| self.about(name, error))
    }

    fn check(&self, name: &str, stat: &Stat) -> io::Result<()> {
        let problem = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if !is_trusted(stat.st_uid) => format!("belongs to user {}", stat.st_uid),
            FileType::RegularFile => return Ok(()),
            FileType::Symlink => "is a symbolic link instead of a file of the daemon".to_owned(),
            kind => format!("is not a regular file but a {kind:?}"),
        };
        Err(refuse(&self.path.join(name), problem))
    }

    /// The size of a file of this process's user, in bytes; `None` if no file has this name.
    ///
    /// # Errors
    /// If it cannot be examined, or the name belongs to anything else.
    pub fn size(&self, name: &str) -> io::Result<Option<u64>> {
        match self.stat(name) {
            Ok(stat) => self.check(name, &stat).map(|()| u64::try_from(stat.st_size).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Checks that a file has no second name, before something writes to it by its path.
    ///
    /// # Errors
    /// If it has one, cannot be examined, or the name belongs to something other than a file of this process's user.
    pub fn check_sole(&self, name: &str) -> io::Result<()> {
        let stat = self.stat(name)?;
        self.check(name, &stat)?;
        if stat.st_nlink > 1 {
            return Err(refuse(&self.path.join(name), "has a second name elsewhere (a hard link)"));
        }
        Ok(())
    }

    /// Opens a file to read it.
    ///
    /// # Errors
    /// If it cannot be opened, or the name belongs to something other than a file of this process's user.
    pub fn read(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDONLY)
    }

    /// Creates a file.
    ///
    /// # Errors
    /// If it cannot be created, or the name is taken.
    pub fn create(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    /// Creates a file, in place of an existing one of this process's user.
    ///
    /// # Errors
    /// If it cannot be created, or the name belongs to anything else.
    pub fn create_anew(&self, name: &str) -> io::Result<File> {
        if self.size(name)?.is_some() {
            self.remove(name)?;
        }
        self.create(name)
    }

    /// Takes a lock that lasts until the returned descriptor is closed, at the latest when the process ends. Creates the file
    /// if it is missing, and never writes to it.
    ///
    /// # Errors
    /// With `taken` if another process holds the lock; if the name belongs to something other than a file of this
    /// process's user.
    pub fn lock(&self, name: &str, taken: &str) -> io::Result<OwnedFd> {
        // Checked before it is opened, because opening a device has effects.
        self.size(name)?;
        let file = OwnedFd::from(self.open_file(name, OFlags::RDWR | OFlags::CREATE)?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => Err(self.about(name, io::Error::new(io::ErrorKind::ResourceBusy, taken))),
            Err(error) => Err(self.about(name, error)),
        }
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let file = openat(&self.fd, name, flags | SAFELY, MADE);
        let file = match file {
            Err(Errno::LOOP) => return Err(self.check(name, &self.stat(name)?).err().unwrap_or(Errno::LOOP.into())),
            file => file.map_err(|error| self.about(name, error))?,
        };
        self.check(name, &fstat(&file).map_err(|error| self.about(name, error))?)?;
        Ok(file.into())
    }

    /// Removes a name. The target of a link stays.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        unlinkat(&self.fd, name, AtFlags::empty()).map_err(|error| self.about(name, error))
    }

    /// Renames a file, in place of any file with the new name.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        renameat(&self.fd, from, &self.fd, to).map_err(|error| self.about(from, error))
    }

    /// Makes the folder's names survive a power failure.
    ///
    /// # Errors
    /// If the disk fails.
    pub fn sync(&self) -> io::Result<()> {
        fsync(&self.fd).map_err(|error| about(&self.path, error))
    }

    /// All names in the folder that are UTF-8 text.
    ///
    /// # Errors
    /// If it cannot be listed.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let entries = Dir::read_from(&self.fd).map_err(|error| about(&self.path, error))?;
        let name = |entry: rustix::io::Result<rustix::fs::DirEntry>| match entry {
            Ok(entry) => entry.file_name().to_str().ok().map(|name| Ok(name.to_owned())),
            Err(error) => Some(Err(about(&self.path, error))),
        };
        let names = entries.filter_map(name);
        names.filter(|name| !name.as_ref().is_ok_and(|name| name == "." || name == "..")).collect()
    }

    /// Bytes that can still be written; `None` if the system does not report it.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        fstatvfs(&self.fd).ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize))
    }
}
