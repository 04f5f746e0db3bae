//! Recordings that other tools wrote, one file a format. Each becomes a `Tape`, like the product's own.
//!
//! Enters: text or SQLite files, recognised by what is in them, and not by their names. Invariants: a file is read as a
//! stream; a line or row that cannot be read is counted, and no other is lost; what a format does not contain stays
//! unknown.

mod allocations;
pub(crate) mod fairscale;
mod nsight;
mod nvidia_smi;
mod nvprof;
mod onnx_runtime;
pub(crate) mod ort_memory;
mod readings;
mod torch_snapshot;

use super::SkippedLines;
use super::lines::{Fault, File, refuse};
use super::rows;
use super::schema;
use super::tape::Tape;
use crate::source::OpenError;
use serde_json::de::IoRead;
use std::io::{BufReader, Read};
use std::path::Path;

/// What every SQLite file begins with.
const SQLITE: &[u8] = b"SQLite format 3\0";
/// Where in it the number of the program stands that it belongs to, and that number for recordings.
const APPLICATION_AT: std::ops::Range<usize> = 68..72;

/// Whether a file is a recording in the product's own format, or may have become one: a killed recorder can leave a
/// file that is still empty, with everything in its journal.
pub(crate) fn is_own(path: &Path) -> bool {
    let Some(header) = header(path) else { return false };
    let application = header.get(APPLICATION_AT).map(|bytes| bytes == super::APPLICATION_ID.to_be_bytes().as_slice());
    header.starts_with(SQLITE) && application.unwrap_or(false) || header.is_empty() && has_journal(path)
}

/// The first bytes of a regular file; `None` if it is none, or cannot be read.
fn header(path: &Path) -> Option<Vec<u8>> {
    // Opening a FIFO would wait for a writer.
    if !path.is_file() {
        return None;
    }
    let mut header = Vec::new();
    std::fs::File::open(path).ok()?.take(100).read_to_end(&mut header).ok()?;
    Some(header)
}

/// At most so many of the first bytes of a file, unpacked; none if it cannot be read.
pub(crate) fn begin_of(path: &Path, most: usize) -> Vec<u8> {
    let mut begin = Vec::new();
    if let Ok(file) = File::open(path) {
        // What was read before an error is a begin too.
        let _ = file.bytes().take(most as u64).read_to_end(&mut begin);
    }
    begin
}

/// The bytes of a file, unpacked, up to a limit.
///
/// # Errors
/// It cannot be read.
pub(crate) fn bytes_of(path: &Path, most: u64) -> Result<impl Read, OpenError> {
    Ok(File::open(path)?.bytes_up_to(most))
}

/// Reads the SQLite file of another tool.
fn profile(path: &Path) -> Result<Tape, OpenError> {
    let file = rows::File::open_any(path)?;
    if file.has_table(nvprof::TABLE) {
        nvprof::tape(file)
    } else if file.has_table(nsight::TABLE) {
        nsight::tape(file)
    } else {
        Err(refuse(
            "recording_unreadable",
            path,
            "is not a recording of highwater, and has no table of nvprof's or \
            Nsight Systems' memory events (nsys profile --cuda-memory-usage=true writes them)",
        ))
    }
}

fn has_journal(path: &Path) -> bool {
    schema::beside(path, schema::WAL).exists()
}

/// Reads a file that is one JSON object, as a stream.
///
/// # Errors
/// It cannot be read, is too large, or is not what `read` wants; says where.
pub(crate) fn json_of(
    path: &Path,
    read: impl FnOnce(&mut serde_json::Deserializer<IoRead<BufReader<Box<dyn Read>>>>) -> Result<(), serde_json::Error>,
) -> Result<(), OpenError> {
    let file = File::open(path)?;
    let reader: Box<dyn Read> = Box::new(file.bytes());
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(reader));
    let done = read(&mut deserializer).and_then(|()| deserializer.end());
    done.map_err(|error| refuse("recording_unreadable", path, error))
}

/// Reads a file of another tool.
///
/// # Errors
/// If it is of no known format, has no reading, or exceeds the bounds of `docs/recordings.md`.
pub(super) fn tape(path: &Path) -> Result<Tape, OpenError> {
    if header(path).is_some_and(|header| header.starts_with(SQLITE)) {
        return profile(path);
    }
    let file = File::open(path)?;
    if torch_snapshot::is_one(path) {
        return torch_snapshot::tape(path, &file);
    }
    let first = match file.lines().next().map(|(_, line)| line) {
        Some(Ok(line)) => line.trim().trim_start_matches('\u{feff}').to_owned(),
        Some(Err(Fault::File(problem))) => return Err(refuse("recording_too_large", path, problem)),
        Some(Err(Fault::Line(_))) | None => {
            return Err(refuse("recording_unreadable", path, "is empty, or is not text"));
        }
    };
    if onnx_runtime::is_line(&first) {
        onnx_runtime::tape(path, &file)
    } else if nvidia_smi::is_first_line(&first) {
        nvidia_smi::tape(path, &file)
    } else {
        Err(refuse("recording_unreadable", path, KNOWN))
    }
}

const KNOWN: &str = "is no recording that highwater knows: a SQLite file of highwater, nvprof or Nsight Systems, a folder \
                     with nvml_1khz.csv, a memory snapshot of PyTorch, lines of `<device> <nanoseconds> <bytes>`, or CSV of nvidia-smi --query-gpu";

/// What is said of a last line that a tool was still writing.
const CUT_OFF: &str = "it does not end with a newline, so it may be cut off";

/// Passes every line of a text file to `take`, without its end. A line that a tool was still writing has no newline, and
/// its last number may be cut off, so it is not used.
fn each_line(
    path: &Path,
    file: &File,
    skipped: &mut SkippedLines,
    mut take: impl FnMut(&str) -> Result<(), Fault>,
) -> Result<(), OpenError> {
    for (number, line) in file.lines() {
        let taken = line.and_then(|text| match text.strip_suffix('\n') {
            Some(whole) => take(whole.trim().trim_start_matches('\u{feff}')),
            None => Err(Fault::Line(CUT_OFF.to_owned())),
        });
        match taken {
            Ok(()) => {}
            Err(Fault::Line(problem)) => skipped.add(path, number, &problem),
            Err(Fault::File(problem)) => return Err(refuse("recording_unreadable", path, problem)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::tape::Times;

    /// A file of this name with this text, imported.
    pub(super) fn imported(name: &str, text: &str) -> Result<Tape, OpenError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        tape(&path)
    }

    /// Files that the tools wrote on an H200 while a job trained on it.
    #[test]
    fn files_of_the_tools_themselves_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/imports");
        let read = |name: &str| {
            let tape = tape(&folder.join(name)).expect(name);
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
        let known = &read("smi_all.csv").devices[0];
        assert_eq!((known.index.as_str(), known.name.as_deref()), ("0", Some("NVIDIA H200")));
        assert_eq!(
            (known.pci_bus_id.as_deref(), known.memory_total_bytes),
            (Some("00000000:00:06.0"), Some(143_771 << 20))
        );
        assert_eq!(read("memory_usage.txt").tracks[0].points().next(), Some((14_045, Some(35_452_223_488))));
    }

    #[test]
    fn a_file_of_no_known_format_is_refused_with_the_formats_that_are_known() {
        let error = imported("job.log", "epoch 1, loss 3.1\n").expect_err("a log");
        assert!(error.message.ends_with(KNOWN), "{error:?}");
        let error = imported("empty.txt", "\n\n").expect_err("nothing");
        assert!(error.message.ends_with("is empty, or is not text"), "{error:?}");
    }
}
