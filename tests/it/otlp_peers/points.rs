//! What a real collector takes is what a scrape tells: every series of the catalogue, over both of OTLP's ways.

use super::*;
use crate::collector::{Attributes, Point};
use highwater::export::otlp::names::{self, Instrument, NAMES, Named};
use serde_json::Value;

#[test]
fn over_grpc_every_point_is_what_a_scrape_tells() {
    every_point_is_what_a_scrape_tells(Protocol::Grpc);
}

#[test]
fn over_http_every_point_is_what_a_scrape_tells() {
    every_point_is_what_a_scrape_tells(Protocol::Http);
}

fn every_point_is_what_a_scrape_tells(protocol: Protocol) {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    let scenario = written(RESTING);
    let source = format!("sim:{}", scenario.path().join("scenario.toml").display());
    let daemon = pushing(&["--source", &source], &collector, protocol);
    let before = rested(&daemon);
    let asked_ns = now_ns();
    // A snapshot is one request, so that all of it is there with its first point.
    let points = eventually(DELIVERED_WITHIN, "a snapshot of after the scrape", || {
        let points = collector.points();
        let time_ns = points.iter().map(|point| point.time_ns).find(|time_ns| *time_ns > asked_ns)?;
        Some(points.into_iter().filter(|point| point.time_ns == time_ns).collect::<Vec<_>>())
    });
    let after = exposition(&daemon.get("/metrics"));

    let mut compared = BTreeSet::new();
    for ((name, labels), low) in &before {
        let Some(high) = after.get(&(name.clone(), labels.clone())) else { continue };
        let Some((named, field)) = named(name) else { continue };
        let point = the_one(&points, named, labels);
        assert_eq!((point.unit.as_str(), point.kind.as_str()), (named.unit, kind(named.instrument)), "{name}");
        let told = field.map_or(point.value, |field| number(&point.json[field]));
        let told = told.unwrap_or_else(|| panic!("{name}{labels:?}: {point:?}"));
        if is_total(named) {
            // The reader of JSON here is a few last digits off.
            let slack = high.abs() * 1e-14;
            assert!(
                (low - slack..=high + slack).contains(&told),
                "{name}{labels:?}: {told} is not within {low}..={high}"
            );
        } else if low == high && is_at_rest(name) {
            assert!((told - low).abs() <= low.abs() * 1e-14, "{name}{labels:?}: {told} is not {low}");
        }
        compared.insert(named.metric.name);
    }
    assert!(compared.len() > 40, "{compared:?}");
    nothing_more_is_pushed(&points, &[&before, &after]);
    by_their_own_names(&points, &before);
}

/// The two metrics that people ask for first, without the table of names.
fn by_their_own_names(points: &[Point], told: &Exposition) {
    for (name, theirs) in [
        ("highwater_gpu_memory_used_bytes", "hw.gpu.memory.usage"),
        ("highwater_gpu_memory_total_bytes", "hw.gpu.memory.limit"),
    ] {
        let gpus: BTreeMap<&str, Option<f64>> = points
            .iter()
            .filter(|point| point.metric == theirs)
            .map(|point| (point.attributes["hw.id"].as_str(), point.value))
            .collect();
        let expected: BTreeMap<&str, Option<f64>> = told
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

/// No series is pushed that no scrape tells, but for what only OTLP has.
fn nothing_more_is_pushed(points: &[Point], told: &[&Exposition]) {
    for point in points {
        if names::OTLP_ONLY.iter().any(|only| only.name == point.metric) {
            continue;
        }
        let is_it = |(name, labels): &(String, Attributes)| {
            named(name).is_some_and(|(named, _)| named.name == point.metric && is_point_of(point, named, labels))
        };
        assert!(told.iter().any(|told| told.keys().any(is_it)), "no scrape tells {point:?}");
    }
}

/// The row of a sample's name, and which field of a histogram's point it is.
fn named(sample: &str) -> Option<(&'static Named, Option<&'static str>)> {
    let is = |named: &&Named, name: &str| named.metric.name == name;
    if let Some(named) = NAMES.iter().find(|named| is(named, sample)) {
        return Some((named, None));
    }
    [("_count", "count"), ("_sum", "sum")].into_iter().find_map(|(suffix, field)| {
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
    let labels = labels.iter().map(|(label, value)| (names::attribute_name(named.metric, label), value.clone()));
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

fn is_total(named: &Named) -> bool {
    !matches!(named.instrument, Instrument::Gauge | Instrument::GaugeInt | Instrument::UpDown)
}

/// Whether a gauge of the resting node that two scrapes tell alike was the same in between.
fn is_at_rest(name: &str) -> bool {
    let resting =
        ["highwater_gpu_memory_", "highwater_gpu_info", "highwater_gpu_up", "highwater_job_", "highwater_phase_"];
    resting.iter().any(|prefix| name.starts_with(prefix)) && name != "highwater_gpu_memory_utilization_ratio"
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}
