//! The one timeline that every part shares: nanoseconds of Unix time that never step.
//!
//! Readings and annotations are joined by time, so a step of the system clock (NTP, suspend, an operator's
//! `date -s`) must not tear them apart. [`Live`] therefore runs on `CLOCK_MONOTONIC` and adds the offset to Unix
//! time that it saw at its start; what jobs send in Unix time is converted with the offset of the moment. Replays
//! and tests use [`Manual`], so that nothing below the daemon ever asks the system for the time.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Nanoseconds in one second.
pub const SECOND_NS: i64 = 1_000_000_000;
/// Nanoseconds in one millisecond.
pub const MILLISECOND_NS: i64 = 1_000_000;
/// 2001-09-09 as nanoseconds since 1970. A time from here on is a date: a clock that began with a process or boot never gets this far.
pub const A_DATE_NS: i64 = 1_000_000_000_000_000_000;

/// Reads the time of the shared timeline, in nanoseconds since the Unix epoch.
pub trait Clock: Send + Sync {
    /// Now, on the timeline of readings: it never goes back.
    fn now_ns(&self) -> i64;

    /// What to add to a time of the timeline to get the system's Unix time of this moment: 0 until the system
    /// clock is stepped.
    fn unix_shift_ns(&self) -> i64;

    /// Waits until the timeline has reached `at_ns`; returns at once where it has.
    fn sleep_until(&self, at_ns: i64);

    /// Like [`sleep_until`](Self::sleep_until), but also returns when the thread is unparked, and possibly earlier for no reason.
    fn wait_until(&self, at_ns: i64) {
        self.sleep_until(at_ns);
    }
}

/// The running system's clock.
#[derive(Debug)]
pub struct Live {
    epoch_ns: i64,
}

impl Live {
    /// A timeline that agrees with the system's Unix time now.
    #[must_use]
    pub fn start() -> Self {
        Self { epoch_ns: unix_now_ns() - monotonic_now_ns() }
    }

    /// The moment of `CLOCK_MONOTONIC` that a time of this timeline stands for.
    #[must_use]
    pub fn to_monotonic_ns(&self, at_ns: i64) -> i64 {
        at_ns - self.epoch_ns
    }
}

impl Clock for Live {
    fn now_ns(&self) -> i64 {
        monotonic_now_ns() + self.epoch_ns
    }

    fn unix_shift_ns(&self) -> i64 {
        // The two clocks are read one after the other, and the thread may be preempted in between, so the narrowest of three
        // tries counts. A shift below a millisecond is a measurement error, not a step.
        let tries = (0..3).map(|_| {
            let (before, unix, after) = (monotonic_now_ns(), unix_now_ns(), monotonic_now_ns());
            (after - before, unix - before - self.epoch_ns)
        });
        let shift = tries.min().map_or(0, |(_, shift)| shift);
        if shift.abs() < MILLISECOND_NS { 0 } else { shift }
    }

    fn sleep_until(&self, at_ns: i64) {
        let at_ns = self.to_monotonic_ns(at_ns).max(0);
        let until = rustix::time::Timespec { tv_sec: at_ns / SECOND_NS, tv_nsec: at_ns % SECOND_NS };
        while rustix::thread::clock_nanosleep_absolute(rustix::time::ClockId::Monotonic, &until)
            == Err(rustix::io::Errno::INTR)
        {}
    }

    fn wait_until(&self, at_ns: i64) {
        let left_ns = u64::try_from(at_ns.saturating_sub(self.now_ns())).unwrap_or(0);
        if left_ns > 0 {
            thread::park_timeout(Duration::from_nanos(left_ns));
        }
    }
}

/// A clock that is set by hand: replays and tests.
#[derive(Debug, Default)]
pub struct Manual {
    now_ns: AtomicI64,
    unix_shift_ns: AtomicI64,
}

impl Manual {
    /// A clock that stands at `now_ns`.
    #[must_use]
    pub fn at(now_ns: i64) -> Self {
        Self { now_ns: AtomicI64::new(now_ns), unix_shift_ns: AtomicI64::new(0) }
    }

    /// Sets the system's clock to `unix_shift_ns` after the timeline, as an operator, NTP or the end of a suspension does.
    pub fn set_unix_shift_ns(&self, unix_shift_ns: i64) {
        self.unix_shift_ns.store(unix_shift_ns, Ordering::Release);
    }

    /// Moves the clock; it never goes back.
    pub fn advance_to(&self, now_ns: i64) {
        self.now_ns.fetch_max(now_ns, Ordering::Release);
    }
}

impl Clock for Manual {
    fn now_ns(&self) -> i64 {
        self.now_ns.load(Ordering::Acquire)
    }

    fn unix_shift_ns(&self) -> i64 {
        self.unix_shift_ns.load(Ordering::Acquire)
    }

    /// Advances the clock instead of waiting.
    fn sleep_until(&self, at_ns: i64) {
        self.advance_to(at_ns);
    }
}

fn monotonic_now_ns() -> i64 {
    read(rustix::time::ClockId::Monotonic)
}

fn unix_now_ns() -> i64 {
    read(rustix::time::ClockId::Realtime)
}

fn read(clock: rustix::time::ClockId) -> i64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec * SECOND_NS + now.tv_nsec
}

/// Waits for a while by the system's clock, or until `stop` is set and the thread is unparked.
pub fn park_for(duration: Duration, stop: &AtomicBool) {
    let until = Instant::now() + duration;
    while !stop.load(Ordering::Relaxed) && Instant::now() < until {
        thread::park_timeout(until.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_live_timeline_is_unix_time_and_goes_with_the_monotonic_clock() {
        let live = Live::start();
        // What lies between two looks is far less than what any step of a clock would be.
        let agrees = |one: i64, other: i64| (one - other).abs() < SECOND_NS;
        assert!(agrees(live.now_ns(), unix_now_ns()) && live.now_ns() > 1_700_000_000 * SECOND_NS);
        assert!(agrees(live.to_monotonic_ns(live.now_ns()), monotonic_now_ns()));
        assert_eq!(live.unix_shift_ns(), 0);
        for stepped_ns in [5 * SECOND_NS, -5 * SECOND_NS] {
            let stepped = Live { epoch_ns: live.epoch_ns - stepped_ns };
            assert!(agrees(stepped.unix_shift_ns(), stepped_ns), "{}", stepped.unix_shift_ns());
        }
    }

    #[test]
    fn sleeping_ends_when_the_timeline_is_there_and_not_before() {
        let live = Live::start();
        for ahead_ns in [2 * MILLISECOND_NS, -SECOND_NS] {
            let at_ns = live.now_ns() + ahead_ns;
            live.sleep_until(at_ns);
            assert!(live.now_ns() >= at_ns);
            live.wait_until(at_ns);
        }
        live.sleep_until(i64::MIN / 2);
    }

    #[test]
    fn a_clock_that_is_set_by_hand_never_goes_back() {
        let manual = Manual::at(5);
        assert_eq!((manual.now_ns(), manual.unix_shift_ns()), (5, 0));
        for (to_ns, then_ns) in [(9, 9), (7, 9)] {
            manual.advance_to(to_ns);
            assert_eq!(manual.now_ns(), then_ns);
        }
        manual.sleep_until(12);
        assert_eq!(manual.now_ns(), 12);
        manual.wait_until(15);
        assert_eq!(manual.now_ns(), 15);
    }

    #[test]
    fn parking_ends_with_its_time_or_when_unparked() {
        park_for(Duration::from_secs(3600), &AtomicBool::new(true));
        let begun = Instant::now();
        park_for(Duration::from_millis(2), &AtomicBool::new(false));
        assert!(begun.elapsed() >= Duration::from_millis(2));
    }
}
