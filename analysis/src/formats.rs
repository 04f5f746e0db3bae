//! The registry of file formats: every format that is read, how it is recognized, and how it is described.
//!
//! Enters: a path. Leaves: the format of the file, recognized by its contents and not by its name. The registry also provides
//! the error message for unknown files and the table of docs/reports.md; a test checks that the fuzz corpus has an input of each
//! text format. Invariants: the file is opened once, and once more by SQLite if it is a database; it is read only as far as the
//! entries need; the first entry that recognizes it wins. Absent on purpose: how a format is read. The code that opens files
//! matches on [`FileFormat`], so the compiler demands a reader for each new format.

use crate::import;
use crate::import::polled::{json, monitor, query, survey, table};
use crate::import::{nsight, nvprof, onnx_runtime, ort_memory};
use highwater_core::source::OpenError;
use highwater_engine::recording::lines::{LineFile, refuse};
use highwater_engine::recording::{rows, schema};
use std::cell::{OnceCell, RefCell};
use std::io::Read;
use std::path::Path;

/// A format of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileFormat {
    /// The product's own, in SQLite.
    Own,
    /// The product's own, as a folder of text files.
    Folder,
    /// ONNX Runtime's NVML profiler.
    OnnxRuntime,
    /// A table of text with the memory of GPUs: `nvidia-smi --query-gpu`, and others.
    NvidiaSmi,
    /// A table for people, printed again and again: `nvidia-smi`, `nvitop`, `gpustat`.
    SmiTable,
    /// `nvidia-smi -q`, also with `-x`.
    SmiQuery,
    /// `nvidia-smi dmon` or `pmon`, `dcgmi dmon`.
    Monitor,
    /// JSON objects with the memory of GPUs.
    JsonLines,
    Nvprof,
    NsightSystems,
    /// A memory snapshot of PyTorch.
    TorchSnapshot,
    /// A memory timeline of PyTorch's profiler.
    MemoryTimeline,
    /// A trace of PyTorch's profiler.
    Kineto,
    /// A training log with ONNX Runtime's memory statistics.
    TrainingLog,
    /// Traces of FairScale's layers.
    FairScale,
}

/// What is known of a format.
struct Known {
    format: FileFormat,
    /// Its name in a sentence.
    name: &'static str,
    /// Its row in docs/reports.md: the file, its times, and what it lacks.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test holds the document to it"))]
    row: [&'static str; 3],
    sniff: fn(&Head<'_>) -> bool,
}

/// Every format, in the order in which files are tried: the surest signs first.
const FORMATS: [Known; 15] = [
    Known {
        format: FileFormat::Own,
        name: "a recording or capture of highwater",
        row: [
            "a recording of `highwater run` or `highwater record`, or a capture ([recordings.md](recordings.md))",
            "Unix times",
            "",
        ],
        sniff: |head| head.is_own(),
    },
    Known {
        format: FileFormat::Folder,
        name: "a folder with nvml_1khz.csv",
        row: [
            "a folder with `nvml_1khz.csv` ([scenarios.md](scenarios.md#recordings))",
            "Unix times",
            "phases and findings, which `report` derives from its annotations as the daemon does",
        ],
        // A path that does not exist is refused when it is opened as a folder.
        sniff: |head| !head.is_file(),
    },
    Known {
        format: FileFormat::Nvprof,
        name: "SQLite of nvprof",
        row: [
            "SQLite of nvprof (`--track-memory-allocations on`): table `CUPTI_ACTIVITY_KIND_MEMORY`",
            "Unix times",
            "memory that CUDA itself takes, phases",
        ],
        sniff: |head| head.has_table(nvprof::TABLE),
    },
    Known {
        format: FileFormat::NsightSystems,
        name: "SQLite of Nsight Systems (nsys export -t sqlite)",
        row: [
            "[SQLite of Nsight Systems](#exports-of-nsight-systems) (`nsys export -t sqlite`)",
            "Unix times, if it has the session's begin",
            "memory that CUDA itself takes; all of it without `--cuda-memory-usage=true`",
        ],
        sniff: |head| {
            let has_any = || nsight::WORK.into_iter().chain([nsight::RANGES]).any(|table| head.has_table(table));
            head.has_table(nsight::MEMORY) || head.has_table("StringIds") && has_any()
        },
    },
    Known {
        format: FileFormat::TorchSnapshot,
        name: "a memory snapshot of PyTorch",
        row: [
            "a memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), also packed by gzip",
            "Unix times; numbers of entries before PyTorch 2.1",
            "memory outside PyTorch's allocator, the GPUs' sizes, phases",
        ],
        // A pickle, of protocol 0 to 5.
        sniff: |head| head.with_begin(2, |begin| matches!(begin, [0x80, 0..=5])),
    },
    Known {
        format: FileFormat::Kineto,
        name: "a trace of PyTorch's profiler",
        row: [
            "a [trace of PyTorch's profiler](#traces-of-pytorchs-profiler), also packed by gzip",
            "Unix times, if it has `baseTimeNanoseconds`",
            "memory outside PyTorch's allocator; all of it without `profile_memory=True`",
        ],
        // Kineto writes the version first, older ones the events, and the first one nothing around them.
        sniff: |head| {
            head.is_object_with(&["traceEvents", "schemaVersion"]) || head.with_begin(MEMBERS, is_list_of_events)
        },
    },
    Known {
        format: FileFormat::MemoryTimeline,
        name: "a memory timeline of PyTorch's profiler",
        row: [
            "a [memory timeline of PyTorch's profiler](#memory-timelines-of-pytorchs-profiler) (`export_memory_timeline` to `.raw.json.gz`, \
             `.json.gz` or `.json`)",
            "Unix times",
            "which GPU it is, reserved memory, stacks, phases",
        ],
        sniff: |head| {
            head.with_begin(MEMBERS, |begin| import::memory_timeline::is_begin(&String::from_utf8_lossy(begin)))
        },
    },
    Known {
        format: FileFormat::FairScale,
        name: "FairScale's layer traces",
        row: [
            "[FairScale's layer traces](#fairscales-layer-traces), also packed by gzip",
            "none",
            "the memory of GPUs, times, phases",
        ],
        sniff: |head| head.is_object_with(&[import::fairscale::MEMBER]),
    },
    Known {
        format: FileFormat::TrainingLog,
        name: "a training log with ONNX Runtime's memory statistics",
        row: [
            "a training log with [ONNX Runtime's memory statistics](#onnx-runtimes-memory-statistics), also packed by gzip",
            "numbers of lines",
            "memory of other ranks, the GPUs' sizes, times",
        ],
        sniff: |head| head.with_begin(ort_memory::BEGIN, ort_memory::is_begin),
    },
    Known {
        format: FileFormat::OnnxRuntime,
        name: "lines of `<device> <nanoseconds> <bytes>`",
        row: [
            "`memory_usage.txt` of ONNX Runtime's profiler, or of `highwater record --format ort`: lines of `<device> \
             <nanoseconds since start> <bytes>`",
            "from its begin",
            "the GPUs' sizes and names, phases",
        ],
        sniff: |head| head.first_line().is_some_and(onnx_runtime::is_line),
    },
    Known {
        format: FileFormat::SmiQuery,
        name: "nvidia-smi -q, also with -x",
        row: [
            "`nvidia-smi -q`, also with `-x`, with `-l` or in a loop",
            "local times, shown from the file's begin",
            "readings between its own, phases",
        ],
        sniff: |head| query::is_begin(head.lines()),
    },
    Known {
        format: FileFormat::SmiTable,
        name: "the table of nvidia-smi, nvitop or gpustat, printed again and again",
        row: [
            "the table that `nvidia-smi` prints, with `-l`, in a loop or in `watch`; `nvitop -1`; `gpustat`",
            "local times, shown from the file's begin",
            "readings between its own, phases",
        ],
        sniff: |head| table::is_begin(head.lines()),
    },
    Known {
        format: FileFormat::Monitor,
        name: "nvidia-smi dmon or pmon -s m, dcgmi dmon",
        row: [
            "`nvidia-smi dmon -s m`, `nvidia-smi pmon -s m` (what processes hold together), `dcgmi dmon -e 250,252`",
            "local times with `-o DT`, else numbers of readings",
            "readings between its own, phases",
        ],
        sniff: |head| monitor::is_begin(head.lines()),
    },
    Known {
        format: FileFormat::JsonLines,
        name: "JSON objects with the memory of GPUs",
        row: [
            "JSON objects one after the other: `wandb-events.jsonl`, `gpustat --json`, a script's",
            "[by column](#logs-of-gpus)",
            "readings between its own, phases",
        ],
        sniff: |head| json::is_begin(head.lines()),
    },
    Known {
        format: FileFormat::NvidiaSmi,
        name: "CSV of nvidia-smi --query-gpu, or of others with memory in use",
        row: [
            "CSV of `nvidia-smi --query-gpu=memory.used,… --format=csv`, also with `noheader`, `nounits`, `-l` or `-lms`, \
             and [tables of others](#logs-of-gpus): scripts, exports of W&B and nvitop",
            "local times, shown from the file's begin, or Unix times; without a time, numbers of readings",
            "readings between its own, phases",
        ],
        sniff: |head| survey::is_begin(head.lines()),
    },
];

impl FileFormat {
    /// The format of a file.
    ///
    /// # Errors
    /// It cannot be read, or is of none of them.
    pub(crate) fn of(path: &Path) -> Result<Self, OpenError> {
        let head = Head::of(path);
        if head.is_object_with(&[import::allocator_history::MEMBER]) {
            return Err(head
                .refused("is what PyTorch's allocator did in the first steps of a job: `highwater advise` reads it"));
        }
        if let Some(known) = FORMATS.iter().find(|known| (known.sniff)(&head)) {
            return Ok(known.format);
        }
        // A read error is more useful than "unknown format".
        head.file().as_ref().map_err(Clone::clone)?;
        match head.table_trouble() {
            Some(error) => Err(error),
            None => Err(match head.known_otherwise() {
                Some(why) => head.refused(why),
                None if head.first_line().is_none() => head.refused("is empty, or is not text"),
                None => head.refused(&none_of_them()),
            }),
        }
    }

    /// Its name in a sentence.
    pub(crate) fn name(self) -> &'static str {
        FORMATS.iter().find(|known| known.format == self).map_or("a file", |known| known.name)
    }

    /// Whether a file is a JSON object that soon names this member.
    pub(crate) fn is_object_with(path: &Path, member: &str) -> bool {
        Head::of(path).is_object_with(&[member])
    }

    /// Whether a file is a recording in the product's own format, or may have become one: a killed recorder can leave a file
    /// that is still empty, with everything in its journal.
    pub(crate) fn is_own(path: &Path) -> bool {
        Head::of(path).is_own()
    }
}

/// Why a file of no known format is refused.
fn none_of_them() -> String {
    let names: Vec<_> = FORMATS.iter().map(|known| known.name).collect();
    let (last, others) = names.split_last().expect("there are formats");
    format!(
        "is of no format that highwater reads: {}, or {last}. If it is a table of text, `highwater report --columns` reads it",
        others.join(", ")
    )
}

/// What every SQLite file begins with.
const SQLITE: &[u8] = b"SQLite format 3\0";
/// The position of the application id in SQLite's header.
const APPLICATION_AT: std::ops::Range<usize> = 68..72;
/// Number of stored bytes that are read of a file: the length of SQLite's header.
const STORED: usize = 100;
/// Number of first bytes of a JSON file in which the members that identify its format must appear.
const MEMBERS: usize = 4096;
/// Number of first bytes of a text in which its format must show, and of lines.
const FIRST_BYTES: usize = 64 << 10;
const FIRST_LINES: usize = 64;

/// The first bytes of a file, unpacked, as far as they have been read, and a reader of the rest.
struct Begin {
    read: Vec<u8>,
    rest: Box<dyn Read>,
}

/// The begin of a file, read lazily.
struct Head<'a> {
    path: &'a Path,
    file: OnceCell<Result<LineFile, OpenError>>,
    /// The first bytes as they are stored; `None` if it is no regular file, or cannot be read.
    stored: OnceCell<Option<Vec<u8>>>,
    begin: RefCell<Option<Begin>>,
    lines: OnceCell<Vec<String>>,
    /// Its tables, if it is a SQLite file.
    database: OnceCell<Option<Result<rows::RecordingReader, OpenError>>>,
}

impl<'a> Head<'a> {
    fn of(path: &'a Path) -> Self {
        let (file, stored, lines, database) = (OnceCell::new(), OnceCell::new(), OnceCell::new(), OnceCell::new());
        Self { path, file, stored, begin: RefCell::default(), lines, database }
    }

    fn file(&self) -> &Result<LineFile, OpenError> {
        self.file.get_or_init(|| LineFile::open(self.path))
    }

    fn is_file(&self) -> bool {
        self.path.is_file()
    }

    fn stored(&self) -> Option<&[u8]> {
        let read = || self.file().as_ref().ok()?.stored(STORED).ok();
        self.stored.get_or_init(read).as_deref()
    }

    fn is_own(&self) -> bool {
        let Some(stored) = self.stored() else { return false };
        let application = stored.get(APPLICATION_AT);
        let is_ours = application
            .is_some_and(|bytes| bytes == highwater_engine::recording::APPLICATION_ID.to_be_bytes().as_slice());
        let has_journal = || schema::beside(self.path, schema::WAL).exists();
        stored.starts_with(SQLITE) && is_ours || stored.is_empty() && has_journal()
    }

    /// Calls `look` with the first bytes, unpacked, at most `most`. If reading fails, `look` gets the bytes before the error.
    fn with_begin<T>(&self, most: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        let mut begin = self.begin.borrow_mut();
        let Begin { read, rest } = begin.get_or_insert_with(|| {
            let rest: Box<dyn Read> = match self.file() {
                Ok(file) => Box::new(file.bytes()),
                Err(_) => Box::new(std::io::empty()),
            };
            Begin { read: Vec::new(), rest }
        });
        let missing = most.saturating_sub(read.len());
        let _ = rest.take(missing as u64).read_to_end(read);
        look(read.get(..most).unwrap_or(read))
    }

    /// Whether it is a JSON object that soon names one of these members.
    fn is_object_with(&self, members: &[&str]) -> bool {
        self.with_begin(MEMBERS, |begin| {
            let text = String::from_utf8_lossy(begin);
            text.trim_start().starts_with('{') && members.iter().any(|member| text.contains(&format!("\"{member}\"")))
        })
    }

    /// Its first lines that are not blank, without their ends; none if the first of them is not text.
    fn lines(&self) -> &[String] {
        self.lines.get_or_init(|| {
            self.with_begin(FIRST_BYTES, |begin| {
                let lines = begin.split(|byte| *byte == b'\n').map(|line| line.trim_ascii());
                let lines = lines.filter(|line| !line.is_empty()).take(FIRST_LINES);
                let text = |line| Some(import::trimmed(std::str::from_utf8(line).ok()?).to_owned());
                lines.map_while(text).filter(|line| !line.is_empty()).collect()
            })
        })
    }

    fn first_line(&self) -> Option<&str> {
        self.lines().first().map(String::as_str)
    }

    fn database(&self) -> Option<&Result<rows::RecordingReader, OpenError>> {
        let is_database = || self.stored().is_some_and(|stored| stored.starts_with(SQLITE));
        self.database.get_or_init(|| is_database().then(|| rows::RecordingReader::open_any(self.path))).as_ref()
    }

    /// Whether it is a SQLite file with this table.
    fn has_table(&self, table: &str) -> bool {
        self.database().is_some_and(|file| file.as_ref().is_ok_and(|file| file.has_table(table)))
    }

    /// What a file is that cannot be read, and what to do with it; `None` if that is not known.
    fn known_otherwise(&self) -> Option<&'static str> {
        let is_picture = self.with_begin(MEMBERS, |begin| {
            let text = String::from_utf8_lossy(begin);
            text.trim_start().starts_with("<html>") && text.contains("data:image/png;base64,")
        });
        if is_picture {
            return Some(
                "is a page with a picture, as `export_memory_timeline` of PyTorch's profiler writes to a name that ends in .html: \
                 export it to one that ends in .raw.json.gz",
            );
        }
        let is_of_nsight = self.path.extension().is_some_and(|ending| ending == "nsys-rep" || ending == "qdrep");
        is_of_nsight.then_some(
            "is a report of Nsight Systems: `nsys export -t sqlite FILE` makes the SQLite that highwater reads",
        )
    }

    /// If it is a SQLite file: the error that its tables cannot be opened, or are of no known format.
    fn table_trouble(&self) -> Option<OpenError> {
        self.database().map(|file| match file {
            Err(error) => error.clone(),
            Ok(_) if self.has_table("CUPTI_ACTIVITY_KIND_RUNTIME") && self.has_table("StringTable") => self.refused(
                "is a profile of nvprof without the memory of GPUs: record it with --track-memory-allocations on",
            ),
            Ok(_) if self.has_table("StringIds") => {
                let parts = [
                    ("CUPTI_ACTIVITY_KIND_RUNTIME", "calls of CUDA"),
                    ("OSRT_API", "calls of the operating system"),
                ];
                let has: Vec<&str> = parts.iter().filter(|(table, _)| self.has_table(table)).map(|(_, name)| *name).collect();
                let has = if has.is_empty() { String::new() } else { format!(" (it has {})", has.join(", ")) };
                self.refused(&format!(
                    "is an export of Nsight Systems in which nothing ran on a GPU{has}: record it with --trace=cuda,nvtx, and with \
                     --cuda-memory-usage=true for memory"
                ))
            }
            Ok(_) => self.refused(&none_of_them()),
        })
    }

    fn refused(&self, why: &str) -> OpenError {
        refuse("recording_unreadable", self.path, why)
    }
}

/// Whether text begins a list of objects, the first of which has a phase, and a time or a name, as events of a trace have.
fn is_list_of_events(begin: &[u8]) -> bool {
    let text = String::from_utf8_lossy(begin);
    let inside = text.trim_start().strip_prefix('[').map(str::trim_start).and_then(|rest| rest.strip_prefix('{'));
    let first = inside.and_then(|rest| rest.split('}').next());
    first.is_some_and(|first| first.contains("\"ph\"") && (first.contains("\"ts\"") || first.contains("\"name\"")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn repository(path: &str) -> std::path::PathBuf {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
    }

    /// The format of a file with these contents.
    fn format_of(contents: &[u8]) -> Result<FileFormat, OpenError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it");
        fs::write(&path, contents).expect("written");
        FileFormat::of(&path)
    }

    #[test]
    fn the_documented_formats_are_the_registry() {
        let rows = FORMATS.iter().map(|known| {
            let [file, times, lacks] = known.row;
            format!("| {file} | {times} |{}{lacks} |\n", if lacks.is_empty() { "" } else { " " })
        });
        let table = format!("| file | its times | what it lacks |\n|---|---|---|\n{}", rows.collect::<String>());
        let documented = fs::read_to_string(repository("docs/reports.md")).expect("it is there");
        assert!(documented.contains(&table), "docs/reports.md needs this table:\n{table}");
    }

    #[test]
    fn the_fuzz_corpus_has_a_file_of_each_text_format() {
        let mut missing: Vec<_> = FORMATS.iter().map(|known| known.format).collect();
        // Folders and SQLite files have fuzz targets that write them: `replay`, `recording`, and `import` with rows.
        missing.retain(|format| {
            use FileFormat as Is;
            !matches!(format, Is::Own | Is::Folder | Is::Nvprof | Is::NsightSystems)
        });
        for entry in fs::read_dir(repository("fuzz/corpus/import")).expect("a corpus") {
            let input = fs::read(entry.expect("listed").path()).expect("read");
            // The first byte says that the rest is a file.
            let format = input.get(1..).map(format_of);
            missing.retain(|wanted| format != Some(Ok(*wanted)));
        }
        assert_eq!(missing, []);
    }

    #[test]
    fn a_file_is_what_its_surest_sign_says() {
        let cases: [(&[u8], FileFormat); 9] = [
            (b"[ \n {\"name\": \"x\", \"ph\": \"X\", \"ts\": 1}", FileFormat::Kineto),
            (b"\x80\x02}q\x00.", FileFormat::TorchSnapshot),
            (b"{\"schemaVersion\": 1, \"traces\": []}", FileFormat::Kineto),
            (b"  \n{\"traces\": []}", FileFormat::FairScale),
            (b"0 1000 35452223488\n", FileFormat::OnnxRuntime),
            (b"\n \n0 1000 35452223488\n", FileFormat::OnnxRuntime),
            (b"\xef\xbb\xbfindex, memory.used [MiB]\n0, 12 MiB\n", FileFormat::NvidiaSmi),
            (b"12 MiB\n[INFO] - step 1 memory (MiB) | phase: pre_forward_step", FileFormat::TrainingLog),
            (b"12 MiB\n12 MiB\n", FileFormat::NvidiaSmi),
        ];
        for (contents, format) in cases {
            assert_eq!(format_of(contents), Ok(format), "{}", String::from_utf8_lossy(contents));
        }
        assert_eq!(FileFormat::of(&repository("src")), Ok(FileFormat::Folder));
    }

    #[test]
    fn a_file_of_no_known_format_is_refused_with_all_that_are_known() {
        let refused = |contents: &[u8]| format_of(contents).expect_err("not known").message;
        let message = refused(b"epoch 1, loss 3.1\n");
        FORMATS.iter().for_each(|known| assert!(message.contains(known.name), "{message}"));
        for nothing in [&b""[..], b"\n\n", b"\xff\xfe\n"] {
            assert!(refused(nothing).ends_with("is empty, or is not text"));
        }
        // A database of another program, and one that is broken.
        let folder = tempfile::tempdir().expect("a folder");
        let nsys = folder.path().join("it.nsys-rep");
        fs::write(&nsys, b"\x00\xff\x01").expect("written");
        assert!(FileFormat::of(&nsys).expect_err("not known").message.contains("nsys export -t sqlite FILE"));
        let path = folder.path().join("it.sqlite");
        rusqlite::Connection::open(&path).and_then(|file| file.execute_batch("CREATE TABLE other (a)")).expect("made");
        let message = FileFormat::of(&path).expect_err("not known").message;
        assert!(message.contains("is of no format that highwater reads"), "{message}");
        assert!(!refused(&[SQLITE, &[7; 200]].concat()).contains("is of no format"), "why it cannot be opened");
    }
}
