//! Benchmarks of the core, with the target beside each figure. `make bench` runs all of them; docs/performance.md has
//! the results with their date and machine.

mod cold;
#[allow(dead_code, reason = "each benchmark needs a part of it")]
mod node;
mod senders;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use highwater::export;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::phases::attribute;
use highwater_core::ring;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const START_NS: i64 = 1_800_000_000 * SECOND_NS;
const TEN_MINUTES: i64 = 600_000;
const MINUTE_MS: i64 = 60_000;
/// The default of `ring.max_bytes`.
const RING_BYTES: usize = 2 << 20;

/// Reproducible noise for sample `n`, from SplitMix64: up to 30 µs of jitter, and a random jump.
fn noise(n: i64) -> (i64, u64) {
    let mut mixed = n.cast_unsigned().wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    ((mixed % 60_000).cast_signed() - 30_000, mixed >> 40)
}

/// A ring with ten minutes of samples, each with a new value.
fn full_ring() -> (ring::Writer, ring::Reader) {
    let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: RING_BYTES, resolution_ns: 1_000 };
    let (mut writer, reader) = ring::ring(config).expect("a ring");
    for n in 0..TEN_MINUTES {
        let (jitter_ns, jump) = noise(n);
        writer.push(START_NS + n * MILLISECOND_NS + jitter_ns, (jump % 4096) << 21).expect("in order");
    }
    (writer, reader)
}

/// A ring with ten minutes of an allocator's samples: ten changes a second.
fn allocator_ring() -> (ring::Writer, ring::Reader) {
    let config = ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: RING_BYTES, resolution_ns: 1_000 };
    let (mut writer, reader) = ring::ring(config).expect("a ring");
    let mut used = 20_000_u64;
    for n in 0..TEN_MINUTES {
        let (jitter_ns, jump) = noise(n);
        if n % 100 == 0 {
            used = 20_000 + jump % 2048;
        }
        writer.push(START_NS + n * MILLISECOND_NS + jitter_ns, used << 21).expect("in order");
    }
    (writer, reader)
}

fn ring_costs(c: &mut Criterion) {
    let (_worst_writer, worst) = full_ring();
    let (_writer, usual) = allocator_ring();
    let samples = TEN_MINUTES as f64;
    println!("ring: {:.4} bytes a sample at 10 changes/s (figure: 0.05)", usual.bytes() as f64 / samples);
    println!(
        "ring: {:.4} bytes a sample when every one changes by up to 8 GiB (figure: 3)",
        worst.bytes() as f64 / samples
    );
    let mut group = c.benchmark_group("ring");
    for (name, changing) in [("push, unchanged", false), ("push, changing", true)] {
        let (mut writer, _reader) = full_ring();
        let mut n = TEN_MINUTES;
        group.bench_function(name, |b| {
            b.iter(|| {
                n += 1;
                let used = if changing { noise(n).1 % 4096 } else { 7 };
                black_box(writer.push(START_NS + n * MILLISECOND_NS, used << 21))
            });
        });
    }
    let newest_ns = worst.newest_ns().expect("samples");
    for (name, length_ns) in [("100 ms", SECOND_NS / 10), ("15 s", 15 * SECOND_NS), ("9 min", 540 * SECOND_NS)] {
        let mut n = 0;
        group.bench_function(format!("summary of {name}, every sample changed (figure: p99 50 us)"), |b| {
            b.iter(|| {
                n += 1;
                let end_ns = newest_ns - noise(n).0.abs() * 100;
                black_box(worst.summary(end_ns - length_ns, end_ns))
            });
        });
    }
    group.finish();
    tail("ring: summary of 9 min, every sample changed", 50.0, |n| {
        let end_ns = newest_ns - noise(n).0.abs() * 100;
        black_box(worst.summary(end_ns - 540 * SECOND_NS, end_ns)).is_ok()
    });
}

/// Prints percentiles of many single runs. A mean would hide the tail.
fn tail(what: &str, figure_us: f64, mut run: impl FnMut(i64) -> bool) {
    let timed = |n| {
        let begun = Instant::now();
        assert!(run(n), "{what}");
        begun.elapsed()
    };
    print_tail(what, figure_us, (0..10_000).map(timed).collect());
}

fn print_tail(what: &str, figure_us: f64, mut took: Vec<Duration>) {
    took.sort_unstable();
    let us = |part: usize| took[took.len() * part / 1000].as_secs_f64() * 1e6;
    println!(
        "{what}: p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us (figure: p99 {figure_us} us)",
        us(500),
        us(990),
        us(999)
    );
}

/// Prints the sampling loop's own time in a tick, with warm caches and with caches that a buffer has displaced.
fn cold_ticks(_: &mut Criterion) {
    for (gpus, mebibytes, ticks) in [(2, 0, 20_000), (2, 32, 2_000), (2, 64, 1_000), (8, 0, 20_000), (8, 64, 1_000)] {
        let medians: Vec<_> = (0..5).map(|_| cold::tick(gpus, mebibytes << 20, ticks).as_nanos()).collect();
        println!("tick of {gpus} GPUs after {mebibytes} MiB were read in between: medians of five runs {medians:?} ns");
    }
}

fn attribution(c: &mut Criterion) {
    let node = node::busy(8, MINUTE_MS);
    let ended = node.ended();
    let uuids: Arc<[String]> = node.node.gpus.iter().map(|gpu| gpu.device.uuid.clone()).collect();
    c.bench_function("attribution of one phase of 100 ms", |b| {
        b.iter_batched(
            || ended.clone(),
            |ended| black_box(attribute(ended, &node.node.rings, &node.node.gpus, &uuids)),
            BatchSize::SmallInput,
        );
    });
}

fn scrape(c: &mut Criterion) {
    let node = node::busy(8, MINUTE_MS);
    let exposition = || {
        let families = node.snapshots.collect();
        export::prometheus::encode(families).expect("encoded")
    };
    let text = exposition();
    let series = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty() && line[0] != b'#').count();
    println!("scrape: {series} series, {} bytes, 8 GPUs and 8 ranks", text.len());
    c.bench_function("scrape, 8 GPUs, full catalogue (figure: p99 2 ms)", |b| b.iter(|| black_box(exposition())));
    tail("scrape, 8 GPUs, full catalogue", 2000.0, |_| !exposition().is_empty());
    let protobuf = || export::prometheus::protobuf::encode(node.snapshots.collect());
    println!("scrape: {} bytes as protobuf", protobuf().len());
    tail("scrape as protobuf, 8 GPUs, full catalogue", 2000.0, |_| !protobuf().is_empty());
}

/// Runs scrapes and annotations concurrently while every slot for phase series is in use.
fn scrape_beside_annotations(_: &mut Criterion) {
    const SCRAPES: usize = 500;
    let node = node::busy(8, MINUTE_MS);
    // The rank that annotates gets its series before all slots are in use.
    for kind in ["begin", "end"] {
        node.intake.take_json(senders::event(kind, 0).as_bytes(), &highwater_core::jobs::Sender::DAEMON);
    }
    node.fill_series();
    let exposition = || export::prometheus::encode(node.snapshots.collect()).expect("encoded");
    let text = exposition();
    let phases = text.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"highwater_phase_active")).count();
    println!("beside annotations: {phases} phases of ranks with series, {} bytes an exposition", text.len());
    let collected = || {
        let begun = Instant::now();
        let families = node.snapshots.collect();
        (begun.elapsed(), export::prometheus::encode(families).expect("encoded").len())
    };
    print_tail("of a scrape, collecting, 2,048 phases", 10_000.0, (0..100).map(|_| collected().0).collect());
    let protobuf = || {
        let begun = Instant::now();
        let bytes = black_box(export::prometheus::protobuf::encode(node.snapshots.collect())).len();
        (begun.elapsed(), bytes)
    };
    println!("{} bytes an exposition as protobuf", protobuf().1);
    print_tail("scrape as protobuf, 2,048 phases", 10_000.0, (0..500).map(|_| protobuf().0).collect());
    let text = || {
        let begun = Instant::now();
        black_box(exposition());
        begun.elapsed()
    };
    print_tail("scrape, 2,048 phases", 10_000.0, (0..500).map(|_| text()).collect());
    let (mut scrapes, is_over) = (Vec::with_capacity(SCRAPES), AtomicBool::new(false));
    let mut annotations = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..SCRAPES {
                let begun = Instant::now();
                black_box(exposition());
                scrapes.push(begun.elapsed());
            }
            is_over.store(true, Ordering::Relaxed);
        });
        for n in 0.. {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let event = senders::event(if n % 2 == 0 { "begin" } else { "end" }, 0);
            let begun = Instant::now();
            let answer = node.intake.take_json(event.as_bytes(), &highwater_core::jobs::Sender::DAEMON);
            annotations.push(begun.elapsed());
            assert_eq!(answer.accepted, 1, "{answer:?}");
            if n % 1_000 == 999 {
                node.drain();
            }
        }
    });
    print_tail("scrape beside annotations, 2,048 phases", 10_000.0, scrapes);
    print_tail("annotation beside scrapes, 2,048 phases", 2_000.0, annotations);
}

fn annotations(c: &mut Criterion) {
    let node = node::busy(8, MINUTE_MS);
    let mut group = c.benchmark_group("annotations");
    group.throughput(Throughput::Elements(2));
    let mut pairs = 0_u64;
    group.bench_function("parse, check and take a begin and its end", |b| {
        b.iter(|| {
            for event in ["begin", "end"] {
                let answer =
                    node.intake.take_json(senders::event(event, 0).as_bytes(), &highwater_core::jobs::Sender::DAEMON);
                assert_eq!(answer.accepted, 1, "{answer:?}");
            }
            pairs += 1;
            if pairs.is_multiple_of(10_000) {
                node.drain();
            }
        });
    });
    group.finish();
    let server = senders::Server::start("spike");
    println!(
        "annotations over HTTP, batches of one, 4 connections: {:.0}/s (figure: 20,000/s)",
        server.over_http(40_000, 4)
    );
    let (sent, counted) = server.over_socket(400_000);
    println!("annotations over the socket, one a datagram: {sent:.0}/s sent, {counted:.0}/s taken (figure: 200,000/s)");
}

fn scrapers(_: &mut Criterion) {
    let server = senders::Server::start("demo");
    for scrapers in [0, 50, 0, 50, 0, 50] {
        let (due, missed) = server.ticks_under(scrapers, Duration::from_secs(10));
        println!("{scrapers} scrapers at once every second: {missed} of {due} ticks missed (figure: 50 add none)");
    }
}

fn captures(_: &mut Criterion) {
    let server = senders::Server::start("demo");
    // Waits until each capture has as much history as it asks for.
    std::thread::sleep(Duration::from_secs(30));
    for is_asked in [false, true, false, true] {
        let (due, missed, written) = server.ticks_capturing(is_asked, Duration::from_secs(10));
        println!("{written} captures of 30 s written: {missed} of {due} ticks missed (figure: they add none)");
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    targets = ring_costs, cold_ticks, attribution, scrape, scrape_beside_annotations, annotations, scrapers, captures
}
criterion_main!(benches);
