//! What the daemon's own memory is for.
//!
//! Enters: the bytes that each part reports, and the kernel's resident memory of the process. Leaves: the bytes of each
//! part. `other` is the rest, so that all parts add up to the resident memory. If the parts report more than is
//! resident, because the kernel has taken pages back since they were counted, `other` is 0.

use super::catalogue as c;
use super::families::Families;
use highwater_core::detect::{Finding, Incident};
use highwater_engine::footprint::Footprint;
use highwater_engine::node::Node;
use highwater_engine::shared_state::SharedState;

/// What memory is for. docs/prometheus.md describes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Pages of the program and of its libraries, which the kernel can take back.
    Program,
    /// What opening the driver's library added.
    Nvml,
    /// Samples of memory.
    Rings,
    /// Readings of power and utilization.
    Readings,
    /// Times of sweeps and of the detectors' turns.
    Sweeps,
    /// Events for captures.
    Events,
    /// What jobs have open.
    Open,
    /// Steps and phases that have ended, for the API.
    Ended,
    /// Their times, for charts.
    Trail,
    /// Layers that have ended, for captures.
    Layers,
    /// The last profile of each rank's layers, and their statistics.
    Profiles,
    /// SQLite's, while a capture is written.
    Sqlite,
    /// Requests that wait to be sent over OTLP.
    Otlp,
    /// Long answers that clients are reading.
    Answers,
    /// Answers, expositions, pages, captures and requests that are being made.
    Making,
    /// Findings, active and ended.
    Findings,
    /// Connections over HTTP.
    Connections,
    /// Pages of the heap that the allocator keeps free.
    Free,
    /// The heap at rest, and stacks.
    Other,
}

impl Part {
    /// The label value.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Part::Program => "program",
            Part::Nvml => "nvml",
            Part::Rings => "rings",
            Part::Readings => "readings",
            Part::Sweeps => "sweeps",
            Part::Events => "events",
            Part::Open => "open",
            Part::Ended => "ended",
            Part::Trail => "trail",
            Part::Layers => "layers",
            Part::Profiles => "profiles",
            Part::Sqlite => "sqlite",
            Part::Otlp => "otlp",
            Part::Answers => "answers",
            Part::Making => "making",
            Part::Findings => "findings",
            Part::Connections => "connections",
            Part::Free => "free",
            Part::Other => "other",
        }
    }
}

impl Families {
    /// Adds what a part keeps.
    pub(crate) fn memory(&mut self, part: Part, bytes: usize) {
        self.count(&c::MEMORY, [part.label()], Some(bytes as u64));
    }
}

/// Adds the parts that have no collector of their own, and what is left, after all others.
pub(super) fn collect(footprint: Footprint, state: &SharedState, node: Option<&Node>, out: &mut Families) {
    if let Some(node) = node {
        out.memory(Part::Rings, node.rings.iter().map(|ring| ring.bytes()).sum());
        out.memory(Part::Readings, node.gpus.iter().map(|gpu| gpu.series.bytes()).sum());
        let logs = [node.ticks.log(), node.ticks.turns()];
        out.memory(Part::Sweeps, logs.into_iter().flatten().map(|log| log.bytes()).sum());
    }
    {
        let log = state.ledger.ended();
        out.memory(Part::Ended, log.phases.bytes());
        out.memory(Part::Trail, log.trail.bytes());
        out.memory(Part::Layers, log.layers.bytes());
    }
    {
        let board = state.findings.board();
        let incidents = board.incidents().map(Incident::bytes).sum::<usize>();
        out.memory(Part::Findings, board.all().map(Finding::bytes).sum::<usize>() + incidents);
    }
    out.memory(Part::Sqlite, highwater_engine::recording::sqlite_bytes());
    // Without the driver's library, or before it is opened, all pages of files are the program's.
    let library = state.slot.library();
    if let Some(library) = library {
        out.memory(Part::Nvml, library.resident);
    }
    out.memory(Part::Program, footprint.of_files.saturating_sub(library.unwrap_or_default().of_files));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of sizes is a size")]
    let accounted = out.sum(&c::MEMORY) as usize;
    out.memory(Part::Other, footprint.resident.saturating_sub(accounted));
}
