//! What is open, and what ends it.

use super::*;
use crate::wire::Scalar;

/// Begins or ends a step of this number.
fn step(event_type: EventType, number: Option<u64>, at_ns: i64) -> Event {
    Event { step: number, at_ns, ..event(event_type, Kind::Step, "step", 7) }
}

fn at(at_ns: i64, event: Event) -> Event {
    Event { at_ns, ..event }
}

fn layer(event_type: EventType, name: &str, at_ns: i64) -> Event {
    Event { at_ns, ..event(event_type, Kind::Layer, name, 7) }
}

fn open(jobs: &Jobs) -> Vec<&str> {
    rank(jobs).open.iter().map(|open| &*open.name).collect()
}

/// Jobs that took these events.
fn after(events: &[Event]) -> (Jobs, Arc<Account>) {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    events.iter().for_each(|event| say(&mut jobs, &account, event));
    (jobs, account)
}

#[test]
fn what_ends_has_its_begin_its_step_and_what_was_reported_at_both() {
    let memory = |allocated| Some(Memory { allocated: Some(allocated), ..Memory::default() });
    let attributes: Attributes = Box::new([("lr".into(), Scalar::Float(0.1))]);
    let begins = Event { memory: memory(1), attributes: Some(attributes.clone()), ..at(20, begin("forward", 7)) };
    let (mut jobs, account) = after(&[step(EventType::Begin, Some(5), 10), begins]);
    assert!(jobs.is_in_step(&"j".into(), 0) && !jobs.is_in_step(&"j".into(), 1) && !jobs.is_in_step(&"k".into(), 0));
    say(&mut jobs, &account, &Event { memory: memory(9), ..at(30, end("forward", 7)) });
    say(&mut jobs, &account, &step(EventType::End, Some(5), 40));
    assert!(!jobs.is_in_step(&"j".into(), 0));
    assert_eq!(account.holds(Resource::Pending), 2);
    let ended = jobs.take_ended(i64::MAX, 9);
    let [forward, step] = &ended[..] else { panic!("two: {ended:?}") };
    assert_eq!(
        (&**forward.job.name(), forward.rank, forward.pid, forward.end_ns, forward.memory),
        ("j", 0, Some(7), 30, memory(9))
    );
    assert_eq!((&*forward.open.name, forward.open.kind, forward.open.step), ("forward", Kind::Phase, Some(5)));
    assert_eq!(
        (forward.open.begin_ns, forward.open.memory, &forward.open.attributes),
        (20, memory(1), &Some(attributes))
    );
    assert_eq!((step.open.kind, step.open.step, step.open.begin_ns, step.end_ns), (Kind::Step, Some(5), 10, 40));
    assert_eq!((rank(&jobs).steps, rank(&jobs).step, rank(&jobs).last_event_ns), (1, Some(5), 40));
    drop(ended);
    assert_eq!(account.holds(Resource::Pending), 0);
}

#[test]
fn what_has_ended_is_returned_once_memory_is_known_until_then_and_so_many_at_a_time() {
    let phases = (0..4).flat_map(|n| [at(10 * n, begin("a", 7)), at(10 * n + 5, end("a", 7))]);
    let (mut jobs, _) = after(&phases.collect::<Vec<_>>());
    let ends = |ended: Vec<Ended>| ended.iter().map(|ended| ended.end_ns).collect::<Vec<_>>();
    assert_eq!(ends(jobs.take_ended(4, 9)), [] as [i64; 0]);
    assert_eq!(ends(jobs.take_ended(25, 2)), [5, 15]);
    assert_eq!(ends(jobs.take_ended(25, 2)), [25]);
    assert_eq!(ends(jobs.take_ended(99, 2)), [35]);
}

#[test]
fn a_marked_step_counts_as_many_as_it_stands_for() {
    let (mut jobs, account) = after(&[]);
    let mut counted = Vec::new();
    for (nth, said) in [
        None,
        Some(Scalar::Int(64)),
        Some(Scalar::Int(1 << 40)),
        Some(Scalar::Int(0)),
        Some(Scalar::Int(-5)),
        Some(Scalar::Text("9".into())),
    ]
    .into_iter()
    .enumerate()
    {
        let before = if nth == 0 { 0 } else { rank(&jobs).steps };
        let at_ns = 2 * nth as i64;
        say(&mut jobs, &account, &step(EventType::Begin, Some(nth as u64), at_ns));
        let attributes = said.map(|said| Box::new([("steps".into(), said)]) as Attributes);
        say(&mut jobs, &account, &Event { attributes, ..step(EventType::End, Some(nth as u64), at_ns + 1) });
        counted.push(rank(&jobs).steps - before);
    }
    assert_eq!(counted, [1, 64, 1 << 16, 1, 1, 1]);
}

#[test]
fn an_end_closes_the_innermost_of_its_kind_name_and_step() {
    let (mut jobs, account) = after(&[at(1, begin("a", 7)), layer(EventType::Begin, "a", 2), at(3, begin("b", 7))]);
    say(&mut jobs, &account, &layer(EventType::End, "a", 4));
    assert_eq!(open(&jobs), ["a", "b"]);
    assert_eq!(ended(&mut jobs), [("a".to_owned(), None, 2, 4)]);
    // If both have a step, it must be the same one.
    let of_step = |event_type, step, at_ns| Event { step, at_ns, ..event(event_type, Kind::Phase, "c", 7) };
    say(&mut jobs, &account, &of_step(EventType::Begin, Some(3), 5));
    let refusal = take(&mut jobs, &account, &of_step(EventType::End, Some(4), 6)).unwrap_err();
    assert_eq!(refusal.to_string(), "phase `c` of step 4 has not begun");
    say(&mut jobs, &account, &of_step(EventType::End, None, 6));
    assert_eq!(ended(&mut jobs), [("c".to_owned(), Some(3), 5, 6)]);
    // A step's name does not count.
    say(&mut jobs, &account, &step(EventType::Begin, Some(8), 7));
    say(&mut jobs, &account, &Event { name: "other".into(), ..step(EventType::End, Some(8), 8) });
    assert_eq!(rank(&jobs).steps, 1);
    for (event, what) in [
        (step(EventType::End, Some(9), 9), "step 9 has not begun"),
        (step(EventType::End, None, 9), "a step has not begun"),
        (layer(EventType::End, "x", 9), "layer `x` has not begun"),
        (at(1, end("b", 7)), "phase `b` ends 2 ns before it began"),
    ] {
        assert_eq!(take(&mut jobs, &account, &event).unwrap_err().to_string(), what);
    }
    say(&mut jobs, &account, &at(3, end("b", 7)));
}

#[test]
fn the_end_of_a_step_leaves_what_was_open_in_it_without_an_end() {
    let (mut jobs, account) = after(&[
        at(1, begin("around", 7)),
        step(EventType::Begin, Some(1), 2),
        at(3, begin("a", 7)),
        layer(EventType::Begin, "l", 4),
        step(EventType::End, Some(1), 5),
    ]);
    assert_eq!((open(&jobs), jobs.left().step_ended), (vec!["around"], 2));
    assert_eq!(ended(&mut jobs), [("step".to_owned(), Some(1), 2, 5)]);
    say(&mut jobs, &account, &at(6, end("around", 7)));
    assert_eq!(jobs.left(), Unfinished { step_ended: 2, ..Unfinished::default() });
    let labelled = Unfinished { superseded: 1, step_ended: 2, exited: 3, silent: 4, overflow: 5 }.labelled();
    assert_eq!(labelled, [("superseded", 1), ("step_ended", 2), ("exited", 3), ("silent", 4), ("overflow", 5)]);
}

#[test]
fn a_begin_takes_the_place_of_what_it_begins_again() {
    let (mut jobs, account) = after(&[
        at(1, begin("around", 7)),
        step(EventType::Begin, Some(1), 2),
        at(3, begin("a", 7)),
        layer(EventType::Begin, "a", 4),
        at(5, begin("a", 7)),
    ]);
    assert_eq!((open(&jobs), jobs.left().superseded), (vec!["around", "step", "a", "a"], 1));
    assert_eq!(rank(&jobs).open.last().map(|open| (open.kind, open.begin_ns)), Some((Kind::Phase, 5)));
    // A new step means that the last one will never end, nor anything in it.
    say(&mut jobs, &account, &step(EventType::Begin, Some(2), 6));
    assert_eq!((open(&jobs), jobs.left().superseded), (vec!["around", "step"], 4));
    say(&mut jobs, &account, &at(7, begin("b", 7)));
    say(&mut jobs, &account, &at(8, end("b", 7)));
    assert_eq!(ended(&mut jobs), [("b".to_owned(), Some(2), 7, 8)], "of the step that is open");
}

#[test]
fn a_phase_is_of_the_step_that_is_open_or_of_the_last_one() {
    let (mut jobs, account) = after(&[step(EventType::Begin, Some(4), 1), step(EventType::End, None, 2)]);
    for event in [at(3, begin("a", 7)), at(4, end("a", 7)), step(EventType::Begin, None, 5), at(6, begin("a", 7))] {
        say(&mut jobs, &account, &event);
    }
    say(&mut jobs, &account, &at(7, end("a", 7)));
    let steps: Vec<_> = ended(&mut jobs).into_iter().map(|(name, step, ..)| (name, step)).collect();
    let named = |name: &str, step| (name.to_owned(), step);
    assert_eq!(steps, [named("step", Some(4)), named("a", Some(4)), named("a", None)]);
}

#[test]
fn what_is_reported_late_is_not_the_last_that_is_known() {
    let counted = |at_ns, step, allocated, ooms| Event {
        step: Some(step),
        memory: Some(Memory { allocated, ooms, ..Memory::default() }),
        ..at(at_ns, event(EventType::Mark, Kind::Phase, "m", 7))
    };
    let (mut jobs, account) = after(&[counted(10, 5, Some(100), None)]);
    assert!(take(&mut jobs, &account, &counted(9, 4, Some(90), Some(1))).unwrap().out_of_order);
    let memory = rank(&jobs).memory;
    assert_eq!((rank(&jobs).step, memory.allocated, memory.ooms), (Some(5), Some(100), Some(1)));
    assert!(!take(&mut jobs, &account, &counted(10, 6, Some(80), None)).unwrap().out_of_order, "at the same time");
    let memory = rank(&jobs).memory;
    assert_eq!((rank(&jobs).step, memory.allocated, memory.ooms), (Some(6), Some(80), Some(1)));
    assert_eq!(rank(&jobs).last_event_ns, 10);
    let all = |value| Memory {
        allocated: Some(value),
        reserved: Some(value),
        active: Some(value),
        inactive_split: Some(value),
        alloc_retries: Some(value),
        ooms: Some(value),
    };
    for (value, at_ns) in [(1, 20), (2, 21)] {
        let event = Event { memory: Some(all(value)), ..at(at_ns, event(EventType::Mark, Kind::Phase, "m", 7)) };
        say(&mut jobs, &account, &event);
        assert_eq!(rank(&jobs).memory, all(value));
    }
    say(&mut jobs, &account, &Event { memory: Some(Memory::default()), ..counted(22, 6, None, None) });
    assert_eq!(rank(&jobs).memory, all(2), "what is left out stays");
}

#[test]
fn marks_are_kept_newest_first_and_open_nothing() {
    let limits = Limits { marks: 2, ..Limits::default() };
    let (mut jobs, account) = (Jobs::new(limits), Account::alone());
    for (at_ns, name) in [(1, "a"), (2, "b"), (3, "c")] {
        let mark = Event { step: Some(9), rank: 4, at_ns, ..event(EventType::Mark, Kind::Phase, name, 7) };
        say(&mut jobs, &account, &mark);
    }
    let marks: Vec<_> =
        jobs.marks().map(|mark| (&**mark.job.name(), mark.rank, &*mark.name, mark.at_ns, mark.step)).collect();
    assert_eq!(marks, [("j", 4, "c", 3, Some(9)), ("j", 4, "b", 2, Some(9))]);
    assert!(named(&jobs, "j").ranks[&4].open.is_empty());
}

#[test]
fn a_world_size_and_a_process_stay_until_another_is_reported() {
    let (mut jobs, account) = after(&[Event { world_size: Some(8), ..at(1, begin("a", 7)) }]);
    say(&mut jobs, &account, &Event { pid: None, ..at(2, end("a", 7)) });
    assert_eq!((rank(&jobs).world_size, rank(&jobs).pid), (Some(8), Some(7)));
    say(&mut jobs, &account, &Event { world_size: Some(4), ..at(3, begin("a", 8)) });
    assert_eq!((rank(&jobs).world_size, rank(&jobs).pid), (Some(4), Some(8)));
}
