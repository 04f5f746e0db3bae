//! Makes a ring: its memory, its writer and its first reader.

use super::config::Config;
use super::errors::ConfigError;
use super::layout::Layout;
use super::reader::Reader;
use super::store::Store;
use super::sync::Arc;
use super::writer::Writer;

/// Makes an empty ring: its one writer, and a reader that can be cloned.
///
/// # Errors
/// If the configuration is impossible.
pub fn ring(config: Config) -> Result<(Writer, Reader), ConfigError> {
    if config.retention_ns < 1 {
        return Err(ConfigError::Retention(config.retention_ns));
    }
    if !(1..=1_000_000_000).contains(&config.resolution_ns) {
        return Err(ConfigError::Resolution(config.resolution_ns));
    }
    let layout = Layout::within(config.max_bytes)
        .map_err(|min_bytes| ConfigError::TooSmall { max_bytes: config.max_bytes, min_bytes })?;
    Ok(with_layout(layout, &config))
}

/// An empty ring whose memory is laid out so; tests lay it out smaller than any cap would.
pub(super) fn with_layout(layout: Layout, config: &Config) -> (Writer, Reader) {
    let store = Arc::new(Store::new(layout, config.resolution_ns, config.retention_ns));
    (Writer::new(Arc::clone(&store)), Reader::new(store))
}
