//! The memo of a pickle: the values that it may refer to again by number, in two or four bytes each.
//!
//! Enters: values in the order in which they are remembered. Leaves: the value of a number. Invariant: two bytes a value
//! while there are few different ones, four at most; a snapshot of gigabytes remembers tens of millions.

use super::input::Parsed;
use highwater_engine::recording::FileProblem;

/// Values of one chunk.
const CHUNK: usize = 4096;
/// The most bytes of all values.
const MOST_BYTES: usize = 128 << 20;

/// A value that is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// A container that is not complete yet, by its place among the values that wait.
    Open(u32),
    /// A container of which nothing is kept.
    Gone,
    /// Something that is of no use.
    Other,
    /// A tuple of two integers, and whether one of them is not 0.
    Pair(bool),
    /// A text, by its number.
    Text(u32),
    /// A frame of a stack, by its number.
    Frame(u32),
    /// A whole stack, by its number.
    Stack(u32),
}

const KINDS: u32 = 4;

impl Kept {
    fn code(self) -> u32 {
        match self {
            Self::Gone => 0,
            Self::Other => KINDS,
            Self::Pair(is_set) => (2 + u32::from(is_set)) * KINDS,
            Self::Open(place) => (place + 4) * KINDS,
            Self::Text(number) => number * KINDS + 1,
            Self::Frame(number) => number * KINDS + 2,
            Self::Stack(number) => number * KINDS + 3,
        }
    }

    fn of(code: u32) -> Self {
        let number = code / KINDS;
        match (code % KINDS, number) {
            (1, _) => Self::Text(number),
            (2, _) => Self::Frame(number),
            (3, _) => Self::Stack(number),
            (_, 0) => Self::Gone,
            (_, 1) => Self::Other,
            (_, 2 | 3) => Self::Pair(number == 3),
            _ => Self::Open(number - 4),
        }
    }
}

#[derive(Debug)]
enum Chunk {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

/// The values so far.
#[derive(Debug, Default)]
pub(super) struct Memo {
    chunks: Vec<Chunk>,
    len: usize,
    bytes: usize,
}

impl Memo {
    /// The number of the next value.
    pub fn next(&self) -> usize {
        self.len
    }

    /// Remembers a value under a number: that of one that is remembered already, or the next.
    pub fn put(&mut self, at: usize, kept: Kept) -> Parsed<()> {
        if at < self.len {
            self.set(at, kept);
            return Ok(());
        }
        if at > self.len {
            let problem = format!("it remembers a value as number {at} after {} others", self.len);
            return Err(FileProblem::malformed(problem).into());
        }
        if self.bytes > MOST_BYTES {
            let problem = format!("it remembers more than {} values, which take {MOST_BYTES} bytes", self.len);
            return Err(FileProblem::TooLarge(problem.into()).into());
        }
        if at.is_multiple_of(CHUNK) {
            self.chunks.push(Chunk::Narrow(Vec::with_capacity(CHUNK)));
            self.bytes += CHUNK * size_of::<u16>();
        }
        self.len += 1;
        if let Some(chunk) = self.chunks.last_mut()
            && chunk.push(kept.code())
        {
            self.bytes += CHUNK * size_of::<u16>();
        }
        Ok(())
    }

    /// Replaces a value.
    pub fn set(&mut self, at: usize, kept: Kept) {
        if let Some(chunk) = self.chunks.get_mut(at / CHUNK)
            && chunk.set(at % CHUNK, kept.code())
        {
            self.bytes += CHUNK * size_of::<u16>();
        }
    }

    /// The value of a number.
    pub fn get(&self, at: usize) -> Option<Kept> {
        let code = match self.chunks.get(at / CHUNK)? {
            Chunk::Narrow(codes) => u32::from(*codes.get(at % CHUNK)?),
            Chunk::Wide(codes) => *codes.get(at % CHUNK)?,
        };
        Some(Kept::of(code))
    }
}

/// Each function returns whether it had to widen the chunk from 16 to 32 bits a code.
impl Chunk {
    fn push(&mut self, code: u32) -> bool {
        let is_wider = self.widen_for(code);
        match self {
            // `widen_for` has widened the chunk unless the code fits.
            Self::Narrow(codes) => codes.push(u16::try_from(code).unwrap_or(0)),
            Self::Wide(codes) => codes.push(code),
        }
        is_wider
    }

    fn set(&mut self, at: usize, code: u32) -> bool {
        let is_wider = self.widen_for(code);
        match self {
            Self::Narrow(codes) => {
                codes.get_mut(at).into_iter().for_each(|place| *place = u16::try_from(code).unwrap_or(0))
            }
            Self::Wide(codes) => codes.get_mut(at).into_iter().for_each(|place| *place = code),
        }
        is_wider
    }

    fn widen_for(&mut self, code: u32) -> bool {
        match self {
            Self::Narrow(codes) if code > u32::from(u16::MAX) => {
                let mut wide = Vec::with_capacity(CHUNK);
                wide.extend(codes.iter().map(|code| u32::from(*code)));
                *self = Self::Wide(wide);
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_whatever_their_size_and_order() {
        let mut memo = Memo::default();
        let value = |nth: usize| match nth % 7 {
            0 => Kept::Text(nth as u32 * 900),
            1 => Kept::Frame(nth as u32),
            2 => Kept::Stack(nth as u32),
            3 => Kept::Gone,
            4 | 5 => Kept::Pair(nth % 7 == 5),
            _ => Kept::Other,
        };
        for nth in 0..3 * CHUNK {
            memo.put(nth, Kept::Open(nth as u32)).expect("the next");
            assert_eq!(memo.get(nth), Some(Kept::Open(nth as u32)));
            memo.set(nth, value(nth));
        }
        assert!((0..3 * CHUNK).all(|nth| memo.get(nth) == Some(value(nth))));
        assert_eq!((memo.get(3 * CHUNK), memo.next()), (None, 3 * CHUNK));
        assert!(memo.put(3 * CHUNK + 1, Kept::Gone).is_err(), "a number is left out");
        memo.put(7, Kept::Text(1 << 29)).expect("a number again");
        assert_eq!((memo.get(7), memo.get(8)), (Some(Kept::Text(1 << 29)), Some(value(8))));
    }
}
