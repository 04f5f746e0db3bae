//! Which files a recording is made of.

use crate::files::read_text;
use crate::source::OpenError;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

const MEMORY: &str = "nvml_1khz.csv";
const ANNOTATIONS: &str = "annotations_rank";
const FACTS: &str = "gpus.json";
const UTILIZATION: &str = "utilization.csv";
/// The largest [`FACTS`].
const MOST_FACTS_BYTES: u64 = 1 << 20;

/// A recording's folder.
#[derive(Debug)]
pub(super) struct Folder {
    /// Its own name, which is also the job's.
    pub(super) name: String,
    pub(super) memory: PathBuf,
    /// One a rank, in order of rank.
    pub(super) annotations: Vec<PathBuf>,
    /// Utilization and power, where the recording has them.
    pub(super) utilization: Option<PathBuf>,
    facts: PathBuf,
}

/// What `gpus.json` may tell of a GPU; nothing in it is recorded elsewhere.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GpuFacts {
    pub(super) index: u32,
    pub(super) uuid: Option<String>,
    pub(super) name: Option<String>,
    pub(super) memory_total_bytes: Option<u64>,
    pub(super) memory_reserved_bytes: Option<u64>,
}

/// A recording that cannot be replayed.
pub(super) fn refuse(reason: &'static str, path: &Path, problem: impl std::fmt::Display) -> OpenError {
    OpenError { reason, message: format!("{}: {problem}", path.display()) }
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let missing = |error| refuse("recording_missing", path, error);
        let absolute = fs::canonicalize(path).map_err(missing)?;
        if !absolute.is_dir() {
            let problem = format!("is a file, where a folder with {MEMORY} is played; captures are for SQLite");
            return Err(refuse("recording_missing", path, problem));
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

    /// What is known of the GPUs; nothing where there is no `gpus.json`.
    pub(super) fn gpu_facts(&self) -> Result<Vec<GpuFacts>, OpenError> {
        let text = match read_text(&self.facts, MOST_FACTS_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(refuse("recording_unreadable", &self.facts, error)),
        };
        serde_json::from_str(&text).map_err(|error| refuse("recording_unreadable", &self.facts, error))
    }
}

fn plain(name: &str) -> &str {
    name.strip_suffix(".gz").unwrap_or(name)
}

fn rank_of(name: &str) -> Option<u32> {
    plain(name).strip_prefix(ANNOTATIONS)?.strip_suffix(".jsonl")?.parse().ok()
}
