//! One instant, as scraped by Prometheus and as pushed over OTLP: the same values, name by name, for all metrics.

use highwater::export::otlp::names::{Instrument, NAMES, attribute_name};
use highwater::export::otlp::settings::Temporality;
use highwater::export::otlp::{Exemplars, Mapper, Snapshot};
use highwater::export::prometheus;
use highwater::metrics::catalogue::{ALL, Metric, MetricKind};
use highwater::metrics::{Families, Labels};
use highwater_core::histogram::Durations;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use std::collections::BTreeMap;

const BOUNDS_S: &[f64] = &[0.001, 0.01, 0.1, 1.0, 10.0];
const START_NS: i64 = 1_700_000_000_000_000_000;
const NOW_NS: i64 = START_NS + 60_000_000_000;

/// Every metric of the catalogue, twice, each with a different value.
fn everything() -> Families {
    let mut families = Families::default();
    for (number, metric) in ALL.iter().enumerate() {
        for twin in 0..2 {
            if twin == 1 && metric.labels.is_empty() {
                continue;
            }
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("{label}-{twin}")).collect();
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            match metric.kind {
                MetricKind::Histogram => {
                    let mut durations = Durations::new(BOUNDS_S);
                    for n in 1..=(number as i64 + 1) {
                        durations.observe_ns(n * n * 1_234_567 * (twin + 1));
                    }
                    families.histogram(metric, Labels::found(&labels), durations.counts());
                }
                _ => families.count(metric, Labels::found(&labels), Some(number as u64 * 1000 + twin as u64 + 1)),
            }
        }
    }
    families
}

/// The exposition's values by sample, as `name{labels}`.
fn scraped(families: Families) -> BTreeMap<String, f64> {
    let text = String::from_utf8(prometheus::encode(families).expect("encoded")).expect("text");
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| line.rsplit_once(' ').expect("a value"))
        .map(|(key, value)| (key.to_owned(), value.parse().expect("a number")))
        .collect()
}

fn key(metric: &Metric, suffix: &str, attributes: &[KeyValue]) -> String {
    let text = |name: &str| match attributes.iter().find(|a| a.key == name)?.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        _ => None,
    };
    let labels: Vec<String> = metric
        .labels
        .iter()
        .map(|label| format!("{label}=\"{}\"", text(&attribute_name(metric, label)).unwrap_or_default()))
        .collect();
    if labels.is_empty() {
        format!("{}{suffix}", metric.name)
    } else {
        format!("{}{suffix}{{{}}}", metric.name, labels.join(","))
    }
}

/// OTLP's values, under the exposition's names.
fn pushed(request: &ExportMetricsServiceRequest) -> BTreeMap<String, f64> {
    let mut exported = BTreeMap::new();
    for metric in &request.resource_metrics[0].scope_metrics[0].metrics {
        for named in NAMES.iter().filter(|named| named.name == metric.name) {
            let is_own = |attributes: &[KeyValue]| {
                named.constant.iter().all(|(name, value)| {
                    let wanted = Some(Value::StringValue((*value).into()));
                    attributes
                        .iter()
                        .any(|a| a.key == *name && a.value.as_ref().and_then(|v| v.value.clone()) == wanted)
                })
            };
            match metric.data.as_ref().expect("data") {
                Data::Gauge(highwater_gauge) => {
                    for point in highwater_gauge.data_points.iter().filter(|point| is_own(&point.attributes)) {
                        exported.insert(key(named.metric, "", &point.attributes), number(point.value));
                    }
                }
                Data::Sum(sum) => {
                    for point in sum.data_points.iter().filter(|point| is_own(&point.attributes)) {
                        exported.insert(key(named.metric, "", &point.attributes), number(point.value));
                    }
                }
                Data::Histogram(histogram) => {
                    for point in &histogram.data_points {
                        let key = |suffix| key(named.metric, suffix, &point.attributes);
                        exported.insert(key("_count"), point.count as f64);
                        exported.insert(key("_sum"), point.sum.expect("a sum"));
                        let mut below = 0;
                        for (bound, count) in point.explicit_bounds.iter().zip(&point.bucket_counts) {
                            below += count;
                            exported.insert(bucket(named.metric, &point.attributes, *bound), below as f64);
                        }
                        exported.insert(bucket(named.metric, &point.attributes, f64::INFINITY), point.count as f64);
                    }
                }
                Data::ExponentialHistogram(histogram) => {
                    for point in &histogram.data_points {
                        let key = |suffix| key(named.metric, suffix, &point.attributes);
                        exported.insert(key("_count"), point.count as f64);
                        exported.insert(key("_sum"), point.sum.expect("a sum"));
                        let buckets = point.positive.as_ref().expect("buckets");
                        assert_eq!(buckets.bucket_counts.iter().sum::<u64>() + point.zero_count, point.count);
                    }
                }
                Data::Summary(_) => panic!("no metric is a summary"),
            }
        }
    }
    exported
}

fn bucket(metric: &Metric, attributes: &[KeyValue], bound: f64) -> String {
    let bound = if bound.is_infinite() { "+Inf".to_owned() } else { format!("{bound}") };
    let key = key(metric, "_bucket", attributes);
    match key.strip_suffix('}') {
        Some(open) => format!("{open},le=\"{bound}\"}}"),
        None => format!("{key}{{le=\"{bound}\"}}"),
    }
}

fn number(value: Option<Number>) -> f64 {
    match value.expect("a value") {
        Number::AsInt(value) => value as f64,
        Number::AsDouble(value) => value,
    }
}

#[test]
fn the_whole_catalogue_agrees_name_by_name() {
    check_agreement(false);
}

/// With durations by fixed bounds, for receivers that need them, every bucket is compared.
#[test]
fn explicit_histograms_agree_bucket_by_bucket() {
    check_agreement(true);
}

fn check_agreement(explicit: bool) {
    let families = everything();
    let exemplars = Exemplars::default();
    let mapper = Mapper::new(Temporality::Cumulative, Vec::new(), START_NS);
    let mut mapper = mapper.with_explicit_histograms(explicit);
    let snapshot = Snapshot { now_ns: NOW_NS, families: families.clone(), levels: &[], exemplars: &exemplars };
    let (request, points) = mapper.request(snapshot);
    let mut scraped = scraped(families);
    // Exponential buckets replace the explicit ones of durations. Only their counts and sums are compared.
    let exponential = NAMES.iter().filter(|named| named.instrument == Instrument::Exponential && !explicit);
    for name in exponential.map(|named| format!("{}_bucket", named.metric.name)) {
        scraped.retain(|key, _| !key.starts_with(&name));
    }
    let pushed = pushed(&request);
    assert_eq!(pushed.keys().collect::<Vec<_>>(), scraped.keys().collect::<Vec<_>>());
    for (key, value) in &scraped {
        assert!((pushed[key] - value).abs() <= value.abs() * 1e-12, "{key}: {} and {value}", pushed[key]);
    }
    let samples: usize = everything().into_ordered().iter().map(|family| family.samples.len()).sum();
    assert_eq!(
        points,
        samples as u64 + 2 + 4,
        "plus the share of memory in use of two GPUs, and their two states each"
    );
}

/// Totals that this process counts start with the process. A total from elsewhere starts, as far as is known, when it
/// is first seen.
#[test]
fn starts_of_totals_are_right_and_deltas_add_up() {
    use highwater::metrics::catalogue as c;
    let snapshot = |now_s: i64, steps: f64, energy: f64| {
        let mut families = Families::default();
        families.number(&c::JOB_STEPS, ["a", "0", "", ""], Some(steps));
        families.number(&c::GPU_ENERGY, ["0", "GPU-a"], Some(energy));
        (START_NS + now_s * 1_000_000_000, families)
    };
    let run = |temporality| {
        let mut mapper = Mapper::new(temporality, Vec::new(), START_NS);
        [(10, 3.0, 500.0), (20, 5.0, 700.0), (30, 1.0, 50.0)].map(|(now_s, steps, energy)| {
            let (now_ns, families) = snapshot(now_s, steps, energy);
            let exemplars = Exemplars::default();
            let (request, _) = mapper.request(Snapshot { now_ns, families, levels: &[], exemplars: &exemplars });
            let of = |name: &str| {
                let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
                let Some(Data::Sum(sum)) = metrics.iter().find(|metric| metric.name == name)?.data.as_ref() else {
                    return None;
                };
                let point = &sum.data_points[0];
                assert!(sum.is_monotonic);
                Some((((point.start_time_unix_nano.cast_signed() - START_NS) / 1_000_000_000), number(point.value)))
            };
            (of("highwater.job.steps"), of("hw.energy"))
        })
    };
    assert_eq!(
        run(Temporality::Cumulative),
        [(Some((0, 3.0)), Some((10, 500.0))), (Some((0, 5.0)), Some((10, 700.0))), (Some((20, 1.0)), Some((30, 50.0))),]
    );
    assert_eq!(
        run(Temporality::Delta),
        [(Some((0, 3.0)), None), (Some((10, 2.0)), Some((10, 200.0))), (Some((20, 1.0)), Some((20, 50.0)))]
    );
    assert_eq!(run(Temporality::LowMemory), run(Temporality::Cumulative), "counters stay cumulative");
}
