//! Tests of the watchdog, with a driver whose calls return when the test allows it, and a clock set by hand.

use super::*;
use crate::sample::{TickStats, Ticked};
use highwater_core::clock::{Clock, Manual, SECOND_NS};
use highwater_core::gpu::{Device, GpuState, Health};
use highwater_core::ring;
use highwater_core::source::{CallStats, Error, Source};
use std::collections::HashSet;
use std::sync::{Condvar, Mutex};
use std::thread::{ScopedJoinHandle, scope, yield_now};

const HANG_AFTER_NS: i64 = SECOND_NS;

/// A driver that blocks every call for some GPUs.
#[derive(Default)]
struct Driver {
    keeps: Mutex<HashSet<usize>>,
    changed: Condvar,
    devices: Vec<Device>,
}

impl Driver {
    fn keep(&self, gpus: impl IntoIterator<Item = usize>) {
        *self.keeps.lock().expect("whole") = gpus.into_iter().collect();
        self.changed.notify_all();
    }
}

impl Source for Driver {
    fn description(&self) -> String {
        "a driver that blocks calls".to_owned()
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn memory_used(&self, gpu: usize, _at_ns: i64) -> Result<u64, Error> {
        let keeps = self.keeps.lock().expect("whole");
        drop(self.changed.wait_while(keeps, |keeps| keeps.contains(&gpu)).expect("whole"));
        Ok(1 << 30)
    }
}

/// This many GPUs, each a unit of its own.
struct Rig {
    driver: Arc<Driver>,
    clock: Arc<Manual>,
    stats: Arc<TickStats>,
    gpus: Arc<[GpuState]>,
    sampler: Sampler,
    roll: RollCall,
}

impl Rig {
    fn new(gpus: usize) -> Self {
        let device = |number| Device { uuid: format!("GPU-{number:02}"), ..Device::default() };
        let driver = Arc::new(Driver { devices: (0..gpus).map(device).collect(), ..Driver::default() });
        let clock = Arc::new(Manual::at(SECOND_NS));
        let states = driver.devices.iter().map(|device| GpuState::new(device.clone(), SECOND_NS, SECOND_NS));
        let (gpus, calls): (Arc<[GpuState]>, _) = (states.collect(), Arc::new(CallStats::default()));
        let stats = Arc::new(TickStats::new(MILLISECOND_NS));
        let roll = RollCall::new(&gpus, &calls, Arc::clone(&stats), HANG_AFTER_NS);
        let config = ring::Config { retention_ns: 10 * SECOND_NS, max_bytes: 1 << 16, resolution_ns: 1_000 };
        let writers = gpus.iter().map(|_| ring::ring(config).expect("a ring").0).collect();
        let (source, now): (Arc<dyn Source>, Arc<dyn Clock>) = (driver.clone(), clock.clone());
        let sampler = Sampler::new(source, now, calls, Arc::clone(&stats), Arc::clone(&gpus), writers);
        Self { driver, clock, stats, gpus, sampler, roll }
    }

    /// One check of the watchdog, this many milliseconds after the sweep that the driver blocks.
    fn look(&self, watchdog: &mut Watchdog<'_>, after_ms: i64) -> Option<Stuck> {
        self.clock.advance_to(SECOND_NS + after_ms * MILLISECOND_NS);
        watchdog.look(self.clock.now_ns())
    }

    /// A sweep on a thread of its own, which the driver blocks.
    fn sweep_into_the_hang<'scope>(
        &'scope self,
        threads: &'scope std::thread::Scope<'scope, '_>,
    ) -> ScopedJoinHandle<'scope, Ticked> {
        let mut sampler = self.sampler.share();
        let sweep = threads.spawn(move || sampler.tick(SECOND_NS, |_| ()));
        // The GPUs before it answer at once.
        let kept = self.driver.keeps.lock().expect("whole").clone();
        let hangs = |stuck: Stuck| kept.contains(&stuck.gpu) && self.gpus[stuck.gpu].is_in_fast_call();
        until(|| self.stats.stuck_since(SECOND_NS + 1).is_some_and(hangs));
        sweep
    }

    /// A thread for each GPU answers the roll call. Returns once each has answered or is blocked.
    fn answer<'scope>(&'scope self, threads: &'scope std::thread::Scope<'scope, '_>) {
        for unit in self.roll.units().all() {
            threads.spawn(|| self.roll.answer(unit, &self.gpus, &*self.driver, SECOND_NS));
        }
        let kept = self.driver.keeps.lock().expect("whole").clone();
        until(|| {
            self.roll.units().all().iter().enumerate().all(|(gpu, unit)| {
                if kept.contains(&gpu) { unit.calls.progress() % 2 == 1 } else { !self.gpus[gpu].is_doubted() }
            })
        });
    }

    fn with_health(&self, health: Health) -> Vec<usize> {
        (0..self.gpus.len()).filter(|gpu| self.gpus[*gpu].health() == health).collect()
    }
}

/// Lets every call return when a test ends, even by a failed assertion, because its threads are joined.
struct Release<'a>(&'a Driver);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.keep([]);
    }
}

fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        yield_now();
    }
}

#[test]
fn a_driver_that_blocks_every_call_hangs_no_gpu_and_gets_no_second_thread() {
    let rig = Rig::new(8);
    let mut watchdog = Watchdog::new(&rig.sampler, HANG_AFTER_NS, &rig.roll);
    scope(|threads| {
        let _release = Release(&rig.driver);
        rig.driver.keep(0..8);
        let sweep = rig.sweep_into_the_hang(threads);
        assert_eq!(rig.look(&mut watchdog, 99), None);
        assert!(!rig.gpus[3].is_doubted(), "no roll call before a call has taken long");
        assert_eq!(rig.look(&mut watchdog, 101), None);
        rig.answer(threads);
        for after_ms in [103, 250, 400] {
            assert_eq!(rig.look(&mut watchdog, after_ms), None, "no GPU answers");
        }
        rig.driver.keep([]);
        assert_eq!(sweep.join().expect("whole"), Ticked::Taken, "the thread was not replaced");
        until(|| !rig.gpus.iter().any(GpuState::is_left_alone));
        assert_eq!(rig.look(&mut watchdog, 402), None);
    });
    assert_eq!(rig.with_health(Health::Up).len(), 8);
}

#[test]
fn gpus_that_hang_together_cost_the_others_one_delay() {
    let rig = Rig::new(64);
    let hung: Vec<usize> = (1..64).step_by(2).collect();
    let mut watchdog = Watchdog::new(&rig.sampler, HANG_AFTER_NS, &rig.roll);
    scope(|threads| {
        let _release = Release(&rig.driver);
        rig.driver.keep(hung.iter().copied());
        let sweep = rig.sweep_into_the_hang(threads);
        assert_eq!(rig.look(&mut watchdog, 101), None);
        rig.answer(threads);
        let stuck = rig.look(&mut watchdog, 103).expect("32 GPUs have answered, and the call has not returned");
        let mut successor = watchdog.replace(stuck);
        // It would not return if it read a GPU that hangs.
        for _ in 0..10 {
            assert_eq!(successor.tick(SECOND_NS, |_| ()), Ticked::Taken);
        }
        assert_eq!(rig.stats.missed_driver.load(Ordering::Relaxed), 1103, "since accounting began");
        assert_eq!(rig.look(&mut watchdog, 900), None);
        assert!(rig.with_health(Health::Hung).is_empty(), "skipped, not hung yet");
        assert_eq!(rig.look(&mut watchdog, 1_104), None);
        assert_eq!(rig.with_health(Health::Hung), hung);
        rig.driver.keep([]);
        assert_eq!(sweep.join().expect("whole"), Ticked::Replaced);
        until(|| !rig.gpus.iter().any(GpuState::is_left_alone));
    });
    assert_eq!(rig.with_health(Health::Lost), hung, "each is tried before it is sampled again");
}

/// A thread of the slower lanes hangs in another call on it, while the fast lane has read its memory since: it is not skipped.
#[test]
fn a_gpu_whose_own_thread_has_long_waited_is_not_doubted() {
    let rig = Rig::new(3);
    let mut watchdog = Watchdog::new(&rig.sampler, HANG_AFTER_NS, &rig.roll);
    scope(|threads| {
        let _release = Release(&rig.driver);
        rig.driver.keep([2]);
        rig.gpus[2].doubt();
        rig.answer(threads);
        rig.gpus[2].end_doubt();
        let early = SECOND_NS - 200 * MILLISECOND_NS;
        assert_eq!(watchdog.look(early), None);
        rig.driver.keep([1, 2]);
        rig.sweep_into_the_hang(threads);
        assert_eq!(rig.look(&mut watchdog, 101), None);
        assert_eq!([0, 1, 2].map(|gpu| rig.gpus[gpu].is_doubted()), [true, true, false]);
        rig.driver.keep([]);
    });
}

/// However short each of its calls is.
#[test]
fn gpus_part_if_the_turn_of_one_takes_long() {
    let rig = Rig::new(3);
    rig.roll.units().on_parting(Box::new(|_| true));
    let mut watchdog = Watchdog::new(&rig.sampler, HANG_AFTER_NS, &rig.roll);
    let turn = rig.roll.units().enter(1, SECOND_NS).expect("nothing has its own thread");
    assert_eq!(rig.look(&mut watchdog, 99), None);
    assert_eq!(rig.roll.units().common(), [0, 1, 2]);
    assert_eq!(rig.look(&mut watchdog, 100), None);
    assert_eq!(rig.roll.units().common(), [1]);
    drop(turn);
}

/// The only GPU: no other GPU can show that the driver is not busy, so the limit alone decides.
#[test]
fn a_gpu_that_is_alone_hangs_after_the_limit() {
    let rig = Rig::new(1);
    let mut watchdog = Watchdog::new(&rig.sampler, HANG_AFTER_NS, &rig.roll);
    scope(|threads| {
        let _release = Release(&rig.driver);
        rig.driver.keep([0]);
        let sweep = rig.sweep_into_the_hang(threads);
        assert_eq!(rig.look(&mut watchdog, 101), None);
        assert_eq!(rig.look(&mut watchdog, 999), None);
        assert!(rig.with_health(Health::Hung).is_empty());
        let stuck = rig.look(&mut watchdog, 1_000).expect("it hangs");
        assert_eq!(rig.with_health(Health::Hung), [0]);
        assert_eq!(watchdog.replace(stuck).tick(SECOND_NS, |_| ()), Ticked::Nothing);
        rig.driver.keep([]);
        assert_eq!(sweep.join().expect("whole"), Ticked::Replaced);
    });
    assert_eq!(rig.with_health(Health::Lost), [0]);
}

/// A call that hangs at a node's end returns when the next node samples, into the same counts.
#[test]
fn what_a_thread_of_an_ended_node_reads_is_discarded() {
    let rig = Rig::new(2);
    scope(|threads| {
        let _release = Release(&rig.driver);
        rig.driver.keep([0]);
        let sweep = rig.sweep_into_the_hang(threads);
        let (source, clock): (Arc<dyn Source>, Arc<dyn Clock>) = (rig.driver.clone(), rig.clock.clone());
        let of_next_node =
            Sampler::new(source, clock, Arc::default(), Arc::clone(&rig.stats), Arc::clone(&rig.gpus), Vec::new());
        assert_eq!(rig.stats.stuck_since(i64::MAX), None, "the call does not belong to the next node");
        rig.driver.keep([]);
        assert_eq!(sweep.join().expect("whole"), Ticked::Replaced);
        drop(of_next_node);
    });
}

#[test]
fn a_gpu_that_is_aside_hangs_by_the_call_of_its_own_thread_alone() {
    let rig = Rig::new(2);
    let mut watchdog = Watchdog::new(&rig.sampler, HANG_AFTER_NS, &rig.roll);
    // The call of a thread that was replaced began long ago, and has returned; the GPU's own thread is in another.
    watchdog.replaced_since_ns[0] = Some(0);
    let aside = rig.sampler.aside();
    let is_aside = (0..8).any(|_| aside.note_long(0, 300 * MILLISECOND_NS, SECOND_NS, &rig.gpus));
    assert!(is_aside && aside.has(0));
    rig.gpus[0].begin_fast_call();
    aside.begin_call(0, SECOND_NS + 600 * MILLISECOND_NS);
    for (after_ms, health) in [(500, Health::Up), (1_599, Health::Up), (1_600, Health::Hung)] {
        rig.look(&mut watchdog, after_ms);
        assert_eq!(rig.gpus[0].health(), health, "{after_ms}");
    }
    aside.end_call(0);
    rig.gpus[0].end_fast_call();
    assert_eq!(rig.gpus[0].health(), Health::Lost, "it is tried before it is sampled again");
}
