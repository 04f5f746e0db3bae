//! Fuzzes the text of a scenario, and a simulated node that plays it.

use crate::sim::{Scenario, Sim};
use highwater_core::clock::SECOND_NS;
use highwater_core::source::{CallStats, Source as _};

/// Devices, and annotations, that are read per scenario.
const MOST_DEVICES: usize = 4;
const MOST_ANNOTATIONS: usize = 32;

/// Parses a scenario. A valid one is played at some times.
pub fn scenario(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let scenario = match Scenario::parse(text, "fuzz.toml") {
        Ok(scenario) => scenario,
        Err(error) => {
            assert!(!error.faults.is_empty() && !error.to_string().is_empty(), "a fault says what it is");
            return;
        }
    };
    let (sim, calls) = (Sim::new(scenario, 0), CallStats::default());
    for gpu in 0..sim.devices().len().min(MOST_DEVICES) {
        for at_ns in [0, SECOND_NS / 3, 100 * SECOND_NS] {
            // Fails only if the scenario takes the GPU off the bus.
            let _ = sim.memory_used(gpu, at_ns);
            sim.medium(gpu, at_ns, &calls);
        }
    }
    sim.annotations().take(MOST_ANNOTATIONS).for_each(drop);
}
