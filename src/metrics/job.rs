//! The samples of jobs, ranks and phases.

use super::catalogue as c;
use super::families::{Families, LabelValue, Labels};
use highwater_core::clock::SECOND_NS;
use highwater_core::jobs::{JobId, Profile, Rank};
use highwater_core::mesh::Mesh;
use highwater_core::phases::{Ledger, RankKey, RankStats, WINDOWS};
use highwater_core::wire::{Kind, Memory};
use highwater_engine::node::Node;
use std::sync::Arc;

/// One rank at the time of the collection. It is copied so that the lock on open jobs is released before any sample is
/// made, and senders do not wait for scrapers.
struct RankNow {
    key: RankKey,
    world_size: Option<u32>,
    stage: Option<u32>,
    pid: Option<u32>,
    gpus: Option<Arc<[usize]>>,
    step: Option<u64>,
    steps: u64,
    last_event_ns: i64,
    memory: Memory,
    /// Open phases.
    open: Vec<Arc<str>>,
    profile: Option<Arc<Profile>>,
}

/// Maximum number of layers with series, over all ranks; each has two series. If more ranks than this have a profile, each of
/// them has one layer.
pub(crate) const MOST_LAYERS: usize = 2_048;

impl RankNow {
    fn new(job: &JobId, number: u32, rank: &Rank) -> Self {
        let phases = rank.open.iter().filter(|open| open.kind == Kind::Phase);
        Self {
            key: (job.clone(), number),
            world_size: rank.world_size,
            stage: rank.mesh.as_deref().and_then(Mesh::stage),
            pid: rank.pid,
            gpus: rank.gpus.clone(),
            step: rank.step,
            steps: rank.steps,
            last_event_ns: rank.last_event_ns,
            memory: rank.memory,
            open: phases.map(|open| Arc::clone(&open.name)).collect(),
            profile: rank.profile().cloned(),
        }
    }
}

/// Collects every job's samples. `node` is `None` while no source is open: the samples then name no GPUs.
pub(super) fn collect(ledger: &Ledger, node: Option<&Node>, now_ns: i64, unix_shift_ns: i64, out: &mut Families) {
    let (ranks, left, records_dropped, conflicts) = {
        let jobs = ledger.open();
        let ranks = jobs.ranks().map(|(job, number, rank)| RankNow::new(job, number, rank));
        (ranks.collect::<Vec<_>>(), jobs.left(), jobs.layer_records_dropped(), jobs.conflicts())
    };
    let profiled = ranks.iter().filter(|rank| rank.profile.is_some()).count();
    let most_layers = MOST_LAYERS.checked_div(profiled).unwrap_or(0).max(1);
    let log = ledger.ended();
    let nothing = RankStats::default();
    for rank in &ranks {
        let labels = Labels::of_rank(&rank.key);
        let stats = log.rank(&rank.key).unwrap_or(&nothing);
        info(&labels, rank, node, out);
        steps(&labels, rank, stats, unix_shift_ns, out);
        allocator(&labels, rank, stats, out);
        phases(&labels, rank, stats, now_ns, out);
        if let Some(profile) = &rank.profile {
            layers(&labels, profile, most_layers, out);
        }
    }
    out.count(&c::JOB_CONFLICTS, (), Some(conflicts));
    out.count(&c::LAYER_RECORDS_DROPPED, (), Some(records_dropped));
    out.count(&c::LAYERS_UNKEPT, (), Some(log.layers_unkept()));
    for (outcome, count) in log.attributions().labelled().into_iter().chain(left.labelled()) {
        out.count(&c::PHASES, [outcome], Some(count));
    }
}

fn layers(labels: &Labels, profile: &Profile, most: usize, out: &mut Families) {
    let totals = &profile.totals;
    out.count(&c::JOB_PROFILE_STEP, labels, profile.step);
    out.count(&c::JOB_PROFILE_LAYERS, labels, Some(totals.layers));
    out.count(&c::JOB_PROFILE_MISSING, labels, Some(profile.missing));
    out.count(&c::JOB_PROFILE_ACTIVATION, labels, totals.activations);
    out.count(&c::JOB_PROFILE_PARAMETER, labels, totals.parameters);
    out.count(&c::JOB_PROFILE_GATHERED, labels, totals.gathered);
    out.count(&c::JOB_PROFILE_ALLOCATED_MAX, labels, totals.allocated_max);
    out.count(&c::JOB_PROFILE_RESERVED_MAX, labels, totals.reserved_max);
    for top in profile.top.iter().take(most) {
        let labels = labels.with(Arc::clone(&top.name));
        out.count(&c::LAYER_ACTIVATION, &labels, Some(top.activations));
        out.count(&c::LAYER_PARAMETER, &labels, top.parameters);
    }
}

fn info(labels: &Labels, rank: &RankNow, node: Option<&Node>, out: &mut Families) {
    let world_size = rank.world_size.map(|size| size.to_string()).unwrap_or_default();
    let gpus = rank.gpus.as_deref().unwrap_or_default();
    let labels = labels.with(LabelValue::Found(world_size.into()));
    let devices: Vec<_> = gpus.iter().filter_map(|gpu| Some(&node?.gpus.get(*gpu)?.device)).collect();
    for device in &devices {
        let of_gpu = labels.with(Arc::from(device.index.as_str())).with(Arc::from(device.uuid.as_str()));
        out.number(&c::JOB_INFO, of_gpu, Some(1.0));
    }
    if devices.is_empty() {
        out.number(&c::JOB_INFO, labels.with("").with(""), Some(1.0));
    }
}

#[allow(clippy::cast_precision_loss, reason = "seconds of Unix time to a microsecond")]
fn steps(labels: &Labels, rank: &RankNow, stats: &RankStats, unix_shift_ns: i64, out: &mut Families) {
    out.count(&c::JOB_STEP, labels, rank.step);
    out.count(&c::JOB_STEPS, labels, Some(rank.steps));
    out.count(&c::JOB_PIPELINE_STAGE, labels, rank.stage.map(u64::from));
    out.histogram(&c::JOB_STEP_DURATION, labels, stats.step_durations.counts());
    out.number(&c::JOB_STEP_IDLE, labels, stats.step_gpu_time.idle_seconds);
    out.number(&c::JOB_STEP_SM_ACTIVE, labels, stats.step_gpu_time.sm_active_seconds);
    out.number(&c::JOB_STEP_TENSOR_ACTIVE, labels, stats.step_gpu_time.tensor_active_seconds);
    out.number(&c::JOB_STEP_DRAM_ACTIVE, labels, stats.step_gpu_time.dram_active_seconds);
    out.number(&c::JOB_STEP_IDLE_OBSERVED, labels, stats.step_gpu_time.idle_observed_seconds);
    out.number(&c::JOB_STEP_ACTIVE_OBSERVED, labels, stats.step_gpu_time.active_observed_seconds);
    let last_s = (rank.last_event_ns.saturating_add(unix_shift_ns)) as f64 / SECOND_NS as f64;
    out.number(&c::JOB_LAST_ANNOTATION, labels, Some(last_s));
}

fn allocator(labels: &Labels, rank: &RankNow, stats: &RankStats, out: &mut Families) {
    out.count(&c::JOB_ALLOCATOR_ALLOCATED, labels, rank.memory.allocated);
    out.count(&c::JOB_ALLOCATOR_RESERVED, labels, rank.memory.reserved);
    out.count(&c::JOB_ALLOCATOR_RETRIES, labels, rank.memory.alloc_retries);
    out.count(&c::JOB_ALLOCATOR_OOMS, labels, rank.memory.ooms);
    let outside_bytes = stats.outside_allocator_bytes(rank.pid, rank.gpus.as_deref());
    out.count(&c::JOB_OUTSIDE_ALLOCATOR, labels, outside_bytes);
}

fn phases(labels: &Labels, rank: &RankNow, stats: &RankStats, now_ns: i64, out: &mut Families) {
    for open in rank.open.iter().filter(|open| !stats.phases.contains_key(*open)) {
        out.count(&c::PHASE_ACTIVE, labels.with(Arc::clone(open)), Some(1));
    }
    for (name, stats) in &stats.phases {
        let labels = labels.with(Arc::clone(name));
        out.count(&c::PHASE_ACTIVE, &labels, Some(u64::from(rank.open.contains(name))));
        out.histogram(&c::PHASE_DURATION, &labels, stats.durations.counts());
        out.count(&c::PHASE_MEMORY_PEAK, &labels, stats.peak_bytes);
        for (window, length_ns) in WINDOWS {
            out.count(&c::PHASE_MEMORY_PEAK_MAX, labels.with(window), stats.peak_max_bytes(now_ns, length_ns));
        }
        #[allow(clippy::cast_precision_loss, reason = "bytes below 2^53")]
        let growth = stats.growth_bytes.map(|bytes| bytes as f64);
        out.number(&c::PHASE_MEMORY_GROWTH, &labels, growth);
        out.number(&c::PHASE_ENERGY, &labels, stats.energy_joules);
        out.number(&c::PHASE_IDLE, &labels, stats.gpu_time.idle_seconds);
        out.number(&c::PHASE_SM_ACTIVE, &labels, stats.gpu_time.sm_active_seconds);
        out.number(&c::PHASE_TENSOR_ACTIVE, &labels, stats.gpu_time.tensor_active_seconds);
        out.number(&c::PHASE_DRAM_ACTIVE, &labels, stats.gpu_time.dram_active_seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Scenario, Sim};
    use highwater_core::clock::Manual;
    use highwater_core::jobs::{Limits, Resource, Sender};
    use highwater_core::phases::{Attributed, TrailBlock};
    use highwater_core::source::Source as _;
    use highwater_engine::intake::Intake;

    /// What a node of 64 ranks knows after some steps, with or without 500 layers each, which every fifth step profiles.
    fn after_a_while(layers: &str) -> (Intake, usize) {
        let text = format!(
            "[[gpus]]\ncount = 64\n[[jobs]]\nname = \"large\"\nranks = 64\nbase = \"16 GiB\"\nsteps = 12\nphases = [\n\
             {{ name = \"forward\", duration = \"300 ms\", jitter = \"9 ms\", to = \"80 GiB\", shape = \"steps\" }},\n\
             {{ name = \"backward\", duration = \"500 ms\", to = \"90 GiB\", shape = \"steps\", release = true }}]\n{layers}"
        );
        let sim = Sim::new(Scenario::parse(&text, "large.toml").expect("good"), SECOND_NS);
        let clock = Arc::new(Manual::at(SECOND_NS));
        let intake = Intake::new(Limits::default(), Arc::clone(&clock) as _, Arc::default());
        intake.set_devices(sim.devices());
        let (sender, mut records) = (Sender::process(None, 1_000), 0);
        for said in sim.annotations() {
            clock.advance_to(said.time_unix_nano.expect("a time"));
            records += usize::from(said.layer.is_some());
            intake.take(said, &sender).expect("taken");
            for ended in intake.jobs().take_ended(i64::MAX, usize::MAX) {
                intake.ledger().ended().record(Attributed { ended, gpus: Vec::new(), uuids: Arc::default() });
            }
        }
        (intake, records)
    }

    fn samples(intake: &Intake) -> Vec<(&'static str, usize)> {
        let mut out = Families::default();
        collect(intake.ledger(), None, 60 * SECOND_NS, 0, &mut out);
        out.into_ordered().iter().map(|family| (family.metric.name, family.samples.len())).collect()
    }

    #[test]
    fn layers_of_64_ranks_stay_in_bounds_and_push_no_history_out() {
        let (without, none) = after_a_while("");
        let (with, records) = after_a_while("[jobs.layers]\ncount = 500\nevery_steps = 5\nsharded = true\n");
        assert_eq!((none, records), (0, 3 * 2 * 500 * 64));
        let held = |intake: &Intake| intake.accounts().held(Resource::Layers);
        assert_eq!(held(&without), 0);
        assert!((1 << 20..=Limits::default().layer_bytes / 2).contains(&held(&with)), "{} bytes", held(&with));
        for (_, _, rank) in with.jobs().ranks() {
            let profile = rank.profile().expect("one");
            assert_eq!((profile.step, profile.count, profile.missing), (Some(10), 1_000, 0));
        }
        // What has ended, and when: as long a history as without layers.
        let history = |intake: &Intake| {
            let log = intake.ledger().ended();
            let spans = |block: &Arc<TrailBlock>| block.spans().count();
            let spans: usize = log.trail.blocks(i64::MIN, i64::MAX).iter().map(spans).sum();
            (log.phases.count(), log.phases.since(0).0.len(), log.layers.count(), spans, intake.jobs().marks().count())
        };
        assert_eq!(history(&with), history(&without));
        assert_eq!(history(&with).3, 64 * 12 * 3, "steps and phases");
        let (with, without) = (samples(&with), samples(&without));
        let of = |name: &str| with.iter().find(|(of, _)| *of == name).map(|(_, count)| *count);
        assert_eq!(of("highwater_layer_activation_bytes"), Some(64 * 10));
        let sum = |samples: &[(&str, usize)]| samples.iter().map(|(_, count)| count).sum::<usize>();
        assert_eq!(sum(&with) - sum(&without), 64 * (8 + 2 * 10));
    }

    /// 512 ranks with 100 layers each would have 102,400 series; they have 4,096.
    #[test]
    fn series_of_layers_are_bounded_over_all_ranks() {
        use highwater_core::jobs::{Accounts, Event, Owner};
        use highwater_core::wire::{Direction, EventType, Layer};
        let limits = Limits { top_layers: 100, layer_bytes: 64 << 20, ..Limits::default() };
        let (ledger, account) = (Ledger::new(limits), Accounts::new(&limits).of(&Owner::Daemon));
        for rank in 0..512 {
            for n in 0..=100 {
                let layer = Layer { activations: Some(n), ..Layer::new(Direction::Forward) };
                let (name, layer) = (format!("layer {n}"), Some(Box::new(layer)));
                let step = Some(n / 100);
                let mark = Event {
                    event: EventType::Mark,
                    kind: Kind::Layer,
                    name,
                    layer,
                    step,
                    rank,
                    ..Event::exit("j", 0, None, 1)
                };
                ledger.open().take(&mark, &account, 1).expect("taken");
            }
        }
        let mut out = Families::default();
        collect(&ledger, None, 1, 0, &mut out);
        let families = out.into_ordered();
        let count =
            |name: &str| families.iter().find(|family| family.metric.name == name).map(|family| family.samples.len());
        assert_eq!(count("highwater_layer_activation_bytes"), Some(MOST_LAYERS));
        assert_eq!(count("highwater_layer_parameter_bytes"), None, "unknown");
    }
}
