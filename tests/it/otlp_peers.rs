//! OTLP among the programs that people send it to: a real Collector and a real Prometheus 3, fed by the daemon.
//!
//! Not covered: a program that stores only traces, such as Jaeger; traces are checked as the collector accepted them.
//! Nor a kill between the moments at which a receiver accepts and answers a request: OTLP then delivers twice, and no
//! sender can know.

mod network;
mod outage;
mod points;
mod prometheus;
mod raw;
mod restart;
mod traces;

use crate::collector::{Attributes, Collector, Protocol};
use crate::daemon::Daemon;
use crate::process::eventually;
use crate::tools;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;

/// Enough time for jobs to start, for steps to end and for several exports, on a busy machine.
const DELIVERED_WITHIN: Duration = Duration::from_secs(60);
const MILLISECOND_NS: i64 = 1_000_000;

/// A node whose memory, steps and phases come to rest: two steps, and a third that ends in a checkpoint of an hour.
const RESTING: &str = r#"
[[gpus]]
count = 2

[[jobs]]
name = "rests"
ranks = [0, 1]
startup = "100 ms"
base = "40 GiB"

[[jobs.phases]]
name = "forward"
duration = "100 ms"
to = "60 GiB"
shape = "steps"
busy = 0.9

[[jobs.phases]]
name = "comm"
duration = "20 ms"
collective = true

[jobs.layers]
count = 9
every_steps = 1
sharded = true

[jobs.checkpoint]
every_steps = 3
duration = "1 h"
"#;

/// A daemon that pushes to `collector`, twice a second.
fn pushing(arguments: &[&str], collector: &Collector, protocol: Protocol) -> Daemon {
    let [protocol, endpoint] = collector.environment(protocol);
    pushing_with(arguments, &[(protocol.0, &protocol.1), (endpoint.0, &endpoint.1)])
}

fn pushing_with(arguments: &[&str], environment: &[(&str, &str)]) -> Daemon {
    let common = [
        ("OTEL_METRIC_EXPORT_INTERVAL", "500"),
        ("OTEL_SERVICE_NAME", "tested"),
        ("OTEL_RESOURCE_ATTRIBUTES", "rack=r%207"),
    ];
    Daemon::start_with(&[&["serve"], arguments].concat(), &[&common, environment].concat())
}

/// A folder with the scenario `scenario.toml`.
fn written(scenario: &str) -> TempDir {
    let folder = TempDir::new().expect("a temporary directory");
    std::fs::write(folder.path().join("scenario.toml"), scenario).expect("a writable directory");
    folder
}

/// The result of a scrape: samples by name and labels.
type Exposition = BTreeMap<(String, Attributes), f64>;

fn exposition(text: &str) -> Exposition {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.trim_end_matches('}').split_inclusive("\",").filter_map(|pair| {
            let (label, value) = pair.trim_end_matches(',').split_once('=')?;
            // An empty label counts as absent.
            let value = value.trim_matches('"');
            (!value.is_empty()).then(|| (label.to_owned(), value.to_owned()))
        });
        Some(((name.to_owned(), labels.collect()), value.parse().ok()?))
    };
    text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect()
}

/// The result of a scrape once the node of [`RESTING`] is at rest.
fn rested(daemon: &Daemon) -> Exposition {
    eventually(DELIVERED_WITHIN, "the checkpoint of both ranks", || {
        let scraped = exposition(&daemon.metrics());
        let resting = scraped.iter().filter(|((name, labels), value)| {
            name == "highwater_phase_active" && labels["phase"] == "checkpoint" && **value == 1.0
        });
        let steps = scraped.iter().filter(|((name, _), value)| name == "highwater_job_steps_total" && **value == 2.0);
        // The phases before it are exported once their memory is known.
        let ended = scraped.iter().filter(|((name, labels), value)| {
            name == "highwater_phase_duration_seconds_count" && labels["phase"] == "comm" && **value == 3.0
        });
        (resting.count() == 2 && steps.count() == 2 && ended.count() == 2).then_some(scraped)
    })
}

/// One of the daemon's own samples; panics if it is absent.
fn own(daemon: &Daemon, sample: &str) -> f64 {
    own_if_there(daemon, sample).unwrap_or_else(|| panic!("no {sample}"))
}

/// One of the daemon's own samples, if it is exported.
fn own_if_there(daemon: &Daemon, sample: &str) -> Option<f64> {
    let metrics = daemon.metrics();
    let line = metrics.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '))?;
    Some(line.parse().expect("a number"))
}

fn nothing_was_refused(daemon: &Daemon) {
    let metrics = daemon.metrics();
    let lost: Vec<&str> = metrics
        .lines()
        .filter(|line| line.starts_with("highwater_otlp_dropped_total{") || line.contains("outcome=\"refused\""))
        .filter(|line| line.starts_with("highwater_otlp_") && !line.ends_with(" 0"))
        .collect();
    assert!(lost.is_empty(), "{lost:?}");
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    i64::try_from(since.as_nanos()).expect("before 2262")
}
