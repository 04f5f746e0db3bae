//! The samples of jobs, ranks and phases.

use super::catalogue as c;
use super::families::Families;
use crate::annotate::{Jobs, Rank, WINDOWS};
use crate::node::Node;
use highwater_core::clock::SECOND_NS;
use highwater_core::wire::Kind;

/// Collects every job's samples. `node` is `None` while there is no source; then only times are known.
pub(super) fn collect(jobs: &Jobs, node: Option<&Node>, now_ns: i64, unix_shift_ns: i64, out: &mut Families) {
    for (job_name, job) in jobs.by_name() {
        for (number, rank) in &job.ranks {
            let number = number.to_string();
            let labels = [&**job_name, number.as_str()];
            info(&labels, rank, node, out);
            steps(&labels, rank, unix_shift_ns, out);
            allocator(&labels, rank, out);
            phases(&labels, rank, now_ns, out);
        }
    }
    for (outcome, count) in jobs.outcomes().labelled() {
        out.count(&c::PHASES, &[outcome], Some(count));
    }
}

fn info(labels: &[&str; 2], rank: &Rank, node: Option<&Node>, out: &mut Families) {
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
fn steps(labels: &[&str; 2], rank: &Rank, unix_shift_ns: i64, out: &mut Families) {
    out.count(&c::JOB_STEP, labels, rank.step);
    out.count(&c::JOB_STEPS, labels, Some(rank.steps));
    out.histogram(&c::JOB_STEP_DURATION, labels, rank.step_durations.counts());
    let last_s = (rank.last_event_ns.saturating_add(unix_shift_ns)) as f64 / SECOND_NS as f64;
    out.number(&c::JOB_LAST_ANNOTATION, labels, Some(last_s));
}

fn allocator(labels: &[&str; 2], rank: &Rank, out: &mut Families) {
    out.count(&c::JOB_ALLOCATOR_ALLOCATED, labels, rank.memory.allocated);
    out.count(&c::JOB_ALLOCATOR_RESERVED, labels, rank.memory.reserved);
    out.count(&c::JOB_ALLOCATOR_RETRIES, labels, rank.memory.alloc_retries);
    out.count(&c::JOB_ALLOCATOR_OOMS, labels, rank.memory.ooms);
    out.count(&c::JOB_OUTSIDE_ALLOCATOR, labels, rank.outside_allocator_bytes);
}

fn phases(labels: &[&str; 2], rank: &Rank, now_ns: i64, out: &mut Families) {
    let is_open = |name: &str| rank.open.iter().any(|open| open.kind == Kind::Phase && &*open.name == name);
    let never_ended = rank.open.iter().filter(|open| open.kind == Kind::Phase && !rank.phases.contains_key(&open.name));
    for open in never_ended {
        out.count(&c::PHASE_ACTIVE, &[labels[0], labels[1], &open.name], Some(1));
    }
    for (name, stats) in &rank.phases {
        let labels = [labels[0], labels[1], &**name];
        out.count(&c::PHASE_ACTIVE, &labels, Some(u64::from(is_open(name))));
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
