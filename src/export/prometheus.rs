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

mod message;
pub mod protobuf;
mod series;
mod size;
#[cfg(test)]
mod tests;

use crate::metrics::Families;
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

/// The most lines of a family that the `prometheus` crate writes.
const MOST_BY_CRATE: usize = 16;

/// Encodes these families as text.
///
/// # Errors
/// If the encoder refuses a family, which does not happen with a catalogue that passes its tests.
pub fn encode(families: Families) -> Result<Vec<u8>, prometheus::Error> {
    let families = families.into_ordered();
    let mut text = Vec::with_capacity(families.iter().map(size::bytes).sum());
    for family in families {
        if size::lines(&family) <= MOST_BY_CRATE {
            TextEncoder::new().encode(&[message::of(&family)], &mut text)?;
        } else {
            series::write(&family, &mut text);
        }
    }
    Ok(text)
}
