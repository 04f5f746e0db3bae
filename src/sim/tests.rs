//! Tests of simulated nodes.

use super::*;
use highwater_core::wire::{EventType, Gpu as GpuName, GpuList, Kind};
use proptest::prelude::*;

const MS: i64 = 1_000_000;
const SECOND: i64 = 1_000 * MS;
const GIB: u64 = 1 << 30;
const START: i64 = 1_795_207_211_000_000_000;

fn scenario(text: &str) -> Scenario {
    Scenario::parse(text, "test.toml").unwrap_or_else(|error| panic!("{error}"))
}

fn sim(text: &str) -> Sim {
    Sim::new(scenario(text), START)
}

fn shipped(name: &str) -> Sim {
    Sim::new(Scenario::shipped(name).expect(name), START)
}

/// Memory at a time since the start.
fn used(sim: &Sim, gpu: usize, at_ns: i64) -> u64 {
    sim.memory_used(gpu, START + at_ns).expect("the GPU is there")
}

/// The annotations until then.
fn said(sim: &Sim, until_ns: i64) -> Vec<Annotation> {
    sim.annotations().take_while(|said| since(said) < until_ns).collect()
}

fn since(said: &Annotation) -> i64 {
    said.time_unix_nano.expect("every annotation has a time") - START
}

/// Begin and end of each phase of this name on this rank, with its step.
fn phases(said: &[Annotation], job: &str, rank: u32, name: &str) -> Vec<(i64, i64, u64)> {
    let mine = |said: &&Annotation| {
        said.job.as_deref() == Some(job) && said.rank == Some(rank) && said.name.as_deref() == Some(name)
    };
    let mut begins = said.iter().filter(mine).filter(|said| said.event == EventType::Begin);
    let ends = said.iter().filter(mine).filter(|said| said.event == EventType::End);
    let pair = |end: &Annotation| {
        let begin = begins.next().expect("an end has a begin");
        assert_eq!(begin.step, end.step);
        (since(begin), since(end), end.step.expect("a step"))
    };
    ends.map(pair).collect()
}

/// The highest and lowest memory from begin to end, read every 0.1 ms.
fn extremes(sim: &Sim, gpu: usize, begin_ns: i64, end_ns: i64) -> (u64, u64) {
    let times = (begin_ns..end_ns).step_by(100_000);
    times.map(|at_ns| used(sim, gpu, at_ns)).fold((0, u64::MAX), |(high, low), used| (high.max(used), low.min(used)))
}

#[test]
fn two_simulators_never_disagree_whatever_the_order_of_asking() {
    for name in ["demo", "spike", "faults"] {
        let (forward, backward) = (shipped(name), shipped(name));
        let times: Vec<i64> = (0..400).map(|i| i * 61_803_399).collect();
        for gpu in 0..forward.devices().len() {
            let ahead: Vec<_> = times.iter().map(|at| forward.memory_used(gpu, START + at)).collect();
            let mut back: Vec<_> = times.iter().rev().map(|at| backward.memory_used(gpu, START + at)).collect();
            back.reverse();
            assert_eq!(ahead, back, "{name} GPU {gpu}");
        }
        assert!(forward.annotations().take(5_000).eq(backward.annotations().take(5_000)), "{name}");
    }
}

#[test]
fn the_start_time_moves_everything_and_changes_nothing() {
    let (here, later) = (Sim::new(Scenario::demo(), START), Sim::new(Scenario::demo(), START + 77));
    for at_ns in (0..20 * SECOND).step_by(7_654_321) {
        assert_eq!(here.memory_used(2, START + at_ns), later.memory_used(2, START + 77 + at_ns));
    }
    for (here, later) in here.annotations().zip(later.annotations()).take(1_000) {
        assert_eq!(here.time_unix_nano.map(|at_ns| at_ns + 77), later.time_unix_nano);
    }
}

#[test]
fn another_seed_plays_another_run() {
    let text = include_str!("../../config/scenarios/demo.toml");
    let other = sim(&text.replace("seed = 1", "seed = 2"));
    assert!(!other.annotations().take(500).eq(shipped("demo").annotations().take(500)));
}

#[test]
fn before_its_start_a_node_is_idle() {
    let sim = shipped("demo");
    assert_eq!(used(&sim, 0, -SECOND), 0);
    assert_eq!(sim.energy_joules(0, START - SECOND, &CallStats::default()), Some(0.0));
}

#[test]
fn memory_in_a_phase_is_what_the_scenario_says() {
    let sim = shipped("demo");
    let said = said(&sim, 9 * SECOND);
    let outside = 3 * GIB / 2;
    let forward = phases(&said, "llama-ddp", 1, "forward");
    let backward = phases(&said, "llama-ddp", 1, "backward");
    assert!(forward.len() > 10);
    for (begin, end, step) in forward {
        let (high, low) = extremes(&sim, 1, begin, end + 1);
        assert_eq!((high, low), (96 * GIB + outside, 38 * GIB + outside), "forward of step {step}");
        assert_eq!(used(&sim, 1, end), 96 * GIB + outside);
    }
    for (begin, end, step) in backward {
        assert_eq!(extremes(&sim, 1, begin, end).0, 108 * GIB + outside, "backward of step {step}");
        assert_eq!(used(&sim, 1, end), 38 * GIB + outside);
    }
}

#[test]
fn what_an_allocator_says_is_what_the_gpu_has() {
    let sim = shipped("demo");
    let mut compared = 0;
    for said in said(&sim, 9 * SECOND) {
        let (Some(rank), Some(memory)) = (said.rank, said.memory) else { continue };
        let llama = said.job.as_deref() == Some("llama-ddp");
        let (gpu, outside) = if llama { (rank as usize, 3 * GIB / 2) } else { (rank as usize + 2, 3 * GIB) };
        assert_eq!(said.gpu, Some(GpuList::One(GpuName::Index(u32::try_from(gpu).expect("small")))));
        assert_eq!(memory.reserved, Some(used(&sim, gpu, since(&said)) - outside));
        assert!(memory.allocated < memory.reserved);
        compared += 1;
    }
    assert!(compared > 500);
}

#[test]
fn steps_hold_their_phases_and_follow_each_other_on_each_rank() {
    let said = said(&shipped("demo"), 30 * SECOND);
    assert!(said.is_sorted_by_key(since));
    for (job, rank) in [("llama-ddp", 0), ("llama-ddp", 1), ("moe-tight", 0), ("moe-tight", 1)] {
        let (mut open, mut last, mut steps) = (Vec::new(), i64::MIN, 0);
        for said in said.iter().filter(|said| said.job.as_deref() == Some(job) && said.rank == Some(rank)) {
            assert!(since(said) > last || said.event == EventType::Mark, "times of a rank increase");
            last = since(said);
            match said.event {
                EventType::Begin => {
                    assert_eq!(open.len(), usize::from(said.kind == Kind::Phase));
                    open.push((said.name.clone(), said.step));
                }
                EventType::End => assert_eq!(open.pop(), Some((said.name.clone(), said.step))),
                EventType::Mark | EventType::Exit => {}
            }
            if said.kind == Kind::Step && said.event == EventType::End {
                assert_eq!(said.step, Some(steps));
                steps += 1;
            }
        }
        assert!(steps > 40, "{job} {rank} made {steps} steps");
    }
}

#[test]
fn a_collective_ends_for_all_ranks_at_once() {
    let said = said(&shipped("demo"), 20 * SECOND);
    let [one, other] = [0, 1].map(|rank| phases(&said, "moe-tight", rank, "comm"));
    assert!(one.len() > 20);
    for ((begin, end, _), (other_begin, other_end, _)) in one.iter().zip(&other) {
        assert_eq!(end, other_end);
        assert!(end - begin.max(other_begin) > 25 * MS);
    }
}

#[test]
fn near_oom_flushes_once_a_step_and_makes_the_peer_wait() {
    let sim = shipped("demo");
    let said = said(&sim, 40 * SECOND);
    let usable = sim.devices()[2].usable_bytes().expect("known");
    let comm = phases(&said, "moe-tight", 1, "comm");
    let mut tight = 0;
    for (begin, end, step) in phases(&said, "moe-tight", 0, "forward").into_iter().filter(|(.., step)| *step > 0) {
        let near = sim_is_near(&said, step);
        let (high, _) = extremes(&sim, 2, begin, end);
        let wait = comm.iter().find(|(.., other)| *other == step).map(|(begin, end, _)| end - begin).expect("a comm");
        if near {
            tight += 1;
            let backward_high = extremes(&sim, 2, end, end + 230 * MS).0;
            assert_eq!(usable - backward_high, 200 << 20, "free at the peak of step {step}");
            // From the peak it falls by 9 GiB and is back 90 ms after the fall began.
            let peak_at = (begin..end).step_by(100_000).find(|at| used(&sim, 2, *at) == high).expect("a peak");
            let falls_at = (peak_at..end).step_by(100_000).find(|at| used(&sim, 2, *at) < high).expect("a fall");
            let low = extremes(&sim, 2, falls_at, falls_at + 90 * MS).1;
            assert_eq!(high - low, 9 * GIB);
            assert_eq!(used(&sim, 2, falls_at + 90 * MS), high);
            assert!((276 * MS..324 * MS).contains(&wait), "comm of step {step} lasts {wait} ns");
        } else {
            assert!((28 * MS..54 * MS).contains(&wait), "comm of step {step} lasts {wait} ns");
        }
    }
    assert!((15..40).contains(&tight), "{tight} steps near OOM in 15 s");
    let retries = |rank| {
        said.iter()
            .rfind(|said| said.job.as_deref() == Some("moe-tight") && said.rank == Some(rank))?
            .memory?
            .alloc_retries
    };
    assert_eq!((retries(0), retries(1)), (Some(tight), Some(0)));
}

/// Whether moe-tight's step begins in its first time near OOM.
fn sim_is_near(said: &[Annotation], step: u64) -> bool {
    let begin = said
        .iter()
        .find(|said| said.job.as_deref() == Some("moe-tight") && said.kind == Kind::Step && said.step == Some(step));
    (10 * SECOND..25 * SECOND).contains(&since(begin.expect("a step that begins")))
}

#[test]
fn a_spike_of_half_a_millisecond_is_exactly_where_it_should_be() {
    let sim = shipped("spike");
    for spike in 0..6 {
        let begin = spike * 10 * SECOND + 4_999_900_000;
        let around = [begin - 1, begin, begin + 499_999, begin + 500_000].map(|at_ns| used(&sim, 0, at_ns));
        assert_eq!(around, [0, 20 * GIB, 20 * GIB, 0]);
    }
    let ticks = (0..60_000).filter(|tick| used(&sim, 0, tick * MS) > 0).collect::<Vec<_>>();
    assert_eq!(ticks, [5_000, 15_000, 25_000, 35_000, 45_000, 55_000]);
}

#[test]
fn a_job_dies_of_oom_and_comes_back_with_step_0() {
    let sim = shipped("faults");
    let said: Vec<_> = said(&sim, 60 * SECOND).into_iter().filter(|said| said.job.as_deref() == Some("dies")).collect();
    let oom: Vec<_> = said.iter().filter(|said| said.name.as_deref() == Some("oom")).collect();
    assert_eq!(oom.len(), 2, "at 15 s and 55 s");
    let died = since(oom[0]);
    assert!((15 * SECOND..16 * SECOND).contains(&died));
    assert_eq!(oom[0].memory.map(|memory| (memory.ooms, memory.alloc_retries)), Some((Some(1), Some(1))));
    let usable = sim.devices()[0].usable_bytes().expect("known");
    assert_eq!(used(&sim, 0, died), usable, "it has taken all memory");
    assert_eq!(used(&sim, 0, died + 30 * MS), 0);
    assert_eq!(sim.processes(0, START + died + SECOND, &CallStats::default()), Some(Vec::new()));

    let next = said.iter().find(|said| since(said) > died).expect("it comes back");
    assert_eq!((next.event, next.kind, next.step), (EventType::Begin, Kind::Step, Some(0)));
    assert_eq!(next.memory.map(|memory| memory.ooms), Some(Some(0)), "a new process counts from 0");
    assert_eq!(since(next), died + 5 * SECOND + 2 * SECOND, "a pause and a start");
    let last = said.iter().rfind(|said| since(said) < died).expect("it lived");
    assert_eq!((last.event, last.name.as_deref()), (EventType::Begin, Some("backward")), "the phase never ends");
}

#[test]
fn peers_of_a_dead_rank_wait_in_their_collective_until_they_are_killed() {
    let sim = sim(
        "[[gpus]]\ncount = 2\n[[jobs]]\nname = \"j\"\nranks = 2\nbase = \"1 GiB\"\nstartup = \"1 s\"\noom = { at = \"2 s\", rank = 1 }\n\
         phases = [{ name = \"forward\", duration = \"50 ms\" }, { name = \"comm\", duration = \"5 ms\", collective = true }]\n",
    );
    let said: Vec<_> = sim.annotations().collect();
    let died = since(said.iter().find(|said| said.name.as_deref() == Some("oom")).expect("a death"));
    let peer = said.iter().rfind(|said| said.rank == Some(0)).expect("a peer");
    assert_eq!((peer.event, peer.name.as_deref()), (EventType::Begin, Some("comm")));
    assert_eq!(used(&sim, 0, died + 199 * MS), 2 * GIB);
    assert_eq!(used(&sim, 0, died + 200 * MS), 0);
    assert_eq!(used(&sim, 0, died + 1_000 * SECOND), 0, "without restart_after it stays away");
}

#[test]
fn a_leak_grows_outside_the_allocator_until_the_job_dies_of_it() {
    let sim =
        sim("[[jobs]]\nname = \"j\"\nranks = 1\nbase = \"100 GiB\"\nstartup = \"1 s\"\nleak_per_step = \"2 GiB\"\n\
         phases = [{ name = \"forward\", duration = \"50 ms\" }]\n");
    let said: Vec<_> = sim.annotations().collect();
    let ends: Vec<_> = phases(&said, "j", 0, "forward");
    // 143156 MiB less 101 GiB hold 19 leaks of 2 GiB: in step 20 it is too much.
    assert_eq!(ends.len(), 20);
    for (begin, _, step) in ends {
        assert_eq!(used(&sim, 0, begin), (101 + 2 * step) * GIB);
    }
    assert_eq!(said.last().and_then(|said| said.name.as_deref()), Some("oom"));
}

#[test]
fn a_job_with_a_number_of_steps_ends() {
    let sim = sim(
        "[[jobs]]\nname = \"j\"\nranks = 1\nsteps = 3\nstart = \"1 s\"\ncheckpoint = { every_steps = 2, duration = \"70 ms\" }\n\
         phases = [{ name = \"forward\", duration = \"50 ms\", to = \"7 GiB\", shape = \"ramp\" }]\n",
    );
    let said: Vec<_> = sim.annotations().collect();
    assert_eq!(phases(&said, "j", 0, "forward").len(), 3);
    let saved: Vec<_> = phases(&said, "j", 0, "checkpoint").iter().map(|(.., step)| *step).collect();
    assert_eq!(saved, [1]);
    assert!(said.iter().any(|said| said.name.as_deref() == Some("checkpoint saved")));
    let last = since(said.last().expect("it spoke"));
    assert_eq!([last, last + SECOND].map(|at_ns| used(&sim, 0, at_ns)), [8 * GIB, 0]);
}

#[test]
fn a_data_stall_makes_some_steps_wait_for_their_data() {
    let said = said(&shipped("faults"), 30 * SECOND);
    let data = phases(&said, "starves", 0, "data");
    assert!(data.len() > 30);
    for (begin, end, step) in data {
        let slow = end - begin > 500 * MS;
        assert_eq!(slow, step % 10 == 9, "step {step} waits {} ns", end - begin);
    }
}

#[test]
fn a_lost_gpu_is_gone_and_comes_back() {
    let sim = shipped("faults");
    let at = |at_ns: i64| sim.memory_used(2, START + at_ns);
    assert!(at(20 * SECOND - 1).is_ok());
    assert!(matches!(at(20 * SECOND), Err(Error::Lost(_))));
    assert!(matches!(sim.reacquire(2), Err(Error::Lost(_))));
    let calls = CallStats::default();
    assert_eq!(sim.medium(2, START + 21 * SECOND, &calls), Medium::default());
    assert_eq!(sim.slow(2, START + 21 * SECOND, &calls), Slow::default());
    assert_eq!(calls.failures(Call::Power), 1);
    assert!(sim.memory_used(1, START + 24 * SECOND).is_ok(), "other GPUs are present");
    assert!(matches!(sim.reacquire(2), Err(Error::Lost(_))));
    assert!(sim.memory_used(1, START + 25 * SECOND).is_ok());
    assert_eq!(sim.reacquire(2), Ok(()));
    assert!(at(25 * SECOND).is_ok());
    assert!(matches!(at(81 * SECOND), Err(Error::Lost(_))), "again a minute later");
}

#[test]
fn each_xid_is_reported_once_when_it_is_due() {
    let sim = shipped("faults");
    let event = |sim: &Sim| sim.wait_event(Duration::ZERO);
    used(&sim, 0, 20 * SECOND - 1);
    assert_eq!(event(&sim), Ok(None));
    used(&sim, 0, 20 * SECOND);
    assert_eq!(event(&sim), Ok(Some(DriverEvent::Xid { gpu: 2, xid: 79 })));
    assert_eq!(event(&sim), Ok(None));
    used(&sim, 0, 141 * SECOND);
    assert_eq!([event(&sim), event(&sim), event(&sim)].iter().flatten().flatten().count(), 2);
    assert_eq!(event(&shipped("demo")), Err(Error::Unsupported));
}

#[test]
fn energy_and_link_counters_never_fall_and_agree_with_power() {
    let (sim, calls) = (shipped("demo"), CallStats::default());
    let mut before = sim.pcie(0, START, &calls);
    let mut grown = 0.0;
    let mut links_before = sim.rare(0, START, &calls);
    let mut energy_before = sim.energy_joules(0, START, &calls).expect("known");
    for at_ns in (0..30 * SECOND).step_by(10_000_000) {
        let power = sim.medium(0, START + at_ns, &calls).power_watts.expect("known");
        assert!((75.0..=700.0).contains(&power));
        let now = sim.pcie(0, START + at_ns, &calls);
        let energy = sim.energy_joules(0, START + at_ns, &calls).expect("known");
        let joules = energy - energy_before;
        energy_before = energy;
        assert!((0.0..=7.01).contains(&joules), "{joules} J in 10 ms");
        grown += joules;
        assert!(now.received_bytes >= before.received_bytes);
        let links = sim.rare(0, START + at_ns, &calls);
        assert!(links.nvlink_transmitted_bytes >= links_before.nvlink_transmitted_bytes);
        links_before = links;
        before = now;
    }
    assert!((10_000.0..21_000.0).contains(&grown), "{grown} J in 30 s");
    assert!(links_before.nvlink_received_bytes > Some(100 << 30));
}

#[test]
fn the_lanes_show_what_the_job_does() {
    let (sim, calls) = (shipped("demo"), CallStats::default());
    let said = said(&sim, 6 * SECOND);
    let (begin, end, _) = phases(&said, "llama-ddp", 0, "backward")[3];
    let medium = sim.medium(0, START + end - MS, &calls);
    let utilization = medium.utilization_ratio.expect("known");
    assert!((utilization - 0.98).abs() < 1e-6, "{utilization}");
    assert_eq!((medium.power_watts, medium.throttle_reasons), (Some(700.0), Some(0x4)), "0.98 busy is the power limit");
    let limits = sim.rare(0, START + end, &calls);
    assert_eq!(limits.power_limit_watts, medium.power_watts, "the limit is the one at which power stops rising");
    assert_eq!((limits.slowdown_celsius, limits.shutdown_celsius), (Some(89.0), Some(95.0)));
    let (_, end_of_forward, _) = phases(&said, "llama-ddp", 0, "forward")[3];
    let medium = sim.medium(0, START + end_of_forward - MS, &calls);
    assert_eq!((medium.sm_clock_hertz, medium.throttle_reasons), (Some(1_980e6), Some(0)));
    assert_eq!(sim.rare(0, START + begin, &calls).memory_total_bytes, Some(143_771 << 20));
    let process = Process { pid: std::process::id(), used_bytes: Some(used(&sim, 0, begin)) };
    assert_eq!(sim.processes(0, START + begin, &calls), Some(vec![process]));
    assert!(sim.pcie(0, START + begin, &calls).received_bytes > Some(0));
    assert_eq!(calls.durations(Call::PcieCounters).counts().cumulative.last(), Some(&1));
}

#[test]
fn a_split_gpu_holds_what_its_instances_hold() {
    let (sim, calls) = (shipped("faults"), CallStats::default());
    let indexes: Vec<&str> = sim.devices().iter().map(|device| device.index.as_str()).collect();
    assert_eq!(indexes, ["0", "1", "2", "3", "3:0", "3:1"]);
    let mut most = 0;
    for at_ns in (0..10 * SECOND).step_by(3_333_333) {
        let [whole, one, other] = [3, 4, 5].map(|gpu| used(&sim, gpu, at_ns));
        assert_eq!(whole, one + other);
        most = most.max(one);
    }
    assert_eq!(most, 35 * GIB);
    assert_eq!(sim.medium(4, START, &calls), Medium::default());
    let instance = sim.rare(4, START, &calls);
    assert_eq!((instance.memory_total_bytes, instance.power_limit_watts), (Some(69 * GIB), None));
    let name = sim.annotations().find(|said| said.job.as_deref() == Some("small")).and_then(|said| said.gpu);
    assert_eq!(name, Some(GpuList::One(GpuName::Name("3:0".into()))));
}

#[test]
fn reading_a_millisecond_later_costs_microseconds() {
    let sim = shipped("demo");
    used(&sim, 2, 60 * SECOND);
    let begin = Instant::now();
    for tick in 0..100_000 {
        used(&sim, 2, 60 * SECOND + tick * MS);
    }
    let each = begin.elapsed() / 100_000;
    assert!(each < Duration::from_micros(20), "{each:?}: ten times what it may cost on a quiet machine");
}

/// A job on two GPUs with everything that takes memory: its phases, a ballast, spikes and a leak.
struct Crowded {
    seed: u32,
    base_gib: u64,
    top_gib: u64,
    free_mib: u64,
    spike_gib: u64,
    leak_mib: u64,
    dies: bool,
    shape: &'static str,
}

impl Crowded {
    fn check(&self) {
        let Self { seed, base_gib, top_gib, free_mib, spike_gib, leak_mib, shape, .. } = self;
        let oom = if self.dies { "oom = { at = \"3 s\", every = \"6 s\" }" } else { "" };
        let sim = sim(&format!(
            "seed = {seed}\n[[gpus]]\ncount = 2\n[[jobs]]\nname = \"j\"\nranks = 2\nstartup = \"500 ms\"\n\
             base = \"{base_gib} GiB\"\nleak_per_step = \"{leak_mib} MiB\"\nrestart_after = \"1 s\"\n{oom}\n\
             near_oom = {{ every = \"4 s\", for = \"2 s\", free = \"{free_mib} MiB\" }}\nphases = [\n\
             {{ name = \"forward\", duration = \"60 ms\", jitter = \"9 ms\", to = \"{top_gib} GiB\", shape = \"{shape}\" }},\n\
             {{ name = \"comm\", duration = \"9 ms\", jitter = \"3 ms\", collective = true, release = true }}]\n\
             [[spikes]]\ngpu = 0\nevery = \"70 ms\"\nduration = \"20 ms\"\nbytes = \"{spike_gib} GiB\"\n"
        ));
        for gpu in 0..2 {
            let usable = sim.devices()[gpu].usable_bytes().expect("known");
            for at_ns in (0..12 * SECOND).step_by(2_100_000) {
                assert!(used(&sim, gpu, at_ns) <= usable);
                let held = sim.gpus[gpu].lock().expect("whole").at(at_ns).0.used_bytes;
                assert!(held <= usable, "the processes alone hold {held} of {usable} at {at_ns}");
            }
        }
        let said = said(&sim, 12 * SECOND);
        assert!(said.is_sorted_by_key(since));
        assert!(said.len() > 20);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn memory_never_exceeds_what_the_gpu_has(
        seed in any::<u32>(),
        base_gib in 0_u64..60,
        top_gib in 60_u64..130,
        free_mib in 0_u64..3_000,
        spike_gib in 0_u64..200,
        leak_mib in 0_u64..3_000,
        dies in any::<bool>(),
        steps in any::<bool>(),
    ) {
        let shape = if steps { "steps" } else { "ramp" };
        Crowded { seed, base_gib, top_gib, free_mib, spike_gib, leak_mib, dies, shape }.check();
    }
}

#[test]
fn a_leak_that_no_longer_fits_takes_from_the_ballast() {
    Crowded {
        seed: 277_794_069,
        base_gib: 59,
        top_gib: 60,
        free_mib: 0,
        spike_gib: 0,
        leak_mib: 1_025,
        dies: false,
        shape: "ramp",
    }
    .check();
}

/// The records of one rank, with their times since the start.
fn records(said: &[Annotation], job: &str, rank: u32) -> Vec<(i64, Annotation)> {
    let is_its =
        |said: &&Annotation| said.job.as_deref() == Some(job) && said.rank == Some(rank) && said.layer.is_some();
    said.iter().filter(is_its).map(|said| (since(said), said.clone())).collect()
}

#[test]
fn layers_add_up_to_what_the_forward_phase_takes() {
    let text = "[[gpus]]\ncount = 2\n[[jobs]]\nname = \"a\"\nranks = 2\nbase = \"16 GiB\"\nsteps = 5\n\
        phases = [\n\
        { name = \"forward\", duration = \"100 ms\", jitter = \"9 ms\", to = \"48 GiB\", shape = \"steps\" },\n\
        { name = \"backward\", duration = \"150 ms\", to = \"50 GiB\", shape = \"steps\", release = true }]\n\
        [jobs.layers]\ncount = 30\nevery_steps = 4\nsharded = true\n";
    let said = said(&sim(text), 10 * SECOND);
    let of_rank = records(&said, "a", 1);
    assert_eq!(of_rank.len(), 2 * 2 * 30, "steps 0 and 4, forward and backward");
    assert!(of_rank.iter().all(|(_, said)| matches!(said.step, Some(0 | 4))));
    let forward: Vec<_> = of_rank[..30].iter().map(|(_, said)| said).collect();
    let layer = |said: &Annotation| *said.layer.clone().expect("a layer");
    let sum = |of: fn(&highwater_core::wire::Layer) -> u64| forward.iter().map(|said| of(&layer(said))).sum::<u64>();
    let aligned = |bytes: u64| bytes & !511;
    let live = |bytes: u64| aligned(bytes - bytes / 16);
    assert_eq!(sum(|layer| layer.activations.expect("known")), aligned(live(48 * GIB) - live(16 * GIB)));
    assert_eq!(sum(|layer| layer.parameters.expect("known")), 2 * GIB);
    assert_eq!(sum(|layer| layer.gathered.expect("known")), 4 * GIB, "the whole weights, over two ranks");
    let allocated = |said: &Annotation| said.memory.expect("counters").allocated.expect("known");
    assert!(forward.windows(2).all(|pair| allocated(pair[0]) <= allocated(pair[1])));
    assert!(of_rank[30..60].windows(2).all(|pair| allocated(&pair[0].1) >= allocated(&pair[1].1)));
    assert_eq!(allocated(&of_rank[59].1), live(16 * GIB));
    let (first, last) = (&forward[0], &of_rank[30].1);
    assert_eq!((first.name.as_deref(), last.name.as_deref()), (Some("embedding"), Some("head")));
    let sizes = |records: &[(i64, Annotation)]| {
        let size = |(_, said): &(i64, Annotation)| (said.name.clone(), layer(said).activations, layer(said).parameters);
        records.iter().map(size).collect::<Vec<_>>()
    };
    let mut backward = sizes(&of_rank[30..60]);
    backward.reverse();
    assert_eq!(backward, sizes(&of_rank[..30]), "a layer has the same sizes in both passes");
    // They run inside their phases, one after the other.
    let forwards = phases(&said, "a", 1, "forward");
    assert!(of_rank[..30].iter().all(|(at_ns, _)| (forwards[0].0..forwards[0].1).contains(at_ns)));
    assert!(of_rank.windows(2).all(|pair| pair[0].0 <= pair[1].0));
}
