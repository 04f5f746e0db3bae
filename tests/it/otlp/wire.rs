//! OTLP on the wire: both protocols, compression, headers, partial success, hostile answers, the end.

use super::bench::{Bench, check_accounts};
use super::collector::{Collector, Mode};
use highwater::export::otlp::settings::{Keys, Raw, resolve};
use highwater::export::otlp::{Attempt, DropReason, OtlpSettings, Signal};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

pub const GPUS: &str = "[[gpus]]\ncount = 2\n";

/// Settings from variables, resolved as a daemon does.
pub fn settings(variables: &[(&str, &str)], keys: Keys) -> OtlpSettings {
    let variables: Vec<_> = variables.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    resolve(&keys, &variables).expect("valid").expect("an endpoint")
}

pub fn standard(protocol: &str) -> Vec<(&str, &str)> {
    vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol),
        ("OTEL_METRIC_EXPORT_INTERVAL", "10000"),
    ]
}

#[tokio::test(start_paused = true)]
async fn both_protocols_carry_metrics_with_headers_and_compression() {
    for (protocol, path) in
        [("http/protobuf", "/v1/metrics"), ("grpc", "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")]
    {
        for compression in ["none", "gzip"] {
            let collector = Collector::in_memory();
            let mut variables = standard(protocol);
            variables.push(("OTEL_EXPORTER_OTLP_COMPRESSION", compression));
            variables.push(("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "authorization=Bearer%20secret, x-scope=a"));
            variables.push(("OTEL_RESOURCE_ATTRIBUTES", "k8s.node.name=node%2C1,team=a"));
            let bench = Bench::start(GPUS, settings(&variables, Keys::default()), Arc::new(collector.clone()));
            sleep(Duration::from_secs(31)).await;
            collector.received(|received| {
                assert_eq!(received.paths, [path; 3], "{protocol} {compression}");
                assert_eq!(received.headers[0]["authorization"], "Bearer secret");
                assert_eq!(received.headers[0]["x-scope"], "a");
                let usage: Vec<_> = received.metrics_of("hw.gpu.memory.usage").collect();
                let Some(Data::Sum(sum)) = &usage[2].data else { panic!("a sum: {usage:?}") };
                assert_eq!((sum.data_points.len(), sum.is_monotonic), (2, false));
                let resource = received.metrics[0].resource_metrics[0].resource.as_ref().expect("a resource");
                let text = format!("{resource:?}");
                assert!(text.contains("node,1") && text.contains("highwater") && text.contains("host.name"), "{text}");
            });
            bench.check_accounts();
            assert!(bench.stats.account(Signal::Metrics).exported > 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn partial_success_and_refusal_are_counted_with_their_reasons() {
    for protocol in ["http/protobuf", "grpc"] {
        let collector = Collector::in_memory();
        collector.set(Mode::Rejects(7));
        let bench = Bench::start(GPUS, settings(&standard(protocol), Keys::default()), Arc::new(collector.clone()));
        sleep(Duration::from_secs(11)).await;
        assert_eq!(bench.stats.account(Signal::Metrics).dropped(DropReason::Rejected), 7);
        let exported = bench.stats.account(Signal::Metrics).exported;
        collector.set(Mode::Denies);
        sleep(Duration::from_secs(10)).await;
        assert_eq!(bench.stats.attempts(Signal::Metrics, Attempt::Refused), 1, "{protocol}");
        assert!(bench.stats.account(Signal::Metrics).dropped(DropReason::Refused) >= exported);
        bench.check_accounts();
    }
}

/// A body without an end, a message of a gigabyte, messages without an end or 64 MiB in 64 kB: each is read to its
/// limit and no further, and is not attempted again.
#[tokio::test(start_paused = true)]
async fn a_hostile_answer_is_bounded() {
    let modes = [Mode::Endless, Mode::Flood, Mode::Bomb];
    for (protocol, mode) in ["http/protobuf", "grpc"].into_iter().flat_map(|p| modes.map(|mode| (p, mode))) {
        let collector = Collector::in_memory();
        collector.set(mode);
        let bench = Bench::start(GPUS, settings(&standard(protocol), Keys::default()), Arc::new(collector.clone()));
        sleep(Duration::from_secs(35)).await;
        let stats = &bench.stats;
        let ended = stats.attempts(Signal::Metrics, Attempt::Sent) + stats.attempts(Signal::Metrics, Attempt::Refused);
        assert_eq!(ended, 3, "{protocol} {mode:?}: each was settled by one attempt");
        bench.check_accounts();
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_sends_what_is_left_and_takes_no_longer_than_its_grace() {
    let collector = Collector::in_memory();
    let bench = Bench::start(GPUS, settings(&standard("grpc"), Keys::default()), Arc::new(collector.clone()));
    sleep(Duration::from_secs(5)).await;
    let stats = Arc::clone(&bench.stats);
    assert!(bench.stop().await < Duration::from_secs(1));
    assert_eq!(collector.received(|received| received.metrics.len()), 1, "the last snapshot");
    check_accounts(&stats);
    assert_eq!(stats.account(Signal::Metrics).all_dropped(), 0);

    let collector = Collector::in_memory();
    collector.set(Mode::BlackHole);
    let bench = Bench::start(GPUS, settings(&standard("grpc"), Keys::default()), Arc::new(collector.clone()));
    sleep(Duration::from_secs(25)).await;
    let stats = Arc::clone(&bench.stats);
    assert!(bench.stop().await <= Duration::from_millis(1100));
    check_accounts(&stats);
    assert_eq!(stats.account(Signal::Metrics).dropped(DropReason::Shutdown), stats.account(Signal::Metrics).produced);
}

#[tokio::test(start_paused = true)]
async fn a_queue_on_disk_loses_nothing_over_a_restart() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let keys = || Keys { queue_dir: Some(folder.path().into()), raw: Raw::Always, ..Keys::default() };
    let collector = Collector::in_memory();
    collector.set(Mode::Refuses);
    let bench = Bench::start(GPUS, settings(&standard("http/protobuf"), keys()), Arc::new(collector.clone()));
    sleep(Duration::from_secs(35)).await;
    let stats = Arc::clone(&bench.stats);
    bench.stop().await;
    let left = stats.account(Signal::Metrics).queued + stats.account(Signal::Raw).queued;
    assert_eq!(left, stats.account(Signal::Metrics).produced + stats.account(Signal::Raw).produced);
    // A file torn by a kill, or a damaged one, loses only its own contents.
    std::fs::write(folder.path().join("00000000000000000099-raw-5.otlp.partial"), "torn").expect("written");
    std::fs::write(folder.path().join("00000000000000000098-raw-5.otlp"), "damaged").expect("written");

    collector.set(Mode::Takes);
    let bench = Bench::start(GPUS, settings(&standard("http/protobuf"), keys()), Arc::new(collector.clone()));
    sleep(Duration::from_millis(500)).await;
    let stats = Arc::clone(&bench.stats);
    assert_eq!(stats.account(Signal::Metrics).exported + stats.account(Signal::Raw).exported, left);
    assert_eq!(stats.account(Signal::Raw).dropped(DropReason::Corrupt), 5);
    check_accounts(&stats);
    assert_eq!(collector.received(|received| received.metrics_of("hw.gpu.memory.usage").count()), 4);
    let files: Vec<PathBuf> = std::fs::read_dir(folder.path()).expect("there").map(|e| e.expect("it").path()).collect();
    assert_eq!(files, [folder.path().join("otlp.lock")]);
}
