//! The cost of OTLP in a running daemon, with the targets: CPU, memory, and bytes on the wire.
//!
//! `cargo bench --bench otlp` runs the program repeatedly, each time with another export setup, on eight simulated
//! GPUs that each change 100 times a second and carry one rank of a job. The receiver is in this process.
//! docs/performance.md has the results with their date and machine.
//!
//! The cost of the exporter is the CPU time of its thread: it has exactly one, and no other thread works for it. The
//! CPU time of the whole daemon is printed beside it. The daemon's other threads vary more between two runs than the
//! exporter takes.

mod process;
mod receiver;

use process::{Process, Usage};
use receiver::Receiver;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// From the start to the first measurement: the source is open, the job runs, and one snapshot has been sent.
const WARM_UP: Duration = Duration::from_secs(15);
/// How long a run is measured. The window contains three snapshots, wherever it begins.
const WINDOW: Duration = Duration::from_secs(30);
const GPUS: usize = 8;

/// How the daemon exports.
struct Setup {
    name: &'static str,
    exports: bool,
    spans: bool,
    raw: bool,
    gzip: bool,
}

const SETUPS: [Setup; 6] = [
    Setup { name: "no endpoint", exports: false, spans: false, raw: false, gzip: false },
    Setup { name: "metrics every 10 s", exports: true, spans: false, raw: false, gzip: false },
    Setup { name: "metrics, spans", exports: true, spans: true, raw: false, gzip: false },
    Setup { name: "metrics, raw always", exports: true, spans: false, raw: true, gzip: false },
    Setup { name: "metrics, raw always, gzip", exports: true, spans: false, raw: true, gzip: true },
    Setup { name: "all three, gzip", exports: true, spans: true, raw: true, gzip: true },
];

/// The result of one run.
struct Measured {
    /// CPU of the whole daemon and of the exporter's thread, as shares of one core.
    all: f64,
    exporter: f64,
    resident_bytes: u64,
    wire_bytes_per_second: f64,
    points_per_second: f64,
    missed: f64,
}

fn main() {
    let runs: Vec<Measured> = SETUPS.iter().map(measure).collect();
    println!(
        "OTLP over HTTP, {GPUS} simulated GPUs, each with 100 changes a second and a rank of 5 phases in 0.4 s, {} s each",
        WINDOW.as_secs()
    );
    println!(
        "{:27}{:>12}{:>14}{:>12}{:>12}{:>12}{:>14}",
        "", "daemon", "exporter", "resident", "wire", "points", "ticks missed"
    );
    for (setup, run) in SETUPS.iter().zip(&runs) {
        println!(
            "{:27}{:>10.2} %{:>12.3} %{:>8.1} MiB{:>7.1} kB/s{:>10.0}/s{:>12.2} %",
            setup.name,
            run.all * 100.0,
            run.exporter * 100.0,
            mib(run.resident_bytes as f64),
            run.wire_bytes_per_second / 1e3,
            run.points_per_second,
            run.missed * 100.0
        );
    }
    let [none, metrics, spans, raw, packed, all] = &runs[..] else { unreachable!("as many as there are setups") };
    let added = |run: &Measured| mib(run.resident_bytes as f64 - none.resident_bytes as f64);
    for (name, run) in [("metrics", metrics), ("metrics and spans", spans)] {
        println!("{name}, at 10 s: {:.3} % of a core (figure: at most 1 %)", run.exporter * 100.0);
        println!("{name}, at 10 s: {:+.1} MiB resident (figure: at most 6 MiB)", added(run));
    }
    for (name, run) in [("uncompressed", raw), ("gzip", packed), ("gzip, with spans", all)] {
        let wire = run.wire_bytes_per_second / 1e3;
        println!("raw always, {name}: {:.3} % of a core (figure: at most 3 %)", run.exporter * 100.0);
        println!("raw always, {name}: {wire:.1} kB/s on the wire (figure: at most 250 kB/s uncompressed)");
        println!("raw always, {name}: {:+.1} MiB resident", added(run));
    }
    let alone = (raw.wire_bytes_per_second - metrics.wire_bytes_per_second) / 1e3;
    println!("raw points alone, uncompressed: {alone:.1} kB/s of it");
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

fn measure(setup: &Setup) -> Measured {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("bench.toml");
    std::fs::write(&scenario, scenario_text()).expect("a writable folder");
    let receiver = Receiver::start();
    let mut environment = vec![("OTEL_METRIC_EXPORT_INTERVAL", "10000".to_owned())];
    if setup.exports {
        environment.push(("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://127.0.0.1:{}", receiver.port())));
    }
    environment.push(("OTEL_EXPORTER_OTLP_COMPRESSION", if setup.gzip { "gzip" } else { "none" }.into()));
    let settings = [
        format!("otlp.spans={}", if setup.spans { "all" } else { "off" }),
        format!("otlp.raw={}", if setup.raw { "always" } else { "never" }),
    ];
    let process = Process::start(&scenario, folder.path(), &settings, &environment);
    sleep(WARM_UP);
    let (begun, before, received) = (Instant::now(), process.usage(), receiver.bytes());
    let counts = |process: &Process| {
        let of = |name: &str| process.sum(name);
        (
            of("highwater_otlp_exported_total"),
            of("highwater_sampler_ticks_due_total"),
            of("highwater_sampler_ticks_missed_total"),
        )
    };
    let first = counts(&process);
    sleep(WINDOW);
    let (after, seconds) = (process.usage(), begun.elapsed().as_secs_f64());
    let wire_bytes = receiver.bytes() - received;
    let last = counts(&process);
    assert_eq!(process.sum("highwater_otlp_dropped_total"), 0.0, "{}: points were dropped", setup.name);
    let share = |of: fn(&Usage) -> u64| (of(&after) - of(&before)) as f64 / 1e9 / seconds;
    Measured {
        all: share(|usage| usage.all_ns),
        exporter: share(|usage| usage.exporter_ns),
        resident_bytes: after.resident_bytes,
        wire_bytes_per_second: wire_bytes as f64 / seconds,
        points_per_second: (last.0 - first.0) / seconds,
        missed: (last.2 - first.2) / (last.1 - first.1),
    }
}

/// Eight GPUs, each with 100 changes a second, and a job on all of them whose own memory does not change.
fn scenario_text() -> String {
    let mut text = format!(
        "[[gpus]]\ncount = {GPUS}\n\n[[jobs]]\nname = \"bench\"\nranks = {GPUS}\nstartup = \"500 ms\"\nbase = \"60 GiB\"\n"
    );
    for (name, milliseconds) in [("data", 20), ("forward", 130), ("backward", 190), ("comm", 30), ("optimizer", 30)] {
        text += &format!("[[jobs.phases]]\nname = \"{name}\"\nduration = \"{milliseconds} ms\"\nbusy = 0.9\n");
    }
    for gpu in 0..GPUS {
        // The spike appears and disappears every 20 ms.
        let offset = 2_000_500 + 1_100 * gpu;
        text += &format!(
            "[[spikes]]\ngpu = {gpu}\noffset = \"{offset} us\"\nevery = \"20 ms\"\nduration = \"10 ms\"\nbytes = \"4 GiB\"\n"
        );
    }
    text
}
