//! Which GPUs a rank has: those that it names, those that are found for it, those on which its process is seen.

use super::*;
use crate::wire::Scalar;

fn on(gpus: &[usize], event: Event) -> Event {
    Event { gpus: Some(gpus.to_vec()), ..event }
}

/// With `CUDA_VISIBLE_DEVICES`, as an attribute.
fn visible(devices: &str, event: Event) -> Event {
    let attributes: Attributes = Box::new([("CUDA_VISIBLE_DEVICES".into(), Scalar::Text(devices.into()))]);
    Event { attributes: Some(attributes), ..event }
}

fn gpus(jobs: &Jobs) -> Option<&[usize]> {
    rank(jobs).gpus.as_deref()
}

/// A rank whose GPU was looked for and found, after a phase of it ended.
fn found_on(gpus: &[usize]) -> (Jobs, Arc<Account>) {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    jobs.take(&begin("a", 7), &account, 50).unwrap();
    jobs.take(&end("a", 7), &account, 60).unwrap();
    let search = jobs.search(&"j".into(), 0).expect("it names none");
    assert_eq!(search.since_ns, Some(50));
    jobs.set_found(&"j".into(), 0, &search, &gpus.into());
    (jobs, account)
}

#[test]
fn gpus_that_are_found_are_the_ranks_and_of_what_waits_for_its_memory() {
    let (mut jobs, account) = found_on(&[2]);
    assert_eq!((gpus(&jobs), jobs.search(&"j".into(), 0)).0, Some(&[2][..]));
    assert!(jobs.search(&"j".into(), 0).is_none() && jobs.searches_of(7).is_empty());
    assert_eq!(jobs.take_ended(i64::MAX, 9)[0].gpus.as_deref(), Some(&[2][..]));
    assert!(jobs.search(&"k".into(), 0).is_none() && jobs.search(&"j".into(), 1).is_none());
    // A search that has ended, or another, finds nothing more.
    let stale = Search { since_ns: Some(50), ..Search::default() };
    jobs.set_found(&"j".into(), 0, &stale, &[3].into());
    assert_eq!(gpus(&jobs), Some(&[2][..]));
    say(&mut jobs, &account, &begin("b", 8));
    assert_eq!(gpus(&jobs), None, "another process may run elsewhere");
    jobs.set_found(&"j".into(), 0, &stale, &[3].into());
    assert_eq!(gpus(&jobs), None);
}

#[test]
fn what_waits_has_the_gpus_of_its_own_process_and_rank_and_those_that_it_had() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    let of = |rank, pid, event_type| Event { rank, ..event(event_type, Kind::Phase, "a", pid) };
    for (rank, pid) in [(0, 7), (1, 9), (0, 8)] {
        say(&mut jobs, &account, &of(rank, pid, EventType::Begin));
        say(&mut jobs, &account, &of(rank, pid, EventType::End));
    }
    let search = jobs.search(&"j".into(), 0).expect("looked for");
    jobs.set_found(&"j".into(), 0, &search, &[3].into());
    let ended = jobs.take_ended(i64::MAX, 9);
    let had: Vec<_> = ended.iter().map(|one| (one.rank, one.pid, one.gpus.as_deref())).collect();
    assert_eq!(had, [(0, Some(7), None), (1, Some(9), None), (0, Some(8), Some(&[3][..]))]);
}

#[test]
fn searches_are_those_of_a_process() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    for (rank, pid) in [(0, 7), (1, 7), (2, 8)] {
        say(&mut jobs, &account, &Event { rank, ..visible("1", begin("a", pid)) });
    }
    say(&mut jobs, &account, &Event { rank: 1, ..on(&[0], begin("b", 7)) });
    let searches = jobs.searches_of(7);
    let [(job, rank, of, search)] = &searches[..] else { panic!("one: {searches:?}") };
    assert_eq!((&**job.name(), *rank, Arc::ptr_eq(of, &account)), ("j", 0, true));
    assert_eq!((search.place.visible_devices.as_deref(), search.said_by), (Some("1"), Some(7)));
}

#[test]
fn a_gpu_that_is_named_holds_against_what_attributes_name() {
    let (mut jobs, account) = found_on(&[2]);
    say(&mut jobs, &account, &visible("0", begin("a", 7)));
    assert_eq!(gpus(&jobs), Some(&[2][..]), "given for the first time");
    say(&mut jobs, &account, &visible("1", begin("b", 7)));
    assert_eq!(gpus(&jobs), None, "it uses another one than it said");
    say(&mut jobs, &account, &on(&[1], begin("c", 7)));
    say(&mut jobs, &account, &visible("0", begin("d", 7)));
    assert_eq!((gpus(&jobs), jobs.search(&"j".into(), 0).is_some()), (Some(&[1][..]), false));
    say(&mut jobs, &account, &on(&[0], begin("e", 7)));
    assert_eq!(gpus(&jobs), Some(&[0][..]));
}

#[test]
fn a_rank_follows_its_process_where_it_names_none() {
    let listed = |works: &[usize], idles: &[usize]| OnGpus { works: works.to_vec(), idles: idles.to_vec() };
    let after = |gpus: &[usize], on: OnGpus| {
        let (mut jobs, _) = found_on(gpus);
        jobs.set_listed(&"j".into(), 0, &on);
        rank(&jobs).gpus.as_deref().map(<[usize]>::to_vec)
    };
    assert_eq!(after(&[2], listed(&[2, 3], &[])), Some(vec![2, 3]), "it spreads");
    assert_eq!(after(&[2, 3], listed(&[3], &[2])), Some(vec![3]), "a context alone");
    assert_eq!(after(&[2], listed(&[3], &[2])), Some(vec![3]), "it moved");
    assert_eq!(after(&[2], listed(&[3], &[])), Some(vec![2]), "its own is in no list: nothing follows");
    assert_eq!(after(&[2, 3], listed(&[3], &[])), Some(vec![2, 3]));
    let (mut jobs, account) = found_on(&[2]);
    say(&mut jobs, &account, &on(&[2], begin("a", 7)));
    jobs.set_listed(&"j".into(), 0, &listed(&[2, 3], &[]));
    assert_eq!(gpus(&jobs), Some(&[2][..]), "it names its own");
    jobs.set_listed(&"j".into(), 1, &listed(&[2, 3], &[]));
    let (mut jobs, _) = running();
    jobs.set_listed(&"j".into(), 0, &listed(&[3, 1], &[]));
    assert_eq!(gpus(&jobs), Some(&[3][..]));
}

#[test]
fn positions_follow_their_gpus_when_devices_change() {
    let devices = |uuids: &[&str]| uuids.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    assert!(!jobs.set_devices(devices(&["a", "b", "c"])), "there were none");
    assert!(!jobs.set_devices(devices(&["a", "b", "c"])), "the same");
    say(&mut jobs, &account, &on(&[1, 2], begin("x", 7)));
    say(&mut jobs, &account, &end("x", 7));
    say(&mut jobs, &account, &Event { rank: 1, ..on(&[0], begin("x", 8)) });
    assert!(jobs.set_devices(devices(&["c", "b"])));
    assert_eq!(jobs.devices(), devices(&["c", "b"]));
    assert_eq!(gpus(&jobs), Some(&[1, 0][..]));
    assert_eq!(named(&jobs, "j").ranks[&1].gpus, None, "its GPU is gone");
    assert_eq!(jobs.take_ended(i64::MAX, 9)[0].gpus.as_deref(), Some(&[1, 0][..]));
}

#[test]
fn a_rank_whose_named_gpu_is_gone_is_looked_for_with_its_next_event() {
    let (mut jobs, account) = (Jobs::new(Limits::default()), Account::alone());
    jobs.set_devices(vec!["a".into(), "b".into()]);
    say(&mut jobs, &account, &on(&[0], begin("x", 7)));
    jobs.set_devices(vec!["b".into()]);
    assert!(jobs.search(&"j".into(), 0).is_none());
    jobs.take(&begin("y", 7), &account, 5).unwrap();
    let search = jobs.search(&"j".into(), 0).expect("looked for");
    assert_eq!((search.since_ns, search.named), (Some(5), false));
    jobs.take(&begin("z", 7), &account, 9).unwrap();
    assert_eq!(jobs.search(&"j".into(), 0).expect("looked for").since_ns, Some(5), "since the first");
}
