//! The deadlines of ticks, at absolute times. A late tick is not made up for: each deadline is taken once, or counted
//! as missed.

/// The deadlines since the last tick.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// How late the taken tick began, nanoseconds.
    pub lateness_ns: i64,
    /// Deadlines that passed before the tick began: the thread woke late.
    pub missed_late: u64,
    /// Deadlines that passed while the tick ran: the driver blocked.
    pub missed_driver: u64,
}

/// The grid of deadlines of one paced loop.
#[derive(Debug, Clone)]
pub struct Deadlines {
    next_ns: i64,
    period_ns: i64,
}

impl Deadlines {
    /// A grid on the timeline's multiples of the period, from the first one after `now_ns`.
    #[must_use]
    pub fn starting(now_ns: i64, period_ns: i64) -> Self {
        let period_ns = period_ns.max(1);
        Self { next_ns: (now_ns.div_euclid(period_ns) + 1) * period_ns, period_ns }
    }

    /// The deadline to sleep until.
    #[must_use]
    pub fn next_ns(&self) -> i64 {
        self.next_ns
    }

    /// Accounts for the tick of the current deadline, which ran from `begin_ns` to `end_ns`, and moves to the next
    /// deadline after its end: missed deadlines are skipped, not made up for.
    pub fn taken(&mut self, begin_ns: i64, end_ns: i64) -> Outcome {
        let lateness_ns = begin_ns - self.next_ns;
        let missed_late = self.pass(begin_ns);
        let missed_driver = self.pass(end_ns);
        self.next_ns += self.period_ns;
        Outcome { lateness_ns, missed_late, missed_driver }
    }

    /// Changes the period. The next deadline moves to one new period after the last one.
    pub fn set_period(&mut self, period_ns: i64) {
        let period_ns = period_ns.max(1);
        self.next_ns += period_ns - self.period_ns;
        self.period_ns = period_ns;
    }

    /// Skips the deadlines after the current one that have passed at `now_ns`.
    #[inline]
    fn pass(&mut self, now_ns: i64) -> u64 {
        if now_ns - self.next_ns < self.period_ns { 0 } else { self.pass_some(now_ns) }
    }

    #[cold]
    fn pass_some(&mut self, now_ns: i64) -> u64 {
        let passed = (now_ns - self.next_ns) / self.period_ns;
        self.next_ns += passed * self.period_ns;
        u64::try_from(passed).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_tick_on_time_misses_nothing() {
        let mut grid = Deadlines::starting(0, 1000);
        assert_eq!(grid.taken(1050, 1100), Outcome { lateness_ns: 50, missed_late: 0, missed_driver: 0 });
        assert_eq!(grid.next_ns(), 2000);
    }

    #[test]
    fn a_late_wake_up_and_a_blocked_driver_are_distinguished() {
        let mut grid = Deadlines::starting(0, 1000);
        // Due at 1000, woken at 3500 (2000 and 3000 missed late), the driver answers at 6200 (4000, 5000, 6000).
        assert_eq!(grid.taken(3500, 6200), Outcome { lateness_ns: 2500, missed_late: 2, missed_driver: 3 });
        assert_eq!(grid.next_ns(), 7000, "skipped, not made up for");
    }

    #[test]
    fn a_new_period_counts_from_the_last_deadline() {
        let mut grid = Deadlines::starting(0, 1000);
        grid.taken(1000, 1010);
        grid.set_period(2000);
        assert_eq!(grid.next_ns(), 3000);
    }

    proptest! {
        /// Every deadline of the grid is either taken or missed, whatever the loop does.
        #[test]
        fn due_is_taken_plus_missed(ticks in prop::collection::vec((0i64..20_000, 0i64..20_000), 1..200)) {
            let mut grid = Deadlines::starting(0, 1000);
            let mut accounted = 0u64;
            for (late, busy) in ticks {
                let begin = grid.next_ns() + late;
                let outcome = grid.taken(begin, begin + busy);
                accounted += 1 + outcome.missed_late + outcome.missed_driver;
                prop_assert!(grid.next_ns() > begin + busy);
                prop_assert!(grid.next_ns() <= begin + busy + 1000);
            }
            // Deadlines are at 1000, 2000, …: those before the next one are all accounted for.
            prop_assert_eq!(accounted, u64::try_from(grid.next_ns() / 1000 - 1).unwrap());
        }
    }
}
