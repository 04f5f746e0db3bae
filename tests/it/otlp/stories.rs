//! Steps and raw points, from the job and the sampler to the receiver.

use super::bench::{Bench, START_NS};
use super::collector::Collector;
use super::wire::{GPUS, settings, standard};
use highwater::export::otlp::Signal;
use highwater::export::otlp::settings::{Keys, Raw};
use highwater_core::clock::MILLISECOND_NS;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Raw points show every change of memory, and where it rests, at the times of the readings: each matches the ring.
#[tokio::test(start_paused = true)]
async fn raw_points_are_the_rings() {
    let scenario =
        "[[spikes]]\ngpu = 0\noffset = \"1.5 s\"\nevery = \"2 s\"\nduration = \"7 ms\"\nbytes = \"20 GiB\"\n";
    let collector = Collector::in_memory();
    let settings = settings(&standard("http/protobuf"), Keys { raw: Raw::Always, ..Keys::default() });
    let bench = Bench::start(scenario, settings, Arc::new(collector.clone()));
    sleep(Duration::from_millis(20_500)).await;
    let mut by_gpu: BTreeMap<String, Vec<(i64, Option<u64>)>> = BTreeMap::new();
    collector.received(|received| {
        for resource in received.metrics.iter().flat_map(|request| &request.resource_metrics) {
            let gpu = format!(
                "{:?}",
                resource.resource.as_ref().expect("a resource").attributes.iter().find(|a| a.key == "hw.id")
            );
            for metric in resource.scope_metrics.iter().flat_map(|scope| &scope.metrics) {
                if metric.name != "highwater.gpu.memory.raw" {
                    continue;
                }
                let Some(Data::Gauge(gauge)) = &metric.data else { panic!("a gauge") };
                let points = gauge.data_points.iter().map(|point| {
                    let value = point.value.map(|value| match value {
                        Value::AsInt(value) => value.cast_unsigned(),
                        Value::AsDouble(_) => panic!("bytes are whole"),
                    });
                    (point.time_unix_nano.cast_signed(), value)
                });
                by_gpu.entry(gpu.clone()).or_default().extend(points);
            }
        }
    });
    assert_eq!(by_gpu.len(), bench.node.rings.len());
    let spiky = by_gpu.values().max_by_key(|points| points.len()).expect("GPUs");
    assert!(spiky.windows(2).all(|pair| pair[0].0 < pair[1].0));
    let mut spikes = 0;
    for (at_ns, value) in spiky {
        assert_eq!(
            bench.node.rings[0].at(*at_ns).expect("kept"),
            *value,
            "at {} ms",
            (at_ns - START_NS) / MILLISECOND_NS
        );
        spikes += usize::from(value.is_some_and(|value| value >= 20 << 30));
    }
    assert!((10 * 2..=10 * 2 + 1).contains(&spikes), "{spikes}: each spike at its begin and its last millisecond");
    assert_eq!(bench.stats.account(Signal::Raw).exported, by_gpu.values().map(Vec::len).sum::<usize>() as u64);
    bench.check_accounts();
}

/// How long memory was at each level: one count for each millisecond for which memory is known.
#[tokio::test(start_paused = true)]
async fn levels_count_every_millisecond_once() {
    let collector = Collector::in_memory();
    let bench = Bench::start(GPUS, settings(&standard("grpc"), Keys::default()), Arc::new(collector.clone()));
    sleep(Duration::from_millis(30_500)).await;
    collector.received(|received| {
        let counts = received.metrics_of("highwater.gpu.memory.level").map(|metric| match &metric.data {
            Some(Data::ExponentialHistogram(histogram)) => histogram.data_points[0].count,
            other => panic!("{other:?}"),
        });
        let counts: Vec<u64> = counts.collect();
        assert_eq!(counts.len(), 3);
        for (count, expected) in counts.iter().zip([10_000, 20_000, 30_000]) {
            assert!(count.abs_diff(expected) <= 60, "{counts:?}: the sampler ticks twenty at a time");
        }
    });
    bench.check_accounts();
}

#[tokio::test(start_paused = true)]
async fn a_step_arrives_as_a_trace_with_its_memory_and_its_gpu() {
    for protocol in ["http/protobuf", "grpc"] {
        let collector = Collector::in_memory();
        let bench = Bench::start(GPUS, settings(&standard(protocol), Keys::default()), Arc::new(collector.clone()));
        sleep(Duration::from_secs(1)).await;
        let begin_ns = START_NS + 100 * MILLISECOND_NS;
        let event = |event: &str, kind: &str, name: &str, ms: i64| {
            let memory = json!({"reserved": 1 << 30, "alloc_retries": ms});
            json!({"event": event, "kind": kind, "name": name, "job": "train", "rank": 1, "gpu": 1, "step": 12,
                   "memory": memory, "time_unix_nano": begin_ns + ms * MILLISECOND_NS})
        };
        let events = json!([
            event("begin", "step", "step", 0),
            event("begin", "phase", "forward", 10),
            event("mark", "phase", "oom", 50),
            event("end", "phase", "forward", 200),
            event("end", "step", "step", 500),
        ]);
        let answer = bench.intake.take_json(events.to_string().as_bytes(), &highwater_core::jobs::Sender::DAEMON);
        assert_eq!((answer.accepted, answer.refused), (5, 0));
        sleep(Duration::from_secs(20)).await;
        collector.received(|received| {
            let spans = received.spans();
            assert_eq!(spans.len(), 2, "{protocol}");
            let step = spans.iter().find(|span| span.name == "highwater.step").expect("a step");
            let forward = spans.iter().find(|span| span.name == "forward").expect("a phase");
            assert_eq!(step.start_time_unix_nano.cast_signed(), begin_ns);
            assert_eq!(forward.end_time_unix_nano.cast_signed(), begin_ns + 200 * MILLISECOND_NS);
            assert_eq!((&forward.trace_id, &forward.parent_span_id), (&step.trace_id, &step.span_id));
            let peak = bench.node.rings[1].summary(begin_ns + 10 * MILLISECOND_NS, begin_ns + 200 * MILLISECOND_NS);
            let peak = peak.expect("kept").max.expect("known");
            let of = |name: &str| format!("{:?}", forward.attributes.iter().find(|a| a.key == name).map(|a| &a.value));
            assert!(
                of("highwater.memory.peak").contains(&format!("IntValue({peak})")),
                "{}",
                of("highwater.memory.peak")
            );
            assert!(of("hw.id").contains(&bench.node.gpus[1].device.uuid));
            assert!(of("highwater.allocator.retries.added").contains("IntValue(190)"));
            assert_eq!(
                step.events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(),
                ["oom", "oom", "allocator_thrash"],
                "its mark, and two findings: its allocator retried"
            );
            let durations = received.metrics_of("highwater.job.step.duration").next().expect("durations");
            let Some(Data::ExponentialHistogram(histogram)) = &durations.data else { panic!("{durations:?}") };
            assert_eq!(histogram.data_points[0].exemplars[0].trace_id, step.trace_id, "it links to the trace");
        });
        bench.check_accounts();
    }
}
