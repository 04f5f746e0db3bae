//! The queue's files: one for each request, so that a restart loses nothing.
//!
//! Enters: payloads. Leaves: the same, also to the next process. A file is written beside its name and renamed, so
//! that a killed process leaves whole files or none; a checksum finds what a lost power supply tore. Files are not
//! synced: they outlive the process, and the page cache outlives it too. A disk that refuses costs no point: the payload
//! stays in memory, and that is logged once. A file that cannot be read for now stays too: only a wrong checksum, or that
//! it is not there, is damage. Nobody else may write to the folder, and no link in it is followed ([`Folder`]).

use super::stats::Signal;
use crate::files::Folder;
use bytes::Bytes;
use flate2::Crc;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Ends the name of a whole file: `NUMBER-SIGNAL-POINTS.otlp`.
const SUFFIX: &str = ".otlp";
/// Ends the name of a file that is being written.
const TORN_SUFFIX: &str = ".partial";
/// Is locked by the process whose queue it is.
const LOCK: &str = "otlp.lock";
/// The checksum behind the payload, bytes.
const CHECKSUM_BYTES: usize = 4;

/// A folder of requests.
#[derive(Debug)]
pub struct Disk {
    folder: Folder,
    names: std::collections::BTreeMap<u64, String>,
    left: Vec<Left>,
    refuses: bool,
    _lock: OwnedFd,
}

/// What became of reading a request.
#[derive(Debug)]
pub(super) enum Read {
    /// The payload.
    Whole(Bytes),
    /// It is not there, or not what was written.
    Damaged,
    /// It cannot be read now, and may be later.
    Failed(io::Error),
}

/// A request that an earlier process left.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left {
    pub number: u64,
    pub signal: Signal,
    pub points: u64,
    pub bytes: usize,
}

impl Disk {
    /// The folder, made if it is not there, and this process's alone. Files of other names are left alone.
    ///
    /// # Errors
    /// Where the folder cannot be made, written or listed, another process has it, others may write to it, or the name of
    /// a request is taken by anything else than a file of this process's user. Each names the path.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let folder = Folder::open(folder)?;
        // Two daemons would send each other's requests, and write over them.
        let lock = folder.lock(LOCK, "another process keeps its queue here")?;
        let names = Default::default();
        let mut disk = Self { folder, names, left: Vec::new(), refuses: false, _lock: lock };
        disk.find_left()?;
        Ok(disk)
    }

    fn find_left(&mut self) -> io::Result<()> {
        for name in self.folder.names()? {
            if name.strip_suffix(TORN_SUFFIX).is_some_and(|whole| whole.ends_with(SUFFIX)) {
                self.folder.remove(&name)?;
            } else if let Some((number, signal, points)) = parse(&name) {
                // One that has gone since it was listed is nobody's.
                let Some(length) = self.folder.size(&name)? else { continue };
                let bytes = usize::try_from(length).unwrap_or(usize::MAX).saturating_sub(CHECKSUM_BYTES);
                self.left.push(Left { number, signal, points, bytes });
                self.names.insert(number, name);
            }
        }
        self.left.sort_by_key(|left| left.number);
        Ok(())
    }

    /// What an earlier process left, oldest first.
    pub(super) fn left(&self) -> Vec<Left> {
        self.left.clone()
    }

    /// Writes a request; returns whether it is there.
    pub(super) fn write(&mut self, number: u64, signal: Signal, points: u64, payload: &[u8]) -> bool {
        let name = format!("{number:020}-{}-{points}{SUFFIX}", signal.label());
        match self.try_write(&name, payload) {
            Ok(()) => {
                self.refuses = false;
                self.names.insert(number, name);
                true
            }
            Err(error) => {
                if !self.refuses {
                    tracing::warn!(%error, folder = %self.folder.path().display(), "otlp.queue_dir: kept in memory instead");
                }
                self.refuses = true;
                false
            }
        }
    }

    fn try_write(&self, name: &str, payload: &[u8]) -> io::Result<()> {
        let torn = format!("{name}{TORN_SUFFIX}");
        let mut content = Vec::with_capacity(payload.len() + CHECKSUM_BYTES);
        content.extend_from_slice(payload);
        content.extend_from_slice(&checksum(payload).to_le_bytes());
        let written = self.folder.create_anew(&torn).and_then(|mut file| file.write_all(&content));
        let written = written.and_then(|()| self.folder.rename(&torn, name));
        if written.is_err() {
            // What is left of it is no whole file; the next start removes it where this one cannot.
            let _ = self.folder.remove(&torn);
        }
        written
    }

    /// The payload of a request of so many bytes.
    pub(super) fn read(&self, number: u64, bytes: usize) -> Read {
        let Some(name) = self.names.get(&number) else { return Read::Damaged };
        let mut content = Vec::with_capacity(bytes + CHECKSUM_BYTES);
        // One byte more than there should be is enough to know that it is damaged.
        let most = (bytes + CHECKSUM_BYTES + 1) as u64;
        match self.folder.read(name).and_then(|file| file.take(most).read_to_end(&mut content)) {
            Ok(_) => whole(content).map_or(Read::Damaged, Read::Whole),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Read::Damaged,
            Err(error) => Read::Failed(error),
        }
    }

    /// Removes a request.
    pub(super) fn remove(&mut self, number: u64) {
        let Some(name) = self.names.remove(&number) else { return };
        if let Err(error) = self.folder.remove(&name)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "otlp.queue_dir: a request that is done with cannot be removed");
        }
    }
}

/// What was written, without its checksum; `None` where that does not match.
fn whole(mut content: Vec<u8>) -> Option<Bytes> {
    let expected = content.split_off(content.len().checked_sub(CHECKSUM_BYTES)?);
    (expected == checksum(&content).to_le_bytes()).then(|| content.into())
}

fn checksum(payload: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(payload);
    crc.sum()
}

fn parse(name: &str) -> Option<(u64, Signal, u64)> {
    let mut parts = name.strip_suffix(SUFFIX)?.split('-');
    let (number, label, points) = (parts.next()?, parts.next()?, parts.next()?);
    let signal = Signal::ALL.into_iter().find(|signal| signal.label() == label)?;
    let (number, points): (u64, u64) = (number.parse().ok()?, points.parse().ok()?);
    // No process gets that far; a name that says so is somebody else's, and must not run a sum over.
    let is_ours = number <= u64::from(u32::MAX) << 16 && points <= u64::from(u32::MAX) && parts.next().is_none();
    is_ours.then_some((number, signal, points))
}
