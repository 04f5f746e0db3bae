//! Arbitrary bytes as typed values, for the fuzz targets and `make test`.

/// The byte that separates the parts of an input. No text contains it.
pub const SEPARATOR: u8 = 0x1e;

/// The parts of an input.
pub fn parts(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    data.split(|byte| *byte == SEPARATOR)
}

/// Numbers from an input, as long as there are bytes; 0 afterwards.
#[derive(Debug, Clone)]
pub struct Numbers<'a>(pub &'a [u8]);

impl Numbers<'_> {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let [byte] = self.bytes();
        byte
    }

    /// The next eight bytes.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// The next two bytes.
    pub fn short(&mut self) -> u16 {
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
