//! The Prometheus expositions: text, and protobuf for scrapers that store native histograms.
//!
//! Enters: collected families. Leaves: text format 0.0.4, or what `protobuf` describes. Absent on purpose: registries and
//! long-lived label sets, so that a job or GPU that is gone leaves no series; texts kept from one scrape to the next, which
//! would save up to 0.3 of the 0.8 million instructions of a scrape of one idle GPU, and took up to 2 MiB on eight GPUs, as a heap
//! with small blocks that stay cannot shrink.
//!
//! The `prometheus` crate writes the text. Its encoder takes a microsecond a line, because it writes the labels of each
//! line and the bound of each bucket anew. That is fast enough for a few samples, but takes 75 ms if 2,048 phases have
//! series. So `long` writes every family with more than `MOST_BY_CRATE` lines, byte for byte as the crate would.
//!
//! A histogram has some 60 buckets, so that a quantile of them is right to a quarter. A family with more than
//! `MOST_FINE` histograms has every fourth bucket instead: otherwise 2,048 phases would have 131,000 series, and their
//! text would take 13 MB. Native histograms keep their resolution.

mod long;
pub mod protobuf;
#[cfg(test)]
mod tests;

use crate::metrics::catalogue::Kind;
use crate::metrics::{Families, Family, Sample, Value};
use highwater_core::histogram::{BOUNDS_TO_A_COARSE_ONE, Counts};
use prometheus::proto::{self, MetricType};
use prometheus::{Encoder, TextEncoder};

/// A format of the exposition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Text, version 0.0.4.
    Text,
    /// Length-delimited protobuf messages, in which histograms are also native ones.
    Protobuf,
}

impl Format {
    /// The content type of an exposition in this format.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Text => prometheus::TEXT_FORMAT,
            Format::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }

    /// Encodes these families.
    ///
    /// # Errors
    /// Those of [`encode`].
    pub fn encode(self, families: Families) -> Result<Vec<u8>, prometheus::Error> {
        match self {
            Format::Text => encode(families),
            Format::Protobuf => Ok(protobuf::encode(families)),
        }
    }
}

/// The most lines of a family that the crate writes: one of each of 8 GPUs.
const MOST_BY_CRATE: usize = 8;
/// The most histograms of a family with all buckets: 32 phases of each of 8 ranks.
const MOST_FINE: usize = 256;

/// Encodes these families as text.
///
/// # Errors
/// If the encoder refuses a family, which does not happen with a catalogue that passes its tests.
pub fn encode(families: Families) -> Result<Vec<u8>, prometheus::Error> {
    let families = families.into_ordered();
    let mut text = Vec::with_capacity(families.iter().map(bytes).sum());
    for family in families {
        if lines(&family) > MOST_BY_CRATE {
            long::write(&family, &mut text);
        } else {
            by_crate(&family, &mut text)?;
        }
    }
    Ok(text)
}

/// The number of a family's lines beside its two comments.
fn lines(family: &Family) -> usize {
    let of_sample = match family.samples.first().map(|sample| &sample.value) {
        Some(Value::Histogram(counts)) => counts.bounds_s.len() / bucket_step(family) + 4,
        _ => 1,
    };
    of_sample * family.samples.len()
}

/// The approximate size of a family's text: 90 bytes for the line of each value, and its two comment lines.
fn bytes(family: &Family) -> usize {
    256 + 90 * lines(family)
}

/// Which buckets of a family are exported: 1 for all, 4 for every fourth.
fn bucket_step(family: &Family) -> usize {
    if family.samples.len() > MOST_FINE { BOUNDS_TO_A_COARSE_ONE } else { 1 }
}

fn by_crate(family: &Family, text: &mut Vec<u8>) -> Result<(), prometheus::Error> {
    TextEncoder::new().encode(&[message(family)], text)
}

fn message(family: &Family) -> proto::MetricFamily {
    let kind = match family.metric.kind {
        Kind::Gauge => MetricType::GAUGE,
        Kind::Counter => MetricType::COUNTER,
        Kind::Histogram => MetricType::HISTOGRAM,
    };
    let mut encoded = proto::MetricFamily::default();
    encoded.set_name(family.metric.name.to_owned());
    encoded.set_help(family.metric.help.to_owned());
    encoded.set_field_type(kind);
    encoded.set_metric(family.samples.iter().map(|sample| metric(family, kind, sample)).collect());
    encoded
}

fn metric(family: &Family, kind: MetricType, sample: &Sample) -> proto::Metric {
    let labels = family.metric.labels.iter().zip(&*sample.labels).map(|(name, value)| {
        let mut pair = proto::LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value(value.to_string());
        pair
    });
    let mut metric = proto::Metric::from_label(labels.collect());
    match (&sample.value, kind) {
        (Value::Histogram(counts), _) => metric.set_histogram(histogram(counts, bucket_step(family))),
        (Value::Number(value), MetricType::COUNTER) => {
            let mut counter = proto::Counter::default();
            counter.set_value(*value);
            metric.set_counter(counter);
        }
        (Value::Number(value), _) => {
            let mut gauge = proto::Gauge::default();
            gauge.set_value(*value);
            metric.set_gauge(gauge);
        }
    }
    metric
}

fn histogram(counts: &Counts, step: usize) -> proto::Histogram {
    let buckets = counts.bounds_s.iter().zip(&counts.cumulative).step_by(step).map(|(bound, count)| {
        let mut bucket = proto::Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(*count);
        bucket
    });
    let mut histogram = proto::Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(counts.cumulative.last().copied().unwrap_or(0));
    histogram.set_sample_sum(counts.sum_s);
    histogram
}
