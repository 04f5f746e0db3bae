//! The built program with an exporter, or without.

use super::collector::{Collector, Mode};
use crate::daemon::Daemon;
use crate::process::eventually;
use std::time::Duration;
use tokio::runtime::Runtime;

#[test]
fn without_an_endpoint_there_is_no_exporter() {
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    assert!(!daemon.get("/metrics").contains("highwater_otlp_"));
}

/// Everything at once, over TCP: the demo's jobs as traces, raw points, and the snapshot at the end, which comes before the
/// first interval is over.
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
