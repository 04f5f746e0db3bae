//! `report`: what recordings of every format show, and what stops a script.

use crate::daemon::command;
use crate::terminal::Terminal;
use crate::tools::root;
use rusqlite::Connection;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Output;

const GIB: u64 = 1 << 30;

/// `highwater report` in a folder.
fn report(folder: &Path, arguments: &[&str]) -> Output {
    command().current_dir(folder).arg("report").args(arguments).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json_of(folder: &Path, arguments: &[&str]) -> Value {
    let output = report(folder, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn ddp() -> PathBuf {
    root().join("tests/data/h200-ddp")
}

/// A file in a folder.
fn put(folder: &Path, name: &str, content: &str) {
    std::fs::write(folder.join(name), content).expect("written");
}

/// What ONNX Runtime's profiler writes of one GPU: each millisecond, memory that rises to a peak and stays a while.
fn profile(peak_bytes: u64, milliseconds: u64) -> String {
    (0..milliseconds).fold(String::new(), |mut lines, at| {
        let used = if at < milliseconds / 2 { GIB } else { peak_bytes };
        let _ = writeln!(lines, "0 {} {used}", at * 1_000_000);
        lines
    })
}

#[test]
fn a_recorded_training_job_is_shown_with_its_peak_its_phases_and_its_findings() {
    let folder = tempfile::tempdir().expect("a folder");
    let ddp = ddp().display().to_string();
    let shown = text(&report(folder.path(), &[&ddp, "-o", "page.html"]).stdout);
    // The numbers are those of the file, counted with awk and with the tests' own reader.
    assert!(
        shown.contains("Peak: 140.21 GiB on GPU 0 after 61.367 s, in forward of step 2 of h200-ddp rank 0.\n"),
        "{shown}"
    );
    for kind in ["allocator_thrash", "comm_starvation", "straggler"] {
        assert!(shown.contains(kind), "{kind}: {shown}");
    }
    let json = json_of(folder.path(), &[&ddp]);
    let recording = &json["recordings"][0];
    assert_eq!(recording["gpus"][0]["peak_bytes"], 150_546_087_936_u64);
    assert_eq!(recording["skipped_rows"], 0);
    let phases = recording["phases"].as_array().expect("a list");
    let steps: Vec<_> = phases.iter().filter(|row| row["kind"] == "step").map(|row| row["count"].clone()).collect();
    assert_eq!(steps, [290, 290]);
    let page = std::fs::read_to_string(folder.path().join("page.html")).expect("a page");
    assert!(page.len() < 220_000, "{} bytes", page.len());
    assert!(!page.contains("http://") && !page.contains("https://"), "a page that asks for something");
}

#[test]
fn five_logs_of_each_tool_are_compared_by_peak_and_mean() {
    let folder = tempfile::tempdir().expect("a folder");
    let peaks = [20_u64, 22, 18, 30, 20];
    let (mut ort, mut smi) = (Vec::new(), Vec::new());
    for (nth, peak) in peaks.into_iter().enumerate() {
        let (one, other) = (format!("algorithm_{nth}.txt"), format!("memory_{nth}.csv"));
        put(folder.path(), &one, &profile(peak * GIB, 1_000));
        let rows = (0..100).map(|at| if at < 50 { 1_024 } else { peak * 1_024 });
        let lines = rows.fold("memory.used [MiB]\n".to_owned(), |mut lines, mib| {
            let _ = writeln!(lines, "{mib} MiB");
            lines
        });
        put(folder.path(), &other, &lines);
        ort.push(one);
        smi.push(other);
    }
    for files in [ort, smi] {
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let json = json_of(folder.path(), &files);
        let compared = json["comparison"]["recordings"].as_array().expect("a list");
        assert_eq!(compared.len(), 5);
        for (one, peak) in compared.iter().zip(peaks) {
            assert_eq!(one["peak"]["value"], (peak * GIB) as f64);
            assert_eq!(one["peak"]["increase"], (peak as f64 - 20.0) * GIB as f64);
            // Half of the readings are 1 GiB. The last is true for an instant only.
            let mean = one["mean"]["value"].as_f64().expect("known") / GIB as f64;
            assert!((mean - (1.0 + peak as f64) / 2.0).abs() < 0.2, "{mean} of {peak}");
        }
        let verdict = json["comparison"]["verdict"][0].as_str().expect("a sentence").to_owned();
        assert!(verdict.contains("has the highest peak, 30.00 GiB, 66.7 % more than the 18.00 GiB of"), "{verdict}");
    }
}

#[test]
fn a_condition_that_holds_stops_a_script_with_a_status_of_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "before.txt", &profile(20 * GIB, 100));
    put(folder.path(), "after.txt", &profile(22 * GIB, 100));
    let bin = env!("CARGO_BIN_EXE_highwater");
    let script = |condition: &str| {
        let script =
            format!("set -e; \"$0\" report before.txt after.txt --fail-if '{condition}' > /dev/null; echo passed");
        let output = std::process::Command::new("sh").args(["-c", &script, bin]).current_dir(folder.path()).output();
        let output = output.expect("it runs");
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    assert_eq!(script("peak > 22GiB"), (Some(0), "passed\n".to_owned(), String::new()));
    assert_eq!(script("peak.increase > 10.5%"), (Some(0), "passed\n".to_owned(), String::new()));
    assert_eq!(
        script("peak > 21GiB"),
        (Some(3), String::new(), "highwater: after.txt: peak: 22.00 GiB, and `peak > 21GiB` fails it\n".to_owned())
    );
    assert_eq!(script("peak.increase > 5%"), (
        Some(3),
        String::new(),
        "highwater: after.txt: peak: +10.0 % (22.00 GiB after 20.00 GiB in before.txt), and `peak.increase > 5%` fails it\n"
            .to_owned()
    ));
    // A bound that cannot be checked does not pass.
    let (status, _, why) = script("step > 1s");
    assert_eq!(status, Some(1), "{why}");
    assert!(why.starts_with("highwater: before.txt: step is not known, so `step > 1s` cannot be judged\n"), "{why}");
    let output = report(folder.path(), &["before.txt", "--fail-if", "peak.increase > 5%"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(report(folder.path(), &["before.txt", "--fail-if", "peak > lots"]).status.code(), Some(2));
}

#[test]
fn hostile_and_truncated_files_end_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let database = |name: &str, sql: &str| {
        let file = Connection::open(folder.path().join(name)).expect("created");
        file.execute_batch(sql).expect("good SQL");
    };
    database(
        "nvprof",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMORY (deviceId, start, end, bytes);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMORY VALUES (0, 5, 'x', 9), (-1, 5, 6, 9), (0, 5, 6, -9)",
    );
    database(
        "nsight",
        "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (deviceId, start, bytes, memoryOperationType, address);
        INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (0, 5, 9, 7, 1), (0, 1, 5, 1, 1)",
    );
    database("other", "CREATE TABLE t (a)");
    let whole = std::fs::read(folder.path().join("nvprof")).expect("read");
    std::fs::write(folder.path().join("cut"), &whole[..whole.len() / 2]).expect("written");
    put(folder.path(), "ort", "0 1 2");
    put(folder.path(), "smi", "timestamp, memory.used [MiB]\n2026/");
    put(folder.path(), "ambiguous", "1 MiB, 2 MiB\n");
    put(folder.path(), "log", "Traceback (most recent call last):\n");
    put(folder.path(), "empty", "");
    put(folder.path(), "far", "0 1 2\n0 9200000000000000000 3\n");
    std::fs::write(folder.path().join("noise"), (0..9_000_u32).map(|at| (at * 7 % 251) as u8).collect::<Vec<_>>())
        .expect("written");
    let names =
        ["nvprof", "nsight", "other", "cut", "ort", "smi", "ambiguous", "log", "empty", "far", "noise", "missing"];
    for name in names {
        let output = report(folder.path(), &[name, "-o", "page.html"]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}: {output:?}");
        assert!(said.starts_with(&format!("highwater: {name}: ")) && said.lines().count() == 1, "{name}: {said}");
        assert_eq!(text(&output.stdout), "");
        assert!(!folder.path().join("page.html").exists(), "{name}: a page of nothing");
    }
}

/// `report` shows every row that `record` wrote, and its page never replaces the recording.
#[test]
fn a_recording_of_this_program_is_shown_as_its_rows_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let recorded = command()
        .current_dir(folder.path())
        .args(["record", "-o", "it.sqlite", "--source", "sim:demo", "--for", "4s"])
        .output()
        .expect("it runs");
    assert!(recorded.status.success(), "{recorded:?}");
    let json = json_of(folder.path(), &["it.sqlite"]);
    let file = Connection::open(folder.path().join("it.sqlite")).expect("it opens");
    let one = |sql: &str| file.query_row(sql, [], |row| row.get::<_, i64>(0)).expect("a number");
    let recording = &json["recordings"][0];
    let gpus = recording["gpus"].as_array().expect("a list");
    assert_eq!(gpus.len() as i64, one("SELECT count(*) FROM gpus"));
    for (position, gpu) in gpus.iter().enumerate() {
        assert_eq!(gpu["peak_bytes"], one(&format!("SELECT max(used_bytes) FROM samples WHERE gpu = {position}")));
        assert_eq!(gpu["changes"].as_i64(), Some(one(&format!("SELECT count(*) FROM samples WHERE gpu = {position}"))));
    }
    let count = |kind: &str| {
        let rows = recording["phases"].as_array().expect("a list").iter().filter(|row| row["kind"] == kind);
        rows.map(|row| row["count"].as_i64().expect("a number")).sum::<i64>()
    };
    assert_eq!(count("step"), one("SELECT count(*) FROM phases WHERE ended_by = 'end' AND kind = 'step'"));
    assert_eq!(count("phase"), one("SELECT count(*) FROM phases WHERE ended_by = 'end' AND kind = 'phase'"));
    let layers = recording["layers"].as_array().expect("a list");
    assert_eq!(layers.len() as i64, one("SELECT count(*) FROM layer_profiles"));
    let of_first = "FROM layer_records JOIN layer_profiles ON id = profile WHERE job = 'llama-ddp' AND rank = 0";
    let first = &layers[0];
    assert_eq!((&first["job"], &first["rank"], &first["step"]), (&json!("llama-ddp"), &json!(0), &json!(0)));
    assert_eq!(first["layers"], one(&format!("SELECT count(DISTINCT name) {of_first}")));
    let forward = format!("{of_first} AND direction = 'forward'");
    assert_eq!(first["activation_bytes"], one(&format!("SELECT sum(activation_bytes) {forward}")));
    assert_eq!(first["parameter_bytes"], one(&format!("SELECT sum(parameter_bytes) {forward}")));
    assert_eq!(first["top"][0]["activation_bytes"], one(&format!("SELECT max(activation_bytes) {forward}")));
    assert_eq!((first["top"].as_array().map(Vec::len), &first["gathered_bytes"]), (Some(10), &json!(null)));
    let shown = text(&report(folder.path(), &["it.sqlite"]).stdout);
    assert!(shown.contains("activations") && shown.contains("layers.0.mlp.up"), "{shown}");
    assert_eq!(recording["note"], "highwater record");
    assert!(shown.contains("\nSimulated by sim:demo: no GPU was read.\nPeak: "), "{shown}");
    assert_eq!((&recording["source"], &recording["simulated"]), (&json!("sim:demo"), &json!(true)));
    let before = std::fs::read(folder.path().join("it.sqlite")).expect("read");
    for flag in ["-o", "--png"] {
        let output = report(folder.path(), &["it.sqlite", flag, "it.sqlite"]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains("it.sqlite: exists and is not such a file"), "{output:?}");
    }
    assert!(std::fs::read(folder.path().join("it.sqlite")).expect("read") == before);
    // A page and a picture are replaced by newer ones, also through a link to the folder.
    let other = tempfile::tempdir().expect("a folder");
    std::os::unix::fs::symlink(folder.path(), other.path().join("link")).expect("linked");
    for _ in 0..2 {
        let output = report(other.path(), &["link/it.sqlite", "-o", "page.html", "--png", "picture.png"]);
        assert!(output.status.success(), "{output:?}");
    }
    let page = std::fs::read_to_string(other.path().join("page.html")).expect("a page");
    assert!(page.contains("\"notice\":\"Simulated by sim:demo: no GPU was read.\""), "the page's banner");
}

/// A killed recorder leaves readings after the end that the file notes. The report must not skip them.
#[test]
fn a_recording_that_was_killed_is_shown_to_its_last_reading() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut recorder = command();
    recorder.current_dir(folder.path()).args(["record", "-o", "it.sqlite", "--source", "sim:demo"]);
    let mut recorder = recorder.stderr(std::process::Stdio::null()).spawn().expect("it starts");
    crate::process::eventually(std::time::Duration::from_secs(60), "some seconds are on disk", || {
        let journal = std::fs::metadata(folder.path().join("it.sqlite-wal")).ok()?.len();
        let file = std::fs::metadata(folder.path().join("it.sqlite")).ok()?.len();
        (journal + file > 200_000).then_some(())
    });
    recorder.kill().expect("killed");
    recorder.wait().expect("ended");
    let json = json_of(folder.path(), &["it.sqlite"]);
    assert_eq!(json["recordings"][0]["skipped_rows"], 0, "{json}");
    assert_eq!(json["recordings"][0]["state"], "writing");
    let gpus = json["recordings"][0]["gpus"].as_array().expect("a list").clone();
    assert!(gpus.iter().all(|gpu| gpu["peak_bytes"].is_u64()), "{gpus:?}");
}

#[test]
fn a_bound_on_what_a_file_does_not_contain_never_passes() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "smi.csv", "memory.used [MiB]\n3 MiB\n4 MiB\n5 MiB\n");
    for condition in ["findings > 0", "duration > 10s", "unknown > 1s", "step > 1s"] {
        let output = report(folder.path(), &["smi.csv", "--fail-if", condition]);
        assert_eq!(output.status.code(), Some(1), "{condition}: {output:?}");
        assert!(text(&output.stderr).contains("cannot be judged"), "{condition}: {output:?}");
    }
    let shown = text(&report(folder.path(), &["smi.csv"]).stdout);
    assert!(
        shown.starts_with("smi.csv (nvidia-smi CSV): 2 readings\nPeak: 5.00 MiB on GPU 0 at reading 2.\n"),
        "{shown}"
    );
    put(folder.path(), "first.txt", "0 0 5\n0 1000000 5\n");
    let output = report(folder.path(), &["first.txt", "smi.csv", "--fail-if", "unknown.increase > 10%"]);
    assert!(text(&output.stderr).contains("smi.csv: unknown is not known"), "{output:?}");
    // What a terminal would obey is shown as what it is.
    put(folder.path(), "evil.txt", "0 0 5\n0 \u{1b}]0;owned\u{7} 5\n");
    let shown = text(&report(folder.path(), &["evil.txt"]).stdout);
    assert!(shown.contains("owned") && !shown.contains('\u{1b}'), "{shown:?}");
}

#[test]
fn the_user_names_columns_and_the_period_of_a_log_that_does_not() {
    let folder = tempfile::tempdir().expect("a folder");
    put(folder.path(), "gpu.log", "1785951483,0, 72.60, 73543, 81920\n1785951488,0, 72.97, 73500, 81920\n");
    let refused = report(folder.path(), &["gpu.log"]);
    assert!(text(&refused.stderr).contains("`highwater report --columns` reads it"), "{refused:?}");
    let columns = ["gpu.log", "--columns", "timestamp,-,-,memory.used,memory.total"];
    let read = json_of(folder.path(), &columns)["recordings"][0].clone();
    assert_eq!((&read["times"], &read["duration_ns"]), (&json!("unix"), &json!(5_000_000_000_i64)), "{read}");
    assert_eq!(read["gpus"][0]["peak_bytes"], json!(73_543_u64 << 20));
    let misuse = report(folder.path(), &["gpu.log", "--columns", "timestamp,-,-,-,-"]);
    assert_eq!(misuse.status.code(), Some(2), "{misuse:?}");
    assert!(text(&misuse.stderr).contains("one of the columns must be memory.used"), "{misuse:?}");
    put(folder.path(), "memory_fft.txt", "memory.used [MiB]\n3 MiB\n4 MiB\n5 MiB\n");
    let read = json_of(folder.path(), &["memory_fft.txt", "--period", "10ms"])["recordings"][0].clone();
    assert_eq!((&read["times"], &read["duration_ns"]), (&json!("relative"), &json!(20_000_000)), "{read}");
    assert_eq!(read["gpus"][0]["known_ns"], json!(20_000_000));
}

/// A profile of nvprof: device, begin and end in milliseconds, MiB.
fn nvprof(path: &Path, allocations: &[(u32, i64, i64, i64)]) {
    const BEGIN_NS: i64 = 1_774_586_313_950_756_076;
    let file = Connection::open(path).expect("created");
    let table = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMORY (memoryKind INT, bytes INT, start INT, end INT, deviceId INT)";
    file.execute_batch(table).expect("a table");
    for (device, begin, end, mib) in allocations {
        let times = (BEGIN_NS + begin * 1_000_000, BEGIN_NS + end * 1_000_000);
        let row = format!(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMORY VALUES (3, {}, {}, {}, {device})",
            mib << 20,
            times.0,
            times.1
        );
        file.execute_batch(&row).expect("a row");
    }
}

#[test]
fn processes_of_one_run_are_added_up_and_compared_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    nvprof(&folder.path().join("a.prof"), &[(0, 0, 90, 500), (1, 1, 80, 2)]);
    nvprof(&folder.path().join("b.prof"), &[(1, 20, 70, 700)]);
    let both = json_of(folder.path(), &["a.prof", "b.prof"]);
    assert_eq!(both["recordings"][0]["name"], "2 files together", "{both}");
    assert_eq!(both["recordings"][0]["gpus"][1]["peak_bytes"], json!(702_u64 << 20));
    assert_eq!(both["recordings"][0]["gpus"][1]["peak_after_ns"], json!(20_000_000));
    assert_eq!(both["comparison"], Value::Null);
    let compared = json_of(folder.path(), &["a.prof", "b.prof", "--compare"]);
    assert_eq!(compared["recordings"].as_array().map(Vec::len), Some(2));
    assert!(compared["comparison"].is_object(), "{compared}");
    let judged = report(folder.path(), &["a.prof", "b.prof", "--fail-if", "peak.increase > 5%"]);
    assert_eq!(judged.status.code(), Some(2), "{judged:?}");
    let judged = report(folder.path(), &["a.prof", "b.prof", "--fail-if", "peak > 701MiB"]);
    assert_eq!(judged.status.code(), Some(3), "{judged:?}");
}

#[test]
fn in_a_terminal_lines_fit_and_findings_have_marks_and_colours() {
    for (columns, is_plain) in [(80_u16, false), (60, true), (200, false)] {
        let terminal = Terminal::open(columns, 40);
        let mut command = command();
        command.arg("report").arg(ddp()).env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
        if is_plain {
            command.env("NO_COLOR", "1");
        }
        let status = terminal.attach_errors(&mut command).status().expect("it runs");
        drop(command);
        assert!(status.success());
        let shown = terminal.close();
        assert_eq!(shown.contains("\x1b[33m▲ warning\x1b[0m incident, "), !is_plain, "{shown}");
        assert!(shown.contains("▲ warning"), "{shown}");
        let plain = ["\x1b[33m", "\x1b[36m", "\x1b[1;31m", "\x1b[0m", "\r\x1b[K", "\r"]
            .iter()
            .fold(shown, |text, code| text.replace(code, ""));
        let widest = plain.lines().map(|line| line.chars().count()).max();
        assert!(widest.is_some_and(|widest| widest <= columns.into()), "{widest:?} of {columns}: {plain}");
        // No cell is lost: the step of each highest peak, wherever its column is.
        assert_eq!(plain.matches("140.21 GiB").count(), 4, "{plain}");
    }
}
