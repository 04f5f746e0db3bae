//! All samples of one moment.

use super::families::{Choice, Families};
use super::{catalogue as c, dcgm, findings, gpu, job, memory, own, workloads};
use highwater_engine::footprint::Footprint;
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;

/// A part of the daemon that counts what it does, and exports the counts as metrics of the catalogue.
pub trait Collect: Send + Sync {
    /// Adds its samples of this moment.
    fn collect(&self, out: &mut Families);
}

/// All metrics, from the sources that stay for the life of the daemon: one snapshot for every exporter.
#[derive(Clone)]
pub struct Snapshots {
    /// What is known of GPUs and jobs.
    pub state: SharedState,
    /// What of it is exported.
    pub choice: Choice,
    /// The node's name, for the copies under DCGM's names.
    pub node_name: Arc<str>,
    /// Parts that count what they do.
    pub parts: Vec<Arc<dyn Collect>>,
}

impl Snapshots {
    /// All samples of this moment, for a reader with a name that no other reader has. Findings stay until every reader has
    /// had time to read them.
    #[must_use]
    pub fn collect_for(&self, reader: &str) -> Families {
        let node = self.state.slot.node();
        self.state.findings.note_scrape(reader, self.state.clock_of(node.as_deref()).now_ns());
        self.collect()
    }

    /// All samples of this moment for `/metrics`, with their copies under DCGM's names if these are wanted.
    #[must_use]
    pub fn expose(&self) -> Families {
        let mut families = self.collect();
        if let Some(node) = self.state.slot.node().filter(|_| self.choice.dcgm) {
            let copies = dcgm::families(&families, &node, &self.node_name);
            families.add_copies(copies);
        }
        families
    }

    /// All samples of this moment.
    #[must_use]
    pub fn collect(&self) -> Families {
        let mut out = Families::of(self.choice);
        let slot = &self.state.slot;
        let node = slot.node();
        if let Some(node) = &node {
            gpu::collect(node, self.choice.processes, &mut out);
            own::sampler(node, &mut out);
        } else if let Some(trouble) = slot.trouble() {
            out.number(&c::SOURCE_ERROR, [trouble.reason], Some(1.0));
        }
        out.count(&c::NVML_UP, (), slot.is_nvml().then_some(u64::from(node.is_some())));
        workloads::collect(self.state.kubelet.as_deref(), node.as_deref(), &mut out);
        let clock = self.state.clock_of(node.as_deref());
        let (now_ns, shift_ns) = (clock.now_ns(), clock.unix_shift_ns());
        job::collect(&self.state.ledger, node.as_deref(), now_ns, shift_ns, &mut out);
        findings::collect(&self.state.findings, now_ns, &mut out);
        let footprint = Footprint::now();
        own::process(footprint, &mut out);
        self.parts.iter().for_each(|part| part.collect(&mut out));
        if let Some(footprint) = footprint {
            memory::collect(footprint, &self.state, node.as_deref(), &mut out);
        }
        out
    }
}
