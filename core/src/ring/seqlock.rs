//! A cell of words that one thread rewrites and any other reads: a reader learns that it was overtaken.
//!
//! Word 0 of a cell is its tag: 0 while the cell holds nothing or is being rewritten, else a number that the content
//! never shares with an earlier content of the same cell. The writer clears the tag, writes, and sets the new tag;
//! a reader takes what it read only if the tag was the same before and after. Nobody ever waits. Which
//! words may still grow after the tag is set (the open block's bits) is the owner's affair.

use super::sync::{AtomicU64, Ordering, fence};

/// Words of a cell that do not belong to its content.
pub(super) const TAG_WORDS: usize = 1;

/// One cell: the tag and its content.
#[derive(Clone, Copy)]
pub(super) struct Cell<'a>(&'a [AtomicU64]);

impl<'a> Cell<'a> {
    /// The cell that lies in these words, the first of which is its tag.
    pub(super) fn new(words: &'a [AtomicU64]) -> Self {
        Self(words)
    }

    /// The content's words. Readers go through [`Cell::read`]; the writer, who races with nobody, may look directly.
    pub(super) fn content(&self) -> &'a [AtomicU64] {
        &self.0[TAG_WORDS..]
    }

    /// Rewrites the content: whatever a reader holds of the old one turns invalid first.
    pub(super) fn rewrite(&self, tag: u64, write: impl FnOnce(&'a [AtomicU64])) {
        // Release, so that a reader who meets the cleared tag also sees why it was cleared (the ring's new oldest
        // time). The fence keeps the writes below from being seen before the cleared tag: a reader that read one
        // of them and then fences meets the cleared tag or a later one.
        self.0[0].store(0, Ordering::Release);
        fence(Ordering::Release);
        write(self.content());
        self.0[0].store(tag, Ordering::Release);
    }

    /// Reads whatever content there is, with its tag; `None` where there is none, or it was rewritten meanwhile.
    pub(super) fn read_current<R>(&self, read: impl FnOnce(u64, &'a [AtomicU64]) -> R) -> Option<R> {
        let tag = self.0[0].load(Ordering::Acquire);
        if tag == 0 { None } else { self.unless_rewritten(tag, |content| read(tag, content)) }
    }

    /// Reads the content, or `None` if it is not, or no longer, the one with this tag.
    pub(super) fn read<R>(&self, tag: u64, read: impl FnOnce(&'a [AtomicU64]) -> R) -> Option<R> {
        if self.0[0].load(Ordering::Acquire) == tag { self.unless_rewritten(tag, read) } else { None }
    }

    /// Reads the content, whose tag was this; `None` if it no longer is.
    fn unless_rewritten<R>(&self, tag: u64, read: impl FnOnce(&'a [AtomicU64]) -> R) -> Option<R> {
        let content = read(self.content());
        fence(Ordering::Acquire);
        (self.0[0].load(Ordering::Acquire) == tag).then_some(content)
    }
}
