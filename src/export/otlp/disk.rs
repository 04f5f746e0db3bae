//! The queue's files, one for each request, so that a restart loses nothing.
//!
//! Enters: payloads. Leaves: the same payloads, to this process or the next. A file is written under a temporary name and
//! renamed, so that a killed process leaves whole files or none. A checksum detects files that a power failure damaged.
//! Files are not synced: they survive the process, because the page cache does. If the disk refuses a write, no point
//! is lost: the payload stays in memory, and the failure is logged once. A file that cannot be read for now stays too:
//! only a wrong checksum or a missing file is damage. No other user may write to the folder, and no link in it is
//! followed ([`Folder`]).

use super::stats::Signal;
use bytes::Bytes;
use flate2::Crc;
use highwater_engine::files::Folder;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;

/// The end of a whole file's name: `NUMBER-SIGNAL-POINTS.otlp`.
const SUFFIX: &str = ".otlp";
/// The end of the name of a file that is being written.
const TORN_SUFFIX: &str = ".partial";
/// The file that the process that owns the queue locks.
const LOCK: &str = "otlp.lock";
/// The size of the checksum behind the payload, bytes.
const CHECKSUM_BYTES: usize = 4;

/// A folder of requests.
#[derive(Debug)]
pub struct Disk {
    folder: Folder,
    names: std::collections::BTreeMap<u64, String>,
    left: Vec<LeftoverRequest>,
    refuses: bool,
    _lock: OwnedFd,
}

/// The result of reading a request.
#[derive(Debug)]
pub(super) enum Read {
    /// The payload.
    Whole(Bytes),
    /// It is missing, or not what was written.
    Damaged,
    /// It cannot be read now, but may be later.
    Failed(io::Error),
}

/// A request that an earlier process left.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftoverRequest {
    pub number: u64,
    pub signal: Signal,
    pub points: u64,
    pub bytes: usize,
}

impl Disk {
    /// Opens the folder for this process alone, and creates it if it is missing. Files with other names are left alone.
    ///
    /// # Errors
    /// If the folder cannot be created, written or listed, another process uses it, others may write to it, or the name
    /// of a request belongs to something other than a file of this process's user. Each error names the path.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let folder = Folder::open(folder)?;
        // Two daemons would send each other's requests, and overwrite them.
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
                // A file that has disappeared since it was listed is ignored.
                let Some(length) = self.folder.size(&name)? else { continue };
                let bytes = usize::try_from(length).unwrap_or(usize::MAX).saturating_sub(CHECKSUM_BYTES);
                self.left.push(LeftoverRequest { number, signal, points, bytes });
                self.names.insert(number, name);
            }
        }
        self.left.sort_by_key(|left| left.number);
        Ok(())
    }

    /// The requests that an earlier process left, oldest first.
    pub(super) fn left(&self) -> Vec<LeftoverRequest> {
        self.left.clone()
    }

    /// Writes a request. Returns whether it is on disk.
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
                    tracing::warn!(
                        %error,
                        folder = %self.folder.path().display(),
                        "otlp.queue_dir: cannot be written to; requests stay in memory"
                    );
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
            // The rest is not a whole file. If it cannot be removed now, the next start removes it.
            let _ = self.folder.remove(&torn);
        }
        written
    }

    /// The payload of a request of `bytes` bytes.
    pub(super) fn read(&self, number: u64, bytes: usize) -> Read {
        let Some(name) = self.names.get(&number) else { return Read::Damaged };
        let mut content = Vec::with_capacity(bytes + CHECKSUM_BYTES);
        // Reading one byte more than expected is enough to detect damage.
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
            tracing::warn!(%error, "otlp.queue_dir: a finished request cannot be removed");
        }
    }
}

/// The payload without its checksum; `None` if the checksum does not match.
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
    // No process reaches such numbers. A name that has them is not ours, and must not overflow a sum.
    let is_ours = number <= u64::from(u32::MAX) << 16 && points <= u64::from(u32::MAX) && parts.next().is_none();
    is_ours.then_some((number, signal, points))
}
