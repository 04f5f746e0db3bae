//! From a scrape to a pager: a real Prometheus with the rules, a real Alertmanager with the documented routes, and a
//! webhook. Only durations differ from the shipped files, so that a test does not take minutes.

use crate::alertmanager::Alertmanager;
use crate::daemon::{Daemon, wide};
use crate::http_server::HttpServer;
use crate::process::eventually;
use crate::scraper::Scraper;
use crate::tools;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Enough for a near-OOM that occurs once a minute, on a busy machine.
const DELIVERED_WITHIN: Duration = Duration::from_secs(150);

/// GPU 2 of a node and the rank on it, nearly out of memory.
const SHORT: &str = r#"highwater_build_info{version="0.1.0",rustc="1.88.0"} 1
highwater_gpu_up{gpu="2",uuid="GPU-2"} 1
highwater_gpu_memory_used_bytes{gpu="2",uuid="GPU-2"} 149700000000
highwater_gpu_memory_free_bytes{gpu="2",uuid="GPU-2"} 300000000
highwater_gpu_memory_used_max_bytes{gpu="2",uuid="GPU-2",window="60s"} 149790284288
highwater_job_info{training_job="moe-tight",rank="0",world_size="2",gpu="2",uuid="GPU-2"} 1
highwater_finding_active{finding="low_headroom",severity="warning",gpu="2",uuid="GPU-2",training_job="moe-tight",rank="0"} 1
"#;

/// The demo's `moe-tight` goes near OOM for a quarter of every minute.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn demo_near_oom_reaches_the_webhook_and_resolves() {
    let (Some(prometheus), Some(alertmanager)) = (tools::find("prometheus"), tools::find("prometheus-alertmanager"))
    else {
        return;
    };
    let node = Daemon::start(&["demo"]);
    let alertmanager = Alertmanager::start(&alertmanager);
    let rules = hastened_rules();
    let _prometheus = Scraper::alerting(&prometheus, node.address(), rules.path(), alertmanager.address());
    let incident = |status: &'static str| {
        alertmanager.notice(DELIVERED_WITHIN, &format!("{status} HighwaterJobIncident of moe-tight"), |notice| {
            let is = |label: &str, value: &str| notice.labels.get(label).is_some_and(|own| own == value);
            notice.status == status && is("alertname", "HighwaterJobIncident") && is("training_job", "moe-tight")
        })
    };
    let fired = incident("firing");
    assert_eq!(fired.receiver, "chat", "a warning goes to the chat alone: {fired:?}");
    assert_eq!((&*fired.labels["severity"], &*fired.labels["cause"]), ("warning", "memory"), "{fired:?}");
    assert!(fired.annotations["summary"].ends_with(" is short of memory"), "{fired:?}");
    let description = &fired.annotations["description"];
    let of_rank = ["low_headroom", "allocator_thrash", "comm_starvation"].map(|kind| format!("{kind} of rank 0"));
    assert!(of_rank.iter().any(|finding| description.contains(finding)), "{description}");
    assert!(description.contains(&format!("on {}", node.address())), "{description}");
    assert_eq!(fired.annotations["runbook"], "docs/runbooks/job-incident.md");
    let resolved = incident("resolved");
    assert_eq!(resolved.labels, fired.labels, "the alert that fired is the one that resolves");
}

/// One rank of 64 is short of memory, and 63 wait for it.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn one_starved_rank_of_64_is_one_alert_that_is_not_inhibited() {
    let (Some(prometheus), Some(alertmanager)) = (tools::find("prometheus"), tools::find("prometheus-alertmanager"))
    else {
        return;
    };
    let (_folder, source) = wide(0..64, "offset = \"10 s\"\nfor = \"10 min\"");
    let node = Daemon::start(&["serve", "--source", &source, "--set", "sampling.period=10ms"]);
    let alertmanager = Alertmanager::start(&alertmanager);
    let rules = hastened_rules();
    let _prometheus = Scraper::alerting(&prometheus, node.address(), rules.path(), alertmanager.address());
    // Alerts by name, and whether something inhibits them.
    let of_job = || -> Vec<(String, bool)> {
        let of = |alert: &serde_json::Value| {
            let labels = &alert["labels"];
            let is_free = alert["status"]["state"] == "active";
            (labels["training_job"] == "wide")
                .then(|| (labels["alertname"].as_str().unwrap_or_default().to_owned(), is_free))
        };
        alertmanager.alerts().iter().filter_map(of).collect()
    };
    eventually(DELIVERED_WITHIN, "one alert that stands for the others", || {
        let alerts = of_job();
        let has = |name: &str| alerts.iter().any(|(own, _)| own == name);
        let free: Vec<&str> = alerts.iter().filter(|(_, is_free)| *is_free).map(|(name, _)| name.as_str()).collect();
        let are_all = has("HighwaterNearOom") && has("HighwaterAllocatorThrash") && has("HighwaterCommStarvation");
        (are_all && matches!(free[..], ["HighwaterJobIncident" | "HighwaterJobCommStarvation"])).then_some(())
    });
    let alerts = of_job();
    assert!(alerts.len() <= 5, "of one fault, whatever the number of ranks: {alerts:?}");
    let incidents: serde_json::Value = serde_json::from_str(&node.get("/api/v1/incidents")).expect("JSON");
    let incidents = incidents["incidents"].as_array().expect("a list");
    let warnings: Vec<_> = incidents.iter().filter(|incident| incident["severity"] != "info").collect();
    let [incident] = warnings[..] else { panic!("{incidents:?}") };
    assert_eq!((&incident["cause"], &incident["ranks"]), (&"memory".into(), &serde_json::json!([0])), "{incident}");
    assert_eq!(incident["waiting_ranks"].as_array().map(Vec::len), Some(63), "{incident}");
    assert!(incident["lost_seconds"].as_f64().is_some_and(|lost| lost > 1.0), "{incident}");
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn a_lost_gpu_wakes_somebody_and_inhibits_what_follows_from_it() {
    let (Some(prometheus), Some(alertmanager)) = (tools::find("prometheus"), tools::find("prometheus-alertmanager"))
    else {
        return;
    };
    let lost =
        SHORT.replace(r#"highwater_gpu_up{gpu="2",uuid="GPU-2"} 1"#, r#"highwater_gpu_up{gpu="2",uuid="GPU-2"} 0"#);
    let node = HttpServer::start(move |_, _| lost.clone());
    let alertmanager = Alertmanager::start(&alertmanager);
    let rules = hastened_rules();
    let _prometheus = Scraper::alerting(&prometheus, &node.address(), rules.path(), alertmanager.address());
    let fired = alertmanager.notice(DELIVERED_WITHIN, "HighwaterGpuLost", |notice| {
        notice.status == "firing" && notice.labels["alertname"] == "HighwaterGpuLost"
    });
    assert_eq!(fired.receiver, "pager", "{fired:?}");
    assert!(fired.annotations["description"].contains("Rank 0 of moe-tight"), "{fired:?}");
    eventually(DELIVERED_WITHIN, "HighwaterNearOom inhibited", || {
        let alerts = alertmanager.alerts();
        let near_oom = alerts.iter().find(|alert| alert["labels"]["alertname"] == "HighwaterNearOom")?;
        let inhibited = near_oom["status"]["inhibitedBy"].as_array().is_some_and(|by| !by.is_empty());
        (near_oom["status"]["state"] == "suppressed" && inhibited).then_some(())
    });
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_rule_can_be_evaluated_over_what_a_real_daemon_says() {
    let Some(prometheus) = tools::find("prometheus") else { return };
    let daemon = Daemon::start(&["demo"]);
    let nobody = HttpServer::start(|_, _| String::new());
    let rules = hastened_rules();
    let prometheus = Scraper::alerting(&prometheus, daemon.address(), rules.path(), &nobody.address());
    // These rules are the last of their chains. They have values only if every metric below them has a series.
    for (recorded, count) in [
        ("highwater:gpu_memory_headroom_bytes > 0", 4),
        ("highwater:sampler_ticks_missed_ratio:rate10m >= 0", 2),
        ("highwater:comm_stretch_ratio > 0", 4),
        ("highwater:comm_excess_ratio", 4),
        ("highwater:rank_silence_seconds < 120", 4),
        ("highwater:rank_step_seconds > 0", 4),
    ] {
        eventually(DELIVERED_WITHIN, recorded, || (prometheus.query(recorded).len() == count).then_some(()));
    }
    let answer = prometheus.api("rules", &[]);
    let groups = answer["groups"].as_array().expect("groups");
    let rules: Vec<_> = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules")).collect();
    assert!(rules.len() > 25, "{answer}");
    for rule in rules {
        assert_eq!(rule["health"], "ok", "{}: {}", rule["name"], rule["lastError"]);
    }
    // The demo has one job that goes near OOM, and no other problem.
    let wrong =
        r#"ALERTS{alertname=~"Highwater(GpuLost|Xid.*|NothingToRead|Exporter.*|AnnotationsSilent|InputStall)"}"#;
    assert!(prometheus.query(wrong).is_empty(), "{:?}", prometheus.query(wrong));
}

/// Copies of the shipped rules with seconds instead of minutes: how long a condition must hold, how long an alert keeps
/// firing, how often groups are evaluated, and how far expressions look back.
fn hastened_rules() -> TempDir {
    let directory = TempDir::new().expect("a temporary directory");
    for file in super::files() {
        let text = std::fs::read_to_string(&file).expect("readable");
        let name: PathBuf = file.file_name().map(Path::new).expect("a file").into();
        let quick: Vec<String> = text.lines().map(hastened).collect();
        std::fs::write(directory.path().join(name), quick.join("\n")).expect("writable");
    }
    directory
}

fn hastened(line: &str) -> String {
    match line.trim_start().split_once(':') {
        Some((key @ ("for" | "keep_firing_for" | "interval"), _)) => {
            let indent = &line[..line.len() - line.trim_start().len()];
            format!("{indent}{key}: 1s")
        }
        _ => line.replace("[2m]", "[3s]").replace("offset 15m", "offset 5s"),
    }
}
