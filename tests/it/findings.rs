//! What the program finds on real recordings whose truth is known.

use crate::daemon::{Daemon, command};
use crate::process::eventually;
use expect_test::expect_file;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/h200-ddp");
const PATIENCE: Duration = Duration::from_secs(60);

fn lines(name: &str) -> impl Iterator<Item = String> {
    lines_of(&format!("{RECORDING}/{name}"))
}

fn lines_of(path: &str) -> impl Iterator<Item = String> + use<> {
    let file = File::open(path).expect("the recording is in tests/data");
    BufReader::new(GzDecoder::new(file)).lines().map(|line| line.expect("a line of text"))
}

/// A copy of a recording without the allocators' counters.
fn without_counters(recording: &str, ranks: u32) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["nvml_1khz.csv.gz", "gpus.json"] {
        // The older recording has no sizes of its GPUs.
        let _ = fs::copy(format!("{recording}/{name}"), folder.path().join(name));
    }
    for rank in 0..ranks {
        let name = format!("annotations_rank{rank}.jsonl.gz");
        hide_counters(&format!("{recording}/{name}"), &folder.path().join(&name));
    }
    folder
}

/// All findings of a recording, in the order in which they were raised.
fn found(recording: &str) -> Vec<Value> {
    let source = format!("replay:{recording}");
    let daemon = Daemon::start(&["serve", "--source", source.as_str(), "--replay-speed", "max"]);
    eventually(PATIENCE, "the end of the recording", || {
        daemon.printed().contains("the recording has ended").then_some(())
    });
    let (status, body) = daemon.ask("/api/v1/findings?limit=1000");
    assert_eq!(status, 200);
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    let mut found = answer["findings"].as_array().expect("a list").clone();
    found.reverse();
    found
}

/// A finding in one line: certainty, severity, kind, rank, step, and the configuration that ran when it began.
fn short(finding: &Value, configurations: &[(i64, String)]) -> String {
    let begin = finding["begin_unix_nano"].as_i64().expect("a time");
    let configuration = configurations.iter().rev().find(|(at, _)| *at <= begin).map_or("none", |(_, name)| name);
    let text = |name: &str| finding[name].as_str().unwrap_or("none").to_owned();
    format!(
        "{} {} {} rank {} step {} in {configuration}",
        text("certainty"),
        text("severity"),
        text("finding"),
        finding["rank"],
        finding["step"]
    )
}

/// When each configuration of the recording began.
fn configurations() -> Vec<(i64, String)> {
    let mut begun: Vec<(i64, String)> = Vec::new();
    for line in lines("annotations_rank0.jsonl.gz") {
        let event: Value = serde_json::from_str(&line).expect("JSON");
        let name = event["cfg"].as_str().expect("a name");
        if begun.last().is_none_or(|(_, last)| last != name) {
            begun.push((event["ts"].as_i64().expect("a time"), name.to_owned()));
        }
    }
    begun
}

fn shorts(recording: &str) -> String {
    let configurations = configurations();
    found(recording).iter().map(|finding| short(finding, &configurations) + "\n").collect()
}

/// The recording has three allocator retries, one of which made a collective wait long enough for a finding. In the first
/// steps rank 0 maps its memory, which has severity `info`. Steady steps have no finding.
#[test]
fn the_recording_has_what_its_allocator_counted_and_nothing_else() {
    expect_test::expect![[r#"
        confirmed warning allocator_thrash rank 0 step 2 in alpha0.2
        observed info straggler rank 0 step 0 in alpha0.1
        confirmed warning allocator_thrash rank 0 step 2 in alpha0.05
        observed warning comm_starvation rank 0 step 2 in alpha0.05
        observed info straggler rank 0 step 0 in alpha0.03
        confirmed warning allocator_thrash rank 0 step 2 in alpha0.02
        observed info straggler rank 0 step 0 in alpha0.01
    "#]]
    .assert_eq(&shorts(RECORDING));
}

/// The same recording without the allocators' counters, so that memory is the only evidence.
#[test]
fn without_the_allocators_counters_its_flushes_are_suspected() {
    let folder = without_counters(RECORDING, 2);
    expect_test::expect![[r#"
        suspected warning allocator_thrash rank 0 step 2 in alpha0.2
        observed info straggler rank 0 step 0 in alpha0.1
        suspected warning allocator_thrash rank 0 step 2 in alpha0.05
        observed warning comm_starvation rank 0 step 2 in alpha0.05
        observed info straggler rank 0 step 0 in alpha0.03
        suspected warning allocator_thrash rank 0 step 2 in alpha0.02
        observed info straggler rank 0 step 0 in alpha0.01
    "#]]
    .assert_eq(&shorts(&folder.path().display().to_string()));
}

/// A job that empties its cache looks like thrashing. That plenty of memory was free shows that it is not.
#[test]
fn a_cache_emptied_on_purpose_is_not_suspected() {
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/h200-findings/uneven-eight");
    let folder = without_counters(recording, 8);
    let found = found(&folder.path().display().to_string());
    let troubles = found.iter().filter(|finding| finding["severity"] != "info");
    let kinds: Vec<&str> = troubles.filter_map(|finding| finding["finding"].as_str()).collect();
    // The lengths of its sequences do differ.
    assert!(kinds.iter().all(|kind| ["input_stall", "uneven_work"].contains(kind)), "{kinds:?}");
}

fn hide_counters(source: &str, target: &Path) {
    let mut out = GzEncoder::new(File::create(target).expect("a file"), Compression::fast());
    for line in lines_of(source) {
        let mut event: Value = serde_json::from_str(&line).expect("JSON");
        let fields = event.as_object_mut().expect("an object");
        for counter in ["allocated", "reserved", "retries", "ooms"] {
            fields.remove(counter);
        }
        writeln!(out, "{event}").expect("written");
    }
    out.finish().expect("written");
}

/// Each finding describes in words and numbers what was seen, and the metrics agree with it.
#[test]
fn a_finding_has_its_words_its_numbers_and_its_series() {
    let source = format!("replay:{RECORDING}");
    let daemon = Daemon::start(&["serve", "--source", source.as_str(), "--replay-speed", "max"]);
    eventually(PATIENCE, "the end of the recording", || {
        daemon.printed().contains("the recording has ended").then_some(())
    });
    let answer: Value = serde_json::from_str(&daemon.ask("/api/v1/findings?limit=1000").1).expect("JSON");
    let thrash = answer["findings"].as_array().expect("a list").iter().find(|one| one["finding"] == "allocator_thrash");
    let thrash = thrash.expect("one");
    assert_eq!(thrash["evidence"]["allocator_retries_count"], 1.0);
    assert!(thrash["evidence"]["fall_bytes"].as_f64() > Some(8e9), "{thrash}");
    assert_eq!((thrash["gpu"].as_str(), thrash["job"].as_str()), (Some("0"), Some("h200-ddp")));
    for words in ["what", "why", "advice"] {
        assert!(thrash[words].as_str().is_some_and(|text| text.len() > 40), "{words}");
    }
    assert!(daemon.printed().contains("ran out of memory and flushed its cache in step 2"));
    let metrics = daemon.metrics();
    // Each kind has a series from the start, and each subject one of its own.
    let counted = |of: &str| -> f64 {
        let start = format!("highwater_findings_total{{finding={of}");
        let counts = metrics.lines().filter(|line| line.starts_with(&start));
        counts.map(|line| line.rsplit(' ').next().expect("a value").parse::<f64>().expect("a number")).sum()
    };
    let of = ["\"allocator_thrash\"", "\"allocator_thrash\",gpu=\"0\"", "\"straggler\"", "\"gpu_lost\""];
    assert_eq!(of.map(counted), [3.0, 3.0, 3.0, 0.0], "{metrics}");
    assert!(metrics.contains("highwater_findings_total{finding=\"gpu_lost\"} 0"), "{metrics}");
    assert!(metrics.contains("highwater_comm_slowdown_ratio{training_job=\"h200-ddp\",rank=\"1\"} "), "{metrics}");
    let (status, _) = daemon.ask("/api/v1/findings?active=perhaps");
    assert_eq!(status, 400);
}

/// On all recordings whose truth is known, precision and recall are at least nine in ten.
#[test]
fn precision_and_recall_hold_on_every_recording() {
    let (holds, scores, trouble) = evaluate(&[]);
    assert!(holds, "{scores}{trouble}");
    expect_file![concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/scores.txt")].assert_eq(&scores);
}

/// Late ranks on two H200s are named with their cause, and faults of one GPU are found; of the blocks without one, nothing is reported.
#[test]
fn what_is_wrong_in_the_corpus_is_found_with_its_cause() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    let entries = fs::read_dir(root).expect("the corpus").map(|entry| entry.expect("an entry").file_name());
    let mut folders: Vec<_> = entries.filter(|name| !name.to_string_lossy().contains('.')).collect();
    folders.sort();
    let mut command = command();
    let output = command.current_dir(root).args(["replay-eval", "--fail-below", "0.97"]).args(&folders).output();
    let output = output.expect("it runs");
    let scores = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{scores}{}", String::from_utf8_lossy(&output.stderr));
    expect_file![concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/scores-corpus.txt")].assert_eq(&scores);
}

/// What the jobs' allocators count is hidden: flushes are then seen by the GPU's memory alone.
#[test]
fn flushes_are_suspected_without_the_counters_and_nothing_else_is() {
    let (holds, scores, trouble) = evaluate(&["--without-counters"]);
    assert!(holds, "{scores}{trouble}");
    expect_file![concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/scores-without-counters.txt")].assert_eq(&scores);
}

/// The documentation states in how many steps each kind of finding says nothing. The numbers are those of the recordings.
#[test]
fn the_documented_shares_of_steps_without_an_answer_are_the_measured_ones() {
    let root = env!("CARGO_MANIFEST_DIR");
    let read = |path: &str| fs::read_to_string(format!("{root}/{path}")).expect("readable");
    let (scores, documented) = (read("tests/data/scores.txt"), read("docs/findings.md"));
    let measured = scores.split("finding           steps").nth(1).expect("a table").lines().skip(1);
    let mut kinds = 0;
    for line in measured {
        let cells: Vec<&str> = line.split_whitespace().collect();
        let row = |line: &&str| line.starts_with(&format!("| `{}` |", cells[0])) && line.split(" | ").count() == 4;
        let row =
            documented.lines().find(row).unwrap_or_else(|| panic!("docs/findings.md has no row for {}", cells[0]));
        assert!(row.ends_with(&format!("| {} |", cells[3])), "measured: {line}, documented: {row}");
        kinds += 1;
    }
    assert_eq!(kinds, 12, "{scores}");
}

/// The command judges each kind by itself. With a threshold that nothing reaches, a kind's findings are missed, and the
/// findings of the other kinds do not make up for them.
#[test]
fn a_kind_that_is_not_found_fails_the_evaluation_by_its_name() {
    for (setting, kind) in [("detect.lag=1000", "straggler"), ("detect.comm_slowdown=1000", "comm_starvation")] {
        let (holds, scores, trouble) = evaluate(&["--set", setting]);
        assert!(!holds && trouble.contains(&format!("recall of {kind} is 0.000")), "{scores}{trouble}");
    }
}

/// Runs `replay-eval` over all recordings; returns whether it passes, its table, and its errors.
fn evaluate(more: &[&str]) -> (bool, String, String) {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
    let recordings = ["h100-findings", "h200-findings"].into_iter().flat_map(|folder| {
        let entries = fs::read_dir(format!("{data}/{folder}")).expect("recordings");
        entries.map(move |entry| format!("{folder}/{}", entry.expect("an entry").file_name().to_string_lossy()))
    });
    let mut folders: Vec<_> = recordings.collect();
    folders.push("h200-ddp".to_owned());
    let mut command = command();
    command.current_dir(data).args(["replay-eval", "--fail-below", "0.9"]).args(&folders).args(more);
    let output = command.output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}
