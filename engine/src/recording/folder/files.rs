//! The files of a recording's folder, by their names.

use crate::files::read_text;
use crate::recording::lines::refuse;
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

/// A recording's folder.
#[derive(Debug)]
pub(super) struct TextFolder {
    /// Its own name, which is also the job's.
    pub name: String,
    pub memory: PathBuf,
    /// One file per rank, in order of rank.
    pub annotations: Vec<PathBuf>,
    /// Utilization and power, if the recording has them.
    pub utilization: Option<PathBuf>,
    pub facts: PathBuf,
}

/// What `gpus.json` may contain about a GPU. Nothing of it is recorded elsewhere.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GpuFacts {
    pub index: u32,
    pub uuid: Option<String>,
    pub name: Option<String>,
    pub memory_total_bytes: Option<u64>,
    pub memory_reserved_bytes: Option<u64>,
}

impl TextFolder {
    pub fn open(path: &Path) -> Result<Self, OpenError> {
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
    pub fn gpu_facts(&self) -> Result<Vec<GpuFacts>, OpenError> {
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
