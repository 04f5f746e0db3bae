//! All samples of one moment.

use super::families::Families;
use super::{catalogue as c, found, gpu, job, memory, own};
use highwater_engine::footprint::Footprint;
use highwater_engine::known::Known;
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
    pub known: Known,
    /// Whether the memory of single processes is exported.
    pub processes: bool,
    /// Parts that count what they do.
    pub parts: Vec<Arc<dyn Collect>>,
}

impl Snapshots {
    /// All samples of this moment, for a reader with a name that no other reader has. Findings stay until every reader has
    /// had time to read them.
    #[must_use]
    pub fn collect_for(&self, reader: &str) -> Families {
        let node = self.known.slot.node();
        self.known.findings.note_scrape(reader, self.known.clock_of(node.as_deref()).now_ns());
        self.collect()
    }

    /// All samples of this moment.
    #[must_use]
    pub fn collect(&self) -> Families {
        let mut out = Families::default();
        let slot = &self.known.slot;
        let node = slot.node();
        if let Some(node) = &node {
            gpu::collect(node, self.processes, &mut out);
            own::sampler(node, &mut out);
        } else if let Some(trouble) = slot.trouble() {
            out.number(&c::SOURCE_ERROR, [trouble.reason], Some(1.0));
        }
        out.count(&c::NVML_UP, (), slot.is_nvml().then_some(u64::from(node.is_some())));
        let clock = self.known.clock_of(node.as_deref());
        let (now_ns, shift_ns) = (clock.now_ns(), clock.unix_shift_ns());
        job::collect(&self.known.ledger, node.as_deref(), now_ns, shift_ns, &mut out);
        found::collect(&self.known.findings, now_ns, &mut out);
        let footprint = Footprint::now();
        own::process(footprint, &mut out);
        self.parts.iter().for_each(|part| part.collect(&mut out));
        if let Some(footprint) = footprint {
            memory::collect(footprint, &self.known, node.as_deref(), &mut out);
        }
        out
    }
}
