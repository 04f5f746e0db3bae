//! The whole daemon over the fake driver: a GPU that fails, is lost, or hangs does not affect the others.

use crate::daemon::Daemon;
use crate::fake_nvml::Control;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
/// How long a change may take to be exported on a busy machine.
const SEEN_WITHIN: Duration = Duration::from_secs(30);

struct Node {
    control: Control,
    daemon: Daemon,
    _folder: TempDir,
}

impl Node {
    fn start(control: &Value, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let fake = Control::new(folder.path());
        fake.put(control);
        let library = fake.library().display().to_string();
        let daemon = Daemon::start(&[&["serve", "--nvml-library", &library], arguments].concat());
        Self { control: fake, daemon, _folder: folder }
    }

    fn value(&self, sample: &str) -> Option<f64> {
        value(&self.daemon.metrics(), sample)
    }

    /// Waits until `metrics` are as the test expects, and returns them.
    fn until(&self, what: &str, mut as_expected: impl FnMut(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let metrics = self.daemon.metrics();
            if as_expected(&metrics) {
                return metrics;
            }
            assert!(begun.elapsed() < SEEN_WITHIN, "not seen: {what}\n{metrics}");
            std::thread::yield_now();
        }
    }
}

fn value(metrics: &str, sample: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(sample)?.trim().parse().ok())
}

fn gpus(count: usize) -> Value {
    let gpu = |n: usize| json!({"uuid": format!("GPU-{n}"), "used": (n as u64 + 1) * GIB});
    json!({"gpus": (0..count).map(gpu).collect::<Vec<_>>()})
}

fn used(gpu: usize) -> String {
    format!("highwater_gpu_memory_used_bytes{{gpu=\"{gpu}\",uuid=\"GPU-{gpu}\"}}")
}

fn up(gpu: usize) -> String {
    format!("highwater_gpu_up{{gpu=\"{gpu}\",uuid=\"GPU-{gpu}\"}}")
}

#[test]
fn a_lost_gpu_is_down_and_absent_and_comes_back() {
    let mut control = gpus(3);
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    node.until("GPU 1", |metrics| value(metrics, &used(1)).is_some());
    control["gpus"][1]["lost"] = json!(true);
    node.control.put(&control);
    let metrics = node.until("the loss", |metrics| value(metrics, &up(1)) == Some(0.0));
    assert_eq!(value(&metrics, &used(1)), None, "the last value is not repeated");
    assert!(!metrics.contains("highwater_gpu_power_watts{gpu=\"1\""));
    assert_eq!(value(&metrics, &used(0)), Some(GIB as f64));
    control["gpus"][1]["lost"] = json!(false);
    node.control.put(&control);
    node.until("its return", |metrics| value(metrics, &used(1)) == Some(2.0 * GIB as f64));
    // The time in between is a gap, and is reported as one.
    let memory: Value = serde_json::from_str(&node.daemon.get("/api/v1/gpus/1/memory")).expect("JSON");
    assert!(memory["gap_ns"].as_i64().is_some_and(|gap| gap > 0), "{memory}");
    assert!(memory["points"].as_array().expect("points").iter().any(|point| point[1].is_null()), "{memory}");
}

#[test]
fn a_gpu_that_hangs_while_it_is_opened_is_down_and_comes_back() {
    let mut control = gpus(3);
    control["gpus"][1]["hang"] = json!(["nvmlDeviceGetUUID"]);
    let node = Node::start(&control, &["--set", "sampling.hang_after=100ms", "--set", "sampling.slow_period=100ms"]);
    let metrics = node.until("the others", |metrics| value(metrics, &used(2)) == Some(3.0 * GIB as f64));
    assert_eq!(value(&metrics, "highwater_gpu_up{gpu=\"1\"}"), Some(0.0), "{metrics}");
    assert_eq!(node.daemon.ask("/readyz").0, 200, "two are read");
    let gpus: Value = serde_json::from_str(&node.daemon.get("/api/v1/gpus")).expect("JSON");
    assert!(gpus.to_string().contains("nvmlDeviceGetUUID has not returned for "), "{gpus}");
    control["gpus"][1]["hang"] = json!([]);
    node.control.put(&control);
    node.until("its return", |metrics| value(metrics, &used(1)) == Some(2.0 * GIB as f64));
}

#[test]
fn a_driver_that_hangs_at_its_initialization_is_named_and_waited_for() {
    let mut control = gpus(1);
    control["hang"] = json!(["nvmlInit_v2", "nvmlInitWithFlags"]);
    let node = Node::start(&control, &["--set", "sampling.hang_after=100ms"]);
    let named = |why: &str| why.contains("nvmlInit has not returned for ") && why.contains("the driver hangs");
    let begun = Instant::now();
    while !matches!(node.daemon.ask("/readyz"), (503, why) if named(&why)) {
        assert!(begun.elapsed() < SEEN_WITHIN, "never named: {:?}", node.daemon.ask("/readyz"));
        std::thread::yield_now();
    }
    assert_eq!(node.daemon.ask("/healthz").0, 200, "a restart would not help");
    assert_eq!(node.value("highwater_source_error{reason=\"driver_hangs\"}"), Some(1.0));
    node.control.put(&gpus(1));
    node.until("the GPU", |metrics| value(metrics, &used(0)) == Some(GIB as f64));
}

#[test]
fn a_gpu_whose_call_hangs_is_set_aside_and_the_others_go_on() {
    let mut control = gpus(3);
    let node = Node::start(&control, &["--set", "sampling.hang_after=200ms", "--set", "sampling.slow_period=100ms"]);
    node.until("GPU 1", |metrics| value(metrics, &used(1)).is_some());
    // Each lane hangs, in a different call.
    let calls = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetRemappedRows"];
    control["gpus"][1]["hang"] = json!(calls);
    for gpu in [0, 2] {
        control["gpus"][gpu]["temperature"] = json!(77);
        control["gpus"][gpu]["rows_corrected"] = json!(5);
    }
    control["gpus"][2]["used"] = json!(7 * GIB);
    node.control.put(&control);
    let metrics = node.until("the hang", |metrics| value(metrics, &up(1)) == Some(0.0));
    let taken = value(&metrics, "highwater_sampler_ticks_taken_total").expect("ticks are exported");
    node.until("ticks after the hang", |metrics| {
        value(metrics, "highwater_sampler_ticks_taken_total").is_some_and(|now| now > taken + 100.0)
            && value(metrics, &used(2)) == Some(7.0 * GIB as f64)
    });
    node.until("the other lanes of the other GPUs", |metrics| {
        [0, 2].iter().all(|gpu| {
            let of = |name: &str, label: &str| {
                value(metrics, &format!("highwater_gpu_{name}{{gpu=\"{gpu}\",uuid=\"GPU-{gpu}\"{label}}}"))
            };
            of("temperature_celsius", "") == Some(77.0)
                && of("remapped_rows_total", ",error_type=\"corrected\"") == Some(5.0)
        })
    });
    control["gpus"][1]["hang"] = json!([]);
    node.control.put(&control);
    node.until("its return", |metrics| value(metrics, &used(1)) == Some(2.0 * GIB as f64));
}

/// The slower lanes of all GPUs share one thread. If it hangs, each GPU gets a thread; the fast lane is not affected.
#[test]
fn a_gpu_that_hangs_in_a_slower_call_keeps_no_other_waiting() {
    let mut control = gpus(3);
    let node = Node::start(&control, &[]);
    let temperature = |gpu: usize| format!("highwater_gpu_temperature_celsius{{gpu=\"{gpu}\",uuid=\"GPU-{gpu}\"}}");
    node.until("the first turn", |metrics| (0..3).all(|gpu| value(metrics, &temperature(gpu)).is_some()));
    assert_eq!(threads(&node, "hw-gpu"), 1);
    control["gpus"][1]["hang"] = json!(["nvmlDeviceGetUtilizationRates"]);
    node.control.put(&control);
    node.until("a thread for each", |_| threads(&node, "hw-gpu") == 3);
    for gpu in 0..3 {
        control["gpus"][gpu]["temperature"] = json!(77);
    }
    node.control.put(&control);
    let metrics = node
        .until("the other GPUs", |metrics| [0, 2].iter().all(|gpu| value(metrics, &temperature(*gpu)) == Some(77.0)));
    assert_eq!(value(&metrics, &up(1)), Some(1.0), "its memory is read");
    control["gpus"][1]["hang"] = json!([]);
    node.control.put(&control);
    node.until("its return", |metrics| value(metrics, &temperature(1)) == Some(77.0));
}

/// All GPUs share one NVML event set, whose registration hangs with that GPU. So only XIDs wait for it.
#[test]
fn a_gpu_that_hangs_in_the_registration_for_xids_costs_only_xids_and_only_until_it_returns() {
    let mut control = gpus(2);
    control["gpus"][1]["hang"] = json!(["nvmlDeviceRegisterEvents"]);
    control["xids"] = json!([{"gpu": 0, "xid": 79}]);
    let node = Node::start(&control, &[]);
    let temperature = |gpu: usize| format!("highwater_gpu_temperature_celsius{{gpu=\"{gpu}\",uuid=\"GPU-{gpu}\"}}");
    let xid = "highwater_gpu_xid_errors_total{gpu=\"0\",uuid=\"GPU-0\",xid=\"79\"}";
    let metrics = node.until("all other readings", |metrics| {
        let is_read = |gpu| value(metrics, &used(gpu)).is_some() && value(metrics, &temperature(gpu)).is_some();
        (0..2).all(is_read) && value(metrics, "highwater_sampler_ticks_taken_total").is_some_and(|taken| taken > 500.0)
    });
    assert_eq!((value(&metrics, &up(1)), value(&metrics, xid)), (Some(1.0), None));
    control["gpus"][1]["hang"] = json!([]);
    node.control.put(&control);
    node.until("the XID", |metrics| value(metrics, xid) == Some(1.0));
}

/// Functions of the fast and of the medium lane. Each thread of the slower lanes hangs in its first call.
const EVERY_LANE: [&str; 2] = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates"];
/// Every second of 64 GPUs.
const HUNG: fn(usize) -> bool = |gpu| gpu % 2 == 1;

/// The other GPUs lose at most 1 % of the ticks of 30 s, plus those for which the daemon waited for a CPU. If each of the 32
/// GPUs that hang delayed them by 1 s, they would lose 32 s.
#[test]
fn gpus_that_hang_at_once_stop_the_others_once_and_not_one_after_another() {
    let mut control = gpus(64);
    // A period long enough for 64 GPUs of the fake, on two cores beside other tests, and without back-off.
    let settings = ["sampling.period=5ms", "sampling.max_period=5ms", "sampling.budget=1"];
    let node = Node::start(&control, &settings.map(|setting| ["--set", setting]).concat());
    node.until("every GPU", |metrics| (0..64).all(|gpu| value(metrics, &used(gpu)).is_some()));
    let ticks = |metrics: &str| {
        ["due_total", "missed_total{cause=\"driver_blocked\"}"]
            .map(|name| value(metrics, &format!("highwater_sampler_ticks_{name}")).expect("exported"))
    };
    let (before, waited) = (ticks(&node.daemon.metrics()), node.daemon.waited());
    for gpu in (0..64).filter(|gpu| HUNG(*gpu)) {
        control["gpus"][gpu]["hang"] = json!(EVERY_LANE);
    }
    node.control.put(&control);
    let down = |metrics: &str| (0..64).filter(|gpu| value(metrics, &up(*gpu)) == Some(0.0)).collect::<Vec<_>>();
    node.until("that 32 hang", |metrics| {
        let down = down(metrics);
        assert!(down.iter().all(|gpu| HUNG(*gpu)), "a GPU that answers is reported down: {down:?}");
        down.len() == 32
    });
    // Until then others wait for those that hang.
    let waited_ticks = node.daemon.waited().saturating_sub(waited).as_secs_f64() / 0.005;
    let metrics = node.until("6,000 ticks", |metrics| ticks(metrics)[0] >= before[0] + 6_000.0);
    let [due, blocked] = [0, 1].map(|at| ticks(&metrics)[at] - before[at]);
    println!("of {due} ticks due {blocked} were blocked; {} sampling threads", sampling_threads(&node));
    assert!(blocked <= 0.01 * due + waited_ticks, "{blocked} of {due} ticks; the daemon waited {waited_ticks}");
    assert_eq!(down(&metrics).len(), 32);
    assert!(sampling_threads(&node) <= 33, "at most one for each GPU that hangs, and one for the others");
    control["gpus"].as_array_mut().expect("GPUs").iter_mut().for_each(|gpu| gpu["hang"] = json!([]));
    node.control.put(&control);
    node.until("their return", |metrics| {
        (0..64).all(|gpu| value(metrics, &used(gpu)) == Some((gpu as u64 + 1) as f64 * GIB as f64))
    });
}

/// Only this GPU's calls are slow, permanently. The other GPUs' calls must not wait for them.
#[test]
fn a_gpu_whose_calls_take_long_costs_the_others_no_ticks_and_is_still_read() {
    for delay_us in [5_000.0, 300_000.0] {
        let mut control = gpus(4);
        // A period long enough for a machine with two cores beside other tests, and without back-off.
        let settings = ["sampling.period=5ms", "sampling.max_period=5ms", "sampling.budget=1"];
        let node = Node::start(&control, &settings.map(|setting| ["--set", setting]).concat());
        node.until("every GPU", |metrics| (0..4).all(|gpu| value(metrics, &used(gpu)).is_some()));
        control["gpus"][1]["delay_us"] = json!({"nvmlDeviceGetMemoryInfo_v2": delay_us});
        node.control.put(&control);
        node.until("a thread of its own", |_| threads(&node, "hw-aside") == 1);
        let ticks = |metrics: &str| {
            ["due_total", "missed_total{cause=\"driver_blocked\"}"]
                .map(|name| value(metrics, &format!("highwater_sampler_ticks_{name}")).expect("exported"))
        };
        // On a busy machine the kernel may keep the thread from the processor in the middle of a call. The wait for the
        // slow GPU would cost half of the ticks, or nearly all.
        let before = ticks(&node.daemon.metrics());
        let metrics = node.until("2,000 ticks", |metrics| ticks(metrics)[0] >= before[0] + 2_000.0);
        let [due, blocked] = [0, 1].map(|at| ticks(&metrics)[at] - before[at]);
        println!("{delay_us} us: of {due} ticks due {blocked} were blocked");
        assert!(blocked <= 0.2 * due, "{blocked} of {due} ticks");
        // Its memory is followed, and its period is that of its calls.
        control["gpus"][1]["used"] = json!(9 * GIB);
        node.control.put(&control);
        node.until("its memory", |metrics| value(metrics, &used(1)) == Some(9.0 * GIB as f64));
        node.until("its period", |metrics| value(metrics, &period(1)).is_some_and(|period| period >= delay_us * 1e-6));
        assert!(value(&node.daemon.metrics(), &period(2)) == Some(0.005));
        control["gpus"][1]["hang"] = json!(["nvmlDeviceGetMemoryInfo_v2"]);
        node.control.put(&control);
        node.until("that it hangs there", |metrics| value(metrics, &up(1)) == Some(0.0));
        control["gpus"][1]["hang"] = json!([]);
        node.control.put(&control);
        node.until("its answer", |metrics| value(metrics, &up(1)) == Some(1.0));
        control["gpus"][1]["delay_us"] = json!({});
        node.control.put(&control);
        node.until("its return", |metrics| {
            threads(&node, "hw-aside") == 0 && value(metrics, &period(1)) == Some(0.005)
        });
    }
}

/// How many threads of the daemon are sampling, or hang in it.
fn sampling_threads(node: &Node) -> usize {
    threads(node, "hw-fast")
}

/// How many threads of the daemon have this name.
fn threads(node: &Node, name: &str) -> usize {
    let threads = std::fs::read_dir(format!("/proc/{}/task", node.daemon.pid())).expect("threads");
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|of| of.trim() == name).count()
}

/// Deadlines are counted by outcome. The clock shows that none is missing: as many are due as periods have passed, also
/// while the driver blocks every sweep and while a thread hangs in one.
#[test]
fn every_deadline_is_due_and_a_blocked_driver_is_reported() {
    let mut control = gpus(2);
    let settings = ["sampling.budget=1", "sampling.max_period=1ms", "sampling.hang_after=200ms"];
    let node = Node::start(&control, &settings.map(|setting| ["--set", setting]).concat());
    node.until("ticks", |metrics| value(metrics, "highwater_sampler_ticks_taken_total").is_some());
    let due = |metrics: &str| value(metrics, "highwater_sampler_ticks_due_total").expect("exported");
    let blocked = "highwater_sampler_ticks_missed_total{cause=\"driver_blocked\"}";
    // The number of periods lies between two elapsed times: from after the first reading to before the last, and from
    // before the first to after the last.
    let begun = Instant::now();
    let first = due(&node.daemon.metrics());
    let looked = Instant::now();
    for gpu in 0..2 {
        control["gpus"][gpu]["delay_us"] = json!({"nvmlDeviceGetMemoryInfo_v2": 5_000.0});
    }
    node.control.put(&control);
    node.until("blocked ticks", |metrics| value(metrics, blocked).is_some_and(|missed| missed > 500.0));
    control["gpus"][0]["hang"] = json!(["nvmlDeviceGetMemoryInfo_v2"]);
    node.control.put(&control);
    node.until("the hang", |metrics| value(metrics, &up(0)) == Some(0.0));
    let ticks = |metrics: &str| value(metrics, "highwater_sampler_ticks_taken_total").expect("exported");
    let taken = ticks(&node.daemon.metrics());
    node.until("ticks after it", |metrics| ticks(metrics) > taken + 2_000.0);
    let least = looked.elapsed();
    let due = due(&node.daemon.metrics()) - first;
    let periods = [least, begun.elapsed()].map(|elapsed| elapsed.as_secs_f64() * 1_000.0);
    // The sweep in progress has not been counted. Those that a hang of 200 ms delayed have.
    let open = 150.0;
    assert!((periods[0] - open..=periods[1] + open).contains(&due), "{due} due in {periods:?} periods");
}

#[test]
fn a_gpu_that_only_fails_is_down_and_what_it_counted_stays() {
    let mut control = gpus(1);
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    node.until("the GPU", |metrics| value(metrics, &used(0)).is_some());
    control["xids"] = json!([{"gpu": 0, "xid": 79}]);
    node.control.put(&control);
    let xid = "highwater_gpu_xid_errors_total{gpu=\"0\",uuid=\"GPU-0\",xid=\"79\"}";
    node.until("the XID", |metrics| value(metrics, xid) == Some(1.0));
    control["xids"] = json!([]);
    control["gpus"][0]["errors"] = json!({"nvmlDeviceGetMemoryInfo_v2": 999});
    node.control.put(&control);
    node.until("that it is down", |metrics| value(metrics, &up(0)) == Some(0.0));
    // Its only GPU is gone, so NVML is closed and opened again.
    node.until("that NVML is closed", |metrics| metrics.contains("highwater_source_error{reason=\"all_gpus_lost\"} 1"));
    control["gpus"][0]["errors"] = json!({});
    node.control.put(&control);
    let metrics = node.until("its return", |metrics| value(metrics, &used(0)) == Some(GIB as f64));
    assert_eq!(value(&metrics, xid), Some(1.0), "counted before NVML was opened again");
}

#[test]
fn a_gpu_that_stops_supporting_the_memory_call_is_down_until_it_does_again() {
    let mut control = gpus(2);
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    node.until("the GPU", |metrics| value(metrics, &used(1)).is_some());
    control["gpus"][1]["errors"] = json!({"nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetMemoryInfo": 3});
    node.control.put(&control);
    let metrics = node.until("that it is down", |metrics| value(metrics, &up(1)) == Some(0.0));
    assert_eq!((value(&metrics, &used(1)), value(&metrics, &up(0))), (None, Some(1.0)));
    // It stays down however often it is tried. Three seconds are longer than it takes to be found failing.
    let ticks = |metrics: &str| value(metrics, "highwater_sampler_ticks_due_total").expect("exported");
    node.until("three seconds more", |now| {
        assert_eq!(value(now, &up(1)), Some(0.0));
        ticks(now) > ticks(&metrics) + 3_000.0
    });
    control["gpus"][1]["errors"] = json!({});
    node.control.put(&control);
    node.until("its return", |metrics| value(metrics, &used(1)) == Some(2.0 * GIB as f64));
}

/// Such GPUs exist: the parent of MIG instances, if the process may not read it, and a GPU that shares the host's memory.
#[test]
fn a_gpu_without_a_memory_call_that_is_lost_is_down_and_comes_back() {
    let mut control = gpus(2);
    control["gpus"][1]["errors"] = json!({"nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetMemoryInfo": 3});
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    let power = "highwater_gpu_power_watts{gpu=\"1\",uuid=\"GPU-1\"}";
    let metrics = node.until("its power", |metrics| value(metrics, power).is_some());
    assert_eq!((value(&metrics, &used(1)), value(&metrics, &up(1))), (None, Some(1.0)));
    let utilization = "highwater_gpu_memory_busy_ratio{gpu=\"1\",uuid=\"GPU-1\"}";
    assert_eq!(value(&metrics, utilization), None, "it has no memory of its own");
    control["gpus"][1]["lost"] = json!(true);
    node.control.put(&control);
    let metrics = node.until("that it is down", |metrics| value(metrics, &up(1)) == Some(0.0));
    assert_eq!(value(&metrics, &up(0)), Some(1.0));
    control["gpus"][1]["lost"] = json!(false);
    node.control.put(&control);
    node.until("its return", |metrics| value(metrics, &up(1)) == Some(1.0));
}

#[test]
fn an_expensive_driver_is_backed_off_from() {
    let mut control = gpus(2);
    // On a busy machine ticks are late, so that a shorter delay would be no large share of the time.
    for gpu in 0..2 {
        control["gpus"][gpu]["delay_us"] = json!({"nvmlDeviceGetMemoryInfo_v2": 2_000.0});
    }
    let node = Node::start(&control, &[]);
    node.until("a longer period", |metrics| {
        value(metrics, "highwater_sampler_period_seconds").is_some_and(|period| period > 0.001)
    });
    node.until("the share", |metrics| value(metrics, "highwater_nvml_busy_ratio").is_some_and(|ratio| ratio > 0.0));
}

fn period(gpu: usize) -> String {
    format!("highwater_gpu_sampling_period_seconds{{gpu=\"{gpu}\",uuid=\"GPU-{gpu}\"}}")
}

#[test]
fn a_gpu_on_which_nothing_runs_is_read_seldom_until_the_first_sign() {
    const FULL: Option<f64> = Some(0.001);
    const SELDOM: Option<f64> = Some(0.1);
    let mut control = gpus(2);
    let idle = control["gpus"].as_array_mut().expect("GPUs");
    idle.iter_mut().for_each(|gpu| gpu["used"] = json!(0));
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    let periods = |metrics: &str| [0, 1].map(|gpu| value(metrics, &period(gpu)));
    let sampler = |metrics: &str| value(metrics, "highwater_sampler_period_seconds");
    node.until("both idle", |metrics| periods(metrics) == [SELDOM, SELDOM] && sampler(metrics) == SELDOM);
    // An annotation that names one brings back its full rate, and not the other's.
    let event = json!({"event": "begin", "name": "forward", "job": "story", "gpu": 1});
    assert_eq!(node.daemon.post("/api/v1/annotations", &event).0, 200);
    let metrics = node.until("the named one", |metrics| periods(metrics) == [SELDOM, FULL]);
    assert_eq!(sampler(&metrics), FULL);
    node.until("no sign for a while", |metrics| periods(metrics) == [SELDOM, SELDOM]);
    // Memory, as a context takes it.
    control["gpus"][0]["used"] = json!(527 << 20);
    node.control.put(&control);
    node.until("memory", |metrics| {
        value(metrics, &used(0)) == Some((527_u64 << 20) as f64) && periods(metrics) == [FULL, SELDOM]
    });
    control["gpus"][0]["used"] = json!(0);
    node.control.put(&control);
    node.until("its release", |metrics| periods(metrics) == [SELDOM, SELDOM]);
    // A process without memory that would show it.
    control["gpus"][1]["processes"] = json!([{"pid": 4242, "used": 0, "compute": true}]);
    node.control.put(&control);
    let metrics = node.until("a process", |metrics| periods(metrics) == [SELDOM, FULL]);
    // What is due follows the period: none is missed for the time at which nothing was due.
    let count = |name: &str| value(&metrics, &format!("highwater_sampler_ticks_{name}")).expect(name);
    let missed = ["late", "driver_blocked"].map(|cause| count(&format!("missed_total{{cause=\"{cause}\"}}")));
    assert_eq!(count("due_total"), count("taken_total") + missed.iter().sum::<f64>());
}

#[test]
fn a_gpu_is_never_read_seldom_if_that_is_off_or_its_processes_are_not_known() {
    let mut control = gpus(1);
    control["gpus"][0]["used"] = json!(0);
    let off = Node::start(&control, &["--set", "sampling.idle_period=none", "--set", "sampling.slow_period=100ms"]);
    control["gpus"][0]["errors"] = json!({"nvmlDeviceGetComputeRunningProcesses_v3": 999});
    let unknown = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    for node in [off, unknown] {
        let ticks = |metrics: &str| value(metrics, "highwater_sampler_ticks_due_total");
        node.until("three seconds at the full rate", |metrics| {
            assert_ne!(value(metrics, &period(0)), Some(0.1));
            ticks(metrics) > Some(3_000.0)
        });
    }
}

#[test]
fn a_driver_that_comes_later_is_found() {
    let node = Node::start(&json!({"errors": {"nvmlInit_v2": 9, "nvmlInitWithFlags": 9}}), &[]);
    node.until("the reason", |metrics| metrics.contains("highwater_source_error{reason=\"driver_not_loaded\"} 1"));
    assert_eq!(node.value("highwater_nvml_up"), Some(0.0));
    node.control.put(&gpus(1));
    let metrics = node.until("the GPU", |metrics| value(metrics, &used(0)) == Some(GIB as f64));
    assert_eq!(value(&metrics, "highwater_nvml_up"), Some(1.0));
}

#[test]
fn mig_instances_are_devices_with_their_parent() {
    let mig = json!({"uuid": "MIG-a", "name": "NVIDIA H200 MIG 1g.18gb", "total": 18 * GIB, "used": GIB});
    let node = Node::start(&json!({"gpus": [{"uuid": "GPU-0", "used": 2 * GIB, "mig": [mig]}]}), &[]);
    let metrics = node.until("the instance", |metrics| {
        value(metrics, "highwater_gpu_memory_used_bytes{gpu=\"0:0\",uuid=\"MIG-a\"}") == Some(GIB as f64)
    });
    let info = metrics.lines().find(|line| line.starts_with("highwater_gpu_info{gpu=\"0:0\"")).expect("info");
    assert!(info.contains("parent_uuid=\"GPU-0\"") && info.contains("mig_profile=\"1g.18gb\""), "{info}");
}

#[test]
fn instances_that_come_and_go_and_a_gpu_that_opens_later_are_found() {
    let mut control = json!({"gpus": [
        {"uuid": "GPU-0", "used": GIB, "mig": [{"uuid": "MIG-a", "used": 2 * GIB}, null]},
        {"uuid": "GPU-1", "used": 3 * GIB, "errors": {"nvmlDeviceGetHandleByIndex_v2": 999}},
    ]});
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    let instance =
        |name: &str, place: usize| format!("highwater_gpu_memory_used_bytes{{gpu=\"0:{place}\",uuid=\"MIG-{name}\"}}");
    let metrics = node.until("the instance", |metrics| value(metrics, &instance("a", 0)) == Some(2.0 * GIB as f64));
    assert_eq!(value(&metrics, "highwater_gpu_up{gpu=\"1\"}"), Some(0.0), "it is there and cannot be opened");
    let gpus: Value = serde_json::from_str(&node.daemon.get("/api/v1/gpus")).expect("JSON");
    assert!(gpus["gpus"][2]["trouble"].as_str().is_some_and(|why| why.contains("UNKNOWN")), "{gpus}");
    control["gpus"][0]["mig"] = json!([null, {"uuid": "MIG-b", "used": 4 * GIB}]);
    control["gpus"][1]["errors"] = json!({});
    node.control.put(&control);
    let metrics =
        node.until("the other instance", |metrics| value(metrics, &instance("b", 1)) == Some(4.0 * GIB as f64));
    assert!(!metrics.contains("highwater_gpu_up{gpu=\"0:0\""), "{metrics}");
    node.until("the GPU that opens", |metrics| value(metrics, &used(1)) == Some(3.0 * GIB as f64));
    node.until("that no instance is called lost", |_| {
        !node.daemon.get("/api/v1/findings?active=true").contains("gpu_lost")
    });
}

#[test]
fn a_process_that_spreads_over_more_gpus_is_followed() {
    let holding = |bytes: u64| json!([{"pid": std::process::id(), "used": bytes}]);
    let mut control = gpus(3);
    control["gpus"][0]["processes"] = holding(GIB / 2);
    control["gpus"][1]["processes"] = holding(8 * GIB);
    let node = Node::start(&control, &["--set", "sampling.slow_period=100ms"]);
    let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    // Steps go on, as a job's do, and the driver's process list is read now and then.
    let mut step = 0;
    let mut until_on = |wanted: Value| {
        node.until("the rank's GPUs", |_| {
            step += 1;
            let event = json!({"event": "begin", "kind": "step", "step": step, "job": "story", "rank": 0});
            socket.send_to(event.to_string().as_bytes(), node.daemon.socket()).expect("sent");
            let jobs: Value = serde_json::from_str(&node.daemon.get("/api/v1/jobs")).expect("JSON");
            jobs["jobs"][0]["ranks"][0]["gpus"] == wanted
        });
    };
    // On the first GPU it has only a context, as frameworks create there by accident.
    until_on(json!(["GPU-1"]));
    control["gpus"][2]["processes"] = holding(2 * GIB);
    node.control.put(&control);
    until_on(json!(["GPU-1", "GPU-2"]));
}

#[test]
fn limits_are_exported_where_the_gpu_has_them() {
    let node = Node::start(
        &json!({"gpus": [
            {"uuid": "GPU-0", "power_limit_mw": 500_000, "slowdown_celsius": 87, "shutdown_celsius": 92},
            {"uuid": "GPU-1", "slowdown_celsius": null, "shutdown_celsius": null,
             "errors": {"nvmlDeviceGetEnforcedPowerLimit": 3}},
        ]}),
        &[],
    );
    let bar1 = |gpu| format!("highwater_gpu_bar1_used_bytes{{gpu=\"{gpu}\"");
    let metrics =
        node.until("both GPUs' rare readings", |metrics| [0, 1].iter().all(|gpu| metrics.contains(&bar1(gpu))));
    let of = |limit| value(&metrics, &format!("highwater_gpu_{limit}}}"));
    assert_eq!(of("power_limit_watts{gpu=\"0\",uuid=\"GPU-0\""), Some(500.0));
    assert_eq!(of("temperature_limit_celsius{gpu=\"0\",uuid=\"GPU-0\",limit=\"slowdown\""), Some(87.0));
    assert_eq!(of("temperature_limit_celsius{gpu=\"0\",uuid=\"GPU-0\",limit=\"shutdown\""), Some(92.0));
    assert!(!metrics.contains("_limit_watts{gpu=\"1\"") && !metrics.contains("_limit_celsius{gpu=\"1\""), "{metrics}");
}

#[test]
fn memory_of_processes_is_reported_on_request_only() {
    let control = json!({"gpus": [{"uuid": "GPU-0", "processes": [{"pid": 4711, "used": GIB}]}]});
    let process = "highwater_process_gpu_memory_used_bytes{gpu=\"0\",uuid=\"GPU-0\",pid=\"4711\"}";
    let node = Node::start(&control, &["--set", "metrics.processes=true"]);
    node.until("the process", |metrics| value(metrics, process) == Some(GIB as f64));
    let node = Node::start(&control, &[]);
    let metrics = node.until("the slow lane", |metrics| metrics.contains("highwater_gpu_energy_joules_total"));
    assert!(!metrics.contains("highwater_process_gpu_memory_used_bytes"));
}
