//! The lines of a training log.
//!
//! Enters: bytes that anything may have printed. Leaves: lines, one at a time. Invariants: a carriage return ends a line
//! too, because progress bars may print no line feed for hours; a line that is too long is returned without its text, and
//! the lines after it are still read; only one line is in memory.

use std::io::{self, BufRead, ErrorKind};

/// The longest line, bytes.
pub const MOST_LINE_BYTES: usize = 64 << 10;

/// Reads lines.
pub struct LogLines<R> {
    reader: R,
    line: Vec<u8>,
    number: usize,
    /// The byte that ended the previous line.
    end: Option<u8>,
}

/// A line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// Its number from 1, by line feeds.
    pub number: usize,
    /// Its bytes without its end; `None` if there are more than [`MOST_LINE_BYTES`].
    pub text: Option<&'a [u8]>,
    /// Whether it has an end. One that a tool was still writing has none.
    pub is_ended: bool,
}

impl<R: BufRead> LogLines<R> {
    /// Reads lines from here on.
    pub fn new(reader: R) -> Self {
        Self { reader, line: Vec::new(), number: 1, end: None }
    }

    /// The next line; `None` at the end.
    ///
    /// # Errors
    /// The reader fails.
    pub fn next(&mut self) -> io::Result<Option<LogLine<'_>>> {
        self.line.clear();
        let (mut is_whole, mut begun) = (true, false);
        if self.end.take() == Some(b'\r') && available(&mut self.reader)?.first() == Some(&b'\n') {
            self.reader.consume(1);
            self.number += 1;
        }
        let number = self.number;
        loop {
            let part = available(&mut self.reader)?;
            if part.is_empty() {
                break;
            }
            begun = true;
            let end = part.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let found = end.and_then(|end| part.get(end).copied());
            let part = &part[..end.unwrap_or(part.len())];
            let consumed = part.len() + usize::from(found.is_some());
            is_whole &= self.line.len() + part.len() <= MOST_LINE_BYTES;
            if is_whole {
                self.line.extend_from_slice(part);
            }
            self.reader.consume(consumed);
            if found.is_some() {
                self.number += usize::from(found == Some(b'\n'));
                self.end = found;
                break;
            }
        }
        let line = LogLine { number, text: is_whole.then_some(&*self.line), is_ended: self.end.is_some() };
        Ok(begun.then_some(line))
    }
}

/// The buffered bytes of the reader, filled if there are none. Empty only at the end of the input.
fn available(reader: &mut impl BufRead) -> io::Result<&[u8]> {
    while let Err(error) = reader.fill_buf() {
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
    reader.fill_buf()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    fn read(log: &[u8], room: usize) -> Vec<(usize, Option<String>, bool)> {
        let mut lines = LogLines::new(BufReader::with_capacity(room, log));
        let mut found = Vec::new();
        while let Some(line) = lines.next().expect("it is read") {
            let text = line.text.map(|text| String::from_utf8_lossy(text).into_owned());
            found.push((line.number, text, line.is_ended));
        }
        found
    }

    #[test]
    fn each_end_of_a_line_ends_one() {
        let wanted = [
            (1, "a", true),
            (2, "", true),
            (3, "b", true),
            (4, " 10%", true),
            (4, " 20%", true),
            (4, "c", true),
            (5, "", true),
            (5, "", true),
            (5, "d", false),
        ];
        let wanted = wanted.map(|(number, text, is_ended)| (number, Some(text.to_owned()), is_ended));
        for room in 1..30 {
            assert_eq!(read(b"a\n\nb\r\n 10%\r 20%\rc\n\r\rd", room), wanted, "{room}");
        }
        assert_eq!(read(b"", 8), []);
        assert_eq!(read(b"\r\n", 8), [(1, Some(String::new()), true)]);
    }

    #[test]
    fn a_line_that_is_too_long_costs_no_other() {
        let long = "x".repeat(MOST_LINE_BYTES + 1);
        let log = format!("a\n{long}\nb\n{}\n{long}", &long[1..]);
        let found: Vec<_> = read(log.as_bytes(), 1000)
            .into_iter()
            .map(|(number, text, _)| (number, text.map(|text| text.len())))
            .collect();
        assert_eq!(found, [(1, Some(1)), (2, None), (3, Some(1)), (4, Some(MOST_LINE_BYTES)), (5, None)]);
    }
}
