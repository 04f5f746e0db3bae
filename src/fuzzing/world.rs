//! A node for fuzzed annotations and requests: two simulated GPUs, some seconds into their work.

use crate::sim::{Scenario, Sim};
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::jobs::Limits;
use highwater_core::ring;
use highwater_core::source::Source;
use highwater_engine::intake::Intake;
use highwater_engine::node::{Node, Periods};
use std::sync::{Arc, OnceLock};

/// When the node began, nanoseconds of the timeline.
const BEGIN_NS: i64 = 1_800_000_000 * SECOND_NS;
/// The time of its last reading. Fuzzed annotations are of the seconds before.
pub(super) const END_NS: i64 = BEGIN_NS + 8 * SECOND_NS;

/// Time between its readings. It is long because each input decodes all readings and uses few.
const TURN_NS: i64 = 100 * MILLISECOND_NS;

const SCENARIO: &str = r#"
[[gpus]]
count = 2
[[jobs]]
name = "fuzz"
ranks = 2
base = "40 GiB"
phases = [
  { name = "data", duration = "20 ms", busy = 0.1 },
  { name = "forward", duration = "60 ms", to = "96 GiB", shape = "steps" },
  { name = "backward", duration = "90 ms", to = "130 GiB", shape = "steps", release = true },
]
"#;

/// The node, which nothing sent to an intake changes.
pub(crate) fn node() -> Arc<Node> {
    static NODE: OnceLock<Arc<Node>> = OnceLock::new();
    Arc::clone(NODE.get_or_init(|| Arc::new(play())))
}

fn play() -> Node {
    let scenario = Scenario::parse(SCENARIO, "fuzz").expect("the scenario above is held by a test");
    let source: Arc<dyn Source> = Arc::new(Sim::new(scenario, BEGIN_NS));
    let clock = Arc::new(Manual::at(BEGIN_NS));
    let config = ring::Config { retention_ns: 60 * SECOND_NS, max_bytes: 1 << 20, resolution_ns: 1_000 };
    let made = Node::new(source, Arc::clone(&clock) as _, config, Periods::default(), None);
    let (node, writers) = made.expect("a ring of 1 MiB can be made");
    let mut sampler = node.sampler(writers);
    for turn in 0..=(END_NS - BEGIN_NS) / TURN_NS {
        clock.advance_to(BEGIN_NS + turn * TURN_NS);
        sampler.tick(clock.now_ns(), |_| ());
        read_medium(&node, clock.now_ns());
    }
    node
}

fn read_medium(node: &Node, at_ns: i64) {
    for (position, gpu) in node.gpus.iter().enumerate() {
        gpu.set_medium(at_ns, node.source.medium(position, at_ns, &node.calls));
    }
}

/// An intake that knows the node's GPUs and nothing else.
pub(super) fn intake(clock: &Arc<Manual>) -> Intake {
    let intake = Intake::new(Limits::default(), Arc::clone(clock) as _, Arc::default());
    intake.set_devices(node().source.devices());
    intake
}
