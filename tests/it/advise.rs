//! `highwater advise`, and the same advice of the API: where to checkpoint resnet50's activations, as FairScale's own program
//! computes it from the same layers (`tests/data/torch`), and what is refused.

use crate::daemon::{Daemon, command};
use crate::layers;
use crate::process::eventually;
use crate::tools;
use rusqlite::Connection;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn traces() -> PathBuf {
    tools::root().join("tests/data/torch/resnet50_layer_traces.json.gz")
}

/// What it prints with these flags, as JSON.
fn advised(layers: &Path, flags: &[&str]) -> Value {
    let output =
        command().arg("advise").arg("--layers").arg(layers).args(flags).arg("--json").output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn refused(layers: &Path, flags: &[&str], because: &str) {
    let output = command().arg("advise").arg("--layers").arg(layers).args(flags).output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && printed.contains(because), "{flags:?}: {printed}");
    assert!(output.stdout.is_empty(), "{flags:?}");
}

/// What is known of resnet50 at batch 16.
fn is_as_known(one: &Value, two: &Value) {
    assert_eq!((&one["max_memory"], &one["split_modules"]), (&json!(729_152_000), &json!(["layer2.0.bn1"])));
    let split = json!(["layer1.1.bn3", "layer2.2.conv3"]);
    assert_eq!((&two["max_memory"], &two["split_modules"]), (&json!(485_095_936), &split));
    let by = json!([1_435_630_080_u64, 729_152_000, 485_095_936]);
    assert_eq!((&two["max_memory_by_checkpoints"], &two["activation_bytes"]), (&by, &json!(1_435_630_080)));
}

#[test]
fn resnet50_is_split_where_fairscale_splits_it() {
    let [none, one, two] = ["0", "1", "2"].map(|most| advised(&traces(), &["--checkpoints", most]));
    is_as_known(&one, &two);
    assert_eq!((&none["max_memory"], &none["split_modules"]), (&json!(1_435_630_080), &json!([])));
    assert_eq!(two["observed_peak_bytes"], json!(1_588_135_936));
    let output = command().arg("advise").arg("--layers").arg(traces()).args(["--checkpoints", "2"]).output();
    let text = String::from_utf8(output.expect("it runs").stdout).expect("text");
    assert!(text.contains("at most 462.62 MiB of activations are held at a time, instead of 1.34 GiB"), "{text}");
}

#[test]
fn a_running_job_gets_the_same_advice() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    layers::send(&daemon, "resnet50");
    let asked = |query: &str| -> Value {
        serde_json::from_str(&daemon.get(&format!("/api/v1/jobs/resnet50/advice{query}"))).expect("JSON")
    };
    let [one, two] = [1, 2].map(|most| asked(&format!("?checkpoints={most}"))["checkpoints"].take());
    is_as_known(&one, &two);
    assert_eq!((&two["job"], &two["rank"], &two["step"]), (&json!("resnet50"), &json!(0), &json!(7)));
    // And so does a saved answer of the layers.
    let folder = tempfile::tempdir().expect("a folder");
    let saved = folder.path().join("layers.json");
    std::fs::write(&saved, daemon.get("/api/v1/jobs/resnet50/layers")).expect("written");
    let [one, two] = ["1", "2"].map(|most| advised(&saved, &["--checkpoints", most, "--rank", "0"]));
    is_as_known(&one, &two);
    refused(
        &saved,
        &["--checkpoints", "1", "--rank", "3"],
        "it has no layers of rank 3, but of job resnet50, rank 0, step 7",
    );

    for (query, because) in [
        ("?checkpoints=4097", "`checkpoints`: 4097 is more than 4096"),
        ("?skip_layers=126", "126 layers are to be left out, and there are 126"),
        (
            "?rank=5",
            "rank 5 of job `resnet50` has sent no layer profile, and no step has the attribute `batch_size` and a known peak",
        ),
    ] {
        let (_, problem) = daemon.ask(&format!("/api/v1/jobs/resnet50/advice{query}"));
        let problem: Value = serde_json::from_str(&problem).expect("JSON");
        assert_eq!(problem["detail"], json!(because));
    }
}

#[test]
fn ten_thousand_layers_and_fifty_checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("traces.json");
    let trace = |nth: u64| {
        json!({"module_name": format!("layer.{nth}"), "is_forward": true, "allocated": nth, "module_params": 4,
            "event": {"memory_diff": 1, "memory_activations": 1 + nth * 7_919 % 1_009}})
    };
    let traces = json!({"traces": (0..10_000).map(trace).collect::<Vec<_>>()});
    std::fs::write(&file, traces.to_string()).expect("written");
    let advice = advised(&file, &["--checkpoints", "50"]);
    let segments = advice["segments"].as_array().expect("a list");
    let largest = segments.iter().filter_map(|segment| segment["activation_bytes"].as_u64()).max();
    assert_eq!((segments.len(), largest), (51, advice["max_memory"].as_u64()));
    // At or above the number of layers, FairScale fails.
    let few = advised(&file, &["--checkpoints", "40", "--skip-layers", "9990"]);
    assert_eq!((&few["layers"], few["split_modules"].as_array().map(Vec::len)), (&json!(10), Some(9)));
}

/// The activations of these layers are not what makes the peak, so parts of them do not lower it.
#[test]
fn a_peak_that_checkpoints_do_not_lower_is_not_said_to_fall() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("traces.json");
    let trace = |nth: u64, activations: u64| {
        json!({"module_name": format!("layer.{nth}"), "is_forward": true, "allocated": 1_000_000, "module_params": 4,
            "event": {"memory_diff": 1, "memory_activations": activations}})
    };
    let traces = json!({"traces": [trace(0, 10), trace(1, 4_000_000), trace(2, 10)]});
    std::fs::write(&file, traces.to_string()).expect("written");
    let output = command().args(["advise", "--checkpoints", "1", "--layers"]).arg(&file).output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let answer = advised(&file, &["--checkpoints", "1"]);
    let [observed, predicted] = ["observed_peak_bytes", "predicted_peak_bytes"].map(|name| answer[name].as_u64());
    assert!(observed.is_some() && predicted >= observed, "{answer}");
    assert!(text.contains("should not fall") && !text.contains("should fall"), "{text}");
}

#[test]
fn files_that_are_no_layers_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("it.json");
    let one = ["--checkpoints", "1"];
    for (text, because) in [
        ("{}", "it has no layer profile: neither a recording with one"),
        ("[1]", "is of no file that says anything about layers"),
        (
            "{\"traces\": [{\"module_name\": \"a\"}]}",
            "something in it is of another form than what is read: line 1, column",
        ),
        ("{\"traces\": [{\"module_name\": \"a\", \"is_fo", "it ends in the middle, in line 1, column"),
        ("{\"traces\": []}", "there is no layer that ran forward"),
        (
            "{\"traces\": [{\"module_name\": \"a\", \"is_forward\": true}]}",
            "the activations of none of the 1 layers are known",
        ),
        ("{\"profiles\": [{\"records\": 7}]}", "something in it is of another form than what is read: line 1, column"),
    ] {
        std::fs::write(&file, text).expect("written");
        refused(&file, &one, because);
        refused(&file, &one, &file.display().to_string());
    }
    refused(&folder.path().join("none.json"), &one, "No such file");
    // Nobody writes into it, and nobody waits for that.
    let fifo = folder.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("it runs").success());
    refused(&fifo, &one, "is not a regular file");
    let report = command().arg("report").arg(&fifo).output().expect("it runs");
    assert!(!report.status.success(), "{report:?}");
    refused(&traces(), &["--checkpoints", "4097"], "4097 is not in 0..=4096");
}

/// The table of ONNX Runtime's documentation, in a log of training.
fn plans(flags: &[&str]) -> std::process::Output {
    let log = tools::root().join("tests/data/advise/ortmodule.log");
    command().arg("advise").arg("--plans").arg(log).args(flags).output().expect("it runs")
}

fn planned(flags: &[&str]) -> Value {
    let output = plans(&[flags, &["--json"]].concat());
    assert!(output.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn the_fewest_recompute_plans_that_save_enough() {
    let listed = planned(&[]);
    let savings = |of: &Value| {
        of["plans"].as_array().expect("a list").iter().map(|plan| plan["saving_bytes"].clone()).collect::<Vec<_>>()
    };
    let printed = [134_217_728, 134_086_656, 67_043_328, 20_951_040, 20_951_040, 5_237_760, 4_096, 2_048];
    assert_eq!(savings(&listed), printed.map(|bytes: u64| json!(bytes)));
    assert_eq!((&listed["choice"], &listed["dims"]["inputs_input_ids_dim1"]), (&Value::Null, &json!(1024)));
    assert_eq!(planned(&["--dim", "inputs_input_ids_dim0=8"])["dims"]["inputs_input_ids_dim0"], json!(8));
    // The expressions say the same, and eight times that for a batch of eight.
    assert_eq!(savings(&planned(&["--dim", "inputs_input_ids_dim0=1"])), savings(&listed));
    assert_eq!(savings(&planned(&["--dim", "inputs_input_ids_dim0=8"])), printed.map(|bytes| json!(8 * bytes)));

    for (free, enabled, saved) in [
        ("128MiB", vec!["Reshape+Where+:1:-1"], 134_217_728_u64),
        // Of the pairs that suffice, the one that recomputes least.
        ("190MiB", vec!["BiasSoftmax+:1:-1", "Cast+:1:-1"], 201_129_984),
        ("200MiB", vec!["Reshape+Where+:1:-1", "BiasSoftmax+:1:-1"], 268_304_384),
    ] {
        let choice = &planned(&["--free", free])["choice"];
        assert_eq!((&choice["enable"], &choice["saving_bytes"]), (&json!(enabled), &json!(saved)), "{free}");
        // What is on stays on, as often as it was asked for.
        let inline = format!("BiasGelu+:1:1,{}", enabled.join(","));
        assert_eq!((&choice["inline"], &choice["is_exact"]), (&json!(inline), &json!(true)), "{free}");
    }
    let output = plans(&["--free", "190MiB"]);
    let text = String::from_utf8(output.stdout).expect("text");
    for part in [
        "2 plans save 191.81 MiB of the 190.00 MiB",
        "export ORTMODULE_MEMORY_OPT_CONFIG='BiasGelu+:1:1,BiasSoftmax+:1:-1,Cast+:1:-1'",
    ] {
        assert!(text.contains(part), "{text}");
    }
    for (flags, because) in [
        // Cast+ can be recomputed in one of two ways.
        (
            vec!["--free", "3.2GiB"],
            "3435973836 bytes cannot be saved: the plans that are not enabled save at most 361540608 bytes",
        ),
        (
            vec!["--dim", "batch=8"],
            "--dim batch: no plan's saving depends on it, but on inputs_input_ids_dim0, inputs_input_ids_dim1",
        ),
        (vec!["--dim", "batch"], "is not NAME=N"),
        (vec!["--dim", "inputs_input_ids_dim=8"], "no plan's saving depends on it"),
        (vec!["--enabled", "/nonexistent.json"], "--enabled /nonexistent.json: No such file or directory"),
        (vec!["--free", "much"], "much"),
        (vec!["--enabled", "Cast+:7:1"], "--enabled Cast+:7:1: the strategy of `Cast+:7:1` is not 0, 1 or 2"),
        (vec!["--checkpoints", "3"], "cannot be used with"),
    ] {
        let output = plans(&flags);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && printed.contains(because), "{flags:?}: {printed}");
    }
    // A name from a log must not run as a command when a user pastes it.
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    std::fs::write(&log, " - Plan 1 : OFF : A';touch${IFS}x;'+:1:-1  1  5,000  5000\n").expect("written");
    let output = command().arg("advise").arg("--plans").arg(&log).args(["--free", "4KB"]).output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.contains(r"OPT_CONFIG='A'\'';touch${IFS}x;'\''+:1:-1'"), "{text}");
    assert!(text.contains("1 plan saves 5000 B of the 4000 B that are needed"), "{text}");
    let empty = folder.path().join("empty.log");
    std::fs::write(&empty, "").expect("written");
    let other = command().args(["advise", "--plans"]).arg(&empty).output().expect("it runs");
    assert!(String::from_utf8_lossy(&other.stderr).contains("empty.log: has no table of plans"), "{other:?}");
}

/// What `advise` prints of these files, and on standard error.
fn any(flags: &[&str], files: &[&Path]) -> (String, String) {
    let output = command().arg("advise").args(flags).args(files).output().expect("it runs");
    let [out, error] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert_eq!(output.status.success(), error.is_empty(), "{out}{error}");
    (out, error)
}

#[test]
fn a_file_of_any_kind_is_advised_on_or_says_which_is_needed() {
    let folder = tempfile::tempdir().expect("a folder");
    // The default is that of the API.
    let (found, _) = any(&["--json"], &[&traces()]);
    let found: Value = serde_json::from_str(&found).expect("JSON");
    assert_eq!(found["files"][0]["checkpoints"], advised(&traces(), &["--checkpoints", "4"]));
    assert_eq!((&found["batch"], &found["not_advised"]), (&Value::Null, &json!([])));
    let log = tools::root().join("tests/data/advise/ortmodule.log");
    let (both, _) = any(&["--checkpoints", "2", "--free", "190MiB"], &[&traces(), &log]);
    for part in
        ["resnet50_layer_traces.json.gz:\n", "With 2 checkpoints", "ortmodule.log:\n", "ORTMODULE_MEMORY_OPT_CONFIG="]
    {
        assert!(both.contains(part), "{both}");
    }
    let batches = grown(folder.path());
    let (text, _) = any(&[], &[&batches]);
    assert!(text.contains("The largest batch that stays below") && text.contains("Not advised: "), "{text}");
    for (name, contents, because) in [
        (
            "a.txt",
            &b"hello\n"[..],
            "is of no known format, of which no advice can be made: checkpoints need the layers",
        ),
        ("a", b"", "is of no known format"),
        ("a.sqlite", &[&b"SQLite format 3\0"[..], &[7; 200]].concat(), "is of no known format"),
        ("a.csv", b"index, memory.used [MiB]\n0, 12 MiB\n", "`highwater report` shows what is in it"),
        ("a.json", b"{\"traces\": [", "it ends in the middle"),
        ("b.json", b"{\"profiles\": 5}", "something in it is of another form than what is read"),
    ] {
        let file = folder.path().join(name);
        std::fs::write(&file, contents).expect("written");
        let (_, error) = any(&[], &[&file]);
        assert!(error.contains(&format!("{name}: ")) && error.contains(because), "{error}");
        for raw in ["expected", "EOF", "invalid", "database", "os error"] {
            assert!(!error.contains(raw), "{error}");
        }
    }
    let (_, error) = any(&["--checkpoints", "2", "--plans"], &[&log]);
    assert!(error.contains("--checkpoints"), "{error}");
    let (_, error) = any(&[], &[&folder.path().join("none")]);
    assert!(error.contains("none: No such file"), "{error}");
}

#[test]
fn advice_comes_through_a_pipe() {
    let folder = tempfile::tempdir().expect("a folder");
    let recording = grown(folder.path());
    let shell = |script: &str| {
        let program = command().get_program().to_owned();
        let mut bash = std::process::Command::new("bash");
        bash.env("TMPDIR", folder.path()).env("HW", program).env("TRACES", traces()).env("RECORDING", &recording);
        let output = bash.args(["-c", script]).output().expect("it runs");
        (
            output.status.success(),
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        )
    };
    for script in [
        "cat $TRACES | $HW advise -",
        "zcat $TRACES | $HW advise --layers - --checkpoints 4",
        "$HW advise <(zcat $TRACES)",
        "$HW advise - < $TRACES",
    ] {
        let (succeeded, [out, error]) = shell(script);
        assert!(succeeded && out.contains("With 4 checkpoints"), "{script}: {out}{error}");
    }
    for script in ["cat $RECORDING | $HW advise -", "$HW advise --batches <(cat $RECORDING)"] {
        let (succeeded, [out, error]) = shell(script);
        assert!(succeeded && out.contains("The largest batch that stays below"), "{script}: {out}{error}");
    }
    for script in ["cat $RECORDING | $HW report -", "$HW report <(cat $RECORDING) $RECORDING"] {
        let (succeeded, [out, error]) = shell(script);
        assert!(succeeded && out.contains("Peak: "), "{script}: {out}{error}");
    }
    let (succeeded, [_, error]) = shell("head -c 3000 $RECORDING | $HW report -");
    assert!(
        !succeeded && error.contains("standard input: ") && !error.contains(&*folder.path().display().to_string()),
        "{error}"
    );
    let (succeeded, [_, error]) = shell("cat $TRACES | $HW report - -");
    assert!(!succeeded && error.contains("can be given once"), "{error}");
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).expect("listed").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("highwater-")), "{left:?}");
}

const MIB: u64 = 1 << 20;

/// A recording of a job on a GPU of 40 GiB: four steps with growing batches, then one with a small batch, which still holds
/// the memory of the largest. Each step takes a fifth of a second.
fn grown(folder: &Path) -> PathBuf {
    let path = folder.join("it.sqlite");
    let recorded = command().args(["record", "--source", "sim:spike", "--for", "1s", "-o"]).arg(&path).output();
    assert!(recorded.as_ref().is_ok_and(|output| output.status.success()), "{recorded:?}");
    let connection = Connection::open(&path).expect("it opens");
    let begin_ns: i64 =
        connection.query_row("SELECT min(at_ns) FROM samples", [], |row| row.get(0)).expect("a reading");
    let mut rows = String::from(
        "DELETE FROM samples; DELETE FROM gpus WHERE gpu > 0;
        UPDATE gpus SET memory_total_bytes = 40 * 1073741824, memory_reserved_bytes = 0, known_until_ns = NULL;",
    );
    for (nth, (batch, mib)) in [(4, 1_403), (8, 1_799), (16, 2_593), (24, 3_405), (4, 3_405)].into_iter().enumerate() {
        let (from, step) = (begin_ns + nth as i64 * 200_000_000, nth + 1);
        let (to, bytes) = (from + 190_000_000, mib * MIB);
        // The client knows a step's batch size at its end.
        rows += &format!(
            "INSERT INTO samples VALUES (0, {from}, 0, {bytes});
            INSERT INTO annotations (at_ns, event, kind, name, job, rank, step, gpus, attributes) VALUES
                ({from} + 1000000, 'begin', 'step', 'step', 'j', 0, {step}, '[\"0\"]', NULL),
                ({to}, 'end', 'step', 'step', 'j', 0, {step}, NULL, '{{\"batch_size\": {batch}}}');
            INSERT INTO phases VALUES ({step}, 'j', 0, 'step', 'step', {step}, {from} + 1000000, {to}, 'end');
            INSERT INTO phase_memory (phase, gpu, peak_bytes, gap_ns) VALUES ({step}, 0, {bytes}, 0);"
        );
    }
    connection.execute_batch(&rows).expect("good SQL");
    path
}

/// Asserts the fitted line. The unit test of `advise::batch` has the same one, computed independently.
fn fits(of: &Value, limit_mib: u64, largest: u64) {
    let mib = |name: &str| of[name].as_f64().expect(name) / MIB as f64;
    assert!(
        (mib("bytes_per_sample") - 100.050_847).abs() < 1e-4 && (mib("error_bytes") - 6.457_16).abs() < 1e-3,
        "{of}"
    );
    assert_eq!((&of["limit_bytes"], &of["largest_batch_size"]), (&json!(limit_mib * MIB), &json!(largest)), "{of}");
    assert_eq!(of["left_out_steps"], json!(1), "the small batch after the largest");
}

#[test]
fn the_largest_batch_is_advised_from_steps_of_different_ones() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = grown(folder.path());
    let asked =
        |flags: &[&str]| command().arg("advise").arg("--batches").arg(&path).args(flags).output().expect("it runs");
    let output = asked(&["--json", "--headroom", "32960MiB"]);
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    fits(&found, 8_000, 68);
    let output = asked(&[]);
    let text = String::from_utf8(output.stdout).expect("text");
    for part in [
        "On rank 0, the peak is 999.34 MiB and 100.05 MiB more for each sample, with an error of 6.46 MiB.",
        "stays below 39.00 GiB",
        "approach it in steps",
        "Left out: 1 steps after one with a larger batch",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let other = command().arg("advise").arg("--batches").arg(traces()).output().expect("it runs");
    assert!(!other.status.success(), "no recording");
    // The same of a daemon that plays it.
    let daemon = Daemon::start(&[
        "serve",
        "--source",
        &format!("replay:{}", path.display()),
        "--set",
        "detect.headroom=32960MiB",
    ])
    .ready();
    let answer = eventually(Duration::from_secs(30), "all steps to end", || {
        let (_, answer) = daemon.ask("/api/v1/jobs/j/advice");
        answer.contains("\"left_out_steps\":1").then_some(answer)
    });
    let found: Value = serde_json::from_str(&answer).expect("JSON");
    fits(&found["batch"], 8_000, 68);
    assert_eq!(found.get("checkpoints"), None, "no layers are known");
}

#[test]
fn plans_are_chosen_for_the_headroom_that_a_recording_lacks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = grown(folder.path());
    let log = tools::root().join("tests/data/advise/ortmodule.log");
    let asked = |headroom: &str| {
        let mut advise = command();
        advise.args(["advise", "--json", "--plans"]).arg(&log).arg("--observed").arg(&path);
        let output = advise.args(["--headroom", headroom]).output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["choice"].clone()
    };
    // Of 40,960 MiB, 3,405 were used.
    assert_eq!(asked("37555MiB")["enable"], json!([]), "what is free suffices");
    let chosen = asked("37655MiB");
    assert!(chosen["saving_bytes"].as_u64() >= Some(100 * MIB), "{chosen}");
    assert_eq!(chosen["enable"].as_array().map(Vec::len), Some(1), "{chosen}");
}

#[test]
fn a_report_on_a_job_that_lacked_memory_says_where_to_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = grown(folder.path());
    let connection = Connection::open(&path).expect("it opens");
    let finding =
        "INSERT INTO findings (kind, severity, certainty, gpu_uuid, job, rank, begin_ns, what, why, advice, evidence)
        SELECT '{kind}', 'warning', 'observed', NULL, 'j', 0, min(at_ns), 'w', 'y', 'a', '{}' FROM samples";
    let mut rows = finding.replace("{kind}", "low_headroom");
    rows += ";INSERT INTO layer_profiles SELECT 1, 'j', 0, 2, min(at_ns), min(at_ns), 0 FROM samples;";
    for nth in 0..10 {
        let of = "INSERT INTO layer_records (profile, nth, name, direction, at_ns, allocated_bytes, growth_bytes, activation_bytes)";
        let allocated = (nth + 1) * 100 * MIB;
        rows += &format!(
            "{of} SELECT 1, {nth}, 'layer{nth}', 'forward', min(at_ns), {allocated}, {0}, {0} FROM samples;",
            100 * MIB
        );
    }
    connection.execute_batch(&rows).expect("good SQL");
    let report = |flags: &[&str]| {
        let output = command().arg("report").arg(&path).args(flags).output().expect("it runs");
        String::from_utf8(output.stdout).expect("text")
    };
    let (text, json) = (report(&[]), report(&["--json"]));
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let advice = &json["recordings"][0]["advice"];
    let layers = ["layer2", "layer4", "layer6", "layer8"];
    assert_eq!(advice[0]["checkpoints"]["split_modules"], json!(layers), "{advice}");
    let sentence = "advice: Activations of job j, rank 0, step 2: with 4 checkpoints, at layer2, layer4, layer6, layer8, at \
                    most 200.00 MiB are held at a time instead of 1000.00 MiB.";
    assert!(text.contains(sentence), "{text}");
    // Memory was not what a lagging rank lacked, and of a part of the layers nothing follows.
    for change in [
        "UPDATE findings SET kind = 'straggler'",
        "UPDATE findings SET kind = 'low_headroom'; UPDATE layer_profiles SET missing = 1",
    ] {
        connection.execute_batch(change).expect("good SQL");
        assert!(!report(&[]).contains("advice: "), "{change}");
    }
}

/// What the allocator did with two batch sizes, as an H200 ran them: 24 samples of this GPT ran in 40 GiB, and 25 did not.
#[test]
fn histories_of_two_batches_are_one_answer() {
    let folder = tools::root().join("tests/data/advise");
    let [small, large] = [8, 16].map(|size| folder.join(format!("allocations_gpt_batch{size}.json.gz")));
    let run = |flags: &[&str], files: &[&Path]| {
        let output = command().arg("advise").args(flags).args(files).output().expect("it runs");
        let [out, problem] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("text"));
        (output.status.success(), out, problem)
    };
    let (_, whole, _) = run(&["--json", "--headroom", "0B"], &[&small, &large]);
    let whole: Value = serde_json::from_str(&whole).expect("JSON");
    assert_eq!((&whole["files"], &whole["batch"]), (&json!([]), &Value::Null));
    let limit = whole["simulated_batch"]["limit_bytes"].as_u64().expect("a number");
    let headroom = format!("{}B", limit - (40 << 30));
    let batches = format!("--batches={}", small.display());
    let (_, answer, _) = run(&["--json", "--headroom", &headroom, &batches, "--batches"], &[&large]);
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["largest_batch_size"], json!(24));
    assert_eq!(answer["with_expandable_segments"]["largest_batch_size"], json!(28));
    let (_, text, _) = run(&["--headroom", &headroom], &[&large, &small]);
    for line in [
        "  As the job ran, the largest batch that fits has 24 samples: 39.68 GiB reserved at most, 34.29 GiB of them allocated.",
        "  With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, the largest batch that fits has 28 samples: ",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let (is_well, _, problem) = run(&[], &[&small]);
    assert!(!is_well && problem.contains("histories of two batch sizes are needed"), "{problem}");
    let recording = folder.join("gpt_layers.json.gz");
    let (is_well, _, problem) = run(&[&batches, "--batches"], &[&recording]);
    assert!(!is_well && problem.contains("name files of one kind"), "{problem}");
    let report = command().arg("report").arg(&small).output().expect("it runs");
    let problem = String::from_utf8(report.stderr).expect("text");
    assert!(!report.status.success() && problem.contains("`highwater advise` reads it"), "{problem}");
}
