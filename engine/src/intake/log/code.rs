//! Encodes one event as bytes, with `postcard`: thousands of events are kept, and most of their numbers are small. Only
//! the process that wrote them ever reads them, so there is no version.

use highwater_core::jobs::{Event, Scope};
use highwater_core::mesh::Mesh;
use highwater_core::wire::{EventType, Kind, Memory, Scalar};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// An event's fields, as they are kept. The wire's own types are for JSON: they omit missing fields.
#[derive(Serialize, Deserialize)]
struct Kept<'a> {
    /// How many numbers after the one before it in its block.
    after: u64,
    event: EventType,
    kind: Kind,
    at_ns: i64,
    rank: u32,
    job: &'a str,
    namespace: Option<&'a str>,
    user: Option<&'a str>,
    name: &'a str,
    world_size: Option<u32>,
    #[serde(borrow)]
    mesh: Option<Vec<(&'a str, u32)>>,
    pid: Option<u32>,
    step: Option<u64>,
    #[serde(borrow)]
    gpus: Option<Cow<'a, [usize]>>,
    memory: Option<[Option<u64>; 6]>,
    #[serde(borrow)]
    attributes: Option<Vec<(&'a str, Value<'a>)>>,
}

#[derive(Serialize, Deserialize)]
enum Value<'a> {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
}

/// Appends an event, whose number is higher by `after` than that of the one before it.
pub(in crate::intake) fn encode(after: u64, event: &Event, bytes: &mut Vec<u8>) {
    let Event {
        event, kind, name, job, scope, rank, world_size, mesh, gpus, step, at_ns, memory, attributes, pid, ..
    } = event;
    let attributes = attributes.as_deref().map(|all| all.iter().map(|(name, value)| (&**name, Value::of(value))));
    let kept = Kept {
        after,
        event: *event,
        kind: *kind,
        at_ns: *at_ns,
        rank: *rank,
        job,
        namespace: scope.as_ref().and_then(Scope::namespace),
        user: scope.as_ref().and_then(Scope::user),
        name,
        world_size: *world_size,
        mesh: mesh.as_ref().map(|mesh| mesh.axes().collect()),
        pid: *pid,
        step: *step,
        gpus: gpus.as_deref().map(Cow::Borrowed),
        memory: memory.map(counters),
        attributes: attributes.map(Iterator::collect),
    };
    postcard::to_io(&kept, bytes).expect("memory takes all, and every length is known");
}

fn counters(memory: Memory) -> [Option<u64>; 6] {
    let Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms } = memory;
    [allocated, reserved, active, inactive_split, alloc_retries, ooms]
}

fn memory([allocated, reserved, active, inactive_split, alloc_retries, ooms]: [Option<u64>; 6]) -> Memory {
    Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms }
}

impl<'a> Value<'a> {
    fn of(scalar: &'a Scalar) -> Self {
        match scalar {
            Scalar::Bool(value) => Self::Bool(*value),
            Scalar::Int(value) => Self::Int(*value),
            Scalar::Float(value) => Self::Float(*value),
            Scalar::Text(value) => Self::Text(value),
        }
    }
}

impl From<Value<'_>> for Scalar {
    fn from(value: Value<'_>) -> Self {
        match value {
            Value::Bool(value) => Self::Bool(value),
            Value::Int(value) => Self::Int(value),
            Value::Float(value) => Self::Float(value),
            Value::Text(value) => Self::Text(value.to_owned()),
        }
    }
}

/// The events of a block, each with how many numbers it is after the one before it.
pub(in crate::intake) struct Events<'a>(&'a [u8]);

impl<'a> Events<'a> {
    /// The events that were appended to these bytes.
    pub fn of(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Bytes that are still to be read.
    pub fn bytes_left(&self) -> usize {
        self.0.len()
    }
}

impl Iterator for Events<'_> {
    type Item = (u64, Event);

    fn next(&mut self) -> Option<Self::Item> {
        // The bytes end where no further event can be read.
        let (kept, rest) = postcard::take_from_bytes::<Kept<'_>>(self.0).ok()?;
        self.0 = rest;
        let attributes = kept.attributes.map(|all| all.into_iter().map(|(name, value)| (name.into(), value.into())));
        let event = Event {
            event: kept.event,
            kind: kept.kind,
            name: kept.name.to_owned(),
            job: kept.job.to_owned(),
            scope: Some(Scope::of(kept.namespace, kept.user)),
            rank: kept.rank,
            world_size: kept.world_size,
            mesh: kept.mesh.and_then(|axes| {
                Mesh::checked(axes.into_iter().map(|(name, at)| (name.to_owned(), at)).collect()).ok()
            }),
            gpus: kept.gpus.map(Cow::into_owned),
            step: kept.step,
            at_ns: kept.at_ns,
            memory: kept.memory.map(memory),
            layer: None,
            attributes: attributes.map(Iterator::collect),
            pid: kept.pid,
            connection: None,
        };
        Some((kept.after, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::wire::Scalar;
    use proptest::prelude::*;

    fn scalar() -> impl Strategy<Value = Scalar> {
        prop_oneof![
            any::<bool>().prop_map(Scalar::Bool),
            any::<i64>().prop_map(Scalar::Int),
            (-1e300..1e300).prop_map(Scalar::Float),
            "[a-z\"\\\\é]{0,20}".prop_map(Scalar::Text),
        ]
    }

    fn any_memory() -> impl Strategy<Value = Memory> {
        prop::array::uniform6(any::<Option<u64>>()).prop_map(memory)
    }

    fn event() -> impl Strategy<Value = Event> {
        let event_type = prop::sample::select(&EventType::ALL[..]);
        let kind = prop_oneof![Just(Kind::Step), Just(Kind::Phase), Just(Kind::Layer)];
        let what = (event_type, kind, "[a-zé ]{1,40}", "[a-z-]{1,40}", any::<u32>(), any::<i64>());
        let more = (
            (
                any::<Option<u32>>(),
                prop::option::of(prop::collection::btree_map("[a-z0-9_]{1,24}", any::<u32>(), 1..12)),
            ),
            prop::option::of(prop::collection::vec(0..64_usize, 0..9)),
            any::<Option<u64>>(),
            prop::option::of(any_memory()),
            prop::option::of(prop::collection::vec(("[a-z]{1,9}", scalar()), 0..5)),
            (any::<Option<u32>>(), prop::option::of("[a-z]{1,9}"), prop::option::of("[0-9]{1,9}")),
        );
        (what, more).prop_map(
            |(
                (event, kind, name, job, rank, at_ns),
                ((world_size, mesh), gpus, step, memory, attributes, (pid, namespace, user)),
            )| Event {
                event,
                kind,
                name,
                job,
                scope: Some(Scope::of(namespace.as_deref(), user.as_deref())),
                rank,
                world_size,
                mesh: mesh.map(|mesh| Mesh::checked(mesh).expect("good")),
                gpus,
                step,
                at_ns,
                memory,
                layer: None,
                attributes: attributes
                    .map(|all| all.into_iter().map(|(name, value)| (name.into_boxed_str(), value)).collect()),
                pid,
                connection: None,
            },
        )
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(events in prop::collection::vec((any::<u64>(), event()), 0..20)) {
            let mut bytes = Vec::new();
            events.iter().for_each(|(after, event)| encode(*after, event, &mut bytes));
            prop_assert_eq!(Events::of(&bytes).collect::<Vec<_>>(), events);
        }
    }

    #[test]
    fn a_usual_event_takes_some_seventy_bytes() {
        let of = |bytes: u64| Some(bytes << 20);
        let memory = Memory {
            allocated: of(61_000),
            reserved: of(80_000),
            active: of(62_000),
            inactive_split: of(300),
            alloc_retries: Some(2),
            ooms: Some(0),
        };
        let event = Event {
            event: EventType::End,
            kind: Kind::Phase,
            name: "backward".into(),
            job: "llama-8b".into(),
            scope: Some(Scope::Daemon),
            rank: 7,
            world_size: Some(8),
            mesh: None,
            gpus: Some(vec![7]),
            step: Some(12_345),
            at_ns: 1_795_236_050_273_350_611,
            memory: Some(memory),
            layer: None,
            attributes: None,
            pid: Some(71_234),
            connection: None,
        };
        let mut bytes = Vec::new();
        encode(1, &event, &mut bytes);
        assert_eq!(bytes.len(), 79);
        assert_eq!(Events::of(&bytes).collect::<Vec<_>>(), [(1, event)]);
    }
}
