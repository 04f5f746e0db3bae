//! What the command line refuses, and what it says then.

use crate::daemon::{Daemon, command};
use crate::process::{Killed, behind_python, eventually, hearing_signals};
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long a process may take to end or to print something, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// What it prints on stderr, and whether it succeeds.
fn run(arguments: &[&str]) -> (bool, String) {
    let output = command().args(arguments).output().expect("it runs");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn refused(arguments: &[&str], because: &str) {
    let output = command().args(arguments).output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && printed.contains(because), "{arguments:?}: {printed}");
}

#[test]
fn flags_that_would_have_no_effect_or_make_no_sense_are_refused() {
    refused(&["serve", "--check-config", "--replay-speed", "2"], "--replay-speed: needs --source replay:PATH");
    refused(
        &["serve", "--check-config", "--source", "sim", "--replay-shift-to-now"],
        "--replay-shift-to-now: needs --source replay:PATH",
    );
    for share in ["1.5", "-0.1", "NaN", "most"] {
        refused(&["replay-eval", &format!("--fail-below={share}"), "x"], "is not a share from 0 to 1");
    }
    refused(
        &["serve", "--check-config", "--source", "sim:nope"],
        "neither a shipped scenario (demo, spike, faults, pipeline)",
    );
}

#[test]
fn shells_and_man_get_what_they_need() {
    let printed = |arguments: &[&str]| {
        let output = command().args(arguments).output().expect("it runs");
        assert!(output.status.success(), "{arguments:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    for (shell, has) in
        [("bash", "complete -F _highwater"), ("zsh", "#compdef highwater"), ("fish", "complete -c highwater")]
    {
        let completions = printed(&["completions", shell]);
        assert!(completions.contains(has) && completions.contains("replay-eval"), "{shell}: {completions:.300}");
    }
    let man = printed(&["man"]);
    assert!(man.contains(".TH highwater 1") && man.contains("ring.retention"), "{man:.300}");
}

#[test]
fn localhost_is_an_address_and_other_names_are_not_looked_up() {
    let (is_good, printed) = run(&["serve", "--check-config", "--listen", "localhost:10450"]);
    assert!(is_good, "{printed}");
    refused(&["serve", "--check-config", "--listen", "gpu-7:10450"], "is not ADDRESS:PORT");
}

#[test]
fn a_port_that_is_taken_is_named_with_what_to_do() {
    let daemon = Daemon::start(&["serve", "--source", "sim:demo"]);
    let because = format!("cannot listen on {}: Address already in use", daemon.address());
    let (is_good, printed) =
        run(&["serve", "--source", "sim:demo", "--listen", daemon.address(), "--annotations-socket", "none"]);
    assert!(!is_good && printed.contains(&because) && printed.contains("set another port"), "{printed}");
}

#[test]
fn help_has_the_default_of_every_setting() {
    let output = command().args(["serve", "--help"]).output().expect("it runs");
    let help = String::from_utf8_lossy(&output.stdout);
    assert!(help.contains("ring.retention [HIGHWATER_RING_RETENTION] [default: 10m]"), "{help}");
    assert!(help.contains("otlp.endpoint [HIGHWATER_OTLP_ENDPOINT] [default: not set]"), "{help}");
}

#[test]
fn every_json_answer_ends_its_line() {
    let daemon = Daemon::start(&["serve", "--source", "sim:demo"]).ready();
    let begin = json!({"event": "begin", "name": "p", "job": "j", "gpu": 0});
    assert!(daemon.post("/api/v1/annotations", &begin).1.ends_with("}\n"));
    for path in
        ["gpus", "gpus/0/memory", "jobs", "jobs/j/phases", "jobs/j/layers", "findings", "captures", "jobs/none/phases"]
    {
        let (_, body) = daemon.ask(&format!("/api/v1/{path}"));
        assert!(body.ends_with("}\n") && !body.ends_with("\n\n"), "{path}: {body}");
    }
}

#[test]
fn at_debug_every_refusal_and_every_request_is_logged_with_its_url() {
    let otlp = "otlp.endpoint=http://127.0.0.1:1";
    let daemon =
        Daemon::start_with(&["serve", "--source", "sim:demo", "--set", otlp], &[("RUST_LOG", "highwater=debug")]);
    let bad = json!([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(daemon.post("/api/v1/annotations", &bad).0, 400);
    let refusals = || daemon.printed().matches("annotation refused").count();
    eventually(SOON, "more lines than the usual six", || (refusals() == 10).then_some(()));
    let failed = |line: &str| line.contains("OTLP: not sent") && line.contains("url=http://127.0.0.1:1/v1/traces");
    eventually(SOON, "a failed request with its URL", || daemon.printed().lines().any(failed).then_some(()));
}

#[test]
fn the_log_has_what_rust_log_asks_for_or_says_why_not() {
    let logged = |asked: &str| {
        let demo = command().args(["demo", "--for", "1s", "--listen", "127.0.0.1:0"]).env("RUST_LOG", asked).output();
        String::from_utf8_lossy(&demo.expect("it runs").stderr).into_owned()
    };
    assert!(logged("").contains("INFO"), "the default");
    assert!(!logged("warn").contains("INFO"));
    assert!(logged("warn,highwater::daemon=info").contains("INFO reading"), "of one module");
    let wrong = logged("highwater=loud");
    assert!(wrong.starts_with("RUST_LOG: ") && wrong.contains("using the default, `info`"), "{wrong}");
    assert!(wrong.contains("INFO"), "{wrong}");
}

/// The lines that the demo prints below a heading, as the reader would paste them.
fn printed_commands(printed: &str, heading: &str) -> String {
    let below = printed.split(heading).nth(1).unwrap_or_else(|| panic!("no `{heading}`: {printed}"));
    below.lines().skip(1).map_while(|line| line.strip_prefix("  ")).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_demos_python_job_runs_as_printed_and_a_closed_terminal_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("printed");
    let mut demo = command();
    demo.args(["demo", "--listen", "127.0.0.1:0"]).env("TMPDIR", folder.path()).env_remove("XDG_RUNTIME_DIR");
    let mut demo = hearing_signals(&demo);
    demo.stdout(std::fs::File::create(&out).expect("a file")).stderr(Stdio::null()).stdin(Stdio::null());
    let mut demo = Killed(demo.spawn().expect("it starts"));
    let printed = || std::fs::read_to_string(&out).expect("text");
    let commands = eventually(SOON, "the job", || {
        printed().contains("example.py").then(|| printed_commands(&printed(), "Mark the steps of a Python job"))
    });
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut job = Command::new("sh");
    job.args(["-c", &format!("{commands} --steps 3 --seconds 0.2")]).current_dir(root);
    assert!(job.status().expect("it runs").success(), "{commands}");
    let address =
        printed().split("open  ").nth(1).and_then(|rest| rest.split('/').nth(2)).expect("an address").to_owned();
    let metrics = || {
        let got = ureq::get(&format!("http://{address}/metrics")).call().expect("an answer");
        got.into_body().read_to_string().expect("text")
    };
    eventually(SOON, "the job's steps", || {
        let is_its = |line: &str| {
            line.starts_with("highwater_job_steps_total{training_job=\"example\",") && line.ends_with(" 3")
        };
        metrics().lines().any(is_its).then_some(())
    });
    rustix::process::kill_process(rustix::process::Pid::from_child(&demo.0), rustix::process::Signal::HUP)
        .expect("sent");
    let status = eventually(SOON, "its end", || demo.0.try_wait().expect("it is our child"));
    assert!(status.success(), "SIGHUP ends it as SIGTERM does: {status}");
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).expect("listed").map(|entry| entry.expect("one").file_name()).collect();
    assert_eq!(left, ["printed"], "its folder is gone");
}

/// What a short run prints if its standard streams are a terminal.
fn on_a_terminal(variables: &[(&str, &str)]) -> String {
    let mut demo = command();
    demo.args(["demo", "--for", "1s", "--listen", "127.0.0.1:0"]);
    let mut terminal = behind_python("import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)", &demo);
    terminal.env_remove("NO_COLOR").env("RUST_LOG", "info").envs(variables.iter().copied());
    let output = terminal.stdin(Stdio::null()).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_log_has_colors_on_a_terminal_unless_no_color_is_set() {
    // As no-color.org has it: an empty value is as good as none.
    for (variables, colors) in [(&[][..], true), (&[("NO_COLOR", "")][..], true), (&[("NO_COLOR", "1")][..], false)] {
        let printed = on_a_terminal(variables);
        let logged = printed.lines().find(|line| line.contains("INFO")).expect("a line of the log");
        assert_eq!(logged.contains("\u{1b}["), colors, "{variables:?}: {logged:?}");
    }
    let piped = command().args(["demo", "--for", "1s", "--listen", "127.0.0.1:0"]).env("RUST_LOG", "info").output();
    let piped = String::from_utf8_lossy(&piped.expect("it runs").stderr).into_owned();
    assert!(piped.contains("INFO") && !piped.contains('\u{1b}'), "{piped:?}");
}
