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

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::SECOND_NS;

    /// Why a file of this name and content is not played; `None` if it is.
    fn refused(name: &str, content: &str) -> Option<String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("written");
        imported(&path, FileFormat::of(&path).expect("a known format"), &Hints::default())
            .err()
            .map(|error| error.message)
    }

    #[test]
    fn what_has_no_memory_over_time_is_not_played_and_is_named() {
        let trace = r#"{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 3}]}"#;
        let message = refused("trace.json", trace).expect("no memory");
        assert!(
            message.contains("has no memory of GPUs over time") && message.contains("`highwater report` reads it"),
            "{message}"
        );
        let ort = format!("0 {} 1048576\n0 {} 2097152\n", 5 * SECOND_NS, 6 * SECOND_NS);
        assert_eq!(refused("memory.txt", &ort), None, "what ONNX Runtime's poller writes is played");
        let documented =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reports.md")).expect("docs");
        let sentence =
            "plays all of these files but traces, exports of Nsight without memory, training logs and layer traces";
        assert!(documented.contains(sentence));
    }
}
