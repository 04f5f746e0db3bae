//! The sampling thread's own time in a tick, with warm and with cold caches.
//!
//! The thread sleeps for a millisecond between two ticks, and finds little of its memory in a cache when it wakes. Here the
//! whole loop runs on a clock whose wait touches a buffer, which evicts everything else from the caches and the TLB. The time
//! from one wait to the next is measured, less the driver's time. The driver takes [`CALL`], as a real one does, so memory
//! that was prefetched before the call has arrived when it returns.

use highwater_core::clock::{Clock, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::gpu::Device;
use highwater_core::ring;
use highwater_core::source::{Error, Source};
use highwater_engine::node::{Node, Periods};
use highwater_engine::sample::{self, Budget, FastLaneSettings};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const START_NS: i64 = 1_800_000_000 * SECOND_NS;

/// How long the driver takes.
const CALL: Duration = Duration::from_micros(5);

/// GPUs whose memory does not change, behind a driver that counts how long it takes.
struct Still {
    devices: Vec<Device>,
    took_ns: AtomicU64,
}

impl Source for Still {
    fn description(&self) -> String {
        "still".to_owned()
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn memory_used(&self, gpu: usize, _at_ns: i64) -> Result<u64, Error> {
        let begun = Instant::now();
        let mut took = Duration::ZERO;
        while took < CALL {
            took = begun.elapsed();
        }
        self.took_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        Ok((40 << 30) + ((gpu as u64) << 21))
    }
}

/// A clock whose wait displaces everything from the caches.
struct Displacing {
    clock: Manual,
    driver: Arc<Still>,
    state: Mutex<State>,
    /// Ends the loop after enough ticks.
    stop: Arc<AtomicBool>,
}

struct State {
    buffer: Vec<u64>,
    ticks: usize,
    /// When the last wait ended.
    woken: Option<Instant>,
    took: Vec<Duration>,
}

impl Clock for Displacing {
    fn now_ns(&self) -> i64 {
        self.clock.now_ns()
    }

    fn unix_shift_ns(&self) -> i64 {
        0
    }

    fn sleep_until(&self, at_ns: i64) {
        let asleep = Instant::now();
        let mut state = self.state.lock().expect("whole");
        if let Some(woken) = state.woken {
            let driver = Duration::from_nanos(self.driver.took_ns.swap(0, Ordering::Relaxed));
            state.took.push((asleep - woken).saturating_sub(driver));
        }
        // One word of each line.
        state.buffer.iter_mut().step_by(8).for_each(|word| *word = black_box(*word + 1));
        self.clock.advance_to(at_ns);
        self.stop.store(state.took.len() >= state.ticks, Ordering::Relaxed);
        // The clock's own pages are in a cache again before it is read.
        black_box(Instant::now());
        state.woken = Some(Instant::now());
    }
}

/// The median of the loop's own time in `ticks` ticks over `gpus` GPUs. Each wait touches `displaced_bytes`.
pub fn tick(gpus: usize, displaced_bytes: usize, ticks: usize) -> Duration {
    let stop = Arc::new(AtomicBool::new(false));
    let state = State { buffer: vec![1; displaced_bytes / 8], ticks, woken: None, took: Vec::with_capacity(ticks + 1) };
    let device = |gpu: usize| Device { index: gpu.to_string(), uuid: format!("GPU-{gpu}"), ..Device::default() };
    let source = Arc::new(Still { devices: (0..gpus).map(device).collect(), took_ns: AtomicU64::new(0) });
    let (clock, driver) = (Manual::at(START_NS), Arc::clone(&source));
    let clock = Arc::new(Displacing { clock, driver, state: Mutex::new(state), stop: Arc::clone(&stop) });
    let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
    let (node, writers) = Node::new(source, Arc::clone(&clock) as _, config, Periods::default(), None).expect("rings");
    // As the daemon does for captures.
    node.ticks.keep_log(600_000, 6_000);
    let budget = Budget { period_ns: MILLISECOND_NS, max_period_ns: SECOND_NS, busy_ratio: 0.15 };
    let lane = FastLaneSettings { budget, idle_period_ns: Some(100 * MILLISECOND_NS), hang_after_ns: SECOND_NS };
    sample::run_paced(node.sampler(writers), lane, &stop);
    let mut took = std::mem::take(&mut clock.state.lock().expect("whole").took);
    took.sort_unstable();
    took[took.len() / 2]
}
