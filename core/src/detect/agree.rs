//! Readings in a row that must agree before a detector reports anything.

/// For how many readings in a row something was so.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct InARow {
    readings: u32,
    /// When the first of them was made.
    begin_ns: i64,
}

impl InARow {
    /// Notes one more reading.
    pub fn note(&mut self, at_ns: i64, is_so: bool) {
        *self = match self.readings {
            _ if !is_so => Self::default(),
            0 => Self { readings: 1, begin_ns: at_ns },
            readings => Self { readings: readings.saturating_add(1), ..*self },
        };
    }

    /// Since when it is so, if two readings agree.
    pub fn since_ns(&self) -> Option<i64> {
        (self.readings >= 2).then_some(self.begin_ns)
    }
}
