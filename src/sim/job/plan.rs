//! A job of a scenario, with everything that its generator needs to know about the node.

use super::modules::{Module, modules};
use crate::sim::scenario::fleet::Fleet;
use crate::sim::scenario::{DeviceRef, Job, Phase, Scenario, Shape};
use crate::sim::window::Window;
use highwater_core::units::{Bytes, Nanoseconds};
use highwater_core::wire::Gpu;

/// The name of the phase in which a checkpoint is written.
pub(super) const CHECKPOINT: &str = "checkpoint";

/// A job with everything that its generator needs to know about the node.
#[derive(Debug)]
pub(in crate::sim) struct Plan {
    pub(super) job: Job,
    /// The index of the job in the scenario.
    pub(super) index: u64,
    pub(super) seed: u64,
    pub(super) ranks: Vec<Place>,
    pub(super) near_oom: Option<Window>,
    pub(super) oom: Option<Window>,
    /// The phase that a checkpoint adds to a step.
    pub(super) checkpoint: Option<Phase>,
    /// The layers of its model, which some steps profile.
    pub(super) modules: Vec<Module>,
}

/// Where a rank runs.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) device: usize,
    pub(super) gpu: Gpu,
    pub(super) usable_bytes: u64,
}

impl Plan {
    pub(in crate::sim) fn new(scenario: &Scenario, index: usize, job: &Job, fleet: &Fleet) -> Self {
        let place = |device: DeviceRef| {
            let position = fleet.find(&device)?;
            let gpu = match device {
                DeviceRef::Index(index) => Gpu::Index(index),
                DeviceRef::Name(name) => Gpu::Name(name),
            };
            Some(Place { device: position, gpu, usable_bytes: fleet.usable_bytes(position) })
        };
        Self {
            index: index as u64,
            seed: scenario.seed,
            ranks: job.ranks.devices().into_iter().filter_map(place).collect(),
            near_oom: job.near_oom.as_ref().map(|near| Window::new(near.offset, near.every, near.lasting)),
            oom: job.oom.as_ref().map(|oom| Window::new(oom.at, oom.every, Nanoseconds(1))),
            checkpoint: job.checkpoint.as_ref().map(|checkpoint| checkpoint_phase(checkpoint.duration)),
            modules: job.layers.as_ref().map_or_else(Vec::new, |layers| modules(layers.count)),
            job: job.clone(),
        }
    }

    /// Which device each rank runs on.
    pub(in crate::sim) fn devices(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().map(|place| place.device)
    }
}

fn checkpoint_phase(duration: Nanoseconds) -> Phase {
    let name = CHECKPOINT.to_owned();
    let (jitter, to, shape, release) = (Nanoseconds(0), None::<Bytes>, Shape::Hold, false);
    Phase { name, duration, jitter, to, shape, release, busy: 0.05, collective: true }
}
