//! Readers of other tools' files, one module a format.
//!
//! Enters: files whose format `formats` has recognized. Leaves: a `Tape`, as of the product's own recordings, for formats with
//! memory over time; `fairscale` and `ort_memory` pass their records to a function instead, and `allocator_history` is for advice. Invariants: a file is read as a
//! stream; a line or row that cannot be read is counted, and no other is lost; what a format does not contain stays unknown.

mod allocations;
pub(crate) mod allocator_history;
pub(crate) mod fairscale;
pub(crate) mod memory_timeline;
pub(crate) mod nsight;
pub(crate) mod nvprof;
pub(crate) mod onnx_runtime;
pub(crate) mod ort_memory;
pub mod polled;
mod readings;
pub(crate) mod torch_snapshot;

use highwater_core::source::OpenError;
pub use highwater_engine::recording::lines::{Fault, LineFile, refuse};
use highwater_engine::recording::{FileProblem, SkippedLines};
use serde_json::de::IoRead;
use serde_json::error::Category;
use std::io::{BufReader, Read};
use std::path::Path;

/// The bytes of a file, unpacked, up to a limit.
///
/// # Errors
/// It cannot be read.
pub fn bytes_of(path: &Path, most: u64) -> Result<impl Read, OpenError> {
    Ok(LineFile::open(path)?.bytes_up_to(most))
}

/// Reads a file that is one JSON object, as a stream.
///
/// # Errors
/// It cannot be read, is too large, or is not what `read` wants; says where.
pub(crate) fn json_of(
    path: &Path,
    read: impl FnOnce(&mut serde_json::Deserializer<IoRead<BufReader<Box<dyn Read>>>>) -> Result<(), serde_json::Error>,
) -> Result<(), OpenError> {
    let file = LineFile::open(path)?;
    let reader: Box<dyn Read> = Box::new(file.bytes());
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(reader));
    let done = read(&mut deserializer).and_then(|()| deserializer.end());
    done.map_err(|error| refuse("recording_unreadable", path, json_problem(&error)))
}

/// What is wrong with a file of JSON. The parser's own words are about its types.
fn json_problem(error: &serde_json::Error) -> String {
    const OF_TYPES: [&str; 6] =
        ["invalid type", "invalid value", "invalid length", "missing field", "duplicate field", "unknown variant"];
    let (text, place) = (error.to_string(), format!("line {}, column {}", error.line(), error.column()));
    match error.classify() {
        Category::Eof => format!("it ends in the middle, in {place}"),
        Category::Syntax => format!("it is no JSON from {place} on"),
        Category::Data if OF_TYPES.iter().any(|begin| text.starts_with(begin)) => {
            format!("something in it is of another form than what is read: {place}")
        }
        Category::Data | Category::Io => text,
    }
}

/// The problem that is reported for a last line that a tool was still writing.
fn cut_off() -> FileProblem {
    FileProblem::malformed("it does not end with a newline, so it may be cut off")
}

/// A line without its end, and without the mark that begins some files.
pub(crate) fn trimmed(line: &str) -> &str {
    line.trim().trim_start_matches('\u{feff}')
}

/// Passes every line of a text file to `take`, without its end. A line that a tool was still writing has no newline, and
/// its last number may be cut off, so it is not used.
fn each_line(
    path: &Path,
    file: &LineFile,
    skipped: &mut SkippedLines,
    mut take: impl FnMut(&str) -> Result<(), Fault>,
) -> Result<(), OpenError> {
    for (number, line) in file.lines() {
        let taken = line.and_then(|text| match text.strip_suffix('\n') {
            Some(whole) => take(trimmed(whole)),
            None => Err(Fault::Line(cut_off())),
        });
        match taken {
            Ok(()) => {}
            Err(Fault::Line(problem)) => skipped.add(path, number, problem),
            Err(Fault::File(problem)) => return Err(file.refused(&problem)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::tape_of;
    use highwater_engine::recording::tape::{Tape, Times};

    /// A file of this name with this text, imported.
    pub(super) fn imported(name: &str, text: &str) -> Result<Tape, OpenError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        tape_of(&path)
    }

    /// Files that the tools wrote on an H200 while a job trained on it.
    #[test]
    fn files_of_the_tools_themselves_are_read() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("tests/data/imports");
        let read = |name: &str| {
            let tape = tape_of(&folder.join(name)).expect(name);
            assert_eq!((tape.skipped.count, tape.tracks.len()), (0, 1), "{name}");
            tape
        };
        for name in ["smi_all.csv", "smi_noheader.csv", "smi_nounits.csv", "smi_bare.csv"] {
            let tape = read(name);
            assert_eq!(tape.tracks[0].used_at(tape.end_ns), Some(33_195 << 20), "{name}");
            let has_times = !name.contains("bare");
            assert_eq!(tape.format.times, if has_times { Times::Relative } else { Times::Readings }, "{name}");
            let length_ms = (tape.end_ns - tape.begin_ns) / 1_000_000;
            assert!((15..400).contains(&length_ms), "{name}: {length_ms} ms");
        }
        // Of the same kind of GPU, without a job, and with one that holds 1,634 MiB.
        for (name, used) in
            [("smi_table.txt", 0), ("smi_query.xml", 0), ("dmon.txt", 0), ("dmon.csv", 0), ("pmon.txt", 1_634 << 20)]
        {
            let tape = read(name);
            assert_eq!(tape.tracks[0].used_at(tape.end_ns), Some(used), "{name}");
            assert_eq!(tape.format.times, Times::Relative, "{name}");
        }
        assert_eq!(read("smi_table.txt").devices[0].name.as_deref(), Some("NVIDIA H200"));
        assert_eq!(read("smi_query.xml").devices[0].memory_total_bytes, Some(143_771 << 20));
        let known = &read("smi_all.csv").devices[0];
        assert_eq!((known.index.as_str(), known.name.as_deref()), ("0", Some("NVIDIA H200")));
        assert_eq!(
            (known.pci_bus_id.as_deref(), known.memory_total_bytes),
            (Some("00000000:00:06.0"), Some(143_771 << 20))
        );
        assert_eq!(read("memory_usage.txt").tracks[0].points().next(), Some((14_045, Some(35_452_223_488))));
    }
}
