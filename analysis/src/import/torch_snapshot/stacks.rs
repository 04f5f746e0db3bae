//! Texts, frames and stacks of a snapshot, each once.
//!
//! Enters: texts, frames and lists of frames, most of them many times. Leaves: their numbers. Invariants: all are
//! bounded; what exceeds a bound gets the number [`NONE`], and is counted.

use super::members::MEMBERS;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

/// The number of texts, frames and stacks beyond the bounds, and of the empty stack.
pub(super) const NONE: u32 = 0;
/// The line of a frame that has none.
pub(super) const NO_LINE: u32 = u32::MAX;
/// Maximum bytes of all texts, and number of texts.
const MOST_TEXT_BYTES: usize = 16 << 20;
const MOST_TEXTS: usize = 1 << 18;
/// Frames, and places in all stacks.
const MOST_FRAMES: usize = 1 << 18;
const MOST_PLACES: usize = 1 << 22;
const MOST_STACKS: usize = 1 << 18;

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Frame {
    /// The function's name.
    pub name: u32,
    /// The file's name.
    pub file: u32,
    /// The line; [`NO_LINE`] if it is not known.
    pub line: u32,
}

/// All texts, frames and stacks so far.
#[derive(Debug)]
pub(super) struct Stacks {
    texts: Vec<Box<str>>,
    by_text: HashMap<Box<str>, u32>,
    text_bytes: usize,
    frames: Vec<Frame>,
    by_frame: HashMap<Frame, u32>,
    /// Where each stack ends in `places`.
    ends: Vec<u32>,
    places: Vec<u32>,
    /// Stacks by the hash of their frames.
    by_hash: HashMap<u64, Vec<u32>>,
    /// Randomly keyed: otherwise a crafted file could give all stacks the same hash.
    hasher: RandomState,
    /// What found no room.
    pub left_out: u64,
}

impl Default for Stacks {
    fn default() -> Self {
        let nothing = Frame { name: NONE, file: NONE, line: NO_LINE };
        let mut stacks = Self {
            texts: vec!["?".into()],
            by_text: HashMap::new(),
            text_bytes: 0,
            frames: vec![nothing],
            by_frame: HashMap::new(),
            ends: vec![0],
            places: Vec::new(),
            by_hash: HashMap::new(),
            hasher: RandomState::new(),
            left_out: 0,
        };
        for member in MEMBERS {
            stacks.text(member);
        }
        stacks
    }
}

impl Stacks {
    /// The number of a text.
    pub fn text(&mut self, text: &str) -> u32 {
        if let Some(known) = self.by_text.get(text) {
            return *known;
        }
        if self.texts.len() >= MOST_TEXTS || self.text_bytes + text.len() > MOST_TEXT_BYTES {
            self.left_out += 1;
            return NONE;
        }
        self.text_bytes += text.len();
        let number = number(self.texts.len());
        self.texts.push(text.into());
        self.by_text.insert(text.into(), number);
        number
    }

    /// A text by its number.
    pub fn text_of(&self, number: u32) -> &str {
        self.texts.get(number as usize).map_or("?", |text| text)
    }

    /// The number of a frame.
    pub fn frame(&mut self, frame: Frame) -> u32 {
        if let Some(known) = self.by_frame.get(&frame) {
            return *known;
        }
        if self.frames.len() >= MOST_FRAMES {
            self.left_out += 1;
            return NONE;
        }
        let number = number(self.frames.len());
        self.frames.push(frame);
        self.by_frame.insert(frame, number);
        number
    }

    /// A frame by its number.
    pub fn frame_of(&self, number: u32) -> Frame {
        self.frames.get(number as usize).copied().unwrap_or(Frame { name: NONE, file: NONE, line: NO_LINE })
    }

    /// The number of a stack.
    pub fn stack(&mut self, frames: &[u32]) -> u32 {
        if frames.is_empty() {
            return NONE;
        }
        let hash = self.hasher.hash_one(frames);
        let known = self.by_hash.get(&hash).into_iter().flatten().find(|number| self.stack_of(**number) == frames);
        if let Some(known) = known {
            return *known;
        }
        if self.ends.len() >= MOST_STACKS || self.places.len() + frames.len() > MOST_PLACES {
            self.left_out += 1;
            return NONE;
        }
        let stack = number(self.ends.len());
        self.places.extend_from_slice(frames);
        self.ends.push(number(self.places.len()));
        self.by_hash.entry(hash).or_default().push(stack);
        stack
    }

    /// The frames of a stack, innermost first.
    pub fn stack_of(&self, number: u32) -> &[u32] {
        let at = number as usize;
        let end = self.ends.get(at).copied().unwrap_or(0) as usize;
        let begin = at.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0) as usize;
        self.places.get(begin..end).unwrap_or(&[])
    }
}

/// A length as a number. The bounds keep every length far below `u32::MAX`.
fn number(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_there_once() {
        let mut stacks = Stacks::default();
        let (name, file) = (stacks.text("f"), stacks.text("a.py"));
        assert_eq!((stacks.text("f"), stacks.text_of(name), stacks.text_of(file)), (name, "f", "a.py"));
        let [one, other] = [1, 2].map(|line| stacks.frame(Frame { name, file, line }));
        assert_eq!(stacks.frame(Frame { name, file, line: 1 }), one);
        let both = stacks.stack(&[one, other]);
        let alone = stacks.stack(&[other]);
        assert_eq!((stacks.stack(&[one, other]), stacks.stack(&[])), (both, NONE));
        assert_eq!(
            (stacks.stack_of(both), stacks.stack_of(alone), stacks.stack_of(NONE)),
            (&[one, other][..], &[other][..], &[][..])
        );
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let mut stacks = Stacks::default();
        let long = "x".repeat(MOST_TEXT_BYTES + 1);
        assert_eq!((stacks.text(&long), stacks.left_out), (NONE, 1));
        let frames = vec![1; MOST_PLACES + 1];
        assert_eq!((stacks.stack(&frames), stacks.left_out), (NONE, 2));
    }
}
