//! A recording as a folder: `nvml_1khz.csv[.gz]` and, if a job annotated, one `annotations_rank<N>.jsonl[.gz]` per
//! rank; `docs/scenarios.md` has the formats. Invariant: a line that cannot be read is counted, and no other line is
//! lost.

mod annotations;
mod memory;
mod utilization;

use super::lines::{SkippedLines, refuse};
use super::tape::{DAY_NS, Format, Tape, Times, is_too_long};
use crate::files::read_text;
use highwater_core::gpu::Device;
use highwater_core::source::OpenError;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

const MEMORY: &str = "nvml_1khz.csv";
const ANNOTATIONS: &str = "annotations_rank";
const FACTS: &str = "gpus.json";
const UTILIZATION: &str = "utilization.csv";
/// The largest size of [`FACTS`].
const MOST_FACTS_BYTES: u64 = 1 << 20;

const FORMAT: Format = Format { name: "folder of text files", times: Times::Unix, missing: &[] };

/// A recording's folder.
#[derive(Debug)]
struct Folder {
    /// Its own name, which is also the job's.
    name: String,
    memory: PathBuf,
    /// One file per rank, in order of rank.
    annotations: Vec<PathBuf>,
    /// Utilization and power, if the recording has them.
    utilization: Option<PathBuf>,
    facts: PathBuf,
}

/// What `gpus.json` may contain about a GPU. Nothing of it is recorded elsewhere.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuFacts {
    index: u32,
    uuid: Option<String>,
    name: Option<String>,
    memory_total_bytes: Option<u64>,
    memory_reserved_bytes: Option<u64>,
}

impl Folder {
    fn open(path: &Path) -> Result<Self, OpenError> {
        let missing = |error| refuse("recording_missing", path, error);
        let absolute = fs::canonicalize(path).map_err(missing)?;
        if !absolute.is_dir() {
            return Err(refuse("recording_missing", path, format!("is neither a file nor a folder with {MEMORY}")));
        }
        let mut found: Vec<String> = Vec::new();
        for entry in fs::read_dir(path).map_err(missing)? {
            found.push(entry.map_err(missing)?.file_name().to_string_lossy().into_owned());
        }
        let mut ranks: Vec<(u32, &String)> = found.iter().filter_map(|name| Some((rank_of(name)?, name))).collect();
        ranks.sort_unstable();
        if let Some(twice) = ranks.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let problem = format!("both {} and {} are there: remove one", twice[0].1, twice[1].1);
            return Err(refuse("recording_ambiguous", path, problem));
        }
        let memory = match found.iter().filter(|name| plain(name) == MEMORY).collect::<Vec<_>>()[..] {
            [] => return Err(refuse("recording_missing", path, format!("there is no {MEMORY} or {MEMORY}.gz"))),
            [one] => path.join(one),
            _ => {
                return Err(refuse(
                    "recording_ambiguous",
                    path,
                    format!("both {MEMORY} and {MEMORY}.gz are there: remove one"),
                ));
            }
        };
        Ok(Self {
            name: absolute
                .file_name()
                .map_or_else(|| "recording".to_owned(), |name| name.to_string_lossy().into_owned()),
            memory,
            utilization: found.iter().find(|name| plain(name) == UTILIZATION).map(|name| path.join(name)),
            annotations: ranks.iter().map(|(_, name)| path.join(name)).collect(),
            facts: path.join(FACTS),
        })
    }

    /// What is known of the GPUs; empty if there is no `gpus.json`.
    fn gpu_facts(&self) -> Result<Vec<GpuFacts>, OpenError> {
        let text = match read_text(&self.facts, MOST_FACTS_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(refuse("recording_unreadable", &self.facts, error)),
        };
        serde_json::from_str(&text).map_err(|error| refuse("recording_unreadable", &self.facts, error))
    }
}

/// Reads a recording.
///
/// # Errors
/// If the folder or its memory file is missing, a file has no valid line, a file is there twice, or `gpus.json` is
/// wrong; and if a time lies more than 31 days from the others.
pub(super) fn tape(path: &Path) -> Result<Tape, OpenError> {
    let folder = Folder::open(path)?;
    let mut skipped = SkippedLines::default();
    let tracks = memory::read(&folder.memory, &mut skipped)?;
    let ranks = annotations::read(&folder, &mut skipped)?;
    let facts = folder.gpu_facts()?;
    let meters = folder.utilization.as_deref().map(|path| utilization::read(path, &mut skipped)).transpose()?;
    let of_memory = tracks.iter().filter_map(|track| Some((track.span()?, &folder.memory)));
    let of_ranks = ranks.spans().zip(&folder.annotations);
    let spans: Vec<_> = of_memory.chain(of_ranks).collect();
    let first = spans.iter().min_by_key(|(span, _)| span.0);
    let last = spans.iter().max_by_key(|(span, _)| span.1);
    let begin_ns = first.map_or(i64::MAX, |(span, _)| span.0);
    let end_ns = last.map_or(i64::MIN, |(span, _)| span.1);
    if is_too_long(begin_ns, end_ns) {
        let days = end_ns.saturating_sub(begin_ns) / DAY_NS;
        let [first, last] = [first, last].map(|end| end.and_then(|(_, file)| file.file_name()).unwrap_or_default());
        let (first, last) = (first.display(), last.display());
        let problem = format!(
            "times lie {days} days apart, from {begin_ns} ns in {first} to {end_ns} ns in {last}: one of them is wrong"
        );
        return Err(refuse("recording", path, problem));
    }
    Ok(Tape {
        devices: tracks.iter().map(|track| device(track.gpu, &folder.name, &facts)).collect(),
        tracks,
        said: Box::new(ranks),
        meters: meters.unwrap_or_default(),
        turns: Vec::new(),
        changes: Vec::new(),
        begin_ns,
        end_ns,
        skipped,
        format: FORMAT,
        allocations: Vec::new(),
        allocators: Vec::new(),
    })
}

fn device(gpu: u32, folder: &str, facts: &[GpuFacts]) -> Device {
    let known = facts.iter().find(|known| known.index == gpu);
    Device {
        index: gpu.to_string(),
        uuid: known.and_then(|known| known.uuid.clone()).unwrap_or_else(|| format!("REPLAY-{folder}-{gpu}")),
        name: known.and_then(|known| known.name.clone()),
        memory_total_bytes: known.and_then(|known| known.memory_total_bytes),
        memory_reserved_bytes: known.and_then(|known| known.memory_reserved_bytes),
        ..Device::default()
    }
}

fn plain(name: &str) -> &str {
    name.strip_suffix(".gz").unwrap_or(name)
}

fn rank_of(name: &str) -> Option<u32> {
    plain(name).strip_prefix(ANNOTATIONS)?.strip_suffix(".jsonl")?.parse().ok()
}
