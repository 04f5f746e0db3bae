//! Turns the snapshot that Prometheus also scrapes into OTLP's data points.
//!
//! Enters: families, memory levels and exemplars. Leaves: one resource with one scope of metrics. Invariant: each value
//! is the one that a scrape of the same snapshot returns. Absent on purpose: samples that are not known.

use super::levels::Level;
use super::names::{self, Instrument, MEMORY_LEVEL, MEMORY_SHARE, NAMES, Named, OtlpOnly, STATE, STATUS};
use super::resource::{resource, scope, text};
use super::series::{Reported, Series, SnapshotTime};
use super::settings::Temporality;
use crate::metrics::{Families, Family, Labels, Sample, Value, catalogue as c};
use highwater_core::histogram::{Counts, Exponential};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::exponential_histogram_data_point::Buckets;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, ExponentialHistogram, ExponentialHistogramDataPoint, Gauge, Histogram,
    HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum,
};
use std::collections::HashMap;

/// Exemplars by the labels of a duration's series: those of the slowest since the last snapshot.
pub type Exemplars = HashMap<Labels, Exemplar>;

/// Turns snapshots into requests. Keeps the last exported value of every total.
pub struct Mapper {
    temporality: Temporality,
    explicit: bool,
    resource: Vec<(String, String)>,
    last_ns: i64,
    numbers: Series<f64>,
    histograms: Series<Counts>,
    levels: Series<Exponential>,
}

/// One snapshot.
pub struct Snapshot<'a> {
    /// When it was taken, Unix nanoseconds.
    pub now_ns: i64,
    /// Its samples.
    pub families: Families,
    /// How long each GPU's memory was at each level.
    pub levels: &'a [Level],
    /// Traces of slow steps and phases.
    pub exemplars: &'a Exemplars,
}

impl Mapper {
    /// A mapper of a process that began at `start_ns`, Unix nanoseconds.
    #[must_use]
    pub fn new(temporality: Temporality, resource: Vec<(String, String)>, start_ns: i64) -> Self {
        Self {
            temporality,
            explicit: false,
            resource,
            last_ns: start_ns,
            numbers: Series::default(),
            histograms: Series::default(),
            levels: Series::default(),
        }
    }

    /// Whether durations are exported with fixed bounds, for receivers that have no exponential histograms.
    #[must_use]
    pub fn with_explicit_histograms(self, explicit: bool) -> Self {
        Self { explicit, ..self }
    }

    /// The request of a snapshot, and its number of points.
    pub fn request(&mut self, snapshot: Snapshot) -> (ExportMetricsServiceRequest, u64) {
        let now_ns = snapshot.now_ns;
        let families = snapshot.families.into_ordered();
        let mut metrics: Vec<Metric> = Vec::new();
        metrics.extend(share(&families, now_ns));
        metrics.extend(status(&families, now_ns));
        metrics.extend(self.levels(snapshot.levels, now_ns));
        for family in families {
            let Some(place) = NAMES.iter().position(|named| std::ptr::eq(named.metric, family.metric)) else {
                continue;
            };
            let metric = self.metric(place, family, now_ns, snapshot.exemplars);
            match metrics.iter_mut().find(|known| known.name == metric.name) {
                Some(known) => join(known, metric),
                None => metrics.push(metric),
            }
        }
        self.numbers.end_round();
        self.histograms.end_round();
        self.levels.end_round();
        self.last_ns = now_ns;
        metrics.retain(|metric| count(metric) > 0);
        let points = metrics.iter().map(count).sum();
        let metrics = ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() };
        let resource_metrics = ResourceMetrics {
            resource: Some(resource(&self.resource)),
            scope_metrics: vec![metrics],
            ..ResourceMetrics::default()
        };
        (ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] }, points)
    }

    fn moment(&self, now_ns: i64, delta: bool, own: bool) -> SnapshotTime {
        SnapshotTime { now_ns, last_ns: self.last_ns, delta, own }
    }

    fn metric(&mut self, place: usize, family: Family, now_ns: i64, exemplars: &Exemplars) -> Metric {
        let named = &NAMES[place];
        let data = match named.instrument {
            Instrument::Histogram | Instrument::Exponential => {
                self.histogram(place, named, family.samples, now_ns, exemplars)
            }
            _ => self.number(place, named, family.samples, now_ns),
        };
        Metric {
            name: named.name.into(),
            description: named.metric.help.into(),
            unit: named.unit.into(),
            data: Some(data),
            ..Metric::default()
        }
    }

    fn number(&mut self, place: usize, named: &Named, samples: Vec<Sample>, now_ns: i64) -> Data {
        use Instrument::{Count, CountInt, ForeignCount, ForeignCountInt, GaugeInt, UpDown};
        let is_total = matches!(named.instrument, Count | CountInt | ForeignCount | ForeignCountInt);
        let is_whole = matches!(named.instrument, GaugeInt | UpDown | CountInt | ForeignCountInt);
        let own = matches!(named.instrument, Count | CountInt);
        let delta = is_total && self.temporality == Temporality::Delta;
        let moment = self.moment(now_ns, delta, own);
        let mut data_points = Vec::with_capacity(samples.len());
        for Sample { labels, value } in samples {
            let Value::Number(value) = value else { continue };
            let attributes = attributes(named, &labels);
            // The start time of a value that rises and falls carries no information, and is left out.
            let reported =
                if is_total { self.numbers.advance((place, labels), value, moment) } else { Some(gauge(value)) };
            let Some(reported) = reported else { continue };
            data_points.push(point(attributes, reported, now_ns, is_whole));
        }
        if !is_total && named.instrument != UpDown {
            return Data::Gauge(Gauge { data_points });
        }
        Data::Sum(Sum { data_points, aggregation_temporality: temporality(delta), is_monotonic: is_total })
    }

    fn histogram(
        &mut self,
        place: usize,
        named: &Named,
        samples: Vec<Sample>,
        now_ns: i64,
        exemplars: &Exemplars,
    ) -> Data {
        let delta = self.temporality != Temporality::Cumulative;
        let moment = self.moment(now_ns, delta, true);
        let is_exponential = named.instrument == Instrument::Exponential && !self.explicit;
        let (mut explicit, mut exponential) = (Vec::new(), Vec::new());
        for Sample { labels, value } in samples {
            let Value::Histogram(counts) = value else { continue };
            let attributes = attributes(named, &labels);
            let exemplars = exemplars.get(&labels).into_iter().cloned().collect();
            let Some(reported) = self.histograms.advance((place, labels), *counts, moment) else { continue };
            match &reported.value.exponential {
                Some(buckets) if is_exponential => {
                    let sum_s = reported.value.sum_s;
                    let point = exponential_point(attributes, buckets, sum_s, reported.start_ns, now_ns);
                    exponential.push(ExponentialHistogramDataPoint { exemplars, ..point });
                }
                _ => {
                    let point = explicit_point(attributes, &reported, now_ns);
                    explicit.push(HistogramDataPoint { exemplars, ..point });
                }
            }
        }
        let aggregation_temporality = temporality(delta);
        if is_exponential {
            return Data::ExponentialHistogram(ExponentialHistogram {
                data_points: exponential,
                aggregation_temporality,
            });
        }
        Data::Histogram(Histogram { data_points: explicit, aggregation_temporality })
    }

    fn levels(&mut self, levels: &[Level], now_ns: i64) -> Option<Metric> {
        let delta = self.temporality != Temporality::Cumulative;
        let moment = self.moment(now_ns, delta, true);
        let mut data_points = Vec::with_capacity(levels.len());
        for level in levels {
            let key = (0, Labels::found(&[&level.index, &level.uuid]));
            let Some(reported) = self.levels.advance(key, level.histogram.clone(), moment) else { continue };
            let attributes = vec![text("highwater.gpu.index", &level.index), text("hw.id", &level.uuid)];
            let sum = reported.value.sum();
            data_points.push(exponential_point(attributes, &reported.value, sum, reported.start_ns, now_ns));
        }
        let aggregation_temporality = temporality(delta);
        let data = Data::ExponentialHistogram(ExponentialHistogram { data_points, aggregation_temporality });
        Some(only(&MEMORY_LEVEL, data))
    }
}

/// A metric that only OTLP has.
pub(super) fn only(declared: &OtlpOnly, data: Data) -> Metric {
    Metric {
        name: declared.name.into(),
        description: declared.help.into(),
        unit: declared.unit.into(),
        data: Some(data),
        ..Metric::default()
    }
}

/// Memory in use as a share of the total, for GPUs for which both are known.
fn share(families: &[Family], now_ns: i64) -> Option<Metric> {
    let of = |metric| families.iter().find(|family| std::ptr::eq(family.metric, metric)).map(|family| &family.samples);
    let (used, total) = (of(&c::GPU_MEMORY_USED)?, of(&c::GPU_MEMORY_TOTAL)?);
    let named = names::of(&c::GPU_MEMORY_USED)?;
    let mut data_points = Vec::with_capacity(used.len());
    for used in used {
        let total = total.iter().find(|total| total.labels == used.labels).map(|total| &total.value);
        let (Value::Number(used_bytes), Some(Value::Number(total_bytes))) = (&used.value, total) else { continue };
        if *total_bytes > 0.0 {
            let share = gauge(used_bytes / total_bytes);
            data_points.push(point(attributes(named, &used.labels), share, now_ns, false));
        }
    }
    Some(only(&MEMORY_SHARE, Data::Gauge(Gauge { data_points })))
}

fn gauge(value: f64) -> Reported<f64> {
    Reported { start_ns: 0, value }
}

fn attributes(named: &Named, labels: &Labels) -> Vec<KeyValue> {
    let reported = named.metric.labels.iter().zip(&**labels).filter(|(_, value)| !value.is_empty());
    let reported = reported.map(|(label, value)| {
        text(&names::attribute_name(named.metric, label), names::attribute_value(named.metric, label, value))
    });
    reported.chain(named.constant.iter().map(|(name, value)| text(name, value))).collect()
}

fn point(attributes: Vec<KeyValue>, reported: Reported<f64>, now_ns: i64, is_whole: bool) -> NumberDataPoint {
    #[allow(clippy::cast_possible_truncation, reason = "bytes and counts, which doubles hold exactly below 2^53")]
    let value = if is_whole { Number::AsInt(reported.value as i64) } else { Number::AsDouble(reported.value) };
    NumberDataPoint {
        attributes,
        start_time_unix_nano: unix(reported.start_ns),
        time_unix_nano: unix(now_ns),
        value: Some(value),
        ..NumberDataPoint::default()
    }
}

/// The state of each GPU, a point for each state that one can be in.
fn status(families: &[Family], now_ns: i64) -> Option<Metric> {
    let up = families.iter().find(|family| std::ptr::eq(family.metric, &raw const c::GPU_UP))?;
    let named = names::of(&c::GPU_UP)?;
    let mut data_points = Vec::with_capacity(2 * up.samples.len());
    for sample in &up.samples {
        let Value::Number(is_up) = sample.value else { continue };
        for (state, value) in [("ok", is_up), ("failed", 1.0 - is_up)] {
            let mut attributes = attributes(named, &sample.labels);
            attributes.extend([text("hw.type", "gpu"), text(STATE, state)]);
            data_points.push(point(attributes, gauge(value), now_ns, true));
        }
    }
    let aggregation_temporality = temporality(false);
    Some(only(&STATUS, Data::Sum(Sum { data_points, aggregation_temporality, is_monotonic: false })))
}

fn explicit_point(attributes: Vec<KeyValue>, reported: &Reported<Counts>, now_ns: i64) -> HistogramDataPoint {
    let mut below = 0;
    let bucket_counts = reported.value.cumulative.iter().map(|count| {
        let own = count.saturating_sub(below);
        below = *count;
        own
    });
    HistogramDataPoint {
        attributes,
        start_time_unix_nano: unix(reported.start_ns),
        time_unix_nano: unix(now_ns),
        bucket_counts: bucket_counts.collect(),
        count: reported.value.cumulative.last().copied().unwrap_or(0),
        sum: Some(reported.value.sum_s),
        explicit_bounds: reported.value.bounds_s.to_vec(),
        ..HistogramDataPoint::default()
    }
}

fn exponential_point(
    attributes: Vec<KeyValue>,
    histogram: &Exponential,
    sum: f64,
    start_ns: i64,
    now_ns: i64,
) -> ExponentialHistogramDataPoint {
    let buckets = Buckets { offset: histogram.offset(), bucket_counts: histogram.buckets().collect() };
    ExponentialHistogramDataPoint {
        attributes,
        start_time_unix_nano: unix(start_ns),
        time_unix_nano: unix(now_ns),
        count: histogram.count(),
        sum: Some(sum),
        scale: histogram.scale(),
        zero_count: histogram.zeros(),
        positive: Some(buckets),
        min: histogram.extremes().map(|(min, _)| min),
        max: histogram.extremes().map(|(_, max)| max),
        ..ExponentialHistogramDataPoint::default()
    }
}

fn temporality(delta: bool) -> i32 {
    (if delta { AggregationTemporality::Delta } else { AggregationTemporality::Cumulative }).into()
}

/// Adds the points of a metric to another metric of the same name and shape.
fn join(known: &mut Metric, more: Metric) {
    match (&mut known.data, more.data) {
        (Some(Data::Gauge(known)), Some(Data::Gauge(more))) => known.data_points.extend(more.data_points),
        (Some(Data::Sum(known)), Some(Data::Sum(more))) => known.data_points.extend(more.data_points),
        _ => {}
    }
}

/// The number of points of a metric.
pub(super) fn count(metric: &Metric) -> u64 {
    let points = match &metric.data {
        Some(Data::Gauge(gauge)) => gauge.data_points.len(),
        Some(Data::Sum(sum)) => sum.data_points.len(),
        Some(Data::Histogram(histogram)) => histogram.data_points.len(),
        Some(Data::ExponentialHistogram(histogram)) => histogram.data_points.len(),
        Some(Data::Summary(summary)) => summary.data_points.len(),
        None => 0,
    };
    points as u64
}

/// A time in OTLP's form. A time before 1970 becomes 0, which means not known.
pub(super) fn unix(at_ns: i64) -> u64 {
    u64::try_from(at_ns).unwrap_or(0)
}
