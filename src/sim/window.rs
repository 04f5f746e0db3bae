//! Recurring windows of time: spikes, losses, times near OOM.

use highwater_core::units::Nanoseconds;

/// A window of time that begins at an offset and, if it recurs, again after each period. Nanoseconds since the
/// scenario's start; begin included, end excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) offset_ns: i64,
    pub(super) every_ns: Option<i64>,
    pub(super) lasting_ns: i64,
}

impl Window {
    pub(super) fn new(offset: Nanoseconds, every: Option<Nanoseconds>, lasting: Nanoseconds) -> Self {
        Self { offset_ns: offset.0, every_ns: every.map(|every| every.0), lasting_ns: lasting.0 }
    }

    /// Whether the window is open at this time.
    pub(super) fn contains(&self, at_ns: i64) -> bool {
        let Some(since) = at_ns.checked_sub(self.offset_ns).filter(|since| *since >= 0) else { return false };
        self.every_ns.map_or(since, |every| since % every) < self.lasting_ns
    }

    /// How long it was open until this time.
    pub(super) fn open_ns_until(&self, at_ns: i64) -> i64 {
        let since_ns = at_ns.saturating_sub(self.offset_ns).max(0);
        let every_ns = self.every_ns.unwrap_or(i64::MAX);
        let lasting_ns = self.lasting_ns.min(every_ns);
        (since_ns / every_ns).saturating_mul(lasting_ns).saturating_add((since_ns % every_ns).min(lasting_ns))
    }

    /// The first time after `after_ns` at which it opens; `None` if it never opens again.
    pub(super) fn next_opening_ns(&self, after_ns: i64) -> Option<i64> {
        if after_ns < self.offset_ns {
            return Some(self.offset_ns);
        }
        let every = self.every_ns?;
        self.offset_ns.checked_add(((after_ns - self.offset_ns) / every).checked_add(1)?.checked_mul(every)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_open_from_its_begin_to_just_before_its_end() {
        let window = Window { offset_ns: 10, every_ns: Some(100), lasting_ns: 5 };
        let open: Vec<i64> = (-100..250).filter(|at| window.contains(*at)).collect();
        assert_eq!(open, [10, 11, 12, 13, 14, 110, 111, 112, 113, 114, 210, 211, 212, 213, 214]);
        assert_eq!(Window { every_ns: None, ..window }.next_opening_ns(10), None);
        let until = |window: Window| [0, 12, 15, 109, 112, 1_000].map(|at| window.open_ns_until(at));
        assert_eq!(until(window), [0, 2, 5, 5, 7, 50]);
        assert_eq!(until(Window { every_ns: None, ..window }), [0, 2, 5, 5, 5, 5]);
        for (after, opening) in [(-5, 10), (9, 10), (10, 110), (109, 110), (110, 210)] {
            assert_eq!(window.next_opening_ns(after), Some(opening));
        }
    }
}
