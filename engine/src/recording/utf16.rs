//! Text in UTF-16, as PowerShell's `>` writes it.

use std::io::{self, Read};

/// Reads UTF-16 as UTF-8. What is no character becomes U+FFFD.
pub(super) struct Utf16<R> {
    inner: R,
    is_big_endian: bool,
    /// Bytes that were read and are not yet decoded: half a character at most.
    rest: Vec<u8>,
    /// Text that was decoded and is not yet taken, from `taken` on.
    text: Vec<u8>,
    taken: usize,
}

/// The byte order mark of a text; `None` if it has none of UTF-16. `true` is the big endian.
pub(super) fn is_big_endian(begin: &[u8]) -> Option<bool> {
    match begin {
        // With two zeros after it this would be UTF-32.
        [0xff, 0xfe, 0, 0, ..] => None,
        [0xff, 0xfe, ..] => Some(false),
        [0xfe, 0xff, ..] => Some(true),
        _ => None,
    }
}

impl<R: Read> Utf16<R> {
    pub fn new(inner: R, is_big_endian: bool) -> Self {
        Self { inner, is_big_endian, rest: Vec::new(), text: Vec::new(), taken: 0 }
    }

    fn decode(&mut self) -> io::Result<()> {
        let mut stored = [0; 8 << 10];
        let read = self.inner.read(&mut stored)?;
        self.rest.extend_from_slice(&stored[..read]);
        let (units, _) = self.rest.as_chunks::<2>();
        let unit =
            |pair: &[u8; 2]| if self.is_big_endian { u16::from_be_bytes(*pair) } else { u16::from_le_bytes(*pair) };
        // The second half of a last character may be in the next bytes.
        let is_cut = read > 0 && units.last().is_some_and(|last| (0xd800..0xdc00).contains(&unit(last)));
        let whole = units.len() - usize::from(is_cut);
        let decoded = char::decode_utf16(units[..whole].iter().map(unit));
        let text: String = decoded.map(|one| one.unwrap_or(char::REPLACEMENT_CHARACTER)).collect();
        self.rest.drain(..if read == 0 { self.rest.len() } else { 2 * whole });
        (self.text, self.taken) = (text.into_bytes(), 0);
        Ok(())
    }
}

impl<R: Read> Read for Utf16<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.taken == self.text.len() {
            self.decode()?;
            if self.text.is_empty() && self.rest.is_empty() {
                return Ok(0);
            }
        }
        let read = (&self.text[self.taken..]).read(buffer)?;
        self.taken += read;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader of few bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = self.1.min(buffer.len());
            self.0.read(&mut buffer[..most])
        }
    }

    #[test]
    fn a_text_is_the_same_however_it_is_cut() {
        let wanted = "\u{feff}memory.used [MiB]\r\n12 MiB 显存 \u{1f600}\r\n";
        for is_big in [false, true] {
            let bytes: Vec<u8> = wanted
                .encode_utf16()
                .flat_map(|unit| if is_big { unit.to_be_bytes() } else { unit.to_le_bytes() })
                .collect();
            assert_eq!(is_big_endian(&bytes), Some(is_big));
            for most in 1..9 {
                let mut text = String::new();
                Utf16::new(Slow(&bytes, most), is_big).read_to_string(&mut text).expect("UTF-8");
                assert_eq!(text, wanted, "{most}");
            }
        }
        assert_eq!(is_big_endian("\u{feff}a".as_bytes()), None);
    }

    #[test]
    fn half_a_character_at_the_end_ends_it() {
        for bytes in [&b"\xff\xfea\x00\x00\xd8"[..], b"\xff\xfea\x00\x00"] {
            let mut text = String::new();
            Utf16::new(bytes, false).read_to_string(&mut text).expect("UTF-8");
            assert!(text.starts_with("\u{feff}a"), "{text:?}");
        }
    }
}
