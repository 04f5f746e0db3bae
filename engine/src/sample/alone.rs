//! The thread of a GPU that is set aside: it reads the GPU's memory as often as its calls allow.
//!
//! Enters: who is set [aside](super::aside). Leaves: readings, like those of the fast lane. It ends when the GPU comes back to
//! the fast lane, or does not answer.

use super::aside::LONG_NS;
use super::sweep::Sampler;
use crate::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of long calls in a row from which on the thread pauses after each call for as long as the call took.
const HABIT_CALLS: u32 = 8;

/// Starts a thread for the GPU at this position, which was set aside.
pub(super) fn start(sampler: &Sampler, position: usize, idle_ns: Option<i64>, stop: &Arc<AtomicBool>) {
    let (mut reader, stop, now_ns) = (sampler.share(), Arc::clone(stop), sampler.clock().now_ns());
    let aside = sampler.aside();
    let patience_ns = aside.start_patience_ns(position, now_ns);
    let device = &sampler.gpus()[position].device;
    tracing::warn!(
        gpu = device.index,
        uuid = device.uuid,
        "calls on the GPU take long; a thread of its own reads its memory, so that the others need not wait"
    );
    match thread::spawn("hw-aside", move || run(&mut reader, position, patience_ns, idle_ns, &stop)) {
        Ok(thread) => aside.keep(thread),
        Err(error) => {
            aside.end(position, now_ns);
            tracing::error!(%error, "cannot start a thread for the GPU; the other GPUs wait for its calls");
        }
    }
}

/// Reads the memory of a GPU that is aside until `stop`, until the GPU is no longer sampled, or until its calls have
/// been prompt for `patience_ns`.
fn run(sampler: &mut Sampler, position: usize, patience_ns: i64, idle_ns: Option<i64>, stop: &AtomicBool) {
    thread::wake_on_time();
    let mut pace = Pace::new(sampler.clock().now_ns());
    while !stop.load(Ordering::Relaxed) && sampler.gpus()[position].is_sampled() {
        let at_ns = sampler.clock().now_ns();
        let period_ns = sampler.tick_aside(position, at_ns, idle_ns, pace.usual_ns());
        let end_ns = sampler.clock().now_ns();
        if pace.called(at_ns, end_ns) >= patience_ns {
            break;
        }
        sampler.clock().sleep_until(pace.next_ns(period_ns, end_ns));
    }
    sampler.end_aside(position);
    if sampler.gpus()[position].is_sampled() && !stop.load(Ordering::Relaxed) {
        let device = &sampler.gpus()[position].device;
        tracing::info!(gpu = device.index, uuid = device.uuid, "calls on the GPU are prompt again");
    }
}

/// When to read a GPU that is aside.
#[derive(Debug)]
struct Pace {
    due_ns: i64,
    prompt_since_ns: i64,
    /// How long the last call took, and how many long ones there were in a row.
    took_ns: i64,
    long: u32,
}

impl Pace {
    fn new(now_ns: i64) -> Self {
        Self { due_ns: now_ns, prompt_since_ns: now_ns, took_ns: 0, long: 0 }
    }

    /// Notes a call. Returns for how long calls have been prompt.
    fn called(&mut self, begin_ns: i64, end_ns: i64) -> i64 {
        self.took_ns = end_ns - begin_ns;
        if self.took_ns > LONG_NS {
            (self.long, self.prompt_since_ns) = (self.long.saturating_add(1), end_ns);
        } else {
            self.long = 0;
        }
        end_ns - self.prompt_since_ns
    }

    /// The time between two readings while all calls take long, nanoseconds: twice the last call. 0 otherwise.
    fn usual_ns(&self) -> i64 {
        if self.long >= HABIT_CALLS { 2 * self.took_ns } else { 0 }
    }

    /// When to make the next call. After a long call, at once: a job that makes calls wait is changing its memory. After
    /// [`HABIT_CALLS`] long calls in a row, half of the time is left to the driver.
    fn next_ns(&mut self, period_ns: i64, end_ns: i64) -> i64 {
        self.due_ns = (self.due_ns + period_ns).max(end_ns + self.usual_ns() / 2);
        self.due_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater_core::clock::{MILLISECOND_NS as MS, SECOND_NS};

    #[test]
    fn a_call_that_waits_now_and_then_costs_no_reading_that_could_be_had() {
        let mut pace = Pace::new(0);
        let (mut now_ns, mut readings) = (0, 0);
        while now_ns < 10 * SECOND_NS {
            // A quarter of a second in each second.
            let took_ns = if now_ns % SECOND_NS < 250 * MS { 250 * MS - now_ns % SECOND_NS } else { 5_000 };
            pace.called(now_ns, now_ns + took_ns);
            readings += 1;
            now_ns = pace.next_ns(MS, now_ns + took_ns);
            assert_eq!(pace.usual_ns(), 0);
        }
        assert!((7_400..7_600).contains(&readings), "{readings}");
    }

    #[test]
    fn where_every_call_takes_long_half_of_the_time_is_left_to_the_driver() {
        let mut pace = Pace::new(0);
        let (mut now_ns, mut readings) = (0, 0);
        while now_ns < 10 * SECOND_NS {
            assert_eq!(pace.called(now_ns, now_ns + 5 * MS), 0, "never prompt");
            readings += 1;
            now_ns = pace.next_ns(MS, now_ns + 5 * MS);
        }
        assert_eq!((readings, pace.usual_ns()), (1_004, 10 * MS));
        assert_eq!(pace.called(now_ns, now_ns + MS / 2), MS / 2 + 5 * MS, "the pause was prompt too");
    }
}
