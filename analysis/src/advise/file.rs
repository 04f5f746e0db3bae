//! Layers from a file: a recording, FairScale's traces, or an answer of the API that was saved.
//!
//! Enters: a file, and optionally a job and a rank. Leaves: of the profiles of that job and rank, the one with the most
//! activations. Invariants: recognised by its contents; at most two profiles are in memory; a file that cannot be used is
//! refused with its name and why.

use super::answer;
use super::best::{Best, ProfileChoice};
use super::layers::{LayersError, StepLayers};
use crate::formats::FileFormat;
use crate::import::{fairscale, json_of};
use highwater_core::source::OpenError;
use highwater_engine::recording::{refuse, rows};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::fmt;
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
        json_of(path, |deserializer| deserializer.deserialize_map(Whole(&mut best)))?;
    }
    best.finish().map_err(|problem| refuse("layers_unreadable", path, problem))
}

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
