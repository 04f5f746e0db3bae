//! The last second of a changing value, each value with the time from which it holds.

use std::collections::VecDeque;

/// Values in order of time; never empty.
#[derive(Debug)]
pub(super) struct Recent<T> {
    older: VecDeque<(i64, T)>,
    newest: (i64, T),
}

impl<T> Recent<T> {
    /// A value that holds from `at_ns` on.
    pub(super) fn new(at_ns: i64, value: T) -> Self {
        Self { older: VecDeque::new(), newest: (at_ns, value) }
    }

    /// Adds a value that holds from `at_ns` on, which is not before the newest value's time.
    pub(super) fn push(&mut self, at_ns: i64, value: T) {
        let before = std::mem::replace(&mut self.newest, (at_ns, value));
        if before.0 < at_ns {
            self.older.push_back(before);
        }
    }

    /// The newest value and its time.
    pub(super) fn newest(&self) -> &(i64, T) {
        &self.newest
    }

    /// The value at this time and when it began; `None` for a time that is no longer kept.
    pub(super) fn at(&self, at_ns: i64) -> Option<&(i64, T)> {
        if at_ns >= self.newest.0 {
            return Some(&self.newest);
        }
        self.older.get(self.older.partition_point(|(since, _)| *since <= at_ns).checked_sub(1)?)
    }

    /// Drops values that no time from `before_ns` on needs.
    pub(super) fn forget(&mut self, before_ns: i64) {
        while self.older.get(1).unwrap_or(&self.newest).0 <= before_ns && self.older.pop_front().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_holds_until_the_next_one() {
        let mut recent = Recent::new(0, 'a');
        recent.push(10, 'b');
        recent.push(20, 'c');
        recent.push(20, 'd');
        let held = |recent: &Recent<char>, at| recent.at(at).map(|(_, value)| *value);
        assert_eq!(
            [-1, 0, 9, 10, 19, 20, 99].map(|at| held(&recent, at)),
            [None, Some('a'), Some('a'), Some('b'), Some('b'), Some('d'), Some('d')]
        );
        recent.forget(15);
        assert_eq!([9, 10, 20].map(|at| held(&recent, at)), [None, Some('b'), Some('d')]);
        recent.forget(100);
        assert_eq!([19, 20].map(|at| held(&recent, at)), [None, Some('d')]);
    }
}
