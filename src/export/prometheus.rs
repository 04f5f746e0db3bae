//! The Prometheus expositions: text, and protobuf for scrapers that store native histograms.
//!
//! Enters: collected families. Leaves: text format 0.0.4, or what `protobuf` describes. Absent on purpose: registries and
//! long-lived label sets, so that a job or GPU that is gone leaves no series; texts kept from one scrape to the next, which
//! would save some of the 0.3 million instructions of a scrape of one idle GPU, and took up to 2 MiB on eight GPUs, as a heap
//! with small blocks that stay cannot shrink.
//!
//! The `prometheus` crate writes the numbers of the daemon itself. `series` writes what grows with GPUs and jobs, and histograms,
//! byte for byte as the crate would: for a line with labels the crate copies each name and value first, and it writes the bound of
//! each bucket anew. 2,048 phases took 75 ms with it, and a scrape may take 10; with all families of at most 16 lines it took half
//! as many instructions again for eight GPUs (docs/performance.md).
//!
//! A histogram has some 60 buckets, so that a quantile of them is right to a quarter. A family with more than
//! `MOST_FINE` histograms has every fourth bucket instead: otherwise 2,048 phases would have 131,000 series, and their
//! text would take 13 MB. Native histograms keep their resolution.

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
    let families = families.into_ordered();
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

/// Whether a family is numbers of the daemon itself, so that its lines do not grow with GPUs, jobs or clients.
fn is_of_the_daemon(metric: &Metric) -> bool {
    metric.kind != MetricKind::Histogram && !metric.labels.iter().any(|label| matches!(*label, "gpu" | "training_job"))
}
