//! A real collector receives what a scrape returns: every series of the catalogue, over both of OTLP's protocols.

use super::*;
use crate::collector::{Attributes, Point};
use highwater::export::otlp::names::{self, Instrument, NAMES, Named};
use serde_json::Value;

#[test]
#[ignore = "needs a peer: make test-peers"]
fn over_grpc_every_point_is_what_a_scrape_shows() {
    every_point_is_what_a_scrape_has(Protocol::Grpc);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn over_http_every_point_is_what_a_scrape_shows() {
    every_point_is_what_a_scrape_has(Protocol::Http);
}

/// Compares one push of a running daemon with the scrapes just before and just after it. Each series of the scrapes is
/// in the push, with a value between the two; where the scrapes agree, with exactly that value.
fn every_point_is_what_a_scrape_has(protocol: Protocol) {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    let scenario = written(&format!("{RESTING}\n{MORE}"));
    let source = format!("sim:{}", scenario.path().join("scenario.toml").display());
    let arguments = ["--source", &source, "--set", "metrics.processes=true", "--set", "otlp.raw=always"];
    let daemon = eventually(DELIVERED_WITHIN, "a node at rest of which all is known", || {
        let daemon = pushing(&arguments, &collector, protocol);
        let at_rest = rested(&daemon);
        UNKNOWN_AFTER_A_STALL.iter().all(|known| at_rest.keys().any(|(name, _)| name == known)).then_some(daemon)
    });
    // This metric comes last: a share needs some seconds of history.
    let busy = "highwater_nvml_busy_ratio";
    eventually(DELIVERED_WITHIN, busy, || own_if_there(&daemon, busy));
    let (before, points, after) = push_between_scrapes(&daemon, &collector, "hw.gpu.memory.usage");

    let (mut compared, mut equal, mut series) = (BTreeSet::new(), 0, 0);
    for ((name, labels), low) in &before {
        // A series that is not in both scrapes is not compared.
        let Some(high) = after.get(&(name.clone(), labels.clone())) else { continue };
        let Some((named, field)) = named(name) else { panic!("{name} is not in the table of names") };
        let Some(exported) = exported(&points, named, field, labels) else { continue };
        is_between(name, labels, exported, *low, *high);
        compared.insert(named.metric.name);
        (series, equal) = (series + 1, equal + usize::from(low == high));
    }
    let all: BTreeSet<&str> = NAMES.iter().map(|named| named.metric.name).collect();
    let missing: BTreeSet<&str> = all.difference(&compared).copied().collect();
    let expected: BTreeSet<&str> = WITHOUT_A_DRIVER.into_iter().chain(AFTER_MANY_STEPS).chain(NOT_HERE).collect();
    assert_eq!(missing, expected, "of {} metrics {} are compared", all.len(), compared.len());
    assert!(equal * 3 > series, "{equal} of {series} series did not change in between");
    println!("{protocol:?}: {series} series of {} metrics, {equal} of them equal", compared.len());
    nothing_more_is_pushed(&points, &[&before, &after]);
    by_their_own_names(&points, &before);
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn that_there_is_nothing_to_read_is_pushed_as_it_is_scraped() {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    let daemon = pushing(&["--source", "nvml", "--nvml-library", "/nonexistent.so"], &collector, Protocol::Http);
    let error = || exposition(&daemon.get("/metrics")).into_iter().find(|((name, _), _)| name == WITHOUT_A_DRIVER[1]);
    let ((_, labels), _) = eventually(DELIVERED_WITHIN, WITHOUT_A_DRIVER[1], error);
    let (before, points, _) = push_between_scrapes(&daemon, &collector, "highwater.source.error");
    for (name, labels, value) in [(WITHOUT_A_DRIVER[0], Attributes::new(), 0.0), (WITHOUT_A_DRIVER[1], labels, 1.0)] {
        let (named, field) = named(name).expect("a row");
        assert_eq!(before[&(name.to_owned(), labels.clone())], value);
        assert_eq!(exported(&points, named, field, &labels), Some(value), "{name}");
    }
    assert!(points.iter().all(|point| !point.metric.starts_with("hw.gpu.")), "nothing is known of GPUs");
}

/// Adds the rest of the catalogue: an XID.
const MORE: &str = "[[xids]]\ngpu = 1\nxid = 31\nat = \"200 ms\"\n";

/// A simulated node does not export these. Another test covers them.
const WITHOUT_A_DRIVER: [&str; 2] = ["highwater_nvml_up", "highwater_source_error"];

/// Detectors export these after more steps than [`RESTING`] has; `otlp::agreement` covers them, as it does all others.
const AFTER_MANY_STEPS: [&str; 5] = [
    "highwater_comm_slowdown_ratio",
    "highwater_job_data_stall_ratio",
    "highwater_job_lost_seconds_total",
    "highwater_job_memory_full_forecast_seconds",
    "highwater_job_productive_seconds_total",
];

/// Unknown, as they must be, where a busy machine missed the readings at the ends of the last phases: another daemon then.
const UNKNOWN_AFTER_A_STALL: [&str; 2] =
    ["highwater_job_memory_outside_allocator_bytes", "highwater_phase_memory_growth_bytes"];

/// For refused senders, a web configuration file, a job with coordinates, phases of 2 s or longer, a kubelet, and Slurm. This test has none
/// of them; `otlp::agreement` covers them, but for the kubelet's and Slurm's.
const NOT_HERE: [&str; 12] = [
    "highwater_gpu_pod_info",
    "highwater_gpu_slurm_step_info",
    "highwater_pod_gpu_memory_used_bytes",
    "highwater_slurm_step_gpu_memory_used_bytes",
    "highwater_gpu_memory_outside_workloads_bytes",
    "highwater_kubelet_up",
    "highwater_annotations_refused_total",
    "highwater_web_config_reads_total",
    "highwater_job_pipeline_stage",
    "highwater_phase_dram_active_seconds_total",
    "highwater_phase_sm_active_seconds_total",
    "highwater_phase_tensor_active_seconds_total",
];

/// Gauges that rise and fall between two scrapes by themselves.
const BREATHING: [&str; 8] = [
    "highwater_http_open_connections",
    "highwater_memory_bytes",
    "highwater_nvml_busy_ratio",
    "highwater_otlp_queued",
    "highwater_otlp_queued_bytes",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
];

/// Scrapes repeatedly; returns the points of a push, the last scrape before it and the first after it.
fn push_between_scrapes(daemon: &Daemon, collector: &Collector, metric: &str) -> (Exposition, Vec<Point>, Exposition) {
    let mut scrapes: Vec<(Exposition, i64)> = Vec::new();
    eventually(DELIVERED_WITHIN, "a push between two scrapes", || {
        for _ in 0..10 {
            let exported = exposition(&daemon.get("/metrics"));
            scrapes.push((exported, now_ns()));
        }
        let (points, first_ns) = (collector.points(), scrapes.first()?.1);
        // A snapshot is collected right after its time, and sent as one request: one point implies the rest.
        let is_whole = |point: &&Point| point.metric == metric && point.time_ns > first_ns;
        let time_ns = points.iter().find(is_whole)?.time_ns;
        let before = scrapes.iter().rfind(|scrape| scrape.1 <= time_ns)?.0.clone();
        // The push has arrived, so this scrape is later.
        let after = exposition(&daemon.get("/metrics"));
        Some((before, points.into_iter().filter(|point| point.time_ns == time_ns).collect(), after))
    })
}

fn is_between(name: &str, labels: &Attributes, exported: f64, one: f64, other: f64) {
    let (mut low, mut high) = (one.min(other), one.max(other));
    if BREATHING.contains(&name) {
        // A scrape that is answered during the push is what `making` counts then, and neither scrape sees it.
        (low, high) = (low / 2.0 - 1e6, high * 2.0 + 1e6);
    }
    // The JSON parser here is off in the last few digits.
    let slack = high.abs() * 1e-14;
    assert!(
        (low - slack..=high + slack).contains(&exported),
        "{name}{labels:?}: {exported} is not within {low}..={high}"
    );
}

/// The OTLP value of a scraped sample. `None` for a sample whose metric has other buckets over OTLP.
fn exported(points: &[Point], named: &Named, field: Option<&'static str>, labels: &Attributes) -> Option<f64> {
    let mut own = labels.clone();
    let bound = own.remove("le");
    let point = the_one(points, named, &own);
    assert_eq!((point.unit.as_str(), point.kind.as_str()), (named.unit, kind(named.instrument)), "{}", named.name);
    let exported = match (field, bound) {
        (None, _) => point.value,
        (Some("bucket"), _) if named.instrument == Instrument::Exponential => return None,
        (Some("bucket"), bound) => Some(at_most(point, &bound.expect("a bucket has a bound"))),
        (Some(field), _) => number(&point.json[field]),
    };
    Some(exported.unwrap_or_else(|| panic!("{}{labels:?}: {point:?}", named.name)))
}

/// How many values of a histogram's point are at most this bound.
fn at_most(point: &Point, bound: &str) -> f64 {
    let list = |field: &str| -> Vec<f64> {
        point.json[field].as_array().into_iter().flatten().map(|value| number(value).expect("a number")).collect()
    };
    let (bounds, counts) = (list("explicitBounds"), list("bucketCounts"));
    assert_eq!(bounds.len() + 1, counts.len(), "{point:?}");
    let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a bound") };
    let within = bounds.iter().chain([&f64::INFINITY]).take_while(|known| **known <= bound).count();
    counts[..within].iter().sum()
}

/// Checks the two metrics that people ask for first, without the table of names.
fn by_their_own_names(points: &[Point], exported: &Exposition) {
    for (name, theirs) in [
        ("highwater_gpu_memory_used_bytes", "hw.gpu.memory.usage"),
        ("highwater_gpu_memory_total_bytes", "hw.gpu.memory.limit"),
    ] {
        let gpus: BTreeMap<&str, Option<f64>> = points
            .iter()
            .filter(|point| point.metric == theirs)
            .map(|point| (point.attributes["hw.id"].as_str(), point.value))
            .collect();
        let expected: BTreeMap<&str, Option<f64>> = exported
            .iter()
            .filter(|((known, _), _)| known == name)
            .map(|((_, labels), value)| (labels["uuid"].as_str(), Some(*value)))
            .collect();
        assert_eq!(gpus, expected, "{theirs}");
        assert_eq!(gpus.len(), 2);
    }
    assert!(points.iter().all(|point| point.resource["service.name"] == "tested"), "OTEL_SERVICE_NAME");
    assert!(points.iter().all(|point| point.resource["rack"] == "r 7"), "OTEL_RESOURCE_ATTRIBUTES");
}

/// No series is pushed that is missing from the scrapes, except those that only OTLP has.
fn nothing_more_is_pushed(points: &[Point], exported: &[&Exposition]) {
    for point in points {
        if names::OTLP_ONLY.iter().any(|only| only.name == point.metric) {
            continue;
        }
        let is_it = |(name, labels): &(String, Attributes)| {
            named(name).is_some_and(|(named, _)| named.name == point.metric && is_point_of(point, named, labels))
        };
        assert!(exported.iter().any(|exported| exported.keys().any(is_it)), "no scrape has {point:?}");
    }
}

/// The row for a sample's name, and which field of a histogram's point the sample is.
fn named(sample: &str) -> Option<(&'static Named, Option<&'static str>)> {
    let is = |named: &&Named, name: &str| named.metric.name == name;
    if let Some(named) = NAMES.iter().find(|named| is(named, sample)) {
        return Some((named, None));
    }
    [("_count", "count"), ("_sum", "sum"), ("_bucket", "bucket")].into_iter().find_map(|(suffix, field)| {
        let name = sample.strip_suffix(suffix)?;
        Some((NAMES.iter().find(|named| is(named, name))?, Some(field)))
    })
}

fn the_one<'a>(points: &'a [Point], named: &Named, labels: &Attributes) -> &'a Point {
    let found: Vec<_> =
        points.iter().filter(|point| point.metric == named.name && is_point_of(point, named, labels)).collect();
    assert_eq!(found.len(), 1, "{} {labels:?}: {found:?}", named.name);
    found[0]
}

fn is_point_of(point: &Point, named: &Named, labels: &Attributes) -> bool {
    let of = |(label, value): (&String, &String)| {
        (names::attribute_name(named.metric, label), names::attribute_value(named.metric, label, value).to_string())
    };
    let labels = labels.iter().map(of);
    let constant = named.constant.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    point.attributes == labels.chain(constant).collect::<Attributes>()
}

fn kind(instrument: Instrument) -> &'static str {
    match instrument {
        Instrument::Gauge | Instrument::GaugeInt => "gauge",
        Instrument::Histogram => "histogram",
        Instrument::Exponential => "exponentialHistogram",
        _ => "sum",
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}
