//! A node with GPUs and jobs, scraped by a real Prometheus: the query API returns what its users ask for.

use crate::daemon::Daemon;
use crate::process::eventually;
use crate::scraper::{Sample, Scraper};
use crate::tools;
use serde_json::json;
use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Enough time for phases to end, windows to fill and several scrapes to make a rate.
const DATA_WITHIN: Duration = Duration::from_secs(60);

#[test]
#[ignore = "needs a peer: make test-peers"]
fn prometheus_stores_what_a_node_says() {
    let Some(program) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    let scraper = Scraper::of(&program, &[&daemon]);
    scraper.wait_for_scrapes(1, 5);
    let gpus = eventually(DATA_WITHIN, "highwater_gpu_info", || {
        let gpus = labels(&scraper.query("highwater_gpu_info"), "uuid");
        (!gpus.is_empty()).then_some(gpus)
    });
    for metric in ["highwater_gpu_up", "highwater_gpu_memory_used_bytes", "highwater_gpu_memory_total_bytes"] {
        assert_eq!(labels(&scraper.query(metric), "uuid"), gpus, "{metric} for every GPU");
    }
    // Each query returns something only if something is wrong.
    for (wrong, why) in [
        ("up == 0", "a scrape failed"),
        ("highwater_gpu_up == 0", "no simulated GPU is lost"),
        (
            r#"highwater_gpu_memory_used_max_bytes < ignoring(window) group_left highwater_gpu_memory_used_min_bytes{window="15s"}"#,
            "a peak is below a low of the same or a shorter window",
        ),
        (
            "highwater_gpu_memory_used_bytes + highwater_gpu_memory_free_bytes > highwater_gpu_memory_total_bytes",
            "more memory than there is",
        ),
        ("resets(highwater_sampler_ticks_taken_total[1m]) > 0", "a counter fell"),
        (
            "highwater_sampler_ticks_due_total - highwater_sampler_ticks_taken_total - on (instance) sum by (instance) (highwater_sampler_ticks_missed_total) > 1",
            "ticks due are those taken and those missed, but for the one under way",
        ),
    ] {
        let found = scraper.query(wrong);
        assert!(found.is_empty(), "{why}: {wrong}: {found:?}");
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn prometheus_stores_what_the_jobs_say() {
    let Some(program) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    let scraper = Scraper::of(&program, &[&daemon]);
    for positive in [
        "histogram_quantile(0.5, sum by (training_job, le) (rate(highwater_job_step_duration_seconds_bucket[10s])))",
        "sum by (training_job, rank) (rate(highwater_job_steps_total[10s]))",
        "sum by (phase) (rate(highwater_phase_duration_seconds_sum[10s]))",
        r#"highwater_phase_memory_peak_max_bytes{window="15s"}"#,
        "highwater_phase_memory_peak_bytes",
        "highwater_job_allocator_reserved_bytes",
        "rate(highwater_phase_energy_joules_total[10s])",
    ] {
        eventually(DATA_WITHIN, positive, || scraper.query(positive).iter().any(|s| s.value > 0.0).then_some(()));
    }
    let steps = scraper.query("highwater_job_step");
    assert!(steps.iter().all(|sample| !sample.labels.contains_key("step")), "a step number is a value: {steps:?}");
    let named = labels(&scraper.query("highwater_job_info"), "training_job");
    assert_eq!(labels(&steps, "training_job"), named, "every job that is known has a step");
    assert_eq!(labels(&steps, "job"), BTreeSet::from(["highwater".to_owned()]), "the scrape's own label is kept");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn what_a_job_sends_is_what_prometheus_stores() {
    let Some(program) = tools::find("prometheus") else { return };
    // A node with GPUs, whose only job is this test.
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]);
    let scraper = Scraper::of(&program, &[&daemon]);
    scraper.wait_for_scrapes(1, 2);
    let socket = UnixDatagram::unbound().expect("a socket");
    for (event, kind) in [("begin", "step"), ("begin", "phase"), ("end", "phase"), ("end", "step")] {
        let annotation = |rank: u32| {
            let name = if kind == "phase" { "forward" } else { "step" };
            json!({"event": event, "kind": kind, "name": name, "job": "mine", "rank": rank, "gpu": 0, "step": 7})
        };
        let (status, answer) = daemon.post("/api/v1/annotations", &annotation(0));
        assert_eq!(status, 200, "{answer}");
        socket.send_to(annotation(1).to_string().as_bytes(), daemon.socket()).expect("the daemon listens");
        // A phase without a sample inside has no peak either, so each lasts for several samples.
        scraper.wait_for_another_scrape();
    }
    for (ended, count) in [
        (r#"highwater_job_steps_total{training_job="mine"} == 1"#, 2),
        (r#"highwater_job_step{training_job="mine"} == 7"#, 2),
        (r#"highwater_job_info{training_job="mine",gpu="0"}"#, 2),
        (r#"highwater_phase_duration_seconds_count{training_job="mine",phase="forward"} == 1"#, 2),
        (r#"highwater_phase_memory_peak_bytes{training_job="mine",phase="forward"}"#, 2),
        (r#"highwater_phase_active{training_job="mine"} == 1"#, 0),
    ] {
        eventually(DATA_WITHIN, ended, || (scraper.query(ended).len() == count).then_some(()));
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn it_ends_within_two_seconds_while_it_is_scraped() {
    let Some(program) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    let scraper = Scraper::of(&program, &[&daemon]);
    scraper.wait_for_scrapes(1, 2);
    let (status, after) = daemon.stop();
    assert!(status.success(), "{status}");
    assert!(after < Duration::from_secs(2), "{after:?}");
    eventually(DATA_WITHIN, "up == 0", || (!scraper.query(r#"up{job="highwater"} == 0"#).is_empty()).then_some(()));
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_metric_comes_with_its_type_and_its_help() {
    let Some(program) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    let scraper = Scraper::of(&program, &[&daemon]);
    scraper.wait_for_scrapes(1, 2);
    let metadata = scraper.api("targets/metadata", &[("match_target", r#"{job="highwater"}"#)]);
    let families = metadata.as_array().expect("a list of families");
    assert!(families.len() > 30, "the catalogue has more than {} families", families.len());
    for family in families {
        let name = family["metric"].as_str().unwrap_or_default();
        let help = family["help"].as_str().unwrap_or_default();
        assert!(help.len() > 10, "{name} has the help {help:?}");
        assert_ne!(family["type"], "unknown", "{name}");
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn promtool_finds_nothing_to_say() {
    let Some(promtool) = tools::find("promtool") else { return };
    for source in ["sim", "nvml"] {
        // Without a driver there is little to expose, and it must be just as clean. No machine has this library.
        let library = tools::root().join("target/no-such-library.so").display().to_string();
        let mut arguments = vec!["serve", "--source", source];
        if source == "nvml" {
            arguments.extend(["--nvml-library", &library]);
        }
        let daemon = Daemon::start(&arguments);
        let exposition = eventually(DATA_WITHIN, "metrics", || {
            let text = daemon.metrics();
            (source == "nvml" || text.contains("highwater_phase_memory_peak_bytes{")).then_some(text)
        });
        let mut check = Command::new(&promtool);
        check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut check = check.spawn().expect("promtool starts");
        check.stdin.take().expect("stdin is piped").write_all(exposition.as_bytes()).expect("promtool reads");
        let output = check.wait_with_output().expect("promtool ends");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{source}: {}: {said}", output.status);
    }
}

fn labels(samples: &[Sample], name: &str) -> BTreeSet<String> {
    samples.iter().filter_map(|sample| sample.labels.get(name).cloned()).collect()
}

/// What NVIDIA's dashboard 12239 asks for: each of its panels has one of these fields, by these labels.
#[test]
fn the_fields_of_nvidias_dashboard_have_data_under_its_labels() {
    let with = Daemon::start(&["serve", "--source", "sim:demo", "--set", "compat.dcgm=true"]).ready();
    let gpus = ["gpu=\"0\"", "gpu=\"3\""];
    let of_a_gpu = ["UUID=\"GPU-", "Hostname=\"", "modelName=\""];
    for field in [
        "DEV_GPU_TEMP",
        "DEV_POWER_USAGE",
        "DEV_SM_CLOCK",
        "PROF_GR_ENGINE_ACTIVE",
        "PROF_PIPE_TENSOR_ACTIVE",
        "DEV_FB_USED",
    ] {
        let start = format!("DCGM_FI_{field}{{");
        eventually(Duration::from_secs(20), field, || {
            let metrics = with.get("/metrics");
            let series: Vec<_> = metrics.lines().filter(|line| line.starts_with(&start)).collect();
            let has = |part: &str| series.iter().any(|line| line.contains(part));
            let is_whole = series.iter().all(|line| of_a_gpu.iter().all(|label| line.contains(label)));
            (is_whole && gpus.into_iter().all(has)).then_some(())
        });
    }
    let used = with.get("/metrics");
    let value = |start: &str| {
        let line = used.lines().find(|line| line.starts_with(start)).expect(start);
        line.rsplit_once(' ').expect("a value").1.parse::<f64>().expect("a number")
    };
    let mebibytes = value("highwater_gpu_memory_total_bytes{gpu=\"0\"") / 1_048_576.0;
    assert!((value("DCGM_FI_DEV_FB_TOTAL{gpu=\"0\"") - mebibytes).abs() < 1e-6);
    let without = Daemon::start(&["serve", "--source", "sim:demo"]).ready();
    assert!(!without.get("/metrics").contains("DCGM_FI"));
}
