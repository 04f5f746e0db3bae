//! Reads recordings of every format into reports.

mod kineto;
mod layered;
mod logged;
mod nsight;
mod played;
mod recorded;
mod work;

use super::model::Report;
use super::room::Room;
use crate::formats::FileFormat;
use crate::import::polled::Hints;
use highwater_core::source::OpenError;
use highwater_engine::offline::Settings;
use std::path::Path;

impl Report {
    /// Reads a recording of any format. A recording without phases and findings of its own is played through the
    /// detectors with these settings.
    ///
    /// # Errors
    /// It is missing, is not a recording, or exceeds the bounds of `docs/recordings.md`.
    pub fn open(path: &Path, room: Room, settings: &Settings) -> Result<Self, OpenError> {
        Self::open_with(path, room, settings, &Hints::default())
    }

    /// The same, with what the user says of a log that does not say it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: &Path, room: Room, settings: &Settings, hints: &Hints) -> Result<Self, OpenError> {
        let format = if hints.columns.is_some() { FileFormat::NvidiaSmi } else { FileFormat::of(path)? };
        match format {
            FileFormat::Own => recorded::open(path, room),
            FileFormat::Kineto => kineto::open(path, room),
            FileFormat::NsightSystems => nsight::open(path, room, settings, hints),
            FileFormat::FairScale => layered::open(path, room),
            FileFormat::TrainingLog => logged::open(path, room),
            FileFormat::Folder
            | FileFormat::OnnxRuntime
            | FileFormat::NvidiaSmi
            | FileFormat::SmiTable
            | FileFormat::SmiQuery
            | FileFormat::Monitor
            | FileFormat::JsonLines
            | FileFormat::Nvprof
            | FileFormat::TorchSnapshot
            | FileFormat::MemoryTimeline => played::open(format, path, room, settings, hints),
        }
    }

    /// Reads a recording in our own format, as captures are.
    ///
    /// # Errors
    /// It is missing, or is not such a recording.
    pub fn open_own(path: &Path, room: Room) -> Result<Self, OpenError> {
        recorded::open(path, room)
    }
}
