//! Layers from a file: a recording, FairScale's traces, or an answer of the API that was saved.
//!
//! Enters: a file, and optionally a job and a rank. Leaves: of the profiles of that job and rank, the one with the most
//! activations. Invariants: recognised by its contents; at most two profiles are in memory; a file that cannot be used is
//! refused with its name and why.

use super::answer;
use super::best::{Best, ProfileChoice};
use super::layers::{LayersError, StepLayers};
use super::recompute;
use crate::formats::FileFormat;
use crate::import::{LineFile, allocator_history, bytes_of, fairscale, json_of};
use highwater_core::source::OpenError;
use highwater_engine::recording::{refuse, rows};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::fmt;
use std::fs;
use std::io::{BufReader, Read};
use std::path::Path;

/// The layers of a file, and how many profiles it has.
///
/// # Errors
/// The file cannot be read, is of no known form, or has no such profile.
pub fn read(path: &Path, choice: &ProfileChoice) -> Result<(StepLayers, usize), OpenError> {
    let mut best = Best::new(choice.clone());
    if FileFormat::is_own(path) {
        recorded(path, &mut best)?;
    } else {
        let file = LineFile::open(path)?;
        if !is_object(file.bytes()) {
            return Err(refuse(
                "layers_unreadable",
                path,
                format_args!("is of no file that says anything about layers: {LAYERS}"),
            ));
        }
        json_of(path, |deserializer| deserializer.deserialize_map(Whole(&mut best)))?;
    }
    best.finish().map_err(|problem| refuse("layers_unreadable", path, problem))
}

/// What a file has that advice can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advisable {
    /// It is a recording of highwater: the layers of a step, steps with batch sizes, both or none of them.
    Recording,
    /// The layers of a step.
    Layers,
    /// A log of ORTModule with recompute plans.
    Plans,
    /// What PyTorch's allocator did in the first steps of a process.
    Allocations,
}

/// Which files have the layers of a step.
const LAYERS: &str = "checkpoints need the layers of a step, from a recording with a layer profile, traces of FairScale's \
                      LayerwiseMemoryTracker, or a saved answer of /api/v1/jobs/JOB/layers";
/// Which files have what else is advised.
const OTHERS: &str = "a batch size needs recordings of `highwater run` whose steps have the attribute batch_size, or what \
                      `highwater.torch.watch(history_dir=…)` writes of two batch sizes; recompute plans need a log of ORTModule \
                      at level INFO";
/// The largest log, unpacked, bytes.
const MOST_LOG_BYTES: u64 = 64 << 30;

/// What a file has that advice can use, by its contents.
///
/// # Errors
/// It cannot be read, or has nothing; says which file is needed instead.
pub fn advisable(path: &Path) -> Result<Advisable, OpenError> {
    let found = fs::metadata(path).map_err(|error| refuse("recording_unreadable", path, error))?;
    if FileFormat::is_own(path) {
        return Ok(Advisable::Recording);
    }
    let needs = |what: &str, instead: &str| {
        Err(refuse(
            "nothing_to_advise",
            path,
            format_args!("is {what}, of which no advice can be made: {LAYERS}; {OTHERS}{instead}"),
        ))
    };
    if found.is_dir() {
        return needs("a folder", "");
    }
    if !found.is_file() {
        return Err(refuse("recording_unreadable", path, "is not a regular file"));
    }
    if FileFormat::is_object_with(path, answer::MEMBER) {
        return Ok(Advisable::Layers);
    }
    if is_history(path) {
        return Ok(Advisable::Allocations);
    }
    match FileFormat::of(path) {
        Ok(FileFormat::Own) => Ok(Advisable::Recording),
        Ok(FileFormat::FairScale) => Ok(Advisable::Layers),
        // A log may have both.
        Ok(FileFormat::TrainingLog) if has_plans(path)? => Ok(Advisable::Plans),
        Ok(format) => needs(format.name(), ". `highwater report` shows what is in it"),
        Err(_) if has_plans(path)? => Ok(Advisable::Plans),
        Err(_) => needs("of no known format", ""),
    }
}

/// Whether a file is what PyTorch's allocator did in the first steps of a process, by its begin.
#[must_use]
pub fn is_history(path: &Path) -> bool {
    FileFormat::is_object_with(path, allocator_history::MEMBER)
}

/// Whether a file has a table of recompute plans.
fn has_plans(path: &Path) -> Result<bool, OpenError> {
    let bytes = bytes_of(path, MOST_LOG_BYTES)?;
    let log = recompute::read(BufReader::new(bytes)).map_err(|error| refuse("recording_unreadable", path, error))?;
    Ok(!log.plans.is_empty())
}

/// Whether the first character is the begin of an object.
fn is_object(bytes: impl Read) -> bool {
    let first =
        BufReader::new(bytes).bytes().map_while(Result::ok).take(MOST_BLANKS).find(|byte| !byte.is_ascii_whitespace());
    first == Some(b'{')
}

/// Blanks before an object.
const MOST_BLANKS: usize = 1 << 12;

fn recorded(path: &Path, best: &mut Best) -> Result<(), OpenError> {
    let mut file = rows::RecordingReader::open(path)?;
    let heads = file.profiles()?;
    let (mut last, mut problem) = (None, None);
    let end = |best: &mut Best, position: usize| {
        let head = &heads[position];
        let mut of = StepLayers::of(Some(head.job.clone()), Some(head.rank), head.step);
        of.missing = head.missing;
        best.end(of);
    };
    file.records(&heads, |position, record| {
        if last != Some(position) {
            last.replace(position).into_iter().for_each(|last| end(best, last));
            best.begin();
        }
        let added = match record {
            Some(record) => best.add(&record.name, record.allocated, &record.layer),
            None => Err(LayersError::TooManyRecords),
        };
        problem = problem.take().or(added.err());
    })?;
    last.into_iter().for_each(|last| end(best, last));
    if let Some(first) = file.skipped.first.first() {
        tracing::warn!(count = file.skipped.count, %first, "rows could not be read");
    }
    problem.map_or(Ok(()), |problem| Err(refuse("layers_unreadable", path, problem)))
}

/// The object that a JSON file is.
struct Whole<'a>(&'a mut Best);

impl<'de> Visitor<'de> for Whole<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FairScale's traces, or layers of the API")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(member) = members.next_key::<String>()? {
            match member.as_str() {
                "job" => self.0.job = members.next_value()?,
                fairscale::MEMBER => {
                    self.0.begin();
                    members.next_value_seed(fairscale::Traces(|name: &str, (allocated, _), layer: &_| {
                        self.0.add(name, allocated, layer)
                    }))?;
                    self.0.end(StepLayers::default());
                }
                answer::MEMBER => members.next_value_seed(answer::Profiles(self.0))?,
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}
