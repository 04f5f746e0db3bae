//! The profiles in an answer of `GET /api/v1/jobs/{job}/layers` that was saved: `{"job": …, "profiles": [{"rank": …,
//! "records": […]}]}`.

use super::best::Best;
use super::layers::StepLayers;
use highwater_core::wire::{Direction, Layer};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// The member of the object that has the profiles.
pub(super) const MEMBER: &str = "profiles";

/// A record as the API writes it. What is not used is left out.
#[derive(Deserialize)]
struct Record {
    layer: String,
    direction: Direction,
    allocated: Option<u64>,
    growth: Option<i64>,
    activations: Option<u64>,
    parameters: Option<u64>,
    duration_ns: Option<u64>,
    modules: Option<u64>,
    peak: Option<u64>,
    held: Option<i64>,
    recompute: Option<i64>,
}

/// Reads every profile.
pub(super) struct Profiles<'a>(pub &'a mut Best);

impl<'de> DeserializeSeed<'de> for Profiles<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Profiles<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("layer profiles")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut each: A) -> Result<(), A::Error> {
        while each.next_element_seed(Profile(self.0))?.is_some() {}
        Ok(())
    }
}

struct Profile<'a>(&'a mut Best);

impl<'de> DeserializeSeed<'de> for Profile<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Profile<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a layer profile")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut of = StepLayers::default();
        self.0.begin();
        while let Some(member) = members.next_key::<String>()? {
            match member.as_str() {
                "rank" => of.rank = members.next_value()?,
                "step" => of.step = members.next_value()?,
                "missing" => of.missing = members.next_value()?,
                "records" => members.next_value_seed(Records(self.0))?,
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        self.0.end(of);
        Ok(())
    }
}

struct Records<'a>(&'a mut Best);

impl<'de> DeserializeSeed<'de> for Records<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Records<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("records of layers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut each: A) -> Result<(), A::Error> {
        while let Some(record) = each.next_element::<Record>()? {
            let Record {
                direction, growth, activations, parameters, duration_ns, modules, peak, held, recompute, ..
            } = record;
            let known = Layer { growth, activations, parameters, duration_ns, ..Layer::new(direction) };
            let layer = Layer { modules, peak, held, recompute, ..known };
            self.0.add(&record.layer, record.allocated, &layer).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}
