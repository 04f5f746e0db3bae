//! The exported parts of the daemon's memory, compared with the resident memory that the kernel reports.

use crate::daemon::Daemon;
use crate::process::eventually;
use std::collections::BTreeMap;
use std::time::Duration;

const MIB: f64 = 1_048_576.0;
const SOON: Duration = Duration::from_secs(60);

/// Eight GPUs and a job of eight ranks: 914 marks a second.
const SCENARIO: &str = include_str!("../../benches/gpu/resident.toml");

/// The parts by name, and the resident memory of the same scrape, bytes.
fn parts(daemon: &Daemon) -> (BTreeMap<String, f64>, f64) {
    let metrics = daemon.metrics();
    let part = |line: &str| {
        let (part, bytes) = line.strip_prefix("highwater_memory_bytes{part=\"")?.split_once("\"} ")?;
        Some((part.to_owned(), bytes.parse::<f64>().expect("a number")))
    };
    let resident = metrics.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes ")?.parse().ok());
    (metrics.lines().filter_map(part).collect(), resident.expect("a number"))
}

#[test]
fn what_the_daemon_takes_is_accounted_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("eight.toml");
    std::fs::write(&scenario, SCENARIO).expect("written");
    // Nobody listens where requests are to go, so they wait.
    let arguments =
        ["serve", "--source", &format!("sim:{}", scenario.display()), "--set", "otlp.endpoint=http://127.0.0.1:9"];
    let daemon = Daemon::start_with(&arguments, &[("OTEL_METRIC_EXPORT_INTERVAL", "1000")]).ready();
    // Whatever jobs send is kept, and so is what waits to be sent.
    let least = [("events", 0.3), ("ended", 2.0), ("trail", 0.03), ("otlp", 0.5)];
    let (late, resident) = eventually(SOON, "four parts that grow", || {
        let (late, resident) = parts(&daemon);
        least.iter().all(|(part, mib)| late[*part] > mib * MIB).then_some((late, resident))
    });
    let all: f64 = late.values().sum();
    assert_eq!(all, resident, "{late:?}");
    assert_eq!(late.contains_key("free"), cfg!(target_env = "gnu"), "{late:?}");
    // The heap at rest, and stacks.
    assert!(late["other"] > 0.0 && late["other"] < 16.0 * MIB, "{late:?}");
    assert!(late["rings"] > 0.0 && late["readings"] > 0.0 && late["sweeps"] > 0.5 * MIB, "{late:?}");
    assert_eq!(late.get("nvml"), None, "it was not opened");
}
