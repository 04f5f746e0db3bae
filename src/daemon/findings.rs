//! Tests of findings in simulations, with the delay from the onset to the moment at which a scrape would report them.

use crate::sim::{Scenario, Sim};
use highwater_core::clock::{Clock as _, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::detect::{Certainty, Detect, FindingKind, Settings, Severity, Sign};
use highwater_core::jobs::{Limits, Sender};
use highwater_core::ring;
use highwater_core::source::{DriverEvent, Source};
use highwater_core::wire::{Annotation, EventType};
use highwater_engine::intake::{Intake, due};
use highwater_engine::node::{Node, Periods};
use std::sync::Arc;
use std::time::Duration;

pub(super) const START_NS: i64 = 1_800_000_000 * SECOND_NS;
/// How late a finding may be.
const LATE_NS: i64 = 500 * MILLISECOND_NS;

/// The period of the join.
pub(super) const TURN_NS: i64 = 100 * MILLISECOND_NS;

/// The signs seen, each with the time of its turn of the join.
type Seen = Vec<(i64, Sign)>;

/// A simulated node as the daemon runs it, with simulated time.
struct Played {
    source: Arc<Sim>,
    /// The signs seen; times are nanoseconds since the start.
    seen: Seen,
    /// The steps of each rank: job, rank, number, begin and end, since the start.
    steps: Vec<(String, u32, u64, i64, i64)>,
    detect: Detect,
    intake: Intake,
}

fn play(scenario: &str, seconds: i64) -> Played {
    play_with(scenario, seconds, Settings::default())
}

fn play_with(scenario: &str, seconds: i64, settings: Settings) -> Played {
    play_within(scenario, seconds, settings, Limits::default())
}

fn play_within(scenario: &str, seconds: i64, settings: Settings, limits: Limits) -> Played {
    let (clock, source, node, writers) = simulated(scenario);
    let intake = Intake::new(limits, Arc::clone(&clock) as _, Arc::default());
    intake.set_devices(source.devices());
    let detect = Detect::new(settings);
    let mut sampler = node.sampler(writers);
    let mut said = source.annotations().peekable();
    let (mut seen, mut said_in_order) = (Seen::new(), Vec::new());
    for ms in 1..=seconds * 1000 {
        clock.advance_to(START_NS + ms * MILLISECOND_NS);
        let now_ns = clock.now_ns();
        sampler.tick(now_ns, |_| ());
        for annotation in due(&mut said, now_ns) {
            said_in_order.push(annotation.clone());
            intake.take(annotation, &Sender::DAEMON).expect("a good annotation");
        }
        if ms % 100 == 0 {
            lanes(&node, now_ns);
            node.advance(intake.ledger(), now_ns);
            let change = detect.advance(&node.join, intake.ledger(), now_ns);
            seen.extend(change.signs.into_iter().map(|sign| (now_ns - START_NS, sign)));
        }
    }
    Played { source, seen, steps: steps(&said_in_order), detect, intake }
}

/// A node that reads this scenario, with simulated time.
pub(super) fn simulated(scenario: &str) -> (Arc<Manual>, Arc<Sim>, Node, Vec<ring::Writer>) {
    let scenario = Scenario::parse(scenario, "story").expect("a scenario");
    let (clock, source) = (Arc::new(Manual::at(START_NS)), Arc::new(Sim::new(scenario, START_NS)));
    let rings = ring::Config { retention_ns: 60 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };
    let made = Node::new(Arc::clone(&source) as _, Arc::clone(&clock) as _, rings, Periods::default(), None);
    let (node, writers) = made.expect("rings");
    (clock, source, node, writers)
}

/// The work of the other lanes' threads: readings, events, and attempts to get back a lost GPU.
pub(super) fn lanes(node: &Node, now_ns: i64) {
    for (position, gpu) in node.gpus.iter().enumerate() {
        if gpu.health() == highwater_core::gpu::Health::Up {
            gpu.set_medium(now_ns, node.source.medium(position, now_ns, &node.calls));
            gpu.set_slow(now_ns, node.source.slow(position, now_ns, &node.calls));
            if gpu.rare().is_none_or(|rare| now_ns - rare.at_ns >= 30 * SECOND_NS) {
                gpu.set_rare(now_ns, node.source.rare(position, now_ns, &node.calls));
                gpu.set_processes(now_ns, node.source.processes(position, now_ns, &node.calls));
            }
        } else if node.source.reacquire(position).is_ok() {
            gpu.set_health(highwater_core::gpu::Health::Up);
        }
    }
    while let Ok(Some(DriverEvent::Xid { gpu, xid })) = node.source.wait_event(Duration::ZERO) {
        node.gpus[gpu].set_xids([(xid, highwater_core::gpu::Xid { count: 1, last_ns: now_ns })].into());
    }
}

fn steps(said_in_order: &[Annotation]) -> Vec<(String, u32, u64, i64, i64)> {
    use highwater_core::wire::Kind as Of;
    let of_steps = said_in_order.iter().filter(|said| said.kind == Of::Step);
    let mut begun = std::collections::BTreeMap::new();
    let mut steps = Vec::new();
    for said in of_steps {
        let key = (said.job.clone().unwrap_or_default(), said.rank.unwrap_or(0), said.step.unwrap_or(0));
        let at_ns = said.time_unix_nano.expect("a time") - START_NS;
        match said.event {
            EventType::Begin => drop(begun.insert(key, at_ns)),
            _ => steps.extend(begun.remove(&key).map(|begin_ns| (key.0, key.1, key.2, begin_ns, at_ns))),
        }
    }
    steps
}

impl Played {
    fn of(&self, kind: FindingKind) -> impl Iterator<Item = &(i64, Sign)> {
        self.seen.iter().filter(move |(_, sign)| sign.kind == kind)
    }

    /// The first sign of a kind, with its time.
    fn first(&self, kind: FindingKind) -> &(i64, Sign) {
        self.of(kind).next().unwrap_or_else(|| panic!("no {}", kind.label()))
    }

    /// The step of a rank that is in progress at a moment.
    fn step_at(&self, rank: u32, at_ns: i64) -> (u64, i64, i64) {
        let found = self.steps.iter().find(|step| step.1 == rank && step.3 <= at_ns && at_ns <= step.4);
        found.map(|step| (step.2, step.3, step.4)).expect("a step")
    }

    /// When free memory of a GPU first falls below a bound, after a moment.
    fn first_below(&self, gpu: usize, free_bytes: u64, from_ns: i64) -> i64 {
        let usable_bytes = self.source.devices()[gpu].usable_bytes().expect("known");
        let is_below = |at_ns: &i64| {
            self.source.memory_used(gpu, START_NS + at_ns).is_ok_and(|used| usable_bytes - used < free_bytes)
        };
        (from_ns..from_ns + 60 * SECOND_NS).step_by(1_000_000).find(is_below).expect("it gets that full")
    }

    /// Seconds that the job's ranks spent in steps after their warm-up, lost, and did not lose.
    fn seconds_in_steps(&self) -> [f64; 3] {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let usual = self.steps.iter().filter(|step| step.2 >= Settings::default().warm_up_steps);
        let end_ns = START_NS + 3_600 * SECOND_NS;
        let lost = self.detect.lost(end_ns).into_iter().map(|(_, lost_ns)| lost_ns).sum();
        let productive = self.detect.productive(end_ns).into_iter().map(|(_, productive_ns)| productive_ns).sum();
        [usual.map(|step| (step.4 - step.3) as f64 / 1e9).sum(), seconds(lost), seconds(productive)]
    }

    fn kinds(&self) -> Vec<&'static str> {
        let mut kinds: Vec<_> = self.seen.iter().map(|(_, sign)| sign.kind.label()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }
}

/// Prints the delay, for the table of docs/findings.md (`cargo test --lib daemon::findings -- --nocapture`).
fn assert_in_time(kind: FindingKind, onset_ns: i64, seen_ns: i64, step_ns: i64) {
    let delay_ns = seen_ns - onset_ns;
    println!(
        "{:>17}: {:>4} ms after its onset (a step takes {} ms)",
        kind.label(),
        delay_ns / 1_000_000,
        step_ns / 1_000_000
    );
    assert!((0..=LATE_NS.max(step_ns)).contains(&delay_ns), "{}: {delay_ns} ns after its onset", kind.label());
}

/// The keys of a training job, from its `base` on.
const TRAINING: &str = include_str!("../../tests/data/training.toml");

pub(super) fn training(more: &str) -> String {
    format!("[[gpus]]\ncount = 2\n\n[[jobs]]\nname = \"train\"\nranks = [0, 1]\n{TRAINING}\n{more}")
}

#[test]
fn a_healthy_job_has_nothing() {
    let played = play(&training(""), 40);
    assert!(played.steps.len() > 100);
    assert_eq!(played.kinds(), [""; 0]);
    let ratios = *played.detect.board().ratios().values().next().expect("a rank");
    assert!(ratios.comm_slowdown.is_some_and(|ratio| (0.5..1.5).contains(&ratio)), "{ratios:?}");
    assert!(ratios.data_stall.is_some_and(|share| share < 0.1), "{ratios:?}");
    assert_eq!(ratios.memory_full_seconds, None);
    let [all, lost, productive] = played.seconds_in_steps();
    assert!(lost == 0.0 && (0.97..=1.0001).contains(&(productive / all)), "{productive} of {all}");
}

#[test]
fn near_oom_is_reported_with_its_cause_and_who_waits() {
    let played = play(&training("[jobs.near_oom]\noffset = \"12 s\"\nfor = \"5 s\"\nfree = \"200 MiB\""), 40);
    let (seen_ns, thrash) = played.first(FindingKind::AllocatorThrash);
    let (number, begin_ns, end_ns) = played.step_at(0, thrash.begin_ns - START_NS);
    assert_eq!((thrash.certainty, thrash.step, thrash.subject.rank), (Certainty::Confirmed, Some(number), Some(0)));
    assert!(begin_ns >= 12 * SECOND_NS);
    assert_in_time(FindingKind::AllocatorThrash, thrash.begin_ns - START_NS, *seen_ns, end_ns - begin_ns);

    let (seen_ns, headroom) = played.first(FindingKind::LowHeadroom);
    let onset_ns = played.first_below(0, Settings::default().headroom_bytes, 10 * SECOND_NS);
    assert_in_time(FindingKind::LowHeadroom, onset_ns, *seen_ns, end_ns - begin_ns);
    assert_eq!((headroom.subject.gpu, headroom.subject.rank), (Some(0), Some(0)));

    let (seen_ns, starved) = played.first(FindingKind::CommStarvation);
    let (_, begin_ns, end_ns) = played.step_at(1, starved.begin_ns - START_NS);
    // A collective is slow only once it has lasted longer than it should, which is known at the end of its step.
    assert_in_time(FindingKind::CommStarvation, end_ns, *seen_ns, end_ns - begin_ns);
    let (gpu, rank) = (starved.subject.gpu, starved.subject.rank);
    assert_eq!((gpu, rank, &starved.waiting_ranks), (Some(0), Some(0), &vec![1]), "rank 0 is short, rank 1 waits");
    assert!(starved.text.what.starts_with("Rank 0 of train flushed"), "{}", starved.text.what);
    assert!(starved.text.what.contains("while rank 1 waited"), "{}", starved.text.what);
    assert_eq!(played.kinds(), ["allocator_thrash", "comm_starvation", "low_headroom", "slow_steps"]);
    // Ten seconds after the last sign all findings have ended.
    assert_eq!(played.detect.board().active().count(), 0);
    assert_eq!(played.detect.board().ended().count(), 4);
    let [all, lost, productive] = played.seconds_in_steps();
    assert!(lost > 2.0 && (0.97..=1.0001).contains(&((lost + productive) / all)), "{lost} + {productive} of {all}");
}

#[test]
fn slow_steps_are_reported_with_the_first_of_them_and_belong_to_their_cause() {
    let played = play(&training("[jobs.near_oom]\noffset = \"20 s\"\nfor = \"5 s\"\nfree = \"200 MiB\""), 60);
    let (seen_ns, slow) = played.first(FindingKind::SlowSteps);
    let (number, begin_ns, end_ns) = played.step_at(0, slow.begin_ns - START_NS);
    assert_eq!((slow.step, slow.severity), (Some(number), Severity::Info));
    assert!(begin_ns >= 19 * SECOND_NS && slow.text.why.contains("more than usual in comm"), "{:?}", slow.text);
    assert_in_time(FindingKind::SlowSteps, end_ns, *seen_ns, end_ns - begin_ns);
    let board = played.detect.board();
    let incidents: Vec<Vec<_>> =
        board.incidents().map(|one| one.parts.iter().map(|part| part.kind).collect()).collect();
    let all =
        [FindingKind::LowHeadroom, FindingKind::AllocatorThrash, FindingKind::CommStarvation, FindingKind::SlowSteps];
    assert_eq!(incidents, [all.to_vec()]);
}

#[test]
fn a_data_loader_that_stalls_every_step_is_found() {
    let played = play(&training("data_stall = { every_steps = 1, duration = \"600 ms\" }"), 20);
    let (seen_ns, stall) = played.first(FindingKind::InputStall);
    // Warm-up is not judged: the stall counts from the first step after it.
    let first = played.steps.iter().find(|step| step.1 == 0 && step.2 == 3).expect("a fourth step");
    // One late batch is not a stall: the detector waits for a second one, and for the turn after.
    assert_in_time(FindingKind::InputStall, first.4, *seen_ns, first.4 - first.3 + TURN_NS);
    assert_eq!(stall.certainty, Certainty::Observed);
    assert_eq!(played.kinds(), ["input_stall"]);
}

#[test]
fn now_and_then_one_slow_batch_is_no_stall() {
    let played = play(&training("data_stall = { every_steps = 10, duration = \"300 ms\" }"), 60);
    assert_eq!(played.kinds(), [""; 0]);
}

#[test]
fn a_leak_is_reported_with_the_time_at_which_memory_is_full() {
    let played = play(&training("leak_per_step = \"128 MiB\""), 60);
    let (seen_ns, growth) = played.first(FindingKind::MemoryGrowth);
    let full_in = growth.evidence.iter().find(|one| one.name == "full_in_seconds").expect("a forecast").value;
    let usable_bytes = played.source.devices()[0].usable_bytes().expect("known");
    let peak = growth.evidence.iter().find(|one| one.name == "peak_bytes").expect("a peak").value;
    let steps_left = (usable_bytes as f64 - peak) / f64::from(128 << 20);
    let step_s =
        played.steps.iter().map(|step| (step.4 - step.3) as f64 / 1e9).sum::<f64>() / played.steps.len() as f64;
    let truth_s = steps_left * step_s;
    assert!((0.7..1.4).contains(&(full_in / truth_s)), "{full_in} s are reported, {truth_s} s are left");
    println!("{:>17}: {} s after the begin of the run", growth.kind.label(), seen_ns / SECOND_NS);
    assert_eq!(played.kinds(), ["memory_growth"]);
}

#[test]
fn a_lost_gpu_and_its_xid_are_reported_at_once() {
    let scenario =
        training("[[xids]]\ngpu = 1\nat = \"5 s\"\nxid = 79\n\n[[lost]]\ngpu = 1\nat = \"5 s\"\nfor = \"3 s\"");
    let played = play(&scenario, 12);
    let (seen_ns, lost) = played.first(FindingKind::GpuLost);
    assert_in_time(FindingKind::GpuLost, 5 * SECOND_NS, *seen_ns, 0);
    assert_eq!((lost.severity, lost.subject.gpu), (Severity::Critical, Some(1)));
    let (seen_ns, xid) = played.first(FindingKind::Xid);
    assert_in_time(FindingKind::Xid, 5 * SECOND_NS, *seen_ns, 0);
    assert!(xid.text.what.contains("fallen off the bus"), "{}", xid.text.what);
    let still: Vec<_> = played.detect.board().active().map(|finding| finding.sign.kind).collect();
    assert_eq!(still, [FindingKind::Xid], "the GPU came back; the XID is remembered");
}

#[test]
fn memory_that_runs_out_is_reported_with_its_phase_whether_or_not_it_is_marked() {
    let played = play(&training("[jobs.oom]\nrank = 1\nat = \"10 s\""), 30);
    let (seen_ns, oom) = played.first(FindingKind::Oom);
    assert_in_time(FindingKind::Oom, oom.begin_ns - START_NS, *seen_ns, 0);
    assert_eq!((oom.certainty, oom.subject.gpu, oom.subject.rank), (Certainty::Confirmed, Some(1), Some(1)));
    assert!(oom.text.what.contains("in forward of step"), "{}", oom.text.what);
    assert!(oom.text.why.contains("was free") || oom.text.why.contains("left"), "{}", oom.text.why);
    assert_eq!(played.of(FindingKind::Oom).count(), 1, "reported once");
}

#[test]
fn a_gpu_that_is_held_back_is_reported_for_as_long_as_it_is() {
    let degraded = "[[degraded]]\ngpu = 1\nat = \"10 s\"\nfor = \"15 s\"\n";
    let played = play(&training(&format!("{degraded}throttle = \"hw_power_brake_slowdown\"\nclock = 0.6")), 40);
    let (seen_ns, throttled) = played.first(FindingKind::GpuThrottled);
    // Half of the window must be bad.
    assert_in_time(FindingKind::GpuThrottled, 12_400 * MILLISECOND_NS, *seen_ns, 0);
    assert_eq!(
        (throttled.subject.gpu, throttled.subject.rank, throttled.severity),
        (Some(1), Some(1), Severity::Warning)
    );
    let number = |name| throttled.evidence.iter().find(|one| one.name == name).map(|one| one.value);
    assert!(number("clock_ratio").is_some_and(|ratio| (0.5..0.7).contains(&ratio)), "{throttled:?}");
    let last_ns = played.of(FindingKind::GpuThrottled).last().expect("some").0;
    assert!((25 * SECOND_NS..28 * SECOND_NS).contains(&last_ns), "{last_ns}");
    assert_eq!(played.kinds(), ["gpu_throttled"]);
}

#[test]
fn a_narrow_link_and_a_gpu_that_needs_a_reset_are_reported() {
    let degraded = "[[degraded]]\ngpu = 0\nat = \"1 s\"\nfor = \"1 h\"\npcie_width = 8\nrow_remap_pending = true\nrecovery_action = 1";
    let played = play(&training(degraded), 70);
    let of = |kind| played.of(kind).map(|(_, sign)| sign.clone()).collect::<Vec<_>>();
    let narrow = of(FindingKind::PcieDegraded);
    assert!(narrow[0].text.what.contains("with 8 lanes instead of generation 5 with 16"), "{}", narrow[0].text.what);
    assert_eq!(narrow[0].subject.rank, Some(0));
    let codes: std::collections::BTreeSet<_> = of(FindingKind::GpuUnhealthy).iter().map(|sign| sign.code).collect();
    assert_eq!(codes, [Some(2), Some(0x101)].into());
    assert_eq!(played.kinds(), ["gpu_unhealthy", "pcie_degraded"]);
}

#[test]
fn nvlinks_that_are_down_or_send_again_and_a_gpu_outside_of_its_fabric_are_reported() {
    let of = |gpu: usize, what: &str| format!("[[degraded]]\ngpu = {gpu}\nat = \"1 s\"\nfor = \"1 h\"\n{what}\n");
    let played = play(&training(&(of(0, "nvlinks_down = 2") + &of(1, "nvlink_replays = 3"))), 70);
    let signs: Vec<_> = played.of(FindingKind::NvlinkDegraded).map(|(_, sign)| sign).collect();
    let first = |gpu| signs.iter().find(|sign| sign.subject.gpu == Some(gpu)).expect("reported");
    assert_eq!(first(0).text.what, "Only 16 NVLinks of GPU 0 are up, instead of 18.");
    assert_eq!((first(0).subject.rank, first(1).subject.rank), (Some(0), Some(1)));
    assert!(first(1).text.why.starts_with("87 replays, 0 recoveries"), "{}", first(1).text.why);
    assert_eq!(played.kinds(), ["nvlink_degraded"]);
    let idle = format!("[[gpus]]\ncount = 2\n\n{}", of(1, "outside_fabric = true"));
    let played = play_with(&idle, 70, Settings::default());
    let (_, outside) = played.first(FindingKind::GpuUnhealthy);
    assert_eq!((outside.subject.gpu, outside.severity), (Some(1), Severity::Critical));
    assert_eq!(outside.text.what, "GPU 1 has not joined the NVLink fabric.");
}

#[test]
fn memory_that_is_held_with_nothing_running_is_idle() {
    let scenario = training("steps = 5");
    let settings = Settings { idle_after_ns: 2 * SECOND_NS, ..Settings::default() };
    let held = "[[gpus]]\ncount = 1\n\n[[jobs]]\nname = \"asleep\"\nranks = [0]\nbase = \"40 GiB\"\nphases = [{ name = \"wait\", duration = \"10 s\" }]";
    let played = play_with(held, 8, settings.clone());
    let (_, idle) = played.first(FindingKind::IdleGpu);
    assert_eq!((idle.severity, idle.subject.gpu), (Severity::Info, Some(0)));
    assert_eq!(
        play_with(&scenario, 8, settings).of(FindingKind::IdleGpu).count(),
        0,
        "a job that has ended holds nothing"
    );
}

/// An hour in which the same rank runs short of memory each minute, beside seven others.
#[test]
fn a_fault_that_comes_back_each_minute_for_an_hour_is_one_incident() {
    let scenario = format!(
        "[[gpus]]\ncount = 8\n\n[[jobs]]\nname = \"wide\"\nranks = 8\n{}\n[jobs.near_oom]\noffset = \"20 s\"\nevery = \"1 min\"\nfor = \"6 s\"\nfree = \"200 MiB\"\n",
        include_str!("../../tests/data/training.toml")
    );
    let played = play(&scenario, 3_600);
    let board = played.detect.board();
    let incidents: Vec<_> = board.incidents().collect();
    let texts: Vec<_> = incidents.iter().map(|one| (one.cause.label(), one.times, &one.text.what)).collect();
    assert_eq!(incidents.len(), 1, "{texts:?}");
    let [incident] = incidents[..] else { return };
    assert_eq!((incident.cause.label(), incident.times, &incident.ranks), ("memory", 60, &[0].into()), "{texts:?}");
    assert!(board.all().count() > 60, "{} findings", board.all().count());
}

#[test]
fn nothing_is_looked_for_where_that_is_not_wanted() {
    let settings = Settings { enabled: false, ..Settings::default() };
    let near_oom = training("[jobs.near_oom]\noffset = \"4 s\"\nfor = \"3 s\"\nfree = \"200 MiB\"");
    assert!(play_with(&near_oom, 8, settings).seen.is_empty());
}

#[test]
fn steps_that_nobody_looked_at_are_counted() {
    let scenario = "[[gpus]]\ncount = 1\n[[jobs]]\nname = \"fast\"\nranks = 1\nphases = [{ name = \"forward\", duration = \"2 ms\" }]\n";
    assert_eq!(play(scenario, 4).detect.unseen(), 0);
    let limits = Limits { ended: 16, ..Limits::default() };
    let unseen = play_within(scenario, 4, Settings::default(), limits).detect.unseen();
    // Two per step, some fifty steps a turn, for two seconds after the job's start.
    assert!((1_000..2_000).contains(&unseen), "{unseen}");
}

/// Eight GPUs as stages of a pipeline, each with its own memory, for 20 s; `keys` are those of the pipeline.
fn pipeline(keys: &str) -> String {
    format!(
        r#"
        [[gpus]]
        count = 8

        [[jobs]]
        name = "pipeline"
        ranks = 8
        startup = "100 ms"
        base = "20 GiB"
        phases = [
          {{ name = "data", duration = "4 ms", jitter = "1 ms" }},
          {{ name = "forward", duration = "10 ms", jitter = "300 us", to = "22 GiB", shape = "ramp", busy = 0.9 }},
          {{ name = "backward", duration = "20 ms", jitter = "600 us", busy = 0.9 }},
          {{ name = "comm", duration = "8 ms", busy = 0.5, collective = true }},
          {{ name = "optimizer", duration = "5 ms", busy = 0.5 }},
        ]

        [jobs.pipeline]
        {keys}
        "#
    )
}

/// The kinds that are found of a pipeline, with the ranks that are accused of being slow.
fn of_pipeline(keys: &str) -> (Vec<&'static str>, Vec<u32>) {
    let played = play(&pipeline(keys), 20);
    let (mut kinds, mut accused) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    for (_, sign) in &played.seen {
        kinds.insert(sign.kind.label());
        accused.extend(sign.subject.rank.filter(|_| sign.kind == FindingKind::Straggler));
    }
    (kinds.into_iter().collect(), accused.into_iter().collect())
}

/// Bubbles, interleaved chunks, long stages and uneven sequences, with and without coordinates and marks of waiting.
#[test]
fn no_rank_of_a_simulated_pipeline_is_accused_of_what_its_schedule_does() {
    let schedules = [
        "stages = 4\nmicrobatches = 8",
        "stages = 4\nmicrobatches = 8\nschedule = \"gpipe\"",
        "stages = 4\nmicrobatches = 6\nchunks = 2",
        "stages = 2\nmicrobatches = 4",
    ];
    let even = ["", "\nspread = 0.3", "\nmarks_waits = false", "\nsends_mesh = false"];
    for (schedule, more) in schedules.iter().flat_map(|schedule| even.map(|more| (schedule, more))) {
        assert_eq!(of_pipeline(&format!("{schedule}{more}")).1, [0_u32; 0], "{schedule}{more}");
    }
    let uneven = "stages = 4\nmicrobatches = 8\nweights = [1.0, 1.0, 1.0, 1.7]";
    assert_eq!(of_pipeline(uneven), (vec!["stage_imbalance"], vec![]));
    for more in
        ["\nschedule = \"gpipe\"", "\nchunks = 2", "\nspread = 0.3", "\nmarks_waits = false", "\nsends_mesh = false"]
    {
        assert_eq!(of_pipeline(&format!("{uneven}{more}")).1, [0_u32; 0], "{uneven}{more}");
    }
}

#[test]
fn a_slow_rank_of_a_simulated_pipeline_is_accused_alone() {
    for schedule in ["", "\nschedule = \"gpipe\"", "\nchunks = 2"] {
        let keys = format!("stages = 4\nmicrobatches = 8{schedule}\nslow = {{ rank = 3, factor = 1.8 }}");
        assert_eq!(of_pipeline(&keys), (vec!["straggler"], vec![3]), "{keys}");
    }
}

#[test]
fn the_phase_in_which_a_job_dies_of_oom_has_its_peak() {
    let played = play(include_str!("../../config/scenarios/faults.toml"), 17);
    let usable_bytes = played.source.devices()[0].usable_bytes();
    let log = played.intake.ledger().ended();
    let dies = log.ranks().find(|((job, _), _)| &**job.name() == "dies").expect("it has steps").1;
    let peak_bytes = |phase: &str| dies.phases[phase].peak_max_bytes(START_NS + 17 * SECOND_NS, 15 * SECOND_NS);
    assert_eq!(peak_bytes("backward"), usable_bytes, "it has taken all memory, and never ended");
    assert!(peak_bytes("forward") < usable_bytes);
    assert!(dies.step_durations.exponential().count() > 10);
}
