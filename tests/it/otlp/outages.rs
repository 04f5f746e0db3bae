//! Outages of ten minutes in simulated time, and what is delivered after each.

use super::bench::{Bench, START_NS};
use super::collector::{Collector, Mode};
use super::wire::{GPUS, settings, standard};
use highwater::export::otlp::settings::{Keys, Raw};
use highwater::export::otlp::{DropReason, Signal};
use highwater_core::clock::SECOND_NS;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::sleep;

const INTERVAL_S: i64 = 10;

/// The times of the points of the first GPU's memory in use, seconds since the start.
fn usage_times(collector: &Collector) -> Vec<i64> {
    collector.received(|received| {
        let metrics = received.metrics_of("hw.gpu.memory.usage");
        let first = metrics.map(|metric| match &metric.data {
            Some(Data::Sum(sum)) => sum.data_points[0].time_unix_nano,
            other => panic!("{other:?}"),
        });
        first.map(|time| (time.cast_signed() - START_NS) / SECOND_NS).collect()
    })
}

async fn outage(protocol: &str, mode: Mode, raw: Raw) {
    let collector = Collector::in_memory();
    let settings = settings(&standard(protocol), Keys { raw, ..Keys::default() });
    let cap_bytes = settings.queue_bytes;
    let bench = Bench::start(GPUS, settings, Arc::new(collector.clone()));
    sleep(Duration::from_secs(35)).await;
    collector.set(mode);
    sleep(Duration::from_secs(600)).await;
    bench.check_accounts();
    collector.set(Mode::Takes);
    sleep(Duration::from_secs(60)).await;
    let expected: Vec<i64> = (1..=69).map(|n| n * INTERVAL_S).collect();
    assert_eq!(usage_times(&collector), expected, "{protocol} {mode:?}: every point once, in order, at its own time");
    bench.check_accounts();
    for signal in [Signal::Metrics, Signal::Raw] {
        let stats = &bench.stats;
        assert_eq!(
            (stats.account(signal).queued, stats.account(signal).all_dropped()),
            (0, 0),
            "{protocol} {mode:?} {signal:?}"
        );
    }
    bench.check_no_tick_is_missing();
    assert!(bench.most_queued_bytes.load(Relaxed) <= cap_bytes);
}

#[tokio::test(start_paused = true)]
async fn refused_over_http() {
    outage("http/protobuf", Mode::Refuses, Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn refused_over_grpc() {
    outage("grpc", Mode::Refuses, Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn black_holed_over_http() {
    outage("http/protobuf", Mode::BlackHole, Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn black_holed_over_grpc() {
    outage("grpc", Mode::BlackHole, Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn unavailable_over_http() {
    outage("http/protobuf", Mode::Unavailable(Duration::from_secs(20)), Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn unavailable_over_grpc() {
    outage("grpc", Mode::Unavailable(Duration::from_secs(20)), Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn accepting_slowly_over_http() {
    outage("http/protobuf", Mode::Slow(Duration::from_secs(9)), Raw::Never).await;
}

#[tokio::test(start_paused = true)]
async fn too_slow_over_grpc() {
    outage("grpc", Mode::Slow(Duration::from_secs(11)), Raw::Never).await;
}

#[tokio::test(start_paused = true)]
async fn killed_in_mid_stream_over_http() {
    outage("http/protobuf", Mode::DiesMidStream, Raw::Always).await;
}

#[tokio::test(start_paused = true)]
async fn killed_in_mid_stream_over_grpc() {
    outage("grpc", Mode::DiesMidStream, Raw::Always).await;
}

/// The exporter obeys the wait that a receiver asks for: no attempt comes sooner.
#[tokio::test(start_paused = true)]
async fn retry_after_is_obeyed() {
    for protocol in ["http/protobuf", "grpc"] {
        let collector = Collector::in_memory();
        collector.set(Mode::Unavailable(Duration::from_secs(100)));
        let _bench = Bench::start(GPUS, settings(&standard(protocol), Keys::default()), Arc::new(collector.clone()));
        sleep(Duration::from_secs(109)).await;
        assert_eq!(collector.received(|received| received.refused), 1, "{protocol}");
        sleep(Duration::from_secs(12)).await;
        assert_eq!(collector.received(|received| received.refused), 2, "{protocol}");
    }
}

/// Beyond the cap the oldest points are dropped, and exactly those are counted.
#[tokio::test(start_paused = true)]
async fn what_does_not_fit_is_dropped_oldest_first_and_counted() {
    let collector = Collector::in_memory();
    let mut settings = settings(&standard("http/protobuf"), Keys::default());
    settings.queue_bytes = 200_000;
    let bench = Bench::start(GPUS, settings, Arc::new(collector.clone()));
    sleep(Duration::from_secs(35)).await;
    collector.set(Mode::Refuses);
    sleep(Duration::from_secs(600)).await;
    collector.set(Mode::Takes);
    sleep(Duration::from_secs(60)).await;
    let times = usage_times(&collector);
    let missing: Vec<i64> = (1..=69).map(|n| n * INTERVAL_S).filter(|time| !times.contains(time)).collect();
    assert!(missing.len() > 5 && missing.len() < 60, "{missing:?}");
    let first_missing = missing[0];
    assert!(missing.iter().enumerate().all(|(n, time)| *time == first_missing + n as i64 * INTERVAL_S), "the oldest");
    assert_eq!(first_missing, 40, "what was sent before the outage is not lost");
    let received: u64 = collector.received(|received| received.metrics.iter().map(points).sum());
    let stats = &bench.stats;
    assert_eq!(
        stats.account(Signal::Metrics).dropped(DropReason::Overflow),
        stats.account(Signal::Metrics).produced - received
    );
    assert_eq!(stats.account(Signal::Metrics).exported, received);
    assert!(bench.most_queued_bytes.load(Relaxed) <= 200_000);
    bench.check_accounts();
}

fn points(request: &opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest) -> u64 {
    let mut by_kind: BTreeMap<&str, usize> = BTreeMap::new();
    for resource in &request.resource_metrics {
        for metric in resource.scope_metrics.iter().flat_map(|scope| &scope.metrics) {
            let (kind, count) = match metric.data.as_ref().expect("data") {
                Data::Gauge(gauge) => ("gauge", gauge.data_points.len()),
                Data::Sum(sum) => ("sum", sum.data_points.len()),
                Data::Histogram(histogram) => ("histogram", histogram.data_points.len()),
                Data::ExponentialHistogram(histogram) => ("exponential", histogram.data_points.len()),
                Data::Summary(summary) => ("summary", summary.data_points.len()),
            };
            *by_kind.entry(kind).or_default() += count;
        }
    }
    by_kind.values().sum::<usize>() as u64
}

/// Files that cannot be read for ten minutes, while the receiver is up again. Directories take their places, which root
/// cannot read either.
#[tokio::test(start_paused = true)]
async fn files_that_cannot_be_read_for_a_while_cost_no_point() {
    let folder = tempfile::tempdir().expect("a folder");
    let queue = folder.path().join("queue");
    let aside = folder.path().join("aside");
    std::fs::create_dir(&aside).expect("made");
    let collector = Collector::in_memory();
    let mut settings = settings(&standard("http/protobuf"), Keys { raw: Raw::Always, ..Keys::default() });
    settings.queue_dir = Some(queue.clone());
    let bench = Bench::start(GPUS, settings, Arc::new(collector.clone()));
    sleep(Duration::from_secs(35)).await;
    collector.set(Mode::Refuses);
    sleep(Duration::from_secs(100)).await;
    let waiting = || std::fs::read_dir(&queue).expect("there").map(|entry| entry.expect("an entry").path());
    let files: Vec<_> = waiting().filter(|path| path.extension().is_some_and(|ending| ending == "otlp")).collect();
    assert!(files.len() > 10, "{files:?}");
    for file in &files {
        std::fs::rename(file, aside.join(file.file_name().expect("a name"))).expect("there");
        std::fs::create_dir(file).expect("made");
    }
    collector.set(Mode::Takes);
    for _ in 0..60 {
        sleep(Duration::from_secs(10)).await;
        bench.check_accounts();
    }
    for signal in [Signal::Metrics, Signal::Raw] {
        let (failures, stats) = (bench.stats.read_failures(signal), &bench.stats);
        assert_eq!(stats.account(signal).all_dropped(), 0, "{signal:?}");
        assert!(
            stats.account(signal).queued > 0 && (20..200).contains(&failures),
            "{signal:?}: {failures} in ten minutes"
        );
    }
    for file in &files {
        std::fs::remove_dir(file).expect("empty");
        std::fs::rename(aside.join(file.file_name().expect("a name")), file).expect("put back");
    }
    sleep(Duration::from_secs(60)).await;
    let now_s = 35 + 100 + 600 + 60;
    let expected: Vec<i64> = (1..=now_s / INTERVAL_S).map(|n| n * INTERVAL_S).collect();
    assert_eq!(usage_times(&collector), expected, "every point once, in order, at its own time");
    bench.check_accounts();
    for signal in [Signal::Metrics, Signal::Raw] {
        let stats = &bench.stats;
        assert_eq!((stats.account(signal).queued, stats.account(signal).all_dropped()), (0, 0), "{signal:?}");
    }
}
