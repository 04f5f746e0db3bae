//! A simulated node that exports as much of the catalogue as it can: every GPU runs a job. And one that is idle.

use highwater::metrics::{Choice, Snapshots};
use highwater::sim::{Scenario, Sim};
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::jobs::{Ended, EndedBy, Limits, Open, Sender};
use highwater_core::ring;
use highwater_core::source::Source;
use highwater_core::wire::Kind;
use highwater_engine::intake::{Intake, due};
use highwater_engine::node::{Node, Periods};
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;

/// How many distinct phase names a job may have.
const PHASE_NAMES: usize = 32;

/// The node and its surroundings.
pub struct Busy {
    /// The simulated time.
    pub clock: Arc<Manual>,
    /// Its GPUs and rings.
    pub node: Arc<Node>,
    /// What a scrape collects from.
    pub snapshots: Snapshots,
    /// Its jobs.
    pub intake: Arc<Intake>,
}

/// A node with `gpus` GPUs, one rank on each, after `lasting_ms`.
pub fn busy(gpus: usize, lasting_ms: i64) -> Busy {
    after(&scenario(gpus), lasting_ms)
}

/// A node with one GPU, and nothing on it.
pub fn idle(lasting_ms: i64) -> Busy {
    after("[[gpus]]\ncount = 1\n", lasting_ms)
}

fn after(scenario: &str, lasting_ms: i64) -> Busy {
    let start_ns = 1_800_000_000 * SECOND_NS;
    let scenario = Scenario::parse(scenario, "bench").expect("a scenario");
    let clock = Arc::new(Manual::at(start_ns));
    let source: Arc<dyn Source> = Arc::new(Sim::new(scenario, start_ns));
    let ring = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
    let (node, writers) =
        Node::new(Arc::clone(&source), Arc::clone(&clock) as _, ring, Periods::default(), None).expect("rings");
    let node = Arc::new(node);
    let log = highwater::capture::CaptureSettings::default().event_log();
    let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default()).with_log(log);
    intake.set_devices(source.devices());
    let mut sampler = node.sampler(writers);
    let mut annotations = source.annotations().peekable();
    for n in 1..=lasting_ms {
        clock.advance_to(start_ns + n * MILLISECOND_NS);
        sampler.tick(clock.now_ns(), |_| ());
        for annotation in due(&mut annotations, clock.now_ns()) {
            intake.take(annotation, &Sender::DAEMON).expect("a good annotation");
        }
        if n % 100 == 0 {
            node.advance(intake.ledger(), clock.now_ns());
            node.ticks.take();
            node.ticks.lateness.observe_ns(20_000);
            lanes_once(&node);
        }
    }
    let intake = Arc::new(intake);
    let state = SharedState::of(&node, intake.ledger());
    let snapshots = Snapshots {
        state,
        choice: Choice { processes: true, ..Choice::default() },
        node_name: Arc::default(),
        parts: vec![Arc::clone(&intake) as _],
    };
    Busy { clock, node, snapshots, intake }
}

/// Runs the medium and the slow lane once.
fn lanes_once(node: &Node) {
    for gpu in 0..node.gpus.len() {
        let at_ns = node.clock.now_ns();
        node.gpus[gpu].set_medium(at_ns, node.source.medium(gpu, at_ns, &node.calls));
        node.gpus[gpu].set_slow(at_ns, node.source.slow(gpu, at_ns, &node.calls));
        node.gpus[gpu].set_pcie(at_ns, node.source.pcie(gpu, at_ns, &node.calls));
        node.gpus[gpu].set_processes(at_ns, node.source.processes(gpu, at_ns, &node.calls));
        node.gpus[gpu].set_rare(at_ns, node.source.rare(gpu, at_ns, &node.calls));
        if let Some(joules) = node.source.energy_joules(gpu, at_ns, &node.calls) {
            // The second reading confirms the first.
            (0..2).for_each(|_| node.gpus[gpu].energy.set(at_ns, joules, &node.gpus[gpu].series));
        }
    }
}

fn scenario(gpus: usize) -> String {
    format!(
        r#"
        [[gpus]]
        count = {gpus}
        [[jobs]]
        name = "bench"
        ranks = {gpus}
        base = "40 GiB"
        phases = [
          {{ name = "data", duration = "20 ms", busy = 0.1 }},
          {{ name = "forward", duration = "60 ms", to = "96 GiB", shape = "steps" }},
          {{ name = "backward", duration = "90 ms", to = "110 GiB", shape = "steps", release = true }},
          {{ name = "comm", duration = "20 ms", collective = true }},
          {{ name = "optimizer", duration = "10 ms" }},
        ]
        "#
    )
}

impl Busy {
    /// Takes every slot for phase series: 64 ranks with 32 phases each, besides the ranks that are already running.
    pub fn fill_series(&self) {
        let most = Limits::default().phase_series / PHASE_NAMES;
        for rank in 0..most {
            for phase in 0..PHASE_NAMES {
                for event in ["begin", "end"] {
                    let json = format!(
                        r#"{{"event":"{event}","name":"phase {phase}","job":"full","rank":{rank},"gpu":{}}}"#,
                        rank % 8
                    );
                    // The last ones get no slot, because the running job already holds some.
                    self.intake.take_json(json.as_bytes(), &Sender::DAEMON);
                }
            }
            self.drain();
        }
    }

    /// A phase of 100 ms that began 30 s ago.
    pub fn ended(&self) -> Ended {
        let begin_ns = self.clock.now_ns() - 30 * SECOND_NS;
        let open = Open {
            kind: Kind::Phase,
            name: "forward".into(),
            step: Some(1),
            begin_ns,
            memory: None,
            attributes: None,
            by: None,
            held: None,
            series: None,
        };
        let (job, gpus) = ("bench".into(), Some(Arc::from([0_usize].as_slice())));
        Ended {
            job,
            rank: 0,
            open,
            end_ns: begin_ns + 100 * MILLISECOND_NS,
            by: EndedBy::End,
            memory: None,
            gpus,
            pid: None,
            waiting: None,
        }
    }

    /// Runs the join on everything that has ended, so that no queue fills up.
    pub fn drain(&self) {
        self.node.advance(self.intake.ledger(), self.clock.now_ns());
    }
}
