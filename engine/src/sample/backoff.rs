//! Reduces the fast lane's rate when the driver is overloaded: the period doubles, and recovers by itself.
//!
//! The only criterion, evaluated once a second: calls take more of the wall time than the budget. Calls that take far
//! longer than most calls of that second are counted with a capped duration. Such a call waits because a job that maps
//! or frees memory holds the driver's lock, whatever polls it and however rarely. A longer period would not shorten
//! such waits, and the curve matters most at these times. The cap is three times the usual duration of a call. If most
//! calls take longer than that because the driver has become slow, the cap is a duration that most calls do not exceed.
//! Calls that take three times as long as usual are no reason by themselves: on virtual machines the calls of one
//! process slow down for seconds to minutes, from 4 µs to 12, while no other process uses the GPU.

use highwater_core::clock::SECOND_NS;

/// The fast lane's limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// The configured period, nanoseconds.
    pub period_ns: i64,
    /// The longest period that it backs off to, nanoseconds.
    pub max_period_ns: i64,
    /// Share of wall time that the fast lane's driver calls may take, 0 to 1.
    pub busy_ratio: f64,
}

/// Windows in a row before the period is halved again. Each must be below 45 % of the budget: half the period costs
/// twice as much.
const CALM_WINDOWS: u32 = 5;
/// A call is slow when it takes this many times its baseline.
const SLOW_FACTOR: i64 = 3;
/// Calls from which the first baseline is learned. They do not count against the budget.
const LEARNING_CALLS: u32 = 256;

/// The state of the back-off.
#[derive(Debug, Clone)]
pub struct Backoff {
    budget: Budget,
    period_ns: i64,
    baseline_ns: f64,
    learned: u32,
    window: Window,
    calm: u32,
}

/// How many times the longest usual duration is doubled before it exceeds every call: from microseconds to seconds.
const LEVELS: usize = 24;

/// One second's calls by duration: level 0 holds those up to the longest usual duration, each further level those up to
/// twice as long as the level before.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    began_ns: i64,
    calls: [u32; LEVELS],
    took_ns: [i64; LEVELS],
}

impl Window {
    fn call(&mut self, duration_ns: i64, usual_ns: i64) {
        let level = match (duration_ns - 1) / usual_ns {
            ..=0 => 0,
            times => times.ilog2() as usize + 1,
        };
        let level = level.min(LEVELS - 1);
        self.calls[level] += 1;
        self.took_ns[level] += duration_ns;
    }

    /// The time that all calls took. Calls longer than most are capped at the level that holds the majority.
    fn busy_ns(&self, usual_ns: i64) -> i64 {
        let all: u32 = self.calls.iter().sum();
        let (mut calls, mut busy_ns) = (0, 0);
        for (level, (at_level, took_ns)) in self.calls.iter().zip(self.took_ns).enumerate() {
            calls += at_level;
            busy_ns += took_ns;
            if 2 * calls >= all {
                return busy_ns + i64::from(all - calls) * (usual_ns << level);
            }
        }
        busy_ns
    }
}

impl Backoff {
    /// No back-off yet.
    #[must_use]
    pub fn new(budget: Budget) -> Self {
        Self { budget, period_ns: budget.period_ns, baseline_ns: 0.0, learned: 0, window: Window::default(), calm: 0 }
    }

    /// Starts at `period_ns`, to which a previous thread had backed off, within the budget's limits.
    #[must_use]
    pub fn resumed(budget: Budget, period_ns: i64) -> Self {
        let longest_ns = budget.max_period_ns.max(budget.period_ns);
        Self { period_ns: period_ns.clamp(budget.period_ns, longest_ns), ..Self::new(budget) }
    }

    /// The current period, nanoseconds.
    #[must_use]
    pub fn period_ns(&self) -> i64 {
        self.period_ns
    }

    /// Records one call's duration.
    pub fn call(&mut self, duration_ns: i64) {
        #[allow(clippy::cast_precision_loss, reason = "a duration in nanoseconds")]
        let duration = duration_ns as f64;
        if self.learned < LEARNING_CALLS {
            // The shortest of the first calls: the driver's cold start must not become the norm.
            self.learned += 1;
            self.baseline_ns = if self.learned == 1 { duration } else { self.baseline_ns.min(duration) };
            return;
        }
        let usual_ns = self.usual_ns();
        self.window.call(duration_ns, usual_ns);
        // Slow calls move the baseline too, but a hundred times less: a driver that stays slow becomes the norm
        // eventually.
        let weight = if duration_ns > usual_ns { 1e-5 } else { 1e-3 };
        self.baseline_ns += weight * (duration - self.baseline_ns);
    }

    /// Records the end of a sweep. All calls until then must have been recorded. Once a second, judges the calls of
    /// that second, and returns the new period if it changes.
    pub fn sweep(&mut self, begin_ns: i64, end_ns: i64) -> Option<i64> {
        if self.window.began_ns == 0 {
            self.window.began_ns = begin_ns;
        }
        let length_ns = end_ns - self.window.began_ns;
        if length_ns < SECOND_NS {
            return None;
        }
        let before = self.period_ns;
        self.judge(length_ns);
        self.window = Window { began_ns: end_ns, ..Window::default() };
        (self.period_ns != before).then_some(self.period_ns)
    }

    /// The longest duration of a call that is not slow, nanoseconds.
    #[allow(clippy::cast_possible_truncation, reason = "a duration in nanoseconds")]
    fn usual_ns(&self) -> i64 {
        (SLOW_FACTOR * self.baseline_ns as i64).max(1)
    }

    fn judge(&mut self, length_ns: i64) {
        #[allow(clippy::cast_precision_loss, reason = "a share")]
        let busy = self.window.busy_ns(self.usual_ns()) as f64 / length_ns as f64;
        if busy > self.budget.busy_ratio {
            self.calm = 0;
            self.period_ns = (self.period_ns * 2).min(self.budget.max_period_ns.max(self.budget.period_ns));
            return;
        }
        // Half the period costs twice as much: speed up again only if that stays well within the budget.
        self.calm = if busy * 2.0 < self.budget.busy_ratio * 0.9 { self.calm + 1 } else { 0 };
        if self.calm >= CALM_WINDOWS && self.period_ns > self.budget.period_ns {
            self.calm = 0;
            self.period_ns = (self.period_ns / 2).max(self.budget.period_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::MILLISECOND_NS;

    const BUDGET: Budget = Budget { period_ns: MILLISECOND_NS, max_period_ns: 100 * MILLISECOND_NS, busy_ratio: 0.15 };

    /// Runs one second of sweeps of `calls` calls of `call_ns` each.
    fn second(backoff: &mut Backoff, now_ns: &mut i64, calls: u32, call_ns: i64) {
        let end = *now_ns + SECOND_NS + backoff.period_ns();
        while *now_ns < end {
            for _ in 0..calls {
                backoff.call(call_ns);
            }
            backoff.sweep(*now_ns, *now_ns + i64::from(calls) * call_ns);
            *now_ns += backoff.period_ns();
        }
    }

    #[test]
    fn stays_at_its_period_within_the_budget() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        for _ in 0..10 {
            second(&mut backoff, &mut now, 8, 5_000);
        }
        assert_eq!(backoff.period_ns(), MILLISECOND_NS);
    }

    #[test]
    fn doubles_when_a_slow_driver_takes_more_than_the_budget_and_comes_back() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        second(&mut backoff, &mut now, 8, 4_000);
        // Capped at three times the usual duration, they would be 10 % of the time; they are 20 %.
        second(&mut backoff, &mut now, 8, 25_000);
        second(&mut backoff, &mut now, 8, 25_000);
        assert!(backoff.period_ns() > MILLISECOND_NS, "slow calls back off");
        for _ in 0..60 {
            second(&mut backoff, &mut now, 8, 4_000);
        }
        assert_eq!(backoff.period_ns(), MILLISECOND_NS, "and it recovers");
    }

    /// As on an H200 in a virtual machine: from 4 µs to 22 and back, at intervals.
    #[test]
    fn calls_that_slow_down_within_the_budget_are_no_reason() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        for spell in 0..20 {
            let call_ns = if spell % 2 == 0 { 4_000 } else { 22_000 };
            for _ in 0..10 {
                second(&mut backoff, &mut now, 1, call_ns);
                assert_eq!(backoff.period_ns(), MILLISECOND_NS);
            }
        }
    }

    /// Both at once: a slow period, and a job that makes calls wait for 40 ms five times a second.
    #[test]
    fn waits_within_a_slow_spell_are_no_reason() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        second(&mut backoff, &mut now, 1, 4_000);
        for sweep in 0..20_000 {
            let call_ns = if sweep % 160 == 0 { 40 * MILLISECOND_NS } else { 22_000 };
            backoff.call(call_ns);
            backoff.sweep(now, now + call_ns);
            now += call_ns.max(MILLISECOND_NS);
            assert_eq!(backoff.period_ns(), MILLISECOND_NS);
        }
    }

    #[test]
    fn a_driver_that_stands_still_for_most_calls_is_a_reason() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        second(&mut backoff, &mut now, 8, 4_000);
        for _ in 0..200 {
            (0..8).for_each(|_| backoff.call(12 * MILLISECOND_NS));
            backoff.sweep(now, now + 96 * MILLISECOND_NS);
            now += 96 * MILLISECOND_NS;
        }
        assert_eq!(backoff.period_ns(), 100 * MILLISECOND_NS);
    }

    #[test]
    fn doubles_over_the_budget_up_to_the_longest_period() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        for _ in 0..40 {
            second(&mut backoff, &mut now, 8, 12_000_000);
        }
        assert_eq!(backoff.period_ns(), 100 * MILLISECOND_NS);
    }

    #[test]
    fn one_blocked_sweep_a_second_is_no_reason() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        for _ in 0..1000 {
            backoff.call(5_000);
        }
        for _ in 0..5 {
            backoff.call(300 * MILLISECOND_NS);
            backoff.sweep(now, now + 300 * MILLISECOND_NS);
            now += 300 * MILLISECOND_NS;
            for _ in 0..700 {
                backoff.call(5_000);
                backoff.sweep(now, now + 5_000);
                now += MILLISECOND_NS;
            }
        }
        assert_eq!(backoff.period_ns(), MILLISECOND_NS);
    }

    #[test]
    fn a_job_that_makes_a_third_of_the_calls_wait_is_no_reason() {
        let (mut backoff, mut now) = (Backoff::new(BUDGET), 1);
        for _ in 0..1000 {
            backoff.call(5_000);
        }
        for sweep in 0..10_000 {
            let call_ns = if sweep % 3 == 0 { 4 * MILLISECOND_NS } else { 5_000 };
            (0..8).for_each(|gpu| backoff.call(if gpu == 0 { call_ns } else { 5_000 }));
            backoff.sweep(now, now + call_ns);
            now += call_ns.max(MILLISECOND_NS);
        }
        assert_eq!(backoff.period_ns(), MILLISECOND_NS);
    }
}
