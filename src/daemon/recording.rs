//! Records this node's GPUs into one file: the daemon without HTTP, OTLP and captures.
//!
//! Enters: settings, the file's path, and annotations over the sockets. Leaves: the file. Invariant: the file has begun
//! when [`start`](Recording::start) returns, so a command that starts afterwards is recorded from its first
//! millisecond.

use super::parts::scenario;
use super::readers::Readers;
use super::sockets::Sockets;
use crate::capture::{Ended, Profile, Whole};
use crate::config::Settings;
use anyhow::Context as _;
use highwater_engine::recording::schema;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The thread that writes a file.
type Writer = JoinHandle<anyhow::Result<Ended>>;

/// A recording in progress.
pub struct Recording {
    path: PathBuf,
    writer: Writer,
    stop_writer: Arc<AtomicBool>,
    readers: Readers,
}

/// The format of the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// A SQLite database with everything.
    #[default]
    Sqlite,
    /// Lines of `<device> <nanoseconds since start> <bytes>`, as ONNX Runtime's profiler writes them.
    Ort,
}

/// Why nothing is recorded.
#[derive(Debug, thiserror::Error)]
pub enum Unrecorded {
    /// What was asked for cannot be had: the file exists, there is no GPU, no such scenario.
    #[error(transparent)]
    Asked(anyhow::Error),
    /// The system prevents it: a limit on files, file sizes or threads, a full disk, or a file that cannot be created.
    #[error(transparent)]
    Machine(anyhow::Error),
    /// No socket for annotations can be bound. Nothing was begun.
    #[error(transparent)]
    Sockets(anyhow::Error),
}

impl Recording {
    /// Opens the source and the sockets, and begins the file.
    ///
    /// # Errors
    /// The scenario cannot be read, a socket cannot be bound, the source cannot be opened, or the file cannot be
    /// written or exists.
    pub fn start(mut settings: Settings, path: &Path, format: OutputFormat, note: &str) -> Result<Self, Unrecorded> {
        let path = free(path).map_err(Unrecorded::Asked)?;
        settings.captures.directory = None;
        settings.captures.is_recording = true;
        let scenario = scenario(&settings).map_err(Unrecorded::Asked)?;
        let sockets = Sockets::open(&settings).map_err(Unrecorded::Sockets)?;
        let readers = Readers::start(settings, scenario, sockets).map_err(Unrecorded::Machine)?;
        let begun = readers
            .wait_for_node()
            .map_err(Unrecorded::Asked)
            .and_then(|()| Self::begin(&readers, path.clone(), format, note).map_err(Unrecorded::Machine));
        match begun {
            Ok((writer, stop_writer)) => Ok(Self { path, writer, stop_writer, readers }),
            Err(error) => {
                readers.stop();
                Err(error)
            }
        }
    }

    /// Begins the file, and starts the thread that writes it.
    fn begin(
        readers: &Readers,
        path: PathBuf,
        format: OutputFormat,
        note: &str,
    ) -> anyhow::Result<(Writer, Arc<AtomicBool>)> {
        let stop_writer = Arc::new(AtomicBool::new(false));
        let (stopped, state) = (Arc::clone(&stop_writer), &readers.shared.state);
        let thread = std::thread::Builder::new().name("hw-record".to_owned());
        let writer = match format {
            OutputFormat::Sqlite => {
                let whole = Whole::begin(path, note, state, &readers.shared.intake)?;
                thread.spawn(move || whole.run(&stopped))
            }
            OutputFormat::Ort => {
                let profile = Profile::begin(path, state)?;
                thread.spawn(move || profile.run(&stopped))
            }
        };
        Ok((writer.context("cannot start thread hw-record")?, stop_writer))
    }

    /// The file, with the links of its folder resolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is no longer written: the source went away, or the disk is full.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.writer.is_finished()
    }

    /// Ends the file now, with what is still on its way.
    ///
    /// # Errors
    /// The file could not be written to its end.
    pub fn stop(self) -> anyhow::Result<Ended> {
        self.stop_writer.store(true, Ordering::Relaxed);
        self.writer.thread().unpark();
        let ended = self.writer.join();
        self.readers.stop();
        ended.map_err(|_| anyhow::anyhow!("the thread that writes the recording panicked, which is a bug"))?
    }
}

/// The path of a file that does not exist yet.
fn free(path: &Path) -> anyhow::Result<PathBuf> {
    let path = without_links(path)?;
    // A journal without its file is that of a recording that was killed and then moved.
    for taken in [path.clone(), schema::beside(&path, schema::WAL)] {
        anyhow::ensure!(taken.symlink_metadata().is_err(), "{}: exists, and is not overwritten", taken.display());
    }
    Ok(path)
}

/// The path with the links of its folder resolved: the user means where they point, and SQLite is to follow none.
fn without_links(path: &Path) -> anyhow::Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| anyhow::anyhow!("{}: is not the name of a file", path.display()))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().map_err(|error| anyhow::anyhow!("{}: {error}", folder.display()))?;
    Ok(folder.join(name))
}
