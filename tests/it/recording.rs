//! `run` and `record`: what a command gets, what it returns, and what is left in the file.

use crate::daemon::{Daemon, command};
use crate::process::{Process, behind_python, eventually, hearing_signals};
use crate::tools::{root, skip};
use rusqlite::Connection;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// How long anything may take on a busy machine.
const SOON: Duration = Duration::from_secs(30);

/// `highwater run` on simulated GPUs, up to the command.
fn run(folder: &Path, arguments: &[&str]) -> Command {
    run_of("sim:spike", folder, arguments)
}

fn run_of(source: &str, folder: &Path, arguments: &[&str]) -> Command {
    let mut run = command();
    run.arg("run").arg("-o").arg(folder.join("file.sqlite")).args(["--source", source]).args(arguments);
    run
}

fn output(folder: &Path, arguments: &[&str]) -> Output {
    run(folder, arguments).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_commands_status_is_returned_as_a_shell_returns_it() {
    let cannot_run = root().join("README.md").display().to_string();
    let cases: [(&[&str], i32); 8] = [
        (&["true"], 0),
        (&["--", "false"], 1),
        (&["sh", "-c", "exit 43"], 43),
        (&["sh", "-c", "kill -KILL $$"], 137),
        (&["sh", "-c", "kill -TERM $$"], 143),
        (&["no-such-command-anywhere"], 127),
        (&[&cannot_run], 126),
        // A child that outlives the command is not waited for, as without `run`.
        (&["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $! > \"$TMPDIR/left\"; exit 5"], 5),
    ];
    for (arguments, code) in cases {
        let folder = tempfile::tempdir().expect("a folder");
        let output = run(folder.path(), arguments).env("TMPDIR", folder.path()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}: standard output is the command's");
        let is_run = !matches!(code, 126 | 127);
        assert_eq!(folder.path().join("file.sqlite").exists(), is_run, "{arguments:?}");
        assert_eq!(text(&output.stderr).contains("reached at"), is_run, "{arguments:?}: {output:?}");
        if let Ok(left) = std::fs::read_to_string(folder.path().join("left")) {
            let pid = rustix::process::Pid::from_raw(left.trim().parse().expect("a number")).expect("not 0");
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is still there");
        }
    }
}

/// Batch systems limit the size of files. The kernel's signal would end the recorder and leave the command behind.
#[test]
fn a_limit_on_the_size_of_files_costs_the_recording_and_not_the_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let writes = "head -c 1000000 /dev/zero >\"$TMPDIR/large\"; echo $?; sleep 3; exit 43";
    // 150 KiB: there is room for its beginning.
    let mut limited = limited("ulimit -f 300", run_of("sim:demo", folder.path(), &["sh", "-c", writes]));
    let output = limited.env("TMPDIR", folder.path()).output().expect("it runs");
    assert_eq!(output.status.code(), Some(43), "{output:?}");
    // What the command does beyond the limit ends it as without `run`: 128 and SIGXFSZ.
    assert_eq!(text(&output.stdout), "153\n", "{output:?}");
    assert!(text(&output.stderr).contains("file.sqlite: disk I/O error"), "it says what it lacks: {output:?}");
}

/// Sandboxes of batch systems may lack `/proc`. The test needs a mount namespace, which some machines do not permit.
#[test]
fn where_proc_is_not_mounted_the_command_is_recorded_without_marks() {
    let unshare = |arguments: &[&str]| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount"]).args(arguments);
        unshare
    };
    if !unshare(&["mount", "-t", "tmpfs", "none", "/proc"]).output().is_ok_and(|tried| tried.status.success()) {
        return skip("`unshare --user --map-root-user --mount` is not permitted");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let run = run(folder.path(), &["sh", "-c", "echo \"${HIGHWATER_ANNOTATIONS_SOCKET-none}\"; exit 43"]);
    let program: Vec<&str> =
        std::iter::once(run.get_program()).chain(run.get_args()).map(|part| part.to_str().expect("UTF-8")).collect();
    let mut hidden = unshare(&["sh", "-c", "mount -t tmpfs none /proc && exec \"$0\" \"$@\""]);
    let output = hidden.args(program).env_remove("HIGHWATER_ANNOTATIONS_SOCKET").output().expect("it runs");
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(43), "none\n"), "{output:?}");
    let says = "highwater: marks are not recorded: ";
    let (error, why) = (text(&output.stderr), "because /proc is not mounted");
    assert!(error.matches(says).count() == 1 && error.contains(why) && error.contains("reached at"), "{output:?}");
    assert!(folder.path().join("file.sqlite").exists());
}

/// The same program in a shell after this line.
fn limited(line: &str, program: Command) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("{line} && exec \"$0\" \"$@\"")]).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// If a recording cannot begin, or only without marks, the command runs all the same.
#[test]
fn a_machine_that_lets_nothing_be_recorded_runs_the_command() {
    for line in ["ulimit -f 16", "ulimit -n 12", "ulimit -n 16"] {
        let folder = tempfile::tempdir().expect("a folder");
        let command = ["sh", "-c", "head -c 100000 /dev/zero >\"$TMPDIR/large\"; echo $?; exit 43"];
        let mut limited = limited(line, run(folder.path(), &command));
        let output = limited.env("TMPDIR", folder.path()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(43), "{line}: {output:?}");
        // The command has its limit, and the signal for it, as without `run`.
        let of_command = if line == "ulimit -f 16" { "153\n" } else { "0\n" };
        assert_eq!(text(&output.stdout), of_command, "{line}: {output:?}");
        let says = ["highwater: the command runs, and is not recorded: ", "highwater: marks are not recorded: "];
        let error = text(&output.stderr);
        assert!(says.iter().any(|says| error.contains(says)), "{line}: {output:?}");
        let is_recorded = folder.path().join("file.sqlite").exists();
        assert_eq!(error.matches(says[0]).count(), usize::from(!is_recorded), "{line}: {output:?}");
    }
    // No program: as a shell has it.
    let folder = tempfile::tempdir().expect("a folder");
    let output = limited("ulimit -n 8", run(folder.path(), &["no-such-command-anywhere"])).output().expect("it runs");
    assert_eq!(output.status.code(), Some(127), "{output:?}");
}

#[test]
fn a_folder_for_temporary_files_that_no_socket_fits_in_costs_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let long = folder.path().join("x".repeat(100));
    std::fs::create_dir(&long).expect("a folder");
    for (number, tmpdir) in [long, folder.path().join("missing")].into_iter().enumerate() {
        let file = folder.path().join(format!("{number}.sqlite"));
        let mut run = command();
        run.arg("run").arg("-o").arg(&file).args(["--source", "sim:spike", "sh", "-c"]);
        run.arg("[ -S \"$HIGHWATER_ANNOTATIONS_SOCKET\" ] && exit 43");
        let output = run.env("TMPDIR", &tmpdir).env_remove("XDG_RUNTIME_DIR").output().expect("it runs");
        assert_eq!(output.status.code(), Some(43), "{}: {output:?}", tmpdir.display());
        assert!(file.exists(), "{output:?}");
    }
}

#[test]
fn arguments_and_streams_are_the_commands_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = ["a  b", "\"c\"", "d'e", "$HOME", "", "--help", "-o", "ü\n"];
    let script = "for word in \"$@\"; do printf '[%s]' \"$word\"; done; cat; echo wrong >&2";
    let mut run = run(folder.path(), &[&["sh", "-c", script, "sh"][..], &words].concat());
    // A variable that is none of its business.
    run.env("OTEL_EXPORTER_OTLP_ENDPOINT", "bogus");
    let mut child = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().expect("a pipe").write_all(b"typed").expect("written");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(text(&output.stdout), words.map(|word| format!("[{word}]")).concat() + "typed");
    let said = text(&output.stderr);
    assert!(said.starts_with("highwater: Simulated by sim:spike: no GPU was read.\nwrong\n"), "{output:?}");
    assert!(!said.contains("a daemon runs on this node too"), "{output:?}");
    assert!(output.status.success());
}

/// A recording looks for another daemon at the socket in `RUNTIME_DIRECTORY`, if the service manager sets it. All other tests
/// set it to a folder that does not exist.
#[test]
fn another_daemon_is_looked_for_where_the_service_manager_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = |name: &str| {
        let mut record = command();
        record.args(["record", "--source", "sim", "--for", "0.1s", "-o"]).arg(folder.path().join(name));
        record.env("RUNTIME_DIRECTORY", folder.path()).env("TMPDIR", folder.path());
        text(&record.output().expect("it runs").stderr).contains("a daemon runs on this node too")
    };
    assert!(!told("alone.sqlite"));
    let _other = std::os::unix::net::UnixDatagram::bind(folder.path().join("annotations.sock")).expect("bound");
    assert!(told("beside.sqlite"));
}

/// As with a training script that asks something, or draws a progress bar.
#[test]
fn a_command_has_the_terminal_and_its_interrupts() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut run = run(
        folder.path(),
        &["sh", "-c", "test -t 0 && test -t 1 && trap 'exit 9' INT; read line; echo got $line; read line"],
    );
    run.env("TMPDIR", folder.path());
    let (code, seen) = on_terminal(&run, "yes\n", "got yes");
    assert_eq!((code, seen.matches("reached at").count()), (9, 1), "{seen}");
    // Only `record` shows how long it has been: a command has its terminal to itself.
    assert!(!seen.contains("Control-C"), "{seen}");
}

#[test]
fn a_terminal_shows_how_long_it_has_recorded() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut record = command();
    record
        .args(["record", "--source", "sim", "-o"])
        .arg(folder.path().join("file.sqlite"))
        .env("TMPDIR", folder.path());
    let (code, seen) = on_terminal(&record, "", "bytes; Control-C ends it");
    assert_eq!((code, seen.matches("reached at").count()), (0, 1), "{seen}");
    assert!(seen.contains("\r\u{1b}[K0 s, "), "{seen:?}");
}

/// Runs a command on a pseudo-terminal, types `first`, and types Control-C when it has printed `awaited`. Returns its exit
/// code and all that it printed.
fn on_terminal(command: &Command, first: &str, awaited: &str) -> (i32, String) {
    let types = "
import os, pty, signal, sys
signal.alarm(60)
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
seen = b''
os.write(terminal, os.environb[b'FIRST'])
while os.environb[b'AWAITED'] not in seen:
    seen += os.read(terminal, 1000)
os.write(terminal, b'\\x03')
try:
    while read := os.read(terminal, 1000):
        seen += read
except OSError:
    pass
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.stdout.buffer.write(b'%d\\n' % code + seen)
";
    let mut python = behind_python(types, &hearing_signals(command));
    let output = python.env("FIRST", first).env("AWAITED", awaited).output().expect("it runs");
    let printed = text(&output.stdout);
    let (code, seen) = printed.split_once('\n').unwrap_or_else(|| panic!("{output:?}"));
    (code.parse().expect("a number"), seen.to_owned())
}

/// Control-C ends a shell's loop around `run`, and reaches a command in its own process group. The output's folder is a
/// symbolic link.
#[test]
fn interrupts_end_the_loop_around_it() {
    let folder = tempfile::tempdir().expect("a folder");
    std::os::unix::fs::symlink(folder.path(), folder.path().join("link")).expect("a link");
    let waits = "import os, time; os.setpgid(0, 0); print('ready', flush=True); time.sleep(60)";
    let script =
        format!(r#"for n in 1 2; do "$0" run --source sim -o "$1/link/$n.sqlite" -- python3 -c "{waits}"; done"#);
    let mut bash = Command::new("bash");
    bash.args(["-c", &script, env!("CARGO_BIN_EXE_highwater")]).arg(folder.path());
    bash.env("RUNTIME_DIRECTORY", crate::daemon::NO_DAEMON);
    let (_, seen) = on_terminal(&bash, "", "ready");
    assert_eq!((seen.matches("ready").count(), seen.matches("reached at").count()), (1, 1), "{seen}");
}

#[test]
fn signals_are_passed_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let script =
        "trap 'exit 7' TERM; trap 'echo > \"$READY.heard\"' HUP USR1; echo > \"$READY\"; while :; do sleep 0.05; done";
    let mut run = run(folder.path(), &["sh", "-c", script]);
    run.env("READY", folder.path().join("ready"));
    let mut run = hearing_signals(&run);
    run.stdout(Stdio::piped()).stderr(Stdio::null());
    let child = run.spawn().expect("it starts");
    let pid = rustix::process::Pid::from_child(&child);
    eventually(SOON, "the command", || folder.path().join("ready").exists().then_some(()));
    let heard = folder.path().join("ready.heard");
    for signal in [rustix::process::Signal::USR1, rustix::process::Signal::HUP] {
        rustix::process::kill_process(pid, signal).expect("sent");
        eventually(SOON, "the signal", || heard.exists().then_some(()));
        std::fs::remove_file(&heard).expect("there");
    }
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("sent");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}

#[test]
fn a_file_that_exists_or_a_missing_gpu_stops_it_before_the_command() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file.sqlite"), "mine").expect("written");
    let touched = folder.path().join("touched").display().to_string();
    let refused = output(folder.path(), &["touch", &touched]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("file.sqlite: exists, and is not overwritten"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(folder.path().join("file.sqlite")).expect("there"), "mine");
    let mut run = command();
    run.arg("run").arg("-o").arg(folder.path().join("other")).args(["--nvml-library", "/nope.so", "touch", &touched]);
    let refused = run.output().expect("it runs");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(text(&refused.stderr).contains("no GPU can be read"), "{refused:?}");
    assert!(!folder.path().join("other").exists() && !Path::new(&touched).exists());
    for (flags, because) in [
        (&["-i", "0", "true"][..], "--interval: sampling.period: `0us` is not between"),
        (&["--source", "replay:/x", "true"][..], "a replay is a recording already"),
        (&[][..], "COMMAND"),
    ] {
        let mut run = command();
        let refused = run.args(["run", "-o"]).arg(folder.path().join("new")).args(flags).output().expect("it runs");
        assert_eq!(refused.status.code(), Some(2), "{flags:?}: {refused:?}");
        assert!(text(&refused.stderr).contains(because), "{flags:?}: {refused:?}");
    }
}

/// The peaks of the phases of job `t` by name, from the file.
fn peaks(file: &Path) -> Vec<(String, i64)> {
    let file = Connection::open(file).expect("a recording");
    let mut rows = file
        .prepare(
            "SELECT name, max(peak_bytes) FROM phases JOIN phase_memory ON phase = id WHERE job = 't' GROUP BY name",
        )
        .expect("its tables");
    let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).expect("it runs");
    rows.map(|row| row.expect("a row")).collect()
}

#[test]
fn a_job_finds_the_socket_and_its_phases_are_in_the_file_and_play_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = "
import highwater, time
highwater.configure(job='t', gpu=0)
for n in range(3):
    with highwater.step(n), highwater.phase('forward'):
        time.sleep(0.1)
";
    let mut run = run(folder.path(), &["python3", "-c", job]);
    let output = run.env("PYTHONPATH", root().join("python")).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let (file, printed) = (folder.path().join("file.sqlite"), text(&output.stderr));
    assert!(printed.contains("forward"), "{printed}");
    let simulated = "Simulated by sim:spike: no GPU was read.\n";
    assert_eq!(printed.matches(simulated).count(), 2, "before the command, and above the peak: {printed}");
    let live = peaks(&file);
    assert_eq!(live.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["forward", "step"], "{printed}");
    let query = |sql: &str| -> String {
        Connection::open(&file).expect("a recording").query_row(sql, [], |row| row.get(0)).expect(sql)
    };
    assert_eq!(query("SELECT value FROM meta WHERE key = 'kind'"), "recording");
    assert_eq!(query("SELECT value FROM meta WHERE key = 'state'"), "complete");
    assert_eq!(query("PRAGMA integrity_check"), "ok");

    let source = format!("replay:{}", file.display());
    let daemon = Daemon::start(&["serve", "--source", &source, "--replay-speed", "max"]);
    eventually(SOON, "the end", || daemon.printed().contains("the recording has ended").then_some(()));
    let metrics = daemon.metrics();
    let info = format!("highwater_source_info{{source=\"{source} of sim:spike\",simulated=\"true\"}} 1");
    assert!(metrics.contains(&info), "{metrics}");
    let gpus: serde_json::Value = serde_json::from_str(&daemon.get("/api/v1/gpus")).expect("JSON");
    assert_eq!(gpus["simulated"], true);
    let (_, peak) = live.iter().find(|(name, _)| name == "step").expect("steps");
    let answer: serde_json::Value = serde_json::from_str(&daemon.get("/api/v1/jobs/t/phases?limit=100")).expect("JSON");
    let played = answer["phases"].as_array().into_iter().flatten();
    let played = played.filter(|phase| phase["kind"] == "step");
    let played = played.filter_map(|phase| phase["gpus"][0]["peak_bytes"].as_i64()).max();
    assert_eq!(played, Some(*peak), "{answer}\n{metrics}");
}

/// A recording that a test ends.
fn record(folder: &Path) -> (Process, PathBuf) {
    let mut record = command();
    let file = folder.join("file.sqlite");
    record.args(["record", "--source", "sim:demo", "-o"]).arg(&file);
    // One that is killed leaves its folder behind.
    record.env("TMPDIR", folder).env_remove("XDG_RUNTIME_DIR");
    let record = Process::start(record);
    record.wait_for(SOON, "line `recording to`", |line| line.contains("recording to ").then_some(()));
    (record, file)
}

fn last_tick_ns(file: &Connection) -> i64 {
    // Without any tick it has begun only.
    let sql = "SELECT coalesce(max(end_ns), (SELECT value FROM meta WHERE key = 'begin_ns')) FROM ticks";
    file.query_row(sql, [], |row| row.get(0)).expect("a time")
}

#[test]
fn a_recording_that_is_killed_opens_with_what_was_written() {
    let mut worst = Duration::ZERO;
    // HIGHWATER_KILLS=100 kills it at so many more moments within two seconds.
    let more: u64 = std::env::var("HIGHWATER_KILLS").map_or(0, |kills| kills.parse().expect("a number"));
    let more = (1..=more).map(|nth| nth.wrapping_mul(6_364_136_223_846_793_005) >> 33).map(|random| random % 2_000);
    for milliseconds in [0, 40, 130, 260, 390, 700, 1_100, 1_900].into_iter().chain(more) {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut record, file) = record(folder.path());
        // The moments are to differ; which they are does not matter.
        std::thread::sleep(Duration::from_millis(milliseconds));
        let killed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        let source = format!("replay:{}", file.display());
        if milliseconds == 700 {
            let refused = command().args(["serve", "--check-config", "--source", &source]).output().expect("it runs");
            assert!(text(&refused.stderr).contains("is still being written"), "{refused:?}");
        }
        record.kill();
        if milliseconds == 700 {
            // Read first where nothing can be written: a full disk is such a place.
            let mut report = command();
            report.arg("report").arg(&file);
            let refused = limited("ulimit -f 0", report).output().expect("it runs");
            let says = "its writer was killed and left file.sqlite-wal";
            assert!(!refused.status.success() && text(&refused.stderr).contains(says), "{refused:?}");
            let played = command().args(["serve", "--check-config", "--source", &source]).output().expect("it runs");
            assert!(played.status.success(), "{played:?}");
            let moved = folder.path().join("kept.sqlite");
            std::fs::rename(&file, &moved).expect("moved");
            let again = command().args(["record", "--source", "sim", "-o"]).arg(&file).output().expect("it runs");
            assert!(text(&again.stderr).contains("file.sqlite-wal: exists"), "{again:?}");
            std::fs::rename(&moved, &file).expect("moved");
        }
        let file = Connection::open(&file).expect("it opens");
        assert_eq!(file.query_row("PRAGMA integrity_check", [], |row| row.get::<_, String>(0)).expect("runs"), "ok");
        let last = Duration::from_nanos(last_tick_ns(&file).unsigned_abs());
        worst = worst.max(killed.saturating_sub(last));
        // Each sweep that is there has its readings.
        let without: i64 = file
            .query_row("SELECT count(*) FROM samples_by_tick WHERE used_bytes IS NULL", [], |row| row.get(0))
            .expect("its view");
        assert_eq!(without, 0);
        let samples: i64 = file.query_row("SELECT count(*) FROM samples", [], |row| row.get(0)).expect("a number");
        drop(file);
        let shown = command().arg("report").arg(folder.path().join("file.sqlite")).output().expect("it runs");
        if samples == 0 {
            // On a machine under load it may be killed before its first reading.
            assert!(milliseconds < 300 && text(&shown.stderr).contains("it has no memory of any GPU"), "{shown:?}");
            continue;
        }
        assert!(shown.status.success() && text(&shown.stdout).contains("reached at"), "{shown:?}");
    }
    println!("at most {worst:?} before the kill is missing");
    // A second on a machine that does nothing else; tests run beside others.
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[test]
fn record_ends_with_a_signal_or_after_its_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut recording, file) = record(folder.path());
    let (status, _) = recording.terminate();
    assert!(status.success() && status.signal().is_none());
    assert!(recording.printed().contains("reached at"), "{}", recording.printed());
    let state = Connection::open(&file).expect("a recording");
    let state: String =
        state.query_row("SELECT value FROM meta WHERE key = 'state'", [], |row| row.get(0)).expect("a row");
    assert_eq!(state, "complete");
    let other = folder.path().join("other.sqlite");
    let mut timed = command();
    timed.args(["record", "--source", "sim:spike", "--for", "300ms", "-i", "2", "-o"]).arg(&other);
    assert!(timed.output().expect("it runs").status.success());
    let file = Connection::open(&other).expect("a recording");
    let (begin_ns, period_ns): (i64, i64) = file
        .query_row(
            "SELECT (SELECT value FROM meta WHERE key = 'begin_ns'), (SELECT value FROM meta WHERE key = 'period_ns')",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .expect("a row");
    assert_eq!(period_ns, 2_000_000);
    // A sweep may be late.
    assert!(last_tick_ns(&file) - begin_ns >= 200_000_000, "{}", last_tick_ns(&file) - begin_ns);
}

/// The file has a line for every reading, in the format of ONNX Runtime's profiler, and `report` reads it.
#[test]
fn the_older_tools_format_has_a_line_for_every_reading() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = command()
        .current_dir(folder.path())
        .args(["record", "--format", "ort", "--source", "sim:spike", "--for", "1s"])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stderr).contains("reached at"), "{output:?}");
    assert!(text(&output.stderr).contains("Simulated by sim:spike"), "the file cannot say it: {output:?}");
    let lines = std::fs::read_to_string(folder.path().join("memory_usage.txt")).expect("the tool's own name");
    let mut readings = std::collections::BTreeMap::<u64, Vec<(u64, u64)>>::new();
    for line in lines.lines() {
        let fields: Vec<u64> = line.split(' ').map(|field| field.parse().expect("a number")).collect();
        let [gpu, at_ns, used] = fields[..] else { panic!("`{line}`") };
        readings.entry(gpu).or_default().push((at_ns, used));
    }
    assert!(lines.ends_with('\n') && !readings.is_empty(), "{lines}");
    for of in readings.values() {
        assert!(of.is_sorted_by(|one, other| one.0 < other.0), "times go back");
        // At most one each millisecond, and far more than changes of memory; a busy machine misses some.
        let milliseconds = (of[of.len() - 1].0 - of[0].0) / 1_000_000;
        assert!((100..=milliseconds + 2).contains(&(of.len() as u64)), "{} readings in {milliseconds} ms", of.len());
    }
    let json = command().current_dir(folder.path()).args(["report", "memory_usage.txt", "--json"]).output();
    let json: serde_json::Value = serde_json::from_slice(&json.expect("it runs").stdout).expect("JSON");
    let peak = |of: &[(u64, u64)]| of.iter().map(|(_, used)| *used).max();
    for (gpu, of) in readings {
        let shown = &json["recordings"][0]["gpus"][usize::try_from(gpu).expect("few")];
        assert_eq!(shown["peak_bytes"].as_u64(), peak(&of));
    }
    // As with every recording, nothing is overwritten.
    let again =
        command().current_dir(folder.path()).args(["run", "--format", "ort", "--source", "sim", "true"]).output();
    let again = again.expect("it runs");
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(text(&again.stderr).contains("memory_usage.txt: exists, and is not overwritten"), "{again:?}");
}

/// With `--via`, the daemon's recorder makes the file, and no GPU is read here.
#[test]
fn a_daemon_that_runs_already_can_record_the_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let captures = format!("captures.directory={}", folder.path().join("captures").display());
    let daemon = Daemon::start(&["serve", "--source", "sim:demo", "--set", &captures]).ready();
    // Until the first phases of the simulated jobs have ended.
    eventually(SOON, "phases", || daemon.metrics().contains("highwater_phase_duration_seconds_count").then_some(()));
    let run = |flags: &[&str], words: &[&str]| {
        let mut run = command();
        run.current_dir(folder.path()).arg("run").args(flags).arg("--").args(words);
        // A driver that cannot be opened: nothing here may try.
        run.env("HIGHWATER_NVML_LIBRARY", "/nonexistent.so").output().expect("it runs")
    };
    let via = format!("--via=http://{}", daemon.address());
    let output = run(&[&via, "-o", "file.sqlite"], &["sh", "-c", "sleep 1.5; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(text(&output.stderr).contains("reached at"), "{output:?}");
    let file = Connection::open(folder.path().join("file.sqlite")).expect("a recording");
    let one = |sql: &str| file.query_row(sql, [], |row| row.get::<_, String>(0)).expect("a row");
    assert_eq!(one("SELECT value FROM meta WHERE key = 'note'"), "sh -c sleep 1.5; exit 7");
    let length = "SELECT printf('%f', (SELECT value FROM meta WHERE key = 'end_ns') / 1e9 -
                                      (SELECT value FROM meta WHERE key = 'begin_ns') / 1e9)";
    let seconds: f64 = one(length).parse().expect("a number");
    assert!((2.4..30.0).contains(&seconds), "{seconds} s of a command of 1.5 s and the second after it");
    assert_ne!(one("SELECT count(*) || '' FROM phase_memory"), "0");
    // Each GPU has what held at the begin, and nothing of before or of after the end.
    let outside =
        "SELECT count(*) || '' FROM breakdown WHERE at_ns < (SELECT value FROM meta WHERE key = 'begin_ns') OR
        at_ns > (SELECT value FROM meta WHERE key = 'end_ns')";
    assert_eq!(one(outside), "0");
    let first =
        "SELECT count(DISTINCT gpu) || '' FROM breakdown WHERE at_ns = (SELECT value FROM meta WHERE key = 'begin_ns')";
    assert_eq!(one(first), one("SELECT count(*) || '' FROM gpus"));
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &folder.path().join("file.sqlite").metadata().expect("there").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);

    // Every fault is reported before the command runs.
    let marker = folder.path().join("ran");
    let touch = ["touch", marker.to_str().expect("UTF-8")];
    let ended = |flags: &[&str], code: i32, why: &str| {
        let output = run(flags, &touch);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {output:?}");
        assert!(text(&output.stderr).contains(why), "{flags:?}: {output:?}");
        assert!(!marker.exists(), "{flags:?}: the command ran");
    };
    ended(&[&via, "-o", "file.sqlite"], 1, "file.sqlite: exists, and is not overwritten");
    ended(&["--via=http://127.0.0.1:1", "-o", "other.sqlite"], 1, "http://127.0.0.1:1: ");
    ended(&["--via=https://localhost", "-o", "other.sqlite"], 1, "is not http://HOST:PORT");
    ended(&[&via, "-o", "other.sqlite", "-i", "5"], 2, "--interval: has no effect with --via");
    let without = Daemon::start(&["serve", "--source", "sim", "--set", "captures.directory=none"]).ready();
    ended(&[&format!("--via=http://{}", without.address()), "-o", "other.sqlite"], 1, "takes no captures");
}
