//! Jobs that end. Over each transport, a finding on a GPU moves to the next job as soon as that job sends an event.

use crate::daemon::Daemon;
use crate::process::eventually;
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

/// Sends each line that it reads over one transport, then prints `sent`. It runs until it is killed, as a job does.
const SENDER: &str = r#"
import socket, sys, urllib.request
door, where = sys.argv[1:]
if door != "http":
    kind = socket.SOCK_DGRAM if door == "datagram" else socket.SOCK_SEQPACKET
    sender = socket.socket(socket.AF_UNIX, kind)
    sender.connect(where)
for line in sys.stdin.buffer:
    if door == "http":
        urllib.request.urlopen(f"http://{where}/api/v1/annotations", line).read()
    else:
        sender.send(line)
    print("sent", flush=True)
"#;

/// A daemon over a GPU that is full from the start, whichever job runs there.
fn full() -> (Daemon, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("full.toml");
    let text = "[[gpus]]\n[[spikes]]\ngpu = 0\noffset = \"0 s\"\nduration = \"1 h\"\nbytes = \"200 GiB\"\n";
    std::fs::write(&scenario, text).expect("written");
    let source = format!("sim:{}", scenario.display());
    (Daemon::start(&["serve", "--source", &source]).ready(), folder)
}

/// A process that marks steps of one job.
struct Job {
    name: &'static str,
    process: Child,
    says: ChildStdin,
    sent: BufReader<ChildStdout>,
}

impl Job {
    fn start(name: &'static str, door: &str, daemon: &Daemon) -> Self {
        let place = match door {
            "http" => daemon.address().to_owned(),
            "datagram" => daemon.socket().display().to_string(),
            _ => highwater_engine::intake::seqpacket::path_beside(Path::new(&daemon.socket())).display().to_string(),
        };
        let mut process = Command::new("python3")
            .args(["-c", SENDER, door, &place])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let (says, sent) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        Self { name, process, says, sent: BufReader::new(sent) }
    }

    fn say(&mut self, what: Value) {
        let mut event = what;
        (event["job"], event["gpu"]) = (json!(self.name), json!(0));
        writeln!(self.says, "{event}").expect("it reads");
        self.sent.read_line(&mut String::new()).expect("it says that it has sent");
    }

    fn step(&mut self, number: u64) {
        for event in ["begin", "end"] {
            self.say(json!({"event": event, "kind": "step", "step": number}));
        }
    }

    fn kill(mut self) {
        self.process.kill().and_then(|()| self.process.wait()).expect("it ends");
    }
}

/// Waits until the finding that the GPU is full belongs to this job.
fn wait_until_full_for(daemon: &Daemon, job: &str) -> String {
    eventually(PATIENCE, &format!("the GPU is full for {job}"), || {
        let metrics = daemon.metrics();
        let of_job = format!("training_job=\"{job}\"");
        let is_its = |line: &str| {
            line.starts_with("highwater_finding_active{finding=\"low_headroom\"") && line.contains(&of_job)
        };
        metrics.lines().any(is_its).then_some(metrics)
    })
}

/// Runs a first job on the GPU, ends it with `end`, and starts a second one, of which one step is enough.
fn followed_over(door: &str, end: impl FnOnce(Job)) -> String {
    let (daemon, _scenario) = full();
    let mut first = Job::start("first", door, &daemon);
    (0..3).for_each(|number| first.step(number));
    first.say(json!({"event": "begin", "kind": "step", "step": 3}));
    wait_until_full_for(&daemon, "first");
    end(first);
    let mut second = Job::start("second", door, &daemon);
    second.step(0);
    let metrics = wait_until_full_for(&daemon, "second");
    assert!(
        metrics.contains("highwater_job_steps_total{training_job=\"second\",rank=\"0\"} 1"),
        "within one step: {metrics}"
    );
    // The series of the first job can still be scraped.
    assert!(metrics.contains("highwater_job_steps_total{training_job=\"first\",rank=\"0\"} 3"), "{metrics}");
    second.kill();
    metrics
}

fn assert_first_has_exited(metrics: &str) {
    assert!(metrics.contains("highwater_phases_total{outcome=\"exited\"} 1"), "the open step is given up: {metrics}");
    assert!(metrics.contains("highwater_job_info{training_job=\"first\",rank=\"0\"}"), "{metrics}");
}

#[test]
fn a_second_job_over_seqpacket_follows_one_that_was_killed() {
    assert_first_has_exited(&followed_over("seqpacket", Job::kill));
}

#[test]
fn a_second_job_over_datagrams_follows_one_that_was_killed() {
    assert_first_has_exited(&followed_over("datagram", Job::kill));
}

#[test]
fn a_second_job_over_http_follows_one_that_said_so() {
    let exit = |mut job: Job| {
        job.say(json!({"event": "exit"}));
        job.kill();
    };
    assert_first_has_exited(&followed_over("http", exit));
}

#[test]
fn a_second_job_over_http_follows_one_that_has_nothing_open() {
    let rest = |mut job: Job| {
        job.say(json!({"event": "end", "kind": "step", "step": 3}));
        job.kill();
    };
    let (daemon, _scenario) = full();
    let mut first = Job::start("first", "http", &daemon);
    first.say(json!({"event": "begin", "kind": "step", "step": 3}));
    wait_until_full_for(&daemon, "first");
    rest(first);
    let mut second = Job::start("second", "http", &daemon);
    second.step(0);
    wait_until_full_for(&daemon, "second");
    second.kill();
}

#[test]
fn a_script_that_starts_a_program_for_each_mark_keeps_what_it_has_open() {
    let (daemon, _scenario) = full();
    for (event, outcome) in [("begin", "accepted"), ("end", "accepted")] {
        let mut program = Job::start("script", "datagram", &daemon);
        program.say(json!({"event": event, "name": "eval"}));
        program.kill();
        let accepted = if event == "begin" { 1 } else { 2 };
        eventually(PATIENCE, "the event is accepted", || {
            daemon
                .get("/metrics")
                .contains(&format!("highwater_annotations_total{{outcome=\"{outcome}\"}} {accepted}\n"))
                .then_some(())
        });
    }
    assert!(daemon.metrics().contains("highwater_phases_total{outcome=\"exited\"} 0"));
}

#[test]
fn what_a_sender_could_not_send_is_counted() {
    let (daemon, _scenario) = full();
    let mut job = Job::start("first", "datagram", &daemon);
    job.say(json!({"event": "begin", "name": "eval", "lost": 3}));
    job.say(json!({"event": "end", "name": "eval", "lost": 2}));
    eventually(PATIENCE, "the losses are counted", || {
        let uid = rustix::process::getuid().as_raw();
        let series = format!("highwater_annotations_lost_total{{sender=\"uid {uid}\"}} 5\n");
        daemon.metrics().contains(&series).then_some(())
    });
    job.kill();
}
