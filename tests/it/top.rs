//! `highwater top`: in a terminal, for scripts, beside a daemon and without one.

use crate::daemon::{Daemon, command, wide};
use crate::process::eventually;
use crate::terminal::Terminal;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::process::{Output, Stdio};
use std::time::Duration;

/// How long something may take on a busy machine.
const WITHIN: Duration = Duration::from_secs(60);

/// One picture, without a terminal.
fn once(arguments: &[&str]) -> Output {
    let mut command = command();
    command.args(["top", "--once"]).args(arguments).env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
    command.output().expect("it runs")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[test]
fn one_picture_without_a_daemon_has_the_gpus_and_no_escape_sequences() {
    let picture = text(&once(&["--source", "sim:demo"]));
    let head = picture.lines().next().unwrap_or_default();
    assert!(head.starts_with("highwater top  sim:demo · no daemon: without marks of jobs"), "{head}");
    assert!(picture.contains("\n3 ") && !picture.contains('\x1b'), "{picture}");
    assert!(
        !picture.contains('?') && picture.contains(" %") && picture.contains("/700"),
        "everything has been read: {picture}"
    );
    assert!(picture.lines().all(|line| line.chars().count() <= 160 && !line.ends_with(' ')), "{picture}");
}

#[test]
fn beside_a_daemon_processes_have_their_ranks_and_what_is_wrong_is_said() {
    let (_folder, source) = wide(0..4, "offset = \"2 s\"\nfor = \"1 h\"");
    let daemon = Daemon::start(&["serve", "--source", &source]);
    let via = format!("--via=http://{}", daemon.address());
    let picture = eventually(WITHIN, "an incident is shown", || {
        Some(text(&once(&[&via]))).filter(|picture| picture.contains("wide: GPU 0 had only"))
    });
    assert!(picture.contains(" incident") && picture.contains("\n          → "), "{picture}");
    let rows: Vec<Vec<&str>> = picture
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|row| row.contains(&"wide"))
        .collect();
    for rank in ["0", "1", "2", "3"] {
        let is_its = |row: &&Vec<&str>| row.get(2) == Some(&rank) && row.get(5) == Some(&rank);
        assert!(rows.iter().any(|row| is_its(&row)), "rank {rank} on its GPU: {picture}");
    }
    let json: serde_json::Value = serde_json::from_str(&text(&once(&[&via, "--json"]))).expect("JSON");
    assert_eq!(json["gpus"]["gpus"].as_array().map(Vec::len), Some(4));
    assert!(
        json["gpus"]["gpus"][0]["memory_peak_bytes"].as_u64() >= json["gpus"]["gpus"][0]["memory_used_bytes"].as_u64()
    );
}

#[test]
fn what_cannot_be_shown_is_an_error_that_names_it() {
    let nobody = once(&["--via", "http://127.0.0.1:1"]);
    let error = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(!nobody.status.success() && error.contains("http://127.0.0.1:1"), "{error}");
    let output = command().arg("top").stdin(Stdio::null()).output().expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), error.contains("--once")), (Some(2), true), "{error}");
}

/// Whether a terminal shows what is typed: not while keys are read one by one.
fn echoes(terminal: &File) -> bool {
    // SAFETY: a structure of plain numbers, of which every bit pattern is a value, filled by the call.
    let mut settings: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the structure outlives the call.
    assert_eq!(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut settings) }, 0);
    settings.c_lflag & libc::ECHO != 0
}

#[test]
fn in_a_terminal_it_fills_the_screen_takes_keys_and_leaves_the_terminal_as_it_was() {
    for end in [&b"q"[..], b"\x03"] {
        let mut terminal = Terminal::open(100, 30);
        let mut command = command();
        command.args(["top", "--source", "sim:demo"]).env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
        let mut child = terminal.attach(&mut command).stderr(Stdio::piped()).spawn().expect("it starts");
        // It has the program's end too, which must be closed for the other end to be.
        drop(command);
        assert!(echoes(&terminal.person));
        eventually(WITHIN, "the other screen has a picture", || {
            terminal.has("q quit").and(terminal.has("\x1b[?1049h"))
        });
        assert!(!echoes(&terminal.person), "keys come one by one");
        assert!(terminal.has("\x1b[32m").is_some(), "it has colours");
        terminal.person.write_all(b"h").expect("a key");
        eventually(WITHIN, "help", || terminal.has("page up, page down"));
        terminal.person.write_all(b"s").expect("a key");
        terminal.person.write_all(end).expect("a key");
        let status = child.wait().expect("it ends");
        assert!(status.success(), "{status}");
        eventually(WITHIN, "the first screen is back", || terminal.has("\x1b[?25h\x1b[?1049l"));
        assert!(echoes(&terminal.person), "the terminal is as it was");
        let shown = terminal.close();
        let lines = shown.split("\x1b[H").nth(1).map_or(0, |picture| picture.lines().count());
        assert_eq!(lines, 30, "a picture has as many lines as the terminal");
    }
}
