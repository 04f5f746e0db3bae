//! Jobs that end. Over each transport, a finding on a GPU moves to the next job as soon as that job sends an event.

use crate::daemon::Daemon;
use crate::process::eventually;
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
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

/// A control group whose files a test writes, in the place where the kernel says that the senders of the test are.
struct Counted {
    root: tempfile::TempDir,
    folder: PathBuf,
    version: u32,
}

impl Counted {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let own = std::fs::read_to_string("/proc/self/cgroup").expect("Linux");
        let path = |controllers: &str| {
            let has = |all: &str| {
                if controllers.is_empty() { all.is_empty() } else { all.split(',').any(|one| one == controllers) }
            };
            let lines = own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
            lines.filter(|(all, _)| has(all)).map(|(_, path)| path.trim_start_matches('/').to_owned()).next()
        };
        let one = path("memory").map(|path| (1, root.path().join("memory").join(path)));
        let (version, folder) = one.unwrap_or_else(|| (2, root.path().join(path("").expect("a group"))));
        std::fs::create_dir_all(&folder).expect("made");
        let counted = Self { root, folder, version };
        counted.kill(0);
        counted
    }

    /// From now on that many processes were killed, at a limit of 8 GiB.
    fn kill(&self, count: u64) {
        let files: [(&str, String); 3] = match self.version {
            1 => [
                ("memory.failcnt", count.to_string()),
                ("memory.limit_in_bytes", (8_u64 << 30).to_string()),
                ("memory.oom_control", format!("oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")),
            ],
            _ => [
                ("memory.events.local", format!("oom {count}\n")),
                ("memory.max", (8_u64 << 30).to_string()),
                ("memory.events", format!("oom {count}\noom_kill {count}\n")),
            ],
        };
        for (name, text) in files {
            // Whole, however the daemon reads meanwhile.
            let new = self.folder.join("new");
            std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, self.folder.join(name))).expect("written");
        }
    }
}

fn wait_until_read(daemon: &Daemon) {
    eventually(PATIENCE, "the control group is read", || {
        daemon.metrics().contains("highwater_cgroups_read 1\n").then_some(())
    });
}

/// The one finding of this kind.
fn finding(daemon: &Daemon, kind: &str) -> Value {
    eventually(PATIENCE, "the finding", || {
        let answer: Value = serde_json::from_str(&daemon.get("/api/v1/findings")).expect("JSON");
        let of_kind = |found: &&Value| found["finding"] == kind;
        answer["findings"].as_array().expect("a list").iter().find(of_kind).cloned()
    })
}

#[test]
fn a_rank_that_the_kernel_kills_for_want_of_host_memory_is_a_finding_with_the_limit() {
    for door in ["seqpacket", "datagram"] {
        let counted = Counted::new();
        let cgroups = format!("host.cgroups={}", counted.root.path().display());
        let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", &cgroups]).ready();
        let mut job = Job::start("eats", door, &daemon);
        (0..3).for_each(|number| job.step(number));
        job.say(json!({"event": "begin", "kind": "step", "step": 3}));
        job.say(json!({"event": "begin", "name": "data"}));
        wait_until_read(&daemon);
        counted.kill(1);
        job.kill();
        let found = finding(&daemon, "host_oom");
        let expected = "Rank 0 of eats ran out of host memory in data of step 3: its limit of 8.0 GiB was reached.";
        assert_eq!((&found["what"], &found["severity"]), (&json!(expected), &json!("critical")), "{door}: {found}");
        let metrics = daemon.metrics();
        assert!(metrics.contains("highwater_incident_active{cause=\"host_memory\""), "{metrics}");
        assert!(metrics.contains("highwater_phases_total{outcome=\"exited\"} 2\n"), "a step and a phase: {metrics}");
        eventually(PATIENCE, "nothing is read without jobs", || {
            daemon.metrics().contains("highwater_cgroups_read 0\n").then_some(())
        });
    }
}

#[test]
fn a_job_that_is_killed_otherwise_is_none() {
    let counted = Counted::new();
    counted.kill(7);
    let cgroups = format!("host.cgroups={}", counted.root.path().display());
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", &cgroups]).ready();
    let mut job = Job::start("first", "seqpacket", &daemon);
    job.step(0);
    job.say(json!({"event": "begin", "kind": "step", "step": 1}));
    wait_until_read(&daemon);
    job.kill();
    eventually(PATIENCE, "its end", || {
        daemon.metrics().contains("highwater_phases_total{outcome=\"exited\"} 1").then_some(())
    });
    // What its end is due to is marked before the end is counted, and found in the next turn of the detectors, as the other job's.
    let mut other = Job::start("other", "seqpacket", &daemon);
    other.step(0);
    other.say(json!({"event": "mark", "name": "oom"}));
    finding(&daemon, "oom");
    let found = daemon.get("/api/v1/findings");
    assert!(!found.contains("host_oom"), "{found}");
    other.kill();
}

/// A control group that is removed when the test is over.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // Fails only while a process is in it.
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Where this process may make a control group: as root, with version 1.
#[test]
fn a_job_that_a_real_limit_ends_is_a_finding() {
    let group = PathBuf::from(format!("/sys/fs/cgroup/memory/highwater-test-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir(&group) {
        eprintln!("NOT TESTED: a real limit of memory, because {} cannot be made: {error}", group.display());
        return;
    }
    let _removed = Removed(group.clone());
    std::fs::write(group.join("memory.limit_in_bytes"), (64_u64 << 20).to_string()).expect("a limit");
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    let mut job = Job::start("eats", "seqpacket", &daemon);
    std::fs::write(group.join("cgroup.procs"), job.process.id().to_string()).expect("moved");
    job.step(0);
    job.say(json!({"event": "begin", "kind": "step", "step": 1}));
    wait_until_read(&daemon);
    // A line that needs more than the limit.
    let _killed = (0..256).try_for_each(|_| job.says.write_all(&[b' '; 1 << 20]));
    job.process.wait().expect("it ends");
    let found = finding(&daemon, "host_oom");
    let expected = "Rank 0 of eats ran out of host memory in step 1: its limit of 64 MiB was reached.";
    assert_eq!(found["what"], json!(expected), "{found}");
    assert!(found["why"].as_str().expect("text").contains("/highwater-test-"), "{found}");
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
