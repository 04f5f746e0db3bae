//! Jobs from event to event.

mod bounds;
mod ends;
mod gpus;
mod open;
mod profiles;

use super::*;

fn event(event: EventType, kind: Kind, name: &str, pid: u32) -> Event {
    Event { event, kind, name: name.to_owned(), ..Event::exit("j", 0, Some(pid), 0) }
}

fn begin(name: &str, pid: u32) -> Event {
    event(EventType::Begin, Kind::Phase, name, pid)
}

fn end(name: &str, pid: u32) -> Event {
    event(EventType::End, Kind::Phase, name, pid)
}

/// Jobs in which process 7 has ended phase `a` on GPU 3, and has begun phase `b`.
fn running() -> (Jobs, Arc<Account>) {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let on_gpu = Event { gpus: Some(vec![3]), ..begin("a", 7) };
    let taken = [on_gpu, end("a", 7), begin("b", 7)].map(|event| jobs.take(&event, &account, 0).unwrap().watch);
    assert_eq!(taken, [None, Some(SenderId::Process(7)), None], "one that has spoken twice is watched");
    (jobs, account)
}

/// The only job of this name, of any owner.
fn find<'a>(jobs: &'a Jobs, name: &str) -> Option<&'a Job> {
    let mut of_name = jobs.by_id().iter().filter(|(id, _)| **id.name() == *name).map(|(_, job)| job);
    of_name.next().filter(|_| of_name.next().is_none())
}

fn named<'a>(jobs: &'a Jobs, name: &str) -> &'a Job {
    find(jobs, name).expect("one job of this name")
}

fn rank(jobs: &Jobs) -> &Rank {
    &named(jobs, "j").ranks[&0]
}

fn exit(jobs: &mut Jobs, account: &Arc<Account>, now_ns: i64) {
    jobs.take(&Event::exit("j", 0, Some(7), now_ns), account, now_ns).unwrap();
}

/// Takes an event that arrives at its time. Returns the result.
fn take(jobs: &mut Jobs, account: &Arc<Account>, event: &Event) -> Result<Taken, Refusal> {
    jobs.take(event, account, event.at_ns)
}

/// Takes an event that must be good.
fn say(jobs: &mut Jobs, account: &Arc<Account>, event: &Event) {
    take(jobs, account, event).expect("taken");
}

/// What has ended, by name, with its step and the times.
fn ended(jobs: &mut Jobs) -> Vec<(String, Option<u64>, i64, i64)> {
    let ended = jobs.take_ended(i64::MAX, usize::MAX);
    ended.iter().map(|one| (one.open.name.to_string(), one.open.step, one.open.begin_ns, one.end_ns)).collect()
}
