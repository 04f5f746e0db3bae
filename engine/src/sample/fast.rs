//! The fast lane's loops: paced by the clock for live sources, by recorded times for a recording.

use super::backoff::{Backoff, Budget};
use super::deadlines::Deadlines;
use super::sweep::{Cause, Sampler, Ticked};
use super::{alone, aside};
use crate::thread;
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual};
use highwater_core::source::NextTick;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The longest time from one tick of a replay to the next: the period of the join over live readings.
const REPLAY_PERIOD_NS: i64 = 100 * MILLISECOND_NS;

/// How the fast lane runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FastLaneSettings {
    /// Its period, and its limits.
    pub budget: Budget,
    /// The period of GPUs on which nothing runs, nanoseconds; `None` for the full rate.
    pub idle_period_ns: Option<i64>,
    /// How long a call may take before its GPU counts as hung, nanoseconds. GPUs that answer are sampled again much
    /// sooner.
    pub hang_after_ns: i64,
}

/// Samples at absolute deadlines until `stop` or until another thread has taken over.
pub fn run_paced(sampler: Sampler, lane: FastLaneSettings, stop: &Arc<AtomicBool>) {
    run(sampler, Backoff::new(lane.budget), lane, stop);
}

/// As [`run_paced`], starting at the period of `backoff`. The whole hot path is here and in [`Sampler::tick`].
pub(super) fn run(mut sampler: Sampler, mut backoff: Backoff, lane: FastLaneSettings, stop: &Arc<AtomicBool>) {
    thread::wake_on_time();
    let started_ns = sampler.clock().now_ns();
    sampler.set_periods(lane.idle_period_ns, backoff.period_ns());
    let mut period_ns = sampler.period_ns();
    let mut deadlines = Deadlines::starting(started_ns, period_ns);
    sampler.stats().accounted_ns.store(started_ns, Ordering::Relaxed);
    publish(&sampler, period_ns, backoff.period_ns());
    while !stop.load(Ordering::Relaxed) {
        sampler.clock().sleep_until(deadlines.next_ns());
        let begin_ns = sampler.clock().now_ns();
        let mut observed = false;
        let ticked = sampler.tick(begin_ns, |call_ns| {
            observed = true;
            backoff.call(call_ns);
        });
        // A replaced thread does this too: the call that it waited for may have set a GPU aside.
        if sampler.has_newly_aside() && !stop.load(Ordering::Relaxed) {
            set_aside(&mut sampler, lane, stop);
        }
        if ticked == Ticked::Replaced {
            break;
        }
        let end_ns = sampler.end_ns();
        let outcome = deadlines.taken(begin_ns, end_ns);
        match ticked {
            Ticked::Taken => {
                sampler.count(outcome.lateness_ns);
                sampler.stats().miss(Cause::Late, outcome.missed_late);
                sampler.stats().miss(Cause::Driver, outcome.missed_driver);
            }
            Ticked::Blocked => {
                sampler.stats().miss(Cause::Driver, 1 + outcome.missed_late + outcome.missed_driver);
            }
            Ticked::Nothing | Ticked::Replaced => {}
        }
        // The back-off needs all durations so far: it runs after they were observed, or after a tick without calls.
        let may_judge = observed || ticked != Ticked::Taken;
        let backed_off = if may_judge { backoff.sweep(begin_ns, end_ns) } else { None };
        if backed_off.is_some() || sampler.period_ns() != period_ns {
            if let Some(full_ns) = backed_off {
                sampler.set_full(full_ns);
            }
            period_ns = sampler.period_ns();
            if backed_off.is_some() {
                deadlines.set_period(period_ns);
            } else {
                // All GPUs became idle, or one no longer is. Deadlines until now belong to the old period.
                deadlines = Deadlines::starting(end_ns, period_ns);
            }
            publish(&sampler, period_ns, backoff.period_ns());
        }
        sampler.stats().accounted_ns.store(deadlines.next_ns() - period_ns, Ordering::Relaxed);
    }
    sampler.count_held(|_| ());
}

/// Starts a thread for each GPU that the last sweep set aside.
#[cold]
fn set_aside(sampler: &mut Sampler, lane: FastLaneSettings, stop: &Arc<AtomicBool>) {
    let newly = sampler.take_newly_aside();
    for position in (0..sampler.gpus().len()).filter(|position| aside::has(newly, *position)) {
        alone::start(sampler, position, lane.idle_period_ns, stop);
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
    let is_whole = loop {
        if stop.load(Ordering::Relaxed) {
            break false;
        }
        let at_ns = match sampler.source().next_tick(clock.now_ns()) {
            // Long stretches without a change still get regular ticks, for the work that follows each tick.
            NextTick::At(at_ns) if begun => at_ns.min(clock.now_ns() + REPLAY_PERIOD_NS),
            NextTick::At(at_ns) => at_ns,
            NextTick::Periodic => clock.now_ns() + period_ns,
            NextTick::End => break true,
        };
        before(at_ns);
        clock.advance_to(at_ns);
        sampler.tick(at_ns, |_| ());
        begun = true;
        after(at_ns);
    };
    sampler.count_held(|_| ());
    is_whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Node, Periods};
    use crate::sample::TickStats;
    use highwater_core::clock::SECOND_NS;
    use highwater_core::gpu::{Device, GpuState};
    use highwater_core::histogram::Histogram;
    use highwater_core::ring;
    use highwater_core::source::{Call, Error, Source};
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicU64;

    /// Answers for two GPUs. Each call takes `call_ns` nanoseconds.
    struct Prompt {
        devices: Vec<Device>,
        clock: Arc<Stopping>,
        call_ns: i64,
    }

    impl Source for Prompt {
        fn description(&self) -> String {
            "a prompt driver".to_owned()
        }

        fn devices(&self) -> &[Device] {
            &self.devices
        }

        fn memory_used(&self, _gpu: usize, _at_ns: i64) -> Result<u64, Error> {
            self.clock.clock.advance_to(self.clock.now_ns() + self.call_ns);
            Ok(1 << 30)
        }
    }

    /// A clock on which waiting takes no time. It stops the loop once `waits` has counted down to zero.
    struct Stopping {
        clock: Manual,
        waits: AtomicU64,
        stop: Arc<AtomicBool>,
        stats: OnceLock<Arc<TickStats>>,
        /// When this number of waits is left, all GPUs are left alone from then on.
        blocked: u64,
        gpus: OnceLock<Arc<[GpuState]>>,
        /// The most ticks that were counted and their lateness was not.
        most_held: AtomicU64,
    }

    impl Clock for Stopping {
        fn now_ns(&self) -> i64 {
            self.clock.now_ns()
        }

        fn unix_shift_ns(&self) -> i64 {
            0
        }

        fn sleep_until(&self, at_ns: i64) {
            let stats = self.stats.get().expect("set before the loop");
            let held = stats.taken.load(Ordering::Relaxed) - all(&stats.lateness);
            self.most_held.fetch_max(held, Ordering::Relaxed);
            self.clock.advance_to(at_ns);
            let left = self.waits.fetch_sub(1, Ordering::Relaxed);
            self.stop.store(left == 1, Ordering::Relaxed);
            if left == self.blocked {
                self.gpus.get().expect("set before the loop").iter().for_each(GpuState::doubt);
            }
        }
    }

    /// How many durations are counted.
    fn all(histogram: &Histogram) -> u64 {
        histogram.counts().cumulative.last().copied().unwrap_or(0)
    }

    /// Runs `ticks` ticks. Returns the node, and the most ticks whose lateness was not counted while it ran.
    fn run_ticks(ticks: u64, period_ns: i64) -> (Node, u64) {
        run_ticks_of(ticks, period_ns, 0, 0)
    }

    /// The same with calls that take so long, nanoseconds. In the last `blocked` ticks all GPUs are left alone.
    fn run_ticks_of(ticks: u64, period_ns: i64, call_ns: i64, blocked: u64) -> (Node, u64) {
        let stop = Arc::new(AtomicBool::new(false));
        let clock = Arc::new(Stopping {
            clock: Manual::at(SECOND_NS),
            waits: AtomicU64::new(ticks),
            stop: Arc::clone(&stop),
            stats: OnceLock::new(),
            blocked,
            gpus: OnceLock::new(),
            most_held: AtomicU64::new(0),
        });
        let device = |gpu: usize| Device { uuid: format!("GPU-{gpu}"), ..Device::default() };
        let devices = (0..2).map(device).collect();
        let driver = Arc::new(Prompt { devices, clock: Arc::clone(&clock), call_ns });
        let config = ring::Config { retention_ns: 10 * SECOND_NS, max_bytes: 1 << 16, resolution_ns: 1_000 };
        let (node, writers) =
            Node::new(driver, Arc::clone(&clock) as _, config, Periods::default(), None).expect("rings");
        clock.stats.set(Arc::clone(&node.ticks)).expect("once");
        assert!(clock.gpus.set(Arc::clone(&node.gpus)).is_ok(), "once");
        let budget = Budget { period_ns, max_period_ns: SECOND_NS, busy_ratio: 0.5 };
        let lane = FastLaneSettings { budget, idle_period_ns: None, hang_after_ns: SECOND_NS };
        run_paced(node.sampler(writers), lane, &stop);
        (node, clock.most_held.load(Ordering::Relaxed))
    }

    #[test]
    fn every_tick_and_every_call_has_been_counted_when_the_lane_ends() {
        for ticks in [1, 63, 200] {
            let (node, _) = run_ticks(ticks, MILLISECOND_NS);
            let [taken, due] = [&node.ticks.taken, &node.ticks.due].map(|count| count.load(Ordering::Relaxed));
            let counted = (taken, due, all(&node.ticks.lateness), all(node.calls.durations(Call::MemoryInfo)));
            assert_eq!(counted, (ticks, ticks, ticks, 2 * ticks));
        }
    }

    #[test]
    fn every_missed_tick_is_counted_with_its_cause() {
        let stats = TickStats::new(MILLISECOND_NS);
        [(Cause::Late, 1), (Cause::Driver, 1), (Cause::Driver, 0), (Cause::Driver, 2)]
            .into_iter()
            .for_each(|(cause, count)| stats.miss(cause, count));
        let counted = [&stats.missed_late, &stats.missed_driver, &stats.due].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counted, [1, 3, 4]);
    }

    #[test]
    fn a_driver_that_takes_most_of_the_time_is_asked_less_often() {
        let period_ns = |ticks, call_ns, blocked| {
            run_ticks_of(ticks, MILLISECOND_NS, call_ns, blocked).0.ticks.full_period_ns.load(Ordering::Relaxed)
        };
        assert_eq!(period_ns(1_500, 200_000, 0), MILLISECOND_NS, "40 % of the time, of at most 50");
        assert!(period_ns(1_500, 400_000, 0) > MILLISECOND_NS);
        assert_eq!(period_ns(10_000, 400_000, 8_500), MILLISECOND_NS, "seconds without a call are calm ones");
    }

    #[test]
    fn no_duration_waits_for_long() {
        assert_eq!(run_ticks(500, MILLISECOND_NS).1, 32, "until there are 64 calls");
        assert_eq!(run_ticks(500, 10 * MILLISECOND_NS).1, 5, "until 50 ms are over");
        assert_eq!(run_ticks(20, 100 * MILLISECOND_NS).1, 1, "that of the last tick, at an idle GPU's period");
    }
}
