//! A pickle's bytes.
//!
//! Enters: a file, as a stream. Leaves: bytes, numbers and texts. Invariant: one buffer, whatever the lengths that the file
//! names.

use highwater_engine::recording::FileProblem;
use std::io::{ErrorKind, Read};

/// What is parsed of a snapshot. The error is in a box because every opcode of a large file returns one of these.
pub(super) type Parsed<T> = Result<T, Box<FileProblem>>;

const BUFFER: usize = 1 << 18;
/// The longest text that is read; the rest of a longer one is passed over.
pub(super) const MOST_TEXT: usize = 1 << 16;

/// What is left of a file.
pub(super) struct Input<R> {
    reader: R,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    /// Bytes before the buffer.
    before: u64,
}

impl<R: Read> Input<R> {
    pub fn new(reader: R) -> Self {
        Self { reader, buffer: vec![0; BUFFER].into_boxed_slice(), at: 0, end: 0, before: 0 }
    }

    /// How many bytes were read.
    pub fn position(&self) -> u64 {
        self.before + self.at as u64
    }

    /// Reads until the buffer has at least `wanted` bytes. It must have room for them.
    #[cold]
    fn fill(&mut self, wanted: usize) -> Parsed<()> {
        self.buffer.copy_within(self.at..self.end, 0);
        self.before += self.at as u64;
        (self.end, self.at) = (self.end - self.at, 0);
        while self.end < wanted {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(FileProblem::CutShort { after: self.before + self.end as u64 }.into()),
                Ok(read) => self.end += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::FileTooLarge => {
                    return Err(FileProblem::TooLarge(error.to_string().into()).into());
                }
                Err(error) => {
                    let (after, error) = (self.position(), error.to_string());
                    return Err(FileProblem::Unreadable { after, error }.into());
                }
            }
        }
        Ok(())
    }

    /// The next byte.
    #[inline]
    pub fn byte(&mut self) -> Parsed<u8> {
        if self.at == self.end {
            self.fill(1)?;
        }
        self.at += 1;
        Ok(self.buffer[self.at - 1])
    }

    /// The next `count` bytes, at most as many as the longest text has.
    #[inline]
    pub fn bytes(&mut self, count: usize) -> Parsed<&[u8]> {
        if self.end - self.at < count {
            self.fill(count)?;
        }
        self.at += count;
        Ok(&self.buffer[self.at - count..self.at])
    }

    /// An unsigned number of `bytes` bytes, the lowest byte first.
    #[inline]
    pub fn number(&mut self, bytes: usize) -> Parsed<u64> {
        Ok(self.bytes(bytes)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// A signed number of `bytes` bytes, the lowest byte first. `None` if it is longer than any that is of use.
    pub fn signed(&mut self, bytes: u64) -> Parsed<Option<i128>> {
        if bytes > 16 {
            self.skip(bytes)?;
            return Ok(None);
        }
        let bytes = self.bytes(usize::try_from(bytes).unwrap_or(0))?;
        let first = if bytes.last().is_some_and(|last| last & 0x80 != 0) { -1 } else { 0 };
        Ok(Some(bytes.iter().rev().fold(first, |number, byte| number << 8 | i128::from(*byte))))
    }

    /// Skips `count` bytes.
    pub fn skip(&mut self, mut count: u64) -> Parsed<()> {
        while count > 0 {
            if self.at == self.end {
                self.fill(1)?;
            }
            let step = (self.end - self.at).min(usize::try_from(count).unwrap_or(usize::MAX));
            self.at += step;
            count -= step as u64;
        }
        Ok(())
    }

    /// A line, without its end.
    pub fn line(&mut self) -> Parsed<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return Ok(line),
                byte if line.len() < MOST_TEXT => line.push(byte),
                _ => {
                    return Err(FileProblem::TooLarge(format!("a line is longer than {MOST_TEXT} bytes").into()).into());
                }
            }
        }
    }
}
