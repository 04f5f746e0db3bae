//! Opens any file that has memory over time as a recording that can be played.
//!
//! Enters: a path. Leaves: a [`Replay`], like one of a file in the product's own format. Absent on purpose: playing it.

use crate::formats::FileFormat;
use crate::import::polled::{Hints, csv, json, monitor, query, table};
use crate::import::{memory_timeline, nsight, nvprof, onnx_runtime, torch_snapshot};
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{LineFile, refuse};
use highwater_engine::recording::tape::Tape;
use highwater_engine::recording::{Options, Replay, refuse_part, rows};
use std::path::Path;

/// Reads a recording of any format that has memory over time.
///
/// # Errors
/// [`OpenError`] if it is missing, is not a recording, has no valid line of memory, or exceeds the bounds of
/// `docs/recordings.md`. Single lines and rows that cannot be read are no error: [`Replay::skipped`] has them.
pub fn open(path: &Path, options: Options) -> Result<Replay, OpenError> {
    open_as(FileFormat::of(path)?, path, options, &Hints::default())
}

/// The same of a file whose format is known, with what the user says of a log.
///
/// # Errors
/// See [`open`].
pub(crate) fn open_as(format: FileFormat, path: &Path, options: Options, hints: &Hints) -> Result<Replay, OpenError> {
    if matches!(format, FileFormat::Own | FileFormat::Folder) {
        return Replay::open(path, options);
    }
    refuse_part(path, options)?;
    Ok(Replay::of(imported(path, format, hints)?, path, options))
}

/// Reads a file of another tool, if it is one that can be played.
fn imported(path: &Path, format: FileFormat, hints: &Hints) -> Result<Tape, OpenError> {
    match format {
        FileFormat::OnnxRuntime => onnx_runtime::tape(path, &LineFile::open(path)?),
        FileFormat::NvidiaSmi => csv::tape(path, &LineFile::open(path)?, hints),
        FileFormat::SmiTable => table::tape(path, &LineFile::open(path)?, hints),
        FileFormat::SmiQuery => query::tape(path, &LineFile::open(path)?, hints),
        FileFormat::Monitor => monitor::tape(path, &LineFile::open(path)?, hints),
        FileFormat::JsonLines => json::tape(path, &LineFile::open(path)?, hints),
        FileFormat::Nvprof => nvprof::tape(rows::RecordingReader::open_any(path)?),
        FileFormat::NsightSystems => nsight::tape(rows::RecordingReader::open_any(path)?),
        FileFormat::TorchSnapshot => torch_snapshot::tape(path, &LineFile::open(path)?),
        FileFormat::MemoryTimeline => memory_timeline::tape(path),
        FileFormat::Own | FileFormat::Folder | FileFormat::Kineto | FileFormat::TrainingLog | FileFormat::FairScale => {
            let why = "has no memory of GPUs over time, which is what is played; `highwater report` reads it";
            Err(refuse("recording_unreadable", path, why))
        }
    }
}

/// Reads a file of another tool, recognized by its contents.
#[cfg(test)]
pub(crate) fn tape_of(path: &Path) -> Result<Tape, OpenError> {
    imported(path, FileFormat::of(path)?, &Hints::default())
}
