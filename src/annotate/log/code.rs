//! One event as bytes: its length, which fields it has, and those.
//!
//! Only this process ever reads what it wrote, so there is no version. Names are at most some hundred bytes and
//! attributes some thousand, which `Limits` holds, so that no length overflows; one that would is cut off.

use crate::annotate::event::{Attributes, Event};
use crate::annotate::wire::{EventType, Kind, Memory};

const WORLD_SIZE: u8 = 1;
const GPUS: u8 = 1 << 1;
const STEP: u8 = 1 << 2;
const MEMORY: u8 = 1 << 3;
const ATTRIBUTES: u8 = 1 << 4;
const PID: u8 = 1 << 5;

/// Appends an event.
pub(super) fn encode(event: &Event, bytes: &mut Vec<u8>) {
    let begin = bytes.len();
    bytes.extend([0; 4]);
    let has = |field: u8, is_there: bool| if is_there { field } else { 0 };
    let fields = has(WORLD_SIZE, event.world_size.is_some())
        | has(GPUS, event.gpus.is_some())
        | has(STEP, event.step.is_some())
        | has(MEMORY, event.memory.is_some())
        | has(ATTRIBUTES, event.attributes.is_some())
        | has(PID, event.pid.is_some());
    bytes.extend([event.event as u8, event.kind as u8, fields]);
    bytes.extend(event.at_ns.to_le_bytes());
    bytes.extend(event.rank.to_le_bytes());
    put(bytes, event.job.as_bytes());
    put(bytes, event.name.as_bytes());
    bytes.extend(event.world_size.iter().chain(&event.pid).flat_map(|number| number.to_le_bytes()));
    bytes.extend(event.step.iter().flat_map(|step| step.to_le_bytes()));
    if let Some(gpus) = &event.gpus {
        let positions: Vec<u8> = gpus.iter().flat_map(|gpu| (*gpu as u64).to_le_bytes()).collect();
        put(bytes, &positions);
    }
    if let Some(memory) = &event.memory {
        put_memory(bytes, memory);
    }
    if let Some(attributes) = &event.attributes {
        // Plain values and texts are always JSON.
        put(bytes, &serde_json::to_vec(attributes).unwrap_or_default());
    }
    let length = u32::try_from(bytes.len() - begin - 4).unwrap_or(u32::MAX);
    bytes[begin..begin + 4].copy_from_slice(&length.to_le_bytes());
}

fn put(bytes: &mut Vec<u8>, field: &[u8]) {
    let length = u16::try_from(field.len()).unwrap_or(u16::MAX);
    bytes.extend(length.to_le_bytes());
    bytes.extend(&field[..usize::from(length)]);
}

fn put_memory(bytes: &mut Vec<u8>, memory: &Memory) {
    let counters = counters(memory);
    let which =
        counters.iter().enumerate().filter(|(_, counter)| counter.is_some()).fold(0, |all, (n, _)| all | 1 << n);
    bytes.push(which);
    bytes.extend(counters.iter().flatten().flat_map(|counter| counter.to_le_bytes()));
}

fn counters(memory: &Memory) -> [Option<u64>; 6] {
    let Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms } = *memory;
    [allocated, reserved, active, inactive_split, alloc_retries, ooms]
}

/// The events of a block.
pub(super) struct Events<'a>(Fields<'a>);

impl<'a> Events<'a> {
    /// Those that were appended to these bytes.
    pub fn of(bytes: &'a [u8]) -> Self {
        Self(Fields(bytes))
    }
}

impl Iterator for Events<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let length = u32::from_le_bytes(self.0.take()?);
        let event = self.0.bytes(usize::try_from(length).ok()?)?;
        Fields(event).event()
    }
}

/// What is left to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn field(&mut self) -> Option<&'a [u8]> {
        let length = u16::from_le_bytes(self.take()?);
        self.bytes(length.into())
    }

    fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.field()?).into_owned())
    }

    fn event(mut self) -> Option<Event> {
        let [event, kind, fields] = self.take()?;
        let has = |field: u8| fields & field != 0;
        let (at_ns, rank) = (i64::from_le_bytes(self.take()?), u32::from_le_bytes(self.take()?));
        let (job, name) = (self.text()?, self.text()?);
        let world_size = if has(WORLD_SIZE) { Some(u32::from_le_bytes(self.take()?)) } else { None };
        let pid = if has(PID) { Some(u32::from_le_bytes(self.take()?)) } else { None };
        let step = if has(STEP) { Some(u64::from_le_bytes(self.take()?)) } else { None };
        let gpus = if has(GPUS) { Some(self.gpus()?) } else { None };
        let memory = if has(MEMORY) { Some(self.memory()?) } else { None };
        let attributes: Option<Attributes> =
            if has(ATTRIBUTES) { Some(serde_json::from_slice(self.field()?).ok()?) } else { None };
        let (event, kind) = (event_type(event)?, kind_of(kind)?);
        Some(Event { event, kind, name, job, rank, world_size, gpus, step, at_ns, memory, attributes, pid })
    }

    fn gpus(&mut self) -> Option<Vec<usize>> {
        let mut positions = Fields(self.field()?);
        let mut gpus = Vec::new();
        while let Some(position) = positions.take() {
            gpus.push(usize::try_from(u64::from_le_bytes(position)).ok()?);
        }
        Some(gpus)
    }

    fn memory(&mut self) -> Option<Memory> {
        let [which] = self.take()?;
        let mut counters = [None; 6];
        for (n, counter) in counters.iter_mut().enumerate() {
            if which & 1 << n != 0 {
                *counter = Some(u64::from_le_bytes(self.take()?));
            }
        }
        let [allocated, reserved, active, inactive_split, alloc_retries, ooms] = counters;
        Some(Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms })
    }
}

fn event_type(code: u8) -> Option<EventType> {
    [EventType::Begin, EventType::End, EventType::Mark].into_iter().find(|event| *event as u8 == code)
}

fn kind_of(code: u8) -> Option<Kind> {
    [Kind::Step, Kind::Phase, Kind::Layer].into_iter().find(|kind| *kind as u8 == code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::annotate::wire::Scalar;
    use proptest::prelude::*;

    fn scalar() -> impl Strategy<Value = Scalar> {
        prop_oneof![
            any::<bool>().prop_map(Scalar::Bool),
            any::<i64>().prop_map(Scalar::Int),
            "[a-z\"\\\\é]{0,20}".prop_map(Scalar::Text),
        ]
    }

    fn memory() -> impl Strategy<Value = Memory> {
        prop::array::uniform6(any::<Option<u64>>()).prop_map(|counters| {
            let [allocated, reserved, active, inactive_split, alloc_retries, ooms] = counters;
            Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms }
        })
    }

    fn event() -> impl Strategy<Value = Event> {
        let what = (0..3_u8, 0..3_u8, "[a-zé ]{1,40}", "[a-z-]{1,40}", any::<u32>(), any::<i64>());
        let more = (
            any::<Option<u32>>(),
            prop::option::of(prop::collection::vec(0..64_usize, 0..9)),
            any::<Option<u64>>(),
            prop::option::of(memory()),
            prop::option::of(prop::collection::vec(("[a-z]{1,9}", scalar()), 0..5)),
            any::<Option<u32>>(),
        );
        (what, more).prop_map(
            |((event, kind, name, job, rank, at_ns), (world_size, gpus, step, memory, attributes, pid))| Event {
                event: event_type(event).expect("one of three"),
                kind: kind_of(kind).expect("one of three"),
                name,
                job,
                rank,
                world_size,
                gpus,
                step,
                at_ns,
                memory,
                attributes: attributes
                    .map(|all| all.into_iter().map(|(name, value)| (name.into_boxed_str(), value)).collect()),
                pid,
            },
        )
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(events in prop::collection::vec(event(), 0..20)) {
            let mut bytes = Vec::new();
            events.iter().for_each(|event| encode(event, &mut bytes));
            prop_assert_eq!(Events::of(&bytes).collect::<Vec<_>>(), events);
        }
    }
}
