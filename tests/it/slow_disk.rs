//! A disk that does not answer: the threads that write to it wait, and no others.

use crate::daemon::{Daemon, command};
use crate::libraries;
use crate::process::{Process, eventually};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// How long anything may take on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// A folder on a disk that can be blocked for the programs that are started with its environment.
struct Disk(TempDir);

impl Disk {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    /// From now on nothing that is written to it returns.
    fn block(&self) {
        std::fs::write(self.file("blocked"), "").expect("writable");
    }

    fn unblock(&self) {
        std::fs::remove_file(self.file("blocked")).expect("it was blocked");
    }

    fn environment(&self) -> [(&'static str, String); 2] {
        static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| libraries::build("slow-disk")).to_str().expect("UTF-8");
        [("LD_PRELOAD", library.to_owned()), ("SLOW_DISK", self.0.path().to_str().expect("UTF-8").to_owned())]
    }

    fn daemon(&self, settings: &[&str], more: &[(&str, &str)]) -> Daemon {
        let own = self.environment();
        let environment: Vec<_> =
            own.iter().map(|(name, value)| (*name, value.as_str())).chain(more.iter().copied()).collect();
        let settings: Vec<_> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        Daemon::start_with(&[&["serve", "--source", "sim"], &settings[..]].concat(), &environment).ready()
    }
}

fn value(metrics: &str, sample: &str) -> f64 {
    let value = metrics.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok());
    value.unwrap_or_else(|| panic!("no {sample}"))
}

/// The daemon does all else: it reads GPUs, takes events, finds and answers.
fn assert_works(daemon: &Daemon) {
    let taken = || value(&daemon.metrics(), "highwater_sampler_ticks_taken_total");
    let before = taken();
    eventually(SOON, "200 more ticks", || (taken() > before + 200.0).then_some(()));
    let event = json!({"event": "mark", "name": "checkpoint saved", "job": "train"});
    assert_eq!(daemon.post("/api/v1/annotations", &event).0, 200);
    for path in ["/api/v1/gpus", "/api/v1/jobs", "/api/v1/findings", "/api/v1/captures", "/healthz", "/readyz"] {
        assert_eq!(daemon.ask(path).0, 200, "{path}");
    }
}

fn captures(daemon: &Daemon) -> Vec<Value> {
    let answer: Value = serde_json::from_str(&daemon.get("/api/v1/captures")).expect("JSON");
    answer["captures"].as_array().expect("a list").clone()
}

#[test]
fn a_capture_waits_for_its_disk_and_nothing_else_does() {
    let disk = Disk::new();
    let folder = format!("captures.directory={}", disk.file("captures"));
    let daemon = disk.daemon(&[&folder, "captures.before=1s", "captures.after=200ms", "detect.enabled=false"], &[]);
    disk.block();
    let (status, answer) = daemon.post("/api/v1/captures", &json!({}));
    assert_eq!(status, 202, "{answer}");
    assert_works(&daemon);
    assert_eq!(captures(&daemon)[0]["state"], "writing");
    disk.unblock();
    let ended =
        eventually(SOON, "the capture", || captures(&daemon).into_iter().find(|capture| capture["state"] != "writing"));
    assert_eq!(ended["state"], "complete", "{ended}");
}

#[test]
fn the_queue_waits_for_its_disk_and_nothing_else_does() {
    let disk = Disk::new();
    let queue = format!("otlp.queue_dir={}", disk.file("queue"));
    // Nobody listens where requests are to go, so they wait.
    let daemon = disk.daemon(&[&queue, "otlp.endpoint=http://127.0.0.1:9"], &[("OTEL_METRIC_EXPORT_INTERVAL", "100")]);
    let in_one = |metrics: &str, part: &str| value(metrics, &format!("highwater_otlp_{part}{{signal=\"metrics\"}}"));
    let points = |part: &str| in_one(&daemon.metrics(), part);
    eventually(SOON, "a request in the queue", || (points("queued") > 0.0).then_some(()));
    disk.block();
    // One that was being written when it was blocked may still come; none does after that.
    let mut before = points("produced_total");
    assert_works(&daemon);
    eventually(SOON, "the producer to wait", || {
        let now = points("produced_total");
        assert_works(&daemon);
        std::mem::replace(&mut before, now).eq(&now).then_some(())
    });
    disk.unblock();
    eventually(SOON, "more requests", || (points("queued") > before).then_some(()));
    // More are produced between two scrapes.
    let metrics = daemon.metrics();
    assert_eq!(in_one(&metrics, "produced_total"), in_one(&metrics, "queued"), "nothing is lost");
}

#[test]
fn a_recording_waits_for_its_disk_and_its_command_does_not() {
    let disk = Disk::new();
    let (done, file) = (disk.file("done"), disk.file("file.sqlite"));
    let script = format!("touch {0}; sleep 1; touch {done}; exit 43", disk.file("blocked"));
    let mut run = command();
    run.envs(disk.environment()).args(["run", "-o", &file, "--source", "sim:spike", "--", "sh", "-c", &script]);
    let mut process = Process::start(run);
    eventually(SOON, "the end of the command", || std::fs::exists(&done).unwrap_or(false).then_some(()));
    disk.unblock();
    let status = process.wait(SOON).expect("it ends");
    assert_eq!(status.code(), Some(43), "{}", process.printed());
    let shown = command().args(["report", &file]).output().expect("it runs");
    assert!(shown.status.success(), "{shown:?}");
}

#[test]
fn a_signal_ends_it_although_its_disks_do_not_answer() {
    let disk = Disk::new();
    let settings =
        [format!("captures.directory={}", disk.file("captures")), format!("otlp.queue_dir={}", disk.file("queue"))];
    let settings: Vec<&str> = settings.iter().map(String::as_str).chain(["otlp.endpoint=http://127.0.0.1:9"]).collect();
    let daemon = disk.daemon(&settings, &[("OTEL_METRIC_EXPORT_INTERVAL", "100")]);
    disk.block();
    assert_eq!(daemon.post("/api/v1/captures", &json!({})).0, 202);
    let (status, _) = daemon.stop();
    assert_eq!(status.code(), Some(0));
}
