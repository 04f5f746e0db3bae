//! How a rank ends: by its own exit event, by silence, or with a process or connection that speaks for it.

use super::*;
use crate::clock::SECOND_NS;

#[test]
fn a_rank_that_ends_has_nothing_open_and_no_gpu_and_keeps_what_it_has_said() {
    let (mut jobs, account) = running();
    assert_eq!((rank(&jobs).gpus.as_deref(), rank(&jobs).open.len()), (Some([3].as_slice()), 1));
    exit(&mut jobs, &account, 5);
    let ended = rank(&jobs);
    assert_eq!((ended.exited_ns, ended.gpus.as_deref(), ended.open.len()), (Some(5), None, 0));
    assert_eq!(jobs.left().exited, 1);
    assert!(jobs.search(&"j".into(), 0).is_none(), "its GPU is not looked for");
    assert!(rank(&jobs).has_series("a"));
    let ended = jobs.take_ended(i64::MAX, 9);
    let known = ended.iter().map(|ended| (&*ended.open.name, ended.by, ended.end_ns, ended.gpus.as_deref()));
    assert_eq!(
        known.collect::<Vec<_>>(),
        [("a", EndedBy::End, 0, Some([3].as_slice())), ("b", EndedBy::Exit, 5, Some([3].as_slice()))],
        "both have its GPU"
    );
    assert!(rank(&jobs).has_series("b"), "its peak has a place");
    let memory: Vec<_> = jobs.memory_of_ranks().into_iter().map(|rank| (rank.gpu, rank.pid)).collect();
    assert_eq!(memory, [(None, Some(7))], "its process is still known as a rank's");
    drop(ended);
    assert_eq!(account.holds(Resource::Pending), 0);
    // An end for what was given up is refused; another begin makes the rank go on.
    assert!(matches!(jobs.take(&end("b", 7), &account, 6), Err(Refusal::EndWithoutBegin(_))));
    jobs.take(&begin("b", 7), &account, 7).unwrap();
    assert_eq!((rank(&jobs).exited_ns, rank(&jobs).since_ns, rank(&jobs).open.len()), (None, 7, 1));
}

#[test]
fn what_is_open_at_the_end_of_a_rank_ends_with_it_the_step_last() {
    let (mut jobs, account) = running();
    jobs.take_ended(i64::MAX, 9);
    let attributes: Attributes = Box::new([("run_id".into(), crate::wire::Scalar::Text("x".into()))]);
    let step = Event { step: Some(4), attributes: Some(attributes), ..event(EventType::Begin, Kind::Step, "step", 7) };
    let layer = event(EventType::Begin, Kind::Layer, "layer", 7);
    for begun in [step, begin("forward", 7), layer] {
        say(&mut jobs, &account, &begun);
    }
    exit(&mut jobs, &account, 5);
    let ended = jobs.take_ended(i64::MAX, 9);
    let known = ended.iter().map(|one| (&*one.open.name, one.by, one.open.step, one.open.attributes.is_some()));
    let by = EndedBy::Exit;
    assert_eq!(
        known.collect::<Vec<_>>(),
        [("b", by, None, false), ("forward", by, Some(4), false), ("step", by, Some(4), true)],
        "and no layer"
    );
    assert_eq!(jobs.left().exited, 4);
    drop(ended);
    assert_eq!(account.holds(Resource::Pending), 0);
}

#[test]
fn a_rank_that_ended_is_shown_for_a_while_and_one_that_is_silent_for_longer() {
    let limits = Limits::default();
    for (exits, kept_ns) in [(true, limits.shown_after_exit_ns), (false, limits.silence_ns)] {
        let (mut jobs, account) = running();
        if exits {
            exit(&mut jobs, &account, 0);
        }
        assert!(!jobs.expire(kept_ns) && jobs.expire(kept_ns + 1) && jobs.by_id().is_empty());
        assert!(!jobs.expire(kept_ns + 2), "returned once");
        assert_eq!((jobs.left().exited, jobs.left().silent), (u64::from(exits), u64::from(!exits)));
        assert_eq!(account.holds(Resource::Ranks), 0);
    }
}

#[test]
fn a_failed_allocation_keeps_the_memory_of_the_phases_in_which_it_fails() {
    let (mut jobs, account) = running();
    let oom = Event { event: EventType::Mark, name: "oom".to_owned(), at_ns: 4, ..begin("oom", 7) };
    jobs.take_ended(i64::MAX, 9);
    say(&mut jobs, &account, &oom);
    let ended = jobs.take_ended(i64::MAX, 9);
    let known = ended.iter().map(|ended| (&*ended.open.name, ended.by, ended.end_ns, ended.gpus.as_deref()));
    assert_eq!(known.collect::<Vec<_>>(), [("b", EndedBy::StillOpen, 4, Some([3].as_slice()))]);
    // It goes on, and ends or does not.
    assert_eq!((rank(&jobs).open.len(), jobs.left().exited), (1, 0));
    let series = account.holds(Resource::Series);
    say(&mut jobs, &account, &Event { at_ns: 6, ..end("b", 7) });
    assert_eq!(jobs.take_ended(i64::MAX, 9)[0].by, EndedBy::End);
    assert_eq!(account.holds(Resource::Series), series);
}

#[test]
fn nobody_ends_a_rank_that_is_not_there() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let refusal = jobs.take(&Event::exit("j", 0, None, 0), &account, 0).unwrap_err();
    assert_eq!(refusal.outcome(), Outcome::EndWithoutBegin);
    assert!(jobs.by_id().is_empty());
}

#[test]
fn ranks_that_have_ended_make_room_for_others_of_their_owner() {
    let limits = Limits { ranks: 1, ..Limits::default() };
    let accounts = Accounts::new(&limits);
    let owner = |uid| accounts.of(&Owner::User { uid, within: Within::Node });
    let (mut jobs, one, other) = (Jobs::new(limits), owner(1), owner(2));
    let of = |job: &str, name: &str| Event { job: job.to_owned(), ..begin(name, 1) };
    jobs.take(&of("one", "a"), &one, 0).unwrap();
    assert_eq!(jobs.take(&of("two", "a"), &one, 0).unwrap_err().outcome(), Outcome::TooManyRanks);
    jobs.take(&Event::exit("one", 0, None, 0), &one, 0).unwrap();
    assert_eq!(
        jobs.take(&of("two", "a"), &other, 0).unwrap_err().outcome(),
        Outcome::TooManyRanks,
        "not for another's"
    );
    jobs.take(&of("two", "a"), &one, 0).unwrap();
    assert_eq!(jobs.by_id().keys().map(|id| &**id.name()).collect::<Vec<_>>(), ["two"]);
    assert!(jobs.expire(0), "what was known of the other is forgotten too");
}

#[test]
fn a_rank_ends_with_whoever_alone_speaks_for_it() {
    let (mut jobs, account) = running();
    assert!(jobs.end_with(SenderId::Process(8), 9).is_empty() && jobs.end_with(SenderId::Connection(7), 9).is_empty());
    let exits: Vec<_> = jobs.end_with(SenderId::Process(7), 9).into_iter().map(|(exit, _)| exit).collect();
    assert_eq!(exits, [Event { scope: Some(Scope::Daemon), ..Event::exit("j", 0, Some(7), 9) }]);
    assert_eq!((rank(&jobs).exited_ns, jobs.left().exited), (Some(9), 1));
    assert!(jobs.end_with(SenderId::Process(7), 9).is_empty(), "returned once");
    // One that still speaks, or has something open, keeps it.
    let (mut jobs, _) = running();
    jobs.take(&begin("c", 8), &account, 0).unwrap();
    assert!(jobs.end_with(SenderId::Process(7), 9).is_empty(), "8 has begun c, and is not over");
}

#[test]
fn a_connection_speaks_for_itself_and_not_for_its_process() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let over = |connection| Event { connection: Some(connection), ..begin("a", 7) };
    assert_eq!(jobs.take(&over(1), &account, 0).unwrap().watch, None);
    assert_eq!(jobs.take(&over(1), &account, 0).unwrap().watch, Some(SenderId::Connection(1)));
    assert!(jobs.end_with(SenderId::Process(7), 9).is_empty());
    assert_eq!(jobs.end_with(SenderId::Connection(1), 9).len(), 1);
}

#[test]
fn silence_is_counted_from_the_last_event() {
    let (mut jobs, account) = running();
    jobs.take(&begin("c", 7), &account, 100 * SECOND_NS).unwrap();
    assert!(!jobs.expire(Limits::default().silence_ns + 1));
    assert_eq!(rank(&jobs).last_heard_ns, 100 * SECOND_NS);
}

/// A step's begin over a connection of a process.
fn step(pid: u32, connection: u32) -> Event {
    Event { connection: Some(connection), ..event(EventType::Begin, Kind::Step, "step", pid) }
}

#[test]
fn a_second_process_that_sends_steps_for_a_rank_is_kept_apart() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    (0..2).for_each(|_| say(&mut jobs, &account, &step(7, 1)));
    let other = step(8, 2);
    let refusal = take(&mut jobs, &account, &other).unwrap_err();
    assert_eq!(refusal.to_string(), "rank 0 of job `j` is process 7, which still runs");
    assert_eq!(jobs.take_apart(&other, &account, 0).unwrap().job.text(), "j~8");
    for _ in 0..3 {
        assert_eq!(take(&mut jobs, &account, &step(7, 1)).unwrap().job.text(), "j");
        assert_eq!(take(&mut jobs, &account, &step(8, 2)).unwrap().job.text(), "j~8");
    }
    assert_eq!((jobs.conflicts(), named(&jobs, "j").ranks[&0].open.len()), (1, 1));
    // A process that loads data marks its phases within the rank's step.
    let data = Event { connection: Some(3), ..begin("data", 9) };
    assert_eq!(take(&mut jobs, &account, &data).unwrap().job.text(), "j");
    // When the first has ended, the rank is free, also for a process of the same id as the second.
    jobs.end_with(SenderId::Connection(3), 5);
    jobs.end_with(SenderId::Connection(1), 5);
    jobs.end_held_by(7, 5);
    jobs.end_with(SenderId::Connection(2), 5);
    jobs.expire(i64::MAX);
    assert_eq!(take(&mut jobs, &account, &step(8, 4)).unwrap().job.text(), "j");
}

#[test]
fn programs_that_run_once_for_each_mark_share_a_rank() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    (7..20).for_each(|pid| say(&mut jobs, &account, &event(EventType::Begin, Kind::Step, "step", pid)));
    assert_eq!((jobs.conflicts(), jobs.left().superseded), (0, 12));
}

#[test]
fn a_rank_whose_process_ran_out_of_host_memory_is_marked_where_it_was_and_goes_on_until_it_ends() {
    let (mut jobs, account) = running();
    for (rank, pid) in [(1, 7), (4, 8)] {
        let event = Event { rank, step: Some(3), ..event(EventType::Begin, Kind::Step, "step", pid) };
        jobs.take(&event, &account, 0).unwrap();
    }
    for rank in [1, 4] {
        let event = Event { rank, ..begin("data", if rank == 1 { 7 } else { 8 }) };
        jobs.take(&event, &account, 0).unwrap();
    }
    let oom =
        HostOom { pid: Some(7), killed: Some(1), is_own: Some(true), has_ended: Some(true), ..HostOom::default() };
    let ranks = |marks: Vec<(Event, Arc<Account>)>| marks.into_iter().map(|(mark, _)| mark.rank).collect::<Vec<_>>();
    assert_eq!(ranks(jobs.mark_host_oom(&[SenderId::Process(7)], &oom, 5)), [0, 1]);
    let of = |jobs: &Jobs, rank: u32| named(jobs, "j").ranks[&rank].host_oom.clone();
    let marked = of(&jobs, 0).expect("marked");
    assert_eq!((marked.count, marked.at_ns, marked.phase.as_deref(), &*marked.gpus), (1, 5, Some("b"), &[3][..]));
    assert_eq!((marked.pid, marked.has_ended, of(&jobs, 1).expect("marked").step), (Some(7), Some(true), Some(3)));
    assert_eq!((of(&jobs, 4), rank(&jobs).gpus.as_deref()), (None, Some([3].as_slice())), "another process's rank");
    assert_eq!(jobs.marks().filter(|mark| mark.name == "host_oom").count(), 2);
    exit(&mut jobs, &account, 6);
    assert!(of(&jobs, 0).is_some(), "it is known after its end");
    // Ranks that have ended lose no process beside them.
    let beside = HostOom { pid: None, is_own: Some(false), has_ended: Some(false), ..oom.clone() };
    let all = [SenderId::Process(7), SenderId::Process(8)];
    assert_eq!(ranks(jobs.mark_host_oom(&all, &beside, 7)), [1], "the lowest of the job");
    assert_eq!(of(&jobs, 1).map(|oom| (oom.count, oom.pid)), Some((2, None)));
    let late = HostOom { ago_ns: 2 * SECOND_NS, ..beside.clone() };
    assert_eq!(ranks(jobs.mark_host_oom(&all, &late, 8)), [1]);
    let marked = of(&jobs, 1).expect("marked");
    assert_eq!(
        (marked.at_ns, marked.step, marked.phase.as_deref()),
        (8 - 2 * SECOND_NS, None, None),
        "not where it is now"
    );
    assert!(jobs.mark_host_oom(&[SenderId::Process(9)], &beside, 8).is_empty());
    // A process of its data loader sends for rank 4 too.
    for name in ["a", "b"] {
        jobs.take(&Event { rank: 4, ..begin(name, 9) }, &account, 9).unwrap();
    }
    assert_eq!(ranks(jobs.mark_host_oom(&[SenderId::Process(9)], &HostOom { pid: Some(9), ..oom }, 10)), [4]);
    assert_eq!(of(&jobs, 4).map(|oom| (oom.is_own, oom.has_ended)), Some((Some(false), Some(false))));
}
