//! What jobs may make the daemon keep, and that a refused event changes nothing.

use super::*;

/// An account of one user beside others, whose share is half of each limit.
fn user(limits: &Limits) -> (Jobs, Arc<Account>) {
    let owner = Owner::User { uid: 1, within: Within::Node };
    (Jobs::new(*limits), Accounts::new(limits).of(&owner))
}

fn outcome(jobs: &mut Jobs, account: &Arc<Account>, event: &Event) -> Option<Outcome> {
    take(jobs, account, event).err().map(|refusal| refusal.outcome())
}

/// What is held of everything.
fn held(account: &Arc<Account>) -> [usize; 5] {
    [Resource::Bytes, Resource::Jobs, Resource::Ranks, Resource::Series, Resource::Pending].map(|of| account.holds(of))
}

#[test]
fn what_a_job_takes_is_on_its_owners_account_until_it_has_gone() {
    let (mut jobs, account) = user(&Limits::default());
    say(&mut jobs, &account, &begin("forward", 7));
    assert_eq!([RANK_BYTES, OPEN_BYTES, SERIES_BYTES, JOB_BYTES, NAME_BYTES], [3_584, 512, 5_120, 512, 160]);
    let of_phase = OPEN_BYTES + SERIES_BYTES;
    let of_job = JOB_BYTES + "j".len() + NAME_BYTES + "forward".len();
    assert_eq!(held(&account), [RANK_BYTES + of_job + of_phase, 1, 1, 1, 0]);
    // The same name again takes nothing but its place among what is open.
    let layer = |event_type| event(event_type, Kind::Layer, "forward", 7);
    say(&mut jobs, &account, &layer(EventType::Begin));
    say(&mut jobs, &account, &layer(EventType::End));
    let of_layer = NAME_BYTES + "forward".len();
    assert_eq!(held(&account), [RANK_BYTES + of_job + of_phase + of_layer + OPEN_BYTES, 1, 1, 1, 1]);
    drop(jobs.take_ended(i64::MAX, 9));
    assert_eq!(held(&account), [RANK_BYTES + of_job + of_phase + of_layer, 1, 1, 1, 0]);
    let with_step = Event { name: "a step".into(), ..event(EventType::Begin, Kind::Step, "", 7) };
    say(&mut jobs, &account, &with_step);
    assert_eq!(held(&account)[0], RANK_BYTES + of_job + of_phase + of_layer + OPEN_BYTES + "a step".len());
    jobs.expire(i64::MAX);
    drop(jobs.take_ended(i64::MAX, 9));
    assert_eq!(held(&account), [0; 5]);
}

/// What ends frees more than it takes: nobody else's bytes keep it from ending.
#[test]
fn an_end_is_taken_where_others_have_left_no_room() {
    let each = RANK_BYTES + JOB_BYTES + 1 + NAME_BYTES + 1 + OPEN_BYTES + SERIES_BYTES;
    let limits = Limits { bytes: 2 * each + 1, ..Limits::default() };
    let (accounts, mut jobs) = (Accounts::new(&limits), Jobs::new(limits));
    let [one, other] = [1, 2].map(|uid| accounts.of(&Owner::User { uid, within: Within::Node }));
    say(&mut jobs, &one, &begin("a", 7));
    say(&mut jobs, &other, &Event { job: "k".into(), ..begin("a", 8) });
    assert_eq!(outcome(&mut jobs, &one, &begin("a", 7)), Some(Outcome::OverBudget));
    assert_eq!(outcome(&mut jobs, &one, &end("a", 7)), None);
}

#[test]
fn a_phase_has_series_once_whether_it_is_open_or_has_ended() {
    let (mut jobs, account) = user(&Limits::default());
    for event in [begin("a", 7), begin("a", 7), end("a", 7), begin("a", 7), end("a", 7)] {
        say(&mut jobs, &account, &event);
        assert_eq!(account.holds(Resource::Series), 1);
        assert!(rank(&jobs).has_series("a") && !rank(&jobs).has_series("b"));
    }
    say(&mut jobs, &account, &event(EventType::Begin, Kind::Layer, "b", 7));
    assert!(!rank(&jobs).has_series("b"), "a layer has none");
    for _ in 0..2 {
        say(&mut jobs, &account, &begin("c", 7));
        say(&mut jobs, &account, &begin("d", 7));
        assert_eq!(account.holds(Resource::Series), 3, "each has its own, begun again or not");
    }
    let (mut jobs, account) = user(&Limits::default());
    let step = event(EventType::Begin, Kind::Step, "step", 7);
    for (event, series) in [(&step, 0), (&begin("a", 7), 1), (&step, 0)] {
        say(&mut jobs, &account, event);
        assert_eq!(account.holds(Resource::Series), series, "those of a phase that never ends are given back");
    }
}

#[test]
fn each_limit_is_kept_and_names_itself() {
    let with = |limits: Limits, good: &[Event], last: Event| {
        let (mut jobs, account) = user(&limits);
        good.iter().for_each(|event| say(&mut jobs, &account, event));
        let before = held(&account);
        let outcome = outcome(&mut jobs, &account, &last);
        assert!(outcome.is_none() || held(&account) == before, "a refused event changes nothing");
        outcome
    };
    let limits = Limits::default;
    let of_rank = |rank| Event { rank, ..begin("a", 7) };
    let of_job = |job: &str| Event { job: job.into(), ..begin("a", 7) };
    assert_eq!(with(Limits { jobs: 2, ..limits() }, &[of_job("j")], of_job("k")), Some(Outcome::TooManyJobs));
    assert_eq!(with(Limits { ranks: 2, ..limits() }, &[of_rank(0)], of_rank(1)), Some(Outcome::TooManyRanks));
    let series = Limits { phase_series: 2, ..limits() };
    assert_eq!(with(series, &[begin("a", 7)], begin("b", 7)), Some(Outcome::TooManyNames));
    let names = Limits { phase_names: 2, layer_names: 1, ..limits() };
    assert_eq!(with(names, &[begin("a", 7), begin("b", 7)], begin("c", 7)), Some(Outcome::TooManyNames));
    let layer = |name| event(EventType::Begin, Kind::Layer, name, 7);
    assert_eq!(with(names, &[layer("a")], layer("b")), Some(Outcome::TooManyNames));
    let step = event(EventType::Begin, Kind::Step, "another name", 7);
    let full = [begin("a", 7), begin("b", 7), step.clone(), event(EventType::Mark, Kind::Phase, "c", 7), begin("b", 7)];
    let (mut jobs, account) = user(&names);
    assert!(full.iter().all(|event| outcome(&mut jobs, &account, event).is_none()), "no new name");
    let open = Limits { open: 2, ..limits() };
    assert_eq!(with(open, &[begin("a", 7), begin("b", 7)], begin("c", 7)), Some(Outcome::TooManyOpen));
    let (mut jobs, account) = user(&open);
    for event in [step.clone(), begin("a", 7), begin("a", 7), step] {
        assert_eq!(outcome(&mut jobs, &account, &event), None, "what it replaces makes room");
    }
    let attributes: Attributes = Box::new([("a".into(), crate::wire::Scalar::Text("b".repeat(500)))]);
    let with_attributes = Event { attributes: Some(attributes.clone()), ..begin("a", 7) };
    let (mut jobs, account) = user(&limits());
    say(&mut jobs, &account, &begin("a", 7));
    let before = account.holds(Resource::Bytes);
    say(&mut jobs, &account, &with_attributes);
    assert_eq!(account.holds(Resource::Bytes), before + weight(&attributes), "in the place of the one before");
    // A name and its place among what is open.
    let most = 2 * (RANK_BYTES + JOB_BYTES + 1 + NAME_BYTES + 1 + OPEN_BYTES + SERIES_BYTES);
    let bytes = |bytes| with(Limits { bytes, ..limits() }, &[begin("a", 7)], begin("b", 7));
    assert_eq!(bytes(most), Some(Outcome::OverBudget));
    let again = |bytes| with(Limits { bytes, ..limits() }, &[begin("a", 7)], begin("a", 7));
    let with_one_more = most + 2 * OPEN_BYTES;
    assert_eq!((again(with_one_more), again(with_one_more - 1)), (None, Some(Outcome::OverBudget)), "a known name");
    assert_eq!(bytes(most + 2 * (NAME_BYTES + 1 + OPEN_BYTES + SERIES_BYTES)), None);
    assert_eq!(bytes(most + 2 * (NAME_BYTES + 1 + OPEN_BYTES + SERIES_BYTES) - 1), Some(Outcome::OverBudget));
}

#[test]
fn what_waits_for_its_memory_is_bounded_by_each_owner() {
    let (mut jobs, account) = user(&Limits { pending: 4, ..Limits::default() });
    for _ in 0..5 {
        say(&mut jobs, &account, &begin("a", 7));
        say(&mut jobs, &account, &end("a", 7));
    }
    assert_eq!((jobs.take_ended(i64::MAX, 9).len(), jobs.left().overflow), (2, 3));
}

#[test]
fn a_job_is_its_owners_and_of_the_process_that_began_it_before_its_pod_was_known() {
    let accounts = Accounts::new(&Limits::default());
    let of = |uid, within| accounts.of(&Owner::User { uid, within });
    let pod = || Within::Pod(Pod { namespace: "n".into(), name: "p".into() });
    let mut jobs = Jobs::new(Limits::default());
    say(&mut jobs, &of(1, Within::Unknown), &begin("a", 7));
    let mut job_of = |account: &Arc<Account>, event: &Event| take(&mut jobs, account, event).map(|taken| taken.job);
    let (in_pod, unknown) = (of(1, pod()), of(1, Within::Unknown));
    let [of_user, of_other] = ["1", "2"].map(|user| Ok(JobId::new(Scope::of(None, Some(user)), "j")));
    assert_eq!(job_of(&of(2, Within::Unknown), &begin("b", 7)), of_other);
    assert_eq!(
        job_of(&of(1, pod()), &Event { job: "k".into(), ..begin("b", 8) }).unwrap().scope(),
        &Scope::of(Some("n"), None)
    );
    assert_eq!(job_of(&in_pod, &begin("b", 7)), of_user, "the process that began it, whose pod is known now");
    assert_eq!(job_of(&in_pod, &begin("b", 8)), of_user, "with it the other processes of the pod");
    assert_eq!(job_of(&unknown, &begin("c", 8)), Err(Refusal::NotOwner("j".into())), "it is the pod's now");
}

#[test]
fn jobs_of_one_name_are_apart_by_namespace_or_else_by_user() {
    let accounts = Accounts::new(&Limits::default());
    let pod = |namespace: &str| Within::Pod(Pod { namespace: namespace.into(), name: "p".into() });
    let owners = [(0, pod("team-a")), (0, pod("team-b")), (7, pod("team-b")), (0, Within::Node), (7, Within::Node)];
    let mut jobs = Jobs::new(Limits::default());
    for (uid, within) in owners {
        let account = accounts.of(&Owner::User { uid, within });
        (0..3).for_each(|_| say(&mut jobs, &account, &event(EventType::Begin, Kind::Step, "step", 7)));
        say(&mut jobs, &account, &event(EventType::End, Kind::Step, "step", 7));
    }
    let steps: Vec<_> = jobs.ranks().map(|(id, _, rank)| (id.text(), rank.steps)).collect();
    let expected = [("0/j", 1), ("7/j", 1), ("team-a/j", 1), ("team-b/j", 2)].map(|(id, steps)| (id.to_owned(), steps));
    assert_eq!(steps, expected, "users of one namespace share its jobs");
}

/// The rank's account is the one that it began with; the end that the daemon saw does not ask whose the job is now.
#[test]
fn a_rank_whose_pod_became_known_late_ends_with_its_process() {
    let accounts = Accounts::new(&Limits::default());
    let of = |within| accounts.of(&Owner::User { uid: 1, within });
    let mut jobs = Jobs::new(Limits::default());
    say(&mut jobs, &of(Within::Unknown), &begin("a", 7));
    let pod = Within::Pod(Pod { namespace: "n".into(), name: "p".into() });
    (0..2).for_each(|_| say(&mut jobs, &of(pod.clone()), &begin("a", 7)));
    let exits: Vec<_> = jobs.end_with(SenderId::Process(7), 9).into_iter().map(|(exit, _)| exit).collect();
    assert_eq!(exits.iter().map(|exit| (exit.event, exit.pid)).collect::<Vec<_>>(), [(EventType::Exit, Some(7))]);
    assert_eq!((rank(&jobs).exited_ns, rank(&jobs).open.len()), (Some(9), 0));
}

#[test]
fn an_end_of_a_rank_that_is_not_there_names_it() {
    let (mut jobs, account) = user(&Limits::default());
    let refusal = take(&mut jobs, &account, &end("a", 7)).unwrap_err();
    assert_eq!(refusal.to_string(), "rank 0 of job `j` has not begun");
    say(&mut jobs, &account, &event(EventType::Mark, Kind::Phase, "m", 7));
    let ranks: Vec<_> = jobs.ranks().map(|(job, number, rank)| (&**job.name(), number, rank.open.len())).collect();
    assert_eq!(ranks, [("j", 0, 0)], "a mark is enough");
}

#[test]
fn ended_ranks_make_room_of_every_kind_and_are_reported_once() {
    for limits in [
        Limits { jobs: 2, ..Limits::default() },
        Limits { phase_series: 2, ..Limits::default() },
        Limits {
            bytes: 2 * (RANK_BYTES + JOB_BYTES + 1 + NAME_BYTES + 1 + OPEN_BYTES + SERIES_BYTES),
            ..Limits::default()
        },
    ] {
        let (mut jobs, account) = user(&limits);
        say(&mut jobs, &account, &begin("a", 7));
        say(&mut jobs, &account, &end("a", 7));
        drop(jobs.take_ended(i64::MAX, 9));
        let other = Event { job: "k".into(), ..begin("a", 8) };
        assert!(outcome(&mut jobs, &account, &other).is_some(), "{limits:?}");
        exit(&mut jobs, &account, 0);
        assert_eq!(outcome(&mut jobs, &account, &other), None, "{limits:?}");
        assert!(jobs.expire(0) && !jobs.expire(0), "reported once");
    }
}
