//! A real recording, replayed by the program: each phase of each step has the peak that follows from the two files.

use crate::daemon::Daemon;
use flate2::read::GzDecoder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/h200-ddp");
/// How long a replay of 78 s at full speed may take on a busy machine.
const REPLAYED_WITHIN: Duration = Duration::from_secs(60);

/// (rank, phase, begin, end). A step's number is not unique: each configuration uses the same numbers again.
type PhaseKey = (u64, String, i64, i64);

fn lines(name: &str) -> impl Iterator<Item = String> {
    let file = File::open(format!("{RECORDING}/{name}")).expect("the recording is in tests/data");
    BufReader::new(GzDecoder::new(file)).lines().map(|line| line.expect("a line of text"))
}

/// Change points by GPU, read without the program under test.
fn memory() -> BTreeMap<u64, Vec<(i64, u64)>> {
    let mut points = BTreeMap::<u64, Vec<(i64, u64)>>::new();
    for line in lines("nvml_1khz.csv.gz").filter(|line| !line.starts_with('#')) {
        let fields: Vec<i64> = line.split(',').map(|field| field.parse().expect("a number")).collect();
        points.entry(fields[1].unsigned_abs()).or_default().push((fields[0], fields[2].unsigned_abs()));
    }
    points
}

/// The peak of each phase: the value held at its begin, and each change before its end.
fn peaks(memory: &BTreeMap<u64, Vec<(i64, u64)>>) -> BTreeMap<PhaseKey, u64> {
    let mut peaks = BTreeMap::new();
    for rank in 0..2 {
        let mut begun = BTreeMap::new();
        for line in lines(&format!("annotations_rank{rank}.jsonl.gz")) {
            let event: Value = serde_json::from_str(&line).expect("JSON");
            let (at, phase) =
                (event["ts"].as_i64().expect("a time"), event["phase"].as_str().expect("a phase").to_owned());
            if event["ev"] == "begin" {
                begun.insert(phase, at);
            } else if event["ev"] == "end" {
                let begin = begun.remove(&phase).expect("an end has a begin");
                let held = memory[&rank].iter().rev().find(|(change, _)| *change <= begin);
                let changes = memory[&rank].iter().filter(|(change, _)| *change > begin && *change < at);
                let peak = held.into_iter().chain(changes).map(|(_, used)| *used).max().expect("memory is known");
                peaks.insert((rank, phase, begin, at), peak);
            }
        }
    }
    peaks
}

/// The program's answer after the whole recording was replayed.
fn replayed(arguments: &[&str], phases: usize) -> (Daemon, Value) {
    let source = format!("replay:{RECORDING}");
    let daemon = Daemon::start(&[&["serve", "--source", source.as_str()], arguments].concat());
    let begun = Instant::now();
    loop {
        let (status, body) = daemon.ask("/api/v1/jobs/h200-ddp/phases?limit=100000");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        if status == 200 && answer["phases"].as_array().is_some_and(|listed| listed.len() >= phases) {
            return (daemon, answer);
        }
        assert!(begun.elapsed() < REPLAYED_WITHIN, "the replay does not end: {status}");
        // The answer is megabytes, and other tests need the CPU.
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn answered_peaks(answer: &Value) -> BTreeMap<PhaseKey, u64> {
    let answered = |phase: &Value| {
        let time = |name: &str| phase[name].as_i64().expect("a time");
        let key = (
            phase["rank"].as_u64().expect("a rank"),
            phase["phase"].as_str().expect("a name").to_owned(),
            time("begin_unix_nano"),
            time("end_unix_nano"),
        );
        (key, phase["gpus"][0]["peak_bytes"].as_u64().expect("a peak"))
    };
    answer["phases"].as_array().expect("phases").iter().map(answered).collect()
}

#[test]
fn every_phase_of_every_step_has_the_peak_of_the_recording() {
    let expected = peaks(&memory());
    assert_eq!(expected.len(), 580 * 6);
    let (_daemon, answer) = replayed(&["--replay-speed", "max"], expected.len());
    assert!(answered_peaks(&answer) == expected, "{} peaks differ", differing(&answered_peaks(&answer), &expected));
}

fn differing(left: &BTreeMap<PhaseKey, u64>, right: &BTreeMap<PhaseKey, u64>) -> usize {
    left.iter().filter(|(key, peak)| right.get(*key) != Some(*peak)).count()
}

#[test]
fn the_speed_of_a_replay_changes_no_result() {
    let phases = 580 * 6;
    let (_fast, fast) = replayed(&["--replay-speed", "max"], phases);
    let (_slow, slow) = replayed(&["--replay-speed", "8"], phases);
    assert_eq!(fast, slow);
}

#[test]
fn a_gpu_that_the_recording_knows_only_later_is_played_from_then_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let header = lines("nvml_1khz.csv.gz").next().expect("a header");
    let rows = ["1000000000,0,5", "7000000000,0,6", "8000000000,1,70", "9000000000,1,80", "9500000000,0,7"];
    let text = [&[header.as_str()], rows.as_slice()].concat().join("\n");
    std::fs::write(folder.path().join("nvml_1khz.csv"), text).expect("written");
    let source = format!("replay:{}", folder.path().display());
    let daemon = Daemon::start(&["serve", "--source", &source, "--replay-speed", "max"]);
    let begun = Instant::now();
    loop {
        let (_, body) = daemon.ask("/api/v1/gpus/1/memory?from=0");
        let answered: Value = serde_json::from_str(&body).expect("JSON");
        if answered["peak_bytes"].as_u64().is_some_and(|peak| peak >= 80) {
            break;
        }
        assert!(begun.elapsed() < REPLAYED_WITHIN, "{body}");
        std::thread::yield_now();
    }
    let findings = daemon.get("/api/v1/findings");
    assert!(!findings.contains("gpu_lost"), "{findings}");
}

#[test]
fn what_the_recording_does_not_have_is_not_exported() {
    let (daemon, answer) = replayed(&["--replay-speed", "max"], 580 * 6);
    let newest = &answer["phases"][0];
    assert_eq!(newest["gpus"][0]["energy_joules"], Value::Null);
    let metrics = daemon.metrics();
    for absent in ["highwater_nvml_", "highwater_gpu_memory_total_bytes", "highwater_gpu_power_watts", "sampler_ticks"]
    {
        assert!(!metrics.lines().any(|line| line.contains(absent)), "{absent} is exported for a replay");
    }
    assert!(metrics.contains("highwater_job_allocator_retries_total{training_job=\"h200-ddp\",rank=\"0\"} 3"));
}

/// The three steps in which PyTorch's allocator retried show their fall and regrowth, and no other step has one.
#[test]
fn flushes_are_those_of_the_steps_with_an_allocator_retry() {
    use highwater_core::phases::FlushDetector;
    let mut flushes = BTreeMap::<u64, Vec<i64>>::new();
    for (gpu, points) in memory() {
        let mut detector = FlushDetector::default();
        for (at, used) in points {
            let flush = detector.push(at, Some(used), None);
            flushes.entry(gpu).or_default().extend(flush.map(|flush| flush.trough_ns));
        }
    }
    let (daemon, answer) = replayed(&["--replay-speed", "max"], 580 * 6);
    let counted: usize = flushes.values().map(Vec::len).sum();
    let answered: f64 = daemon
        .get("/metrics")
        .lines()
        .filter(|line| line.starts_with("highwater_gpu_memory_flushes_total{"))
        .map(|line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number"))
        .sum();
    assert!((answered - counted as f64).abs() < f64::EPSILON, "{answered} exported, {counted} counted");

    for step in answer["phases"].as_array().expect("phases").iter().filter(|phase| phase["phase"] == "step") {
        let retries = |memory: &str| step[memory]["alloc_retries"].as_u64().expect("retries are recorded");
        let (begin, end) = (step["begin_unix_nano"].as_i64().unwrap(), step["end_unix_nano"].as_i64().unwrap());
        let rank = step["rank"].as_u64().expect("a rank");
        let inside = flushes[&rank].iter().filter(|trough| (begin..end).contains(trough)).count() as u64;
        assert_eq!(inside, retries("memory_end") - retries("memory_begin"), "{step}");
    }
}
