//! The built program with an exporter, or without.

use super::collector::{Collector, Mode};
use crate::daemon::Daemon;
use crate::process::eventually;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use std::time::Duration;
use tokio::runtime::Runtime;

#[test]
fn without_an_endpoint_there_is_no_exporter() {
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    assert!(!daemon.get("/metrics").contains("highwater_otlp_"));
}

/// Everything at once, over TCP: the demo's jobs as traces, raw points, and the last snapshot, which is sent at the
/// end, before the first interval is over.
#[test]
fn a_running_daemon_pushes_all_signals_and_its_last_snapshot_at_the_end() {
    for protocol in ["http/protobuf", "grpc"] {
        let runtime = Runtime::new().expect("a runtime");
        let (collector, port) = runtime.block_on(Collector::on_tcp());
        let daemon = Daemon::start_with(
            &[
                "serve",
                "--source",
                "sim",
                "--set",
                &format!("otlp.endpoint=http://127.0.0.1:{port}"),
                "--set",
                "otlp.raw=always",
            ],
            &[("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)],
        );
        eventually(Duration::from_secs(60), "raw points and spans", || {
            collector.received(|received| {
                let raw = received.metrics_of("highwater.gpu.memory.raw").next().is_some();
                (raw && received.spans().iter().any(|span| span.name == "highwater.step")).then_some(())
            })
        });
        assert!(collector.received(|received| received.metrics_of("hw.gpu.memory.usage").next().is_none()));
        let (status, _) = daemon.stop();
        assert!(status.success());
        assert_eq!(collector.received(|received| received.metrics_of("hw.gpu.memory.usage").count()), 1, "{protocol}");
    }
}

/// A GPU whose memory changes with nearly every reading.
const CHANGING: &str = r#"
[[gpus]]
count = 1

[[jobs]]
name = "grows"
ranks = [0]
startup = "100 ms"
base = "10 GiB"

[[jobs.phases]]
name = "forward"
duration = "500 ms"
to = "130 GiB"
shape = "ramp"
release = true
"#;

/// Raw points are collected once a second, but at the end none is missing: the newest equals the last snapshot.
#[test]
fn the_newest_change_is_pushed_at_the_end() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let scenario = folder.path().join("changing.toml");
    std::fs::write(&scenario, CHANGING).expect("written");
    for protocol in ["http/protobuf", "grpc"] {
        let runtime = Runtime::new().expect("a runtime");
        let (collector, port) = runtime.block_on(Collector::on_tcp());
        let (source, endpoint) =
            (format!("sim:{}", scenario.display()), format!("otlp.endpoint=http://127.0.0.1:{port}"));
        let arguments = ["serve", "--source", &source, "--set", &endpoint, "--set", "otlp.raw=always"];
        let daemon = Daemon::start_with(&arguments, &[("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)]);
        eventually(Duration::from_secs(60), "raw points", || {
            collector.received(|received| received.metrics_of("highwater.gpu.memory.raw").nth(1).map(|_| ()))
        });
        let (status, _) = daemon.stop();
        assert!(status.success());
        collector.received(|received| {
            let last = |name| {
                let metric = received.metrics_of(name).last().expect("it was pushed");
                match metric.data.as_ref().expect("data") {
                    Data::Gauge(gauge) => gauge.data_points.last().expect("a point").value,
                    Data::Sum(sum) => sum.data_points.last().expect("a point").value,
                    other => panic!("{other:?}"),
                }
            };
            let (raw, usage) = (last("highwater.gpu.memory.raw"), last("hw.gpu.memory.usage"));
            assert!(raw.is_some() && raw == usage, "{protocol}: {raw:?}, {usage:?}");
        });
    }
}

#[test]
fn a_receiver_that_never_answers_does_not_hold_up_the_end() {
    let runtime = Runtime::new().expect("a runtime");
    let (collector, port) = runtime.block_on(Collector::on_tcp());
    collector.set(Mode::BlackHole);
    let daemon =
        Daemon::start(&["serve", "--source", "sim", "--set", &format!("otlp.endpoint=http://127.0.0.1:{port}")]);
    eventually(Duration::from_secs(30), "a span that waits", || {
        daemon
            .get("/metrics")
            .lines()
            .any(|line| line.starts_with("highwater_otlp_queued{signal=\"spans\"} ") && !line.ends_with(" 0"))
            .then_some(())
    });
    let (status, after) = daemon.stop();
    assert!(status.success() && after < Duration::from_secs(4), "{status} after {after:?}");
}
