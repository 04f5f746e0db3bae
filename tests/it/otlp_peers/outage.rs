//! A real collector that is killed and comes back.

use super::*;
use crate::collector::Point;
use serde_json::Value;
use std::collections::HashSet;

/// One second. Raw points and spans are then exported together with the snapshot.
const INTERVAL: (&str, &str) = ("OTEL_METRIC_EXPORT_INTERVAL", "1000");
const SIGNALS: [&str; 3] = ["metrics", "raw", "spans"];

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_collector_that_is_killed_and_comes_back_has_every_point_once() {
    let Some(program) = tools::find("otelcol") else { return };
    let mut collector = Collector::start(&program);
    let [protocol, endpoint] = collector.environment(Protocol::Grpc);
    let environment = [INTERVAL, (protocol.0, &protocol.1), (endpoint.0, &endpoint.1)];
    let daemon = pushing_with(&["--source", "sim", "--set", "otlp.raw=always"], &environment);
    for outage in 1..=2 {
        // Kills right after an export, so that no request is accepted and unanswered.
        let (mut exported, mut exports) = (0.0, 0);
        eventually(DELIVERED_WITHIN, "three more exports, and nothing under way", || {
            let metrics = exposition(&daemon.get("/metrics"));
            let now = sum(&metrics, "highwater_otlp_exported_total");
            let is_fresh = now > exported;
            exports += usize::from(is_fresh);
            exported = now;
            (exports > 3 && is_fresh && sum(&metrics, "highwater_otlp_queued") == 0.0).then_some(())
        });
        collector.kill();
        let per_export = collector.points().len() / times(&collector.points()).len();
        let queued = || own(&daemon, &queued("metrics"));
        eventually(DELIVERED_WITHIN, "three exports in the queue", || {
            (queued() >= 3.0 * per_export as f64).then_some(())
        });
        collector.restart();
        eventually(DELIVERED_WITHIN, &format!("an empty queue after outage {outage}"), || {
            (queued() == 0.0).then_some(())
        });
    }
    for signal in SIGNALS {
        let (produced, taken) = settled(&daemon, &collector, signal);
        assert_eq!(produced as usize, taken.len(), "{signal}: produced, and taken");
        assert_eq!(taken.iter().collect::<HashSet<_>>().len(), taken.len(), "{signal}: one was taken twice");
    }
    for gpu in 0..4 {
        raw_points_are_the_ring(&daemon, &collector, gpu);
    }
    nothing_was_refused(&daemon);
}

fn queued(signal: &str) -> String {
    format!("highwater_otlp_queued{{signal=\"{signal}\"}}")
}

/// The sum over all signals.
fn sum(metrics: &Exposition, name: &str) -> f64 {
    metrics.iter().filter(|((of, _), _)| of == name).map(|(_, points)| *points).sum()
}

/// The times of the snapshots among these points.
fn times(points: &[Point]) -> BTreeSet<i64> {
    points.iter().filter(|point| point.metric == "hw.gpu.memory.usage").map(|point| point.time_ns).collect()
}

/// How many of `signal` the daemon has produced and exported, and all that the collector accepted, at one time.
fn settled(daemon: &Daemon, collector: &Collector, signal: &str) -> (f64, Vec<String>) {
    let count = |name: &str| own(daemon, &format!("highwater_otlp_{name}{{signal=\"{signal}\"}}"));
    let (produced, taken) = eventually(DELIVERED_WITHIN, &format!("a moment without {signal} under way"), || {
        let produced = count("produced_total");
        let is_settled = count("queued") == 0.0 && count("exported_total") == produced;
        let taken = is_settled.then(|| collector.taken())?;
        (count("produced_total") == produced).then_some((produced, taken))
    });
    if signal == "spans" {
        return (produced, taken.spans().into_iter().map(|span| span.id).collect());
    }
    let is_its = |point: &&Point| (point.metric == "highwater.gpu.memory.raw") == (signal == "raw");
    let points = taken.points();
    let key = |p: &Point| format!("{} {:?} {:?} {}", p.metric, p.resource, p.attributes, p.time_ns);
    (produced, points.iter().filter(is_its).map(key).collect())
}

/// Every change in the ring was delivered, at its nanosecond, and nothing else.
fn raw_points_are_the_ring(daemon: &Daemon, collector: &Collector, gpu: usize) {
    let points = collector.points_named("highwater.gpu.memory.raw");
    let of_gpu = points.iter().filter(|point| point.resource["highwater.gpu.index"] == gpu.to_string());
    let stored: Vec<(i64, Option<f64>)> = of_gpu.map(|point| (point.time_ns, point.value)).collect();
    let (first, last) = (stored.first().expect("points").0, stored.last().expect("points").0);
    // An interval contains the changes before its end.
    let path = format!("/api/v1/gpus/{gpu}/memory?from={first}&to={}&max_points=1000000", last + 1);
    let answer: Value = serde_json::from_str(&daemon.get(&path)).expect("JSON");
    let ring = answer["points"].as_array().expect("points").iter();
    let ring: Vec<(i64, Option<f64>)> =
        ring.map(|point| (point[0].as_i64().expect("a time"), point[1].as_f64())).collect();
    assert!(ring.len() > 100, "{} points", ring.len());
    let changes: BTreeMap<i64, f64> = ring.iter().filter_map(|(at, used)| Some((*at, (*used)?))).collect();
    let known: BTreeMap<i64, f64> = stored.iter().filter_map(|(at, used)| Some((*at, (*used)?))).collect();
    let missing: Vec<_> = changes.iter().filter(|(at, used)| known.get(*at) != Some(*used)).take(5).collect();
    assert!(missing.is_empty(), "GPU {gpu}: {missing:?}");
    for (at, used) in &known {
        assert_eq!(changes.range(..=at).next_back().map(|(_, held)| held), Some(used), "GPU {gpu} at {at}");
    }
    for gap in ring.windows(2).filter(|two| two[0].1.is_none()) {
        let within = stored.iter().filter(|(at, used)| (gap[0].0 + 1..gap[1].0).contains(at) && used.is_some());
        assert_eq!(within.count(), 0, "GPU {gpu}: values within the gap {gap:?}");
    }
}
