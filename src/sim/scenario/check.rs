//! Checks what a scenario must satisfy beyond its syntax. Each fault names the key to change.

use super::fleet::Fleet;
use super::{BACKWARD, FORWARD, Job, NVLINKS, Nanoseconds, Phase, Pipeline, Scenario, ScenarioFault, Schedule, Shape};
use highwater_core::gpu::THROTTLE_REASONS;
use std::collections::BTreeSet;

/// The longest duration: sums of a few of these stay far from the end of 64-bit time.
const LONGEST_NS: i64 = 366 * 86_400 * 1_000_000_000;
/// The shortest phase, so that time advances.
const SHORTEST_PHASE_NS: i64 = 1_000;
/// The limit on counts. More than a node has is a typing error.
const MOST: usize = 256;
/// The limit on a model's layers times the job's ranks: all records of a step are in memory at once.
const MOST_LAYERS: usize = 65_536;
/// The limit on what a pipeline runs in a step, in each direction: all of it is in memory at once.
const MOST_PASSES: usize = 4_096;
/// Larger than any framebuffer: 1 PiB.
const LARGEST_BYTES: u64 = 1 << 50;

/// Everything that is wrong, with keys and without lines.
pub(super) fn faults(scenario: &Scenario) -> Vec<ScenarioFault> {
    let mut found = Faults::default();
    check_gpus(scenario, &mut found);
    if !found.0.is_empty() {
        return found.0;
    }
    let fleet = Fleet::of(scenario);
    for (index, job) in scenario.jobs.iter().enumerate() {
        check_job(job, &format!("jobs[{index}]"), &fleet, &mut found);
        if scenario.jobs.iter().take(index).any(|other| other.name == job.name) {
            found.add(format!("jobs[{index}].name"), format!("there is another job `{}`", job.name));
        }
    }
    check_befalling(scenario, &fleet, &mut found);
    if found.0.is_empty() {
        check_room(scenario, &fleet, &mut found);
    }
    found.0
}

#[derive(Default)]
struct Faults(Vec<ScenarioFault>);

impl Faults {
    fn add(&mut self, key: String, message: impl Into<String>) {
        self.0.push(ScenarioFault { key, line: None, message: message.into() });
    }

    fn require(&mut self, holds: bool, key: String, message: impl Into<String>) {
        if !holds {
            self.add(key, message);
        }
    }

    fn lasts(&mut self, duration: Nanoseconds, shortest_ns: i64, key: String) {
        self.require(duration.0 >= shortest_ns, key.clone(), "is too short");
        self.require(duration.0 <= LONGEST_NS, key, "must be at most 366 d");
    }

    fn stretches(&mut self, factor: f64, key: String) {
        self.require((1.0..=1_000.0).contains(&factor), key, "must lie between 1 and 1000");
    }
}

fn check_gpus(scenario: &Scenario, found: &mut Faults) {
    let count = scenario.gpus.iter().map(|group| group.count).fold(0_usize, usize::saturating_add);
    found.require((1..=MOST).contains(&count), "gpus".into(), format!("must be 1 to {MOST} GPUs in all"));
    for (index, group) in scenario.gpus.iter().enumerate() {
        let at = format!("gpus[{index}]");
        found.require(group.total.0 <= LARGEST_BYTES, format!("{at}.total"), "must be at most 1024 TiB");
        found.require(group.reserved < group.total, format!("{at}.reserved"), "must be less than `total`");
        found.require(group.mig.len() <= 16, format!("{at}.mig"), "must be at most 16 instances");
        let instances = group.mig.iter().fold(0_u64, |sum, instance| sum.saturating_add(instance.total.0));
        let usable = group.total.0.saturating_sub(group.reserved.0);
        found.require(instances <= usable, format!("{at}.mig"), "instances must fit into `total` less `reserved`");
    }
}

fn check_job(job: &Job, at: &str, fleet: &Fleet, found: &mut Faults) {
    found.require(!job.name.is_empty(), format!("{at}.name"), "must not be empty");
    check_ranks(job, at, fleet, found);
    found.lasts(job.start, 0, format!("{at}.start"));
    found.lasts(job.startup, 1, format!("{at}.startup"));
    if let Some(again) = job.restart_after {
        found.lasts(again, 1, format!("{at}.restart_after"));
    }
    found.stretches(job.first_step_stretch, format!("{at}.first_step_stretch"));
    let phases = 1..=MOST;
    found.require(phases.contains(&job.phases.len()), format!("{at}.phases"), format!("must be 1 to {MOST}"));
    for (index, phase) in job.phases.iter().enumerate() {
        check_phase(job, phase, &format!("{at}.phases[{index}]"), found);
    }
    check_troubles(job, at, found);
    if let Some(pipeline) = &job.pipeline {
        check_pipeline(job, pipeline, &format!("{at}.pipeline"), found);
    }
}

fn check_pipeline(job: &Job, pipeline: &Pipeline, at: &str, found: &mut Faults) {
    let ranks = job.ranks.count();
    let divides = pipeline.stages >= 2 && ranks.is_multiple_of(pipeline.stages);
    found.require(divides, format!("{at}.stages"), format!("must be 2 or more, and divide the {ranks} ranks"));
    found.require(
        (1..=MOST).contains(&pipeline.microbatches),
        format!("{at}.microbatches"),
        format!("must be 1 to {MOST}"),
    );
    found.require((1..=16).contains(&pipeline.chunks), format!("{at}.chunks"), "must be 1 to 16");
    let passes = pipeline.stages.saturating_mul(pipeline.chunks).saturating_mul(pipeline.microbatches);
    found.require(
        passes <= MOST_PASSES,
        at.to_owned(),
        format!("must be at most {MOST_PASSES} stages × chunks × microbatches"),
    );
    let is_interleaved = pipeline.chunks > 1 && pipeline.schedule == Schedule::Gpipe;
    found.require(!is_interleaved, format!("{at}.chunks"), "must be 1 with the schedule `gpipe`");
    let is_each = pipeline.weights.is_empty() || pipeline.weights.len() == pipeline.stages;
    found.require(is_each, format!("{at}.weights"), "must have a number for each stage");
    for (index, weight) in pipeline.weights.iter().enumerate() {
        found.require(
            (0.01..=100.0).contains(weight),
            format!("{at}.weights[{index}]"),
            "must lie between 0.01 and 100",
        );
    }
    found.require(
        (0.0..1.0).contains(&pipeline.spread),
        format!("{at}.spread"),
        "must lie between 0 and 1, and not be 1",
    );
    if let Some(slow) = &pipeline.slow {
        found.require((slow.rank as usize) < ranks, format!("{at}.slow.rank"), "the job has no such rank");
        found.stretches(slow.factor, format!("{at}.slow.factor"));
    }
    found.require(!pipeline.wait.is_empty(), format!("{at}.wait"), "must not be empty");
    for name in [FORWARD, BACKWARD] {
        let passes: Vec<&Phase> = job.phases.iter().filter(|phase| phase.name == name).collect();
        found.require(passes.len() == 1, at.to_owned(), format!("needs one phase `{name}`"));
        let is_plain = |phase: &&Phase| !phase.collective && !phase.release && (name == FORWARD || phase.to.is_none());
        let message =
            format!("its phase `{name}` cannot have `collective` or `release`, nor `to` if it is `{BACKWARD}`");
        found.require(passes.iter().all(is_plain), at.to_owned(), message);
        let stalls = job.data_stall.as_ref().is_some_and(|stall| stall.phase == name);
        found.require(!stalls, at.to_owned(), format!("`data_stall` cannot be in its phase `{name}`"));
    }
    let has_trouble = job.near_oom.is_some() || job.oom.is_some() || job.layers.is_some() || job.leak_per_step.0 > 0;
    found.require(
        !has_trouble,
        at.to_owned(),
        "cannot be simulated with `near_oom`, `oom`, `layers` or `leak_per_step`",
    );
}

fn check_ranks(job: &Job, at: &str, fleet: &Fleet, found: &mut Faults) {
    if !(1..=MOST).contains(&job.ranks.count()) {
        // Checked before the ranks are looked at: a number of nine bytes could stand for gigabytes.
        return found.add(format!("{at}.ranks"), format!("must be 1 to {MOST}"));
    }
    let own = u64::from(job.first_rank) + job.ranks.count() as u64;
    let fits = own <= u64::from(job.world_size.unwrap_or(u32::MAX));
    found.require(
        fits,
        format!("{at}.world_size"),
        format!("must be {own} or more, as ranks up to {} are here", own - 1),
    );
    let listed = matches!(job.ranks, super::Ranks::On(_));
    let mut seen = BTreeSet::new();
    for (rank, device) in job.ranks.devices().iter().enumerate() {
        let key = if listed { format!("{at}.ranks[{rank}]") } else { format!("{at}.ranks") };
        match fleet.find(device) {
            None => found.add(key, format!("there is no GPU {device} in this scenario")),
            Some(position) if fleet.is_split(position) => {
                found.add(key, format!("GPU {device} is split: name one of its instances, as \"{device}:0\""));
            }
            Some(position) => {
                found.require(seen.insert(position), key, format!("GPU {device} has a rank of this job already"));
            }
        }
    }
}

fn check_phase(job: &Job, phase: &Phase, at: &str, found: &mut Faults) {
    found.require(!phase.name.is_empty(), format!("{at}.name"), "must not be empty");
    let shortest = phase.duration.0.saturating_sub(phase.jitter.0);
    found.require(
        shortest >= SHORTEST_PHASE_NS,
        format!("{at}.duration"),
        "must be at least 1 us with the jitter taken off",
    );
    found.require(phase.duration.0 <= LONGEST_NS, format!("{at}.duration"), "must be at most 366 d");
    found.require((0.0..=1.0).contains(&phase.busy), format!("{at}.busy"), "must lie between 0 and 1");
    let moves = phase.shape != Shape::Hold;
    found.require(
        phase.to.is_some() == moves,
        format!("{at}.shape"),
        "`to` needs `ramp` or `steps`, and they need `to`",
    );
    let at_least_base = phase.to.is_none_or(|to| to >= job.base);
    found.require(at_least_base, format!("{at}.to"), "must not be below the job's `base`");
}

fn check_troubles(job: &Job, at: &str, found: &mut Faults) {
    let ranks = job.ranks.count();
    let names_phase = |name: &str| job.phases.iter().any(|phase| phase.name == name);
    let rank_is_there = |rank: u32| (rank as usize) < ranks;
    if let Some(checkpoint) = &job.checkpoint {
        found.require(checkpoint.every_steps > 0, format!("{at}.checkpoint.every_steps"), "must be at least 1");
        found.lasts(checkpoint.duration, SHORTEST_PHASE_NS, format!("{at}.checkpoint.duration"));
    }
    if let Some(layers) = &job.layers {
        let (at, most) = (format!("{at}.layers"), MOST_LAYERS / ranks.max(1));
        let message = format!("must be 1 to {} with {ranks} ranks", most.min(4_096));
        found.require((1..=most.min(4_096)).contains(&layers.count), format!("{at}.count"), message);
        found.require(layers.every_steps > 0, format!("{at}.every_steps"), "must be at least 1");
        let rises = job.phases.iter().any(|phase| phase.name == FORWARD && phase.to.is_some());
        found.require(rises, at, "needs a phase `forward` with `to`");
    }
    if let Some(stall) = &job.data_stall {
        found.require(stall.every_steps > 0, format!("{at}.data_stall.every_steps"), "must be at least 1");
        found.lasts(stall.duration, 1, format!("{at}.data_stall.duration"));
        found.require(names_phase(&stall.phase), format!("{at}.data_stall.phase"), "the job has no such phase");
    }
    if let Some(near) = &job.near_oom {
        let at = format!("{at}.near_oom");
        found.require(rank_is_there(near.rank), format!("{at}.rank"), "the job has no such rank");
        found.require(names_phase(&near.phase), format!("{at}.phase"), "the job has no such phase");
        check_window(("offset", near.offset), near.every, ("for", near.lasting), &at, found);
        found.lasts(near.regrow, 1_000_000, format!("{at}.regrow"));
        found.stretches(near.comm_stretch, format!("{at}.comm_stretch"));
        let either = near.free.is_some() != near.ballast.is_some();
        found.require(either, at, "needs either `free` or `ballast`");
    }
    if let Some(oom) = &job.oom {
        let at = format!("{at}.oom");
        found.require(rank_is_there(oom.rank), format!("{at}.rank"), "the job has no such rank");
        found.require(names_phase(&oom.phase), format!("{at}.phase"), "the job has no such phase");
        check_window(("at", oom.at), oom.every, ("every", INSTANT), &at, found);
    }
}

/// A window, with the names of the keys for its begin and its length.
fn check_window(
    (begin_key, begin): (&str, Nanoseconds),
    every: Option<Nanoseconds>,
    (length_key, length): (&str, Nanoseconds),
    at: &str,
    found: &mut Faults,
) {
    found.lasts(begin, 0, format!("{at}.{begin_key}"));
    found.lasts(length, 1, format!("{at}.{length_key}"));
    if let Some(every) = every {
        found.lasts(every, 1, format!("{at}.every"));
        found.require(length <= every, format!("{at}.{length_key}"), "must not be longer than `every`");
    }
}

/// The length of an event without a duration.
const INSTANT: Nanoseconds = Nanoseconds(1);

fn check_befalling(scenario: &Scenario, fleet: &Fleet, found: &mut Faults) {
    let is_there = |gpu: &super::DeviceRef, at: &str, found: &mut Faults| {
        found.require(
            fleet.find(gpu).is_some(),
            format!("{at}.gpu"),
            format!("there is no GPU {gpu} in this scenario"),
        );
    };
    for (index, spike) in scenario.spikes.iter().enumerate() {
        let at = format!("spikes[{index}]");
        is_there(&spike.gpu, &at, found);
        check_window(("offset", spike.offset), spike.every, ("duration", spike.duration), &at, found);
    }
    for (index, lost) in scenario.lost.iter().enumerate() {
        let at = format!("lost[{index}]");
        is_there(&lost.gpu, &at, found);
        check_window(("at", lost.at), lost.every, ("for", lost.lasting), &at, found);
    }
    for (index, degraded) in scenario.degraded.iter().enumerate() {
        let at = format!("degraded[{index}]");
        is_there(&degraded.gpu, &at, found);
        check_window(("at", degraded.at), degraded.every, ("for", degraded.lasting), &at, found);
        let names = || THROTTLE_REASONS.iter().map(|(_, name)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let is_known = degraded.throttle.is_none() || degraded.throttle_bit().is_some();
        found.require(is_known, format!("{at}.throttle"), format!("must be one of {}", names()));
        let is_share = degraded.clock > 0.0 && degraded.clock <= 1.0;
        found.require(is_share, format!("{at}.clock"), "must be above 0 and at most 1");
        let of_link = [("pcie_generation", degraded.pcie_generation, 5), ("pcie_width", degraded.pcie_width, 16)];
        for (key, value, best) in of_link {
            let is_possible = value.is_none_or(|value| (1..=best).contains(&value));
            found.require(is_possible, format!("{at}.{key}"), format!("must be from 1 to {best}"));
        }
        found.require(
            degraded.nvlinks_down <= NVLINKS,
            format!("{at}.nvlinks_down"),
            format!("must be at most {NVLINKS}"),
        );
    }
    for (index, xid) in scenario.xids.iter().enumerate() {
        let at = format!("xids[{index}]");
        is_there(&xid.gpu, &at, found);
        check_window(("at", xid.at), xid.every, ("every", INSTANT), &at, found);
    }
}

/// Every device must hold the most that its ranks ever take by themselves, and a rank that is driven to the limit of
/// its GPU must be alone on it.
fn check_room(scenario: &Scenario, fleet: &Fleet, found: &mut Faults) {
    let mut taken = vec![(0_u64, 0_usize); fleet.devices.len()];
    for (index, job) in scenario.jobs.iter().enumerate() {
        for device in job.ranks.devices() {
            let Some(position) = fleet.find(&device) else { continue };
            let (bytes, ranks) = &mut taken[position];
            *bytes = bytes.saturating_add(job.most_bytes());
            *ranks += 1;
            let room = fleet.usable_bytes(position);
            let message = format!(
                "GPU {device} has {} MiB for its jobs, and with this one they take {} MiB",
                room >> 20,
                *bytes >> 20
            );
            found.require(*bytes <= room, format!("jobs[{index}].ranks"), message);
        }
    }
    for (index, job) in scenario.jobs.iter().enumerate() {
        check_limits(job, &format!("jobs[{index}]"), fleet, &taken, found);
    }
}

fn check_limits(job: &Job, at: &str, fleet: &Fleet, taken: &[(u64, usize)], found: &mut Faults) {
    let devices = job.ranks.devices();
    let position_of = |rank: u32| devices.get(rank as usize).and_then(|device| fleet.find(device));
    let alone = |position: Option<usize>, key: String, found: &mut Faults| {
        let shared = position.is_some_and(|position| taken[position].1 > 1);
        found.require(!shared, key, "needs a GPU that no other job shares");
    };
    if let Some(near) = &job.near_oom {
        let position = position_of(near.rank);
        alone(position, format!("{at}.near_oom"), found);
        let room = position.map_or(0, |position| fleet.usable_bytes(position)).saturating_sub(job.most_bytes());
        let (asked, key) = match (near.free, near.ballast) {
            (Some(free), _) => (free.0, "free"),
            (None, ballast) => (ballast.unwrap_or_default().0, "ballast"),
        };
        let message = format!("the GPU has no more than {} MiB left at the job's peak", room >> 20);
        found.require(asked <= room, format!("{at}.near_oom.{key}"), message);
    }
    if let Some(oom) = &job.oom {
        alone(position_of(oom.rank), format!("{at}.oom"), found);
    }
    if job.leak_per_step.0 > 0 {
        devices.iter().for_each(|device| alone(fleet.find(device), format!("{at}.leak_per_step"), found));
    }
}
