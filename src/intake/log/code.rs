//! One event as bytes: which fields it has, and those.
//!
//! Numbers have seven bits a byte, the lowest first, and a bit that says whether more follow: most are small, and
//! thousands of events are kept. Only this process ever reads what it wrote, so there is no version.

use highwater_core::jobs::{Attributes, Event};
use highwater_core::wire::{EventType, Kind, Memory};

const WORLD_SIZE: u8 = 1;
const GPUS: u8 = 1 << 1;
const STEP: u8 = 1 << 2;
const MEMORY: u8 = 1 << 3;
const ATTRIBUTES: u8 = 1 << 4;
const PID: u8 = 1 << 5;

/// Of a number's byte: more of it follows.
const MORE: u8 = 1 << 7;
/// How many bits of a number one byte has.
const BITS: usize = 7;

/// Appends an event.
pub(in crate::intake) fn encode(event: &Event, bytes: &mut Vec<u8>) {
    let has = |field: u8, is_there: bool| if is_there { field } else { 0 };
    let fields = has(WORLD_SIZE, event.world_size.is_some())
        | has(GPUS, event.gpus.is_some())
        | has(STEP, event.step.is_some())
        | has(MEMORY, event.memory.is_some())
        | has(ATTRIBUTES, event.attributes.is_some())
        | has(PID, event.pid.is_some());
    bytes.extend([event.event as u8, event.kind as u8, fields]);
    bytes.extend(event.at_ns.to_le_bytes());
    put_number(bytes, event.rank.into());
    put(bytes, event.job.as_bytes());
    put(bytes, event.name.as_bytes());
    event.world_size.iter().chain(&event.pid).for_each(|number| put_number(bytes, (*number).into()));
    event.step.iter().for_each(|step| put_number(bytes, *step));
    if let Some(gpus) = &event.gpus {
        put_number(bytes, gpus.len() as u64);
        gpus.iter().for_each(|gpu| put_number(bytes, *gpu as u64));
    }
    if let Some(memory) = &event.memory {
        put_memory(bytes, memory);
    }
    if let Some(attributes) = &event.attributes {
        // Plain values and texts are always JSON.
        put(bytes, &serde_json::to_vec(attributes).unwrap_or_default());
    }
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= MORE.into() {
        bytes.push(number.to_le_bytes()[0] | MORE);
        number >>= BITS;
    }
    bytes.push(number.to_le_bytes()[0]);
}

fn put(bytes: &mut Vec<u8>, field: &[u8]) {
    put_number(bytes, field.len() as u64);
    bytes.extend(field);
}

fn put_memory(bytes: &mut Vec<u8>, memory: &Memory) {
    let counters = counters(memory);
    let which =
        counters.iter().enumerate().filter(|(_, counter)| counter.is_some()).fold(0, |all, (n, _)| all | 1 << n);
    bytes.push(which);
    counters.iter().flatten().for_each(|counter| put_number(bytes, *counter));
}

fn counters(memory: &Memory) -> [Option<u64>; 6] {
    let Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms } = *memory;
    [allocated, reserved, active, inactive_split, alloc_retries, ooms]
}

/// The events of a block.
pub(in crate::intake) struct Events<'a>(Fields<'a>);

impl<'a> Events<'a> {
    /// Those that were appended to these bytes.
    pub fn of(bytes: &'a [u8]) -> Self {
        Self(Fields(bytes))
    }
}

impl Iterator for Events<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.0.event()
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

    fn number<N: TryFrom<u64>>(&mut self) -> Option<N> {
        let mut number = 0;
        for place in (0..u64::BITS).step_by(BITS) {
            let [byte] = self.take()?;
            number |= u64::from(byte & !MORE) << place;
            if byte & MORE == 0 {
                return N::try_from(number).ok();
            }
        }
        None
    }

    fn field(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?;
        self.bytes(length)
    }

    fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.field()?).into_owned())
    }

    fn event(&mut self) -> Option<Event> {
        let [event, kind, fields] = self.take()?;
        let has = |field: u8| fields & field != 0;
        let (at_ns, rank) = (i64::from_le_bytes(self.take()?), self.number()?);
        let (job, name) = (self.text()?, self.text()?);
        let world_size = if has(WORLD_SIZE) { Some(self.number()?) } else { None };
        let pid = if has(PID) { Some(self.number()?) } else { None };
        let step = if has(STEP) { Some(self.number()?) } else { None };
        let gpus = if has(GPUS) { Some(self.gpus()?) } else { None };
        let memory = if has(MEMORY) { Some(self.memory()?) } else { None };
        let attributes: Option<Attributes> =
            if has(ATTRIBUTES) { Some(serde_json::from_slice(self.field()?).ok()?) } else { None };
        let (event, kind) = (event_type(event)?, kind_of(kind)?);
        Some(Event {
            event,
            kind,
            name,
            job,
            rank,
            world_size,
            gpus,
            step,
            at_ns,
            memory,
            attributes,
            pid,
            connection: None,
        })
    }

    fn gpus(&mut self) -> Option<Vec<usize>> {
        let count: usize = self.number()?;
        (0..count).map(|_| self.number()).collect()
    }

    fn memory(&mut self) -> Option<Memory> {
        let [which] = self.take()?;
        let mut counters = [None; 6];
        for (n, counter) in counters.iter_mut().enumerate() {
            if which & 1 << n != 0 {
                *counter = Some(self.number()?);
            }
        }
        let [allocated, reserved, active, inactive_split, alloc_retries, ooms] = counters;
        Some(Memory { allocated, reserved, active, inactive_split, alloc_retries, ooms })
    }
}

fn event_type(code: u8) -> Option<EventType> {
    EventType::ALL.into_iter().find(|event| *event as u8 == code)
}

fn kind_of(code: u8) -> Option<Kind> {
    [Kind::Step, Kind::Phase, Kind::Layer].into_iter().find(|kind| *kind as u8 == code)
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
                event: event_type(event).expect("one of four"),
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
                connection: None,
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

    #[test]
    fn a_usual_event_takes_some_sixty_bytes() {
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
            rank: 7,
            world_size: Some(8),
            gpus: Some(vec![7]),
            step: Some(12_345),
            at_ns: 1_795_236_050_273_350_611,
            memory: Some(memory),
            attributes: None,
            pid: Some(71_234),
            connection: None,
        };
        let mut bytes = Vec::new();
        encode(&event, &mut bytes);
        assert_eq!(bytes.len(), 64);
        assert_eq!(Events::of(&bytes).collect::<Vec<_>>(), [event]);
    }
}
