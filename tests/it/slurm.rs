//! Steps of Slurm's jobs, by real control groups and by the folder that a prolog writes.

use crate::control_group::ControlGroup;
use crate::daemon::Daemon;
use crate::process::eventually;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const WITHIN: Duration = Duration::from_secs(60);

/// The processes of the demo's GPUs are the daemon itself.
fn daemon(folder: &Path) -> Daemon {
    let map = format!("slurm.job_map={}", folder.join("jobs").display());
    Daemon::start(&["serve", "--source", "sim", "--set", &map]).ready()
}

fn gpus(daemon: &Daemon) -> Value {
    let answer: Value = serde_json::from_str(&daemon.get("/api/v1/gpus")).expect("JSON");
    answer["gpus"].clone()
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_gpus_slurm_step_is_named_without_marks_with_its_memory() {
    let job = std::process::id();
    let Some(group) = ControlGroup::new(&format!("slurm/uid_4711/job_{job}/step_3/task_0")) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let jobs = folder.path().join("jobs");
    std::fs::create_dir(&jobs).expect("a folder");
    let daemon = daemon(folder.path());
    let metrics = || daemon.get("/metrics");
    eventually(WITHIN, "a list of none", || (gpus(&daemon)[0]["slurm_steps"] == json!([])).then_some(()));
    group.take(daemon.pid());
    std::fs::write(jobs.join("1"), "9001 1000\n").expect("written");
    let step = json!({"job": job.to_string(), "step": "3", "user": 4711});
    let steps = |gpu: &Value| gpu["slurm_steps"].as_array().cloned().unwrap_or_default();
    let of_folder = json!({"job": "9001", "step": "", "user": 1000, "used_bytes": null});
    let value = |(found, text): &(Value, String), name: &str, labels: &str| {
        let series = format!("highwater_{name}{{gpu=\"0\",uuid={}{labels}}} ", found[0]["uuid"]);
        text.lines().find_map(|line| line.strip_prefix(&series)?.parse::<f64>().ok())
    };
    // The lists of processes change what a step uses: both answers are of one list if nothing changed around them. On a machine
    // under load, what was in use at a list is sometimes not known.
    let outside = "gpu_memory_outside_workloads_bytes";
    let seen = eventually(WITHIN, "its step, and the folder's job", || {
        let seen = (gpus(&daemon), metrics());
        let named = steps(&seen.0[0]).iter().any(|one| one["step"] == step["step"] && !one["used_bytes"].is_null());
        // The folder's job has no process.
        let listed = steps(&seen.0[1]).contains(&of_folder);
        let is_one = gpus(&daemon)[0]["slurm_steps"] == seen.0[0]["slurm_steps"];
        (named && listed && is_one && value(&seen, outside, "").is_some()).then_some(seen)
    });
    let (found, text) = &seen;
    let used = &found[0]["slurm_steps"][0]["used_bytes"];
    let row = json!({"job": step["job"], "step": "3", "user": 4711, "used_bytes": used});
    assert_eq!(found[0]["slurm_steps"], json!([row]), "{found}");
    assert_eq!(found[0]["processes"][0]["slurm_step"], format!("{job}.3"), "{found}");
    assert_eq!(found[0]["pods"], Value::Null);
    let labels = format!(",slurm_job=\"{job}\",slurm_step=\"3\",user=\"4711\"");
    assert_eq!(value(&seen, "gpu_slurm_step_info", &labels), Some(1.0), "{text}");
    assert_eq!(value(&seen, "slurm_step_gpu_memory_used_bytes", &labels), used.as_f64(), "{text}");
    assert!(value(&seen, outside, "").is_some_and(|rest| rest >= 0.0), "{text}");
    assert!(text.contains("slurm_job=\"9001\",user=\"1000\"} 1\n"), "{text}");
    // The job ends.
    std::fs::remove_file(jobs.join("1")).expect("removed");
    eventually(WITHIN, "its end", || (!metrics().contains("slurm_job=\"9001\"")).then_some(()));
}
