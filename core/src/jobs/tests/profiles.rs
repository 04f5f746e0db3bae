//! Layer profiles, from record to record.

use super::*;
use crate::wire::{Direction, Layer};
use proptest::prelude::*;

/// A forward record of a layer in a step, which gives it 1 MiB of activations and 2 MiB of parameters.
fn record(name: &str, step: u64, at_ns: i64) -> Event {
    let layer = Layer {
        growth: Some(1 << 20),
        activations: Some(1 << 20),
        parameters: Some(2 << 20),
        duration_ns: Some(300_000),
        ..Layer::new(Direction::Forward)
    };
    let memory = Some(Memory {
        allocated: Some((9 << 30) + at_ns.unsigned_abs()),
        reserved: Some(9 << 31),
        ..Memory::default()
    });
    let layer = Some(Box::new(layer));
    Event { step: Some(step), at_ns, layer, memory, ..event(EventType::Mark, Kind::Layer, name, 7) }
}

fn backward(name: &str, step: u64, at_ns: i64) -> Event {
    let layer = Layer { gathered: Some(5), activations: Some(7), ..Layer::new(Direction::Backward) };
    Event { layer: Some(Box::new(layer)), ..record(name, step, at_ns) }
}

fn step(event_type: EventType, number: u64, at_ns: i64) -> Event {
    Event { step: Some(number), at_ns, ..event(event_type, Kind::Step, "step", 7) }
}

fn of(rank: u32, event: Event) -> Event {
    Event { rank, ..event }
}

/// The step of the rank's profile, its layers and how many it lacks.
fn shown(jobs: &Jobs) -> Option<(Option<u64>, Vec<String>, u64)> {
    let profile = rank(jobs).profile()?;
    let names = profile.records().map(|record| format!("{}:{}", record.name, record.layer.direction.label()));
    Some((profile.step, names.collect(), profile.missing))
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// One user of this node among others.
fn user(limits: Limits) -> (Jobs, Accounts, Arc<Account>) {
    let accounts = Accounts::new(&limits);
    let account = accounts.of(&Owner::User { uid: 1, within: Within::Node });
    (Jobs::new(limits), accounts, account)
}

#[test]
fn a_profile_is_shown_at_once_when_its_step_is_over() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let say = |jobs: &mut Jobs, events: &[Event]| events.iter().for_each(|event| super::say(jobs, &account, event));
    say(&mut jobs, &[step(EventType::Begin, 1, 0), record("a", 1, 10), record("b", 1, 20), backward("b", 1, 30)]);
    assert_eq!(shown(&jobs), None, "half a profile");
    say(&mut jobs, &[step(EventType::End, 1, 40)]);
    let first = Some((Some(1), names(&["a:forward", "b:forward", "b:backward"]), 0));
    assert_eq!(shown(&jobs), first);
    let profile = Arc::clone(rank(&jobs).profile().expect("one"));
    assert_eq!((profile.begin_ns, profile.end_ns, profile.count), (10, 30, 3));
    let records: Vec<_> = profile.records().collect();
    let expected = backward("b", 1, 30);
    assert_eq!(records[2].layer, *expected.layer.expect("a layer"));
    assert_eq!(
        (records[2].at_ns, records[2].allocated, records[2].reserved),
        (30, Some((9 << 30) + 30), Some(9 << 31))
    );
    // The begin of the next step replaces it, and so does a record of another.
    say(&mut jobs, &[step(EventType::Begin, 2, 50), record("c", 2, 60)]);
    assert_eq!(shown(&jobs), first);
    say(&mut jobs, &[step(EventType::Begin, 3, 70)]);
    assert_eq!(shown(&jobs), Some((Some(2), names(&["c:forward"]), 0)));
    say(&mut jobs, &[record("d", 3, 80), record("e", 4, 90)]);
    assert_eq!(shown(&jobs).expect("one").1, names(&["d:forward"]));
    // The rank's end: there will be no more of that step.
    say(&mut jobs, &[Event::exit("j", 0, Some(7), 99)]);
    assert_eq!(shown(&jobs).expect("one").1, names(&["e:forward"]));
    assert_eq!(jobs.layer_records_dropped(), 0);
}

#[test]
fn totals_count_parameters_once_and_unknown_stays_unknown() {
    let (mut jobs, account) = (Jobs::new(Limits { top_layers: 2, ..Limits::default() }), Account::alone());
    let unknown = |name: &str, at_ns| {
        let layer = Some(Box::new(Layer::new(Direction::Forward)));
        Event { layer, memory: None, ..record(name, 1, at_ns) }
    };
    let mut large = record("large", 1, 3);
    large.layer.as_mut().expect("a layer").activations = Some(9 << 20);
    for event in [record("a", 1, 1), record("a", 1, 2), large, record("b", 1, 4), unknown("c", 5), backward("b", 1, 6)]
    {
        say(&mut jobs, &account, &event);
    }
    say(&mut jobs, &account, &step(EventType::Begin, 2, 9));
    let profile = rank(&jobs).profile().expect("one");
    let expected = Totals {
        layers: 4,
        activations: Some(12 << 20),
        parameters: Some(6 << 20),
        gathered: Some(5),
        allocated_max: Some((9 << 30) + 6),
        reserved_max: Some(9 << 31),
    };
    assert_eq!(profile.totals, expected);
    let top: Vec<_> = profile.top.iter().map(|top| (&*top.name, top.activations, top.parameters)).collect();
    assert_eq!(top, [("large", 9 << 20, Some(2 << 20)), ("a", 2 << 20, Some(2 << 20))]);
    say(&mut jobs, &account, &Event { step: Some(2), ..unknown("c", 10) });
    say(&mut jobs, &account, &step(EventType::Begin, 3, 11));
    let profile = rank(&jobs).profile().expect("one");
    assert_eq!((profile.totals, profile.top.len()), (Totals { layers: 1, ..Totals::default() }, 0));
}

#[test]
fn a_record_is_no_mark_and_a_mark_of_kind_layer_is_no_record() {
    let limits = Limits { marks: 4, ..Limits::default() };
    let (mut jobs, account) = (Jobs::new(limits), Account::alone());
    say(&mut jobs, &account, &event(EventType::Mark, Kind::Phase, "oom", 7));
    (0..100).for_each(|n| say(&mut jobs, &account, &record("a", 1, n)));
    say(&mut jobs, &account, &Event { layer: None, ..record("bare", 1, 100) });
    say(&mut jobs, &account, &step(EventType::Begin, 2, 101));
    assert_eq!(jobs.marks().map(|mark| mark.name.as_str()).collect::<Vec<_>>(), ["bare", "oom"]);
    assert_eq!(rank(&jobs).profile().expect("one").count, 100);
    assert!(jobs.take_ended(i64::MAX, 9).is_empty() && rank(&jobs).open.len() == 1);
    assert_eq!(rank(&jobs).memory.allocated, Some((9 << 30) + 100), "the allocator's counters as last sent");
}

#[test]
fn a_record_after_its_step_does_not_replace_the_profile() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let say = |jobs: &mut Jobs, events: &[Event]| events.iter().for_each(|event| super::say(jobs, &account, event));
    say(
        &mut jobs,
        &[step(EventType::Begin, 1, 0), record("a", 1, 10), step(EventType::End, 1, 20), record("b", 1, 15)],
    );
    say(&mut jobs, &[step(EventType::Begin, 2, 30), step(EventType::End, 2, 40)]);
    assert_eq!((shown(&jobs).expect("one").1, jobs.layer_records_dropped()), (names(&["a:forward"]), 1));
    // The same step once more, as after a restart.
    say(&mut jobs, &[step(EventType::Begin, 1, 50), record("c", 1, 60), step(EventType::End, 1, 70)]);
    assert_eq!((shown(&jobs).expect("one").1, jobs.layer_records_dropped()), (names(&["c:forward"]), 1));
}

#[test]
fn a_step_that_never_ends_takes_no_more_than_its_owners_share() {
    let limits = Limits { layer_bytes: 256 << 10, ..Limits::default() };
    let (mut jobs, accounts, account) = user(limits);
    let mut refused = 0;
    for n in 0..1_000_000 {
        // Names of 128 bytes, of which a job may have some thousands.
        let name = if n % 7 == 0 { format!("{:0>128}", n % 35_000) } else { "a".to_owned() };
        refused += u64::from(take(&mut jobs, &account, &record(&name, 1, n)).is_err());
        assert!(account.holds(Resource::Layers) <= limits.layer_bytes / 2);
    }
    assert!(refused > 900_000, "{refused}");
    assert_eq!(jobs.layer_records_dropped(), refused);
    assert!(account.holds(Resource::Bytes) < 2 << 20);
    // Another owner still has room, and a profile knows what it lacks.
    let other = accounts.of(&Owner::User { uid: 2, within: Within::Node });
    let of_other = |event: Event| Event { job: "k".into(), ..event };
    (0..1_000).for_each(|n| say(&mut jobs, &other, &of_other(record("a", 1, n))));
    say(&mut jobs, &other, &of_other(step(EventType::Begin, 2, 1_000_000)));
    assert_eq!(named(&jobs, "k").ranks[&0].profile().expect("one").missing, 0);
    say(&mut jobs, &account, &step(EventType::Begin, 2, 1_000_001));
    let profile = Arc::clone(rank(&jobs).profile().expect("one"));
    assert_eq!((profile.missing, profile.count as u64), (refused, 1_000_000 - refused));
    assert_eq!(profile.records().count(), profile.count);
    // What is read is on the account for as long as it is.
    jobs.expire(i64::MAX);
    assert!(jobs.by_id().is_empty() && accounts.held(Resource::Layers) > 0);
    assert!(accounts.held(Resource::Bytes) > 0, "its names are too");
    drop(profile);
    assert_eq!((accounts.held(Resource::Layers), accounts.held(Resource::Bytes)), (0, 0));
}

#[test]
fn a_profile_is_on_its_account_while_it_is_built_and_afterwards() {
    let limits = Limits { top_layers: 7, ..Limits::default() };
    let (mut jobs, account) = (Jobs::new(limits), Account::alone());
    let own = size_of::<Profile>() + 7 * size_of::<Top>();
    say(&mut jobs, &account, &record("a", 1, 1));
    let building = account.holds(Resource::Layers);
    assert!((own + 1_024..own + 1_024 + 256).contains(&building), "{building} bytes");
    say(&mut jobs, &account, &step(EventType::Begin, 2, 2));
    let whole = account.holds(Resource::Layers);
    assert!((own + 20..own + 256).contains(&whole), "{whole} bytes");
    say(&mut jobs, &account, &record("a", 2, 3));
    assert_eq!(account.holds(Resource::Layers), whole + building);
    jobs.expire(i64::MAX);
    assert_eq!(account.holds(Resource::Layers), 0);
}

/// As few bytes as it takes here, each record is a row in files and answers.
#[test]
fn a_record_counts_at_least_sixteen_bytes() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let layer = Some(Box::new(Layer::new(Direction::Forward)));
    let tiny = Event { layer, memory: None, ..record("a", 1, 5) };
    for n in 1..=10_000 {
        say(&mut jobs, &account, &tiny);
        assert!(account.holds(Resource::Layers) >= n * 16);
    }
    assert!(account.holds(Resource::Layers) < 10_000 * 16 + 4_096);
    say(&mut jobs, &account, &step(EventType::Begin, 2, 9));
    assert!(account.holds(Resource::Layers) >= 10_000 * 16);
}

#[test]
fn a_record_of_an_earlier_step_ends_no_profile_of_the_open_one() {
    let (mut jobs, account) = (Jobs::new(Limits { layer_names: 3, ..Limits::default() }), Account::alone());
    let say = |jobs: &mut Jobs, events: &[Event]| events.iter().for_each(|event| super::say(jobs, &account, event));
    say(&mut jobs, &[step(EventType::Begin, 5, 0), record("a", 5, 10), step(EventType::End, 5, 20)]);
    say(&mut jobs, &[step(EventType::Begin, 6, 30), record("a", 6, 40), record("late", 5, 15), record("late", 4, 5)]);
    assert_eq!(shown(&jobs), Some((Some(5), names(&["a:forward"]), 0)), "half a profile");
    // Without room for its name, neither.
    say(&mut jobs, &[record("c", 6, 41)]);
    assert_eq!(take(&mut jobs, &account, &record("d", 5, 16)), Err(Refusal::TooManyNames(3)));
    say(&mut jobs, &[step(EventType::End, 6, 50)]);
    assert_eq!(shown(&jobs), Some((Some(6), names(&["a:forward", "c:forward"]), 0)));
    assert_eq!(jobs.layer_records_dropped(), 3);
}

#[test]
fn a_step_that_begins_again_has_no_records_of_the_attempt_before() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let say = |jobs: &mut Jobs, events: &[Event]| events.iter().for_each(|event| super::say(jobs, &account, event));
    say(&mut jobs, &[step(EventType::Begin, 100, 0), record("a", 100, 10), record("b", 100, 20)]);
    say(&mut jobs, &[step(EventType::Begin, 100, 30), record("a", 100, 40), step(EventType::End, 100, 50)]);
    assert_eq!((shown(&jobs), jobs.layer_records_dropped()), (Some((Some(100), names(&["a:forward"]), 0)), 2));
    assert_eq!(rank(&jobs).profile().expect("one").begin_ns, 40);
}

#[test]
fn a_profile_is_forgotten_for_no_want_that_it_cannot_mend() {
    let limits = Limits { bytes: 32 << 10, ..Limits::default() };
    let (mut jobs, _accounts, account) = user(limits);
    for event in [record("a", 1, 1), step(EventType::Begin, 2, 2), record("a", 2, 3)] {
        say(&mut jobs, &account, &event);
    }
    let refusals = (0..100).filter_map(|n| take(&mut jobs, &account, &record(&format!("{n:0>128}"), 2, 4)).err());
    assert!(refusals.last().is_some_and(|refusal| refusal.is_over_budget_of(Resource::Bytes)));
    assert!(matches!(take(&mut jobs, &account, &of(9, record("a", 2, 5))), Err(Refusal::OverBudget { .. })));
    assert_eq!(shown(&jobs), Some((Some(1), names(&["a:forward"]), 0)));
}

/// Each would look at every rank under the lock that all senders need.
#[test]
fn refused_records_of_ever_other_steps_look_at_no_other_rank() {
    let limits = Limits { layer_bytes: 32 << 10, ..Limits::default() };
    let (mut jobs, accounts, account) = user(limits);
    let other = accounts.of(&Owner::User { uid: 2, within: Within::Node });
    let held = other.hold(Resource::Layers, 8 << 10);
    (0..2_000).for_each(|n| drop(take(&mut jobs, &account, &record("a", 1, n))));
    assert!(jobs.layer_records_dropped() > 0);
    drop(held);
    // This rank has a profile that could make room.
    for event in [record("a", 1, 1), step(EventType::Begin, 2, 2), record("a", 2, 3)] {
        say(&mut jobs, &account, &of(1, event));
    }
    let _held = other.hold(Resource::Layers, 14 << 10);
    let refusal = |jobs: &mut Jobs, step| take(jobs, &account, &record("a", step, 3_000)).err();
    let expected = "bytes of layer profiles (two thirds of annotations.max_ended_bytes): this sender may have no more of \
                    the 32768 that all share";
    // The refusal of step 7 ends the profile of step 1, which is this rank's own to forget.
    assert_eq!(refusal(&mut jobs, 7).expect("no room").to_string(), expected);
    assert!(named(&jobs, "j").ranks[&1].profile().is_some());
}

/// As a recording has it, whose step may never end.
#[test]
fn a_played_profile_is_whole_with_its_last_record() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let mut last = record("b", 1, 20);
    last.layer.as_mut().expect("a layer").last_with_missing = Some(7);
    for event in [step(EventType::Begin, 1, 0), record("a", 1, 10), last] {
        assert!(jobs.by_id().is_empty() || shown(&jobs).is_none());
        say(&mut jobs, &account, &event);
    }
    assert_eq!(shown(&jobs), Some((Some(1), names(&["a:forward", "b:forward"]), 7)));
}

#[test]
fn records_that_come_before_their_step_begins_stay_in_its_profile() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    for event in [record("a", 1, 10), step(EventType::Begin, 1, 0), record("b", 1, 20), step(EventType::End, 1, 30)] {
        say(&mut jobs, &account, &event);
    }
    assert_eq!(shown(&jobs).expect("one").1, names(&["a:forward", "b:forward"]));
}

#[test]
fn a_profile_has_a_bounded_number_of_records() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let most = 1 << 14;
    let refusals: Vec<_> = (0..most + 3).filter_map(|n| take(&mut jobs, &account, &record("a", 1, n)).err()).collect();
    assert_eq!(refusals, vec![Refusal::TooManyRecords(1 << 14); 3]);
    say(&mut jobs, &account, &step(EventType::Begin, 2, most + 9));
    let profile = rank(&jobs).profile().expect("one");
    assert_eq!((profile.count, profile.missing), (1 << 14, 3));
}

#[test]
fn a_layer_without_a_place_for_its_name_is_missing() {
    let limits = Limits { layer_names: 2, ..Limits::default() };
    let (mut jobs, account) = (Jobs::new(limits), Account::alone());
    ["a", "b"].iter().for_each(|name| say(&mut jobs, &account, &record(name, 1, 1)));
    assert_eq!(take(&mut jobs, &account, &record("c", 1, 2)), Err(Refusal::TooManyNames(2)));
    assert_eq!(take(&mut jobs, &account, &record("c", 2, 3)), Err(Refusal::TooManyNames(2)));
    assert_eq!(shown(&jobs), Some((Some(1), names(&["a:forward", "b:forward"]), 1)));
    say(&mut jobs, &account, &step(EventType::Begin, 3, 9));
    assert_eq!(shown(&jobs).expect("one").0, Some(1), "one without a single record replaces nothing");
    assert_eq!(jobs.layer_records_dropped(), 2);
    // One that may not speak for the job changes nothing.
    let other = Accounts::new(&limits).of(&Owner::User { uid: 9, within: Within::Node });
    let of_daemon = Event { pid: None, scope: Some(Scope::Daemon), ..record("c", 3, 10) };
    assert!(matches!(take(&mut jobs, &other, &of_daemon), Err(Refusal::NotOwner(_))));
    assert_eq!(jobs.layer_records_dropped(), 2);
}

/// Where a rank's next profile finds no room, its last one makes it.
#[test]
fn the_last_profile_makes_room_for_the_next() {
    let limits = Limits { layer_bytes: 96 << 10, ..Limits::default() };
    let (mut jobs, _accounts, account) = user(limits);
    for number in 0..20_u64 {
        say(&mut jobs, &account, &step(EventType::Begin, number, number.cast_signed() * 10_000));
        (0..1_500).for_each(|n| say(&mut jobs, &account, &record("a", number, number.cast_signed() * 10_000 + n)));
        say(&mut jobs, &account, &step(EventType::End, number, number.cast_signed() * 10_000 + 2_000));
        let profile = rank(&jobs).profile().expect("one");
        assert_eq!((profile.step, profile.count, profile.missing), (Some(number), 1_500, 0));
        assert!(account.holds(Resource::Layers) <= 48 << 10);
    }
}

/// 64 ranks of 500 layers: as many as some nodes have, of one user, with the default limits.
#[test]
fn profiles_of_64_ranks_of_500_layers_fit() {
    let (mut jobs, accounts, account) = user(Limits::default());
    let layers: Vec<String> = (0..500).map(|n| format!("transformer.h.{}.mlp.{}", n / 6, n % 6)).collect();
    for number in 1..4_u64 {
        let begin_ns = number.cast_signed() * 1_000_000_000;
        (0..64).for_each(|rank| say(&mut jobs, &account, &of(rank, step(EventType::Begin, number, begin_ns))));
        for (n, name) in (0..).zip(&layers) {
            (0..64).for_each(|rank| say(&mut jobs, &account, &of(rank, record(name, number, begin_ns + n * 400_000))));
        }
        for (n, name) in (500..).zip(layers.iter().rev()) {
            (0..64)
                .for_each(|rank| say(&mut jobs, &account, &of(rank, backward(name, number, begin_ns + n * 400_000))));
        }
        (0..64)
            .for_each(|rank| say(&mut jobs, &account, &of(rank, step(EventType::End, number, begin_ns + 900_000_000))));
        assert!(accounts.held(Resource::Layers) <= Limits::default().layer_bytes / 2);
        for (_, _, rank) in jobs.ranks() {
            let profile = rank.profile().expect("one");
            assert_eq!((profile.step, profile.count, profile.missing), (Some(number), 1_000, 0));
            assert_eq!(profile.totals.layers, 500);
        }
    }
    let each = accounts.held(Resource::Layers) / (64 * 1_000);
    assert!(each <= 24, "{each} bytes a record");
    assert_eq!(jobs.layer_records_dropped(), 0);
}

proptest! {
    /// Whatever comes in which order, every record that was taken is in one profile, or counted.
    #[test]
    fn nothing_is_lost_unseen(events in prop::collection::vec((0_u8..6, 0_u64..3, 0_usize..4), 1..200)) {
        let (mut jobs, account) = (Jobs::new(Limits { layer_names: 3, ..Limits::default() }), Account::alone());
        let (mut records, mut seen, mut last) = (0, 0, None::<Arc<Profile>>);
        let mut count = |jobs: &Jobs| {
            let profile = find(jobs, "j").and_then(|job| job.ranks[&0].profile()).cloned();
            if let Some(profile) = profile && !last.as_ref().is_some_and(|last| Arc::ptr_eq(last, &profile)) {
                seen += profile.records().count() as u64;
                last = Some(profile);
            }
        };
        for (at_ns, (what, number, name)) in (0..).zip(events) {
            let event = match what {
                0 => step(EventType::Begin, number, at_ns),
                1 => step(EventType::End, number, at_ns),
                2 => Event::exit("j", 0, Some(7), at_ns),
                _ => record(["a", "b", "c", "d"][name], number, at_ns),
            };
            records += u64::from(event.layer.is_some());
            // Some ends have no begin.
            let _ = take(&mut jobs, &account, &event);
            count(&jobs);
        }
        if records > 0 {
            say(&mut jobs, &account, &step(EventType::Begin, 9, 1_000));
            count(&jobs);
        }
        prop_assert_eq!(seen + jobs.layer_records_dropped(), records);
    }
}
