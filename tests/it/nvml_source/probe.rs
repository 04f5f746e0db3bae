//! The `probe` command against the fake NVML.

use super::Node;
use highwater::cli::probe;
use serde_json::{Value, json};
use std::time::Duration;

fn probed(node: &Node, json: bool, gpu: Option<&str>) -> anyhow::Result<String> {
    let mut out = Vec::new();
    let options = probe::Options {
        library: Some(node.control.library()),
        gpu,
        json,
        budget_a_call: Duration::from_millis(20),
        watched: Duration::from_millis(120),
    };
    probe::run(&options, &mut out)?;
    Ok(String::from_utf8(out)?)
}

fn probed_node() -> Node {
    Node::with(json!({"gpus": [{}, {
        "uuid": "GPU-b", "name": "NVIDIA H200 NVL",
        "power_instant_mw": {"from": 70_000, "step": 1, "every_ms": 10, "steps": null},
        "delay_us": {"nvmlDeviceGetBAR1MemoryInfo": 300, "nvmlDeviceGetPcieThroughput": 20_800},
        "errors": {"nvmlDeviceGetTemperature": 3}, "pcie_narrow": true,
        "gpm": {"pcie_tx_mib_per_second": 12, "pcie_rx_mib_per_second": 34_567},
    }]}))
}

#[test]
fn probe_reports_every_call_as_json() {
    let node = probed_node();
    let report: Value = serde_json::from_str(&probed(&node, true, Some("gpu-B")).expect("a report")).expect("JSON");
    assert_eq!(report["gpu"], json!({"index": "1", "uuid": "GPU-b", "name": "NVIDIA H200 NVL"}));
    assert_eq!(report["driver_version"], "580.159.04");
    let named = |list: &str, name: &str| {
        let list = report[list].as_array().cloned().unwrap_or_default();
        list.into_iter().find(|entry| entry["name"] == name).unwrap_or_else(|| panic!("there is no {name}"))
    };
    // Each call is listed, and made, once.
    let calls: Vec<&str> =
        report["calls"].as_array().expect("a list").iter().filter_map(|call| call["name"].as_str()).collect();
    let distinct: std::collections::BTreeSet<_> = calls.iter().collect();
    assert_eq!(calls.len(), distinct.len(), "{calls:?}");
    let memory = named("calls", "memory used");
    assert_eq!((memory["made_in"].as_str(), memory["status"].as_str()), (Some("fast"), Some("ok")));
    assert!(memory["p50_us"].as_f64() <= memory["p99_us"].as_f64());
    let bar1 = named("calls", "BAR1");
    assert!(bar1["p50_us"].as_f64() >= Some(300.0), "{bar1}");
    assert_eq!(named("calls", "PCIe throughput, sent")["fit_for"], Value::Null, "20 ms fit no lane");
    let temperature = named("calls", "temperature");
    assert_eq!((&temperature["p50_us"], &temperature["n"]), (&Value::Null, &json!(0)));
    assert!(temperature["status"].as_str().is_some_and(|status| status.starts_with("not supported")));
    assert_eq!(named("counters", "temperature")["period_ms"], Value::Null);
    assert_eq!(named("counters", "utilization")["status"], "constant while watched");
}

/// If others keep the watching thread off its core, a counter seems to change less often than it does. One attempt of
/// several is undisturbed.
#[test]
fn probe_finds_how_often_a_counter_changes() {
    let node = probed_node();
    let look = || {
        let report = probed(&node, true, Some("GPU-b")).expect("a report");
        let report: Value = serde_json::from_str(&report).expect("JSON");
        let counters = report["counters"].as_array().expect("counters");
        let power = counters.iter().find(|counter| counter["name"] == "power, instant").expect("it is watched");
        power["period_ms"].as_f64()
    };
    let mut looks = std::iter::repeat_with(look).take(20);
    let is_found = looks.any(|period| period.is_some_and(|period| (9.0..=21.0).contains(&period)));
    assert!(is_found, "the counter changes every 10 ms");
}

#[test]
fn probe_shows_which_pcie_reading_is_used() {
    let node = probed_node();
    let rows = |gpu| {
        let report: Value = serde_json::from_str(&probed(&node, true, Some(gpu)).expect("a report")).expect("JSON");
        ["PCIe counters, both ways", "GPM sample", "PCIe MiB/s by GPM, sent", "PCIe MiB/s by GPM, received"].map(
            |name| {
                let calls = report["calls"].as_array().cloned().unwrap_or_default();
                calls.into_iter().find(|call| call["name"] == name).unwrap_or_else(|| panic!("there is no {name}"))
            },
        )
    };
    let narrow = rows("1");
    assert_eq!(narrow.each_ref().map(|call| call["made_in"].clone()), ["never", "medium", "slow", "slow"]);
    assert_eq!(narrow[0]["status"], "narrow: wraps at 2^32, not used");
    assert_eq!((&narrow[2]["value"], &narrow[3]["value"]), (&json!(12), &json!(34_567)));
    assert!(narrow.iter().all(|call| call["p50_us"].as_f64().is_some()), "each has its cost");
    let wide = rows("0");
    assert_eq!(wide.each_ref().map(|call| call["made_in"].clone()), ["slow", "medium", "never", "never"]);
    assert_eq!(wide[0]["status"], "ok");
    assert!(wide[3]["status"].as_str().is_some_and(|status| status.starts_with("not supported")), "{}", wide[3]);
}

#[test]
fn probe_shows_that_energy_is_read_seldom_and_why() {
    let report: Value = serde_json::from_str(&probed(&probed_node(), true, None).expect("a report")).expect("JSON");
    let calls = report["calls"].as_array().cloned().unwrap_or_default();
    let energy = calls.into_iter().find(|call| call["name"] == "energy").expect("an energy call");
    assert_eq!(energy["made_in"], "seldom");
    assert!(energy["status"].as_str().is_some_and(|status| status.contains("blocks every other call")), "{energy}");
}

#[test]
fn probe_prints_a_table_for_people() {
    let node = probed_node();
    let table = probed(&node, false, Some("1")).expect("a table");
    for words in [
        "NVIDIA H200 NVL · GPU 1 · driver 580.159.04",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetFieldValues(138,139)",
        "nvmlGpmSampleGet",
        "not supported by this device",
        "narrow: wraps at 2^32, not used",
        "seldom",
        "no lane",
        "constant while watched",
    ] {
        assert!(table.contains(words), "{words} is not in\n{table}");
    }
    let gpus = probed(&node, false, Some("7")).expect_err("there is no GPU 7").to_string();
    assert!(gpus.contains("there are 0, 1"), "{gpus}");
}
