//! The Prometheus expositions: text, and protobuf for scrapers that store native histograms.
//!
//! Enters: collected families. Leaves: text format 0.0.4, or what `protobuf` describes. Absent on purpose: registries and
//! long-lived label sets, so a job or GPU that is gone leaves no series; and text cached between scrapes. Such a cache would
//! save some of the 0.5 million instructions of a scrape of one idle GPU, but its small long-lived blocks kept the heap from
//! shrinking: it took up to 2 MiB on eight GPUs.
//!
//! The `prometheus` crate writes the metrics of the daemon itself. `series` writes histograms and what grows with GPUs and
//! jobs, byte for byte as the crate would. The crate copies the name and value of each label, and formats every bucket bound
//! again. So it took 75 ms for 2,048 phases, where the limit is 10 ms. Using it for every family of at most 16 lines took
//! half as many instructions again on eight GPUs (docs/performance.md).
//!
//! A histogram has some 60 buckets, so a quantile is accurate to about a quarter. In a family with more than `MOST_FINE`
//! histograms, each exports only every fourth bucket: otherwise 2,048 phases would have 131,000 series, and their text would
//! take 13 MB. Native histograms keep their resolution.

mod message;
pub mod protobuf;
mod series;
mod size;
#[cfg(test)]
mod tests;

use crate::metrics::Families;
use crate::metrics::catalogue::{Metric, MetricKind};
use prometheus::{Encoder as _, TextEncoder};

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

/// Encodes these families as text.
///
/// # Errors
/// If the encoder refuses a family, which does not happen with a catalogue that passes its tests.
pub fn encode(families: Families) -> Result<Vec<u8>, prometheus::Error> {
    let families = families.into_exposed();
    let mut text = Vec::with_capacity(families.iter().map(size::bytes).sum());
    for family in families {
        if is_of_the_daemon(family.metric) {
            TextEncoder::new().encode(&[message::of(&family)], &mut text)?;
        } else {
            series::write(&family, &mut text);
        }
    }
    Ok(text)
}

/// Whether the crate writes a family: it has no histograms, and is about the daemon, so it does not grow with GPUs or jobs.
fn is_of_the_daemon(metric: &Metric) -> bool {
    metric.kind != MetricKind::Histogram && !metric.labels.iter().any(|label| matches!(*label, "gpu" | "training_job"))
}
