//! The fast lane's loops: paced by the clock for live sources, by recorded times for a recording.

use super::backoff::{Backoff, Budget};
use super::deadlines::Deadlines;
use super::sweep::{Cause, Sampler, Ticked};
use crate::source::NextTick;
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};

/// The longest time from one tick of a replay to the next: the period of the join over live readings.
const REPLAY_PERIOD_NS: i64 = 100 * MILLISECOND_NS;

/// How the fast lane runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FastLane {
    /// Its period, and its limits.
    pub budget: Budget,
    /// The period of GPUs on which nothing runs, nanoseconds; `None` for the full rate.
    pub idle_period_ns: Option<i64>,
    /// How long a call may take before sampling continues without its GPU, nanoseconds.
    pub hang_after_ns: i64,
}

/// Samples at absolute deadlines until `stop` or until another thread has taken over.
pub fn run_paced(sampler: Sampler, lane: FastLane, stop: &AtomicBool) {
    run(sampler, Backoff::new(lane.budget), lane.idle_period_ns, stop);
}

/// As [`run_paced`], starting at the period of `backoff`. The whole hot path is here and in [`Sampler::tick`].
pub(super) fn run(mut sampler: Sampler, mut backoff: Backoff, idle_period_ns: Option<i64>, stop: &AtomicBool) {
    // Without this the kernel may delay each wake-up by 50 µs. Only sandboxes refuse it, at the cost of those 50 µs.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let started_ns = sampler.clock().now_ns();
    sampler.set_periods(idle_period_ns, backoff.period_ns());
    let mut period_ns = sampler.period_ns();
    let mut deadlines = Deadlines::starting(started_ns, period_ns);
    sampler.stats().accounted_ns.store(started_ns, Ordering::Relaxed);
    publish(&sampler, period_ns, backoff.period_ns());
    while !stop.load(Ordering::Relaxed) {
        sampler.clock().sleep_until(deadlines.next_ns());
        let begin_ns = sampler.clock().now_ns();
        let ticked = sampler.tick(begin_ns, |call_ns| backoff.call(call_ns));
        if ticked == Ticked::Replaced {
            return;
        }
        let end_ns = sampler.end_ns();
        let outcome = deadlines.taken(begin_ns, end_ns);
        let stats = sampler.stats();
        match ticked {
            Ticked::Taken => {
                stats.take(outcome.lateness_ns);
                stats.miss(Cause::Late, outcome.missed_late);
                stats.miss(Cause::Driver, outcome.missed_driver);
            }
            Ticked::Blocked => stats.miss(Cause::Driver, 1 + outcome.missed_late + outcome.missed_driver),
            Ticked::Nothing | Ticked::Replaced => {}
        }
        let backed_off = backoff.sweep(begin_ns, end_ns);
        if let Some(full_ns) = backed_off {
            sampler.set_full(full_ns);
        }
        if backed_off.is_some() || sampler.period_ns() != period_ns {
            period_ns = sampler.period_ns();
            if backed_off.is_some() {
                deadlines.set_period(period_ns);
            } else {
                // GPUs that became idle, or one that no longer is: what was due until now was due at the old period.
                deadlines = Deadlines::starting(end_ns, period_ns);
            }
            publish(&sampler, period_ns, backoff.period_ns());
        }
        sampler.stats().accounted_ns.store(deadlines.next_ns() - period_ns, Ordering::Relaxed);
    }
}

fn publish(sampler: &Sampler, period_ns: i64, full_ns: i64) {
    sampler.stats().period_ns.store(period_ns, Ordering::Relaxed);
    sampler.stats().full_period_ns.store(full_ns, Ordering::Relaxed);
}

/// Samples a recording at its own times until its end, with `clock` set to each. Calls `before` with each time before
/// memory is read, and `after` after it: there the daemon delivers the recorded annotations and advances the join, so
/// that the speed of a replay does not change the results. Returns whether the whole recording was played.
pub fn run_replay(
    mut sampler: Sampler,
    clock: &Manual,
    period_ns: i64,
    stop: &AtomicBool,
    mut before: impl FnMut(i64),
    mut after: impl FnMut(i64),
) -> bool {
    let mut begun = false;
    while !stop.load(Ordering::Relaxed) {
        let at_ns = match sampler.source().next_tick(clock.now_ns()) {
            // Long stretches without a change still get regular ticks, for the work that follows each tick.
            NextTick::At(at_ns) if begun => at_ns.min(clock.now_ns() + REPLAY_PERIOD_NS),
            NextTick::At(at_ns) => at_ns,
            NextTick::Periodic => clock.now_ns() + period_ns,
            NextTick::End => return true,
        };
        before(at_ns);
        clock.advance_to(at_ns);
        sampler.tick(at_ns, |_| ());
        begun = true;
        after(at_ns);
    }
    false
}
