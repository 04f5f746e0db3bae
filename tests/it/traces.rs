//! Traces of PyTorch's profiler, as `highwater report` shows them: two ranks of data-parallel training on H200, of which rank 0
//! has little free memory and is late. `kineto`'s own tests compare every number with an independent computation.

use crate::daemon::command;
use crate::tools;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Output;

fn data(name: &str) -> PathBuf {
    tools::root().join("tests/data/kineto").join(name)
}

fn report(files: &[PathBuf], flags: &[&str]) -> Output {
    command().arg("report").args(files).args(flags).output().expect("it runs")
}

#[test]
fn a_slow_collective_differs_from_one_that_waits() {
    let files = [0, 1].map(|rank| data(&format!("ddp_tight_rank{rank}.json.gz")));
    let output = report(&files, &["--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let step = |at: usize, name: &str| found["recordings"][at]["trace"]["steps"][0][name].clone();
    for (name, expected) in [
        ("window_ns", [636_942_522, 637_308_336]),
        ("idle_ns", [68_713_253, 36_344_183]),
        ("compute_ns", [529_009_357, 522_861_840]),
        ("communication_ns", [38_096_376, 76_990_547]),
        ("overlap_ns", [0, 0]),
    ] {
        assert_eq!([step(0, name), step(1, name)], expected.map(|ns: u64| json!(ns)), "{name}");
    }
    let ranks = &found["ranks"]["ranks"];
    assert_eq!((&ranks[0]["waiting_ns"], &ranks[1]["waiting_ns"]), (&json!(4_849_126), &json!(45_441_806)));
    assert_eq!(found["ranks"]["most_waited_for"], json!(0));
    let text = String::from_utf8(report(&files, &[]).stdout).expect("text");
    for part in [
        "Rank 1 of 2.",
        "all_reduce: 735 in 33.46 ms of transfer, 204.1 GB/s on the bus",
        "The others waited for rank 0 the longest. Their communication is bound by it, not by the links: 45.44 ms of their 76.99 ms",
        "Bound by computation: for 83.1 % of the time kernels computed.",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_step_is_idle_for_data_for_the_host_or_for_other_causes() {
    let output = report(&[data("mlp_kineto.json.gz")], &["--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let steps = found["recordings"][0]["trace"]["steps"].as_array().expect("a list");
    let idle: Vec<_> = steps.iter().map(|step| (step["step"].clone(), step["idle"]["data_ns"].clone())).collect();
    let expected = [(2, 986_667), (3, 930_024), (4, 545_885), (5, 347_556)];
    assert_eq!(idle, expected.map(|(step, data_ns)| (json!(step), json!(data_ns))));
    for step in steps {
        let ns = |name: &str| step["idle"][name].as_u64().expect("known");
        assert_eq!(
            Some(ns("data_ns") + ns("host_ns") + ns("other_ns") + ns("unexplained_ns")),
            step["idle_ns"].as_u64()
        );
    }
    assert_eq!(found["ranks"], Value::Null);
}

#[test]
fn what_cannot_be_shown_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = data("mlp_kineto.json.gz");
    let other = tools::root().join("tests/data/imports/memory_usage.txt");
    let cut = folder.path().join("cut.json");
    let mut whole = Vec::new();
    let file = std::fs::File::open(&trace).expect("it is there");
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut whole).expect("whole");
    std::fs::write(&cut, &whole[..whole.len() / 10 * 9]).expect("written");
    let output = report(&[cut], &[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("The file ends in the middle"), "{text}");
    let empty = folder.path().join("empty.json");
    std::fs::write(&empty, "{\"traceEvents\": []}").expect("written");
    let picture = folder.path().join("report.png");
    for (files, flags, because) in [
        (
            vec![trace.clone()],
            vec!["--png", picture.to_str().expect("UTF-8")],
            "--png: no file has the memory of a GPU",
        ),
        (vec![trace, other], vec!["--fail-if", "peak > 1GiB"], "mlp_kineto.json.gz: peak is not known"),
        (vec![empty], vec![], "the trace has no kernel and no copy on any GPU"),
    ] {
        let output = report(&files, &flags);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && printed.contains(because), "{flags:?}: {printed}");
    }
    let twice = report(&vec![data("ddp_tight_rank0.json.gz"); 2], &[]);
    let text = String::from_utf8_lossy(&twice.stdout);
    assert!(
        twice.status.success() && text.contains("not compared as ranks of one job: two traces are of rank 0"),
        "{text}"
    );
}
