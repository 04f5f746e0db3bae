//! Names that occur many times, kept once.
//!
//! Invariant: at most [`MOST_NAME_BYTES`] bytes in all.

use super::MOST_NAME_BYTES;
use std::collections::HashMap;
use std::rc::Rc;

/// Different names, numbered in the order in which they were first seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    numbers: HashMap<Rc<str>, u32>,
    names: Vec<Rc<str>>,
    bytes: usize,
}

impl Names {
    /// The number of a name; `None` if there is no room for it.
    pub(super) fn intern(&mut self, name: &str) -> Option<u32> {
        if let Some(number) = self.numbers.get(name) {
            return Some(*number);
        }
        // The empty name counts no bytes, but it can be added only once.
        if self.bytes + name.len() > MOST_NAME_BYTES {
            return None;
        }
        self.bytes += name.len();
        let (name, number) = (Rc::<str>::from(name), u32::try_from(self.names.len()).ok()?);
        self.numbers.insert(Rc::clone(&name), number);
        self.names.push(name);
        Some(number)
    }

    /// The name with a number.
    pub(super) fn get(&self, number: u32) -> Option<&str> {
        self.names.get(usize::try_from(number).ok()?).map(|name| &**name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once_and_too_many_are_refused() {
        let mut names = Names::default();
        assert_eq!((names.intern("a"), names.intern("b"), names.intern("a")), (Some(0), Some(1), Some(0)));
        assert_eq!((names.get(1), names.get(2)), (Some("b"), None));
        assert_eq!(names.intern(&"x".repeat(MOST_NAME_BYTES - 1)), None);
        assert_eq!(names.intern(&"x".repeat(MOST_NAME_BYTES - 2)), Some(2));
        assert_eq!((names.intern("c"), names.intern("b")), (None, Some(1)));
    }
}
