//! The queue's files: one for each request, so that a restart loses nothing.
//!
//! Enters: payloads. Leaves: the same, also to the next process. A file is written beside its name and renamed, so
//! that a killed process leaves whole files or none; a checksum finds what a lost power supply tore. Files are not
//! synced: they outlive the process, and the page cache outlives it too. A disk that refuses costs no point: the payload
//! stays in memory, and that is told once.

use super::stats::Signal;
use bytes::Bytes;
use flate2::Crc;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::path::{Path, PathBuf};

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
    folder: PathBuf,
    names: std::collections::BTreeMap<u64, String>,
    left: Vec<Left>,
    refuses: bool,
    _lock: File,
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
    /// Where the folder cannot be made, written or listed, or another process has it.
    pub fn open(folder: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let lock = lock(folder)?;
        let (folder, names) = (folder.to_owned(), Default::default());
        let mut disk = Self { folder, names, left: Vec::new(), refuses: false, _lock: lock };
        disk.find_left()?;
        Ok(disk)
    }

    fn find_left(&mut self) -> std::io::Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.ends_with(TORN_SUFFIX) {
                std::fs::remove_file(entry.path())?;
            } else if let Some((number, signal, points)) = parse(&name) {
                let length = usize::try_from(entry.metadata()?.len()).unwrap_or(usize::MAX);
                let bytes = length.saturating_sub(CHECKSUM_BYTES);
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
                    tracing::warn!(%error, folder = %self.folder.display(), "otlp.queue_dir: kept in memory instead");
                }
                self.refuses = true;
                false
            }
        }
    }

    fn try_write(&self, name: &str, payload: &[u8]) -> std::io::Result<()> {
        let torn = self.folder.join(format!("{name}{TORN_SUFFIX}"));
        let mut content = Vec::with_capacity(payload.len() + CHECKSUM_BYTES);
        content.extend_from_slice(payload);
        content.extend_from_slice(&checksum(payload).to_le_bytes());
        let written = std::fs::write(&torn, content).and_then(|()| std::fs::rename(&torn, self.folder.join(name)));
        if written.is_err() {
            // What is left of it is no whole file; the next start removes it where this one cannot.
            let _ = std::fs::remove_file(&torn);
        }
        written
    }

    /// The payload of a request; `None` where its file is damaged or gone.
    pub(super) fn read(&self, number: u64) -> Option<Bytes> {
        let mut content = std::fs::read(self.folder.join(self.names.get(&number)?)).ok()?;
        let expected = content.split_off(content.len().checked_sub(CHECKSUM_BYTES)?);
        (expected == checksum(&content).to_le_bytes()).then(|| content.into())
    }

    /// Removes a request.
    pub(super) fn remove(&mut self, number: u64) {
        let Some(name) = self.names.remove(&number) else { return };
        if let Err(error) = std::fs::remove_file(self.folder.join(&name)) {
            tracing::warn!(%error, name, "otlp.queue_dir: a request that is done with cannot be removed");
        }
    }
}

/// Takes the folder for this process, for as long as the file is open. Two daemons would send each other's requests, and
/// write over them.
fn lock(folder: &Path) -> std::io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(folder.join(LOCK))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(std::io::Error::other("another process keeps its queue here")),
        Err(error) => Err(error.into()),
    }
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
