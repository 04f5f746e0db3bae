//! The memory of a running daemon while its receiver sends hostile answers.

use super::collector::{Collector, Mode};
use crate::daemon::Daemon;
use crate::process::eventually;
use std::time::Duration;
use tokio::runtime::Runtime;

const WITHIN: Duration = Duration::from_secs(90);
/// Limit of the resident memory that hostile answers may add, bytes: in all lanes at once, over all modes below, and beside the
/// what the daemon accounts for itself, such as the readings and requests that it keeps meanwhile.
const MOST_ADDED: u64 = 8 << 20;

#[test]
fn hostile_answers_over_http_add_little_memory() {
    memory_is_bounded("http/protobuf");
}

#[test]
fn hostile_answers_over_grpc_add_little_memory() {
    memory_is_bounded("grpc");
}

fn memory_is_bounded(protocol: &str) {
    let runtime = Runtime::new().expect("a runtime");
    let (collector, port) = runtime.block_on(Collector::on_tcp());
    let endpoint = format!("otlp.endpoint=http://127.0.0.1:{port}");
    let daemon = Daemon::start_with(
        &["serve", "--source", "sim", "--set", &endpoint, "--set", "otlp.raw=always"],
        &[
            ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "500"),
        ],
    );
    let took = |signal: &str| attempts(&daemon, &format!("{{signal=\"{signal}\",outcome=\"sent\"}}"));
    eventually(WITHIN, "every signal, a few times", || {
        ["metrics", "raw", "spans"].iter().all(|signal| took(signal) >= 3.0).then_some(())
    });
    let (before, kept_before) = (memory(&daemon, "VmRSS:"), accounted(&daemon));
    for mode in [Mode::Endless, Mode::Flood, Mode::Bomb, Mode::Headers] {
        collector.set(mode);
        let begin = attempts(&daemon, "");
        eventually(WITHIN, &format!("six answers of {mode:?}"), || {
            (attempts(&daemon, "") >= begin + 6.0).then_some(())
        });
    }
    let (most, kept) = (memory(&daemon, "VmHWM:"), accounted(&daemon).saturating_sub(kept_before));
    println!("{protocol}: {before} bytes resident before hostile answers, at most {most} by the end, {kept} more kept");
    let added = most.saturating_sub(before).saturating_sub(kept);
    assert!(added <= MOST_ADDED, "{protocol}: {before} bytes, then up to {most}, with {kept} more kept");
    collector.set(Mode::Takes);
    let begin = took("metrics");
    eventually(WITHIN, "another accepted export", || (took("metrics") > begin).then_some(()));
}

/// The sum of attempts whose labels end with `labels`.
fn attempts(daemon: &Daemon, labels: &str) -> f64 {
    let metrics = daemon.get("/metrics");
    let samples =
        metrics.lines().filter_map(|line| line.strip_prefix("highwater_otlp_attempts_total")?.rsplit_once(' '));
    samples.filter(|(of, _)| of.ends_with(labels)).map(|(_, count)| count.parse::<f64>().expect("a number")).sum()
}

/// Bytes that the daemon accounts for, by what they are.
fn accounted(daemon: &Daemon) -> u64 {
    let metrics = daemon.get("/metrics");
    let parts = metrics.lines().filter(|line| {
        line.starts_with("highwater_memory_bytes{")
            && !line.contains("part=\"other\"")
            && !line.contains("part=\"sqlite\"")
    });
    parts.map(|line| line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok()).expect("bytes")).sum()
}

/// A field of the daemon's memory in `/proc`, bytes.
fn memory(daemon: &Daemon, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of every process");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}
