//! A report on traces of FairScale's `LayerwiseMemoryTracker`: layers and their memory, without times.

use crate::import::{fairscale, json_of};
use crate::report::layers::Layers;
use crate::report::model::{Origin, Report, name_of};
use crate::report::room::Room;
use highwater_core::source::OpenError;
use highwater_core::wire::Layer;
use highwater_engine::recording::{LayerRecord, READING_NS, Times, refuse};
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use std::convert::Infallible;
use std::fmt;
use std::path::Path;

/// Reads the traces.
pub(super) fn open(path: &Path, room: Room) -> Result<Report, OpenError> {
    let mut count = 0;
    let layers = Layers::of_one(&name_of(path), room, |add| {
        let mut take = |record: &LayerRecord| {
            count += 1;
            add(record);
        };
        json_of(path, |deserializer| deserializer.deserialize_map(Whole(&mut take)))
    })?;
    if count == 0 {
        return Err(refuse("recording_unreadable", path, "has no trace of any layer"));
    }
    let end_ns = (count - 1) * READING_NS;
    let origin = Origin {
        missing: vec!["the memory of GPUs", "times", "steps and phases"],
        ..Origin::new("FairScale layer traces", Times::Readings)
    };
    Ok(Report { end_ns, layers, ..Report::of_file(path, origin) })
}

/// Reads the object that is the whole file. The time of a record is its number.
struct Whole<F>(F);

impl<'de, F: FnMut(&LayerRecord)> Visitor<'de> for Whole<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FairScale's traces")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        let mut at_ns = 0;
        while let Some(member) = members.next_key::<String>()? {
            if member != fairscale::MEMBER {
                members.next_value::<IgnoredAny>()?;
                continue;
            }
            members.next_value_seed(fairscale::Traces(|name: &str, (allocated, reserved), layer: &Layer| {
                (self.0)(&LayerRecord { name: name.to_owned(), at_ns, allocated, reserved, layer: *layer });
                at_ns += READING_NS;
                Ok::<(), Infallible>(())
            }))?;
        }
        Ok(())
    }
}
