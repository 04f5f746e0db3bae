//! Readings in a row that must agree before a detector reports anything.

/// For how many readings in a row something was so.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct InARow {
    /// When the last reading was made.
    read_ns: Option<i64>,
    readings: u32,
    /// The time of the first of these readings.
    begin_ns: i64,
}

impl InARow {
    /// Notes a reading. One that was noted already counts once: it is looked at more often than it is made.
    pub fn note(&mut self, at_ns: i64, is_so: bool) {
        if self.read_ns.replace(at_ns) == Some(at_ns) {
            return;
        }
        let readings = if is_so { self.readings.saturating_add(1) } else { 0 };
        let begin_ns = if readings == 1 { at_ns } else { self.begin_ns };
        *self = Self { readings, begin_ns, ..*self };
    }

    /// Since when it is so, if two readings agree.
    pub fn since_ns(&self) -> Option<i64> {
        (self.readings >= 2).then_some(self.begin_ns)
    }
}
