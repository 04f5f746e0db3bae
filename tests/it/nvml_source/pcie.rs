//! PCIe bytes: from the GPU's own counters where they are wide, otherwise from GPM's rates multiplied by time.

use super::{MIB, Node};
use crate::daemon::Daemon;
use crate::process::eventually;
use highwater::nvml::Nvml;
use highwater_core::gpu::Pcie;
use highwater_core::source::{Call, CallStats, Source};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const SECOND_NS: i64 = 1_000_000_000;

/// A GPU like an H200: narrow counters, and rates from GPM.
fn gpu(sent_mib: u64, received_mib: u64) -> Value {
    let gpm = json!({"pcie_tx_mib_per_second": sent_mib, "pcie_rx_mib_per_second": received_mib});
    json!({"pcie_narrow": true, "gpm": gpm})
}

fn only(gpu: Value) -> Value {
    json!({"gpus": [gpu]})
}

/// What is read at this second, in MiB: sent, received.
fn totals(nvml: &Nvml, seconds: f64) -> (Option<u64>, Option<u64>) {
    #[allow(clippy::cast_possible_truncation, reason = "whole nanoseconds of small numbers")]
    let at_ns = (seconds * SECOND_NS as f64) as i64;
    let pcie = nvml.pcie(0, at_ns, &CallStats::default());
    (pcie.transmitted_bytes.map(|bytes| bytes / MIB), pcie.received_bytes.map(|bytes| bytes / MIB))
}

const NOTHING: (Option<u64>, Option<u64>) = (None, None);

#[test]
fn totals_grow_by_rate_times_time_in_the_gpus_view() {
    let node = Node::with(only(gpu(100, 40_000)));
    let nvml = node.open();
    assert_eq!(totals(&nvml, 1000.0), NOTHING, "one sample gives no rate");
    assert_eq!(totals(&nvml, 1001.0), (Some(100), Some(40_000)));
    assert_eq!(totals(&nvml, 1003.5), (Some(350), Some(140_000)));
    node.control.set(&only(gpu(0, 2)));
    assert_eq!(totals(&nvml, 1004.5), (Some(350), Some(140_002)));
    assert_eq!(node.control.calls("field:197"), 1, "narrow counters are read once");
    assert_eq!(node.control.calls("nvmlGpmQueryDeviceSupport"), 1);
}

#[test]
fn a_sample_is_not_counted_from_before_it_is_old_enough() {
    let node = Node::with(only(gpu(10, 0)));
    let nvml = node.open();
    assert_eq!(totals(&nvml, 0.0), NOTHING);
    assert_eq!(totals(&nvml, 1.0), (Some(10), Some(0)));
    let samples = node.control.calls("nvmlGpmSampleGet");
    assert_eq!([totals(&nvml, 1.1), totals(&nvml, 1.4)], [(Some(10), Some(0)); 2]);
    assert_eq!(node.control.calls("nvmlGpmSampleGet"), samples);
    assert_eq!(totals(&nvml, 1.5), (Some(15), Some(0)));
}

#[test]
fn wide_counters_leave_gpm_alone() {
    let gpm = json!({"pcie_tx_mib_per_second": 5, "pcie_rx_mib_per_second": 5});
    let node = Node::with(only(json!({"gpm": gpm, "pcie_tx_bytes": 7 * MIB, "pcie_rx_bytes": 9 * MIB})));
    let nvml = node.open();
    assert_eq!([totals(&nvml, 0.0), totals(&nvml, 1.0)], [(Some(7), Some(9)); 2]);
    // GPM does not stand in for a counter that fails: its total would start from another origin.
    let failing = json!({"gpm": gpm, "field_errors": {"197": 999, "198": 999}});
    node.control.set(&only(failing));
    assert_eq!([totals(&nvml, 2.0), totals(&nvml, 3.0)], [NOTHING; 2]);
    assert_eq!(node.control.calls("nvmlGpmQueryDeviceSupport") + node.control.calls("nvmlGpmSampleGet"), 0);
}

#[test]
fn a_gpu_with_neither_shows_nothing_and_is_asked_once() {
    let old_library = json!({"pcie_narrow": true, "errors": {"nvmlGpmQueryDeviceSupport": 13}});
    let no_metrics = json!({"pcie_narrow": true, "gpm": {}});
    for (gpu, samples) in [(json!({"pcie_narrow": true}), 0), (old_library, 0), (no_metrics, 2)] {
        let node = Node::with(only(gpu));
        let (nvml, calls) = (node.open(), CallStats::default());
        for turn in 0..5 {
            assert_eq!(nvml.pcie(0, turn * SECOND_NS, &calls), Pcie::default());
            assert!(nvml.rare(0, 0, &calls).memory_total_bytes.is_some(), "the other readings go on");
        }
        assert_eq!(node.control.calls("nvmlGpmQueryDeviceSupport"), 1);
        assert_eq!(node.control.calls("nvmlGpmSampleGet"), samples);
        assert_eq!(calls.failures(Call::Gpm), 0, "an unsupported call is not a failure");
    }
}

#[test]
fn one_direction_that_is_not_there_does_not_cost_the_other() {
    let node = Node::with(only(json!({"pcie_narrow": true, "gpm": {"pcie_rx_mib_per_second": 3}})));
    let nvml = node.open();
    assert_eq!([0.0, 1.0, 2.0].map(|at| totals(&nvml, at)), [NOTHING, (None, Some(3)), (None, Some(6))]);
}

#[test]
fn a_lost_gpu_adds_nothing_over_the_gap_and_keeps_its_total() {
    let node = Node::with(only(gpu(100, 10)));
    let nvml = node.open();
    assert_eq!([totals(&nvml, 0.0), totals(&nvml, 1.0)], [NOTHING, (Some(100), Some(10))]);
    node.control.set(&json!({"gpus": [{"pcie_narrow": true, "lost": true}]}));
    assert_eq!(totals(&nvml, 2.0), NOTHING, "the last total is not repeated");
    let mut back = gpu(100, 10);
    back["generation"] = json!(1);
    node.control.set(&only(back));
    assert_eq!(nvml.reacquire(0), Ok(()));
    assert_eq!([totals(&nvml, 4.0), totals(&nvml, 5.0)], [NOTHING, (Some(200), Some(20))]);
}

#[test]
fn a_gpu_that_was_got_back_between_two_turns_begins_anew() {
    let node = Node::with(only(gpu(100, 10)));
    let nvml = node.open();
    assert_eq!([totals(&nvml, 0.0), totals(&nvml, 1.0)], [NOTHING, (Some(100), Some(10))]);
    assert_eq!(nvml.reacquire(0), Ok(()));
    assert_eq!([totals(&nvml, 2.0), totals(&nvml, 3.0)], [NOTHING, (Some(200), Some(20))]);
}

#[test]
fn a_sample_that_fails_loses_the_windows_that_it_belongs_to() {
    let node = Node::with(only(gpu(100, 10)));
    let (nvml, calls) = (node.open(), CallStats::default());
    assert_eq!([totals(&nvml, 0.0), totals(&nvml, 1.0)], [NOTHING, (Some(100), Some(10))]);
    let mut failing = gpu(100, 10);
    failing["errors"] = json!({"nvmlGpmSampleGet": 999});
    node.control.set(&only(failing));
    assert_eq!(nvml.pcie(0, 2 * SECOND_NS, &calls).received_bytes, None);
    assert_eq!(calls.failures(Call::Gpm), 1);
    node.control.set(&only(gpu(100, 10)));
    assert_eq!([totals(&nvml, 3.0), totals(&nvml, 4.0)], [NOTHING, (Some(200), Some(20))]);
}

#[test]
fn rates_that_fail_lose_one_window() {
    let with = |errors: Value| json!({"gpus": [gpu(100, 10)], "errors": errors});
    let node = Node::with(with(json!({})));
    let nvml = node.open();
    assert_eq!([totals(&nvml, 0.0), totals(&nvml, 1.0)], [NOTHING, (Some(100), Some(10))]);
    // An invalid argument concerns these two samples, not the GPU.
    for (second, code) in [(2.0, 999), (3.0, 2)] {
        node.control.set(&with(json!({"nvmlGpmMetricsGet": code})));
        assert_eq!(totals(&nvml, second), NOTHING);
    }
    node.control.set(&with(json!({})));
    assert_eq!(totals(&nvml, 4.0), (Some(200), Some(20)));
}

#[test]
fn a_lane_that_was_away_for_long_begins_anew() {
    let node = Node::with(only(gpu(100, 10)));
    let nvml = node.open();
    assert_eq!([totals(&nvml, 0.0), totals(&nvml, 10.0)], [NOTHING, (Some(1000), Some(100))]);
    assert_eq!([totals(&nvml, 20.1), totals(&nvml, 21.1)], [NOTHING, (Some(1100), Some(110))]);
    assert_eq!([totals(&nvml, 5.0), totals(&nvml, 6.0)], [NOTHING, (Some(1200), Some(120))], "also if time runs back");
}

#[test]
fn an_instance_is_not_asked() {
    let mut whole = gpu(100, 10);
    whole["mig"] = json!([{"uuid": "MIG-x"}]);
    let node = Node::with(only(whole));
    let (nvml, calls) = (node.open(), CallStats::default());
    for turn in 0..2 {
        assert_eq!(nvml.pcie(1, turn * SECOND_NS, &calls), Pcie::default());
    }
    assert_eq!(node.control.calls("nvmlGpmQueryDeviceSupport"), 0);
}

#[test]
fn every_sample_is_freed() {
    let node = Node::with(json!({"gpus": [gpu(1, 1), gpu(2, 2)]}));
    let (nvml, calls) = (node.open(), CallStats::default());
    for turn in 0..4 {
        for gpu in 0..2 {
            nvml.pcie(gpu, turn * SECOND_NS, &calls);
        }
    }
    let open = || node.control.calls("nvmlGpmSampleAlloc") - node.control.calls("nvmlGpmSampleFree");
    assert_eq!(open(), 2, "one per GPU to count from");
    drop(nvml);
    assert_eq!((open(), node.control.calls("nvmlGpmSampleAlloc")), (0, 8));
}

#[test]
fn the_daemon_shows_the_totals_of_the_gpu_that_has_rates_and_none_of_the_other() {
    let (sent_rate, received_rate) = (100.0, 40_000.0);
    let mut rates = gpu(100, 40_000);
    rates["uuid"] = json!("GPU-a");
    let node = Node::with(json!({"gpus": [rates, {"uuid": "GPU-b", "pcie_narrow": true}]}));
    let begun = Instant::now();
    let daemon = Daemon::start(&["serve", "--nvml-library", &node.control.library().display().to_string()]);
    let (metrics, sent, received) = eventually(Duration::from_secs(30), "PCIe bytes of a window", || {
        let metrics = daemon.get("/metrics");
        let value = |way: &str| {
            let sample = format!("highwater_gpu_pcie_{way}_bytes_total{{gpu=\"0\",uuid=\"GPU-a\"}} ");
            metrics.lines().find_map(|line| line.strip_prefix(sample.as_str())?.parse::<f64>().ok())
        };
        let (sent, received) = (value("transmitted")?, value("received")?);
        (received >= 2.0 * received_rate * MIB as f64).then_some((metrics, sent, received))
    });
    assert!(received <= begun.elapsed().as_secs_f64() * received_rate * MIB as f64, "no more than has passed");
    assert!((received / sent - received_rate / sent_rate).abs() < 0.001, "each direction by its own rate");
    assert!(metrics.contains(r#"highwater_gpu_up{gpu="1",uuid="GPU-b"} 1"#));
    assert!(
        !metrics.lines().any(|line| line.starts_with("highwater_gpu_pcie")
            && line.contains("_bytes_total")
            && line.contains("GPU-b"))
    );
    assert!(metrics.contains(r#"highwater_nvml_call_duration_seconds_count{call="gpm"}"#));
}
