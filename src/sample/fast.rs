//! The fast lane's loops: paced by the clock for live sources, by its own times for a recording; and the watchdog
//! that gives the lane a new thread when a call does not come back.

use super::backoff::{Backoff, Budget};
use super::deadlines::Deadlines;
use super::latest::Health;
use super::sweep::{Cause, Sampler, Ticked};
use crate::clock::{Clock, MILLISECOND_NS, Manual};
use crate::source::NextTick;
use crate::thread;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Periods without a good reading after which nothing is known: one lost tick is held over, two are a gap.
const GAP_AFTER_PERIODS: i64 = 3;
/// How often the watchdog looks at least: for a stop too.
const WATCH_PERIOD_NS: i64 = 250 * MILLISECOND_NS;

/// The longest time from one tick of a replay to the next: the period of the join over live readings.
const REPLAY_PERIOD_NS: i64 = 100 * MILLISECOND_NS;

/// How the fast lane runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FastLane {
    /// Its period, and what it may cost.
    pub budget: Budget,
    /// How long a call may take before the other GPUs go on without it, nanoseconds.
    pub hang_after_ns: i64,
}

/// Samples at absolute deadlines until `stop` or until another thread has taken over. The whole hot path is here and
/// in [`Sampler::tick`].
pub fn run_paced(mut sampler: Sampler, budget: Budget, stop: &AtomicBool) {
    // Without this the kernel may delay each wake-up by 50 µs. Refused only by sandboxes, which cost those 50 µs.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let mut backoff = Backoff::new(budget);
    let started_ns = sampler.clock().now_ns();
    let mut deadlines = Deadlines::starting(started_ns, budget.period_ns);
    sampler.stats().accounted_ns.store(started_ns, Ordering::Relaxed);
    set_period(&mut sampler, budget.period_ns);
    while !stop.load(Ordering::Relaxed) {
        sampler.clock().sleep_until(deadlines.next_ns());
        let begin_ns = sampler.clock().now_ns();
        let ticked = sampler.tick(begin_ns, |call_ns| backoff.call(call_ns));
        if ticked == Ticked::Replaced {
            return;
        }
        let end_ns = sampler.clock().now_ns();
        let outcome = deadlines.taken(begin_ns, end_ns);
        let stats = sampler.stats();
        if ticked == Ticked::Taken {
            stats.take(outcome.lateness_ns);
            stats.miss(Cause::Late, outcome.missed_late);
            stats.miss(Cause::Driver, outcome.missed_driver);
        }
        stats.accounted_ns.store(deadlines.next_ns() - backoff.period_ns(), Ordering::Relaxed);
        if let Some(period_ns) = backoff.sweep(begin_ns, end_ns) {
            deadlines.set_period(period_ns);
            set_period(&mut sampler, period_ns);
        }
    }
}

fn set_period(sampler: &mut Sampler, period_ns: i64) {
    sampler.set_gap_after(GAP_AFTER_PERIODS * period_ns);
    sampler.stats().period_ns.store(period_ns, Ordering::Relaxed);
}

/// Samples a recording at its own times until its end, with `clock` set to each. `before` is called with each time
/// before memory is read at it, `after` when it has been: the daemon delivers the recorded annotations and advances
/// the join there, so that the speed of a replay changes no result. Returns whether the recording was played whole.
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
            // Where nothing changes for long, time passes all the same, for whoever looks at it after each tick.
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

/// Watches the fast lane until `stop`: a GPU whose call has not come back for too long is set aside, and a new thread
/// samples the others. The old one is never joined; when its call returns it finds itself replaced and ends.
pub fn watch(sampler: &Sampler, lane: FastLane, stop: &Arc<AtomicBool>) {
    let period_ns = WATCH_PERIOD_NS.min(lane.hang_after_ns / 4);
    let mut looked_ns = sampler.clock().now_ns();
    // The successor that no thread could be started for yet.
    let mut waiting: Option<Sampler> = None;
    while !stop.load(Ordering::Relaxed) {
        looked_ns = sampler.clock().now_ns().max(looked_ns + 1);
        sampler.clock().sleep_until(looked_ns + period_ns);
        let now_ns = sampler.clock().now_ns();
        if let Some(successor) = waiting.take() {
            sampler.stats().account_missed(now_ns, Cause::Late);
            waiting = start(successor, lane, stop);
            continue;
        }
        let Some(stuck) = sampler.stats().stuck_since(now_ns - lane.hang_after_ns) else { continue };
        let Some(gpu) = sampler.gpus().get(stuck.gpu) else { continue };
        gpu.set_health(Health::Hung);
        if !sampler.stats().is_stuck(stuck) {
            // It came back between the two looks; whether its thread saw the mark is not known.
            gpu.lose_if_hung();
            continue;
        }
        let successor = sampler.successor();
        sampler.stats().account_missed(now_ns, Cause::Driver);
        waiting = start(successor, lane, stop);
    }
}

/// Starts a thread for a sampler, and gives it back where the system has none to give.
fn start(sampler: Sampler, lane: FastLane, stop: &Arc<AtomicBool>) -> Option<Sampler> {
    let (runner, stop) = (sampler.share(), Arc::clone(stop));
    let error = thread::spawn("hw-fast", move || run_paced(runner, lane.budget, &stop)).err()?;
    tracing::error!(%error, "cannot start a new sampling thread; it is tried again");
    Some(sampler)
}
