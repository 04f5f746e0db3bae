//! Walks from a path to its folder's descriptor, one component at a time, so that the folder that is checked is the one
//! that is used.

use super::{about, is_trusted, refuse};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, mkdirat, open, openat, readlinkat, statat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// The most links followed on the way to one folder: as many as the kernel follows.
const MOST_LINKS: usize = 40;
/// The mode of a folder that is created. Others may read it, as far as the umask allows.
const MADE: Mode = Mode::from_raw_mode(0o755);
/// Opens a folder only to look up names in it, which needs no permission to read it.
const ON_THE_WAY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Whether users that are not trusted may add or replace names in a folder.
pub(super) fn is_open_to_others(folder: &Stat) -> bool {
    folder.st_mode & 0o022 != 0
}

/// Opens a folder for looking up names in it. Creates it and the folders above it if they are missing.
///
/// Links on the way are followed, except in the last component if `last_may_be_link` is not set. Entries of a folder
/// that others may write to must belong to root or to this process's user, because others may have prepared them.
pub(super) fn reach(path: &Path, last_may_be_link: bool) -> io::Result<OwnedFd> {
    let mut walk = Walk::begin(path, last_may_be_link)?;
    while let Some(name) = walk.ahead.pop_front() {
        walk.step(&name).map_err(|error| if error.get_ref().is_some() { error } else { about(&walk.at, error) })?;
    }
    Ok(walk.folder)
}

struct Walk {
    folder: OwnedFd,
    /// The path of `folder`, for errors.
    at: PathBuf,
    ahead: VecDeque<OsString>,
    links: usize,
    last_may_be_link: bool,
}

fn names(path: &Path) -> impl DoubleEndedIterator<Item = OsString> {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

impl Walk {
    fn begin(path: &Path, last_may_be_link: bool) -> io::Result<Self> {
        let at = PathBuf::from(if path.is_absolute() { "/" } else { "." });
        let folder = open(&at, ON_THE_WAY, Mode::empty()).map_err(|error| about(&at, error))?;
        Ok(Self { folder, at, ahead: names(path).collect(), links: 0, last_may_be_link })
    }

    /// Goes on to the next name.
    fn step(&mut self, name: &OsString) -> io::Result<()> {
        let next = self.at.join(name);
        let above = fstat(&self.folder)?;
        let found = self.find_or_make(name)?;
        // The owner of a folder can write to it, so an untrusted owner counts too.
        let is_prepared = is_open_to_others(&above) || !is_trusted(above.st_uid);
        if is_prepared && !is_trusted(found.st_uid) && name != ".." {
            let owner = found.st_uid;
            let problem = format!("belongs to user {owner}, who could prepare it in a folder that others may write to");
            return Err(refuse(&next, problem));
        }
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Symlink => self.follow(name, &next),
            FileType::Directory => {
                let opened =
                    openat(&self.folder, name, ON_THE_WAY, Mode::empty()).map_err(|error| about(&next, error))?;
                let is_same = fstat(&opened).is_ok_and(|it| (it.st_dev, it.st_ino) == (found.st_dev, found.st_ino));
                if !is_same && name != ".." {
                    return Err(refuse(&next, "was replaced while it was checked"));
                }
                (self.folder, self.at) = (opened, next);
                Ok(())
            }
            _ => Err(io::Error::new(io::ErrorKind::NotADirectory, format!("{}: is not a folder", next.display()))),
        }
    }

    fn find_or_make(&self, name: &OsString) -> io::Result<Stat> {
        let find = || statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW);
        let found = match find() {
            Err(Errno::NOENT) => match mkdirat(&self.folder, name, MADE) {
                // Another process created it meanwhile: it is checked like anything that existed before.
                Ok(()) | Err(Errno::EXIST) => find(),
                Err(error) => Err(error),
            },
            found => found,
        };
        found.map_err(|error| about(&self.at.join(name), error))
    }

    fn follow(&mut self, name: &OsString, next: &Path) -> io::Result<()> {
        if self.ahead.is_empty() && !self.last_may_be_link {
            return Err(refuse(next, "is a symbolic link; name the folder itself"));
        }
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(about(next, Errno::LOOP));
        }
        let target = readlinkat(&self.folder, name, Vec::new()).map_err(|error| about(next, error))?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            let root = Self::begin(&target, true)?;
            (self.folder, self.at) = (root.folder, root.at);
        }
        for name in names(&target).rev() {
            self.ahead.push_front(name);
        }
        Ok(())
    }
}
