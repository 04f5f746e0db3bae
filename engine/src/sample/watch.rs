//! The watchdog of the fast lane: it starts a new thread for the lane when a call does not return while other GPUs
//! answer.
//!
//! A call that takes long is either for a GPU that hangs, or it waits together with all others because the driver is
//! busy. After a tenth of a second the watchdog therefore doubts every GPU, and a thread for each GPU reads its memory
//! once. The first answer while the call still has not returned proves that the driver is not busy as a whole. A new
//! thread then samples the GPUs that have answered, and each further GPU from its answer on. A GPU on which no call
//! returns for `hang_after` is hung. So k GPUs that hang at once cost the others one delay, not k, and a driver that
//! blocks every call does not mark any GPU as hung.

use super::backoff::Backoff;
use super::fast::{self, FastLaneSettings};
use super::roll::RollCall;
use super::sweep::{Cause, Sampler, Stuck};
use crate::thread;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::GpuState;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The longest time between two checks of the watchdog, which also look for a stop, unless all GPUs are idle.
const WATCH_PERIOD_NS: i64 = 250 * MILLISECOND_NS;
/// The same while nothing runs on any GPU.
const IDLE_WATCH_PERIOD_NS: i64 = SECOND_NS;
/// How long the watchdog waits before it replaces the fast lane's thread. If the whole driver was busy, all calls
/// return at about the same time, in any order: the stuck call may return right after another GPU has answered.
const GRACE_NS: i64 = 2 * MILLISECOND_NS;

/// Watches the fast lane until `stop`. A GPU whose call does not return is skipped, and a new thread samples the
/// others. The old thread is never joined; when its call returns, it finds itself replaced and ends.
pub fn watch(sampler: &Sampler, lane: FastLaneSettings, roll: &RollCall, stop: &Arc<AtomicBool>) {
    roll.i_am_the_watchdog();
    let period_ns = WATCH_PERIOD_NS.min(lane.hang_after_ns / 4);
    let mut watchdog = Watchdog::new(sampler, lane.hang_after_ns, roll);
    // The successor for which no thread could be started yet.
    let mut waiting: Option<Sampler> = None;
    while !stop.load(Ordering::Relaxed) {
        // The memory of idle GPUs does not change, so a late check loses nothing, unless a call hangs just as a job starts on
        // another GPU. Sampling of that GPU then continues up to a second later.
        let wait_ns = if sampler.gpus().iter().all(GpuState::is_idle) {
            IDLE_WATCH_PERIOD_NS.min(lane.hang_after_ns)
        } else {
            period_ns
        };
        sampler.clock().wait_until(sampler.clock().now_ns() + wait_ns.max(1));
        let now_ns = sampler.clock().now_ns();
        if let Some(successor) = waiting.take() {
            sampler.stats().account_missed(now_ns, Cause::Late);
            waiting = start(successor, lane, stop);
            // The pause keeps a thread that is unparked repeatedly from retrying without end.
            sampler.clock().sleep_until(now_ns + period_ns);
            continue;
        }
        let Some(stuck) = watchdog.look(now_ns) else { continue };
        sampler.clock().sleep_until(now_ns + GRACE_NS);
        if sampler.stats().is_stuck(stuck) {
            let successor = watchdog.replace(stuck);
            waiting = start(successor, lane, stop);
        }
    }
    sampler.aside().join();
}

/// Starts a thread for a sampler. Returns the sampler if the system cannot create a thread.
fn start(sampler: Sampler, lane: FastLaneSettings, stop: &Arc<AtomicBool>) -> Option<Sampler> {
    let (runner, stop) = (sampler.share(), Arc::clone(stop));
    let backoff = Backoff::resumed(lane.budget, sampler.stats().full_period_ns.load(Ordering::Relaxed));
    let error = thread::spawn("hw-fast", move || fast::run(runner, backoff, lane, &stop)).err()?;
    tracing::error!(%error, "cannot start a new sampling thread; retrying");
    Some(sampler)
}

/// The watchdog's state about calls that do not return.
struct Watchdog<'a> {
    sampler: &'a Sampler,
    roll: &'a RollCall,
    hang_after_ns: i64,
    /// The call that caused the last roll call, and the devices doubted because of it.
    called: Option<(Stuck, Vec<bool>)>,
    /// The progress of the slower lanes' calls on each unit (odd during a call), and when that number was first seen.
    own: Vec<(u64, i64)>,
    /// Since when a call of a replaced thread has been in progress, by the device's position.
    replaced_since_ns: Vec<Option<i64>>,
}

impl<'a> Watchdog<'a> {
    fn new(sampler: &'a Sampler, hang_after_ns: i64, roll: &'a RollCall) -> Self {
        let (own, replaced_since_ns) = (vec![(0, 0); roll.units().all().len()], vec![None; sampler.gpus().len()]);
        Self { sampler, roll, hang_after_ns, called: None, own, replaced_since_ns }
    }

    /// Checks every call in progress. Returns the fast lane's call if another thread should continue without it.
    fn look(&mut self, now_ns: i64) -> Option<Stuck> {
        self.note_own_calls(now_ns);
        self.relieve(now_ns);
        self.hang_silent(now_ns);
        let Some(stuck) = self.roll.stuck(now_ns) else {
            self.called = None;
            return None;
        };
        if self.called.as_ref().is_none_or(|(called, _)| *called != stuck) {
            self.call_roll(stuck, now_ns);
        }
        if stuck.since_ns <= now_ns - self.hang_after_ns {
            self.sampler.gpus().get(stuck.gpu)?.hang();
            return Some(stuck);
        }
        self.has_an_answer(stuck).then_some(stuck)
    }

    /// Records the call that is in progress on each unit.
    fn note_own_calls(&mut self, now_ns: i64) {
        for (unit, own) in self.roll.units().all().iter().zip(&mut self.own) {
            let progress = unit.calls.progress();
            if own.0 != progress {
                *own = (progress, now_ns);
            }
        }
    }

    /// Gives each other GPU a thread of its own if the slower lanes' common thread has been in the turn of one for too long.
    fn relieve(&self, now_ns: i64) {
        let before_ns = now_ns - self.roll.stuck_after_ns();
        if self.roll.units().in_turn_since_ns().is_some_and(|since_ns| since_ns <= before_ns) {
            self.roll.units().separate(now_ns);
        }
    }

    /// Since when a call of the slower lanes on a device's unit has been in progress, if one is.
    fn own_since_ns(&self, position: usize) -> Option<i64> {
        let (progress, since_ns) = *self.own.get(self.roll.units().of(position)?)?;
        (progress % 2 == 1).then_some(since_ns)
    }

    /// Doubts every GPU that a thread of the slower lanes can check. Skips a GPU if a slower lane's call on it began long before
    /// the stuck call: that thread cannot check the GPU, and the fast lane has read it since.
    fn call_roll(&mut self, stuck: Stuck, now_ns: i64) {
        let long_before_ns = stuck.since_ns - self.roll.stuck_after_ns();
        let is_doubted = |(position, gpu): (usize, &GpuState)| {
            let can_answer = self.own_since_ns(position).is_none_or(|since_ns| since_ns > long_before_ns);
            let is_doubted = gpu.is_sampled() && can_answer;
            if is_doubted {
                gpu.doubt();
            }
            is_doubted
        };
        let doubted = self.sampler.gpus().iter().enumerate().map(is_doubted).collect();
        self.called = Some((stuck, doubted));
        self.roll.call(now_ns);
    }

    /// Whether a doubted GPU has answered, other than the one whose call does not return.
    fn has_an_answer(&self, stuck: Stuck) -> bool {
        let Some((_, doubted)) = &self.called else { return false };
        let gpus = self.sampler.gpus().iter().zip(doubted).enumerate();
        gpus.filter(|(position, (_, doubted))| **doubted && *position != stuck.gpu)
            .any(|(_, (gpu, _))| gpu.is_sampled() && !gpu.is_left_alone())
    }

    /// Marks GPUs as hung that are skipped or set aside and on which one call has been in progress for too long.
    fn hang_silent(&mut self, now_ns: i64) {
        let before_ns = now_ns - self.hang_after_ns;
        for (position, gpu) in self.sampler.gpus().iter().enumerate() {
            let own_ns = self.own_since_ns(position).filter(|_| gpu.is_doubted());
            let replaced_ns = &mut self.replaced_since_ns[position];
            // A GPU is set aside only after the replaced thread's call has returned. A call in progress is its own thread's.
            let aside = self.sampler.aside();
            *replaced_ns = replaced_ns.filter(|_| gpu.is_in_fast_call() && !aside.has(position));
            let aside_ns = aside.call_since_ns(position);
            let mut since_ns = own_ns.into_iter().chain(*replaced_ns).chain(aside_ns);
            if gpu.is_sampled() && since_ns.any(|since_ns| since_ns <= before_ns) {
                gpu.hang();
            }
        }
    }

    /// The successor of the sampler whose call does not return. Counts the deadlines until now as missed.
    fn replace(&mut self, stuck: Stuck) -> Sampler {
        if let Some(since_ns) = self.replaced_since_ns.get_mut(stuck.gpu) {
            *since_ns = Some(stuck.since_ns);
        }
        self.called = None;
        let successor = self.sampler.successor();
        successor.stats().account_missed(self.sampler.clock().now_ns(), Cause::Driver);
        successor
    }
}

#[cfg(test)]
mod tests;
