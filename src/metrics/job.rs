//! The samples of jobs, ranks and phases.

use super::catalogue as c;
use super::families::Families;
use crate::node::Node;
use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::Rank;
use highwater_core::phases::{Ledger, RankKey, RankStats, WINDOWS};
use highwater_core::wire::{Kind, Memory};
use std::sync::Arc;

/// One rank as it was when it was looked at: what is open is let go before any sample is made, so that whoever sends does
/// not wait for whoever scrapes.
struct RankNow {
    key: RankKey,
    world_size: Option<u32>,
    pid: Option<u32>,
    gpus: Option<Arc<[usize]>>,
    step: Option<u64>,
    steps: u64,
    last_event_ns: i64,
    memory: Memory,
    /// Phases that are open.
    open: Vec<Arc<str>>,
}

impl RankNow {
    fn new(job: &Arc<str>, number: u32, rank: &Rank) -> Self {
        let phases = rank.open.iter().filter(|open| open.kind == Kind::Phase);
        Self {
            key: (Arc::clone(job), number),
            world_size: rank.world_size,
            pid: rank.pid,
            gpus: rank.gpus.clone(),
            step: rank.step,
            steps: rank.steps,
            last_event_ns: rank.last_event_ns,
            memory: rank.memory,
            open: phases.map(|open| Arc::clone(&open.name)).collect(),
        }
    }
}

/// Collects every job's samples. `node` is `None` while there is no source; then only times are known.
pub(super) fn collect(ledger: &Ledger, node: Option<&Node>, now_ns: i64, unix_shift_ns: i64, out: &mut Families) {
    let (ranks, left) = {
        let jobs = ledger.open();
        (jobs.ranks().map(|(job, number, rank)| RankNow::new(job, number, rank)).collect::<Vec<_>>(), jobs.left())
    };
    let log = ledger.ended();
    let nothing = RankStats::default();
    for rank in &ranks {
        let number = rank.key.1.to_string();
        let labels = [&*rank.key.0, number.as_str()];
        let stats = log.rank(&rank.key).unwrap_or(&nothing);
        info(&labels, rank, node, out);
        steps(&labels, rank, stats, unix_shift_ns, out);
        allocator(&labels, rank, stats, out);
        phases(&labels, rank, stats, now_ns, out);
    }
    out.count(&c::LAYERS_UNKEPT, &[], Some(log.layers_unkept()));
    for (outcome, count) in log.attributions().labelled().into_iter().chain(left.labelled()) {
        out.count(&c::PHASES, &[outcome], Some(count));
    }
}

fn info(labels: &[&str; 2], rank: &RankNow, node: Option<&Node>, out: &mut Families) {
    let world_size = rank.world_size.map(|size| size.to_string()).unwrap_or_default();
    let gpus = rank.gpus.as_deref().unwrap_or_default();
    let devices: Vec<_> = gpus.iter().filter_map(|gpu| Some(&node?.gpus.get(*gpu)?.device)).collect();
    for device in &devices {
        out.number(&c::JOB_INFO, &[labels[0], labels[1], &world_size, &device.index, &device.uuid], Some(1.0));
    }
    if devices.is_empty() {
        out.number(&c::JOB_INFO, &[labels[0], labels[1], &world_size, "", ""], Some(1.0));
    }
}

#[allow(clippy::cast_precision_loss, reason = "seconds of Unix time to a microsecond")]
fn steps(labels: &[&str; 2], rank: &RankNow, stats: &RankStats, unix_shift_ns: i64, out: &mut Families) {
    out.count(&c::JOB_STEP, labels, rank.step);
    out.count(&c::JOB_STEPS, labels, Some(rank.steps));
    out.histogram(&c::JOB_STEP_DURATION, labels, stats.step_durations.counts());
    let last_s = (rank.last_event_ns.saturating_add(unix_shift_ns)) as f64 / SECOND_NS as f64;
    out.number(&c::JOB_LAST_ANNOTATION, labels, Some(last_s));
}

fn allocator(labels: &[&str; 2], rank: &RankNow, stats: &RankStats, out: &mut Families) {
    out.count(&c::JOB_ALLOCATOR_ALLOCATED, labels, rank.memory.allocated);
    out.count(&c::JOB_ALLOCATOR_RESERVED, labels, rank.memory.reserved);
    out.count(&c::JOB_ALLOCATOR_RETRIES, labels, rank.memory.alloc_retries);
    out.count(&c::JOB_ALLOCATOR_OOMS, labels, rank.memory.ooms);
    let outside_bytes = stats.outside_allocator_bytes(rank.pid, rank.gpus.as_deref());
    out.count(&c::JOB_OUTSIDE_ALLOCATOR, labels, outside_bytes);
}

fn phases(labels: &[&str; 2], rank: &RankNow, stats: &RankStats, now_ns: i64, out: &mut Families) {
    for open in rank.open.iter().filter(|open| !stats.phases.contains_key(*open)) {
        out.count(&c::PHASE_ACTIVE, &[labels[0], labels[1], open], Some(1));
    }
    for (name, stats) in &stats.phases {
        let labels = [labels[0], labels[1], &**name];
        out.count(&c::PHASE_ACTIVE, &labels, Some(u64::from(rank.open.contains(name))));
        out.histogram(&c::PHASE_DURATION, &labels, stats.durations.counts());
        out.count(&c::PHASE_MEMORY_PEAK, &labels, stats.peak_bytes);
        for (window, length_ns) in WINDOWS {
            let labels = [labels[0], labels[1], labels[2], window];
            out.count(&c::PHASE_MEMORY_PEAK_MAX, &labels, stats.peak_max_bytes(now_ns, length_ns));
        }
        #[allow(clippy::cast_precision_loss, reason = "bytes below 2^53")]
        let growth = stats.growth_bytes.map(|bytes| bytes as f64);
        out.number(&c::PHASE_MEMORY_GROWTH, &labels, growth);
        out.number(&c::PHASE_ENERGY, &labels, stats.energy_joules);
        out.number(&c::PHASE_IDLE, &labels, stats.idle_seconds);
    }
}
