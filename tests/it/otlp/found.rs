//! Exports around findings only: a simulated job that runs nearly out of memory, and a receiver that counts.

use super::bench::{Bench, START_NS};
use super::collector::{Collector, Received};
use super::wire::{settings, standard};
use highwater::export::otlp::Signal;
use highwater::export::otlp::settings::{Keys, Raw, Spans};
use highwater_core::clock::SECOND_NS;
use highwater_core::detect::{Finding, Severity};
use highwater_core::ring::Point;
use highwater_core::wire::{EventType, Kind};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Attribute;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

const NEAR_OOM: &str = concat!(
    "[[gpus]]\ncount = 2\n\n[[jobs]]\nname = \"train\"\nranks = [0, 1]\n",
    include_str!("../../data/training.toml"),
    "near_oom = { offset = \"25 s\", for = \"4 s\", free = \"200 MiB\" }\n",
);

/// Begin and end of the time around the reported findings, which is one stretch here.
fn stretch(findings: &[Finding]) -> (i64, i64) {
    let begin_ns = findings.iter().map(|finding| finding.sign.begin_ns).min().expect("findings");
    let end_ns = findings.iter().map(|finding| finding.seen_ns).max().expect("findings");
    (begin_ns - 10 * SECOND_NS, end_ns + 10 * SECOND_NS)
}

/// Raw points by the UUID of their GPU, in order of arrival.
fn raw_points(received: &Received) -> BTreeMap<String, Vec<(i64, Option<u64>)>> {
    let mut by_gpu: BTreeMap<String, Vec<(i64, Option<u64>)>> = BTreeMap::new();
    for one in received.metrics.iter().flat_map(|request| &request.resource_metrics) {
        let metrics = one.scope_metrics.iter().flat_map(|scope| &scope.metrics);
        for metric in metrics.filter(|metric| metric.name == "highwater.gpu.memory.raw") {
            let resource = one.resource.as_ref().expect("a resource");
            let id = resource.attributes.iter().find(|attribute| attribute.key == "hw.id").expect("a GPU");
            let Some(Attribute::StringValue(uuid)) = id.value.as_ref().and_then(|value| value.value.clone()) else {
                panic!("{id:?}")
            };
            let Some(Data::Gauge(gauge)) = &metric.data else { panic!("a gauge") };
            by_gpu.entry(uuid).or_default().extend(gauge.data_points.iter().map(|point| {
                let value = match point.value {
                    Some(Value::AsInt(value)) => Some(value.cast_unsigned()),
                    None => None,
                    other => panic!("{other:?}"),
                };
                (point.time_unix_nano.cast_signed(), value)
            }));
        }
    }
    by_gpu
}

fn start(collector: &Collector) -> Bench {
    let keys = Keys { raw: Raw::Findings, spans: Spans::Findings, ..Keys::default() };
    // One reading at each moment, so that each change has its own time.
    Bench::start_reading(1, NEAR_OOM, settings(&standard("http/protobuf"), keys), Arc::new(collector.clone()))
}

fn findings(bench: &Bench) -> Vec<Finding> {
    let board = bench.state.findings.board();
    assert_eq!(board.active().count(), 0, "every finding has ended");
    let exported = board.ended().filter(|finding| finding.sign.severity >= Severity::Warning);
    exported.cloned().collect()
}

/// Every change near the findings is received once, and no other change.
#[tokio::test(start_paused = true)]
async fn raw_points_come_around_findings_alone() {
    let collector = Collector::in_memory();
    let bench = start(&collector);
    sleep(Duration::from_secs(20)).await;
    assert_eq!(bench.stats.account(Signal::Raw).produced, 0, "nothing is found yet");
    sleep(Duration::from_millis(50_500)).await;
    let (from_ns, to_ns) = stretch(&findings(&bench));
    assert!(from_ns > START_NS + 10 * SECOND_NS && to_ns < START_NS + 50 * SECOND_NS);
    let by_gpu = collector.received(raw_points);
    assert_eq!(by_gpu.len(), 2, "also from the GPU that waits for the other one");
    for (gpu, ring) in bench.node.gpus.iter().zip(bench.node.rings.iter()) {
        let points = &by_gpu[&gpu.device.uuid];
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0), "in order, and nothing twice");
        let (last, before) = points.split_last().expect("points");
        assert!(before.iter().all(|(at_ns, _)| (from_ns..=to_ns).contains(at_ns)), "nothing outside");
        assert_eq!(last.1, None, "the last point has no value: what follows was not sent");
        let times: BTreeSet<i64> = points.iter().map(|(at_ns, _)| *at_ns).collect();
        let oldest_ns = ring.oldest_ns().expect("read");
        let all = ring.points(oldest_ns, START_NS + 70 * SECOND_NS, usize::MAX).expect("kept").points;
        for (at_ns, used) in before {
            assert_eq!(ring.at(*at_ns).expect("kept"), *used, "with its own time: at {} ns", at_ns - START_NS);
        }
        let (near, far): (Vec<Point>, Vec<Point>) =
            all.into_iter().partition(|point| (from_ns..=to_ns).contains(&point.at_ns));
        println!(
            "{}: {} changes near findings and {} others; {} sent",
            gpu.device.index,
            near.len(),
            far.len(),
            points.len()
        );
        assert!(near.len() > 100 && far.len() > 100);
        assert!(near.iter().all(|point| times.contains(&point.at_ns)), "every change");
    }
    assert_eq!(bench.stats.account(Signal::Raw).exported, by_gpu.values().map(Vec::len).sum::<usize>() as u64);
    bench.check_accounts();
}

/// Rank and number of a step's span.
fn step_of(span: &Span) -> (u32, u64) {
    let of = |name: &str| {
        let found = span.attributes.iter().find(|attribute| attribute.key == name).and_then(|one| one.value.clone());
        let Some(Attribute::IntValue(value)) = found.and_then(|value| value.value) else { panic!("no {name}") };
        u64::try_from(value).expect("not negative")
    };
    (u32::try_from(of("highwater.rank")).expect("small"), of("highwater.step"))
}

/// The simulated steps that have a finding, by rank and number, and how many steps there are.
fn expected_steps(bench: &Bench, findings: &[Finding], until_ns: i64) -> (BTreeSet<(u32, u64)>, usize) {
    let (mut begun, mut expected, mut count) = (BTreeMap::new(), BTreeSet::new(), 0);
    let said = bench.node.source.annotations().filter(|one| one.kind == Kind::Step);
    for one in said.take_while(|one| one.time_unix_nano.is_some_and(|at_ns| at_ns < until_ns)) {
        let (rank, step) = (one.rank.expect("a rank"), one.step.expect("a number"));
        let at_ns = one.time_unix_nano.expect("a time");
        if one.event == EventType::Begin {
            begun.insert(rank, at_ns);
            continue;
        }
        count += 1;
        let begin_ns = begun[&rank];
        let is_found = findings.iter().any(|finding| {
            let sign = &finding.sign;
            let is_its = sign.subject.rank == Some(rank) || sign.waiting_ranks.contains(&rank);
            is_its && sign.begin_ns <= at_ns && finding.seen_ns >= begin_ns
        });
        if is_found {
            expected.insert((rank, step));
        }
    }
    (expected, count)
}

/// Exactly the steps with a finding become traces, each with its findings as events.
#[tokio::test(start_paused = true)]
async fn steps_with_a_finding_are_traces_that_show_it() {
    let collector = Collector::in_memory();
    let bench = start(&collector);
    sleep(Duration::from_millis(60_500)).await;
    let findings = findings(&bench);
    let (expected, count) = expected_steps(&bench, &findings, START_NS + 56 * SECOND_NS);
    collector.received(|received| {
        let spans = received.spans();
        let steps: Vec<&&Span> = spans.iter().filter(|span| span.name == "highwater.step").collect();
        let exported: BTreeSet<_> = steps.iter().map(|span| step_of(span)).collect();
        println!("{} of {count} steps have a finding; {} spans", exported.len(), spans.len());
        assert_eq!((exported.len(), &exported), (steps.len(), &expected), "each once");
        assert!(expected.len() > 5 && expected.len() < count / 2);
        assert!(spans.len() >= 6 * steps.len(), "their phases come with them");
        assert!(steps.iter().all(|span| !span.events.is_empty()));
        let events: BTreeSet<&str> =
            steps.iter().flat_map(|span| &span.events).map(|event| event.name.as_str()).collect();
        for kind in ["allocator_thrash", "comm_starvation", "low_headroom"] {
            assert!(events.contains(kind), "{kind} is not in {events:?}");
        }
        let in_span = |span: &Span| {
            let within = span.start_time_unix_nano..=span.end_time_unix_nano;
            span.events.iter().all(|event| within.contains(&event.time_unix_nano))
        };
        assert!(steps.iter().all(|span| in_span(span)));
    });
    bench.check_accounts();
}
