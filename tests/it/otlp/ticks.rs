//! Daemons with their real threads, side by side: one whose receiver accepts everything, and others whose receiver does
//! not. They run on one machine at the same time, so all of them miss ticks if it lacks CPU.

use super::collector::{Collector, Mode};
use crate::collector::Port;
use crate::daemon::Daemon;
use crate::process::eventually;
use crate::relay::Relay;
use std::time::Duration;
use tokio::runtime::Runtime;

const WITHIN: Duration = Duration::from_secs(120);
/// How many ticks of each daemon one measurement covers.
const TICKS: f64 = 15_000.0;
/// How many measurements there are at most.
const MOST_LOOKS: usize = 3;
/// How much more an outage may miss than no outage: half as much again, and this share of the ticks due. On a busy
/// machine two daemons without an outage differ by as much.
const MOST_MORE: f64 = 0.02;

#[test]
fn an_outage_makes_no_tick_late() {
    let runtime = Runtime::new().expect("a runtime");
    let (healthy, port) = runtime.block_on(Collector::on_tcp());
    let (busy, busy_port) = runtime.block_on(Collector::on_tcp());
    busy.set(Mode::Unavailable(Duration::ZERO));
    let black_hole = Relay::to(port);
    black_hole.lose();
    let refusing = Port::reserve();
    let names = ["takes", "refuses", "black hole", "503"];
    let daemons = [port, refusing.number, black_hole.port(), busy_port].map(pushing);
    // A daemon may lose its core for a moment by chance. The next measurement then hits another daemon.
    let mut always_more: Vec<&str> = names[1..].to_vec();
    for _ in 0..MOST_LOOKS {
        let shares = missed_shares(&daemons);
        println!("{names:?}: missed {shares:.5?}");
        let has_more = |name: &&str| {
            let share = names.iter().zip(&shares).find(|(of, _)| *of == name).map_or(0.0, |(_, share)| *share);
            share > 1.5 * shares[0] + MOST_MORE
        };
        always_more.retain(has_more);
        if always_more.is_empty() {
            break;
        }
    }
    assert!(always_more.is_empty(), "{always_more:?} miss more ticks than without an outage");
    let queued: Vec<f64> = daemons.iter().map(|daemon| sum(daemon, "highwater_otlp_queued{")).collect();
    assert!(sum(&daemons[0], "highwater_otlp_exported_total{signal=\"raw\"}") > 0.0);
    assert!(healthy.received(|received| !received.metrics.is_empty()));
    for (name, queued) in names.iter().zip(&queued).skip(1) {
        assert!(*queued > 0.0, "{name}: nothing is queued");
    }
    for daemon in &daemons {
        let counted = sum(daemon, "highwater_otlp_dropped_total");
        assert_eq!(counted, 0.0, "nothing overflows in this time");
    }
}

/// A daemon that pushes everything, ten times a second, and reads every millisecond however busy the machine is.
fn pushing(port: u16) -> Daemon {
    let endpoint = format!("otlp.endpoint=http://127.0.0.1:{port}");
    let arguments = ["serve", "--source", "sim", "--set", "sampling.max_period=1ms", "--set", "otlp.raw=always"];
    Daemon::start_with(
        &[&arguments[..], &["--set", &endpoint]].concat(),
        &[("OTEL_METRIC_EXPORT_INTERVAL", "100"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")],
    )
}

/// The share of the next ticks that each daemon misses.
fn missed_shares(daemons: &[Daemon]) -> Vec<f64> {
    let counts = || daemons.iter().map(|daemon| (due(daemon), missed(daemon))).collect::<Vec<_>>();
    let before = counts();
    let all = |daemons: &[Daemon]| daemons.iter().zip(&before).all(|(daemon, (from, _))| due(daemon) >= from + TICKS);
    eventually(WITHIN, "all ticks", || all(daemons).then_some(()));
    let share =
        |((to, missed), (from, missed_before)): ((f64, f64), &(f64, f64))| (missed - missed_before) / (to - from);
    counts().into_iter().zip(&before).map(share).collect()
}

fn missed(daemon: &Daemon) -> f64 {
    sum(daemon, "highwater_sampler_ticks_missed_total")
}

fn due(daemon: &Daemon) -> f64 {
    sum(daemon, "highwater_sampler_ticks_due_total")
}

/// The sum of the samples that begin with `prefix`.
fn sum(daemon: &Daemon, prefix: &str) -> f64 {
    let metrics = daemon.get("/metrics");
    let samples = metrics.lines().filter(|line| line.starts_with(prefix)).filter_map(|line| line.rsplit_once(' '));
    samples.map(|(_, value)| value.parse::<f64>().expect("a number")).sum()
}
