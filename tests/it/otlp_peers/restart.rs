//! The queue on disk: a daemon ends while a real collector is away, and the next daemon delivers what it left.

use super::*;
use crate::collector::Point;
use std::collections::HashSet;
use std::path::Path;

/// How a daemon ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Terminated,
    Killed,
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn what_a_terminated_daemon_left_is_delivered_by_the_next() {
    what_one_daemon_leaves_the_next_delivers(End::Terminated);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn what_a_killed_daemon_left_is_delivered_by_the_next() {
    what_one_daemon_leaves_the_next_delivers(End::Killed);
}

fn what_one_daemon_leaves_the_next_delivers(end: End) {
    let Some(program) = tools::find("otelcol") else { return };
    let mut collector = Collector::start(&program);
    let folder = TempDir::new().expect("a temporary directory");
    let queue = format!("otlp.queue_dir={}", folder.path().display());
    let [protocol, endpoint] = collector.environment(Protocol::Grpc);
    let environment = [(protocol.0, &*protocol.1), (endpoint.0, &*endpoint.1)];
    let arguments = ["--source", "sim", "--set", "otlp.raw=always", "--set", &queue];
    collector.kill();
    let first = pushing_with(&arguments, &environment);
    let waits = |daemon: &Daemon, signal: &str| own(daemon, &format!("highwater_otlp_queued{{signal=\"{signal}\"}}"));
    eventually(DELIVERED_WITHIN, "something of every signal", || {
        let signals = ["metrics", "raw", "spans"];
        (signals.iter().all(|signal| own_if_there(&first, &queued(signal)).is_some_and(|points| points > 0.0))
            && times(&files(folder.path())) >= 5)
            .then_some(())
    });
    let waited = ["metrics", "raw", "spans"].map(|signal| waits(&first, signal));
    match end {
        End::Terminated => assert!(first.stop().0.success()),
        End::Killed => first.kill(),
    }
    let ended_ns = now_ns();
    let left = files(folder.path());
    for (signal, waited) in ["metrics", "raw", "spans"].into_iter().zip(waited) {
        assert!(points_of(&left, signal) as f64 >= waited, "{signal}: {left:?}, and {waited} waited");
    }

    collector.restart();
    let next = pushing_with(&arguments, &environment);
    eventually(DELIVERED_WITHIN, "everything that was left", || {
        let files: HashSet<_> = files(folder.path()).into_iter().collect();
        left.iter().all(|file| !files.contains(file)).then_some(())
    });
    let (raw, metrics): (Vec<Point>, Vec<Point>) = collector
        .points()
        .into_iter()
        .filter(|point| point.time_ns <= ended_ns)
        .partition(|point| point.metric == "highwater.gpu.memory.raw");
    let spans: Vec<_> = collector.spans().into_iter().filter(|span| span.end_ns <= ended_ns).collect();
    let keys = |points: &[Point]| -> HashSet<String> {
        points.iter().map(|p| format!("{} {:?} {:?} {}", p.metric, p.resource, p.attributes, p.time_ns)).collect()
    };
    for (signal, delivered, apart) in [
        ("metrics", metrics.len(), keys(&metrics).len()),
        ("raw", raw.len(), keys(&raw).len()),
        ("spans", spans.len(), spans.iter().map(|span| &span.id).collect::<HashSet<_>>().len()),
    ] {
        assert_eq!((delivered as u64, apart), (points_of(&left, signal), delivered), "{end:?} {signal}: each once");
    }
    nothing_was_refused(&next);
}

fn queued(signal: &str) -> String {
    format!("highwater_otlp_queued{{signal=\"{signal}\"}}")
}

/// The complete requests in the folder. Their names contain signal and points: `NUMBER-SIGNAL-POINTS.otlp`.
fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).expect("there").map(|entry| entry.expect("an entry").file_name());
    names.filter_map(|name| name.into_string().ok()).filter(|name| name.ends_with(".otlp")).collect()
}

fn points_of(files: &[String], signal: &str) -> u64 {
    let of_signal = files.iter().filter(|name| name.contains(&format!("-{signal}-")));
    of_signal.map(|name| name.trim_end_matches(".otlp").rsplit('-').next().expect("points")).map(number).sum()
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

/// How many snapshots there are.
fn times(files: &[String]) -> usize {
    files.iter().filter(|name| name.contains("-metrics-")).count()
}
