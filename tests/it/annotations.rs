//! Events from jobs: good ones are joined with memory; bad ones are refused with a reason, and cost no good event.

use crate::daemon::{Daemon, agent, answer};
use crate::process::eventually;
use serde_json::{Value, json};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a sent datagram may take to be counted on a busy machine.
const COUNTED_WITHIN: Duration = Duration::from_secs(20);

/// A daemon with memory to join with.
fn simulated() -> Daemon {
    Daemon::start(&["serve", "--source", "sim:spike"]).ready()
}

fn begin(name: &str) -> Value {
    json!({"event": "begin", "name": name, "job": "story", "gpu": 0})
}

fn end(name: &str) -> Value {
    json!({"event": "end", "name": name, "job": "story"})
}

fn now_ns() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos()).expect("before 2262")
}

fn post(daemon: &Daemon, body: &Value) -> (u16, Value) {
    let (status, text) = daemon.post("/api/v1/annotations", body);
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}")))
}

fn post_text(daemon: &Daemon, body: &[u8]) -> (u16, Value) {
    let url = format!("http://{}/api/v1/annotations", daemon.address());
    let (status, text) = answer(agent().post(url).send(body), "POST");
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}")))
}

/// The value in the line of `/metrics` that begins with `sample`.
fn value_of(metrics: &str, sample: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(sample)?.trim().parse().ok())
}

/// Waits until the line of `/metrics` that begins with `sample` has at least this value.
fn wait_for(daemon: &Daemon, sample: &str, least: f64) {
    let begun = Instant::now();
    loop {
        let metrics = daemon.metrics();
        let value = value_of(&metrics, sample);
        if value.is_some_and(|value| value >= least) {
            return;
        }
        assert!(begun.elapsed() < COUNTED_WITHIN, "{sample} is {value:?}, not {least}");
        std::thread::yield_now();
    }
}

/// How many phases have been joined with memory, whole or in part: on a busy machine a reading may be missed.
fn joined(metrics: &str) -> Option<f64> {
    let count = |outcome| value_of(metrics, &format!("highwater_phases_total{{outcome=\"{outcome}\"}}"));
    Some(count("attributed")? + count("with_gap")?)
}

/// Waits until this many phases have been joined with memory.
fn wait_for_joined(daemon: &Daemon, least: f64) {
    eventually(COUNTED_WITHIN, "phases with memory", || (joined(&daemon.metrics())? >= least).then_some(()));
}

/// Waits until memory has been read twice more: on a busy machine, what takes no time may lie between two readings.
fn wait_for_readings(daemon: &Daemon) {
    const TICKS: &str = "highwater_sampler_ticks_taken_total";
    let ticks = |daemon: &Daemon| value_of(&daemon.metrics(), TICKS).expect("exported");
    wait_for(daemon, TICKS, ticks(daemon) + 2.0);
}

/// The refusal of a bad event in a batch whose other events are good.
fn refusal_of(bad: Value) -> Value {
    let daemon = simulated();
    let (status, answered) = post(&daemon, &json!([begin("forward"), bad, end("forward")]));
    assert_eq!((status, &answered["accepted"], &answered["refused"]), (200, &json!(2), &json!(1)), "{answered}");
    wait_for(
        &daemon,
        "highwater_phase_duration_seconds_count{training_job=\"story\",rank=\"0\",phase=\"forward\"}",
        1.0,
    );
    assert_eq!(answered["refusals"][0]["index"], json!(1));
    answered["refusals"][0].clone()
}

#[track_caller]
fn refused(bad: Value, reason: &str, detail: &str) {
    let answered = refusal_of(bad);
    assert_eq!(answered["reason"], reason, "{answered}");
    assert!(answered["detail"].as_str().is_some_and(|text| text.contains(detail)), "{answered}");
}

#[test]
fn a_phase_over_http_has_its_memory_and_duration() {
    let daemon = simulated();
    let begun = now_ns();
    // The first may lie in a gap of a busy machine.
    let (phase, metrics) = eventually(COUNTED_WITHIN, "a phase that lies in no gap", || {
        assert_eq!(post(&daemon, &begin("forward")).0, 200);
        wait_for_readings(&daemon);
        assert_eq!(post(&daemon, &end("forward")).0, 200);
        let phases: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/story/phases")).expect("JSON");
        let mut ended = phases["phases"].as_array().expect("a list").iter();
        let is_whole = |phase: &&Value| phase["gpus"][0]["peak_bytes"].is_u64() && phase["gpus"][0]["gap_ns"] == 0;
        let whole = ended.find(is_whole).cloned()?;
        let metrics = daemon.metrics();
        Some((whole, metrics))
    });
    assert_eq!((&phase["phase"], &phase["rank"]), (&json!("forward"), &json!(0)));
    assert!(value_of(&metrics, "highwater_phases_total{outcome=\"attributed\"}") >= Some(1.0), "{metrics}");
    let (begin_ns, end_ns) = (phase["begin_unix_nano"].as_i64().unwrap(), phase["end_unix_nano"].as_i64().unwrap());
    assert!(begun <= begin_ns && begin_ns <= end_ns && end_ns <= now_ns(), "{phase}");
}

#[test]
fn a_datagram_is_joined_with_its_senders_job_and_pid() {
    let daemon = simulated();
    let socket = UnixDatagram::unbound().expect("a socket");
    let lines = [
        json!({"event": "begin", "kind": "step", "step": 7, "job": "story", "rank": 3, "gpu": [0]}),
        json!({"event": "begin", "name": "forward", "job": "story", "rank": 3}),
        json!({"event": "end", "name": "forward", "job": "story", "rank": 3, "memory": {"reserved": 5}}),
        json!({"event": "end", "kind": "step", "step": 7, "job": "story", "rank": 3}),
        json!({"event": "mark", "name": "oom", "job": "story", "rank": 3}),
    ];
    let (begins, ends) = lines.split_at(2);
    for lines in [begins, ends] {
        let datagram = lines.iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
        socket.send_to(datagram.as_bytes(), daemon.socket()).expect("the socket is there");
        wait_for_readings(&daemon);
    }
    socket.send_to(b"not json", daemon.socket()).expect("the socket is there");
    wait_for_joined(&daemon, 2.0);
    wait_for(&daemon, "highwater_annotations_total{outcome=\"malformed\"}", 1.0);
    let metrics = daemon.metrics();
    for line in [
        "highwater_job_step{training_job=\"story\",rank=\"3\"} 7",
        "highwater_job_steps_total{training_job=\"story\",rank=\"3\"} 1",
        "highwater_job_allocator_reserved_bytes{training_job=\"story\",rank=\"3\"} 5",
        "highwater_annotations_total{outcome=\"accepted\"} 5",
    ] {
        assert!(metrics.contains(line), "no line {line}");
    }
    let jobs: Value = serde_json::from_str(&daemon.get("/api/v1/jobs")).expect("JSON");
    let rank = &jobs["jobs"][0]["ranks"][0];
    assert_eq!(rank["pid"], json!(std::process::id()), "{rank}");
}

/// The README's example with the client that it imports, and stand-ins for a model and its data.
#[test]
fn the_readmes_python_is_taken_word_for_word() {
    let readme = include_str!("../../README.md");
    let mut blocks = readme.split("```python\n").skip(1).filter_map(|rest| rest.split("```").next());
    let steps = blocks.find(|block| block.contains("highwater.step")).expect("its example");
    // They take as long as work does: on a busy machine, what takes no time may lie between two readings.
    let stand_ins = "import time\n\
        def work(): time.sleep(0.2)\n\
        class model:\n\
        \x20   def __new__(cls, batch): work(); return cls\n\
        \x20   def backward(): work()\n\
        batches = [None]\n";
    let daemon = simulated();
    // It stays alive until its environment has been read, as a job does.
    let mut job = std::process::Command::new("python3")
        .args(["-c", &[stand_ins, steps, "\nimport sys; sys.stdin.read()\n"].concat()])
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/python"))
        .env("HIGHWATER_ANNOTATIONS_SOCKET", daemon.socket())
        .envs([("HIGHWATER_JOB", "llama"), ("RANK", "1"), ("CUDA_VISIBLE_DEVICES", "0"), ("LOCAL_RANK", "0")])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("python3");
    wait_for_joined(&daemon, 3.0);
    let metrics = daemon.metrics();
    assert!(metrics.contains("highwater_job_step{training_job=\"llama\",rank=\"1\"} 0"), "{metrics}");
    assert!(metrics.contains("highwater_job_info{training_job=\"llama\",rank=\"1\",gpu=\"0\""), "{metrics}");
    drop(job.stdin.take());
    assert!(job.wait().expect("it ends").success());
    // The first may come before the process's environment has been read.
    eventually(COUNTED_WITHIN, "all six events", || {
        let metrics = daemon.metrics();
        let count = |outcome| value_of(&metrics, &format!("highwater_annotations_total{{outcome=\"{outcome}\"}}"));
        (count("accepted")? + count("accepted_without_gpu")? > 5.5).then_some(())
    });
    // The end of its connection is the end of the rank.
    eventually(COUNTED_WITHIN, "the rank's end", || {
        let job: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/llama")).expect("JSON");
        job["ranks"][0]["exited_unix_nano"].as_i64().map(|_| ())
    });
}

#[test]
fn open_files_that_a_sender_passes_along_are_not_kept() {
    let daemon = simulated();
    let open_files = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("its open files").count();
    let before = open_files();
    let script = format!(
        "import socket\nsender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\nsender.connect({:?})\n\
         for text in [b'{{}}', b'x' * 70_000]:\n    for _ in range(100): socket.send_fds(sender, [text], [0, 1, 2, 0])",
        daemon.socket()
    );
    let status = std::process::Command::new("python3").args(["-c", &script]).status().expect("python3");
    assert!(status.success());
    wait_for(&daemon, "highwater_annotations_total{outcome=\"malformed\"}", 100.0);
    wait_for(&daemon, "highwater_annotations_total{outcome=\"too_large\"}", 100.0);
    // A scrape's connection may be open in one count and not in the other. The datagrams carried 800 open files.
    assert!(open_files() < before + 50, "{before} open files, then {}", open_files());
}

#[test]
fn a_sender_without_a_job_is_named_by_its_environment() {
    let daemon = simulated();
    // A separate process has its own environment. It sends what it reads.
    let script = format!(
        "import socket,sys; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.stdin.buffer.read(), {:?})\n\
         input_end = sys.stdin.close()\nimport time\nwhile True: time.sleep(1)",
        daemon.socket()
    );
    let mut child = std::process::Command::new("python3")
        .args(["-c", &script])
        .env("SLURM_JOB_ID", "4711")
        .env("SLURM_PROCID", "2")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("python3");
    let event = json!({"event": "begin", "name": "forward", "gpu": 0}).to_string();
    std::io::Write::write_all(&mut child.stdin.take().expect("stdin"), event.as_bytes()).expect("written");
    wait_for(&daemon, "highwater_phase_active{training_job=\"slurm-4711\",rank=\"2\",phase=\"forward\"}", 1.0);
    child.kill().and_then(|()| child.wait()).expect("it ends");
}

#[test]
fn bad_events_are_refused_by_name_and_nothing_good_is_lost() {
    refused(json!({"event": "begin", "name": "x", "job": "story", "colour": "red"}), "malformed", "colour");
    refused(json!({"event": "begins", "name": "x", "job": "story"}), "malformed", "begins");
    refused(json!({"event": "begin", "name": "x"}), "malformed", "job");
    refused(json!({"event": "begin", "job": "story"}), "malformed", "name");
    refused(json!({"event": "begin", "name": "x\u{0}y", "job": "story"}), "bad_name", "U+0000");
    refused(json!({"event": "begin", "name": "x", "job": "a\nb"}), "bad_name", "U+000A");
    refused(json!({"event": "begin", "name": "x".repeat(10_000), "job": "story"}), "bad_name", "10000 bytes");
    refused(json!({"event": "begin", "name": "x", "job": "story", "gpu": 9}), "unknown_gpu", "`9`");
    refused(json!({"event": "begin", "name": "x", "job": "story", "gpu": [0, "GPU-x"]}), "unknown_gpu", "`GPU-x`");
    refused(json!({"event": "end", "name": "backward", "job": "story"}), "end_without_begin", "`backward`");
    refused(json!({"event": "begin", "name": "x", "job": "story", "time_unix_nano": 1}), "too_old", "600 s");
    let in_2100 = 4_102_444_800_000_000_000_i64;
    refused(json!({"event": "begin", "name": "x", "job": "story", "time_unix_nano": in_2100}), "in_future", "ahead");
}

#[test]
fn layers_are_listed_once_each_and_no_phase_is_lost_to_them() {
    let daemon = simulated();
    let layer = |event: &str, n: usize, allocated: u64| {
        json!({"event": event, "kind": "layer", "name": format!("layer {n:03}"), "job": "story", "rank": 2, "step": 7,
            "gpu": 0, "memory": {"allocated": allocated}})
    };
    assert_eq!(post(&daemon, &json!([begin("forward"), end("forward")])).0, 200);
    // More rows than one chunk of the answer has; each layer twice.
    for _ in 0..2 {
        let events: Vec<Value> = (0..250).flat_map(|n| [layer("begin", n, 5), layer("end", n, 12)]).collect();
        assert_eq!(post(&daemon, &json!(events)).1["accepted"], json!(500));
    }
    let layers = eventually(COUNTED_WITHIN, "every layer has ended twice", || {
        let listed: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/story/layers")).expect("JSON");
        let layers = listed["layers"].as_array().expect("a list");
        (layers.last()?["count"] == json!(2)).then(|| layers.clone())
    });
    let names: Vec<_> = layers.iter().map(|layer| layer["layer"].as_str().expect("a name").to_owned()).collect();
    assert_eq!(names, (0..250).map(|n| format!("layer {n:03}")).collect::<Vec<_>>());
    let one = &layers[249];
    assert_eq!((&one["rank"], &one["count"], &one["last"]["step"]), (&json!(2), &json!(2), &json!(7)));
    assert_eq!(one["last"]["allocated_growth_bytes"], json!(7));
    assert!(one["last"]["reserved_growth_bytes"].is_null(), "{one}");
    // A layer of no length may lie in a gap of a busy machine.
    eventually(COUNTED_WITHIN, "a layer that lies in no gap", || {
        assert_eq!(post(&daemon, &json!([layer("begin", 249, 5), layer("end", 249, 12)])).1["accepted"], json!(2));
        let listed: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/story/layers")).expect("JSON");
        listed["layers"][249]["peak_bytes"].is_u64().then_some(())
    });
    let phases: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/story/phases")).expect("JSON");
    assert_eq!(phases["phases"].as_array().map(Vec::len), Some(1), "layers are not listed as phases");
    assert_eq!(daemon.ask("/api/v1/jobs/nobody/layers").0, 404);
}

#[test]
fn a_layer_profile_is_listed_when_its_step_is_over_and_pushes_nothing_out() {
    let daemon = simulated();
    let record = |n: u64, direction: &str| {
        json!({"event": "mark", "kind": "layer", "name": format!("layer {n:03}"), "job": "story", "rank": 2, "step": 7,
            "memory": {"allocated": 1_000 + n, "reserved": 9_000},
            "layer": {"direction": direction, "growth": -5, "activations": n, "parameters": 4, "gathered": 0}})
    };
    let step = |event: &str, rank: u32| {
        let (job, kind) = ("story", "step");
        json!({"event": event, "kind": kind, "job": job, "rank": rank, "step": 7, "gpu": 0})
    };
    // More records than one piece of the answer has.
    let mut events = vec![step("begin", 2), step("begin", 5)];
    events.extend((0..250).map(|n| record(n, "forward")));
    events.extend((0..250).rev().map(|n| record(n, "backward")));
    assert_eq!(post(&daemon, &json!(events)).1["accepted"], json!(502));
    let listed = |query: &str| -> Value {
        serde_json::from_str(&daemon.get(&format!("/api/v1/jobs/story/layers{query}"))).expect("JSON")
    };
    assert_eq!(listed("")["profiles"], json!([]), "half a profile");
    let mut other = record(3, "forward");
    other["rank"] = json!(5);
    assert_eq!(post(&daemon, &json!([step("end", 2), other, step("end", 5)])).1["accepted"], json!(3));
    let all = listed("");
    let ranks: Vec<_> = all["profiles"].as_array().expect("a list").iter().map(|profile| &profile["rank"]).collect();
    assert_eq!((ranks, &all["layers"]), (vec![&json!(2), &json!(5)], &json!([])));
    let profile = &listed("?rank=2")["profiles"][0];
    assert_eq!(listed("?rank=5")["profiles"].as_array().map(Vec::len), Some(1));
    assert_eq!((&profile["step"], &profile["missing"]), (&json!(7), &json!(0)));
    let records = profile["records"].as_array().expect("a list");
    assert_eq!(records.len(), 500);
    let last = json!({"layer": "layer 000", "direction": "backward", "allocated": 1_000, "reserved": 9_000, "growth": -5,
        "activations": 0, "parameters": 4, "gathered": 0, "gathered_sum": null, "duration_ns": null,
        "modules": null, "peak": null, "held": null, "recompute": null, "time_unix_nano": profile["end_unix_nano"]});
    assert_eq!(records[499], last);
    assert_eq!(daemon.ask("/api/v1/jobs/story/layers?rank=x").0, 400);
    let metrics = daemon.metrics();
    let has = |line: &str| assert!(metrics.lines().any(|other| other == line), "{line}\n{metrics}");
    has("highwater_job_profile_layers{training_job=\"story\",rank=\"2\"} 250");
    has("highwater_job_profile_activation_bytes{training_job=\"story\",rank=\"2\"} 31125");
    has("highwater_job_profile_parameter_bytes{training_job=\"story\",rank=\"2\"} 1000");
    has("highwater_layer_activation_bytes{training_job=\"story\",rank=\"2\",layer=\"layer 249\"} 249");
    let top = metrics.lines().filter(|line| line.starts_with("highwater_layer_activation_bytes{")).count();
    assert_eq!(top, 11, "ten of one rank, and the only one of the other");
    let misplaced = json!({"event": "begin", "name": "x", "job": "story", "layer": {"direction": "forward"}});
    let answer = post(&daemon, &json!([begin("forward"), misplaced])).1;
    assert_eq!(answer["refusals"][0]["reason"], json!("malformed"));
    assert!(answer["refusals"][0]["detail"].as_str().expect("text").contains("`layer`"), "{answer}");
}

#[test]
fn the_documented_record_of_a_layer_is_accepted() {
    let document = std::fs::read_to_string(crate::tools::root().join("docs/annotations.md")).expect("text");
    let block = document.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block");
    let daemon = simulated();
    let answer = post(&daemon, &serde_json::from_str(block).expect("JSON")).1;
    assert_eq!((&answer["accepted"], &answer["refused"]), (&json!(1), &json!(0)), "{answer}");
    assert_eq!(post(&daemon, &json!({"event": "exit", "job": "j", "rank": 0})).1["accepted"], json!(1));
    let layers: Value = serde_json::from_str(&daemon.get("/api/v1/jobs/j/layers")).expect("JSON");
    assert_eq!(layers["profiles"][0]["records"][0]["layer"], "transformer.h.3.attn");
}

#[test]
fn an_end_before_its_begin_is_refused_and_a_later_one_taken() {
    let daemon = simulated();
    let now = now_ns();
    let at = |event: Value, ns: i64| {
        let mut event = event;
        event["time_unix_nano"] = json!(ns);
        event
    };
    // Sent alone: sorting a batch by time would correct the order.
    assert_eq!(post(&daemon, &at(begin("forward"), now)).0, 200);
    let (status, answered) = post(&daemon, &at(end("forward"), now - 1_000_000));
    assert_eq!(
        (status, &answered["annotations"]["refusals"][0]["reason"]),
        (400, &json!("end_before_begin")),
        "{answered}"
    );
    assert_eq!(post(&daemon, &at(end("forward"), now + 1_000)).0, 200);
    wait_for(
        &daemon,
        "highwater_phase_duration_seconds_count{training_job=\"story\",rank=\"0\",phase=\"forward\"}",
        1.0,
    );
}

#[test]
fn a_batch_is_taken_in_the_order_of_its_times() {
    let daemon = simulated();
    let now = now_ns() - 1_000_000_000;
    let mut events = [end("forward"), begin("forward")];
    events[0]["time_unix_nano"] = json!(now + 5_000_000);
    events[1]["time_unix_nano"] = json!(now);
    let (status, answered) = post(&daemon, &json!(events));
    assert_eq!((status, &answered["accepted"]), (200, &json!(2)), "{answered}");
}

#[test]
fn a_batch_with_and_without_times_keeps_its_order() {
    let daemon = simulated();
    let mut first = begin("forward");
    first["time_unix_nano"] = json!(now_ns() - 1_000_000);
    let (status, answered) = post(&daemon, &json!([first, end("forward")]));
    assert_eq!((status, &answered["accepted"]), (200, &json!(2)), "{answered}");
}

#[test]
fn what_encloses_steps_outlives_them() {
    let daemon = simulated();
    let step = |event: &str, number: u64| json!({"event": event, "kind": "step", "step": number, "job": "story"});
    let events = [begin("epoch"), step("begin", 1), step("end", 1), step("begin", 2), step("end", 2), end("epoch")];
    let (status, answered) = post(&daemon, &json!(events));
    assert_eq!((status, &answered["accepted"]), (200, &json!(6)), "{answered}");
}

#[test]
fn a_gpu_named_a_thousand_times_counts_once() {
    let daemon = simulated();
    let mut event = begin("forward");
    event["gpu"] = json!(vec![0; 1000]);
    assert_eq!(post(&daemon, &event).0, 200);
    let infos = daemon.metrics().lines().filter(|line| line.starts_with("highwater_job_info{")).count();
    assert_eq!(infos, 1);
}

#[test]
fn without_a_driver_jobs_come_and_go_all_the_same() {
    let daemon = Daemon::start(&[
        "serve",
        "--nvml-library",
        "/nonexistent/libnvidia-ml.so.1",
        "--set",
        "annotations.silence=1s",
    ]);
    let event = |event: &str| json!({"event": event, "name": "forward", "job": "story"});
    assert_eq!(post(&daemon, &json!([event("begin"), event("end"), event("begin")])).0, 200);
    wait_for(&daemon, "highwater_phases_total{outcome=\"without_gpu\"}", 1.0);
    wait_for(&daemon, "highwater_phases_total{outcome=\"silent\"}", 1.0);
    assert!(!daemon.metrics().contains("training_job=\"story\""));
}

#[test]
fn web_pages_cannot_annotate() {
    let daemon = simulated();
    let url = format!("http://{}/api/v1/annotations", daemon.address());
    let request = agent().post(&url).header("origin", "http://evil.example");
    assert_eq!(answer(request.send_json(begin("x")), "POST").0, 403);
}

#[test]
fn begun_twice_and_never_ended_have_their_outcomes() {
    let daemon = simulated();
    let step =
        |event: &str, number: u64| json!({"event": event, "kind": "step", "step": number, "job": "story", "gpu": 0});
    // Step 1 begins, with a phase in it. Step 2 begins before step 1 has ended. A phase of step 2 is open when it ends.
    let events = [step("begin", 1), begin("forward"), step("begin", 2), begin("backward"), step("end", 2)];
    let (_, answered) = post(&daemon, &json!(events));
    assert_eq!(answered["accepted"], json!(5), "{answered}");
    wait_for(&daemon, "highwater_phases_total{outcome=\"superseded\"}", 2.0);
    wait_for(&daemon, "highwater_phases_total{outcome=\"step_ended\"}", 1.0);
    wait_for(&daemon, "highwater_job_steps_total{training_job=\"story\",rank=\"0\"}", 1.0);
    // An event older than the rank's newest is accepted and counted as out of order.
    let mut late = begin("eval");
    late["time_unix_nano"] = json!(now_ns() - 60_000_000_000);
    assert_eq!(post(&daemon, &late).0, 200);
    wait_for(&daemon, "highwater_annotations_total{outcome=\"accepted_out_of_order\"}", 1.0);
}

#[test]
fn a_silent_job_is_forgotten() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", "annotations.silence=1s"]);
    assert_eq!(post(&daemon, &begin("forward")).0, 200);
    wait_for(&daemon, "highwater_phases_total{outcome=\"silent\"}", 1.0);
    assert!(!daemon.metrics().contains("training_job=\"story\""));
}

#[test]
fn a_job_without_a_gpu_has_times_and_no_memory() {
    let daemon = simulated();
    let event = |event: &str| json!({"event": event, "name": "forward", "job": "story"});
    assert_eq!(post(&daemon, &json!([event("begin"), event("end")])).0, 200);
    wait_for(&daemon, "highwater_phases_total{outcome=\"without_gpu\"}", 1.0);
    let metrics = daemon.metrics();
    assert!(metrics.contains("highwater_annotations_total{outcome=\"accepted_without_gpu\"} 2"));
    assert!(
        metrics
            .contains("highwater_phase_duration_seconds_count{training_job=\"story\",rank=\"0\",phase=\"forward\"} 1")
    );
    assert!(!metrics.contains("highwater_phase_memory_peak_bytes{training_job=\"story\""));
}

#[test]
fn visible_devices_and_local_rank_find_the_gpu() {
    let daemon = Daemon::start(&["serve", "--source", "sim"]).ready();
    let attributes = json!({"CUDA_VISIBLE_DEVICES": "2,3", "LOCAL_RANK": 1});
    let event = |event: &str| json!({"event": event, "name": "x", "job": "story", "attributes": attributes});
    assert_eq!(post(&daemon, &json!([event("begin"), event("end")])).0, 200);
    let metrics = daemon.metrics();
    let info = metrics
        .lines()
        .find(|line| line.starts_with("highwater_job_info{training_job=\"story\""))
        .expect("the job is known");
    assert!(info.contains("gpu=\"3\""), "{info}");
}

#[test]
fn what_is_no_json_and_what_is_too_long_are_reported_as_such() {
    let daemon = simulated();
    let (status, answered) = post_text(&daemon, b"{\"event\": \"begin\", ");
    assert_eq!((status, &answered["title"]), (400, &json!("Bad Request")), "{answered}");
    let mixed = format!("{}\nnonsense\n{}\n", begin("forward"), end("forward"));
    let (status, answered) = post_text(&daemon, mixed.as_bytes());
    assert_eq!(
        (status, &answered["accepted"], &answered["refusals"][0]["index"]),
        (200, &json!(2), &json!(1)),
        "{answered}"
    );
    let (status, answered) = post_text(&daemon, &vec![b' '; 10 << 20]);
    assert_eq!(status, 413, "{answered}");
    assert_eq!(post_text(&daemon, b"\xff\xfe{}").0, 400);
    wait_for(&daemon, "highwater_annotations_total{outcome=\"too_large\"}", 1.0);
    assert_eq!(post(&daemon, &begin("still here")).0, 200);
}

#[test]
fn ten_thousand_job_names_of_one_user_take_half_the_places() {
    let daemon = simulated();
    assert_eq!(post(&daemon, &begin("forward")).0, 200);
    for batch in 0..10 {
        let events: Vec<_> =
            (0..1000).map(|n| json!({"event": "begin", "name": "x", "job": format!("job-{batch}-{n}")})).collect();
        post(&daemon, &json!(events));
    }
    let metrics = daemon.metrics();
    let jobs = metrics.lines().filter(|line| line.starts_with("highwater_job_info{")).count();
    assert_eq!(jobs, 64);
    assert!(metrics.contains("highwater_annotations_total{outcome=\"too_many_jobs\"} 9937"), "the rest is counted");
    assert_eq!(post(&daemon, &end("forward")).0, 200, "the first job is not affected");
}

#[test]
fn an_address_that_is_not_loopback_needs_a_token() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", "listen=0.0.0.0:0"]);
    let port = daemon.address().rsplit(':').next().expect("a port").to_owned();
    let url = format!("http://127.0.0.1:{port}/api/v1/annotations");
    let (status, answered) = answer(agent().post(&url).send_json(begin("x")), "POST");
    assert_eq!(status, 403, "{answered}");
    assert!(answered.contains("token_file"), "{answered}");

    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "0123456789abcdef\n").expect("written");
    let token = format!("annotations.token_file={}", file.path().display());
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", &token]);
    assert_eq!(post(&daemon, &begin("x")).0, 401);
    let url = format!("http://{}/api/v1/annotations", daemon.address());
    let request = agent().post(&url).header("authorization", "Bearer 0123456789abcdef");
    assert_eq!(answer(request.send_json(begin("x")), "POST").0, 200);
}

/// Over TCP, all clients behind one address were one owner: one namespace's job could not be distinguished from another's.
#[test]
fn two_namespaces_with_tokens_each_have_a_job_of_one_name() {
    let folder = tempfile::tempdir().expect("a folder");
    for (namespace, token) in [("research", "0123456789abcdef"), ("serving", "fedcba9876543210")] {
        std::fs::write(folder.path().join(namespace), token).expect("written");
    }
    let tokens = format!("annotations.namespace_tokens={}", folder.path().display());
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", &tokens]).ready();
    let send = |token: &str, path: &str, body: &Value| {
        let url = format!("http://{}{path}", daemon.address());
        answer(agent().post(&url).header("authorization", format!("Bearer {token}")).send_json(body), "POST")
    };
    let annotate = |token: &str, body: &Value| send(token, "/api/v1/annotations", body);
    let step = json!({"event": "begin", "kind": "step", "job": "train", "step": 3});
    assert_eq!(annotate("0123456789abcdef", &step).0, 200);
    assert_eq!(annotate("fedcba9876543210", &step).0, 200);
    assert_eq!([annotate("0123456789abcdee", &step).0, post(&daemon, &step).0], [401, 401]);
    let metrics = daemon.metrics();
    let jobs = metrics.lines().filter(|line| line.starts_with("highwater_job_step{"));
    let namespaces: Vec<_> = jobs.filter_map(|line| line.split("namespace=\"").nth(1)?.split('"').next()).collect();
    assert_eq!(namespaces, ["research", "serving"], "{metrics}");
    // Who has one namespace's token says nothing of another's pods, and takes no captures of the whole node.
    let mut other = step;
    other["attributes"] = json!({"k8s.namespace.name": "serving", "k8s.pod.name": "vllm-0"});
    let (status, said) = annotate("0123456789abcdef", &other);
    assert!(status == 400 && said.contains("the token is that of namespace `research`"), "{said}");
    let (status, said) = send("0123456789abcdef", "/api/v1/captures", &json!({}));
    assert!(status == 403 && said.contains("is for annotations alone"), "{said}");
}
