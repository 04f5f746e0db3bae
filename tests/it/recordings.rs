//! A capture that is replayed: the replay reports what the live run reported.

use crate::daemon::Daemon;
use crate::process::eventually;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(180);

/// Two ranks, one of which is nearly out of memory for three seconds, so that its peer waits in its collectives; and
/// beside them a job whose GPU reports an error and is lost for two seconds.
const SCENARIO: &str = r#"
[[gpus]]
count = 3
[[jobs]]
name = "tight"
ranks = 2
start = "1 s"
startup = "1 s"
base = "60 GiB"
phases = [
  { name = "forward", duration = "60 ms", to = "110 GiB", shape = "steps", busy = 0.9 },
  { name = "backward", duration = "60 ms", busy = 0.9 },
  { name = "comm", duration = "20 ms", collective = true, busy = 0.9 },
]
[jobs.near_oom]
offset = "8 s"
for = "3 s"
free = "200 MiB"
[[jobs]]
name = "alone"
ranks = [2]
start = "1 s"
startup = "1 s"
base = "10 GiB"
phases = [{ name = "forward", duration = "30 ms", to = "40 GiB", shape = "steps", busy = 0.9 }]
[[xids]]
gpu = "2"
xid = 79
at = "6 s"
[[lost]]
gpu = "2"
at = "6500 ms"
for = "2 s"
"#;

fn json_of(daemon: &Daemon, path: &str) -> Value {
    serde_json::from_str(&daemon.get(path)).expect("JSON")
}

/// The rows of a list in an answer, sorted, with only these fields, in this order.
fn rows(daemon: &Daemon, path: &str, list: &str, fields: &[&str]) -> Vec<String> {
    let answer = json_of(daemon, path);
    let row = |row: &Value| fields.iter().map(|field| row[*field].to_string()).collect::<Vec<_>>().join(" ");
    let mut rows: Vec<String> = answer[list].as_array().expect("a list").iter().map(row).collect();
    rows.sort_unstable();
    rows
}

/// Every step and phase that ended by `end_ns`: its rank, name and begin, with its end and its memory.
fn phases(daemon: &Daemon, job: &str, end_ns: i64) -> BTreeMap<String, String> {
    let answer = json_of(daemon, &format!("/api/v1/jobs/{job}/phases?limit=100000"));
    let ended = answer["phases"].as_array().expect("a list").iter();
    let known = |phase: &&Value| phase["end_unix_nano"].as_i64().is_some_and(|at| at <= end_ns);
    let text = |phase: &Value| {
        let memory = &phase["gpus"][0];
        let of = ["uuid", "begin_bytes", "end_bytes", "peak_bytes", "min_bytes", "drop_bytes", "above_ns", "gap_ns"];
        let memory = of.map(|field| memory[field].to_string()).join(" ");
        let key = job.to_owned()
            + " "
            + &["rank", "kind", "phase", "begin_unix_nano"].map(|field| phase[field].to_string()).join(" ");
        (key, format!("{} {} {memory}", phase["step"], phase["end_unix_nano"]))
    };
    ended.filter(known).map(text).collect()
}

#[test]
fn a_capture_is_played_with_the_same_peaks_and_findings() {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("tight.toml");
    std::fs::write(&scenario, SCENARIO).expect("written");
    let captures = format!("captures.directory={}", folder.path().join("captures").display());
    let scenario = format!("sim:{}", scenario.display());
    // The capture reaches back to the daemon's start.
    let live = ["serve", "--source", &scenario, "--set", &captures, "--set", "captures.before=60s"];
    let live = Daemon::start(&live).ready();
    let found = "/api/v1/findings?limit=1000";
    let capture = eventually(PATIENCE, "every finding to end, and their capture to be complete", || {
        let findings = json_of(&live, found)["findings"].as_array().expect("a list").clone();
        // An XID stays active for minutes.
        let is_over =
            findings.iter().all(|finding| finding["finding"] == "xid" || !finding["ended_unix_nano"].is_null());
        let listed = json_of(&live, "/api/v1/captures");
        let whole =
            listed["captures"].as_array().expect("a list").iter().find(|one| one["state"] == "complete")?.clone();
        is_over.then_some(whole)
    });
    let end_ns = capture["end_unix_nano"].as_i64().expect("a time");
    let of_finding =
        ["finding", "severity", "certainty", "uuid", "job", "rank", "step", "begin_unix_nano", "evidence", "what"];
    let both = |daemon: &Daemon| {
        let mut all = phases(daemon, "tight", end_ns);
        all.append(&mut phases(daemon, "alone", end_ns));
        all
    };
    let (phases_live, findings_live) = (both(&live), rows(&live, found, "findings", &of_finding));
    let file = format!("captures/{}.sqlite", capture["id"].as_str().expect("an id"));
    let recording = format!("replay:{}", folder.path().join(file).display());
    for finding in ["low_headroom", "comm_starvation", "xid", "gpu_lost"] {
        assert!(findings_live.iter().any(|found| found.contains(finding)), "no {finding}: {findings_live:#?}");
    }
    drop(live);
    let replay = Daemon::start(&["serve", "--source", &recording, "--replay-speed", "max"]);
    eventually(PATIENCE, "the end of the recording", || {
        replay.printed().contains("the recording has ended").then_some(())
    });
    let phases_replayed = both(&replay);
    assert!(phases_live.len() > 400, "{}", phases_live.len());
    for (phase, of) in &phases_live {
        assert_eq!(phases_replayed.get(phase), Some(of), "{phase}");
    }
    // The driver's lists of processes are not in a recording, so that what they add to a finding is not either.
    let without_lists = |findings: Vec<String>| -> Vec<String> {
        let cut = |finding: String| {
            let (evidence, text) = finding.split_once("} ").expect("evidence and text");
            let evidence = evidence.split(",\"outside_allocator_bytes\"").next().unwrap_or_default().to_owned();
            evidence + "} " + text.split(": ").next().unwrap_or_default().trim_end_matches(['.', '"'])
        };
        findings.into_iter().map(cut).collect()
    };
    let replayed = rows(&replay, found, "findings", &of_finding);
    assert_eq!(without_lists(replayed.into_iter().collect()), without_lists(findings_live.into_iter().collect()));
    assert!(!replay.printed().contains("refused") && !replay.printed().contains("skipped"), "{}", replay.printed());
}
