//! Traces of FairScale's `LayerwiseMemoryTracker`: `{"traces": [{"module_name": …, "event": {…}}, …]}`.
//!
//! Enters: one record for each layer and pass, in the order in which they ran. Leaves: the same as records of a layer
//! profile. There are no times. Errors of the tracker are not corrected: it counts every element of a type other than float16
//! as four bytes.

use highwater_core::wire::{Direction, Layer};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;

/// The member of the object that has the records.
pub(crate) const MEMBER: &str = "traces";

/// A record as it is in the file. What is not used is left out.
#[derive(Deserialize)]
struct Trace {
    module_name: String,
    module_params: Option<u64>,
    allocated: Option<u64>,
    reserved: Option<u64>,
    is_forward: bool,
    all_gathered: Option<u64>,
    cumul_all_gathered: Option<u64>,
    #[serde(default)]
    event: Option<Event>,
}

#[derive(Deserialize)]
struct Event {
    memory_diff: Option<i64>,
    memory_activations: Option<u64>,
}

/// The bytes in live tensors after a layer, and those that the allocator had reserved then.
pub(crate) type Counters = (Option<u64>, Option<u64>);

/// Passes each record to a function: the layer's name, the allocator's counters after it, and what it did.
pub(crate) struct Traces<F>(pub F);

impl<'de, E: fmt::Display, F: FnMut(&str, Counters, &Layer) -> Result<(), E>> DeserializeSeed<'de> for Traces<F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, E: fmt::Display, F: FnMut(&str, Counters, &Layer) -> Result<(), E>> Visitor<'de> for Traces<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FairScale's traces")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut each: A) -> Result<(), A::Error> {
        while let Some(trace) = each.next_element::<Trace>()? {
            let event = trace.event.unwrap_or(Event { memory_diff: None, memory_activations: None });
            let layer = Layer {
                growth: event.memory_diff,
                activations: event.memory_activations,
                parameters: trace.module_params,
                gathered: trace.all_gathered,
                gathered_sum: trace.cumul_all_gathered,
                ..Layer::new(if trace.is_forward { Direction::Forward } else { Direction::Backward })
            };
            (self.0)(&trace.module_name, (trace.allocated, trace.reserved), &layer).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}
