//! The Prometheus expositions: text, and protobuf for scrapers that store native histograms.
//!
//! Enters: collected families. Leaves: text format 0.0.4, or what `protobuf` describes. Absent on purpose: registries and
//! long-lived label sets, so that a job or GPU that is gone leaves no series; texts kept from one scrape to the next, which
//! would save some of the 0.3 million instructions of a scrape of one idle GPU, and took up to 2 MiB on eight GPUs, as a heap
//! with small blocks that stay cannot shrink.
//!
//! The `prometheus` crate writes single values without labels. For a line with labels it copies every name and value first,
//! and it writes the bound of each bucket anew: the lines of one GPU took a third of a scrape's instructions, and 2,048
//! phases 75 ms. So `series` writes all other families, byte for byte as the crate would.
//!
//! A histogram has some 60 buckets, so that a quantile of them is right to a quarter. A family with more than
//! `MOST_FINE` histograms has every fourth bucket instead: otherwise 2,048 phases would have 131,000 series, and their
//! text would take 13 MB. Native histograms keep their resolution.

pub mod protobuf;
mod series;
#[cfg(test)]
mod tests;

use crate::metrics::catalogue::{Metric, MetricKind};
use crate::metrics::{Families, Family, Sample, Value};
use highwater_core::histogram::BOUNDS_TO_A_COARSE_ONE;
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
        match &family.samples[..] {
            [Sample { labels, value: Value::Number(value) }] if labels.is_empty() => {
                let message = message(family.metric, vec![single(family.metric.kind, *value)]);
                TextEncoder::new().encode(&[message], &mut text)?;
            }
            _ => series::write(&family, &mut text),
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

/// A family as the crate takes it.
fn message(metric: &Metric, values: Vec<proto::Metric>) -> proto::MetricFamily {
    let kind = match metric.kind {
        MetricKind::Gauge => MetricType::GAUGE,
        MetricKind::Counter => MetricType::COUNTER,
        MetricKind::Histogram => MetricType::HISTOGRAM,
    };
    let mut family = proto::MetricFamily::default();
    family.set_name(metric.name.to_owned());
    family.set_help(metric.help.to_owned());
    family.set_field_type(kind);
    family.set_metric(values);
    family
}

/// A value without labels as the crate takes it.
fn single(kind: MetricKind, value: f64) -> proto::Metric {
    let mut metric = proto::Metric::default();
    if kind == MetricKind::Counter {
        let mut counter = proto::Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
    } else {
        let mut gauge = proto::Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    }
    metric
}
