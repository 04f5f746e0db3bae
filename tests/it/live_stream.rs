//! `/api/v1/live`: each reading and each phase once, findings announced, and no client that can hold up another.

use crate::daemon::Daemon;
use crate::process::eventually;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// A client of the stream.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(daemon: &Daemon) -> Self {
        let mut stream = TcpStream::connect(daemon.address()).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        let request = format!("GET /api/v1/live HTTP/1.0\r\nhost: {}\r\n\r\n", daemon.address());
        stream.write_all(request.as_bytes()).expect("sent");
        Self(BufReader::new(stream))
    }

    /// The next event; `None` when the stream has ended.
    fn next(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(data).expect("JSON"));
            }
        }
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().expect("a list")
}

#[test]
fn events_follow_each_other_without_a_gap_and_name_each_phase_once() {
    let daemon = Daemon::start(&["demo"]).ready();
    let (points, phases) = follow(&mut Client::connect(&daemon), 24);
    assert!(points > 100, "{points} points");
    assert!(phases > 0, "some");
}

/// The events are built once for all clients, whenever each connected.
#[test]
fn a_client_that_connects_between_two_events_misses_nothing_and_gets_nothing_twice() {
    let daemon = Daemon::start(&["demo"]).ready();
    let mut early = Client::connect(&daemon);
    for _ in 0..8 {
        early.next().expect("an event");
        follow(&mut Client::connect(&daemon), 4);
    }
    follow(&mut early, 8);
}

/// Reads events, each of which begins where the one before ended. Returns how many points and phases they have.
fn follow(client: &mut Client, events: usize) -> (usize, usize) {
    let (mut until, mut points, mut ids) = (None::<i64>, 0, BTreeSet::new());
    for _ in 0..events {
        let event = client.next().expect("an event");
        let base_us = event["base_unix_nano"].as_i64().expect("a time") / 1_000;
        let gpu = &list(&event, "gpus")[0];
        let first = list(gpu, "points").first().map(|point| point[0].as_i64().expect("a time") + base_us);
        if let (Some(until), Some(first)) = (until, first) {
            // The base of each event is rounded down to the microsecond.
            assert!((first - until).abs() <= 2, "an event begins at {first}, and the last one ended at {until}");
        }
        until = gpu["until_us"].as_i64().map(|at| at + base_us).or(until);
        points += list(gpu, "points").len();
        for rank in list(&event, "ranks") {
            for span in list(rank, "spans") {
                assert!(span["begin_us"].as_i64() <= span["end_us"].as_i64(), "{span}");
                assert!(ids.insert(span["id"].as_u64().expect("a number")), "again: {span}");
            }
        }
    }
    let numbers = ids.first().zip(ids.last()).map_or(0, |(first, last)| last - first + 1);
    assert_eq!(numbers, ids.len() as u64, "none is missing");
    (points, ids.len())
}

/// Each finding that is raised, escalates or ends changes the number, and nothing else does.
#[test]
fn a_finding_changes_the_revision() {
    let daemon = Daemon::start(&["demo"]).ready();
    let mut client = Client::connect(&daemon);
    let (mut revisions, mut states) = (BTreeSet::new(), BTreeSet::new());
    while states.len() < 4 {
        let event = client.next().expect("an event");
        let listed: Value = serde_json::from_str(&daemon.get("/api/v1/findings?limit=512")).expect("JSON");
        let state =
            |found: &Value| format!("{} {} {}", found["id"], found["severity"], found["ended_unix_nano"].is_null());
        revisions.insert(event["findings_revision"].as_u64().expect("a number"));
        states.insert(list(&listed, "findings").iter().map(state).collect::<Vec<_>>());
    }
    // The list was read after the event, so it may be one state ahead, and two events may have the same.
    assert!((states.len() - 1..=states.len() + 1).contains(&revisions.len()), "{revisions:?} for {states:?}");
    assert!(revisions.iter().all(|revision| *revision < 1 << 53), "exact in JavaScript");
}

#[test]
fn a_phase_that_is_open_is_shown_and_what_has_ended_is_in_the_timeline() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    let mark = |event: &str, kind: &str| json!({ "event": event, "kind": kind, "name": "forward", "job": "j", "rank": 3, "gpu": 0, "step": 7 });
    assert_eq!(daemon.post("/api/v1/annotations", &json!([mark("begin", "step"), mark("begin", "phase")])).0, 200);
    let mut client = Client::connect(&daemon);
    let event = client.next().expect("an event");
    assert_eq!(event["notice"], "Simulated by sim:spike: no GPU was read.");
    let rank = &list(&event, "ranks")[0];
    assert_eq!((&rank["job"], &rank["rank"], list(rank, "open").len()), (&json!("j"), &json!(3), 2), "{event}");
    assert_eq!(daemon.post("/api/v1/annotations", &json!([mark("end", "phase"), mark("end", "step")])).0, 200);
    let spans = eventually(Duration::from_secs(20), "the phase", || {
        let timeline: Value =
            serde_json::from_str(&daemon.get("/api/v1/timeline?from=0&to=9000000000000000000")).expect("JSON");
        let spans = list(&list(&timeline, "ranks")[0], "spans").to_vec();
        (spans.len() == 2).then_some(spans)
    });
    assert_eq!(spans.iter().map(|span| span["kind"].as_str()).collect::<Vec<_>>(), [Some("phase"), Some("step")]);
    assert_eq!(spans[0]["step"], 7);
    let brought = std::iter::from_fn(|| client.next()).find_map(|event| {
        let rank = list(&event, "ranks").first()?.clone();
        (!list(&rank, "spans").is_empty()).then_some(rank)
    });
    let brought = brought.expect("the stream has it too");
    assert_eq!(list(&brought, "spans")[0]["id"], spans[0]["id"]);
    // What the end of its rank leaves open stays in sight, and says so.
    let exit = json!({ "event": "exit", "job": "j", "rank": 3 });
    assert_eq!(
        daemon.post("/api/v1/annotations", &json!([mark("begin", "step"), mark("begin", "phase"), exit])).0,
        200
    );
    let cut = eventually(Duration::from_secs(20), "what was open", || {
        let phases: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/j/phases")).expect("JSON");
        let phases = list(&phases, "phases").to_vec();
        (phases.len() == 4).then(|| phases.iter().map(|phase| phase["cut"] == true).collect::<Vec<_>>())
    });
    assert_eq!(cut, [true, true, false, false], "the newest first");
    let timeline: Value =
        serde_json::from_str(&daemon.get("/api/v1/timeline?from=0&to=9000000000000000000")).expect("JSON");
    let spans = list(&list(&timeline, "ranks")[0], "spans").iter().map(|span| span["cut"] == true);
    assert_eq!(spans.collect::<Vec<_>>(), [false, false, true, true]);
    let (status, problem) = daemon.ask("/api/v1/timeline?from=0");
    assert!(status == 400 && problem.contains("to"), "{problem}");
}

/// Clients that never read cost nobody an event.
#[test]
fn clients_that_do_not_read_hold_up_nobody() {
    let daemon = Daemon::start(&["demo"]).ready();
    let stalled: Vec<Client> = (0..60).map(|_| Client::connect(&daemon)).collect();
    let mut client = Client::connect(&daemon);
    let begun = client.next().expect("an event")["base_unix_nano"].as_i64();
    for _ in 0..12 {
        assert!(client.next().expect("an event")["base_unix_nano"].as_i64() > begun);
    }
    assert!(daemon.metrics().contains("highwater_sampler_ticks_taken_total"));
    drop(stalled);
}

/// A stream has no end of its own: the daemon ends it when it stops, and does not wait for its client.
#[test]
fn the_stream_ends_with_the_daemon() {
    let daemon = Daemon::start(&["demo"]).ready();
    let mut client = Client::connect(&daemon);
    assert!(client.next().is_some());
    let (status, _) = daemon.stop();
    assert!(status.success(), "{status}");
    let mut rest = Vec::new();
    client.0.read_to_end(&mut rest).expect("it ends in order, and is not reset");
}
