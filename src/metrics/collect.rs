//! All samples of one moment.

use super::catalogue as c;
use super::families::Families;
use super::{found, gpu, job, own};
use crate::annotate::Intake;
use crate::export::otlp::Stats;
use crate::node::Slot;
use crate::record::Recorder;
use crate::web::counts as web;
use highwater_core::clock::Clock;
use std::sync::Arc;

/// Everything that is told, from the sources that stay for the life of the daemon: one snapshot for every exporter.
#[derive(Clone)]
pub struct Snapshots {
    /// The node of the moment.
    pub slot: Arc<Slot>,
    /// The jobs.
    pub intake: Arc<Intake>,
    /// The system's timeline, for times while there is no node.
    pub clock: Arc<dyn Clock>,
    /// Whether the memory of single processes is told.
    pub processes: bool,
    /// What became of points that were to be exported over OTLP, where they are.
    pub otlp: Option<Arc<Stats>>,
    /// The flight recorder.
    pub recorder: Recorder,
    /// What HTTP takes in, where it listens.
    pub web: Option<Arc<web::Stats>>,
}

impl Snapshots {
    /// All samples of this moment.
    #[must_use]
    pub fn collect(&self) -> Families {
        let mut out = collect(&self.slot, &self.intake, &*self.clock, self.processes);
        if let Some(stats) = self.recorder.stats() {
            own::captures(stats, &mut out);
        }
        if let Some(stats) = &self.web {
            own::web(stats, &mut out);
        }
        if let Some(stats) = &self.otlp {
            own::otlp(stats, &mut out);
        }
        out
    }
}

/// Collects every sample but those of exporters. `processes` asks for the memory of single processes too.
#[must_use]
pub fn collect(slot: &Slot, intake: &Intake, clock: &dyn Clock, processes: bool) -> Families {
    let mut out = Families::default();
    let node = slot.node();
    if let Some(node) = &node {
        gpu::collect(node, processes, &mut out);
        own::sampler(node, &mut out);
    } else if let Some(trouble) = slot.trouble() {
        out.number(&c::SOURCE_ERROR, &[trouble.reason], Some(1.0));
    }
    out.count(&c::NVML_UP, &[], slot.is_nvml().then_some(u64::from(node.is_some())));
    let clock = node.as_ref().map_or(clock, |node| &*node.clock);
    job::collect(intake.ledger(), node.as_deref(), clock.now_ns(), clock.unix_shift_ns(), &mut out);
    found::collect(slot.detect(), &mut out);
    own::annotations(intake, &mut out);
    own::process(&mut out);
    out
}
