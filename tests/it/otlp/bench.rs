//! The daemon's parts in simulated time: sampler, join, jobs and exporter on one runtime. Its time stands still until
//! every task waits, then jumps to the next deadline.

use highwater::export::otlp::{Exporter, OtlpSettings, OtlpStats, Signal};
use highwater::metrics::{Choice, Snapshots};
use highwater::sim::{Scenario, Sim};
use highwater_core::clock::{Clock, MILLISECOND_NS, SECOND_NS};
use highwater_core::jobs::{Limits, Sender};
use highwater_core::ring;
use highwater_core::source::Source;
use highwater_engine::dial::Dial;
use highwater_engine::intake::{Intake, due};
use highwater_engine::node::Node;
use highwater_engine::sample::Sampler;
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub const START_NS: i64 = 1_800_000_000 * SECOND_NS;

/// The runtime's time as a clock.
pub struct Simulated(Instant);

impl Clock for Simulated {
    fn now_ns(&self) -> i64 {
        START_NS + i64::try_from(self.0.elapsed().as_nanos()).expect("centuries")
    }

    fn unix_shift_ns(&self) -> i64 {
        0
    }

    fn sleep_until(&self, _: i64) {
        unreachable!("nothing in here blocks")
    }
}

pub struct Bench {
    pub clock: Arc<Simulated>,
    pub node: Arc<Node>,
    pub state: SharedState,
    pub intake: Arc<Intake>,
    pub stats: Arc<OtlpStats>,
    pub most_queued_bytes: Arc<AtomicUsize>,
    stop: oneshot::Sender<()>,
    exporter: JoinHandle<()>,
}

impl Bench {
    /// Starts a node of `scenario` that exports through `dial`. Must be called on a runtime whose time is paused.
    pub fn start(scenario: &str, settings: OtlpSettings, dial: Arc<dyn Dial>) -> Self {
        Self::start_reading(20, scenario, settings, dial)
    }

    /// Like [`start`](Self::start), with `at_once` readings at each moment. Many are faster, but changes then share
    /// their times; with 1, each change has its own.
    pub fn start_reading(at_once: usize, scenario: &str, settings: OtlpSettings, dial: Arc<dyn Dial>) -> Self {
        let clock = Arc::new(Simulated(Instant::now()));
        let scenario = Scenario::parse(scenario, "otlp").expect("a scenario");
        let source: Arc<dyn Source> = Arc::new(Sim::new(scenario, START_NS));
        let ring = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
        let (node, writers) =
            Node::new(source, Arc::clone(&clock) as _, ring, highwater_engine::node::Periods::default(), None)
                .expect("rings");
        let node = Arc::new(node);
        let intake = Arc::new(Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default()));
        intake.set_devices(node.source.devices());
        let stats = Arc::new(OtlpStats::default());
        let (sampled, joined, watched) = (Arc::clone(&node), Arc::clone(&intake), Arc::clone(&stats));
        let state = SharedState::of(&node, intake.ledger());
        let found = state.clone();
        let most_queued_bytes = Arc::new(AtomicUsize::new(0));
        let most = Arc::clone(&most_queued_bytes);
        let sampler = Sampler::new(
            Arc::clone(&node.source),
            Arc::clone(&node.clock),
            Arc::clone(&node.calls),
            Arc::clone(&node.ticks),
            Arc::clone(&node.gpus),
            writers,
        );
        tokio::spawn(sample(at_once, sampler, sampled, found, joined, watched, most));
        let parts = vec![Arc::clone(&intake) as _, Arc::clone(&stats) as _];
        let snapshots = Snapshots { state: state.clone(), choice: Choice::default(), node_name: Arc::default(), parts };
        let exporter = Exporter::new(settings, snapshots, &stats, &dial).expect("an exporter");
        let (stop, stopped) = oneshot::channel::<()>();
        let exporter = tokio::spawn(exporter.run(async {
            let _ = stopped.await;
        }));
        Self { clock, node, state, intake, stats, most_queued_bytes, stop, exporter }
    }

    /// Ends the exporter; returns how long that took.
    pub async fn stop(self) -> Duration {
        let begin = Instant::now();
        self.stop.send(()).expect("it runs");
        self.exporter.await.expect("no panic");
        begin.elapsed()
    }

    /// Asserts that memory is known at every tick of the ten minutes that are kept.
    #[track_caller]
    pub fn check_no_tick_is_missing(&self) {
        for ring in self.node.rings.iter() {
            let (oldest_ns, newest_ns) = (ring.oldest_ns().expect("read"), ring.newest_ns().expect("read"));
            assert!(newest_ns - oldest_ns >= 590 * SECOND_NS && self.clock.now_ns() - newest_ns < 30 * MILLISECOND_NS);
            assert_eq!(ring.summary(oldest_ns, newest_ns).expect("kept").gap_ns, 0);
        }
    }

    /// Asserts for each signal that points produced = exported + queued + dropped.
    #[track_caller]
    pub fn check_accounts(&self) {
        check_accounts(&self.stats);
    }
}

#[track_caller]
pub fn check_accounts(stats: &OtlpStats) {
    for signal in Signal::ALL {
        let accounted =
            stats.account(signal).exported + stats.account(signal).queued + stats.account(signal).all_dropped();
        assert_eq!(stats.account(signal).produced, accounted, "{signal:?}");
    }
}

/// Does the work of the daemon's threads: ticks, simulated annotations, the join, and detection every 100 ms.
async fn sample(
    at_once: usize,
    mut sampler: Sampler,
    node: Arc<Node>,
    state: SharedState,
    intake: Arc<Intake>,
    stats: Arc<OtlpStats>,
    most: Arc<AtomicUsize>,
) {
    let (mut next_ns, mut looked_ns) = (START_NS, START_NS);
    let step = Duration::from_millis(at_once as u64);
    let mut said = node.source.annotations().peekable();
    loop {
        tokio::time::sleep(step).await;
        let now_ns = node.clock.now_ns();
        if at_once == 1 {
            // Ticks that were slept over are not made up for.
            next_ns = now_ns;
        }
        while next_ns <= now_ns {
            sampler.tick(next_ns, |_| ());
            next_ns += MILLISECOND_NS;
        }
        for annotation in due(&mut said, now_ns) {
            intake.take(annotation, &Sender::DAEMON).expect("a good annotation");
        }
        node.advance(intake.ledger(), now_ns);
        if now_ns - looked_ns >= 100 * MILLISECOND_NS {
            state.findings.advance(&node.join, intake.ledger(), now_ns);
            looked_ns = now_ns;
        }
        most.fetch_max(usize::try_from(stats.queued_bytes()).expect("small"), Relaxed);
    }
}
