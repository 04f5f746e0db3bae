//! How the daemon starts and ends, and what it reports without a GPU.

use crate::daemon::{Daemon, command};
use crate::fake_nvml::Control;
use crate::process::{Killed, eventually};
use crate::terminal::Terminal;
use rustix::process::{Pid, Signal};
use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn without_a_driver_it_says_so_and_serves() {
    let daemon = Daemon::start(&["serve", "--nvml-library", "/nonexistent/libnvidia-ml.so.1"]);
    let begun = Instant::now();
    let metrics = loop {
        let metrics = daemon.metrics();
        if metrics.contains("highwater_source_error") || begun.elapsed() > Duration::from_secs(20) {
            break metrics;
        }
        std::thread::yield_now();
    };
    assert!(metrics.lines().any(|line| line == "highwater_nvml_up 0"), "{metrics}");
    assert!(metrics.contains("highwater_source_error{reason=\"library_missing\"} 1"), "{metrics}");
    assert!(!metrics.contains("highwater_gpu_"), "nothing is simulated unasked");
    assert_eq!(daemon.ask("/healthz").0, 200);
    let (status, why) = daemon.ask("/readyz");
    assert_eq!(status, 503);
    assert!(why.contains("/nonexistent/libnvidia-ml.so.1"), "{why}");
    let (status, why) = daemon.ask("/api/v1/gpus");
    assert!(status == 503 && why.contains("/nonexistent/libnvidia-ml.so.1"), "{why}");
}

/// In a container only a new one gets another library, so the kubelet must find out.
#[test]
fn without_a_library_it_asks_to_be_restarted_where_that_helps() {
    let missing = ["--nvml-library", "/nonexistent/libnvidia-ml.so.1"];
    let daemon = Daemon::start(&["serve", missing[0], missing[1], "--set", "health.restart_after=1s"]);
    let why = eventually(SOON, "not alive", || Some(daemon.ask("/healthz")).filter(|(status, _)| *status == 503)).1;
    assert!(why.contains("for 1s and longer") && why.contains(missing[1]), "{why}");
    assert!(daemon.metrics().contains("highwater_nvml_up 0"), "it goes on to answer");
}

/// The daemon is ready while one GPU answers, and not ready while none does, however many there were.
#[test]
fn it_is_not_ready_while_no_gpu_answers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let fake = Control::new(folder.path());
    let gpus = |lost: [bool; 2]| serde_json::json!({"gpus": [{"lost": lost[0]}, {"lost": lost[1]}]});
    fake.put(&gpus([false, false]));
    let library = fake.library().display().to_string();
    let daemon = Daemon::start(&["serve", "--nvml-library", &library]).ready();
    let is_down = |gpu: u32| {
        let sample = format!("highwater_gpu_up{{gpu=\"{gpu}\"");
        daemon.metrics().lines().any(|line| line.starts_with(&sample) && line.ends_with(" 0"))
    };
    fake.put(&gpus([false, true]));
    eventually(SOON, "the loss of one", || is_down(1).then_some(()));
    assert_eq!(daemon.ask("/readyz").0, 200);
    fake.put(&gpus([true, true]));
    let why = eventually(SOON, "no GPU", || Some(daemon.ask("/readyz")).filter(|(status, _)| *status == 503)).1;
    assert!(why.contains("no GPU answers: 0: ") && why.contains("; 1: "), "{why}");
    assert_eq!(daemon.ask("/healthz").0, 200, "a restart would not help");
}

#[test]
fn it_goes_on_when_nobody_reads_its_log_any_more() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let socket = folder.path().join("annotations.sock");
    let mut serve = command();
    serve.args(["serve", "--source", "sim", "--listen", "127.0.0.1:0", "--annotations-socket"]).arg(&socket);
    serve.env("XDG_STATE_HOME", folder.path()).stderr(std::process::Stdio::piped());
    let mut child = Killed(serve.spawn().expect("it starts"));
    let mut log = BufReader::new(child.0.stderr.take().expect("a pipe")).lines();
    let address = log.find_map(|line| Some(line.expect("a line").split_once("listening on ")?.1.to_owned()));
    let metrics = format!("{}/metrics", address.expect("it listens"));
    // Nothing reads the log any more, and each of these datagrams causes a line.
    drop(log);
    let sender = UnixDatagram::unbound().expect("a socket");
    let begun = Instant::now();
    let printed = "highwater_annotations_total{outcome=\"malformed\"} 3";
    for _ in 0..3 {
        sender.send_to(b"not json", &socket).expect("the socket is there");
    }
    while !ureq::get(&metrics).call().expect("metrics").body_mut().read_to_string().expect("text").contains(printed) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the thread that takes annotations is gone");
        std::thread::yield_now();
    }
    rustix::process::kill_process(Pid::from_child(&child.0), Signal::TERM).expect("it runs");
    assert!(child.0.wait().expect("it ends").success());
}

#[test]
fn sigterm_ends_it_within_two_seconds() {
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    daemon.metrics();
    let socket = daemon.socket();
    assert!(socket.exists());
    let (status, took) = daemon.stop();
    assert!(status.success(), "{status}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(!socket.exists(), "the socket is left behind");
}

/// SIGTERM may come as soon as the daemon logs that it listens.
#[test]
fn a_signal_that_comes_at_once_ends_it_as_any_other() {
    for _ in 0..10 {
        let daemon = Daemon::start(&["serve", "--source", "sim:spike"]);
        let socket = daemon.socket();
        assert!(daemon.stop().0.success());
        assert!(!socket.exists(), "the socket is left behind");
    }
}

#[test]
fn the_demo_ends_by_itself_and_has_said_what_to_look_at() {
    let output = command().args(["demo", "--for", "1s", "--listen", "127.0.0.1:0"]).output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for part in ["/metrics", "curl", "moe-tight", "used GiB"] {
        assert!(printed.contains(part), "{part} is not in: {printed}");
    }
    // Nor does its end cause a message about a refused or unheard annotation.
    let logged = String::from_utf8_lossy(&output.stderr);
    assert!(!logged.contains("refused") && !logged.contains("was lost"), "{logged}");
}

/// The command that it prints must work: an address that is not loopback accepts nothing without a token.
#[test]
fn the_demo_on_all_addresses_shows_what_works_there() {
    let output = command().args(["demo", "--for", "1s", "--listen", "0.0.0.0:0"]).output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(printed.contains("http://localhost:") && !printed.contains("0.0.0.0"), "{printed}");
    assert!(printed.contains("annotations.token_file") && !printed.contains(" -d "), "{printed}");
}

#[test]
fn two_daemons_do_not_share_a_socket() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]);
    let socket = daemon.socket().display().to_string();
    let mut second = command();
    second.args(["serve", "--source", "sim:spike", "--listen", "127.0.0.1:0", "--annotations-socket", &socket]);
    let output = second.output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && printed.contains("another daemon listens on it"), "{printed}");
}

#[test]
fn unknown_paths_and_methods_are_problems() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike"]).ready();
    let (status, body) = daemon.ask("/nothing");
    assert_eq!(status, 404);
    assert!(body.contains("\"title\":\"Not Found\""), "{body}");
    assert_eq!(daemon.ask("/api/v1/annotations").0, 405);
    assert_eq!(daemon.ask("/api/v1/gpus/7/memory").0, 404);
    assert_eq!(daemon.ask("/api/v1/gpus/0/memory?from=yesterday").0, 400);
    assert_eq!(daemon.ask("/api/v1/jobs/nobody/phases").0, 404);
}

/// An attacker who knows the demo's process ID prepares the folder that it once wrote to.
#[test]
fn the_demo_writes_to_nothing_that_others_prepared_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (victim, there) = (folder.path().join("victim"), folder.path().join("tmp"));
    std::fs::write(&victim, "bytes of somebody else").expect("written");
    std::fs::create_dir(&there).expect("made");
    let prepare = "mkdir -p \"$TMPDIR/highwater-demo-$$/captures\" && cd \"$TMPDIR/highwater-demo-$$/captures\" \
                   && ln -s \"$VICTIM\" .reserve && ln -s \"$VICTIM\" .lock && exec \"$0\" \"$@\"";
    let mut demo = std::process::Command::new("sh");
    demo.args(["-c", prepare, env!("CARGO_BIN_EXE_highwater"), "demo", "--for", "8s", "--listen", "127.0.0.1:0"]);
    demo.env_clear().env("TMPDIR", &there).env("VICTIM", &victim).env("PATH", std::env::var_os("PATH").expect("one"));
    demo.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
    let mut child = Killed(demo.spawn().expect("it starts"));
    let log = BufReader::new(child.0.stderr.take().expect("a pipe")).lines();
    let mut log = log.map(|line| line.expect("a line"));
    let address = log.find_map(|line| Some(line.split_once("listening on ")?.1.to_owned())).expect("it listens");
    let is_prepared = |name: &str| name.len() < "highwater-demo-0123456789abcdef".len();
    let own = crate::process::eventually(Duration::from_secs(20), "a folder of its own", || {
        let names = std::fs::read_dir(&there).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.into_iter().find(|name| !is_prepared(name)).map(|name| there.join(name))
    });
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&own).expect("there").permissions());
    assert_eq!(mode & 0o777, 0o700);
    // A capture needs the reserve.
    let captures = format!("{}/api/v1/captures", address.trim());
    crate::process::eventually(Duration::from_secs(20), "a capture", || {
        let asked = crate::daemon::agent().post(&captures).send_json(serde_json::json!({"seconds_after": 0})).ok()?;
        (asked.status() == 202).then_some(())
    });
    crate::process::eventually(Duration::from_secs(20), "a reserve of its own", || {
        (std::fs::metadata(own.join("captures/.reserve")).ok()?.len() == 1 << 20).then_some(())
    });
    rustix::process::kill_process(Pid::from_child(&child.0), Signal::TERM).expect("it runs");
    assert!(child.0.wait().expect("it ends").success());
    assert_eq!(std::fs::read_to_string(&victim).expect("there"), "bytes of somebody else");
    assert!(!own.exists(), "{}", own.display());
}

#[test]
fn in_a_terminal_a_line_of_the_log_takes_the_place_of_the_demos_status() {
    let terminal = Terminal::open(100, 40);
    let mut command = command();
    command.args(["demo", "--set", "listen=127.0.0.1:0"]).env("NO_COLOR", "1");
    let mut child = terminal.attach_errors(&mut command).spawn().expect("it starts");
    drop(command);
    eventually(Duration::from_secs(60), "a status and a finding", || {
        terminal.has("moe-tight step 2").and(terminal.has(" WARN "))
    });
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).expect("there");
    child.wait().expect("it ends");
    let shown = terminal.close();
    for line in shown.lines().filter(|line| line.contains(" WARN ")) {
        let own = line.rsplit("\x1b[K").next().unwrap_or_default();
        assert!(own.starts_with("20") && own.contains("Z  WARN "), "glued to a status: {line:?}");
    }
    let status = shown.split("\r\x1b[K").find(|line| line.contains("moe-tight step ")).expect("a status");
    assert!(status.chars().count() < 100, "{status}");
}
