//! A family in the types of the `prometheus` crate.

use super::size::{Kept, kept};
use crate::metrics::catalogue::MetricKind;
use crate::metrics::{Family, Sample, Value};
use highwater_core::histogram::Counts;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

/// The family. An empty label is the same as none, so it is left out.
pub(super) fn of(family: &Family) -> MetricFamily {
    let of = family.metric;
    let kind = match of.kind {
        MetricKind::Gauge => MetricType::GAUGE,
        MetricKind::Counter => MetricType::COUNTER,
        MetricKind::Histogram => MetricType::HISTOGRAM,
    };
    let mut message = MetricFamily::default();
    message.set_name(of.name.to_owned());
    message.set_help(of.help.to_owned());
    message.set_field_type(kind);
    let kept = kept(family);
    message.set_metric(family.samples.iter().map(|sample| metric(sample, of.labels, of.kind, kept)).collect());
    message
}

fn metric(sample: &Sample, names: &[&str], kind: MetricKind, kept: Kept) -> Metric {
    let mut metric = Metric::default();
    let labels = names.iter().zip(&*sample.labels).filter(|(_, value)| !value.is_empty()).map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value(value.to_string());
        pair
    });
    metric.set_label(labels.collect());
    match (&sample.value, kind) {
        (Value::Histogram(counts), _) => metric.set_histogram(histogram(counts, kept)),
        (Value::Number(value), MetricKind::Counter) => {
            let mut counter = Counter::default();
            counter.set_value(*value);
            metric.set_counter(counter);
        }
        (Value::Number(value), _) => {
            let mut gauge = Gauge::default();
            gauge.set_value(*value);
            metric.set_gauge(gauge);
        }
    }
    metric
}

fn histogram(counts: &Counts, kept: Kept) -> Histogram {
    let buckets = kept.of(counts.bounds_s).iter().zip(&counts.cumulative).step_by(kept.step).map(|(bound, count)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(*count);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(counts.cumulative.last().copied().unwrap_or(0));
    histogram.set_sample_sum(counts.sum_s);
    histogram
}
