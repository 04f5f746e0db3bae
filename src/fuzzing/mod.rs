//! What outside data goes through, as functions of bytes: for the fuzz targets in `fuzz/` and for `make test`.
//!
//! Enters: any bytes. Leaves: nothing, or a panic where a promise is broken. Invariants: an input needs no thread and no
//! runtime of its own, so that millions of them take minutes; what one leaves behind changes no other, but for the
//! bounded state of a few hundred requests in `http`. Absent on purpose: anything that a shipped build has.

mod annotations;
mod folder;
mod http;
mod replay;
mod scenario;
mod settings;
#[cfg(test)]
mod tests;
mod world;

pub use crate::annotate::fuzzing::event_log;
pub use crate::export::otlp::fuzzing::otlp_reply;
pub use crate::kubelet::fuzzing::kubelet;
pub use crate::ring::fuzzing::ring;
pub use annotations::annotations;
pub use http::http;
pub use replay::replay;
pub use scenario::scenario;
pub use settings::settings;

/// Parts of an input are parted by this byte, which no text has.
pub(crate) const SEPARATOR: u8 = 0x1e;

/// The parts of an input.
pub(crate) fn parts(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    data.split(|byte| *byte == SEPARATOR)
}

/// Numbers from an input, as long as there are bytes; 0 afterwards.
#[derive(Debug, Clone)]
pub(crate) struct Numbers<'a>(pub(crate) &'a [u8]);

impl Numbers<'_> {
    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    /// The next eight bytes.
    pub(crate) fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// The next two bytes.
    pub(crate) fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let (taken, rest) = self.0.split_at(self.0.len().min(N));
        bytes[..taken.len()].copy_from_slice(taken);
        self.0 = rest;
        bytes
    }
}
