//! The benchmark cases, each of which prepares its state and then repeats one operation on one thread.

use crate::node;
use axum::body::Body;
use highwater::capture::Recorder;
use highwater::config::Settings;
use highwater::export;
use highwater::metrics::{Choice, Snapshots};
use highwater::web::annotations::Access;
use highwater::web::gate::{Gate, Refusals};
use highwater::web::hosts::Hosts;
use highwater::web::{self, Site, counts};
use highwater_core::clock::{Clock, MILLISECOND_NS, Manual, SECOND_NS};
use highwater_core::gpu::{Device, Rare};
use highwater_core::jobs::Limits;
use highwater_core::ring;
use highwater_core::source::{Error, Source};
use highwater_engine::intake::{Intake, datagram, seqpacket};
use highwater_engine::node::{Node, Periods};
use highwater_engine::offline;
use highwater_engine::recording::{Options, Replay};
use highwater_engine::sample::Sampler;
use highwater_engine::shared_state::SharedState;
use http_body_util::BodyExt as _;
use std::hint::black_box;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tower_service::Service as _;

/// One thing that is counted.
pub struct Case {
    /// What it is called in the baseline.
    pub name: &'static str,
    /// How often it is repeated.
    pub repetitions: u64,
    /// Prepares the state, and repeats the operation this many times.
    pub run: fn(u64),
}

/// All of them.
pub const CASES: &[Case] = &[
    Case { name: "tick, 8 GPUs", repetitions: 2_000, run: tick },
    Case { name: "tick, 8 idle GPUs", repetitions: 2_000, run: idle_tick },
    Case { name: "ring write", repetitions: 20_000, run: ring_write },
    Case { name: "interval query, 15 s", repetitions: 500, run: interval_query },
    Case { name: "turn of the join, 8 GPUs at rest", repetitions: 200, run: join_at_rest },
    Case { name: "scrape as text, 8 GPUs and ranks", repetitions: 10, run: scrape_text },
    Case { name: "scrape as protobuf, 8 GPUs and ranks", repetitions: 10, run: scrape_protobuf },
    Case { name: "scrape as text, 1 idle GPU", repetitions: 20, run: scrape_idle },
    Case { name: "annotation over HTTP", repetitions: 200, run: over_http },
    Case { name: "annotation as datagram", repetitions: 200, run: as_datagram },
    Case { name: "annotation over seqpacket", repetitions: 200, run: over_seqpacket },
    Case { name: "replay of 78 s of 2 GPUs", repetitions: 1, run: replay },
];

const START_NS: i64 = 1_800_000_000 * SECOND_NS;
/// How long the node of the scrapes has run, milliseconds.
const RUN_MS: i64 = 3_000;
/// Events in a batch. With [`LAST`], a batch fits the kernel's default queue of unread datagrams, 10.
const AT_ONCE: u64 = 8;

/// Until when memory changes, milliseconds.
const REST_MS: i64 = 60_000;

/// Eight GPUs. The memory of each changes every 100 ms for a minute, as under an allocator at work.
struct Steady(Vec<Device>);

impl Source for Steady {
    fn description(&self) -> String {
        "steady".to_owned()
    }

    fn devices(&self) -> &[Device] {
        &self.0
    }

    fn memory_used(&self, gpu: usize, at_ns: i64) -> Result<u64, Error> {
        let ms = (at_ns - START_NS) / MILLISECOND_NS;
        let turn = ms.min(REST_MS).unsigned_abs() + 12 * gpu as u64;
        Ok((20_000 + turn / 100 % 7 * 64) << 21)
    }
}

/// A sampler of eight GPUs, with its clock.
fn sampler() -> (Sampler, Arc<Manual>, Arc<Node>) {
    let device = |gpu: usize| Device { index: gpu.to_string(), uuid: format!("GPU-{gpu}"), ..Device::default() };
    let source = Arc::new(Steady((0..8).map(device).collect()));
    let clock = Arc::new(Manual::at(START_NS));
    let (node, writers) =
        Node::new(source, Arc::clone(&clock) as _, ring_config(), Periods::default(), None).expect("rings");
    (node.sampler(writers), clock, Arc::new(node))
}

fn ring_config() -> ring::Config {
    ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 }
}

fn tick(repetitions: u64) {
    let (mut sampler, clock, _node) = sampler();
    sampler.set_periods(Some(100 * MILLISECOND_NS), MILLISECOND_NS);
    for n in 0..repetitions.cast_signed() {
        let at_ns = START_NS + n * MILLISECOND_NS;
        clock.advance_to(at_ns);
        black_box(sampler.tick(at_ns, |_| ()));
    }
}

/// Ticks at the full rate while all GPUs are idle. Only one in a hundred reads them.
fn idle_tick(repetitions: u64) {
    struct Empty(Steady);
    impl Source for Empty {
        fn description(&self) -> String {
            self.0.description()
        }
        fn devices(&self) -> &[Device] {
            self.0.devices()
        }
        fn memory_used(&self, _: usize, _: i64) -> Result<u64, Error> {
            Ok(0)
        }
    }
    let device = |gpu: usize| Device { index: gpu.to_string(), uuid: format!("GPU-{gpu}"), ..Device::default() };
    let source = Arc::new(Empty(Steady((0..8).map(device).collect())));
    let clock = Arc::new(Manual::at(START_NS));
    let (node, writers) =
        Node::new(source, Arc::clone(&clock) as _, ring_config(), Periods::default(), None).expect("rings");
    let mut sampler = node.sampler(writers);
    sampler.set_periods(Some(100 * MILLISECOND_NS), MILLISECOND_NS);
    // Two seconds without a sign make them idle.
    let mut at_ns = START_NS;
    let mut sweep = |times: i64| {
        for _ in 0..times {
            at_ns += MILLISECOND_NS;
            clock.advance_to(at_ns);
            black_box(sampler.tick(at_ns, |_| ()));
        }
    };
    sweep(2);
    for gpu in node.gpus.iter() {
        gpu.set_processes(clock.now_ns(), Some(Vec::new()));
    }
    sweep(3_000);
    assert!(node.gpus.iter().all(highwater_core::gpu::GpuState::is_idle), "they are idle");
    sweep(repetitions.cast_signed());
}

fn ring_write(repetitions: u64) {
    let (mut writer, _reader) = ring::ring(ring_config()).expect("a ring");
    for n in 0..repetitions {
        let at_ns = START_NS + n.cast_signed() * MILLISECOND_NS;
        black_box(writer.push(at_ns, (20_000 + n / 100 % 7 * 64) << 21)).expect("in order");
    }
}

fn interval_query(repetitions: u64) {
    let (mut writer, reader) = ring::ring(ring_config()).expect("a ring");
    for n in 0..100_000 {
        writer.push(START_NS + n * MILLISECOND_NS, (n.unsigned_abs() * 7919 % 4096) << 21).expect("in order");
    }
    let newest_ns = reader.newest_ns().expect("samples");
    for n in 0..repetitions.cast_signed() {
        let end_ns = newest_ns - n * 977 % 60_000 * MILLISECOND_NS;
        black_box(reader.summary(end_ns - 15 * SECOND_NS, end_ns)).expect("kept");
    }
}

/// Turns of the join over GPUs whose memory changed often and then came to rest, as in a job past its first steps. Each
/// turn follows one tick, which is counted too.
fn join_at_rest(repetitions: u64) {
    let (mut sampler, clock, node) = sampler();
    let total = Rare { memory_total_bytes: Some(140 << 30), ..Rare::default() };
    node.gpus.iter().for_each(|gpu| gpu.set_rare(START_NS, total.clone()));
    let state = SharedState::of(&node, intake().ledger());
    for turn in 0..REST_MS / 100 {
        for n in turn * 100..(turn + 1) * 100 {
            clock.advance_to(START_NS + n * MILLISECOND_NS);
            sampler.tick(clock.now_ns(), |_| ());
        }
        state.advance(&node, clock.now_ns());
    }
    for n in 0..repetitions.cast_signed() {
        clock.advance_to(START_NS + REST_MS * MILLISECOND_NS + n * 250 * MILLISECOND_NS);
        sampler.tick(clock.now_ns(), |_| ());
        black_box(state.advance(&node, clock.now_ns()));
    }
}

fn scrape_text(repetitions: u64) {
    let node = node::busy(8, RUN_MS);
    for _ in 0..repetitions {
        black_box(export::prometheus::encode(node.snapshots.collect()).expect("encoded"));
    }
}

fn scrape_protobuf(repetitions: u64) {
    let node = node::busy(8, RUN_MS);
    for _ in 0..repetitions {
        black_box(export::prometheus::protobuf::encode(node.snapshots.collect()));
    }
}

fn scrape_idle(repetitions: u64) {
    let node = node::idle(RUN_MS);
    for _ in 0..repetitions {
        black_box(export::prometheus::encode(node.snapshots.collect()).expect("encoded"));
    }
}

/// An intake of eight GPUs.
fn intake() -> Arc<Intake> {
    let intake = Intake::new(Limits::default(), Arc::new(Manual::at(START_NS)), Arc::default());
    let device = |gpu: usize| Device { index: gpu.to_string(), uuid: format!("GPU-{gpu}"), ..Device::default() };
    intake.set_devices(&(0..8).map(device).collect::<Vec<_>>());
    Arc::new(intake)
}

/// An event as jobs send it; every second one ends what the one before began.
fn event(n: u64) -> String {
    let event = if n.is_multiple_of(2) { "begin" } else { "end" };
    format!(
        r#"{{"event":"{event}","name":"forward","job":"sender","rank":0,"gpu":0,"step":1234,"memory":{{"allocated":12345678901,"reserved":23456789012,"alloc_retries":0}}}}"#
    )
}

/// The mark that ends a batch: when the intake sees it, the listener stops.
const LAST: &str = r#"{"event":"mark","name":"last","job":"sender","rank":0,"gpu":0}"#;

fn over_http(repetitions: u64) {
    let intake = intake();
    let node = node::idle(100);
    let (stats, recorder) = (Arc::<counts::HttpStats>::default(), Recorder::default());
    let gate = Gate {
        hosts: Hosts::default(),
        guard: None,
        access: Access::Open,
        stats: Arc::clone(&stats),
        refusals: Refusals::default(),
    };
    let snapshots = Snapshots {
        state: SharedState::of(&node.node, intake.ledger()),
        choice: Choice::default(),
        node_name: Arc::default(),
        parts: vec![Arc::clone(&intake) as _],
    };
    let mut routes = web::router(Site::new(snapshots, intake, recorder), Arc::new(gate), true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    for n in 0..repetitions {
        let request = http::Request::post("/api/v1/annotations").body(Body::from(event(n))).expect("a request");
        runtime.block_on(async {
            let Ok(answer) = routes.call(request).await;
            let status = answer.status();
            let body = answer.into_body().collect().await.expect("whole").to_bytes();
            assert!(status.is_success(), "{status}: {body:?}");
        });
    }
}

/// Sends annotations to a listener's socket in batches, and runs the listener until it has read each batch.
fn through(repetitions: u64, path: &Path, intake: &Intake, send: impl Fn(&str), run: impl Fn(&Intake, &AtomicBool)) {
    let stop: Arc<AtomicBool> = Arc::default();
    let seen = Arc::clone(&stop);
    intake.on_mark(Box::new(move |_| seen.store(true, Ordering::Relaxed)));
    for batch in 0..repetitions / AT_ONCE {
        (0..AT_ONCE).for_each(|n| send(&event(batch * AT_ONCE + n)));
        send(LAST);
        stop.store(false, Ordering::Relaxed);
        run(intake, &stop);
        assert!(stop.load(Ordering::Relaxed), "{}", path.display());
    }
}

fn as_datagram(repetitions: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("annotations.sock");
    let door = datagram::Socket::bind(&path).expect("bound");
    let socket = UnixDatagram::unbound().expect("a socket");
    socket.connect(&path).expect("it listens");
    let send = |text: &str| {
        socket.send(text.as_bytes()).expect("there is room");
    };
    through(repetitions, &path, &intake(), send, |intake, stop| door.run(intake, stop));
}

fn over_seqpacket(repetitions: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("annotations.sock");
    let door = seqpacket::Listener::beside(&path).expect("bound");
    // Each run of the listener closes its connections when it ends, so each batch needs a new one.
    let send = |text: &str| {
        SENDER.with_borrow_mut(|sender| {
            let socket = sender.get_or_insert_with(|| connected(door.path()));
            rustix::net::send(&*socket, text.as_bytes(), rustix::net::SendFlags::empty()).expect("there is room");
        })
    };
    through(repetitions, &path, &intake(), send, |intake, stop| {
        door.run(intake, stop);
        SENDER.with_borrow_mut(Option::take);
    });
}

thread_local!(static SENDER: std::cell::RefCell<Option<rustix::fd::OwnedFd>> = const { std::cell::RefCell::new(None) });

fn connected(path: &Path) -> rustix::fd::OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
    let sender = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&sender, &SocketAddrUnix::new(path).expect("a short path")).expect("it listens");
    sender
}

fn replay(repetitions: u64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/h200-ddp");
    for _ in 0..repetitions {
        let replay = Arc::new(Replay::open(&folder, Options::default()).expect("a recording"));
        let played = offline::play(&replay, &(&settings()).into(), |_, _, _| ()).expect("played");
        assert_eq!(played.refused, 0);
    }
}

fn settings() -> Settings {
    Settings::default()
}
